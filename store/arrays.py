"""Arrays of one model on disk: written layer by layer while staged, read back for the catalogue.

Layout below the model's group: ``<operator>/<stack>/<array>``. The first axis is ``layer``, in the
order of the array ``layer``, which holds the checkpoint's own numbers. Where layers differ in
size, arrays are as large as the largest layer needs and padded with NaN (-1 for integers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BloscShuffle

from ingest.plan import LayerPlan
from stats.errors import HeadatlasError, StoreError
from stats.registry import HEAD_STATISTICS, PAIR_STATISTICS, QK_STATISTICS, SPECTRA, STATUS_REASONS, Statistic

if TYPE_CHECKING:
    from ingest.pipeline import LayerMeasurement

COMPRESSOR = BloscCodec(cname="zstd", clevel=5, shuffle=BloscShuffle.bitshuffle)
EIGENVALUE = Statistic(
    "eigenvalue",
    "DOUBLE[]",
    "eigenvalues of T, by descending modulus",
    "weight units squared",
    "eig(D K)",
)
CORE = Statistic(
    "core",
    "DOUBLE[]",
    "K, the transport in principal coordinates: T = Q_O K Q_V^T",
    "weight units squared",
    "W^T R_O R_V^T U",
)

HEAD_AXES = ("layer", "head")
ARRAYS: dict[str, tuple[Statistic, tuple[str, ...]]] = {
    **{item.name: (item, HEAD_AXES) for item in HEAD_STATISTICS},
    **{
        item.name: (item, (*HEAD_AXES, "d_head"))
        for item in (*SPECTRA, EIGENVALUE)
        if not item.name.startswith("eigenvalue_")
    },
    **{
        f"qk_{item.name}": (item, (*HEAD_AXES, "d_head_qk") if item.sql_type == "DOUBLE[]" else HEAD_AXES)
        for item in QK_STATISTICS
    },
    **{item.name: (item, ("layer", "write_head", "read_head")) for item in PAIR_STATISTICS},
    "core": (CORE, (*HEAD_AXES, "principal_o", "principal_v")),
    "o_basis": (
        Statistic("o_basis", "DOUBLE[]", "Q_O, orthonormal: what the head writes to", "-1 to 1", "T = Q_O K Q_V^T"),
        (*HEAD_AXES, "d_model", "principal_o"),
    ),
    "v_basis": (
        Statistic("v_basis", "DOUBLE[]", "Q_V, orthonormal: what the head reads", "-1 to 1", "T = Q_O K Q_V^T"),
        (*HEAD_AXES, "d_source", "principal_v"),
    ),
}
"""Every array that may be stored, with its declaration and axis names; the bases only when they are kept."""

CODECS = {"bytes", "blosc", "zstd", "crc32c", "sharding_indexed"}
"""Codecs that stored arrays may have."""

LARGEST_STACK = 2**32
"""Bytes of all arrays of a stack that are read as one, and of a chunk of any."""

LARGE = ("core", "o_basis", "v_basis")
"""Arrays that go to disk layer by layer, a shard each, and are read only when asked for."""


def statistic_attributes(statistic: Statistic) -> dict[str, Any]:
    """What an array says about itself."""
    return {
        "long_name": statistic.meaning,
        "values": statistic.values,
        "formula": statistic.formula,
        "source": statistic.source,
    }


SIZES = {
    "n_heads": "query heads of the layer",
    "n_kv_heads": "key/value heads of the layer",
    "d_model": "width of the residual stream",
    "d_head": "width of a head's value",
}


class StackWriter:
    """Collects one stack of one operator. ``LARGE`` arrays go to disk layer by layer, the rest at the end."""

    def __init__(self, directory: Path, plans: list[LayerPlan]) -> None:
        self._group = zarr.open_group(str(directory), mode="w-", zarr_format=3)
        self._plans = plans
        self._row = {plan.layer: row for row, plan in enumerate(plans)}
        self._heads = max(plan.n_heads for plan in plans)
        self._small: dict[str, np.ndarray] = {}
        self._large: dict[str, zarr.Array[Any]] = {}
        self._kv_head = np.full((len(plans), self._heads), -1, np.int32)

    def add(self, measurement: LayerMeasurement, arrays: Mapping[str, np.ndarray]) -> None:
        """Take one layer's arrays; ``head`` is their leading axis."""
        row = self._row[measurement.plan.layer]
        n_heads = measurement.plan.n_heads
        self._kv_head[row, :n_heads] = measurement.kv_head
        for name, array in arrays.items():
            if name in LARGE:
                self._write_large(name, row, array)
            else:
                target = self._collected(name, array)[row]
                target[tuple(slice(size) for size in array.shape)] = array

    def _collected(self, name: str, array: np.ndarray) -> np.ndarray:
        """The collecting array of a name, as long in every axis as any layer needs."""
        shape = (len(self._plans), *self._padded(array.shape, name))
        kept = self._small.get(name)
        if kept is None or any(have < need for have, need in zip(kept.shape, shape, strict=True)):
            fill: Any = np.nan if array.dtype.kind in "fc" else -1
            grown = np.full(shape if kept is None else np.maximum(kept.shape, shape), fill, array.dtype)
            if kept is not None:
                grown[tuple(slice(size) for size in kept.shape)] = kept
            kept = self._small[name] = grown
        return kept

    def _padded(self, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
        axes = ARRAYS[name][1][1:] if name in ARRAYS else ("head",)
        return tuple(
            self._heads if axis.endswith("head") and not axis.startswith("d_") else size
            for axis, size in zip(axes, shape, strict=True)
        )

    def _write_large(self, name: str, row: int, array: np.ndarray) -> None:
        if name not in self._large:
            d_head = max(plan.d_head for plan in self._plans)
            widths = {axis: max(getattr(plan.sizes, axis) for plan in self._plans) for axis in ("d_model", "d_source")}
            shape = tuple(widths.get(axis, d_head) for axis in ARRAYS[name][1][2:])
            whole = (len(self._plans), self._heads, *shape)
            self._large[name] = self._create(name, whole, array.dtype, (1, 1, *shape), (1, *whole[1:]))
        target = self._large[name]
        padded = np.full(target.shape[1:], np.nan, array.dtype)
        padded[tuple(slice(size) for size in array.shape)] = array
        target[row] = padded

    def _create(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: tuple[int, ...],
        shards: tuple[int, ...] | None = None,
        axes: tuple[str, ...] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> zarr.Array[Any]:
        if name in ARRAYS:
            statistic, axes = ARRAYS[name]
            attributes = statistic_attributes(statistic)
        fill: Any = np.nan if np.dtype(dtype).kind in "fc" else -1
        return self._group.create_array(
            name,
            shape=shape,
            dtype=dtype,
            chunks=chunks,
            shards=shards,
            compressors=COMPRESSOR,
            fill_value=fill,
            dimension_names=axes,
            attributes=dict(attributes or {}),
        )

    def close(self) -> None:
        """Write what was collected, one chunk per array, and the per-layer sizes."""
        for name, array in self._small.items():
            if name == "reason":
                meanings = [reason.replace(" ", "_") or "ok" for reason in STATUS_REASONS]
                attributes = {
                    "long_name": "why closure is undefined",
                    "flag_values": list(range(len(meanings))),
                    "flag_meanings": " ".join(meanings),
                }
                self._write(name, array.astype(np.int8), HEAD_AXES, attributes)
            elif name == "rank":
                self._write(name, array.astype(np.int32))
            else:
                self._write(name, array)
        self._write("kv_head", self._kv_head, HEAD_AXES, {"long_name": "value and key projection a head reads"})
        layers = np.array([plan.layer for plan in self._plans], np.int32)
        self._write("layer", layers, ("layer",), {"long_name": "layer number in the checkpoint"})
        for name, meaning in SIZES.items():
            sizes = np.array([getattr(plan.sizes, name) for plan in self._plans], np.int32)
            self._write(name, sizes, ("layer",), {"long_name": meaning})

    def _write(
        self,
        name: str,
        array: np.ndarray,
        axes: tuple[str, ...] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        created = self._create(name, array.shape, array.dtype, array.shape, None, axes, attributes)
        created[...] = array


def read_stack(directory: Path) -> dict[str, np.ndarray]:
    """Every array of one stack except the ``LARGE`` ones, by name.

    Raises:
        StoreError: arrays of another kind than this program stores, or damaged ones.
    """
    group = open_stack(directory)
    with readable(directory):
        return {name: np.asarray(array[...]) for name, array in group.arrays() if name not in LARGE}


def open_stack(directory: Path) -> zarr.Group:
    """The arrays of one stack to read from, once their metadata has been checked.

    An older form of Zarr names codecs that run code, sizes can be anything, and links lead anywhere.

    Raises:
        StoreError: arrays of another kind than this program stores.
    """
    with readable(directory):
        link = next((path for path in directory.rglob("*") if not is_own(path)), None)
        if link is not None:
            raise unlike_ours(link, "a regular file", "a link, or something else that is no file")
        group = zarr.open_group(str(directory), mode="r", zarr_format=3)
        size = 0
        for name, array in group.arrays():
            codecs = _codec_names(array.metadata.to_dict()["codecs"])
            if array.dtype.kind not in "fciub" or not codecs <= CODECS:
                raise unlike_ours(
                    directory / name, f"numbers, and codecs among {sorted(CODECS)}", f"{array.dtype}, {codecs}"
                )
            pieces = [math.prod(shape) for shape in (array.chunks, array.shards or array.chunks)]
            size += 0 if name in LARGE else max(array.nbytes, pieces[1] * array.dtype.itemsize)
            if max(size, pieces[0] * array.dtype.itemsize) > LARGEST_STACK:
                raise unlike_ours(
                    directory / name, f"arrays of at most {LARGEST_STACK:,} bytes", f"shape {array.shape}"
                )
        return group


def is_own(path: Path) -> bool:
    """Whether a path is a regular file or a directory in its own place, and not a link that leads elsewhere."""
    return not path.is_symlink() and (path.is_file() or path.is_dir())


def is_own_file(path: Path) -> bool:
    """Whether a path is a regular file in its own directory and not a link that leads elsewhere."""
    return is_own(path) and path.is_file()


def _codec_names(codecs: Any) -> set[str]:
    """Names of codecs, those within a sharding codec among them."""
    names = set()
    for codec in codecs:
        names.add(str(codec["name"]))
        inner = codec.get("configuration") or {}
        for key in ("codecs", "index_codecs"):
            names |= _codec_names(inner.get(key) or ())
    return names


def unlike_ours(where: Path, expected: str, found: str) -> StoreError:
    """The error for arrays that this program cannot have written."""
    return StoreError(
        "stored arrays are not as this program writes them",
        where=str(where),
        expected=expected,
        found=found,
        remedy="do not trust this store, or restore it from a copy",
    )


@contextmanager
def readable(where: Path) -> Iterator[None]:
    """Report whatever reading damaged arrays or attributes raises as the store's own error."""
    try:
        yield
    except (HeadatlasError, FileNotFoundError):
        raise
    except Exception as error:  # what decoders raise depends on the damage
        raise StoreError(
            "stored arrays cannot be read",
            where=str(where),
            expected="arrays and attributes as this program writes them",
            found=f"{type(error).__name__}: {str(error)[:300]}",
            remedy="see what is damaged with: headatlas verify",
        ) from error


def attributes_of(directory: Path) -> dict[str, Any]:
    """Attributes of a Zarr group or array.

    Raises:
        StoreError: there are none that can be read.
    """
    with readable(directory):
        return dict(zarr.open(str(directory), mode="r", zarr_format=3).attrs)


def write_group(directory: Path, attributes: Mapping[str, Any]) -> None:
    """Make a directory a Zarr group with these attributes; groups below it stay."""
    zarr.open_group(str(directory), mode="a", zarr_format=3, attributes=dict(attributes))
