"""Intervals for clustered heads: coverage in simulation, published values, brute force, degenerate cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from stats.errors import HeadatlasError
from stats.inference import (
    ClusteredHeads,
    cliffs_delta_interval,
    cluster_interval,
    design_effect,
    difference_interval,
    effective_size,
    intra_cluster_correlation,
    rate_design_effect,
    rate_interval,
    superiority_interval,
    weighted_mean,
    weighted_median,
    wilson_interval,
)

LAYERS, HEADS, CORRELATION = 24, 8, 0.5
TRIALS = 250
MONTE_CARLO = 4 * math.sqrt(0.95 * 0.05 / TRIALS)
"""Four standard errors of a coverage of 95% over that many trials: 0.055."""


def normal_heads(generator: np.random.Generator, layers: int = LAYERS, shift: float = 0.0) -> ClusteredHeads:
    """Standard normal heads, correlated within layers, plus a shift."""
    layer = np.repeat(np.arange(layers), HEADS)
    own = generator.standard_normal(layers * HEADS)
    shared = generator.standard_normal(layers)[layer]
    return ClusteredHeads(shift + math.sqrt(CORRELATION) * shared + math.sqrt(1 - CORRELATION) * own, layer)


def independent(heads: ClusteredHeads) -> ClusteredHeads:
    """The same heads, each a cluster of its own."""
    return ClusteredHeads(heads.value, np.arange(len(heads.value)))


def indicator(heads: ClusteredHeads, threshold: float) -> ClusteredHeads:
    return ClusteredHeads(np.asarray(heads.value) > threshold, heads.cluster)


@pytest.mark.parametrize("statistic", [weighted_median, weighted_mean])
def test_layer_intervals_cover_and_head_intervals_do_not(statistic) -> None:
    generator = np.random.default_rng(1)
    covered = np.zeros(2)
    for trial in range(TRIALS):
        heads = normal_heads(generator)
        for which, sample in enumerate((heads, independent(heads))):
            found = cluster_interval(sample, statistic, n_resamples=250, seed=trial)
            covered[which] += found.low <= 0 <= found.high
    by_layer, by_head = covered / TRIALS
    assert abs(by_layer - 0.95) < MONTE_CARLO
    assert by_head < 0.80


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_rate_intervals_cover_and_plain_wilson_intervals_do_not(rate: float) -> None:
    generator = np.random.default_rng(2)
    threshold = scipy.stats.norm.isf(rate)
    covered = np.zeros(2)
    for _ in range(TRIALS):
        heads = indicator(normal_heads(generator), threshold)
        found = rate_interval(heads)
        low, high = wilson_interval(found.estimate, found.n_heads)
        covered += (found.low <= rate <= found.high, low <= rate <= high)
    by_layer, by_head = covered / TRIALS
    assert abs(by_layer - 0.95) < MONTE_CARLO
    assert by_head < 0.88


def test_intervals_of_differences_and_of_superiority_cover() -> None:
    generator = np.random.default_rng(3)
    covered = np.zeros(2)
    for trial in range(TRIALS):
        first, second = normal_heads(generator, shift=0.5), normal_heads(generator, layers=16)
        difference = difference_interval(first, second, weighted_median, n_resamples=250, seed=trial)
        superiority = superiority_interval(first, second, n_resamples=250, seed=trial)
        truth = scipy.stats.norm.cdf(0.5 / math.sqrt(2))
        covered += (difference.low <= 0.5 <= difference.high, superiority.low <= truth <= superiority.high)
    assert (np.abs(covered / TRIALS - 0.95) < MONTE_CARLO).all()


def test_pooled_models_are_resampled_within_each() -> None:
    """Models far apart: what differs between them is no part of the interval."""
    generator = np.random.default_rng(4)
    covered, width = 0.0, []
    for trial in range(TRIALS):
        models = [normal_heads(generator, layers=12, shift=shift) for shift in (-10.0, 10.0)]
        pooled = ClusteredHeads(
            np.concatenate([model.value for model in models]),
            np.concatenate([model.cluster for model in models]),
            np.repeat(["a", "b"], 12 * HEADS),
        )
        found = cluster_interval(pooled, weighted_mean, n_resamples=250, seed=trial)
        covered += found.low <= 0 <= found.high
        width.append(found.high - found.low)
    assert abs(covered / TRIALS - 0.95) < MONTE_CARLO
    standard_error = math.sqrt((CORRELATION + (1 - CORRELATION) / HEADS) / 24)
    assert np.mean(width) == pytest.approx(2 * scipy.stats.t.isf(0.025, 22) * standard_error, rel=0.06)


@settings(max_examples=200, deadline=None)
@given(
    value=arrays.arrays(np.float64, st.integers(1, 9), elements=st.sampled_from([-2.0, 0.0, 0.5, 1.0, 7.0])),
    seed=st.integers(0, 2**31),
)
def test_weighted_statistics_are_those_of_repeated_heads(value: np.ndarray, seed: int) -> None:
    weight = np.random.default_rng(seed).integers(0, 4, (5, len(value)))
    median = weighted_median(value, weight.astype(float))
    mean = weighted_mean(value, weight.astype(float))
    for row, count in enumerate(weight):
        repeated = np.repeat(value, count)
        if len(repeated) == 0:
            assert np.isnan([median[row], mean[row]]).all()
        else:
            assert median[row] == np.median(repeated)
            assert mean[row] == pytest.approx(repeated.mean(), abs=1e-14)


def test_bounds_against_a_loop_over_resamples() -> None:
    """Whole layers concatenated one resample at a time, with draws of another generator."""
    heads = normal_heads(np.random.default_rng(5), layers=10)
    found = cluster_interval(heads, weighted_median, n_resamples=20000)
    layers = np.asarray(heads.value).reshape(10, HEADS)
    generator = np.random.default_rng(6)
    medians = [np.median(layers[generator.integers(0, 10, 10)]) for _ in range(20000)]
    widened = scipy.stats.norm.sf(math.sqrt(10 / 9) * scipy.stats.t.isf(0.025, 9))
    assert found.estimate == np.median(layers)
    spread = np.std(medians)
    assert found.low == pytest.approx(np.quantile(medians, widened), abs=0.1 * spread)
    assert found.high == pytest.approx(np.quantile(medians, 1 - widened), abs=0.1 * spread)


def test_widened_quantiles_are_the_t_interval_of_layer_means() -> None:
    """For a mean of many equal layers the interval is Student's, here of nearly normal resamples."""
    heads = normal_heads(np.random.default_rng(7), layers=40)
    found = cluster_interval(heads, weighted_mean, n_resamples=20000)
    means = np.asarray(heads.value).reshape(40, HEADS).mean(1)
    low, high = scipy.stats.t.interval(0.95, 39, means.mean(), means.std(ddof=1) / math.sqrt(40))
    assert found.low == pytest.approx(low, abs=0.03 * (high - low))
    assert found.high == pytest.approx(high, abs=0.03 * (high - low))


