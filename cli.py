"""The command line: commands parse, call and print; everything else is in the packages."""

from __future__ import annotations

import gc
import json
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import click

from query.formats import EXPORT_FORMATS, FORMATS
from stats.errors import CheckpointError, HeadatlasError, QueryError, StoreError

if TYPE_CHECKING:
    import polars as pl

    from ingest.pipeline import ComputeSettings
    from ingest.plan import Operator, Plan
    from query.atlas import Atlas
    from query.intervals import RateMethod
    from query.questions import Question
    from store.atlas import AtlasStore, Derivation
    from store.ingestion import Identity, Outcome
    from store.units import Source

STORED_OPERATORS = ("raw", "folded", "scaled")
OPERATORS = {"raw": ("raw",), "folded": ("folded",), "scaled": ("scaled",), "both": ("raw", "folded")}
Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


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


def timeout_option(command: Command) -> Command:
    """``--timeout`` of the commands that run what a user writes."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Stop the query after that long.  [default: never]",
    )(command)


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
    with heavy_imports():
        from query import open_atlas

    with open_atlas(store_path) as atlas:
        yield atlas


def print_rows(
    store_path: Path,
    question: Question,
    style: str,
    output: Path | None,
    show_sql: bool,
    timeout: float | None = None,
) -> None:
    """Run a question and print its rows, or print the question."""
    if show_sql:
        click.echo(f"{question};")
        return
    with opened(store_path) as atlas:
        atlas.timeout = timeout
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
            help="Weights as stored; norms folded in; scaled too by what multiplies the branch; the first two.",
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

    MODEL is a Hugging Face directory, a .safetensors, .bin or .gguf file, a hub name
    org/name[@revision], or an https://, s3:// or gs:// address of a directory or file.
    """


class ByteSize(click.ParamType):
    """A number of bytes, such as 500MB, 8GiB or 2000000."""

    name = "size"
    UNITS: ClassVar = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of the text."""
        if isinstance(value, int):
            return value
        number = value.rstrip(string.ascii_letters)
        unit = self.UNITS.get(value[len(number) :].strip().lower())
        try:
            size = int(float(number) * unit) if unit else 0
        except (ValueError, OverflowError):
            size = 0
        if size <= 0:
            self.fail(f"{value!r} is no size such as 500MB or 8GiB", param, ctx)
        return size


class Part(click.ParamType):
    """``i/n``: part i of n, from 1."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Number and count."""
        if isinstance(value, tuple):
            return cast("tuple[int, int]", value)
        number, _, count = value.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            self.fail(f"{value!r} is no part such as 3/16, from 1/16 to 16/16", param, ctx)
        return int(number), int(count)


