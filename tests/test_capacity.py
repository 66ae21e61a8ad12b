"""Capacity against exhaustive search, grids, dense matrices and finite differences."""

from __future__ import annotations

import hashlib
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stats.capacity import (
    EXCESS,
    assignment_capacity,
    attained_closure,
    diagonal_curvature,
    log_closure,
    oriented_closure,
    permutation_matrix,
)
from stats.refinement import (
    haar_start,
    head_gaussian,
    perturbed_start,
    refine_assignment,
    refine_capacity,
)
from tests import dense

KEYS = [f"head {index}".encode() for index in range(64)]
Spectra = tuple[torch.Tensor, torch.Tensor]


def random_spectra(seed: int, heads: int, d_head: int) -> Spectra:
    """Singular values over two decades and cosines down to zero, descending."""
    generator = np.random.default_rng(seed)
    sigma = 10 ** generator.uniform(-2, 0, (heads, d_head))
    cosine = generator.beta(1, 2, (heads, d_head))
    return torch.from_numpy(-np.sort(-sigma)), torch.from_numpy(-np.sort(-cosine))


def from_the_formula(s: np.ndarray, overlap: np.ndarray) -> np.ndarray:
    """P' (...) written out in numpy, from ``C`` (..., d_head, d_head)."""
    n = (s**3 * np.diagonal(overlap, axis1=-2, axis2=-1)).sum(-1)
    den = (s[..., :, None] ** 2 * overlap**2 * s[..., None, :] ** 2).sum((-2, -1))
    return n**2 / (den * (s**2).sum(-1))


def every_permutation(s: np.ndarray, c: np.ndarray) -> np.ndarray:
    """P' of each of the d_head! pairings."""
    x = s**2 * c[np.array(list(permutations(range(len(s)))))]
    return (x @ s) ** 2 / ((x**2).sum(-1) * (s**2).sum())


def operator(sigma: np.ndarray, cosine: np.ndarray, write: np.ndarray, read: np.ndarray, seed: int) -> np.ndarray:
    """A dense T (d_model, d_model) with these singular values, principal cosines and orientation."""
    k = len(sigma)
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((3 * k, 3 * k)))[0]
    reading = basis[:, :k]
    writing = reading * cosine + basis[:, k : 2 * k] * np.sqrt(1 - cosine**2)
    return writing @ write @ np.diag(sigma) @ read.T @ reading.T


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), d_head=st.integers(1, 6), zeros=st.integers(0, 3))
def test_no_permutation_is_better(seed: int, d_head: int, zeros: int) -> None:
    sigma, cosine = random_spectra(seed, 3, d_head)
    if zeros and zeros < d_head:
        sigma[1, -zeros:], cosine[2, -zeros:] = 0, 0
    found = assignment_capacity(sigma, cosine)
    for head in range(3):
        with np.errstate(invalid="ignore"):
            best = np.nanmax(every_permutation(sigma[head].numpy(), cosine[head].numpy()))
        assert found.closure[head] == pytest.approx(best, rel=2 * EXCESS)
        assert found.closure[head] <= best * (1 + 1e-12)
        assert found.bound[head] >= best * (1 - 1e-12)
        assert found.bound[head] <= min(best * (1 + 2 * EXCESS), 1)


@pytest.mark.parametrize("d_head", [2, 4, 6])
def test_no_signed_permutation_is_better(d_head: int) -> None:
    """Mixed signs only lower the numerator: every sign pattern on every pairing, through C itself."""
    sigma, cosine = random_spectra(d_head, 1, d_head)
    s, c = sigma[0].numpy(), cosine[0].numpy()
    orders = np.array(list(permutations(range(d_head))))
    best = 0.0
    for signs in product([-1.0, 1.0], repeat=d_head):
        overlap = (c[orders] * np.array(signs))[:, None, :] * np.eye(d_head)
        best = max(best, from_the_formula(s, overlap).max())
    assert assignment_capacity(sigma, cosine).closure[0] == pytest.approx(best, rel=2 * EXCESS)


