"""Encoders of text, images and sound to build and probe."""

from __future__ import annotations

from tests.variant import N_HEADS, N_LAYERS, WIDTH, Variant

ENCODER = {"auto": "AutoModelForMaskedLM", "attention": "attention", "projection": "attention.output.dense"}
INNER = {**ENCODER, "attention": "attention.self"}
ALBERT = {**ENCODER, "projection": "attention.dense"}

SHORT_NAMES = {"n_layers": N_LAYERS, "n_heads": N_HEADS}
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
IMAGE = {"image_size": 16, "patch_size": 8}
VISION = {
    "auto": "AutoModelForImageClassification",
    "attention": "attention",
    "projection": "attention.o_proj",
}
SOUND = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
STABLE_SOUND = {**SOUND, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}
AUDIO = {"auto": "AutoModelForCTC", "attention": "attention", "projection": "attention.out_proj"}

ENCODER_VARIANTS = {
    "bert": Variant("bert", **ENCODER, post_norm=True),
    "roberta": Variant("roberta", **ENCODER, post_norm=True),
    "xlm-roberta": Variant("xlm-roberta", **ENCODER, post_norm=True),
    "camembert": Variant("camembert", **ENCODER, post_norm=True),
    "albert": Variant("albert", {"num_hidden_groups": 2, "inner_group_num": 1}, **ALBERT, post_norm=True),
    "albert-inner-blocks": Variant(
        "albert", {"num_hidden_groups": 2, "inner_group_num": 2}, **ALBERT, n_blocks=4, post_norm=True
    ),
    "electra": Variant("electra", {"embedding_size": 32}, **ENCODER, post_norm=True),
    "ernie": Variant("ernie", **ENCODER, post_norm=True),
    "layoutlm": Variant("layoutlm", **INNER, post_norm=True),
    "rembert": Variant("rembert", {"input_embedding_size": 32, "output_embedding_size": 32}, **ENCODER, post_norm=True),
    "roformer": Variant("roformer", {"embedding_size": WIDTH}, **ENCODER, post_norm=True),
    "data2vec-text": Variant("data2vec-text", **ENCODER, post_norm=True),
    "megatron-bert": Variant("megatron-bert", **INNER),
    "roberta-prelayernorm": Variant("roberta-prelayernorm", **INNER),
    "xlm-roberta-xl": Variant("xlm-roberta-xl", **INNER),
    "esm": Variant("esm", {"position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 3}, **INNER),
    "mpnet": Variant(
        "mpnet",
        auto="AutoModelForMaskedLM",
        attention="attention.attn",
        projection="attention.attn.o",
        post_norm=True,
    ),
    "distilbert": Variant(
        "distilbert",
        {**SHORT_NAMES, "dim": WIDTH, "hidden_dim": 96},
        auto="AutoModelForMaskedLM",
        attention="attention",
        projection="attention.out_lin",
        post_norm=True,
    ),
    "xlm": Variant(
        "xlm",
        {**SHORT_NAMES, "emb_dim": WIDTH, "n_words": 131},
        auto="AutoModelForMaskedLM",
        attention="",
        projection="out_lin",
        post_norm=True,
    ),
    "deberta": Variant("deberta", DEBERTA, **INNER, post_norm=True),
    "deberta-v2": Variant(
        "deberta-v2",
        {**DEBERTA, "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        **INNER,
        post_norm=True,
    ),
    "modernbert": Variant(
        "modernbert",
        {"local_attention": 512, "global_attn_every_n_layers": 2},
        auto="AutoModelForMaskedLM",
        attention="attn",
        projection="attn.Wo",
    ),
    "eurobert": Variant("eurobert", {"num_key_value_heads": 2, "head_dim": 24}, auto="AutoModelForMaskedLM"),
    "nomic_bert": Variant("nomic_bert", auto="AutoModelForMaskedLM", post_norm=True),
    "vit": Variant("vit", IMAGE, **VISION),
    "deit": Variant("deit", IMAGE, **{**VISION, "auto": "AutoModelForMaskedImageModeling"}),
    "beit": Variant("beit", IMAGE, **VISION),
    "vit_mae": Variant(
        "vit_mae",
        {
            **IMAGE,
            "mask_ratio": 0.0,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        **{**VISION, "auto": "AutoModelForPreTraining"},
    ),
    "dinov2": Variant("dinov2", IMAGE, **VISION),
    "dinov2_with_registers": Variant("dinov2_with_registers", IMAGE, **VISION),
    "dinov3_vit": Variant("dinov3_vit", {**IMAGE, "num_register_tokens": 2}, **{**VISION, "auto": "AutoModel"}),
    "wav2vec2": Variant("wav2vec2", SOUND, **AUDIO, post_norm=True),
    "wav2vec2-pre-norm": Variant("wav2vec2", STABLE_SOUND, **AUDIO),
    "hubert": Variant("hubert", SOUND, **AUDIO, post_norm=True),
    "hubert-pre-norm": Variant("hubert", STABLE_SOUND, **AUDIO),
}
