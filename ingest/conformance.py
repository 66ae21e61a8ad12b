"""Head factors of a checkpoint against the heads of the running model, one layer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ingest.checkpoint import Checkpoint
from ingest.factors import HeadFactors
from ingest.family import NEUTRALISED
from ingest.head_response import HeadResponse, linear_part
from ingest.plan import LayerPlan, Operator
from ingest.running import NotComparableError, RunningAttention, RunningModel, first_line

OPERATOR_TOLERANCE = 1e-5
"""Largest relative difference of what a head writes: some modules round to float32 within, at 6e-8 a step."""

N_TOKENS = 3
"""Random tokens that every head is probed with."""

Outcome = Literal["ok", "differs", "not compared"]


@dataclass(frozen=True, slots=True)
class LayerAgreement:
    """How far the heads of one layer and the running model are apart.

    ``operator_error`` is the largest relative difference over heads, and ``shifted_error`` the
    smallest when every head is compared with its neighbour: what the first would be if heads could
    not be told apart. ``neutralised`` are pieces of the module that ``T`` leaves out.
    """

    outcome: Outcome
    operator_error: float | None = None
    shifted_error: float | None = None
    neutralised: tuple[str, ...] = ()
    reason: str = ""


def compare_layer(
    running: RunningModel, checkpoint: Checkpoint, layer: LayerPlan, operator: Operator, factors: HeadFactors
) -> LayerAgreement:
    """Compare what factors say with what the running heads do, on random tokens.

    Args:
        running: the model, its modules found.
        checkpoint: where the factors come from.
        layer: the layer's plan.
        operator: the operator that the factors are of.
        factors: in float64.
    """
    neutralised = tuple(piece for piece in layer.pieces if piece in NEUTRALISED or piece == "sinks")
    generator = torch.Generator().manual_seed(layer.layer)
    shape = (N_TOKENS, layer.sizes.d_source)
    tokens = torch.randn(shape, dtype=torch.float64, generator=generator) / layer.sizes.d_source**0.5
    tokens = torch.cat([tokens, tokens[:1] - 2 * tokens[1:2]])
    try:
        attention = running.attention(layer)
        gain = checkpoint.read(layer.tensors["latent_gain"]) if "latent_gain" in layer.tensors else None
        measured = _respond(HeadResponse(attention, layer, gain), attention, layer, operator, tokens)
    except NotComparableError as reason:
        return LayerAgreement("not compared", neutralised=neutralised, reason=str(reason))
    except Exception as error:
        reason_text = f"{type(error).__name__}: {first_line(error)}"
        return LayerAgreement("not compared", neutralised=neutralised, reason=reason_text)
    kept = [head for head in range(layer.n_heads) if head not in layer.pruned]
    value = factors.value[factors.kv_head[kept]]
    read = torch.einsum("td,hdk->thk", tokens, value)
    expected = torch.einsum("thk,hmk->thm", read, factors.output[kept])
    return _judge(measured, expected, neutralised)


def _respond(
    response: HeadResponse, attention: RunningAttention, layer: LayerPlan, operator: Operator, tokens: Tensor
) -> Tensor:
    """What the running heads write (token, head, d_model), norms included where they are folded."""
    if operator == "raw":
        return response.operators(tokens)
    source = layer.source if layer.two_spaces else layer.feeding
    if source is not None:
        if attention.feeding is None:
            raise NotComparableError("no norm of the running model gives what attention reads")
        tokens = linear_part(attention.feeding, tokens)
    written = response.operators(tokens)
    if layer.branch is not None:
        if attention.branch is None:
            raise NotComparableError("no norm of the running model reads what attention writes")
        written = linear_part(attention.branch, written.flatten(0, 1)).view_as(written)
    return written


def _judge(measured: Tensor, expected: Tensor, neutralised: tuple[str, ...]) -> LayerAgreement:
    """Compare responses (token, head, d_model), the last token being the first less twice the second."""
    if not (expected.isfinite().all() and measured.isfinite().all()):
        return LayerAgreement("not compared", neutralised=neutralised, reason="a head gives NaN or infinity")
    error = float(relative_difference(measured, expected).max())
    n_heads = expected.shape[1]
    neighbours = relative_difference(measured, expected.roll(1, 1))
    shifted = float(neighbours.min()) if n_heads > 1 else None
    if n_heads > 1 and float(neighbours.max()) < OPERATOR_TOLERANCE:
        return LayerAgreement("not compared", error, shifted, neutralised, "all heads of the layer do the same")
    if error < OPERATOR_TOLERANCE:
        return LayerAgreement("ok", error, shifted, neutralised)
    combined = measured[0] - 2 * measured[1]
    if float(relative_difference(measured[-1:], combined[None]).max()) > OPERATOR_TOLERANCE:
        reason = "the module is not linear in its tokens"
        return LayerAgreement("not compared", error, shifted, neutralised, reason)
    return LayerAgreement("differs", error, shifted, neutralised, "the running heads do something else")


def relative_difference(one: Tensor, other: Tensor) -> Tensor:
    """Norm of the difference of each head's answers (token, head, d_model) over the larger of both.

    A head that writes nothing is measured by the layer instead.
    """
    size = torch.maximum(one.norm(dim=(0, 2)), other.norm(dim=(0, 2)))
    scale = torch.where(size > torch.finfo(torch.float64).eps * size.max(), size, size.max())
    difference: Tensor = (one - other).norm(dim=(0, 2)) / scale.clamp(min=torch.finfo(torch.float64).tiny)
    return difference