@pytest.mark.parametrize("d_head", [16, 64])
def test_no_exchange_of_two_is_better(d_head: int) -> None:
    """Too many permutations to list; every pairing one exchange away, and the bound on the rest."""
    sigma, cosine = random_spectra(d_head, 4, d_head)
    found = assignment_capacity(sigma, cosine)
    assert (found.bound >= found.closure).all()
    assert (found.bound <= found.closure * (1 + 1.01 * EXCESS)).all()
    i, j = np.triu_indices(d_head, 1)
    orders = found.permutation[:, None, :].repeat(1, len(i), 1)
    rows = torch.arange(len(i))
    orders[:, rows, i], orders[:, rows, j] = orders[:, rows, j], orders[:, rows, i]
    neighbours = attained_closure(sigma[:, None].expand(orders.shape), cosine[:, None].expand(orders.shape), orders)
    assert (neighbours.amax(-1) <= found.bound).all()


@pytest.mark.parametrize(("d_head", "lost_sigma", "lost_cosine"), [(8, 5, 6), (5, 1, 4), (9, 7, 8), (8, 5, 5)])
def test_pairings_that_return_nothing_do_not_loosen_the_bound(d_head: int, lost_sigma: int, lost_cosine: int) -> None:
    """Zeros enough that every non-zero singular value can meet a zero cosine: the hull reaches the origin."""
    sigma, cosine = random_spectra(d_head, 20, d_head)
    sigma[:, -lost_sigma:], cosine[:, -lost_cosine:] = 0, 0
    found = assignment_capacity(sigma, cosine)
    assert (found.bound <= found.closure * (1 + 1.01 * EXCESS)).all()


def test_the_permutation_attains_what_is_stored() -> None:
    sigma, cosine = random_spectra(1, 5, 12)
    found = assignment_capacity(sigma, cosine)
    assert torch.equal(found.permutation.sort(-1).values, torch.arange(12).expand(5, 12))
    torch.testing.assert_close(attained_closure(sigma, cosine, found.permutation), found.closure, rtol=1e-14, atol=0)
    matrix = permutation_matrix(found.permutation)
    torch.testing.assert_close(oriented_closure(sigma, cosine, matrix, matrix), found.closure, rtol=1e-13, atol=0)
    again = assignment_capacity(sigma[2:3], cosine[2:3])
    assert torch.equal(again.permutation[0], found.permutation[2])
    assert again.closure[0] == found.closure[2]


def test_dense_matrices_attain_it() -> None:
    sigma, cosine = random_spectra(2, 3, 6)
    found = assignment_capacity(sigma, cosine)
    refined = refine_assignment(sigma, cosine, found.permutation, KEYS[:3], 0)
    haar = refine_capacity(sigma, cosine, *haar_start(KEYS[:3], 0, 6))
    matrix = permutation_matrix(found.permutation)
    for closure, write, read in (
        (found.closure, matrix, matrix),
        (refined.closure, refined.write, refined.read),
        (haar.closure, haar.write, haar.read),
    ):
        for head in range(3):
            parts = (array[head].numpy() for array in (sigma, cosine, write, read))
            assert dense.closure(operator(*parts, seed=head)) == pytest.approx(float(closure[head]), rel=1e-10)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.floats(-12, 12), d_head=st.integers(2, 12))
def test_scale_and_order_do_not_matter(seed: int, exponent: float, d_head: int) -> None:
    sigma, cosine = random_spectra(seed, 2, d_head)
    expected = assignment_capacity(sigma, cosine).closure
    scaled = assignment_capacity(sigma * 10.0**exponent, cosine)
    torch.testing.assert_close(scaled.closure, expected, rtol=3 * EXCESS, atol=0)
    generator = np.random.default_rng(seed)
    first, second = (torch.from_numpy(generator.permutation(d_head)) for _ in range(2))
    shuffled = assignment_capacity(sigma[:, first], cosine[:, second])
    torch.testing.assert_close(shuffled.closure, expected, rtol=3 * EXCESS, atol=0)
    torch.testing.assert_close(
        attained_closure(sigma[:, first], cosine[:, second], shuffled.permutation), shuffled.closure
    )


