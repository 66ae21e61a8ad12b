"""The shape of a family's row: how a ``model_type`` names, lays out and normalises its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["separate", "concatenated", "interleaved", "grouped", "four_blocks"]
NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]


@dataclass(frozen=True, slots=True)
class Projections:
    """The projections of one attention block, by name within the block.

    ``separate`` has query, key and value; the fused layouts have ``fused``. With ``n`` query heads,
    ``g`` key/value heads and head size ``a``, the rows of the fused matrix are ``[Q (n a), K (g a),
    V (g a)]`` when ``concatenated``; ``n`` blocks of ``[q, k, v]`` (``a`` rows each) when
    ``interleaved``; ``g`` blocks of ``[n / g queries, k, v]`` when ``grouped``; and four blocks of
    ``[q, v, k]``, a quarter of the heads each, when ``four_blocks``. ``transposed`` marks ``Conv1D``
    weights, stored (in, out).
    """

    output: str
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    layout: Layout = "separate"
    transposed: bool = False

    @property
    def roles(self) -> dict[str, str]:
        """Tensor name within the block by role."""
        names = {"query": self.query, "key": self.key, "value": self.value, "fused": self.fused, "output": self.output}
        return {role: name for role, name in names.items() if name}


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm whose gain can be folded into a factor.

    ``kind`` is ``rms`` (x/rms * w), ``rms_plus_one`` (x/rms * (1 + w)), ``layer`` (mean removed,
    * w) or ``layer_plus_one`` (mean removed, * (1 + w)). ``tensor`` is empty where the norm has no
    gain in the file, and ``other_tensor`` is a second name that some files use. Layers before
    ``first_layer`` have no such norm.
    """

    tensor: str
    kind: NormKind
    first_layer: int = 0
    other_tensor: str = ""


@dataclass(frozen=True, slots=True)
class Keys:
    """Configuration keys of the sizes, tried in order; a dot reaches into a nested object.

    ``layer_list`` is a list with an entry for each layer, which overrules the depth where present.
    """

    width: tuple[str, ...] = ("hidden_size",)
    depth: tuple[str, ...] = ("num_hidden_layers",)
    layer_list: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    head_dim: tuple[str, ...] = ("head_dim",)


@dataclass(frozen=True, slots=True)
class Family:
    """One row: how a ``model_type`` names, lays out and normalises its attention.

    ``block`` is the path of one layer with ``{layer}`` for its number, below whatever prefix the
    file adds. Where one numbered layer holds several blocks, ``{inner}`` numbers them and the
    configuration key ``inner_count`` says how many. ``feeding`` is the norm in front of attention
    and ``branch`` the gain on its output; neither exists where the norm comes after the residual
    sum. ``when`` are settings a configuration must have for this row, where a ``model_type`` has
    several. ``fixed_kv_heads`` overrules what the configuration says. ``defaults`` are the class
    defaults of ``transformers`` for absent or null keys; an absent head size is width / heads.
    """

    model_type: str
    block: str
    projections: tuple[Projections, ...]
    stack: str = "decoder"
    feeding: Norm | None = None
    branch: Norm | None = None
    when: Mapping[str, Any] = field(default_factory=dict)
    keys: Keys = Keys()
    fixed_kv_heads: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    inner_count: str = ""

    @property
    def can_fold(self) -> bool:
        """Whether a norm in front of attention or on its output exists to be folded."""
        return self.feeding is not None or self.branch is not None

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
