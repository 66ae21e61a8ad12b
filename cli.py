"""The command line: commands parse, call and print; everything else is in the packages."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from stats.errors import HeadatlasError, QueryError

if TYPE_CHECKING:
    import polars as pl

    from ingest.plan import Plan
    from query.atlas import Atlas
    from query.questions import Question

FORMATS = ("table", "csv", "json", "ndjson", "parquet", "markdown", "latex")
OPERATORS = {"raw": ("raw",), "folded": ("folded",), "both": ("raw", "folded")}
Command = TypeVar("Command", bound=Callable[..., Any])


class HeadatlasGroup(click.Group):
    """Prints the project's own errors as one message with exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HeadatlasError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted: the store is as it was", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            ctx.exit(1)


def store_option(command: Command) -> Command:
    """``--store`` as every command has it."""
    return click.option(
        "--store",
        "store_path",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="HEADATLAS_STORE",
        default=Path("atlas"),
        show_default="$HEADATLAS_STORE, else ./atlas",
        help="Directory of the store.",
    )(command)


def row_options(command: Command) -> Command:
    """Output options of every command that prints rows."""
    command = click.option("--sql", "show_sql", is_flag=True, help="Print the query instead of running it.")(command)
    return format_options(command)


def format_options(command: Command) -> Command:
    """``--format`` and ``--output``."""
    command = click.option(
        "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file instead of stdout."
    )(command)
    return click.option(
        "--format", "style", type=click.Choice(FORMATS), default="table", show_default=True, help="Form of the rows."
    )(command)


def question_options(*groupings: str) -> Callable[[Command], Command]:
    """Options of the questions about heads: which models, threshold, grouping, operator."""

    def decorate(command: Command) -> Command:
        for option in (
            row_options,
            click.option("--operator", type=click.Choice(("raw", "folded")), help="One operator only."),
            click.option(
                "--by", type=click.Choice(groupings), default=groupings[0], show_default=True, help="A row per what."
            ),
            click.option(
                "--threshold",
                type=click.FloatRange(0, 1),
                default=0.9,
                show_default=True,
                help="Closure at or above which a head is strong.",
            ),
            store_option,
            click.argument("models", nargs=-1),
        ):
            command = option(command)
        return command

    return decorate


@contextmanager
def opened(store_path: Path) -> Iterator[Atlas]:
    """The store opened for questions."""
    from query import open_atlas

    with open_atlas(store_path) as atlas:
        yield atlas


def print_rows(store_path: Path, question: Question, style: str, output: Path | None, show_sql: bool) -> None:
    """Run a question and print its rows, or print the question."""
    if show_sql:
        click.echo(f"{question};")
        return
    with opened(store_path) as atlas:
        print_frame(atlas.ask(question), style, output)


def print_frame(frame: pl.DataFrame, style: str, output: Path | None) -> None:
    """Print rows that are already there."""
    from query.output import Format, deliver

    deliver(frame, cast("Format", style), output)


def known_models(store_path: Path, models: tuple[str, ...]) -> list[str]:
    """The names as given, each checked to be in the store."""
    from store.atlas import AtlasStore, unknown_model

    if models:
        store = AtlasStore.open(store_path)
        stored = store.models()
        for model in models:
            if model not in stored:
                raise unknown_model(store, model)
    return list(models)


def checkpoint_options(command: Command) -> Command:
    """What can be said about a checkpoint that does not say it itself."""
    for option in (
        click.option("--family", help="model_type to assume where the configuration names none."),
        click.option(
            "--config",
            "config_path",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="config.json for a file that has none beside it.",
        ),
        click.option(
            "--operator",
            type=click.Choice(tuple(OPERATORS)),
            default="raw",
            show_default=True,
            help="Weights as stored, with the norms folded in, or both.",
        ),
        click.argument("model"),
    ):
        command = option(command)
    return command


def make_plan(model: str, operator: str, config_path: Path | None, family: str | None) -> Plan:
    """Open a checkpoint and plan it; headers only."""
    from ingest.plan import Operator, plan_checkpoint
    from ingest.source import open_checkpoint

    operators = cast("tuple[Operator, ...]", OPERATORS[operator])
    return plan_checkpoint(open_checkpoint(model, config_path), operators, family)


