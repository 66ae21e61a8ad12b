"""A remote file as random access to its bytes: only what is asked for moves, and it is one content throughout."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import numpy as np

from ingest.byte_ranges import Span, coalesced, pieces
from ingest.safetensors_file import truncated
from ingest.transfers import PROGRESS, AbandonedError, Part, PassingError, Transfers, Transport, Tries
from stats.errors import CheckpointError

HEAD = 64 * 1024
"""Bytes of the first request: the header of most safetensors files."""

Sink = Callable[[int, memoryview], None]
"""Takes bytes and the position they have in the file."""


@dataclass(eq=False, slots=True)
class _Window:
    """A range that is fetched before it is read, and the spans in it that are still to be read."""

    span: Span
    buffer: memoryview
    parts: list[Future[None]]
    wanted: set[Span] = field(default_factory=set)


class RangedFile:
    """Bytes of a remote file.

    The first request tells length and identity of the file, and every later answer must agree. A
    range that breaks off is continued where it broke. From a server that sends whole files whatever
    it is asked, the spans that were announced with ``expect`` are kept from a single pass, in a
    temporary file.
    """

    def __init__(self, transport: Transport, transfers: Transfers) -> None:
        self.name = transport.name
        self._transport = transport
        self._transfers = transfers
        self._lock = threading.Lock()
        self._opening = threading.RLock()
        self._size: int | None = None
        self._content: str | None = None
        self._whole = False
        self._head = b""
        self._windows: list[_Window] = []
        self._expected: list[Span] = []
        self._kept: _Kept | None = None

    @property
    def size(self) -> int:
        return self.open()

    def open(self) -> int:
        """Length of the file; the first call fetches its beginning as well."""
        with self._opening:
            if self._size is None:
                head = bytearray()
                self._transfer(Span(0, HEAD), lambda _, chunk: head.extend(chunk), self._transfers.stopped)
                self._head = bytes(head)
            assert self._size is not None
            return self._size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        last = offset + len(buffer)
        if last > self.open():
            raise truncated(self.name, last, self.size)
        span = Span(offset, last)
        known = self._head[offset:last]
        buffer[: len(known)] = known
        if len(known) == len(buffer) or self._from_window(span, buffer):
            return
        if self._whole and any(expected.covers(span) for expected in self._expected):
            self._from_single_pass(span, buffer)
            return
        start = offset + len(known)
        self._transfer(Span(start, last), _into(buffer[len(known) :], start), self._transfers.stopped)

    def expect(self, spans: Sequence[Span]) -> None:
        """Announce everything that will be read."""
        self._expected = coalesced(spans)

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Start to fetch what will be read soon, neighbours together and as far as there is room."""
        size = self.open()
        if self._whole:
            return
        with self._lock:
            coming = [window.span for window in self._windows]
            new = {span for span in spans if span.last <= size and span.last > len(self._head)}
            new = {span for span in new if not any(other.covers(span) for other in coming)}
            for joined in coalesced(new):
                if not self._transfers.reserve(len(joined)):
                    return
                window = _Window(joined, np.empty(len(joined), np.uint8).data, [])
                window.wanted.update(span for span in new if joined.covers(span))
                window.parts += [self._fetching(window, piece) for piece in pieces(joined)]
                self._windows.append(window)

    def _fetching(self, window: _Window, piece: Span) -> Future[None]:
        first = window.span.first
        sink = _into(window.buffer[piece.first - first : piece.last - first], piece.first)
        return self._transfers.submit(lambda stop: self._transfer(piece, sink, stop))

    def _from_window(self, span: Span, buffer: memoryview) -> bool:
        """Copy a span out of a range that was prefetched, once it has arrived; False if it never will."""
        with self._lock:
            window = next((window for window in self._windows if window.span.covers(span)), None)
        if window is None:
            return False
        try:
            for part in window.parts:
                part.result()
            first = span.first - window.span.first
            buffer[:] = window.buffer[first : first + len(span)]
        except (AbandonedError, CancelledError):
            window.wanted.clear()
            return False
        finally:
            self._read(window, span)
        return True

    def _read(self, window: _Window, span: Span) -> None:
        """Let go of a window once all that was wanted of it has been read."""
        with self._lock:
            window.wanted.discard(span)
            if not window.wanted and window in self._windows:
                self._windows.remove(window)
                self._transfers.release(len(window.span))

    def forget_ahead(self) -> None:
        """Drop what was prefetched and not read."""
        with self._lock:
            for window in self._windows:
                self._transfers.release(len(window.span))
            self._windows.clear()

    def _from_single_pass(self, span: Span, buffer: memoryview) -> None:
        """Read from what one pass over the whole file kept."""
        with self._opening:
            if self._kept is None:
                kept = _Kept(self.name, self._expected)
                everything = Span(0, max(expected.last for expected in self._expected))
                self._transfer(everything, kept.take, self._transfers.stopped)
                self._kept = kept
        self._kept.read_into(span.first, buffer)

    def _transfer(self, span: Span, sink: Sink, stop: threading.Event) -> None:
        """Move a span, or as much of it as the file has, to a sink in order, each byte once."""
        position, last = span.first, span.last
        tries = Tries(stop)
        while position < last:
            before = position
            try:
                with self._transport.request(position, last) as part:
                    last = min(last, self._agreed(part, last))
                    at = part.first
                    if at > position:
                        raise self._other_range(position, part)
                    for chunk in part.chunks if position < last else ():
                        self._transfers.count(len(chunk))
                        wanted = memoryview(chunk)[max(0, position - at) : max(0, last - at)]
                        at += len(chunk)
                        if len(wanted):
                            sink(position, wanted)
                            position += len(wanted)
                        if stop.is_set():
                            raise AbandonedError
                        if position == last:
                            break
                    if position < last and position == before:
                        raise PassingError(self._nothing_came(position, last))
            except PassingError as interruption:
                got_on = position - before >= PROGRESS
                tries.failed(interruption, got_on, reached=self._size is not None)

    def _agreed(self, part: Part, last: int) -> int:
        """Length of the file, once an answer is known to be of the same content as the first one."""
        with self._lock:
            if self._size is None:
                self._size, self._content = part.size, part.content
            if part.whole and part.size > last:
                self._whole = True
                self._transfers.notes[
                    f"the server sends whole files, whatever part is asked for: {self.name} is read from its beginning"
                ] = None
            if (part.size, part.content) == (self._size, self._content):
                return self._size
            known = f"{self._size:,} bytes, {self._content or 'no ETag'}"
        raise CheckpointError(
            "a file changed while it was read",
            where=self.name,
            expected=known,
            found=f"{part.size:,} bytes, {part.content or 'no ETag'}",
            remedy="wait until its upload is over, then start again; nothing was stored",
        )

    def _other_range(self, position: int, part: Part) -> CheckpointError:
        return CheckpointError(
            "the server sent another range than was asked for",
            where=self.name,
            expected=f"bytes from {position:,}",
            found=f"bytes from {part.first:,}",
            remedy="download the files and name their directory",
        )

    def _nothing_came(self, position: int, last: int) -> CheckpointError:
        return CheckpointError(
            "the server sent less than was asked for",
            where=self.name,
            expected=f"bytes {position:,} to {last:,}",
            found="an answer without them",
            remedy="try again, or download the files and name their directory",
        )


