"""GGUF files: metadata and tensor headers parsed here, values dequantised by the gguf package.

The package's own reader builds an object for every token of the vocabulary before it shows the
first tensor, which takes seconds; this one steps over them. Layout: magic, version, counts, the
key/value metadata, one record per tensor, padding, values (little-endian, version 2 and 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.checkpoint import TensorHeader
from ingest.safetensors_file import MOST_AXES, ByteSource, LocalFile, read_bytes, truncated, unopenable
from stats.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FIRST_PIECE = 64 * 1024
"""Bytes of the header that are fetched first; a vocabulary makes it longer by megabytes."""

LEAST_RECORD, LEAST_FIELD = 24, 13
"""Bytes that a tensor and a metadata key take at least."""

MOST_STRINGS = 10_000_000
"""Texts in an array; the largest vocabularies have some hundred thousand."""

LONGEST_ARRAY_KEPT = 4096
"""Arrays longer than this are vocabularies and their scores; per-layer settings are shorter."""


@cache
def can_dequantize(dtype: str) -> bool:
    """Whether values stored in a type can be had as floats, tried on one block."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[dtype]
    if dtype == "F64":
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Cursor:
    """Sequential little-endian reads that know where the file ends."""

    def __init__(self, buffer: mmap.mmap | bytes, name: str, size: int) -> None:
        self.buffer = buffer
        self.name = name
        self.position = 0
        self.size = size
        self.there = len(buffer)

    def need(self, last: int) -> None:
        """Stop where bytes up to ``last`` are not in the file, or not in the buffer."""
        if last > self.size:
            raise truncated(self.name, last, self.size)
        if last > self.there:
            raise _ShortHeadError(last)

    def skip(self, count: int) -> int:
        start = self.position
        self.need(start + max(count, 0))
        self.position = start + count
        return start

    def scalar(self, code: str) -> Any:
        start = self.skip(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.buffer, start)[0]

    def text(self) -> str:
        length = self.scalar("Q")
        start = self.skip(length)
        return self.buffer[start : start + length].decode("utf-8", errors="replace")


class _ShortHeadError(Exception):
    """The header goes on beyond the bytes that are there, at least up to ``last``."""

    def __init__(self, last: int) -> None:
        super().__init__(last)
        self.last = last


