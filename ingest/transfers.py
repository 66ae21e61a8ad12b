"""What the remote files of a checkpoint share: threads that fetch, patience, and a count of the bytes moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stats.errors import CheckpointError

Answer = TypeVar("Answer")

CONNECTIONS = 8
"""Requests in flight at once."""

MOST_AHEAD = 2**30
"""Bytes fetched and not yet read, at most; what does not fit is fetched when it is read."""

ATTEMPTS = 6
"""Tries at a range without getting on, before giving up."""

PROGRESS = 64 * 1024
"""Bytes that a try must bring, unless it brings all that is missing, for the next to be counted as the first."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0
"""Seconds between tries: doubled from the first up to the longest."""

MOST_PATIENCE = 300.0
"""Seconds that a server can ask to wait for; where it asks for more, that is reported instead."""


@dataclass(frozen=True, slots=True)
class Part:
    """The answer to a request for bytes of a file.

    ``first`` is the position its bytes begin at, ``size`` the length of the whole file, ``content`` a
    text that changes when the file does (an ETag), and ``whole`` says that the range was ignored.
    """

    first: int
    size: int
    content: str | None
    whole: bool
    chunks: Iterator[bytes]


class Transport(Protocol):
    """How to ask for bytes of one remote file."""

    name: str

    def request(self, first: int, last: int) -> AbstractContextManager[Part]:
        """Ask for the bytes from ``first`` up to, not including, ``last``; a shorter file gives fewer.

        Raises:
            PassingError: something that may go better the next time; also while chunks arrive.
            CheckpointError: something that will not.
        """


class PassingError(Exception):
    """A request that failed in a way that may pass.

    Attributes:
        error: what to say if it does not.
        wait: seconds the server asks to wait.
        unreachable: there was no connection at all.
    """

    def __init__(self, error: CheckpointError, wait: float | None = None, unreachable: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait = wait
        self.unreachable = unreachable


class NoSuchFileError(CheckpointError):
    """A file that a server says it does not have."""


class NoAccessError(CheckpointError):
    """A file that a server does not show; some say so of files they do not have."""


class AbandonedError(Exception):
    """A transfer that nobody waits for any more."""


def pause(seconds: float, stop: threading.Event) -> None:
    """Wait between two tries, unless the transfers are stopped meanwhile."""
    stop.wait(seconds)


class Transfers:
    """Shared by the remote files of one checkpoint.

    Attributes:
        moved: bytes of file content that arrived so far.
        notes: what a user should know about how the bytes were had.
    """

    def __init__(self) -> None:
        self.moved = 0
        self.notes: dict[str, None] = {}
        self.stopped = threading.Event()
        self._held = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def count(self, n: int) -> None:
        """Note that bytes arrived."""
        with self._lock:
            self.moved += n

    def reserve(self, n: int) -> bool:
        """Make room for bytes that are fetched before they are read; False where there is none."""
        with self._lock:
            if self._held + n > MOST_AHEAD:
                return False
            self._held += n
            return True

    def release(self, n: int) -> None:
        """Give room back."""
        with self._lock:
            self._held -= n

    def submit(self, task: Callable[[threading.Event], None]) -> Future[None]:
        """Have a thread do a task, which should end soon once the event is set."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="transfer")
            return self._pool.submit(task, self.stopped)

    def stop(self) -> None:
        """Abandon what is under way; later tasks start afresh."""
        with self._lock:
            self.stopped.set()
            pool, self._pool, self.stopped = self._pool, None, threading.Event()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


class Tries:
    """Counts the tries at one range and waits between them."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._failed = 0

    def failed(self, interruption: PassingError, got_on: bool, reached: bool) -> None:
        """Wait after a try that was interrupted.

        Args:
            interruption: what happened.
            got_on: whether the try brought bytes worth another series of tries.
            reached: whether the server has answered before, which makes a lost connection worth a wait.

        Raises:
            CheckpointError: there is no point in trying again.
        """
        if self._stop.is_set():
            raise AbandonedError
        self._failed = 1 if got_on else self._failed + 1
        hopeless = interruption.unreachable and not reached
        if hopeless or self._failed >= ATTEMPTS or (interruption.wait or 0) > MOST_PATIENCE:
            raise interruption.error from interruption
        doubled = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (self._failed - 1))
        pause(doubled if interruption.wait is None else interruption.wait, self._stop)
        if self._stop.is_set():
            raise AbandonedError


def patiently(ask: Callable[[], Answer], stop: threading.Event) -> Answer:
    """The answer to a question that may be asked several times.

    Raises:
        CheckpointError: it stayed unanswered.
    """
    tries = Tries(stop)
    while True:
        try:
            return ask()
        except PassingError as interruption:
            tries.failed(interruption, got_on=False, reached=False)
