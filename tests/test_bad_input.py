"""Input that cannot be measured: one clear error, exit status 1, and the store as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

import cli
import ingest.pipeline
import store.ingestion
from ingest.pipeline import ComputeSettings
from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from store.atlas import AtlasStore
from store.measured_layers import MeasuredLayers
from store.unfinished import unfinished_ingests
from tests import checkpoints
from tests.checkpoints import Model, bert, gpt2, llama, save_config, save_gguf, save_safetensors, save_torch

ROOT = Path(cli.__file__).parent
Build = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """What makes a checkpoint in an empty place, and words of each part of the refusal."""

    build: Build
    what: str
    where: str
    expected: str
    found: str
    options: tuple[str, ...] = ()


CASES: dict[str, Case] = {}


def refused(what: str, where: str = "", expected: str = "", found: str = "", *options: str) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        CASES[build.__name__.replace("_", " ")] = Case(build, what, where, expected, found, options)
        return build

    return register


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def error_parts(result: Result) -> dict[str, str]:
    """The parts of the one error on stderr, after checking that there is exactly one."""
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("error: "))
    what = lines[start].removeprefix("error: ")
    return {"what": what} | dict(line.strip().split(": ", 1) for line in lines[start + 1 :])


def contents(directory: Path) -> dict[str, str]:
    """Checksum of every file below a directory, and its empty folders."""
    return {
        str(path.relative_to(directory)): "folder" if path.is_dir() else sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.name != "write.lock"
    }


def published(directory: Path) -> dict[str, str]:
    """The same without what is kept of ingests that have not ended."""
    return {name: checksum for name, checksum in contents(directory).items() if not name.startswith("staging/")}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A store that holds one model named kept and must stay as it is, and its contents."""
    directory = tmp_path_factory.mktemp("untouched")
    model = save_safetensors(llama(seed=7), directory / "kept")
    assert invoke("ingest", model, "--store", directory / "store").exit_code == 0
    return directory / "store", contents(directory / "store")