class GgufFile:
    """One GGUF file: metadata, tensor headers, and dequantised values.

    Of a file that is not local, the header is read a piece at a time until it is complete.
    """

    def __init__(self, file: Path | ByteSource) -> None:
        self._path = file if isinstance(file, Path) else None
        self._source = LocalFile(file) if isinstance(file, Path) else file
        self._name = self._source.name

    @cached_property
    def _parsed(self) -> tuple[dict[str, Any], dict[str, TensorHeader], dict[str, int]]:
        if self._source.size < 24:
            raise truncated(self._name, 24, self._source.size)
        if self._path is None:
            return self._parse_piecewise()
        try:
            with self._path.open("rb") as stream:
                whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise unopenable(self._name, str(error)) from error
        with whole as mapped:
            return self._parse(_Cursor(mapped, self._name, len(mapped)))

    def _parse_piecewise(self) -> tuple[dict[str, Any], dict[str, TensorHeader], dict[str, int]]:
        head, wanted = b"", FIRST_PIECE
        while True:
            wanted = min(wanted, self._source.size)
            head += read_bytes(self._source, len(head), wanted - len(head))
            try:
                return self._parse(_Cursor(head, self._name, self._source.size))
            except _ShortHeadError as more:
                wanted = max(more.last, len(head) + len(head) // 4)

    def _parse(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorHeader], dict[str, int]]:
        magic = cursor.buffer[cursor.skip(4) : 4]
        version = cursor.scalar("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise self._malformed("the letters GGUF and version 2 or 3", f"{magic!r}, version {version}")
        n_tensors, n_fields = cursor.scalar("Q"), cursor.scalar("Q")
        least = cursor.position + n_tensors * LEAST_RECORD + n_fields * LEAST_FIELD
        if least > cursor.size:
            raise truncated(self._name, least, cursor.size)
        metadata = {}
        for _ in range(n_fields):
            name = cursor.text()
            if name in metadata:
                raise self._malformed("every metadata key once", f"{name[:200]!r} twice")
            metadata[name] = self._value(cursor, cursor.scalar("I"), nested=0)
        records: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(n_tensors):
            name, shape, type_number, offset = self._record(cursor)
            if name in records:
                raise self._malformed("every tensor once", f"{name[:200]!r} twice")
            records[name] = shape, type_number, offset
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._malformed("a positive general.alignment", repr(alignment))
        start = -(-cursor.position // alignment) * alignment
        headers, offsets = {}, {}
        for name, (shape, type_number, offset) in records.items():
            dtype, nbytes = self._stored_size(name, shape, type_number)
            if start + offset + nbytes > cursor.size:
                raise truncated(f"{self._name}, tensor {name}", start + offset + nbytes, cursor.size)
            headers[name] = TensorHeader(name, shape, dtype, nbytes, self._name)
            offsets[name] = start + offset
        return metadata, headers, offsets

    def _value(self, cursor: _Cursor, kind: int, nested: int) -> Any:
        if kind in SCALARS:
            return cursor.scalar(SCALARS[kind])
        if kind == STRING:
            return cursor.text()
        if kind != ARRAY or nested > 2:
            raise self._malformed("a known metadata type", f"type {kind} at byte {cursor.position:,}")
        kind, count = cursor.scalar("I"), cursor.scalar("Q")
        if kind in SCALARS:
            code = f"<{count}{SCALARS[kind]}"
            if count > cursor.size:
                raise truncated(self._name, cursor.position + count, cursor.size)
            start = cursor.skip(struct.calcsize(code))
            return list(struct.unpack_from(code, cursor.buffer, start)) if count <= LONGEST_ARRAY_KEPT else None
        if kind == STRING:
            if count > MOST_STRINGS and count <= cursor.size // 8:
                raise self._malformed(f"at most {MOST_STRINGS:,} texts in an array", f"{count:,}")
            length = struct.Struct("<Q").unpack_from
            buffer, position, last = cursor.buffer, cursor.position, cursor.there - 8
            for _ in range(count):
                if position > last:
                    cursor.need(position + 8)
                position += 8 + length(buffer, position)[0]
            cursor.skip(position - cursor.position)
            return None
        return [self._value(cursor, kind, nested + 1) for _ in range(count)]

    def _record(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = cursor.text(), cursor.scalar("I")
        if n_dims > MOST_AXES:
            raise self._malformed(f"at most {MOST_AXES} axes for tensor {name}", str(n_dims))
        shape = tuple(cursor.scalar("Q") for _ in range(n_dims))[::-1]
        return name, shape, cursor.scalar("I"), cursor.scalar("Q")

    def _stored_size(self, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise self._malformed(f"a known value type for tensor {name}", f"type {type_number}") from error
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if (shape[-1] if shape else 1) % per_block:
            found = f"rows of {shape[-1] if shape else 1}"
            raise self._malformed(f"rows of tensor {name} in blocks of {per_block}", found)
        return kind.name, math.prod(shape) // per_block * block_bytes

    def _malformed(self, expected: str, found: str) -> CheckpointError:
        return CheckpointError(
            "the file is not valid GGUF",
            where=self._name,
            expected=expected,
            found=found,
            remedy="download or convert the file again",
        )

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata by key; vocabularies are None."""
        return self._parsed[0]

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self._parsed[1]

    def place(self, name: str) -> tuple[ByteSource, int]:
        return self._source, self._parsed[2][name]

    def read(self, name: str) -> Tensor:
        import numpy as np
        import torch
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        header, offset = self._parsed[1][name], self._parsed[2][name]
        raw = np.empty(header.nbytes, np.uint8)
        self._source.read_into(offset, raw.data)
        if header.dtype == "F64":
            return torch.from_numpy(raw.view(np.float64).reshape(header.shape))
        rows = raw.reshape(*header.shape[:-1], -1) if header.shape else raw
        values = dequantize(rows, GGMLQuantizationType[header.dtype])
        return torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(header.shape))
