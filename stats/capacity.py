"""Capacity: how closed a head could be if only the orientation of its core were free.

With ``T = Q_O K Q_V^T``, ``K = A S B^T`` and ``C = B^T D A`` the closure is

    P'(A, B) = (sum_i s_i^3 C_ii)^2 / (sum_ij s_i^2 C_ij^2 s_j^2 * sum_i s_i^2),

so singular values and principal cosines are all it takes to ask for its maximum over A, B in O(k).
Every value returned here is attained by an orientation returned with it, hence a lower bound on the
capacity. This file holds the closed construction that gives each singular value one cosine;
``stats.refinement`` climbs from there, or from anywhere else, on O(k) x O(k).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Vector = NDArray[np.float64]
Order = NDArray[np.int64]

EXCESS = 1e-7
"""The search stops once no permutation can beat the best one by more than this share of it."""

ROUNDING = 1e-13
"""Share of a sum of d_head products that is rounding."""


def relative(spectrum: Tensor) -> Tensor:
    """Spectra (..., d_head) in float64 over their largest entry, which is where fourth powers are safe.

    Zeros stay zeros; a spectrum with a NaN or an infinity becomes all NaN.
    """
    spectrum = spectrum.double()
    largest = spectrum.amax(-1, keepdim=True)
    finite = spectrum.isfinite().all(-1, keepdim=True)
    return torch.where(finite, spectrum / torch.where(largest > 0, largest, 1.0), torch.nan)


def oriented_closure(sigma: Tensor, cosine: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """Closure (...) of the core ``A S B^T`` between spans with these principal cosines.

    Args:
        sigma: singular values (..., d_head), not negative, on any scale.
        cosine: principal cosines (..., d_head).
        write: A (..., d_head, d_head), orthogonal.
        read: B (..., d_head, d_head), orthogonal.

    Returns:
        P' in [0, 1]; NaN where a spectrum is not finite or the square of the core vanishes.
    """
    s = relative(sigma)
    overlap = read.double().mT @ (relative(cosine).unsqueeze(-1) * write.double())
    product = (s.pow(3) * overlap.diagonal(dim1=-2, dim2=-1)).sum(-1)
    square = (s.unsqueeze(-1) * overlap * s.unsqueeze(-2)).square().sum((-2, -1))
    return _share(product, square, s)


def attained_closure(sigma: Tensor, cosine: Tensor, permutation: Tensor) -> Tensor:
    """Closure (...) of the orientation that returns singular direction i with cosine ``permutation[i]``.

    ``A = B`` is then the permutation matrix with ones at ``(permutation[i], i)``.

    Args:
        sigma: singular values (..., d_head), not negative, on any scale.
        cosine: principal cosines (..., d_head).
        permutation: int64 (..., d_head).

    Returns:
        P' in [0, 1]; NaN where a spectrum is not finite or the square of the core vanishes.
    """
    s = relative(sigma)
    returned = s.square() * torch.gather(relative(cosine), -1, permutation)
    return _share((returned * s).sum(-1), returned.square().sum(-1), s)


def _share(product: Tensor, square: Tensor, s: Tensor) -> Tensor:
    """``product^2 / (square * sum s^2)``, NaN where ``square`` is zero."""
    ratio = product / torch.where(square == 0, torch.nan, square).sqrt()
    return (ratio.square() / s.square().sum(-1)).clamp(max=1.0)


def permutation_matrix(permutation: Tensor) -> Tensor:
    """The orthogonal matrix (..., d_head, d_head) that ``attained_closure`` takes for A and for B."""
    return torch.nn.functional.one_hot(permutation, permutation.shape[-1]).double().mT


def log_closure(s: Tensor, c: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
    """``log P'`` (head,) up to a constant, and its gradient in the Lie algebra.

    Args:
        s: relative singular values (head, d_head).
        c: relative cosines (head, d_head).
        rotations: A and B stacked (head, 2, d_head, d_head).

    Returns:
        ``log(n^2 / den)`` and skew X, Y (head, 2, d_head, d_head) such that moving A along ``A X'``
        and B along ``B Y'`` changes it by ``<X, X'> + <Y, Y'>``. ``log(0)`` is minus infinity.
    """
    overlap, n, den, weighted = _returned(s, c, rotations)
    cubes = 2 * s.pow(3) / n.unsqueeze(-1)
    gradient = torch.diag_embed(cubes) - 2 * weighted / den[:, None, None]
    algebra = torch.stack([skew_part(overlap.mT @ gradient), -skew_part(gradient @ overlap.mT)], 1)
    return (n.square() / den).log(), algebra


def diagonal_curvature(s: Tensor, c: Tensor, rotations: Tensor) -> Tensor:
    """Curvature of ``-log P'`` in the planes (i, j) of both rotations, as if ``C`` were its diagonal.

    Where C is diagonal, as at an assignment, the Hessian couples nothing but the same plane of A and
    of B, and there only in ``U = (X + Y) / sqrt 2`` and ``V = (X - Y) / sqrt 2``: with ``c_i = C_ii``,
    ``g_i = 2 s_i^3 / n - 2 s_i^4 c_i / den`` and w = ``2 s_i^2 s_j^2 / den``

        U: w (c_i - c_j)^2 + (g_i - g_j)(c_i - c_j)      V: w (c_i + c_j)^2 + (g_i + g_j)(c_i + c_j)

    Returns:
        Both (head, 2, d_head, d_head), symmetric in i and j; negative is a way up from a critical point.
    """
    overlap, n, den, _ = _returned(s, c, rotations)
    kept = overlap.diagonal(dim1=-2, dim2=-1)
    slope = 2 * s.pow(3) / n.unsqueeze(-1) - 2 * s.pow(4) * kept / den.unsqueeze(-1)
    weight = 2 * (s.unsqueeze(-1) * s.unsqueeze(-2)).square() / den[:, None, None]
    planes = []
    for sign in (-1, 1):
        together = kept.unsqueeze(-1) + sign * kept.unsqueeze(-2)
        planes.append(weight * together.square() + (slope.unsqueeze(-1) + sign * slope.unsqueeze(-2)) * together)
    return torch.stack(planes, 1)


def _returned(s: Tensor, c: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """C, n, den and ``s_i^2 s_j^2 C_ij`` of the closure ``n^2 / (den sum s^2)``."""
    overlap = rotations[:, 1].mT @ (c.unsqueeze(-1) * rotations[:, 0])
    weighted = (s.unsqueeze(-1) * s.unsqueeze(-2)).square() * overlap
    n = (s.pow(3) * overlap.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return overlap, n, (weighted * overlap).sum((-2, -1)), weighted


def skew_part(x: Tensor) -> Tensor:
    """``(x - x^T) / 2`` over the last two axes."""
    return (x - x.mT) / 2


@dataclass(frozen=True, slots=True)
class Assignment:
    """Best found one-to-one pairing of singular values with cosines; the first axis is head.

    ``closure`` (head,) is attained by ``permutation`` (head, d_head) and no permutation exceeds
    ``bound`` (head,), which lies within the share ``EXCESS`` above it. ``iterations`` (head,) counts linear
    assignments solved. A head without a capacity has NaN, NaN, the identity and 0.
    """

    closure: Tensor
    bound: Tensor
    permutation: Tensor
    iterations: Tensor


def assignment_capacity(sigma: Tensor, cosine: Tensor) -> Assignment:
    """Maximise P' over the orientations in which ``C`` is diagonal: ``A = B`` a permutation.

    With ``n = sum s_i^3 c_p(i)`` and ``d = sum s_i^4 c_p(i)^2`` the closure is
    ``n^2 / (d sum s^2)``; signs are best all equal. That ratio is convex in ``(n, d)``, so its
    maximum over all k! permutations lies on the upper hull of the points they make, and the hull's
    corners are the solutions of ``min sum_i (s_i^2 c_p(i) - lambda s_i)^2``, one linear assignment a
    lambda. Between two solved lambdas the two supporting lines bound what is left to find, so about
    twenty assignments, each at the slope between two known corners, certify the maximum. Iterating
    the fixed point ``lambda = d / n``, which the maximum satisfies, takes more of them and proves nothing.

    Invariant under a change of scale of either spectrum and under permutations of their entries (up
    to ``EXCESS``). The same input gives the same output, whatever else is in the batch.

    Args:
        sigma: singular values (head, d_head), not negative; rank deficiency is zeros.
        cosine: principal cosines (head, d_head). Heads of another d_head go into another call.

    Returns:
        The assignment of every head, on the CPU. NaN where a spectrum is zero or not finite.
    """
    s, c = relative(sigma.cpu()), relative(cosine.cpu())
    n_heads, d_head = s.shape
    permutation = torch.arange(d_head).repeat(n_heads, 1)
    iterations = torch.zeros(n_heads, dtype=torch.int64)
    excess = torch.full((n_heads,), torch.nan, dtype=torch.float64)
    alive = s.isfinite().all(-1) & c.isfinite().all(-1) & (s.amax(-1) > 0) & (c.amax(-1) > 0)
    for head in torch.nonzero(alive).flatten().tolist():
        order, excess[head], iterations[head] = _best_pairing(s[head].numpy(), c[head].numpy())
        permutation[head] = torch.from_numpy(order)
    closure = torch.where(alive, attained_closure(s, c, permutation), torch.nan)
    return Assignment(closure, (closure * (1 + excess)).clamp(max=1.0), permutation, iterations)


@dataclass(frozen=True, slots=True)
class _Corner:
    """A pairing on the upper hull: the maximiser of ``n - weight d``, ``weight = 1 / (2 lambda)``."""

    weight: float
    n: float
    d: float
    order: Order


def _ratio(n: float, d: float) -> float:
    """``n^2 / d``, proportional to the closure; 0 where nothing is returned."""
    if n <= 0:
        return 0.0
    return n * n / d if d > 0 else np.inf


def _bound(left: _Corner, right: _Corner) -> float:
    """What no pairing on the hull between two corners exceeds: ``n^2 / d`` where their lines cross."""
    height = left.n - left.weight * left.d
    d = right.d
    if right.weight < np.inf:
        d = (height - right.n + right.weight * right.d) / (right.weight - left.weight)
        d = min(max(d, right.d), left.d)
    n = height + left.weight * d
    if d <= ROUNDING * left.d and n <= ROUNDING * left.n:
        n = 0.0  # the line through the origin: a pairing that returns nothing is the right end
    return max(_ratio(n, d), _ratio(left.n, left.d), _ratio(right.n, right.d))


def _best_pairing(s: Vector, c: Vector) -> tuple[Order, float, int]:
    """Permutation of the largest ``n^2 / d``, the share above it not excluded, assignments solved."""
    cubes, powers = np.multiply.outer(s**3, c), np.multiply.outer(s**2, c) ** 2
    rows = np.arange(len(s))

    def corner(weight: float, order: Order) -> _Corner:
        return _Corner(weight, float(cubes[rows, order].sum()), float(powers[rows, order].sum()), order)

    alike, opposite = np.empty_like(rows), np.empty_like(rows)
    falling = np.argsort(-s, kind="stable")
    alike[falling] = np.argsort(-c, kind="stable")
    opposite[falling] = np.argsort(c, kind="stable")
    best, rightmost = corner(0.0, alike), corner(np.inf, opposite)
    waiting = [(best, rightmost)]
    if _ratio(rightmost.n, rightmost.d) > _ratio(best.n, best.d):
        best = rightmost
    solved, excluded = 0, 0.0
    while waiting:
        left, right = waiting.pop()
        bound = _bound(left, right)
        weight = (left.n - right.n) / (left.d - right.d) if left.d > right.d else left.weight
        if bound <= (1 + EXCESS) * _ratio(best.n, best.d) or not left.weight < weight < right.weight:
            excluded = max(excluded, bound)
            continue
        order = linear_sum_assignment(cubes - weight * powers, maximize=True)[1].astype(np.int64)
        middle = corner(weight, order)
        solved += 1
        if _ratio(middle.n, middle.d) > _ratio(best.n, best.d):
            best = middle
        waiting += [(left, middle), (middle, right)]
    return best.order, max(excluded / _ratio(best.n, best.d) - 1, 0.0), solved
