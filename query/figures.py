"""Figures for a paper: from frames to files, readable in grey and by colour-blind readers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from stats.errors import QueryError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK, WARM, GREY = "#0b3c6f", "#d55e00", "#7f7f7f"
"""Two colours that differ in lightness as well as in hue, and a grey."""

PANEL_WIDTH, PANEL_HEIGHT = 2.6, 2.5
"""Inches of one panel."""

SUFFIXES = (".pdf", ".svg", ".png")

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
}


def trajectory_figure(steps: pl.DataFrame, threshold: float) -> Figure:
    """Closure, capacity and null level over training steps, a panel for each run.

    Args:
        steps: rows of ``trajectory_by_step`` of one operator and stack.
        threshold: closure at which a head of the final step counts as strong.

    Raises:
        QueryError: no rows, or rows of several operators or stacks.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kinds = steps.select("operator", "stack").unique().rows()
    if len(kinds) != 1:
        raise QueryError(
            "a trajectory is drawn for one operator and stack",
            expected="rows of one",
            found=", ".join("/".join(kind) for kind in sorted(kinds)) or "no rows",
            remedy="choose with --operator",
        )
    runs = steps["lineage"].unique().sort().to_list()
    with rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH * len(runs), PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for axes, run in zip(panels, runs, strict=True):
            _draw_run(axes, steps.filter(lineage=run).sort("step"), threshold)
            axes.set_title(run)
            axes.set_xlabel("training step")
        panels[0].set_ylabel("median closure")
        panels[0].set_ylim(top=1.4)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _draw_run(axes: Axes, steps: pl.DataFrame, threshold: float) -> None:
    """One run: capacity above, closure of the two cohorts, and the level of the null below."""
    strong, others = (steps.filter(cohort=cohort) for cohort in ("final strong", "others"))
    numbers = [int(step) for step in steps["step"] if step > 0] or [1]
    first, last = min(numbers), max(numbers)
    series = (
        (others, "capacity", GREY, "--", "s", "capacity"),
        (strong, "closure", WARM, "-", "o", f"heads finally at {threshold:g} or more"),
        (others, "closure", DARK, "-", "^", "other heads"),
        (others, "null_level", GREY, ":", "", "scramble null"),
    )
    for rows, column, colour, line, marker, label in series:
        known = rows.filter(pl.col(column).is_not_null())
        if len(known):
            axes.plot(known["step"], known[column], line, color=colour, marker=marker, label=label)
    axes.set_xscale("symlog", linthresh=first, linscale=0.4)
    axes.set_xlim(-first / 10, last * 1.15)
    ticks = [0, *(10**power for power in range(1, 10) if 2 * first <= 10**power <= last)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yscale("log")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as the file's ending says: PDF, SVG or PNG.

    Raises:
        QueryError: another ending, or a file that cannot be written.
    """
    from matplotlib import rc_context

    if path.suffix.lower() not in SUFFIXES:
        raise QueryError("an unknown form of figure", where=str(path), expected=", ".join(SUFFIXES), found=path.suffix)
    try:
        with rc_context(STYLE):
            figure.savefig(path)
    except OSError as error:
        raise QueryError(
            "the figure cannot be written",
            where=str(path),
            found=error.strerror or str(error),
            remedy="check the path and its permissions",
        ) from error
