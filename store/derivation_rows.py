"""Catalogue rows of what is derived from the stored arrays."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stats.errors import StoreError
from stats.registry import CAPACITY_STATISTICS, NULL_STATISTICS, Statistic
from store.arrays import attributes_of, read_stack
from store.atlas import USER_KIND
from store.frames import POLARS_TYPES, table_frame
from store.tables import TABLE_BY_NAME, Column

FLAGS = ("wins", "tail_trusted", "closed_form_trusted")
USER_TYPES = ("DOUBLE", "INTEGER", "BOOLEAN")
HEAD_KEY = ("model", "operator", "stack", "layer", "head")


def derivation_rows(group: Path, model: str, heads: pl.DataFrame, units: list[str]) -> dict[str, pl.DataFrame]:
    """Rows of ``derivations``, ``nulls`` and ``capacities`` from derived units.

    Args:
        group: the model's group on disk.
        model: its name.
        heads: the model's rows of ``heads``.
        units: at most one of a kind and operator.
    """
    frames: dict[str, list[pl.DataFrame]] = {"derivations": [], "nulls": [], "capacities": []}
    for unit in units:
        facts = attributes_of(group / unit)
        facts |= {"model": model, "unit": unit}
        created_at = datetime.fromisoformat(facts["created_at"]).replace(tzinfo=None)
        columns = [column.name for column in TABLE_BY_NAME["derivations"].columns]
        row = {name: [facts.get(name)] for name in columns} | {"created_at": [created_at]}
        frames["derivations"].append(table_frame("derivations", row))
        if facts["kind"].startswith(USER_KIND):
            continue
        table = "nulls" if facts["kind"] == "scramble" else "capacities"
        own = heads.filter(pl.col("operator") == facts["operator"])
        frames[table].append(_head_rows(table, own, _arrays(group / unit), facts))
    return {table: pl.concat(parts) for table, parts in frames.items() if parts}


def user_columns(group: Path, units: list[str]) -> dict[str, Column]:
    """Columns of ``heads`` that a user's own statistics add, by name."""
    columns = {}
    for unit in units:
        kind = attributes_of(group / unit)["kind"]
        if kind.startswith(USER_KIND):
            name = kind.removeprefix(USER_KIND)
            if not name.isidentifier():
                raise no_statistic(group / unit, "the name of a Python function", name)
            stack = next(path for path in sorted((group / unit).iterdir()) if path.is_dir())
            facts = attributes_of(stack / name)
            if facts["sql_type"] not in USER_TYPES:
                raise no_statistic(stack / name, "one of " + ", ".join(USER_TYPES), facts["sql_type"])
            declared = [str(facts[key]) for key in ("long_name", "values", "formula", "source")]
            columns[name] = Column(name, facts["sql_type"], Statistic(name, facts["sql_type"], *declared).comment)
    return columns


def no_statistic(where: Path, expected: str, found: object) -> StoreError:
    """The error for stored arrays that are no statistic of a user."""
    return StoreError(
        "a unit of arrays is no statistic that this program stores",
        where=str(where),
        expected=expected,
        found=repr(found)[:200],
        remedy="do not trust this store",
    )


def with_user_columns(group: Path, heads: pl.DataFrame, units: list[str]) -> pl.DataFrame:
    """Rows of ``heads`` with a column for each of the user's own statistics."""
    columns = user_columns(group, units)
    parts: dict[str, list[pl.DataFrame]] = {name: [] for name in columns}
    for unit in units:
        facts = attributes_of(group / unit)
        name = facts["kind"].removeprefix(USER_KIND)
        if name not in columns:
            continue
        arrays = _arrays(group / unit)
        for (stack,), own in heads.filter(operator=facts["operator"]).group_by("stack", maintain_order=True):
            row = own["layer"].rank("dense").to_numpy() - 1
            values = pl.Series(name, arrays[str(stack)][name][row, own["head"].to_numpy()]).fill_nan(None)
            parts[name].append(own.select(HEAD_KEY).with_columns(values.cast(POLARS_TYPES[columns[name].sql_type])))
    for rows in parts.values():
        heads = heads.join(pl.concat(rows), on=HEAD_KEY, how="left", maintain_order="left")
    return heads


