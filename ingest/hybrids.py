"""Decoders where only some layers have softmax attention, by ``model_type``, as in transformers 5.24."""

from __future__ import annotations

from dataclasses import replace

from ingest.decoders import LLAMA, RESIDUAL_MULTIPLIER
from ingest.family import Family, Keys, Multiplier, Norm, Projections, sizes

JAMBA = replace(LLAMA, model_type="jamba", defaults=sizes(4096, 32, 32, 8))
QWEN3_NEXT = replace(
    LLAMA,
    model_type="qwen3_next",
    projections=(replace(LLAMA.projections[0], gated_query=True),),
    feeding=Norm("input_layernorm", "rms_plus_one"),
    defaults=sizes(2048, 48, 16, 2, 256),
)

HYBRIDS: tuple[Family, ...] = (
    JAMBA,
    replace(JAMBA, model_type="bamba"),
    replace(
        JAMBA,
        model_type="falcon_h1",
        multiplier=Multiplier(("attention_in_multiplier", "attention_out_multiplier")),
    ),
    replace(JAMBA, model_type="minimax", multiplier=Multiplier(("full_attn_beta_factor",))),
    replace(LLAMA, model_type="granitemoehybrid", multiplier=RESIDUAL_MULTIPLIER),
    QWEN3_NEXT,
    replace(QWEN3_NEXT, model_type="qwen3_5_text", defaults=sizes(4096, 32, 16, 4, 256)),
    replace(QWEN3_NEXT, model_type="qwen3_5_moe_text", defaults=sizes(2048, 40, 16, 2, 256)),
    replace(
        LLAMA,
        model_type="lfm2",
        projections=(Projections("self_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
        feeding=Norm("operator_norm", "rms"),
        defaults=sizes(2560, 32, 32, 8),
    ),
    replace(
        LLAMA,
        model_type="nemotron_h",
        projections=(Projections("mixer.o_proj", "mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),),
        feeding=Norm("norm", "rms"),
        keys=Keys(layer_list=("layers_block_type",)),
        defaults={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    replace(
        LLAMA,
        model_type="recurrent_gemma",
        projections=(
            Projections(
                "temporal_block.o_proj", "temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"
            ),
        ),
        feeding=Norm("temporal_pre_norm", "rms_plus_one"),
        defaults=sizes(2560, 26, 10),
    ),
    replace(
        LLAMA,
        model_type="olmo_hybrid",
        feeding=None,
        branch=Norm("feedforward_layer_norm", "rms", other_tensor="post_attention_layernorm"),
        defaults=sizes(3840, 32, 30),
    ),
)
