"""Where statements end and what the cursor stands in, by DuckDB's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of SQL: its kind, its text without the space behind it, and the character it begins at."""

    kind: duckdb.token_type
    text: str
    start: int


def tokens(text: str) -> list[Token]:
    """The pieces of SQL, comments left out. A literal that is not closed goes to the end of the text."""
    encoded = text.encode()
    starts = [(len(encoded[:offset].decode()), kind) for offset, kind in duckdb.tokenize(text)]
    ends = [*(start for start, _ in starts), len(text)][1:]
    return [
        Token(kind, text[start:end] if kind == duckdb.token_type.string_const else text[start:end].rstrip(), start)
        for (start, kind), end in zip(starts, ends, strict=True)
        if kind != duckdb.token_type.comment
    ]


def split(text: str) -> tuple[list[str], str]:
    """Statements that a semicolon ends, without it, and what is left after the last one."""
    finished, begin = [], 0
    for token in tokens(text):
        if token.kind == duckdb.token_type.operator and token.text == ";":
            statement = text[begin : token.start]
            if tokens(statement):
                finished.append(statement.strip())
            begin = token.start + 1
    rest = text[begin:].strip()
    return finished, rest if tokens(rest) else ""


def open_literal(text: str) -> Token | None:
    """The string literal at the end of the text whose closing quote is still to come."""
    for token in tokens(text)[-1:]:
        if token.kind == duckdb.token_type.string_const and token.text[0] == "'" and token.text.count("'") % 2:
            return token
    return None
