"""Multi-head latent attention: head projections composed from their low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ingest.plan import LayerPlan


@dataclass(frozen=True, slots=True)
class LatentParts:
    """The factors in one form, whatever names and axes the file has.

    ``value_up`` (head d_head, rank), ``key_up`` (head nope, rank), ``gain`` (rank,), ``down``
    (rank, d_source) and ``rope_key`` (rope, d_source), which all heads share; the query as
    ``query`` (head d_key, d_model), or low-rank as ``query`` (head d_key, query_rank),
    ``query_gain`` and ``query_down`` (query_rank, d_model).
    """

    value_up: Tensor
    key_up: Tensor
    gain: Tensor
    down: Tensor
    rope_key: Tensor
    query: Tensor
    query_gain: Tensor | None
    query_down: Tensor | None

    @property
    def value(self) -> tuple[Tensor, ...]:
        """What the values are made of."""
        return self.value_up, self.gain[None], self.down

    @property
    def query_key(self) -> tuple[Tensor, ...]:
        """What queries and keys are made of."""
        if self.query_gain is None or self.query_down is None:
            return self.query, self.key_up, self.rope_key
        return self.query, self.query_gain[None], self.query_down, self.key_up, self.rope_key


def latent_parts(tensors: Mapping[str, Tensor], plan: LayerPlan) -> LatentParts:
    """Sort the tensors of a block, by role, into factors."""
    sizes = plan.sizes
    assert sizes.latent is not None
    if "latent_up" in tensors:
        up = tensors["latent_up"].view(sizes.n_heads, -1, sizes.latent.rank)
        key_up, value_up = up[:, : sizes.latent.nope], up[:, sizes.latent.nope :]
    else:
        key_up, value_up = tensors["key_up"].mT, tensors["value_up"]
    low_rank = "query_up" in tensors
    return LatentParts(
        value_up.flatten(0, 1),
        key_up.flatten(0, 1),
        tensors["latent_gain"],
        tensors["latent_down"][: sizes.latent.rank],
        tensors["latent_down"][sizes.latent.rank :],
        tensors["query_up" if low_rank else "query"],
        tensors["query_gain"] if low_rank else None,
        tensors["query_down"] if low_rank else None,
    )


def compose(parts: LatentParts, plan: LayerPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key (head d_key, width) and value (head d_head, width) projections, in float64.

    The latent's norm divides by a scalar that depends on the token; its gain is composed in and
    the scalar left out. The rotary part of a key does not pass the norm.
    """
    sizes, latent = plan.sizes, plan.projections.latent
    assert sizes.latent is not None
    assert latent is not None
    down = parts.gain.double()[:, None] * parts.down.double()
    if latent.scaled:
        down *= (sizes.d_model / sizes.latent.rank) ** 0.5
    value = parts.value_up.double() @ down
    nope = (parts.key_up.double() @ down).view(sizes.n_heads, sizes.latent.nope, -1)
    rope = parts.rope_key.double().expand(sizes.n_heads, -1, -1)
    key = torch.cat([nope, rope], 1).flatten(0, 1)
    query = parts.query.double()
    if parts.query_gain is not None and parts.query_down is not None:
        query_down = parts.query_gain.double()[:, None] * parts.query_down.double()
        if latent.scaled:
            query_down *= (sizes.d_model / sizes.latent.query_rank) ** 0.5
        query = query @ query_down
    return query, key, value
