"""Tables for reading: which columns, under which headings, and every number as text with a few digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

Kind = Literal["text", "integer", "number", "percent", "interval", "fraction"]

NUMERIC: tuple[Kind, ...] = ("integer", "number", "percent")
"""Kinds whose cells are single numbers."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column as it is set.

    ``fields`` are the columns of the rows it shows: one, or the two ends of an interval, or the two parts
    of a fraction. ``heading`` is plain text; ``latex`` is the same for LaTeX, already escaped, where it is
    not the same text. A percent and an interval show shares of 0 to 1.
    """

    fields: tuple[str, ...]
    heading: str
    kind: Kind
    latex: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with what is needed to publish them.

    ``query`` gives the rows again. Where ``columns`` is empty every column of the rows is set. The
    caption is LaTeX, the notes are plain text. Between rows that differ in the column ``group`` goes some space.
    """

    name: str
    query: str
    rows: pl.DataFrame
    columns: tuple[Column, ...] = ()
    caption: str = ""
    notes: tuple[str, ...] = ()
    group: str | None = None

    def shown(self) -> tuple[Column, ...]:
        """The columns that are set."""
        return self.columns or tuple(_as_stored(name, kind) for name, kind in self.rows.schema.items())


def _as_stored(name: str, kind: pl.DataType) -> Column:
    """A column of any query: its name, its cells as their type says."""
    form: Kind = "integer" if kind.is_integer() else "number" if kind.is_numeric() else "text"
    return Column((name,), name, form)


def cells(table: Table, digits: int) -> list[list[str]]:
    """Text of every cell, by row; an empty text where there is no value.

    Args:
        table: rows and columns.
        digits: significant digits of numbers, as far as a column is not better served by as many
            decimals; shares in percent have two fewer decimals.
    """
    columns = [_texts(table.rows, column, digits) for column in table.shown()]
    return [list(row) for row in zip(*columns, strict=True)]


def _texts(rows: pl.DataFrame, column: Column, digits: int) -> list[str]:
    values = [rows[field].to_list() for field in column.fields]
    if column.kind == "interval":
        pairs = zip(*values, strict=True)
        return [
            f"[{_percent(low, digits)}, {_percent(high, digits)}]" if low is not None else "" for low, high in pairs
        ]
    if column.kind == "fraction":
        return [f"{part}/{whole}" if part is not None else "" for part, whole in zip(*values, strict=True)]
    if column.kind == "percent":
        return ["" if share is None else _percent(share, digits) for share in values[0]]
    form = _number_form(values[0], digits) if column.kind == "number" else _text
    return ["" if value is None else form(value) for value in values[0]]


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{max(0, digits - 2)}f}"


def _number_form(values: list[Any], digits: int) -> Callable[[float], str]:
    """Equal decimals for a column where they leave two digits of every number, else significant digits."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if all(10 ** (1 - digits) <= size < 1000 for size in sizes):
        return lambda value: f"{value:.{digits}f}"
    return lambda value: significant(value, digits)


def significant(value: float, digits: int) -> str:
    """A number with significant digits, with an exponent below 0.001 and from 1e6; ``3.28e-4``.

    Args:
        value: any number.
        digits: at least 1.
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = int(exponent)
    if -4 < power < 6:
        return f"{value:.{max(0, digits - 1 - power)}f}"
    return f"{mantissa}e{power}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return significant(value, 3)
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    return " ".join(str(value).split()) if not isinstance(value, bool) else str(value).lower()
