"""Heads of several models that may stand side by side: one operator, shared stacks, and one shape where needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from stats.errors import QueryError, nearest

if TYPE_CHECKING:
    from query.atlas import Atlas

NUMERIC = ("DOUBLE", "FLOAT", "HUGEINT", "BIGINT", "INTEGER", "SMALLINT", "TINYINT")
IDENTIFIERS = ("layer", "head")

COLUMNS = "SELECT column_name, data_type FROM duckdb_columns() WHERE database_name = 'atlas' AND table_name = 'heads'"
STORED = """SELECT models.model, list(DISTINCT operator ORDER BY operator) FILTER (operator IS NOT NULL),
    list(DISTINCT stack ORDER BY stack) FILTER (operator = $operator)
FROM models LEFT JOIN heads USING (model) GROUP BY models.model ORDER BY models.model"""
HEADS = """SELECT operator, stack, model, layer, head, label, kv_head, d_model, d_head, "{column}"::DOUBLE AS value
FROM heads
WHERE list_contains($models, model) AND operator = $operator AND list_contains($stacks, stack)
ORDER BY stack, list_position($models, model), layer, head"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Heads of several models that may stand side by side.

    ``heads`` has ``operator``, ``stack``, ``model``, ``layer``, ``head``, ``label``, ``kv_head``,
    ``d_model``, ``d_head`` and the compared ``value``; models are in the order asked for.
    ``left_out`` are each model's other stacks, which some model lacks.
    """

    models: tuple[str, ...]
    column: str
    stacks: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]
    heads: pl.DataFrame

    def of(self, stack: str, model: str) -> pl.DataFrame:
        """Heads of one model and stack, in order of layer and head."""
        return self.heads.filter(pl.col("stack") == stack, pl.col("model") == model)


def select(
    atlas: Atlas,
    models: Sequence[str],
    column: str = "closure",
    operator: str = "raw",
    stacks: Sequence[str] | None = None,
) -> Selection:
    """The heads to compare.

    Args:
        atlas: an open store.
        models: two or more names; the first is what the others are compared with.
        column: a numeric column of heads, one of the reader's own statistics among them.
        operator: raw, folded or scaled; every model must have been measured with it.
        stacks: those to compare; all that every model has when None.

    Raises:
        QueryError: fewer than two models, one twice or unknown, a column that is no number of heads, an
            operator or a stack that some model lacks, or no stack in common.
    """
    types = dict(atlas.sql(COLUMNS).rows())
    numeric = [name for name, kind in types.items() if kind in NUMERIC and name not in IDENTIFIERS]
    if column not in numeric:
        raise QueryError(
            f"{column!r} is not a numeric column of heads" if column in types else f"heads has no column {column!r}",
            expected="one of " + ", ".join(numeric),
            found=f"{column} {types[column]}" if column in types else column,
            remedy=nearest(column, numeric) or "list the columns with: headatlas schema heads",
        )
    stored = {
        name: (operators or [], found or [])
        for name, operators, found in atlas.sql(STORED, {"operator": operator}).rows()
    }
    _require_models(models, list(stored))
    lacking = [name for name in models if operator not in stored[name][0]]
    if lacking:
        raise QueryError(
            f"not every model was measured with the operator {operator}",
            where=", ".join(lacking),
            expected=operator,
            found="; ".join(f"{name}: {', '.join(stored[name][0]) or 'no heads'}" for name in models),
            remedy=f"measure it with ingest --operator {operator}, or compare another operator with --operator",
        )
    own = {name: stored[name][1] for name in models}
    shared = [stack for stack in own[models[0]] if all(stack in found for found in own.values())]
    chosen = list(dict.fromkeys(stacks)) if stacks else shared
    missing = [stack for stack in chosen if stack not in shared]
    if missing or not chosen:
        raise QueryError(
            f"not every model has the stack {missing[0]}" if missing else "the models have no stack in common",
            expected=f"one of {', '.join(shared)}" if shared else "a stack that every model has",
            found="; ".join(f"{name}: {', '.join(found)}" for name, found in own.items()),
        )
    left_out = {name: tuple(stack for stack in found if stack not in shared) for name, found in own.items()}
    heads = atlas.sql(HEADS.format(column=column), {"models": list(models), "operator": operator, "stacks": chosen})
    return Selection(tuple(models), column, tuple(chosen), {name: out for name, out in left_out.items() if out}, heads)


def require_one_shape(selection: Selection) -> None:
    """Refuse models whose heads have no partner in the first model, saying what differs.

    Raises:
        QueryError: other layers, heads, value heads or widths.
    """
    first, *others = selection.models
    for stack in selection.stacks:
        own = _shape(selection.of(stack, first))
        for model in others:
            differences = _differences(own, _shape(selection.of(stack, model)))
            if differences:
                raise QueryError(
                    "models of different shape have no heads to pair",
                    where=f"{first} and {model}, {stack}",
                    expected="the same layers, heads, value heads, d_model and d_head",
                    found="; ".join(differences),
                    remedy="compare them by model or by depth",
                )


def _shape(heads: pl.DataFrame) -> dict[int, dict[str, int]]:
    """Numbers that pair heads, by layer."""
    layers = heads.group_by("layer", maintain_order=True).agg(
        pl.len().alias("heads"), pl.col("kv_head").n_unique().alias("value heads"), pl.col("d_model", "d_head").first()
    )
    return {row.pop("layer"): row for row in layers.iter_rows(named=True)}


def _differences(own: dict[int, dict[str, int]], other: dict[int, dict[str, int]]) -> list[str]:
    """What differs between two shapes: numbers of layers, or the first layer where something else does."""
    said = []
    if len(own) != len(other):
        said.append(f"{len(own)} layers against {len(other)}")
    elif own.keys() != other.keys():
        said.append(f"layer {min(own.keys() - other.keys())} against layer {min(other.keys() - own.keys())}")
    for layer in [layer for layer in own if layer in other and own[layer] != other[layer]][:1]:
        said += [
            f"layer {layer}: {name} {value} against {other[layer][name]}"
            for name, value in own[layer].items()
            if value != other[layer][name]
        ]
    return said


def _require_models(models: Sequence[str], stored: Sequence[str]) -> None:
    for name in models:
        if name not in stored:
            raise QueryError(
                f"no model named {name!r}",
                expected="one of " + ", ".join(stored),
                found=name,
                remedy=nearest(name, stored) or "list the models with: headatlas models",
            )
    if len(set(models)) < max(2, len(models)):
        raise QueryError(
            "a comparison takes two or more models, each once",
            expected="different names of " + ", ".join(stored),
            found=", ".join(models) or "none",
        )
