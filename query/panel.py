"""The published panel numbers beside a store's own, with intervals and a verdict.

The numbers are those of the paper on scaled idempotence of OV operators: six endpoints from 2.8B
to 235B parameters, and nine MHA and GQA models with 7,304 heads. Raw operator throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from query.atlas import Atlas
    from stats.inference import ClusteredHeads, Interval

POOLED = "all models"
"""Name of the rows that take every model together."""

PUBLISHED_THRESHOLD = 0.9
"""Closure at or above which the published counts call a head strong."""

NO_DRAWS = "no scrambles are stored{}: draw them with headatlas null"
NO_CAPACITY = "no capacities are stored{}: compute them with headatlas capacity"
CLOSURE = "#.3g"
"""Three significant digits: closures of random heads are a few ten-thousandths."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A store's own number for a claim: the number and its 95% interval, where there is one, and in words.

    ``reason`` says what the verdict rests on.
    """

    value: str
    reason: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    agrees: bool | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One published statement; ``test`` answers it from the heads and pairs of some models.

    ``thresholded`` statements speak of heads at ``PUBLISHED_THRESHOLD``, so that they cannot be tested at
    another.
    """

    claim: str
    published: str
    test: Callable[[Heads], Answer]
    thresholded: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """What claims are tested on: heads with their null and capacity, pairs, and the threshold."""

    heads: pl.DataFrame
    pairs: pl.DataFrame
    threshold: float

    def of(self, models: Sequence[str]) -> Heads:
        """The part of some models."""
        own = pl.col("model").is_in(models)
        return Heads(self.heads.filter(own), self.pairs.filter(own), self.threshold)

    def clustered(self, value: str, table: pl.DataFrame | None = None) -> ClusteredHeads:
        """A column with the layer as cluster and the model as stratum."""
        from stats.inference import ClusteredHeads

        rows = (self.heads if table is None else table).filter(pl.col(value).is_not_null())
        layer = rows.select(pl.struct("stack", "layer").rank("dense")).to_series()
        return ClusteredHeads(rows[value].cast(pl.Float64).to_numpy(), layer.to_numpy(), rows["model"].to_numpy())

    def lacking(self, column: str, reason: str) -> Answer | None:
        """Why nothing can be said where a column is not there for every head; ``reason`` names models."""
        names = self.heads.filter(pl.col(column).is_null())["model"].unique().sort().to_list()
        if not names:
            return None
        some = len(names) < self.heads["model"].n_unique()
        return Answer("", reason.format(f" for {', '.join(names)}" if some else ""))


def _known(bound: float) -> float | None:
    return None if np.isnan(bound) else bound


def _text(interval: Interval, form: str) -> str:
    if np.isnan(interval.low):
        return format(interval.estimate, form)
    return f"{interval.estimate:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _bounded(interval: Interval, form: str, low: float, high: float, extra: str = "") -> Answer:
    """Agreement of an interval with a published range, or with one number where low is high."""
    published = "the published number" if low == high else "the published range"
    agrees: bool | None = False
    if np.isnan(interval.low):
        agrees, reason = None, "a single layer shows no variation between layers"
    elif interval.high < low:
        reason = f"the interval lies below {published}"
    elif interval.low > high:
        reason = f"the interval lies above {published}"
    else:
        agrees, reason = True, f"the interval {'holds' if low == high else 'reaches'} {published}"
    return Answer(
        _text(interval, form) + extra, reason, interval.estimate, _known(interval.low), _known(interval.high), agrees
    )


def _strong(part: Heads) -> Answer:
    from stats.inference import rate_interval

    heads = part.heads.with_columns(strong=pl.col("closure") >= part.threshold)
    interval = rate_interval(part.clustered("strong", heads))
    return _bounded(interval, ".2%", 0.0398, 0.08, f", {heads['strong'].sum():,} of {len(heads):,} heads")


def _trained_median(part: Heads) -> Answer:
    from stats.inference import cluster_interval, weighted_median

    interval = cluster_interval(part.clustered("closure"), weighted_median)
    return _bounded(interval, CLOSURE, 0.336, 0.336, f", {len(part.heads):,} heads")


