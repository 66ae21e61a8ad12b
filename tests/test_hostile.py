"""Checkpoints from strangers: no code runs, no path leaves its directory, no size is believed.

Files that are merely wrong are in ``test_bad_input``; these are made to do harm.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingest.adapter import ends_with
from ingest.by_shape import _endings, recognise_by_shape
from ingest.families import FAMILIES
from ingest.json_text import DEEPEST, MOST_VALUES, parsed_json
from ingest.plan import plan_checkpoint
from ingest.safetensors_file import LocalFile, SafetensorsFile
from ingest.source import open_checkpoint
from ingest.torch_file import TorchFile
from stats.errors import CheckpointError, shown
from tests import checkpoints
from tests.checkpoints import Model, llama, save_config, save_safetensors, save_torch
from tests.test_bad_input import contents, error_parts, invoke

# -- code in pickles ---------------------------------------------------------------------------------------


class Calls:
    """Unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Nested:
    """Unpickling calls what unpickling another object gives: the harm is one level down."""

    def __init__(self, inner: Calls) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return dict, ([("inner", self.inner)],)


def bombs(marker: Path) -> dict[str, Any]:
    touch = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, touch),
        "subprocess": Calls(subprocess.call, ["touch", str(marker)]),
        "eval": Calls(eval, python.replace("open", "__import__('pathlib').io.open")),
        "exec": Calls(exec, python),
        "open": Calls(open, str(marker), "w"),
        "nested": Nested(Calls(os.system, touch)),
        "in a list in a dictionary": {"a": [{"b": Calls(os.system, touch)}]},
        "as a key": {Calls(os.system, touch): torch.ones(2)},
        "torch.load": Calls(torch.load, str(marker)),
        "getattr": Calls(getattr, str(marker), "system"),
    }


@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle", "protocol 5"])
@pytest.mark.parametrize("name", bombs(Path()))
def test_no_code_of_a_pickle_runs(name: str, form: str, tmp_path: Path) -> None:
    marker, place = tmp_path / "marker", tmp_path / "model"
    value = {**llama(layers=1).tensors, "bomb": bombs(marker)[name]}
    save_config(llama(layers=1), place)
    file = place / "pytorch_model.bin"
    if form == "plain pickle":
        file.write_bytes(pickle.dumps(bombs(marker)[name], protocol=2))
    elif form == "protocol 5":
        torch.save(value, file, pickle_protocol=5)
    else:
        torch.save(value, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CheckpointError, match=r"never run|not a readable|may take more memory"):
        plan_checkpoint(open_checkpoint(str(place)))
    assert not marker.exists()


def test_a_record_put_into_a_sound_file_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    file = save_torch(llama(layers=1), tmp_path / "model") / "pytorch_model.bin"
    rewritten(file, {"data.pkl": pickle.dumps(Calls(os.system, f"touch {marker}"), protocol=2)})
    with pytest.raises(CheckpointError, match="never run"):
        open_checkpoint(str(file.parent))
    assert not marker.exists()


def test_a_program_saved_by_torch_is_refused(tmp_path: Path) -> None:
    save_config(llama(), tmp_path / "model")
    file = save_torch(llama(layers=1), tmp_path / "model") / "pytorch_model.bin"
    rewritten(file, {"constants.pkl": pickle.dumps((), protocol=2)}, keep=True)
    with pytest.raises(CheckpointError):
        open_checkpoint(str(file.parent))


# -- files that are larger in memory -----------------------------------------------------------------------


def rewritten(file: Path, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED, keep: bool = False) -> None:
    """A file of torch.save with records replaced, or added where ``keep``."""
    with zipfile.ZipFile(file) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    top = next(iter(kept)).split("/")[0]
    changed = {f"{top}/{name}": data for name, data in records.items()}
    assert keep or set(changed) <= set(kept)
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in {**kept, **changed}.items():
            archive.writestr(name, data)


