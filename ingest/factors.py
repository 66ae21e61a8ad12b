"""From the tensors of one layer to its head factors, raw or with what surrounds attention multiplied in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingest.checkpoint import Checkpoint
from ingest.family import Norm
from ingest.latent import compose, latent_parts
from ingest.plan import BESIDE, BRANCH_SCALE, GAINS, LayerPlan, Operator


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Canonical projections of one layer, contiguous, heads in order along rows.

    ``w_q`` (head d_key, d_model), ``w_k`` (kv_head d_key, d_source), ``w_v`` (kv_head d_head,
    d_source), ``w_o`` (d_model, head d_head), and the gains and scales to be multiplied in. In the
    checkpoint's dtype, or in float64 where they are products. ``values`` and ``queries`` are what
    identifies them: the stored matrices themselves, or the factors of the products.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    gains: Mapping[str, Tensor]
    values: tuple[Tensor, ...]
    queries: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class HeadFactors:
    """Factors of one layer and operator.

    ``output`` O (head, d_model, d_head), ``value`` V (kv_head, d_source, d_head), ``query`` (head,
    d_model, d_key) and ``key`` (kv_head, d_source, d_key); ``kv_head`` (head,) says which value and key a head reads.
    """

    output: Tensor
    value: Tensor
    query: Tensor
    key: Tensor
    kv_head: Tensor


def read_weights(checkpoint: Checkpoint, plan: LayerPlan) -> LayerWeights:
    """Read one layer and bring every layout to the same four matrices."""
    stored = {name: checkpoint.read(name) for name in dict.fromkeys(plan.tensors.values())}
    tensors = {role: stored[name] for role, name in plan.tensors.items()}
    gains: dict[str, Tensor] = {role: tensors.pop(role) for role in BESIDE if role in tensors}
    if plan.projections.latent is not None:
        parts = latent_parts(tensors, plan)
        w_q, w_k, w_v = compose(parts, plan)
        w_o = tensors["output"].contiguous()
        return LayerWeights(w_q, w_k, w_v, w_o, gains, (*parts.value, w_o), parts.query_key)
    if plan.projections.transposed:
        tensors = {role: tensor.mT for role, tensor in tensors.items()}
    if "fused" in tensors:
        w_q, w_k, w_v = split_fused(tensors["fused"], plan)
    else:
        w_q, w_k, w_v = tensors["query"], tensors["key"], tensors["value"]
    if plan.projections.gated_query:
        w_q = w_q.view(plan.stored_heads, 2, -1, w_q.shape[-1])[:, 0].flatten(0, 1)
    w_o = tensors["output"]
    if plan.pruned:
        w_q, w_k, w_v, w_o = _restore_pruned(w_q, w_k, w_v, w_o, plan)
    w_q, w_k, w_v, w_o = (w.contiguous() for w in (w_q, w_k, w_v, w_o))
    return LayerWeights(w_q, w_k, w_v, w_o, gains, (w_v, w_o), (w_q, w_k))


def split_fused(fused: Tensor, plan: LayerPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value rows of a fused matrix, heads in order."""
    layout = plan.projections.layout
    if layout == "grouped":
        groups = fused.view(plan.stored_kv_heads, -1, plan.d_head, fused.shape[-1])
        return groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)
    if layout == "four_blocks":
        query, value, key = fused.view(4, 3, -1, fused.shape[-1]).unbind(1)
        return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    if layout == "interleaved":
        query, key, value = fused.view(plan.stored_heads, 3, plan.d_head, fused.shape[-1]).unbind(1)
        return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    rows, kv_rows = plan.stored_heads * plan.sizes.d_key, plan.stored_kv_heads * plan.sizes.d_key
    return fused[:rows], fused[rows : rows + kv_rows], fused[rows + kv_rows :]


