"""Pairs of heads of a layer: one head's O with another's V, and products of two operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from query.figures.colour import draw_matrix, hatch_cells, numbers, scale_of
from query.figures.selection import (
    Choice,
    Drawn,
    Population,
    head_rows,
    one_population,
    populations,
    rows_of,
    strongest,
)
from query.figures.style import (
    DARK,
    GREY,
    WARM,
    WIDTH,
    Style,
    label_of,
    legend_below,
    new_figure,
    outer_labels,
    panels,
    settle,
    styled,
)
from stats.errors import QueryError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from query.atlas import Atlas

LAYER_PAIRS = """SELECT write_head, read_head, mismatch_closure FROM pairs
WHERE model = $model AND stack = $stack AND operator = $operator AND layer = $layer"""

PRODUCTS = """SELECT model, stack, layer, write_head, read_head, shared_value, right_closure, left_closure
FROM products($threshold) WHERE operator = $operator"""


def mismatch_figure(closure: np.ndarray, kv_head: np.ndarray, style: Style = "screen", title: str = "") -> Figure:
    """Closure of every head's O with every head's V, matched on the diagonal, heads that share values outlined.

    Args:
        closure: (write_head, read_head) closure of ``O_i V_j^T``; NaN where it is undefined.
        kv_head: (head,) value projection of each head.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    count = len(closure)
    scale = scale_of(closure, "0 to 1")
    with styled(style):
        figure = new_figure(style, 0.87 if style == "screen" else 0.92, title, square=True)
        axes = figure.subplots()
        image = draw_matrix(axes, closure, scale, (-0.5, count - 0.5, count - 0.5, -0.5))
        axes.set_aspect("equal")
        hatch_cells(axes, *np.nonzero(~np.isfinite(closure)))
        if len(set(kv_head)) < count:
            _outline_groups(axes, kv_head)
        figure.colorbar(image, ax=axes, extend=scale.extend, pad=0.02).set_label(label_of("closure") + scale.note)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(min(count, 12), integer=True))
        axes.set_xlabel("head j, whose V reads")
        axes.set_ylabel("head i, whose O writes")
        _dot_diagonal(axes, count, WIDTH[style] * 45 / count)
        dot = {"marker": "o", "markerfacecolor": "white", "markeredgecolor": "black", "markersize": 4}
        handles: list[Line2D | Patch] = [Line2D([], [], linestyle="", **dot)]  # type: ignore[arg-type]
        labels = ["matched, i = j"]
        if len(set(kv_head)) < count:
            handles.append(Patch(facecolor="none", edgecolor="black", linewidth=1.2))
            labels.append("heads that share values")
        if not np.isfinite(closure).all():
            handles.append(Patch(facecolor="white", edgecolor="0.35", hatch="/////", linewidth=0.4))
            labels.append("undefined")
        legend_below(figure, handles, labels, style)
        return settle(figure)


def _outline_groups(axes: Axes, kv_head: np.ndarray) -> None:
    """A line along every edge between a pair that shares values and one that does not."""
    from matplotlib.collections import LineCollection

    shared = np.pad(kv_head[:, None] == kv_head[None, :], 1)
    edges = []
    for row, column in np.argwhere(shared[1:, :] != shared[:-1, :]):
        edges.append([(column - 1.5, row - 0.5), (column - 0.5, row - 0.5)])
    for row, column in np.argwhere(shared[:, 1:] != shared[:, :-1]):
        edges.append([(column - 0.5, row - 1.5), (column - 0.5, row - 0.5)])
    for colour, width in (("white", 2.6), ("black", 1.2)):
        lines = LineCollection(edges, colors=colour, linewidths=width, capstyle="projecting", clip_on=False, zorder=3)
        axes.add_collection(lines)


def _dot_diagonal(axes: Axes, count: int, cell: float) -> None:
    """A dot where a head meets itself, sized by the cells, which are ``cell`` points wide."""
    size = min(max(0.3 * cell, 0.8), 4.0)
    middle = np.arange(count)
    axes.scatter(middle, middle, s=size**2, c="white", edgecolors="black", linewidths=0.4)


def draw_mismatch(atlas: Atlas, choice: Choice) -> Drawn:
    """The mismatch matrix of one layer, by default that of the head of highest closure.

    Raises:
        QueryError: several models or stacks, no such layer, or a stack whose heads read and write two spaces.
    """
    selected = one_population(atlas, choice)
    population = selected.populations[0]
    layer, _ = strongest(atlas, choice, population, choice.layer)
    heads = head_rows(atlas, choice, [population]).filter(layer=layer)
    closure = np.full((len(heads), len(heads)), np.nan)
    np.fill_diagonal(closure, numbers(heads["closure"]))
    rows = atlas.sql(
        LAYER_PAIRS,
        {"model": population.model, "stack": population.stack, "operator": choice.operator, "layer": layer},
    )
    closure[rows["write_head"].to_numpy(), rows["read_head"].to_numpy()] = numbers(rows["mismatch_closure"])
    if not np.isfinite(closure).any():
        raise QueryError(
            "no pair of heads of the layer has a closure",
            where=f"{population.name}, layer {layer}",
            found=", ".join(heads["reason"].drop_nulls().unique().sort().to_list()),
            remedy="choose another --layer or --stack",
        )
    if choice.layer is None:
        selected.notes.append(f"layer {layer}, that of the head of highest closure; another with --layer")
    title = f"{population.name}, layer {layer}, {choice.operator}"
    return Drawn(mismatch_figure(closure, heads["kv_head"].to_numpy(), choice.style, title), selected)