def _scrambled_median(part: Heads) -> Answer:
    from stats.inference import cluster_interval, weighted_median

    if lacking := part.lacking("null_median", NO_DRAWS):
        return lacking
    interval = cluster_interval(part.clustered("null_median"), weighted_median)
    return _bounded(interval, ".2e", 1.04e-4, 1.04e-4, f", {min(part.heads['n_draws'].to_list()):,} draws a head")


def _wins(part: Heads) -> Answer:
    from stats.inference import rate_interval

    if lacking := part.lacking("wins", NO_DRAWS):
        return lacking
    count = f", {part.heads['wins'].sum():,} of {len(part.heads):,} heads"
    return _bounded(rate_interval(part.clustered("wins")), ".2%", 0.9864, 0.9864, count)


def _every_layer(part: Heads, holds: pl.Expr) -> Answer:
    """Whether something holds in every layer."""
    layers = part.heads.group_by("model", "stack", "layer").agg(holds.alias("holds"))
    count = int(layers["holds"].sum())
    missing = len(layers) - count
    reason = f"not in {missing:,} {'layer' if missing == 1 else 'layers'}" if missing else "in every layer"
    return Answer(f"{count:,} of {len(layers):,} layers", reason, count / len(layers), agrees=not missing)


def _layer_wins(part: Heads) -> Answer:
    return part.lacking("null_median", NO_DRAWS) or _every_layer(
        part, pl.col("closure").median() > pl.col("null_median").median()
    )


def _mismatch(part: Heads) -> Answer:
    pairs = part.pairs.filter(~pl.col("shared_value") & pl.col("mismatch_closure").is_not_null())
    if pairs.is_empty():
        return Answer("", "no mismatched pair: one value for all heads of a layer")
    row = pairs.sort("mismatch_closure", descending=True).row(0, named=True)
    where = f"L{row['layer']} O{row['write_head']} V{row['read_head']}"
    if part.heads["model"].n_unique() > 1:
        where = f"{row['model']} {where}"
    largest = float(row["mismatch_closure"])
    below = largest < PUBLISHED_THRESHOLD
    reason = f"the largest is {'' if below else 'not '}below {PUBLISHED_THRESHOLD:g}"
    return Answer(f"{largest:{CLOSURE}} ({where}), {len(pairs):,} pairs", reason, largest, agrees=below)


def _right_action(part: Heads) -> Answer:
    from stats.inference import cluster_interval, weighted_median

    shared = part.pairs.filter("shared_value")
    if shared.is_empty():
        return Answer("", "no values are shared: every head has its own")
    if not (part.heads["closure"] >= part.threshold).any():
        return Answer("", f"no head closes to {part.threshold:g}")
    acting = part.heads.select("model", "stack", "layer", pl.col("head").alias("read_head"), acting="closure")
    products = shared.join(acting, on=["model", "stack", "layer", "read_head"])
    products = products.filter(pl.col("acting") >= part.threshold)
    if products.is_empty():
        return Answer("", "no strong head shares its values with another")
    right, left = (
        cluster_interval(part.clustered(name, products), weighted_median) for name in ("right_closure", "left_closure")
    )
    text = f"right {_text(right, CLOSURE)}, left {_text(left, CLOSURE)}, {len(products):,} products"
    if np.isnan(right.low) or np.isnan(left.high):
        agrees, reason = None, "the strong heads are in a single layer"
    else:
        agrees = bool(right.low > left.high)
        reason = f"the right interval lies {'' if agrees else 'not '}above the left one"
    return Answer(text, reason, right.estimate, _known(right.low), _known(right.high), agrees)


def _feasible(part: Heads) -> Answer:
    return part.lacking("capacity", NO_CAPACITY) or _every_layer(part, pl.col("capacity").max() >= part.threshold)


def _unattained(part: Heads) -> Answer:
    if lacking := part.lacking("capacity", NO_CAPACITY):
        return lacking
    feasible = part.heads.filter(pl.col("capacity") >= part.threshold)
    if feasible.is_empty():
        return Answer("", "no head could close that far")
    count = int((feasible["closure"] < part.threshold).sum())
    text = f"{count:,} of {len(feasible):,} heads that could"
    usually = count > len(feasible) / 2
    reason = f"{'more' if usually else 'not more'} than half do not"
    return Answer(text, reason, count / len(feasible), agrees=usually)


