"""Families of GGUF files, by ``general.architecture``.

Conversion to GGUF unifies the names, undoes every per-head interleave and ``Conv1D`` transpose (so
that ``attn_qkv`` always is ``[Q, K, V]``), and adds the one to gains that are stored without it:
those of Gemma 1 to 3, Qwen3-Next, Nemotron and PLaMo. For architectures converted like llama it also
permutes the rows of q and k within each head, both alike, which no stored number depends on. The
multipliers of Falcon-H1 are inside its converted matrices, so its operators are larger or smaller
than those of the original by one factor.

Which norm stands in front of attention follows llama.cpp's graphs; an architecture with LayerNorm
gives ``attention.layer_norm_epsilon``, one with RMSNorm ``attention.layer_norm_rms_epsilon``. Only
Phi-3.5-MoE gives the key of the other, although the original has LayerNorm, as here. A
``post_attention_norm`` is the gain on the branch in some architectures and feeds the MLP in others.
"""

from __future__ import annotations

from dataclasses import replace

from ingest.family import Family, Keys, Latent, Multiplier, Norm, Piece, Projections

KEYS = Keys(
    width=("embedding_length",),
    depth=("block_count",),
    trailing=("nextn_predict_layers",),
    heads=("attention.head_count",),
    kv_heads=("attention.head_count_kv",),
    head_dim=("attention.key_length",),
    value_dim=("attention.value_length",),
)
SLIDING_KEYS = replace(
    KEYS,
    head_dim=("attention.key_length_swa", *KEYS.head_dim),
    value_dim=("attention.value_length_swa", *KEYS.value_dim),
)
SEPARATE = Projections("attn_output", "attn_q", "attn_k", "attn_v")
FUSED = Projections("attn_output", fused="attn_qkv", layout="concatenated")

SINKS = Piece("sinks", tensor="attn_sinks.weight")
CLAMP = Piece("clamp", setting="attention.clamp_kqv")
OUTPUT_GATE = Piece("output_gate", tensor="attn_gate.weight")
RESIDUAL_SCALE = Multiplier(("residual_scale",))

LLAMA = Family(
    "llama",
    "blk.{layer}.",
    (SEPARATE, FUSED),
    feeding=Norm("attn_norm", "rms"),
    keys=KEYS,
    by_layer_type={"sliding_attention": SLIDING_KEYS},
)
LAYER_NORMED = replace(LLAMA, feeding=Norm("attn_norm", "layer"))
SANDWICH = replace(LLAMA, branch=Norm("post_attention_norm", "rms"))
POST_NORMED = replace(LLAMA, stack="encoder", feeding=None)
GATED = replace(LLAMA, projections=(replace(SEPARATE, gated_query=True),))

_LATENT = Latent(down="attn_kv_a_mqa", norm="attn_kv_a_norm")
_LATENT_UPS = (replace(_LATENT, key_up="attn_k_b", value_up="attn_v_b"), replace(_LATENT, up="attn_kv_b"))
MULTI_LATENT = replace(
    LLAMA,
    projections=(
        *(
            Projections(
                "attn_output",
                layout="latent",
                latent=replace(latent, query_down="attn_q_a", query_norm="attn_q_a_norm", query_up="attn_q_b"),
            )
            for latent in _LATENT_UPS
        ),
        *(Projections("attn_output", "attn_q", layout="latent", latent=latent) for latent in _LATENT_UPS),
        SEPARATE,
    ),
    keys=replace(
        KEYS,
        value_dim=("attention.value_length_mla", *KEYS.value_dim),
        latent_key_dim=("attention.key_length_mla", *KEYS.head_dim),
        latent_rank="attention.kv_lora_rank",
        query_rank="attention.q_lora_rank",
        rope_dim="rope.dimension_count",
    ),
    by_layer_type={},
)
"""Keys and values of a block are one projection (``attn_kv_b``), or in newer files two, with one slice for a head."""

T5_ENCODER = replace(
    LLAMA,
    model_type="t5",
    block="enc.blk.{layer}.",
    projections=(Projections("attn_o", "attn_q", "attn_k", "attn_v"),),
    stack="encoder",
)
T5_DECODER = replace(
    T5_ENCODER,
    block="dec.blk.{layer}.",
    stack="decoder",
    keys=replace(KEYS, depth=("decoder_block_count", "block_count")),
)
T5_CROSS = replace(
    T5_DECODER,
    projections=(Projections("cross_attn_o", "cross_attn_q", "cross_attn_k", "cross_attn_v"),),
    stack="cross",
    feeding=Norm("cross_attn_norm", "rms"),
    source=Norm("enc.output_norm", "rms", of_stack=True),
    two_spaces=True,
)

