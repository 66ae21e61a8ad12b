"""The one error family: what is wrong, where, what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.remedy = remedy
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