@click.group(cls=HeadatlasGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headatlas", prog_name="headatlas")
def main() -> None:
    """Headatlas: a statistical database of the attention heads of transformers.

    \b
    headatlas ingest MODEL          measure a checkpoint once
    headatlas closure               which heads nearly close, T^2 ~ alpha T
    headatlas sql "SELECT ..."      any question about all heads

    MODEL is a Hugging Face directory, a .safetensors, .bin or .gguf file, or a hub name
    org/name[@revision].
    """


@main.command()
@checkpoint_options
@store_option
@click.option("--name", help="Name in the store.  [default: the directory, file or hub name]")
@click.option("--replace", "replace_existing", is_flag=True, help="Replace a stored model of that name.")
@click.option("--lineage", help="Training run this checkpoint belongs to.")
@click.option("--step", type=click.IntRange(min=0), help="Training step within the lineage.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ...; auto takes a GPU if any.")
@click.option(
    "--dtype",
    type=click.Choice(("float64", "float32")),
    default="float64",
    show_default=True,
    help="Precision of the tall products; small matrices are always float64.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Layers measured at once.  [default: by cores and memory]")
def ingest(
    model: str,
    operator: str,
    config_path: Path | None,
    family: str | None,
    store_path: Path,
    name: str | None,
    replace_existing: bool,
    lineage: str | None,
    step: int | None,
    device: str,
    dtype: str,
    workers: int | None,
) -> None:
    """Measure every attention head of MODEL and store it.

    Reads only the attention tensors, one layer at a time. A model that is already stored with the
    same content is left as it is.

    \b
    headatlas ingest ./SmolLM2-135M
    headatlas ingest model.gguf --operator both
    headatlas ingest EleutherAI/pythia-70m@step3000 --lineage pythia-70m --step 3000
    """
    if step is not None and lineage is None:
        raise click.UsageError("--step needs --lineage")
    plan = make_plan(model, operator, config_path, family)
    with heavy_imports():
        from ingest.pipeline import ComputeSettings
        from store.atlas import AtlasStore
        from store.ingestion import Identity, ingest_model

    identity = Identity(name or plan.checkpoint.name, lineage, step)
    settings = ComputeSettings(device, dtype, workers)
    settings.resolve_device()
    with progress_reporter(identity.model) as progress:
        outcome = ingest_model(
            AtlasStore.open_or_create(store_path),
            plan,
            identity,
            settings,
            replace_existing=replace_existing,
            progress=progress,
        )
    for other in outcome.same_content:
        click.echo(f"warning: {outcome.model} and {other} hold the same values and outputs", err=True)
    heads = sum(layer.n_heads for layer in plan.layers)
    if outcome.action == "unchanged":
        click.echo(f"{outcome.model}: already stored with the same content, nothing to do (--replace measures again)")
    else:
        click.echo(
            f"{outcome.model}: {heads:,} heads in {len(plan.layers)} layers, {' and '.join(outcome.operators)}, "
            f"{outcome.bytes_read:,} bytes read, {outcome.seconds:.1f} s"
        )
    for item in plan.skipped:
        click.echo(f"{outcome.model}: {item.stack} layer {item.layer} skipped: {item.reason}", err=True)


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Keep the garbage collector off modules that live as long as the process.

    It would go through them again and again while they load and once more at exit, which takes
    longer than measuring a small model.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def progress_reporter(model: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with layers, rate and time left on a terminal, plain lines elsewhere; on stderr."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: _plain_progress(model, stage, done, total)
        return
    from tqdm import tqdm

    bars: dict[str, tqdm[Any]] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            for bar in bars.values():
                bar.close()
            bars[stage] = tqdm(total=total, desc=f"{model}: {stage}", unit="layer", file=sys.stderr, dynamic_ncols=True)
        bars[stage].update(done - bars[stage].n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()


def _plain_progress(model: str, stage: str, done: int, total: int) -> None:
    """A line at about every quarter of the way."""
    if done == 0 or done == total or done * 4 // total != (done - 1) * 4 // total:
        click.echo(f"{model}: {stage}, {done} of {total} layers", err=True)


@main.command()
@checkpoint_options
@format_options
def plan(
    model: str, operator: str, config_path: Path | None, family: str | None, style: str, output: Path | None
) -> None:
    """Show what ingesting MODEL would read, from its headers alone.

    The table groups tensors by role; json holds everything, the other formats a row per tensor.
    """
    planned = make_plan(model, operator, config_path, family)
    import polars as pl

    from ingest.summary import plan_rows, plan_summary

    summary, tensors = plan_summary(planned), plan_rows(planned)
    if style == "json":
        from query.output import deliver_bytes

        text = json.dumps(summary | {"tensor_list": tensors}, indent=1) + "\n"
        deliver_bytes(text.encode(), output)
        return
    frame = pl.DataFrame(tensors)
    if style != "table":
        print_frame(frame.with_columns(pl.col("shape").cast(pl.List(pl.Int64))), style, output)
        return
    by_role = frame.group_by("role", "shape", "dtype", maintain_order=True).agg(
        pl.len().alias("tensors"), pl.col("bytes").sum(), pl.col("tensor").first().alias("first")
    )
    print_facts(summary)
    click.echo()
    print_frame(by_role, style, output)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Name and value on a line each; empty values are left out."""
    shown = {name: value for name, value in facts.items() if value not in (None, [], "")}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        for line in value if isinstance(value, list) else [value]:
            click.echo(f"{name:<{width}}  {f'{line:,}' if isinstance(line, int) else line}")


@main.command()
@store_option
@row_options
def models(store_path: Path, style: str, output: Path | None, show_sql: bool) -> None:
    """List the models of the store."""
    from query import questions

    print_rows(store_path, questions.MODELS, style, output, show_sql)


@main.command()
@click.argument("model")
@store_option
@row_options
def describe(model: str, store_path: Path, style: str, output: Path | None, show_sql: bool) -> None:
    """Everything recorded about one MODEL."""
    from query import questions

    question = questions.description(model)
    if not show_sql:
        known_models(store_path, (model,))
    print_rows(store_path, question, style, output, show_sql)


@main.command()
@click.argument("table", required=False)
@store_option
@row_options
def schema(table: str | None, store_path: Path, style: str, output: Path | None, show_sql: bool) -> None:
    """List tables and macros, or the columns of one TABLE with their meaning."""
    from query import questions
    from store.tables import TABLE_BY_NAME

    if table is not None and table not in TABLE_BY_NAME:
        raise QueryError(f"no table named {table!r}", expected="one of " + ", ".join(TABLE_BY_NAME), found=table)
    question = questions.table_schema(table) if table else questions.SCHEMA_TABLES
    print_rows(store_path, question, style, output, show_sql)


@main.command()
@click.argument("query")
@click.option("-p", "--param", "parameters", multiple=True, metavar="NAME=VALUE", help="Value of $NAME in the query.")
@store_option
@row_options
def sql(
    query: str, parameters: tuple[str, ...], store_path: Path, style: str, output: Path | None, show_sql: bool
) -> None:
    """Run one reading SQL QUERY over all heads; - reads it from stdin.

    \b
    headatlas sql "SELECT label, closure, alpha FROM heads WHERE closure > 0.9 ORDER BY closure"
    headatlas sql "FROM strongest_heads(5)"
    headatlas sql 'SELECT count(*) FROM heads WHERE closure >= $t' -p t=0.5
    """
    from query.questions import Question

    text = sys.stdin.read() if query == "-" else query
    print_rows(store_path, Question(text, dict(map(parameter, parameters))), style, output, show_sql)


def parameter(text: str) -> tuple[str, Any]:
    """``NAME=VALUE`` with numbers as numbers."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise click.UsageError(f"--param wants NAME=VALUE, not {text!r}")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def question_command(name: str, groupings: tuple[str, ...], description: str) -> None:
    """Add the command that asks the question of that name in ``query.questions``."""

    @main.command(name, help=description)
    @question_options(*groupings)
    def command(
        models: tuple[str, ...],
        store_path: Path,
        threshold: float,
        by: str,
        operator: str | None,
        style: str,
        output: Path | None,
        show_sql: bool,
    ) -> None:
        from query import questions

        names = list(models) if show_sql else known_models(store_path, models)
        question = getattr(questions, name)(threshold, by, names, operator)
        print_rows(store_path, question, style, output, show_sql)


question_command(
    "closure",
    ("model", "layer", "head"),
    """How many heads of MODELS nearly close: T^2 ~ alpha T.

    --by head lists every head at or above the threshold.
    """,
)
question_command(
    "mismatch",
    ("model", "layer"),
    """Closure of one head's O with another head's V, as a null.

    Pairs that share a value projection are no mismatch and do not count.
    """,
)
question_command(
    "algebra",
    ("model", "group", "pair"),
    """The right-action law T_i T_j ~ alpha_j T_i where head j is strong.

    The left action and pairs of other value groups are the controls.
    """,
)


@main.command()
@store_option
@format_options
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Closure of a strong head."
)
def panel(store_path: Path, style: str, output: Path | None, threshold: float) -> None:
    """The published panel numbers beside this store's own."""
    with opened(store_path) as atlas:
        print_frame(atlas.panel(threshold), style, output)


@main.command()
@click.argument("model", required=False)
@store_option
@format_options
@click.pass_context
def verify(ctx: click.Context, model: str | None, store_path: Path, style: str, output: Path | None) -> None:
    """Check every checksum, that catalogue and arrays agree, and closure against the stored cores."""
    import polars as pl

    from store.atlas import AtlasStore
    from store.integrity import verify as check

    store = AtlasStore.open(store_path)
    findings = list(check(store, model))
    if not findings:
        count = 1 if model else len(store.models())
        click.echo(f"ok: {count} {'model' if count == 1 else 'models'} verified", err=style != "table")
        return
    rows = [(finding.model, finding.where, finding.problem) for finding in findings]
    print_frame(pl.DataFrame(rows, schema=["model", "where", "problem"], orient="row"), style, output)
    ctx.exit(1)


@main.command()
@store_option
def rebuild(store_path: Path) -> None:
    """Make the catalogue again from the arrays."""
    from store.atlas import AtlasStore
    from store.integrity import rebuild as make_again

    count = make_again(AtlasStore.open(store_path))
    click.echo(f"catalogue made from the arrays of {count} {'model' if count == 1 else 'models'}")


@main.command()
@click.argument("model")
@store_option
def remove(model: str, store_path: Path) -> None:
    """Remove MODEL from the store."""
    from store.atlas import AtlasStore
    from store.integrity import remove as take_out

    take_out(AtlasStore.open(store_path), model)
    click.echo(f"{model}: removed")


if __name__ == "__main__":
    main()