def call(function: str, argument: int) -> bytes:
    """A pickle that calls a function of one number."""
    number = argument.to_bytes(8, "little")
    return b"\x80\x02c" + function.replace(".", "\n", function.count(".")).encode() + b"\n\x8a\x08" + number + b"\x85R."


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    """A zip bomb, and a file whose values would be read as if they were not compressed."""
    file = save_torch(llama(layers=1), tmp_path / "model") / "pytorch_model.bin"
    rewritten(file, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed records"):
        open_checkpoint(str(file.parent))
    rewritten(file, {"data.pkl": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < 1_000_000
    with pytest.raises(CheckpointError, match="compressed records"):
        open_checkpoint(str(file.parent))


def test_records_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """Many entries of the directory over one record: the zip bomb that needs no compression."""
    file = save_torch(llama(layers=1), tmp_path / "model") / "pytorch_model.bin"
    data = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        large = max(archive.infolist(), key=lambda record: record.file_size)
    end = data.rindex(b"PK\x05\x06")
    start = data.index(b"PK\x01\x02")
    entry = data.index(large.filename.encode(), start) - 46
    length = 46 + sum(struct.unpack_from("<HHH", data, entry + 28))
    copies = b"".join(
        data[entry : entry + 46]
        + large.filename[:-2].encode()
        + f"{number:02}".encode()
        + data[entry + 46 + len(large.filename) : entry + length]
        for number in range(60)
    )
    directory = data[start : data.index(b"PK\x06\x06")] + copies
    count = directory.count(b"PK\x01\x02")
    tail = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(directory), start, 0)
    assert end > start
    file.write_bytes(data[:start] + directory + tail)
    with pytest.raises(CheckpointError, match="overlap"):
        open_checkpoint(str(file.parent))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_call_that_makes_bytes_is_refused(legacy: bool, tmp_path: Path) -> None:
    """The one function among those that torch lets a file call whose result is as large as its argument."""
    bomb = call("builtins.bytearray", 2**40)
    save = checkpoints.save_legacy_torch if legacy else save_torch
    file = save(llama(layers=1), tmp_path / "model") / "pytorch_model.bin"
    if legacy:
        file.write_bytes(file.read_bytes()[: file.read_bytes().index(b"}q")] + bomb)
    else:
        rewritten(file, {"data.pkl": bomb})
    with pytest.raises(CheckpointError, match="a call of bytearray"):
        open_checkpoint(str(file.parent))


def test_values_that_the_file_does_not_hold_are_refused(tmp_path: Path) -> None:
    """A matrix of strides of zero takes four bytes of the file and any memory when it is computed with."""
    name = "model.layers.0.self_attn.q_proj.weight"
    for tensor in (torch.ones(1).expand(32, 32), torch.empty(32, 32, device="meta"), torch.eye(32).to_sparse()):
        place = tmp_path / str(tensor.layout) / str(tensor.device)
        save_torch(llama(layers=1).changed(**{name: tensor}), place)
        checkpoint = open_checkpoint(str(place))
        with pytest.raises(CheckpointError, match="not stored as its values") as caught:
            checkpoint.read(name)
        assert name in str(caught.value.where)
    plain = save_torch(llama(layers=1).changed(**{name: torch.ones(32, 32).mT}), tmp_path / "transposed")
    assert open_checkpoint(str(plain)).read(name).shape == (32, 32)


def test_storages_that_the_file_does_not_hold_are_refused(tmp_path: Path) -> None:
    """A tensor made by a call of its class has memory that nothing wrote."""
    file = save_torch(llama(layers=1), tmp_path / "model") / "pytorch_model.bin"
    tensor = call("torch.FloatTensor", 2**22)[2:-1]
    rewritten(file, {"data.pkl": b"\x80\x02}q\x00X\x01\x00\x00\x00a" + tensor + b"s."})
    read = TorchFile(file)
    assert read.headers["a"].shape == (2**22,)
    with pytest.raises(CheckpointError, match="not stored as its values"):
        read.read("a")


# -- paths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/../../x", "..", ".", "a\nb", "\u202eab", "\ud800", "a\\..\\b", "~"],
)
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_stays_in_its_directory(name: str, kind: str, tmp_path: Path) -> None:
    save = checkpoints.save_sharded_safetensors if kind.endswith("s") else checkpoints.save_sharded_torch
    place = save(llama(layers=1), tmp_path / "model")
    shutil.copyfile(next(place.glob("*-00001-*")), tmp_path / "secret.safetensors")
    index = place / f"{kind}.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"] = dict.fromkeys(listed["weight_map"], name)
    index.write_text(json.dumps(listed))
    parts = error_parts(invoke("plan", place))
    assert ("outside its directory" in parts["what"]) == (name != "~")
    assert "index.json" in parts["where"] or name == "~"


