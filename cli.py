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

from stats.errors import CheckpointError, HeadatlasError, QueryError, StoreError

if TYPE_CHECKING:
    import polars as pl

    from ingest.plan import Operator, Plan
    from query.atlas import Atlas
    from query.questions import Question
    from store.atlas import AtlasStore, Derivation

FORMATS = ("table", "csv", "json", "ndjson", "parquet", "markdown", "latex")
STORED_OPERATORS = ("raw", "folded", "scaled")
OPERATORS = {"raw": ("raw",), "folded": ("folded",), "scaled": ("scaled",), "both": ("raw", "folded")}
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
            click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only."),
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
        click.option("--base", metavar="MODEL", help="Where MODEL is a LoRA adapter, the model it changes."),
        click.option(
            "--operator",
            type=click.Choice(tuple(OPERATORS)),
            default="raw",
            show_default=True,
            help="Weights as stored; with the norms folded in; also scaled by what multiplies the branch; or the first two.",
        ),
    ):
        command = option(command)
    return command


def make_plan(model: str, operator: str, config_path: Path | None, family: str | None, base: str | None) -> Plan:
    """Open a checkpoint and plan it; headers only."""
    from ingest.plan import plan_checkpoint
    from ingest.source import open_checkpoint

    operators = cast("tuple[Operator, ...]", OPERATORS[operator])
    return plan_checkpoint(open_checkpoint(model, config_path, base), operators, family)


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
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@checkpoint_options
@store_option
@click.option("--name", help="Name in the store.  [default: the directory, file or hub name]")
@click.option("--replace", "replace_existing", is_flag=True, help="Replace a stored model of that name.")
@click.option("--lineage", help="Training run the checkpoints belong to.")
@click.option("--step", type=click.IntRange(min=0), help="Training step within the lineage.  [default: from the name]")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ...; auto takes a GPU if any.")
@click.option(
    "--dtype",
    type=click.Choice(("float64", "float32")),
    default="float64",
    show_default=True,
    help="Precision of the tall products; small matrices are always float64.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Layers measured at once.  [default: by cores and memory]")
@click.option("--keep-factors", is_flag=True, help="Also store what each head reads and writes, for drift; large.")
def ingest(
    models: tuple[str, ...],
    operator: str,
    config_path: Path | None,
    family: str | None,
    base: str | None,
    store_path: Path,
    name: str | None,
    replace_existing: bool,
    lineage: str | None,
    step: int | None,
    device: str,
    dtype: str,
    workers: int | None,
    keep_factors: bool,
) -> None:
    """Measure every attention head of each MODEL and store it.

    Reads only the attention tensors, one layer at a time. A model that is already stored with the
    same content is left as it is. With --lineage, MODEL may be a directory that holds a checkpoint of
    every step (step1000, checkpoint-1000, ...), or several revisions.

    \b
    headatlas ingest ./SmolLM2-135M
    headatlas ingest model.gguf --operator both
    headatlas ingest ./my-adapter --base meta-llama/Llama-3.2-1B
    headatlas ingest runs/my-model --lineage my-model
    headatlas ingest EleutherAI/pythia-70m@step1000 EleutherAI/pythia-70m@step3000 --lineage pythia-70m
    """
    from ingest.lineage import is_run, members, step_of

    if step is not None and lineage is None:
        raise click.UsageError("--step needs --lineage")
    run = next((model for model in models if is_run(Path(model).expanduser())), None)
    if run is not None and lineage is None:
        raise CheckpointError(
            "the directory holds several checkpoints, not one",
            where=run,
            remedy="name the training run they belong to with --lineage NAME, or ingest one of them",
        )
    several = len(models) > 1 or run is not None
    if several and (name is not None or step is not None):
        raise click.UsageError("--name and --step go with a single checkpoint")

    wanted: list[tuple[str, str | None, int | None]]
    if several and lineage is not None:
        wanted = [(member.source, member.name, member.step) for member in members(models, lineage)]
    else:
        wanted = [(model, name, step_of(model) if lineage and step is None else step) for model in models]
    failed = 0
    for source, called, at_step in wanted:
        try:
            planned = make_plan(source, operator, config_path, family, base)
            ingest_one(
                planned, store_path, called, replace_existing, lineage, at_step, (device, dtype, workers, keep_factors)
            )
        except HeadatlasError as error:
            if len(wanted) == 1:
                raise
            failed += 1
            click.echo(f"error: {error}", err=True)
    if failed:
        click.echo(f"{failed} of {len(wanted)} checkpoints were not stored", err=True)
        click.get_current_context().exit(1)


