"""Models side by side: distributions, depth by depth, and head by head where the architecture is one.

Heads of different operators or stacks are never put together: one operator at a time, and a row for each
stack that all models have. Effects are those of a model against the first one, with 95% intervals that
take whole layers for what varies independently (``stats.inference``).
"""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

import polars as pl

from query.frames import comparison, require_threshold
from query.selection import Selection, require_one_shape
from stats.errors import QueryError

if TYPE_CHECKING:
    from stats.inference import ClusteredHeads, Interval

GROUPINGS = ("model", "depth", "head", "pair")
MOST_BINS = 1000

PLACE = ("operator", "stack")
EFFECTS = ("median_difference", "rate_difference", "delta")


def compare(
    selection: Selection, by: str = "model", threshold: float | None = None, bins: int = 10, seed: int = 0
) -> pl.DataFrame:
    """Models side by side in one frame.

    Args:
        selection: the heads, from ``select``.
        by: ``model``, ``depth``, ``head`` or ``pair``; see ``by_model`` and its neighbours.
        threshold: value at or above which a head is strong; 0.9 for closure, none for other columns.
        bins: of the relative depth.
        seed: of the resamples.

    Raises:
        QueryError: an unknown grouping, a threshold of closure outside 0 to 1, no bin, or for ``head`` and
            ``pair`` models of different shape.
    """
    if by == "model":
        return by_model(selection, threshold, seed)
    if by == "depth":
        return by_depth(selection, bins)
    if by == "head":
        return by_head(selection)
    if by == "pair":
        return by_pair(selection, seed)
    raise QueryError("unknown grouping", expected="one of " + ", ".join(GROUPINGS), found=by)


def by_model(selection: Selection, threshold: float | None = None, seed: int = 0) -> pl.DataFrame:
    """A row per stack and model: its distribution, and its effects against the first model.

    ``median_difference`` and ``rate_difference`` are the model's less the first's; ``delta`` is Cliff's
    ``P(X > Y) - P(X < Y)`` of its heads X and the first's Y, in [-1, 1], the probability of superiority
    being ``(1 + delta) / 2``. Bounds are 95% intervals, the models' layers resampled apart; for rates
    they come from Wilson's. The first model has no effects; rates are NULL for a column without a
    threshold.
    """
    if selection.column == "closure":
        threshold = require_threshold(0.9 if threshold is None else threshold)
    keys = (*PLACE, "model")
    sides = comparison(selection.heads, "value", threshold, keys).collect()
    effects = [
        {"stack": stack, "model": model, **_effects(selection, stack, model, threshold, seed)}
        for stack in selection.stacks
        for model in selection.models[1:]
    ]
    bounds = [name for effect in EFFECTS for name in (effect, f"{effect}_low", f"{effect}_high")]
    types = {"stack": pl.String, "model": pl.String, **dict.fromkeys(bounds, pl.Float64)}
    joined = sides.join(pl.DataFrame(effects, schema=types), on=["stack", "model"], how="left")
    return _in_order(joined, selection, "stack", "model")


