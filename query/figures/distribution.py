"""How closure is distributed: trained heads against scrambled ones, and models against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from query.figures.colour import numbers
from query.figures.selection import Choice, Drawn, Selected, head_rows, needs, null_draws, populations, rows_of
from query.figures.style import (
    DARK,
    GREY,
    WARM,
    Style,
    label_of,
    legend_below,
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

PROBABILITIES = np.linspace(0.0, 1.0, 401)
"""Where the distribution of pooled draws is drawn; there are too many for a point each."""

LOG_SPAN = 50.0
"""Closures whose 95% quantile is this many times their 5% quantile are drawn on a logarithmic axis."""


def closure_distribution_figure(
    heads: pl.DataFrame,
    null: Mapping[str, np.ndarray],
    null_name: str = "scrambled heads",
    threshold: float = 0.9,
    style: Style = "screen",
    title: str = "",
) -> Figure:
    """Share of heads at or below each closure, trained and scrambled, a panel for each model.

    Args:
        heads: rows with ``panel`` and ``closure``; heads without closure are left out.
        null: closure of scrambled heads (draw,) by panel; more than 401 are drawn as quantiles.
        null_name: what the legend calls them.
        threshold: closure of a strong head, a vertical line.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.
    """
    parts = heads.filter(pl.col("closure").is_not_null()).partition_by("panel", maintain_order=True)
    trained = {part["panel"][0]: np.sort(numbers(part["closure"])) for part in parts}
    everything = np.concatenate([*trained.values(), *(null[name] for name in trained)])
    with styled(style):
        figure, used = panels(list(trained), style, title, 0.75)
        for axes, (name, closure) in zip(used, trained.items(), strict=True):
            share = np.arange(1, len(closure) + 1) / len(closure)
            axes.step(closure, share, where="post", color=DARK, linestyle="-", label="trained heads")
            scrambled = np.sort(null[name])
            if len(scrambled) > len(PROBABILITIES):
                axes.plot(
                    np.quantile(scrambled, PROBABILITIES), PROBABILITIES, color=WARM, linestyle="--", label=null_name
                )
            else:
                share = np.arange(1, len(scrambled) + 1) / len(scrambled)
                axes.step(scrambled, share, where="post", color=WARM, linestyle="--", label=null_name)
            axes.axvline(threshold, color=GREY, linestyle=":", linewidth=0.8, label=f"closure {threshold:g}")
            closure_axis(axes, everything)
            axes.set_ylim(0, 1.02)
        outer_labels(used, label_of("closure"), "share [0 to 1]")
        legend_below(figure, *used[0].get_legend_handles_labels(), style)
        return settle(figure)


def closure_axis(axes: Axes, closure: np.ndarray) -> None:
    """The x axis of closures: logarithmic where most of them lie far below the largest."""
    positive = closure[closure > 0]
    low, high = np.quantile(positive, [0.05, 0.95]) if positive.size else (1.0, 1.0)
    if high > LOG_SPAN * low:
        axes.set_xscale("log", nonpositive="clip")
        axes.set_xlim(10 ** np.floor(np.log10(np.quantile(positive, 0.01))), 1.2)
    else:
        axes.set_xlim(0, 1 if closure.max() > 0.5 else float(closure.max()) * 1.05 or 1.0)


NULLS = """SELECT model, stack, layer, head, median
FROM nulls WHERE kind = 'scramble' AND operator = $operator AND median IS NOT NULL"""


def draw_closure_distribution(atlas: Atlas, choice: Choice) -> Drawn:
    """Trained against scrambled closure of a choice, from the stored draws, or else the heads' medians.

    Raises:
        QueryError: scrambles that have not been drawn, or no head with a closure; as in ``populations``.
    """
    selected = populations(atlas, choice)
    heads = with_closure(atlas, choice, selected)
    medians = rows_of(atlas, NULLS, {"operator": choice.operator}, selected.populations)
    having = set(medians["panel"])
    without = [item for item in selected.populations if item.name not in having]
    if without and (choice.models or len(without) == len(selected.populations)):
        models = list(dict.fromkeys(item.model for item in without))
        raise needs("scrambles", models, "null", choice.operator, str(atlas.path))
    selected.leave_out([item for item in selected.populations if item.name in having], "nothing drawn")
    selected.limit(bool(choice.models))
    names = [item.name for item in selected.populations]
    draws = [null_draws(atlas, item, choice.operator) for item in selected.populations]
    if all(part is not None for part in draws):
        null, said = {name: part for name, part in zip(names, draws, strict=True) if part is not None}, "every draw"
    else:
        null, said = {name: numbers(medians.filter(panel=name)["median"]) for name in names}, "each head's median"
    figure = closure_distribution_figure(
        heads.filter(pl.col("panel").is_in(names)),
        null,
        f"scrambled heads, {said}",
        choice.strong,
        choice.style,
        f"closure of trained and scrambled heads, {choice.operator}",
    )
    return Drawn(figure, selected)


def with_closure(atlas: Atlas, choice: Choice, selected: Selected) -> pl.DataFrame:
    """Rows of heads of the populations that have a closure anywhere; the others are left out.

    Raises:
        QueryError: none has.
    """
    heads = head_rows(atlas, choice, selected.populations)
    having = set(heads.filter(pl.col("closure").is_not_null())["panel"])
    if not having:
        reasons = heads["reason"].drop_nulls().unique().sort().to_list()
        raise QueryError(
            "no head of these has a closure",
            where=", ".join(item.name for item in selected.populations),
            found=", ".join(reasons),
            remedy="choose other models or another --stack",
        )
    selected.leave_out([item for item in selected.populations if item.name in having], "no head has a closure")
    return heads.filter(pl.col("panel").is_in(having))
