"""Questions kept as ``.sql`` files: those that come with the program, and a store's own in ``queries/``.

A file begins with its header, comments in this form and nothing else, and goes on with one reading statement::

    -- question: how many heads of each model nearly close
    -- param threshold DOUBLE 0..1 = 0.9: closure at or above which a head is strong
    -- param models VARCHAR[] of models.model = NULL: models to keep; all where NULL
    -- param lineage VARCHAR of models.lineage: the training run

A parameter has a name, a type, then if wanted the bounds of its values or the column of the store that they
are in, a default in JSON, without which it has to be given, and its meaning. The statement uses each as
``$name`` or ``:name``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from query.named_question import NamedQuestion, Parameter
from query.parameters import TYPES, checked, dollars, marks
from stats.errors import QueryError, nearest
from store.tables import TABLE_BY_NAME

if TYPE_CHECKING:
    import polars as pl

__all__ = ["NamedQuestion", "Parameter", "Questions", "parsed", "questions"]

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
QUESTION_LINE = re.compile(r"-- question: (?P<description>\S.*)")
PARAMETER_LINE = re.compile(
    r"-- param (?P<name>[A-Za-z_][A-Za-z0-9_]*) (?P<type>[A-Z]+(?:\[\])?)"
    r"(?: (?P<low>-?[0-9.]*?)\.\.(?P<high>-?[0-9.]*)| of (?P<table>[a-z_]+)\.(?P<column>[a-z_]+))?"
    r"(?: = (?P<default>\[.*?\]|\"[^\"]*\"|[^:\s]+))?: (?P<meaning>\S.*)"
)
BUILT_IN = "built in"
FOLDER = "queries"
PARAMETER_FORM = "-- param NAME TYPE [LOW..HIGH | of TABLE.COLUMN] [= DEFAULT]: MEANING"


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions that can be asked by name, and why some files of the store hold none."""

    by_name: dict[str, NamedQuestion]
    faults: dict[str, QueryError]

    def named(self, name: str) -> NamedQuestion:
        """One question.

        Raises:
            QueryError: no question of that name, or a file of that name with a fault.
        """
        if name in self.faults:
            raise self.faults[name]
        if name not in self.by_name:
            raise QueryError(
                f"no question named {name[:80]!r}",
                expected="one of " + ", ".join(self.by_name),
                found=name[:80],
                remedy=nearest(name[:80], self.by_name) or "list them with: headatlas ask",
            )
        return self.by_name[name]

    def frame(self) -> pl.DataFrame:
        """A row per question: name, description, parameters with their defaults, origin."""
        import polars as pl

        rows = [(each.name, each.description, each.signature(), each.origin) for each in self.by_name.values()]
        columns = ("name", "description", "parameters", "origin")
        return pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String), orient="row")


def questions(store: Path | None = None) -> Questions:
    """The questions of the program and, with ``store``, those in its directory ``queries``.

    A file with a fault takes no other question away. One with the name of a question of the program is such
    a fault: the program's stays what it is, and asking for that name says so.
    """
    found = dict(_built_in())
    faults = {}
    for path in sorted((store / FOLDER).glob("*.sql")) if store is not None else ():
        name = path.name.removesuffix(".sql")
        try:
            if name in found:
                raise QueryError(
                    f"the name {name!r} belongs to a question of the program",
                    where=str(path),
                    remedy="rename the file",
                )
            found[name] = parsed(name, _text(path), str(path), str(path))
        except QueryError as error:
            faults[name] = error
    return Questions(found, faults)


@cache
def _built_in() -> dict[str, NamedQuestion]:
    """The questions of the program by name."""
    found = {}
    for file in sorted(files("query").joinpath("named").iterdir(), key=lambda each: each.name):
        if file.name.endswith(".sql"):
            name = file.name.removesuffix(".sql")
            found[name] = parsed(name, file.read_text(encoding="utf-8"), f"query/named/{file.name}", BUILT_IN)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise QueryError("the file is not text", where=str(path), expected="UTF-8") from error
    except OSError as error:
        raise QueryError("the file cannot be read", where=str(path), found=error.strerror or str(error)) from error


