"""Whether every byte of the catalogue's file is what was written, and its tables those of this version.

A DuckDB file is three headers of 4096 bytes and blocks of 256 KiB; each begins with a checksum of its other
bytes. DuckDB looks at those of the blocks that a query needs. Here all are looked at, also of blocks
that are free or hold an index, so that no byte is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import duckdb
import numpy as np

from store import catalogue
from store.tables import TABLES, Column, schema_sql

HEADER_BYTES = 4096
HEADERS = 3
BLOCK_BYTES = 2**18
SEED, FACTOR = np.uint64(5381), np.uint64(0xBF58476D1CE4E5B9)
"""Constants of the checksum: src/common/checksum.cpp of DuckDB."""

BLOCKS_AT_ONCE = 64

SCHEMA = (
    "SELECT 'table', table_name, '', '', comment FROM duckdb_tables() WHERE database_name = $database "
    "UNION ALL SELECT 'column', table_name, column_name, data_type || ' ' || is_nullable, comment "
    "FROM duckdb_columns() WHERE database_name = $database AND NOT internal "
    "UNION ALL SELECT 'constraint', table_name, '', constraint_text, '' FROM duckdb_constraints() "
    "WHERE database_name = $database "
    "UNION ALL SELECT 'view', view_name, '', sql, '' FROM duckdb_views() WHERE database_name = $database "
    "AND NOT internal"
)


def checksum(words: np.ndarray) -> np.uint64:
    """DuckDB's checksum of what follows the first word of a header or block, (word,) little-endian uint64."""
    return np.uint64(SEED ^ np.bitwise_xor.reduce(words[1:] * FACTOR))


def damaged_parts(path: Path) -> Iterator[str]:
    """Headers and blocks whose checksum is wrong, and a length that is none."""
    with path.open("rb") as stream:
        for number in range(HEADERS):
            header = stream.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                yield "the file ends within its headers"
                return
            if not _whole(header):
                yield f"header {number} has a wrong checksum"
        first = 0
        while data := stream.read(BLOCK_BYTES * BLOCKS_AT_ONCE):
            blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
            for number, block in enumerate(blocks, first):
                if len(block) < BLOCK_BYTES:
                    yield f"the file ends within block {number}"
                elif not _whole(block):
                    yield f"block {number} has a wrong checksum"
            first += len(blocks)


def _whole(data: bytes) -> bool:
    """Whether a header or block is as it was written; one that is all zeros never was."""
    words = np.frombuffer(data, "<u8")
    return bool(words[0] == checksum(words)) or not words.any()


def other_tables(path: Path, user_columns: Iterable[Column]) -> list[str]:
    """Names of tables whose columns, types, keys or comments are not those of this version.

    Args:
        path: the catalogue.
        user_columns: what any stored derivation says of a user's own columns of ``heads``.

    Raises:
        duckdb.Error: the file cannot be read.
    """
    connection = duckdb.connect(config=dict(catalogue.OFFLINE))
    try:
        connection.execute(schema_sql())
        expected = set(connection.execute(SCHEMA, {"database": "memory"}).fetchall())
        connection.execute(f"ATTACH {catalogue.quoted(path)} AS stored (READ_ONLY)")
        found = set(connection.execute(SCHEMA, {"database": "stored"}).fetchall())
    finally:
        connection.close()
    mine = {("column", "heads", item.name, f"{item.sql_type} true", item.comment) for item in user_columns}
    absent = {row[2] for row in mine} - {row[2] for row in found if row[1] == "heads"}
    return sorted(
        {str(row[1]) for row in (expected - found) | (found - expected - mine)} | ({"heads"} if absent else set())
    )


def models_without_a_row(path: Path) -> list[str]:
    """Names that some table has rows of and ``models`` does not."""
    union = " UNION ".join(f'SELECT model FROM "{table.name}"' for table in TABLES)
    with catalogue.reading(path) as connection:
        return [name for (name,) in connection.execute(f"({union}) EXCEPT SELECT model FROM models").fetchall()]
