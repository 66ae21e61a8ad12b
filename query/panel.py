"""The published panel numbers beside a store's own, with intervals and a verdict.

The numbers are those of the paper on scaled idempotence of OV operators: six endpoints from 2.8B
to 235B parameters, and nine MHA and GQA models with 7,304 heads. Raw operator throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from query.atlas import Atlas
    from stats.inference import ClusteredHeads, Interval

POOLED = "all models"
"""Name of the rows that take every model together."""

NO_DRAWS = "no scrambles are stored: draw them with headatlas null"
NO_CAPACITY = "no capacities are stored: compute them with headatlas capacity"


@dataclass(frozen=True, slots=True)
class Answer:
    """A store's own number for a claim: the number and its 95% interval, where there is one, and in words."""

    value: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    agrees: bool | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One published statement; ``test`` answers it from the heads and pairs of some models."""

    claim: str
    published: str
    test: Callable[[Heads], Answer]


@dataclass(frozen=True, slots=True)
class Heads:
    """What claims are tested on: heads with their null and capacity, pairs, and the threshold."""

    heads: pl.DataFrame
    pairs: pl.DataFrame
    threshold: float

    def of(self, model: str) -> Heads:
        """The part of one model."""
        own = pl.col("model") == model
        return Heads(self.heads.filter(own), self.pairs.filter(own), self.threshold)

    def clustered(self, value: str, table: pl.DataFrame | None = None) -> ClusteredHeads:
        """A column with the layer as cluster and the model as stratum."""
        from stats.inference import ClusteredHeads

        rows = (self.heads if table is None else table).filter(pl.col(value).is_not_null())
        cluster = (rows["stack"] + "/" + rows["layer"].cast(pl.String)).to_numpy()
        return ClusteredHeads(rows[value].cast(pl.Float64).to_numpy(), cluster, rows["model"].to_numpy())


def _known(bound: float) -> float | None:
    return None if np.isnan(bound) else bound


def _text(interval: Interval, form: str) -> str:
    if np.isnan(interval.low):
        return format(interval.estimate, form)
    return f"{interval.estimate:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _bounded(
    interval: Interval, form: str, low: float, high: float, extra: str = "", untestable: str = "no such head"
) -> Answer:
    """Agreement of an interval with a published range, or with one number where low is high."""
    if not interval.n_heads:
        return Answer("", reason=untestable)
    agrees = None if np.isnan(interval.low) else bool(interval.low <= high and interval.high >= low)
    reason = "" if agrees is not None else "a single layer shows no variation between layers"
    return Answer(
        _text(interval, form) + extra, interval.estimate, _known(interval.low), _known(interval.high), agrees, reason
    )


def _strong(part: Heads) -> Answer:
    from stats.inference import rate_interval

    heads = part.heads.filter(pl.col("closure").is_not_null()).with_columns(strong=pl.col("closure") >= part.threshold)
    interval = rate_interval(part.clustered("strong", heads))
    return _bounded(interval, ".2%", 0.0398, 0.08, f", {heads['strong'].sum()} of {len(heads)}")


def _trained_median(part: Heads) -> Answer:
    from stats.inference import cluster_interval, weighted_median

    return _bounded(cluster_interval(part.clustered("closure"), weighted_median), ".3f", 0.336, 0.336)


def _scrambled_median(part: Heads) -> Answer:
    from stats.inference import cluster_interval, weighted_median

    if part.heads["null_median"].is_null().any():
        return Answer("", reason=NO_DRAWS)
    return _bounded(cluster_interval(part.clustered("null_median"), weighted_median), ".2e", 1.04e-4, 1.04e-4)


def _wins(part: Heads) -> Answer:
    from stats.inference import rate_interval

    if part.heads["wins"].is_null().any():
        return Answer("", reason=NO_DRAWS)
    return _bounded(rate_interval(part.clustered("wins")), ".2%", 0.9864, 0.9864)


def _by_layer(part: Heads, *columns: pl.Expr) -> pl.DataFrame:
    return part.heads.group_by("model", "stack", "layer").agg(*columns)


def _layer_wins(part: Heads) -> Answer:
    if part.heads["null_median"].is_null().any():
        return Answer("", reason=NO_DRAWS)
    layers = _by_layer(part, (pl.col("closure").median() > pl.col("null_median").median()).alias("wins"))
    count = int(layers["wins"].sum())
    return Answer(f"{count} of {len(layers)} layers", count / len(layers), agrees=count == len(layers))


def _mismatch(part: Heads) -> Answer:
    pairs = part.pairs.filter(~pl.col("shared_value") & pl.col("mismatch_closure").is_not_null())
    if pairs.is_empty():
        return Answer("", reason="no mismatched pair: one value for all heads of a layer")
    row = pairs.sort("mismatch_closure", descending=True).row(0, named=True)
    where = f"L{row['layer']} O{row['write_head']} V{row['read_head']}"
    largest = float(row["mismatch_closure"])
    return Answer(f"{largest:.3f} ({where}), {len(pairs):,} pairs", largest, agrees=largest < 0.9)


def _right_action(part: Heads) -> Answer:
    from stats.inference import cluster_interval, weighted_median

    acting = part.heads.select("model", "stack", "layer", pl.col("head").alias("read_head"), acting="closure")
    products = part.pairs.filter("shared_value").join(acting, on=["model", "stack", "layer", "read_head"])
    products = products.filter(pl.col("acting") >= part.threshold)
    if products.is_empty():
        return Answer("", reason="no strong head shares its values with another")
    right, left = (
        cluster_interval(part.clustered(name, products), weighted_median) for name in ("right_closure", "left_closure")
    )
    text = f"{_text(right, '.3f')}, left {_text(left, '.3f')}, {len(products)} products"
    agrees = None if np.isnan(right.low) or np.isnan(left.high) else bool(right.low > left.high)
    reason = "" if agrees is not None else "the strong heads are in a single layer"
    return Answer(text, right.estimate, _known(right.low), _known(right.high), agrees, reason)


def _feasible(part: Heads) -> Answer:
    if part.heads["capacity"].is_null().any():
        return Answer("", reason=NO_CAPACITY)
    layers = _by_layer(part, pl.col("capacity").max())
    count = int((layers["capacity"] >= part.threshold).sum())
    return Answer(f"{count} of {len(layers)} layers", count / len(layers), agrees=count == len(layers))


def _unattained(part: Heads) -> Answer:
    if part.heads["capacity"].is_null().any():
        return Answer("", reason=NO_CAPACITY)
    feasible = part.heads.filter(pl.col("capacity") >= part.threshold)
    if feasible.is_empty():
        return Answer("", reason="no head could close that far")
    count = int((feasible["closure"] < part.threshold).sum())
    text = f"{count} of {len(feasible)} heads that could"
    return Answer(text, count / len(feasible), agrees=count > len(feasible) / 2)


CLAIMS = (
    Claim("heads at closure >= 0.9", "3.98% to 8.00% (six endpoints, 2.8B to 235B)", _strong),
    Claim("median closure, trained heads", "0.336 (nine models, 7,304 heads)", _trained_median),
    Claim("median closure, scrambled heads", "1.04e-4 (nine models, 7,304 heads)", _scrambled_median),
    Claim("trained beats scrambled, heads", "98.64% (nine models, 7,304 heads)", _wins),
    Claim("trained beats scrambled, layers", "every layer", _layer_wins),
    Claim("largest within-layer O/V mismatch", "below 0.9 in every model", _mismatch),
    Claim("right action where values are shared, median", "holds in seven models with value sharing", _right_action),
    Claim("closure >= 0.9 feasible", "in every layer", _feasible),
    Claim("closure >= 0.9 feasible but not attained", "usually", _unattained),
)

HEADS = """SELECT heads.*, nulls.median AS null_median, nulls.wins, capacities.closure AS capacity
FROM heads
LEFT JOIN nulls ON (nulls.model, nulls.operator, nulls.stack, nulls.layer, nulls.head)
    = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND nulls.kind = 'scramble'
