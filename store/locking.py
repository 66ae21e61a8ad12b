"""Locks between processes: who publishes to a store, and whose staged files are still being written.

A lock is the operating system's (``flock``): it ends with the process that holds it, however that ends.
So a lock file that lies about means nothing; what counts is whether somebody holds it. The file says
who, for those who wait.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from stats.errors import StoreError

FIRST_MESSAGE_SECONDS = 1.0
"""How long a writer waits before it says for whom."""

AGAIN_SECONDS = 30.0
"""How often it says so again while the same process goes on."""

LOOK_SECONDS = 0.02
COMMAND_LENGTH = 200


def to_stderr(text: str) -> None:
    """Tell whoever waits."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock, as it wrote itself into the file; ``since`` in seconds since 1970."""

    host: str
    pid: int
    command: str
    since: float

    @classmethod
    def here(cls) -> Holder:
        """The process that asks, from now on."""
        return cls(socket.gethostname(), os.getpid(), shlex.join(sys.argv)[:COMMAND_LENGTH], time.time())

    @classmethod
    def of(cls, path: Path) -> Holder | None:
        """What a lock file says; None where nobody has written into it."""
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            return cls(str(known["host"]), int(known["pid"]), str(known["command"]), float(known["since"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        return f"PID {self.pid} on {self.host}"


class Lock:
    """A lock on a file, exclusive or shared, that is tried for and not waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, *, shared: bool = False) -> bool:
        """Whether the lock was free; an exclusive one then names this process in the file.

        Raises:
            OSError: the file cannot be opened or made.
        """
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if not _is_at(descriptor, self.path):
                    os.close(descriptor)
                    continue
                if not shared:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps(asdict(Holder.here())).encode())
            except BlockingIOError:
                os.close(descriptor)
                return False
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            return True

    def release(self, *, delete: bool = False) -> None:
        """Let go, and take the file away if asked."""
        if self._descriptor is None:
            return
        try:
            if delete:
                self.path.unlink(missing_ok=True)
            elif fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_RDWR:
                os.ftruncate(self._descriptor, 0)
        except OSError:
            pass
        finally:
            os.close(self._descriptor)
            self._descriptor = None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        there, opened = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def is_held(path: Path) -> bool:
    """Whether any process holds the lock on a file; what cannot be asked counts as held."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file of one's own, which goes afterwards.

    Raises:
        OSError: the file cannot be made.
    """
    lock = Lock(path)
    while not lock.acquire():
        time.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        lock.release(delete=True)


@contextmanager
def publishing(path: Path, limit: float, tell: Callable[[str], None] = to_stderr) -> Iterator[None]:
    """Exclusive right to publish to a store: waits for other writers, and says for whom.

    Args:
        path: the lock file.
        limit: seconds after which waiting ends.
        tell: given a line about whom this process waits for.

    Raises:
        StoreError: others hold the lock for longer than ``limit``, or the file cannot be written.
    """
    lock = Lock(path)
    try:
        _wait(lock, limit, tell)
    except OSError as error:
        raise StoreError(
            "the store cannot be written",
            where=str(path),
            found=error.strerror or str(error),
            remedy="fix its permissions or free space, then try again; nothing was changed",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _wait(lock: Lock, limit: float, tell: Callable[[str], None]) -> None:
    started = time.monotonic()
    told: dict[Holder | None, float] = {}
    while not lock.acquire():
        waited = time.monotonic() - started
        holder = Holder.of(lock.path)
        if waited >= limit:
            raise _still_held(lock.path, holder, limit)
        last = told.get(holder)
        if waited >= FIRST_MESSAGE_SECONDS and (last is None or waited - last >= AGAIN_SECONDS):
            told[holder] = waited
            tell(f"waiting for {holder or 'another process'}{_busy_for(holder)}")
        time.sleep(LOOK_SECONDS)


def _busy_for(holder: Holder | None) -> str:
    if holder is None:
        return ", which is publishing to the store"
    return f", which has been publishing for {max(0.0, time.time() - holder.since):.0f} s: {holder.command}"


def _still_held(path: Path, holder: Holder | None, limit: float) -> StoreError:
    elsewhere = holder is not None and holder.host != socket.gethostname()
    return StoreError(
        "another process is publishing to the store",
        where=str(path),
        expected=f"the write lock within {limit:g} seconds",
        found=f"{holder or 'another process'}{_busy_for(holder)}",
        remedy=(
            f"wait for it to end, then try again; if {holder.host} has crashed, its file server frees the lock when "
            f"it is up again or its lease ends, or delete {path.name} once nothing writes to the store any more"
            if elsewhere and holder is not None
            else "wait for it to end, then try again, or allow more time with HEADATLAS_LOCK_SECONDS"
        ),
    )