def test_a_flat_spectrum_with_equal_cosines_closes() -> None:
    """``C`` is then a rotation times a number, and the ascent cannot change its determinant: the largest
    trace is 8 or, with a reflection in it, 6.
    """
    sigma, cosine = torch.full((1, 8), 2.5), torch.full((1, 8), 0.3)
    found = assignment_capacity(sigma, cosine)
    assert found.closure[0] == pytest.approx(1, abs=1e-14)
    climbed = [float(refine_capacity(sigma, cosine, *haar_start(KEYS[:1], seed, 8)).closure[0]) for seed in range(6)]
    reachable = np.array([1, (6 / 8) ** 2])
    assert np.abs(np.array(climbed)[:, None] - reachable).min(-1) == pytest.approx(0, abs=1e-9)
    assert max(climbed) == pytest.approx(1, abs=1e-9)


def test_spectra_that_invert_each_other_close() -> None:
    """``C = lambda S^-1`` makes the core a scaled idempotent."""
    cosine = torch.linspace(0.1, 0.9, 10, dtype=torch.float64)
    found = assignment_capacity(1 / cosine[None], cosine[None])
    assert found.closure[0] == pytest.approx(1, abs=1e-7)
    assert found.permutation[0].tolist() == list(range(10))


def test_one_dimension_is_always_closed() -> None:
    sigma, cosine = torch.tensor([[3.0]]), torch.tensor([[0.2]])
    assert assignment_capacity(sigma, cosine).closure[0] == 1
    assert refine_capacity(sigma, cosine, *haar_start(KEYS[:1], 0, 1)).closure[0] == 1


def test_heads_without_a_capacity_leave_the_others_alone() -> None:
    sigma, cosine = random_spectra(4, 6, 5)
    clean = assignment_capacity(sigma, cosine)
    start = haar_start(KEYS[:6], 0, 5)
    climbed = refine_capacity(sigma, cosine, *start)
    sigma[1], cosine[2] = 0, 0
    sigma[3, 2], cosine[4, 0] = torch.nan, torch.inf
    found = assignment_capacity(sigma, cosine)
    assert found.closure.isnan().tolist() == [False, True, True, True, True, False]
    assert found.bound.isnan().tolist() == [False, True, True, True, True, False]
    assert found.iterations[1:5].tolist() == [0] * 4
    assert torch.equal(found.permutation[1:5], torch.arange(5).expand(4, 5))
    assert torch.equal(found.closure[[0, 5]], clean.closure[[0, 5]])
    refined = refine_capacity(sigma, cosine, *start)
    assert refined.closure.isnan().tolist() == [False, True, True, True, True, False]
    assert refined.iterations[1:5].tolist() == [0] * 4
    torch.testing.assert_close(refined.closure[[0, 5]], climbed.closure[[0, 5]], rtol=1e-9, atol=0)
    torch.testing.assert_close(refined.write[1:5], start[0][1:5])
    from_assignment = refine_assignment(sigma, cosine, found.permutation, KEYS[:6], 0)
    assert from_assignment.closure.isnan().tolist() == [False, True, True, True, True, False]


def test_no_heads() -> None:
    nothing = torch.empty(0, 4)
    found = assignment_capacity(nothing, nothing)
    assert found.closure.shape == (0,)
    assert found.permutation.shape == (0, 4)
    square = torch.empty(0, 4, 4)
    assert refine_capacity(nothing, nothing, square, square).closure.shape == (0,)


