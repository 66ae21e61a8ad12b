"""A web server of files on localhost, with ranges, faults to switch on, and a record of every request."""

import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

HOST = "127.0.0.1"
RANGE = re.compile(r"bytes=(?P<first>\d+)-(?P<last>\d*)")
CHUNK = 64 * 1024


@dataclass
class Request:
    """One request as the server saw it; ``sent`` counts bytes of body."""

    path: str
    range: tuple[int, int] | None
    headers: Mapping[str, str]
    status: int = 0
    sent: int = 0


class RangeServer:
    """The server and what it serves.

    Attributes:
        address: ``http://host:port``, or ``https://`` with TLS.
        files: content by path; a :class:`Path` is a file on disk, of which only what is asked for is read.
        requests: every request in order of arrival.
        tags: ETag by path; files without one get none.
        ignore_range: whether every answer is the whole file.
        without_length: whether answers do not say how long they are.
        break_after: bytes after which every answer breaks off.
        busy: statuses, with what ``Retry-After`` says, for as many requests to come.
        statuses: status by path, for every request.
        redirects: address by path.
        encoding: ``Content-Encoding`` to claim.
        modified: ``Last-Modified`` of every file.
    """

    def __init__(self, files: Mapping[str, bytes | Path], tls: ssl.SSLContext | None = None) -> None:
        self.files = dict(files)
        self.requests: list[Request] = []
        self.tags: dict[str, str] = {}
        self.ignore_range = False
        self.without_length = False
        self.break_after: int | None = None
        self.busy: list[tuple[int, str | None]] = []
        self.statuses: dict[str, int] = {}
        self.redirects: dict[str, str] = {}
        self.encoding: str | None = None
        self.modified: str | None = None
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()
        self._server = _Listener((HOST, 0), _Handler)
        self._server.owner = self
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.address = f"{'https' if tls else 'http'}://{HOST}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, so that connections are refused."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def sent(self, suffix: str = "") -> int:
        """Bytes of body sent of files whose path ends so."""
        return sum(request.sent for request in self.requests if request.path.endswith(suffix))


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    owner: RangeServer

    def handle_error(self, *_: object) -> None:
        """Nothing: a client may refuse a certificate or leave early."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def do_GET(self) -> None:
        owner = self.server.owner
        path = unquote(urlsplit(self.path).path)
        asked = RANGE.fullmatch(self.headers.get("Range") or "")
        span = (int(asked["first"]), int(asked["last"] or -1)) if asked else None
        request = Request(path, span, dict(self.headers.items()))
        with owner.lock:
            owner.requests.append(request)
            busy = owner.busy.pop(0) if owner.busy else None
            owner.in_flight += 1
            owner.most_in_flight = max(owner.most_in_flight, owner.in_flight)
        try:
            self._answer(owner, path, request, busy)
        except ConnectionError:
            self.close_connection = True
        finally:
            with owner.lock:
                owner.in_flight -= 1

    def _answer(self, owner: RangeServer, path: str, request: Request, busy: tuple[int, str | None] | None) -> None:
        if busy is not None:
            self._head(request, busy[0], {"Retry-After": busy[1], "Content-Length": "0"})
        elif path in owner.statuses:
            self._head(request, owner.statuses[path], {"Content-Length": "0"})
        elif path in owner.redirects:
            self._head(request, HTTPStatus.FOUND, {"Location": owner.redirects[path], "Content-Length": "0"})
        elif path not in owner.files:
            self._head(request, HTTPStatus.NOT_FOUND, {"Content-Length": "0"})
        else:
            self._serve(owner, owner.files[path], request, owner.tags.get(path))

    def _serve(self, owner: RangeServer, content: bytes | Path, request: Request, tag: str | None) -> None:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        headers = {"ETag": tag, "Last-Modified": owner.modified, "Content-Encoding": owner.encoding}
        first, last = 0, size
        status = HTTPStatus.OK
        if request.range is not None and not owner.ignore_range:
            first, last = request.range[0], min(size, request.range[1] + 1)
            if first >= size:
                self._head(request, 416, {**headers, "Content-Range": f"bytes */{size}", "Content-Length": "0"})
                return
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {first}-{last - 1}/{size}"
        if owner.without_length:
            self.close_connection = True
            headers["Connection"] = "close"
        else:
            headers["Content-Length"] = str(last - first)
        self._head(request, status, headers)
        limit = last if owner.break_after is None else min(last, first + owner.break_after)
        if limit < last:
            self.close_connection = True
        if isinstance(content, Path):
            with content.open("rb") as stream:
                stream.seek(first)
                for position in range(first, limit, CHUNK):
                    self._send(request, stream.read(min(CHUNK, limit - position)))
        else:
            for position in range(first, limit, CHUNK):
                self._send(request, content[position : min(limit, position + CHUNK)])

    def _head(self, request: Request, status: int, headers: Mapping[str, str | None]) -> None:
        request.status = status
        self.send_response_only(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def _send(self, request: Request, piece: bytes) -> None:
        self.wfile.write(piece)
        request.sent += len(piece)

    def log_message(self, *args: object) -> None:
        """Nothing; requests are recorded."""


@contextmanager
def serving(files: Mapping[str, bytes | Path], tls: ssl.SSLContext | None = None) -> Iterator[RangeServer]:
    """A server that listens as long as the block runs."""
    server = RangeServer(files, tls)
    try:
        yield server
    finally:
        server.stop()
