"""A store, or models of it, as one file: a zip laid out as the store, the same bytes for the same content.

The first entry lists all others with size and SHA-256; the zip's comment is the SHA-256 of everything in
front of it. Entries are not compressed (arrays are already), so that no entry can be larger than the file.
The catalogue is there for whoever unzips the file; unpacking makes it again from the arrays.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import duckdb

from stats.errors import StoreError, nearest
from store import catalogue
from store.atlas import FORMAT_VERSION, AtlasStore
from store.catalogue import FILE_NAME
from store.derivation_rows import user_columns
from store.file_names import check_name, check_together
from store.formats import FORMAT, NEEDS
from store.integrity import latest_derivations
from store.offered import NODE, OfferedModel, OtherStore, Seal, checked_pieces
from store.pack_file import COMMENT_LENGTH, CONTENTS, MARK, PACK, PACK_VERSION, Packed, digest_of
from store.rows import catalogue_rows
from store.version import tool_version
from store.whole_files import written_whole

FIRST_DAY = (1980, 1, 1, 0, 0, 0)
REGULAR = 0o100644 << 16


def pack(root: Path, file: Path, models: Sequence[str] = ()) -> Packed:
    """Write models of a store, all where none is named, into one file, which is whole or not there.

    Raises:
        StoreError: no such model or none at all, damage in the store, or a file that cannot be written.
    """
    store = OtherStore(root)
    offered = store.models()
    for name in models:
        if name not in offered:
            raise StoreError(
                f"no model named {name!r}",
                where=str(root),
                expected="one of " + ", ".join(offered),
                found=name,
                remedy=nearest(name, offered) or "list the models with: headatlas models",
            )
    chosen = {name: model for name, model in offered.items() if not models or name in models}
    if not chosen:
        raise StoreError("there is nothing to pack", where=str(root), expected="at least one model", found="none")
    try:
        with (
            written_whole(file, durable=True) as partial,
            tempfile.TemporaryDirectory(prefix="headatlas-") as temporary,
        ):
            count = _write(store, chosen, Path(temporary), partial)
            size = partial.stat().st_size
    except OSError as error:
        raise StoreError(
            "the pack cannot be written", where=str(error.filename or file), found=error.strerror or str(error)
        ) from error
    return Packed(tuple(chosen), count, size)


def _write(store: OtherStore, chosen: Mapping[str, OfferedModel], temporary: Path, partial: Path) -> int:
    """Write everything under a partial name; returns the number of entries beside the list of contents."""
    small: dict[str, bytes] = {f"arrays.zarr/{NODE}": (store.store.arrays_path / NODE).read_bytes()}
    small |= {f"queries/{name}": text for name, text in store.questions().items()}
    seals: dict[str, Seal] = {}
    for model in chosen.values():
        for unit, offered in model.units.items():
            manifest = f"manifests/{model.group}.{unit}.json"
            small[manifest] = (store.store.root / manifest).read_bytes()
            seals |= {f"arrays.zarr/{model.group}/{name}": seal for name, seal in offered.files.items()}
    made = temporary / FILE_NAME
    _make_catalogue(store.store, chosen, made)
    seals |= {name: Seal(len(data), hashlib.sha256(data).hexdigest()) for name, data in small.items()}
    with made.open("rb") as stream:
        seals[FILE_NAME] = Seal(made.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
    contents = {
        PACK: PACK_VERSION,
        FORMAT: FORMAT_VERSION,
        NEEDS: tool_version(),
        "models": [
            {"model": name, "array_group": model.group, "units": sorted(model.units)}
            for name, model in sorted(chosen.items())
        ],
        "files": {name: seals[name].as_json() for name in sorted(seals)},
    }
    check_together(seals)
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        text = json.dumps(contents, indent=1).encode()
        _add(archive, CONTENTS, len(text), [text])
        for name in sorted(seals):
            check_name(name)
            with _opened(store, small, made, name) as source:
                _add(archive, name, seals[name].size, checked_pieces(source, seals[name], store.where, name))
        archive.comment = MARK + b"0" * 64
    with partial.open("r+b") as stream:
        end = stream.seek(0, os.SEEK_END) - COMMENT_LENGTH
        digest = digest_of(stream, end)
        stream.seek(end)
        stream.write(MARK + digest.encode())
    return len(seals)


def _opened(store: OtherStore, small: Mapping[str, bytes], made: Path, name: str) -> IO[bytes]:
    if name in small:
        return io.BytesIO(small[name])
    return made.open("rb") if name == FILE_NAME else store.open(name)


def _add(archive: zipfile.ZipFile, name: str, size: int, pieces: Any) -> None:
    entry = zipfile.ZipInfo(name, FIRST_DAY)
    entry.create_system, entry.external_attr, entry.file_size = 3, REGULAR, size
    with archive.open(entry, "w", force_zip64=size > zipfile.ZIP64_LIMIT) as target:
        for piece in pieces:
            target.write(piece)


def _make_catalogue(store: AtlasStore, chosen: Mapping[str, OfferedModel], path: Path) -> None:
    """A catalogue of some models only."""

    def fill(connection: duckdb.DuckDBPyConnection) -> None:
        for _, model in sorted(chosen.items()):
            group = store.arrays_path / model.group
            derived = latest_derivations(store, model.group, sorted(model.units))
            catalogue.add_user_columns(connection, user_columns(group, derived).values())
            catalogue.insert(connection, catalogue_rows(group, sorted(model.operators), derived))

    catalogue.change(path, fill, threads=1)
