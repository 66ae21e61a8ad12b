"""The published panel numbers beside a store's own.

The numbers are those of the paper on scaled idempotence of OV operators: six endpoints from 2.8B
to 235B parameters, and nine MHA and GQA models with 7,304 heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from query.atlas import Atlas


@dataclass(frozen=True, slots=True)
class Claim:
    """One published statement and the query that gives a store's value for a model.

    ``value`` is text made by the query so that counts and ranges read as in the paper.
    """

    claim: str
    published: str
    sql: str


CLAIMS = (
    Claim(
        "heads at closure >= 0.9",
        "3.98% to 8.00% (six endpoints, 2.8B to 235B)",
        "SELECT model, printf('%.2f%% (%d of %d)', 100 * rate, strong, defined) AS value\n"
        "FROM closure_by_model($threshold) WHERE operator = 'raw'",
    ),
    Claim(
        "median closure, trained heads",
        "0.336 (nine models, 7,304 heads)",
        "SELECT model, printf('%.3f', median) AS value FROM closure_by_model($threshold) WHERE operator = 'raw'",
    ),
    Claim(
        "median closure, scrambled heads",
        "1.04e-4 (nine models, 7,304 heads)",
        "SELECT model, printf('%.1e (leading order)', median(0.4549 * null_scale)) AS value\n"
        "FROM heads WHERE operator = 'raw' AND $threshold IS NOT NULL GROUP BY model",
    ),
    Claim(
        "largest within-layer O/V mismatch",
        "below 0.9 in every model",
        "SELECT model, coalesce(printf('%.3f (%s)', maximum, largest_pair), 'no such pair: one value group') AS value\n"
        "FROM mismatch_by_model($threshold) WHERE operator = 'raw'",
    ),
    Claim(
        "right action where values are shared, median",
        "holds in seven models with value sharing",
        "SELECT model, printf('%.3f, against left %.3f (%d products)', right_median, left_median, products) AS value\n"
        "FROM algebra_by_model($threshold) WHERE operator = 'raw' AND pairing = 'same group'",
    ),
)


def panel(atlas: Atlas, threshold: float = 0.9) -> pl.DataFrame:
    """One row per claim and model: claim, published, model, value (raw operator).

    A model without a row for a claim cannot test it and says so.
    """
    models = atlas.sql("SELECT model FROM models ORDER BY model")
    frames = []
    for order, claim in enumerate(CLAIMS):
        values = atlas.sql(claim.sql, {"threshold": threshold})
        frames.append(
            models.join(values, on="model", how="left").select(
                pl.lit(order).alias("order"),
                pl.lit(claim.claim).alias("claim"),
                pl.lit(claim.published).alias("published"),
                "model",
                pl.col("value").fill_null("not testable here"),
            )
        )
    return pl.concat(frames).sort("order", "model").drop("order")
