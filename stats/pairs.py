"""All ordered pairs of heads in one layer: mismatch, and the right and left action of products.

Everything is computed between orthonormal bases, ``T_i = Q_Oi K_i Q_Vi^T``, so that neither a bad
gauge nor a bad condition number of a factor costs accuracy, and one key/value group at a time, so
that memory stays at a few copies of the layer's output projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stats.closure import closure, frobenius, inner, unit
from stats.factorization import ThinFactor, overlaps, rounding_cut


def pair_statistics(output: ThinFactor, value: ThinFactor, kv_head: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Mismatch closure and both actions for every ordered pair (write_head, read_head).

    Args:
        output: thin factors of O (head, d_model, d_head).
        value: thin factors of V (kv_head, d_model, d_head).
        kv_head: (head,) index of the value each head reads.

    Returns:
        ``stats.registry.PAIR_STATISTICS`` by name, each (head, head) with ``T_i`` the row
        (write_head) and ``T_j`` the column (read_head), NaN where undefined; and the overlaps
        ``Q_V^T Q_O`` (head, d_head, d_head) of the matched factors. The diagonal of every closure
        is the head's own closure.
    """
    n_heads, d_head, _ = output.basis.shape
    dtype = output.basis.dtype
    cut = rounding_cut(dtype, d_head)
    transport, norm = unit(output.root @ value.root.mT[kv_head])
    alive = norm > cut * frobenius(output.root) * frobenius(value.root)[kv_head]
    written = transport.mT.to(dtype) @ output.basis

    mismatch = norm.new_empty((n_heads, value.basis.shape[0]))
    right = norm.new_empty((n_heads, n_heads))
    left = torch.empty_like(right)
    product_norm = torch.empty_like(right)
    matched = torch.empty_like(transport)
    for group in range(value.basis.shape[0]):
        overlap = overlaps(value.basis[group], output.basis)
        mismatch[:, group] = _mismatch_closure(output, value.root[group], overlap, cut)
        members = torch.nonzero(kv_head == group).flatten()
        matched[members] = overlap[members]
        reading = overlap @ transport
        values_overlap = overlaps(value.basis[group], value.basis)
        returned = (reading.to(dtype) @ written).flatten(1)
        left[members] = (written[members].flatten(1) @ returned.mT).double()
        for head in members.tolist():
            product = transport[head] @ reading
            product_norm[head] = frobenius(product)
            right[head] = inner(product, (transport[head] @ values_overlap)[kv_head])

    defined = (product_norm > cut) & alive[:, None] & alive[None, :]
    safe = torch.where(defined, product_norm, 1.0)

    def share(action: Tensor) -> Tensor:
        return torch.where(defined, (action / safe).square().clamp(max=1.0), torch.nan)

    both = alive[:, None] & alive[None, :]
    smallest, largest = _range_angles(output.basis, kv_head)
    statistics = {
        "mismatch_closure": mismatch[:, kv_head],
        "right_closure": share(right),
        "right_alpha": torch.where(both, right * norm[None, :], torch.nan),
        "left_closure": share(left),
        "left_alpha": torch.where(both, left * norm[:, None], torch.nan),
        "range_angle_min": torch.where(both, smallest, torch.nan),
        "range_angle_max": torch.where(both, largest, torch.nan),
    }
    return statistics, matched


def _mismatch_closure(output: ThinFactor, value_root: Tensor, overlap: Tensor, cut: float) -> Tensor:
    """Closure of ``O_i V^T`` (head,) for one value projection V; NaN where undefined."""
    result = closure(output.root @ value_root.mT, overlap)
    floor = cut * frobenius(output.root) * frobenius(value_root)
    return torch.where((result.norm > floor) & (result.square_norm > cut), result.closure, torch.nan)


def _range_angles(basis: Tensor, kv_head: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest principal angle (head, head) between what two heads of a group write to.

    NaN for heads of different groups. Angles below pi/4 come from sines and the others from cosines,
    as in Knyazev and Argentati 2002: the arccosine of a cosine near 1 is wrong by 1e-8. Two ranges have
    as many angles as the smaller has dimensions; its sines are those of what lies outside the other.

    Args:
        basis: ``Q_O^T`` (head, d_head, d_model), with zero rows beyond a head's rank.
        kv_head: (head,) group of each head.
    """
    n_heads = len(kv_head)
    rank = (basis.square().sum(-1) > 0.5).sum(-1)
    smallest = torch.full((n_heads, n_heads), torch.nan, dtype=torch.float64, device=basis.device)
    largest = smallest.clone()
    for head in range(n_heads):
        others = torch.nonzero(
            (kv_head == kv_head[head]) & (torch.arange(n_heads, device=basis.device) > head)
        ).flatten()
        if not len(others):
            continue
        overlap = overlaps(basis[head], basis[others])
        cosine = torch.linalg.svdvals(overlap).clamp(max=1.0)
        last = torch.minimum(rank[head], rank[others]).clamp(min=1) - 1
        furthest = cosine.gather(1, last[:, None])[:, 0]
        low, high = cosine[:, 0].acos(), furthest.acos()
        for place in torch.nonzero(cosine[:, 0].square() > 0.5).flatten().tolist():
            own, other = basis[head].double(), basis[others[place]].double()
            if rank[head] < rank[others[place]]:
                outside = own - overlap[place] @ other
            else:
                outside = other - overlap[place].mT @ own
            sine = torch.linalg.svdvals(outside.mT).clamp(max=1.0)
            low[place] = sine[last[place]].asin()
            if furthest[place].square() > 0.5:
                high[place] = sine[0].asin()
        smallest[head, others], smallest[others, head] = low, low
        largest[head, others], largest[others, head] = high, high
    return smallest, largest
