"""Identification counts and expressivity of a checkpoint, from its configuration and headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingest.plan import GAINS, LayerPlan, Plan
from stats.identification import (
    AttentionShape,
    expressivity,
    unidentified_score_parameters,
    unidentified_value_parameters,
)

ROTARY_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_pct", "rotary_dim", "rotary_emb_base")
"""Configuration keys that only models with rotary embeddings have."""


def rotary_dim(config: Mapping[str, Any], layer: LayerPlan) -> int:
    """Coordinates of a key that rotate, as far as the configuration tells; 0 where it speaks of no rotation."""
    if layer.sizes.latent is not None:
        return layer.sizes.latent.rope
    if isinstance(config.get("rotary_dim"), int):
        return int(config["rotary_dim"])
    rope = config.get("rope_parameters")
    inside = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = next(
        (value for value in (config.get("partial_rotary_factor"), config.get("rotary_pct"), inside) if value), 1
    )
    turning = any(config.get(key) is not None for key in ROTARY_KEYS)
    return 2 * int(layer.sizes.d_key * float(share) / 2) if turning else 0


def identification_rows(plan: Plan, d_rotary: int | None, n_tokens: int) -> list[dict[str, Any]]:
    """A row per stack and shape of layer.

    Args:
        plan: a planned checkpoint.
        d_rotary: coordinates of a key that rotate; from the configuration when None.
        n_tokens: tokens at which the growth is given as log10.
    """
    configs = {stack.name: stack.config for stack in plan.recognition.stacks}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for layer in plan.layers:
        turning = rotary_dim(configs[layer.stack], layer) if d_rotary is None else d_rotary
        biases = {f"{role}_bias": _has_bias(plan, layer, role) for role in ("query", "key", "value", "output")}
        sizes = layer.sizes
        scores = AttentionShape(sizes.n_heads, sizes.n_kv_heads, sizes.d_key, sizes.d_model, turning, **biases)
        values = AttentionShape(sizes.n_heads, sizes.n_kv_heads, sizes.d_head, sizes.d_model, 0, **biases)
        key = (layer.stack, scores, values)
        if key in rows:
            rows[key]["layers"] += 1
            continue
        free = unidentified_value_parameters(values) + unidentified_score_parameters(scores)
        parameters = _parameters(plan, layer)
        rows[key] = {
            "stack": layer.stack,
            "layers": 1,
            "n_heads": sizes.n_heads,
            "n_kv_heads": sizes.n_kv_heads,
            "d_model": sizes.d_model,
            "d_head": sizes.d_head,
            "d_key": sizes.d_key,
            "d_rotary": turning,
            "biases": ", ".join(role.removesuffix("_bias") for role, there in biases.items() if there) or "none",
            "parameters": parameters,
            "value_freedom": unidentified_value_parameters(values),
            "score_freedom": unidentified_score_parameters(scores),
            "unidentified_share": free / parameters,
        }
    for row in rows.values():
        growth = expressivity(row["n_heads"], row["d_model"], row["layers"], n_tokens)
        row |= {
            "cells_exponent": growth.layer_exponent,
            "regions_exponent": growth.region_exponent,
            "log10_cells": growth.layer_log10,
            "log10_regions": growth.region_log10,
        }
    return list(rows.values())


def _parameters(plan: Plan, layer: LayerPlan) -> int:
    """Parameters of the projections of a layer and their biases."""
    weights = {name for role, name in layer.tensors.items() if role not in GAINS}
    biases = {name.removesuffix("weight") + "bias" for name in weights}
    return sum(plan.checkpoint.header(name).numel for name in weights | biases if name in plan.checkpoint)


def _has_bias(plan: Plan, layer: LayerPlan, role: str) -> bool:
    """Whether a projection has a bias; a fused one has it for queries, keys and values alike."""
    tensor = layer.tensors.get(role) or (layer.tensors.get("fused") if role != "output" else None)
    return tensor is not None and tensor.removesuffix("weight") + "bias" in plan.checkpoint
