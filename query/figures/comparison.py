"""Several models beside each other: the distribution of closure, and closure by depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from query.figures.colour import numbers
from query.figures.distribution import closure_axis, with_closure
from query.figures.selection import Choice, Drawn, populations
from query.figures.style import (
    FAINT,
    FONT,
    GREY,
    WIDTH,
    Style,
    columns_for,
    label_of,
    legend_below,
    new_figure,
    panel_title,
    series_style,
    settle,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from query.atlas import Atlas


def comparison_figure(heads: pl.DataFrame, threshold: float = 0.9, style: Style = "screen", title: str = "") -> Figure:
    """Distributions of closure of several models, and below them medians by depth with bands between the quartiles.

    Args:
        heads: rows with ``panel``, ``layer`` and ``closure``; heads without closure are left out.
        threshold: closure of a strong head, a vertical line.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.
    """
    parts = heads.filter(pl.col("closure").is_not_null()).partition_by("panel", maintain_order=True)
    names = [part["panel"][0] for part in parts]
    depths = [by_depth(part) for part in parts]
    across = columns_for(len(parts))
    down = -(-len(parts) // across)
    small = WIDTH[style] / across * (0.62 if across < 3 else 0.8) + 2 * FONT[style] / 72
    upper = WIDTH[style] * 0.5
    legend_rows = len(parts) / (1 if style == "paper" else 2) * FONT[style] * 1.4 / 72
    with styled(style):
        figure = new_figure(style, (upper + down * small + legend_rows) / WIDTH[style] + 0.1, title)
        grid = figure.add_gridspec(down + 1, across, height_ratios=[upper, *[small] * down])
        whole = figure.add_subplot(grid[0, :])
        for number, part in enumerate(parts):
            closure = np.sort(numbers(part["closure"]))
            share = np.arange(1, len(closure) + 1) / len(closure)
            every = (number * len(closure) // (8 * len(parts)), max(1, len(closure) // 8))
            whole.plot(
                closure, share, drawstyle="steps-post", markevery=every, **series_style(number), label=names[number]
            )
        closure_axis(whole, numbers(heads["closure"].drop_nulls()))
        whole.axvline(threshold, color=GREY, linestyle=":", linewidth=0.8, label=f"closure {threshold:g}")
        whole.set_ylim(0, 1.02)
        whole.set_xlabel(label_of("closure"))
        whole.set_ylabel("share [0 to 1]")
        lower: list[Axes] = []
        for number, name in enumerate(names):
            axes = figure.add_subplot(grid[1 + number // across, number % across], sharey=lower[0] if lower else None)
            _draw_depth(axes, depths, number)
            panel_title(axes, name, WIDTH[style] / across * 0.85, style)
            axes.tick_params(labelleft=number % across == 0)
            if number + across >= len(names):
                axes.set_xlabel("depth [0 to 1]")
            if number % across == 0:
                axes.set_ylabel(label_of("closure"))
            lower.append(axes)
        handles, labels = whole.get_legend_handles_labels()
        legend_below(figure, handles, labels, style)
        return settle(figure)


def by_depth(part: pl.DataFrame) -> pl.DataFrame:
    """Median and quartiles of closure by layer, with ``depth`` from 0 at the first layer to 1 at the last."""
    closure = pl.col("closure")
    rows = part.group_by("layer").agg(
        closure.quantile(0.25, "linear").alias("lower"),
        closure.median().alias("median"),
        closure.quantile(0.75, "linear").alias("upper"),
    )
    layer = pl.col("layer")
    span = pl.max_horizontal(layer.max() - layer.min(), 1)
    return rows.sort("layer").with_columns(((layer - layer.min()) / span).alias("depth"))


def _draw_depth(axes: Axes, depths: list[pl.DataFrame], number: int) -> None:
    """One model's median and the band between its quartiles, over the medians of the others."""
    for other in [*depths[:number], *depths[number + 1 :]]:
        axes.plot(other["depth"], other["median"], color=FAINT, linewidth=0.6)
    mine = depths[number]
    axes.fill_between(
        mine["depth"], mine["lower"], mine["upper"], color=series_style(number)["color"], alpha=0.45, linewidth=0
    )
    axes.plot(mine["depth"], mine["median"], color="black")
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])


def draw_comparison(atlas: Atlas, choice: Choice) -> Drawn:
    """The comparison of a choice.

    Raises:
        QueryError: no head with a closure; as in ``populations``.
    """
    selected = populations(atlas, choice)
    with_closure(atlas, choice, selected)
    selected.limit(bool(choice.models))
    heads = with_closure(atlas, choice, selected)
    title = f"closure of models, {choice.operator}"
    return Drawn(comparison_figure(heads, choice.strong, choice.style, title), selected)
