"""Files that are whole or not there: written beside their place under a partial name, then renamed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(target: Path, *, durable: bool = False) -> Iterator[Path]:
    """A partial name to write a file under; it takes its own once the block has ended well.

    With ``durable`` the file, and then its name, are on the disk at the end.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        if durable:
            sync(partial)
        partial.replace(target)
        if durable:
            sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, written to the disk, so that they outlive the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
