"""DuckDB connections that can read one store and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from stats.errors import QueryError, StoreError
from store.catalogue import OFFLINE, quoted

MEMORY_LIMIT = "4GB"
READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)


def connect(catalogue: Path) -> duckdb.DuckDBPyConnection:
    """A connection with the catalogue attached read-only as ``atlas`` and the macros installed.

    Files, network, extensions and settings are out of reach of whatever runs on it.
    """
    if not catalogue.exists():
        raise StoreError(
            "the store is empty",
            where=str(catalogue.parent),
            expected="at least one ingested model",
            found="no catalogue",
            remedy="ingest a model first: headatlas ingest MODEL",
        )
    connection = duckdb.connect(config=dict(OFFLINE))
    try:
        connection.execute(f"ATTACH {quoted(catalogue)} AS atlas (READ_ONLY)")
        connection.execute("USE atlas")
        connection.execute(files("query").joinpath("macros.sql").read_text(encoding="utf-8"))
        connection.execute(
            f"SET memory_limit = '{MEMORY_LIMIT}'; SET temp_directory = ''; "
            "SET enable_external_access = false; SET lock_configuration = true"
        )
    except duckdb.Error as error:
        connection.close()
        raise StoreError(
            "the catalogue cannot be opened",
            where=str(catalogue),
            found=_message(error),
            remedy="make it again from the arrays: headatlas rebuild",
        ) from error
    return connection


def run(connection: duckdb.DuckDBPyConnection, query: str, parameters: Mapping[str, Any] | None = None) -> pl.DataFrame:
    """Rows of one reading statement; parameters are ``$name`` in the text.

    Raises:
        QueryError: not exactly one statement, one that does not only read, or one DuckDB refuses.
    """
    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1 or statements[0].type not in READING:
            raise QueryError(
                "only a single reading statement can run",
                where=" ".join(query.split())[:120],
                expected="one SELECT, FROM, WITH, DESCRIBE, SUMMARIZE or EXPLAIN",
                found=", ".join(statement.type.name for statement in statements) or "no statement",
            )
        frame: pl.DataFrame = connection.sql(query, params=dict(parameters) if parameters else None).pl()
    except duckdb.Error as error:
        raise QueryError(
            "the query cannot be answered",
            where=" ".join(query.split())[:120],
            found=_message(error),
            remedy="list tables and columns with: headatlas schema [TABLE]",
        ) from error
    return frame


def rendered(query: str, parameters: Mapping[str, Any]) -> str:
    """The query with literals in place of its parameters, as a person would type it."""

    def literal(value: Any) -> str:
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(literal(item) for item in value) + "]"
        return "NULL" if value is None else str(value)

    return re.sub(r"\$(\w+)", lambda match: literal(parameters[match[1]]), query)


def _message(error: duckdb.Error) -> str:
    return str(error).strip()
