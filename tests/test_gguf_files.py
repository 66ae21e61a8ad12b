"""GGUF files: every type that values are stored in, and models split over several files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from ingest.gguf_file import GgufFile
from stats.errors import CheckpointError
from tests.checkpoints import llama, save_gguf
from tests.gguf_conversion import Sizes, metadata, save
from tests.measuring import numbers, plan


def package_can(kind: GGMLQuantizationType, action: Callable[..., Any], values: np.ndarray) -> bool:
    try:
        action(values, kind)
    except NotImplementedError:
        return False
    return True


def stored_block(kind: GGMLQuantizationType) -> np.ndarray:
    return np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)


KINDS = list(GGMLQuantizationType)
QUANTISABLE = [kind for kind in KINDS if package_can(kind, gguf.quantize, np.zeros((1, 256), np.float32))]
DEQUANTISABLE = [kind for kind in KINDS if package_can(kind, gguf.dequantize, stored_block(kind))]
REFUSED = [kind for kind in KINDS if kind not in DEQUANTISABLE and kind.name != "F64"]


def save_stored(
    kind: GGMLQuantizationType, path: Path, store: Callable[[np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    """Write one layer whose projections are stored in a type; returns what was written."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata(Sizes(256, 1, 4, 4, 64)).items():
        writer.add_uint32(f"llama.{key}", value)
    generator = np.random.default_rng(0)
    stored = {}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        tensor = f"blk.0.{name}.weight"
        stored[tensor] = store(generator.standard_normal((256, 256)).astype(np.float32))
        writer.add_tensor(tensor, stored[tensor], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def random_blocks(kind: GGMLQuantizationType) -> np.ndarray:
    """A stored (256, 256) matrix of arbitrary bytes."""
    per_block, size = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(1).integers(0, 256, (256, 256 // per_block * size), np.uint8)


def test_the_package_quantises_what_it_did() -> None:
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 TQ1_0 TQ2_0 MXFP4"
    assert {kind.name for kind in QUANTISABLE} >= set(names.split())
    names = "Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS NVFP4"
    assert {kind.name for kind in DEQUANTISABLE} >= set(names.split())
    assert {kind.name for kind in REFUSED} >= {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64"}


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda kind: kind.name)
def test_a_matrix_in_every_type_the_package_writes(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    stored = save_stored(kind, tmp_path / "m.gguf", lambda values: gguf.quantize(values, kind))
    planned = plan(tmp_path / "m.gguf")
    assert planned.source_dtype == kind.name
    assert set(planned.layers[0].tensors.values()) == set(stored)
    for name, values in stored.items():
        np.testing.assert_array_equal(planned.checkpoint.read(name).numpy(), gguf.dequantize(values, kind))


@pytest.mark.parametrize("kind", DEQUANTISABLE, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_arbitrary_bytes_in_every_type_the_package_reads(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    save_stored(kind, tmp_path / "m.gguf", lambda _: random_blocks(kind))
    planned = plan(tmp_path / "m.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        expected = gguf.dequantize(np.array(tensor.data), kind)
        np.testing.assert_array_equal(planned.checkpoint.read(tensor.name).numpy(), expected)


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_a_type_that_cannot_be_undone_is_refused_by_name(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    save_stored(kind, tmp_path / "m.gguf", lambda _: random_blocks(kind))
    with pytest.raises(CheckpointError, match=f"values stored as {kind.name} cannot be read"):
        plan(tmp_path / "m.gguf")


def save_split(directory: Path) -> list[Path]:
    """A model over several files, as llama.cpp writes it."""
    whole = GgufFile(save_gguf(llama(), directory / "whole"))
    settings = {key.removeprefix("llama."): value for key, value in whole.metadata.items() if key.startswith("llama.")}
    tensors = {name: whole.read(name) for name in whole.headers}
    (directory / "parts").mkdir()
    save("llama", settings, tensors, directory / "parts" / "model.gguf", split_max_tensors=8)
    return sorted((directory / "parts").iterdir())


def test_a_split_model_is_read_whole_by_any_part_or_by_its_directory(tmp_path: Path) -> None:
    parts = save_split(tmp_path)
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    expected = numbers(plan(tmp_path / "whole" / "model.gguf", ("raw", "folded")))
    for path in (*parts, tmp_path / "parts"):
        planned = plan(path, ("raw", "folded"))
        assert planned.checkpoint.name == ("parts" if path.is_dir() else "model")
        assert {planned.checkpoint.location[tensor.name] for tensor in planned.tensors} == {
            part.name for part in parts[:2]
        }
        found = numbers(planned)
        assert found.keys() == expected.keys()
        for key, array in found.items():
            np.testing.assert_array_equal(array, expected[key], err_msg=str(key))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_part_is_named(lost: int, tmp_path: Path) -> None:
    parts = save_split(tmp_path)
    parts[lost].unlink()
    for path in (parts[lost - 1], tmp_path / "parts"):
        with pytest.raises(CheckpointError, match="part of the split GGUF model is missing") as caught:
            plan(path)
        assert f"expected: {parts[lost].name}" in str(caught.value)
        assert "2 of 3 parts" in str(caught.value)


def test_parts_under_other_names_are_refused(tmp_path: Path) -> None:
    parts = save_split(tmp_path)
    alone = shutil.copy(parts[0], tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="another part's name") as caught:
        plan(alone)
    assert "split.count 3" in str(caught.value)
    parts[1].rename(tmp_path / "kept")
    parts[2].rename(parts[1])
    (tmp_path / "kept").rename(parts[2])
    with pytest.raises(CheckpointError, match="another part's name"):
        plan(parts[0])


def test_a_part_of_another_model_is_noticed(tmp_path: Path) -> None:
    first, second = save_split(tmp_path / "first"), save_split(tmp_path / "second")
    shutil.copy(second[0], first[0])
    tensors = {name: torch.ones(4, 4) for name in ("a.weight", "b.weight", "c.weight")}
    save("llama", {}, tensors, tmp_path / "other" / "model.gguf", split_max_tensors=1)
    shutil.copy(tmp_path / "other" / first[2].name, first[2])
    with pytest.raises(CheckpointError, match="do not belong together"):
        plan(first[0])


def test_two_models_in_a_directory_are_not_mixed(tmp_path: Path) -> None:
    parts = save_split(tmp_path)
    shutil.copy(tmp_path / "whole" / "model.gguf", tmp_path / "parts")
    with pytest.raises(CheckpointError, match="several weight files"):
        plan(tmp_path / "parts")
    assert plan(parts[1]).layers


def test_a_merged_model_says_it_has_no_parts(tmp_path: Path) -> None:
    path = save_gguf(llama(), tmp_path)
    file = GgufFile(path)
    writer = gguf.GGUFWriter(tmp_path / "merged.gguf", "llama")
    writer.add_uint16("split.count", 0)
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            writer.add_uint32(key, value)
    for name in file.headers:
        writer.add_tensor(name, file.read(name).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert numbers(plan(tmp_path / "merged.gguf")).keys() == numbers(plan(path)).keys()
