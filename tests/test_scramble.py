"""The scramble null against dense brute force, Haar moments, independent draws and quadrature."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch

from stats.scramble import (
    draws_per_pair,
    haar_reflections,
    haar_returns,
    null_scale,
    pair_normals,
    scramble_draws,
    scramble_summary,
    scrambled_closure,
)
from stats.tail import (
    benjamini_hochberg,
    closed_form_trust,
    excess_kurtosis,
    log_tail,
    tail_p,
    tail_trust,
)
from tests import dense


def keys(count: int, name: str = "head") -> list[bytes]:
    return [f"{name} {index}".encode() for index in range(count)]


def spectra(heads: int, d_head: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    sigma = np.sort(generator.uniform(0.1, 1.0, (heads, d_head)))[:, ::-1]
    cosine = np.sort(generator.uniform(0.0, 1.0, (heads, d_head)))[:, ::-1]
    return torch.from_numpy(sigma.copy()), torch.from_numpy(cosine.copy())


def steep(d_head: int) -> torch.Tensor:
    """A spectrum that a few directions dominate."""
    return 1 / torch.arange(1, d_head + 1, dtype=torch.float64)


@cache
def dense_draws(d_head: int, count: int) -> np.ndarray:
    """Closures of dense T from scrambled cores between spans at given angles, A and B from SciPy."""
    sigma, cosine = spectra(1, d_head)
    s, c = sigma[0].numpy(), cosine[0].numpy()
    q_v = np.eye(2 * d_head)[:, :d_head]
    q_o = np.vstack([np.diag(c), np.diag(np.sqrt(1 - c**2))])
    generator = np.random.default_rng(5)
    haar = scipy.stats.ortho_group(d_head, seed=generator)
    drawn = []
    for _ in range(count):
        core = haar.rvs() @ np.diag(s) @ haar.rvs().T
        drawn.append(dense.closure(q_o @ core @ q_v.T))
    return np.array(drawn)


def test_closure_of_a_scramble_is_that_of_the_dense_operator() -> None:
    d_head, d_model = 6, 15
    generator = np.random.default_rng(1)
    sigma, cosine = (x[0] for x in spectra(1, d_head))
    frame = scipy.stats.ortho_group(d_model, seed=generator).rvs()
    q_v = frame[:, :d_head]
    q_o = q_v * cosine.numpy() + frame[:, d_head : 2 * d_head] * np.sqrt(1 - cosine.numpy() ** 2)
    a, b = scipy.stats.ortho_group(d_head, seed=generator).rvs(2)
    operator = q_o @ (a @ np.diag(sigma.numpy()) @ b.T) @ q_v.T
    returned = torch.from_numpy(b.T @ np.diag(cosine.numpy()) @ a)
    for scale in (1.0, 1e-150, 1e150):
        found = scrambled_closure(scale * sigma, returned / scale)
        assert float(found) == pytest.approx(dense.closure(operator), rel=1e-12)


def test_draws_come_from_the_scrambles_of_dense_operators() -> None:
    d_head = 5
    sigma, cosine = spectra(1, d_head)
    brute = dense_draws(d_head, 3000)
    for independent in (True, False):
        found = scramble_draws(sigma, cosine, keys(1), 3, 6000, independent=independent)[0].numpy()
        assert scipy.stats.ks_2samp(brute, found).pvalue > 1e-3


def test_fast_draws_are_signed_permutations_of_their_pair() -> None:
    """Every draw of a pair, from its C with columns permuted and signed explicitly."""
    d_head = 4
    sigma, cosine = spectra(1, d_head)
    per_pair = draws_per_pair(d_head)
    returned = haar_returns(cosine / cosine.max(), keys(1), 9, range(2))[0]
    found = scramble_draws(sigma, cosine, keys(1), 9, 2 * per_pair)[0].view(2, per_pair)
    patterns = [np.array(bits) for bits in np.ndindex(*[2] * d_head)]
    for pair in range(2):
        reachable = np.array(
            [
                float(scrambled_closure(sigma[0], returned[pair].roll(-shift, -1) * torch.from_numpy(1.0 - 2 * bits)))
                for shift in range(d_head)
                for bits in patterns
            ]
        )
        for value in found[pair].tolist():
            assert np.abs(reachable - value).min() < 1e-14
        plain = [float(scrambled_closure(sigma[0], returned[pair].roll(-t, -1))) for t in range(d_head)]
        np.testing.assert_allclose(found[pair, :d_head].numpy(), plain, rtol=1e-12)


def test_returns_are_haar() -> None:
    d_head, pairs = 5, 8000
    rotation = haar_returns(torch.ones(1, d_head), keys(1), 2, range(pairs))[0]
    identity = torch.eye(d_head, dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.mT, identity.expand_as(rotation), rtol=0, atol=1e-12)
    error = 5 / math.sqrt(pairs)
    assert rotation.mean(0).abs().max() < error / math.sqrt(d_head)
    assert (rotation.square().mean(0) * d_head - 1).abs().max() < error * 2
    assert (rotation.pow(4).mean(0) * d_head * (d_head + 2) / 3 - 1).abs().max() < error * 4
    assert abs(float(torch.linalg.det(rotation).mean())) < error
    peer = scipy.stats.ortho_group(d_head, seed=np.random.default_rng(0)).rvs(pairs)
    trace = rotation.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert scipy.stats.ks_2samp(trace.numpy(), np.trace(peer, axis1=1, axis2=2)).pvalue > 1e-3
    angle = torch.linalg.eigvals(rotation[:2000]).angle().abs().amax(-1)
    assert scipy.stats.ks_2samp(angle.numpy(), np.abs(np.angle(np.linalg.eigvals(peer[:2000]))).max(-1)).pvalue > 1e-3


def test_one_rotation_is_haar_and_a_return_is_made_of_two() -> None:
    """Signs of diag(R) that are left out would hardly show in C, so each factor is tested alone."""
    d_head, count = 3, 20_000
    half = d_head * (d_head + 1) // 2
    normals = torch.from_numpy(np.stack([pair_normals(b"head 0", 6, pair, 2 * half) for pair in range(count)]))
    reflections = haar_reflections(normals.view(count, 2, half), d_head)
    rotation = torch.linalg.householder_product(reflections.vectors, reflections.scale)
    rotation = rotation * reflections.sign.unsqueeze(-2)
    for one in rotation.unbind(1):
        assert (one.mean(0) * math.sqrt(d_head * count)).abs().max() < 5
        assert abs(float(torch.linalg.det(one).sum())) < 5 * math.sqrt(count)
        peer = scipy.stats.ortho_group(d_head, seed=np.random.default_rng(8)).rvs(count)
        trace = one.diagonal(dim1=-2, dim2=-1).sum(-1).numpy()
        assert scipy.stats.ks_2samp(trace, np.trace(peer, axis1=1, axis2=2)).pvalue > 1e-4
    cosine = torch.tensor([[0.9, 0.4, 0.1]], dtype=torch.float64)
    explicit = rotation[:, 1].mT @ torch.diag(cosine[0]) @ rotation[:, 0]
    torch.testing.assert_close(haar_returns(cosine, keys(1), 6, range(count))[0], explicit, rtol=0, atol=1e-13)


def test_no_two_pairs_share_a_number() -> None:
    drawn = np.concatenate([pair_normals(b"head", 0, pair, 500) for pair in range(20)])
    assert len(np.unique(drawn)) == len(drawn)


def test_both_rotations_of_a_return_are_haar() -> None:
    """With one cosine, C is an outer product whose factors are the first rows of A and B."""
    d_head, pairs = 4, 20_000
    cosine = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    returned = haar_returns(cosine, keys(1), 4, range(pairs))[0]
    exact = scipy.stats.beta(0.5, (d_head - 1) / 2)
    for axis in (-1, -2):
        share = returned.square().sum(axis)
        for entry in range(d_head):
            assert scipy.stats.kstest(share[:, entry].numpy(), exact.cdf).pvalue > 1e-4
    assert abs(float(torch.sign(returned[:, 0, 0]).mean())) < 5 / math.sqrt(pairs)


def test_draws_depend_on_key_and_seed_alone() -> None:
    sigma, cosine = spectra(7, 8)
    names = keys(7)
    together = scramble_draws(sigma, cosine, names, 11, 100)
    for head in (0, 6):
        alone = scramble_draws(sigma[[head]], cosine[[head]], [names[head]], 11, 100)
        torch.testing.assert_close(alone[0], together[head], rtol=1e-10, atol=0)
    order = [5, 0, 3]
    shuffled = scramble_draws(sigma[order], cosine[order], [names[head] for head in order], 11, 100)
    torch.testing.assert_close(shuffled, together[order], rtol=1e-10, atol=0)
    rescaled = scramble_draws(1e-140 * sigma, 1e-3 * cosine, names, 11, 100)
    torch.testing.assert_close(rescaled, together, rtol=1e-10, atol=0)
    same = scramble_draws(sigma[[0, 0, 0]], cosine[[0, 0, 0]], [b"a", b"b", b"a"], 11, 100)
    assert not torch.isclose(same[0], same[1]).any()
    torch.testing.assert_close(same[0], same[2])
    assert not torch.isclose(scramble_draws(sigma, cosine, names, 12, 100), together).any()


@pytest.mark.parametrize("independent", [False, True])
def test_more_draws_extend_fewer(independent: bool) -> None:
    sigma, cosine = spectra(2, 80)
    longest = scramble_draws(sigma, cosine, keys(2), 1, 410, independent=independent)
    for count in (1, 80, 125, 126, 300):
        shorter = scramble_draws(sigma, cosine, keys(2), 1, count, independent=independent)
        torch.testing.assert_close(shorter, longest[:, :count], rtol=1e-10, atol=0)


def test_large_batches_are_cut_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    sigma, cosine = spectra(5, 8)
    whole = scramble_draws(sigma, cosine, keys(5), 1, 200)
    monkeypatch.setattr("stats.scramble.CHUNK_ENTRIES", 3 * 64)
    torch.testing.assert_close(scramble_draws(sigma, cosine, keys(5), 1, 200), whole, rtol=1e-10, atol=0)


@pytest.mark.parametrize("spectrum", ["spread", "steep"])
def test_fast_draws_are_distributed_as_independent_ones(spectrum: str) -> None:
    """KS over many heads of one spectrum, one draw of each position within a pair at a time."""
    heads, d_head = 400, 12
    sigma, cosine = spectra(1, d_head)
    sigma = (sigma if spectrum == "spread" else steep(d_head)[None]).expand(heads, -1)
    cosine = cosine.expand(heads, -1)
    independent = scramble_draws(sigma, cosine, keys(heads, "other"), 0, 10, independent=True).flatten().numpy()
    fast = scramble_draws(sigma, cosine, keys(heads), 0, 8 * draws_per_pair(d_head))
    for position in (0, 5, 23):
        assert scipy.stats.ks_2samp(fast[:, position :: draws_per_pair(d_head)].flatten(), independent).pvalue > 1e-3


@pytest.mark.parametrize(("spectrum", "independent"), [("spread", False), ("steep", False), ("spread", True)])
def test_the_standard_error_is_the_spread_over_seeds(spectrum: str, independent: bool) -> None:
    d_head, seeds = 16, 120
    sigma, cosine = spectra(1, d_head)
    sigma = sigma if spectrum == "spread" else steep(d_head)[None]
    per_pair = 1 if independent else draws_per_pair(d_head)
    repeated = [
        scramble_summary(
            torch.zeros(1),
            scramble_draws(sigma, cosine, keys(1), seed, 320, independent=independent),
            per_pair,
        )
        for seed in range(seeds)
    ]
    spread = float(torch.stack([item.median for item in repeated]).std())
    stated = float(torch.stack([item.median_error for item in repeated]).square().mean().sqrt())
    assert stated == pytest.approx(spread, rel=0.25)


def test_p_is_uniform_under_the_null() -> None:
    heads, d_head = 600, 32
    sigma, cosine = spectra(heads, d_head)
    closure = scramble_draws(sigma, cosine, keys(heads, "observed"), 0, 1, independent=True)[:, 0]
    draws = scramble_draws(sigma, cosine, keys(heads), 0, 512)
    summary = scramble_summary(closure, draws, draws_per_pair(d_head))
    assert scipy.stats.kstest(summary.p.numpy(), "uniform").pvalue > 1e-3
    assert float(summary.wins.mean()) == pytest.approx(0.5, abs=0.1)
    assert scipy.stats.kstest(tail_p(closure, sigma).numpy(), "uniform").pvalue > 1e-3


def test_summary_by_hand() -> None:
    draws = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.4, 0.1, 0.3, 0.2], [0.4, 0.1, 0.3, 0.2]], dtype=torch.float64)
    closure = torch.tensor([0.3 * (1 + 1e-14), 0.25 * (1 + 1e-14), torch.nan], dtype=torch.float64)
    summary = scramble_summary(closure, draws, 2)
    torch.testing.assert_close(summary.median, torch.full((3,), 0.25, dtype=torch.float64))
    for name, share in (("q95", 0.95), ("q99", 0.99)):
        expected = torch.from_numpy(np.quantile(draws.numpy(), share, axis=1))
        torch.testing.assert_close(getattr(summary, name), expected)
    assert summary.p[:2].tolist() == [3 / 5, 3 / 5]
    assert summary.wins[:2].tolist() == [1.0, 0.0]
    assert summary.p[2].isnan()
    assert summary.wins[2].isnan()
    torch.testing.assert_close(summary.median_error, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15)
    assert scramble_summary(closure, draws, 4).median_error.isnan().all()


def test_undefined_heads_do_not_touch_the_others() -> None:
    sigma, cosine = spectra(6, 8)
    clean = scramble_draws(sigma, cosine, keys(6), 0, 50)
    sigma[0] = 0.0
    cosine[1] = 0.0
    sigma[2, 3] = torch.nan
    cosine[3, 0] = torch.inf
    draws = scramble_draws(sigma, cosine, keys(6), 0, 50)
    assert draws[:4].isnan().all()
    torch.testing.assert_close(draws[4:], clean[4:], rtol=1e-10, atol=0)
    summary = scramble_summary(torch.full((6,), 0.1), draws, draws_per_pair(8))
    for values in (summary.median, summary.q95, summary.q99, summary.median_error, summary.p, summary.wins):
        assert values.isnan().tolist() == [True] * 4 + [False] * 2


def test_rank_deficient_heads_are_those_of_their_support() -> None:
    """One direction in and out: P' is 1; zeros in D leave the null of C's smaller rank."""
    cosine = torch.tensor([[1.0, 0.5, 0.0, 0.0]])
    single = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(scramble_draws(single, cosine, keys(1), 0, 40), torch.ones(1, 40, dtype=torch.float64))
    sigma = torch.tensor([[1.0, 0.7, 0.3, 0.0]], dtype=torch.float64)
    found = scramble_draws(sigma, cosine, keys(1), 0, 4000)[0].numpy()
    generator = np.random.default_rng(0)
    haar = scipy.stats.ortho_group(4, seed=generator)
    returned = haar.rvs(3000).transpose(0, 2, 1) @ (cosine[0].numpy()[:, None] * haar.rvs(3000))
    brute = scrambled_closure(sigma, torch.from_numpy(returned)).numpy()
    assert scipy.stats.ks_2samp(found, brute).pvalue > 1e-3


def test_one_dimensional_heads_are_always_closed() -> None:
    sigma, cosine = torch.tensor([[3.0]]), torch.tensor([[0.2]])
    draws = scramble_draws(sigma, cosine, keys(1), 0, 7)
    assert (draws == 1).all()
    summary = scramble_summary(torch.tensor([1 - 1e-15], dtype=torch.float64), draws, draws_per_pair(1))
    assert float(summary.p) == 1
    assert float(summary.wins) == 0
    assert tail_p(torch.tensor([1.0, 0.5]), sigma.expand(2, 1)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("closure", [1e-8, 1e-4, 0.01, 0.1, 0.5, 0.99])
def test_the_tail_of_a_flat_spectrum_is_beta(closure: float) -> None:
    """A Gaussian matrix has a uniform direction, so its squared cosine with one is beta."""
    d_head = 16
    found = float(log_tail(torch.tensor([closure], dtype=torch.float64), torch.ones(1, d_head)))
    exact = scipy.stats.beta.logsf(closure, 0.5, (d_head**2 - 1) / 2)
    assert found == pytest.approx(exact, abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("closure", [0.02, 0.2, 0.6])
def test_the_tail_is_imhofs_integral(closure: float) -> None:
    """Eigenvalues of the dense quadratic form, inverted by Imhof's oscillating integral."""
    sigma = np.array([1.0, 0.8, 0.5, 0.1])
    power = sigma**2 / (sigma**2).sum()
    linear = np.diag(power**1.5).flatten()
    form = np.outer(linear, linear) - closure * np.diag(np.outer(power, power).flatten())
    weight = np.linalg.eigvalsh(form)
    weight /= np.abs(weight).max()

    def integrand(u: float) -> float:
        return float(np.sin(np.arctan(weight * u).sum() / 2) / (u * np.prod(1 + (weight * u) ** 2) ** 0.25))

    exact = 0.5 + scipy.integrate.quad(integrand, 0, np.inf, limit=2000)[0] / math.pi
    found = float(tail_p(torch.tensor([closure], dtype=torch.float64), torch.from_numpy(sigma)[None]))
    assert found == pytest.approx(exact, rel=1e-6)


