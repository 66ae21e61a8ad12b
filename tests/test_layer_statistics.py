"""Every statistic of a layer against dense brute force, and its invariances and edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stats.errors import HeadatlasError
from stats.factorization import RANK_CUT, checked_eigh, thin_factor
from stats.layer import REASON_CODE, measure_layer
from stats.registry import HEAD_STATISTICS, PAIR_STATISTICS, QK_STATISTICS
from tests import dense

CUT = RANK_CUT[torch.float64]
INTRINSIC = [item.name for item in HEAD_STATISTICS] + ["sigma", "cosine", "eigenvalue"]
"""What belongs to T alone and must not depend on how it is factored."""


def random_factors(
    seed: int, heads: int = 4, groups: int = 2, d_model: int = 24, d_head: int = 5
) -> list[torch.Tensor]:
    """O (head), V (kv_head), W_Q (head), W_K (kv_head), each (n, d_model, d_head)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, d_model, d_head, generator=generator, dtype=torch.float64)
        for count in (heads, groups, heads, groups)
    ]


def measure(factors: list[torch.Tensor], rank_cut: float = CUT) -> dict[str, np.ndarray]:
    output, value, query, key = factors
    kv_head = torch.arange(len(output)) // (len(output) // len(value))
    measured = measure_layer(output, value, query, key, kv_head, rank_cut)
    return {name: array.numpy() for name, array in measured.items()}


