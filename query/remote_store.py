"""Stores at an address, ``https://``, ``s3://`` or ``gs://``: the catalogue fetched whole, arrays when they are read.

DuckDB does not attach over a network without an extension, so the catalogue is fetched into a cache, once for
each content that the server names (its ETag). Beside it come the files of arrays that are asked for, checked
against their manifest. The copy is a store's directory with a part of its files; it is only read.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from ingest.transfers import Transfers, Transport, patiently
from stats.errors import QueryError, StoreError
from store.atlas import REMOTE, check_directory_name
from store.catalogue import FILE_NAME
from store.file_names import check_name
from store.offered import NODE, Seal
from store.whole_files import written_whole

SCHEMES = ("https", "http", "s3", "gs")
PIECE = 2**23
LARGEST_MANIFEST = 2**28


def mirrored(address: str) -> Path:
    """Directory in the cache with the catalogue of the store at an address, as the server has it now.

    Raises:
        StoreError: an address of another kind, or a cache that cannot be written.
        CheckpointError: nothing there, no permission, or no connection.
    """
    scheme = urlsplit(address).scheme.lower()
    if scheme not in SCHEMES:
        raise StoreError(
            "an address of a kind that is not read",
            where=address,
            expected=", ".join(f"{known}://" for known in SCHEMES),
            found=f"{scheme}://",
        )
    base = address.rstrip("/")
    content = _content(_transport(base, FILE_NAME))
    root = _fetched(base, f"arrays.zarr/{NODE}", LARGEST_MANIFEST)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headatlas" / "stores"
    directory = (
        home / hashlib.sha256(base.encode()).hexdigest()[:16] / hashlib.sha256(content.encode()).hexdigest()[:16]
    )
    try:
        if not (directory / FILE_NAME).is_file():
            directory.mkdir(parents=True, exist_ok=True)
            _download(base, FILE_NAME, directory / FILE_NAME)
        _write(directory / "arrays.zarr" / NODE, root)
        _write(directory / REMOTE, json.dumps({"address": base}).encode())
    except OSError as error:
        raise StoreError(
            "the cache cannot be written",
            where=str(error.filename or directory),
            found=error.strerror or str(error),
            remedy="free space, or name another directory with XDG_CACHE_HOME",
        ) from error
    return directory


def fetch_array(directory: Path, group: str, unit: str, stack: str, name: str) -> None:
    """Fetch what reading one array takes, into a directory that ``mirrored`` gave; others are left alone.

    Raises:
        QueryError: files that are not what the manifest says: the store has changed, or is damaged.
    """
    source = directory / REMOTE
    if not source.is_file():
        return
    base = json.loads(source.read_bytes())["address"]
    for part in (group, unit, stack):
        check_directory_name(part, str(directory))
    listed = f"manifests/{group}.{unit}.json"
    if not (directory / listed).is_file():
        _write(directory / listed, _fetched(base, listed, LARGEST_MANIFEST))
    try:
        files = {path: Seal.of(seal) for path, seal in json.loads((directory / listed).read_bytes())["files"].items()}
        folders = tuple(f"{unit}/{stack}/{array}/" for array in (name, "layer", "n_heads"))
        nodes = (NODE, f"{unit}/{NODE}", f"{unit}/{stack}/{NODE}")
        wanted = {path: seal for path, seal in files.items() if path in nodes or path.startswith(folders)}
        for path in wanted:
            check_name(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _changed(base, listed, str(error)) from error
    for path, seal in wanted.items():
        target = directory / "arrays.zarr" / group / path
        if not target.is_file():
            data = _fetched(base, f"arrays.zarr/{group}/{path}", seal.size)
            if Seal(len(data), hashlib.sha256(data).hexdigest()) != seal:
                raise _changed(base, path, "its checksum differs from the manifest")
            _write(target, data)


def _changed(base: str, name: str, found: str) -> QueryError:
    return QueryError(
        "the store at the address has changed or is damaged",
        where=f"{base}, {name}",
        found=found,
        remedy="open it again; if that does not help, tell whoever keeps it",
    )


def _transport(base: str, name: str) -> Transport:
    """How to ask for a file of the store."""
    parts = urlsplit(base)
    if parts.scheme.lower() in ("s3", "gs"):
        from ingest.object_store import Bucket, StoredObject

        return StoredObject(Bucket(parts.scheme.lower(), parts.netloc), f"{parts.path.strip('/')}/{name}".lstrip("/"))
    from ingest.http_files import HttpFile
    from ingest.hub import request_headers

    url = urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/{quote(name)}", parts.query, ""))
    return HttpFile(url, headers=request_headers(url))


def _content(transport: Transport) -> str:
    """What the server says that changes with the file; its size where it says nothing else."""

    def ask() -> str:
        with transport.request(0, 1) as part:
            return f"{part.content} {part.size}"

    return patiently(ask, threading.Event())


def _download(base: str, name: str, target: Path) -> None:
    """Fetch a file of any size; it is whole or not there."""
    file = _opened(base, name)
    with written_whole(target) as partial, partial.open("wb") as stream:
        for first in range(0, file.size, PIECE):
            buffer = bytearray(min(PIECE, file.size - first))
            file.read_into(first, memoryview(buffer))
            stream.write(buffer)


def _fetched(base: str, name: str, most: int) -> bytes:
    """A file that fits into memory."""
    file = _opened(base, name)
    if file.size > most:
        raise _changed(base, name, f"{file.size:,} bytes, at most {most:,} expected")
    buffer = bytearray(file.size)
    if buffer:
        file.read_into(0, memoryview(buffer))
    return bytes(buffer)


def _opened(base: str, name: str) -> Any:
    from ingest.ranged_file import RangedFile

    return RangedFile(_transport(base, name), Transfers())


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as partial:
        partial.write_bytes(data)
