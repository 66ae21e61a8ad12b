"""The shape of a family's row: how a ``model_type`` names, lays out and normalises its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Layout = Literal["separate", "concatenated", "interleaved", "grouped", "four_blocks", "latent"]
NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]
PieceName = Literal["output_gate", "sinks", "latent_norm", "value_norm", "clamp", "sub_norm", "qk_norm"]

PIECES: tuple[PieceName, ...] = get_args(PieceName)
"""Names of everything that may lie between a token and a head's output besides matrices."""

NEUTRALISED: tuple[PieceName, ...] = ("output_gate", "latent_norm", "value_norm", "clamp", "sub_norm")
"""Pieces between a token and what a head writes that ``T`` leaves out, as they are not linear."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Names of the low-rank projections of multi-head latent attention.

    ``down`` (latent + rope, in) gives the latent and the shared rotary key, ``norm`` (latent,) is the
    gain of the latent's norm, and ``up`` (heads (nope + value), latent) gives each head's
    ``[k_nope, v]``. Where keys and values have matrices of their own, ``key_up`` (heads, latent, nope) and
    ``value_up`` (heads, value, latent) stand for ``up``. A low-rank query has ``query_down``,
    ``query_norm`` and ``query_up``. ``scaled`` latents are multiplied by ``sqrt(width / rank)``.
    """

    down: str
    norm: str
    up: str = ""
    key_up: str = ""
    value_up: str = ""
    query_down: str = ""
    query_norm: str = ""
    query_up: str = ""
    scaled: bool = False

    @property
    def roles(self) -> dict[str, str]:
        """Tensor name within the block by role; empty where the form has none."""
        return {
            "latent_down": self.down,
            "latent_gain": self.norm,
            "latent_up": self.up,
            "key_up": self.key_up,
            "value_up": self.value_up,
            "query_down": self.query_down,
            "query_gain": self.query_norm,
            "query_up": self.query_up,
        }


@dataclass(frozen=True, slots=True)
class Projections:
    """The projections of one attention block, by name within the block.

    ``separate`` has query, key and value; the fused layouts have ``fused``. With ``n`` query heads,
    ``g`` key/value heads and head size ``a``, the rows of the fused matrix are ``[Q (n a), K (g a),
    V (g a)]`` when ``concatenated``; ``n`` blocks of ``[q, k, v]`` (``a`` rows each) when
    ``interleaved``; ``g`` blocks of ``[n / g queries, k, v]`` when ``grouped``; and four blocks of
    ``[q, v, k]``, a quarter of the heads each, when ``four_blocks``. ``transposed`` marks ``Conv1D``
    weights, stored (in, out). ``latent`` names what multi-head latent attention has in place of keys
    and values. A ``gated_query`` holds ``[q, gate]`` for each head. ``layer_types`` are the entries of
    the configuration's ``layer_types`` that may have this form; empty means all.
    """

    output: str
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    layout: Layout = "separate"
    transposed: bool = False
    latent: Latent | None = None
    gated_query: bool = False
    layer_types: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, str]:
        """Tensor name within the block by role."""
        names = {"query": self.query, "key": self.key, "value": self.value, "fused": self.fused, "output": self.output}
        names |= self.latent.roles if self.latent else {}
        return {role: name for role, name in names.items() if name}


@dataclass(frozen=True, slots=True)
class Piece:
    """Something between a token and what a head writes that no matrix describes.

    It is there when the tensor ``tensor`` (a full name within the block) exists, when the
    configuration's ``setting`` is true or not zero, or, with neither named, always; and where a list
    ``layer_setting`` has an entry for the layer, only when that is true or not zero. Without the
    list, the last of every ``layer_interval`` (a configuration key) layers does not have it.
    """

    name: PieceName
    tensor: str = ""
    setting: str = ""
    layer_setting: str = ""
    layer_interval: str = ""


