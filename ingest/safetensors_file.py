"""Safetensors files: the header parsed and checked here, so that any byte source can serve it.

A file is an 8-byte little-endian header length, that many bytes of JSON, and the values.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ingest.checkpoint import TensorHeader
from ingest.json_text import parsed_json
from stats.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

ITEM_SIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
FLOATING = ("F64", "F32", "F16", "BF16")
"""Types whose values stand alone."""

LARGEST_HEADER = 100_000_000
"""The safetensors library's own limit on the header, in bytes."""

MOST_AXES = 8


class ByteSource(Protocol):
    """Random access to the bytes of one file."""

    name: str

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; a short file is an error."""


class LocalFile:
    """Bytes of a local file by ``pread``, which threads can share; never mapped into memory.

    The kernel is told not to read ahead: what lies between two tensors is mostly not wanted.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise unopenable(self.name, "not a regular file")
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            raise unopenable(self.name, error.strerror or str(error)) from error

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @cached_property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise CheckpointError(
                    "a file of the checkpoint cannot be read",
                    where=f"{self.name}, byte {offset + filled:,}",
                    found=error.strerror or str(error),
                    remedy="check the disk or the network it is on, then try again",
                ) from error
            if count == 0:
                raise truncated(self.name, offset + len(buffer), offset + filled)
            filled += count


def unopenable(where: str, found: str) -> CheckpointError:
    """The error for a file that is missing or cannot be opened."""
    return CheckpointError(
        "a file of the checkpoint cannot be opened",
        where=where,
        expected="a readable file",
        found=found,
        remedy="complete the download, or check the path and its permissions",
    )


def truncated(where: str, expected: int, found: int) -> CheckpointError:
    """The error for a file that ends before its own header says it does."""
    return CheckpointError(
        "a checkpoint file is truncated",
        where=where,
        expected=f"at least {expected:,} bytes",
        found=f"{found:,} bytes",
        remedy="download or copy the file again",
    )


def read_bytes(source: ByteSource, offset: int, length: int) -> bytes:
    """``length`` bytes from ``offset``."""
    buffer = bytearray(length)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


class SafetensorsFile:
    """One safetensors file over a byte source."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source

    @cached_property
    def _parsed(self) -> tuple[dict[str, TensorHeader], dict[str, int]]:
        source = self._source
        if source.size < 8:
            raise truncated(source.name, 8, source.size)
        length = int.from_bytes(read_bytes(source, 0, 8), "little")
        if length > LARGEST_HEADER:
            raise self._malformed(f"a header of at most {LARGEST_HEADER:,} bytes", f"{length:,} bytes")
        if 8 + length > source.size:
            raise truncated(source.name, 8 + length, source.size)
        try:
            entries = parsed_json(read_bytes(source, 8, length), unique=True)
        except ValueError as error:
            raise self._malformed("a JSON header", str(error)) from error
        if not isinstance(entries, dict):
            raise self._malformed("a JSON object", type(entries).__name__)
        entries.pop("__metadata__", None)
        headers, offsets = {}, {}
        for name, entry in entries.items():
            headers[name], offsets[name] = self._tensor(name, entry, 8 + length)
        self._refuse_overlap(headers, offsets)
        return headers, offsets

    def _refuse_overlap(self, headers: Mapping[str, TensorHeader], offsets: Mapping[str, int]) -> None:
        """No byte may belong to two tensors; those without a value have no byte."""
        end, before = 0, ""
        for name in sorted((name for name in headers if headers[name].nbytes), key=offsets.__getitem__):
            if offsets[name] < end:
                raise self._malformed(f"tensor {name} behind the values of {before}", "values that overlap")
            end, before = offsets[name] + headers[name].nbytes, name

    def _tensor(self, name: str, entry: Any, start: int) -> tuple[TensorHeader, int]:
        """One entry of the header, checked against the file, and where its values start."""
        try:
            dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(f"dtype, shape and data_offsets for tensor {name}", repr(entry)[:200]) from error
        if not isinstance(dtype, str) or not isinstance(shape, list):
            raise self._malformed(f"a text as dtype and a list as shape for tensor {name}", repr(entry)[:200])
        if any(type(size) is not int for size in (first, last, *shape)):
            raise self._malformed(f"integers as shape and data_offsets for tensor {name}", repr(entry)[:200])
        shape = tuple(shape)
        nbytes = last - first
        if len(shape) > MOST_AXES or nbytes < 0 or any(not 0 <= size < 2**63 for size in (first, last, *shape)):
            raise self._malformed(f"sizes for tensor {name} that a file can have", repr(entry)[:200])
        if dtype in ITEM_SIZE and nbytes != math.prod(shape) * ITEM_SIZE[dtype]:
            raise self._malformed(
                f"{math.prod(shape) * ITEM_SIZE[dtype]:,} bytes for tensor {name} {list(shape)} {dtype}",
                f"{nbytes:,} bytes",
            )
        if start + last > self._source.size:
            raise truncated(f"{self._source.name}, tensor {name}", start + last, self._source.size)
        return TensorHeader(name, shape, dtype, nbytes, self._source.name), start + first

    def _malformed(self, expected: str, found: str) -> CheckpointError:
        return CheckpointError(
            "the file is not valid safetensors",
            where=self._source.name,
            expected=expected,
            found=found,
            remedy="download or convert the file again",
        )

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self._parsed[0]

    def place(self, name: str) -> tuple[ByteSource, int]:
        return self._source, self._parsed[1][name]

    def read(self, name: str) -> Tensor:
        import torch

        headers, offsets = self._parsed
        header = headers[name]
        dtypes = {
            "F64": torch.float64,
            "F32": torch.float32,
            "F16": torch.float16,
            "BF16": torch.bfloat16,
            "F8_E4M3": torch.float8_e4m3fn,
            "F8_E5M2": torch.float8_e5m2,
            "F8_E8M0": torch.float8_e8m0fnu,
        }
        values = torch.empty(header.nbytes, dtype=torch.uint8)
        self._source.read_into(offsets[name], values.numpy().data)
        return values.view(dtypes[header.dtype]).view(header.shape)
