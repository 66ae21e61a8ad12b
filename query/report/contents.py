"""What a report shows: heads with their null and capacity, summaries, claims and packed arrays."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from query.panel import panel
from query.provenance import Provenance, provenance
from stats.errors import QueryError, StoreError, nearest
from stats.registry import CAPACITY_STATISTICS, HEAD_STATISTICS, NULL_STATISTICS
from store.tables import TABLE_BY_NAME

if TYPE_CHECKING:
    from query.atlas import Atlas

HERE = Path(__file__).parent
DIGITS = 6
"""Significant digits of the heads' numbers."""

KEY = ("model", "operator", "stack")
SPECTRA = ("sigma", "cosine", "eigenvalue_re", "eigenvalue_im")
PAIRS = ("mismatch_closure", "right_closure", "left_closure")
MEANINGS = (
    {item.name: item.meaning.split("; NULL")[0].replace("^2", "²") for item in HEAD_STATISTICS}
    | {item.name: item.meaning.split("; NULL")[0] for item in NULL_STATISTICS if item.name in ("p", "p_tail")}
    | {
        "null_median": "median closure of the head's scrambles",
        "null_q95": "95% quantile of closure of the head's scrambles",
        "null_q99": "99% quantile of closure of the head's scrambles",
        "n_draws": "scrambles drawn",
        "null_seed": "seed of the scrambles",
        "q": "false discovery rate at which p is significant among the heads of the model and operator",
        "wins": "whether closure exceeds the median of the scrambles",
        "tail_trusted": "whether p_tail is measured to be close for spectra like the head's",
        "mismatches": "values of the layer's other groups that the head was paired with",
        "mismatch_median": "median closure with the values of the layer's other groups",
        "mismatch_p": "share of those mismatches at or above the head's closure",
        "capacity": CAPACITY_STATISTICS[0].meaning,
        "refined_capacity": "the same after an ascent over all orientations",
        "attainment": "share of the capacity that the head attains",
    }
)


@dataclass(frozen=True, slots=True)
class Part:
    """One stack of one operator of a model: rows ``start`` to ``start + count`` of the heads.

    ``packed`` has arrays over ``layers``, ``heads`` and ``d_head``, which are the largest of any layer.
    """

    model: str
    operator: str
    stack: str
    start: int
    count: int
    layers: list[int]
    heads: int
    d_head: int
    packed: bytes

    @property
    def facts(self) -> dict[str, Any]:
        """Everything but the arrays."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "packed"}


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything a report shows.

    ``heads`` has a row for each head in the order of ``parts``; ``summary`` one for each part;
    ``claims`` is that of ``query.panel``.
    """

    heads: pl.DataFrame
    parts: tuple[Part, ...]
    summary: pl.DataFrame
    claims: pl.DataFrame
    provenance: Provenance
    threshold: float
    store: str

    def columns(self) -> dict[str, list[Any]]:
        """The heads column by column, numbers with ``DIGITS`` significant digits."""
        rounded = self.heads.select(
            pl.col(name).replace([float("inf"), float("-inf"), float("nan")], None).round_sig_figs(DIGITS)
            if kind == pl.Float64
            else pl.col(name)
            for name, kind in self.heads.drop(KEY).schema.items()
        )
        return rounded.to_dict(as_series=False)


def contents(atlas: Atlas, models: Sequence[str] = (), operator: str | None = None, threshold: float = 0.9) -> Contents:
    """Gather what a report shows.

    Args:
        atlas: the store.
        models: names to show; all when empty.
        operator: raw or folded; all that are stored when None.
        threshold: closure at or above which a head is strong, 0 to 1.

    Raises:
        StoreError: an empty store.
        QueryError: an unknown model, an operator that none of the models has, or a threshold out of range.
    """
    if not 0 <= threshold <= 1:
        raise QueryError("a closure threshold out of range", expected="0 to 1", found=str(threshold))
    stored = atlas.sql("SELECT model FROM models ORDER BY model")["model"].to_list()
    if not stored:
        raise StoreError("the store is empty", where=str(atlas.path), remedy="measure a model: headatlas ingest MODEL")
    for model in models:
        if model not in stored:
            raise QueryError(
                f"no model named {model!r}",
                where=str(atlas.path),
                expected="one of " + ", ".join(stored),
                found=model,
                remedy=nearest(model, stored) or "list the models with: headatlas models",
            )
    wanted = {"models": sorted(set(models)) or stored, "operator": operator}
    heads = atlas.sql((HERE / "heads.sql").read_text(encoding="utf-8"), wanted)
    if heads.is_empty():
        raise QueryError(
            "no such operator is stored",
            where=str(atlas.path),
            found=operator,
            remedy=f"measure it: headatlas ingest MODEL --operator {operator}",
        )
    summary = atlas.sql((HERE / "summary.sql").read_text(encoding="utf-8"), wanted | {"threshold": threshold})
    asked = ["headatlas report", *models, *(["--operator", operator] if operator else []), f"--threshold {threshold:g}"]
    return Contents(
        heads,
        tuple(_parts(atlas, heads)),
        summary,
        panel(atlas, threshold, wanted["models"]),
        provenance(atlas, " ".join(asked), heads),
        threshold,
        str(atlas.path),
    )


def user_columns(heads: pl.DataFrame) -> list[str]:
    """Columns that a user's own statistics have added to ``heads``."""
    declared = {column.name for column in TABLE_BY_NAME["heads"].columns}
    return [name for name in heads.columns if name not in declared | MEANINGS.keys()]


def _parts(atlas: Atlas, heads: pl.DataFrame) -> list[Part]:
    parts = []
    start = 0
    for (model, operator, stack), rows in heads.group_by(*KEY, maintain_order=True):
        assert isinstance(model, str)
        assert isinstance(operator, str)
        assert isinstance(stack, str)
        arrays = {name: atlas.array(model, name, operator, stack) for name in ("sigma", "cosine", "eigenvalue", *PAIRS)}
        layers = atlas.array(model, "layer", operator, stack).tolist()
        _, width, d_head = arrays["sigma"].shape
        packed = gzip.compress(_packed(arrays), mtime=0)
        parts.append(Part(model, operator, stack, start, len(rows), layers, width, d_head, packed))
        start += len(rows)
    return parts


def _packed(arrays: dict[str, np.ndarray]) -> bytes:
    """Spectra and pairs as half floats, all low bytes in front of all high bytes, which compresses best.

    Singular values and eigenvalues are divided by the largest singular value of their head, and closures
    of pairs are there as their square roots: small ones keep their digits so. The order
    is that of ``SPECTRA`` (layer, head, d_head) and ``PAIRS`` (layer, write_head, read_head).
    """
    largest = arrays["sigma"][..., :1]
    scale = np.where(largest > 0, largest, 1.0)
    eigenvalue = arrays["eigenvalue"] / scale
    values = [arrays["sigma"] / scale, arrays["cosine"], eigenvalue.real, eigenvalue.imag]
    values += [np.sqrt(arrays[name]) for name in PAIRS]
    halves = np.concatenate([value.astype("<f2").ravel() for value in values])
    return halves.view(np.uint8).reshape(-1, 2).T.tobytes()


def compressed(columns: dict[str, list[Any]]) -> bytes:
    """Columns as gzipped JSON."""
    return gzip.compress(
        json.dumps(columns, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(), mtime=0
    )