@dataclass(frozen=True, slots=True)
class Multiplier:
    """What multiplies the branch outside the attention module: recorded, and part of ``T`` in the scaled operator only.

    The product of ``settings`` (1 where absent), over the square root of the depth where
    ``over_sqrt_depth``. ``gain`` is a vector in the file, a full tensor name within the block, or,
    where ``gated``, a single number whose hyperbolic tangent multiplies.
    """

    settings: tuple[str, ...] = ()
    over_sqrt_depth: bool = False
    gain: str = ""
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm whose gain can be folded into a factor.

    ``kind`` is ``rms`` (x/rms * w), ``rms_plus_one`` (x/rms * (1 + w)), ``layer`` (mean removed,
    * w) or ``layer_plus_one`` (mean removed, * (1 + w)). ``tensor`` is empty where the norm has no
    gain in the file, and ``other_tensor`` is a second name that some files use. Layers before
    ``first_layer`` have no such norm. The name is relative to the block, or, where it contains
    ``{layer}`` or the norm belongs to the whole ``stack``, to what stands before the block.
    """

    tensor: str
    kind: NormKind
    first_layer: int = 0
    other_tensor: str = ""
    of_stack: bool = False

    def names(self, prefix: str, block: str, layer: int, inner: int) -> list[str]:
        """Names of the gain in the file, likeliest first; none where the norm has no gain."""
        found = []
        for name in (self.tensor, self.other_tensor):
            if name:
                stem = prefix if self.of_stack or "{layer}" in name else prefix + block
                found += [f"{stem}{name.format(layer=layer, inner=inner)}.{gain}" for gain in ("weight", "gamma")]
        return found


@dataclass(frozen=True, slots=True)
class Keys:
    """Configuration keys of the sizes, tried in order; a dot reaches into a nested object.

    ``layer_list`` is a list with an entry for each layer, which overrules the depth where present.
    ``trailing`` counts layers at the end that the depth includes although they are no part of the
    stack. ``kv_heads`` is multiplied by ``kv_factor``. ``value_dim`` is the size of a head's value
    where it is not ``head_dim``, and ``source_width`` the width of what keys and values read where it
    is not ``width``. The last five are the sizes of multi-head latent attention; ``latent_key_dim``
    is the size of a whole key, and stands in for ``nope_dim``.
    """

    width: tuple[str, ...] = ("hidden_size",)
    depth: tuple[str, ...] = ("num_hidden_layers",)
    layer_list: tuple[str, ...] = ()
    trailing: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    kv_factor: int = 1
    head_dim: tuple[str, ...] = ("head_dim",)
    value_dim: tuple[str, ...] = ()
    source_width: tuple[str, ...] = ()
    latent_rank: str = "kv_lora_rank"
    query_rank: str = "q_lora_rank"
    nope_dim: str = "qk_nope_head_dim"
    rope_dim: str = "qk_rope_head_dim"
    latent_key_dim: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One row: how one stack of a ``model_type`` names, lays out and normalises its attention.

    ``block`` is the path of one layer with ``{layer}`` for its number, below whatever prefix the
    file adds, and ``other_block`` a second spelling of it. Where one numbered layer holds several
    blocks, ``{inner}`` numbers them, in the block or in the projections, and ``inner_count`` says how
    many: a configuration key, or a number. ``feeding`` is the norm in front of attention and
    ``branch`` the gain on its output; neither exists where the norm comes after the residual sum.

    A ``model_type`` has a row for each of its ``stack``s. ``part`` are keys of a nested
    configuration that describes the stack, the first one present; without any the whole
    configuration does. Keys and values of a ``two_spaces`` stack read another stream than the one
    its heads write to, through the norm ``source``.

    ``when`` are settings a configuration must have for this row, where a stack has several.
    ``fixed_kv_heads`` overrules what the configuration says. ``by_layer_type`` has other keys for
    some entries of ``layer_types``; a ``per_layer_config`` in the configuration, which has settings
    of single layers, takes its place. The last ``shared_layers`` (a configuration key) layers use the
    keys and values of earlier ones. Values are multiplied by the setting ``value_scale``.
    ``defaults`` are the class defaults of ``transformers`` for absent or null keys; an absent head
    size is width / heads.
    """

    model_type: str
    block: str
    projections: tuple[Projections, ...]
    stack: str = "decoder"
    feeding: Norm | None = None
    branch: Norm | None = None
    source: Norm | None = None
    two_spaces: bool = False
    part: tuple[str, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    keys: Keys = Keys()
    by_layer_type: Mapping[str, Keys] = field(default_factory=dict)
    fixed_kv_heads: int | None = None
    shared_layers: str = ""
    value_scale: str = ""
    pieces: tuple[Piece, ...] = ()
    multiplier: Multiplier | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    inner_count: str | int = ""
    other_block: str = ""

    @property
    def can_fold(self) -> bool:
        """Whether a norm in front of attention or on its output exists to be folded."""
        return any(norm is not None for norm in (self.feeding, self.branch, self.source))

    def described_by(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a model's configuration that describes this stack."""
        parts = (config.get(name) for name in self.part)
        return next((part for part in parts if isinstance(part, dict)), config)

    def setting(self, config: Mapping[str, Any], *keys: str) -> Any:
        """First value of a configuration that is present and not null, else the class default."""
        for key in keys:
            value = config.get(key)
            outer, dot, inner = key.partition(".")
            if value is None and dot and isinstance(config.get(outer), Mapping):
                value = config[outer].get(inner)
            if value is not None:
                return value
        return next((self.defaults[key] for key in keys if key in self.defaults), None)

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the configuration has the settings this row is for."""
        return all(self.setting(config, key) == value for key, value in self.when.items())


def sizes(
    width: int, depth: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, int]:
    """Class defaults under the usual keys; a count left out is derived."""
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return {key: size for key, size in sizes.items() if size is not None}
