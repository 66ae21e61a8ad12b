"""The one error family: what is wrong, where, what was expected, what was found, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_PART = 2000
"""Characters of a part of a message."""

UNPRINTABLE = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
"""Characters that steer a terminal, turn the direction of text, or cannot be written."""


def shown(text: str) -> str:
    """A text that names and values from strangers are part of, safe to print and not too long to read."""
    if len(text) > LONGEST_PART:
        text = f"{text[:LONGEST_PART]}... ({len(text):,} characters)"
    return printable(text)


def printable(text: str) -> str:
    """A text with what a terminal would act on, and what cannot be written, as escapes; lines stay lines."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class HeadatlasError(Exception):
    """Base of every error this project raises on purpose.

    ``str()`` gives the full message; the parts stay available as attributes so that no caller has
    to take a message apart.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what = shown(what)
        self.where = where = where if where is None else shown(where)
        self.expected = expected = expected if expected is None else shown(expected)
        self.found = found = found if found is None else shown(found)
        self.remedy = remedy = remedy if remedy is None else shown(remedy)
        parts = [what]
        parts += [
            f"  {name}: {text}"
            for name, text in (
                ("where", where),
                ("expected", expected),
                ("found", found),
                ("to do", remedy),
            )
            if text is not None
        ]
        super().__init__("\n".join(parts))


class CheckpointError(HeadatlasError):
    """A checkpoint that cannot be read as attention heads."""


class StoreError(HeadatlasError):
    """A store that is missing, damaged, busy, or asked for something it does not hold."""


class QueryError(HeadatlasError):
    """A question that cannot be answered as asked."""


def nearest(found: str, known: Iterable[str]) -> str | None:
    """A remedy that names the known names closest to a mistaken one; None where none is close."""
    lowered = {name.lower(): name for name in sorted(known)}
    close = get_close_matches(found.lower(), lowered, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(lowered[name] for name in close)}?" if close else None