@pytest.fixture
def filled(untouched: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    """A copy of that store, to be changed."""
    return Path(shutil.copytree(untouched[0], tmp_path / "filled"))


@refused("no configuration", "model", "config.json", "model.safetensors")
def missing_config(place: Path) -> Path:
    save_safetensors(llama(), place)
    (place / "config.json").unlink()
    return place


@refused("no configuration", "weights.safetensors", "a config.json beside it")
def missing_config_of_a_bare_file(place: Path) -> Path:
    path = checkpoints.save_bare_safetensors(llama(), place)
    (place / "config.json").unlink()
    return path


def _with_config(place: Path, text: str) -> Path:
    save_safetensors(llama(), place)
    (place / "config.json").write_text(text, encoding="utf-8")
    return place


@refused("not valid JSON", "config.json", found="Expecting")
def config_not_json(place: Path) -> Path:
    return _with_config(place, "{oops")


@refused("not valid JSON", "config.json", found="recursion")
def config_nested_too_deep(place: Path) -> Path:
    return _with_config(place, '{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


@refused("does not hold a JSON object", "config.json", "an object", "list")
def config_a_list(place: Path) -> Path:
    return _with_config(place, "[]")


@refused("too large", "config.json", "200,000,000 bytes", "200,000,001 bytes")
def config_too_large(place: Path) -> Path:
    _with_config(place, "")
    os.truncate(place / "config.json", 200_000_001)
    return place


@refused("not valid JSON", "config.json", found="utf-8")
def config_not_text(place: Path) -> Path:
    save_safetensors(llama(), place)
    (place / "config.json").write_bytes(b"\xff\xfe\x00")
    return place


FUSED = "h.0.attn.c_attn.weight [32, 96], h.0.attn.c_proj.weight [32, 32]"


@refused("unknown family 'frobnicator'", "model", "separate projections", FUSED)
def unknown_family(place: Path) -> Path:
    return save_safetensors(gpt2().configured(model_type="frobnicator"), place)


@refused("unknown family ['gpt2']", "model", "separate projections", FUSED)
def model_type_a_list(place: Path) -> Path:
    return save_safetensors(gpt2().configured(model_type=["gpt2"]), place)


@refused("unknown model family 'lama'", "model", "llama", "lama", "--family", "lama")
def family_misspelt(place: Path) -> Path:
    return save_safetensors(llama(), place)


@refused("does not name a model_type", "model", "separate projections", FUSED)
def model_type_absent(place: Path) -> Path:
    return save_safetensors(gpt2().configured(model_type=...), place)


@refused("cannot be opened", "model-00002-of-00002.safetensors", found="No such file")
def missing_shard(place: Path) -> Path:
    checkpoints.save_sharded_safetensors(llama(), place)
    (place / "model-00002-of-00002.safetensors").unlink()
    return place


@refused("cannot be opened", "pytorch_model-00002-of-00002.bin", found="No such file")
def missing_torch_shard(place: Path) -> Path:
    checkpoints.save_sharded_torch(llama(), place)
    (place / "pytorch_model-00002-of-00002.bin").unlink()
    return place


@refused("cannot be opened", "model-00001-of-00002.safetensors", found="not a regular file")
def shard_a_directory(place: Path) -> Path:
    checkpoints.save_sharded_safetensors(llama(), place)
    (place / "model-00001-of-00002.safetensors").unlink()
    (place / "model-00001-of-00002.safetensors").mkdir()
    return place


@refused("cannot be opened", "model.safetensors", found="not a regular file")
def weights_a_pipe(place: Path) -> Path:
    save_config(llama(), place)
    os.mkfifo(place / "model.safetensors")
    return place


def _with_weight_map(place: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    checkpoints.save_sharded_safetensors(llama(), place)
    index = place / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    index.write_text(json.dumps({"weight_map": change(weight_map)}), encoding="utf-8")
    return place


QUERY = "model.layers.1.self_attn.q_proj.weight"


@refused("cannot be opened", "model-00003-of-00003.safetensors", found="No such file")
def index_names_an_absent_file(place: Path) -> Path:
    return _with_weight_map(place, lambda weight_map: weight_map | {QUERY: "model-00003-of-00003.safetensors"})


@refused("does not hold them", "model-00001-of-00002.safetensors", "lm_head.scale", "other tensors")
def index_places_a_tensor_in_the_wrong_file(place: Path) -> Path:
    wrong = {"lm_head.scale": "model-00001-of-00002.safetensors"}
    return _with_weight_map(place, lambda weight_map: weight_map | wrong)


@refused("the index names no tensors", "model.safetensors.index.json", "weight_map", "list")
def index_without_a_map(place: Path) -> Path:
    return _with_weight_map(place, list)


@refused("not valid JSON", "model.safetensors.index.json", found="recursion")
def index_nested_too_deep(place: Path) -> Path:
    checkpoints.save_sharded_safetensors(llama(), place)
    (place / "model.safetensors.index.json").write_text("[" * 100_000, encoding="utf-8")
    return place


def _refused_file_name(label: str, name: object) -> None:
    def build(place: Path) -> Path:
        return _with_weight_map(place, lambda weight_map: weight_map | {QUERY: name})

    build.__name__ = f"index_names_{label}"
    refused("a file outside its directory", f"tensor {QUERY}", "a plain file name", repr(name))(build)


for label, name in {
    "the parent": "../x.safetensors",
    "an absolute path": "/etc/passwd",
    "a folder": "sub/model.safetensors",
    "a backslash": "a\\b",
    "a NUL": "a\0b",
    "dots": "..",
    "nothing": "",
    "a number": 3,
}.items():
    _refused_file_name(label, name)


def _cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


@refused("truncated", "model.safetensors, tensor", "at least", "bytes")
def safetensors_cut_in_its_values(place: Path) -> Path:
    save_safetensors(llama(), place)
    _cut(place / "model.safetensors", 1)
    return place


@refused("truncated", "model.safetensors", "at least 99,000,008 bytes", "48 bytes")
def safetensors_header_longer_than_the_file(place: Path) -> Path:
    return _safetensors_of(place, b"{}".ljust(40), length=99_000_000)


@refused("not valid safetensors", "model.safetensors", "at most 100,000,000 bytes", f"{2**63:,} bytes")
def safetensors_header_of_absurd_length(place: Path) -> Path:
    return _safetensors_of(place, b"{}", length=2**63)


@refused("truncated", "model.safetensors", "at least 8 bytes", "0 bytes")
def safetensors_empty(place: Path) -> Path:
    save_config(llama(), place)
    (place / "model.safetensors").touch()
    return place


def _safetensors_of(place: Path, header: bytes, length: int | None = None) -> Path:
    save_config(llama(), place)
    prefix = struct.pack("<Q", len(header) if length is None else length)
    (place / "model.safetensors").write_bytes(prefix + header)
    return place


@refused("not valid safetensors", "model.safetensors", "a JSON header", "recursion")
def safetensors_header_nested_too_deep(place: Path) -> Path:
    return _safetensors_of(place, b"[" * 100_000)


@refused("not valid safetensors", "model.safetensors", "a JSON object", "list")
def safetensors_header_a_list(place: Path) -> Path:
    return _safetensors_of(place, b"[]")


@refused("not valid safetensors", "model.safetensors", "dtype, shape and data_offsets for tensor x")
def safetensors_entry_without_offsets(place: Path) -> Path:
    return _safetensors_of(place, b'{"x": {"dtype": "F32", "shape": [2]}}')


@refused("not valid safetensors", "model.safetensors", "12 bytes for tensor x [3] F32", "8 bytes")
def safetensors_shape_and_size_disagree(place: Path) -> Path:
    return _safetensors_of(place, b'{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'.ljust(99))


@refused("not valid safetensors", "model.safetensors", "for tensor x", "inf")
def safetensors_infinite_shape(place: Path) -> Path:
    return _safetensors_of(place, b'{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}')


@refused("not valid safetensors", "model.safetensors", "that a file can have", "99999")
def safetensors_shape_of_thousands_of_digits(place: Path) -> Path:
    digits = b"9" * 4000
    shape = b"[" + digits + b"," + digits + b"]"
    return _safetensors_of(place, b'{"x": {"dtype": "F32", "shape": ' + shape + b', "data_offsets": [0, 8]}}')


@refused("not valid safetensors", "model.safetensors", "for tensor x", "[8, 0]")
def safetensors_offsets_backwards(place: Path) -> Path:
    return _safetensors_of(place, b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}')


@refused("truncated", "pytorch_model.bin", "at least", "bytes")
def torch_file_cut(place: Path) -> Path:
    save_torch(llama(), place)
    _cut(place / "pytorch_model.bin", 1000)
    return place


@refused("not a readable PyTorch checkpoint", "pytorch_model.bin", "a complete file", "EOF")
def legacy_torch_file_cut(place: Path) -> Path:
    checkpoints.save_legacy_torch(llama(), place)
    _cut(place / "pytorch_model.bin", 1000)
    return place


@refused("not a readable PyTorch checkpoint", "pytorch_model.bin", "a complete file", "EOFError")
def torch_file_empty(place: Path) -> Path:
    save_config(llama(), place)
    (place / "pytorch_model.bin").touch()
    return place


@refused("not a readable PyTorch checkpoint", "pytorch_model.bin", "torch.save", "KeyError")
def torch_file_of_something_else(place: Path) -> Path:
    save_config(llama(), place)
    (place / "pytorch_model.bin").write_text("hello, this is no checkpoint")
    return place


def _torch_of(place: Path, value: object, legacy: bool = False) -> Path:
    save_config(llama(), place)
    torch.save(value, place / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return place


@refused("needs code to load", "pytorch_model.bin", "tensors and plain containers", "Linear")
def torch_file_of_a_whole_module(place: Path) -> Path:
    return _torch_of(place, torch.nn.Linear(2, 2))


@refused("does not hold a dictionary of tensors", "pytorch_model.bin", "a state dict", "list")
def torch_file_of_a_list(place: Path) -> Path:
    return _torch_of(place, [torch.ones(2)])


@refused("does not hold a dictionary of tensors", "pytorch_model.bin", "a state dict", "dict")
def torch_file_of_a_dictionary_inside_itself(place: Path) -> Path:
    wrapped: dict[str, Any] = {}
    wrapped["model"] = wrapped
    return _torch_of(place, wrapped)


@refused("truncated", "model.gguf, tensor", "at least", "bytes")
def gguf_cut_in_its_values(place: Path) -> Path:
    path = save_gguf(llama(), place)
    _cut(path, 200)
    return path


@refused("truncated", "model.gguf", "at least", "500 bytes")
def gguf_cut_in_its_metadata(place: Path) -> Path:
    path = save_gguf(llama(), place)
    os.truncate(path, 500)
    return path


@refused("truncated", "model.gguf", "at least 24 bytes", "0 bytes")
def gguf_empty(place: Path) -> Path:
    return _gguf_of(place, b"")


def _gguf_of(place: Path, data: bytes) -> Path:
    place.mkdir()
    (place / "model.gguf").write_bytes(data)
    return place / "model.gguf"


def _gguf_head(n_tensors: int, n_fields: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return struct.pack("<4sIQQ", magic, version, n_tensors, n_fields)


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ARCHITECTURE = _gguf_text("general.architecture") + struct.pack("<I", 8) + _gguf_text("llama")


@refused("not valid GGUF", "model.gguf", "the letters GGUF and version 2 or 3", "b'GGML', version 3")
def gguf_of_another_magic(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(0, 0, magic=b"GGML"))


@refused("not valid GGUF", "model.gguf", "the letters GGUF and version 2 or 3", "version 1")
def gguf_of_another_version(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(0, 0, version=1))


@refused("truncated", "model.gguf", "at least", "bytes")
def gguf_of_2_to_the_60_tensors(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(2**60, 1) + ARCHITECTURE + bytes(64))


@refused("truncated", "model.gguf", "at least", "bytes")
def gguf_of_2_to_the_60_fields(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(0, 2**60) + ARCHITECTURE)


@refused("truncated", "model.gguf", f"at least {2**62 + 32:,} bytes", "40 bytes")
def gguf_string_of_2_to_the_62_bytes(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(0, 1) + struct.pack("<QQ", 2**62, 0))


def _gguf_array(kind: int, count: int) -> bytes:
    return _gguf_head(0, 2) + ARCHITECTURE + _gguf_text("llama.x") + struct.pack("<IIQ", 9, kind, count)


@refused("truncated", "model.gguf", "at least", "bytes")
def gguf_array_of_2_to_the_62_numbers(place: Path) -> Path:
    return _gguf_of(place, _gguf_array(4, 2**62))


@refused("truncated", "model.gguf", "at least", "bytes")
def gguf_array_of_2_to_the_62_strings(place: Path) -> Path:
    return _gguf_of(place, _gguf_array(8, 2**62) + bytes(64))


@refused("truncated", "model.gguf", "at least", "bytes")
def gguf_array_of_2_to_the_62_arrays(place: Path) -> Path:
    return _gguf_of(place, _gguf_array(9, 2**62) + struct.pack("<IQ", 4, 0) * 8)


@refused("not valid GGUF", "model.gguf", "a known metadata type", "type 9")
def gguf_arrays_nested_too_deep(place: Path) -> Path:
    return _gguf_of(place, _gguf_array(9, 1) + struct.pack("<IQ", 9, 1) * 1000)


@refused("truncated", "model.gguf, tensor x", "at least", "bytes")
def gguf_tensor_of_absurd_shape(place: Path) -> Path:
    record = _gguf_text("x") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)
    return _gguf_of(place, _gguf_head(1, 1) + ARCHITECTURE + record)


@refused("not valid GGUF", "model.gguf", "at most 8 axes for tensor x", f"{2**32 - 1}")
def gguf_tensor_of_absurd_rank(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(1, 1) + ARCHITECTURE + _gguf_text("x") + struct.pack("<I", 2**32 - 1))


@refused("not valid GGUF", "model.gguf", "a known value type for tensor x", "type 999")
def gguf_tensor_of_unknown_type(place: Path) -> Path:
    record = _gguf_text("x") + struct.pack("<IQIQ", 1, 2, 999, 0)
    return _gguf_of(place, _gguf_head(1, 1) + ARCHITECTURE + record)


@refused("does not name its architecture", "model.gguf", "general.architecture", "nothing")
def gguf_without_an_architecture(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(0, 0))


@refused("unknown family 'mamba'", "model.gguf", "one stack of attention", "no tensors")
def gguf_of_an_unknown_architecture(place: Path) -> Path:
    architecture = _gguf_text("general.architecture") + struct.pack("<I", 8) + _gguf_text("mamba")
    return _gguf_of(place, _gguf_head(0, 1) + architecture)


@refused("does not give a size", "model.gguf, block_count", "an integer from 1 to 10,000", "None")
def gguf_without_sizes(place: Path) -> Path:
    return _gguf_of(place, _gguf_head(0, 1) + ARCHITECTURE)


@refused("stored as I8 cannot be read", "model.gguf, tensor blk.0.attn_q.weight", "the gguf package", "I8")
def gguf_of_integers(place: Path) -> Path:
    path = save_gguf(llama(), place, quantisation=GGMLQuantizationType.Q8_0)
    data, record = path.read_bytes(), struct.Struct("<IQQI")
    plain = record.pack(2, 32, 32, GGMLQuantizationType.Q8_0)
    name = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    assert data[name : name + len(plain)] == plain
    path.write_bytes(data[:name] + record.pack(2, 32, 32, GGMLQuantizationType.I8) + data[name + len(plain) :])
    return path


@refused(
    "shape contradicts the configuration",
    "model, layer 0, tensor model.layers.0.self_attn.k_proj.weight",
    "[32, 32] from 4 heads, 4 key/value heads",
    "[16, 32]",
)
def shape_contradicts_the_configuration(place: Path) -> Path:
    return save_safetensors(llama().configured(num_key_value_heads=4), place)


@refused("shape contradicts the configuration", "layer 1", "[32, 32]", "[1024]")
def projection_that_is_no_matrix(place: Path) -> Path:
    return save_safetensors(llama().changed(**{QUERY: torch.zeros(1024)}), place)


@refused("cannot be grouped evenly", "model, layer 0", "divide the query heads", "4 query heads, 3 key/value heads")
def heads_not_divisible(place: Path) -> Path:
    return save_safetensors(llama().configured(num_key_value_heads=3), place)


@refused("pruned_heads does not list heads", "model, layer 1", "from 0 to 3", "[4]")
def pruned_heads_out_of_range(place: Path) -> Path:
    return save_safetensors(bert().configured(pruned_heads={"1": [4]}), place)


@refused("pruned_heads does not list heads", "model, layer 0", "from 0 to 3", "'all'")
def pruned_heads_of_another_form(place: Path) -> Path:
    return save_safetensors(bert().configured(pruned_heads="all"), place)


def _refused_size(key: str, value: object, largest: str = "2,147,483,647") -> None:
    def build(place: Path) -> Path:
        return save_safetensors(llama().configured(**{key: value}), place)

    build.__name__ = f"{key}_{value!r:.30}"
    refused("does not give a size", f"model, {key}", f"an integer from 1 to {largest}", repr(value)[:100])(build)


for key, value in (
    ("hidden_size", "32"),
    ("hidden_size", 2**31),
    ("hidden_size", 10**300),
    ("hidden_size", float("inf")),
    ("num_attention_heads", -4),
    ("num_attention_heads", 0),
    ("num_attention_heads", True),
    ("num_key_value_heads", 2.0),
    ("num_key_value_heads", {"a": 1}),
    ("head_dim", "8"),
    ("head_dim", False),
):
    _refused_size(key, value)
for value in ("2", -1, True, [2], 10_001, 2**31 - 1):
    _refused_size("num_hidden_layers", value, largest="10,000")


@refused("does not give a size", "model, inner_group_num", "an integer from 1 to 5,000", "'two'")
def inner_count_no_number(place: Path) -> Path:
    config = {"model_type": "albert", "hidden_size": 32, "num_hidden_groups": 2, "inner_group_num": "two"}
    return save_safetensors(Model(config, llama().tensors), place)


def _quantized(method: object) -> Model:
    return llama().configured(quantization_config=method)


@refused("quantised with GPTQ", "model", "a GGUF file", "quantization_config")
def gptq_by_configuration(place: Path) -> Path:
    return save_safetensors(_quantized({"quant_method": "gptq", "bits": 4}), place)


@refused("quantised with AWQ", "model", "a GGUF file", "quantization_config")
def awq_by_configuration(place: Path) -> Path:
    return save_safetensors(_quantized({"quant_method": "awq", "bits": 4}), place)


@refused("quantised with bitsandbytes", "model", "a GGUF file", "quantization_config")
def bitsandbytes_by_an_old_configuration(place: Path) -> Path:
    return save_safetensors(_quantized({"load_in_8bit": True, "load_in_4bit": False}), place)


@refused("quantised with an unnamed scheme", "model", "a GGUF file", "quantization_config")
def quantised_by_an_unnamed_scheme(place: Path) -> Path:
    return save_safetensors(_quantized({"bits": 3}), place)


@refused("quantised with a-new-one", "model", "a GGUF file", "quantization_config")
def quantised_by_an_unknown_scheme(place: Path) -> Path:
    return save_safetensors(_quantized({"quant_method": "a-new-one"}), place)


def _packed(companions: Mapping[str, Tensor], weight: Tensor | None = None) -> Model:
    """The query projection of layer 1 replaced by what a packed layout stores."""
    model = llama().without(QUERY)
    stem = QUERY.removesuffix(".weight")
    packed = {f"{stem}.{name}": tensor for name, tensor in companions.items()}
    return model.changed(**packed, **({} if weight is None else {QUERY: weight}))


QWEIGHT = {
    "qweight": torch.zeros(4, 32, dtype=torch.int32),
    "qzeros": torch.zeros(1, 4, dtype=torch.int32),
    "scales": torch.ones(1, 32),
}


@refused("quantised with GPTQ", "model", "a GGUF file", "q_proj.g_idx")
def gptq_by_tensors(place: Path) -> Path:
    companions = QWEIGHT | {"g_idx": torch.zeros(32, dtype=torch.int32)}
    return save_safetensors(_packed(companions), place)


@refused("quantised with GPTQ or AWQ", "model", "a GGUF file", "q_proj.qweight")
def awq_by_tensors(place: Path) -> Path:
    return save_safetensors(_packed(QWEIGHT), place)


@refused("quantised with GPTQ or AWQ", "model", "a GGUF file", "q_proj.qweight")
def awq_by_tensors_of_a_torch_file(place: Path) -> Path:
    return save_torch(_packed(QWEIGHT), place)


@refused("quantised with bitsandbytes 4-bit", "model", "a GGUF file", "q_proj.weight.absmax")
def bitsandbytes_4_bit_by_tensors(place: Path) -> Path:
    companions = {"weight.absmax": torch.ones(16), "weight.quant_map": torch.ones(16)}
    return save_safetensors(_packed(companions, torch.zeros(512, 1, dtype=torch.uint8)), place)


@refused("quantised with bitsandbytes 8-bit", "model", "a GGUF file", "q_proj.SCB")
def bitsandbytes_8_bit_by_tensors(place: Path) -> Path:
    return save_safetensors(_packed({"SCB": torch.ones(32)}, torch.zeros(32, 32, dtype=torch.int8)), place)


@refused("quantised with block-scaled fp8", "model", "a GGUF file", "q_proj.weight_scale_inv")
def fp8_by_tensors(place: Path) -> Path:
    return save_safetensors(
        _packed({"weight_scale_inv": torch.ones(1, 1)}, torch.zeros(32, 32).to(torch.float8_e4m3fn)), place
    )


@refused("an unknown scheme with F8_E4M3 weights", "model", "a float of 16 bits or more", QUERY)
def fp8_without_scales(place: Path) -> Path:
    return save_safetensors(_packed({}, torch.zeros(32, 32).to(torch.float8_e4m3fn)), place)


@refused("an unknown scheme with I8 weights", "model", "a float of 16 bits or more", QUERY)
def int8_without_a_configuration(place: Path) -> Path:
    return save_safetensors(_packed({}, torch.zeros(32, 32, dtype=torch.int8)), place)


@refused("an unknown scheme with I8 weights", "model", "a float of 16 bits or more", QUERY)
def int8_in_a_torch_file(place: Path) -> Path:
    return save_torch(_packed({}, torch.zeros(32, 32, dtype=torch.int8)), place)


@refused("an adapter, not a model", "model", "the weights of a whole model", "base model org/base")
def adapter_only(place: Path) -> Path:
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "r": 8}))
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({lora: torch.ones(8, 32)}, place / "adapter_model.safetensors")
    return place


@refused("no weights found", "model", "model.safetensors", "nothing")
def empty_directory(place: Path) -> Path:
    place.mkdir()
    return place


@refused("several weight files and no index", "model", "model.safetensors.index.json", "a.safetensors, b.safetensors")
def shards_without_an_index(place: Path) -> Path:
    save_config(llama(), place)
    for name, tensors in checkpoints.shards(llama(), "{}.safetensors").items():
        save_file(tensors, place / {"1.safetensors": "a.safetensors", "2.safetensors": "b.safetensors"}[name])
    return place


@refused("no such checkpoint", "model", "an existing directory or file", "neither")
def path_that_does_not_exist(place: Path) -> Path:
    return place


@refused("not a checkpoint", "weights.onnx", ".safetensors, .bin or .gguf", ".onnx")
def file_of_unknown_suffix(place: Path) -> Path:
    place.mkdir()
    (place / "weights.onnx").touch()
    return place / "weights.onnx"


@refused("no attention found", "model", "layers.{layer}.self_attn.q_proj.weight", "h.0.attn.c_attn.weight")
def names_of_another_family(place: Path) -> Path:
    return save_safetensors(Model(llama().config, gpt2().tensors), place)


@refused("no attention found", "model", "layers.{layer}.self_attn.q_proj.weight", "layers.9")
def layer_number_of_thousands_of_digits(place: Path) -> Path:
    stem = f"layers.{'9' * 5000}.self_attn."
    tensors = {f"{stem}{name}_proj.weight": torch.zeros(32, 32) for name in "qkvo"}
    return save_safetensors(Model(llama().config, tensors), place)


@refused("incomplete", "model, layer 1", "model.layers.1.self_attn.v_proj.weight", "q_proj.weight")
def layer_without_its_values(place: Path) -> Path:
    return save_safetensors(llama().without("layers.1.self_attn.v_proj"), place)


@refused(
    "a tensor of the layer is missing", "layer 1", "model.layers.1.input_layernorm.weight", "", "--operator", "both"
)
def folded_without_the_norm(place: Path) -> Path:
    return save_safetensors(llama().without("layers.1.input_layernorm"), place)


@refused("bert has no folded operator", "model", "a norm in front", "after the residual sum", "--operator", "folded")
def folded_asked_of_bert(place: Path) -> Path:
    return save_safetensors(bert(), place)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_and_the_store_left_alone(
    name: str, tmp_path: Path, untouched: tuple[Path, dict[str, str]]
) -> None:
    case, (store_path, before) = CASES[name], untouched
    path = case.build(tmp_path / "model")
    parts = error_parts(invoke("ingest", path, "--store", store_path, *case.options))
    for part in ("what", "where", "expected", "found"):
        assert getattr(case, part) in parts.get(part, ""), parts
    assert contents(store_path) == before
    assert error_parts(invoke("ingest", path, "--store", tmp_path / "new", *case.options)) == parts
    assert not (tmp_path / "new").exists()
    assert error_parts(invoke("plan", path, *case.options)) == parts


ABSURD = (
    "safetensors header longer than the file",
    *(name for name in CASES if "absurd" in name or "2 to the" in name),
)


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_counts_allocate_nothing(name: str, tmp_path: Path) -> None:
    path = CASES[name].build(tmp_path / "model")
    invoke("plan", path)
    tracemalloc.start()
    try:
        error_parts(invoke("plan", path))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def stored_names(root: Path) -> list[str]:
    return list(AtlasStore.open(root).models())


def test_a_family_can_be_named_where_the_configuration_names_none(tmp_path: Path, filled: Path) -> None:
    path = CASES["model type absent"].build(tmp_path / "model")
    assert invoke("ingest", path, "--store", filled, "--family", "gpt2").exit_code == 0
    assert stored_names(filled) == ["kept", "model"]


class RunsCode:
    """Unpickling makes a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_never_run(legacy: bool, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = _torch_of(tmp_path / "model", dict(llama().tensors) | {"code": RunsCode(marker)}, legacy)
    parts = error_parts(invoke("ingest", path, "--store", tmp_path / "store"))
    assert "code from a checkpoint is never run" in parts["what"]
    assert "pytorch_model.bin" in parts["where"]
    assert "mkdir" in parts["found"]
    assert "weights_only" not in str(parts)
    assert not (tmp_path / "store").exists()
    assert not marker.exists()
    torch.load(path / "pytorch_model.bin", weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_cut_anywhere_is_refused(legacy: bool, tmp_path: Path) -> None:
    path = _torch_of(tmp_path / "model", dict(llama(layers=1).tensors), legacy)
    whole = (path / "pytorch_model.bin").read_bytes()
    for size in [*range(0, 1000, 50), len(whole) // 2, len(whole) - 1]:
        (path / "pytorch_model.bin").write_bytes(whole[:size])
        assert "pytorch_model.bin" in error_parts(invoke("plan", path))["where"]


def test_a_store_below_a_file(tmp_path: Path) -> None:
    path = save_safetensors(llama(), tmp_path / "model")
    (tmp_path / "file").write_text("kept")
    parts = error_parts(invoke("ingest", path, "--store", tmp_path / "file" / "store"))
    assert parts["what"] == "the store cannot be created"
    assert str(tmp_path / "file" / "store") in parts["where"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_store_where_something_else_is(tmp_path: Path) -> None:
    path = save_safetensors(llama(), tmp_path / "model")
    before = contents(path)
    parts = error_parts(invoke("ingest", path, "--store", path))
    assert parts["what"] == "the directory is in use for something else"
    assert parts["found"] == "config.json, model.safetensors"
    assert contents(path) == before


def test_a_name_taken_by_other_weights(tmp_path: Path, filled: Path) -> None:
    (old_group,) = (path.name for path in (filled / "arrays.zarr").iterdir() if path.is_dir())
    path = save_safetensors(llama(seed=8), tmp_path / "model")
    before = contents(filled)
    arguments = ("ingest", path, "--store", filled, "--name", "kept")
    parts = error_parts(invoke(*arguments))
    assert parts["what"] == "the store already has a model named 'kept' with other weights"
    assert str(path) in parts["where"]
    assert parts["expected"] != parts["found"]
    assert "--replace" in parts["to do"]
    assert contents(filled) == before

    result = invoke(*arguments, "--replace")
    assert result.exit_code == 0, result.output
    after = contents(filled)
    assert not [name for name in after if old_group in name]
    (new_group,) = (path.name for path in (filled / "arrays.zarr").iterdir() if path.is_dir())
    assert AtlasStore.open(filled).models()["kept"].array_group == new_group
    assert list((filled / "staging").iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [("--step", "3"), ("--no-such-option",), ("--dtype", "float16"), ("--operator", "none"), ("--workers", "0")],
    ids=" ".join,
)
def test_usage_errors(arguments: tuple[str, ...], tmp_path: Path) -> None:
    path = save_safetensors(llama(), tmp_path / "model")
    result = invoke("ingest", path, "--store", tmp_path / "store", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert "Usage:" in result.stderr
    assert not (tmp_path / "store").exists()


def test_a_file_as_the_store_is_a_usage_error(tmp_path: Path) -> None:
    path = save_safetensors(llama(), tmp_path / "model")
    (tmp_path / "store").write_text("kept")
    result = invoke("ingest", path, "--store", tmp_path / "store")
    assert result.exit_code == 2
    assert "--store" in result.stderr
    assert (tmp_path / "store").read_text() == "kept"


@pytest.mark.parametrize(
    ("step", "failure"),
    [("seal", OSError(errno.ENOSPC, "No space left on device")), ("publish_rows", KeyboardInterrupt())],
    ids=["disk full", "interrupted"],
)
@pytest.mark.parametrize(
    "arguments", [("--name", "new"), ("--name", "kept", "--replace"), ("--operator", "both")], ids=" ".join
)
def test_a_failure_while_publishing_loses_nothing(
    arguments: tuple[str, ...],
    step: str,
    failure: BaseException,
    tmp_path: Path,
    filled: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save_safetensors(llama(seed=7), tmp_path / "kept")
    before = published(filled)

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(store.ingestion, step, fail)
        result = invoke("ingest", path, "--store", filled, *arguments)
    if isinstance(failure, OSError):
        assert "No space left" in error_parts(result)["found"]
    else:
        assert result.exit_code == 130
        assert "interrupted: the store is as it was" in result.stderr
    assert published(filled) == before
    layers = 2 if "both" not in arguments or step else 1
    assert f"{layers} of 2 measured layers are kept; the same command goes on from there" in result.stderr

    with monkeypatch.context() as patch:
        patch.setattr(ingest.pipeline, "measure_layer", fail)
        assert invoke("ingest", path, "--store", filled, *arguments).exit_code == 0
    assert list((filled / "staging").iterdir()) == []
    assert invoke("verify", "--store", filled).exit_code == 0


def test_what_a_crash_left_of_an_operator_is_no_obstacle(tmp_path: Path, filled: Path) -> None:
    path = save_safetensors(llama(seed=7), tmp_path / "kept")
    group = AtlasStore.open(filled).models()["kept"].array_group
    debris = filled / "arrays.zarr" / group / "folded" / "decoder"
    debris.mkdir(parents=True)
    (debris / "half").write_text("written")
    assert invoke("ingest", path, "--store", filled, "--operator", "both").exit_code == 0
    assert invoke("verify", "--store", filled).exit_code == 0


SLOW_COMMAND_LINE = """
import signal, time
import cli, ingest.read_ahead

read_weights = ingest.read_ahead.read_weights

def read_slowly(*arguments):
    time.sleep(0.2)
    return read_weights(*arguments)

ingest.read_ahead.read_weights = read_slowly
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.main()
"""


def test_an_interrupted_ingest_goes_on_where_it_stopped(
    tmp_path: Path, untouched: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_safetensors(llama(layers=40), tmp_path / "model")
    store_path = tmp_path / "store"
    shutil.copytree(untouched[0], store_path)
    before = published(store_path)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_COMMAND_LINE, "ingest", str(path), "--store", str(store_path), "--device", "cpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "model: measuring, 0 of 40 layers\n"
        assert process.stderr.readline() == "model: measuring, 10 of 40 layers\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.splitlines()[-1] == "interrupted: the store is as it was"
    assert "Traceback" not in stderr
    assert published(store_path) == before
    assert stored_names(store_path) == ["kept"]
    (unfinished,) = unfinished_ingests(AtlasStore.open(store_path))
    assert 10 <= unfinished.measured < 40
    assert f"{unfinished.measured} of 40 measured layers are kept" in stderr
    assert invoke("verify", "--store", store_path).exit_code == 1

    measured, measure_layer = [], ingest.pipeline.measure_layer
    monkeypatch.setattr(
        ingest.pipeline, "measure_layer", lambda *given, **named: measured.append(1) or measure_layer(*given, **named)
    )
    assert invoke("ingest", path, "--store", store_path, "--device", "cpu").exit_code == 0
    assert len(measured) == 40 - unfinished.measured
    assert invoke("verify", "--store", store_path).exit_code == 0
    whole = tmp_path / "whole"
    assert invoke("ingest", path, "--store", whole).exit_code == 0
    assert arrays_of(store_path, "model") == arrays_of(whole, "model")


def arrays_of(store_path: Path, model: str) -> dict[str, str]:
    """Checksum of every array file of a model's operators."""
    group = AtlasStore.open(store_path).models()[model].array_group
    below = contents(store_path / "arrays.zarr" / group)
    return {name: checksum for name, checksum in below.items() if "/" in name and not name.endswith("raw/zarr.json")}


def test_kept_layers_of_other_weights_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store_path = save_safetensors(llama(seed=7), tmp_path / "model"), tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(store.ingestion, "seal", interrupted)
        assert invoke("ingest", path, "--store", store_path).exit_code == 130
    save_safetensors(llama(seed=8), path)
    assert invoke("ingest", path, "--store", store_path).exit_code == 0
    save_safetensors(llama(seed=8), path)
    assert invoke("ingest", path, "--store", tmp_path / "fresh").exit_code == 0
    assert arrays_of(store_path, "model") == arrays_of(tmp_path / "fresh", "model")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: b"", lambda data: flipped(data, 1000)])
def test_a_damaged_kept_layer_is_measured_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store_path = save_safetensors(llama(seed=7), tmp_path / "model"), tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(store.ingestion, "seal", interrupted)
        assert invoke("ingest", path, "--store", store_path).exit_code == 130
    (kept,) = (store_path / "staging").glob("*/decoder.1.npz")
    kept.write_bytes(damage(kept.read_bytes()))
    assert invoke("ingest", path, "--store", store_path).exit_code == 0
    assert invoke("ingest", path, "--store", tmp_path / "fresh").exit_code == 0
    assert arrays_of(store_path, "model") == arrays_of(tmp_path / "fresh", "model")


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]


def test_one_ingest_of_a_model_at_a_time(tmp_path: Path) -> None:
    path = save_safetensors(llama(), tmp_path / "model")
    store_path = tmp_path / "store"
    planned = plan_checkpoint(open_checkpoint(str(path)))
    measured = MeasuredLayers(AtlasStore.open_or_create(store_path), planned, "model", ComputeSettings())
    with measured.claimed():
        result = invoke("ingest", path, "--store", store_path)
    assert "another process is ingesting 'model'" in result.stderr
    assert result.exit_code == 1
    assert invoke("ingest", path, "--store", store_path).exit_code == 0
