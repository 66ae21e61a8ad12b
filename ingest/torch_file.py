"""PyTorch ``.bin`` files, read without ever running code they carry."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from ingest.checkpoint import TensorHeader
from ingest.safetensors_file import truncated, unopenable
from stats.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("state_dict", "model", "module", "model_state_dict")
WRAPPED_AT_MOST = 8
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
            with path.open("rb") as stream:
                zipped = stream.read(2) == b"PK"
        except OSError as error:
            raise unopenable(str(path), error.strerror or str(error)) from error
        if zipped and not is_zipfile(path):
            raise truncated(str(path), path.stat().st_size + 1, path.stat().st_size)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
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
        return self._tensors[name].detach()

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
