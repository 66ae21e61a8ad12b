"""Closure of heads against the most that their singular values and cosines allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from query.figures.colour import numbers
from query.figures.selection import Choice, Drawn, needs, populations, rows_of
from query.figures.style import GREY, Style, label_of, legend_below, new_figure, series_style, settle, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from query.atlas import Atlas

CAPACITIES = """SELECT model, stack, layer, head, method, heads.closure, capacities.closure AS capacity
FROM capacities JOIN heads USING (model, operator, stack, layer, head)
WHERE operator = $operator AND heads.closure IS NOT NULL AND capacities.closure IS NOT NULL"""

MANY = 1000
"""Points of one model from which on they are an image within the file."""


def closure_capacity_figure(
    rows: pl.DataFrame,
    method: str = "assignment",
    threshold: float = 0.9,
    style: Style = "screen",
    title: str = "",
) -> Figure:
    """A point for each head, a marker for each model, under the line where closure is the capacity.

    Args:
        rows: ``panel``, ``capacity`` and ``closure`` of every head that has both.
        method: how the capacities were found.
        threshold: closure of a strong head; a line on either axis.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.
    """
    parts = rows.partition_by("panel", maintain_order=True)
    capacity = numbers(rows["capacity"])
    with styled(style):
        height = 0.7 if style == "screen" else 0.8 + 0.06 * len(parts)
        figure = new_figure(style, height, title)
        axes = figure.subplots()
        for number, part in enumerate(parts):
            looks = series_style(number)
            filled = looks["markerfacecolor"] == looks["color"]
            axes.scatter(
                numbers(part["capacity"]),
                numbers(part["closure"]),
                s=6 if style == "paper" else 16,
                marker=looks["marker"],
                facecolors=looks["color"] if filled else "none",
                edgecolors=looks["color"],
                linewidths=0.5,
                alpha=0.75,
                rasterized=len(part) > MANY,
                label=part["panel"][0],
            )
        low = min(float(capacity.min()), threshold)
        low -= 0.04 * (1 - low)
        axes.plot([low, 1], [low, 1], color="black", linewidth=0.8, label="closure = capacity")
        axes.axhline(threshold, color=GREY, linestyle=":", linewidth=0.8, label=f"threshold {threshold:g}")
        axes.axvline(threshold, color=GREY, linestyle=":", linewidth=0.8)
        axes.set_xlim(low, 1.005)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel(label_of("capacity", "0 to 1") + f", found by {method}")
        axes.set_ylabel(label_of("closure"))
        legend_below(figure, *axes.get_legend_handles_labels(), style)
        return settle(figure)


def draw_closure_capacity(atlas: Atlas, choice: Choice) -> Drawn:
    """Closure against capacity of a choice; by ascent where every model has been searched so.

    Raises:
        QueryError: capacities that have not been derived; as in ``populations``.
    """
    selected = populations(atlas, choice)
    rows = rows_of(atlas, CAPACITIES, {"operator": choice.operator}, selected.populations)
    having = set(rows["panel"])
    without = [item for item in selected.populations if item.name not in having]
    if without and (choice.models or len(without) == len(selected.populations)):
        models = list(dict.fromkeys(item.model for item in without))
        raise needs("capacities", models, "capacity", choice.operator, str(atlas.path))
    selected.leave_out([item for item in selected.populations if item.name in having], "no capacities")
    selected.limit(bool(choice.models))
    names = {item.name for item in selected.populations}
    rows = rows.filter(pl.col("panel").is_in(names))
    climbed = rows.filter(method="riemannian")
    method = "riemannian" if set(climbed["panel"]) == names else "assignment"
    title = f"closure and capacity of every head, {choice.operator}"
    named = "ascent" if method == "riemannian" else method
    figure = closure_capacity_figure(rows.filter(method=method), named, choice.strong, choice.style, title)
    return Drawn(figure, selected)