def _restore_pruned(
    w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, plan: LayerPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put zero blocks where heads were removed, so that the others keep their numbers."""
    kept = [head for head in range(plan.n_heads) if head not in plan.pruned]

    def rows(w: Tensor, size: int) -> Tensor:
        full = w.new_zeros(plan.n_heads, size, w.shape[-1])
        full[kept] = w.reshape(len(kept), size, w.shape[-1])
        return full.flatten(0, 1)

    if plan.stored_kv_heads < plan.n_kv_heads:
        w_k, w_v = rows(w_k, plan.sizes.d_key), rows(w_v, plan.d_head)
    return rows(w_q, plan.sizes.d_key), w_k, w_v, rows(w_o.mT, plan.d_head).mT


def digest(*matrices: Tensor) -> bytes:
    """SHA-256 of matrices as little-endian float64 in row-major order, with their shapes."""
    state = hashlib.sha256()
    for matrix in matrices:
        state.update(repr(tuple(matrix.shape)).encode())
        rows = max(1, 2**20 // max(1, matrix.shape[-1]))
        for first in range(0, matrix.shape[0], rows):
            state.update(matrix[first : first + rows].double().contiguous().numpy().data)
    return state.digest()


@dataclass(frozen=True, slots=True)
class LayerDigests:
    """What identifies one layer: its values and outputs, queries and keys, and what an operator multiplies in."""

    content: bytes
    query_key: bytes
    gains: Mapping[Operator, bytes]


@dataclass(frozen=True, slots=True)
class ModelHashes:
    """SHA-256, as hexadecimal text, over the digests of a model's layers in key order."""

    content: str
    query_key: str
    gains: Mapping[Operator, str]


def layer_digests(weights: LayerWeights, plan: LayerPlan, operators: Sequence[Operator]) -> LayerDigests:
    """Digests of one layer, the same whatever format, sharding or fused layout it came from."""
    gains = [gain[None] for role, gain in sorted(weights.gains.items()) if role in GAINS]
    scales = [scale[None] for role, scale in weights.gains.items() if role == BRANCH_SCALE]
    scales.append(torch.tensor([[plan.multiplier]], dtype=torch.float64))
    multiplied: dict[Operator, list[Tensor]] = {"folded": gains, "scaled": gains + scales}
    by_operator = {operator: digest(*multiplied[operator]) for operator in operators if operator in multiplied}
    return LayerDigests(digest(*weights.values), digest(*weights.queries), by_operator)


def model_hashes(layers: Sequence[LayerDigests]) -> ModelHashes:
    """Hashes of a model from the digests of its layers."""

    def over(parts: list[bytes]) -> str:
        return hashlib.sha256(b"".join(parts)).hexdigest()

    return ModelHashes(
        over([layer.content for layer in layers]),
        over([layer.query_key for layer in layers]),
        {operator: over([layer.gains[operator] for layer in layers]) for operator in layers[0].gains},
    )


def head_factors(
    weights: LayerWeights, plan: LayerPlan, operator: Operator, device: torch.device, dtype: torch.dtype
) -> HeadFactors:
    """Factors on ``device`` in ``dtype``; biases are no part of them.

    ``folded`` multiplies the norm in front of attention into V, Q and K (``diag(g) V`` for RMSNorm,
    ``(I - 11^T/d) diag(g) V`` for LayerNorm) and the gain on the branch's output into O. Values and
    keys that read another stream have that stream's norm. ``scaled`` also multiplies O with what
    multiplies the branch outside its module: a number, a vector along d_model, or both.
    """

    def heads(w: Tensor, count: int) -> Tensor:
        return w.to(device=device, dtype=dtype).view(count, -1, w.shape[-1]).mT

    output = heads(weights.w_o.mT.contiguous(), plan.n_heads)
    kv_heads = plan.n_kv_heads
    value, key = heads(weights.w_v, kv_heads), heads(weights.w_k, kv_heads)
    query = heads(weights.w_q, plan.n_heads)
    if plan.value_scale != 1:
        value = value * plan.value_scale
    if operator != "raw":
        if plan.feeding is not None:
            query = fold(query, plan.feeding, weights.gains.get("feeding_norm"))
        source, role = (plan.source, "source_norm") if plan.two_spaces else (plan.feeding, "feeding_norm")
        if source is not None:
            value, key = (fold(x, source, weights.gains.get(role)) for x in (value, key))
        if plan.branch is not None:
            output = fold(output, plan.branch, weights.gains.get("branch_norm"))
    if operator == "scaled":
        output = output * plan.multiplier
        if plan.layer_scale is not None:
            scale = weights.gains[BRANCH_SCALE].to(device=device, dtype=dtype)
            output = output * (scale.tanh() if plan.gated else scale)[:, None]
    kv_head = torch.arange(plan.n_heads, device=device) // (plan.n_heads // kv_heads)
    return HeadFactors(output, value, query, key, kv_head)


def fold(x: Tensor, norm: Norm, gain: Tensor | None) -> Tensor:
    """``x`` (n, d_model, d_head) with the linear part of a norm folded in along d_model."""
    if gain is not None:
        scale = gain.to(device=x.device, dtype=x.dtype)
        x = x * (1 + scale if norm.kind.endswith("plus_one") else scale)[:, None]
    return x - x.mean(1, keepdim=True) if norm.kind.startswith("layer") else x
