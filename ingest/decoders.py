"""Decoders, by ``model_type``. Names and norms were checked against the modules of transformers 5.24."""

from __future__ import annotations

from dataclasses import replace

from ingest.family import Family, Keys, Norm, Projections

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
OPT = Family(
    "opt",
    "decoder.layers.{layer}.",
    (Projections("self_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    feeding=Norm("self_attn_layer_norm", "layer"),
    when={"do_layer_norm_before": True},
    defaults={
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "do_layer_norm_before": True,
    },
)

DECODERS: tuple[Family, ...] = (
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
    OPT,
    replace(OPT, when={"do_layer_norm_before": False}, feeding=None),
)
