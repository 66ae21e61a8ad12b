"""Sizes of a stack and its layers, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingest.checkpoint import Checkpoint
from ingest.family import Keys, Multiplier, Projections
from ingest.recognition import Stack
from stats.errors import CheckpointError

MOST_LAYERS = 10_000
"""Layers a configuration may speak of: each one that has no attention is listed."""


LARGEST_SCALAR = 1e30
"""What a scalar may be: its products stay finite in float64."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Ranks of the latents (``query_rank`` is 0 for a full query) and the two parts of a key."""

    rank: int
    query_rank: int
    nope: int
    rope: int


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Heads and widths of one layer's attention.

    ``d_head`` is the width of a head's value, ``d_key`` of its query and key; heads write to a
    stream of ``d_model`` and their keys and values read one of ``d_source``.
    """

    n_heads: int
    n_kv_heads: int
    d_model: int
    d_source: int
    d_head: int
    d_key: int
    latent: LatentSizes | None


@dataclass(frozen=True, slots=True)
class Depth:
    """Numbered layers of a stack, and attention blocks in each."""

    layers: int
    inner: int

    @property
    def blocks(self) -> int:
        """Attention blocks in all."""
        return self.layers * self.inner


def positive(checkpoint: Checkpoint, keys: Sequence[str], value: Any, largest: int = 2**31 - 1) -> int:
    """A size, checked.

    Raises:
        CheckpointError: it is not an integer from 1 to ``largest``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
        raise CheckpointError(
            "the configuration does not give a size",
            where=f"{checkpoint.source}, {' or '.join(keys)}",
            expected=f"an integer from 1 to {largest:,}",
            found=repr(value)[:100],
            remedy="correct the configuration the model was saved with",
        )
    return value


