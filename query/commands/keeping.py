"""Commands that check, mend, move and remove what is stored."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from query.commands.ingesting import make_plan
from query.commands.options import format_options, store_option, taking_options
from query.commands.printing import heavy_imports, print_frame, progress_reporter
from stats.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from ingest.plan import Operator
    from store.atlas import AtlasStore
    from store.pack_file import Packed


@click.command()
@click.argument("model", required=False)
@click.option(
    "--against",
    type=click.Choice(("transformers",)),
    help="Compare with the modules of this library as they run; MODEL is then a checkpoint, as for ingest.",
)
@click.option("--operator", type=click.Choice(("raw", "folded")), help="With --against: which one.  [default: raw]")
@click.option("--name", help="With --against: name in the store.  [default: the directory, file or hub name]")
@click.option("--layers", metavar="N,N,...", help="With --against: these layers only.  [default: all]")
@click.option("--repair", is_flag=True, help="Clean up after crashes, and make a damaged catalogue again.")
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
    repair: bool,
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

    With --repair: what commands that ended early have left is listed and deleted, also the measured layers of
    unfinished ingests, and a damaged or missing catalogue is made from the sealed arrays. What is published stays
    as it is, and so does what a running command has staged.

    \b
    headatlas verify
    headatlas verify SmolLM2-135M
    headatlas verify --repair
    headatlas verify ./SmolLM2-135M --against transformers
    """
    from store.atlas import AtlasStore

    if against is None:
        if (operator, name, layers) != (None, None, None):
            raise click.UsageError("--operator, --name and --layers go with --against")
        if repair and model is not None:
            raise click.UsageError("--repair is for the whole store: leave MODEL out")
        sound = print_findings(AtlasStore.open(store_path), model, style, output, repair)
    elif repair:
        raise click.UsageError("--repair does not go with --against")
    elif model is None:
        raise click.UsageError("--against needs the checkpoint to run: headatlas verify MODEL --against transformers")
    else:
        chosen = None if layers is None else [layer_number(text) for text in layers.split(",")]
        sound = compare_with_running(model, operator or "raw", name, chosen, store_path, style, output)
    if not sound:
        ctx.exit(1)


def print_findings(store: AtlasStore, model: str | None, style: str, output: Path | None, repair: bool) -> bool:
    """Check a store, or one model of it, and print what is found; whether nothing is wrong."""
    import polars as pl

    from store.integrity import verify as check

    if repair:
        from store.repair import repair as mend

        findings = list(mend(store))
    else:
        findings = list(check(store, model))
    wrong = [finding for finding in findings if finding.kind not in ("running", "repaired")]
    if findings:
        rows = [(finding.model, finding.where, finding.problem) for finding in findings]
        print_frame(pl.DataFrame(rows, schema=["model", "where", "problem"], orient="row"), style, output)
    if not wrong:
        count = 1 if model else len(store.models())
        verified = f"ok: {count} {'model' if count == 1 else 'models'} verified"
        click.echo(verified, err=style != "table" or bool(findings))
    elif any(finding.kind in ("leftover", "unfinished") for finding in wrong):
        click.echo("what commands that ended early have left goes with: headatlas verify --repair", err=True)
    return not wrong


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
    numbers, texts = ("operator_error", "shifted_error", "stored_error"), ("neutralised", "reason")
    types = dict.fromkeys(numbers, pl.Float64()) | dict.fromkeys(texts, pl.String())
    print_frame(pl.DataFrame(rows, schema_overrides=types), style, output)
    outcomes = [row["outcome"] for row in rows]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    click.echo(f"{stored.model}, {operator}, against {running.model_class}: of {len(rows)} layers {counts}", err=True)
    return "ok" in outcomes and "differs" not in outcomes


@click.command()
@store_option
def rebuild(store_path: Path) -> None:
    """Make the catalogue again from the arrays.

    \b
    headatlas rebuild
    headatlas rebuild --store runs/atlas
    """
    from store.atlas import AtlasStore
    from store.integrity import Finding
    from store.integrity import rebuild as make_again

    damaged: list[Finding] = []
    count = make_again(AtlasStore.open(store_path), damaged.append)
    click.echo(f"catalogue made from the arrays of {count} {'model' if count == 1 else 'models'}")
    for finding in damaged:
        click.echo(f"warning: left out, for its arrays are damaged: {finding.where}: {finding.problem}", err=True)
    if damaged:
        click.get_current_context().exit(1)