def test_gradient_against_finite_differences() -> None:
    """In every direction of the Lie algebra, along matrix exponentials, of the formula in numpy."""
    sigma, cosine = random_spectra(6, 1, 4)
    write, read = haar_start(KEYS[:1], 1, 4)
    gradient = log_closure(sigma, cosine, torch.stack([write, read], 1))[1][0]

    def log_p(x: torch.Tensor, y: torch.Tensor) -> float:
        a, b = write[0] @ torch.matrix_exp(x), read[0] @ torch.matrix_exp(y)
        return float(np.log(from_the_formula(sigma[0].numpy(), (b.mT @ torch.diag(cosine[0]) @ a).numpy())))

    still = torch.zeros(4, 4, dtype=torch.float64)
    for i in range(4):
        for j in range(i):
            turn = still.clone()
            turn[i, j], turn[j, i] = 1e-5, -1e-5
            for side, (x, y) in enumerate(((turn, still), (still, turn))):
                slope = (log_p(x, y) - log_p(-x, -y)) / 2e-5
                assert float(gradient[side, i, j] - gradient[side, j, i]) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_curvature_of_an_assignment_against_finite_differences() -> None:
    """The whole Hessian of the formula in numpy: its planes' curvatures, and zero between planes."""
    sigma, cosine = random_spectra(8, 1, 4)
    matrix = permutation_matrix(assignment_capacity(sigma, cosine).permutation)
    curvature = diagonal_curvature(sigma, cosine, torch.stack([matrix, matrix], 1))[0]
    s, a = sigma[0].numpy(), matrix[0]
    planes = [(i, j) for i in range(4) for j in range(i)]

    def descent(turns: np.ndarray) -> float:
        skew = torch.zeros(2, 4, 4, dtype=torch.float64)
        for index, (i, j) in enumerate(planes):
            u, v = turns[2 * index : 2 * index + 2] / 2**0.5
            skew[0, i, j], skew[1, i, j] = u + v, u - v
        write, read = a @ torch.matrix_exp(skew - skew.mT)
        return -float(np.log(from_the_formula(s, (read.mT @ torch.diag(cosine[0]) @ write).numpy())))

    step = 1e-4 * np.eye(2 * len(planes))
    hessian = np.array(
        [[(descent(p + q) - descent(p - q) - descent(q - p) + descent(-p - q)) / 4e-8 for q in step] for p in step]
    )
    expected = np.diag([float(curvature[side, i, j]) for i, j in planes for side in range(2)])
    np.testing.assert_allclose(hessian, expected, atol=2e-6 * np.abs(expected).max())


def test_an_ascent_is_fast() -> None:
    """A planted head of capacity 1: gradients alone end 4e-5 away, without memory 2e-7, without curvature 2e-6."""
    cosine = torch.linspace(0.1, 0.9, 10, dtype=torch.float64)[None]
    start = perturbed_start(torch.arange(10)[None], KEYS[:1], 0)
    climbed = refine_capacity(1 / cosine, cosine, *start, max_iterations=40)
    assert climbed.closure[0] > 1 - 5e-8


def test_an_ascent_that_only_comes_back_gives_the_assignment() -> None:
    cosine = torch.linspace(0.1, 0.9, 10, dtype=torch.float64)[None]
    found = assignment_capacity(1 / cosine, cosine)
    for budget in (0, 5):
        refined = refine_assignment(1 / cosine, cosine, found.permutation, KEYS[:1], 0, budget)
        assert refined.closure[0] == pytest.approx(float(found.closure[0]), rel=1e-14)
        assert torch.equal(refined.write, permutation_matrix(found.permutation))
        assert torch.equal(refined.read, permutation_matrix(found.permutation))


def test_two_dimensions_against_a_grid() -> None:
    """O(2) x O(2) is four pairs of circles: look everywhere."""
    sigma, cosine = random_spectra(7, 12, 2)
    found = assignment_capacity(sigma, cosine)
    climbed = [refine_assignment(sigma, cosine, found.permutation, KEYS[:12], 0).closure]
    climbed += [refine_capacity(sigma, cosine, *haar_start(KEYS[:12], seed, 2)).closure for seed in range(4)]
    refined = torch.stack(climbed).amax(0).numpy()
    angle = np.linspace(0, 2 * np.pi, 361)
    turn = np.moveaxis(np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]), -1, 0)
    circle = np.concatenate([turn, turn * np.array([1, -1])])
    for head in range(12):
        overlap = np.einsum("bij,i,aik->bajk", circle, cosine[head].numpy(), circle)
        best = from_the_formula(sigma[head].numpy(), overlap).max()
        assert best <= refined[head] * (1 + 1e-9)
        assert best >= refined[head] * (1 - 2e-3)


@pytest.mark.parametrize("d_head", [3, 4])
def test_random_orientations_stay_below(d_head: int) -> None:
    sigma, cosine = random_spectra(d_head, 4, d_head)
    found = assignment_capacity(sigma, cosine)
    climbed = [refine_assignment(sigma, cosine, found.permutation, KEYS[:4], 0).closure]
    climbed += [refine_capacity(sigma, cosine, *haar_start(KEYS[:4], seed, d_head)).closure for seed in range(4)]
    refined = torch.stack(climbed).amax(0)
    gaussian = np.random.default_rng(d_head).standard_normal((2, 20_000, d_head, d_head))
    write, read = np.linalg.qr(gaussian)[0]
    for head in range(4):
        overlap = np.einsum("nji,j,njk->nik", read, cosine[head].numpy(), write)
        assert from_the_formula(sigma[head].numpy(), overlap).max() <= refined[head] * (1 + 1e-12)