def test_the_tail_is_a_decreasing_probability() -> None:
    closure = torch.linspace(0, 1, 400, dtype=torch.float64)
    for values in ([1.0] * 64, steep(64).tolist(), [1.0, 0.3, 0.0], [1e-200, 1e-204]):
        spectrum = torch.tensor(values, dtype=torch.float64).expand(400, -1)
        logarithm = log_tail(closure, spectrum)
        assert (logarithm[:-1].diff() < 0).all()
        p = tail_p(closure, spectrum)
        assert ((p > 0) & (p <= 1)).all()
        assert (p.diff() <= 0).all()
        torch.testing.assert_close(log_tail(closure, 7e9 * spectrum), logarithm, rtol=1e-9, atol=1e-12)
    assert log_tail(torch.tensor([torch.nan, 0.1]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])).isnan().all()


@pytest.mark.parametrize("spectrum", ["flat", "linear", "steep"])
def test_the_tail_agrees_with_draws_where_it_is_trusted(spectrum: str) -> None:
    d_head, count = 64, 200_000
    sigma = {"flat": torch.ones(d_head), "linear": torch.linspace(1, 0.05, d_head), "steep": steep(d_head)}[spectrum]
    sigma = sigma.double()[None]
    cosine = torch.linspace(0.9, 0.05, d_head, dtype=torch.float64)[None]
    assert bool(tail_trust(sigma, cosine))
    ordered = scramble_draws(sigma, cosine, keys(1), 0, count)[0].sort().values
    for p, tolerance in ((0.5, 0.02), (0.1, 0.03), (0.01, 0.08), (0.001, 0.25)):
        found = tail_p(ordered[None, int(count * (1 - p))], sigma)
        assert float(found) / p == pytest.approx(1, abs=tolerance)
        if bool(closed_form_trust(sigma, cosine)):
            chi = scipy.stats.chi2.sf(float(ordered[int(count * (1 - p))] / null_scale(sigma)), 1)
            assert chi / p == pytest.approx(1, abs=tolerance)


