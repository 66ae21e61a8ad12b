"""Stacks of models that see, hear or compare, by ``model_type``, checked against the modules of transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ingest.decoders import LLAMA
from ingest.encoders import BASE
from ingest.family import Family, Keys, Multiplier, Norm, Projections, sizes

NO_KV_HEADS = Keys(kv_heads=())
QWEN_VISION_KEYS = Keys(depth=("depth",), heads=("num_heads",), kv_heads=())
SOUND_KEYS = Keys(
    width=("d_model", "hidden_size"),
    depth=("encoder_layers", "num_hidden_layers"),
    heads=("encoder_attention_heads", "num_attention_heads"),
    kv_heads=(),
)
OWN_OUTPUT = (Projections("self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),)

CLIP_VISION = Family(
    "clip_vision_model",
    "encoder.layers.{layer}.",
    (Projections("self_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    stack="vision",
    feeding=Norm("layer_norm1", "layer"),
    keys=NO_KV_HEADS,
    defaults=BASE,
)
CLIP_TEXT = replace(CLIP_VISION, model_type="clip_text_model", stack="text", defaults=sizes(512, 12, 8))
SIGLIP_TEXT = replace(CLIP_TEXT, model_type="siglip_text_model", defaults=BASE)

QWEN2_VISION = Family(
    "qwen2_vl_vision",
    "blocks.{layer}.",
    (Projections("attn.proj", fused="attn.qkv", layout="concatenated"),),
    stack="vision",
    feeding=Norm("norm1", "layer"),
    keys=replace(QWEN_VISION_KEYS, width=("embed_dim",)),
    defaults={"embed_dim": 1280, "depth": 32, "num_heads": 16},
)
QWEN2_5_VISION = replace(
    QWEN2_VISION,
    model_type="qwen2_5_vl_vision",
    feeding=Norm("norm1", "rms"),
    keys=QWEN_VISION_KEYS,
    defaults={"hidden_size": 3584, "depth": 32, "num_heads": 16},
)
QWEN3_VISION = replace(
    QWEN2_VISION,
    model_type="qwen3_vl_vision",
    keys=QWEN_VISION_KEYS,
    defaults={"hidden_size": 1152, "depth": 27, "num_heads": 16},
)

QWEN2_SOUND = Family(
    "qwen2_audio_encoder",
    "layers.{layer}.",
    CLIP_VISION.projections,
    stack="audio",
    feeding=Norm("self_attn_layer_norm", "layer"),
    keys=SOUND_KEYS,
    defaults={"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
)

LLAMA4_VISION = replace(
    CLIP_VISION,
    model_type="llama4_vision_model",
    block="layers.{layer}.",
    projections=OWN_OUTPUT,
    feeding=Norm("input_layernorm", "layer"),
    defaults=sizes(768, 34, 16),
)
MLLAMA_VISION = replace(
    LLAMA4_VISION,
    model_type="mllama_vision_model",
    block="transformer.layers.{layer}.",
    keys=Keys(heads=("attention_heads",), kv_heads=()),
    defaults={"hidden_size": 1280, "num_hidden_layers": 32, "attention_heads": 16, "num_global_layers": 8},
)
MLLAMA_TEXT = replace(LLAMA, model_type="mllama_text_model", defaults=sizes(4096, 40, 32, 8))

BLIP2_VISION = replace(
    CLIP_VISION,
    model_type="blip_2_vision_model",
    projections=(Projections("self_attn.projection", fused="self_attn.qkv", layout="concatenated"),),
    defaults=sizes(1408, 39, 16),
)
BLIP2_QFORMER = Family(
    "blip_2_qformer",
    "encoder.layer.{layer}.",
    (
        Projections(
            "attention.output.dense",
            "attention.attention.query",
            "attention.attention.key",
            "attention.attention.value",
        ),
    ),
    stack="qformer",
    keys=NO_KV_HEADS,
    defaults={**BASE, "encoder_hidden_size": 1408},
)
BLIP2_QFORMER_CROSS = replace(
    BLIP2_QFORMER,
    projections=(
        Projections(
            "crossattention.output.dense",
            "crossattention.attention.query",
            "crossattention.attention.key",
            "crossattention.attention.value",
        ),
    ),
    stack="qformer_cross",
    two_spaces=True,
    keys=Keys(kv_heads=(), source_width=("encoder_hidden_size",)),
)

TOWERS: tuple[Family, ...] = (
    CLIP_TEXT,
    CLIP_VISION,
    replace(CLIP_TEXT, model_type="clip", part=("text_config_dict", "text_config")),
    replace(CLIP_VISION, model_type="clip", part=("vision_config_dict", "vision_config")),
    SIGLIP_TEXT,
    replace(SIGLIP_TEXT, model_type="siglip2_text_model"),
    *(replace(SIGLIP_TEXT, model_type=name, part=("text_config",)) for name in ("siglip", "siglip2")),
    *(replace(CLIP_VISION, model_type=name, part=("vision_config",)) for name in ("siglip", "siglip2")),
    *(replace(CLIP_VISION, model_type=name) for name in ("siglip_vision_model", "siglip2_vision_model")),
    *(
        replace(CLIP_VISION, model_type=name, defaults=sizes(1152, 12, 16))
        for name in ("idefics3_vision", "smolvlm_vision")
    ),
    replace(
        CLIP_VISION,
        model_type="pixtral",
        block="transformer.layers.{layer}.",
        projections=(Projections("attention.o_proj", "attention.q_proj", "attention.k_proj", "attention.v_proj"),),
        feeding=Norm("attention_norm", "rms"),
        defaults=sizes(1024, 24, 16),
    ),
    replace(
        CLIP_VISION,
        model_type="internvl_vision",
        block="encoder.layer.{layer}.",
        projections=(
            Projections("attention.projection_layer", "attention.q_proj", "attention.k_proj", "attention.v_proj"),
        ),
        feeding=Norm("layernorm_before", "layer"),
        multiplier=Multiplier(gain="lambda_1"),
        defaults=sizes(1024, 24, 16),
    ),
    QWEN2_VISION,
    QWEN2_5_VISION,
    QWEN3_VISION,
    replace(QWEN3_VISION, model_type="qwen3_vl_moe_vision"),
    replace(
        QWEN2_5_VISION,
        model_type="qwen2_5_omni_vision_encoder",
        projections=(Projections("attn.proj", "attn.q", "attn.k", "attn.v"),),
    ),
    LLAMA4_VISION,
    MLLAMA_VISION,
    replace(
        MLLAMA_VISION,
        stack="vision_global",
        block="global_transformer.layers.{layer}.",
        keys=replace(MLLAMA_VISION.keys, depth=("num_global_layers",)),
        multiplier=Multiplier(gain="gate_attn", gated=True),
    ),
    BLIP2_VISION,
    BLIP2_QFORMER,
    BLIP2_QFORMER_CROSS,
    replace(BLIP2_VISION, model_type="instructblip_vision_model"),
    replace(BLIP2_QFORMER, model_type="instructblip_qformer"),
    replace(BLIP2_QFORMER_CROSS, model_type="instructblip_qformer"),
    QWEN2_SOUND,
    replace(QWEN2_SOUND, model_type="qwen2_5_omni_audio_encoder"),
    replace(
        QWEN2_SOUND,
        model_type="voxtral_encoder",
        defaults={"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20},
    ),
    replace(LLAMA, model_type="qwen2_vl_text", defaults=sizes(8192, 80, 64, 8)),
    replace(LLAMA, model_type="qwen2_5_vl_text", defaults=sizes(8192, 80, 64, 8)),
    replace(LLAMA, model_type="qwen2_5_omni_text", defaults=sizes(3584, 28, 28, 4)),
    replace(LLAMA, model_type="qwen3_vl_text", defaults=sizes(4096, 32, 32, 32, 128)),
    replace(LLAMA, model_type="qwen3_vl_moe_text", defaults=sizes(2048, 24, 16, 16, 128)),
    MLLAMA_TEXT,
    replace(
        MLLAMA_TEXT,
        stack="cross",
        projections=(Projections("cross_attn.o_proj", "cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj"),),
        two_spaces=True,
        multiplier=Multiplier(gain="cross_attn_attn_gate", gated=True),
    ),
)

_CLIP_BESIDE_LLAMA = {"text_config": "llama", "vision_config": "clip_vision_model"}
_OMNI = {
    "text_config": "qwen2_5_omni_text",
    "vision_config": "qwen2_5_omni_vision_encoder",
    "audio_config": "qwen2_5_omni_audio_encoder",
}

WRAPPED: Mapping[str, Mapping[str, str]] = {
    "llava": _CLIP_BESIDE_LLAMA,
    "llava_next": _CLIP_BESIDE_LLAMA,
    "llava_next_video": _CLIP_BESIDE_LLAMA,
    "vipllava": _CLIP_BESIDE_LLAMA,
    "llava_onevision": {"text_config": "qwen2", "vision_config": "siglip_vision_model"},
    "paligemma": {"text_config": "gemma", "vision_config": "siglip_vision_model"},
    "gemma3": {"text_config": "gemma3_text", "vision_config": "siglip_vision_model"},
    "shieldgemma2": {"text_config": "gemma3_text", "vision_config": "siglip_vision_model"},
    "aya_vision": {"text_config": "cohere2", "vision_config": "siglip_vision_model"},
    "cohere2_vision": {"text_config": "cohere2", "vision_config": "siglip_vision_model"},
    "lfm2_vl": {"text_config": "lfm2", "vision_config": "siglip2_vision_model"},
    "mistral3": {"text_config": "mistral", "vision_config": "pixtral"},
    "internvl": {"text_config": "qwen2", "vision_config": "internvl_vision"},
    "idefics3": {"text_config": "llama", "vision_config": "idefics3_vision"},
    "smolvlm": {"text_config": "llama", "vision_config": "smolvlm_vision"},
    "qwen2_vl": {"text_config": "qwen2_vl_text", "vision_config": "qwen2_vl_vision"},
    "qwen2_5_vl": {"text_config": "qwen2_5_vl_text", "vision_config": "qwen2_5_vl_vision"},
    "qwen3_vl": {"text_config": "qwen3_vl_text", "vision_config": "qwen3_vl_vision"},
    "qwen3_vl_moe": {"text_config": "qwen3_vl_moe_text", "vision_config": "qwen3_vl_moe_vision"},
    "llama4": {"text_config": "llama4_text", "vision_config": "llama4_vision_model"},
    "mllama": {"text_config": "mllama_text_model", "vision_config": "mllama_vision_model"},
    "blip-2": {
        "text_config": "opt",
        "vision_config": "blip_2_vision_model",
        "qformer_config": "blip_2_qformer",
    },
    "instructblip": {
        "text_config": "opt",
        "vision_config": "instructblip_vision_model",
        "qformer_config": "instructblip_qformer",
    },
    "qwen2_audio": {"text_config": "qwen2", "audio_config": "qwen2_audio_encoder"},
    "voxtral": {"text_config": "llama", "audio_config": "voxtral_encoder"},
    "qwen2_5_omni": {"thinker_config": "qwen2_5_omni_thinker"},
    "qwen2_5_omni_thinker": _OMNI,
}
"""What a multimodal model's class assumes of nested configurations that do not name their ``model_type``."""
