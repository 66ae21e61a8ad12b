"""The main questions as functions on Polars frames, which compose with a reader's own Polars.

They take what ``atlas.table(...)`` gives, filtered or with columns added, and return lazy frames with
the columns of the SQL macros of the same question. Counts are Int64, rates and quantiles Float64, and
rows are in the order of the grouping. A head whose closure is NULL counts in ``heads`` alone::

    import polars as pl
    from query import open_atlas
    from query.frames import closure_rates

    atlas = open_atlas("atlas")
    heads = atlas.table("heads").filter(pl.col("operator") == "raw")
    half = pl.when(pl.col("layer") < 15).then(pl.lit("lower")).otherwise(pl.lit("upper"))
    closure_rates(heads.with_columns(half=half), 0.9, by=("model", "half")).collect()
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stats.errors import QueryError, nearest

Frame = pl.LazyFrame | pl.DataFrame

STACK = ("model", "operator", "stack")
HEAD = (*STACK, "layer", "head")
RUN = ("lineage", "operator", "stack", "cohort")

NULL_MEDIAN = 0.4549
"""Median of chi^2 with one degree of freedom: the scramble null's median over ``null_scale``."""


def closure_rates(heads: Frame, threshold: float = 0.9, by: str | Sequence[str] = STACK) -> pl.LazyFrame:
    """How many heads nearly close, as ``closure_by_model(threshold)`` has it.

    Args:
        heads: rows of ``heads`` with ``closure``, ``alpha`` and the columns of ``by``.
        threshold: closure at or above which a head is strong, 0 to 1.
        by: columns to group by, a reader's own among them; none for one row over all heads.

    Returns:
        ``by``, ``heads``, ``defined``, ``strong``, ``rate``, ``median``, ``q90``, ``maximum`` and
        ``strong_negative``, the strong heads with a negative alpha.

    Raises:
        QueryError: a column that is missing, or a threshold out of range.

    Example:
        ``closure_rates(atlas.table("heads"), 0.9, by="d_head").collect()``
    """
    keys = _keys(by)
    rows = _checked(heads, "heads", ("closure", "alpha", *keys))
    closure, strong = pl.col("closure"), pl.col("closure") >= require_threshold(threshold)
    return _grouped(
        rows,
        keys,
        _rows().alias("heads"),
        _defined("closure").alias("defined"),
        _count(strong).alias("strong"),
        _rate(strong, "closure").alias("rate"),
        closure.median().alias("median"),
        closure.quantile(0.9, "linear").alias("q90"),
        closure.max().alias("maximum"),
        _count(strong & (pl.col("alpha") < 0)).alias("strong_negative"),
    )


def null_summary(heads: Frame, nulls: Frame, by: str | Sequence[str] = STACK) -> pl.LazyFrame:
    """Trained heads against their nulls, as ``null_by_model()`` has it.

    Args:
        heads: rows of ``heads``; those that are left out take their nulls with them.
        nulls: rows of ``nulls``.
        by: columns of either to group by, beside ``kind``, whose nulls are never mixed.

    Returns:
        ``by``, ``kind``, ``heads``, ``defined``, ``draws`` (of the scramble, the fewest of a head),
        ``trained_median``, ``null_median``, ``wins``, ``win_rate``, ``significant`` and
        ``discoveries`` at 0.05, ``largest_error``.

    Raises:
        QueryError: a column that is missing.

    Example:
        ``null_summary(atlas.table("heads"), atlas.table("nulls"), by=("model", "layer")).collect()``
    """
    keys = _keys(by, "kind")
    needed = ("kind", "n_draws", "median", "median_se", "p", "q", "wins")
    rows = _with_heads(nulls, "nulls", needed, heads, keys)
    tested = pl.col("p").is_not_null()
    return _grouped(
        rows,
        keys,
        _rows().alias("heads"),
        _defined("p").alias("defined"),
        pl.col("n_draws").filter(pl.col("kind") == "scramble").min().alias("draws"),
        pl.col("trained_closure").filter(tested).median().alias("trained_median"),
        pl.col("median").median().alias("null_median"),
        _count(pl.col("wins")).alias("wins"),
        _rate(pl.col("wins"), "p").alias("win_rate"),
        _count(pl.col("p") <= 0.05).alias("significant"),
        _count(pl.col("q") <= 0.05).alias("discoveries"),
        pl.col("median_se").max().alias("largest_error"),
    )


