"""Decoders, by ``model_type``. Names and norms were checked against the modules of transformers 5.24."""

from __future__ import annotations

from dataclasses import replace

from ingest.family import Family, Keys, Multiplier, Norm, Piece, Projections, sizes

CLAMP = Piece("clamp", setting="clip_qkv")
NESTED_CLAMP = Piece("clamp", setting="attn_config.clip_qkv")
RESIDUAL_MULTIPLIER = Multiplier(("residual_multiplier",))

LLAMA = Family(
    "llama",
    "layers.{layer}.",
    (Projections("self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    feeding=Norm("input_layernorm", "rms"),
    defaults=sizes(4096, 32, 32),
)
MISTRAL = replace(LLAMA, model_type="mistral", defaults={**LLAMA.defaults, "num_key_value_heads": 8})
QWEN2 = replace(LLAMA, model_type="qwen2", defaults={**LLAMA.defaults, "num_key_value_heads": 32})
GEMMA = replace(
    LLAMA,
    model_type="gemma",
    feeding=Norm("input_layernorm", "rms_plus_one"),
    defaults=sizes(3072, 28, 16, 16, 256),
)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    branch=Norm("post_attention_layernorm", "rms_plus_one"),
    defaults=sizes(2304, 26, 8, 4, 256),
)
OPT = Family(
    "opt",
    "decoder.layers.{layer}.",
    (Projections("self_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    feeding=Norm("self_attn_layer_norm", "layer"),
    when={"do_layer_norm_before": True},
    defaults={
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "do_layer_norm_before": True,
    },
)
GPT2 = Family(
    "gpt2",
    "h.{layer}.",
    (Projections("attn.c_proj", fused="attn.c_attn", layout="concatenated", transposed=True),),
    feeding=Norm("ln_1", "layer"),
    keys=Keys(width=("n_embd",), depth=("n_layer",), heads=("n_head",)),
    defaults={"n_embd": 768, "n_layer": 12, "n_head": 12},
)
GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    projections=(Projections("attn.c_proj", fused="attn.c_attn", layout="concatenated"),),
    when={"multi_query": True},
    fixed_kv_heads=1,
    defaults={**GPT2.defaults, "multi_query": True},
)
GPTJ = replace(
    GPT2,
    model_type="gptj",
    projections=(Projections("attn.out_proj", "attn.q_proj", "attn.k_proj", "attn.v_proj"),),
    defaults={"n_embd": 4096, "n_layer": 28, "n_head": 16},
)
GPT_NEOX = Family(
    "gpt_neox",
    "layers.{layer}.",
    (Projections("attention.dense", fused="attention.query_key_value", layout="interleaved"),),
    feeding=Norm("input_layernorm", "layer"),
    defaults=sizes(6144, 44, 64),
)
GPT_NEO = Family(
    "gpt_neo",
    "h.{layer}.",
    (
        Projections(
            "attn.attention.out_proj", "attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"
        ),
    ),
    feeding=Norm("ln_1", "layer"),
    keys=Keys(depth=("num_layers",), heads=("num_heads",)),
    defaults={"hidden_size": 2048, "num_layers": 24, "num_heads": 16},
)
FALCON = Family(
    "falcon",
    "h.{layer}.",
    (Projections("self_attention.dense", fused="self_attention.query_key_value", layout="concatenated"),),
    feeding=Norm("input_layernorm", "layer"),
    when={"new_decoder_architecture": False, "multi_query": True},
    keys=Keys(depth=("num_hidden_layers", "n_layer"), heads=("num_attention_heads", "n_head"), kv_heads=()),
    fixed_kv_heads=1,
    defaults={**sizes(4544, 32, 71), "new_decoder_architecture": False, "multi_query": True},
)
FALCON_INTERLEAVED = replace(
    FALCON,
    projections=(Projections("self_attention.dense", fused="self_attention.query_key_value", layout="interleaved"),),
    when={"new_decoder_architecture": False, "multi_query": False},
    fixed_kv_heads=None,
)
FALCON_GROUPED = replace(
    FALCON,
    projections=(Projections("self_attention.dense", fused="self_attention.query_key_value", layout="grouped"),),
    when={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    fixed_kv_heads=None,
    keys=replace(FALCON.keys, kv_heads=("num_kv_heads", "n_head_kv")),
)
OLMO2 = replace(LLAMA, model_type="olmo2", feeding=None, branch=Norm("post_attention_layernorm", "rms"))
PHI = replace(
    LLAMA,
    model_type="phi",
    projections=(Projections("self_attn.dense", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    feeding=Norm("input_layernorm", "layer"),
    defaults=sizes(2048, 24, 32),
)
GLM4 = replace(
    LLAMA,
    model_type="glm4",
    branch=Norm("post_self_attn_layernorm", "rms"),
    defaults=sizes(4096, 40, 32, 2, 128),
)

RMS_NORMED = {
    "arcee": sizes(2560, 32, 32),
    "cwm": sizes(6144, 64, 48, 8, 128),
    "doge": sizes(1024, 32, 8),
    "dots1": sizes(4608, 62, 32, 32),
    "ernie4_5": sizes(1024, 18, 16, 2, 128),
    "ernie4_5_moe": sizes(2560, 28, 20, 4),
    "glm": sizes(4096, 40, 32, 2, 128),
    "glm4_moe": sizes(4096, 46, 96, 8),
    "helium": sizes(2560, 24, 20, 20, 128),
    "hunyuan_v1_dense": sizes(4096, 32, 32),
    "hunyuan_v1_moe": sizes(4096, 32, 32),
    "minimax_m2": sizes(3072, 62, 48, 8, 128),
    "ministral3": sizes(4096, 34, 32, 8, 128),
    "qwen2_moe": sizes(2048, 24, 16, 16),
    "qwen3_moe": sizes(2048, 24, 32, 4),
    "seed_oss": sizes(4096, 64, 80, 8, 128),
    "smollm3": sizes(2048, 36, 16, 4),
    "solar_open": sizes(4096, 48, 64, 8, 128),
}
"""Class defaults of the families named and normalised like Llama."""

LAYER_NORMED = {
    "cohere": sizes(8192, 40, 64),
    "cohere2": sizes(8192, 40, 64),
    "jais2": sizes(3328, 32, 26),
    "phimoe": sizes(4096, 32, 32, 8),
    "stablelm": sizes(2560, 32, 32, 32),
    "starcoder2": sizes(3072, 30, 24, 2),
}
"""Class defaults of the families named like Llama, with LayerNorm in front of attention."""

DECODERS: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    replace(MISTRAL, model_type="mixtral"),
    QWEN2,
    replace(QWEN2, model_type="qwen3", defaults={**QWEN2.defaults, "head_dim": 128}),
    *(replace(LLAMA, model_type=name, defaults=sizes) for name, sizes in RMS_NORMED.items()),
    *(
        replace(LLAMA, model_type=name, feeding=Norm("input_layernorm", "layer"), defaults=sizes)
        for name, sizes in LAYER_NORMED.items()
    ),
    replace(LLAMA, model_type="apertus", feeding=Norm("attention_layernorm", "rms")),
    GEMMA,
    GEMMA2,
    replace(GEMMA2, model_type="gemma3_text"),
    replace(GEMMA2, model_type="vaultgemma", branch=None),
    *(replace(LLAMA, model_type=name, multiplier=RESIDUAL_MULTIPLIER) for name in ("granite", "granitemoe")),
    replace(
        LLAMA,
        model_type="llama4_text",
        pieces=(
            Piece(
                "qk_norm",
                setting="use_qk_norm",
                layer_setting="no_rope_layers",
                layer_interval="no_rope_layer_interval",
            ),
        ),
        defaults={**sizes(5120, 48, 40, 8, 128), "use_qk_norm": True, "no_rope_layer_interval": 4},
    ),
    replace(
        LLAMA,
        model_type="nanochat",
        feeding=Norm("", "rms"),
        pieces=(Piece("qk_norm"),),
        defaults=sizes(768, 12, 6),
    ),
    replace(LLAMA, model_type="olmo", feeding=Norm("", "layer"), pieces=(CLAMP,)),
    replace(LLAMA, model_type="olmoe", pieces=(CLAMP,), defaults=sizes(2048, 16, 16)),
    OLMO2,
    replace(OLMO2, model_type="olmo3"),
    replace(OLMO2, model_type="flex_olmo"),
    replace(OLMO2, model_type="exaone4", defaults=sizes(4096, 32, 32, 32)),
    replace(
        GPT_NEO,
        model_type="exaone",
        other_block="layers.{layer}.",
        feeding=Norm("ln_1", "rms"),
        keys=Keys(depth=("num_hidden_layers", "num_layers")),
        defaults=sizes(4096, 32, 32, 8),
    ),
    GLM4,
    PHI,
    replace(
        LLAMA,
        model_type="phi3",
        projections=(Projections("self_attn.o_proj", fused="self_attn.qkv_proj", layout="concatenated"),),
        defaults=sizes(3072, 32, 32),
    ),
    replace(
        LLAMA,
        model_type="nemotron",
        feeding=Norm("input_layernorm", "layer_plus_one"),
        defaults=sizes(6144, 32, 48),
    ),
    GPT_NEOX,
    replace(GPT_NEOX, model_type="gpt_neox_japanese", defaults=sizes(2560, 32, 32)),
    replace(
        GPT_NEOX,
        model_type="persimmon",
        projections=(Projections("self_attn.dense", fused="self_attn.query_key_value", layout="interleaved"),),
        defaults=sizes(4096, 36, 64),
    ),
    GPT2,
    replace(GPT2, model_type="openai-gpt", feeding=None),
    replace(
        GPT2,
        model_type="imagegpt",
        feeding=Norm("ln_1", "rms"),
        defaults={"n_embd": 512, "n_layer": 24, "n_head": 8},
    ),
    GPT_BIGCODE,
    replace(
        GPT_BIGCODE,
        projections=(Projections("attn.c_proj", fused="attn.c_attn", layout="interleaved"),),
        when={"multi_query": False},
        fixed_kv_heads=None,
        keys=replace(GPT2.keys, kv_heads=()),
    ),
    GPTJ,
    replace(
        GPTJ,
        model_type="codegen",
        projections=(Projections("attn.out_proj", fused="attn.qkv_proj", layout="four_blocks"),),
    ),
    GPT_NEO,
    Family(
        "ctrl",
        "h.{layer}.",
        (
            Projections(
                "multi_head_attention.dense",
                "multi_head_attention.Wq",
                "multi_head_attention.Wk",
                "multi_head_attention.Wv",
            ),
        ),
        feeding=Norm("layernorm1", "layer"),
        keys=GPT2.keys,
        defaults={"n_embd": 1280, "n_layer": 48, "n_head": 16},
    ),
    FALCON,
    FALCON_INTERLEAVED,
    FALCON_GROUPED,
    replace(FALCON_GROUPED, when={"new_decoder_architecture": True}, feeding=Norm("ln_attn", "layer")),
    replace(
        FALCON_INTERLEAVED,
        model_type="bloom",
        when={},
        keys=Keys(
            width=("n_embed", "hidden_size"),
            depth=("num_hidden_layers", "n_layer"),
            heads=("num_attention_heads", "n_head"),
            kv_heads=(),
        ),
        defaults={"hidden_size": 64, "n_layer": 2, "n_head": 8},
    ),
    Family(
        "mpt",
        "blocks.{layer}.",
        (Projections("attn.out_proj", fused="attn.Wqkv", layout="concatenated"),),
        feeding=Norm("norm_1", "layer"),
        keys=Keys(width=("d_model",), depth=("n_layers",), heads=("n_heads",)),
        pieces=(NESTED_CLAMP,),
        defaults={"d_model": 2048, "n_layers": 24, "n_heads": 16},
    ),
    Family(
        "dbrx",
        "blocks.{layer}.norm_attn_norm.",
        (Projections("attn.out_proj", fused="attn.Wqkv", layout="concatenated"),),
        feeding=Norm("norm_1", "layer"),
        keys=Keys(width=("d_model",), depth=("n_layers",), heads=("n_heads",), kv_heads=("attn_config.kv_n_heads",)),
        pieces=(NESTED_CLAMP,),
        defaults={"d_model": 2048, "n_layers": 24, "n_heads": 16, "attn_config.kv_n_heads": 1},
    ),
    OPT,
    replace(OPT, when={"do_layer_norm_before": False}, feeding=None),
    replace(
        OPT,
        model_type="xglm",
        block="layers.{layer}.",
        when={},
        keys=Keys(width=("d_model",), depth=("num_layers",), heads=("attention_heads",)),
        defaults={"d_model": 1024, "num_layers": 24, "attention_heads": 16},
    ),
    replace(OPT, model_type="biogpt", block="layers.{layer}.", when={}, defaults=sizes(1024, 24, 16)),
)
