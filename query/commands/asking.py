"""Commands that say what a store holds and ask it in SQL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from query.commands.options import row_options, store_option, timeout_option, usage
from query.commands.printing import heavy_imports, known_models, opened, print_frame, print_rows

if TYPE_CHECKING:
    pass


@click.command()
@store_option
@row_options
def models(store_path: Path, style: str, output: Path | None, show_sql: bool) -> None:
    """List the models of the store.

    \b
    headatlas models
    headatlas models --format json
    """
    from query import questions

    print_rows(store_path, questions.MODELS, style, output, show_sql)


@click.command()
@click.argument("model")
@click.option("--provenance", is_flag=True, help="From which bytes, versions and settings every part of it came.")
@store_option
@row_options
def describe(model: str, provenance: bool, store_path: Path, style: str, output: Path | None, show_sql: bool) -> None:
    """Everything recorded about one MODEL.

    \b
    headatlas describe SmolLM2
    headatlas describe SmolLM2 --provenance
    """
    from query import questions

    question = questions.origins(model) if provenance else questions.description(model)
    if not show_sql:
        known_models(store_path, (model,))
    print_rows(store_path, question, style, output, show_sql)


@click.command()
@click.argument("table", required=False)
@store_option
@row_options
def schema(table: str | None, store_path: Path, style: str, output: Path | None, show_sql: bool) -> None:
    """List tables and macros, or the columns of one TABLE with their meaning.

    \b
    headatlas schema
    headatlas schema heads
    """
    from query import questions
    from store.tables import TABLE_BY_NAME

    if table is not None and table not in TABLE_BY_NAME:
        raise questions.unknown_table(table)
    question = questions.table_schema(table) if table else questions.SCHEMA_TABLES
    print_rows(store_path, question, style, output, show_sql)


@click.command()
@click.argument("query")
@click.option(
    "-p",
    "--param",
    "--set",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of :NAME or $NAME in the query: a number, true, false, null, a list in JSON, else text; "
    "NAME:VARCHAR=VALUE says the type.",
)
@timeout_option
@store_option
@row_options
def sql(
    query: str,
    parameters: tuple[str, ...],
    timeout: float | None,
    store_path: Path,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """Run one reading SQL QUERY over all heads; - reads it from stdin.

    \b
    headatlas sql "SELECT label, closure, alpha FROM heads WHERE closure > 0.9 ORDER BY closure"
    headatlas sql "FROM strongest_heads(5)"
    headatlas sql "SELECT count(*) FROM heads WHERE closure >= :t" --set t=0.5
    """
    with heavy_imports():
        from query.parameters import assignment
        from query.questions import Question

    text = sys.stdin.read() if query == "-" else query
    values = dict(usage(assignment, given) for given in parameters)
    print_rows(store_path, Question(text, values), style, output, show_sql, timeout)


@click.command()
@click.argument("name", required=False)
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="Value of a parameter; lists are JSON.")
@click.option("--parameters", "show_parameters", is_flag=True, help="List the parameters of NAME with their meaning.")
@timeout_option
@store_option
@row_options
def ask(
    name: str | None,
    given: tuple[str, ...],
    show_parameters: bool,
    timeout: float | None,
    store_path: Path,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """Ask the question called NAME; without it, list the questions.

    Your own are files in the directory queries of the store, see docs/questions.md.

    \b
    headatlas ask
    headatlas ask strongest-heads --parameters
    headatlas ask closure-by-model --set threshold=0.8 --set operator=raw
    headatlas ask compare-models --set models='["llama", "bert"]'
    """
    with heavy_imports():
        from query.named import questions
        from query.parameters import split

    found = questions(store_path)
    if name is None:
        for fault in found.faults.values():
            click.echo(f"warning: {fault}", err=True)
        print_frame(found.frame(), style, output)
        return
    question = found.named(name)
    if show_parameters:
        print_frame(question.frame(), style, output)
        return
    bound = question.with_values(dict(usage(split, text) for text in given))
    if show_sql:
        click.echo(f"{bound};")
        return
    with opened(store_path) as atlas:
        atlas.timeout = timeout
        print_frame(question.answer(atlas, bound), style, output)


@click.command()
@store_option
def shell(store_path: Path) -> None:
    """An SQL prompt on the store, with history and completion; reads statements from stdin if it is no terminal.

    Statements end with a semicolon. Ctrl-C stops a query, Ctrl-D leaves, .help lists commands.

    \b
    headatlas shell
    headatlas shell < questions.sql
    """
    from query.shell import from_stream, from_terminal

    if sys.stdin.isatty():
        from_terminal(store_path)
    elif not from_stream(store_path, sys.stdin):
        click.get_current_context().exit(1)


COMMANDS = (models, describe, schema, sql, ask, shell)