LEFT JOIN capacities ON (capacities.model, capacities.operator, capacities.stack, capacities.layer, capacities.head)
    = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND capacities.method = 'assignment'
WHERE heads.operator = 'raw' AND heads.closure IS NOT NULL
ORDER BY heads.model, heads.stack, heads.layer, heads.head"""
PAIRS = "SELECT * FROM pairs WHERE operator = 'raw' ORDER BY model, stack, layer, write_head, read_head"


def panel(atlas: Atlas, threshold: float = 0.9, models: Sequence[str] | None = None) -> pl.DataFrame:
    """A row per claim and model, and per claim over all models where there are several.

    Columns: ``claim``, ``published``, ``model``, ``value`` in words with its 95% interval (layers
    resampled, models kept), the same as numbers ``estimate``, ``low`` and ``high``, ``verdict``
    (agrees, differs, not testable here) and ``reason``.
    """
    everything = Heads(atlas.sql(HEADS), atlas.sql(PAIRS), threshold)
    names = list(models) if models else atlas.sql("SELECT model FROM models ORDER BY model")["model"].to_list()
    kept = pl.col("model").is_in(names)
    everything = Heads(everything.heads.filter(kept), everything.pairs.filter(kept), threshold)
    rows = []
    for claim in CLAIMS:
        parts = [(name, everything.of(name)) for name in names]
        for name, part in [*parts, (POOLED, everything)] if len(parts) > 1 else parts:
            answer = claim.test(part) if len(part.heads) else Answer("", reason="not measured with the raw operator")
            verdict = {True: "agrees", False: "differs", None: "not testable here"}[answer.agrees]
            rows.append(
                {
                    "claim": claim.claim,
                    "published": claim.published,
                    "model": name,
                    "value": answer.value,
                    "verdict": verdict,
                    "reason": answer.reason,
                    "estimate": answer.estimate,
                    "low": answer.low,
                    "high": answer.high,
                }
            )
    return pl.DataFrame(rows, schema_overrides=dict.fromkeys(("estimate", "low", "high"), pl.Float64))