RMS_NORMED = (
    "llama", "llama4", "mistral3", "deci", "baichuan", "xverse", "refact", "arctic", "internlm2", "plamo", "openelm",
    "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe",
    "phi3", "gemma", "olmoe", "deepseek", "chatglm", "glm4moe", "exaone", "exaone-moe", "smollm3", "arcee",
    "ernie4_5", "ernie4_5-moe", "hunyuan-moe", "hunyuan-dense", "hunyuan_vl", "seed_oss", "dots1", "apertus",
    "bailingmoe", "bailingmoe2", "minimax-m2", "grovemoe", "smallthinker", "pangu-embedded", "paddleocr", "maincoder",
    "dream", "llada", "llada-moe", "rnd1",
    "jamba", "falcon-h1", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe",
)  # fmt: skip
"""Architectures with RMSNorm in front of attention and nothing else outside the projections."""

LAYER_NORMED_NAMES = (
    "gptneox", "gpt2", "gptj", "bloom", "starcoder", "starcoder2", "codeshell", "jais", "jais2", "stablelm", "orion",
    "phi2", "phimoe", "command-r", "cohere2", "nemotron",
)  # fmt: skip
"""Architectures with LayerNorm in front of attention and nothing else outside the projections."""

ARCHITECTURES: tuple[Family, ...] = (
    *(replace(LLAMA, model_type=name) for name in RMS_NORMED),
    *(replace(LAYER_NORMED, model_type=name) for name in LAYER_NORMED_NAMES),
    *(replace(LAYER_NORMED, model_type=name, pieces=(CLAMP,)) for name in ("mpt", "dbrx")),
    replace(LAYER_NORMED, model_type="falcon", feeding=Norm("attn_norm_2", "layer", other_tensor="attn_norm")),
    *(replace(SANDWICH, model_type=name) for name in ("gemma2", "gemma3", "glm4", "plamo2", "plamo3")),
    replace(SANDWICH, model_type="gemma-embedding", stack="encoder"),
    replace(
        SANDWICH,
        model_type="gemma3n",
        shared_layers="attention.shared_kv_layers",
        pieces=(Piece("value_norm"),),
    ),
    replace(
        SANDWICH,
        model_type="gemma4",
        projections=(SEPARATE, FUSED, replace(SEPARATE, value="attn_k")),
        shared_layers="attention.shared_kv_layers",
        pieces=(Piece("value_norm"),),
    ),
    replace(SANDWICH, model_type="afmoe", pieces=(OUTPUT_GATE,)),
    replace(LLAMA, model_type="grok", branch=Norm("attn_output_norm", "rms")),
    *(replace(SANDWICH, model_type=name, feeding=None) for name in ("olmo2", "exaone4")),
    replace(LLAMA, model_type="olmo", feeding=Norm("", "layer"), pieces=(CLAMP,)),
    replace(LLAMA, model_type="chameleon", when={"swin_norm": False}, defaults={"swin_norm": False}),
    replace(
        LLAMA,
        model_type="chameleon",
        when={"swin_norm": True},
        feeding=None,
        branch=Norm("attn_norm", "rms"),
    ),
    *(
        replace(LLAMA, model_type=name, multiplier=RESIDUAL_SCALE)
        for name in ("granite", "granitemoe", "granitehybrid", "minicpm")
    ),
    replace(LLAMA, model_type="bitnet", pieces=(Piece("sub_norm", tensor="attn_sub_norm.weight"),)),
    replace(LLAMA, model_type="gpt-oss", pieces=(SINKS,)),
    replace(LLAMA, model_type="mimo2", value_scale="attention.value_scale", pieces=(SINKS,)),
    replace(LLAMA, model_type="step35", pieces=(OUTPUT_GATE,)),
    *(replace(GATED, model_type=name) for name in ("qwen3next", "qwen35", "qwen35moe")),
    *(
        replace(MULTI_LATENT, model_type=name)
        for name in ("deepseek2", "deepseek2-ocr", "glm-dsa", "mistral4", "minicpm3", "plm")
    ),
    *(
        replace(POST_NORMED, model_type=name)
        for name in ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3")
    ),
    replace(POST_NORMED, model_type="modern-bert", feeding=Norm("attn_norm", "layer", first_layer=1)),
    *(replace(LLAMA, model_type=name, stack="encoder") for name in ("eurobert", "llama-embed")),
    T5_ENCODER,
    T5_DECODER,
    T5_CROSS,
    replace(T5_ENCODER, model_type="t5encoder"),
)
"""Every row; a layer of another kind, in hybrids, lacks the tensors or is given no key/value heads."""
