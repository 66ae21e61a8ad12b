"""Decoders with multi-head latent attention, by ``model_type``, as in transformers 5.24."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingest.decoders import LLAMA
from ingest.family import Family, Keys, Latent, Multiplier, Norm, Projections, sizes


def latent_projections(block: str, *, scaled: bool = False) -> tuple[Projections, Projections]:
    """The low-rank form and the one with a full query matrix, all names beginning with ``block``."""
    full = Latent(
        down=block + "kv_a_proj_with_mqa",
        norm=block + "kv_a_layernorm",
        up=block + "kv_b_proj",
        scaled=scaled,
    )
    low_rank = replace(
        full,
        query_down=block + "q_a_proj",
        query_norm=block + "q_a_layernorm",
        query_up=block + "q_b_proj",
    )
    return (
        Projections(block + "o_proj", layout="latent", latent=low_rank),
        Projections(block + "o_proj", block + "q_proj", layout="latent", latent=full),
    )


def latent_sizes(
    width: int, depth: int, heads: int, *, rank: int, query_rank: int, nope: int, rope: int, value: int
) -> dict[str, Any]:
    """Class defaults under the usual keys."""
    return {
        **sizes(width, depth, heads),
        "kv_lora_rank": rank,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }


DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    projections=latent_projections("self_attn."),
    keys=Keys(value_dim=("v_head_dim",)),
    defaults=latent_sizes(7168, 61, 128, rank=512, query_rank=1536, nope=128, rope=64, value=128),
)

LATENT_DECODERS: tuple[Family, ...] = (
    DEEPSEEK_V3,
    replace(DEEPSEEK_V3, model_type="deepseek_v32"),
    replace(
        DEEPSEEK_V3,
        model_type="deepseek_v2",
        defaults=latent_sizes(4096, 32, 32, rank=512, query_rank=1536, nope=128, rope=64, value=128),
    ),
    replace(
        DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        defaults=latent_sizes(2048, 47, 20, rank=512, query_rank=768, nope=192, rope=64, value=256),
    ),
    replace(
        DEEPSEEK_V3,
        model_type="youtu",
        defaults=latent_sizes(2048, 32, 16, rank=512, query_rank=1536, nope=128, rope=64, value=128),
    ),
    replace(
        DEEPSEEK_V3,
        model_type="minicpm3",
        multiplier=Multiplier(("scale_depth",), over_sqrt_depth=True),
        defaults={
            **latent_sizes(2560, 62, 40, rank=256, query_rank=768, nope=64, rope=32, value=64),
            "scale_depth": 1.4,
        },
    ),
    replace(
        DEEPSEEK_V3,
        model_type="longcat_flash",
        projections=latent_projections("self_attn.{inner}.", scaled=True)[:1],
        feeding=Norm("input_layernorm.{inner}", "rms"),
        keys=Keys(depth=("num_layers",), value_dim=("v_head_dim",)),
        inner_count=2,
        defaults={
            **latent_sizes(6144, 28, 64, rank=512, query_rank=1536, nope=128, rope=64, value=128),
            "num_layers": 28,
        },
    ),
)
