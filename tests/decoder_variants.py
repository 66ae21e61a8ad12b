"""Decoders to build and probe."""

from __future__ import annotations

from tests.variant import WIDTH, Variant

GROUPED = {"num_key_value_heads": 2, "head_dim": 24}
OPT = {"projection": "self_attn.out_proj"}


DECODER_VARIANTS = {
    "llama": Variant("llama", GROUPED),
    "llama-biases": Variant("llama", {**GROUPED, "attention_bias": True}),
    "llama-one-kv-head": Variant("llama", {"num_key_value_heads": 1}),
    "mistral": Variant("mistral", GROUPED),
    "mixtral": Variant("mixtral", {**GROUPED, "num_local_experts": 4}),
    "qwen2": Variant("qwen2", GROUPED),
    "qwen3": Variant("qwen3", GROUPED),
    "gemma": Variant("gemma", GROUPED),
    "gemma2": Variant("gemma2", {**GROUPED, "attn_logit_softcapping": None}),
    "gemma3_text": Variant("gemma3_text", {**GROUPED, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo": Variant("olmo", GROUPED),
    "olmo2": Variant("olmo2", GROUPED),
    "phi3": Variant("phi3", GROUPED),
    "smollm3": Variant("smollm3", GROUPED),
    "gpt_neox": Variant("gpt_neox", attention="attention", projection="attention.dense"),
    "gpt2": Variant("gpt2", attention="attn", projection="attn.c_proj"),
    "opt": Variant("opt", {"ffn_dim": 96, "word_embed_proj_dim": WIDTH}, **OPT),
    "opt-post-norm": Variant(
        "opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}, **OPT, post_norm=True
    ),
}
