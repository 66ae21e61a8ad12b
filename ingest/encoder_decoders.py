"""Encoder-decoders, by ``model_type``: three stacks each, checked against the modules of transformers 5.24.

Cross-attention reads its keys and values from the encoder's output and its queries from the decoder,
so that ``T`` takes the encoder's space to the decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ingest.family import Family, Keys, Norm, Projections

T5_KEYS = Keys(width=("d_model",), depth=("num_layers",), heads=("num_heads",), kv_heads=(), head_dim=("d_kv",))
T5_NORM = Norm("layer_norm", "rms")

T5_ENCODER = Family(
    "t5",
    "encoder.block.{layer}.layer.0.",
    (Projections("SelfAttention.o", "SelfAttention.q", "SelfAttention.k", "SelfAttention.v"),),
    stack="encoder",
    feeding=T5_NORM,
    keys=T5_KEYS,
    defaults={"d_model": 512, "d_kv": 64, "num_layers": 6, "num_heads": 8},
)
T5_DECODER = replace(
    T5_ENCODER,
    block="decoder.block.{layer}.layer.0.",
    stack="decoder",
    keys=replace(T5_KEYS, depth=("num_decoder_layers", "num_layers")),
)
T5_CROSS = replace(
    T5_DECODER,
    block="decoder.block.{layer}.layer.1.",
    projections=(Projections("EncDecAttention.o", "EncDecAttention.q", "EncDecAttention.k", "EncDecAttention.v"),),
    stack="cross",
    source=Norm("encoder.final_layer_norm", "rms", of_stack=True),
    two_spaces=True,
)
T5_STACKS = (T5_ENCODER, T5_DECODER, T5_CROSS)
MT5_SIZES = {"d_model": 512, "d_kv": 64, "num_layers": 8, "num_heads": 6}
SWITCH_STACKS = tuple(replace(row, keys=replace(row.keys, depth=row.keys.depth[:1])) for row in T5_STACKS)
"""A decoder of unnamed depth is not as deep as the encoder: the class has a number of its own."""

SWITCH_SIZES = {"d_model": 768, "d_kv": 64, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}

BART_ENCODER = Family(
    "bart",
    "encoder.layers.{layer}.",
    (Projections("self_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    stack="encoder",
    keys=Keys(width=("d_model",), depth=("encoder_layers",), heads=("encoder_attention_heads",), kv_heads=()),
)
BART_DECODER = replace(
    BART_ENCODER,
    block="decoder.layers.{layer}.",
    stack="decoder",
    keys=Keys(width=("d_model",), depth=("decoder_layers",), heads=("decoder_attention_heads",), kv_heads=()),
)
BART_CROSS = replace(
    BART_DECODER,
    projections=(
        Projections("encoder_attn.out_proj", "encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"),
    ),
    stack="cross",
    two_spaces=True,
)
BART_STACKS = (BART_ENCODER, BART_DECODER, BART_CROSS)
PRE_NORM_STACKS = (
    replace(BART_ENCODER, feeding=Norm("self_attn_layer_norm", "layer")),
    replace(BART_DECODER, feeding=Norm("self_attn_layer_norm", "layer")),
    replace(
        BART_CROSS,
        feeding=Norm("encoder_attn_layer_norm", "layer"),
        source=Norm("encoder.layer_norm", "layer", of_stack=True),
    ),
)
WHISPER_STACKS = (
    replace(PRE_NORM_STACKS[0], block="layers.{layer}.", when={"architectures": ["WhisperEncoder"]}),
    *PRE_NORM_STACKS,
)
"""An encoder that was saved as a model of its own does not name itself in its tensors."""


def _bart_sizes(width: int, layers: tuple[int, int], heads: int) -> dict[str, int]:
    """Class defaults, ``layers`` those of the encoder and of the decoder."""
    return {
        "d_model": width,
        "encoder_layers": layers[0],
        "decoder_layers": layers[1],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
    }


def _named(stacks: tuple[Family, ...], model_type: str, defaults: Mapping[str, Any]) -> tuple[Family, ...]:
    """The stacks of another family of the same names and norms."""
    return tuple(replace(row, model_type=model_type, defaults=defaults) for row in stacks)


LARGE = _bart_sizes(1024, (12, 12), 16)

ENCODER_DECODERS: tuple[Family, ...] = (
    *T5_STACKS,
    *_named(T5_STACKS, "mt5", MT5_SIZES),
    *_named(T5_STACKS, "umt5", MT5_SIZES),
    *_named(SWITCH_STACKS, "switch_transformers", SWITCH_SIZES),
    *_named(BART_STACKS, "bart", LARGE),
    *_named(BART_STACKS, "plbart", _bart_sizes(768, (6, 6), 12)),
    *_named(BART_STACKS, "marian", LARGE),
    *_named(BART_STACKS, "blenderbot-small", _bart_sizes(512, (8, 8), 16)),
    *_named(PRE_NORM_STACKS, "mbart", LARGE),
    *_named(PRE_NORM_STACKS, "pegasus", LARGE),
    *_named(PRE_NORM_STACKS, "m2m_100", LARGE),
    *_named(PRE_NORM_STACKS, "blenderbot", _bart_sizes(2560, (2, 24), 32)),
    *_named(WHISPER_STACKS, "whisper", _bart_sizes(384, (4, 4), 6)),
)
