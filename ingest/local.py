"""Local checkpoints: a Hugging Face directory, a bare safetensors or ``.bin`` file, a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from ingest.checkpoint import Checkpoint, TensorFile
from ingest.gguf_checkpoint import gguf_parts, open_gguf
from ingest.gguf_file import GgufFile
from ingest.json_text import parsed_json
from ingest.safetensors_file import LocalFile, SafetensorsFile, unopenable
from ingest.torch_file import TorchFile
from stats.errors import CheckpointError

INDEXES = (
    ("model.safetensors.index.json", "safetensors"),
    ("model.safetensors", "safetensors"),
    ("pytorch_model.bin.index.json", "torch"),
    ("pytorch_model.bin", "torch"),
)
"""Weight files of a directory in the order they are looked for; an index names its shards."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter, which changes a model that is stored elsewhere."""

LARGEST_JSON = 200_000_000


class Folder(Protocol):
    """A place that holds a checkpoint's files by plain name."""

    location: str

    def names(self) -> Collection[str]:
        """Files that are there."""

    def path(self, name: str) -> Path:
        """A local path of one file, fetched first if need be."""

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file."""

    def safetensors(self, name: str) -> SafetensorsFile:
        """One safetensors file; opening it reads nothing yet."""

    def gguf(self, name: str) -> GgufFile:
        """One GGUF file; opening it reads nothing yet."""


class LocalFolder:
    """A directory."""

    def __init__(self, directory: Path) -> None:
        self.location = str(directory)
        self._directory = directory

    def names(self) -> Collection[str]:
        try:
            return {entry.name for entry in self._directory.iterdir()}
        except OSError as error:
            raise unopenable(self.location, error.strerror or str(error)) from error

    def path(self, name: str) -> Path:
        return self._directory / name

    def safetensors(self, name: str) -> SafetensorsFile:
        return SafetensorsFile(LocalFile(self._directory / name))

    def json(self, name: str) -> dict[str, Any]:
        return read_json(self.path(name))

    def gguf(self, name: str) -> GgufFile:
        return GgufFile(self.path(name))


class LazyFiles(Mapping[str, TensorFile]):
    """Tensor files by name, opened at first use."""

    def __init__(self, names: list[str], opener: Callable[[str], TensorFile]) -> None:
        self._names = dict.fromkeys(names)
        self._opener = opener
        self._open: dict[str, TensorFile] = {}

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._open:
            self._open[name] = self._opener(name)
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or the reason it is not one."""
    try:
        if not path.is_file():
            raise unopenable(str(path), "not a regular file" if path.exists() else "No such file or directory")
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(
                "a JSON file is too large to be one",
                where=str(path),
                expected=f"at most {LARGEST_JSON:,} bytes",
                found=f"{path.stat().st_size:,} bytes",
            )
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError("a file cannot be read", where=str(path), found=error.strerror) from error
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str, unique: bool = False) -> dict[str, Any]:
    """A JSON object, or why a file's content is none; ``unique`` refuses a key that is there twice."""
    try:
        value = parsed_json(content, unique)
    except ValueError as error:
        raise CheckpointError(
            "a file is not valid JSON", where=where, found=str(error)[:200], remedy="download the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            "a file does not hold a JSON object", where=where, expected="an object", found=type(value).__name__
        )
    return value


def open_local(path: Path, config_path: Path | None = None) -> Checkpoint:
    """Open a local checkpoint; only small files and headers are read.

    Args:
        path: a directory with ``config.json``, or a ``.safetensors``, ``.bin`` or ``.gguf`` file.
        config_path: configuration for a file that has none beside it.
    """
    if path.is_dir():
        return open_folder(LocalFolder(path), path.resolve().name, config_path)
    folder = LocalFolder(path.parent)
    beside = (*gguf_parts(path.name), "config.json", ADAPTER_CONFIG)
    present = [name for name in beside if folder.path(name).is_file()]
    checkpoint = open_file(folder, path.name, present, str(path), config_path)
    checkpoint.source = str(path)
    return checkpoint


def open_file(
    folder: Folder, name: str, present: Collection[str], where: str, config_path: Path | None = None
) -> Checkpoint:
    """Open the checkpoint that one file of a folder is, or a part of it.

    Args:
        folder: where the file is.
        name: its plain name.
        present: which of the files beside it that may matter are there.
        where: what to call the file in messages.
        config_path: configuration for a file that has none beside it.
    """
    stem, suffix = PurePosixPath(name).stem, PurePosixPath(name).suffix.lower()
    if suffix == ".gguf":
        return open_gguf(where, name, [part for part in gguf_parts(name) if part in present], folder.gguf)
    kinds = {".safetensors": "safetensors", ".bin": "torch", ".pt": "torch", ".pth": "torch"}
    if suffix not in kinds:
        raise CheckpointError(
            "the file is not a checkpoint",
            where=where,
            expected="a directory, .safetensors, .bin or .gguf",
            found=suffix or "no suffix",
        )
    if name in ADAPTER_WEIGHTS and ADAPTER_CONFIG in present:
        raise _adapter_without_base(folder)
    if config_path is None and "config.json" not in present:
        raise CheckpointError(
            "the file has no configuration",
            where=where,
            expected="a config.json beside it",
            remedy="name one with --config FILE",
        )
    config = read_json(config_path) if config_path else folder.json("config.json")
    return _assemble(folder, stem, kinds[suffix], config, {}, [name])


