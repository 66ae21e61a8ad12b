"""Encoders of text and images to build and probe."""

from __future__ import annotations

from tests.variant import Variant

ENCODER = {"auto": "AutoModelForMaskedLM", "attention": "attention", "projection": "attention.output.dense"}
ALBERT = {**ENCODER, "projection": "attention.dense"}

ENCODER_VARIANTS = {
    "bert": Variant("bert", **ENCODER, post_norm=True),
    "roberta": Variant("roberta", **ENCODER, post_norm=True),
    "xlm-roberta": Variant("xlm-roberta", **ENCODER, post_norm=True),
    "camembert": Variant("camembert", **ENCODER, post_norm=True),
    "albert": Variant("albert", {"num_hidden_groups": 2, "inner_group_num": 1}, **ALBERT, post_norm=True),
    "albert-inner-blocks": Variant(
        "albert", {"num_hidden_groups": 2, "inner_group_num": 2}, **ALBERT, n_blocks=4, post_norm=True
    ),
    "vit": Variant(
        "vit",
        {"image_size": 16, "patch_size": 8},
        auto="AutoModelForImageClassification",
        attention="attention",
        projection="attention.o_proj",
    ),
}
