"""Decoders with multi-head latent attention to build and probe."""

from __future__ import annotations

from typing import Any

from tests.variant import N_LAYERS, Variant

LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
DEEPSEEK_V2 = {**LATENT, **EXPERTS, "topk_method": "greedy"}
GAIN_ONLY: dict[str, Any] = {"neutralised": ("latent_norm",)}

LATENT_VARIANTS = {
    "deepseek_v2": Variant("deepseek_v2", DEEPSEEK_V2, **GAIN_ONLY),
    "deepseek_v2-full-query": Variant("deepseek_v2", {**DEEPSEEK_V2, "q_lora_rank": None}, **GAIN_ONLY),
    "deepseek_v3": Variant("deepseek_v3", {**LATENT, **EXPERTS}, **GAIN_ONLY),
    "deepseek_v3-biases": Variant("deepseek_v3", {**LATENT, **EXPERTS, "attention_bias": True}, **GAIN_ONLY),
    "deepseek_v32": Variant(
        "deepseek_v32",
        {**LATENT, **EXPERTS, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 256},
        **GAIN_ONLY,
    ),
    "glm4_moe_lite": Variant("glm4_moe_lite", {**LATENT, **EXPERTS}, **GAIN_ONLY),
    "youtu": Variant("youtu", LATENT, **GAIN_ONLY),
    "minicpm3": Variant("minicpm3", LATENT, **GAIN_ONLY),
    "longcat_flash": Variant(
        "longcat_flash",
        {
            **LATENT,
            "num_hidden_layers": 2 * N_LAYERS,
            "num_layers": N_LAYERS,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "head_dim": 8,
        },
        attention="self_attn.{inner}",
        projection="self_attn.{inner}.o_proj",
        inner_count=2,
        n_blocks=2 * N_LAYERS,
        **GAIN_ONLY,
    ),
}