def measuring_options(command: Command) -> Command:
    """How and under what name a checkpoint is measured; ``assemble`` has to be told the same."""
    for option in (
        click.option("--keep-factors", is_flag=True, help="Also store what each head reads and writes; large."),
        click.option(
            "--dtype",
            type=click.Choice(("float64", "float32")),
            default="float64",
            show_default=True,
            help="Precision of the tall products; small matrices are always float64.",
        ),
        click.option(
            "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ...; auto takes a GPU if any."
        ),
        click.option(
            "--step", type=click.IntRange(min=0), help="Training step within the lineage.  [default: from the name]"
        ),
        click.option("--lineage", help="Training run the checkpoints belong to."),
        click.option("--replace", "replace_existing", is_flag=True, help="Replace a stored model of that name."),
        click.option("--name", help="Name in the store.  [default: the directory, file or hub name]"),
        store_option,
        checkpoint_options,
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Measuring:
    """The options of ``ingest`` and ``assemble`` that do not depend on the checkpoint."""

    store_path: Path
    operator: str
    config_path: Path | None
    family: str | None
    base: str | None
    replace_existing: bool
    device: str
    dtype: str
    keep_factors: bool
    threads: int | None = None
    memory: int | None = None
    workers: int | None = None
    cluster: str | None = None
    only_assemble: bool = False

    def source(self, model: str) -> Source:
        """A checkpoint with what was said about it."""
        from store.units import Source

        operators = cast("tuple[Operator, ...]", OPERATORS[self.operator])
        return Source(model, operators, self.config_path, self.family, self.base)

    def settings(self) -> ComputeSettings:
        """Where and how to compute, checked to be possible here unless others compute."""
        from ingest.pipeline import ComputeSettings, cores

        threads = self.threads
        if self.workers and not threads:
            threads = max(1, cores() // self.workers) if self.cluster is None else 1
        memory = self.memory // self.workers if self.memory and self.workers else self.memory
        settings = ComputeSettings(self.device, self.dtype, threads, self.keep_factors, memory)
        if self.cluster is None and not self.only_assemble:
            settings.resolve_device()
        return settings


@main.command()
@click.argument("models", nargs=-1, metavar="MODEL...")
@measuring_options
@click.option(
    "--from",
    "listed",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with a checkpoint a line: MODEL, or MODEL and its name in the store.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Layers measured at once.  [default: by cores and memory]")
@click.option(
    "--memory", type=ByteSize(), help="What layers in flight may take, such as 8GiB.  [default: half of what is free]"
)
@click.option("--workers", type=click.IntRange(min=1), help="Measure in this many processes.")
@click.option("--cluster", metavar="ADDRESS", help="Measure on a Dask cluster; its workers see the same paths.")
@click.option("--unit", type=Part(), help="Measure part i of n of the layers only; assemble publishes them.")
def ingest(
    models: tuple[str, ...],
    name: str | None,
    lineage: str | None,
    step: int | None,
    listed: Path | None,
    unit: tuple[int, int] | None,
    **options: Any,
) -> None:
    """Measure every attention head of each MODEL and store it.

    Reads only the attention tensors, one layer at a time. A model that is already stored with the
    same content is left as it is. With --lineage, MODEL may be a directory that holds a checkpoint of
    every step (step1000, checkpoint-1000, ...), or several revisions. An ingest that was interrupted
    goes on from the layers it had measured.

    \b
    headatlas ingest ./SmolLM2-135M
    headatlas ingest model.gguf --operator both
    headatlas ingest ./my-adapter --base meta-llama/Llama-3.2-1B
    headatlas ingest runs/my-model --lineage my-model
    headatlas ingest EleutherAI/pythia-70m@step1000 EleutherAI/pythia-70m@step3000 --lineage pythia-70m
    headatlas ingest --from checkpoints.txt
    headatlas ingest org/large-model --workers 8
    headatlas ingest org/large-model --unit 3/16
    """
    if step is not None and lineage is None:
        raise click.UsageError("--step needs --lineage")
    how = Measuring(**options)
    if how.cluster is not None and how.workers is None:
        how = replace(how, workers=16)
    wanted = checkpoints_wanted(models, listed, name, lineage, step)
    if unit is not None:
        if len(wanted) != 1 or how.workers or how.cluster:
            raise click.UsageError("--unit goes with a single checkpoint, and without --workers and --cluster")
        measure_unit(how, wanted[0], unit)
        return
    if len(wanted) == 1:
        ingest_one(how, wanted[0], lineage)
        return
    rows = [ingest_or_tell(how, checkpoint, lineage) for checkpoint in wanted]
    print_outcomes(rows)


@main.command()
@click.argument("model")
@measuring_options
def assemble(model: str, name: str | None, lineage: str | None, step: int | None, **options: Any) -> None:
    """Publish MODEL from the layers that ingest --unit has measured, on any machines that share the store.

    Give the options that the units were given. Nothing is measured here: layers that are missing are named.

    \b
    headatlas ingest org/large-model --unit 1/2
    headatlas ingest org/large-model --unit 2/2
    headatlas assemble org/large-model
    """
    if step is not None and lineage is None:
        raise click.UsageError("--step needs --lineage")
    how = Measuring(**options, only_assemble=True)
    ingest_one(how, checkpoints_wanted((model,), None, name, lineage, step)[0], lineage)


Wanted = tuple[str, str | None, int | None]
"""A checkpoint, its name in the store, and its step."""


def checkpoints_wanted(
    models: tuple[str, ...], listed: Path | None, name: str | None, lineage: str | None, step: int | None
) -> list[Wanted]:
    """The checkpoints a command names, a run's by step."""
    from ingest.lineage import is_run, listed_checkpoints, members, step_of

    named = [(model, name) for model in models]
    if listed is not None:
        named += listed_checkpoints(listed)
    if not named:
        raise click.UsageError("give a MODEL, or --from FILE")
    run = next((model for model, _ in named if is_run(Path(model).expanduser())), None)
    if run is not None and lineage is None:
        raise CheckpointError(
            "the directory holds several checkpoints, not one",
            where=run,
            remedy="name the training run they belong to with --lineage NAME, or ingest one of them",
        )
    several = len(named) > 1 or run is not None
    if several and (name is not None or step is not None):
        raise click.UsageError("--name and --step go with a single checkpoint")
    if several and lineage is not None:
        found = members(tuple(model for model, _ in named), lineage)
        return [(member.source, member.name, member.step) for member in found]
    return [(model, called, step_of(model) if lineage and step is None else step) for model, called in named]


def measure_unit(how: Measuring, checkpoint: Wanted, part: tuple[int, int]) -> None:
    """Measure one unit and say what it did."""
    with heavy_imports():
        from store.units import Unit, run_unit

    model, name, _ = checkpoint
    source = how.source(model)
    called = name or source.plan().checkpoint.name
    manifest = run_unit(Unit(how.store_path, source, called, how.settings(), *part))
    click.echo(
        f"{called}: unit {part[0]} of {part[1]}, {manifest.layers} layers, {manifest.measured} of them measured now, "
        f"{manifest.seconds:.1f} s; publish with: headatlas assemble"
    )


def ingest_or_tell(how: Measuring, checkpoint: Wanted, lineage: str | None) -> dict[str, Any]:
    """Ingest one of several checkpoints; a row that says what became of it."""
    row: dict[str, Any] = {"checkpoint": checkpoint[0], "model": checkpoint[1], "outcome": "failed", "reason": None}
    try:
        outcome = ingest_one(how, checkpoint, lineage, several=True)
    except HeadatlasError as error:
        click.echo(f"error: {error}", err=True)
        return row | {"reason": error.what + (f": {error.found}" if error.found else "")}
    done = "done" if outcome.action == "ingested" else "skipped"
    reason = None if done == "done" else "already stored"
    return row | {"model": outcome.model, "outcome": done, "seconds": outcome.seconds, "reason": reason}


def print_outcomes(rows: list[dict[str, Any]]) -> None:
    """What became of several checkpoints; ends the command with status 1 if any failed."""
    import polars as pl

    types = {"model": pl.String, "seconds": pl.Float64, "reason": pl.String}
    columns = ("checkpoint", "model", "outcome", "seconds", "reason")
    print_frame(pl.DataFrame(rows, schema_overrides=types).select(columns), "table", None)
    outcomes = [row["outcome"] for row in rows]
    click.echo(", ".join(f"{outcomes.count(name)} {name}" for name in ("done", "skipped", "failed")), err=True)
    if "failed" in outcomes:
        click.get_current_context().exit(1)


def ingest_one(how: Measuring, checkpoint: Wanted, lineage: str | None, several: bool = False) -> Outcome:
    """Measure one checkpoint, and say what was done."""
    with heavy_imports():
        from store.atlas import AtlasStore
        from store.ingestion import Identity, ingest_model
        from store.units import WorkersElsewhere

    model, name, step = checkpoint
    source = how.source(model)
    plan = source.plan()
    identity = Identity(name or plan.checkpoint.name, lineage, step)
    settings = how.settings()
    store = AtlasStore.open_or_create(how.store_path)
    elsewhere = None
    if how.workers:
        elsewhere = WorkersElsewhere(source, settings, identity.model, how.store_path, how.workers, how.cluster)
    with progress_reporter(identity.model) as progress, telling_what_is_kept(store, identity.model):
        outcome = ingest_model(
            store,
            plan,
            identity,
            settings,
            replace_existing=how.replace_existing,
            progress=progress,
            elsewhere=elsewhere,
            only_assemble=how.only_assemble,
        )
    tell_outcome(plan, outcome, identity, several)
    return outcome


def tell_outcome(plan: Plan, outcome: Outcome, identity: Identity, several: bool) -> None:
    """Say what an ingest did; of one among several on stderr, where the rest of the table's making goes."""
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
        done = f"{outcome.model}: already stored with the same content, nothing to do (--replace measures again)"
        click.echo(done, err=several)
        if (identity.lineage, identity.step) != (outcome.lineage, outcome.step) and identity.lineage is not None:
            click.echo(
                f"warning: it is stored as step {outcome.step} of {outcome.lineage or 'no lineage'}; "
                "--replace stores it with the one given",
                err=True,
            )
    else:
        click.echo(
            f"{outcome.model}: {heads:,} heads in {len(plan.layers)} layers, {' and '.join(outcome.operators)}, "
            f"{outcome.bytes_read:,} bytes read{over_network(plan)}, {outcome.seconds:.1f} s",
            err=several,
        )
    for note in (note for transfers in plan.checkpoint.transfers for note in transfers.notes):
        click.echo(f"{outcome.model}: {note}", err=True)
    for item in plan.skipped:
        click.echo(f"{outcome.model}: {item.stack} layer {item.layer} skipped: {item.reason}", err=True)
    for note in plan.recognition.notes:
        click.echo(f"{outcome.model}: {note}", err=True)


@contextmanager
def telling_what_is_kept(store: AtlasStore, model: str) -> Iterator[None]:
    """When an ingest fails, say what of it is kept for the next try."""
    from store.unfinished import unfinished_ingests

    try:
        yield
    except BaseException:
        for found in unfinished_ingests(store):
            if found.model == model and found.measured:
                kept = f"{found.measured} of {found.layers} measured layers are kept"
                click.echo(f"{model}: {kept}; the same command goes on from there", err=True)
        raise


def over_network(plan: Plan) -> str:
    """What moved to read a checkpoint that is not on this machine; it includes headers."""
    moved = sum(transfers.moved for transfers in plan.checkpoint.transfers)
    return f", {moved:,} moved over the network" if moved else ""


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

    \b
    headatlas plan ./SmolLM2-135M
    headatlas plan model.gguf --operator both --format json
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
    """List the models of the store.

    \b
    headatlas models
    headatlas models --format json
    """
    from query import questions

    print_rows(store_path, questions.MODELS, style, output, show_sql)


@main.command()
@click.argument("model")
@store_option
@row_options
def describe(model: str, store_path: Path, style: str, output: Path | None, show_sql: bool) -> None:
    """Everything recorded about one MODEL.

    \b
    headatlas describe SmolLM2
    """
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


@main.command()
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


def usage(read: Callable[[str], Result], text: str) -> Result:
    """What is read from an option's text; what cannot be read is a mistake in the use of the command."""
    try:
        return read(text)
    except QueryError as error:
        raise click.UsageError(str(error)) from error


@main.command()
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


@main.command()
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


@main.command()
@question_options("model", "layer", "head")
@click.option(
    "--intervals",
    type=click.Choice(("bootstrap", "wilson")),
    help="Add 95% intervals, the rate's by resampling layers or by Wilson at the effective number of heads.",
)
def closure(
    models: tuple[str, ...],
    store_path: Path,
    threshold: float,
    by: str,
    operator: str | None,
    intervals: RateMethod | None,
    style: str,
    output: Path | None,
    show_sql: bool,
) -> None:
    """How many heads of MODELS nearly close: T^2 ~ alpha T.

    --by head lists every head at or above the threshold.

    With --intervals, rate and median have 95% bounds that hold for heads which are not independent: whole
    layers vary, with the heads that share values in them. The median's bounds are always from resampled
    layers. For rates of a few percent wilson is the safer. A rate of 0 or 1 has Wilson bounds in either
    case, with each layer counted as one head. design_effect is how many times the variance of the rate
    exceeds that of independent heads, effective_heads how many of those the heads are worth; the same for
    the median. value_group_effect is the median's with heads of one value in place of heads of one layer,
    1 where every head has its own. The bounds tell about other layers, not about other models.

    \b
    headatlas closure --intervals wilson
    headatlas closure SmolLM2 --threshold 0.8 --intervals bootstrap
    """
    from query import questions

    if intervals is not None:
        if by != "model" or show_sql:
            raise click.UsageError("--intervals goes with --by model, and is no query that --sql could print")
        with opened(store_path) as atlas:
            print_frame(atlas.closure_intervals(threshold, models, operator, intervals), style, output)
        return
    names = list(models) if show_sql else known_models(store_path, models)
    print_rows(store_path, questions.closure(threshold, by, names, operator), style, output, show_sql)


question_command(
    "mismatch",
    ("model", "layer"),
    """Closure of one head's O with another head's V, as a null.

    Pairs that share a value projection are no mismatch and do not count.

    \b
    headatlas mismatch
    headatlas mismatch SmolLM2 --by layer --operator raw
    """,
)
question_command(
    "algebra",
    ("model", "group", "pair"),
    """The right-action law T_i T_j ~ alpha_j T_i where head j is strong.

    The left action and pairs of other value groups are the controls.

    \b
    headatlas algebra
    headatlas algebra SmolLM2 --by group --operator raw
    headatlas algebra --by pair --threshold 0.95
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

    \b
    headatlas trajectory my-model
    headatlas trajectory my-model --by head --operator raw
    headatlas trajectory my-model --figure trajectory.pdf
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
            from query.provenance import provenance

            steps = atlas.ask(questions.trajectory(threshold, "step", lineages, operator))
            source = provenance(atlas, str(questions.trajectory(threshold, "step", lineages, operator)))
            save_figure(trajectory_figure(steps, threshold), figure, source)
        print_frame(atlas.ask(question), style, output)


@main.command()
@click.argument("name", required=False, metavar="[NAME]")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@store_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to draw to: .pdf, .svg or .png."
)
@click.option(
    "--style",
    type=click.Choice(("screen", "paper")),
    default="screen",
    show_default=True,
    help="paper is one column, 3.3 inches wide, and leaves the title to the caption.",
)
@click.option("--operator", type=click.Choice(STORED_OPERATORS), default="raw", show_default=True, help="Which.")
@click.option("--stack", help="One stack only, where a model has several.")
@click.option("--column", help="heatmap: a number of heads.  [default: closure]")
@click.option("--layer", type=click.IntRange(min=0), help="mismatch, head, algebra: one layer.")
@click.option("--head", type=click.IntRange(min=0), help="head: which, with --layer.  [default: of highest closure]")
@click.option("--threshold", type=click.FloatRange(0, 1), help="Closure of a strong head.  [default: 0.9]")
def plot(
    name: str | None,
    models: tuple[str, ...],
    store_path: Path,
    output: Path | None,
    style: str,
    operator: str,
    stack: str | None,
    column: str | None,
    layer: int | None,
    head: int | None,
    threshold: float | None,
) -> None:
    """Draw the figure NAME of MODELS to a file; without NAME, list the figures.

    What the figure was made from is in the file's metadata. The same store and options on the same day
    give the same bytes.

    \b
    headatlas plot
    headatlas plot heatmap -o closure.pdf --style paper
    headatlas plot heatmap SmolLM2 --column alpha -o alpha.png
    headatlas plot head SmolLM2 --layer 5 --head 3 -o head.svg
    """
    from query.figures import Choice, Style, drawing, figure_list, form_of

    if name is None:
        print_frame(figure_list(), "table", output)
        return
    if output is None:
        raise click.UsageError("plot needs a file to draw to: -o FILE.pdf, .svg or .png")
    form_of(output)
    choice = Choice(models, operator, stack, column, layer, head, threshold, cast(Style, style))
    with opened(store_path) as atlas:
        drawn = drawing(atlas, name, choice)
    drawn.save(output)
    for note in drawn.notes:
        click.echo(f"{name}: {note}", err=True)


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
    """Parameters of MODEL that no output determines, and how its expressivity grows; headers only.

    \b
    headatlas identify ./SmolLM2-135M
    headatlas identify model.gguf --rotary 0 --tokens 4096
    """
    import polars as pl

    from ingest.identification import identification_rows

    planned = make_plan(model, operator, config_path, family, base)
    print_frame(pl.DataFrame(identification_rows(planned, rotary, tokens)), style, output)


@main.command()
@click.argument("lineage")
@store_option
@format_options
def drift(lineage: str, store_path: Path, style: str, output: Path | None) -> None:
    """How far each head turns between the steps of LINEAGE; needs ingest --keep-factors.

    \b
    headatlas ingest runs/my-model --lineage my-model --keep-factors
    headatlas drift my-model --format csv --output drift.csv
    """
    from query.drift import drift as between_steps

    with opened(store_path) as atlas:
        print_frame(between_steps(atlas, lineage), style, output)


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODELS...")
@store_option
@click.option("--column", default="closure", show_default=True, help="Numeric column of heads to compare.")
@click.option(
    "--by",
    type=click.Choice(("model", "depth", "head", "pair")),
    default="model",
    show_default=True,
    help="Distributions and effects; medians by relative depth; each head in both; how heads agree in all.",
)
@click.option("--threshold", type=float, help="With --by model: value of a strong head.  [default: 0.9 for closure]")
@click.option("--bins", type=click.IntRange(1, 1000), help="With --by depth: bins of relative depth.  [default: 10]")
@click.option("--operator", type=click.Choice(STORED_OPERATORS), default="raw", show_default=True, help="Which one.")
@click.option("--stack", "stacks", multiple=True, help="A stack to compare; repeatable.  [default: all in common]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the resampled layers.")
@format_options
def compare(
    models: tuple[str, ...],
    store_path: Path,
    column: str,
    by: str,
    threshold: float | None,
    bins: int | None,
    operator: str,
    stacks: tuple[str, ...],
    seed: int,
    style: str,
    output: Path | None,
) -> None:
    """Compare MODELS with the first of them.

    Differences are a model's value less the first one's, with 95% intervals; delta is Cliff's delta, above
    0 where the model's heads tend to have larger values. By head and by pair take models of one shape: a
    fine-tuned one against its base, or two quantisations.

    \b
    headatlas compare SmolLM2-135M Qwen2.5-0.5B
    headatlas compare SmolLM2-135M Qwen2.5-0.5B --by depth --bins 5 --column participation
    headatlas compare base tuned --by pair
    """
    if threshold is not None and by != "model":
        raise click.UsageError("--threshold goes with --by model")
    if bins is not None and by != "depth":
        raise click.UsageError("--bins goes with --by depth")
    from query.comparison import compare as side_by_side
    from query.selection import select

    with opened(store_path) as atlas:
        selection = select(atlas, models, column, operator, stacks)
        for model, left_out in selection.left_out.items():
            click.echo(f"{model}: left out {', '.join(left_out)}, which not every model has", err=True)
        print_frame(side_by_side(selection, by, threshold, bins or 10, seed), style, output)


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

    \b
    headatlas capacity
    headatlas capacity SmolLM2 --by layer
    headatlas capacity --refine --starts 4
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

    \b
    headatlas derive leading_share.py
    headatlas derive leading_share.py SmolLM2
    headatlas derive --remove leading_share
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
    """The published panel numbers beside this store's own.

    A row for every claim and model, and for the models together: `pooled` names them, each set of weights
    once and of a training run the last step. Values of the raw operator have a 95% interval from resampled
    layers, and agree where it reaches what was published. It tells about other layers of the same models,
    so that a difference may be one between models. Claims about scrambles and capacities need
    `headatlas null` and `headatlas capacity` first.

    \b
    headatlas panel
    headatlas panel --threshold 0.95 --format markdown --output panel.md
    """
    with opened(store_path) as atlas:
        print_frame(atlas.panel(threshold), style, output)


@main.command()
@click.argument("words", nargs=-1, metavar="[NAME [MODEL]...]")
@timeout_option
@store_option
@click.option("--query", help="SQL to export instead of a name; - reads it from stdin.")
@click.option(
    "-p", "--param", "--set", "parameters", multiple=True, metavar="NAME=VALUE", help="Value of a parameter of it."
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File; its ending says the form.")
@click.option("--format", "style", type=click.Choice(EXPORT_FORMATS), help="Form.  [default: by the file's ending]")
@click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only; paper tables take raw.")
@click.option("--threshold", type=click.FloatRange(0, 1), help="Closure of a strong head; paper tables take 0.9.")
@click.option("--caption", help="Caption for latex (as LaTeX) and markdown.")
@click.option("--label", help="Label for latex.  [default: tab:NAME]")
@click.option(
    "--digits",
    type=click.IntRange(1, 16),
    default=3,
    show_default=True,
    help="Significant digits in latex and markdown; other formats keep all.",
)
@click.option("--no-provenance", is_flag=True, help="Leave out where the rows come from.")
@click.option("--check", "checked", is_flag=True, help="Say of exported files whether they still match the store.")
@click.pass_context
def export(
    ctx: click.Context,
    words: tuple[str, ...],
    timeout: float | None,
    store_path: Path,
    query: str | None,
    parameters: tuple[str, ...],
    output: Path | None,
    style: str | None,
    operator: str | None,
    threshold: float | None,
    caption: str | None,
    label: str | None,
    digits: int,
    no_provenance: bool,
    checked: bool,
) -> None:
    """Write a table or a query to a file, ready for a paper.

    NAME is a table of the paper, a table of the catalogue, a macro or a question of `headatlas ask`; without
    one, they are listed. With MODEL (for paper-trajectory: training run), of these only. A file holds where
    its rows come from: the query, the models by content, the version and the day. --check asks again.

    \b
    headatlas export paper-closure -o closure.tex
    headatlas export heads SmolLM2-135M -o heads.parquet
    headatlas export 'strongest_heads(5)' -o strongest.csv
    headatlas export --query "SELECT label, closure FROM heads WHERE closure > 0.9" -o strong.md
    headatlas export --check closure.tex heads.parquet
    """
    with opened(store_path) as atlas:
        atlas.timeout = timeout
        if checked:
            if not words:
                raise click.UsageError("--check needs the files: headatlas export --check FILE...")
            if not print_checks(atlas, [Path(word) for word in words]):
                ctx.exit(1)
            return
        from query.export import Request, listing
        from query.export import export as write

        if query is not None and words:
            raise click.UsageError("give a NAME or --query, not both")
        if query is None and not words:
            print_frame(listing(atlas), "table", None)
            return
        from query.parameters import assignment, split

        request = Request(
            name=words[0] if words else "",
            sql=sys.stdin.read() if query == "-" else query or "",
            parameters=dict(usage(split if query is None else assignment, text) for text in parameters),
            models=words[1:],
            operator=operator,
            threshold=threshold,
        )
        table = write(
            atlas, request, output, style, digits=digits, caption=caption, label=label, sourced=not no_provenance
        )
    for note in table.notes:
        click.echo(note, err=True)
    if output is not None:
        click.echo(f"{output}: {len(table.rows):,} {'row' if len(table.rows) == 1 else 'rows'}", err=True)


def print_checks(atlas: Atlas, files: list[Path]) -> bool:
    """Compare exported files with the store and print what became of each; whether all match."""
    import polars as pl

    from query.checking import check

    findings = [check(atlas, file) for file in files]
    rows = [(finding.file, finding.outcome, finding.detail) for finding in findings]
    print_frame(pl.DataFrame(rows, schema=["file", "outcome", "detail"], orient="row"), "table", None)
    return all(finding.outcome == "ok" for finding in findings)


@main.command()
@click.argument("models", nargs=-1)
@store_option
@click.option("--operator", type=click.Choice(STORED_OPERATORS), help="One operator only.")
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Closure of a strong head."
)
@click.option("--title", default="Attention heads", show_default=True, help="What stands above the page.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=Path("report.html"),
    show_default=True,
    help="File to write; - is stdout.",
)
def report(
    models: tuple[str, ...],
    store_path: Path,
    operator: str | None,
    threshold: float,
    title: str,
    output: Path,
) -> None:
    """One HTML file of the heads of MODELS, to explore in a browser and to hand on.

    Heatmap, scatter, table and a card for every head, with its spectra, null and pairs. The file needs
    neither a network nor the store.

    \b
    headatlas report
    headatlas report SmolLM2-135M -o smollm2.html
    """
    from query.output import deliver_bytes
    from query.report import report as page

    with opened(store_path) as atlas:
        data = page(atlas, models, operator, threshold, title).encode()
    to_stdout = str(output) == "-"
    deliver_bytes(data, None if to_stdout else output)
    if not to_stdout:
        click.echo(f"{output}: {len(data) / 1e6:.1f} MB")


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
    """Make the catalogue again from the arrays.

    \b
    headatlas rebuild
    headatlas rebuild --store runs/atlas
    """
    from store.atlas import AtlasStore
    from store.integrity import rebuild as make_again

    count = make_again(AtlasStore.open(store_path))
    click.echo(f"catalogue made from the arrays of {count} {'model' if count == 1 else 'models'}")


@main.command()
@click.argument("model")
@store_option
def remove(model: str, store_path: Path) -> None:
    """Remove MODEL from the store.

    \b
    headatlas remove SmolLM2
    """
    from store.atlas import AtlasStore
    from store.integrity import remove as take_out

    take_out(AtlasStore.open(store_path), model)
    click.echo(f"{model}: removed")


if __name__ == "__main__":
    main()
