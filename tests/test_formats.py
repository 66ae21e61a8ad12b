"""One model, whatever holds it: formats, shardings, wrappers, head counts, damaged and absent heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import polars as pl
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ingest.factors import ModelHashes, model_hashes
from ingest.pipeline import ComputeSettings, hash_layers, measure
from ingest.plan import Operator, Plan, plan_checkpoint
from ingest.safetensors_file import LocalFile
from ingest.source import open_checkpoint
from query import open_atlas
from query.atlas import Atlas
from stats.errors import CheckpointError
from stats.registry import PAIR_STATISTICS
from store.tables import TABLES
from tests import checkpoints
from tests.checkpoints import FORMATS, Model, bert, gpt2, llama, save_gguf, save_safetensors
from tests.ingesting import ingest_into

CPU = ComputeSettings(device="cpu")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
Q_PROJ, K_PROJ, V_PROJ, O_PROJ = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo")


def planned(path: Path) -> Plan:
    """The plan for whichever operators the model has."""
    checkpoint = open_checkpoint(str(path))
    foldable = checkpoint.config["model_type"] != "bert"
    return plan_checkpoint(checkpoint, ("raw", "folded") if foldable else ("raw",))


def hashes(path: Path) -> ModelHashes:
    return model_hashes(list(hash_layers(planned(path))))


def numbers(path: Path) -> dict[tuple[int, str, str], np.ndarray]:
    """Every measured array by layer, operator and name."""
    return {
        (item.plan.layer, operator, name): array
        for item in measure(planned(path), CPU)
        for operator, arrays in item.arrays.items()
        for name, array in arrays.items()
    }


def assert_same_numbers(found: Path, expected: Path) -> None:
    left, right = numbers(found), numbers(expected)
    assert left.keys() == right.keys()
    for key, array in left.items():
        np.testing.assert_array_equal(array, right[key], err_msg=str(key))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_hashes_and_numbers(form: str, dtype: str, tmp_path: Path) -> None:
    model = llama(dtype=DTYPES[dtype])
    reference, path = save_safetensors(model, tmp_path / "reference"), FORMATS[form](model, tmp_path / "model")
    expected, found = hashes(reference), hashes(path)
    assert (found.content, found.gains) == (expected.content, expected.gains)
    assert (found.query_key == expected.query_key) == (form != "permuted gguf")
    left, right = numbers(path), numbers(reference)
    assert left.keys() == right.keys()
    for key, array in left.items():
        if form == "permuted gguf" and key[2].startswith("qk_"):
            np.testing.assert_allclose(array, right[key], rtol=1e-11, atol=1e-13, err_msg=str(key))
        else:
            np.testing.assert_array_equal(array, right[key], err_msg=str(key))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_content_hash_is_of_values_not_of_storage(dtype: str, tmp_path: Path) -> None:
    model = llama(dtype=DTYPES[dtype])
    assert hashes(save_safetensors(model, tmp_path / "a")) == hashes(
        save_safetensors(model.cast(torch.float64), tmp_path / "b")
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_hashes_notice_a_single_last_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = llama(dtype=dtype)
    reference = hashes(save_safetensors(model, tmp_path / "reference"))
    for name, of_content in ((Q_PROJ, False), (K_PROJ, False), (V_PROJ, True), (O_PROJ, True)):
        tensor = model.tensors[name].clone()
        tensor[-1, -1] = torch.nextafter(tensor[-1, -1], torch.ones((), dtype=dtype))
        found = hashes(save_safetensors(model.changed(**{name: tensor}), tmp_path / name))
        assert (found.content != reference.content) == of_content
        assert (found.query_key != reference.query_key) == (not of_content)


@pytest.mark.parametrize("form", ["safetensors", "sharded safetensors", "bare safetensors", "gguf"])
def test_exactly_the_announced_bytes_are_read_each_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(FORMATS[form](llama(), tmp_path / "model"))
    announced = plan.bytes_to_read
    reads: Counter[tuple[str, int, int]] = Counter()
    read_into = LocalFile.read_into

    def counted(file: LocalFile, offset: int, buffer: memoryview) -> None:
        reads[file.name, offset, len(buffer)] += 1
        read_into(file, offset, buffer)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    assert len(list(measure(plan, CPU))) == 2
    assert set(reads.values()) == {1}
    assert sum(length for _, _, length in reads) == announced
    assert announced == 2 * 4 * (2 * 32 * 32 + 2 * 16 * 32 + 32)


def test_weight_files_beside_an_index_are_ignored(tmp_path: Path) -> None:
    model, other = llama(), llama(seed=1)
    path = checkpoints.save_sharded_safetensors(model, tmp_path / "model")
    expected = hashes(path)
    for name in ("model.safetensors", "consolidated.safetensors"):
        checkpoints.save_file(dict(other.tensors), path / name)
    checkpoints.save_torch(other, path)
    assert hashes(path) == expected
    assert hashes(path) != hashes(save_safetensors(other, tmp_path / "other"))


@pytest.mark.parametrize("quantisation", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_a_quantised_gguf_file_equals_its_dequantised_values(
    quantisation: GGMLQuantizationType, tmp_path: Path
) -> None:
    model = llama()
    plain = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), quantisation), quantisation))
        for name, tensor in model.tensors.items()
        if tensor.ndim == 2
    }
    expected = save_safetensors(model.changed(**plain), tmp_path / "dequantised")
    found = save_gguf(model, tmp_path / "quantised", quantisation=quantisation)
    assert hashes(found) == hashes(expected)
    assert hashes(found) != hashes(save_safetensors(model, tmp_path / "exact"))
    assert_same_numbers(found, expected)
    assert planned(found).source_dtype == quantisation.name


WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "state_dict": lambda tensors: {"state_dict": tensors, "epoch": 3},
    "model": lambda tensors: {"model": tensors, "optimizer": {"lr": torch.ones(1)}},
    "both": lambda tensors: {"model": {"state_dict": tensors}},
    "parameters": lambda tensors: {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()},
    "views": lambda tensors: (
        {name: tensor.mT.contiguous().mT for name, tensor in tensors.items() if tensor.ndim == 2}
        | {name: tensor for name, tensor in tensors.items() if tensor.ndim == 1}
    ),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrapped_state_dicts(wrapping: str, legacy: bool, tmp_path: Path) -> None:
    model = llama()
    expected = save_safetensors(model, tmp_path / "plain")
    checkpoints.save_config(model, tmp_path / "wrapped")
    torch.save(
        WRAPPINGS[wrapping](dict(model.tensors)),
        tmp_path / "wrapped" / "pytorch_model.bin",
        _use_new_zipfile_serialization=not legacy,
    )
    assert hashes(tmp_path / "wrapped") == hashes(expected)
    assert_same_numbers(tmp_path / "wrapped", expected)


@pytest.mark.parametrize("form", ["safetensors", "sharded safetensors", "torch"])
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: "module." + name,
        lambda name: "module._orig_mod." + name,
        lambda name: name.removeprefix("model."),
        lambda name: "language_model." + name,
    ],
    ids=["module", "compiled", "headless", "language_model"],
)
def test_prefixes_around_the_names(rename: Callable[[str], str], form: str, tmp_path: Path) -> None:
    model = llama()
    found = FORMATS[form](model.renamed(rename), tmp_path / "prefixed")
    assert hashes(found) == hashes(save_safetensors(model, tmp_path / "plain"))


def sizes(path: Path) -> tuple[int, int, int]:
    layer = planned(path).layers[0]
    return layer.n_heads, layer.n_kv_heads, layer.d_head


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (llama(d_head=16), (4, 2, 16)),
        (llama().configured(head_dim=None), (4, 2, 8)),
        (llama().configured(head_dim=...), (4, 2, 8)),
        (llama(kv_heads=4).configured(num_key_value_heads=None), (4, 4, 8)),
        (llama(kv_heads=4).configured(num_key_value_heads=...), (4, 4, 8)),
        (llama(kv_heads=1), (4, 1, 8)),
        (llama(model_type="mistral", heads=16, kv_heads=8, d_head=4).configured(num_key_value_heads=...), (16, 8, 4)),
        (llama(model_type="mistral", heads=16, kv_heads=8, d_head=4).configured(num_key_value_heads=None), (16, 8, 4)),
        (llama(model_type="qwen3", d_head=128).configured(head_dim=...), (4, 2, 128)),
    ],
    ids=[
        "explicit head_dim",
        "head_dim null",
        "head_dim absent",
        "kv null",
        "kv absent",
        "kv one",
        "mistral kv absent",
        "mistral kv null",
        "qwen3 head_dim absent",
    ],
)
def test_head_counts_from_keys_nulls_and_class_defaults(
    model: Model, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    assert sizes(save_safetensors(model, tmp_path / "model")) == expected


@pytest.mark.parametrize("kv_heads", [16, 4])
def test_a_class_default_that_the_shapes_contradict_is_refused(kv_heads: int, tmp_path: Path) -> None:
    model = llama(model_type="mistral", heads=16, kv_heads=kv_heads, d_head=4).configured(num_key_value_heads=...)
    with pytest.raises(CheckpointError, match="shape contradicts") as caught:
        planned(save_safetensors(model, tmp_path / "model"))
    assert "[32, 32] from 16 heads, 8 key/value heads" in str(caught.value)
    assert f"[{4 * kv_heads}, 32]" in str(caught.value)


def test_one_value_for_all_heads(tmp_path: Path) -> None:
    path = save_safetensors(llama(kv_heads=1), tmp_path / "model")
    assert all(np.array_equal(item.kv_head, np.zeros(4)) for item in measure(planned(path), CPU))
    repeated = llama(kv_heads=1)
    full = repeated.changed(
        **{
            name: tensor.repeat(4, 1)
            for name, tensor in repeated.tensors.items()
            if "k_proj" in name or "v_proj" in name
        }
    ).configured(num_key_value_heads=4)
    shared, separate = numbers(path), numbers(save_safetensors(full, tmp_path / "full"))
    for key, array in shared.items():
        if key[-1].startswith("range_angle"):
            assert np.isnan(separate[key]).all()
        else:
            np.testing.assert_allclose(array, separate[key], rtol=1e-9, atol=1e-12, err_msg=str(key))


NOT_A_NUMBER = {
    "DOUBLE": "count_if(isnan({column}))",
    "DOUBLE[]": "count_if(len(list_filter({column}, lambda x: isnan(x))) > 0)",
}


@contextmanager
def atlas_of(tmp_path: Path, operators: tuple[Operator, ...] = ("raw", "folded"), **models: Model) -> Iterator[Atlas]:
    """A store of the models, opened, after checking that no column shows a NaN."""
    for name, model in models.items():
        ingest_into(tmp_path / "store", save_safetensors(model, tmp_path / name), name, operators)
    with open_atlas(tmp_path / "store") as atlas:
        for table in TABLES:
            numeric = [column for column in table.columns if column.sql_type in NOT_A_NUMBER]
            if numeric:
                counts = ", ".join(NOT_A_NUMBER[column.sql_type].format(column=column.name) for column in numeric)
                assert not any(atlas.sql(f"SELECT {counts} FROM {table.name}").row(0)), table.name
        yield atlas


def damaged(model: Model, name: str, rows: slice, columns: slice, value: float) -> Model:
    tensor = model.tensors[name].clone()
    tensor[rows, columns] = value
    return model.changed(**{name: tensor})


HEAD_1 = slice(8, 16)
"""Rows of Q or columns of O that belong to head 1 of ``llama()``; rows of V for heads 2 and 3."""
ALL = slice(None)
ONE = slice(9, 10)


@dataclass(frozen=True)
class Damage:
    """A change to layer 1 and what follows for it.

    ``heads`` lose their closure for ``reason``; ``writes`` and ``reads`` are the heads whose O or V
    is damaged, and ``queries`` those whose query-key form is.
    """

    name: str
    rows: slice
    columns: slice
    value: float
    reason: str = ""
    writes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()

    @property
    def heads(self) -> list[int]:
        return sorted({*self.writes, *self.reads})


DAMAGES = {
    "NaN in one O": Damage(O_PROJ, slice(3, 4), ONE, np.nan, "nonfinite", writes=(1,)),
    "infinity in one O": Damage(O_PROJ, slice(3, 4), ONE, -np.inf, "nonfinite", writes=(1,)),
    "NaN in a shared V": Damage(V_PROJ, ONE, slice(3, 4), np.nan, "nonfinite", reads=(2, 3)),
    "infinity in a shared V": Damage(V_PROJ, ONE, slice(3, 4), np.inf, "nonfinite", reads=(2, 3)),
    "NaN in a query": Damage(Q_PROJ, ONE, slice(3, 4), np.nan, queries=(1,)),
    "NaN in a shared key": Damage(K_PROJ, ONE, slice(3, 4), np.nan, queries=(2, 3)),
    "a head of zeros": Damage(O_PROJ, ALL, HEAD_1, 0.0, "zero", writes=(1,)),
    "a shared V of zeros": Damage(V_PROJ, HEAD_1, ALL, 0.0, "zero", reads=(2, 3)),
}


def rows_of(atlas: Atlas, table: str, model: str) -> pl.DataFrame:
    return atlas.sql(f"SELECT * EXCLUDE (model) FROM {table} WHERE model = $model ORDER BY ALL", {"model": model})


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_stays_with_the_heads_it_belongs_to(case: str, tmp_path: Path) -> None:
    damage, model = DAMAGES[case], llama()
    broken = damaged(model, damage.name, damage.rows, damage.columns, damage.value)
    in_layer = pl.col("layer") == 1
    hit = in_layer & pl.col("head").is_in(damage.heads)
    queried = in_layer & pl.col("head").is_in(damage.queries)
    touched = in_layer & (pl.col("write_head").is_in(damage.heads) | pl.col("read_head").is_in(damage.heads))
    mismatched = in_layer & (pl.col("write_head").is_in(damage.writes) | pl.col("read_head").is_in(damage.reads))
    with atlas_of(tmp_path, ("raw",), intact=model, broken=broken) as atlas:
        found = {table: rows_of(atlas, table, "broken") for table in ("heads", "spectra", "qk", "pairs")}
        expected = {table: rows_of(atlas, table, "intact") for table in found}
    for table, affected in {"heads": hit, "spectra": hit, "qk": queried, "pairs": touched}.items():
        assert found[table].filter(~affected).equals(expected[table].filter(~affected)), table
    assert set(expected["heads"]["status"]) == {"ok"}

    lost = found["heads"].filter(hit)
    assert lost["head"].to_list() == damage.heads
    assert lost["status"].to_list() == ["undefined"] * lost.height
    assert lost["reason"].to_list() == [damage.reason] * lost.height
    assert lost["closure"].null_count() == lost["alpha"].null_count() == lost.height
    known = 0.0 if damage.reason == "zero" else None
    assert lost["norm"].to_list() == lost["rank"].to_list() == [known] * lost.height
    assert found["spectra"].filter(hit)["sigma"].to_list() == [None if known is None else [0.0] * 8] * lost.height

    forms = found["qk"].filter(queried).drop("operator", "stack", "layer", "head")
    assert all(forms[name].null_count() == len(damage.queries) for name in forms.columns)

    for statistic in PAIR_STATISTICS:
        gone = mismatched if statistic.name == "mismatch_closure" else touched
        pairs = found["pairs"].filter(gone)[statistic.name]
        assert pairs.null_count() == len(pairs)
        kept = [frame["pairs"].filter(~gone)[statistic.name] for frame in (found, expected)]
        assert kept[0].equals(kept[1]), statistic.name


def without_heads(model: Model, layer: int, heads: list[int]) -> Model:
    """The model with heads physically removed from one layer, as ``prune_heads`` did."""
    kept = torch.tensor([unit for unit in range(32) if unit // 8 not in heads], dtype=torch.int64)
    cut = {}
    for name, tensor in model.tensors.items():
        if f"layer.{layer}.attention.self." in name:
            cut[name] = tensor[kept]
        elif f"layer.{layer}.attention.output.dense.weight" in name:
            cut[name] = tensor[:, kept]
        elif name == f"h.{layer}.attn.c_attn.weight":
            cut[name] = tensor[:, torch.cat([kept, kept + 32, kept + 64])]
        elif name == f"h.{layer}.attn.c_proj.weight":
            cut[name] = tensor[kept]
    return model.changed(**cut).configured(pruned_heads={str(layer): heads})


@pytest.mark.parametrize("heads", [[2], [3, 0], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("build", [bert, gpt2])
def test_pruned_heads_are_rows_and_the_others_keep_their_numbers(
    build: Callable[[], Model], heads: list[int], tmp_path: Path
) -> None:
    model = build()
    in_layer = pl.col("layer") == 1
    gone = in_layer & pl.col("head").is_in(heads)
    pair_gone = in_layer & (pl.col("write_head").is_in(heads) | pl.col("read_head").is_in(heads))
    with atlas_of(tmp_path, ("raw",), intact=model, pruned=without_heads(model, 1, heads)) as atlas:
        for table, lost in (("heads", gone), ("spectra", gone), ("qk", gone), ("pairs", pair_gone)):
            found, expected = rows_of(atlas, table, "pruned"), rows_of(atlas, table, "intact")
            assert found.height == expected.height
            assert found.filter(~lost).equals(expected.filter(~lost)), table
        rows = rows_of(atlas, "heads", "pruned").filter(gone)
        assert rows["head"].to_list() == sorted(heads)
        assert set(rows["status"]) == {"undefined"}
        assert set(rows["reason"]) == {"pruned"}
        assert rows["closure"].null_count() == len(heads)


@pytest.mark.parametrize("pruned", [{}, None, {"0": []}], ids=str)
def test_an_empty_list_of_pruned_heads_prunes_nothing(pruned: object, tmp_path: Path) -> None:
    found = save_safetensors(bert().configured(pruned_heads=pruned), tmp_path / "listed")
    assert_same_numbers(found, save_safetensors(bert(), tmp_path / "plain"))


def test_layers_outside_the_configuration_and_missing_layers_are_listed(tmp_path: Path) -> None:
    model = llama(layers=4).configured(num_hidden_layers=3).without("layers.1.self_attn")
    with atlas_of(tmp_path, model=model, whole=llama(layers=4)) as atlas:
        assert rows_of(atlas, "skipped", "model").rows() == [
            ("decoder", 1, "no attention tensors in the checkpoint"),
            ("decoder", 3, "beyond the 3 layers of the configuration"),
        ]
        assert rows_of(atlas, "layers", "model")["layer"].to_list() == [0, 2]
        for table in ("heads", "spectra", "qk", "pairs", "layers"):
            expected = rows_of(atlas, table, "whole").filter(pl.col("layer").is_in([0, 2]))
            assert rows_of(atlas, table, "model").equals(expected)
        assert rows_of(atlas, "skipped", "whole").is_empty()
        assert atlas.sql("SELECT n_layers FROM models ORDER BY model")["n_layers"].to_list() == [2, 4]
