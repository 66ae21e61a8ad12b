"""A checkpoint as named tensors with headers, whatever file format holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ingest.fp8 import FP8, block_size, dequantised, scale_of

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.safetensors_file import ByteSource
    from ingest.transfers import Transfers


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about one tensor before its values are read.

    ``shape`` is (out, in) as numpy would show it; ``nbytes`` is the size of the stored values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class TensorFile(Protocol):
    """One file of tensors. ``read`` may be called from several threads."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Headers by tensor name."""

    def read(self, name: str) -> Tensor:
        """The stored values on the CPU in a floating dtype, shaped as the header says."""

    def place(self, name: str) -> tuple[ByteSource, int] | None:
        """Bytes that hold the stored values and where in them they begin; None where that is not known."""


@dataclass(slots=True)
class Checkpoint:
    """Named tensors spread over files, and the configuration beside them.

    ``files`` opens lazily: only files that hold attention are ever touched. ``naming`` selects the
    family table, ``transformers`` or ``gguf``. ``transfers`` are those of the remote places it is read from.
    """

    source: str
    name: str
    format: str
    naming: str
    config: Mapping[str, Any]
    location: Mapping[str, str]
    files: Mapping[str, TensorFile]
    revision: str | None = None
    transfers: tuple[Transfers, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.location

    @property
    def commit(self) -> str | None:
        """What the values of every tensor follow from, where a commit of the hub says so."""
        return self.revision

    def header(self, name: str) -> TensorHeader:
        """Header of one tensor; opens its file."""
        return self.files[self.location[name]].headers[name]

    def companions(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that are read beside one because its values depend on them."""
        header = self.header(name)
        return (scale_of(self, header).name,) if header.dtype in FP8 else ()

    def read(self, name: str) -> Tensor:
        """Values of one tensor in a floating dtype on the CPU; those of fp8 weights include their scale."""
        header, stored = self.header(name), self._stored(name)
        if header.dtype not in FP8:
            return stored
        return dequantised(stored, self._stored(scale_of(self, header).name), block_size(self))

    def place(self, name: str) -> tuple[ByteSource, int] | None:
        """Where the stored values of one tensor begin, and in which bytes."""
        return self.files[self.location[name]].place(name)

    def _stored(self, name: str) -> Tensor:
        return self.files[self.location[name]].read(name)

    def total_parameters(self) -> int | None:
        """Parameters of the whole checkpoint, or None where some headers are in files never opened."""
        if len(self.files) != 1:
            return None
        return sum(header.numel for file in self.files.values() for header in file.headers.values())
