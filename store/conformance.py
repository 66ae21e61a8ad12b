"""Stored numbers against the running model: what is stored follows from factors that the model confirms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ingest.conformance import LayerAgreement, Outcome, compare_layer
from ingest.factors import HeadFactors, head_factors, layer_digests, read_weights
from ingest.plan import LayerPlan, Operator, Plan
from ingest.running import RunningModel
from stats.errors import StoreError
from store import catalogue
from store.arrays import attributes_of, read_stack
from store.atlas import AtlasStore, StoredModel

STORED_TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""Largest relative difference of a stored number, by the dtype it was computed in."""

NUMBERS = ("norm", "sigma", "closure", "alpha", "trace")
"""Stored numbers that are computed again."""

IN_ONE_SPACE = ("closure", "alpha", "trace")
"""Those that need ``T^2``, or a basis of one space."""


@dataclass(frozen=True, slots=True)
class LayerConformance:
    """One layer: its heads against the running model, and its stored numbers against its heads.

    ``stored_error`` is the largest relative difference of closure, alpha, norm, trace and singular
    values from those computed by another route; None where other weights are stored.
    """

    stack: str
    layer: int
    heads: int
    agreement: LayerAgreement
    stored_error: float | None
    outcome: Outcome
    reason: str


def stored_model(store: AtlasStore, name: str, operator: Operator) -> StoredModel:
    """A stored model, checked to have an operator.

    Raises:
        StoreError: the store holds no such model, or not that operator of it.
    """
    stored = store.model(name)
    if operator not in stored.gain_hash:
        raise StoreError(
            f"{name} has no {operator} operator in the store",
            where=str(store.root),
            expected=f"one of {', '.join(sorted(stored.gain_hash))}",
            found=operator,
            remedy=f"ingest the checkpoint with --operator {operator}",
        )
    return stored


def compare_with_store(
    store: AtlasStore, stored: StoredModel, plan: Plan, layers: list[LayerPlan], running: RunningModel
) -> Iterator[LayerConformance]:
    """Compare layers of a plan of a single operator with what is stored and with the running model."""
    (operator,) = plan.operators
    unit = store.arrays_path / stored.array_group / operator
    tolerance = STORED_TOLERANCE[attributes_of(unit)["compute_dtype"]]
    hashes = _content_hashes(store, stored.model)
    stacks: dict[str, dict[str, np.ndarray]] = {}
    for layer in layers:
        weights = read_weights(plan.checkpoint, layer)
        factors = head_factors(weights, layer, operator, torch.device("cpu"), torch.float64)
        agreement = compare_layer(running, plan.checkpoint, layer, operator, factors)
        error, outcome, reason = None, agreement.outcome, agreement.reason
        if hashes.get((layer.stack, layer.layer)) != layer_digests(weights, layer, ()).content.hex():
            outcome, reason = "differs", "the store holds other weights"
        else:
            if layer.stack not in stacks:
                stacks[layer.stack] = read_stack(unit / layer.stack)
            error = stored_error(_of_layer(stacks[layer.stack], layer), factors)
            if not error < tolerance:
                outcome, reason = "differs", "stored numbers do not follow from the weights"
        yield LayerConformance(layer.stack, layer.layer, layer.n_heads, agreement, error, outcome, reason)


def _content_hashes(store: AtlasStore, model: str) -> dict[tuple[str, int], str]:
    with catalogue.reading(store.catalogue_path) as connection:
        rows = connection.execute(
            "SELECT stack, layer, content_hash FROM layers WHERE model = ? ORDER BY stack, layer", [model]
        ).fetchall()
    return {(stack, layer): content for stack, layer, content in rows}


def _of_layer(arrays: Mapping[str, np.ndarray], layer: LayerPlan) -> dict[str, np.ndarray]:
    """Stored numbers of one layer's heads, without padding."""
    row = int(np.flatnonzero(arrays["layer"] == layer.layer)[0])
    found = {name: arrays[name][row, : layer.n_heads] for name in ("reason", *NUMBERS)}
    return found | {"sigma": found["sigma"][:, : layer.d_head]}


def stored_error(stored: Mapping[str, np.ndarray], factors: HeadFactors) -> float:
    """Largest difference of stored numbers from those of the same factors, relative to each one's scale.

    Closure is compared as it is, the others relative to ``||T||``. Of a head without a closure only
    the norm and singular values are compared, and only where it has finite ones.

    Args:
        stored: ``closure``, ``alpha``, ``norm``, ``trace``, ``reason`` (head,) and ``sigma`` (head, d_head).
        factors: in float64.
    """
    again = layer_numbers(factors.output.numpy(), factors.value.numpy(), factors.kv_head.numpy())
    defined = stored["reason"] == 0
    scale = np.where(again["norm"] > 0, again["norm"], 1.0)
    worst = 0.0
    for name in NUMBERS:
        difference = np.abs(stored[name] - again[name]) if name in again else np.full(len(defined), np.nan)
        difference = difference.max(-1) if name == "sigma" else difference
        relative = difference if name == "closure" else difference / scale
        compared = defined if name in IN_ONE_SPACE else defined | np.isfinite(relative)
        worst = max(worst, float(np.nan_to_num(relative[compared], nan=np.inf).max(initial=0.0)))
    return worst


def layer_numbers(output: np.ndarray, value: np.ndarray, kv_head: np.ndarray) -> dict[str, np.ndarray]:
    """Norm and singular values of ``T = O V^T``, and closure, alpha and trace in one space, by thin QR.

    With ``O = Q_O R_O`` and ``V = Q_V R_V``, ``T`` is ``R_O R_V^T`` between orthonormal bases and
    ``T^2`` is ``R_O (V^T O) R_V^T``. Heads that hold NaN or infinity have NaN, and so has the closure of
    one whose square vanishes.

    Args:
        output: O (head, d_model, d_head).
        value: V (kv_head, d_source, d_head).
        kv_head: (head,).
    """
    nothing = ~(np.isfinite(output).all((1, 2)) & np.isfinite(value).all((1, 2))[kv_head])
    output, value = (np.nan_to_num(factor, posinf=0.0, neginf=0.0) for factor in (output, value))
    upper_o, upper_v = (np.linalg.qr(factor, mode="r") for factor in (output, value))
    transport = upper_o @ upper_v[kv_head].mT
    sigma = np.linalg.svd(transport, compute_uv=False)
    missing = output.shape[-1] - sigma.shape[-1]
    numbers = {
        "norm": np.linalg.norm(transport, axis=(1, 2)),
        "sigma": np.pad(sigma, ((0, 0), (0, missing))),
    }
    if output.shape[1] == value.shape[1]:
        between = value[kv_head].mT @ output
        square = upper_o @ between @ upper_v[kv_head].mT
        inner = (square * transport).sum((1, 2))
        with np.errstate(invalid="ignore", divide="ignore"):
            numbers["closure"] = (inner / (np.linalg.norm(square, axis=(1, 2)) * numbers["norm"])) ** 2
            numbers["alpha"] = inner / numbers["norm"] ** 2
        numbers["trace"] = np.trace(between, axis1=1, axis2=2)
    for array in numbers.values():
        array[nothing] = np.nan
    return numbers
