"""Decoders to build and probe whose layers differ, or hold more than matrices."""

from __future__ import annotations

from typing import Any

from tests.variant import Variant

KV_HEADS = {"num_key_value_heads": 2}
GROUPED = {**KV_HEADS, "head_dim": 24}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
VALUE_NORM: dict[str, Any] = {"neutralised": ("value_norm",)}
GEMMA3N = {
    **GROUPED,
    **ALTERNATING,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 131,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
GEMMA4 = {
    **GROUPED,
    **ALTERNATING,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 131,
    "global_head_dim": 32,
}

IRREGULAR_VARIANTS = {
    "gemma3n_text": Variant(
        "gemma3n_text",
        {**GEMMA3N, "num_kv_shared_layers": 2},
        n_blocks=2,
        skipped=2,
        borrowing=2,
        **VALUE_NORM,
    ),
    "gemma4_text": Variant("gemma4_text", GEMMA4, n_blocks=4, **VALUE_NORM),
    "gemma4_text-shared-layers": Variant(
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
        n_blocks=2,
        skipped=2,
        borrowing=2,
        **VALUE_NORM,
    ),
    "gemma4_text-values-are-keys": Variant(
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        n_blocks=4,
        **VALUE_NORM,
    ),
    "mimo_v2_flash": Variant(
        "mimo_v2_flash",
        {
            **GROUPED,
            "v_head_dim": 20,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
        neutralised=("sinks",),
    ),
    "gpt_oss": Variant(
        "gpt_oss", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, neutralised=("sinks",)
    ),
    "bitnet": Variant("bitnet", KV_HEADS, neutralised=("sub_norm",)),
    "afmoe": Variant(
        "afmoe",
        {
            **GROUPED,
            **EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        neutralised=("output_gate",),
    ),
    "modernbert-decoder": Variant(
        "modernbert-decoder",
        {"local_attention": 512, "global_attn_every_n_layers": 2},
        attention="attn",
        projection="attn.Wo",
    ),
}
