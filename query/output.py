"""Frames to text or files in the formats every command shares."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import polars as pl

from stats.errors import QueryError

Format = Literal["table", "csv", "json", "ndjson", "parquet", "markdown", "latex"]
FORMATS: tuple[Format, ...] = ("table", "csv", "json", "ndjson", "parquet", "markdown", "latex")
TABULATE_STYLES = {"table": "simple", "markdown": "github", "latex": "latex_booktabs"}


def encode(frame: pl.DataFrame, style: Format) -> bytes:
    """A frame in one of ``FORMATS``. Tables for reading show four significant digits."""
    buffer = io.BytesIO()
    if style == "parquet":
        frame.write_parquet(buffer)
    elif style == "csv":
        frame.with_columns(
            pl.col(name).map_elements(lambda values: json.dumps(list(values)), return_dtype=pl.String)
            for name, kind in frame.schema.items()
            if isinstance(kind, pl.List)
        ).write_csv(buffer)
    elif style == "ndjson":
        frame.write_ndjson(buffer)
    elif style == "json":
        frame.write_json(buffer)
        buffer.write(b"\n")
    else:
        buffer.write(_typeset(frame, TABULATE_STYLES[style]).encode())
    return buffer.getvalue()


def _typeset(frame: pl.DataFrame, style: str) -> str:
    from tabulate import tabulate

    rows = [[_cell(value) for value in row] for row in frame.iter_rows()]
    align = ["right" if kind.is_numeric() else "left" for kind in frame.dtypes]
    text = tabulate(
        rows, headers=frame.columns, tablefmt=style, colalign=align if rows else None, disable_numparse=True
    )
    return text + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(_cell(item) for item in value[:3])}{', ...' if len(value) > 3 else ''}]"
    return str(value)


def deliver(frame: pl.DataFrame, style: Format, output: Path | None) -> None:
    """Print a frame, or write it to a file that appears whole or not at all.

    Raises:
        QueryError: parquet to a terminal, or a file that cannot be written.
    """
    if output is None and style == "parquet" and sys.stdout.isatty():
        raise QueryError("parquet is not text", remedy="write it to a file with --output FILE")
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
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(output)
    except OSError as error:
        raise QueryError(
            "the output cannot be written", where=str(output), found=error.strerror or str(error)
        ) from error
    finally:
        partial.unlink(missing_ok=True)