CLAIMS = (
    Claim("heads at closure >= 0.9", "3.98% to 8.00% (six endpoints, 2.8B to 235B)", _strong, True),
    Claim("median closure, trained heads", "0.336 (nine models, 7,304 heads)", _trained_median),
    Claim("median closure, scrambled heads", "1.04e-04 (nine models, 7,304 heads)", _scrambled_median),
    Claim("trained beats scrambled, heads", "98.64% (nine models, 7,304 heads)", _wins),
    Claim("trained beats scrambled, layers", "every layer", _layer_wins),
    Claim("largest within-layer O/V mismatch", "below 0.9 in every model", _mismatch),
    Claim(
        "right action where values are shared, median", "holds in seven models with value sharing", _right_action, True
    ),
    Claim("closure >= 0.9 feasible", "in every layer", _feasible, True),
    Claim("closure >= 0.9 feasible but not attained", "usually", _unattained, True),
)

HEADS = """SELECT heads.model, heads.stack, heads.layer, heads.head, heads.kv_head, heads.closure,
    nulls.median AS null_median, nulls.n_draws, nulls.wins, capacities.closure AS capacity
FROM heads
LEFT JOIN nulls ON (nulls.model, nulls.operator, nulls.stack, nulls.layer, nulls.head)
    = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND nulls.kind = 'scramble'
LEFT JOIN capacities ON (capacities.model, capacities.operator, capacities.stack, capacities.layer, capacities.head)
    = (heads.model, heads.operator, heads.stack, heads.layer, heads.head) AND capacities.method = 'assignment'
WHERE heads.operator = 'raw' AND heads.closure IS NOT NULL
ORDER BY heads.model, heads.stack, heads.layer, heads.head"""
PAIRS = "SELECT * FROM pairs WHERE operator = 'raw' ORDER BY model, stack, layer, write_head, read_head"
MODELS = "SELECT model, content_hash, lineage, step FROM models ORDER BY model"


def panel(atlas: Atlas, threshold: float = PUBLISHED_THRESHOLD, models: Sequence[str] | None = None) -> pl.DataFrame:
    """A row per claim and model, and per claim over all models where there are several.

    Columns: ``claim``, ``published``, ``model``, ``value`` in words with its 95% interval (layers
    resampled, models kept), ``verdict`` (agrees, differs, not testable here) with its ``reason``, the value
    as numbers ``estimate``, ``low`` and ``high``, and for the row over all models ``pooled``, which ones.

    A number agrees where its interval reaches the published number or range. The interval is about other
    layers of the same models, so that a difference may be one between models. Of models with the same
    values and outputs one is pooled, and of a training run its last step.

    Args:
        atlas: the store.
        threshold: closure at or above which a head is strong. Claims about 0.9 cannot be tested at another.
        models: names to keep; all when None.
    """
    stored = atlas.sql(MODELS)
    if models:
        stored = stored.filter(pl.col("model").is_in(list(models)))
    names = stored["model"].to_list()
    everything = Heads(atlas.sql(HEADS), atlas.sql(PAIRS), threshold)
    measured = stored.filter(pl.col("model").is_in(everything.heads["model"].unique().to_list()))
    pooled = _pooled(measured)
    parts = [(name, everything.of([name])) for name in names]
    if len(names) > 1:
        parts.append((POOLED, everything.of(pooled)))
    rows = []
    for claim in CLAIMS:
        for name, part in parts:
            answer = claim.test(part) if len(part.heads) else Answer("", "closure of the raw operator is not stored")
            if claim.thresholded and threshold != PUBLISHED_THRESHOLD and answer.value:
                other = f"published for a closure of {PUBLISHED_THRESHOLD:g}, counted here at {threshold:g}"
                answer = replace(answer, agrees=None, reason=other)
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
                    "pooled": ", ".join(pooled) if name == POOLED else None,
                }
            )
    numbers = dict.fromkeys(("estimate", "low", "high"), pl.Float64)
    return pl.DataFrame(rows, schema_overrides=numbers | {"pooled": pl.String})


def _pooled(models: pl.DataFrame) -> list[str]:
    """Of rows of ``models`` the names that count once: no second copy, no earlier step of a run."""
    last = (
        pl.col("lineage").is_null()
        | pl.col("step").is_null()
        | (pl.col("step") == pl.col("step").max().over("lineage"))
    )
    return models.filter(last).unique("content_hash", keep="first", maintain_order=True)["model"].to_list()
