"""The store against running models: what agrees, what must not, and what is said where nothing can be compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner, Result

import cli
import ingest.running
from ingest.conformance import compare_layer, relative_difference
from ingest.factors import head_factors, read_weights
from ingest.families import FAMILIES
from ingest.plan import Operator, plan_checkpoint
from ingest.recognition import recognise
from ingest.running import RunningModel
from ingest.source import open_checkpoint
from store.arrays import attributes_of
from store.atlas import AtlasStore
from store.conformance import layer_numbers
from store.integrity import publish_rows, seal
from tests import checkpoints, dense, test_encoder_decoders, test_families, test_towers
from tests.encoder_decoder_variants import ENCODER_DECODER_VARIANTS
from tests.ingesting import ingest_into

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILY_NAMES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "bert",
    "megatron-bert",
    "vit",
    "dbrx",
    "deepseek_v3",
    "gemma3n_text",
    "gpt_oss",
    "bitnet",
    "qwen3_next",
)
TOWER_NAMES = ("clip", "siglip2", "qwen2-vl", "qwen2.5-omni", "mllama", "instructblip")
ENCODER_DECODER_NAMES = ("t5", "whisper")
EXACT, ROUNDED = 1e-12, 1e-6
"""Errors where all is in float64, and where norms, or weights of several tokens, are rounded to float32."""

Subjects = Callable[[str], Path]


def build(name: str) -> Any:
    """A tiny model of random weights."""
    if name in test_families.VARIANTS:
        return test_families.random_model(test_families.VARIANTS[name])
    if name in ENCODER_DECODER_VARIANTS:
        return test_encoder_decoders.random_model(ENCODER_DECODER_VARIANTS[name])
    return test_towers.random_model(name)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance") / "atlas"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    """Saves a model at first use."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / name
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            build(name).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def subject(saved: Subjects, store: Path) -> Subjects:
    """Saves and ingests a model at first use, with every operator it has."""

    @cache
    def make(name: str) -> Path:
        folder = saved(name)
        ingest_into(store, folder, name, operators_of(folder))
        return folder

    return make


def operators_of(folder: Path) -> tuple[Operator, ...]:
    """The operators a checkpoint has."""
    stacks = recognise(open_checkpoint(str(folder)), None).stacks
    return ("raw", "folded") if any(stack.family.can_fold for stack in stacks) else ("raw",)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["verify", *map(str, arguments)])


