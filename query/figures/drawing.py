"""The figures by name: what each shows, which choices it has, and how it is drawn from a store."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from query.figures.capacity import draw_closure_capacity
from query.figures.comparison import draw_comparison
from query.figures.distribution import draw_closure_distribution
from query.figures.head import draw_head
from query.figures.heatmap import draw_heatmap
from query.figures.pairs import draw_algebra, draw_mismatch
from query.figures.saving import save_figure
from query.figures.selection import Choice, Drawn, unknown
from query.figures.style import STYLES, Style
from query.figures.trajectory import draw_trajectory
from query.provenance import Provenance, provenance
from stats.errors import QueryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from query.atlas import Atlas


@dataclass(frozen=True, slots=True)
class Kind:
    """A figure that can be asked for; ``options`` are the choices it heeds besides operator, stack and style."""

    name: str
    description: str
    options: tuple[str, ...]
    draw: Callable[[Atlas, Choice], Drawn]


OWN_OPTIONS = ("column", "layer", "head", "threshold")

KINDS = {
    kind.name: kind
    for kind in (
        Kind("heatmap", "a number of every head, layer by head, a panel a model", ("column",), draw_heatmap),
        Kind(
            "closure-distribution",
            "closure of trained heads against scrambled ones, a panel a model",
            ("threshold",),
            draw_closure_distribution,
        ),
        Kind(
            "closure-capacity",
            "closure of every head against the most it could have",
            ("threshold",),
            draw_closure_capacity,
        ),
        Kind("mismatch", "closure of each head's O with each head's V in one layer", ("layer",), draw_mismatch),
        Kind("head", "singular values, cosines, eigenvalues and core of one head", ("layer", "head"), draw_head),
        Kind(
            "algebra",
            "right against left action of strong heads, shared values and controls",
            ("layer", "threshold"),
            draw_algebra,
        ),
        Kind(
            "trajectory", "closure over the steps of training runs, named like models", ("threshold",), draw_trajectory
        ),
        Kind(
            "comparison",
            "closure of several models: distributions, and medians by depth",
            ("threshold",),
            draw_comparison,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure drawn from a store, with what it was made from and what has to be said about it."""

    name: str
    figure: Figure
    source: Provenance
    notes: tuple[str, ...]
    style: Style

    def save(self, path: Path) -> None:
        """Write it as ``save_figure`` does, with its provenance in the file."""
        save_figure(self.figure, path, self.source, self.style, f"Headatlas {self.name}")


def figure_list() -> pl.DataFrame:
    """Every figure with what it shows and the options it heeds."""
    return pl.DataFrame(
        {
            "figure": list(KINDS),
            "shows": [kind.description for kind in KINDS.values()],
            "options": [" ".join(f"--{option}" for option in kind.options) for kind in KINDS.values()],
        }
    )


def drawing(atlas: Atlas, name: str, choice: Choice) -> Drawing:
    """Draw a figure by name.

    Raises:
        QueryError: an unknown figure, style or option of another figure; what the store does not hold.
    """
    if name not in KINDS:
        raise unknown("figure", name, list(KINDS), "headatlas plot", "list the figures with: headatlas plot")
    if choice.style not in STYLES:
        raise unknown("style", choice.style, STYLES, name)
    given = [option for option in OWN_OPTIONS if getattr(choice, option) is not None]
    for option in given:
        if option not in KINDS[name].options:
            having = [kind.name for kind in KINDS.values() if option in kind.options]
            raise QueryError(
                f"the figure {name} has no --{option}",
                expected=", ".join(f"--{own}" for own in (*KINDS[name].options, "operator", "stack", "style")),
                remedy=f"leave it out, or draw one of {', '.join(having)}",
            )
    if not 0 <= choice.strong <= 1:
        raise QueryError("a closure threshold out of range", expected="0 to 1", found=str(choice.threshold))
    drawn = KINDS[name].draw(atlas, choice)
    models = list(dict.fromkeys(item.model for item in drawn.selected.populations))
    source = provenance(atlas, _command(name, choice), pl.DataFrame({"model": models}))
    return Drawing(name, drawn.figure, source, tuple(drawn.selected.notes), choice.style)


def draw(
    atlas: Atlas,
    name: str,
    models: Sequence[str] = (),
    *,
    style: Style = "screen",
    operator: str = "raw",
    stack: str | None = None,
    column: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    threshold: float | None = None,
) -> Figure:
    """Draw a figure of ``headatlas plot`` from a store.

    Args:
        atlas: the store.
        name: one of ``figure_list``.
        models: names to show, all when empty; for ``trajectory`` names of training runs.
        style: ``screen`` or ``paper``, one column of 3.3 inches.
        operator: raw, folded or scaled.
        stack: which attention, where a model has several.
        column: for ``heatmap``, a numeric column of heads; closure when None.
        layer: for ``mismatch``, ``head`` and ``algebra``.
        head: for ``head``, with ``layer``; the head of highest closure when None.
        threshold: closure of a strong head, 0 to 1; 0.9 when None.

    Raises:
        QueryError: an unknown name or option; what the store does not hold, with the command that makes it.
    """
    return drawing(atlas, name, Choice(tuple(models), operator, stack, column, layer, head, threshold, style)).figure


def _command(name: str, choice: Choice) -> str:
    """The command that draws the figure, as a person would type it."""
    options = [
        f"--{option} {shlex.quote(str(getattr(choice, option)))}"
        for option in ("operator", "stack", *OWN_OPTIONS, "style")
        if getattr(choice, option) is not None
    ]
    return " ".join(["headatlas plot", name, *map(shlex.quote, choice.models), *options])
