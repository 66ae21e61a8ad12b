"""What commands share when they open a store, print rows and report progress."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from stats.errors import printable

if TYPE_CHECKING:
    import polars as pl

    from query.atlas import Atlas
    from query.questions import Question


Result = TypeVar("Result")


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


def print_facts(facts: Mapping[str, Any]) -> None:
    """Name and value on a line each; empty values are left out."""
    shown = {name: value for name, value in facts.items() if value not in (None, [], "")}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        for line in value if isinstance(value, list) else [value]:
            click.echo(f"{name:<{width}}  {f'{line:,}' if isinstance(line, int) else printable(str(line))}")
