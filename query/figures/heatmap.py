"""Layer by head: any number of every head as the colour of a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from query.figures.colour import dot_negative, draw_matrix, hatch_cells, numbers, scale_of
from query.figures.selection import Choice, Drawn, head_rows, numeric_columns, populations, unknown, values_of
from query.figures.style import (
    FONT,
    SIGNED,
    WIDTH,
    Style,
    columns_for,
    declared,
    label_of,
    legend_below,
    outer_labels,
    panels,
    settle,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from query.atlas import Atlas


def heatmap_figure(
    heads: pl.DataFrame, column: str = "closure", values: str | None = None, style: Style = "screen", title: str = ""
) -> Figure:
    """A panel for each model, a cell for each head.

    Undefined heads are hatched, cells without a head stay blank, and negative values carry a dot. One
    scale serves all panels, except for columns in units of the weights, which models do not share.

    Args:
        heads: rows with ``panel``, ``layer``, ``head`` and the column, as ``selection.head_rows`` gives them.
        column: a numeric column.
        values: its unit or range; from the registry when None.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.
    """
    known = declared(column)
    unit = values if values is not None else known.values if known else ""
    everything = numbers(heads[column])
    signed = column in SIGNED or bool((everything < 0).any())
    parts = heads.partition_by("panel", maintain_order=True)
    own = unit.startswith("weight units") and len(parts) > 1
    scale = scale_of(everything, unit, signed)
    with styled(style):
        figure, used = panels([part["panel"][0] for part in parts], style, title, 0.7, drawn=0.66)
        images = []
        for axes, part in zip(used, parts, strict=True):
            if own:
                scale = scale_of(numbers(part[column]), unit, signed)
            matrix, extent = matrix_of(part, column)
            images.append(draw_matrix(axes, matrix, scale, extent))
            missing = part.filter(~np.isfinite(numbers(part[column])))
            hatch_cells(axes, missing["head"].to_numpy(), missing["layer"].to_numpy())
            _whole_ticks(axes, WIDTH[style] / columns_for(len(parts)) * 72 / FONT[style])
            if own:
                figure.colorbar(images[-1], ax=axes, extend=scale.extend, aspect=16, pad=0.03)
        label = label_of(column, unit) + scale.note
        if not own:
            figure.colorbar(images[0], ax=used, extend=scale.extend, aspect=22, pad=0.02).set_label(label)
        outer_labels(used, "layer", "head")
        scales = f"colour: {label}, on each model's own scale" if own else ""
        _legend(figure, everything, scales, any(_has_gaps(part) for part in parts), style)
        settle(figure)
        for axes, image, part in zip(used, images, parts, strict=True):
            dot_negative(axes, image, part["head"].to_numpy(), part["layer"].to_numpy(), numbers(part[column]))
    return figure


def matrix_of(part: pl.DataFrame, column: str) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """One model's values (head, layer), NaN where there is none, and the edges of the matrix."""
    layers, heads = part["layer"].to_numpy(), part["head"].to_numpy()
    first = layers.min()
    matrix = np.full((heads.max() + 1, layers.max() - first + 1), np.nan)
    matrix[heads, layers - first] = numbers(part[column])
    matrix[~np.isfinite(matrix)] = np.nan
    return matrix, (first - 0.5, layers.max() + 0.5, -0.5, heads.max() + 0.5)


def _whole_ticks(axes: Axes, ems: float) -> None:
    """As many ticks at whole layers and heads as a panel of that width has room for."""
    from matplotlib.ticker import MaxNLocator

    for axis, count in ((axes.xaxis, int(ems * 0.22)), (axes.yaxis, 4)):
        count = min(max(count, 2), 6)
        axis.set_major_locator(MaxNLocator(count, integer=True))


def _has_gaps(part: pl.DataFrame) -> bool:
    """Whether some layer within the range lacks heads that others have, or all."""
    matrix, _ = matrix_of(part, "layer")
    return matrix.size > len(part)


def _legend(figure: Figure, values: np.ndarray, scales: str, gaps: bool, style: Style) -> None:
    """What hatching, blanks and dots mean, where there are any, and what the colours are."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[tuple[Line2D | Patch, str]] = []
    if scales:
        entries.append((Line2D([], [], linestyle=""), scales))
    if undefined := int((~np.isfinite(values)).sum()):
        patch = Patch(facecolor="white", edgecolor="0.35", hatch="/////", linewidth=0.4)
        entries.append((patch, f"undefined ({undefined:,} of {len(values):,} heads)"))
    if gaps:
        entries.append((Line2D([], [], linestyle=""), "blank: no head"))
    if (values < 0).any():
        entries.append((Line2D([], [], linestyle="", marker="o", markersize=3, color="black"), "negative"))
    legend_below(figure, [mark for mark, _ in entries], [text for _, text in entries], style)


def draw_heatmap(atlas: Atlas, choice: Choice) -> Drawn:
    """The heatmap of a choice.

    Raises:
        QueryError: an unknown column, or one that holds no numbers; as in ``populations``.
    """
    column = choice.column or "closure"
    known = numeric_columns(atlas)
    if column not in known:
        raise unknown("column of numbers in heads", column, known, str(atlas.path))
    selected = populations(atlas, choice)
    selected.limit(bool(choice.models))
    heads = head_rows(atlas, choice, selected.populations)
    title = f"{column.replace('_', ' ')} of every head, {choice.operator}"
    figure = heatmap_figure(heads, column, values_of(atlas, column), choice.style, title)
    return Drawn(figure, selected)
