"""DuckDB connections that can read one store and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from query.interruption import stoppable
from query.parameters import dollars, match_values
from query.sql_errors import message, refused
from stats.errors import QueryError, StoreError
from store.catalogue import OFFLINE, check_version, quoted

MEMORY_LIMIT = "4GB"
NO_FRAME = ("INTERVAL", "UNION", "BIGNUM", "VARIANT")
"""Types that Polars has no counterpart of."""
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
        connection.execute(
            f"SET memory_limit = '{MEMORY_LIMIT}'; SET temp_directory = ''; SET enable_external_access = false"
        )
        check_version(connection, catalogue)
        connection.execute(files("query").joinpath("macros.sql").read_text(encoding="utf-8"))
        connection.execute("SET errors_as_json = true; SET lock_configuration = true")
    except StoreError:
        connection.close()
        raise
    except duckdb.Error as error:
        connection.close()
        raise StoreError(
            "the catalogue cannot be opened",
            where=str(catalogue),
            found=message(error),
            remedy="make it again from the arrays: headatlas rebuild",
        ) from error
    return connection


def run(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    parameters: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> pl.DataFrame:
    """Rows of one reading statement; parameters are ``$name`` or ``:name`` in the text.

    Raises:
        QueryError: not exactly one statement, one that does not only read, a parameter too few or too many,
            a statement that DuckDB refuses, or one that was stopped after ``timeout`` seconds.
    """
    text = dollars(query)
    try:
        statements = connection.extract_statements(text)
        if len(statements) != 1 or statements[0].type not in READING:
            raise QueryError(
                "only a single reading statement can run",
                where=" ".join(query.split())[:120],
                expected="one SELECT, FROM, WITH, DESCRIBE, SUMMARIZE or EXPLAIN",
                found=", ".join(statement.type.name for statement in statements) or "no statement",
            )
        values = match_values(statements[0].named_parameters, parameters or {})
        return stoppable(connection, lambda: _frame(_relation(connection, text, values)), timeout)
    except duckdb.InterruptException as error:
        raise QueryError("the query was interrupted", where=" ".join(query.split())[:120]) from error
    except duckdb.Error as error:
        raise refused(connection, query, error) from error


def _relation(connection: duckdb.DuckDBPyConnection, text: str, values: Mapping[str, Any]) -> duckdb.DuckDBPyRelation:
    """A statement bound to its values; errors have their parts, which those of ``connection.sql`` lack."""
    try:
        return connection.sql(text, params=values or None)
    except (duckdb.BinderException, duckdb.CatalogException):
        connection.execute(text, values or None)
        raise


def _frame(relation: duckdb.DuckDBPyRelation) -> pl.DataFrame:
    """Rows of a relation, which runs once; equal names are numbered."""
    for name, kind in zip(relation.columns, relation.types, strict=True):
        if any(part in str(kind) for part in NO_FRAME):
            raise QueryError(
                "a column of a type that has no place in the rows",
                found=f"{name}: {kind}",
                remedy="convert it, such as with ::VARCHAR",
            )
    if len(set(relation.columns)) < len(relation.columns):
        frame: pl.DataFrame = relation.pl()
        return frame
    return pl.DataFrame(relation.materialize())