def algebra_figure(products: pl.DataFrame, threshold: float = 0.9, style: Style = "screen", title: str = "") -> Figure:
    """Right action against left action of products with a strong head, by whether the two heads share values.

    Args:
        products: ``panel``, ``shared_value``, ``right_closure`` and ``left_closure`` of every product.
        threshold: closure at which head j is strong; a horizontal line.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.
    """
    parts = products.partition_by("panel", maintain_order=True)
    left, right = (_decade_below(numbers(products[name])) for name in ("left_closure", "right_closure"))
    with styled(style):
        figure, used = panels([part["panel"][0] for part in parts], style, title, 0.95, 2 if style == "paper" else 3)
        for axes, part in zip(used, parts, strict=True):
            for shared, colour, marker, name in (
                (False, DARK, "o", "other group (control)"),
                (True, WARM, "^", "heads that share values"),
            ):
                chosen = part.filter(shared_value=shared)
                axes.scatter(
                    numbers(chosen["left_closure"]),
                    numbers(chosen["right_closure"]),
                    s=7 if style == "paper" else 18,
                    marker=marker,
                    facecolors=colour if shared else "none",
                    edgecolors=colour,
                    linewidths=0.6,
                    rasterized=len(chosen) > 1000,
                    label=name,
                )
            axes.plot(
                [min(left, right), 1],
                [min(left, right), 1],
                color=GREY,
                linestyle="--",
                linewidth=0.8,
                label="right = left",
            )
            axes.axhline(threshold, color=GREY, linestyle=":", linewidth=0.8, label=f"threshold {threshold:g}")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(left, 1.5)
            axes.set_ylim(right, 1.5)
        outer_labels(used, "left closure [0 to 1]", "right closure [0 to 1]")
        legend_below(figure, *used[0].get_legend_handles_labels(), style)
        return settle(figure)


def _decade_below(values: np.ndarray) -> float:
    """The power of ten at or below the smallest positive value, at most a tenth."""
    positive = values[np.isfinite(values) & (values > 0)]
    return float(min(0.1, 10 ** np.floor(np.log10(positive.min())))) if positive.size else 0.1


def draw_algebra(atlas: Atlas, choice: Choice) -> Drawn:
    """The algebra of a choice, of one layer where one is given.

    Raises:
        QueryError: no strong head whose values another head shares; as in ``populations``.
    """
    selected = populations(atlas, choice)
    rows = rows_of(atlas, PRODUCTS, {"threshold": choice.strong, "operator": choice.operator}, selected.populations)
    if choice.layer is not None:
        for item in selected.populations:
            strongest(atlas, choice, item, choice.layer)
        rows = rows.filter(layer=choice.layer)
    having = set(rows.filter(pl.col("shared_value"))["panel"])
    if not having:
        raise _nothing_strong(atlas, choice, selected.populations)
    kept = [item for item in selected.populations if item.name in having]
    selected.leave_out(kept, f"no head of {choice.strong:g} or more shares its values")
    selected.limit(bool(choice.models))
    names = [item.name for item in selected.populations]
    where = "" if choice.layer is None else f", layer {choice.layer}"
    title = f"T_i T_j where head j closes to {choice.strong:g} or more, {choice.operator}{where}"
    figure = algebra_figure(rows.filter(pl.col("panel").is_in(names)), choice.strong, choice.style, title)
    return Drawn(figure, selected)


def _nothing_strong(atlas: Atlas, choice: Choice, wanted: list[Population]) -> QueryError:
    """Why there is no product to draw: nothing is shared, or what is shared does not close."""
    heads = head_rows(atlas, choice, wanted)
    if choice.layer is not None:
        heads = heads.filter(layer=choice.layer)
    group = ["model", "stack", "layer", "kv_head"]
    sharing = heads.filter(pl.len().over(group) > 1, pl.col("closure").is_not_null())
    where = ", ".join(item.name for item in wanted) + ("" if choice.layer is None else f", layer {choice.layer}")
    if sharing.is_empty():
        return QueryError("no two heads share values", where=where, remedy="choose a model of grouped values")
    best = sharing.sort("closure", descending=True).row(0, named=True)
    return QueryError(
        "no head that shares its values is strong",
        where=where,
        expected=f"a closure of {choice.strong:g} or more",
        found=f"at most {best['closure']:.4g}, {best['label']} of {best['model']}",
        remedy="lower --threshold" + ("" if choice.layer is None else ", or choose another --layer"),
    )