class _Kept:
    """Some spans of a file, at their own positions in a sparse temporary file that has no name."""

    def __init__(self, name: str, spans: Sequence[Span]) -> None:
        self._name = name
        self._spans = spans
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)

    def take(self, position: int, chunk: memoryview) -> None:
        """Keep what of a chunk lies in the spans."""
        end = position + len(chunk)
        try:
            for span in self._spans:
                first, last = max(span.first, position), min(span.last, end)
                if first < last:
                    os.pwrite(self._file.fileno(), chunk[first - position : last - position], first)
        except OSError as error:
            raise CheckpointError(
                "what a server sends cannot be kept",
                where=f"{self._name}, in {tempfile.gettempdir()}",
                found=error.strerror or str(error),
                remedy="free space there, or set TMPDIR to another directory",
            ) from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from bytes that were kept."""
        filled = 0
        while filled < len(buffer):
            filled += os.preadv(self._file.fileno(), [buffer[filled:]], offset + filled)

    def __del__(self) -> None:
        self._file.close()


def _into(buffer: memoryview, start: int) -> Sink:
    """A sink that fills a buffer whose first byte is at ``start`` of the file."""

    def take(position: int, chunk: memoryview) -> None:
        buffer[position - start : position - start + len(chunk)] = chunk

    return take
