"""Where rows come from: the question, the models it could read by content, the version and the day."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import polars as pl

from store.version import tool_version

if TYPE_CHECKING:
    from query.atlas import Atlas


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a table, a figure or a page is made from.

    ``models`` maps a model's name to the content hash of its values and outputs.
    """

    query: str
    models: dict[str, str]
    version: str
    created: str

    def lines(self) -> list[str]:
        """One fact a line, as comments and metadata of files have them."""
        return [
            f"Headatlas {self.version}, {self.created}",
            f"query: {' '.join(self.query.split())}",
            *(f"model: {name} {content}" for name, content in self.models.items()),
        ]


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
