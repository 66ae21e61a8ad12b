"""Training runs: closure, capacity and the level of the null over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from query import questions
from query.drift import require_runs
from query.figures.selection import Choice, Drawn, Population, Selected, unknown
from query.figures.style import DARK, GREY, MAX_PANELS, WARM, Style, legend_below, outer_labels, panels, settle, styled
from stats.errors import QueryError, nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from query.atlas import Atlas


def trajectory_figure(steps: pl.DataFrame, threshold: float, style: Style = "screen", title: str = "") -> Figure:
    """Closure, capacity and null level over training steps, a panel for each run.

    Args:
        steps: rows of ``trajectory_by_step`` of one operator and stack.
        threshold: closure at which a head of the final step counts as strong.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.

    Raises:
        QueryError: no rows, or rows of several operators or stacks.
    """
    kinds = steps.select("operator", "stack").unique().rows()
    if len(kinds) != 1:
        raise QueryError(
            "a trajectory is drawn for one operator and stack",
            expected="rows of one",
            found=", ".join("/".join(kind) for kind in sorted(kinds)) or "no rows",
            remedy="choose with --operator",
        )
    runs = steps["lineage"].unique().sort().to_list()
    with styled(style):
        figure, used = panels(runs, style, title, 0.42 if style == "paper" else 0.9, 1 if style == "paper" else 3)
        for axes, run in zip(used, runs, strict=True):
            _draw_run(axes, steps.filter(lineage=run).sort("step"), threshold)
        lowest = min(axes.get_ylim()[0] for axes in used)
        for axes in used:
            axes.set_ylim(lowest, 1.4)
        outer_labels(used, "training step", "median closure [0 to 1]")
        found = {
            label: handle for axes in used for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        legend_below(figure, list(found.values()), list(found), style)
        return settle(figure)


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


def draw_trajectory(atlas: Atlas, choice: Choice) -> Drawn:
    """The training runs of a choice, whose ``models`` are lineages.

    Raises:
        QueryError: no such run with two steps, operator or stack, or more runs than fit.
    """
    known = atlas.sql("SELECT DISTINCT lineage FROM models WHERE lineage IS NOT NULL ORDER BY 1")["lineage"].to_list()
    for lineage in choice.models:
        if lineage not in known and nearest(lineage, known):
            raise unknown("training run", lineage, known, str(atlas.path))
    require_runs(atlas, choice.models)
    steps = atlas.ask(questions.trajectory(choice.strong, "step", choice.models, choice.operator))
    if choice.stack is not None:
        stacks = steps["stack"].unique().sort().to_list()
        if choice.stack not in stacks:
            raise unknown("stack", choice.stack, stacks, str(atlas.path))
        steps = steps.filter(stack=choice.stack)
    runs = steps["lineage"].unique().sort().to_list()
    if len(runs) > MAX_PANELS:
        raise QueryError(
            "too many runs for one figure",
            expected=f"at most {MAX_PANELS}",
            found=str(len(runs)),
            remedy="name some of them",
        )
    rows = atlas.sql(
        "SELECT model FROM models WHERE list_contains($runs, lineage) ORDER BY lineage, step", {"runs": runs}
    )
    figure = trajectory_figure(steps, choice.strong, choice.style, f"closure over training, {choice.operator}")
    return Drawn(figure, Selected([Population(model, "", model) for model in rows["model"]]))
