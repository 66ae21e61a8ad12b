"""Parameters of SQL: where they stand in a text, and values for them from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from stats.errors import QueryError, nearest

TYPES = ("DOUBLE", "BIGINT", "BOOLEAN", "VARCHAR", "DOUBLE[]", "BIGINT[]", "VARCHAR[]")
"""SQL types that a value can be given."""

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
VALUE_KEYWORDS = frozenset(("null", "true", "false", "end"))
"""Keywords that end a value, so that a colon behind them begins no parameter."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A parameter in a text: its name, and the bytes from ``start`` to ``end`` of the UTF-8 form."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Token:
    start: int
    end: int
    text: str
    kind: str


def _tokens(encoded: bytes) -> list[_Token]:
    """Tokens by DuckDB's own tokenizer, comments left out."""
    found = duckdb.tokenize(encoded.decode())
    starts = [start for start, _ in found] + [len(encoded)]
    tokens = []
    for (start, kind), following in zip(found, starts[1:], strict=True):
        text = encoded[start:following].decode(errors="replace").rstrip()
        if kind.name != "comment":
            tokens.append(_Token(start, start + len(text.encode()), text, kind.name))
    return tokens


def _ends_value(token: _Token) -> bool:
    if token.kind == "operator":
        return token.text in (")", "]", "}", "?")
    return token.kind != "keyword" or token.text.lower() in VALUE_KEYWORDS


def marks(text: str) -> Iterator[Mark]:
    """Every ``$name`` and ``:name`` of a text, in order.

    A colon begins a parameter where a name follows it at once and a value can stand. It does not behind a
    value, where it is a slice, a key of a struct, an alias or the body of a lambda, nor at the beginning of a
    subscript, ``x[:n]``, nor directly behind a keyword. ``$name`` is a parameter there too.

    Raises:
        QueryError: text that is not Unicode.
    """
    tokens = _tokens(_utf8(text))
    subscript = [token.text == "[" and i > 0 and _ends_value(tokens[i - 1]) for i, token in enumerate(tokens)]
    for i in range(len(tokens) - 1):
        sign, name = tokens[i], tokens[i + 1]
        if sign.kind != "operator" or name.kind not in ("identifier", "keyword"):
            continue
        if sign.text == "$":
            quoted = name.text.startswith('"')
            yield Mark(name.text[1:-1].replace('""', '"') if quoted else name.text, sign.start, name.end)
        elif sign.text == ":" and name.start == sign.end and name.text.isidentifier():
            before = tokens[i - 1] if i else None
            beside = before is not None and before.kind == "keyword" and before.end == sign.start
            if before is None or not (beside or subscript[i - 1] or _ends_value(before)):
                yield Mark(name.text, sign.start, name.end)


def dollars(text: str) -> str:
    """The text with ``$name`` for every ``:name``, as DuckDB reads it; every place stays where it was."""
    encoded = bytearray(_utf8(text))
    for mark in marks(text):
        encoded[mark.start : mark.start + 1] = b"$"
    return encoded.decode()


def rendered(text: str, parameters: Mapping[str, Any]) -> str:
    """The query with literals in place of its parameters, as a person would type it.

    Raises:
        QueryError: a value is missing, or none of the query's.
    """
    encoded = _utf8(text)
    found = list(marks(text))
    matched = match_values({mark.name for mark in found}, parameters)
    pieces, at = [], 0
    for mark in found:
        pieces += [encoded[at : mark.start].decode(), literal(matched[mark.name])]
        at = mark.end
    return "".join(pieces) + encoded[at:].decode()


def literal(value: Any) -> str:
    """A value as SQL text."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"'{value}'::DOUBLE"
    if value is None or isinstance(value, bool):
        return str(value).upper().replace("NONE", "NULL")
    return f"({value!r})" if isinstance(value, int | float) and value < 0 else str(value)


def match_values(names: Iterable[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every parameter of a query; capital and small letters are the same, as in SQL.

    Raises:
        QueryError: a parameter without a value, or a value without a parameter.
    """
    wanted = {name.lower(): name for name in sorted(names)}
    if any(name.isdecimal() for name in wanted):
        raise QueryError("a parameter without a name", found="? or $1", expected="$name or :name")
    given = {name.lower(): value for name, value in parameters.items()}
    for name in parameters:
        if name.lower() not in wanted:
            raise QueryError(
                f"the query has no parameter named {name!r}",
                expected="one of " + ", ".join(f":{known}" for known in wanted.values()) if wanted else "no value",
                found=name,
                remedy=nearest(name, wanted.values()),
            )
    missing = [known for name, known in wanted.items() if name not in given]
    if missing:
        raise QueryError(
            "a parameter has no value" if len(missing) == 1 else f"{len(missing)} parameters have no value",
            found=", ".join(f":{name}" for name in missing),
            remedy=f"give one with --set {missing[0]}=VALUE; a space behind a colon makes it no parameter",
        )
    return {name: given[name.lower()] for name in names}


