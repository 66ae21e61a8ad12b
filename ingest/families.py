"""Where O, V, Q and K sit in each model family's checkpoint. Adding a family adds a row.

Names were checked against the running modules of ``transformers`` 5.24: ``tests/test_families.py``
recovers every head's operator by probing the modules and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Layout = Literal["separate", "concatenated", "interleaved"]
NormKind = Literal["rms", "rms_plus_one", "layer"]


@dataclass(frozen=True, slots=True)
class Projections:
    """The projections of one attention block, by name within the block.

    ``separate`` has query, key and value; the fused layouts have ``fused``. With ``n`` query heads,
    ``g`` key/value heads and head size ``a``, the rows of the fused matrix are ``[Q (n a), K (g a),
    V (g a)]`` when ``concatenated`` and ``n`` blocks of ``[q, k, v]`` (``a`` rows each) when
    ``interleaved``. ``transposed`` marks ``Conv1D`` weights, stored (in, out).
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

    ``kind`` is ``rms`` (x/rms * w), ``rms_plus_one`` (x/rms * (1 + w)) or ``layer`` (mean removed,
    * w). ``tensor`` is empty where the norm has no gain in the file.
    """

    tensor: str
    kind: NormKind


@dataclass(frozen=True, slots=True)
class Keys:
    """Configuration keys of the sizes, tried in order."""

    width: tuple[str, ...] = ("hidden_size",)
    depth: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    head_dim: tuple[str, ...] = ("head_dim",)


@dataclass(frozen=True, slots=True)
class Family:
    """One row: how a ``model_type`` names, lays out and normalises its attention.

    ``block`` is the path of one layer with ``{layer}`` for its number, below whatever prefix the
    file adds. Where one numbered layer holds several blocks, ``{inner}`` numbers them and the
    configuration key ``inner_count`` says how many. ``feeding`` is the norm in front of attention
    and ``branch`` the gain on its output; ``feeding_if`` names a configuration flag, and its
    default, without which the norm comes after and cannot be folded. ``defaults`` are the class
    defaults of ``transformers`` for absent or null keys; an absent head size is width / heads.
    """

    model_type: str
    block: str
    projections: tuple[Projections, ...]
    stack: str = "decoder"
    feeding: Norm | None = None
    branch: Norm | None = None
    feeding_if: tuple[str, bool] | None = None
    keys: Keys = Keys()
    defaults: Mapping[str, int] = field(default_factory=dict)
    inner_count: str = ""

    def can_fold(self, config: Mapping[str, Any]) -> bool:
        """Whether a norm in front of attention or on its output exists to be folded."""
        return self.feeding_norm(config) is not None or self.branch is not None

    def feeding_norm(self, config: Mapping[str, Any]) -> Norm | None:
        """The norm in front of attention under this configuration."""
        if self.feeding_if is not None and not config.get(self.feeding_if[0], self.feeding_if[1]):
            return None
        return self.feeding


LLAMA = Family(
    "llama",
    "layers.{layer}.",
    (Projections("self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    feeding=Norm("input_layernorm", "rms"),
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
)
MISTRAL = replace(LLAMA, model_type="mistral", defaults={**LLAMA.defaults, "num_key_value_heads": 8})
QWEN2 = replace(LLAMA, model_type="qwen2", defaults={**LLAMA.defaults, "num_key_value_heads": 32})
GEMMA = replace(
    LLAMA,
    model_type="gemma",
    feeding=Norm("input_layernorm", "rms_plus_one"),
    defaults={
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    branch=Norm("post_attention_layernorm", "rms_plus_one"),
    defaults={
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
)
BERT = Family(
    "bert",
    "encoder.layer.{layer}.",
    (Projections("attention.output.dense", "attention.self.query", "attention.self.key", "attention.self.value"),),
    stack="encoder",
    defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        replace(MISTRAL, model_type="mixtral"),
        QWEN2,
        replace(QWEN2, model_type="qwen3", defaults={**QWEN2.defaults, "head_dim": 128}),
        GEMMA,
        GEMMA2,
        replace(GEMMA2, model_type="gemma3_text"),
        replace(LLAMA, model_type="olmo", feeding=Norm("", "layer")),
        replace(LLAMA, model_type="olmo2", feeding=None, branch=Norm("post_attention_layernorm", "rms")),
        replace(
            LLAMA,
            model_type="phi3",
            projections=(Projections("self_attn.o_proj", fused="self_attn.qkv_proj", layout="concatenated"),),
            defaults={"hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32},
        ),
        replace(
            LLAMA,
            model_type="smollm3",
            defaults={
                "hidden_size": 2048,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
            },
        ),
        Family(
            "gpt_neox",
            "layers.{layer}.",
            (Projections("attention.dense", fused="attention.query_key_value", layout="interleaved"),),
            feeding=Norm("input_layernorm", "layer"),
            defaults={"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64},
        ),
        Family(
            "gpt2",
            "h.{layer}.",
            (Projections("attn.c_proj", fused="attn.c_attn", layout="concatenated", transposed=True),),
            feeding=Norm("ln_1", "layer"),
            keys=Keys(width=("n_embd",), depth=("n_layer",), heads=("n_head",)),
            defaults={"n_embd": 768, "n_layer": 12, "n_head": 12},
        ),
        Family(
            "opt",
            "decoder.layers.{layer}.",
            (Projections("self_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
            feeding=Norm("self_attn_layer_norm", "layer"),
            feeding_if=("do_layer_norm_before", True),
            defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
        ),
        BERT,
        replace(BERT, model_type="roberta"),
        replace(BERT, model_type="xlm-roberta"),
        replace(BERT, model_type="camembert"),
        replace(
            BERT,
            model_type="albert",
            block="albert_layer_groups.{layer}.albert_layers.{inner}.",
            projections=(Projections("attention.dense", "attention.query", "attention.key", "attention.value"),),
            keys=Keys(depth=("num_hidden_groups",)),
            defaults={"hidden_size": 4096, "num_hidden_groups": 1, "num_attention_heads": 64, "inner_group_num": 1},
            inner_count="inner_group_num",
        ),
        replace(
            BERT,
            model_type="vit",
            projections=(
                Projections(
                    "attention.output.dense",
                    "attention.attention.query",
                    "attention.attention.key",
                    "attention.attention.value",
                ),
            ),
            feeding=Norm("layernorm_before", "layer"),
        ),
    )
}
"""Families by ``model_type`` of ``config.json``."""

_GGUF = Family(
    "llama",
    "blk.{layer}.",
    (
        Projections("attn_output", "attn_q", "attn_k", "attn_v"),
        Projections("attn_output", fused="attn_qkv", layout="concatenated"),
    ),
    feeding=Norm("attn_norm", "rms"),
    keys=Keys(
        width=("embedding_length",),
        depth=("block_count",),
        heads=("attention.head_count",),
        kv_heads=("attention.head_count_kv",),
        head_dim=("attention.value_length", "attention.key_length"),
    ),
)
_GGUF_LAYER = replace(_GGUF, feeding=Norm("attn_norm", "layer"))
_GGUF_SANDWICH = replace(_GGUF, branch=Norm("post_attention_norm", "rms"))

GGUF_FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _GGUF,
        replace(_GGUF, model_type="qwen2"),
        replace(_GGUF, model_type="qwen3"),
        replace(_GGUF, model_type="gemma"),
        replace(_GGUF_SANDWICH, model_type="gemma2"),
        replace(_GGUF_SANDWICH, model_type="gemma3"),
        replace(_GGUF, model_type="olmo", feeding=Norm("", "layer")),
        replace(_GGUF_SANDWICH, model_type="olmo2", feeding=None),
        replace(_GGUF, model_type="phi3"),
        replace(_GGUF, model_type="smollm3"),
        replace(_GGUF_LAYER, model_type="gptneox"),
        replace(_GGUF_LAYER, model_type="gpt2"),
        replace(_GGUF, model_type="bert", stack="encoder", feeding=None),
    )
}
"""Families by ``general.architecture`` of a GGUF file. Conversion to GGUF unifies the names, undoes
every per-head interleave and ``Conv1D`` transpose, and adds the one to Gemma's gains. For
architectures converted like llama it also permutes the rows of q and k within each head, both
alike, which no stored number depends on."""
