"""The DuckDB catalogue: changed in a copy, published by one rename.

DuckDB lets a writer shut out every other process. Writing to a copy means that readers keep the
file they opened and new ones see the new file; nobody waits, and a crash leaves the old catalogue.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import polars as pl

from stats.errors import StoreError
from store.tables import TABLE_BY_NAME, TABLES, Column, schema_sql
from store.whole_files import written_whole

FILE_NAME = "catalog.duckdb"
STORAGE_VERSION = "v1.2.0"
"""Readable by DuckDB from that version on."""

OFFLINE = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}


def quoted(path: Path) -> str:
    """A path as an SQL string literal."""
    return "'" + str(path).replace("'", "''") + "'"


@contextmanager
def reading(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A read-only connection to the catalogue file itself, which has to be of this version."""
    try:
        connection = duckdb.connect(str(path), read_only=True, config={**OFFLINE, "enable_external_access": False})
    except duckdb.Error as error:
        raise StoreError(
            "the catalogue cannot be opened",
            where=str(path),
            expected="a catalogue written by this program",
            found=str(error).splitlines()[0],
            remedy="make it again from the arrays: headatlas rebuild",
        ) from error
    try:
        check_version(connection, path)
        yield connection
    except duckdb.Error as error:
        raise StoreError(
            "the catalogue cannot be read",
            where=str(path),
            expected="the tables that this program writes",
            found=str(error).splitlines()[0],
            remedy="make it again from the arrays: headatlas rebuild",
        ) from error
    finally:
        connection.close()


def check_version(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Refuse a catalogue that lacks tables or columns of this version; ``connection`` has it in use.

    Raises:
        StoreError: it was made by another version of this program.
    """
    rows = connection.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = current_database() AND NOT internal"
    ).fetchall()
    have = set(rows)
    tables = {table for table, _ in rows}
    lacking = [
        f"{table.name}.{column.name}" if table.name in tables else table.name
        for table in TABLES
        for column in table.columns
        if (table.name, column.name) not in have
    ]
    if lacking:
        named = list(dict.fromkeys(lacking))
        raise StoreError(
            "the catalogue was made by another version of this program",
            where=str(path),
            expected="the tables and columns of this version",
            found="none of " + ", ".join(named[:5]) + (", ..." if len(named) > 5 else ""),
            remedy="make it again from the arrays: headatlas rebuild",
        )


def change(path: Path, action: Callable[[duckdb.DuckDBPyConnection], None], threads: int | None = None) -> None:
    """Apply ``action`` in one transaction to a copy of the catalogue and publish the copy.

    The caller holds the store's write lock. A missing catalogue starts empty, with its schema. With one
    thread, the same changes give the same bytes.
    """
    try:
        with written_whole(path, durable=True) as copy:
            _change_copy(path, copy, action, threads)
    except duckdb.Error as error:
        raise StoreError(
            "the catalogue cannot be written",
            where=str(path),
            found=str(error).splitlines()[0],
            remedy="free space or fix permissions, then try again; nothing was changed",
        ) from error


def _change_copy(
    path: Path, copy: Path, action: Callable[[duckdb.DuckDBPyConnection], None], threads: int | None
) -> None:
    if path.exists():
        shutil.copyfile(path, copy)
    connection = duckdb.connect(config={**OFFLINE, **({"threads": threads} if threads else {})})
    try:
        connection.execute(f"ATTACH {quoted(copy)} AS catalogue (STORAGE_VERSION '{STORAGE_VERSION}')")
        connection.execute("USE catalogue")
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        connection.begin()
        if not path.exists():
            connection.execute(schema_sql())
        action(connection)
        connection.commit()
        connection.execute("CHECKPOINT catalogue")
    finally:
        connection.close()
        copy.with_name(copy.name + ".wal").unlink(missing_ok=True)


def insert(connection: duckdb.DuckDBPyConnection, rows: dict[str, pl.DataFrame]) -> None:
    """Insert frames into the tables they are named after."""
    for table, frame in rows.items():
        connection.register("incoming", frame)
        connection.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM incoming')
        connection.unregister("incoming")


def delete(connection: duckdb.DuckDBPyConnection, model: str) -> None:
    """Remove every row of a model."""
    for table in TABLES:
        connection.execute(f'DELETE FROM "{table.name}" WHERE model = ?', [model])


def add_user_columns(connection: duckdb.DuckDBPyConnection, columns: Iterable[Column]) -> None:
    """Give ``heads`` the columns of a user's own statistics that it lacks."""
    for column in columns:
        connection.execute(f'ALTER TABLE heads ADD COLUMN IF NOT EXISTS "{column.name}" {column.sql_type}')
        connection.execute(f'ALTER TABLE heads ALTER COLUMN "{column.name}" TYPE {column.sql_type}')
        comment = column.comment.replace("'", "''")
        connection.execute(f"COMMENT ON COLUMN heads.\"{column.name}\" IS '{comment}'")


def drop_unused_columns(connection: duckdb.DuckDBPyConnection, prefix: str) -> None:
    """Take columns out of ``heads`` that are neither declared nor derived for any model."""
    declared = {column.name for column in TABLE_BY_NAME["heads"].columns}
    kinds = {kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM derivations").fetchall()}
    for (name,) in connection.execute("SELECT column_name FROM (DESCRIBE heads)").fetchall():
        if name not in declared and prefix + name not in kinds:
            quoted_name = name.replace('"', '""')
            connection.execute(f'ALTER TABLE heads DROP COLUMN "{quoted_name}"')
