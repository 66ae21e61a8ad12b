"""Thin factors and the exact principal-coordinate factorization of ``T = O V^T``.

The tall products are Gram matrices. A Gram matrix squares the condition number, so a factor that
is not well conditioned is orthonormalised twice: through the eigenvectors of its Gram matrix,
which also show the numerical rank, and through a Cholesky factor of what the first pass left (the
CholeskyQR2 idea of Yamamoto et al. 2015). Bases are then orthonormal to rounding up to condition
1e6, and the d_model-long work is nothing but matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stats.errors import HeadatlasError

RANK_CUT: dict[torch.dtype, float] = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Singular values below this share of a factor's largest are rounding: the square root of what a
Gram matrix resolves in that dtype, with a margin. Stored with every model as ``rank_cut``."""


WELL_CONDITIONED = 30.0
"""Condition number up to which one pass is enough: its error grows with the square, here to 1e-13."""


def rounding_cut(dtype: torch.dtype, d_head: int) -> float:
    """Relative size below which a product of ``d_head``-wide orthonormal factors is rounding."""
    return 8.0 * d_head * torch.finfo(dtype).eps


@dataclass(frozen=True, slots=True)
class ThinFactor:
    """``X = basis^T root`` with orthonormal rows of ``basis`` on the support of ``X``.

    ``basis`` (n, d_head, d_model) holds ``Q^T`` in the dtype of X: products run fastest along
    d_model when it is contiguous. Rows outside the support are zero. ``root`` (n, d_head, d_head)
    and ``sigma`` (n, d_head), descending, are in float64.
    """

    basis: Tensor
    root: Tensor
    sigma: Tensor


def checked_eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (n, k) ascending and eigenvectors (n, k, k) of symmetric ``gram``, verified.

    Raises:
        HeadatlasError: the solver returned vectors that do not diagonalise ``gram``. Releases of
            accelerator libraries have done so without an error of their own.
    """
    values, vectors = torch.linalg.eigh(gram)
    size = gram.shape[-1]
    scale = values.abs().amax(-1, keepdim=True).unsqueeze(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    identity = torch.eye(size, dtype=gram.dtype, device=gram.device)
    skew = (vectors.mT @ vectors - identity).abs().amax()
    residual = ((gram @ vectors - vectors * values.unsqueeze(-2)) / scale).abs().amax()
    tolerance = 100 * size * torch.finfo(gram.dtype).eps
    if not bool((skew < tolerance) & (residual < tolerance)):
        raise HeadatlasError(
            "the symmetric eigensolver returned a wrong decomposition",
            where=f"device {gram.device}, {gram.shape[0]} matrices of {size} x {size}",
            expected=f"orthogonality and residual below {tolerance:.1e}",
            found=f"{float(skew):.1e} and {float(residual):.1e}",
            remedy="measure with --device cpu, or change the accelerator's libraries",
        )
    return values, vectors


def thin_factor(x: Tensor, rank_cut: float) -> ThinFactor:
    """Orthonormal basis and root of finite tall matrices.

    Args:
        x: (n, d_model, d_head), finite, float64 or float32.
        rank_cut: singular values at or below ``rank_cut`` times the largest are taken as zero.
    """
    rows = x.mT.contiguous()
    values, vectors = checked_eigh((rows @ rows.mT).double())
    sigma = values.clamp_min(0).sqrt()
    largest = sigma.amax(-1, keepdim=True)
    kept = sigma > rank_cut * largest
    inverse = torch.where(kept, 1 / torch.where(kept, sigma, 1.0), 0.0)
    root = (sigma * kept).unsqueeze(-1) * vectors.mT
    basis = (vectors * inverse.unsqueeze(-2)).mT.to(x.dtype) @ rows
    sigma = sigma.flip(-1)
    again = torch.nonzero(sigma[:, -1] * WELL_CONDITIONED <= sigma[:, 0]).flatten()
    if len(again):
        basis[again], root[again] = _second_pass(basis[again], root[again], ~kept[again])
        sigma[again] = torch.linalg.svdvals(root[again])
    return ThinFactor(basis, root, sigma)


def _second_pass(basis: Tensor, root: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormalise rows that are nearly so; ``dropped`` (n, d_head) marks the zero ones."""
    remainder = (basis @ basis.mT).double() + torch.diag_embed(dropped.double())
    lower = torch.linalg.cholesky(remainder)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse_lower = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return inverse_lower.to(basis.dtype) @ basis, lower.mT @ root


@dataclass(frozen=True, slots=True)
class PrincipalCoordinates:
    """``T = Q_O K Q_V^T`` and ``T^2 = Q_O (K D K) Q_V^T`` with ``D = diag(cosine)``.

    ``core`` K (head, d_head, d_head) and ``cosine`` (head, d_head) descending. Where cosines
    coincide K is defined up to a rotation of that block: compare invariants, not entries.
    ``write_turn`` and ``read_turn`` (head, d_head, d_head) take the given bases to ``Q_O^T`` and
    ``Q_V^T``: ``Q_O^T = write_turn @ basis``.
    """

    core: Tensor
    cosine: Tensor
    write_turn: Tensor
    read_turn: Tensor


def principal_coordinates(transport: Tensor, overlap: Tensor) -> PrincipalCoordinates:
    """Rotate both bases to the principal directions of span(V) and span(O).

    Args:
        transport: ``R_O R_V^T`` (head, d_head, d_head), T between the two bases.
        overlap: ``Q_V^T Q_O`` (head, d_head, d_head) of the same bases.
    """
    left, cosine, right_t = torch.linalg.svd(overlap)
    return PrincipalCoordinates(right_t @ transport @ left, cosine.clamp(max=1.0), right_t, left.mT)


def overlaps(left: Tensor, basis: Tensor) -> Tensor:
    """Inner products of one basis with several: ``left basis^T`` (n, d_head, d_head), float64.

    Args:
        left: ``Q^T`` (d_head, d_model) of one factor.
        basis: ``Q^T`` (n, d_head, d_model) of others.
    """
    products = basis.flatten(0, 1) @ left.mT
    return products.view(len(basis), -1, left.shape[0]).mT.double()
