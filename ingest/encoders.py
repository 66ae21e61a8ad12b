"""Encoders of text and images, by ``model_type``, checked against the modules of transformers 5.24."""

from __future__ import annotations

from dataclasses import replace

from ingest.family import Family, Keys, Norm, Projections

BERT = Family(
    "bert",
    "encoder.layer.{layer}.",
    (Projections("attention.output.dense", "attention.self.query", "attention.self.key", "attention.self.value"),),
    stack="encoder",
    defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
)

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
    ),
)
