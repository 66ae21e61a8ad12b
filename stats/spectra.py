"""Summaries of singular values and eigenvalues. Undefined values are NaN, never a number."""

from __future__ import annotations

import torch
from torch import Tensor


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient that is NaN where the denominator is zero."""
    return torch.where(denominator > 0, numerator / denominator, torch.nan)


def _relative(sigma: Tensor) -> Tensor:
    """Singular values over their largest; zeros stay zeros."""
    largest = sigma.amax(-1, keepdim=True)
    return sigma / torch.where(largest > 0, largest, 1.0)


def participation(sigma: Tensor) -> Tensor:
    """Participation ratio ``(sum s^2)^2 / sum s^4`` over the last axis; 1 to its length."""
    power = _relative(sigma).square()
    return _ratio(power.sum(-1).square(), power.square().sum(-1))


def stable_rank(sigma: Tensor) -> Tensor:
    """``sum s^2 / s_1^2`` over the last axis."""
    power = _relative(sigma).square()
    return _ratio(power.sum(-1), power.amax(-1))


def isometry(sigma: Tensor) -> Tensor:
    """Scaled isometry ``(sum s^2)^2 / (k sum s^4)``; 1 for a flat spectrum of full length k."""
    return participation(sigma) / sigma.shape[-1]


def numerical_rank(sigma: Tensor, rank_cut: float) -> Tensor:
    """Number of singular values above ``rank_cut`` times the largest (int64)."""
    return (sigma > rank_cut * sigma.amax(-1, keepdim=True)).sum(-1)


def condition(sigma: Tensor, rank_cut: float) -> Tensor:
    """``s_1 / s_k``; NaN where the numerical rank is below the length of the spectrum."""
    full = numerical_rank(sigma, rank_cut) == sigma.shape[-1]
    return torch.where(full, sigma.amax(-1) / sigma.amin(-1), torch.nan)


def sorted_eigenvalues(matrix: Tensor) -> Tensor:
    """Complex eigenvalues (..., k) by descending modulus, then real part, then imaginary part.

    The two of a conjugate pair share modulus and real part, so their order has to be fixed too.
    """
    values: Tensor = torch.linalg.eigvals(matrix)
    for key in (torch.imag, torch.real, torch.abs):
        order = torch.argsort(key(values), dim=-1, descending=True, stable=True)
        values = torch.gather(values, -1, order)
    return values


def copying(eigenvalue: Tensor, floor: Tensor) -> Tensor:
    """Copying score ``sum Re / sum ||`` in [-1, 1]; NaN where the moduli sum to at most ``floor``."""
    total = eigenvalue.abs().sum(-1)
    return torch.where(total > floor, eigenvalue.real.sum(-1) / torch.where(total > 0, total, 1.0), torch.nan)
