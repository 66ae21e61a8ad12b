"""What a plan says of each stack, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from ingest.family import PIECES, Layout, NormKind
from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from ingest.summary import LAYOUTS, NORM_KINDS, PIECE_WORDS, plan_rows, plan_summary
from tests import checkpoints


def summary_of(model: checkpoints.Model, folder: Path) -> dict[str, Any]:
    return plan_summary(plan_checkpoint(open_checkpoint(str(checkpoints.save_safetensors(model, folder)))))


def stack_of(model: checkpoints.Model, folder: Path) -> dict[str, Any]:
    (stack,) = summary_of(model, folder)["stacks"]
    return dict(stack)


def test_every_piece_layout_and_norm_has_words() -> None:
    assert set(PIECE_WORDS) == set(PIECES)
    assert set(LAYOUTS) == set(get_args(Layout))
    assert set(NORM_KINDS) == set(get_args(NormKind))


def test_a_decoder_with_grouped_values_and_a_gap(tmp_path: Path) -> None:
    model = checkpoints.llama(layers=4).without("model.layers.2.self_attn")
    assert stack_of(model, tmp_path) == {
        "stack": "decoder",
        "family": "llama",
        "layers_with_attention": "0-1, 3",
        "layers_without": ["2: no attention tensors in the checkpoint"],
        "heads_per_layer": 4,
        "kv_heads_per_layer": 2,
        "pruned": [],
        "d_model": 32,
        "d_source": None,
        "d_head": 8,
        "d_key": 8,
        "layout": ["separate: query, key and value each have a tensor"],
        "tensors": 12,
        "bytes_to_read": 3 * 4 * (32 * 32 + 16 * 32 + 16 * 32 + 32 * 32),
        "dtypes": "F32",
        "between_token_and_output": [],
        "multiplier": [],
        "folded": ["input_layernorm (RMSNorm, gain w) in front of attention, into queries, keys and values"],
    }


def test_an_encoder_that_folds_nothing(tmp_path: Path) -> None:
    stack = stack_of(checkpoints.bert().configured(pruned_heads={"1": [0, 2]}).changed(**cut_heads()), tmp_path)
    assert stack["pruned"] == ["layer 1: heads 0, 2"]
    assert stack["folded"] == ["nothing: attention reads and writes the residual stream through no norm of its own"]


def cut_heads() -> dict[str, torch.Tensor]:
    """Layer 1 of the encoder with two of its four heads."""
    before = "bert.encoder.layer.1.attention."
    read = {f"{before}self.{name}.weight": torch.zeros(16, 32) for name in ("query", "key", "value")}
    return read | {f"{before}output.dense.weight": torch.zeros(32, 16)}


def test_norms_on_both_sides(tmp_path: Path) -> None:
    model = checkpoints.llama(model_type="gemma3_text")
    gains = {f"model.layers.{layer}.self_attn.q_norm.weight": torch.ones(8) for layer in (1,)}
    stack = stack_of(model.changed(**gains), tmp_path)
    assert stack["folded"] == [
        "input_layernorm (RMSNorm, gain 1 + w) in front of attention, into queries, keys and values",
        "post_attention_layernorm (RMSNorm, gain 1 + w) on what attention writes, into outputs",
    ]
    assert stack["between_token_and_output"] == [
        "qk_norm: queries and keys pass a norm before they meet; T is the same without (layers 1)"
    ]


def test_what_surrounds_the_heads_is_said(tmp_path: Path) -> None:
    plan = plan_checkpoint(open_checkpoint(str(checkpoints.save_safetensors(checkpoints.llama(), tmp_path))))
    around = {"multiplier": 0.5, "value_scale": 2.0, "layer_scale": "scale", "pieces": ("output_gate", "sinks")}
    layers = tuple(replace(layer, **around) for layer in plan.layers)
    (stack,) = plan_summary(replace(plan, layers=layers))["stacks"]
    assert stack["multiplier"] == [
        "values times 2, in T",
        "the branch times 0.5, in T only where scaled",
        "the branch is scaled by scale and its like; in T only where scaled",
    ]
    assert stack["between_token_and_output"] == [
        "output_gate: each token multiplies what its heads read by a gate; left out of T",
        "sinks: attention weights sum to less than one; T is the same without",
    ]


def test_fused_tensors_are_explained(tmp_path: Path) -> None:
    stack = stack_of(checkpoints.gpt2(), tmp_path)
    assert stack["layout"] == ["concatenated: one tensor has the rows of all queries, then all keys, then all values"]
    assert stack["tensors"] == 4


def test_rows_and_summary_count_the_same_tensors(tmp_path: Path) -> None:
    model = checkpoints.llama(dtype=torch.float16)
    folder = checkpoints.save_safetensors(model, tmp_path)
    plan = plan_checkpoint(open_checkpoint(str(folder)), ("raw", "folded"))
    summary, rows = plan_summary(plan), plan_rows(plan)
    assert summary["tensors"] == len(rows) == summary["stacks"][0]["tensors"]
    assert summary["bytes_to_read"] == sum(row["bytes"] for row in rows) == summary["stacks"][0]["bytes_to_read"]
    assert summary["stacks"][0]["dtypes"] == "F16"
