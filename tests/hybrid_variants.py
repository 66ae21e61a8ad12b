"""Decoders to build and probe where only some layers have softmax attention."""

from __future__ import annotations

from typing import Any

from tests.variant import WIDTH, Variant

KV_HEADS = {"num_key_value_heads": 2}
GROUPED = {**KV_HEADS, "head_dim": 24}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    **LINEAR_FIRST,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ROUTED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
OPEN_GATE: dict[str, Any] = {"neutralised": ("output_gate",)}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
ONE_OF_TWO: dict[str, Any] = {"n_blocks": 1, "skipped": 1}
ONE_OF_THREE: dict[str, Any] = {"n_blocks": 1, "skipped": 2}

HYBRID_VARIANTS = {
    "jamba": Variant(
        "jamba",
        {
            **KV_HEADS,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        **ONE_OF_TWO,
    ),
    "bamba": Variant("bamba", {**KV_HEADS, **MAMBA, "attn_layer_indices": [1]}, **ONE_OF_TWO),
    "falcon_h1": Variant(
        "falcon_h1",
        {
            **GROUPED,
            **MAMBA,
            "mamba_d_ssm": 2 * WIDTH,
            "key_multiplier": 0.5,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.9,
            "ssm_out_multiplier": 0.0,
        },
    ),
    "minimax": Variant("minimax", {**GROUPED, **EXPERTS, **LINEAR_FIRST, "full_attn_beta_factor": 0.7}, **ONE_OF_TWO),
    "qwen3_next": Variant("qwen3_next", {**GROUPED, **DELTA, **ROUTED}, **ONE_OF_TWO, **OPEN_GATE),
    "qwen3_5_text": Variant("qwen3_5_text", {**GROUPED, **DELTA}, **ONE_OF_TWO, **OPEN_GATE),
    "qwen3_5_moe_text": Variant("qwen3_5_moe_text", {**GROUPED, **DELTA, **ROUTED}, **ONE_OF_TWO, **OPEN_GATE),
    "granitemoehybrid": Variant(
        "granitemoehybrid",
        {
            **KV_HEADS,
            **MAMBA,
            **EXPERTS,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 32,
            "attention_multiplier": 0.07,
            "residual_multiplier": 0.3,
        },
        **ONE_OF_TWO,
    ),
    "lfm2": Variant(
        "lfm2",
        {**KV_HEADS, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        projection="self_attn.out_proj",
        **ONE_OF_TWO,
    ),
    "nemotron_h": Variant(
        "nemotron_h",
        {
            **GROUPED,
            "hybrid_override_pattern": "M*-",
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
        },
        attention="mixer",
        projection="mixer.o_proj",
        saved_prefix="backbone.",
        **ONE_OF_THREE,
    ),
    "recurrent_gemma": Variant(
        "recurrent_gemma",
        {
            **KV_HEADS,
            "num_hidden_layers": 3,
            "lru_width": WIDTH,
            "block_types": ["recurrent", "attention", "recurrent"],
        },
        attention="temporal_block",
        projection="temporal_block.o_proj",
        **ONE_OF_THREE,
    ),
    "olmo_hybrid": Variant(
        "olmo_hybrid",
        {
            **KV_HEADS,
            **DELTA,
            "linear_num_value_heads": 2,
        },
        **ONE_OF_TWO,
    ),
}
