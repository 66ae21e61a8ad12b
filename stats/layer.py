"""Everything that is stored about one attention layer, from its factors."""

from __future__ import annotations

import torch
from torch import Tensor

from stats.closure import closure, frobenius
from stats.factorization import ThinFactor, principal_coordinates, rounding_cut, thin_factor
from stats.pairs import pair_statistics
from stats.query_key import query_key_statistics
from stats.registry import HEAD_STATISTICS, PAIR_STATISTICS, STATUS_REASONS
from stats.scramble import null_scale
from stats.spectra import (
    condition,
    copying,
    isometry,
    numerical_rank,
    participation,
    sorted_eigenvalues,
    stable_rank,
)

BASES = ("o_basis", "v_basis")
REASON_CODE = {reason: code for code, reason in enumerate(STATUS_REASONS)}


def measure_layer(
    output: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor,
    kv_head: Tensor,
    rank_cut: float,
    *,
    two_spaces: bool = False,
    keep_bases: bool = False,
) -> dict[str, Tensor]:
    """Closure family, principal coordinates, spectra, query-key companions and all pairs.

    Args:
        output: O (head, d_model, d_head), float64 or float32, on any device.
        value: V (kv_head, d_model, d_head).
        query: W_Q (head, d_model, d_key).
        key: W_K (kv_head, d_model, d_key).
        kv_head: (head,) int64, the value and key each head reads.
        rank_cut: share of the largest singular value below which one is rounding.
        two_spaces: values and keys read another stream, of a width of its own, than the one heads
            write to. What needs T^2, a trace or an angle between the streams is then undefined, and
            ``core`` lies between orthonormal bases of the two supports that are not aligned.
        keep_bases: also return ``o_basis`` (head, d_model, d_head) and ``v_basis``, the orthonormal
            Q_O and Q_V of ``T = Q_O K Q_V^T``, zero in directions that the rank does not reach.

    Returns:
        Arrays by name on the input's device. Head statistics, ``reason`` codes and ``core``,
        ``sigma``, ``cosine``, ``eigenvalue``, ``sigma_o``, ``sigma_v`` under their own names,
        query-key ones prefixed ``qk_``, pair ones of shape (head, head). NaN marks what is
        undefined. A head with a non-finite factor is all NaN and does not touch the others.
    """
    output, output_finite = _finite(output)
    value, value_finite = _finite(value)
    finite = output_finite & value_finite[kv_head]
    cut = rounding_cut(output.dtype, output.shape[-1])

    write, read = thin_factor(output, rank_cut), thin_factor(value, rank_cut)
    if two_spaces:
        pairs = {item.name: output.new_full((len(kv_head),) * 2, torch.nan).double() for item in PAIR_STATISTICS}
        measured = _two_space_statistics(write, read, kv_head, finite, rank_cut, cut)
        turns = None
    else:
        pairs, overlap = pair_statistics(write, read, kv_head)
        measured, turns = _head_statistics(write, read, overlap, kv_head, finite, rank_cut, cut)
    if keep_bases:
        for place, basis in enumerate((write.basis, read.basis[kv_head])):
            turned = basis if turns is None else turns[place].to(basis.dtype) @ basis
            measured[BASES[place]] = _where_finite(finite, turned.mT)
    pair_finite = output_finite[:, None] & value_finite[kv_head][None, :]
    product_finite = finite[:, None] & finite[None, :]
    for name, pair in pairs.items():
        allowed = pair_finite if name == "mismatch_closure" else product_finite
        measured[name] = torch.where(allowed, pair, torch.nan)
    del write, read

    query, query_finite = _finite(query)
    key, key_finite = _finite(key)
    form_finite = query_finite & key_finite[kv_head]
    forms = query_key_statistics(
        thin_factor(query, rank_cut), thin_factor(key, rank_cut), kv_head, two_spaces=two_spaces
    )
    for name, form in forms.items():
        measured[f"qk_{name}"] = _where_finite(form_finite, form)
    return measured