def split(text: str) -> tuple[str, str]:
    """A name and the text of its value from ``NAME=VALUE``.

    Raises:
        QueryError: no equals sign, or nothing before it.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise QueryError("a value that cannot be read", where=f"--set {text[:80]}", expected="NAME=VALUE")
    return name, value


def assignment(text: str) -> tuple[str, Any]:
    """A name and its value from ``NAME=VALUE`` or ``NAME:TYPE=VALUE``.

    Without a type: numbers, ``true``, ``false`` and ``null`` as what they are, a list in JSON as a list,
    everything else as text.

    Raises:
        QueryError: another form, an unknown type, or a value that is not of it.
    """
    left, value = split(text)
    name, colon, sql_type = left.partition(":")
    if not name.isidentifier() or (colon and sql_type.upper() not in TYPES):
        raise QueryError(
            "a value that cannot be read",
            where=f"--set {text[:80]}",
            expected="NAME=VALUE, or NAME:TYPE=VALUE with a type among " + ", ".join(TYPES),
        )
    if colon:
        return name, typed(value, sql_type.upper(), f"--set {name}")
    return name, untyped(value)


def untyped(text: str) -> Any:
    """A value from its text alone."""
    if INTEGER.fullmatch(text) and len(text) < 38:
        return int(text)
    if NUMBER.fullmatch(text):
        return float(text)
    if text.lower() in ("true", "false", "null"):
        return json.loads(text.lower())
    if text.startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if all(item is None or isinstance(item, bool | int | float | str) for item in found):
            return found
    return text


def typed(text: str, sql_type: str, where: str) -> Any:
    """A value of one of ``TYPES`` from its text; lists are JSON, or one element as it is.

    Raises:
        QueryError: text that is no such value.
    """
    if sql_type.endswith("[]"):
        if not text.startswith("["):
            return [typed(text, sql_type[:-2], where)]
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _unlike(where, sql_type, text) from error
        return checked(found, sql_type, where)
    if sql_type == "VARCHAR":
        return checked(text, sql_type, where)
    if sql_type == "BOOLEAN" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if sql_type == "BIGINT" and INTEGER.fullmatch(text) and len(text) < 38:
        return checked(int(text), sql_type, where)
    if sql_type == "DOUBLE" and NUMBER.fullmatch(text):
        return checked(float(text), sql_type, where)
    raise _unlike(where, sql_type, text)


def checked(value: Any, sql_type: str, where: str) -> Any:
    """A Python value as one of ``TYPES``.

    Raises:
        QueryError: a value of another kind, or too large for it.
    """
    if sql_type.endswith("[]"):
        if isinstance(value, str) or not isinstance(value, Iterable):
            value = [value]
        return [checked(item, sql_type[:-2], where) for item in value]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if sql_type == "DOUBLE" and number:
        try:
            found = float(value)
        except OverflowError:
            found = float("inf")
        if found - found == 0:
            return found
    elif (sql_type == "BIGINT" and number and isinstance(value, int) and -(2**63) <= value < 2**63) or (
        sql_type == "BOOLEAN" and isinstance(value, bool)
    ):
        return value
    elif sql_type == "VARCHAR" and isinstance(value, str):
        _utf8(value, where)
        return value
    raise _unlike(where, sql_type, str(value))


def _unlike(where: str, sql_type: str, found: str) -> QueryError:
    expected = {
        "DOUBLE": "a number",
        "BIGINT": "a whole number of 64 bits",
        "BOOLEAN": "true or false",
        "VARCHAR": "text",
    }[sql_type.removesuffix("[]")]
    if sql_type.endswith("[]"):
        expected = f'{expected}, or a list of them in JSON, ["a", "b"] or [1, 2]'
    return QueryError("a value of another type", where=where, expected=f"{sql_type}: {expected}", found=found[:80])


def _utf8(text: str, where: str | None = None) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise QueryError(
            "the text is not Unicode", where=where, expected="UTF-8", found=ascii(text[error.start : error.end])
        ) from error
