"""Closure: scaled idempotence of an operator given by a small core."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def frobenius(x: Tensor) -> Tensor:
    """Frobenius norm over the last two axes."""
    return x.square().sum((-2, -1)).sqrt()


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Frobenius inner product over the last two axes."""
    return (a * b).sum((-2, -1))


def unit(core: Tensor) -> tuple[Tensor, Tensor]:
    """``core`` divided by its norm (zero where the norm is zero), and the norm.

    Fourth powers of weights leave the range of float64 long before the weights do; on unit cores
    nothing over- or underflows.
    """
    norm = frobenius(core)
    return core / torch.where(norm > 0, norm, 1.0)[..., None, None], norm


@dataclass(frozen=True, slots=True)
class Closure:
    """Closure family of ``T = Q_O K Q_V^T`` with ``C = Q_V^T Q_O``; all of the batch's shape.

    ``closure`` in [0, 1] and ``alpha`` are invariant under a change of gauge; both are meaningless
    where ``square_norm``, which is ``||T^2|| / ||T||^2``, or ``norm`` is rounding.
    """

    closure: Tensor
    alpha: Tensor
    norm: Tensor
    square_norm: Tensor


def closure(core: Tensor, overlap: Tensor) -> Closure:
    """``P = <KCK, K>^2 / (||KCK||^2 ||K||^2)`` and ``alpha = <KCK, K> / ||K||^2``.

    Args:
        core: K (..., d_head, d_head).
        overlap: C (..., d_head, d_head); ``diag(cosine)`` in principal coordinates.

    The zero operator and one whose square vanishes come out as 0; the caller decides from ``norm``
    and ``square_norm`` whether that is rounding.
    """
    unit_core, norm = unit(core)
    square = unit_core @ overlap @ unit_core
    square_norm = frobenius(square)
    product = inner(square, unit_core)
    ratio = product / torch.where(square_norm > 0, square_norm, 1.0)
    return Closure(ratio.square().clamp(max=1.0), product * norm, norm, square_norm)