@click.command()
@click.argument("other", type=click.Path(path_type=Path, exists=True))
@click.argument("models", nargs=-1)
@taking_options
def merge(
    other: Path,
    models: tuple[str, ...],
    store_path: Path,
    without: tuple[str, ...],
    renames: tuple[str, ...],
    replace_existing: bool,
) -> None:
    """Take MODELS of another store, or of a pack, into the store; all where none is named.

    OTHER is only read. Each model comes with what was derived from it, every checksum is verified on the way,
    and it is here as a whole or not at all. The same name and content is left as it is and gets the operators
    and derivations it lacks; all names with other content are told before anything is done. Questions kept in
    the other store come along, unless one of that name is here.

    \b
    headatlas merge ../colleague/atlas
    headatlas merge supplement.headatlas SmolLM2 --rename SmolLM2=SmolLM2-theirs
    """
    take_in(other, models, store_path, without, renames, replace_existing)


def take_in(
    other: Path,
    models: tuple[str, ...],
    store_path: Path,
    without: tuple[str, ...],
    renames: tuple[str, ...],
    replace_existing: bool,
) -> None:
    """Take models of another place, and say what became of each."""
    from store.atlas import AtlasStore

    with heavy_imports():
        from store.merging import merge as take
        from store.merging import merge_questions
        from store.pack_file import place_at

    with place_at(other) as place:
        names = dict(renaming(text, place.models().keys()) for text in renames)
        store = AtlasStore.open_or_create(store_path)
        for done in take(store, place, models, names, without, replace_existing=replace_existing):
            called = done.model if done.model == done.source else f"{done.model} (there {done.source})"
            taken = f", {len(done.units)} {'unit' if len(done.units) == 1 else 'units'}" if done.units else ""
            click.echo(f"{called}: {done.action}{taken}")
            for note in done.notes:
                click.echo(f"{done.model}: {note}", err=True)
        found, differing = merge_questions(store, place)
    if found:
        click.echo(f"questions: {', '.join(found)}")
    for name in differing:
        click.echo(f"queries/{name} is another one here and was left as it is", err=True)


def renaming(text: str, known: Collection[str]) -> tuple[str, str]:
    """Old and new name of ``OLD=NEW``; names may hold ``=``."""
    splits = [(text[:place], text[place + 1 :]) for place, sign in enumerate(text) if sign == "="]
    if not splits:
        raise click.UsageError(f"--rename wants OLD=NEW, not {text!r}")
    return next((split for split in splits if split[0] in known), splits[0])


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("models", nargs=-1)
@click.option("--check", "checked", is_flag=True, help="Check FILE, a pack, instead of writing it.")
@store_option
def pack(file: Path, models: tuple[str, ...], checked: bool, store_path: Path) -> None:
    """Write MODELS, or the whole store, to one FILE, such as the supplement of a paper.

    It is a zip that holds a store: the arrays with their checksums, a catalogue of these models, and the store's
    own questions. The same content gives the same bytes. --check reads a pack and verifies every byte of it.

    \b
    headatlas pack supplement.headatlas
    headatlas pack smollm2.headatlas SmolLM2-135M
    headatlas pack --check supplement.headatlas
    """
    if checked:
        if models:
            raise click.UsageError("--check takes a single FILE")
        with heavy_imports():
            from store.pack_file import check

        found = check(file)
        click.echo(f"ok: {described(found)} verified")
        return
    with heavy_imports():
        from store.packing import pack as write

    click.echo(f"{file}: {described(write(store_path, file, models))}")


def described(found: Packed) -> str:
    """What a pack holds, in words."""
    models = f"{len(found.models)} {'model' if len(found.models) == 1 else 'models'}"
    return f"{models}, {found.files:,} files, {found.size / 1e6:.1f} MB"


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@taking_options
def unpack(
    file: Path, store_path: Path, without: tuple[str, ...], renames: tuple[str, ...], replace_existing: bool
) -> None:
    """Take all models of the pack FILE into the store, a new one where there is none.

    Every byte of FILE is verified before anything is stored. In a store that is there, this is
    `headatlas merge FILE`.

    \b
    headatlas unpack supplement.headatlas --store paper
    """
    take_in(file, (), store_path, without, renames, replace_existing)


@click.command()
@store_option
def migrate(store_path: Path) -> None:
    """Bring a store that an older version wrote up to date.

    What changes, attributes and the catalogue, is backed up inside the store first. Arrays stay as they are.
    A store of an older format can be read before, as far as its catalogue goes, and is not written.

    \b
    headatlas migrate --store runs/atlas
    """
    with heavy_imports():
        from store.migration import migrate as bring_up

    done = bring_up(store_path)
    if done.found == done.wanted:
        click.echo(f"the store has format {done.wanted} already, nothing to do")
        return
    for summary in done.summaries:
        click.echo(f"format {done.found} to {done.wanted}: {summary}")
    models = f"{done.models} {'model' if done.models == 1 else 'models'}"
    click.echo(f"{models} brought to format {done.wanted}; what there was is kept in {done.backup}")


@click.command()
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


COMMANDS = (verify, rebuild, merge, pack, unpack, migrate, remove)