def against(folder: Path, store: Path, *options: object) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and rows of a comparison."""
    result = invoke(folder, "--against", "transformers", "--store", store, "--format", "json", *options)
    assert result.stdout, result.output
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *TOWER_NAMES, *ENCODER_DECODER_NAMES])
def test_heads_are_those_that_run(name: str, saved: Subjects) -> None:
    folder = saved(name)
    checkpoint = open_checkpoint(str(folder))
    for operator in operators_of(folder):
        planned = plan_checkpoint(checkpoint, [operator])
        running = RunningModel(str(folder), planned)
        running.find(planned, planned.layers)
        for layer in planned.layers:
            weights = read_weights(checkpoint, layer)
            factors = head_factors(weights, layer, operator, torch.device("cpu"), torch.float64)
            found = compare_layer(running, checkpoint, layer, operator, factors)
            assert (found.outcome, found.reason) == ("ok", ""), layer
            assert found.operator_error is not None
            assert found.operator_error < (EXACT if operator == "raw" and layer.stack == "decoder" else ROUNDED)
            assert found.shifted_error is not None
            assert found.shifted_error > 0.5
            assert set(found.neutralised) >= set(layer.neutralised)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "deepseek_v3", "t5"])
def test_stored_heads_are_those_that_run(name: str, subject: Subjects, store: Path) -> None:
    folder = subject(name)
    for operator in operators_of(folder):
        planned = plan_checkpoint(open_checkpoint(str(folder)))
        status, rows = against(folder, store, "--operator", operator)
        assert [(row["stack"], row["layer"]) for row in rows] == [(item.stack, item.layer) for item in planned.layers]
        for row in rows:
            assert row["outcome"] == "ok", row
            assert row["operator_error"] < ROUNDED
            assert row["stored_error"] < 1e-10
            assert row["shifted_error"] > 0.5
        assert status == 0


def test_layers_are_chosen_by_number(subject: Subjects, store: Path) -> None:
    status, rows = against(subject("t5"), store, "--layers", "1")
    assert (status, [row["stack"] for row in rows]) == (0, ["encoder", "decoder", "cross"])
    assert {row["layer"] for row in rows} == {1}
    result = invoke(subject("t5"), "--against", "transformers", "--store", store, "--layers", "1,77")
    assert result.exit_code == 1
    assert "found: 77" in result.stderr


def test_a_wrong_layout_is_found(saved: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("gpt_neox")
    (row,) = FAMILIES["gpt_neox"]
    (form,) = row.projections
    wrong = replace(row, projections=(replace(form, layout="concatenated"),))
    assert form.layout != "concatenated"
    monkeypatch.setitem(FAMILIES, "gpt_neox", (wrong,))
    ingest_into(tmp_path / "atlas", folder, "gpt_neox")
    status, rows = against(folder, tmp_path / "atlas")
    assert status == 1
    for found in rows:
        assert (found["outcome"], found["reason"]) == ("differs", "the running heads do something else")
        assert found["operator_error"] > 0.5
        assert found["stored_error"] < 1e-10


def test_a_wrong_sharing_of_values_is_found(saved: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("llama")

    def regrouped(*arguments: Any) -> Any:
        factors = head_factors(*arguments)
        n_values = len(factors.value)
        return replace(factors, kv_head=(factors.kv_head + 1) % n_values)

    monkeypatch.setattr("store.conformance.head_factors", regrouped)
    ingest_into(tmp_path / "atlas", folder, "llama")
    status, rows = against(folder, tmp_path / "atlas")
    assert status == 1
    assert all(row["operator_error"] > 0.5 for row in rows)


@pytest.mark.parametrize("name", ["bitnet", "gpt_oss", "gemma3n_text"])
def test_a_piece_the_row_does_not_know_is_never_ok(
    name: str, saved: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(name)
    monkeypatch.setitem(FAMILIES, name, tuple(replace(row, pieces=()) for row in FAMILIES[name]))
    ingest_into(tmp_path / "atlas", folder, name)
    status, rows = against(folder, tmp_path / "atlas")
    assert status == 1
    assert {row["outcome"] for row in rows} == {"not compared"}
    assert {row["reason"] for row in rows} == {"the module is not linear in its tokens"}


def test_other_weights_than_those_stored(tmp_path: Path) -> None:
    store = tmp_path / "atlas"
    folders = [checkpoints.save_safetensors(checkpoints.llama(seed=seed), tmp_path / f"m{seed}") for seed in (0, 1)]
    ingest_into(store, folders[0], "m")
    status, rows = against(folders[1], store, "--name", "m")
    assert status == 1
    for row in rows:
        assert (row["outcome"], row["reason"]) == ("differs", "the store holds other weights")
        assert row["operator_error"] < EXACT


def test_numbers_that_only_the_weights_contradict(tmp_path: Path) -> None:
    """Numbers of one model under the hashes of another pass every check of the store on itself."""
    root = tmp_path / "atlas"
    folders = [checkpoints.save_safetensors(checkpoints.llama(seed=seed), tmp_path / f"m{seed}") for seed in (0, 1)]
    for folder in folders:
        ingest_into(root, folder, folder.name)
    store = AtlasStore.open(root)
    own, other = (store.models()[name].array_group for name in ("m0", "m1"))
    forged, honest = (attributes_of(store.arrays_path / group) for group in (own, other))
    for row, source in zip(forged["layers"], honest["layers"], strict=True):
        row["content_hash"] = source["content_hash"]
    zarr.open_group(str(store.arrays_path / own), mode="r+").update_attributes(forged)
    seal(store, own, "raw")
    publish_rows(store, "m0", own)
    assert invoke("m0", "--store", root).exit_code == 0
    status, rows = against(folders[1], root, "--name", "m0")
    assert status == 1
    for row in rows:
        assert (row["outcome"], row["reason"]) == ("differs", "stored numbers do not follow from the weights")
        assert row["operator_error"] < EXACT
        assert row["stored_error"] > 1e-3


def test_a_damaged_store_is_not_compared(tmp_path: Path, llama_directory: Path) -> None:
    store = tmp_path / "atlas"
    ingest_into(store, llama_directory, "m")
    (array,) = store.glob("arrays.zarr/*/raw/decoder/closure/c/*/*")
    array.write_bytes(array.read_bytes()[::-1])
    result = invoke(llama_directory, "--against", "transformers", "--store", store, "--name", "m")
    assert result.exit_code == 1
    assert "the stored model is damaged" in result.stderr


def test_heads_without_numbers_do_not_hide_the_others(tmp_path: Path) -> None:
    """A head of zeros, and one whose square vanishes."""
    model = checkpoints.llama(layers=2, kv_heads=4)
    output = model.tensors["model.layers.0.self_attn.o_proj.weight"].clone()
    output[:, :8] = 0
    value = model.tensors["model.layers.0.self_attn.v_proj.weight"].clone()
    value[8:16, 16:], output[:16, 8:16] = 0, 0
    model = model.changed(
        **{"model.layers.0.self_attn.o_proj.weight": output, "model.layers.0.self_attn.v_proj.weight": value}
    )
    folder = checkpoints.save_safetensors(model, tmp_path / "m")
    ingest_into(tmp_path / "atlas", folder, "m")
    status, rows = against(folder, tmp_path / "atlas")
    assert (status, [row["outcome"] for row in rows]) == (0, ["ok", "ok"])


def test_heads_that_are_all_alike_prove_nothing(tmp_path: Path) -> None:
    model = checkpoints.llama(layers=2, kv_heads=1)
    name = "model.layers.0.self_attn.o_proj.weight"
    folder = checkpoints.save_safetensors(
        model.changed(**{name: model.tensors[name][:, :8].repeat(1, 4)}), tmp_path / "m"
    )
    ingest_into(tmp_path / "atlas", folder, "m")
    status, rows = against(folder, tmp_path / "atlas")
    assert status == 0
    assert [row["outcome"] for row in rows] == ["not compared", "ok"]
    assert rows[0]["reason"] == "all heads of the layer do the same"


def test_infinite_heads_are_not_compared(tmp_path: Path) -> None:
    model = checkpoints.llama(layers=2)
    value = model.tensors["model.layers.0.self_attn.v_proj.weight"].clone()
    value[0, 0] = torch.inf
    folder = checkpoints.save_safetensors(
        model.changed(**{"model.layers.0.self_attn.v_proj.weight": value}), tmp_path / "m"
    )
    ingest_into(tmp_path / "atlas", folder, "m")
    status, rows = against(folder, tmp_path / "atlas")
    assert status == 0
    assert [row["outcome"] for row in rows] == ["not compared", "ok"]
    assert rows[0]["reason"] == "a head gives NaN or infinity"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_are_compared_as_they_are_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = checkpoints.save_safetensors(checkpoints.llama(dtype=dtype), tmp_path / "m")
    ingest_into(tmp_path / "atlas", folder, "m")
    status, rows = against(folder, tmp_path / "atlas")
    assert status == 0
    assert all(row["operator_error"] < EXACT for row in rows)


def test_a_gguf_file(tmp_path: Path) -> None:
    file = checkpoints.save_gguf(checkpoints.llama(), tmp_path / "m")
    ingest_into(tmp_path / "atlas", file, "m", ("raw", "folded"))
    for operator in ("raw", "folded"):
        status, rows = against(file, tmp_path / "atlas", "--name", "m", "--operator", operator)
        assert status == 0, rows
        assert all(row["operator_error"] < ROUNDED for row in rows)


def test_a_model_that_cannot_be_loaded_or_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "atlas"
    model = checkpoints.llama()
    folder = checkpoints.save_safetensors(model, tmp_path / "m")
    ingest_into(store, folder, "m")
    odd = checkpoints.save_safetensors(model.configured(hidden_act="nonsense"), tmp_path / "odd")
    result = invoke(odd, "--against", "transformers", "--store", store, "--name", "m")
    assert result.exit_code == 1
    assert "transformers cannot load the checkpoint" in result.stderr
    assert "nonsense" in result.stderr

    def no_input(_model: Any) -> dict[str, Any]:
        return {"input_ids": "nothing"}

    monkeypatch.setattr(ingest.running, "dummy_input", no_input)
    status, rows = against(folder, store)
    assert status == 1
    assert {row["outcome"] for row in rows} == {"not compared"}
    assert all(row["reason"].startswith("LlamaForCausalLM cannot be run: ") for row in rows)


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, llama_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest_into(tmp_path / "atlas", llama_directory, "m")
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke(llama_directory, "--against", "transformers", "--store", tmp_path / "atlas", "--name", "m")
    assert result.exit_code == 1
    assert "pip install '.[conformance]'" in result.stderr
    assert invoke("m", "--store", tmp_path / "atlas").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--operator", "raw"], "go with --against"),
        (["m", "--layers", "1"], "go with --against"),
        (["--against", "transformers"], "needs the checkpoint to run"),
        (["m", "--against", "transformers", "--layers", "1,x"], "--layers wants numbers"),
        (["m", "--against", "nothing"], "Invalid value for '--against'"),
    ],
)
def test_usage(arguments: list[str], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_what_the_store_does_not_hold(tmp_path: Path, llama_directory: Path) -> None:
    store = tmp_path / "atlas"
    ingest_into(store, llama_directory, "m")
    for options, words in (
        (["--name", "absent"], "no model named 'absent'"),
        (["--name", "m", "--operator", "folded"], "m has no folded operator in the store"),
    ):
        result = invoke(llama_directory, "--against", "transformers", "--store", store, *options)
        assert result.exit_code == 1
        assert words in result.stderr


def test_numbers_by_thin_factorisations_are_those_of_dense_matrices() -> None:
    generator = np.random.default_rng(0)
    output, value = generator.normal(size=(3, 12, 4)), generator.normal(size=(2, 12, 4))
    output[1] = 0
    output[2, 0, 0] = np.inf
    numbers = layer_numbers(output, value, np.array([1, 0, 0]))
    expected = dense.head(output[0], value[1])
    for name, array in numbers.items():
        np.testing.assert_allclose(array[0], expected[name], rtol=1e-12)
        assert np.isnan(array[2]).all()
    assert numbers["norm"][1] == numbers["trace"][1] == 0
    apart = layer_numbers(output[:1], generator.normal(size=(1, 7, 4)), np.array([0]))
    assert set(apart) == {"norm", "sigma"}


def test_differences_are_relative_to_each_head() -> None:
    one = torch.zeros(1, 3, 2, dtype=torch.float64)
    one[0, 0, 0], one[0, 1, 0] = 1.0, 1e-3
    other = one.clone()
    other[0, 1, 0] = 2e-3
    other[0, 2, 0] = 1e-30
    assert relative_difference(one, other).tolist() == [0.0, 0.5, 1e-30]
