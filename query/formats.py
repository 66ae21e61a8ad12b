"""Names of the forms that rows are written in; nothing is imported, so that the command line can start with it."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["table", "csv", "json", "ndjson", "parquet", "arrow", "markdown", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)
BINARY = ("parquet", "arrow", "xlsx")

ExportFormat = Format | Literal["xlsx"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = (*FORMATS, "xlsx")

ENDINGS: dict[str, ExportFormat] = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".json": "json",
    ".ndjson": "ndjson",
    ".jsonl": "ndjson",
    ".md": "markdown",
    ".tex": "latex",
    ".xlsx": "xlsx",
}
"""Form of an exported file by the ending of its name."""
