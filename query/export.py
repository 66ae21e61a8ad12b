"""Any table or query of a store to a file for a paper, with the provenance inside the file.

Comments and metadata go where readers of the form look for none of the rows: CSV begins with ``#`` lines
(``pl.read_csv(file, comment_prefix="#")``, ``pandas.read_csv(file, comment="#")``), NDJSON with a line that
holds ``provenance`` alone, JSON is an object of ``provenance`` and ``rows``, LaTeX has ``%`` lines, Markdown a
comment of HTML, Parquet and Arrow key-value metadata, a workbook its description.
"""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from query import latex, markdown
from query.formats import BINARY, ENDINGS, ExportFormat
from query.output import deliver_bytes, encode
from query.provenance import COMMENT_MARKS, METADATA_KEY, Provenance, html_comment, provenance
from query.sources import Request, listing, table
from query.typesetting import Table
from stats.errors import QueryError, nearest

if TYPE_CHECKING:
    from query.atlas import Atlas

__all__ = ["Request", "export", "form_for", "listing", "table", "written"]

EXCEL_ROWS = 1_048_576
"""Rows that a worksheet has, the one of the headings among them."""


def form_for(output: Path | None, style: str | None) -> ExportFormat:
    """The form as named, else as the file's ending says, else a table for reading.

    Raises:
        QueryError: an ending that says nothing.
    """
    if style is not None:
        return cast("ExportFormat", style)
    if output is None:
        return "table"
    ending = output.suffix.lower()
    if ending not in ENDINGS:
        raise QueryError(
            f"the ending {ending!r} names no format" if ending else "the file's name has no ending",
            where=str(output),
            expected=", ".join(ENDINGS),
            remedy=nearest(ending, ENDINGS) or "choose the format with --format",
        )
    return ENDINGS[ending]


def written(
    content: Table,
    form: ExportFormat,
    source: Provenance | None,
    digits: int = 3,
    caption: str | None = None,
    label: str | None = None,
) -> bytes:
    """A table in one of the forms.

    Args:
        content: the rows, and how they are set for reading.
        form: how they are written.
        source: provenance to put into the file; None for none.
        digits: significant digits where numbers are set for reading (latex, markdown).
        caption: LaTeX or Markdown in place of the table's own caption.
        label: LaTeX label in place of ``tab:NAME``.

    Raises:
        QueryError: more rows than a worksheet has.
    """
    typeset = form in ("latex", "markdown")
    lines = [] if source is None else (replace(source, digits=digits) if typeset else source).lines()
    rows = content.rows
    if form == "latex":
        heading = content.caption if caption is None else caption
        needed = ["needs, in the preamble:", *latex.packages(content)]
        text = latex.typeset(content, digits, heading, label or f"tab:{content.name}")
        return "".join(f"{line}\n" for line in [*(f"% {line}" for line in [*lines, *needed]), *text]).encode()
    if form == "markdown":
        text = markdown.typeset(content, digits, caption)
        return "\n".join([*([html_comment(lines)] if lines else []), *text, ""]).encode()
    if form == "csv":
        return "".join(f"{COMMENT_MARKS['csv']}{line}\n" for line in lines).encode() + encode(rows, "csv")
    if form == "xlsx":
        return _workbook(content.name, rows, "\n".join(lines))
    if source is None or form == "table":
        return encode(rows, form)
    if form == "json":
        head = json.dumps(source.as_json(), ensure_ascii=False)
        return f'{{"provenance": {head},\n"rows": '.encode() + encode(rows, "json").rstrip() + b"}\n"
    if form == "ndjson":
        return (
            json.dumps({"provenance": source.as_json()}, ensure_ascii=False).encode() + b"\n" + encode(rows, "ndjson")
        )
    return encode(rows, form, {METADATA_KEY: json.dumps(source.as_json(), ensure_ascii=False)})


def _workbook(name: str, rows: pl.DataFrame, description: str) -> bytes:
    """An Excel workbook with one sheet; text stays text, even where it begins with an equals sign."""
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
    from openpyxl.styles import Font

    if len(rows) >= EXCEL_ROWS:
        raise QueryError(
            "more rows than a worksheet has",
            expected=f"below {EXCEL_ROWS:,}",
            found=f"{len(rows):,}",
            remedy="write .parquet or .csv",
        )
    workbook = Workbook(write_only=True)
    workbook.properties.title = name
    workbook.properties.description = description
    sheet = workbook.create_sheet(re.sub(r"[^\w -]", "", name)[:31] or "rows")
    sheet.freeze_panes = "A2"

    def cell(value: Any, bold: bool = False) -> Any:
        if isinstance(value, list):
            value = json.dumps(value)
        if not isinstance(value, str):
            return value
        made = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("", value))
        made.data_type = "s"
        if bold:
            made.font = Font(bold=True)
        return made

    sheet.append([cell(column, bold=True) for column in rows.columns])
    for row in rows.with_columns(pl.col(pl.Float64, pl.Float32).fill_nan(None)).iter_rows():
        sheet.append([cell(value) for value in row])
    buffer = io.BytesIO()
    workbook.save(buffer)
    return buffer.getvalue()


def export(
    atlas: Atlas,
    request: Request,
    output: Path | None = None,
    style: str | None = None,
    *,
    digits: int = 3,
    caption: str | None = None,
    label: str | None = None,
    sourced: bool = True,
) -> Table:
    """Write what was asked for to a file, which appears whole or not at all, or print it.

    Args:
        atlas: an open store.
        request: what to export.
        output: the file; standard output when None.
        style: one of ``query.formats.EXPORT_FORMATS``; as the file's ending says when None.
        digits: significant digits where numbers are set for reading.
        caption: in place of the table's own.
        label: for LaTeX.
        sourced: put the provenance into the file.

    Raises:
        QueryError: what ``table``, ``form_for`` and ``written`` raise, a file that cannot be written, or a
            binary form to a terminal.
    """
    form = form_for(output, style)
    if output is None and form in BINARY and sys.stdout.isatty():
        raise QueryError(f"{form} is not text", remedy="write it to a file with -o FILE")
    content = table(atlas, request)
    source = provenance(atlas, content.query, content.rows) if sourced else None
    deliver_bytes(written(content, form, source, digits, caption, label), output)
    return content
