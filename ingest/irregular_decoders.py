"""Decoders whose layers differ from each other, or hold more than matrices between tokens and output."""

from __future__ import annotations

from dataclasses import replace

from ingest.decoders import LLAMA
from ingest.family import Family, Keys, Norm, Piece, Projections, sizes

GEMMA3N = replace(
    LLAMA,
    model_type="gemma3n_text",
    branch=Norm("post_attention_layernorm", "rms"),
    shared_layers="num_kv_shared_layers",
    pieces=(Piece("value_norm"),),
    defaults={**sizes(2048, 35, 8, 2, 256), "num_kv_shared_layers": 15},
)
GEMMA4 = replace(
    GEMMA3N,
    model_type="gemma4_text",
    by_layer_type={"full_attention": Keys(head_dim=("global_head_dim",))},
    defaults={**sizes(2304, 30, 8, 4, 256), "global_head_dim": 512, "attention_k_eq_v": False},
)
MIMO = replace(
    LLAMA,
    model_type="mimo_v2_flash",
    keys=Keys(value_dim=("v_head_dim",)),
    value_scale="attention_value_scale",
    pieces=(Piece("sinks", tensor="self_attn.attention_sink_bias"),),
    defaults={**sizes(4096, 48, 64, 4, 192), "v_head_dim": 128, "attention_value_scale": 0.707},
)
MIMO_SLIDING = Keys(
    heads=("swa_num_attention_heads", "num_attention_heads"),
    kv_heads=("swa_num_key_value_heads",),
    head_dim=("swa_head_dim", "head_dim"),
    value_dim=("swa_v_head_dim", "v_head_dim"),
)
MIMO_DOUBLED = replace(MIMO.keys, kv_factor=2)

IRREGULAR: tuple[Family, ...] = (
    GEMMA3N,
    replace(GEMMA4, when={"attention_k_eq_v": False}),
    replace(
        GEMMA4,
        when={"attention_k_eq_v": True},
        projections=(
            Projections(
                "self_attn.o_proj",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.k_proj",
                layer_types=("full_attention",),
            ),
            replace(LLAMA.projections[0], layer_types=("sliding_attention",)),
        ),
        by_layer_type={
            "full_attention": Keys(
                head_dim=("global_head_dim",), kv_heads=("num_global_key_value_heads", "num_key_value_heads")
            )
        },
    ),
    replace(
        MIMO,
        when={"swa_num_key_value_heads": None},
        by_layer_type={"sliding_attention": MIMO_DOUBLED},
    ),
    replace(MIMO, by_layer_type={"sliding_attention": MIMO_SLIDING, "1": MIMO_SLIDING}),
    replace(
        LLAMA,
        model_type="gpt_oss",
        pieces=(Piece("sinks", tensor="self_attn.sinks"),),
        defaults=sizes(2880, 36, 64, 8, 64),
    ),
    replace(
        LLAMA,
        model_type="bitnet",
        pieces=(Piece("sub_norm", tensor="self_attn.attn_sub_norm.weight"),),
        defaults=sizes(2560, 30, 20, 5),
    ),
    replace(
        LLAMA,
        model_type="afmoe",
        branch=Norm("post_attention_layernorm", "rms"),
        pieces=(Piece("output_gate", tensor="self_attn.gate_proj.weight"),),
        defaults=sizes(2048, 32, 16, None, 128),
    ),
    replace(
        LLAMA,
        model_type="modernbert-decoder",
        projections=(Projections("attn.Wo", "attn.q_proj", "attn.k_proj", "attn.v_proj"),),
        feeding=Norm("attn_norm", "layer", first_layer=1),
        defaults=sizes(768, 22, 12),
    ),
)