def ingest_one(
    plan: Plan,
    store_path: Path,
    name: str | None,
    replace_existing: bool,
    lineage: str | None,
    step: int | None,
    compute: tuple[str, str, int | None, bool],
) -> None:
    """Measure one planned checkpoint, and say what was done."""
    with heavy_imports():
        from ingest.pipeline import ComputeSettings
        from store.atlas import AtlasStore
        from store.ingestion import Identity, ingest_model

    identity = Identity(name or plan.checkpoint.name, lineage, step)
    settings = ComputeSettings(*compute)
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
    for other, count in outcome.same_layers.items():
        click.echo(
            f"warning: {count} of {len(plan.layers)} layers of {outcome.model} hold the same values and outputs "
            f"as those of {other}",
            err=True,
        )
    heads = sum(layer.n_heads for layer in plan.layers)
    if outcome.action == "unchanged":
        click.echo(f"{outcome.model}: already stored with the same content, nothing to do (--replace measures again)")
        if (lineage, step) != (outcome.lineage, outcome.step) and lineage is not None:
            click.echo(
                f"warning: it is stored as step {outcome.step} of {outcome.lineage or 'no lineage'}; "
                "--replace stores it with the one given",
                err=True,
            )
    else:
        click.echo(
            f"{outcome.model}: {heads:,} heads in {len(plan.layers)} layers, {' and '.join(outcome.operators)}, "
            f"{outcome.bytes_read:,} bytes read, {outcome.seconds:.1f} s"
        )
    for item in plan.skipped:
        click.echo(f"{outcome.model}: {item.stack} layer {item.layer} skipped: {item.reason}", err=True)
    for note in plan.recognition.notes:
        click.echo(f"{outcome.model}: {note}", err=True)


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
@click.argument("model")
@checkpoint_options
@format_options
def plan(
    model: str,
    operator: str,
    config_path: Path | None,
    family: str | None,
    base: str | None,
    style: str,
    output: Path | None,
) -> None:
    """Show what ingesting MODEL would read, from its headers alone.

    What a stack is made of comes first, one paragraph for each stack of attention; then the tensors,
    grouped by role. json holds everything, the other formats a row per tensor.
    """
    planned = make_plan(model, operator, config_path, family, base)
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
    by_role = frame.group_by("stack", "role", "shape", "dtype", maintain_order=True).agg(
        pl.len().alias("tensors"), pl.col("bytes").sum(), pl.col("tensor").first().alias("first")
    )
    stacks = summary.pop("stacks")
    for facts in (summary, *stacks):
        print_facts(facts)
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
@click.argument("lineages", nargs=-1)
@store_option
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Closure of a strong head."
)
@click.option(
    "--by",
    type=click.Choice(("step", "head", "all")),
    default="step",
    show_default=True,
    help="Medians by step; the onset of each head; every head at every step.",
)
@click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only.")
@click.option(
    "--figure", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the medians: .pdf, .svg or .png."
)
@row_options
def trajectory(
    lineages: tuple[str, ...],
    store_path: Path,
    threshold: float,
    by: str,
    operator: str | None,
    figure: Path | None,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """Closure, capacity and spectra over the steps of training LINEAGES.

    Heads that are strong at the last step are followed apart from the others. Capacity is there once
    `headatlas capacity` has computed it.
    """
    from query import questions

    question = questions.trajectory(threshold, by, lineages, operator)
    if show_sql:
        print_rows(store_path, question, style, output, show_sql)
        return
    from query.drift import require_runs

    with opened(store_path) as atlas:
        require_runs(atlas, lineages)
        if figure is not None:
            from query.figures import save_figure, trajectory_figure

            steps = atlas.ask(questions.trajectory(threshold, "step", lineages, operator))
            save_figure(trajectory_figure(steps, threshold), figure)
        print_frame(atlas.ask(question), style, output)


@main.command()
@click.argument("model")
@checkpoint_options
@click.option("--rotary", type=click.IntRange(0), help="Coordinates of a key that rotate.  [default: from config]")
@click.option("--tokens", type=click.IntRange(2), default=1024, show_default=True, help="Tokens N for log10 columns.")
@format_options
def identify(
    model: str,
    operator: str,
    config_path: Path | None,
    family: str | None,
    base: str | None,
    rotary: int | None,
    tokens: int,
    style: str,
    output: Path | None,
) -> None:
    """Parameters of MODEL that no output determines, and how its expressivity grows; headers only."""
    import polars as pl

    from ingest.identification import identification_rows

    planned = make_plan(model, operator, config_path, family, base)
    print_frame(pl.DataFrame(identification_rows(planned, rotary, tokens)), style, output)


@main.command()
@click.argument("lineage")
@store_option
@format_options
def drift(lineage: str, store_path: Path, style: str, output: Path | None) -> None:
    """How far each head turns between the steps of LINEAGE; needs ingest --keep-factors."""
    from query.drift import drift as between_steps

    with opened(store_path) as atlas:
        print_frame(between_steps(atlas, lineage), style, output)


def derivation_options(command: Command) -> Command:
    """Options of the commands that derive something from stored spectra."""
    for option in (
        row_options,
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...; auto takes a GPU if any."),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Random seed."),
        click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only.  [default: all]"),
        click.option(
            "--by",
            type=click.Choice(("model", "layer", "head")),
            default="model",
            show_default=True,
            help="A row per what.",
        ),
        store_option,
        click.argument("models", nargs=-1),
    ):
        command = option(command)
    return command


