"""Encoders of text, images and sound, by ``model_type``, checked against the modules of transformers 5.24."""

from __future__ import annotations

from dataclasses import replace

from ingest.family import Family, Keys, Multiplier, Norm, Projections, sizes

BASE = sizes(768, 12, 12)

BERT = Family(
    "bert",
    "encoder.layer.{layer}.",
    (Projections("attention.output.dense", "attention.self.query", "attention.self.key", "attention.self.value"),),
    stack="encoder",
    defaults=BASE,
)
LIN = ("out_lin", "q_lin", "k_lin", "v_lin")
VIT = replace(
    BERT,
    model_type="vit",
    projections=(
        Projections(
            "attention.output.dense",
            "attention.attention.query",
            "attention.attention.key",
            "attention.attention.value",
        ),
    ),
    feeding=Norm("layernorm_before", "layer"),
)
DINOV2 = replace(
    VIT,
    model_type="dinov2",
    feeding=Norm("norm1", "layer"),
    multiplier=Multiplier(gain="layer_scale1.lambda1"),
)
WAV2VEC2 = replace(
    BERT,
    model_type="wav2vec2",
    block="encoder.layers.{layer}.",
    projections=(Projections("attention.out_proj", "attention.q_proj", "attention.k_proj", "attention.v_proj"),),
    when={"do_stable_layer_norm": False},
    defaults={**BASE, "do_stable_layer_norm": False},
)
WAV2VEC2_PRE_NORM = replace(WAV2VEC2, feeding=Norm("layer_norm", "layer"), when={"do_stable_layer_norm": True})

ENCODERS: tuple[Family, ...] = (
    BERT,
    replace(BERT, model_type="roberta"),
    replace(BERT, model_type="xlm-roberta"),
    replace(BERT, model_type="camembert"),
    replace(
        BERT,
        model_type="albert",
        block="albert_layer_groups.{layer}.albert_layers.{inner}.",
        projections=(Projections("attention.dense", "attention.query", "attention.key", "attention.value"),),
        keys=Keys(depth=("num_hidden_groups",)),
        defaults={"hidden_size": 4096, "num_hidden_groups": 1, "num_attention_heads": 64, "inner_group_num": 1},
        inner_count="inner_group_num",
    ),
    replace(
        BERT,
        model_type="electra",
        defaults=sizes(256, 12, 4),
    ),
    replace(BERT, model_type="ernie"),
    replace(BERT, model_type="layoutlm"),
    replace(
        BERT,
        model_type="rembert",
        defaults=sizes(1152, 32, 18),
    ),
    replace(
        BERT,
        model_type="roformer",
        when={"rotary_value": False},
        defaults={**BASE, "rotary_value": False},
    ),
    replace(BERT, model_type="data2vec-text"),
    replace(
        BERT,
        model_type="megatron-bert",
        feeding=Norm("attention.ln", "layer"),
        defaults=sizes(1024, 24, 16),
    ),
    replace(BERT, model_type="roberta-prelayernorm", feeding=Norm("attention.LayerNorm", "layer")),
    replace(
        BERT,
        model_type="xlm-roberta-xl",
        feeding=Norm("attention.self_attn_layer_norm", "layer"),
        defaults=sizes(2560, 36, 32),
    ),
    replace(BERT, model_type="esm", feeding=Norm("attention.LayerNorm", "layer")),
    replace(
        BERT,
        model_type="mpnet",
        projections=(Projections("attention.attn.o", "attention.attn.q", "attention.attn.k", "attention.attn.v"),),
    ),
    replace(
        BERT,
        model_type="distilbert",
        block="layer.{layer}.attention.",
        projections=(Projections(*LIN),),
        keys=Keys(width=("dim",), depth=("n_layers",), heads=("n_heads",)),
        defaults={"dim": 768, "n_layers": 6, "n_heads": 12},
    ),
    replace(
        BERT,
        model_type="xlm",
        block="attentions.{layer}.",
        projections=(Projections(*LIN),),
        keys=Keys(width=("emb_dim",), depth=("n_layers",), heads=("n_heads",)),
        defaults={"emb_dim": 2048, "n_layers": 12, "n_heads": 16},
    ),
    replace(
        BERT,
        model_type="deberta",
        projections=(Projections("attention.output.dense", fused="attention.self.in_proj", layout="interleaved"),),
    ),
    replace(
        BERT,
        model_type="deberta-v2",
        projections=(
            Projections(
                "attention.output.dense",
                "attention.self.query_proj",
                "attention.self.key_proj",
                "attention.self.value_proj",
            ),
        ),
        defaults=sizes(1536, 24, 24),
    ),
    replace(
        BERT,
        model_type="modernbert",
        block="layers.{layer}.",
        projections=(Projections("attn.Wo", fused="attn.Wqkv", layout="concatenated"),),
        feeding=Norm("attn_norm", "layer", first_layer=1),
        defaults={**BASE, "num_hidden_layers": 22},
    ),
    replace(
        BERT,
        model_type="eurobert",
        block="layers.{layer}.",
        projections=(Projections("self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
        feeding=Norm("input_layernorm", "rms"),
    ),
    replace(
        BERT,
        model_type="nomic_bert",
        block="encoder.layers.{layer}.",
        projections=(Projections("attn.out_proj", fused="attn.Wqkv", layout="concatenated"),),
    ),
    VIT,
    replace(VIT, model_type="deit"),
    replace(VIT, model_type="beit", multiplier=Multiplier(gain="lambda_1")),
    replace(VIT, model_type="vit_mae"),
    DINOV2,
    replace(DINOV2, model_type="dinov2_with_registers"),
    replace(
        DINOV2,
        model_type="dinov3_vit",
        block="layer.{layer}.",
        projections=(Projections("attention.o_proj", "attention.q_proj", "attention.k_proj", "attention.v_proj"),),
        defaults=sizes(384, 12, 6),
    ),
    WAV2VEC2,
    WAV2VEC2_PRE_NORM,
    replace(WAV2VEC2, model_type="hubert"),
    replace(WAV2VEC2_PRE_NORM, model_type="hubert"),
)