def test_every_model_costs_a_degree_of_freedom() -> None:
    """Two layers in each of 16 models: Student's interval with 16 degrees, not 31."""
    layers = np.random.default_rng(17).standard_normal((16, 2))
    model, layer = np.indices((16, 2))
    found = cluster_interval(ClusteredHeads(layers.ravel(), layer.ravel(), model.ravel()), weighted_mean)
    standard_error = math.sqrt((layers.var(axis=1, ddof=1) / 2).sum()) / 16
    low, high = scipy.stats.t.interval(0.95, 16, layers.mean(), standard_error)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_superiority_and_delta_against_all_pairs() -> None:
    generator = np.random.default_rng(8)
    first, second = generator.integers(0, 6, 40), generator.integers(0, 5, 30)
    pairs = np.sign(first[:, None] - second[None, :])
    layers = np.arange(40) // 5, np.arange(30) // 5
    samples = [ClusteredHeads(value, layer) for value, layer in zip((first, second), layers, strict=True)]
    superiority, delta = superiority_interval(*samples), cliffs_delta_interval(*samples)
    mann_whitney = scipy.stats.mannwhitneyu(first, second).statistic
    assert superiority.estimate == pytest.approx(mann_whitney / (40 * 30))
    assert delta.estimate == pytest.approx(pairs.mean())
    assert (delta.low, delta.high) == (2 * superiority.low - 1, 2 * superiority.high - 1)
    assert superiority.low < superiority.estimate < superiority.high

    resampled = []
    for _ in range(4000):
        drawn = [generator.integers(0, count, count) for count in (8, 6)]
        by_layer = pairs.reshape(8, 5, 6, 5)[drawn[0]][:, :, drawn[1]]
        resampled.append((by_layer.mean() + 1) / 2)
    widened = scipy.stats.norm.sf(math.sqrt(14 / 12) * scipy.stats.t.isf(0.025, 12))
    np.testing.assert_allclose(
        (superiority.low, superiority.high), np.quantile(resampled, [widened, 1 - widened]), atol=0.03
    )


