"""Frames to text or files in the formats every command shares."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from query import latex, markdown
from query.formats import BINARY, FORMATS, Format
from query.typesetting import Table
from stats.errors import QueryError, printable
from store.whole_files import written_whole

__all__ = ["FORMATS", "Format", "deliver", "deliver_bytes", "encode"]

DIGITS = 4
"""Significant digits of numbers in tables for reading."""


def encode(frame: pl.DataFrame, style: Format, metadata: Mapping[str, str] | None = None) -> bytes:
    """A frame in one of ``FORMATS``. Tables for reading show four significant digits.

    Args:
        frame: the rows.
        style: how they are written.
        metadata: texts by key for the forms that have room for them beside the rows, parquet and arrow.
    """
    buffer = io.BytesIO()
    if style == "parquet":
        frame.write_parquet(buffer, metadata=dict(metadata or {}))
    elif style == "arrow":
        _write_arrow(frame, buffer, metadata or {})
    elif style == "csv":
        frame = frame.with_columns(
            pl.col(name).map_elements(lambda values: json.dumps(list(values)), return_dtype=pl.String)
            for name, kind in frame.schema.items()
            if isinstance(kind, pl.List)
        )
        frame.write_csv(buffer, quote_style="non_numeric" if _holds_comment_mark(frame) else "necessary")
    elif style == "ndjson":
        frame.write_ndjson(buffer)
    elif style == "json":
        frame.write_json(buffer)
        buffer.write(b"\n")
    else:
        buffer.write(_typeset(frame, style).encode())
    return buffer.getvalue()


def _write_arrow(frame: pl.DataFrame, buffer: io.BytesIO, metadata: Mapping[str, str]) -> None:
    """An Arrow IPC file, which is Feather too; its types are those that older readers know."""
    import pyarrow as pa

    rows = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).replace_schema_metadata(dict(metadata))
    with pa.ipc.new_file(buffer, rows.schema) as writer:
        writer.write_table(rows)


def _holds_comment_mark(frame: pl.DataFrame) -> bool:
    """Whether a name or text has the mark that CSV readers may take for a comment unless it is quoted."""
    texts = (frame[name] for name, kind in frame.schema.items() if kind == pl.String)
    return any("#" in name for name in frame.columns) or any(
        bool(column.str.contains("#", literal=True).any()) for column in texts
    )


def _typeset(frame: pl.DataFrame, style: Format) -> str:
    if style == "table":
        return _plain(frame)
    rows = Table("", "", frame)
    lines = latex.tabular(rows, DIGITS) if style == "latex" else markdown.typeset(rows, DIGITS)
    return "\n".join(lines) + "\n"


def _plain(frame: pl.DataFrame) -> str:
    from tabulate import tabulate

    rows = [[_cell(value) for value in row] for row in frame.iter_rows()]
    align = ["right" if kind.is_numeric() else "left" for kind in frame.dtypes]
    heads = [printable(name) for name in frame.columns]
    text = tabulate(rows, headers=heads, tablefmt="simple", colalign=align if rows else None, disable_numparse=True)
    return text + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(_cell(item) for item in value[:3])}{', ...' if len(value) > 3 else ''}]"
    return printable(str(value))


def deliver(frame: pl.DataFrame, style: Format, output: Path | None) -> None:
    """Print a frame, or write it to a file that appears whole or not at all.

    Raises:
        QueryError: a binary form to a terminal, or a file that cannot be written.
    """
    if output is None and style in BINARY and sys.stdout.isatty():
        raise QueryError(f"{style} is not text", remedy="write it to a file with --output FILE")
    deliver_bytes(encode(frame, style), output)


def deliver_bytes(data: bytes, output: Path | None) -> None:
    """Print encoded data, or write it to a file that appears whole or not at all.

    Raises:
        QueryError: a file that cannot be written.
    """
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        with written_whole(output) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise QueryError(
            "the output cannot be written", where=str(output), found=error.strerror or str(error)
        ) from error
