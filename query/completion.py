"""Completion of SQL at the prompt: what the catalogue holds, ranked by where the cursor stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import duckdb
import polars as pl
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from query.statements import Token, open_literal, split, tokens

if TYPE_CHECKING:
    from query.atlas import Atlas

COLUMNS = """SELECT table_name, column_name, comment FROM duckdb_columns()
WHERE database_name = 'atlas' ORDER BY table_name, column_index"""
TABLES = "SELECT table_name, comment FROM duckdb_tables() WHERE database_name = 'atlas' ORDER BY ALL"
MACROS = """SELECT function_name, array_to_string(parameters, ', '), comment FROM duckdb_functions()
WHERE function_type = 'table_macro' AND NOT internal ORDER BY ALL"""
FUNCTIONS = """SELECT DISTINCT function_name FROM duckdb_functions()
WHERE function_type IN ('scalar', 'aggregate', 'window') AND regexp_full_match(function_name, '[a-z][a-z0-9_]*')
ORDER BY ALL"""
KEYWORDS = "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved' ORDER BY ALL"
MORE_KEYWORDS = (
    *("by", "current", "exclude", "explain", "filter", "first", "following", "last", "nulls", "over"),
    *("partition", "preceding", "range", "recursive", "replace", "rows", "unbounded"),
)
"""Words of reading statements that DuckDB does not reserve."""

NAMING = ("model", "lineage", "operator", "stack", "label", "kind", "method", "status", "reason")
"""Columns whose values are worth completing inside quotes."""

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words of one store by kind; those of tables, columns and macros with their meaning."""

    tables: dict[str, str]
    columns: dict[str, dict[str, str]]
    macros: dict[str, tuple[str, str]]
    functions: tuple[str, ...]
    keywords: tuple[str, ...]
    values: dict[str, tuple[str, ...]]


def vocabulary(atlas: Atlas) -> Vocabulary:
    """What can be named in a query on this store."""
    columns: dict[str, dict[str, str]] = {}
    for table, column, comment in atlas.sql(COLUMNS).rows():
        columns.setdefault(table, {})[column] = comment or ""
    values: dict[str, set[str]] = {}
    for table, named in columns.items():
        for column in NAMING:
            if column in named:
                found = atlas.sql(f'SELECT DISTINCT "{column}" FROM "{table}" WHERE "{column}" IS NOT NULL')
                values.setdefault(column, set()).update(found.to_series().cast(pl.String))
    keywords = {*atlas.sql(KEYWORDS).to_series(), *MORE_KEYWORDS}
    return Vocabulary(
        dict(atlas.sql(TABLES).rows()),
        columns,
        {name: (parameters, meaning or "") for name, parameters, meaning in atlas.sql(MACROS).rows()},
        tuple(atlas.sql(FUNCTIONS).to_series()),
        tuple(sorted(keywords)),
        {column: tuple(sorted(found)) for column, found in values.items()},
    )


class StoreCompleter(Completer):
    """Completes names of a store, functions and keywords of SQL, and commands that begin with a dot.

    Args:
        words: called for the vocabulary at each completion, so that it may change.
        commands: a command's possible arguments by its name.
    """

    def __init__(
        self, words: Callable[[], Vocabulary], commands: dict[str, Callable[[], Iterable[str]]] | None = None
    ) -> None:
        self._words = words
        self._commands = commands or {}

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Completions of the word, or the quoted value, before the cursor."""
        before = document.text_before_cursor
        if before.lstrip().startswith("."):
            yield from self._command(before.lstrip())
            return
        words, (_, statement) = self._words(), split(before)
        quoted = open_literal(statement)
        if quoted is not None:
            yield from _values(words, statement, quoted)
            return
        match = WORD.search(before)
        word = match[0] if match else ""
        pieces = tokens(statement[: len(statement) - len(word)] if word else statement)
        own = tokens(split(before)[1] + document.text_after_cursor)
        if pieces and pieces[-1].text.endswith("."):
            alias = pieces[-2].text.lower() if len(pieces) > 1 else ""
            table = _aliases(words, own).get(alias)
            yield from _matching(word, _columns(words, [table] if table else []).items())
        elif pieces and pieces[-1].text.lower() in ("from", "join"):
            yield from _sources(words, word)
        elif word or complete_event.completion_requested:
            yield from _anything(words, word, own)

    def _command(self, before: str) -> Iterator[Completion]:
        name, space, argument = before.partition(" ")
        found = self._commands.get(name, list)() if space else self._commands
        yield from _matching(argument.lstrip() if space else name, ((text, "") for text in found))


def _matching(word: str, candidates: Iterable[tuple[str, str]], kind: str = "") -> Iterator[Completion]:
    """Candidates (text, meaning) that begin with the word, whatever its case."""
    for text, meaning in candidates:
        if text.lower().startswith(word.lower()):
            yield Completion(text, -len(word), display_meta=meaning or kind)


def _sources(words: Vocabulary, word: str) -> Iterator[Completion]:
    """Tables and macros."""
    yield from _matching(word, words.tables.items())
    for name, (parameters, meaning) in words.macros.items():
        if name.startswith(word.lower()):
            text = name + ("(" if parameters else "()")
            yield Completion(text, -len(word), display=f"{name}({parameters})", display_meta=meaning)


def _anything(words: Vocabulary, word: str, own: list[Token]) -> Iterator[Completion]:
    """Columns first, of the statement's own tables where it names any; then functions, sources and keywords."""
    yield from _matching(word, _columns(words, _aliases(words, own).values()).items())
    yield from _sources(words, word)
    shouted = word.isupper()
    yield from _matching(word, ((name.upper() if shouted else name, "") for name in words.keywords), "keyword")
    if word:
        yield from _matching(word, ((name, "") for name in words.functions), "function")


def _columns(words: Vocabulary, named: Iterable[str]) -> dict[str, str]:
    """Columns of the tables named; of all, those of ``heads`` first, where none is."""
    columns: dict[str, str] = {}
    for table in dict.fromkeys(named) or sorted(words.columns, key=lambda name: name != "heads"):
        for column, meaning in words.columns[table].items():
            columns.setdefault(column, meaning)
    return columns


def _values(words: Vocabulary, statement: str, quoted: Token) -> Iterator[Completion]:
    """Values of the column that the literal is compared with; names of models where that is not plain."""
    before = [token.text.lower() for token in tokens(statement[: quoted.start])]
    compared = next((text for text in reversed(before) if text in words.values), "model")
    typed = quoted.text[1:]
    for value in words.values.get(compared, ()):
        if value.lower().startswith(typed.lower()):
            yield Completion(value.replace("'", "''"), -len(typed), display=value, display_meta=compared)


def _aliases(words: Vocabulary, own: list[Token]) -> dict[str, str]:
    """Tables of a statement by their own names and by the names it gives them."""
    found = {}
    for place, token in enumerate(own):
        table = token.text.lower()
        if table in words.tables and own[place - 1].text.lower() in ("from", "join", ","):
            found[table] = table
            after = [later for later in own[place + 1 : place + 3] if later.text.lower() != "as"][:1]
            if after and after[0].kind == duckdb.token_type.identifier:
                found[after[0].text.lower()] = table
    return found
