"""Counts of unidentified parameters against the null space of a layer's Jacobian."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stats.errors import HeadatlasError
from stats.identification import (
    AttentionShape,
    attention_parameters,
    expressivity,
    unidentified_score_parameters,
    unidentified_share,
    unidentified_value_parameters,
)

CUT = 1e-10
"""Singular values of the Jacobian below this share of the largest are zero."""

STEPS = 7
"""Length of the random sequences: offsets 0 to 6, enough to tell three frequencies apart."""

FREQUENCY = (1.0, 0.37, 1.9)


def parameters(shape: AttentionShape, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights and biases by name, heads before the axes of a single head."""
    sizes = {
        "W_Q": (shape.n_heads, shape.d_model, shape.d_head),
        "W_K": (shape.n_kv_heads, shape.d_model, shape.d_head),
        "W_V": (shape.n_kv_heads, shape.d_model, shape.d_head),
        "W_O": (shape.n_heads, shape.d_model, shape.d_head),
    }
    biases = (
        ("b_Q", shape.query_bias, (shape.n_heads, 1, shape.d_head)),
        ("b_K", shape.key_bias, (shape.n_kv_heads, 1, shape.d_head)),
        ("b_V", shape.value_bias, (shape.n_kv_heads, 1, shape.d_head)),
        ("b_O", shape.output_bias, (shape.d_model,)),
    )
    sizes |= {name: size for name, present, size in biases if present}
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64) * (shape.d_model**-0.5 if "W" in name else 1)
        for name, size in sizes.items()
    }


def rotated(projected: Tensor, d_rotary: int) -> Tensor:
    """Rotary embedding of the first d_rotary coordinates of (..., step, d_head), halves paired."""
    half = d_rotary // 2
    angle = torch.arange(projected.shape[-2], dtype=torch.float64)[:, None] * torch.tensor(
        FREQUENCY[:half], dtype=torch.float64
    )
    first, second, still = projected.split((half, half, projected.shape[-1] - d_rotary), dim=-1)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine, still), dim=-1)


def attention(shape: AttentionShape, weights: dict[str, Tensor], x: Tensor, causal: bool) -> Tensor:
    """Output (step, d_model) of the layer for inputs x of that shape."""
    group = torch.arange(shape.n_heads) // (shape.n_heads // shape.n_kv_heads)
    zero = torch.zeros((), dtype=torch.float64)
    query = rotated(x @ weights["W_Q"] + weights.get("b_Q", zero), shape.d_rotary)
    key = rotated(x @ weights["W_K"] + weights.get("b_K", zero), shape.d_rotary)[group]
    value = (x @ weights["W_V"] + weights.get("b_V", zero))[group]
    score = query @ key.mT / math.sqrt(shape.d_head)
    if causal:
        score = score.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return (score.softmax(-1) @ value @ weights["W_O"].mT).sum(0) + weights.get("b_O", zero)


