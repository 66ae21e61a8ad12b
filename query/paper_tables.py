"""The tables of a paper on scaled idempotence, by name: a row per model, or per step of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from query.typesetting import Column, Table
from stats.errors import QueryError, nearest

if TYPE_CHECKING:
    from query.atlas import Atlas
    from stats.inference import Interval

CLOSURE = """SELECT closures.model, closures.stack, shapes.layers, heads, n_heads, n_kv_heads, d_head, defined, strong,
    maximum
FROM closure_by_model($threshold) AS closures
JOIN (
    SELECT model, stack, count(*) AS layers,
        CASE WHEN min(n_heads) = max(n_heads) THEN min(n_heads) END AS n_heads,
        CASE WHEN min(n_kv_heads) = max(n_kv_heads) THEN min(n_kv_heads) END AS n_kv_heads,
        CASE WHEN min(d_head) = max(d_head) THEN min(d_head) END AS d_head
    FROM layers GROUP BY model, stack
) AS shapes USING (model, stack)
WHERE operator = $operator AND list_contains($names, model)
ORDER BY list_position($names, model), stack"""

NULL = """SELECT trained.model, trained.stack, draws, trained.median AS trained_median,
    null_median AS scrambled_median, wins, win_rate, discoveries, layers_won, layers,
    mismatched.maximum AS largest_mismatch
FROM closure_by_model(0.9) AS trained
LEFT JOIN (SELECT * FROM null_by_model() WHERE kind = 'scramble') AS scrambled USING (model, operator, stack)
LEFT JOIN (
    SELECT model, operator, stack, count(*) FILTER (layer_wins) AS layers_won, count(layer_wins) AS layers
    FROM null_by_layer() WHERE kind = 'scramble' GROUP BY ALL
) AS by_layer USING (model, operator, stack)
LEFT JOIN mismatch_by_model(0.9) AS mismatched USING (model, operator, stack)
WHERE operator = $operator AND list_contains($names, model)
ORDER BY list_position($names, model), trained.stack"""

ALGEBRA = """SELECT closures.model, closures.stack, closures.strong,
    coalesce(own.products, 0) AS products, own.right_median, own.left_median,
    other.right_median AS other_right_median, alpha_spread
FROM closure_by_model($threshold) AS closures
LEFT JOIN (SELECT * FROM algebra_by_model($threshold) WHERE pairing = 'same group') AS own
    USING (model, operator, stack)
LEFT JOIN (SELECT * FROM algebra_by_model($threshold) WHERE pairing = 'other group') AS other
    USING (model, operator, stack)
LEFT JOIN (
    SELECT model, operator, stack, median(right_alpha_spread / abs(alpha)) FILTER (products > 1) AS alpha_spread
    FROM algebra_by_group($threshold) GROUP BY ALL
) AS spreads USING (model, operator, stack)
WHERE operator = $operator AND list_contains($names, model)
ORDER BY list_position($names, model), closures.stack"""

TRAJECTORY = """SELECT lineage, any_value(model) AS model, stack, step, count(*) AS heads,
    count(*) FILTER (closure >= $threshold) AS strong,
    median(closure) FILTER (cohort = 'final strong') AS final_strong_median,
    median(closure) FILTER (cohort = 'others') AS others_median,
    median(capacity) AS capacity_median,
    median(null_level) AS null_level,
    count(null_median) = count(closure) AS drawn
FROM lineage_heads($threshold)
WHERE operator = $operator AND list_contains($names, lineage)
GROUP BY lineage, stack, step
ORDER BY list_position($names, lineage), stack, step"""

WINS = """SELECT model, stack, layer, wins FROM nulls
WHERE kind = 'scramble' AND wins IS NOT NULL AND operator = $operator AND list_contains($names, model)"""

MODELS = "SELECT DISTINCT model FROM models ORDER BY model"
LINEAGES = "SELECT DISTINCT lineage FROM models WHERE lineage IS NOT NULL AND step IS NOT NULL ORDER BY lineage"

MODEL = Column(("model",), "model", "text", "Model")
STACK = Column(("stack",), "stack", "text", "Stack")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows a table is made of; without names, of all that is stored."""

    names: tuple[str, ...] = ()
    operator: str = "raw"
    threshold: float = 0.9