def depth(checkpoint: Checkpoint, stack: Stack) -> Depth:
    """How many layers and blocks the configuration says a stack has."""
    family, config = stack.family, stack.config
    keys = family.keys
    listed = family.setting(config, *keys.layer_list)
    counted = len(listed) if isinstance(listed, list) else family.setting(config, *keys.depth)
    layers = positive(checkpoint, (*keys.layer_list, *keys.depth), counted, MOST_LAYERS)
    trailing = family.setting(config, *keys.trailing) if keys.trailing else None
    if trailing:
        trailing = positive(checkpoint, keys.trailing, trailing, MOST_LAYERS)
        layers = positive(checkpoint, (*keys.depth, *keys.trailing), layers - trailing, MOST_LAYERS)
    if isinstance(family.inner_count, int):
        return Depth(layers, family.inner_count)
    if not family.inner_count:
        return Depth(layers, 1)
    inner = family.setting(config, family.inner_count)
    return Depth(layers, positive(checkpoint, [family.inner_count], inner, MOST_LAYERS // layers))


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """What the configuration calls each layer; empty where it does not."""
    names = ("layer_types", "layers_block_type", "hybrid_layer_pattern")
    listed: Any = next((config[name] for name in names if config.get(name)), [])
    return [str(item) for item in listed] if isinstance(listed, list) else []


def head_sizes(checkpoint: Checkpoint, stack: Stack, projections: Projections, layer: int) -> HeadSizes:
    """Heads and widths of one layer; per-layer lists are indexed."""
    family, config = stack.family, stack.config
    keys = family.keys
    types = layer_types(config)
    by_layer = config.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        own = next((own for number, own in by_layer.items() if number.zfill(9) == f"{layer:09}"), None)
        config = {**config, **own} if isinstance(own, Mapping) else config
    elif layer < len(types):
        keys = family.by_layer_type.get(types[layer], keys)

    def setting(names: Sequence[str]) -> Any:
        value = family.setting(config, *names)
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        return value

    width = positive(checkpoint, keys.width, setting(keys.width))
    source = positive(checkpoint, keys.source_width, setting(keys.source_width)) if keys.source_width else width
    heads = positive(checkpoint, keys.heads, setting(keys.heads))
    if projections.latent is not None:
        latent = _latent_sizes(checkpoint, keys, setting, projections)
        d_head = setting(keys.value_dim)
        d_head = width // heads if d_head is None else positive(checkpoint, keys.value_dim, d_head)
        return HeadSizes(heads, heads, width, source, d_head, latent.nope + latent.rope, latent)
    kv_heads = family.fixed_kv_heads or setting(keys.kv_heads)
    kv_heads = heads if kv_heads is None else positive(checkpoint, keys.kv_heads, kv_heads) * keys.kv_factor
    d_key = setting(keys.head_dim)
    d_key = width // heads if d_key is None else positive(checkpoint, keys.head_dim, d_key)
    d_head = setting(keys.value_dim)
    d_head = d_key if d_head is None else positive(checkpoint, keys.value_dim, d_head)
    if heads % kv_heads:
        raise CheckpointError(
            "query heads cannot be grouped evenly",
            where=f"{checkpoint.source}, layer {layer}",
            expected="key/value heads that divide the query heads",
            found=f"{heads} query heads, {kv_heads} key/value heads",
            remedy="correct the configuration; a count it lacks is the model class's own default",
        )
    if kv_heads != heads and projections.layout in ("interleaved", "four_blocks"):
        raise CheckpointError(
            "the layout has a key and a value for every query head",
            where=f"{checkpoint.source}, layer {layer}, {projections.fused}",
            expected=f"{heads} key/value heads",
            found=f"{kv_heads} key/value heads in the configuration",
            remedy="name the family the weights are laid out like with --family NAME",
        )
    return HeadSizes(heads, kv_heads, width, source, d_head, d_key, None)


def without_heads(stack: Stack, layers: int) -> list[int]:
    """Numbers of layers that a list of head counts by layer gives none."""
    keys = stack.family.keys
    counts = [stack.family.setting(stack.config, *names) for names in (keys.heads, keys.kv_heads)]
    lists = [count for count in counts if isinstance(count, list)]
    return [layer for layer in range(layers) if any(count[layer : layer + 1] == [0] for count in lists)]


def _latent_sizes(checkpoint: Checkpoint, keys: Keys, setting: Any, projections: Projections) -> LatentSizes:
    def size(key: str) -> int:
        return positive(checkpoint, [key], setting([key]))

    query_rank, rope = 0 if projections.query else size(keys.query_rank), size(keys.rope_dim)
    if not keys.latent_key_dim:
        return LatentSizes(size(keys.latent_rank), query_rank, size(keys.nope_dim), rope)
    d_key = positive(checkpoint, keys.latent_key_dim, setting(keys.latent_key_dim))
    nope = positive(checkpoint, (*keys.latent_key_dim, keys.rope_dim), d_key - rope)
    return LatentSizes(size(keys.latent_rank), query_rank, nope, rope)


def branch_multiplier(checkpoint: Checkpoint, stack: Stack, multiplier: Multiplier | None, layers: int) -> float:
    """The scalar that multiplies a branch outside its module; 1 where none does.

    Raises:
        CheckpointError: the configuration gives something that is no number.
    """
    factor = 1.0
    if multiplier is None:
        return factor
    for name in multiplier.settings:
        factor *= scalar(checkpoint, stack, name)
    return factor / layers**0.5 if multiplier.over_sqrt_depth else factor


def scalar(checkpoint: Checkpoint, stack: Stack, name: str) -> float:
    """A number that multiplies something; 1 where the configuration has none, or no ``name`` is given.

    Raises:
        CheckpointError: the configuration gives something that is no number.
    """
    value = stack.family.setting(stack.config, name) if name else None
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_SCALAR:
        raise CheckpointError(
            "the configuration does not give a multiplier",
            where=f"{checkpoint.source}, {name}",
            expected=f"a number up to {LARGEST_SCALAR:g}",
            found=repr(value)[:100],
            remedy="correct the configuration the model was saved with",
        )
    return float(value)
