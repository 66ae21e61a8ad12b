"""Bytes of files on web servers by range requests: redirects, refusals and failures, each with its own message.

huggingface_hub's HTTP client does the talking, so that proxies, certificates and ``HF_HUB_OFFLINE`` act
as they do for hub names.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any, TypedDict
from urllib.parse import urlsplit, urlunsplit

from ingest.transfers import NoAccessError, NoSuchFileError, Part, PassingError
from stats.errors import CheckpointError

TIMEOUT_SECONDS = 30.0
"""For a connection, and between two pieces of an answer."""

PASSING = (408, 429, 500, 502, 503, 504)
"""Statuses worth another try."""

GONE = (401, 403, 404, 410)
"""Statuses by which a storage host says that a signed address is no longer good."""

LASTING = ("TooManyRedirects", "UnsupportedProtocol", "LocalProtocolError", "DecodingError")
"""The client's errors that another try does not help."""

CONTENT_RANGE = re.compile(r"bytes (?:(?P<first>\d+)-\d+|\*)/(?P<size>\d+)")
RESET = re.compile(r";\s*t\s*=\s*(\d+)")
DOWNLOAD = "download the files and name their directory"

MEANINGS = {
    401: ("the server wants to know who asks", "use an address that carries its access, such as a signed one"),
    403: ("the server does not give access to the file", "ask for access, or use an address that carries it"),
    404: ("the server does not have the file", "check the address"),
    408: ("the server was too slow", "try again later"),
    410: ("the server no longer has the file", "check the address"),
    429: ("the server asks for fewer requests", "wait some minutes, then try again"),
}

Response = Any
"""The client's response; the library behind huggingface_hub's session differs by its version."""

Refusal = Callable[[Response], CheckpointError]
"""Makes the error for an answer that refuses."""


class ClientName(TypedDict):
    """What the hub's client says of the program that uses it."""

    library_name: str
    library_version: str


def client_name() -> ClientName:
    """The name and version of this program."""
    return {"library_name": "headatlas", "library_version": version("headatlas")}