def by_depth(selection: Selection, bins: int = 10) -> pl.DataFrame:
    """A row per stack, bin of relative depth and model: the median there, and its difference from the first's.

    The relative depth of a layer is its place among the stack's layers that have rows, 0 for the first and
    1 for the last. Bins are equal, closed below; the last one is closed above too. A model without
    layers in a bin has 0 heads there.
    """
    if not 1 <= bins <= MOST_BINS:
        raise QueryError("a number of depth bins out of range", expected=f"1 to {MOST_BINS}", found=str(bins))
    stack = (*PLACE, "model")
    place = pl.col("layer").rank("dense").cast(pl.Int64).over(stack) - 1
    last = pl.max_horizontal(pl.col("layer").n_unique().over(stack) - 1, 1).cast(pl.Int64)
    found = (
        selection.heads.with_columns(bin=pl.min_horizontal(place * bins // last, bins - 1))
        .group_by(*stack, "bin")
        .agg(
            layers=pl.col("layer").n_unique().cast(pl.Int64),
            heads=pl.len().cast(pl.Int64),
            defined=pl.col("value").count().cast(pl.Int64),
            median=pl.col("value").median(),
        )
    )
    edges = pl.DataFrame({"bin": range(bins)}).with_columns(
        depth_from=pl.col("bin") / bins, depth_to=(pl.col("bin") + 1) / bins
    )
    grid = selection.heads.select(*PLACE).unique().join(edges, how="cross")
    rows = grid.join(pl.DataFrame({"model": selection.models}), how="cross")
    rows = rows.join(found, on=[*stack, "bin"], how="left").with_columns(
        pl.col("layers", "heads", "defined").fill_null(0)
    )
    first = pl.col("model") == selection.models[0]
    base = pl.col("median").filter(first).first().over(*PLACE, "bin")
    rows = rows.with_columns(difference=pl.when(~first).then(pl.col("median") - base))
    shown = ("bin", "depth_from", "depth_to", "model", "layers", "heads", "defined", "median", "difference")
    return _in_order(rows, selection, "stack", "bin", "model").select(*PLACE, *shown)


def by_head(selection: Selection) -> pl.DataFrame:
    """A row per head and model after the first: both values and their difference, the largest first.

    Raises:
        QueryError: models whose layers, heads or widths differ.
    """
    require_one_shape(selection)
    first = selection.models[0]
    key = (*PLACE, "layer", "head")
    own = selection.heads.filter(pl.col("model") == first).select(*key, "label", first="model", first_value="value")
    theirs = selection.heads.filter(pl.col("model") != first).select(*key, "model", "value")
    rows = own.join(theirs, on=key).with_columns(difference=pl.col("value") - pl.col("first_value"))
    rows = rows.with_columns(size=-pl.col("difference").abs())
    shown = ("label", "first", "model", "first_value", "value", "difference")
    return _in_order(rows, selection, "size", "stack", "model", "layer", "head").select(*key, *shown)


def by_pair(selection: Selection, seed: int = 0) -> pl.DataFrame:
    """A row per stack and model after the first: how its heads agree with the first's, head by head.

    ``pearson`` and ``spearman`` are over the heads defined in both, ``within_1_percent`` is the share of
    them whose value is within 1% of the first model's, ``paired_difference`` is the median of the heads'
    differences with a 95% interval, whole layers resampled, and ``largest_difference`` the one of
    largest size.

    Raises:
        QueryError: models whose layers, heads or widths differ.
    """
    from stats.inference import cluster_interval, weighted_median

    rows = []
    for (stack, model), heads in by_head(selection).group_by("stack", "model", maintain_order=True):
        both = heads.filter(pl.col("difference").is_not_null())
        interval = cluster_interval(_clustered(both, "difference"), weighted_median, seed=seed)
        near = pl.col("difference").abs() <= 0.01 * pl.col("first_value").abs()
        rows.append(
            both.select(
                operator=pl.lit(heads["operator"][0]),
                stack=pl.lit(stack),
                first=pl.lit(selection.models[0]),
                model=pl.lit(model),
                heads=pl.lit(len(heads), pl.Int64),
                defined=pl.len().cast(pl.Int64),
                pearson=pl.corr("first_value", "value"),
                spearman=pl.corr("first_value", "value", method="spearman"),
                within_1_percent=near.mean(),
                **{name: pl.lit(bound, pl.Float64) for name, bound in _bounds("paired_difference", interval).items()},
                largest_difference=pl.col("difference").first(),
                largest_head=pl.col("label").first(),
            )
        )
    return _in_order(pl.concat(rows), selection, "stack", "model").with_columns(pl.col(pl.Float64).fill_nan(None))


def _effects(
    selection: Selection, stack: str, model: str, threshold: float | None, seed: int
) -> dict[str, float | None]:
    """Effects of a model against the first, each with its bounds."""
    from stats.inference import cliffs_delta_interval, difference_interval, rate_difference_interval, weighted_median

    pair = [selection.of(stack, name) for name in (model, selection.models[0])]
    own, first = (_clustered(heads, "value") for heads in pair)
    found = _bounds("median_difference", difference_interval(own, first, weighted_median, seed=seed))
    found |= _bounds("delta", cliffs_delta_interval(own, first, seed=seed))
    if threshold is not None:
        own, first = (_clustered(heads.with_columns(pl.col("value") >= threshold), "value") for heads in pair)
        found |= _bounds("rate_difference", rate_difference_interval(own, first))
    return found


def _clustered(heads: pl.DataFrame, column: str) -> ClusteredHeads:
    """A column of one model and stack with the layer as cluster."""
    from stats.inference import ClusteredHeads

    return ClusteredHeads(heads[column].cast(pl.Float64).to_numpy(), heads["layer"].to_numpy())


def _bounds(name: str, interval: Interval) -> dict[str, float | None]:
    """An interval as three columns, NULL where undefined."""
    numbers = {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {column: None if isnan(number) else number for column, number in numbers.items()}


def _in_order(rows: pl.DataFrame, selection: Selection, *columns: str) -> pl.DataFrame:
    """Rows sorted by columns, models as they were asked for and NULLs last."""
    asked = pl.col("model").cast(pl.Enum(selection.models))
    return rows.sort([asked if name == "model" else name for name in columns], nulls_last=True)