def test_the_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """Snapshots of the cache are links to blobs: an index may name them, and they are read."""
    place = checkpoints.save_sharded_safetensors(llama(layers=1), tmp_path / "saved")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted(place.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..") / "blobs" / str(number))
    assert len(plan_checkpoint(open_checkpoint(str(tmp_path / "snapshot"))).layers) == 1


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/urandom", "/", "itself"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_to_what_is_no_file_are_refused(name: str, target: str, tmp_path: Path) -> None:
    place = save_safetensors(llama(layers=1), tmp_path / "model")
    (place / name).unlink()
    (place / name).symlink_to(name if target == "itself" else target)
    assert name in error_parts(invoke("plan", place))["where"]


# -- sizes in headers --------------------------------------------------------------------------------------


def safetensors_file(path: Path, header: str | bytes, values: int = 64, length: int | None = None) -> SafetensorsFile:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(values))
    return SafetensorsFile(LocalFile(path))


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


TWO = '{"a": %s, "b": %s}'
HEADERS = {
    "a float shape": (f'{{"a": {entry([2.0], [0, 8])}}}', "integers"),
    "a text shape": (f'{{"a": {entry("22", [0, 16])}}}', "a list as shape"),
    "texts in a shape": (f'{{"a": {entry(["2"], [0, 8])}}}', "integers"),
    "a boolean shape": (f'{{"a": {entry([True], [0, 4])}}}', "integers"),
    "an object as shape": (f'{{"a": {entry({"2": 1}, [0, 8])}}}', "a list as shape"),
    "float offsets": (f'{{"a": {entry([2], [0.0, 8.0])}}}', "integers"),
    "three offsets": (f'{{"a": {entry([2], [0, 8, 8])}}}', "data_offsets"),
    "negative offsets": (f'{{"a": {entry([2], [-8, 0])}}}', "that a file can have"),
    "a negative shape": (f'{{"a": {entry([-2], [0, 8])}}}', "that a file can have"),
    "a shape whose size overflows": (f'{{"a": {entry([2**32, 2**32], [0, 0])}}}', "bytes for tensor a"),
    "an offset beyond the file": (f'{{"a": {entry([2**40], [0, 2**42])}}}', "truncated"),
    "a dtype that is a list": (f'{{"a": {entry([2], [0, 8], ["F32"])}}}', "a text as dtype"),
    "an entry that is a number": ('{"a": 3}', "dtype, shape"),
    "a tensor twice": (f'{{"a": {entry([2], [0, 8])}, "a": {entry([2], [8, 16])}}}', "'a' twice"),
    "a shape twice": ('{"a": {"dtype": "F32", "shape": [2], "shape": [9], "data_offsets": [0, 8]}}', "'shape' twice"),
    "values that overlap": (TWO % (entry([4], [0, 16]), entry([4], [12, 28])), "overlap"),
    "the same values twice": (TWO % (entry([4], [0, 16]), entry([4], [0, 16])), "overlap"),
    "an integer of 5,000 digits": ('{"a": {"dtype": "F32", "shape": [%s]}}' % ("9" * 5000), "JSON"),
    "NaN": ('{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', "integers"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors_are_not_believed(name: str, tmp_path: Path) -> None:
    header, words = HEADERS[name]
    file = safetensors_file(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=words) as caught:
        _ = file.headers
    assert "x.safetensors" in str(caught.value.where)


def test_tensors_without_values_lie_anywhere(tmp_path: Path) -> None:
    header = TWO % (entry([4], [0, 16]), entry([0, 7], [8, 8]))
    assert safetensors_file(tmp_path / "x", header).headers["b"].nbytes == 0


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_field(name: bytes, kind: int, value: bytes) -> bytes:
    return gguf_text(name) + struct.pack("<I", kind) + value


ARCHITECTURE = gguf_field(b"general.architecture", 8, gguf_text(b"llama"))
NESTED = struct.pack("<IQ", 9, 1) * 100_000
GGUFS = {
    "arrays nested 100,000 deep": (0, ARCHITECTURE + gguf_field(b"a", 9, NESTED), 2, "a known metadata type"),
    "a key twice": (0, ARCHITECTURE * 2, 2, "twice"),
    "a tensor twice": (
        2,
        ARCHITECTURE + (gguf_text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2 + bytes(64),
        1,
        "twice",
    ),
    "alignment 0": (0, ARCHITECTURE + gguf_field(b"general.alignment", 4, bytes(4)), 2, "alignment"),
    "alignment true": (0, ARCHITECTURE + gguf_field(b"general.alignment", 7, b"\1"), 2, "alignment"),
    "alignment 2^64-1": (
        1,
        ARCHITECTURE
        + gguf_field(b"general.alignment", 10, b"\xff" * 8)
        + gguf_text(b"t")
        + struct.pack("<IQIQ", 1, 1, 0, 0),
        2,
        "truncated",
    ),
    "an offset of 2^64-1": (
        1,
        ARCHITECTURE + gguf_text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 2**64 - 1),
        1,
        "truncated",
    ),
    "a block type without rows": (
        1,
        ARCHITECTURE + gguf_text(b"t") + struct.pack("<IIQ", 0, 8, 0),
        1,
        "in blocks of 32",
    ),
    "a metadata type of 2^31": (0, gguf_field(b"a", 2**31, b""), 1, "a known metadata type"),
    "an array of an unknown type": (0, gguf_field(b"a", 9, struct.pack("<IQ", 77, 3)), 1, "a known metadata type"),
    "an architecture that is a number": (0, gguf_field(b"general.architecture", 4, bytes(4)), 1, "architecture"),
    "an architecture that is no UTF-8": (
        0,
        gguf_field(b"general.architecture", 8, gguf_text(b"\xff\xfe")),
        1,
        "family",
    ),
    "a key that is no UTF-8": (0, ARCHITECTURE + gguf_field(b"\xff" * 20, 4, bytes(4)), 2, "block_count"),
}


@pytest.mark.parametrize("name", GGUFS)
def test_headers_of_gguf_are_not_believed(name: str, tmp_path: Path) -> None:
    n_tensors, rest, n_fields, words = GGUFS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_fields) + rest)
    with pytest.raises(CheckpointError, match=words) as caught:
        plan_checkpoint(open_checkpoint(str(path)))
    assert "model.gguf" in str(caught.value.where)


