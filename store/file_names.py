"""Names of files that may come from elsewhere: nothing that leads outside, on any file system."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

ODD = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
LONGEST_NAME = 1000
LONGEST_PART = 255


def check_name(name: str) -> None:
    """Refuse a name that is not a plain path below the place where it is unpacked.

    Raises:
        ValueError: it is not.
    """
    parts = name.split("/")
    if len(name) > LONGEST_NAME or any(len(part.encode()) > LONGEST_PART for part in parts):
        raise ValueError("too long a name")
    if ODD.search(name) or any(part in ("", ".", "..") for part in parts):
        raise ValueError("a name that leads outside, or has characters that no file of a store has")
    if any(RESERVED.fullmatch(part) or part.endswith((" ", ".")) for part in parts):
        raise ValueError("a name that some systems keep for devices, or cannot tell from another")


def check_together(names: Iterable[str]) -> None:
    """Refuse names that would be one file on some file system, or both a file and a directory.

    Raises:
        ValueError: two such names.
    """
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(_folded(name), name)
        if other != name:
            raise ValueError(f"two names that differ in case or form alone: {other}, {name}")
    for folded, name in seen.items():
        parts = folded.split("/")
        for length in range(1, len(parts)):
            if "/".join(parts[:length]) in seen:
                raise ValueError(f"both a file and a directory: {name}")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