def _head_statistics(
    write: ThinFactor,
    read: ThinFactor,
    overlap: Tensor,
    kv_head: Tensor,
    finite: Tensor,
    rank_cut: float,
    cut: float,
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Head statistics, spectra and core; NaN where undefined, with the reason's code. And the bases' turns."""
    coordinates = principal_coordinates(write.root @ read.root.mT[kv_head], overlap)
    core, cosine = coordinates.core, coordinates.cosine
    sigma = torch.linalg.svdvals(core)
    eigenvalue = sorted_eigenvalues(cosine[:, :, None] * core)
    family = closure(core, torch.diag_embed(cosine))

    zero = family.norm <= cut * frobenius(write.root) * frobenius(read.root)[kv_head]
    nilpotent = ~zero & (family.square_norm <= cut)
    reason = torch.zeros_like(kv_head)
    reason[zero] = REASON_CODE["zero"]
    reason[nilpotent] = REASON_CODE["nilpotent"]
    reason[~finite] = REASON_CODE["nonfinite"]
    sigma = torch.where(zero[:, None], 0.0, sigma)
    alpha = torch.where(zero, torch.nan, torch.where(nilpotent, 0.0, family.alpha))
    trace = (cosine * core.diagonal(dim1=-2, dim2=-1)).sum(-1)

    measured = {
        "closure": torch.where(zero | nilpotent, torch.nan, family.closure),
        "alpha": alpha,
        "norm": torch.where(zero, 0.0, family.norm),
        "trace": torch.where(zero, 0.0, trace),
        "trace_rank": torch.where(zero | nilpotent | (alpha == 0), torch.nan, trace / alpha),
        "cos_max": cosine[:, 0],
        "cos_mean": cosine.mean(-1),
        "cos_min": cosine[:, -1],
        "spectral_radius": eigenvalue[:, 0].abs(),
        "copying": copying(eigenvalue, cut * family.norm),
        "null_scale": null_scale(sigma),
        "cosine": cosine,
        "eigenvalue": eigenvalue,
        "core": core,
    }
    measured |= _spectral_statistics(sigma, write, read, kv_head, rank_cut)
    return _stored(measured, sigma, reason, finite, rank_cut), (coordinates.write_turn, coordinates.read_turn)


def _two_space_statistics(
    write: ThinFactor, read: ThinFactor, kv_head: Tensor, finite: Tensor, rank_cut: float, cut: float
) -> dict[str, Tensor]:
    """What is defined of an operator between two streams; the rest is NaN."""
    core = write.root @ read.root.mT[kv_head]
    sigma = torch.linalg.svdvals(core)
    norm = frobenius(core)
    zero = norm <= cut * frobenius(write.root) * frobenius(read.root)[kv_head]
    sigma = torch.where(zero[:, None], 0.0, sigma)
    reason = torch.where(zero, REASON_CODE["zero"], REASON_CODE["two spaces"])
    reason[~finite] = REASON_CODE["nonfinite"]
    undefined = torch.full_like(norm, torch.nan)
    spectrum = torch.full_like(sigma, torch.nan)
    measured = {item.name: undefined for item in HEAD_STATISTICS}
    measured |= {
        "norm": torch.where(zero, 0.0, norm),
        "cosine": spectrum,
        "eigenvalue": torch.complex(spectrum, spectrum),
        "core": core,
    }
    measured |= _spectral_statistics(sigma, write, read, kv_head, rank_cut)
    return _stored(measured, sigma, reason, finite, rank_cut)


def _spectral_statistics(
    sigma: Tensor, write: ThinFactor, read: ThinFactor, kv_head: Tensor, rank_cut: float
) -> dict[str, Tensor]:
    """What follows from the singular values of T, and of its factors, alone."""
    return {
        "sigma_max": sigma[:, 0],
        "sigma_min": sigma[:, -1],
        "participation": participation(sigma),
        "stable_rank": stable_rank(sigma),
        "condition": condition(sigma, rank_cut),
        "isometry": isometry(sigma),
        "sigma": sigma,
        "sigma_o": write.sigma,
        "sigma_v": read.sigma[kv_head],
    }


def _stored(
    measured: dict[str, Tensor], sigma: Tensor, reason: Tensor, finite: Tensor, rank_cut: float
) -> dict[str, Tensor]:
    """The statistics with NaN for heads that are not finite, and the rank and reason of every head."""
    stored = {name: _where_finite(finite, array) for name, array in measured.items()}
    rank = torch.where(finite, numerical_rank(sigma, rank_cut), -1)
    return stored | {"rank": rank, "reason": reason}


def _finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` with every non-finite matrix replaced by zeros, and which (n,) were finite.

    The sum is finite only if every entry is, unless it overflows, which the second look settles.
    """
    finite = torch.isfinite(x.sum((-2, -1)))
    if not bool(finite.all()):
        finite = torch.isfinite(x).all(-1).all(-1)
        x = torch.where(finite[:, None, None], x, 0.0)
    return x, finite


def _where_finite(finite: Tensor, array: Tensor) -> Tensor:
    """``array`` (head, ...) with NaN for the heads that are not finite."""
    return torch.where(finite.view(-1, *[1] * (array.ndim - 1)), array, torch.nan)