def open_folder(folder: Folder, name: str, config_path: Path | None = None) -> Checkpoint:
    """Open the checkpoint of a folder under a name.

    With an index only what it names is read; other weight files beside it are ignored.
    """
    present = folder.names()
    found = next((pair for pair in INDEXES if pair[0] in present), None)
    if found is None:
        return _open_only_file(folder, name, present, config_path)
    config = _configuration(folder, present, config_path)
    weights, kind = found
    if weights.endswith(".index.json"):
        location = shard_index(folder.json(weights), f"{folder.location}/{weights}")
        return _assemble(folder, name, kind, config, location, sorted(set(location.values())))
    return _assemble(folder, name, kind, config, {}, [weights])


def _configuration(folder: Folder, present: Collection[str], config_path: Path | None) -> dict[str, Any]:
    """The configuration named by the user, or the folder's own."""
    if config_path is None and "config.json" not in present:
        raise CheckpointError(
            "the weights have no configuration",
            where=folder.location,
            expected="config.json",
            found=", ".join(sorted(present)[:8]),
            remedy="add the config.json the model was saved with, or name one with --config FILE",
        )
    return read_json(config_path) if config_path else folder.json("config.json")


def _open_only_file(folder: Folder, name: str, present: Collection[str], config_path: Path | None) -> Checkpoint:
    """A folder without the usual names: a single weight file, or a clear refusal."""
    files = sorted(
        file for file in present if file.endswith((".gguf", ".safetensors")) and not file.startswith("adapter_")
    )
    models = {gguf_parts(file) for file in files}
    if len(models) == 1 and files[0].endswith(".gguf"):
        checkpoint = open_gguf(folder.location, files[0], present, folder.gguf)
        checkpoint.name = name
        return checkpoint
    if len(files) == 1:
        return _assemble(folder, name, "safetensors", _configuration(folder, present, config_path), {}, files)
    if ADAPTER_CONFIG in present:
        raise _adapter_without_base(folder)
    raise CheckpointError(
        "no weights found" if not files else "several weight files and no index",
        where=folder.location,
        expected="one of " + ", ".join(file for file, _ in INDEXES) + ", or a single .safetensors or .gguf",
        found=", ".join(sorted(present)[:8]) or "nothing",
        remedy="name the file itself" if files else "complete the download, or check the path",
    )


def _adapter_without_base(folder: Folder) -> CheckpointError:
    base = folder.json(ADAPTER_CONFIG).get("base_model_name_or_path")
    return CheckpointError(
        "this is an adapter, not a model",
        where=folder.location,
        expected="the weights of a whole model",
        found=f"{ADAPTER_CONFIG} for base model {base}",
        remedy=f"name the base model as well: --base {base or 'MODEL'}",
    )


def shard_index(index: Mapping[str, Any], where: str) -> dict[str, str]:
    """File name by tensor name from an index, every name checked to stay in its directory."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index names no tensors",
            where=where,
            expected="a weight_map from tensor to file",
            found=type(weight_map).__name__,
            remedy="download the index again",
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                "the index names a file outside its directory",
                where=f"{where}, tensor {tensor}",
                expected="a plain file name",
                found=repr(name)[:200],
                remedy="do not trust this checkpoint; download it again from its source",
            )
    return weight_map


def _is_plain_name(name: str) -> bool:
    """Whether a text names a file within its directory on every system."""
    return (
        PurePosixPath(name).name == name and name not in ("", "..") and not {*"\\\0"} & {*name} and name.isprintable()
    )


def _assemble(
    folder: Folder,
    name: str,
    kind: str,
    config: Mapping[str, Any],
    location: dict[str, str],
    file_names: list[str],
) -> Checkpoint:
    """A checkpoint over the named files; without an index the single file says what it holds."""

    def opener(file_name: str) -> TensorFile:
        file: TensorFile
        file = TorchFile(folder.path(file_name)) if kind == "torch" else folder.safetensors(file_name)
        _verify_index(location, file_name, file, folder)
        return file

    files = LazyFiles(file_names, opener)
    if not location:
        location = dict.fromkeys(files[file_names[0]].headers, file_names[0])
    return Checkpoint(folder.location, name, kind, "transformers", config, location, files)


def _verify_index(location: Mapping[str, str], file_name: str, file: TensorFile, folder: Folder) -> None:
    """Every tensor the index places in a file must be there."""
    absent = [name for name, place in location.items() if place == file_name and name not in file.headers]
    if absent:
        raise CheckpointError(
            "the index places tensors in a file that does not hold them",
            where=f"{folder.location}/{file_name}",
            expected=", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else ""),
            found=f"{len(file.headers)} other tensors",
            remedy="the shards and the index come from different saves: download both again",
        )
