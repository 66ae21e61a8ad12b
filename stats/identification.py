"""What a configuration alone fixes: parameters no output can determine, and expressivity exponents.

Two parameter settings of an attention layer that give the same output on every input cannot be told
apart. The counts here are the dimension of that freedom at generic weights, for one layer

    y_t = b_O + sum_i O_i (sum_s p_its V_g^T x_s + b_V,g),
    p_it = softmax_s((W_Q,i^T x_t + b_Q,i)^T R_(s-t) (W_K,g^T x_s + b_K,g) / sqrt(d_head))

as a function of all its inputs ``x`` (step, d_model), each query head i reading key/value head
``g = g(i)`` and R rotating ``d_rotary`` of the d_head coordinates, a pair to each of ``d_rotary / 2``
different nonzero frequencies. They are the null-space dimension of the Jacobian of the outputs.

Inputs are taken to fill d_model. Where a LayerNorm confines them to a hyperplane, or a norm's gain can
be traded against a projection, still more is free. A norm on queries or keys takes freedom away; the
counts are not for such layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stats.errors import HeadatlasError


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one attention layer.

    ``d_rotary`` is the number of the d_head coordinates that rotary embeddings turn: even, 0 for
    none, d_head for all.

    Raises:
        HeadatlasError: for sizes that no such layer has, or d_head above d_model.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    d_rotary: int = 0
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        for fits, expected in (
            (min(self.n_heads, self.n_kv_heads, self.d_head) >= 1, "n_heads, n_kv_heads and d_head of at least 1"),
            (self.n_kv_heads >= 1 and self.n_heads % self.n_kv_heads == 0, "n_heads a multiple of n_kv_heads"),
            (self.d_head <= self.d_model, "d_head of at most d_model"),
            (0 <= self.d_rotary <= self.d_head, "d_rotary from 0 to d_head"),
            (self.d_rotary % 2 == 0, "d_rotary even: a rotation turns a pair"),
        ):
            if not fits:
                raise HeadatlasError(
                    "these sizes are not those of an attention layer whose freedom can be counted",
                    expected=expected,
                    found=str(self),
                    remedy="check the sizes read from the configuration",
                )


def attention_parameters(shape: AttentionShape) -> int:
    """Number of parameters of the four projections with their biases."""
    queries, keys = shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head
    biases = shape.query_bias * queries + (shape.key_bias + shape.value_bias) * keys + shape.output_bias * shape.d_model
    return 2 * shape.d_model * (queries + keys) + biases


def unidentified_value_parameters(shape: AttentionShape) -> int:
    """Dimension of the freedom on the output-value side.

    ``n_kv_heads d_head^2`` for the invertible maps between the values of a group and the outputs of
    its heads. Attention weights sum to one, so a value bias only adds a constant to the output: an
    output bias absorbs all of it, and without one it still enters through only d_model numbers.
    """
    values = shape.n_kv_heads * shape.d_head
    free_bias = 0
    if shape.value_bias:
        free_bias = values if shape.output_bias else max(0, values - shape.d_model)
    return values * shape.d_head + free_bias


def unidentified_score_parameters(shape: AttentionShape) -> int:
    """Dimension of the freedom on the query-key side.

    Per key head, the maps that commute with every rotation: a complex number to each rotated pair,
    ``d_rotary`` in all, and any invertible map of the ``d_head - d_rotary`` coordinates that do not
    rotate. On those a key bias adds the same to all scores of a query, which softmax cancels; a
    rotated key bias depends on the position and is determined.
    """
    still = shape.d_head - shape.d_rotary
    return shape.n_kv_heads * (shape.d_rotary + still**2 + shape.key_bias * still)


def unidentified_share(shape: AttentionShape) -> float:
    """Share of the layer's attention parameters that no output determines, in (0, 1).

    ``1 / (2 n_heads)`` for one key/value head a query head, ``n_heads d_head = d_model``, no rotary
    embedding and no biases.
    """
    free = unidentified_value_parameters(shape) + unidentified_score_parameters(shape)
    return free / attention_parameters(shape)


@dataclass(frozen=True, slots=True)
class Expressivity:
    """Growth with the number N of tokens at zero temperature, as exponents of N and as log10.

    There attention assigns each query to the key of the largest score, which partitions queries as a
    power diagram with N cells. The common refinement of n_heads diagrams grows as ``N^n_heads`` a
    layer, the linear regions of n_layers layers as ``N^(d_model n_layers)``. Constants are left out.
    """

    layer_exponent: int
    region_exponent: int
    layer_log10: float
    region_log10: float


def expressivity(n_heads: int, d_model: int, n_layers: int, n_tokens: int) -> Expressivity:
    """Expressivity exponents of ``n_layers`` equal layers, and their log10 at ``n_tokens`` >= 1."""
    if min(n_heads, d_model, n_layers, n_tokens) < 1:
        raise HeadatlasError(
            "expressivity needs heads, a model width, layers and tokens",
            expected="at least 1 of each",
            found=f"n_heads {n_heads}, d_model {d_model}, n_layers {n_layers}, n_tokens {n_tokens}",
            remedy="check the sizes read from the configuration",
        )
    layer, region = n_heads, d_model * n_layers
    return Expressivity(layer, region, layer * math.log10(n_tokens), region * math.log10(n_tokens))
