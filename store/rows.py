"""Rows of the catalogue from the arrays alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stats.registry import HEAD_STATISTICS, PAIR_STATISTICS, QK_STATISTICS, SPECTRA, STATUS_REASONS
from store.arrays import attributes_of, read_stack, readable
from store.derivation_rows import derivation_rows, mismatch_rows, with_user_columns
from store.frames import table_frame
from store.tables import MODEL_FACTS, RUN_FACTS, TABLE_BY_NAME

REASONS = list(STATUS_REASONS)


def catalogue_rows(group: Path, operators: list[str], derivations: list[str]) -> dict[str, pl.DataFrame]:
    """Rows of every table for one model, from its sealed units.

    Args:
        group: the model's group on disk.
        operators: operators to read; at least one.
        derivations: units derived from them, at most one of a kind and operator.

    Raises:
        StoreError: attributes or arrays are not as this program writes them.
    """
    with readable(group):
        return _catalogue_rows(group, operators, derivations)


def _catalogue_rows(group: Path, operators: list[str], derivations: list[str]) -> dict[str, pl.DataFrame]:
    facts = attributes_of(group)
    model = facts["model"]
    runs = {operator: _run_facts(attributes_of(group / operator)) for operator in operators}
    latest = max(runs.values(), key=lambda run: run["created_at"])
    frames: dict[str, list[pl.DataFrame]] = {name: [] for name in TABLE_BY_NAME}
    frames["models"].append(
        table_frame(
            "models",
            {name: [facts.get(name)] for name in ("model", *(column.name for column in MODEL_FACTS))}
            | {name: [value] for name, value in latest.items() if name != "gain_hash"}
            | {"status": ["complete"], "array_group": [group.name]},
        )
    )
    for operator, run in runs.items():
        frames["operators"].append(
            table_frame("operators", {"model": [model], "operator": [operator]} | {k: [v] for k, v in run.items()})
        )
    for table in ("layers", "skipped"):
        rows = facts[table]
        columns = [column.name for column in TABLE_BY_NAME[table].columns if column.name != "model"]
        values = {name: [row.get(name) for row in rows] for name in columns}
        frames[table].append(table_frame(table, {"model": [model] * len(rows)} | values))
    neutralised = {(row["stack"], row["layer"]): row.get("neutralised") for row in facts["layers"]}
    for operator in operators:
        for directory in sorted(path for path in (group / operator).iterdir() if path.is_dir()):
            key = {"model": model, "operator": operator, "stack": directory.name}
            for table, frame in _stack_rows(key, read_stack(directory), neutralised):
                frames[table].append(frame)
    made = {table: pl.concat(parts) for table, parts in frames.items() if parts}
    frames["nulls"].append(mismatch_rows(made["heads"], made["pairs"]))
    for table, rows in derivation_rows(group, model, made["heads"], derivations).items():
        frames[table].append(rows)
    frames["heads"] = [with_user_columns(group, made["heads"], derivations)]
    return {table: pl.concat(parts) for table, parts in frames.items() if parts}


def _run_facts(attributes: dict[str, Any]) -> dict[str, Any]:
    run = {column.name: attributes.get(column.name) for column in RUN_FACTS}
    run["created_at"] = datetime.fromisoformat(attributes["created_at"]).replace(tzinfo=None)
    return run


def _repeated(key: dict[str, str], count: int) -> dict[str, pl.Series]:
    """Constant columns of a key."""
    return {name: pl.repeat(text, count, dtype=pl.String, eager=True) for name, text in key.items()}


def _lists(array: np.ndarray, lengths: np.ndarray, keep: np.ndarray) -> pl.Series:
    """Rows of a padded array (n, size) as lists of their own length; NULL where not kept."""
    series = pl.Series(values=np.ascontiguousarray(array, np.float64)).cast(pl.List(pl.Float64))
    frame = pl.DataFrame({"list": series, "length": lengths, "keep": keep})
    return frame.select(pl.when("keep").then(pl.col("list").list.head(pl.col("length"))).otherwise(None).alias("list"))[
        "list"
    ]


def _stack_rows(
    key: dict[str, str], arrays: dict[str, np.ndarray], neutralised: dict[tuple[str, int], str | None]
) -> Iterator[tuple[str, pl.DataFrame]]:
    """Frames of heads, spectra, qk and pairs for one stack of one operator.

    ``neutralised`` says by stack and layer which pieces of the module T leaves out.
    """
    n_layers, n_heads = arrays["kv_head"].shape
    row, head = (index.ravel() for index in np.indices((n_layers, n_heads)))
    present = head < arrays["n_heads"][row]
    row, head = row[present], head[present]
    layer = arrays["layer"][row]
    keys: dict[str, Any] = {**_repeated(key, len(row)), "layer": layer, "head": head}

    def scalar(name: str) -> np.ndarray:
        return arrays[name][row, head]

    reason = scalar("reason")
    rank = pl.Series(scalar("rank"))
    yield (
        "heads",
        table_frame(
            "heads",
            keys
            | {
                "kv_head": scalar("kv_head"),
                "label": [f"L{i}H{j}" for i, j in zip(layer, head, strict=True)],
                "d_model": arrays["d_model"][row],
                "d_head": arrays["d_head"][row],
                "status": np.where(reason == 0, "ok", "undefined"),
                "reason": [REASONS[code] or None for code in reason],
                "neutralised": [neutralised.get((key["stack"], int(number))) for number in layer],
                **{item.name: scalar(item.name) for item in HEAD_STATISTICS},
                "rank": rank.set(rank < 0, None),
            },
        ),
    )

    spectra = {item.name: arrays.get(item.name) for item in SPECTRA}
    eigenvalue = arrays["eigenvalue"]
    spectra |= {"eigenvalue_re": eigenvalue.real}
    # An undefined eigenvalue can be NaN + 0i: that is how a complex array is filled with NaN.
    spectra |= {"eigenvalue_im": np.where(np.isnan(eigenvalue), np.nan, eigenvalue.imag)}
    lists = {}
    for name, array in spectra.items():
        assert array is not None
        values = array[row, head]
        lists[name] = _lists(values, arrays["d_head"][row], ~np.isnan(values[:, 0]))
    yield "spectra", table_frame("spectra", keys | lists)

    statistics: dict[str, Any] = {}
    for item in QK_STATISTICS:
        values = arrays[f"qk_{item.name}"][row, head]
        if item.sql_type == "DOUBLE[]":
            lengths = (~np.isnan(values)).sum(-1)
            statistics[item.name] = _lists(values, lengths, lengths > 0)
        else:
            statistics[item.name] = values
    yield "qk", table_frame("qk", keys | statistics)

    yield "pairs", _pair_rows(key, arrays)


def _pair_rows(key: dict[str, str], arrays: dict[str, np.ndarray]) -> pl.DataFrame:
    """Rows of ``pairs``; a statistic that the version which measured did not know is NULL."""
    n_layers, n_heads = arrays["kv_head"].shape
    row, write, read = (index.ravel() for index in np.indices((n_layers, n_heads, n_heads)))
    present = (write < arrays["n_heads"][row]) & (read < arrays["n_heads"][row]) & (write != read)
    row, write, read = row[present], write[present], read[present]
    kv_head = arrays["kv_head"]
    unknown = np.full((n_layers, n_heads, n_heads), np.nan)
    return table_frame(
        "pairs",
        _repeated(key, len(row))
        | {
            "layer": arrays["layer"][row],
            "write_head": write,
            "read_head": read,
            "shared_value": kv_head[row, write] == kv_head[row, read],
            **{item.name: arrays.get(item.name, unknown)[row, write, read] for item in PAIR_STATISTICS},
        },
    )
