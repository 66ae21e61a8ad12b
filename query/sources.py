"""What can be exported by name, and the rows that a request gives with the query that gives them again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from query import latex
from query.named import questions as named_questions
from query.paper_tables import PAPER_TABLES, Choice
from query.questions import Question
from query.typesetting import Table
from stats.errors import QueryError, nearest
from store.tables import TABLE_BY_NAME

if TYPE_CHECKING:
    from query.atlas import Atlas
    from query.named import NamedQuestion

COMMAND = "headatlas export "
STRONG = 0.9
MACRO_CALL = re.compile(r"\s*(\w+)\s*\(.*\)\s*", re.DOTALL)
MACROS = """SELECT function_name, array_to_string(parameters, ', '), comment
FROM duckdb_functions() WHERE function_type = 'table_macro' AND NOT internal ORDER BY function_name"""
TABLES = "SELECT table_name, comment FROM duckdb_tables() WHERE database_name = 'atlas' ORDER BY table_name"


@dataclass(frozen=True, slots=True)
class Request:
    """What to export: a name, or SQL with values for its ``$name`` parameters.

    ``models`` (or training runs) and ``operator`` keep some rows of a named table, and are parameters of a
    question of ``headatlas ask``, as ``threshold`` is. In the tables of a paper that is the closure of a
    strong head, ``STRONG`` when None.
    """

    name: str = ""
    sql: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    operator: str | None = None
    threshold: float | None = None

    def command(self) -> str:
        """The command that asks for a paper table, every setting in it."""
        words = [self.name, *self.models, "--operator", self.operator or "raw", "--threshold", str(self.strong)]
        return COMMAND + shlex.join(words)

    @property
    def strong(self) -> float:
        """The threshold of a paper table."""
        return STRONG if self.threshold is None else self.threshold

    @classmethod
    def from_query(cls, text: str) -> Request:
        """What gives the rows of a provenance's query again.

        Raises:
            ValueError: a command of another form.
        """
        if not text.startswith(COMMAND):
            return cls(sql=text)
        name, *models, _, operator, _, threshold = shlex.split(text.removeprefix(COMMAND))
        return cls(name, models=tuple(models), operator=operator, threshold=float(threshold))


def listing(atlas: Atlas) -> pl.DataFrame:
    """Everything that can be exported by name: ``name``, ``kind`` and ``meaning``."""
    rows = [(name, "paper", meaning) for name, (meaning, _) in PAPER_TABLES.items()]
    rows += [(name, "table", meaning) for name, meaning in atlas.sql(TABLES).rows()]
    rows += [(f"{name}({parameters})", "macro", meaning) for name, parameters, meaning in atlas.sql(MACROS).rows()]
    rows += [(each.name, "question", each.description) for each in named_questions(atlas.path).by_name.values()]
    return pl.DataFrame(rows, schema=["name", "kind", "meaning"], orient="row")


def table(atlas: Atlas, request: Request) -> Table:
    """The rows of a request with the query that gives them again.

    Raises:
        QueryError: neither or both of a name and SQL, an unknown name, a value out of range, rows that
            cannot be chosen as asked, or a query that cannot be answered.
    """
    if bool(request.name) == bool(request.sql):
        raise QueryError("an export needs a name or a query", remedy="see what there is with: headatlas export")
    if request.sql:
        if request.models or request.operator or request.threshold is not None:
            raise QueryError("a query chooses its own rows", remedy="put models, operator and threshold into the query")
        return _of_sql(atlas, "query", "Rows of a query.", Question(request.sql, request.parameters))
    asked = named_questions(atlas.path)
    if request.name in asked.by_name or request.name in asked.faults:
        return _of_question(atlas, request, asked.named(request.name))
    if request.parameters:
        raise QueryError(f"{request.name} has no parameters", remedy="they go with --query and with questions")
    if request.name in PAPER_TABLES:
        if not 0 <= request.strong <= 1:
            raise QueryError("a closure threshold out of range", expected="0 to 1", found=str(request.strong))
        choice = Choice(request.models, request.operator or "raw", request.strong)
        return replace(PAPER_TABLES[request.name][1](atlas, choice), query=request.command())
    return _from_catalogue(atlas, request, tuple(asked.by_name))


def _from_catalogue(atlas: Atlas, request: Request, questions: tuple[str, ...]) -> Table:
    """A table of the catalogue, or a macro, some rows of it if so asked."""
    tables = dict(atlas.sql(TABLES).rows())
    macros = {name: (parameters, meaning) for name, parameters, meaning in atlas.sql(MACROS).rows()}
    call = MACRO_CALL.fullmatch(request.name)
    if request.name in tables:
        keys = TABLE_BY_NAME[request.name].key
        order = ", ".join(f'"{column}"' for column in keys)
        return _filtered(atlas, request, f'"{request.name}"', f"ORDER BY {order}", tables[request.name])
    if call is not None and call[1] in macros:
        return _filtered(atlas, request, request.name.strip(), "", macros[call[1]][1])
    if request.name in macros:
        parameters, meaning = macros[request.name]
        if parameters:
            raise QueryError(
                f"{request.name} needs a value",
                expected=f"{request.name}({parameters})",
                found=request.name,
                remedy=f"for instance: headatlas export '{request.name}(0.9)'",
            )
        return _filtered(atlas, request, f"{request.name}()", "", meaning)
    if len(request.name.split()) > 1:
        raise QueryError(
            "that is no name", found=request.name, remedy='SQL goes with --query: headatlas export --query "SELECT ..."'
        )
    known = [*PAPER_TABLES, *tables, *macros, *questions]
    raise QueryError(
        f"nothing to export is named {request.name!r}",
        expected="a paper table, a table of the catalogue, a macro or a question",
        found=request.name,
        remedy=nearest(call[1] if call else request.name, known) or "see what there is with: headatlas export",
    )


def _filtered(atlas: Atlas, request: Request, source: str, order: str, meaning: str) -> Table:
    """Rows of a table or macro, of the models and operator that were asked for."""
    if request.threshold is not None:
        raise QueryError(f"{request.name} takes no threshold", remedy="a macro has it in its parentheses")
    wanted = {"model": list(request.models), "operator": [request.operator] if request.operator else []}
    chosen = {column: values for column, values in wanted.items() if values}
    there = atlas.sql(f"SELECT * FROM {source} LIMIT 0").columns if chosen else []
    for column, values in chosen.items():
        if column not in there:
            raise QueryError(f"{request.name} has no column {column} to choose rows by", expected=", ".join(there))
        known = "models" if column == "model" else "operators"
        stored = atlas.sql(f"SELECT DISTINCT {column} FROM {known} ORDER BY {column}").to_series().to_list()
        for value in values:
            if value not in stored:
                raise QueryError(
                    f"no {column} named {value!r} in the store",
                    expected="one of " + ", ".join(stored),
                    found=value,
                    remedy=nearest(value, stored),
                )
    kept = " AND ".join(f"list_contains(${column}, {column})" for column in chosen)
    parts = (f"SELECT * FROM {source}", f"WHERE {kept}" if kept else "", order)
    return _of_sql(atlas, request.name, meaning, Question(" ".join(filter(None, parts)), chosen))


def _of_question(atlas: Atlas, request: Request, asked: NamedQuestion) -> Table:
    """A question of ``headatlas ask``, its parameters given one by one or as the options they share a name with."""
    given = dict(request.parameters)
    options = {"models": list(request.models), "operator": request.operator, "threshold": request.threshold}
    given |= {name: value for name, value in options.items() if value not in ([], None)}
    question = asked.with_values(given)
    asked.check_in_store(atlas, question.parameters)
    return _of_sql(atlas, asked.name, asked.description, question)


def _of_sql(atlas: Atlas, name: str, meaning: str, question: Question) -> Table:
    """Rows of a query, which is kept with its values in place."""
    text = str(Question(question.sql.strip().rstrip(";"), question.parameters))
    caption = latex.escape(meaning[:1].upper() + meaning[1:].rstrip(".") + ".")
    return Table(re.sub(r"\W+", "-", name).strip("-"), text, atlas.ask(question), caption=caption)