def test_a_hole_of_a_terabyte_is_no_header(tmp_path: Path) -> None:
    """Of a sparse file every count can be believed: the names, all empty, are what gives it away."""
    path = tmp_path / "model.gguf"
    for n_tensors, n_fields in ((2**35, 0), (0, 2**35)):
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_fields))
        os.truncate(path, 2**40)
        with pytest.raises(CheckpointError, match="twice"):
            open_checkpoint(str(path))
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + gguf_field(b"a", 9, struct.pack("<IQ", 8, 2**36)))
    os.truncate(path, 2**40)
    with pytest.raises(CheckpointError, match="texts in an array"):
        open_checkpoint(str(path))


# -- JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_nests_a_hundred_deep_and_no_deeper(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    for depth in (DEEPEST, DEEPEST - 1):
        parsed_json(f"{opening * (depth - 1)}{'[]' if depth else 1}{closing * (depth - 1)}".encode())
    for depth in (DEEPEST + 1, 500, 900, 985, 100_000):
        with pytest.raises(ValueError, match="recursion"):
            parsed_json(f"{opening * depth}1{closing * depth}".encode())


def test_json_of_more_values_than_a_file_has_is_not_parsed() -> None:
    tracemalloc.start()
    try:
        text = b"[" + b"[]," * MOST_VALUES + b"[]]"
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(ValueError, match="more than 5,000,000 values"):
            parsed_json(text)
        assert tracemalloc.get_traced_memory()[1] - before < 1_000_000 + len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [90, 101, 450, 950])
@pytest.mark.parametrize("key", ["thinker_config", "text_config", "quantization_config", "layer_types"])
def test_nested_configurations_end_in_one_error(key: str, depth: int, tmp_path: Path) -> None:
    place = save_safetensors(llama(layers=1), tmp_path / "model")
    text = '{"model_type":"unknown",' + f'"{key}":{{' * depth + "}" * depth + "}"
    (place / "config.json").write_text(text.replace("{{", "{").replace(f'{{"{key}"', f'{{"{key}"'))
    assert error_parts(invoke("plan", place))["where"]


