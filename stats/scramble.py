"""The scramble null: orientation of the core destroyed, spectra and spans kept.

A scramble replaces the core ``K = A_0 S B_0^T`` by ``K' = A S B^T`` with ``A`` and ``B`` independent
and Haar distributed on O(d_head). Its closure depends on the weights through ``S = diag(sigma)`` and
``D = diag(cosine)`` alone: with ``C = B^T D A``,

    P' = (sum_i s_i^3 C_ii)^2 / (sum_ij s_i^2 C_ij^2 s_j^2 * sum_i s_i^2)

One Haar pair is worth many draws. ``A`` times a fixed signed permutation is Haar again, and that only
permutes and signs the columns of ``C``. The permutations used are the cyclic shifts, which never read
an entry of ``C`` twice, and after all of them a second sign pattern over the same shifts. The sums of
all shifts cost what one or two explicit draws would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DRAWS_PER_PAIR = 125
"""Draws taken from one Haar pair where d_head allows it: eight pairs for a thousand draws."""

MOST_BATCHES = 20
"""Batches behind a standard error: enough to estimate a spread, long enough to have a median."""

TIE = 1e-12
"""Relative difference of two closures that is rounding; it decides where the null is a point mass."""

CHUNK_ENTRIES = 2**18
"""Entries of C held at once: 2 MiB, so that the steps on one batch stay in cache."""


def null_scale(sigma: Tensor) -> Tensor:
    """Scale of the closure of a scramble to leading order, ``sum s^6 / (sum s^2)^3``.

    A scrambled head's closure is about ``null_scale * chi^2_1``; ``1 / k^2`` for a flat spectrum.
    The cosines do not enter at this order. NaN for a zero spectrum.
    """
    largest = sigma.amax(-1, keepdim=True)
    power = (sigma / torch.where(largest > 0, largest, 1.0)).square()
    total = power.sum(-1)
    return torch.where(total > 0, power.pow(3).sum(-1) / total.pow(3), torch.nan)


def draws_per_pair(d_head: int) -> int:
    """Draws taken from one Haar pair: at most two sign patterns of each cyclic shift.

    More would repeat themselves where d_head is small; there pairs are cheap.
    """
    return min(DRAWS_PER_PAIR, 2 * d_head)


def scrambled_closure(sigma: Tensor, returned: Tensor) -> Tensor:
    """Closure of ``K' = A S B^T`` (...) in [0, 1]; NaN where it is undefined.

    Args:
        sigma: (..., d_head) singular values, any scale.
        returned: ``C = B^T D A`` (..., d_head, d_head), any scale.
    """
    power = _relative(sigma).square()
    entries = _relative(returned.flatten(-2)).view_as(returned)
    weighted = power.unsqueeze(-1) * entries.square() * power.unsqueeze(-2)
    numerator = (power.pow(1.5) * entries.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return _ratio(numerator, weighted.sum((-2, -1)), power.sum(-1))


@dataclass(frozen=True, slots=True)
class HaarReflections:
    """Haar matrices ``Q = H_1 ... H_k diag(sign)`` as the reflections LAPACK would have found.

    ``vectors`` (..., d_head, d_head) holds the reflection vectors in its lower triangle, ``scale``
    (..., d_head) their coefficients in ``H = I - scale v v^T``, and ``sign`` (..., d_head) the signs
    of diag(R).
    """

    vectors: Tensor
    scale: Tensor
    sign: Tensor


def haar_reflections(normals: Tensor, d_head: int) -> HaarReflections:
    """Reflections of Haar matrices from Gaussians, without a factorization.

    A Haar matrix is the Q of a square Gaussian matrix's QR, with the signs of diag(R) absorbed. The
    reflection that clears column j acts on a Gaussian vector of length ``d_head - j`` independent of
    all earlier ones (Stewart 1980), so that those vectors can be drawn at once.

    Args:
        normals: (..., d_head (d_head + 1) / 2) independent standard normal numbers.
        d_head: width of the matrices.
    """
    lower = normals.new_zeros(*normals.shape[:-1], d_head, d_head)
    rows, columns = torch.tril_indices(d_head, d_head, device=normals.device)
    lower[..., rows, columns] = normals
    pivot = lower.diagonal(dim1=-2, dim2=-1)
    reflected = -torch.copysign(lower.square().sum(-2).sqrt(), pivot)
    vectors = lower / (pivot - reflected).unsqueeze(-2)
    return HaarReflections(vectors, (reflected - pivot) / reflected, torch.sign(reflected))


def pair_normals(head_key: bytes, seed: int, pair: int, count: int) -> NDArray[np.float64]:
    """Standard normal numbers (count,) of one Haar pair of one head.

    They come from NumPy's Philox, a counter-based generator, keyed with the SHA-256 of head key and
    seed. The pair is the highest word of the counter, so that no two pairs share a number.
    """
    digest = hashlib.sha256(b"%d:" % seed + head_key).digest()
    key = np.frombuffer(digest, dtype="<u8", count=2)
    philox = np.random.Philox(key=key, counter=np.array([0, 0, 0, pair], dtype=np.uint64))
    return np.random.Generator(philox).standard_normal(count)


def haar_returns(cosine: Tensor, head_key: Sequence[bytes], seed: int, pairs: range) -> Tensor:
    """``C = B^T D A`` (head, pair, d_head, d_head) for independent Haar ``A`` and ``B``.

    The Gaussians of ``pair_normals`` are drawn on the CPU and moved to the device of ``cosine``: C
    depends on nothing but the head's key, the seed, the pair's index and the cosines, up to rounding.

    Args:
        cosine: (head, d_head), finite; zeros are allowed.
        head_key: one key a head, for example a digest of what identifies it.
        seed: any integer.
        pairs: indices of the pairs.
    """
    n_heads, d_head = cosine.shape
    count = d_head * (d_head + 1)
    normals = torch.from_numpy(np.stack([pair_normals(key, seed, pair, count) for key in head_key for pair in pairs]))
    reflections = haar_reflections(normals.to(cosine.device).view(n_heads * len(pairs), 2, -1), d_head)
    (vectors_a, vectors_b), (scale_a, scale_b), (sign_a, sign_b) = (
        part.unbind(1) for part in (reflections.vectors, reflections.scale, reflections.sign)
    )
    a = torch.linalg.householder_product(vectors_a, scale_a) * sign_a.unsqueeze(-2)
    stretched = cosine.double().repeat_interleave(len(pairs), 0).unsqueeze(-1) * a
    returned = torch.ormqr(vectors_b, scale_b, stretched, transpose=True) * sign_b.unsqueeze(-1)
    return returned.view(n_heads, len(pairs), d_head, d_head)


def scramble_draws(
    sigma: Tensor,
    cosine: Tensor,
    head_key: Sequence[bytes],
    seed: int,
    n_draws: int = 1000,
    *,
    independent: bool = False,
) -> Tensor:
    """Closures of scrambles (head, n_draws), float64; NaN for a head whose null is undefined.

    Draw i of a head is the same, up to rounding, whatever heads are beside it, on every device, and
    for every ``n_draws`` above i, so that more draws extend fewer. It comes from Haar pair
    ``i // draws_per_pair(d_head)``. Draws of one pair are identically distributed but not independent;
    draws of two pairs are independent. ``pair_normals`` makes the randomness.

    Undefined is a zero or non-finite spectrum, or cosines that are all zero.

    Args:
        sigma: (head, d_head) singular values, any scale.
        cosine: (head, d_head) cosines of the principal angles.
        head_key: (head,) keys.
        seed: any integer.
        n_draws: how many.
        independent: take one draw from each pair.
    """
    n_heads, d_head = sigma.shape
    per_pair = 1 if independent else draws_per_pair(d_head)
    defined = ((sigma > 0).any(-1) & (cosine > 0).any(-1) & sigma.isfinite().all(-1) & cosine.isfinite().all(-1)).cpu()
    draws = torch.full((n_heads, n_draws), torch.nan, dtype=torch.float64, device=sigma.device)
    if not bool(defined.any()):
        return draws
    n_pairs = -(-n_draws // per_pair)
    pairs_at_once = max(1, min(n_pairs, CHUNK_ENTRIES // d_head**2))
    heads_at_once = max(1, CHUNK_ENTRIES // (d_head**2 * pairs_at_once))
    for heads in torch.split(torch.nonzero(defined).flatten(), heads_at_once):
        keys = [head_key[head] for head in heads.tolist()]
        index = heads.to(sigma.device)
        spectrum, angles = _relative(sigma[index].double()), _relative(cosine[index].double())
        for first in range(0, n_pairs, pairs_at_once):
            pairs = range(first, min(first + pairs_at_once, n_pairs))
            closures = _pair_closures(spectrum, haar_returns(angles, keys, seed, pairs), per_pair).flatten(1)
            start = first * per_pair
            kept = min(n_draws - start, closures.shape[1])
            draws[index, start : start + kept] = closures[:, :kept]
    return draws


@dataclass(frozen=True, slots=True)
class ScrambleSummary:
    """What a head's scrambles say about its closure; all (head,) float64, NaN where undefined.

    ``median``, ``q95`` and ``q99`` are quantiles of the draws (linear between order statistics).
    ``median_error`` is the standard error of ``median`` by batch means: draws are cut into batches of
    whole Haar pairs, at most ``MOST_BATCHES``, and the spread of the batches' medians is divided by
    the root of their number; NaN with fewer than two pairs.
    ``p`` is ``(1 + #{P' >= P}) / (1 + n_draws)``, in (0, 1]; ``wins`` is 1 where P exceeds ``median``
    and 0 where it does not. Closures equal to rounding count as ties: ``P' >= P`` holds and P does
    not win.
    """

    median: Tensor
    q95: Tensor
    q99: Tensor
    median_error: Tensor
    p: Tensor
    wins: Tensor


def scramble_summary(closure: Tensor, draws: Tensor, per_pair: int) -> ScrambleSummary:
    """Quantiles, standard error, p-value and win of each head.

    Args:
        closure: P (head,); NaN where undefined.
        draws: (head, n_draws) of ``scramble_draws``.
        per_pair: draws that share one Haar pair; 1 if they are independent.
    """
    n_heads, n_draws = draws.shape
    closure = closure.double()
    ordered = draws.sort(-1).values
    median = _quantile(ordered, 0.5)
    error = torch.full_like(median, torch.nan)
    n_batches = min(n_draws // per_pair, MOST_BATCHES)
    if n_batches > 1:
        length = n_draws // per_pair // n_batches * per_pair
        batches = draws[:, : n_batches * length].view(n_heads, n_batches, length).sort(-1).values
        error = _quantile(batches, 0.5).std(-1) / n_batches**0.5
    at_least = (draws >= (closure * (1 - TIE)).unsqueeze(-1)).sum(-1)
    undefined = closure.isnan() | median.isnan()
    return ScrambleSummary(
        median=median,
        q95=_quantile(ordered, 0.95),
        q99=_quantile(ordered, 0.99),
        median_error=error,
        p=torch.where(undefined, torch.nan, (1 + at_least.double()) / (1 + n_draws)),
        wins=torch.where(undefined, torch.nan, (closure > median * (1 + TIE)).double()),
    )


def _pair_closures(sigma: Tensor, returned: Tensor, per_pair: int) -> Tensor:
    """Closures (head, pair, per_pair) of signed cyclic shifts of the columns of C.

    Shift t pairs row i with column i + t. Signs do not enter the denominator, whose sum over rows
    serves every shift.

    Args:
        sigma: (head, d_head), at most 1.
        returned: C (head, pair, d_head, d_head).
        per_pair: at most ``draws_per_pair(d_head)``.
    """
    d_head = sigma.shape[-1]
    power = sigma.square().unsqueeze(1)
    step = torch.arange(d_head, device=sigma.device)
    column = (step[:, None] + step) % d_head
    numerator = (power * sigma.unsqueeze(1)).unsqueeze(-2) * _signs(d_head).to(sigma.device)
    numerator = (numerator @ returned.gather(-1, column.expand_as(returned))).flatten(-2)[..., :per_pair]
    columns = (power.unsqueeze(-2) @ returned.square()).squeeze(-2)
    denominator = (columns[..., column] @ power.unsqueeze(-1)).squeeze(-1).repeat(1, 1, 2)[..., :per_pair]
    return _ratio(numerator, denominator, power.sum(-1, keepdim=True))


def _signs(d_head: int) -> Tensor:
    """The two sign patterns (2, d_head): none, and a fixed one that looks random."""
    generator = np.random.Generator(np.random.Philox(key=d_head))
    drawn = 2.0 * generator.integers(0, 2, d_head) - 1
    return torch.from_numpy(np.stack([np.ones(d_head), drawn]))


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """Quantile over the last axis of sorted values, linear between order statistics."""
    place = share * (ordered.shape[-1] - 1)
    below = int(place)
    above = min(below + 1, ordered.shape[-1] - 1)
    return torch.lerp(ordered[..., below], ordered[..., above], place - below)


def _relative(values: Tensor) -> Tensor:
    """Values over their largest modulus along the last axis; zeros stay zeros."""
    largest = values.abs().amax(-1, keepdim=True)
    return values / torch.where(largest > 0, largest, 1.0)


def _ratio(numerator: Tensor, denominator: Tensor, total: Tensor) -> Tensor:
    """``numerator^2 / (denominator total)``, at most 1; NaN where the denominator is zero."""
    ratio = numerator.square() / torch.where(denominator > 0, denominator * total, torch.nan)
    return ratio.clamp(max=1.0)
