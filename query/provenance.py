"""Where rows come from: the question, the models it could read by content, the version and the day.

It travels inside what is published and is read back from there: as comments in text, as metadata in
Parquet and Arrow, as a property of a workbook, as a part of JSON.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import polars as pl

from query.formats import ExportFormat
from stats.errors import QueryError
from store.version import tool_version

if TYPE_CHECKING:
    from query.atlas import Atlas

METADATA_KEY = "headatlas"
"""Key of the JSON in the metadata of Parquet and Arrow files."""

COMMENT_MARKS = {"csv": "# ", "latex": "% "}
FIRST_LINE = re.compile(r"Headatlas (\S+), (\d{4}-\d{2}-\d{2})")
JSON_START = re.compile(r'\s*\{\s*"provenance"\s*:')
FACT = re.compile(r"(query|digits|model): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a table, a figure or a page is made from.

    ``models`` maps a model's name to the content hash of its values and outputs; ``digits`` are those of
    the numbers, where they are set for reading.
    """

    query: str
    models: dict[str, str]
    version: str
    created: str
    digits: int | None = None

    def lines(self) -> list[str]:
        """One fact a line, as comments of files have them; further lines of a fact begin with two spaces."""
        facts = [
            f"query: {self.query.strip()}",
            *([f"digits: {self.digits}"] if self.digits is not None else []),
            *(f"model: {name} {content}" for name, content in self.models.items()),
        ]
        folded = "\n".join("\n  ".join(fact.splitlines()) for fact in facts)
        return [f"Headatlas {self.version}, {self.created}", *folded.split("\n")]

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Provenance | None:
        """What ``lines`` wrote, with other lines before and after it; None where there is none."""
        remaining = iter(lines)
        first = next((match for match in map(FIRST_LINE.fullmatch, remaining) if match), None)
        facts: list[str] = []
        for line in remaining if first else ():
            if line.startswith("  ") and facts:
                facts[-1] += "\n" + line[2:]
            elif FACT.match(line):
                facts.append(line)
            else:
                break
        told = [match.groups() for match in map(FACT.fullmatch, facts) if match]
        queries = [value for kind, value in told if kind == "query"]
        if first is None or not queries:
            return None
        models = dict(value.rsplit(" ", 1) for kind, value in told if kind == "model" and " " in value)
        digits = next((int(value) for kind, value in told if kind == "digits" and value.isdecimal()), None)
        return cls(queries[0], models, first[1], first[2], digits)

    def as_json(self) -> dict[str, Any]:
        """The parts by name; those without a value are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, parts: Any) -> Provenance | None:
        """What ``as_json`` gave; None where it is something else."""
        try:
            return cls(**parts)
        except TypeError:
            return None


def provenance(atlas: Atlas, query: str, rows: pl.DataFrame | None = None) -> Provenance:
    """Provenance of what a query gave.

    Args:
        atlas: the store that was asked.
        query: the question with its values in place, or the command that asked it.
        rows: the answer; where it has a ``model`` column of stored names, only those models are named.
    """
    stored = dict(atlas.sql("SELECT model, content_hash FROM models ORDER BY model").rows())
    if rows is not None and rows.schema.get("model") == pl.String:
        named = set(rows["model"].drop_nulls())
        if named and named <= stored.keys():
            stored = {name: content for name, content in stored.items() if name in named}
    return Provenance(query, stored, tool_version(), datetime.now(UTC).strftime("%Y-%m-%d"))


def html_comment(lines: Iterable[str]) -> str:
    """Lines as a comment of HTML and Markdown, which must not hold the mark that ends it."""
    text = "\n".join(lines).replace("&", "&amp;").replace("-->", "--&gt;").replace("--!>", "--!&gt;")
    return f"<!--\n{text}\n-->"


def form_of(data: bytes) -> ExportFormat:
    """In which form a file was written, from its content alone.

    Raises:
        QueryError: none of the forms that carry a provenance.
    """
    binary: dict[bytes, ExportFormat] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"PK\x03\x04": "xlsx"}
    for magic, form in binary.items():
        if data.startswith(magic):
            return form
    text = data.decode(errors="replace")
    if JSON_START.match(text):
        return _form_of_json(text)
    for line in text.splitlines():
        for form, mark in (("csv", "# "), ("latex", "% "), ("markdown", "")):
            if line.startswith(mark) and FIRST_LINE.fullmatch(line.removeprefix(mark)):
                return form
    raise QueryError("the file has no provenance", remedy="write it with: headatlas export NAME -o FILE")


def _form_of_json(text: str) -> ExportFormat:
    """One object with provenance and rows, or a line of provenance before those of the rows."""
    try:
        return "json" if "rows" in json.loads(text.partition("\n")[0]) else "ndjson"
    except ValueError:
        return "json"


def read_provenance(path: str | Path) -> Provenance:
    """The provenance inside an exported file, whatever its ending.

    Raises:
        QueryError: a file that cannot be read, or that has none.
    """
    try:
        data = Path(path).read_bytes()
        found = provenance_in(data, form_of(data))
    except OSError as error:
        raise QueryError("the file cannot be read", where=str(path), found=error.strerror or str(error)) from error
    except QueryError as error:
        raise QueryError(error.what, where=str(path), remedy=error.remedy) from error
    return found


def provenance_in(data: bytes, form: ExportFormat) -> Provenance:
    """The provenance in the content of a file of that form.

    Raises:
        QueryError: there is none, or the file is damaged.
    """
    try:
        found = _extract(data, form)
    except (ValueError, KeyError, OSError, BadZipFile, pl.exceptions.PolarsError) as error:
        raise QueryError(f"the file is damaged as {form}", found=str(error)) from error
    if found is None:
        raise QueryError("the file has no provenance", remedy="write it with: headatlas export NAME -o FILE")
    return found


def _extract(data: bytes, form: ExportFormat) -> Provenance | None:
    if form == "parquet":
        return _from_metadata(pl.read_parquet_metadata(io.BytesIO(data)).get(METADATA_KEY))
    if form == "arrow":
        import pyarrow as pa

        metadata = pa.ipc.open_file(io.BytesIO(data)).schema.metadata or {}
        return _from_metadata(metadata.get(METADATA_KEY.encode()))
    if form == "xlsx":
        from openpyxl import load_workbook

        workbook = load_workbook(io.BytesIO(data), read_only=True)
        return Provenance.from_lines((workbook.properties.description or "").splitlines())
    text = data.decode()
    if form in ("json", "ndjson"):
        whole = json.loads(text if form == "json" else text.partition("\n")[0])
        return Provenance.from_json(whole["provenance"])
    if form == "markdown":
        return Provenance.from_lines(html.unescape(text).split("\n"))
    mark = COMMENT_MARKS[form]
    return Provenance.from_lines(line.removeprefix(mark) for line in text.split("\n") if line.startswith(mark))


def _from_metadata(text: str | bytes | None) -> Provenance | None:
    return None if text is None else Provenance.from_json(json.loads(text))