def test_what_is_not_trusted_is_wrong() -> None:
    """Few directions break the closed form; few cosines break the tail as well."""
    d_head, count = 64, 100_000
    sigma = steep(d_head)[None]
    for cosine, tail_ok in ((torch.linspace(0.9, 0.05, d_head), True), (1 / torch.arange(1.0, d_head + 1), False)):
        assert not bool(closed_form_trust(sigma, cosine[None]))
        assert bool(tail_trust(sigma, cosine[None])) == tail_ok
        ordered = scramble_draws(sigma, cosine[None], keys(1), 0, count)[0].sort().values
        q99 = ordered[int(count * 0.99)]
        assert scipy.stats.chi2.sf(float(q99 / null_scale(sigma)), 1) > 0.05
        assert (float(tail_p(q99[None], sigma)) < 0.013) == tail_ok
    assert not bool(tail_trust(torch.zeros(1, 64), torch.ones(1, 64)))


@pytest.mark.parametrize("d_head", [1, 2, 6])
def test_excess_kurtosis_is_that_of_the_numerator(d_head: int) -> None:
    sigma, cosine = spectra(1, d_head)
    returned = haar_returns(cosine, keys(1), 0, range(30_000))[0]
    numerator = (sigma[0].pow(3) * returned.diagonal(dim1=-2, dim2=-1)).sum(-1).square()
    if d_head == 1:
        assert float(excess_kurtosis(sigma, cosine)) == 0
        return
    found = numerator.square().mean() / (3 * numerator.mean().square()) - 1
    assert float(excess_kurtosis(sigma, cosine)) == pytest.approx(float(found), abs=0.04)


def test_false_discovery_rates_by_hand() -> None:
    p = torch.tensor([0.01, torch.nan, 0.04, 0.03, 0.5], dtype=torch.float64)
    expected = torch.tensor([0.04, torch.nan, 0.16 / 3, 0.16 / 3, 0.5], dtype=torch.float64)
    torch.testing.assert_close(benjamini_hochberg(p), expected, equal_nan=True)
    assert benjamini_hochberg(torch.full((2,), torch.nan)).isnan().all()


@pytest.mark.parametrize(
    ("sigma", "cosine"),
    [
        (steep(64), torch.cat([torch.ones(9), torch.full((55,), 0.05)])),
        (torch.ones(64), torch.cat([torch.ones(4), torch.full((60,), 0.05)])),
        (torch.ones(24), torch.linspace(1.0, 0.2, 24)),
    ],
    ids=["kurtosis", "few cosines", "short"],
)
def test_each_condition_of_trust_is_asked(sigma: torch.Tensor, cosine: torch.Tensor) -> None:
    assert not bool(tail_trust(sigma[None], cosine[None]))
