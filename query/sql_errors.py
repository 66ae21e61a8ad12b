"""What DuckDB refuses, told with the place in the query and the known names closest to a mistaken one.

Connections have ``errors_as_json`` set: an error is a JSON object with its kind, the bytes of the query that
it is about and, for a name that is not there, the name. Nothing is read off an error's wording.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import duckdb

from stats.errors import QueryError, nearest

COLUMNS = """SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = 'atlas'
ORDER BY table_name, column_index"""
MACROS = """SELECT function_name, array_to_string(parameters, ', ') FROM duckdb_functions()
WHERE function_type = 'table_macro' AND NOT internal ORDER BY ALL"""
FUNCTIONS = "SELECT DISTINCT function_name FROM duckdb_functions() WHERE regexp_full_match(function_name, '[a-z_0-9]+')"
SCHEMA_REMEDY = "list tables and columns with: headatlas schema [TABLE]"


def facts(error: duckdb.Error) -> dict[str, str]:
    """The parts of an error; ``exception_message`` alone where DuckDB gives no parts."""
    text = str(error).strip()
    try:
        found = json.loads(text[text.index("{") :])
    except ValueError:
        return {"exception_message": text}
    whole = isinstance(found, dict) and {"exception_type", "exception_message"} <= found.keys()
    return {name: str(part) for name, part in found.items()} if whole else {"exception_message": text}


def message(error: duckdb.Error) -> str:
    """An error in words."""
    return facts(error)["exception_message"].strip()


def refused(connection: duckdb.DuckDBPyConnection, query: str, error: duckdb.Error) -> QueryError:
    """The error to raise for a query that DuckDB refuses."""
    parts = facts(error)
    place = _place(query, parts)
    known = _Catalogue(connection)
    name = parts.get("name") or (place[1] if isinstance(error, duckdb.BinderException) and place else "")
    remedy = known.remedy(name.replace('"', "").split("."), parts, query) if name else None
    words = parts["exception_message"].strip()
    in_macro = any(macro in query.lower() for macro in known.macros)
    shown = place is not None and (not in_macro or place[1].lower() == name.lower() != "" or "error_subtype" in parts)
    return QueryError(
        "the query cannot be answered",
        where=_pointed(query, *place) if place and shown else " ".join(query.split())[:120],
        found=words.split("\n", 1)[0] if remedy else words.replace("\n", "\n    "),
        remedy=remedy or SCHEMA_REMEDY,
    )


def _place(query: str, parts: dict[str, str]) -> tuple[int, str] | None:
    """Where the error is, in characters, and the text there."""
    encoded = query.encode(errors="replace")
    try:
        start, length = json.loads(parts["location"])
    except (KeyError, ValueError, TypeError):
        return None
    if not 0 <= start <= len(encoded):
        return None
    return len(encoded[:start].decode(errors="replace")), encoded[start : start + length].decode(errors="replace")


def _pointed(query: str, at: int, text: str) -> str:
    """The line of a place with a mark under it."""
    line = query.count("\n", 0, at) + 1
    begin = query.rfind("\n", 0, at) + 1
    column = at - begin
    whole = query[begin:].split("\n", 1)[0].replace("\t", " ")
    cut = max(0, column - 60)
    shown = whole[cut : cut + 110]
    width = max(1, min(len(text.split("\n", 1)[0]), len(shown) - (column - cut)))
    return f"line {line}, column {column + 1}\n    {shown}\n    {' ' * (column - cut)}{'^' * width}"


class _Catalogue:
    """Names that a query can use."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self.columns: dict[str, list[str]] = {}
        for table, column in connection.execute(COLUMNS).fetchall():
            self.columns.setdefault(table, []).append(column)
        self.macros: dict[str, str] = dict(connection.execute(MACROS).fetchall())

    def remedy(self, path: list[str], parts: dict[str, Any], query: str) -> str | None:
        """What to write instead of a name that is not there, if that can be told."""
        name = path[-1]
        kind = parts.get("type", "")
        if kind == "Table Function" and name.lower() in self.macros:
            return f"write {name}({self.macros[name.lower()]})"
        if kind:
            functions = "Function" in kind
            known: Iterable[str] = [*self.columns, *self.macros]
            if functions and kind != "Table Function":
                known = [row[0] for row in self._connection.execute(FUNCTIONS).fetchall()]
            return nearest(name, known)
        if len(path) > 1 and self._is_column(name):
            return nearest(path[-2], self.columns)
        words = {word.lower() for word in query.replace(",", " ").replace(".", " ").split()}
        here = [column for table, columns in self.columns.items() if table in words for column in columns]
        everywhere = [column for columns in self.columns.values() for column in columns]
        if self._is_column(name) and name.lower() not in here:
            return f"{name} is a column of " + ", ".join(
                table for table, columns in self.columns.items() if name.lower() in columns
            )
        bindable = [column for column in parts.get("candidates", "").split(",") if column]
        return None if self._is_column(name) else nearest(name, [*here, *bindable]) or nearest(name, everywhere)

    def _is_column(self, name: str) -> bool:
        return any(name.lower() in columns for columns in self.columns.values())
