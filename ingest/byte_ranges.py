"""Ranges of bytes: which neighbours to ask for together, and how to cut what is long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LARGEST_SHARE_UNWANTED = 1 / 256
"""Bytes between two tensors that are fetched with them, as a share of the bytes that are wanted."""

LARGEST_REQUEST = 32 * 2**20
"""Bytes of one request; a longer range is fetched in several, at the same time."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Bytes of a file from ``first`` up to, not including, ``last``."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def covers(self, other: Span) -> bool:
        """Whether all bytes of another span are in this one."""
        return self.first <= other.first and other.last <= self.last


def coalesced(spans: Iterable[Span]) -> list[Span]:
    """The fewest ranges, in order, that hold all spans at almost no cost in bytes.

    Neighbours are joined as long as what lies between them stays a small share of what a range is
    asked for, so the ranges together are never longer than ``1 + LARGEST_SHARE_UNWANTED`` times the
    spans. Empty spans are left out.
    """
    ranges: list[Span] = []
    wanted = 0
    for span in sorted(span for span in spans if len(span)):
        if ranges:
            last = ranges[-1]
            joined = Span(last.first, max(last.last, span.last))
            new = max(0, span.last - max(last.last, span.first))
            if len(joined) - wanted - new <= LARGEST_SHARE_UNWANTED * (wanted + new):
                ranges[-1], wanted = joined, wanted + new
                continue
        ranges.append(span)
        wanted = len(span)
    return ranges


def pieces(span: Span, largest: int = LARGEST_REQUEST) -> Iterator[Span]:
    """A span cut into equal parts of at most so many bytes, in order."""
    count = -(-len(span) // largest)
    for number in range(count):
        yield Span(span.first + len(span) * number // count, span.first + len(span) * (number + 1) // count)
