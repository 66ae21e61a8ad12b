"""PyTorch ``.bin`` files, read without ever running code they carry."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile, is_zipfile

from ingest.checkpoint import TensorHeader
from ingest.safetensors_file import truncated, unopenable
from stats.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("state_dict", "model", "module", "model_state_dict")
WRAPPED_AT_MOST = 8
MAKES_BYTES = b"bytearray"
LARGEST_PICKLE = 256 * 2**20
"""Bytes of a file in the old form that may be pickle; its values come last."""
CONVERT = "load it where you trust it and save it as safetensors"


class TorchFile:
    """One ``.bin`` file. Zip files are mapped and read tensor by tensor; older ones load whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {str(name): value for name, value in self._load().items() if hasattr(value, "element_size")}

    def _load(self) -> Mapping[str, Any]:
        import torch

        path = self._path
        try:
            if path.exists() and not path.is_file():
                raise unopenable(str(path), "not a regular file")
            with path.open("rb") as stream:
                zipped = stream.read(2) == b"PK"
        except OSError as error:
            raise unopenable(str(path), error.strerror or str(error)) from error
        try:
            if zipped and not is_zipfile(path):
                raise truncated(str(path), path.stat().st_size + 1, path.stat().st_size)
            self._refuse_bombs(zipped)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:  # its context names the code that was refused
            raise CheckpointError(
                "the pickle needs code to load, or is damaged; code from a checkpoint is never run",
                where=str(path),
                expected="tensors and plain containers",
                found=_first_sentence(error.__context__ or error),
                remedy=CONVERT,
            ) from error
        except Exception as error:  # what the unpickler raises on damage depends on where it is
            raise CheckpointError(
                "the file is not a readable PyTorch checkpoint",
                where=str(path),
                expected="a complete file written by torch.save",
                found=f"{type(error).__name__}: {_first_sentence(error)}",
                remedy="download the file again, or " + CONVERT,
            ) from error
        for _ in range(WRAPPED_AT_MOST):
            if not isinstance(loaded, dict):
                break
            inner = next((loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), dict)), None)
            if inner is None:
                return loaded
            loaded = inner
        raise CheckpointError(
            "the file does not hold a dictionary of tensors",
            where=str(path),
            expected="a state dict",
            found=type(loaded).__name__,
            remedy=CONVERT,
        )

    def _refuse_bombs(self, zipped: bool) -> None:
        """Stop at a file that takes more memory to load than it has bytes.

        Records of torch.save are not compressed, and mapped as if they were not. Of what its unpickler lets a
        file call, one makes as many bytes as it is told to.
        """
        import torch

        size = self._path.stat().st_size
        if not zipped and size:
            with self._path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                if whole.find(MAKES_BYTES, 0, LARGEST_PICKLE) >= 0:
                    raise self._bomb("tensors and plain containers", "a call of bytearray")
        if not zipped:
            return
        with ZipFile(self._path) as archive:
            records = archive.infolist()
            if any(record.compress_type or record.file_size != record.compress_size for record in records):
                raise self._bomb("records that are not compressed, as torch.save writes them", "compressed records")
            if sum(record.file_size for record in records) > size:
                raise self._bomb(f"records of at most {size:,} bytes, which the file has", "records that overlap")
        reader = torch._C.PyTorchFileReader(str(self._path))
        names = reader.get_all_records()
        if sum(reader.get_record_size(name) for name in names) > size:
            raise self._bomb(f"records of at most {size:,} bytes, which the file has", "records that overlap")
        pickles = [name for name in names if name.endswith(".pkl")]
        if any(MAKES_BYTES in reader.get_record(name) for name in pickles):
            raise self._bomb("tensors and plain containers", "a call of bytearray")

    def _bomb(self, expected: str, found: str) -> CheckpointError:
        return CheckpointError(
            "the file may take more memory to load than it has bytes",
            where=str(self._path),
            expected=expected,
            found=found,
            remedy=CONVERT,
        )

    @cached_property
    def headers(self) -> Mapping[str, TensorHeader]:
        return {
            name: TensorHeader(
                name,
                tuple(tensor.shape),
                _DTYPE_NAMES.get(str(tensor.dtype), str(tensor.dtype).removeprefix("torch.").upper()),
                tensor.numel() * tensor.element_size(),
                str(self._path),
            )
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        import torch

        tensor = self._tensors[name].detach()
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            raise self._unreadable(name, "a plain matrix", f"a tensor of layout {tensor.layout} on {tensor.device}")
        stored, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
        if needed > stored or stored > self._path.stat().st_size:
            raise self._unreadable(name, f"{needed:,} bytes of values in the file", f"{stored:,} bytes")
        return tensor

    def _unreadable(self, name: str, expected: str, found: str) -> CheckpointError:
        return CheckpointError(
            "a tensor is not stored as its values",
            where=f"{self._path}, tensor {name}",
            expected=expected,
            found=found,
            remedy=CONVERT,
        )

    def place(self, name: str) -> None:
        """Unknown: a tensor may be a view of any part of what is stored."""


_DTYPE_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int8": "I8",
    "torch.uint8": "U8",
}


def _first_sentence(error: BaseException) -> str:
    """What went wrong, without torch's advice on how to run the code after all."""
    return " ".join(str(error).split()).partition(". ")[0][:200]