def capacity_gap(
    heads: Frame, capacities: Frame, threshold: float = 0.9, by: str | Sequence[str] = STACK
) -> pl.LazyFrame:
    """How closed heads could be beside what they attain, as ``capacity_by_model(threshold)`` has it.

    Args:
        heads: rows of ``heads``; those that are left out take their capacities with them.
        capacities: rows of ``capacities``.
        threshold: closure at or above which a head is strong, 0 to 1.
        by: columns of either to group by, beside ``method``, whose capacities are never mixed.

    Returns:
        ``by``, ``method``, ``heads``, ``defined``, ``median``, ``minimum``, ``feasible``, ``attained``,
        ``attainment_median``, and of the layers, each with its heads in the group: ``feasible_layers``,
        ``layers``, ``lowest_layer_maximum``, ``lowest_layer_median``.

    Raises:
        QueryError: a column that is missing, or a threshold out of range.

    Example:
        ``capacity_gap(atlas.table("heads"), atlas.table("capacities"), 0.9, by="model").collect()``
    """
    keys = _keys(by, "method")
    rows = _with_heads(capacities, "capacities", ("method", "closure", "attainment"), heads, keys)
    capacity, bound = pl.col("closure"), require_threshold(threshold)
    own = _grouped(
        rows,
        keys,
        _rows().alias("heads"),
        _defined("closure").alias("defined"),
        capacity.median().alias("median"),
        capacity.min().alias("minimum"),
        _count(capacity >= bound).alias("feasible"),
        _count(pl.col("trained_closure") >= bound).alias("attained"),
        pl.col("attainment").median().alias("attainment_median"),
    )
    layers = tuple(dict.fromkeys((*keys, *STACK, "layer")))
    of_layers = _grouped(
        _grouped(rows, layers, capacity.max().alias("highest"), capacity.median().alias("middle")),
        keys,
        _count(pl.col("highest") >= bound).alias("feasible_layers"),
        _rows().alias("layers"),
        pl.col("highest").min().alias("lowest_layer_maximum"),
        pl.col("middle").min().alias("lowest_layer_median"),
    )
    return own.join(of_layers, on=keys, how="left", nulls_equal=True, maintain_order="left")


def comparison(
    heads: Frame, column: str = "closure", threshold: float | None = 0.9, by: str | Sequence[str] = STACK
) -> pl.LazyFrame:
    """The distribution of a column side by side.

    Args:
        heads: rows of ``heads`` with the column and those of ``by``.
        column: any number a head has.
        threshold: value at or above which a head counts as ``strong``; None leaves that out.
        by: columns to group by.

    Returns:
        ``by``, ``heads``, ``defined``, ``q25``, ``median``, ``q75``, ``q90``, ``maximum``, ``strong`` and
        ``rate``; the last two are NULL without a threshold.

    Raises:
        QueryError: a column that is missing or holds no numbers.

    Example:
        ``comparison(atlas.table("heads"), "participation", 32, by=("model", "layer")).collect()``
    """
    keys = _keys(by)
    rows = _checked(heads, "heads", (column, *keys))
    if not rows.collect_schema()[column].is_numeric():
        raise QueryError("a column without numbers", expected="a numeric column", found=column)
    value = pl.col(column).cast(pl.Float64)
    strong, rate = pl.lit(None, pl.Int64), pl.lit(None, pl.Float64)
    if threshold is not None:
        strong, rate = _count(value >= threshold), _rate(value >= threshold, column)
    return _grouped(
        rows,
        keys,
        _rows().alias("heads"),
        _defined(column).alias("defined"),
        value.quantile(0.25, "linear").alias("q25"),
        value.median().alias("median"),
        value.quantile(0.75, "linear").alias("q75"),
        value.quantile(0.9, "linear").alias("q90"),
        value.max().alias("maximum"),
        strong.alias("strong"),
        rate.alias("rate"),
    )


def lineage_heads(heads: Frame, models: Frame, capacities: Frame, nulls: Frame, threshold: float = 0.9) -> pl.LazyFrame:
    """Every head at every step of its training run, as ``lineage_heads(threshold)`` has it.

    Args:
        heads: rows of ``heads``; all their columns are kept.
        models: rows of ``models``; the last step of a run is the last one among them.
        capacities: rows of ``capacities``, of which the assignments are taken; may be empty.
        nulls: rows of ``nulls``, of which the scrambles are taken; may be empty.
        threshold: closure at or above which a head of the last step is strong, 0 to 1.

    Returns:
        ``lineage``, ``step``, ``cohort`` (final strong, or others), ``capacity``, ``null_median`` and
        ``null_level`` (its leading order where nothing was drawn) beside the columns of heads.

    Raises:
        QueryError: a column that is missing, or a threshold out of range.

    Example:
        ``lineage_heads(*(atlas.table(name) for name in ("heads", "models", "capacities", "nulls")))``
    """
    bound = require_threshold(threshold)
    added = ("lineage", "step", "cohort", "capacity", "null_median", "null_level")
    rows = _checked(heads, "heads", (*HEAD, "closure", "null_scale")).drop(added, strict=False)
    steps = (
        _checked(models, "models", ("model", "lineage", "step"))
        .select("model", "lineage", "step")
        .filter(pl.col("lineage").is_not_null(), pl.col("step").is_not_null())
    )
    followed = rows.join(steps, on="model")
    place = ("lineage", *HEAD[1:])
    last = steps.filter(pl.col("step") == pl.col("step").max().over("lineage"))
    strong = pl.when(pl.col("closure") >= bound).then(pl.lit("final strong")).otherwise(pl.lit("others"))
    final = rows.join(last, on="model").select(*place, strong.alias("cohort"))
    capacity = _checked(capacities, "capacities", (*HEAD, "method", "closure"))
    capacity = capacity.filter(pl.col("method") == "assignment").select(*HEAD, pl.col("closure").alias("capacity"))
    null = _checked(nulls, "nulls", (*HEAD, "kind", "median"))
    null = null.filter(pl.col("kind") == "scramble").select(*HEAD, pl.col("median").alias("null_median"))
    return (
        followed.join(final, on=place)
        .join(capacity, on=HEAD, how="left")
        .join(null, on=HEAD, how="left")
        .with_columns(pl.coalesce("null_median", NULL_MEDIAN * pl.col("null_scale")).alias("null_level"))
        .sort("lineage", *HEAD[1:], "step", nulls_last=True)
    )


