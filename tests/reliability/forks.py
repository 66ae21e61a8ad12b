"""A warm process whose forks run commands: everything is imported once, so that a trial takes milliseconds to start.

Nothing that starts threads runs in the warm process itself, since threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

END_SECONDS = 20.0


@dataclass(frozen=True)
class Ended:
    """How a fork ended: its exit status or minus its signal, what it printed, and what its function returned."""

    status: int
    seconds: float
    printed: str
    returned: Any = None


def import_everything() -> None:
    """Import what commands import on their way."""
    import cli  # noqa: F401
    import store.derivation
    import store.ingestion
    import store.integrity
    import store.repair
    import store.units
    import store.user_statistics
    from query import open_atlas  # noqa: F401

    with contextlib.suppress(ImportError):
        import store.merging  # type: ignore[import-not-found]  # noqa: F401


class Fork:
    """A child that runs a function, in a process group of its own."""

    def __init__(self, work: Callable[[], Any], printed: Path) -> None:
        self._printed = printed
        self._reader, writer = os.pipe()
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work, writer)
        os.close(writer)

    def _run(self, work: Callable[[], Any], writer: int) -> None:
        status = 70
        try:
            os.setpgid(0, 0)
            os.close(self._reader)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            target = os.open(self._printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, 1)
            os.dup2(target, 2)
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
            sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True)
            returned = work()
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(returned, stream)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the child alone, not to what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Wait for its end."""
        with os.fdopen(self._reader, "rb") as stream:
            data = stream.read()
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self.started
        returned = pickle.loads(data) if data else None
        return Ended(os.waitstatus_to_exitcode(status), seconds, self._printed.read_text(errors="replace"), returned)

    def descendants_end(self) -> bool:
        """Whether all that the child had started is gone soon after it."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            if not members_of(self.pid):
                return True
            time.sleep(0.05)
        return False


def members_of(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def command(*arguments: str) -> Callable[[], None]:
    """A function that runs a command line as the program does."""

    def run() -> None:
        import cli

        sys.argv = ["headatlas", *arguments]
        cli.main(list(arguments))

    return run


def contents(root: Path) -> dict[str, str]:
    """Checksum of every array of the published models, by model, unit without its unique end, and path.

    Attributes of units and models hold times, and are left out.
    """
    from store.atlas import AtlasStore

    store = AtlasStore.open(root)
    found = {}
    for model, stored in store.models().items():
        group = store.arrays_path / stored.array_group
        for unit in (*stored.gain_hash, *stored.derivations):
            name = unit.rsplit("-", 1)[0] if "-" in unit else unit
            for path in sorted((group / unit).rglob("*")):
                if path.is_file() and path != group / unit / "zarr.json":
                    place = path.relative_to(group / unit).as_posix()
                    found[f"{model}:{name}:{place}"] = sha256(path.read_bytes()).hexdigest()
    return found
