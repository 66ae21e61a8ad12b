"""Encoder-decoders to build and probe: encoder, decoder and cross-attention of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

WIDTH, ENCODER_LAYERS, DECODER_LAYERS = 24, 2, 3


@dataclass(frozen=True)
class Stack:
    """One stack of a running model: the path of its layers, and two modules of a layer by path.

    ``source`` is the path of the norm that keys and values read through, where it is none of the layer.
    """

    path: str
    attention: str
    projection: str
    heads: int
    d_head: int
    layers: int
    source: str = ""


@dataclass(frozen=True)
class EncoderDecoderVariant:
    """A model to build from its configuration, and its stacks by name.

    ``base_prefix`` is what a save without the head lacks in front of its names. ``sound``
    models read a spectrum in place of tokens. ``post_norm`` says that attention reads the residual
    stream and writes to it through no norm.
    """

    model_type: str
    config: Mapping[str, Any]
    stacks: Mapping[str, Stack]
    base_prefix: str = ""
    sound: bool = False
    post_norm: bool = False


T5 = {
    "vocab_size": 31,
    "d_model": WIDTH,
    "d_ff": 40,
    "d_kv": 5,
    "num_heads": 4,
    "num_layers": ENCODER_LAYERS,
    "num_decoder_layers": DECODER_LAYERS,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 31,
    "d_model": WIDTH,
    "encoder_layers": ENCODER_LAYERS,
    "decoder_layers": DECODER_LAYERS,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
SPECTRUM = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32, "suppress_tokens": None}

T5_STACKS = {
    "encoder": Stack("encoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o", 4, 5, ENCODER_LAYERS),
    "decoder": Stack("decoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o", 4, 5, DECODER_LAYERS),
    "cross": Stack(
        "decoder.block",
        "layer.1.EncDecAttention",
        "layer.1.EncDecAttention.o",
        4,
        5,
        DECODER_LAYERS,
        "encoder.final_layer_norm",
    ),
}
POST_NORM_STACKS = {
    "encoder": Stack("model.encoder.layers", "self_attn", "self_attn.out_proj", 3, 8, ENCODER_LAYERS),
    "decoder": Stack("model.decoder.layers", "self_attn", "self_attn.out_proj", 4, 6, DECODER_LAYERS),
    "cross": Stack("model.decoder.layers", "encoder_attn", "encoder_attn.out_proj", 4, 6, DECODER_LAYERS),
}
PRE_NORM_STACKS = {
    **POST_NORM_STACKS,
    "cross": replace(POST_NORM_STACKS["cross"], source="model.encoder.layer_norm"),
}


def t5_like(model_type: str, **config: Any) -> EncoderDecoderVariant:
    """A model whose heads have a size of their own and whose norms keep the mean."""
    return EncoderDecoderVariant(model_type, {**T5, **config}, T5_STACKS)


def bart_like(model_type: str, post_norm: bool, sound: bool = False, **config: Any) -> EncoderDecoderVariant:
    """A model whose encoder and decoder have different heads."""
    stacks = POST_NORM_STACKS if post_norm else PRE_NORM_STACKS
    return EncoderDecoderVariant(model_type, {**BART, **config}, stacks, "model.", sound, post_norm)


ENCODER_DECODER_VARIANTS = {
    "t5": t5_like("t5"),
    "t5-gated": t5_like("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": t5_like("mt5"),
    "umt5": t5_like("umt5"),
    "switch_transformers": t5_like(
        "switch_transformers", num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    ),
    "bart": bart_like("bart", post_norm=True),
    "plbart": bart_like("plbart", post_norm=True),
    "marian": bart_like("marian", post_norm=True),
    "blenderbot-small": bart_like("blenderbot-small", post_norm=True),
    "mbart": bart_like("mbart", post_norm=False),
    "pegasus": bart_like("pegasus", post_norm=False),
    "m2m_100": bart_like("m2m_100", post_norm=False),
    "blenderbot": bart_like("blenderbot", post_norm=False),
    "whisper": bart_like("whisper", post_norm=False, sound=True, **SPECTRUM),
}