def _arrays(unit: Path) -> dict[str, dict[str, np.ndarray]]:
    """Small arrays of every stack of a unit."""
    return {path.name: read_stack(path) for path in sorted(unit.iterdir()) if path.is_dir()}


def _head_rows(
    table: str, heads: pl.DataFrame, arrays: dict[str, dict[str, np.ndarray]], facts: dict[str, Any]
) -> pl.DataFrame:
    """One row per head of the operator, in the order of ``heads``."""
    statistics = NULL_STATISTICS if table == "nulls" else CAPACITY_STATISTICS
    parts = []
    for (stack,), own in heads.group_by("stack", maintain_order=True):
        row = own["layer"].rank("dense").to_numpy() - 1
        head = own["head"].to_numpy()
        values: dict[str, Any] = {name: own[name] for name in HEAD_KEY}
        values |= {item.name: arrays[str(stack)][item.name][row, head] for item in statistics}
        values["seed"] = [facts.get("seed")] * len(own)
        if table == "nulls":
            defined = ~np.isnan(values["p"])
            values |= {
                "kind": ["scramble"] * len(own),
                "n_draws": [facts["n_draws"]] * len(own),
                **{name: pl.Series(values[name] == 1).set(pl.Series(~defined), None) for name in FLAGS},
                "q": np.full(len(own), np.nan),
            }
        else:
            values |= {
                "method": [facts["kind"]] * len(own),
                "attainment": own["closure"] / pl.Series(values["closure"]),
                "iterations": pl.Series(values["iterations"]).set(pl.Series(np.isnan(values["closure"])), None),
            }
        parts.append(table_frame(table, values))
    rows = pl.concat(parts)
    return _with_rates(rows) if table == "nulls" else rows


def mismatch_rows(heads: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """The mismatch null of every head: its O with the values of the layer's other groups.

    A value that several heads share counts once. A head without any mismatched value has no row.
    """
    layer_key = ["model", "operator", "stack", "layer"]
    values = heads.select(*layer_key, pl.col("head").alias("read_head"), "kv_head")
    closure = pl.col("mismatch_closure")
    own = pl.col("closure").first()
    null = (
        pairs.filter(~pl.col("shared_value") & closure.is_not_null())
        .join(values, on=[*layer_key, "read_head"])
        .unique([*layer_key, "write_head", "kv_head"], keep="first", maintain_order=True)
        .rename({"write_head": "head"})
        .join(heads.select(*HEAD_KEY, "closure"), on=[*layer_key, "head"])
        .group_by(HEAD_KEY, maintain_order=True)
        .agg(
            pl.lit("mismatch").alias("kind"),
            pl.len().cast(pl.Int32).alias("n_draws"),
            pl.lit(None, pl.Int64).alias("seed"),
            closure.median().alias("median"),
            closure.quantile(0.95, "linear").alias("q95"),
            closure.quantile(0.99, "linear").alias("q99"),
            pl.lit(None, pl.Float64).alias("median_se"),
            ((1 + (closure >= own).sum()) / (1 + pl.len())).alias("p"),
            pl.lit(None, pl.Float64).alias("p_tail"),
            (own > closure.median()).alias("wins"),
        )
        .with_columns(
            *(pl.lit(None, pl.Boolean).alias(name) for name in FLAGS[1:]),
            pl.lit(None, pl.Float64).alias("p_closed_form"),
        )
        .with_columns(
            pl.when(pl.col("wins").is_not_null()).then(pl.col("p")).alias("p"),
            pl.lit(None, pl.Float64).alias("q"),
        )
    )
    return null.select([column.name for column in TABLE_BY_NAME["nulls"].columns])


def _with_rates(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of one model, operator and kind of ``nulls`` with ``q`` over all its heads."""
    import torch

    from stats.tail import benjamini_hochberg

    q = benjamini_hochberg(torch.from_numpy(rows["p"].fill_null(np.nan).to_numpy(writable=True)))
    return rows.with_columns(pl.Series("q", q.numpy()).fill_nan(None))