def shown(url: str) -> str:
    """An address without what may be secret in it: user, password, and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class HttpFile:
    """One file at an address.

    Where the address redirects, later requests go straight to the place it led to, until that refuses.
    Headers given here are sent to the address itself only.
    """

    def __init__(
        self,
        url: str,
        name: str | None = None,
        headers: Mapping[str, str] | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        self.name = name or shown(url)
        self._url = url
        self._headers = dict(headers or {})
        self._refusal = refusal or self._refused
        self._place: tuple[str, str | None] | None = None

    @contextmanager
    def request(self, first: int, last: int) -> Iterator[Part]:
        wanted = {"Range": f"bytes={first}-{last - 1}", "Accept-Encoding": "identity"}
        place = self._place
        if place is not None:
            own = self._headers if _origin(place[0]) == _origin(self._url) else {}
            with self._stream(place[0], own | wanted) as response:
                if response.status_code not in GONE:
                    yield self._part(response, place[1])
                    return
            self._place = None
        with self._stream(self._url, self._headers | wanted) as response:
            linked = next(
                (hop.headers["X-Linked-ETag"] for hop in response.history if "X-Linked-ETag" in hop.headers), None
            )
            part = self._part(response, linked)
            if response.history:
                self._place = str(response.url), linked
            yield part

    @contextmanager
    def _stream(self, url: str, headers: Mapping[str, str]) -> Iterator[Response]:
        """The client's answer, its errors turned into this program's."""
        from huggingface_hub import get_session
        from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True
            ) as response:
                yield response
        except OfflineModeIsEnabled as error:
            raise CheckpointError(
                "offline, and the file is not on this machine",
                where=self.name,
                remedy="unset HF_HUB_OFFLINE, or download the file where there is a connection",
            ) from error
        except HTTPError as error:
            raise failed_connection(error, self.name, url) from error
        except (ValueError, UnicodeError) as error:
            raise CheckpointError("the address cannot be used", where=self.name, found=str(error)[:200]) from error

    def _part(self, response: Response, linked: str | None) -> Part:
        """What an answer says of itself; raises where it holds no bytes of the file."""
        headers = response.headers
        match = CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        content = linked or headers.get("ETag") or headers.get("Last-Modified")
        content = content.removeprefix("W/").strip('"') if content else None
        if response.status_code == 416 and match is not None:
            return Part(0, int(match["size"]), content, False, iter(()))
        if response.status_code not in (200, 206):
            raise self._failed(response)
        if headers.get("Content-Encoding", "identity") != "identity":
            raise self._unusable("plain bytes", f"an answer encoded as {headers['Content-Encoding']}")
        if response.status_code == 206:
            if match is None or match["first"] is None:
                raise self._unusable("a Content-Range with the file's length", headers.get("Content-Range", "none"))
            return Part(int(match["first"]), int(match["size"]), content, False, response.iter_raw())
        if not headers.get("Content-Length", "").isdigit():
            raise self._unusable("ranges, or a Content-Length", "neither")
        return Part(0, int(headers["Content-Length"]), content, True, response.iter_raw())

    def _unusable(self, expected: str, found: str) -> CheckpointError:
        return CheckpointError(
            "the server's answer cannot be used", where=self.name, expected=expected, found=found, remedy=DOWNLOAD
        )

    def _failed(self, response: Response) -> Exception:
        response.read()
        own = _origin(str(response.url)) == _origin(self._url)
        error = self._refusal(response) if own else self._refused(response)
        return PassingError(error, retry_after(response)) if response.status_code in PASSING else error

    def _refused(self, response: Response) -> CheckpointError:
        status = response.status_code
        what, remedy = MEANINGS.get(status, ("the server answered with an error", "try again later"))
        wait = retry_after(response)
        kind = {401: NoAccessError, 403: NoAccessError, 404: NoSuchFileError, 410: NoSuchFileError}
        return kind.get(status, CheckpointError)(
            what,
            where=self.name,
            found=f"{status} from {urlsplit(str(response.url)).netloc.rpartition('@')[2]}"
            + (f", to be asked again after {wait:.0f} s" if wait is not None else ""),
            remedy=remedy,
        )


def _origin(url: str) -> tuple[str, str]:
    """Where headers given for an address may be sent to."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def retry_after(response: Response) -> float | None:
    """Seconds that an answer asks to wait before the next request, if it says."""
    headers = response.headers
    text = headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("Date", ""))).total_seconds())
    except (ValueError, TypeError):
        reset = RESET.search(headers.get("RateLimit", "")) if response.status_code == 429 else None
        return float(reset[1]) if reset else None


def failed_connection(error: Exception, where: str, url: str) -> Exception:
    """What an error of the client means: ``PassingError`` where it may pass, else a ``CheckpointError``."""
    with suppress(AttributeError, RuntimeError):  # the errors of a request that was never made have none
        url = str(error.request.url)  # type: ignore[attr-defined]
    host = urlsplit(url).netloc.rpartition("@")[2]
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    found = str(error) or type(error).__name__
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return CheckpointError(
            "the server's certificate is not trusted",
            where=where,
            expected=f"a certificate for {host} from a known authority",
            found=found[:200],
            remedy="check the address; for an authority of your own set SSL_CERT_FILE to its certificate",
        )
    if type(error).__name__ in LASTING:
        return CheckpointError("the request cannot be made", where=where, found=f"{host}: {found}"[:200])
    unreachable = type(error).__name__ in ("ConnectError", "ConnectTimeout")
    failure = CheckpointError(
        "there is no connection to the server" if unreachable else "the connection to the server broke off",
        where=where,
        found=f"{host}: {found}"[:200],
        remedy="check the address, the connection and proxies in between" if unreachable else "try again later",
    )
    return PassingError(failure, unreachable=unreachable)