def test_refinement_never_falls_below_its_start() -> None:
    sigma, cosine = random_spectra(9, 40, 8)
    found = assignment_capacity(sigma, cosine)
    refined = refine_assignment(sigma, cosine, found.permutation, KEYS[:40], 5)
    assert (refined.closure >= found.closure * (1 - 1e-13)).all()
    start = haar_start(KEYS[:40], 5, 8)
    for budget in (0, 1, 20):
        climbed = refine_capacity(sigma, cosine, *start, max_iterations=budget)
        assert (climbed.closure >= oriented_closure(sigma, cosine, *start) * (1 - 1e-13)).all()
        assert (climbed.iterations <= budget).all()
        torch.testing.assert_close(
            oriented_closure(sigma, cosine, climbed.write, climbed.read), climbed.closure, rtol=1e-13, atol=0
        )
    for rotation in (refined.write, refined.read, climbed.write, climbed.read):
        torch.testing.assert_close(rotation.mT @ rotation, torch.eye(8).double().expand(40, 8, 8), atol=1e-13, rtol=0)


def test_refinement_leaves_an_assignment_that_is_a_saddle() -> None:
    """One large value among many equal ones: exchanging it off the diagonal gives 100/109, no pairing does."""
    sigma = torch.tensor([[3.0] + [1.0] * 100 + [0.0]])
    cosine = torch.ones(1, 102)
    found = assignment_capacity(sigma, cosine)
    assert found.closure[0] == pytest.approx(127**2 / (181 * 109), rel=1e-12)
    refined = refine_assignment(sigma, cosine, found.permutation, KEYS[:1], 0)
    assert refined.closure[0] > 0.91


def test_a_head_does_not_depend_on_its_batch() -> None:
    sigma, cosine = random_spectra(11, 40, 6)
    found = assignment_capacity(sigma, cosine)
    together = refine_assignment(sigma, cosine, found.permutation, KEYS[:40], 2, 40)
    alone = refine_assignment(sigma[35:36], cosine[35:36], found.permutation[35:36], KEYS[35:36], 2, 40)
    assert alone.closure[0] == pytest.approx(float(together.closure[35]), rel=1e-9)
    assert torch.equal(haar_start(KEYS[:40], 2, 6)[0][35], haar_start(KEYS[35:36], 2, 6)[0][0])
    assert torch.equal(
        perturbed_start(found.permutation, KEYS[:40], 2)[1][35],
        perturbed_start(found.permutation[35:36], KEYS[35:36], 2)[1][0],
    )


def test_haar_starts_are_haar() -> None:
    """Orthogonal, both determinants, and entries with the moments of O(3): 0, 1/3 and 1/5."""
    keys = [str(index).encode() for index in range(4000)]
    write, read = haar_start(keys, 0, 3)
    for rotation in (write, read):
        torch.testing.assert_close(rotation.mT @ rotation, torch.eye(3).double().expand(4000, 3, 3))
        assert abs(float((torch.linalg.det(rotation) > 0).double().mean()) - 0.5) < 0.04
        assert (rotation.mean(0).abs() < 0.04).all()
        assert (rotation.pow(2).mean(0) - 1 / 3).abs().max() < 0.03
        assert (rotation.pow(4).mean(0) - 1 / 5).abs().max() < 0.03
    assert float((write * read).sum((-2, -1)).mean().abs()) < 0.1


def test_the_stream_of_a_head_is_fixed() -> None:
    """Stored refinements are reproducible only while these numbers are what they are."""
    drawn = head_gaussian([b"model/3/5", b"model/3/6", b"model/3/5"], 7, 4)
    assert torch.equal(drawn[0], drawn[2])
    philox = np.random.Philox(key=int.from_bytes(hashlib.sha256(b"capacity:7:model/3/5").digest()[:16], "little"))
    np.testing.assert_array_equal(drawn[0].flatten(), np.random.Generator(philox).standard_normal(32))
    others = [drawn[1], head_gaussian([b"model/3/5"], 8, 4)[0], head_gaussian([b"model/3/5"], -7, 4)[0]]
    assert not any(torch.equal(drawn[0], other) for other in others)
