"""Decoders to build and probe."""

from __future__ import annotations

from tests.variant import WIDTH, Variant

GROUPED = {"num_key_value_heads": 2, "head_dim": 24}
OPT = {"projection": "self_attn.out_proj"}
NEO = {"attention": "attn.attention", "projection": "attn.attention.out_proj"}
GPT = {"attention": "attn", "projection": "attn.c_proj"}
FALCON = {"attention": "self_attention", "projection": "self_attention.dense"}
DENSE = {"projection": "self_attn.dense"}
ATTN_OUT = {"attention": "attn", "projection": "attn.out_proj"}

KV_HEADS = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROUTED_EXPERTS = {
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
WIDE_CLAMP = {"clip_qkv": 1e9}
MPT = {"expansion_ratio": 2, "max_seq_len": 256}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
LLAMA4 = {
    **GROUPED,
    **LOCAL_EXPERTS,
    "intermediate_size_mlp": 96,
    "no_rope_layers": [1, 0],
    "attn_temperature_tuning": False,
    "attention_chunk_size": 256,
}
GROUPED_FALCON = {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": False, "alibi": False}


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
    "olmo-clamp": Variant("olmo", {**KV_HEADS, **WIDE_CLAMP}),
    "olmo2": Variant("olmo2", GROUPED),
    "phi3": Variant("phi3", GROUPED),
    "smollm3": Variant("smollm3", GROUPED),
    "gpt_neox": Variant("gpt_neox", attention="attention", projection="attention.dense"),
    "gpt_neox_japanese": Variant(
        "gpt_neox_japanese",
        {"intermediate_multiple_size": 2, "rope_parameters": PLAIN_ROPE},
        attention="attention",
        projection="attention.dense",
    ),
    "exaone": Variant("exaone", GROUPED, saved_prefix="transformer.h.", headless_prefix="layers."),
    "gpt2": Variant("gpt2", attention="attn", projection="attn.c_proj"),
    "opt": Variant("opt", {"ffn_dim": 96, "word_embed_proj_dim": WIDTH}, **OPT),
    "opt-post-norm": Variant(
        "opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}, **OPT, post_norm=True
    ),
    "gpt_bigcode": Variant("gpt_bigcode", {"multi_query": True}, **GPT),
    "gpt_bigcode-all-kv-heads": Variant("gpt_bigcode", {"multi_query": False}, **GPT),
    "gptj": Variant("gptj", {"rotary_dim": 8}, **ATTN_OUT),
    "gpt_neo": Variant("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 256}, **NEO),
    "bloom": Variant("bloom", **FALCON),
    "mpt": Variant("mpt", MPT, **ATTN_OUT),
    "mpt-clamp": Variant("mpt", {**MPT, "attn_config": WIDE_CLAMP}, **ATTN_OUT),
    "falcon-one-kv-head": Variant("falcon", {"multi_query": True, "num_kv_heads": 4}, **FALCON),
    "falcon-all-kv-heads": Variant(
        "falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}, **FALCON
    ),
    "falcon-grouped": Variant("falcon", GROUPED_FALCON, **FALCON),
    "falcon-grouped-one-norm": Variant("falcon", {**GROUPED_FALCON, "num_ln_in_parallel_attn": 1}, **FALCON),
    "codegen": Variant("codegen", {"num_attention_heads": 8, "rotary_dim": 4, "n_ctx": 256}, **ATTN_OUT),
    "phi": Variant("phi", {**KV_HEADS, "qk_layernorm": True}, **DENSE),
    "phimoe": Variant("phimoe", {**KV_HEADS, **LOCAL_EXPERTS, "num_experts_per_tok": 2, "attention_bias": True}),
    "stablelm": Variant("stablelm", {**KV_HEADS, "use_qkv_bias": True}),
    "stablelm-qk-norm": Variant("stablelm", {**KV_HEADS, "qk_layernorm": True, "use_parallel_residual": True}),
    "cohere": Variant("cohere", {**KV_HEADS, "use_qk_norm": True}),
    "cohere2": Variant("cohere2", GROUPED),
    "starcoder2": Variant("starcoder2", KV_HEADS),
    "qwen2_moe": Variant("qwen2_moe", {**KV_HEADS, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": Variant("qwen3_moe", {**GROUPED, **EXPERTS}),
    "olmo3": Variant("olmo3", KV_HEADS),
    "olmoe": Variant("olmoe", {**KV_HEADS, **EXPERTS}),
    "olmoe-clamp": Variant("olmoe", {**KV_HEADS, **EXPERTS, **WIDE_CLAMP}),
    "flex_olmo": Variant("flex_olmo", {**KV_HEADS, **EXPERTS}),
    "vaultgemma": Variant("vaultgemma", {**GROUPED, "attn_logit_softcapping": None}),
    "glm": Variant("glm", {**GROUPED, "attention_bias": True}),
    "glm4": Variant("glm4", {**GROUPED, "attention_bias": True}),
    "glm4_moe": Variant("glm4_moe", {**GROUPED, **ROUTED_EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "granite": Variant("granite", {**KV_HEADS, "attention_multiplier": 0.07, "residual_multiplier": 0.3}),
    "granitemoe": Variant("granitemoe", {**KV_HEADS, **LOCAL_EXPERTS, "residual_multiplier": 0.3}),
    "nemotron": Variant("nemotron", GROUPED),
    "arcee": Variant("arcee", GROUPED),
    "helium": Variant("helium", {**KV_HEADS, "head_dim": 16}),
    "apertus": Variant("apertus", KV_HEADS),
    "seed_oss": Variant("seed_oss", GROUPED),
    "ernie4_5": Variant("ernie4_5", {**GROUPED, "use_bias": True}),
    "ernie4_5_moe": Variant(
        "ernie4_5_moe",
        {
            **KV_HEADS,
            "moe_num_experts": 2,
            "moe_k": 1,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "use_bias": True,
        },
    ),
    "exaone4": Variant("exaone4", {**GROUPED, "sliding_window_pattern": 2}),
    "hunyuan_v1_dense": Variant("hunyuan_v1_dense", GROUPED),
    "hunyuan_v1_moe": Variant("hunyuan_v1_moe", {**GROUPED, "num_experts": 2, "moe_topk": 1}),
    "dots1": Variant("dots1", {**GROUPED, **ROUTED_EXPERTS, "n_shared_experts": 1}),
    "minimax_m2": Variant("minimax_m2", {**GROUPED, **LOCAL_EXPERTS}),
    "ministral3": Variant("ministral3", GROUPED),
    "cwm": Variant("cwm", GROUPED),
    "solar_open": Variant("solar_open", {**GROUPED, **ROUTED_EXPERTS, "n_shared_experts": 1}),
    "jais2": Variant("jais2", KV_HEADS),
    "nanochat": Variant("nanochat", KV_HEADS, bare_norm=True),
    "doge": Variant("doge", {**KV_HEADS, "keep_window_size": 256}),
    "xglm": Variant("xglm", {"ffn_dim": 96}, **OPT),
    "biogpt": Variant("biogpt", **OPT),
    "ctrl": Variant("ctrl", {"dff": 96}, attention="multi_head_attention", projection="multi_head_attention.dense"),
    "persimmon": Variant("persimmon", **DENSE),
    "imagegpt": Variant("imagegpt", auto="AutoModel", **GPT),
    "openai-gpt": Variant("openai-gpt", **GPT, post_norm=True),
    "dbrx": Variant(
        "dbrx",
        {
            "d_model": WIDTH,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, **WIDE_CLAMP, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": WIDTH},
        },
        **ATTN_OUT,
    ),
    "llama4_text": Variant("llama4_text", {**LLAMA4, "use_qk_norm": False}),
    "llama4_text-qk-norm": Variant("llama4_text", LLAMA4),
}