def single(output: torch.Tensor, value: torch.Tensor) -> dict[str, np.ndarray]:
    """One head measured alone, with a random query-key side."""
    generator = torch.Generator().manual_seed(99)
    other = torch.randn(1, *output.shape, generator=generator, dtype=torch.float64)
    return measure([output[None], value[None], other, other])


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_agrees_with_dense_matrices(heads: int, groups: int) -> None:
    factors = random_factors(heads * 10 + groups, heads, groups)
    measured = measure(factors)
    output, value, query, key = (factor.numpy() for factor in factors)
    shared = heads // groups
    operators = [output[i] @ value[i // shared].T for i in range(heads)]
    for i in range(heads):
        for name, expected in dense.head(output[i], value[i // shared]).items():
            np.testing.assert_allclose(
                measured[name][i], expected, rtol=1e-9, atol=1e-12, err_msg=f"{name} of head {i}"
            )
        for name, expected in dense.query_key(query[i], key[i // shared]).items():
            np.testing.assert_allclose(measured[f"qk_{name}"][i], expected, rtol=1e-9, atol=1e-12, err_msg=name)
        eigenvalue = np.linalg.eigvals(operators[i])
        eigenvalue = eigenvalue[np.argsort(-np.abs(eigenvalue))][:5]
        np.testing.assert_allclose(np.poly(measured["eigenvalue"][i]), np.poly(eigenvalue), rtol=1e-8, atol=1e-8)
        for j in range(heads):
            mismatch = dense.closure(output[i] @ value[j // shared].T)
            right = dense.action(operators[i] @ operators[j], operators[i])
            left = dense.action(operators[i] @ operators[j], operators[j])
            angles = (np.nan, np.nan)
            if i != j and i // shared == j // shared:
                angles = np.sort(scipy.linalg.subspace_angles(output[i], output[j]))[[0, -1]]
            expected_pair = (mismatch, *right, *left, *angles)
            found = tuple(measured[item.name][i, j] for item in PAIR_STATISTICS)
            np.testing.assert_allclose(found, expected_pair, rtol=1e-9, atol=1e-13, err_msg=f"pair {i}, {j}")


def test_the_core_is_the_operator_in_principal_coordinates() -> None:
    output, value = random_factors(3, 1, 1)[:2]
    measured = single(output[0], value[0])
    core, cosine = measured["core"][0], measured["cosine"][0]
    t = (output[0] @ value[0].T).numpy()
    np.testing.assert_allclose(
        np.linalg.svd(core, compute_uv=False), np.linalg.svd(t, compute_uv=False)[:5], rtol=1e-10
    )
    returned = core @ np.diag(cosine) @ core
    np.testing.assert_allclose(np.linalg.norm(returned), np.linalg.norm(t @ t), rtol=1e-10)
    np.testing.assert_allclose(np.trace(np.diag(cosine) @ core), np.trace(t), rtol=1e-10)
    np.testing.assert_allclose((returned * core).sum(), (t @ t * t).sum(), rtol=1e-10)


def test_declares_every_array_it_returns() -> None:
    measured = set(measure(random_factors(0)))
    declared = {item.name for item in (*HEAD_STATISTICS, *PAIR_STATISTICS)} | {
        f"qk_{item.name}" for item in QK_STATISTICS
    }
    assert declared <= measured
    assert measured - declared == {"reason", "core", "sigma", "cosine", "eigenvalue", "sigma_o", "sigma_v"}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), groups=st.sampled_from([1, 2, 4]))
def test_gauge_invariance(seed: int, groups: int) -> None:
    """O -> O G, V -> V G^-T changes nothing that belongs to T; one G per value group."""
    output, value, query, key = random_factors(seed, 4, groups)
    gauge = torch.linalg.qr(
        torch.randn(groups, 5, 5, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    )[0]
    stretch = torch.logspace(-1, 1, 5, dtype=torch.float64)
    gauge = gauge * stretch
    per_head = gauge.repeat_interleave(4 // groups, 0)
    moved = [output @ per_head, value @ torch.linalg.inv(gauge).mT, query, key]
    before, after = measure([output, value, query, key]), measure(moved)
    for name in INTRINSIC:
        if name == "eigenvalue":
            before[name], after[name] = (np.array([np.poly(row) for row in x[name]]) for x in (before, after))
        np.testing.assert_allclose(after[name], before[name], rtol=1e-7, atol=1e-9, err_msg=name)
    for name in ("right_closure", "right_alpha", "left_closure", "left_alpha"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-7, atol=1e-9, err_msg=name)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.floats(-12, 12))
def test_scale_invariance(seed: int, exponent: float) -> None:
    """Weights times c: ratios stay, alpha and norm go with c^2."""
    factors = random_factors(seed)
    scale = 10.0**exponent
    before, after = measure(factors), measure([factor * scale for factor in factors])
    for name in ("closure", "trace_rank", "participation", "cos_mean", "copying", "null_scale", "isometry", "rank"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-9, err_msg=name)
    for name in ("mismatch_closure", "right_closure", "left_closure", "qk_symmetric_share"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-9, atol=1e-15, err_msg=name)
    for name in ("alpha", "norm", "trace", "sigma_max", "right_alpha", "left_alpha", "qk_norm"):
        np.testing.assert_allclose(after[name] / scale**2, before[name], rtol=1e-9, err_msg=name)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.floats(1e-3, 1e3),
    sign=st.sampled_from([-1.0, 1.0]),
    tilt=st.floats(0.0, 3.0),
)
def test_planted_oblique_projection(seed: int, size: float, sign: float, tilt: float) -> None:
    """alpha times a projection, orthogonal or oblique, closes exactly, with its sign."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64))[0]
    output = basis[:, :5]
    reading = (
        output + tilt * basis[:, 5:10] @ torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0]
    )
    mixing = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0]
    alpha = sign * size
    measured = single(alpha * output @ mixing, reading @ mixing)
    assert abs(measured["closure"][0] - 1) < 1e-12
    assert measured["alpha"][0] == pytest.approx(alpha, rel=1e-11)
    assert measured["trace_rank"][0] == pytest.approx(5, rel=1e-11)
    assert measured["copying"][0] == pytest.approx(sign, rel=1e-11)


def test_zero_head() -> None:
    output, value = random_factors(5, 1, 1)[:2]
    measured = single(torch.zeros_like(output[0]), value[0])
    assert measured["reason"][0] == REASON_CODE["zero"]
    assert measured["norm"][0] == 0
    assert measured["rank"][0] == 0
    assert np.isnan(
        [measured[name][0] for name in ("closure", "alpha", "trace_rank", "participation", "copying")]
    ).all()


def test_zero_operator_from_nonzero_factors() -> None:
    """O and V use different columns: T = 0 although neither factor is."""
    output, value = random_factors(6, 1, 1)[:2]
    output[0, :, 2:] = 0
    value[0, :, :2] = 0
    assert single(output[0], value[0])["reason"][0] == REASON_CODE["zero"]


def test_nilpotent_head() -> None:
    """span(O) orthogonal to span(V): T is not zero, T^2 is."""
    basis = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    measured = single(3 * basis[:, :5], basis[:, 5:10])
    assert measured["reason"][0] == REASON_CODE["nilpotent"]
    assert np.isnan(measured["closure"][0])
    assert measured["alpha"][0] == 0
    assert measured["norm"][0] == pytest.approx(3 * 5**0.5)
    assert measured["cos_max"][0] == pytest.approx(0, abs=1e-14)
    assert np.isnan(measured["copying"][0])


def test_rank_one_head() -> None:
    generator = torch.Generator().manual_seed(2)
    output, value = (torch.randn(24, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    mixing = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    measured = single(output @ mixing, value @ torch.randn(1, 5, generator=generator, dtype=torch.float64))
    assert measured["rank"][0] == 1
    assert measured["closure"][0] == pytest.approx(1, abs=1e-12)
    assert measured["trace_rank"][0] == pytest.approx(1, rel=1e-10)
    assert measured["participation"][0] == pytest.approx(1, rel=1e-10)
    cosine = abs(float(output.T @ value) / float(output.norm() * value.norm()))
    np.testing.assert_allclose(measured["cosine"][0], [cosine, 0, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(measured["sigma"][0, 1:], 0, atol=1e-12 * measured["sigma"][0, 0])
    assert np.isnan(measured["condition"][0])


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("side", ["output", "value", "both"])
def test_ill_conditioned_factors(condition: float, side: str) -> None:
    """Singular values and cosines stay accurate where a plain Gram matrix would lose them."""
    generator = torch.Generator().manual_seed(int(condition))
    d_model, d_head = 96, 8

    def conditioned(bad: bool) -> torch.Tensor:
        left = torch.linalg.qr(torch.randn(d_model, d_head, generator=generator, dtype=torch.float64))[0]
        right = torch.linalg.qr(torch.randn(d_head, d_head, generator=generator, dtype=torch.float64))[0]
        spread = torch.logspace(0, -np.log10(condition), d_head, dtype=torch.float64) if bad else torch.ones(d_head)
        return left * spread @ right.double()

    output, value = conditioned(side != "value"), conditioned(side != "output")
    generator2 = torch.Generator().manual_seed(0)
    other = torch.randn(1, d_model, d_head, generator=generator2, dtype=torch.float64)
    measured = measure([output[None], value[None], other, other], rank_cut=CUT)
    expected = dense.head(output.numpy(), value.numpy())
    np.testing.assert_allclose(measured["closure"][0], expected["closure"], atol=1e-11)
    np.testing.assert_allclose(measured["cosine"][0], expected["cosine"], atol=2e-9)
    largest = np.max(expected["sigma"])
    np.testing.assert_allclose(measured["sigma"][0], expected["sigma"], atol=1e-13 * largest)
    np.testing.assert_allclose(measured["sigma_o"][0], expected["sigma_o"], rtol=1e-8)


def test_condition_1e6_has_full_factor_rank_and_rank_deficiency_is_seen() -> None:
    generator = torch.Generator().manual_seed(4)
    left = torch.linalg.qr(torch.randn(96, 8, generator=generator, dtype=torch.float64))[0]
    full = thin_factor((left * torch.logspace(0, -6, 8, dtype=torch.float64))[None], CUT)
    assert (full.sigma > 0).all()
    np.testing.assert_allclose(full.basis[0] @ full.basis[0].T, np.eye(8), atol=1e-12)
    low = torch.randn(96, 3, generator=generator, dtype=torch.float64) @ torch.randn(
        3, 8, generator=generator, dtype=torch.float64
    )
    factor = thin_factor(low[None], CUT)
    assert int((factor.sigma[0] > CUT * factor.sigma[0, 0]).sum()) == 3
    np.testing.assert_allclose((factor.basis.mT @ factor.root)[0], low, atol=1e-10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_heads_leave_the_others_alone(bad: float) -> None:
    factors = random_factors(8, 4, 2)
    clean = measure(factors)
    factors[0][1, 3, 2] = bad
    factors[2][2, 0, 0] = bad
    measured = measure(factors)
    assert measured["reason"].tolist() == [0, REASON_CODE["nonfinite"], 0, 0]
    assert np.isnan(measured["closure"][1])
    assert measured["rank"][1] == -1
    for name in INTRINSIC:
        np.testing.assert_array_equal(measured[name][[0, 2, 3]], clean[name][[0, 2, 3]], err_msg=name)
    for item in PAIR_STATISTICS:
        kept = np.ix_([0, 2, 3], [0, 2, 3])
        np.testing.assert_array_equal(measured[item.name][kept], clean[item.name][kept], err_msg=item.name)
    assert np.isnan(measured["right_closure"][1]).all()
    assert np.isnan(measured["right_closure"][:, 1]).all()
    assert np.isnan(measured["mismatch_closure"][1]).all()
    assert not np.isnan(measured["mismatch_closure"][[0, 2, 3]]).any()
    assert np.isnan(measured["qk_norm"]).tolist() == [False, False, True, False]


def test_a_nonfinite_value_projection_takes_its_whole_group() -> None:
    factors = random_factors(9, 4, 2)
    factors[1][0, 0, 0] = float("nan")
    measured = measure(factors)
    assert measured["reason"].tolist() == [REASON_CODE["nonfinite"]] * 2 + [0, 0]
    assert np.isnan(measured["mismatch_closure"][:, :2]).all()
    assert not np.isnan(measured["mismatch_closure"][:, 2:]).any()


def test_products_that_vanish_are_undefined() -> None:
    basis = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    output = torch.stack([basis[:, :5], basis[:, 5:10]])
    value = torch.stack([basis[:, :5], basis[:, 5:10]])
    other = torch.randn(2, 24, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    measured = measure([output, value, other, other])
    assert np.isnan(measured["right_closure"]).tolist() == [[False, True], [True, False]]
    assert np.isnan(measured["mismatch_closure"]).tolist() == [[False, True], [True, False]]
    assert measured["right_alpha"][0, 1] == pytest.approx(0, abs=1e-13)


def test_float32_agrees_to_its_precision() -> None:
    factors = random_factors(10, 4, 2, 256, 16)
    exact = measure(factors)
    rounded = measure([factor.float() for factor in factors], RANK_CUT[torch.float32])
    for name in ("closure", "alpha", "norm", "participation", "cos_mean", "right_closure", "mismatch_closure"):
        np.testing.assert_allclose(rounded[name], exact[name], rtol=2e-4, atol=2e-6, err_msg=name)


def test_a_wrong_eigensolver_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def garbage(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = real(x)
        return values, vectors + 1e-6

    monkeypatch.setattr(torch.linalg, "eigh", garbage)
    with pytest.raises(HeadatlasError, match="eigensolver"):
        checked_eigh(torch.eye(4, dtype=torch.float64)[None])


@pytest.mark.parametrize("tilt", [0.0, 1e-12, 1e-9, 1e-5, 1e-2, 0.5])
def test_small_angles_between_ranges_keep_their_digits(tilt: float) -> None:
    """Two ranges that share all directions but one, which is turned by a known angle."""
    frame = torch.linalg.qr(torch.randn(24, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64))[0]
    first, second = frame[:, :5], frame[:, :5].clone()
    second[:, 0] = math.cos(tilt) * frame[:, 0] + math.sin(tilt) * frame[:, 5]
    mixing = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    output = torch.stack([first @ mixing[0], second @ mixing[1]])
    value, query, key = torch.randn(3, 24, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)[:, None]
    measured = measure([output, value, query.expand(2, -1, -1), key])
    assert measured["range_angle_max"][0, 1] == pytest.approx(tilt, rel=1e-6, abs=1e-13)
    assert measured["range_angle_min"][0, 1] == pytest.approx(0, abs=1e-13)
    np.testing.assert_array_equal(measured["range_angle_max"], measured["range_angle_max"].T)


@pytest.mark.parametrize("ranks", [(5, 3), (3, 5), (3, 3), (5, 1), (1, 1)])
@pytest.mark.parametrize("nearness", [0.02, 1.0])
def test_angles_between_ranges_of_lower_rank(ranks: tuple[int, int], nearness: float) -> None:
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    ranges = [
        whole[:, :rank] + nearness * torch.randn(24, rank, generator=generator, dtype=torch.float64) for rank in ranks
    ]
    mixing = [torch.randn(rank, 5, generator=generator, dtype=torch.float64) for rank in ranks]
    output = torch.stack([kept @ mixed for kept, mixed in zip(ranges, mixing, strict=True)])
    value, query, key = torch.randn(3, 24, 5, generator=generator, dtype=torch.float64)[:, None]
    measured = measure([output, value, query.expand(2, -1, -1), key])
    angles = scipy.linalg.subspace_angles(ranges[0].numpy(), ranges[1].numpy())
    for name, expected in (("range_angle_min", angles.min()), ("range_angle_max", angles.max())):
        assert measured[name][0, 1] == pytest.approx(expected, rel=1e-9)
        assert measured[name][1, 0] == measured[name][0, 1]