def parsed(name: str, text: str, where: str, origin: str) -> NamedQuestion:
    """A question from the text of its file.

    Raises:
        QueryError: a name or a header of another form, or a statement that does not use what is declared.
    """
    if not NAME.fullmatch(name):
        raise QueryError(
            "a name that no question can have",
            where=where,
            expected="small letters, digits, - and _, 64 at most, before .sql",
            found=name[:80],
        )
    lines = text.splitlines()
    first = QUESTION_LINE.fullmatch(lines[0].rstrip()) if lines else None
    if first is None:
        raise _header_fault(where, 1, "-- question: DESCRIPTION", lines[0] if lines else "an empty file")
    parameters: dict[str, Parameter] = {}
    length = 1
    for length, line in enumerate(lines[1:], 2):
        if not line.startswith("--"):
            length -= 1
            break
        parameter = _parameter(line.rstrip(), where, length)
        if parameter.name.lower() in map(str.lower, parameters):
            raise _header_fault(where, length, "every parameter once", line)
        parameters[parameter.name] = parameter
    sql = dollars("\n".join(lines[length:])).strip().removesuffix(";").rstrip()
    if not sql:
        raise _header_fault(where, length + 1, "a statement behind the header", "nothing")
    _check_use(sql, parameters, where, "\n".join(lines[length:]), length)
    return NamedQuestion(name, first["description"], tuple(parameters.values()), sql, origin)


def _check_use(sql: str, parameters: Mapping[str, Parameter], where: str, below: str, header: int) -> None:
    """Refuse a statement that uses a parameter not declared, or does not use one that is."""
    used = {mark.name for mark in marks(sql)}
    for mark in marks(below):
        if mark.name not in parameters:
            line = header + 1 + below.encode()[: mark.start].count(b"\n")
            raise QueryError(
                f"a parameter that the header does not declare: {mark.name}",
                where=f"{where}, line {line}",
                expected=PARAMETER_FORM,
                remedy=nearest(mark.name, parameters),
            )
    for number, name in enumerate(parameters, 2):
        if name not in used:
            raise QueryError(
                f"a parameter that the statement does not use: {name}",
                where=f"{where}, line {number}",
                expected=f"${name} in the statement",
            )


def _parameter(line: str, where: str, number: int) -> Parameter:
    match = PARAMETER_LINE.fullmatch(line)
    if match is None or match["type"] not in TYPES:
        expected = PARAMETER_FORM if match is None else "a type among " + ", ".join(TYPES)
        raise _header_fault(where, number, expected, line)
    name, sql_type = match["name"], match["type"]
    numeric = sql_type.startswith(("DOUBLE", "BIGINT"))
    try:
        low, high = (float(bound) if bound else None for bound in (match["low"], match["high"]))
    except ValueError as error:
        raise _header_fault(where, number, "numbers as bounds", line) from error
    if (low, high) != (None, None) and not numeric:
        raise _header_fault(where, number, f"no bounds for {sql_type}", line)
    column = None
    if match["table"]:
        column = (match["table"], match["column"])
        table = TABLE_BY_NAME.get(column[0])
        if table is None or column[1] not in {each.name for each in table.columns}:
            raise _header_fault(where, number, "a column of the catalogue behind of, such as models.model", line)
    required = Parameter(name, sql_type, match["meaning"], True, None, (low, high), column)
    if match["default"] is None:
        return required
    try:
        default = None if match["default"] == "NULL" else json.loads(match["default"])
        if default is not None:
            default = required.value(checked(default, sql_type, name), name)
    except (ValueError, QueryError) as error:
        raise _header_fault(where, number, f"a default that is {sql_type}, in JSON, or NULL", line) from error
    return replace(required, required=False, default=default)


def _header_fault(where: str, line: int, expected: str, found: str) -> QueryError:
    return QueryError(
        "the header of a question cannot be read", where=f"{where}, line {line}", expected=expected, found=found[:120]
    )
