"""Identification counts of a checkpoint, from its headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from cli import main
from tests import checkpoints


def identify(source: Path, *arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(main, ["identify", str(source), "--format", "json", *arguments])
    assert result.exit_code == 0, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


@pytest.mark.parametrize(
    ("settings", "d_rotary", "score"),
    [
        ({}, 0, 2 * 8 * 8),
        ({"rope_theta": 10000.0}, 8, 2 * 8),
        ({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, 4, 2 * (4 + 4 * 4)),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 2, 2 * (2 + 6 * 6)),
    ],
)
def test_counts_follow_the_configuration(settings: dict[str, Any], d_rotary: int, score: int, tmp_path: Path) -> None:
    source = checkpoints.save_safetensors(checkpoints.llama(layers=3).configured(**settings), tmp_path / "model")
    (row,) = identify(source)
    assert (row["layers"], row["d_rotary"], row["biases"]) == (3, d_rotary, "none")
    assert (row["value_freedom"], row["score_freedom"]) == (2 * 8 * 8, score)
    assert row["parameters"] == 2 * 32 * 8 * (4 + 2)
    assert row["unidentified_share"] == pytest.approx((128 + score) / row["parameters"])
    assert (row["cells_exponent"], row["regions_exponent"]) == (4, 32 * 3)
    assert identify(source, "--rotary", "8")[0]["score_freedom"] == 16


def test_biases_are_found_and_counted(tmp_path: Path) -> None:
    (row,) = identify(checkpoints.save_safetensors(checkpoints.bert(), tmp_path / "model"))
    assert row["biases"] == "query, key, value, output"
    assert row["parameters"] == 4 * 32 * 32 + 4 * 32
    assert row["value_freedom"] == 4 * 8 * 8 + 4 * 8
    assert row["score_freedom"] == 4 * 8 * 8 + 4 * 8


def test_layers_of_another_shape_have_their_own_row(tmp_path: Path) -> None:
    model = checkpoints.llama(layers=2)
    model = model.changed(**{"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)})
    rows = identify(checkpoints.save_safetensors(model, tmp_path / "model"))
    assert [(row["layers"], row["biases"]) for row in rows] == [(1, "none"), (1, "query")]
