"""Frames with the columns and types of the catalogue's tables."""

from __future__ import annotations

from typing import Any

import polars as pl

from store.tables import TABLE_BY_NAME

POLARS_TYPES: dict[str, Any] = {
    "VARCHAR": pl.String,
    "INTEGER": pl.Int32,
    "BIGINT": pl.Int64,
    "DOUBLE": pl.Float64,
    "BOOLEAN": pl.Boolean,
    "TIMESTAMP": pl.Datetime("us"),
    "DOUBLE[]": pl.List(pl.Float64),
}


def table_frame(table: str, values: dict[str, Any]) -> pl.DataFrame:
    """A frame with the table's columns and types; NaN becomes NULL."""
    schema = {column.name: POLARS_TYPES[column.sql_type] for column in TABLE_BY_NAME[table].columns}
    frame = pl.DataFrame({name: values[name] for name in schema}, schema=schema, strict=False)
    return frame.with_columns(pl.col(pl.Float64).fill_nan(None))
