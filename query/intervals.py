"""Intervals of closure rates and medians, for heads that are not independent.

Heads of a layer resemble each other, and heads that share values all the more. An interval that takes
every head for a draw of its own is then too narrow. Here the layers of a model vary, each with all its
heads, and so with all the heads that share a value. The intervals say how a number would vary over other
layers like these; they do not say how it varies from model to model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import polars as pl
import polars.selectors as cs

from stats.errors import QueryError, nearest

if TYPE_CHECKING:
    from query.atlas import Atlas

RateMethod = Literal["bootstrap", "wilson"]
STACK = ("model", "operator", "stack")
RATE_METHODS: tuple[str, ...] = get_args(RateMethod)

HEADS = """SELECT model, operator, stack, layer, kv_head, closure
FROM heads
WHERE ($models IS NULL OR list_contains($models, model)) AND ($operator IS NULL OR operator = $operator)
ORDER BY model, operator DESC, stack, layer, head"""

SCHEMA = {
    "model": pl.String,
    "operator": pl.String,
    "stack": pl.String,
    "heads": pl.Int64,
    "defined": pl.Int64,
    "strong": pl.Int64,
    "rate": pl.Float64,
    "rate_low": pl.Float64,
    "rate_high": pl.Float64,
    "rate_method": pl.String,
    "median": pl.Float64,
    "median_low": pl.Float64,
    "median_high": pl.Float64,
    "layers": pl.Int64,
    "design_effect": pl.Float64,
    "effective_heads": pl.Float64,
    "median_design_effect": pl.Float64,
    "median_effective_heads": pl.Float64,
    "value_groups": pl.Int64,
    "value_group_effect": pl.Float64,
}


def closure_intervals(
    atlas: Atlas,
    threshold: float = 0.9,
    models: Sequence[str] | None = None,
    operator: str | None = None,
    method: RateMethod = "bootstrap",
    *,
    level: float = 0.95,
    seed: int = 0,
) -> pl.DataFrame:
    """Closure rate and median of every model, operator and stack, between their bounds.

    The median's bounds come from resampling layers. So do those of the rate by ``bootstrap``, unless no
    head or every head is strong, where resampling shows nothing and ``rate_method`` says ``wilson``. By
    ``wilson`` the rate has a Wilson interval at the effective number of heads: prefer it for small rates,
    which the bootstrap covers less often than it says (``stats.inference`` has the measurements).

    Args:
        atlas: the store that is asked.
        threshold: closure at or above which a head is strong, 0 to 1.
        models: names to keep; all when None.
        operator: raw, folded or scaled; each on its own rows when None.
        method: how the rate's bounds are made.
        level: coverage, between 0 and 1.
        seed: of the resamples; the same seed gives the same bounds.

    Returns:
        A row per model, operator and stack:

        - ``heads``, ``defined`` (those whose closure exists) and ``strong``;
        - ``rate`` of the strong among the defined, ``rate_low``, ``rate_high``, ``rate_method``;
        - ``median`` closure, ``median_low``, ``median_high``;
        - ``layers``, which are what is resampled;
        - ``design_effect``, how many times the variance of the rate exceeds that of independent heads, at
          least 1, and ``effective_heads``, the number of independent heads worth as much, ``defined /
          design_effect``. Where no head or every head is strong nothing is known of how alike they are;
          a layer then counts as one head;
        - ``median_design_effect`` and ``median_effective_heads``, the same for the share of heads above
          the median;
        - ``value_groups``, how many value projections the heads read, and ``value_group_effect``, the
          design effect on the median with these in place of layers: what the likeness of heads with one
          value costs, 1 where every head has its own.

        NULL where undefined: bounds with a single layer, everything without a defined closure.

    Raises:
        QueryError: a threshold out of range, an unknown model or method.
        HeadatlasError: a level that is no probability.
    """
    if not 0 <= threshold <= 1:
        raise QueryError("a closure threshold out of range", expected="0 to 1", found=str(threshold))
    if method not in RATE_METHODS:
        raise QueryError("unknown kind of interval", expected="one of " + ", ".join(RATE_METHODS), found=str(method))
    _require_stored(atlas, models or ())
    heads = atlas.sql(HEADS, {"models": list(models) if models else None, "operator": operator})
    rows = [
        dict(zip(STACK, key, strict=True)) | _measured(part, threshold, method, level, seed)
        for key, part in heads.group_by(STACK, maintain_order=True)
    ]
    return pl.DataFrame(rows, schema=SCHEMA).with_columns(cs.float().fill_nan(None))


def _measured(part: pl.DataFrame, threshold: float, method: RateMethod, level: float, seed: int) -> dict[str, Any]:
    """The columns of one row after its key, from the heads of one stack; NaN where undefined."""
    from stats.inference import (
        ClusteredHeads,
        cluster_interval,
        design_effect,
        rate_design_effect,
        rate_interval,
        weighted_mean,
        weighted_median,
    )

    defined = part.drop_nulls("closure")
    closure, layer = defined["closure"].to_numpy(), defined["layer"].to_numpy()
    value_group = defined.select(pl.struct("layer", "kv_head").rank("dense")).to_series().to_numpy()
    n_defined, count = len(defined), int((closure >= threshold).sum())

    strong = ClusteredHeads(closure >= threshold, layer)
    resampled = method == "bootstrap" and 0 < count < n_defined
    rate = (
        cluster_interval(strong, weighted_mean, level=level, seed=seed) if resampled else rate_interval(strong, level)
    )
    median = cluster_interval(ClusteredHeads(closure, layer), weighted_median, level=level, seed=seed)
    above = closure > median.estimate
    rate_effect, median_effect = rate_design_effect(strong), design_effect(ClusteredHeads(above, layer))
    return {
        "heads": len(part),
        "defined": n_defined,
        "strong": count,
        "rate": rate.estimate,
        "rate_low": rate.low,
        "rate_high": rate.high,
        "rate_method": None if np.isnan(rate.low) else "bootstrap" if resampled else "wilson",
        "median": median.estimate,
        "median_low": median.low,
        "median_high": median.high,
        "layers": len(np.unique(layer)),
        "design_effect": rate_effect,
        "effective_heads": n_defined / rate_effect,
        "median_design_effect": median_effect,
        "median_effective_heads": n_defined / median_effect,
        "value_groups": len(np.unique(value_group)),
        "value_group_effect": design_effect(ClusteredHeads(above, value_group)),
    }


def _require_stored(atlas: Atlas, models: Sequence[str]) -> None:
    known = atlas.sql("SELECT model FROM models ORDER BY model")["model"].to_list()
    for name in models:
        if name not in known:
            raise QueryError(
                f"no model named {name!r}",
                where=str(atlas.path),
                expected="one of " + ", ".join(known),
                found=name,
                remedy=nearest(name, known),
            )
