"""Commands that look at checkpoints and take them into the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from query.commands.options import OPERATORS, ByteSize, Part, checkpoint_options, format_options, measuring_options
from query.commands.printing import heavy_imports, print_facts, print_frame, progress_reporter
from stats.errors import CheckpointError, HeadatlasError

if TYPE_CHECKING:
    from ingest.pipeline import ComputeSettings
    from ingest.plan import Operator, Plan
    from store.atlas import AtlasStore
    from store.ingestion import Identity, Outcome
    from store.units import Source


def make_plan(model: str, operator: str, config_path: Path | None, family: str | None, base: str | None) -> Plan:
    """Open a checkpoint and plan it; headers only."""
    from ingest.plan import plan_checkpoint
    from ingest.source import open_checkpoint

    operators = cast("tuple[Operator, ...]", OPERATORS[operator])
    return plan_checkpoint(open_checkpoint(model, config_path, base), operators, family)


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


@click.command()
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


@click.command()
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


@click.command()
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


@click.command()
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


COMMANDS = (ingest, assemble, plan, identify)
