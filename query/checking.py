"""Whether an exported file still says what the store says."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from query import latex, markdown
from query.export import written
from query.formats import ExportFormat
from query.provenance import Provenance, form_of, provenance_in
from query.sources import Request, table
from stats.errors import QueryError

if TYPE_CHECKING:
    from query.atlas import Atlas

TOLERANCE = 1e-9
"""Relative difference of numbers that are written in full: another machine rounds the last digits otherwise."""

SHOWN = 3
"""Differences that are told one by one."""

Cell = str | float | None
Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one file; ``detail`` says what differs, or why it cannot be checked."""

    file: str
    outcome: Literal["ok", "differs", "cannot be checked"]
    detail: str


def check(atlas: Atlas, path: Path) -> Finding:
    """Ask a file's query again and compare the values, and the models by content.

    Numbers that are set for reading (latex, markdown) must come out as the same text, others agree to
    ``TOLERANCE``. Rows in another order are the same rows.
    """
    try:
        data = path.read_bytes()
        form = form_of(data)
        source = provenance_in(data, form)
    except OSError as error:
        return Finding(str(path), "cannot be checked", error.strerror or str(error))
    except QueryError as error:
        return Finding(str(path), "cannot be checked", error.what)
    problems = _models(atlas, source)
    try:
        content = table(atlas, Request.from_query(source.query))
        columns, found = _cells(data, form)
        _, expected = _cells(written(content, form, source, source.digits or 3), form)
    except (QueryError, ValueError, KeyError, IndexError, pl.exceptions.PolarsError) as error:
        problems.append(" ".join(str(error).split()))
        return Finding(str(path), "cannot be checked", "; ".join(problems))
    shown = [column.heading for column in content.shown()] if form in ("latex", "markdown") else content.rows.columns
    if columns is not None and columns != content.rows.columns:
        problems.append(f"columns {', '.join(columns)} in the file, {', '.join(content.rows.columns)} in the store")
    else:
        problems += _rows(shown, found, expected)
    return Finding(str(path), "differs" if problems else "ok", "; ".join(problems))


def _models(atlas: Atlas, source: Provenance) -> list[str]:
    """Models of the file that are gone, or hold something else by now."""
    stored = dict(atlas.sql("SELECT model, content_hash FROM models").rows())
    gone = [f"model {name} is not in the store" for name in source.models if name not in stored]
    changed = [name for name, content in source.models.items() if stored.get(name, content) != content]
    return gone + [f"model {name} holds other values than those of the file" for name in changed]


def _cells(data: bytes, form: ExportFormat) -> tuple[list[str] | None, list[Row]]:
    """Columns, where the file tells their names, and rows as they stand in it."""
    columns: list[str] | None = None
    if form in ("latex", "markdown"):
        lines = data.decode().split("\n")
        texts = latex.read_rows(lines) if form == "latex" else markdown.read_rows(lines)
        return None, [tuple(row) for row in texts]
    if form in ("json", "ndjson"):
        text = data.decode()
        parts = json.loads(text)["rows"] if form == "json" else map(json.loads, text.splitlines()[1:])
        found = list(parts)
        columns = list(found[0]) if found else None
        rows = [list(row.values()) for row in found]
    elif form == "xlsx":
        from openpyxl import load_workbook

        sheet = load_workbook(io.BytesIO(data), read_only=True).worksheets[0]
        heading, *values = sheet.iter_rows(values_only=True)
        columns = [str(name) for name in heading]
        rows = [[*row, *[None] * (len(columns) - len(row))] for row in values]
    else:
        frame = _frame(data, form)
        columns, rows = frame.columns, [list(row) for row in frame.iter_rows()]
    return columns, [tuple(map(_plain, row)) for row in rows]


def _frame(data: bytes, form: ExportFormat) -> pl.DataFrame:
    if form == "parquet":
        return pl.read_parquet(io.BytesIO(data))
    if form == "arrow":
        return pl.read_ipc(io.BytesIO(data))
    lines = data.splitlines(keepends=True)
    rows = dropwhile(lambda line: line.startswith(b"#"), lines)
    return pl.read_csv(b"".join(rows), infer_schema_length=None)


def _plain(value: Any) -> Cell:
    """A number as a float, anything else as text."""
    if value is None or isinstance(value, str):
        return value
    return float(value) if isinstance(value, int | float) else json.dumps(value, default=str)


def _rows(names: Sequence[str], found: list[Row], expected: list[Row]) -> list[str]:
    """The rows that differ, the first of them one by one."""
    if len(found) == len(expected):
        differing = [
            place for place, (own, other) in enumerate(zip(found, expected, strict=True)) if not _same(own, other)
        ]
        if not differing or Counter(map(_rounded, found)) == Counter(map(_rounded, expected)):
            return []
        told = [_told(place, names, found[place], expected[place]) for place in differing[:SHOWN]]
        rest = [f"{len(differing)} rows differ in all"] if len(differing) > SHOWN else []
        return told + rest
    own, other = Counter(map(_rounded, found)), Counter(map(_rounded, expected))
    told = [f"{len(found)} rows in the file, {len(expected)} in the store"]
    for where, only in (("file", own - other), ("store", other - own)):
        told += [f"only in the {where}: {', '.join(str(cell) for cell in row[:4])} ..." for row in list(only)[:SHOWN]]
    return told


def _same(own: Row, other: Row) -> bool:
    return len(own) == len(other) and all(map(_agree, own, other))


def _agree(own: Cell, other: Cell) -> bool:
    if own == other:
        return True
    if isinstance(own, float) and isinstance(other, float):
        return (own != own and other != other) or math.isclose(own, other, rel_tol=TOLERANCE)
    return False


def _rounded(row: Row) -> Row:
    return tuple(f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row)


def _told(place: int, names: Sequence[str], own: Row, other: Row) -> str:
    if len(own) != len(other):
        return f"row {place + 1} has {len(own)} cells in the file, {len(other)} in the store"
    differing = [
        f"{name} is {mine} in the file, {theirs} in the store"
        for name, mine, theirs in zip(names, own, other, strict=True)
        if not _agree(mine, theirs)
    ]
    return f"row {place + 1} ({own[0]}): {', '.join(differing)}"
