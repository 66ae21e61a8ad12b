"""Models that see, hear or compare to build and probe: every attention stack of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

TEXT_WIDTH, TEXT_HEADS = 32, 4
TOWER_WIDTH, TOWER_HEADS = 24, 3


@dataclass(frozen=True)
class Tower:
    """One stack of a running model: the path of its layers, and two modules of a layer by path.

    ``width`` is what attention reads and writes, ``source_width`` what its keys and values read
    where that is another stream. ``flat`` modules take a batch as one row of tokens with the
    lengths beside it, and ``complex_rotation`` takes rotary positions as complex numbers. ``branch`` is
    the norm on the branch's output, by path. ``layers`` are the
    numbers of the layers that have this attention. ``post_norm`` says that attention reads the
    residual stream through no norm, and ``second`` that another attention of the layer comes before.
    """

    path: str
    attention: str = "self_attn"
    projection: str = "self_attn.out_proj"
    width: int = TOWER_WIDTH
    heads: int = TOWER_HEADS
    source_width: int = 0
    flat: bool = False
    complex_rotation: bool = False
    branch: str = ""
    layers: tuple[int, ...] = (0, 1)
    post_norm: bool = False
    second: bool = False


@dataclass(frozen=True)
class TowerVariant:
    """A model to build by class and configuration, and its stacks by name."""

    model_class: str
    model_type: str
    config: Mapping[str, Any]
    stacks: Mapping[str, Tower]


TEXT = {
    "vocab_size": 131,
    "hidden_size": TEXT_WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": TEXT_HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {
    "hidden_size": TOWER_WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": TOWER_HEADS,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_IMAGE = {"depth": 2, "num_heads": TOWER_HEADS, "patch_size": 8}
WINDOWS = {"intermediate_size": 40, "out_hidden_size": TEXT_WIDTH, "window_size": 32, "fullatt_block_indexes": [1]}
SOUND = {
    "d_model": TOWER_WIDTH,
    "encoder_layers": 2,
    "encoder_attention_heads": TOWER_HEADS,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 8,
    "max_source_positions": 10,
}
QFORMER = {
    "hidden_size": TEXT_WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": TEXT_HEADS,
    "intermediate_size": 48,
    "encoder_hidden_size": TOWER_WIDTH,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
LONG_MROPE = {**MROPE, "mrope_section": [2, 2, 2]}


def text(model_type: str, **config: Any) -> dict[str, Any]:
    """A text configuration with half as many values as heads."""
    return {"model_type": model_type, **TEXT, "num_key_value_heads": 2, **config}


def image(model_type: str, **config: Any) -> dict[str, Any]:
    """A vision configuration."""
    return {"model_type": model_type, **IMAGE, **config}


CLIP_VISION = Tower("vision_model.encoder.layers")
CLIP_TEXT = Tower("text_model.encoder.layers", width=TEXT_WIDTH, heads=TEXT_HEADS)
DECODER = Tower("model.language_model.layers", projection="self_attn.o_proj", width=TEXT_WIDTH, heads=TEXT_HEADS)
VISION_TOWER = Tower("model.vision_tower.encoder.layers")
AUDIO_TOWER = Tower("model.audio_tower.layers")
VISUAL = Tower("model.visual.blocks", attention="attn", projection="attn.proj", flat=True)
IMAGE_TEXT = "AutoModelForImageTextToText"
BLIP2_STACKS = {
    "decoder": replace(DECODER, path="language_model.model.decoder.layers", projection="self_attn.out_proj"),
    "vision": replace(CLIP_VISION, projection="self_attn.projection"),
    "qformer": Tower(
        "qformer.encoder.layer",
        attention="attention",
        projection="attention.output.dense",
        width=TEXT_WIDTH,
        heads=TEXT_HEADS,
        post_norm=True,
    ),
    "qformer_cross": Tower(
        "qformer.encoder.layer",
        attention="crossattention",
        projection="crossattention.output.dense",
        width=TEXT_WIDTH,
        heads=TEXT_HEADS,
        source_width=TOWER_WIDTH,
        layers=(0,),
        post_norm=True,
        second=True,
    ),
}
BLIP2_TEXT = {"model_type": "opt", **TEXT, "ffn_dim": 48, "word_embed_proj_dim": TEXT_WIDTH}


def clip_like(model_type: str, **vision: Any) -> TowerVariant:
    """A model that compares texts and images."""
    parts = {"text_config": TEXT, "vision_config": {**IMAGE, **vision}}
    return TowerVariant("AutoModel", model_type, parts, {"text": CLIP_TEXT, "vision": CLIP_VISION})


def seeing(
    model_type: str,
    text_config: Mapping[str, Any],
    vision_config: Mapping[str, Any],
    vision: Tower = VISION_TOWER,
    decoder: Tower = DECODER,
    **config: Any,
) -> TowerVariant:
    """A language model that sees."""
    parts = {"text_config": text_config, "vision_config": vision_config, **config}
    return TowerVariant(IMAGE_TEXT, model_type, parts, {"decoder": decoder, "vision": vision})


TOWER_VARIANTS = {
    "clip": clip_like("clip"),
    "siglip": clip_like("siglip"),
    "siglip2": clip_like("siglip2", num_patches=4),
    "clip-text": TowerVariant(
        "CLIPTextModel", "clip_text_model", TEXT, {"text": replace(CLIP_TEXT, path="encoder.layers")}
    ),
    "clip-vision": TowerVariant(
        "CLIPVisionModel", "clip_vision_model", IMAGE, {"vision": replace(CLIP_VISION, path="encoder.layers")}
    ),
    "siglip-text": TowerVariant(
        "SiglipTextModel", "siglip_text_model", TEXT, {"text": replace(CLIP_TEXT, path="encoder.layers")}
    ),
    "siglip2-text": TowerVariant(
        "Siglip2TextModel", "siglip2_text_model", TEXT, {"text": replace(CLIP_TEXT, path="encoder.layers")}
    ),
    "siglip-vision": TowerVariant(
        "SiglipVisionModel", "siglip_vision_model", IMAGE, {"vision": replace(CLIP_VISION, path="encoder.layers")}
    ),
    "llava": seeing("llava", text("llama"), image("clip_vision_model"), image_token_index=5),
    "paligemma": seeing("paligemma", text("gemma", head_dim=12), image("siglip_vision_model"), projection_dim=32),
    "gemma3": seeing(
        "gemma3",
        text("gemma3_text", head_dim=12),
        image("siglip_vision_model"),
        decoder=replace(DECODER, branch="post_attention_layernorm"),
        mm_tokens_per_image=4,
    ),
    "mistral3": seeing(
        "mistral3",
        text("mistral", head_dim=12),
        image("pixtral", head_dim=8),
        Tower("model.vision_tower.transformer.layers", attention="attention", projection="attention.o_proj"),
        image_token_index=5,
    ),
    "internvl": seeing(
        "internvl",
        text("qwen2"),
        image("internvl_vision", image_size=[16, 16], patch_size=[8, 8], use_qk_norm=True),
        Tower("model.vision_tower.encoder.layer", attention="attention", projection="attention.projection_layer"),
    ),
    "idefics3": seeing(
        "idefics3",
        text("llama"),
        image("idefics3_vision"),
        Tower("model.vision_model.encoder.layers"),
        replace(DECODER, path="model.text_model.layers"),
        image_token_id=5,
    ),
    "smolvlm": seeing(
        "smolvlm",
        text("llama"),
        image("smolvlm_vision"),
        Tower("model.vision_model.encoder.layers"),
        replace(DECODER, path="model.text_model.layers"),
        image_token_id=5,
    ),
    "lfm2-vl": seeing(
        "lfm2_vl",
        text("lfm2", layer_types=["full_attention", "full_attention"]),
        image("siglip2_vision_model", num_patches=4),
        replace(VISION_TOWER),
        replace(DECODER, projection="self_attn.out_proj"),
    ),
    "qwen2-vl": seeing(
        "qwen2_vl",
        text("qwen2_vl_text", rope_parameters=MROPE),
        {"model_type": "qwen2_vl_vision", **QWEN_IMAGE, "embed_dim": TOWER_WIDTH, "hidden_size": TEXT_WIDTH},
        VISUAL,
    ),
    "qwen2.5-vl": seeing(
        "qwen2_5_vl",
        text("qwen2_5_vl_text", rope_parameters=MROPE),
        {"model_type": "qwen2_5_vl_vision", **QWEN_IMAGE, "hidden_size": TOWER_WIDTH, **WINDOWS},
        VISUAL,
    ),
    "qwen3-vl": seeing(
        "qwen3_vl",
        text("qwen3_vl_text", head_dim=12, rope_parameters=LONG_MROPE),
        {
            "model_type": "qwen3_vl_vision",
            **QWEN_IMAGE,
            "hidden_size": TOWER_WIDTH,
            "intermediate_size": 40,
            "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        VISUAL,
    ),
    "qwen3-vl-moe": seeing(
        "qwen3_vl_moe",
        text(
            "qwen3_vl_moe_text",
            head_dim=12,
            rope_parameters=LONG_MROPE,
            moe_intermediate_size=16,
            num_experts=2,
            num_experts_per_tok=1,
        ),
        {
            "model_type": "qwen3_vl_moe_vision",
            **QWEN_IMAGE,
            "hidden_size": TOWER_WIDTH,
            "intermediate_size": 40,
            "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        VISUAL,
    ),
    "qwen2-audio": TowerVariant(
        "Qwen2AudioForConditionalGeneration",
        "qwen2_audio",
        {"text_config": text("qwen2"), "audio_config": {"model_type": "qwen2_audio_encoder", **SOUND}},
        {"decoder": DECODER, "audio": AUDIO_TOWER},
    ),
    "voxtral": TowerVariant(
        "VoxtralForConditionalGeneration",
        "voxtral",
        {
            "text_config": text("llama", head_dim=8),
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": TOWER_WIDTH,
                "num_hidden_layers": 2,
                "num_attention_heads": TOWER_HEADS,
                "intermediate_size": 96,
                "num_mel_bins": 8,
                "max_source_positions": 10,
            },
        },
        {"decoder": DECODER, "audio": AUDIO_TOWER},
    ),
    "qwen2.5-omni": TowerVariant(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen2_5_omni_thinker",
        {
            "text_config": text("qwen2_5_omni_text", rope_parameters=MROPE),
            "vision_config": {**QWEN_IMAGE, "hidden_size": TOWER_WIDTH, **WINDOWS},
            "audio_config": {**SOUND, "output_dim": TEXT_WIDTH, "n_window": 4},
        },
        {"decoder": DECODER, "vision": VISUAL, "audio": replace(AUDIO_TOWER, flat=True)},
    ),
    "blip-2": TowerVariant(
        "Blip2ForConditionalGeneration",
        "blip-2",
        {
            "text_config": BLIP2_TEXT,
            "vision_config": IMAGE,
            "qformer_config": QFORMER,
            "num_query_tokens": 4,
        },
        BLIP2_STACKS,
    ),
    "instructblip": TowerVariant(
        "InstructBlipForConditionalGeneration",
        "instructblip",
        {
            "text_config": BLIP2_TEXT,
            "vision_config": IMAGE,
            "qformer_config": QFORMER,
            "num_query_tokens": 4,
        },
        BLIP2_STACKS,
    ),
    "llama4": seeing(
        "llama4",
        text("llama4_text", head_dim=12, num_local_experts=2, intermediate_size_mlp=48, use_qk_norm=False),
        image(
            "llama4_vision_model",
            intermediate_size=96,
            vision_output_dim=TEXT_WIDTH,
            projector_input_dim=TEXT_WIDTH,
            projector_output_dim=TEXT_WIDTH,
            pixel_shuffle_ratio=0.5,
        ),
        Tower("vision_model.model.layers", projection="self_attn.o_proj"),
        replace(DECODER, path="language_model.model.layers", complex_rotation=True),
    ),
    "mllama": TowerVariant(
        "MllamaForConditionalGeneration",
        "mllama",
        {
            "text_config": text("mllama_text_model", num_hidden_layers=3, cross_attention_layers=[1]),
            "vision_config": {
                "hidden_size": TOWER_WIDTH,
                "num_hidden_layers": 2,
                "attention_heads": TOWER_HEADS,
                "num_global_layers": 1,
                "intermediate_size": 40,
                "image_size": 16,
                "patch_size": 8,
                "vision_output_dim": 2 * TOWER_WIDTH,
                "intermediate_layers_indices": [0],
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
        },
        {
            "decoder": replace(DECODER, layers=(0, 2)),
            "cross": replace(
                DECODER,
                attention="cross_attn",
                projection="cross_attn.o_proj",
                source_width=TEXT_WIDTH,
                layers=(1,),
            ),
            "vision": Tower("model.vision_model.transformer.layers", projection="self_attn.o_proj"),
            "vision_global": Tower(
                "model.vision_model.global_transformer.layers", projection="self_attn.o_proj", layers=(0,)
            ),
        },
    ),
}