ABSURD: dict[str, Any] = {
    "layers 10^12": {"num_hidden_layers": 10**12},
    "no heads": {"num_attention_heads": 0},
    "heads -1": {"num_attention_heads": -1},
    "a head size of -1": {"head_dim": -1},
    "lists for numbers": {"hidden_size": [32], "head_dim": [8]},
    "a list of 10^5 layers": {"layer_types": ["full_attention"] * 10**5, "num_hidden_layers": 10**5},
    "a text of 10^7": {"num_attention_heads": "x" * 10**7},
    "a family of 10^7": {"model_type": "x" * 10**7},
    "a family that steers the terminal": {"model_type": "\x1b[2J\x1b]0;x\x07\u202e"},
    "a family with a surrogate": {"model_type": "\ud800"},
    "a width of 4,300 digits": {"hidden_size": 10**4299},
    "NaN heads": {"num_attention_heads": float("nan")},
    "infinite width": {"hidden_size": float("inf")},
    "pruned heads by 10^4 layers": {"pruned_heads": {str(n): [0, -1] for n in range(10**4)}},
    "10^4 parts": {"text_config": {str(n): {"text_config": {}} for n in range(10**4)}, "model_type": "x"},
    "per-layer lists": {"num_attention_heads": [4] * 10**5, "num_key_value_heads": [[2]] * 10},
}


READABLE = (
    "a list of 10^5 layers",
    "pruned heads by 10^4 layers",
    "per-layer lists",
    "lists for numbers",
    "10^4 parts",
    "a family of 10^7",
    "a family that steers the terminal",
    "a family with a surrogate",
)
"""Those that say all that is needed beside what is absurd."""


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_configurations_end_in_one_short_error(name: str, tmp_path: Path) -> None:
    place = save_safetensors(llama(layers=1).configured(**ABSURD[name]), tmp_path / "model")
    size = (place / "config.json").stat().st_size
    tracemalloc.start()
    try:
        result = invoke("plan", place)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if result.exit_code:
        error_parts(result)
        assert len(result.stderr) < 10_000
    else:
        assert name in READABLE
        assert len(result.output) < 10_000
    assert peak < 60_000_000 + 20 * size
    assert not {"\x1b", "\x07", "\u202e", "\ud800"} & {*result.output}


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), "2", 1e200, [1.0]])
def test_multipliers_are_finite_numbers(value: Any, tmp_path: Path) -> None:
    model = llama(layers=1, model_type="granite").configured(residual_multiplier=value)
    place = save_safetensors(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match="does not give a multiplier"):
        plan_checkpoint(open_checkpoint(str(place)), ("scaled",))


# -- names -------------------------------------------------------------------------------------------------


def test_patterns_of_an_adapter_cannot_stall() -> None:
    """Python's own expressions take 2^n steps over these."""
    for pattern in ("(a+)+$", "(a|a)*b", "(.*)*x", "(a*)*(a*)*(a*)*!"):
        assert ends_with(pattern, "a" * 5000 + "?") is False
    assert ends_with("a{1000}{1000}{1000}", "a") is None
    assert ends_with("(", "a") is None
    assert ends_with(r"(?<=a)b", "ab") is None


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("q_proj", "model.layers.0.q_proj", True),
        ("q_proj", "model.layers.0.kq_proj", False),
        (".*q_proj", "model.layers.0.kq_proj", True),
        (r"layers\.[0-3]\.self_attn\.(q|v)_proj", "model.layers.2.self_attn.v_proj", True),
        (r"layers\.[0-3]\.self_attn\.(q|v)_proj", "model.layers.4.self_attn.v_proj", False),
        ("^model.layers.0.q_proj", "model.layers.0.q_proj", True),
        ("q|v", "a.v", True),
        ("", "a", False),
    ],
)
def test_patterns_match_as_in_peft(pattern: str, module: str, matches: bool) -> None:
    import re

    assert ends_with(pattern, module) is matches
    assert bool(re.match(rf"(.*\.)?({pattern})$", module)) is matches


def test_names_of_thousands_of_words_are_read_once(tmp_path: Path) -> None:
    """A name of n words could be parted in n places, each copying all of it."""
    words = "a." * 4_000
    name = words + "layers.0.q_proj.weight"
    assert sum(len(ending) for _, ending in _endings(name)) < 2 * len(name)
    model = llama(layers=1).renamed(lambda name: words + name).configured(model_type="unknown")
    checkpoint = open_checkpoint(str(save_safetensors(model, tmp_path / "model")))
    family, _ = recognise_by_shape(checkpoint, FAMILIES)
    assert family.model_type.endswith("-like")