def trajectory(
    heads: Frame,
    models: Frame,
    capacities: Frame,
    nulls: Frame,
    threshold: float = 0.9,
    by: str | Sequence[str] = RUN,
) -> pl.LazyFrame:
    """Medians over training steps, as ``trajectory_by_step(threshold)`` has it.

    Arguments as in ``lineage_heads``, whose columns ``by`` may name; ``step`` is added to it.

    Returns:
        ``by``, ``step``, ``heads``, ``strong`` (at this step), and medians: ``closure``, ``alpha``,
        ``capacity``, ``null_level``, ``sigma_max``, ``participation``, ``isometry``, ``cos_mean``.

    Raises:
        QueryError: a column that is missing, or a threshold out of range.

    Example:
        ``trajectory(*(atlas.table(name) for name in ("heads", "models", "capacities", "nulls")))``
    """
    keys = _keys(by, "step")
    medians = ("alpha", "sigma_max", "participation", "isometry", "cos_mean")
    rows = lineage_heads(_checked(heads, "heads", medians), models, capacities, nulls, threshold)
    shown = ("closure", "alpha", "capacity", "null_level", *medians[1:])
    return _grouped(
        _checked(rows, "heads", keys),
        keys,
        _rows().alias("heads"),
        _count(pl.col("closure") >= threshold).alias("strong"),
        *(pl.col(name).median() for name in shown),
    )


def require_threshold(threshold: float) -> float:
    """The threshold of a closure as a float.

    Raises:
        QueryError: outside 0 to 1.
    """
    if not 0 <= threshold <= 1:
        raise QueryError("a closure threshold out of range", expected="0 to 1", found=str(threshold))
    return float(threshold)


def _keys(by: str | Sequence[str], *added: str) -> tuple[str, ...]:
    """Columns to group by, each once; a single name may stand without a sequence."""
    return tuple(dict.fromkeys((*((by,) if isinstance(by, str) else by), *added)))


def _checked(frame: Frame, table: str, needed: Sequence[str]) -> pl.LazyFrame:
    """The frame as a lazy one that has the columns a question needs."""
    lazy = frame.lazy()
    present = lazy.collect_schema().names()
    missing = [name for name in needed if name not in present]
    if missing:
        raise QueryError(
            f"the frame of {table} has no column {missing[0]!r}",
            expected=", ".join(dict.fromkeys(needed)),
            found=", ".join(present),
            remedy=nearest(missing[0], present) or "keep or add the column before asking",
        )
    return lazy


def _with_heads(derived: Frame, table: str, needed: Sequence[str], heads: Frame, keys: Sequence[str]) -> pl.LazyFrame:
    """Rows derived from heads with ``trained_closure`` and the columns of ``keys`` that heads have."""
    own = _checked(derived, table, (*HEAD, *needed))
    trained = _checked(heads, "heads", (*HEAD, "closure"))
    names = trained.collect_schema().names()
    carried = [name for name in keys if name in names and name not in (*HEAD, *needed)]
    joined = own.drop(carried, strict=False).join(
        trained.select(*HEAD, pl.col("closure").alias("trained_closure"), *carried), on=HEAD
    )
    return _checked(joined, f"{table} and heads", keys)


def _grouped(rows: pl.LazyFrame, keys: Sequence[str], *columns: pl.Expr) -> pl.LazyFrame:
    """One row per group in the order of the keys, as SQL sorts them; one row in all without keys."""
    if not keys:
        return rows.select(*columns)
    return rows.group_by(keys).agg(*columns).sort(keys, nulls_last=True)


def _rows() -> pl.Expr:
    return pl.len().cast(pl.Int64)


def _defined(column: str) -> pl.Expr:
    return pl.col(column).count().cast(pl.Int64)


def _count(condition: pl.Expr) -> pl.Expr:
    """Rows where a condition is true, which it is not where NULL."""
    return condition.sum().cast(pl.Int64)


def _rate(condition: pl.Expr, column: str) -> pl.Expr:
    """Share of the rows with a value where a condition is true; NULL without any."""
    return pl.when(pl.col(column).count() > 0).then(condition.sum() / pl.col(column).count())
