"""Tables for Markdown, as GitHub reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from query.typesetting import Column, Table, cells


def escape(text: str) -> str:
    """Text that Markdown shows as it is, in one cell."""
    return re.sub(r"([\\`*\[\]<>|~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", " ".join(text.split()))


def typeset(table: Table, digits: int, caption: str | None = None) -> list[str]:
    """The table as lines, a caption above and the notes below.

    Args:
        table: rows and columns.
        digits: as ``query.typesetting.cells`` has them.
        caption: Markdown; none when None.
    """
    columns = table.shown()
    rows = [
        [text if column.kind != "text" else escape(text) for column, text in zip(columns, row, strict=True)]
        for row in cells(table, digits)
    ]
    headings = [escape(column.heading) for column in columns]
    widths = [max(3, *map(len, texts)) for texts in zip(headings, *rows, strict=True)]
    return [
        *([caption, ""] if caption else []),
        _line(columns, headings, widths),
        "| "
        + " | ".join(
            "-" * (width - 1) + (":" if _aligned(column) else "-")
            for column, width in zip(columns, widths, strict=True)
        )
        + " |",
        *(_line(columns, row, widths) for row in rows),
        *(["", *(escape(note) for note in table.notes)] if table.notes else []),
    ]


def read_rows(lines: Iterable[str]) -> list[list[str]]:
    """Cells of the rows of a table that was set here, as they stand in the file."""
    rows = [line.strip() for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def _aligned(column: Column) -> bool:
    """Whether a column is set to the right."""
    return column.kind != "text"


def _line(columns: Sequence[Column], texts: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        text.rjust(width) if _aligned(column) else text.ljust(width)
        for column, text, width in zip(columns, texts, widths, strict=True)
    ]
    return "| " + " | ".join(padded) + " |"
