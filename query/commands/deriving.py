"""Commands that derive nulls, capacities and statistics of a user, and store them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from query.commands.options import derivation_options, store_option
from query.commands.printing import heavy_imports, known_models, print_rows, progress_reporter

if TYPE_CHECKING:
    from store.atlas import Derivation


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


@click.command()
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


@click.command()
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


@click.command()
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


COMMANDS = (null, capacity, derive)