def closure_table(atlas: Atlas, choice: Choice) -> Table:
    """Shape of each model, its share of heads at or above the threshold, median and largest closure.

    The bounds are those of ``query.intervals.closure_intervals`` and of the panel: Wilson's 95% interval of
    the share, at the effective number of heads.

    Raises:
        QueryError: an unknown model, or none measured with the operator.
    """
    from query.intervals import closure_intervals

    rows, notes = _rows(atlas, CLOSURE, choice)
    names = rows["model"].unique().to_list()
    bounds = closure_intervals(atlas, choice.threshold, names, choice.operator, "wilson").select(
        "model", "stack", "rate", "rate_low", "rate_high", "median", "median_low", "median_high"
    )
    rows = rows.join(bounds, on=["model", "stack"], how="left", maintain_order="left")
    rows = rows.select(pl.exclude("maximum"), "maximum")
    notes.insert(0, "Brackets: 95% Wilson interval at the effective number of heads, heads of a layer being alike.")
    limit = f"{choice.threshold:g}"
    columns = (
        Column(("layers",), "layers", "integer", "Layers"),
        Column(("n_heads", "n_kv_heads"), "heads Q/KV", "fraction", r"Heads\\Q/KV"),
        Column(("d_head",), "d_head", "integer", r"$d_{\mathrm{head}}$"),
        Column(("rate",), f"P ≥ {limit} (%)", "percent", rf"$P \geq {limit}$\\(\%)"),
        Column(("rate_low", "rate_high"), "95% interval", "interval", r"95\%\\interval"),
        Column(("median",), "median P", "number", r"median\\$P$"),
        Column(("maximum",), "max P", "number", r"max.\\$P$"),
    )
    caption = rf"Share of attention heads with scaled idempotence $P \geq {limit}$, {choice.operator} operator."
    return _table("paper-closure", rows, columns, caption, notes)


def null_table(atlas: Atlas, choice: Choice) -> Table:
    """Trained heads against their scrambles and against other heads' values.

    ``win_rate_low`` and ``win_rate_high`` are Wilson bounds at the effective number of heads.

    Raises:
        QueryError: an unknown model, none measured with the operator, or no scrambles drawn for any.
    """
    from stats.inference import ClusteredHeads, rate_interval

    rows, notes = _rows(atlas, NULL, choice)
    _require(rows, "draws", "no scrambles are stored for these models", "draw them with: headatlas null")
    values = {"names": rows["model"].unique().to_list(), "operator": choice.operator}
    heads = atlas.sql(WINS, values).group_by("model", "stack")
    bounds = [(*key, *_bounds(rate_interval(ClusteredHeads(part["wins"], part["layer"])))) for key, part in heads]
    names = ("model", "stack", "win_rate_low", "win_rate_high")
    found = pl.DataFrame(bounds, schema=names, schema_overrides=dict.fromkeys(names[2:], pl.Float64), orient="row")
    rows = rows.join(found, on=["model", "stack"], how="left", maintain_order="left")
    later = ("discoveries", "layers_won", "layers", "largest_mismatch")
    rows = rows.select(pl.exclude(later), *later)
    notes.insert(0, "Brackets: 95% Wilson interval at the effective number of heads.")
    notes += _lacking(rows, "draws", "no scrambles drawn")
    notes += _lacking(rows, "largest_mismatch", "no mismatched pair, one value for all heads of a layer")
    columns = (
        Column(("trained_median",), "median P", "number", r"median\\$P$"),
        Column(("scrambled_median",), "scrambled P", "number", r"scrambled\\$P$"),
        Column(("win_rate",), "wins (%)", "percent", r"wins\\(\%)"),
        Column(("win_rate_low", "win_rate_high"), "95% interval", "interval", r"95\%\\interval"),
        Column(("discoveries",), "q ≤ 0.05", "integer", r"$q$\\${}\leq 0.05$"),
        Column(("layers_won", "layers"), "layers won", "fraction", r"layers\\won"),
        Column(("largest_mismatch",), "max mismatch P", "number", r"max.\\mismatch"),
    )
    caption = (
        rf"Trained heads against scrambles of their own core, {choice.operator} operator: medians of $P$, heads above "
        r"the median of their scrambles, heads with false discovery rate $q \leq 0.05$, layers whose median wins; "
        r"and the largest $P$ of one head's output with another head's values."
    )
    return _table("paper-null", rows, columns, caption, notes)


def algebra_table(atlas: Atlas, choice: Choice) -> Table:
    """The right-action law where the acting head is strong, with its two controls.

    ``alpha_spread`` is the median over strong heads of the standard deviation of ``right_alpha`` among the
    heads that share its values, over its own ``|alpha|``; of groups with two such heads at least.

    Raises:
        QueryError: an unknown model, none measured with the operator, or no strong head in any.
    """
    rows, notes = _rows(atlas, ALGEBRA, choice)
    limit = f"{choice.threshold:g}"
    _require(
        rows.filter(pl.col("strong") > 0),
        "strong",
        f"no head of these models has closure {limit} or more",
        "lower --threshold",
    )
    idle = pl.col("strong") == 0
    if rows.filter(idle).height:
        notes.append(f"No head at P ≥ {limit}: {_listed(rows.filter(idle))}.")
    apart = rows.filter(~idle, pl.col("products") == 0)
    if apart.height:
        notes.append(f"No strong head shares its values with another: {_listed(apart)}.")
    columns = (
        Column(("strong",), "strong heads", "integer", r"strong\\heads"),
        Column(("products",), "products", "integer"),
        Column(("right_median",), "right", "number"),
        Column(("left_median",), "left", "number"),
        Column(("other_right_median",), "right, other group", "number", r"right,\\other group"),
        Column(("alpha_spread",), "spread of alpha", "number", r"spread\\of $\alpha$"),
    )
    caption = (
        rf"Action of heads with $P \geq {limit}$ on heads that share their values, {choice.operator} operator: median "
        r"closure of $T_i T_j \approx \alpha_j T_i$ (right) and $T_i T_j \approx \alpha T_j$ (left), the right action "
        r"on heads of other groups, and the spread of $\alpha$ within a group over $|\alpha_j|$."
    )
    return _table("paper-algebra", rows, columns, caption, notes)