def test_messages_neither_steer_a_terminal_nor_flood_it() -> None:
    assert shown("a\x1b[31mb\u202ec\ud800d\r") == "a\\x1b[31mb\\u202ec\\ud800d\\r"
    assert shown("two\nlines, é日本") == "two\nlines, é日本"
    assert len(shown("x" * 10**7)) < 2100
    error = CheckpointError("\x07" + "x" * 10**6, where="\u202e", found="\ud800")
    str(error).encode()
    assert len(str(error)) < 3000
    assert "\x07" not in str(error)


# -- memory ------------------------------------------------------------------------------------------------

CHILD = """
import resource, sys
from stats.errors import HeadatlasError
import polars, torch
from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from ingest.pipeline import hash_layers
kilobytes = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
open_checkpoint(sys.argv[1]); list(hash_layers(plan_checkpoint(open_checkpoint(sys.argv[1]))))
before = kilobytes()
for path in sys.argv[2:]:
    try:
        list(hash_layers(plan_checkpoint(open_checkpoint(path))))
    except HeadatlasError:
        pass
    else:
        sys.exit(path)
    print(path, kilobytes() - before)
"""


def memory_bombs(root: Path) -> Iterator[Path]:
    def torch_file(name: str, model: Model | None = None) -> Path:
        return save_torch(model or llama(layers=1), root / name) / "pytorch_model.bin"

    rewritten(torch_file("deflated"), {"data.pkl": bytes(300_000_000)}, zipfile.ZIP_DEFLATED)
    rewritten(torch_file("bytearray"), {"data.pkl": call("builtins.bytearray", 2**30)})
    query = "model.layers.0.self_attn.q_proj.weight"
    sizes = {"hidden_size": 2**15, "num_attention_heads": 2**12, "num_key_value_heads": 2**12}
    wide = {name: torch.ones(1).expand(2**15, 2**15) for name in llama(layers=1).tensors if "self_attn" in name}
    torch_file("expanded", Model({**llama(layers=1).config, **sizes}, wide))
    assert query in wide
    yield from (root / name for name in ("deflated", "bytearray", "expanded"))
    place = save_safetensors(llama(layers=1), root / "json")
    (place / "config.json").write_bytes(b'{"a": [' + b"{}," * 8_000_000 + b"{}]}")
    yield place
    place = save_safetensors(llama(layers=1), root / "length")
    with (place / "model.safetensors").open("r+b") as stream:
        stream.write(struct.pack("<Q", 99_000_000))
    yield place


@pytest.mark.slow
def test_no_file_takes_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    """In a process of its own: what torch allocates is seen by the system alone."""
    sound = save_torch(llama(layers=1), tmp_path / "sound")
    paths = list(memory_bombs(tmp_path))
    made = subprocess.run(
        [sys.executable, "-c", CHILD, str(sound), *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    )
    assert made.returncode == 0, made.stderr[-2000:] + made.stdout
    grown = {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in made.stdout.splitlines()}
    assert list(grown) == [str(path) for path in paths]
    largest = max(file.stat().st_size for path in paths for file in path.iterdir())
    assert max(grown.values()) * 1024 < 100_000_000 + 2.5 * largest, grown


def test_what_is_refused_leaves_the_store_alone(tmp_path: Path) -> None:
    sound = save_safetensors(llama(layers=1), tmp_path / "sound")
    assert invoke("ingest", sound, "--store", tmp_path / "store").exit_code == 0
    before = contents(tmp_path / "store")
    for path in memory_bombs_that_are_small(tmp_path / "bombs"):
        error_parts(invoke("ingest", path, "--store", tmp_path / "store"))
    assert contents(tmp_path / "store") == before


def memory_bombs_that_are_small(root: Path) -> Iterator[Path]:
    for name, argument in (
        ("builtins.bytearray", 2**62),
        ("torch.FloatTensor", 2**60),
        ("torch.storage.UntypedStorage", 2**60),
    ):
        file = save_torch(llama(layers=1), root / name) / "pytorch_model.bin"
        rewritten(file, {"data.pkl": call(name, argument)})
        yield file.parent
