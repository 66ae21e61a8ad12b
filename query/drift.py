"""How far heads turn between the steps of a training run, from the factors that were kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from stats.errors import QueryError

if TYPE_CHECKING:
    from query.atlas import Atlas

STEPS = """SELECT DISTINCT step, model, stack, operator
FROM models JOIN operators USING (model) JOIN layers USING (model)
WHERE lineage = $lineage AND step IS NOT NULL
ORDER BY operator DESC, stack, step"""

COLUMNS = ("operator_cosine", "write_overlap", "read_overlap")


def require_runs(atlas: Atlas, lineages: Sequence[str]) -> None:
    """Refuse training runs the store does not hold, or holds a single step of; with none named, any must do.

    Raises:
        QueryError: a run of fewer than two steps.
    """
    steps = dict(
        atlas.sql(
            "SELECT lineage, count(DISTINCT step) FROM models WHERE lineage IS NOT NULL GROUP BY lineage ORDER BY 1"
        ).rows()
    )
    for lineage in lineages or steps or ("any",):
        if steps.get(lineage, 0) < 2:
            named = bool(lineages) or lineage in steps
            raise QueryError(
                f"no training run {lineage!r} with at least two steps" if named else "no training run in the store",
                where=str(atlas.path),
                expected="one of " + (", ".join(name for name, count in steps.items() if count > 1) or "none"),
                found=f"{steps.get(lineage, 0)} steps",
                remedy="ingest its checkpoints with --lineage NAME",
            )


def drift(atlas: Atlas, lineage: str) -> pl.DataFrame:
    """A row per head and pair of consecutive steps.

    ``operator_cosine`` is ``<T_a, T_b> / (||T_a|| ||T_b||)`` in [-1, 1]; ``write_overlap`` is
    ``||Q_Oa^T Q_Ob||^2 / d_head`` in [0, 1], 1 where both steps write to the same subspace and
    ``d_head / d_model`` for unrelated ones, and ``read_overlap`` the same of what they read.

    Raises:
        QueryError: no such run, a single step, or steps stored without their factors.
    """
    require_runs(atlas, [lineage])
    steps = atlas.sql(STEPS, {"lineage": lineage})
    frames = []
    for (operator, stack), rows in steps.group_by("operator", "stack", maintain_order=True):
        for (before, model), (after, other) in pairwise(rows.select("step", "model").rows()):
            layers = atlas.array(model, "layer", str(operator), str(stack))
            if not np.array_equal(layers, atlas.array(other, "layer", str(operator), str(stack))):
                raise QueryError("two steps of a run have other layers", where=lineage, found=f"{model}, {other}")
            frames += [
                _layer(atlas, (model, other), str(operator), str(stack), int(layer)).select(
                    pl.lit(lineage).alias("lineage"),
                    pl.lit(operator).alias("operator"),
                    pl.lit(stack).alias("stack"),
                    pl.lit(before).alias("from_step"),
                    pl.lit(after).alias("to_step"),
                    pl.lit(int(layer)).alias("layer"),
                    pl.int_range(pl.len()).alias("head"),
                    *COLUMNS,
                )
                for layer in layers
            ]
    return pl.concat(frames)


def _layer(atlas: Atlas, models: tuple[str, str], operator: str, stack: str, layer: int) -> pl.DataFrame:
    """Overlaps of every head of one layer between two steps."""
    core, written, read = (
        [atlas.array(model, name, operator, stack, layer) for model in models]
        for name in ("core", "o_basis", "v_basis")
    )
    write = np.swapaxes(written[0], 1, 2) @ written[1]
    back = np.swapaxes(read[0], 1, 2) @ read[1]
    size = core[0].shape[-1]
    inner = (core[0] * (write @ core[1] @ np.swapaxes(back, 1, 2))).sum((1, 2))
    norms = [np.sqrt((matrix**2).sum((1, 2))) for matrix in core]
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = (inner / (norms[0] * norms[1]), (write**2).sum((1, 2)) / size, (back**2).sum((1, 2)) / size)
    return pl.DataFrame(dict(zip(COLUMNS, columns, strict=True))).fill_nan(None)