def test_swapping_the_samples_turns_the_sign() -> None:
    generator = np.random.default_rng(9)
    first, second = normal_heads(generator, shift=1.0), normal_heads(generator)
    assert cliffs_delta_interval(first, second).estimate == pytest.approx(
        -cliffs_delta_interval(second, first).estimate
    )
    assert difference_interval(first, second, weighted_mean).n_clusters == 2 * LAYERS
    assert difference_interval(first, second, weighted_mean).estimate == pytest.approx(
        -difference_interval(second, first, weighted_mean).estimate
    )


def test_a_statistic_of_two_columns() -> None:
    """Any statistic: the regression slope of one column on another."""
    generator = np.random.default_rng(10)
    x = generator.standard_normal(200)
    value = np.column_stack((x, 3 * x + 0.1 * generator.standard_normal(200)))
    value[0, 1] = np.nan

    def slope(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
        centred = value[None] - (weight @ value / weight.sum(-1, keepdims=True))[:, None]
        return (weight * centred[..., 0] * centred[..., 1]).sum(-1) / (weight * centred[..., 0] ** 2).sum(-1)

    found = cluster_interval(ClusteredHeads(value, np.arange(200) // 10), slope)
    assert found.estimate == pytest.approx(np.polyfit(*value[1:].T, 1)[0])
    assert found.low < 3 < found.high
    assert found.high - found.low < 0.05
    assert found.n_heads == 199


@pytest.mark.parametrize("statistic", [weighted_median, weighted_mean])
def test_same_seed_same_bounds_in_any_row_order(statistic) -> None:
    generator = np.random.default_rng(11)
    value, layer = generator.lognormal(size=600), generator.integers(0, 12, 600)
    model = generator.choice(["x", "y", "z"], 600)
    found = cluster_interval(ClusteredHeads(value, layer, model), statistic, seed=3)
    for _ in range(3):
        order = generator.permutation(600)
        moved = ClusteredHeads(value[order], layer[order], model[order])
        assert cluster_interval(moved, statistic, seed=3) == found
        assert superiority_interval(moved, ClusteredHeads(value[::-1], layer[::-1])) == superiority_interval(
            ClusteredHeads(value, layer, model), ClusteredHeads(value, layer)
        )
        assert effective_size(moved) == effective_size(ClusteredHeads(value, layer, model))
    other = cluster_interval(ClusteredHeads(value, layer, model), statistic, seed=4)
    assert other.low != found.low
    assert other.estimate == found.estimate


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = normal_heads(np.random.default_rng(12))
    whole = cluster_interval(heads, weighted_median)
    monkeypatch.setattr("stats.inference.CHUNK_ENTRIES", 7 * LAYERS * HEADS)
    assert cluster_interval(heads, weighted_median) == whole


@pytest.mark.parametrize(
    ("true", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_values(true: int, n: int, low: float, high: float) -> None:
    """Newcombe (1998), table I, method 3."""
    found = wilson_interval(true / n, n)
    np.testing.assert_allclose(found, (low, high), atol=5e-5)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("n", [1, 7, 7304])
def test_wilson_against_scipy(n: int, level: float) -> None:
    true = np.unique([0, n // 3, n // 2, n])
    low, high = wilson_interval(true / n, n, level)
    for index, count in enumerate(true):
        peer = scipy.stats.binomtest(int(count), n).proportion_ci(level, method="wilson")
        np.testing.assert_allclose((low[index], high[index]), (peer.low, peer.high), atol=1e-14)


def test_wilson_without_heads() -> None:
    low, high = wilson_interval([0.5, 0.0, 1.0], [0.0, np.nan, 10.0])
    np.testing.assert_array_equal(np.isnan(low), [True, True, False])
    np.testing.assert_array_equal(np.isnan(high), [True, True, False])
    assert high[2] == 1


def test_correlation_against_its_textbook_table() -> None:
    """Shrout and Fleiss (1979), table 2: six targets, four judges; ICC(1,1) is 0.17."""
    ratings = np.array([[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]])
    heads = ClusteredHeads(ratings.ravel(), np.repeat(np.arange(6), 4))
    assert intra_cluster_correlation(heads) == pytest.approx(0.17, abs=0.005)
    assert design_effect(heads) == pytest.approx(1 + 3 * intra_cluster_correlation(heads))
    assert effective_size(heads) == pytest.approx(24 / design_effect(heads))


def test_correlation_of_unequal_clusters_in_two_models() -> None:
    """Unbiased mean squares: known variances come back, whatever lies between the models."""
    generator = np.random.default_rng(13)
    size = generator.integers(1, 12, 3000)
    cluster = np.repeat(np.arange(3000), size)
    model = cluster % 2
    value = 50 * model + generator.standard_normal(3000)[cluster] + 2 * generator.standard_normal(len(cluster))
    heads = ClusteredHeads(value, cluster, model)
    assert intra_cluster_correlation(heads) == pytest.approx(1 / 5, abs=0.02)
    assert intra_cluster_correlation(ClusteredHeads(value, cluster)) > 0.9
    kish = (size**2).sum() / size.sum()
    assert design_effect(heads) == pytest.approx(1 + (kish - 1) / 5, abs=0.2)


def test_correlation_against_sums_over_heads() -> None:
    """Two models of two and three unequal layers, every sum written out."""
    models = [[[1.0, 4.0], [5.0]], [[9.0, 7.0, 8.0], [2.0], [3.0, 6.0]]]
    rows = [
        (x, layer, model) for model, layers in enumerate(models) for layer, heads in enumerate(layers) for x in heads
    ]
    between = within = typical = 0.0
    for layers in models:
        every = np.concatenate(layers)
        between += sum(len(heads) * (np.mean(heads) - every.mean()) ** 2 for heads in layers) / 3
        within += sum(((np.array(heads) - np.mean(heads)) ** 2).sum() for heads in layers) / 4
        typical += (len(every) - sum(len(heads) ** 2 for heads in layers) / len(every)) / 3
    expected = (between - within) / (between + (typical - 1) * within)
    heads = ClusteredHeads(*map(list, zip(*rows, strict=True)))
    assert intra_cluster_correlation(heads) == pytest.approx(expected)
    assert design_effect(heads) == pytest.approx(1 + ((4 + 1 + 9 + 1 + 4) / 9 - 1) * max(0.0, expected))
    assert expected > 0


def test_effective_size_is_what_the_variance_of_a_mean_says() -> None:
    """Unequal clusters: the spread of simulated means against variance / effective size."""
    generator = np.random.default_rng(14)
    size = np.array([1, 2, 4, 8, 16] * 8)
    cluster = np.repeat(np.arange(40), size)
    shared = generator.standard_normal((2000, 40))[:, cluster]
    value = math.sqrt(0.3) * shared + math.sqrt(0.7) * generator.standard_normal((2000, len(cluster)))
    effective = np.median([effective_size(ClusteredHeads(row, cluster)) for row in value[:200]])
    assert 1 / value.mean(1).var() == pytest.approx(effective, rel=0.12)


def test_heads_that_share_everything_count_once() -> None:
    """Copies within groups: as many independent heads as groups."""
    value = np.repeat(np.random.default_rng(15).standard_normal(10), 4)
    heads = ClusteredHeads(value, np.repeat(np.arange(10), 4))
    assert intra_cluster_correlation(heads) == pytest.approx(1)
    assert effective_size(heads) == pytest.approx(10)


def test_negative_correlation_is_no_gain() -> None:
    heads = ClusteredHeads(np.tile([0.0, 1.0], 10), np.repeat(np.arange(10), 2))
    assert intra_cluster_correlation(heads) == pytest.approx(-1)
    assert effective_size(heads) == 20


def test_undefined_correlation() -> None:
    constant = ClusteredHeads(np.full(12, 0.1), np.repeat(np.arange(4), 3))
    single = ClusteredHeads(np.arange(12.0), np.zeros(12))
    alone = ClusteredHeads(np.arange(12.0), np.arange(12))
    for heads in (constant, single, alone):
        assert np.isnan(intra_cluster_correlation(heads))
    assert np.isnan([effective_size(constant), effective_size(single)]).all()
    assert effective_size(alone) == 12


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_or_none(rate: float) -> None:
    """One-sided, as if each layer were one head, with Student's quantile."""
    heads = ClusteredHeads(np.full(270, rate), np.repeat(np.arange(30), 9))
    found = rate_interval(heads)
    square = scipy.stats.t.isf(0.025, 29) ** 2
    reach = square / (30 + square)
    assert (found.low, found.high) == pytest.approx((0, reach) if rate == 0 else (1 - reach, 1), abs=1e-14)
    assert found.estimate == rate
    halves = rate_interval(ClusteredHeads(heads.value, heads.cluster, np.arange(270) // 135))
    assert halves.high - halves.low == pytest.approx(1 / (1 + 30 / scipy.stats.t.isf(0.025, 28) ** 2))
    bootstrap = cluster_interval(heads, weighted_mean)
    assert (bootstrap.low, bootstrap.high) == (rate, rate)


def test_one_cluster_has_an_estimate_and_no_bounds() -> None:
    heads = ClusteredHeads([1.0, 0.0, 1.0], [5, 5, 5])
    for found in (cluster_interval(heads, weighted_median), rate_interval(heads)):
        assert found.estimate == pytest.approx(1.0 if found.estimate == 1 else 2 / 3)
        assert np.isnan([found.low, found.high]).all()
        assert (found.n_heads, found.n_clusters) == (3, 1)
    lonely = ClusteredHeads([1.0, 0.0, 1.0, 1.0], [1, 2, 3, 1], ["a", "a", "a", "b"])
    assert np.isnan(cluster_interval(lonely, weighted_mean).low)
    assert np.isnan(difference_interval(heads, lonely, weighted_mean).high)


@pytest.mark.parametrize("value", [[], [np.nan, np.nan]])
def test_no_heads(value: list[float]) -> None:
    heads = ClusteredHeads(value, list(range(len(value))))
    for found in (
        cluster_interval(heads, weighted_median),
        rate_interval(heads),
        superiority_interval(heads, heads),
        difference_interval(heads, heads, weighted_mean),
    ):
        assert np.isnan([found.estimate, found.low, found.high]).all()
        assert (found.n_heads, found.n_clusters) == (0, 0)
    assert np.isnan(effective_size(heads))


def test_nothing_to_compare_with() -> None:
    heads = normal_heads(np.random.default_rng(16))
    none = ClusteredHeads([np.nan], [0])
    for found in (superiority_interval(heads, none), difference_interval(none, heads, weighted_median)):
        assert np.isnan([found.estimate, found.low, found.high]).all()


def test_unknown_heads_are_absent() -> None:
    known = ClusteredHeads([1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2])
    with_unknown = ClusteredHeads([1.0, np.nan, 0.0, 1.0, 0.0, 0.0, np.nan], [0, 0, 0, 1, 1, 2, 3])
    assert rate_interval(with_unknown) == rate_interval(known)
    assert cluster_interval(with_unknown, weighted_median) == cluster_interval(known, weighted_median)


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(HeadatlasError, match=r"lengths \[3, 2\]"):
        ClusteredHeads([1.0, 2.0, 3.0], [0, 1])
    columns = ClusteredHeads([[1.0, 0.0], [0.0, 1.0]], [0, 1])
    heads = ClusteredHeads([1.0, 0.0], [0, 1])
    with pytest.raises(HeadatlasError, match="one value a head"):
        superiority_interval(heads, columns)
    for refused in (columns, ClusteredHeads([0.2, 1.0], [0, 1])):
        with pytest.raises(HeadatlasError, match="0, 1 or NaN"):
            rate_interval(refused)
    for level in (0, 1, 95):
        with pytest.raises(HeadatlasError, match="write 95% as"):
            rate_interval(heads, level=level)
        with pytest.raises(HeadatlasError, match="write 95% as"):
            cluster_interval(heads, weighted_mean, level=level)
        with pytest.raises(HeadatlasError, match="write 95% as"):
            wilson_interval(0.5, 10, level=level)


def test_the_design_effect_of_a_rate_is_the_one_its_interval_has() -> None:
    """Wilson's interval at heads over the effect, with Student's quantile, is ``rate_interval``."""
    layer = np.repeat(np.arange(8), [2, 3, 4, 5, 6, 7, 8, 9])
    for value in (np.arange(44) % 3 == 0, layer < 4, np.zeros(44), np.ones(44)):
        heads = ClusteredHeads(value, layer)
        effect = rate_design_effect(heads)
        confidence = 2 * scipy.stats.norm.cdf(scipy.stats.t.isf(0.025, 7)) - 1
        low, high = wilson_interval(value.mean(), 44 / effect, confidence)
        found = rate_interval(heads)
        assert (found.low, found.high) == pytest.approx((float(low), float(high)), abs=1e-12)
    assert effect == pytest.approx(sum(size**2 for size in range(2, 10)) / 44)
    assert np.isnan(rate_design_effect(ClusteredHeads([], [])))
    assert rate_design_effect(ClusteredHeads([True, True, np.nan], [0, 0, 0])) == 2
