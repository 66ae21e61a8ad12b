"""Companion statistics of the query-key form ``B = W_Q W_K^T`` of a query head."""

from __future__ import annotations

import torch
from torch import Tensor

from stats.closure import inner, unit
from stats.factorization import ThinFactor, overlaps
from stats.spectra import participation


def query_key_statistics(
    query: ThinFactor, key: ThinFactor, kv_head: Tensor, *, two_spaces: bool = False
) -> dict[str, Tensor]:
    """Spectra of B, of the two factors, and of the angle between their spans.

    Args:
        query: thin factors of W_Q (head, d_model, d_head).
        key: thin factors of W_K (kv_head, d_model, d_head).
        kv_head: (head,) index of the key head each query head reads.
        two_spaces: queries and keys read different streams, so that angles between their spans and
            the symmetric share are undefined.

    Returns:
        ``stats.registry.QK_STATISTICS`` by name: (head,) or (head, d_head); NaN where B = 0.
    """
    form = query.root @ key.root.mT[kv_head]
    overlap = torch.full_like(form, torch.nan) if two_spaces else _overlaps(query.basis, key.basis, kv_head)
    sigma = torch.linalg.svdvals(form)
    cosine = overlap[..., 0] if two_spaces else torch.linalg.svdvals(overlap).clamp(max=1.0)
    unit_form, norm = unit(form)
    returned = unit_form @ overlap
    symmetric = (1 + inner(returned, returned.mT)) / 2
    return {
        "norm": norm,
        "sigma_max": sigma[:, 0],
        "sigma_min": sigma[:, -1],
        "participation": participation(sigma),
        "symmetric_share": torch.where(norm > 0, symmetric, torch.nan),
        "cos_max": cosine[:, 0],
        "cos_mean": cosine.mean(-1),
        "participation_q": participation(query.sigma),
        "participation_k": participation(key.sigma)[kv_head],
        "sigma": sigma,
        "cosine": cosine,
    }


def _overlaps(query_basis: Tensor, key_basis: Tensor, kv_head: Tensor) -> Tensor:
    """``Q_K^T Q_Q`` (head, d_head, d_head) in float64, one key head at a time."""
    n_heads, d_head, _ = query_basis.shape
    overlap = torch.empty((n_heads, d_head, d_head), dtype=torch.float64, device=query_basis.device)
    for group in range(len(key_basis)):
        members = torch.nonzero(kv_head == group).flatten()
        overlap[members] = overlaps(key_basis[group], query_basis[members])
    return overlap