def jacobian_spectrum(shape: AttentionShape, causal: bool = True, seed: int = 0) -> Tensor:
    """Singular values (parameter,) of the Jacobian of the outputs on random sequences.

    Two outputs to a parameter, so that inputs leave undetermined only what no input can determine.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = parameters(shape, generator)
    count = sum(weight.numel() for weight in weights.values())
    sequences = math.ceil(2 * count / (STEPS * shape.d_model))
    x = torch.randn(sequences, STEPS, shape.d_model, generator=generator, dtype=torch.float64)

    def output(values: dict[str, Tensor], sequence: Tensor) -> Tensor:
        return attention(shape, values, sequence, causal)

    jacobian = torch.func.vmap(torch.func.jacrev(output), in_dims=(None, 0))(weights, x)
    matrix = torch.cat([block.flatten(3).flatten(0, 2) for block in jacobian.values()], dim=1)
    assert matrix.shape[1] == count == attention_parameters(shape)
    return torch.linalg.svdvals(matrix)


def check_null_space(shape: AttentionShape, causal: bool = True) -> None:
    spectrum = jacobian_spectrum(shape, causal)
    expected = unidentified_value_parameters(shape) + unidentified_score_parameters(shape)
    relative = spectrum / spectrum[0]
    assert int((relative <= CUT).sum()) == expected
    assert relative[-expected - 1] > 1e-6, "the smallest determined direction must stand clear of the cut"
    assert relative[-expected:].max() < 1e-13
    assert unidentified_share(shape) == expected / len(spectrum)


MHA = AttentionShape(n_heads=2, n_kv_heads=2, d_head=4, d_model=6)
GQA = AttentionShape(n_heads=4, n_kv_heads=2, d_head=4, d_model=6)
MQA = AttentionShape(n_heads=3, n_kv_heads=1, d_head=4, d_model=5)
ALL_BIASES = {"query_bias": True, "key_bias": True, "value_bias": True, "output_bias": True}
QKV_BIASES = {"query_bias": True, "key_bias": True, "value_bias": True}


@pytest.mark.parametrize("biases", [{}, ALL_BIASES, QKV_BIASES], ids=["no-bias", "all-biases", "qkv-biases"])
@pytest.mark.parametrize("d_rotary", [0, 2, 4])
@pytest.mark.parametrize("shape", [MHA, GQA, MQA], ids=["MHA", "GQA", "MQA"])
def test_counts_are_the_null_space_of_the_jacobian(shape: AttentionShape, d_rotary: int, biases: dict) -> None:
    check_null_space(replace(shape, d_rotary=d_rotary, **biases))


@pytest.mark.parametrize("name", ["query_bias", "key_bias", "value_bias", "output_bias"])
def test_each_bias_alone(name: str) -> None:
    check_null_space(replace(GQA, d_rotary=2, **{name: True}))


@pytest.mark.parametrize("d_head", [5, 6])
def test_partial_rotary_with_more_coordinates_still_than_turning_and_the_reverse(d_head: int) -> None:
    check_null_space(AttentionShape(2, 1, d_head, 6, d_rotary=4, key_bias=True))
    check_null_space(AttentionShape(2, 1, d_head, 6, d_rotary=2, key_bias=True))


def test_three_frequencies() -> None:
    check_null_space(AttentionShape(2, 1, 6, 7, d_rotary=6, key_bias=True))


@pytest.mark.parametrize("output_bias", [False, True])
def test_more_value_coordinates_than_d_model(output_bias: bool) -> None:
    """3 * 3 value biases enter through 5 numbers."""
    check_null_space(AttentionShape(3, 3, 3, 5, value_bias=True, output_bias=output_bias))


def test_d_head_equal_to_d_model() -> None:
    check_null_space(AttentionShape(2, 1, 4, 4, d_rotary=2, value_bias=True))


def test_a_head_of_one_coordinate() -> None:
    check_null_space(AttentionShape(2, 2, 1, 3, **ALL_BIASES))


def test_attention_in_both_directions() -> None:
    check_null_space(replace(GQA, d_rotary=2, **ALL_BIASES), causal=False)


def test_equal_frequencies_would_free_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pairs of one frequency mix: complex 2 x 2 maps, 8 real numbers, not 4."""
    shape = AttentionShape(2, 1, 4, 7, d_rotary=4)
    monkeypatch.setattr("tests.test_identification.FREQUENCY", (0.7, 0.7))
    spectrum = jacobian_spectrum(shape)
    assert int((spectrum <= CUT * spectrum[0]).sum()) == unidentified_value_parameters(shape) + 8


def test_published_share_of_plain_multi_head_attention() -> None:
    """1 / (2 H)."""
    gpt2 = AttentionShape(n_heads=12, n_kv_heads=12, d_head=64, d_model=768)
    assert unidentified_share(gpt2) == 1 / 24


def test_counts_of_a_grouped_query_model() -> None:
    """9 heads on 3 of width 64, rotary on all of it: 3 * 64^2 and 3 * 64."""
    smollm2 = AttentionShape(n_heads=9, n_kv_heads=3, d_head=64, d_model=576, d_rotary=64)
    assert unidentified_value_parameters(smollm2) == 12288
    assert unidentified_score_parameters(smollm2) == 192
    assert attention_parameters(smollm2) == 884736


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"n_kv_heads": 3}, "multiple"),
        ({"n_kv_heads": 0}, "at least 1"),
        ({"d_rotary": 3}, "even"),
        ({"d_rotary": 6}, "d_rotary from 0"),
        ({"d_head": 8}, "at most d_model"),
    ],
)
def test_refuses_other_shapes(changed: dict[str, int], expected: str) -> None:
    with pytest.raises(HeadatlasError, match=expected):
        replace(GQA, **changed)


def test_expressivity() -> None:
    found = expressivity(n_heads=9, d_model=576, n_layers=30, n_tokens=1000)
    assert (found.layer_exponent, found.region_exponent) == (9, 17280)
    assert found.layer_log10 == pytest.approx(27)
    assert found.region_log10 == pytest.approx(51840)
    single = expressivity(n_heads=3, d_model=2, n_layers=1, n_tokens=7)
    assert 10**single.layer_log10 == pytest.approx(7**3)
    assert 10**single.region_log10 == pytest.approx(7**2)
    with pytest.raises(HeadatlasError, match="at least 1"):
        expressivity(n_heads=3, d_model=2, n_layers=1, n_tokens=0)
