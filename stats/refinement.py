"""Riemannian ascent of the closure over orientations, from an assignment or from a random start.

The ascent is this project's own: geoopt 0.5.1 brings stochastic first-order steps and pymanopt 2.2.1
optimises one problem at a time, while here hundreds of small independent heads have to share each
matrix product and keep a step length of their own; a batched L-BFGS on O(k) x O(k) is short, and
needs no dependency. Search directions live in the Lie algebra, ``A <- A cay(X)``,
``B <- B cay(Y)`` with skew X and Y, so that earlier steps and gradients are compared without being
moved (Huang, Gallivan and Absil 2015, A Broyden class of quasi-Newton methods for Riemannian
optimization, with the identity as transport). The Hessian at a diagonal C, which is known in closed
form, takes the place of the usual multiple of the identity; without it an ascent needs about four
times the steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stats.capacity import diagonal_curvature, log_closure, oriented_closure, permutation_matrix, relative, skew_part

MEMORY = 8
"""Earlier steps the quasi-Newton direction remembers."""

SUFFICIENT = 1e-4
"""Share of the predicted gain a step has to bring (Armijo; Nocedal and Wright 2006, section 3.1)."""

HALVINGS = 30
"""Times a step is halved before a head counts as converged."""

STEP_LIMIT = 1.0
"""Largest Frobenius norm of a search direction, in radians: beyond it a quadratic model says little."""

PERTURBATION = 0.3
"""Frobenius norm of the rotation that moves a start off the critical point an assignment is.

Most assignments are saddles, with a few weak ways up; from 0.01 away a head can come back to it and stop."""

NO_CURVATURE = 1e-12
"""Inner product of a step and its change of gradient, over the latter's square, that is no curvature."""

FLOOR = 0.1
"""Share of a head's mean curvature below which a plane counts as that steep. The model is exact only where
C is diagonal; from 0.01 down a random start loses more to its errors than it gains."""

FLAT = 1e-7
"""Norm of the gradient of ``log P'`` at which a head has arrived."""

MAX_ITERATIONS = 100
"""Steps of one ascent unless told otherwise."""

CHUNK = 32
"""Heads that share one batch: the steps they remember take 34 MB at d_head 64."""


@dataclass(frozen=True, slots=True)
class Orientation:
    """An orientation of every core and the closure it attains; the first axis is head.

    ``closure`` (head,) is ``stats.capacity.oriented_closure`` of ``write`` A and ``read`` B
    (head, d_head, d_head); ``iterations`` (head,) counts the steps of the ascent that led there.
    """

    closure: Tensor
    write: Tensor
    read: Tensor
    iterations: Tensor


def head_gaussian(head_key: Sequence[bytes], seed: int, d_head: int) -> Tensor:
    """Standard normal numbers (head, 2, d_head, d_head), float64 on the CPU.

    Each head has a Philox stream of its own, keyed by SHA-256 of the seed and the head's key, so
    that its numbers depend on neither the other heads nor the device.
    """
    drawn = np.empty((len(head_key), 2, d_head, d_head))
    for head, key in enumerate(head_key):
        digest = hashlib.sha256(b"capacity:%d:" % seed + key).digest()
        philox = np.random.Philox(key=np.frombuffer(digest, dtype="<u8", count=2))
        drawn[head] = np.random.Generator(philox).standard_normal((2, d_head, d_head))
    return torch.from_numpy(drawn)


