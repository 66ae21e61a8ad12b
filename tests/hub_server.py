"""A model hub on localhost: enough of the hub's routes for huggingface_hub, and a record of every request.

Repositories, revisions and files live in memory. Access rules and faults are switched on by
assigning to the attributes of a running :class:`HubServer`.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

HOST = "127.0.0.1"
INFO_ROUTE = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)")
FILE_ROUTE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
BLOB_ROUTE = re.compile(r"/blobs/(?P<digest>[0-9a-f]{64})")
RANGE = re.compile(r"bytes=(?P<first>\d+)-(?P<last>\d*)")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
CHUNK = 4096


@dataclass
class Request:
    """One request as the server saw it; ``sent`` counts bytes of body."""

    method: str
    path: str
    range: str | None
    token: str | None
    status: int = 0
    sent: int = 0

    @property
    def file(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.path).name


@dataclass
class Repository:
    """Files by commit, and commits by branch or tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """An answer without content: a status and the headers that say why."""

    def __init__(
        self, status: HTTPStatus, code: str | None = None, message: str | None = None, wait: str | None = None
    ) -> None:
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, "Retry-After": wait}


class HubServer:
    """The server and what it serves.

    Attributes:
        endpoint: address to use as ``HF_ENDPOINT``.
        requests: every request in order of arrival, to the storage host too.
        tokens: tokens the hub knows; any other is refused.
        private: repositories hidden from requests without a known token.
        gated: repositories whose files are refused, though their existence is public.
        refuse_info: status for every request for a repository's description.
        refuse_files: status for every request for a file.
        busy: statuses, with what ``Retry-After`` says, for as many requests to come.
        ignore_range: whether a range request gets the whole file.
        separate_storage: whether weight files are redirected to another host.
        break_at: file name by position; downloads of the file break off there.
        page: HTML to answer every request with, as a portal or a wrong address would.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.tokens: set[str] = set()
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.refuse_info: int | None = None
        self.refuse_files: int | None = None
        self.busy: list[tuple[int, str]] = []
        self.ignore_range = False
        self.separate_storage = False
        self.break_at: dict[str, int] = {}
        self.page: str | None = None
        self._hub = _Listener(self)
        self._storage = _Listener(self)
        self.endpoint = self._hub.address
        self.storage = self._storage.address

    def add(self, repository: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Store files as a commit that a branch or tag points to; returns the commit."""
        commit = hashlib.sha1()
        for name, content in sorted(files.items()):
            commit.update(name.encode() + hashlib.sha256(content).digest())
        entry = self.repositories.setdefault(repository, Repository())
        entry.commits[commit.hexdigest()] = dict(files)
        entry.references[revision] = commit.hexdigest()
        return commit.hexdigest()

    def stop(self) -> None:
        """Stop listening, so that connections are refused."""
        self._hub.stop()
        self._storage.stop()

    def files(self) -> set[str]:
        """Names of the files that were asked for, be it by ``HEAD``."""
        return {request.file for request in self.requests if FILE_ROUTE.fullmatch(request.path)}

    def sent(self, suffix: str) -> int:
        """Bytes sent of files whose name ends so."""
        return sum(request.sent for request in self.requests if request.path.endswith(suffix))

    def respond(self, request: Request, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to a request."""
        path = urlsplit(request.path).path
        if self.busy:
            status, wait = self.busy.pop(0)
            raise Refusal(HTTPStatus(status), wait=wait)
        if self.page is not None:
            return HTTPStatus.OK, {"Content-Type": "text/html"}, self.page.encode()
        if blob := BLOB_ROUTE.fullmatch(path):
            return self._serve(self._blob(blob["digest"]), headers, {})
        self._check_token(request.token)
        if info := INFO_ROUTE.fullmatch(path):
            return self._describe(unquote(info["repository"]), unquote(info["revision"]), request.token)
        if file := FILE_ROUTE.fullmatch(path):
            return self._resolve(
                unquote(file["repository"]), unquote(file["revision"]), unquote(file["file"]), request.token, headers
            )
        raise Refusal(HTTPStatus.NOT_FOUND)

    def _check_token(self, token: str | None) -> None:
        if token is not None and token not in self.tokens:
            raise Refusal(HTTPStatus.UNAUTHORIZED, None, "Invalid credentials in Authorization header")

    def _commit(self, repository: str, revision: str, token: str | None) -> tuple[str, dict[str, bytes]]:
        """Commit and files of a revision that the token may know of."""
        hidden = repository in self.private and token is None
        if repository not in self.repositories or hidden:
            status = HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.NOT_FOUND
            raise Refusal(status, "RepoNotFound", "Repository not found")
        entry = self.repositories[repository]
        commit = entry.references.get(revision, revision)
        if commit not in entry.commits:
            raise Refusal(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, entry.commits[commit]

    def _describe(self, repository: str, revision: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.refuse_info is not None:
            raise Refusal(HTTPStatus(self.refuse_info))
        commit, files = self._commit(repository, revision, token)
        info = {
            "id": repository,
            "modelId": repository,
            "sha": commit,
            "private": repository in self.private,
            "gated": "manual" if repository in self.gated else False,
            "tags": [],
            "siblings": [{"rfilename": name} for name in sorted(files)],
        }
        return HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(info).encode()

    def _resolve(
        self, repository: str, revision: str, name: str, token: str | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        commit, files = self._commit(repository, revision, token)
        if repository in self.gated:
            status = HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.FORBIDDEN
            raise Refusal(status, "GatedRepo", f"Access to model {repository} is restricted")
        if self.refuse_files is not None:
            raise Refusal(HTTPStatus(self.refuse_files))
        if name not in files:
            raise Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
        content = files[name]
        digest = hashlib.sha256(content).hexdigest()
        facts = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if name.endswith(WEIGHT_SUFFIXES):
            facts |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            if self.separate_storage:
                return HTTPStatus.FOUND, facts | {"Location": f"{self.storage}/blobs/{digest}"}, b""
        return self._serve(content, headers, facts)

    def _blob(self, digest: str) -> bytes:
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for content in files.values():
                    if hashlib.sha256(content).hexdigest() == digest:
                        return content
        raise Refusal(HTTPStatus.NOT_FOUND)

    def _serve(
        self, content: bytes, headers: Mapping[str, str], facts: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """A file's content, or the range of it that was asked for."""
        answer = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **facts}
        match = RANGE.fullmatch(headers.get("Range") or "")
        if match is None or self.ignore_range:
            return HTTPStatus.OK, answer, content
        first, last = int(match["first"]), int(match["last"] or len(content) - 1)
        if first >= len(content):
            raise Refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        part = content[first : last + 1]
        answer["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return HTTPStatus.PARTIAL_CONTENT, answer, part


class _Listener(ThreadingHTTPServer):
    """A port of the hub, served by a thread of its own."""

    daemon_threads = True

    def __init__(self, hub: HubServer) -> None:
        super().__init__((HOST, 0), _Handler)
        self.hub = hub
        self.address = f"http://{HOST}:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Writes what the hub responds; a connection serves one request."""

    server: _Listener

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        request = Request(self.command, self.path, self.headers.get("Range"), token)
        hub.requests.append(request)
        try:
            request.status, headers, body = hub.respond(request, self.headers)
        except Refusal as refusal:
            request.status, body = refusal.status, b""
            headers = {name: value for name, value in refusal.headers.items() if value is not None}
        self.send_response_only(request.status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.close_connection = True
        try:
            self.end_headers()
            if self.command == "GET":
                self._send(request, body)
        except ConnectionError:
            return

    def _send(self, request: Request, body: bytes) -> None:
        """The body in pieces, up to the place where the file is to break off."""
        start = int(RANGE.fullmatch(request.range)["first"]) if request.status == HTTPStatus.PARTIAL_CONTENT else 0
        limit = self.server.hub.break_at.get(request.file)
        if limit is not None:
            body = body[: max(0, limit - start)]
        for position in range(0, len(body), CHUNK):
            piece = body[position : position + CHUNK]
            request.sent += len(piece)
            self.wfile.write(piece)

    def log_message(self, *args: object) -> None:
        """Nothing; requests are recorded."""


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """A hub that listens as long as the block runs."""
    hub = HubServer()
    try:
        yield hub
    finally:
        hub.stop()
