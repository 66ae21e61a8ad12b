"""SmolLM2-135M-Instruct end to end against an independent dense computation.

Needs the GGUF file that `make demo` and `make test` fetch.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from query import Atlas, open_atlas
from tests.ingesting import ingest_into

ROOT = Path(__file__).parent.parent
GGUF = ROOT / "models" / "SmolLM2-135M-Instruct.gguf"
DATA = Path(__file__).parent / "data"
PAIR_NAMES = {
    "mismatch_closure": "mismatch_closure",
    "right": "right_closure",
    "right_coef": "right_alpha",
    "left": "left_closure",
    "left_coef": "left_alpha",
}

pytestmark = [
    pytest.mark.skipif(not GGUF.exists(), reason="models/SmolLM2-135M-Instruct.gguf is not there: run make test"),
    pytest.mark.xdist_group("smollm2"),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The attention of the GGUF file as transformers would save it: sharded, and as one .bin."""
    tensors = attention_as_saved_by_transformers()
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    root = tmp_path_factory.mktemp("smollm2")
    sharded, single = root / "sharded", root / "single"
    for directory in (sharded, single):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + index % 3:05}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save(tensors, single / "pytorch_model.bin")
    return {"sharded": sharded, "bin": single}


def attention_as_saved_by_transformers() -> dict[str, torch.Tensor]:
    """Dequantised projections under their usual names, the rows of q and k in their usual order."""
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    tensors = {}
    for tensor in GGUFReader(GGUF).tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        role = rest.removesuffix(".weight")
        if role in names:
            values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
            if role in ("attn_q", "attn_k"):
                pairs = values.reshape(-1, 32, 2, values.shape[-1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            tensors[f"model.layers.{block}.self_attn.{names[role]}.weight"] = torch.from_numpy(
                np.ascontiguousarray(values)
            )
    return tensors


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory, directories: dict[str, Path]) -> Atlas:
    """A store with the model from GGUF, from sharded safetensors and from a .bin file."""
    store = tmp_path_factory.mktemp("store") / "atlas"
    assert ingest_into(store, GGUF, "gguf").same_content == ()
    assert ingest_into(store, directories["sharded"], "sharded").same_content == ("gguf",)
    assert ingest_into(store, directories["bin"], "bin").same_content == ("gguf", "sharded")
    return open_atlas(store)


def test_every_head_agrees_with_the_dense_reference(atlas: Atlas) -> None:
    reference = pl.read_csv(DATA / "smollm2_heads.csv")
    heads = atlas.sql("SELECT * FROM heads WHERE model = 'gguf' ORDER BY layer, head")
    assert heads.height == reference.height == 270
    assert heads["kv_head"].to_list() == reference["kv_head"].to_list()
    for name in reference.columns[3:]:
        tolerance = {"rtol": 0, "atol": 1e-9} if name == "closure" else {"rtol": 1e-8}
        np.testing.assert_allclose(heads[name], reference[name], err_msg=name, **tolerance)


def test_every_pair_agrees_with_the_dense_reference(atlas: Atlas) -> None:
    reference = pl.read_csv(DATA / "smollm2_pairs.csv")
    pairs = atlas.sql("SELECT * FROM pairs WHERE model = 'gguf' ORDER BY layer, write_head, read_head")
    assert pairs.height == reference.height == 2160
    assert pairs["shared_value"].cast(int).to_list() == reference["shared_value"].to_list()
    for theirs, ours in PAIR_NAMES.items():
        np.testing.assert_allclose(pairs[ours], reference[theirs], rtol=1e-8, atol=1e-11, err_msg=ours)


def test_the_first_finding(atlas: Atlas) -> None:
    row = atlas.closure(models=["gguf"]).row(0, named=True)
    assert (row["heads"], row["strong"]) == (270, 13)
    assert row["median"] == pytest.approx(0.265, abs=5e-4)
    assert atlas.mismatch(models=["gguf"])["maximum"][0] == pytest.approx(0.023, abs=5e-4)
    algebra = atlas.algebra(models=["gguf"]).row(by_predicate=pl.col("pairing") == "same group", named=True)
    assert algebra["right_median"] == pytest.approx(0.919, abs=5e-4)
    assert algebra["right_minimum"] == pytest.approx(0.862, abs=5e-4)
    assert algebra["left_median"] == pytest.approx(0.294, abs=5e-4)


@pytest.mark.parametrize("other", ["sharded", "bin"])
def test_formats_agree(atlas: Atlas, other: str) -> None:
    """One content hash and one set of numbers; q and k rows are in another order in the GGUF."""
    hashes = atlas.sql("SELECT content_hash, qk_hash FROM models ORDER BY model = $other DESC", {"other": other})
    assert hashes["content_hash"].n_unique() == 1
    for table, order in (("heads", "head"), ("pairs", "write_head, read_head"), ("qk", "head")):
        query = f"SELECT * EXCLUDE (model) FROM {table} WHERE model = $model ORDER BY layer, {order}"
        first, second = (atlas.sql(query, {"model": model}) for model in ("gguf", other))
        for name, kind in first.schema.items():
            if kind == pl.Float64:
                np.testing.assert_allclose(second[name], first[name], rtol=1e-9, atol=1e-12, err_msg=name)
            elif isinstance(kind, pl.List):
                np.testing.assert_allclose(
                    np.stack(second[name].to_list()), np.stack(first[name].to_list()), rtol=1e-9, atol=1e-12
                )
            else:
                assert first[name].equals(second[name])