def haar_start(head_key: Sequence[bytes], seed: int, d_head: int) -> tuple[Tensor, Tensor]:
    """Independent Haar A and B (head, d_head, d_head) of O(d_head), float64 on the CPU.

    Args:
        head_key: what identifies each head; equal keys give equal rotations.
        seed: any integer.
        d_head: size of the rotations.
    """
    q, r = torch.linalg.qr(head_gaussian(head_key, seed, d_head))
    rotations = q * torch.copysign(torch.ones((), dtype=r.dtype), r.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    return rotations[:, 0], rotations[:, 1]


def perturbed_start(permutation: Tensor, head_key: Sequence[bytes], seed: int) -> tuple[Tensor, Tensor]:
    """A and B (head, d_head, d_head) near the assignment's permutation matrix, float64 on the CPU.

    Args:
        permutation: int64 (head, d_head) of ``stats.capacity.assignment_capacity``.
        head_key: what identifies each head.
        seed: any integer.
    """
    skew = skew_part(head_gaussian(head_key, seed, permutation.shape[-1]))
    skew *= PERTURBATION / _dot(skew, skew).sqrt().clamp_min(torch.finfo(skew.dtype).tiny)
    matrix = permutation_matrix(permutation.cpu())
    rotations = matrix.unsqueeze(1) @ _cayley(skew)
    return rotations[:, 0], rotations[:, 1]


def _scaled(gradient: Tensor, curvature: Tensor) -> Tensor:
    """A Newton step of the diagonal model; planes flatter than ``FLOOR`` of the mean count as that steep."""
    steep = curvature.abs()
    steep = steep.clamp_min(FLOOR * steep.mean((-3, -2, -1), keepdim=True))
    x, y = gradient.unbind(1)
    planes = torch.stack([x + y, x - y], 1) / steep
    return torch.stack([planes[:, 0] + planes[:, 1], planes[:, 0] - planes[:, 1]], 1)


def _cayley(skew: Tensor) -> Tensor:
    """``(I - X/2)^-1 (I + X/2)``, a rotation that agrees with ``exp X`` to second order."""
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    inverse: Tensor = torch.linalg.inv(identity - skew / 2)
    return 2 * inverse - identity


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product (head, 1, 1, 1) over everything but the head axis."""
    return (x * y).sum((-3, -2, -1), keepdim=True)


def refine_capacity(
    sigma: Tensor, cosine: Tensor, write: Tensor, read: Tensor, max_iterations: int = MAX_ITERATIONS
) -> Orientation:
    """Climb ``log P'`` from given orientations, each head on its own, towards a critical point.

    Heads are independent of each other and of the batch they are in. P' never decreases, so the
    result is at least the start's closure; an exact critical point is returned as it is.

    Args:
        sigma: singular values (head, d_head), not negative; its device is where the work is done.
        cosine: principal cosines (head, d_head).
        write: A (head, d_head, d_head) to start from, orthogonal.
        read: B (head, d_head, d_head) to start from, orthogonal.
        max_iterations: steps after which a head stops wherever it is.

    Returns:
        The orientation of every head, float64. A head whose start has no closure (a spectrum that
        is zero or not finite, or a core whose square vanishes) keeps its start, with NaN and 0.
    """
    start = torch.stack([write, read], 1).to(sigma.device, torch.float64)
    s, c = relative(sigma), relative(cosine.to(sigma.device))
    rotations = start.clone()
    taken = torch.zeros(len(start), dtype=torch.int64, device=sigma.device)
    for first in range(0, len(start), CHUNK):
        part = slice(first, first + CHUNK)
        rotations[part], taken[part] = _ascend(s[part], c[part], start[part], max_iterations)
    identity = torch.eye(start.shape[-1], dtype=start.dtype, device=sigma.device)
    rotations = rotations @ (3 * identity - rotations.mT @ rotations) / 2
    return _higher(s, c, start, rotations, taken)


def refine_assignment(
    sigma: Tensor,
    cosine: Tensor,
    permutation: Tensor,
    head_key: Sequence[bytes],
    seed: int,
    max_iterations: int = MAX_ITERATIONS,
) -> Orientation:
    """Climb from near an assignment; never below the assignment itself.

    Args:
        sigma: singular values (head, d_head), not negative; its device is where the work is done.
        cosine: principal cosines (head, d_head).
        permutation: int64 (head, d_head) of ``stats.capacity.assignment_capacity``.
        head_key: what identifies each head; its perturbation depends on this and the seed alone.
        seed: any integer.
        max_iterations: steps after which a head stops wherever it is.

    Returns:
        As ``refine_capacity``; where the ascent only came back, the permutation's own orientation.
    """
    found = refine_capacity(sigma, cosine, *perturbed_start(permutation, head_key, seed), max_iterations)
    rotations = torch.stack([found.write, found.read], 1)
    start = permutation_matrix(permutation.to(sigma.device)).unsqueeze(1).expand_as(rotations)
    return _higher(relative(sigma), relative(cosine.to(sigma.device)), start, rotations, found.iterations)


def _higher(s: Tensor, c: Tensor, start: Tensor, end: Tensor, taken: Tensor) -> Orientation:
    """The better of two orientations (head, 2, d_head, d_head) for every head, the start if even."""
    before, after = (oriented_closure(s, c, x[:, 0], x[:, 1]) for x in (start, end))
    better = after > before
    rotations = torch.where(better[:, None, None, None], end, start)
    return Orientation(torch.where(better, after, before), rotations[:, 0], rotations[:, 1], taken)


def _ascend(s: Tensor, c: Tensor, rotations: Tensor, max_iterations: int) -> tuple[Tensor, Tensor]:
    """Rotations (head, 2, d_head, d_head) at the end of the ascent and the steps (head,) it took."""
    value, gradient = log_closure(s, c, rotations)
    moving = value.isfinite()
    taken = torch.zeros_like(moving, dtype=torch.int64)
    memory: list[_Pair] = []
    for _ in range(max_iterations):
        moving = moving & (_dot(gradient, gradient).flatten().sqrt() > FLAT)
        if not bool(moving.any()):
            break
        curvature = diagonal_curvature(s, c, rotations)
        direction = _quasi_newton(gradient, memory, curvature)
        direction = torch.where(_dot(direction, gradient) > 0, direction, _scaled(gradient, curvature))
        direction = direction * (STEP_LIMIT / _dot(direction, direction).sqrt().clamp_min(STEP_LIMIT))
        length, rotations, value, risen = _line_search(s, c, rotations, value, gradient, direction, moving)
        moving = length > 0
        taken += moving
        step = length[:, None, None, None] * direction
        memory = [*memory[1 - MEMORY :], _pair(step, gradient - risen)]
        gradient = risen
    return rotations, taken


def _line_search(
    s: Tensor, c: Tensor, rotations: Tensor, value: Tensor, gradient: Tensor, direction: Tensor, moving: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Halve each moving head's step until it gains enough.

    Returns:
        Step lengths (head,), 0 where no step gained, and rotations, values and gradients after them.
    """
    slope = _dot(direction, gradient).flatten()
    length = torch.zeros_like(value)
    rotations, value, gradient = rotations.clone(), value.clone(), gradient.clone()
    pending, trial = torch.nonzero(moving).flatten(), 1.0
    for _ in range(HALVINGS):
        moved = rotations[pending] @ _cayley(trial * direction[pending])
        new_value, new_gradient = log_closure(s[pending], c[pending], moved)
        enough = new_value > value[pending] + SUFFICIENT * trial * slope[pending]
        reached = pending[enough]
        length[reached] = trial
        rotations[reached], value[reached], gradient[reached] = moved[enough], new_value[enough], new_gradient[enough]
        pending, trial = pending[~enough], trial / 2
        if len(pending) == 0:
            break
    return length, rotations, value, gradient


@dataclass(frozen=True, slots=True)
class _Pair:
    """A step taken and the change of the descending gradient over it.

    ``inverse`` (head, 1, 1, 1) is 1 over their inner product, 0 where that is no positive curvature.
    """

    step: Tensor
    change: Tensor
    inverse: Tensor


def _pair(step: Tensor, change: Tensor) -> _Pair:
    product = _dot(step, change)
    useful = product > NO_CURVATURE * _dot(change, change)
    return _Pair(step, change, torch.where(useful, 1 / torch.where(useful, product, 1.0), 0.0))


def _quasi_newton(gradient: Tensor, memory: list[_Pair], curvature: Tensor) -> Tensor:
    """Direction of ascent by the two-loop recursion of L-BFGS (Nocedal and Wright 2006, section 7.2)."""
    direction, shares = gradient, []
    for pair in reversed(memory):
        shares.append(pair.inverse * _dot(pair.step, direction))
        direction = direction - shares[-1] * pair.change
    direction = _scaled(direction, curvature)
    for pair, share in zip(memory, reversed(shares), strict=True):
        direction = direction + (share - pair.inverse * _dot(pair.change, direction)) * pair.step
    return direction