def trajectory_table(atlas: Atlas, choice: Choice) -> Table:
    """Each step of each training run; the names of the choice are those of runs.

    Raises:
        QueryError: an unknown run, no run in the store, or none measured with the operator.
    """
    rows, notes = _rows(atlas, TRAJECTORY, choice)
    limit = f"{choice.threshold:g}"
    if rows["final_strong_median"].null_count():
        never = rows.filter(pl.col("final_strong_median").is_null())["lineage"].unique(maintain_order=True)
        notes.append(f"No head at P ≥ {limit} at the last step: {', '.join(never)}.")
    if rows["capacity_median"].null_count():
        notes.append("Blank capacities are not computed: headatlas capacity.")
    if not rows["drawn"].all():
        notes.append("Null level from the spectra where no scrambles are drawn.")
    columns = (
        Column(("lineage",), "run", "text", "Run"),
        Column(("step",), "step", "integer", "Step"),
        Column(("heads",), "heads", "integer", "Heads"),
        Column(("strong",), f"P ≥ {limit}", "integer", rf"$P \geq {limit}$"),
        Column(("final_strong_median",), "median P, finally strong", "number", r"$P$, finally\\strong"),
        Column(("others_median",), "median P, others", "number", r"$P$,\\others"),
        Column(("capacity_median",), "capacity", "number"),
        Column(("null_level",), "null level", "number"),
    )
    caption = (
        rf"Training runs step by step, {choice.operator} operator: heads with $P \geq {limit}$; medians of $P$ over "
        r"the heads that have it at the last step and over the others; medians of capacity and of the scramble null."
    )
    return _table("paper-trajectory", rows.drop("drawn"), columns, caption, notes, first="lineage")


PAPER_TABLES: Mapping[str, tuple[str, Callable[[Any, Choice], Table]]] = {
    "paper-closure": ("heads at P >= 0.9 by model, with intervals", closure_table),
    "paper-null": ("trained heads against scrambles and mismatches, by model", null_table),
    "paper-algebra": ("the right-action law and its controls, by model", algebra_table),
    "paper-trajectory": ("closure, capacity and null level by training run and step", trajectory_table),
}
"""Meaning and maker of every paper table by name."""


def _table(
    name: str,
    rows: pl.DataFrame,
    columns: Sequence[Column],
    caption: str,
    notes: Sequence[str],
    first: str = "model",
) -> Table:
    """The table under its name; the stack is shown where a model or run has several."""
    several = rows.select(first, "stack").unique().height > rows[first].n_unique()
    leading = (*((MODEL,) if first == "model" else columns[:1]), *((STACK,) if several else ()))
    shown = (*leading, *(columns if first == "model" else columns[1:]))
    return Table(name, "", rows, shown, caption, tuple(notes), first if first != "model" or several else None)


def _rows(atlas: Atlas, query: str, choice: Choice) -> tuple[pl.DataFrame, list[str]]:
    """Rows of the names that were chosen, and a note on those the operator was not measured for."""
    what, known = ("training run", LINEAGES) if query == TRAJECTORY else ("model", MODELS)
    stored = atlas.sql(known).to_series().to_list()
    for name in choice.names:
        if name not in stored:
            raise QueryError(
                f"no {what} named {name!r}",
                where=str(atlas.path),
                expected="one of " + (", ".join(stored) or "none"),
                found=name,
                remedy=nearest(name, stored),
            )
    if not stored:
        raise QueryError(
            f"no {what} in the store", where=str(atlas.path), remedy="ingest checkpoints with --lineage NAME"
        )
    names = list(dict.fromkeys(choice.names)) or stored
    values = {"names": names, "operator": choice.operator, "threshold": choice.threshold}
    rows = atlas.sql(query, {name: value for name, value in values.items() if f"${name}" in query})
    measured = set(rows["lineage" if query == TRAJECTORY else "model"])
    if not measured:
        raise QueryError(
            f"nothing here was measured with the operator {choice.operator}",
            where=", ".join(names),
            remedy=f"measure it with: headatlas ingest MODEL --operator {choice.operator}",
        )
    missing = [name for name in names if name not in measured]
    return rows, [f"Not measured with the operator {choice.operator}: {', '.join(missing)}."] if missing else []


def _bounds(interval: Interval) -> list[float | None]:
    return [None if np.isnan(bound) else bound for bound in (interval.low, interval.high)]


def _require(rows: pl.DataFrame, column: str, what: str, remedy: str) -> None:
    if not rows[column].count():
        raise QueryError(what, remedy=remedy)


def _lacking(rows: pl.DataFrame, column: str, why: str) -> list[str]:
    missing = rows.filter(pl.col(column).is_null())
    return [f"{why[0].upper()}{why[1:]}: {_listed(missing)}."] if missing.height else []


def _listed(rows: pl.DataFrame) -> str:
    return ", ".join(rows["model"].unique(maintain_order=True))