def derive_missing(
    store_path: Path, models: tuple[str, ...], operator: str | None, device: str, wanted: Derivation
) -> None:
    """Derive something for every model and stored operator that lacks it, with progress."""
    from store.atlas import AtlasStore

    store = AtlasStore.open(store_path)
    stored = store.models()
    missing = [
        (model, name)
        for model in known_models(store_path, models) or stored
        for name in ([operator] if operator else sorted(stored[model].gain_hash, reverse=True))
        if not stored[model].has(name, wanted)
    ]
    if not missing:
        return
    with heavy_imports():
        from ingest.pipeline import ComputeSettings
        from store.derivation import derive

    resolved = ComputeSettings(device).resolve_device()
    for model, name in missing:
        with progress_reporter(f"{model}, {name}") as progress:
            derive(store, model, name, wanted, resolved, progress)


@main.command()
@derivation_options
@click.option("--draws", type=click.IntRange(1), default=1000, show_default=True, help="Scrambles of each head.")
@click.option("--independent", is_flag=True, help="A Haar pair for every draw; slower, for checks.")
@click.option("--mismatch", is_flag=True, help="The values of the layer's other heads as null; nothing is drawn.")
def null(
    models: tuple[str, ...],
    store_path: Path,
    by: str,
    operator: str | None,
    seed: int,
    device: str,
    draws: int,
    independent: bool,
    mismatch: bool,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """Trained heads of MODELS against a null.

    The scramble null destroys the orientation of a head's core and keeps its singular values, its
    supports and the angles between them. Draws are stored: asking again reads them, and more draws
    add to them.

    \b
    headatlas null --draws 1000
    headatlas null SmolLM2 --by layer
    headatlas null --mismatch
    """
    from query import questions

    if not show_sql and not mismatch:
        from store.atlas import Derivation

        wanted = Derivation("scramble", n_draws=draws, seed=seed, independent=independent)
        derive_missing(store_path, models, operator, device, wanted)
    names = list(models) if show_sql else known_models(store_path, models)
    question = questions.null("mismatch" if mismatch else "scramble", by, names, operator)
    print_rows(store_path, question, style, output, show_sql)


@main.command()
@derivation_options
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Closure of a strong head."
)
@click.option("--refine", is_flag=True, help="Also climb from the assignment and from random orientations.")
@click.option(
    "--starts", type=click.IntRange(0), default=2, show_default=True, help="Random orientations to climb from."
)
def capacity(
    models: tuple[str, ...],
    store_path: Path,
    by: str,
    operator: str | None,
    seed: int,
    device: str,
    threshold: float,
    refine: bool,
    starts: int,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """How closed heads of MODELS could be with their own singular values and angles.

    What is found is attained by an orientation that is stored with it, so it is a lower bound.
    """
    from query import questions

    if not show_sql:
        from store.atlas import Derivation

        derive_missing(store_path, models, operator, device, Derivation("assignment"))
        if refine:
            wanted = Derivation("riemannian", seed=seed, random_starts=starts)
            derive_missing(store_path, models, operator, device, wanted)
    names = list(models) if show_sql else known_models(store_path, models)
    print_rows(store_path, questions.capacity(threshold, by, names, operator), style, output, show_sql)


@main.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("models", nargs=-1)
@store_option
@click.option("--remove", "removed", metavar="NAME", help="Take a statistic out of the store instead.")
def derive(file: Path | None, models: tuple[str, ...], store_path: Path, removed: str | None) -> None:
    """Add your own statistics, declared in the Python FILE, as columns of heads.

    \b
    from store.user_statistics import statistic

    @statistic(meaning="largest share of a direction", values="0 to 1")
    def leading_share(sigma):
        return sigma[:, 0] ** 2 / (sigma**2).sum(-1)

    A function takes stored arrays by name, for one layer with the heads in front, and returns a number
    for each head. FILE is run: use your own.
    """
    if (file is None) == (removed is None):
        raise click.UsageError("give a FILE, or --remove NAME")
    from store.atlas import AtlasStore

    with heavy_imports():
        from store.derivation import derive_user_statistics, remove_user_statistic
        from store.user_statistics import load

    store = AtlasStore.open(store_path)
    if removed is not None:
        for model in remove_user_statistic(store, removed):
            click.echo(f"{model}: {removed} removed")
        return
    assert file is not None
    declared = load(file)
    chosen = known_models(store_path, models) or list(store.models())
    derive_user_statistics(store, chosen, declared)
    for mine in declared:
        click.echo(f"{mine.declared.name}: {len(chosen)} {'model' if len(chosen) == 1 else 'models'}")


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
@click.option(
    "--against",
    type=click.Choice(("transformers",)),
    help="Compare with the modules of this library as they run; MODEL is then a checkpoint, as for ingest.",
)
@click.option("--operator", type=click.Choice(("raw", "folded")), help="With --against: which one.  [default: raw]")
@click.option("--name", help="With --against: name in the store.  [default: the directory, file or hub name]")
@click.option("--layers", metavar="N,N,...", help="With --against: these layers only.  [default: all]")
@store_option
@format_options
@click.pass_context
def verify(
    ctx: click.Context,
    model: str | None,
    against: str | None,
    operator: str | None,
    name: str | None,
    layers: str | None,
    store_path: Path,
    style: str,
    output: Path | None,
) -> None:
    """Check the store against itself, or against a running model.

    Without --against: every checksum, that catalogue and arrays agree, and closure against the stored
    cores, for MODEL, a name of the store, or for all.

    With --against transformers: that library builds the model of the checkpoint MODEL and runs it. In
    every layer each head is given random tokens, and what it writes is compared with O V^T; what is stored
    is then computed again from the same O and V by another route. shifted_error is the control: the same
    comparison with the neighbouring head, which must fail.

    \b
    headatlas verify
    headatlas verify SmolLM2-135M
    headatlas verify ./SmolLM2-135M --against transformers
    """
    from store.atlas import AtlasStore

    if against is None:
        if (operator, name, layers) != (None, None, None):
            raise click.UsageError("--operator, --name and --layers go with --against")
        sound = print_findings(AtlasStore.open(store_path), model, style, output)
    elif model is None:
        raise click.UsageError("--against needs the checkpoint to run: headatlas verify MODEL --against transformers")
    else:
        chosen = None if layers is None else [layer_number(text) for text in layers.split(",")]
        sound = compare_with_running(model, operator or "raw", name, chosen, store_path, style, output)
    if not sound:
        ctx.exit(1)


def print_findings(store: AtlasStore, model: str | None, style: str, output: Path | None) -> bool:
    """Check a store, or one model of it, and print what is wrong; whether nothing is."""
    import polars as pl

    from store.integrity import verify as check

    findings = list(check(store, model))
    if not findings:
        count = 1 if model else len(store.models())
        click.echo(f"ok: {count} {'model' if count == 1 else 'models'} verified", err=style != "table")
        return True
    rows = [(finding.model, finding.where, finding.problem) for finding in findings]
    print_frame(pl.DataFrame(rows, schema=["model", "where", "problem"], orient="row"), style, output)
    return False


def layer_number(text: str) -> int:
    """One number of ``--layers``."""
    if not text.strip().isdecimal():
        raise click.UsageError(f"--layers wants numbers such as 0,5,11, not {text!r}")
    return int(text)


def compare_with_running(
    model: str,
    operator: str,
    name: str | None,
    layers: list[int] | None,
    store_path: Path,
    style: str,
    output: Path | None,
) -> bool:
    """Compare a stored model with its checkpoint as transformers runs it; whether all that was compared agrees."""
    import polars as pl

    from ingest.running import RunningModel, load_transformers
    from store.atlas import AtlasStore
    from store.conformance import compare_with_store, stored_model
    from store.integrity import verify as check

    load_transformers()
    store = AtlasStore.open(store_path)
    planned = make_plan(model, operator, None, None, None)
    chosen = [layer for layer in planned.layers if layers is None or layer.layer in layers]
    absent = sorted(set(layers or ()) - {layer.layer for layer in chosen})
    if absent:
        raise CheckpointError(
            "no such layer has attention that is read",
            where=f"{planned.checkpoint.source}, --layers",
            expected=", ".join(map(str, sorted({layer.layer for layer in planned.layers}))),
            found=", ".join(map(str, absent)),
        )
    stored = stored_model(store, name or planned.checkpoint.name, cast("Operator", operator))
    if list(check(store, stored.model)):
        raise StoreError(
            "the stored model is damaged",
            where=f"{store.root}, {stored.model}",
            expected="arrays and catalogue as they were sealed",
            remedy=f"see what is wrong with: headatlas verify {stored.model}",
        )
    click.echo(f"{stored.model}: transformers loads the whole model", err=True)
    running = RunningModel(model, planned)
    running.find(planned, chosen)
    rows = []
    with progress_reporter(stored.model) as progress:
        for done, found in enumerate(compare_with_store(store, stored, planned, chosen, running), 1):
            progress("comparing", done, len(chosen))
            agreement = found.agreement
            rows.append(
                {
                    "stack": found.stack,
                    "layer": found.layer,
                    "heads": found.heads,
                    "operator_error": agreement.operator_error,
                    "shifted_error": agreement.shifted_error,
                    "stored_error": found.stored_error,
                    "neutralised": ", ".join(agreement.neutralised) or None,
                    "outcome": found.outcome,
                    "reason": found.reason or None,
                }
            )
    types = {"operator_error": pl.Float64, "shifted_error": pl.Float64, "stored_error": pl.Float64}
    types |= {"neutralised": pl.String, "reason": pl.String}
    print_frame(pl.DataFrame(rows, schema_overrides=types), style, output)
    outcomes = [row["outcome"] for row in rows]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    click.echo(f"{stored.model}, {operator}, against {running.model_class}: of {len(rows)} layers {counts}", err=True)
    return "ok" in outcomes and "differs" not in outcomes


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
