"""Packs read: every byte checked, and nothing believed that could lead outside a store."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stats.errors import StoreError
from store.atlas import FORMAT_VERSION
from store.catalogue import FILE_NAME
from store.file_names import check_name, check_together
from store.formats import NEEDS, checked_version
from store.offered import (
    LARGEST_JSON,
    LARGEST_QUESTION,
    NODE,
    PIECE,
    QUESTION,
    OfferedModel,
    OtherStore,
    Place,
    Seal,
    checked_pieces,
    damaged,
    offered_model,
)

CONTENTS = "headatlas-pack.json"
PACK = "headatlas_pack"
PACK_VERSION = 1
MARK = b"sha256:"
COMMENT_LENGTH = len(MARK) + 64
ENCRYPTED = 0x1


@dataclass(frozen=True, slots=True)
class Packed:
    """What a pack holds: names of models, entries beside the list of contents, and its size."""

    models: tuple[str, ...]
    files: int
    size: int


def digest_of(stream: IO[bytes], length: int) -> str:
    """SHA-256 of the first bytes of a file."""
    found = hashlib.sha256()
    stream.seek(0)
    while length > 0 and (piece := stream.read(min(PIECE, length))):
        found.update(piece)
        length -= len(piece)
    return found.hexdigest()


class Pack:
    """A pack as a place that offers models; everything in it has been checked.

    Raises:
        StoreError: no pack, a damaged one, one that would lead outside a store, or a newer one.
    """

    def __init__(self, file: Path) -> None:
        self.where = str(file)
        self._file = file
        self._stream = _open(file)
        try:
            self._check_digest()
            self._archive = zipfile.ZipFile(self._stream)
            self._seals, self._listed = self._read_contents()
            self._check_entries()
            self._models = self._read_models()
            self._check_complete()
        except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, UnicodeError) as error:
            self.close()
            raise damaged(self.where, "", str(error)) from error
        except OSError as error:
            self.close()
            raise damaged(self.where, "", error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        self._stream.close()

    @property
    def packed(self) -> Packed:
        """What it holds."""
        return Packed(tuple(self._models), len(self._seals), self._file.stat().st_size)

    def models(self) -> dict[str, OfferedModel]:
        return dict(self._models)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._archive.open(name) as stream:
                yield stream
        except KeyError as error:
            raise FileNotFoundError(name) from error
        except (zipfile.BadZipFile, EOFError) as error:
            raise damaged(self.where, name, str(error)) from error

    def questions(self) -> dict[str, bytes]:
        names = [name for name in self._seals if name.startswith("queries/")]
        return {name.removeprefix("queries/"): self._read(name, self._seals[name]) for name in names}

    def _check_digest(self) -> None:
        """The checksum over the whole file, so that no byte of it is other than written."""
        size = self._stream.seek(0, os.SEEK_END)
        self._stream.seek(0)
        if self._stream.read(4) != b"PK\x03\x04":
            raise StoreError(
                "the file is no pack of this program",
                where=self.where,
                expected="a file that headatlas pack wrote",
                found="something else" if size else "an empty file",
            )
        self._stream.seek(max(0, size - COMMENT_LENGTH))
        comment = self._stream.read()
        if not re.fullmatch(MARK + rb"[0-9a-f]{64}", comment):
            raise damaged(self.where, "", "the checksum at its end is missing: cut off, or written by another program")
        if digest_of(self._stream, size - COMMENT_LENGTH).encode() != comment.removeprefix(MARK):
            raise damaged(self.where, "", "the file's checksum is not the one at its end")

    def _read_contents(self) -> tuple[dict[str, Seal], list[Any]]:
        entries = self._archive.infolist()
        if not entries or entries[0].filename != CONTENTS:
            raise damaged(self.where, "", f"its first entry is not {CONTENTS}")
        try:
            self._check_entry(entries[0])
            if entries[0].file_size > LARGEST_JSON:
                raise ValueError("too large to be read")
            contents = json.loads(self._archive.read(entries[0]))
            if not isinstance(contents[PACK], int) or contents[PACK] > PACK_VERSION:
                raise StoreError(
                    "the pack is of a newer kind than this version of headatlas knows",
                    where=self.where,
                    expected=f"{PACK} {PACK_VERSION}",
                    found=str(contents[PACK])[:40],
                    remedy=f"upgrade to headatlas {str(contents.get(NEEDS, ''))[:40]} or later",
                )
            version = checked_version(contents, FORMAT_VERSION, self.where)
            if version < FORMAT_VERSION:
                raise StoreError(
                    "the pack has an older format",
                    where=self.where,
                    expected=f"format {FORMAT_VERSION}",
                    found=f"format {version}",
                    remedy="unzip it, bring it up to date with headatlas migrate, and merge it",
                )
            seals = {name: Seal.of(listed) for name, listed in contents["files"].items()}
            for name in seals:
                check_name(name)
            check_together(seals)
            return seals, list(contents["models"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(self.where, CONTENTS, str(error)) from error

    def _check_entry(self, entry: zipfile.ZipInfo) -> None:
        """Refuse an entry that is no plain file, stored as it is.

        Raises:
            ValueError: something else.
        """
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFREG) or entry.is_dir():
            raise ValueError("not a plain file")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError("not stored as it is")
        if entry.flag_bits & ENCRYPTED:
            raise ValueError("encrypted")

    def _check_entries(self) -> None:
        """Entries against the list of contents: names, kinds, sizes, checksums; each once, none over another."""
        seen = {CONTENTS}
        end = 0
        for entry in sorted(self._archive.infolist(), key=lambda each: each.header_offset):
            name = entry.filename
            try:
                if entry.header_offset < end:
                    raise ValueError("it lies over another entry")
                end = entry.header_offset + entry.compress_size
                if name == CONTENTS and entry is self._archive.infolist()[0]:
                    continue
                if name in seen:
                    raise ValueError("it is there twice")
                seen.add(name)
                check_name(name)
                self._check_entry(entry)
                if name not in self._seals:
                    raise ValueError("it is not in the list of contents")
                if entry.file_size != self._seals[name].size:
                    raise ValueError(f"{entry.file_size:,} bytes, not {self._seals[name].size:,}")
                with self._archive.open(entry) as stream:
                    for _ in checked_pieces(stream, self._seals[name], self.where, name):
                        pass
            except (ValueError, zipfile.BadZipFile) as error:
                raise damaged(self.where, name, str(error)) from error
        missing = sorted(set(self._seals) - seen)
        if missing:
            raise damaged(self.where, missing[0], "it is in the list of contents, and not there")

    def _read(self, name: str, seal: Seal | None) -> bytes:
        found = self._seals.get(name)
        if found is None or (seal is not None and found != seal):
            raise ValueError(f"{name}: missing, or its checksum differs from the manifest")
        if found.size > LARGEST_JSON:
            raise ValueError("too large to be read")
        with self.open(name) as stream:
            return b"".join(checked_pieces(stream, found, self.where, name))

    def _read_models(self) -> dict[str, OfferedModel]:
        models: dict[str, OfferedModel] = {}
        for listed in self._listed:
            match listed:
                case {"model": str(name), "array_group": str(group), "units": [str(), *_] as units}:
                    if name in models or not all(isinstance(unit, str) for unit in units):
                        raise damaged(self.where, CONTENTS, f"a model that is listed twice or badly: {name[:80]!r}")
                    models[name] = offered_model(self.where, name, group, units, self._read)
                case _:
                    raise damaged(self.where, CONTENTS, f"no model: {str(listed)[:80]}")
        return models

    def _check_complete(self) -> None:
        """That there is nothing but what a store has, and all that the manifests list."""
        expected: dict[str, Seal | None] = {FILE_NAME: None, f"arrays.zarr/{NODE}": None}
        for model in self._models.values():
            for unit, offered in model.units.items():
                expected[f"manifests/{model.group}.{unit}.json"] = None
                expected |= {f"arrays.zarr/{model.group}/{name}": seal for name, seal in offered.files.items()}
        for name, seal in expected.items():
            if name not in self._seals or seal not in (None, self._seals[name]):
                raise damaged(self.where, name, "missing, or its checksum differs from the model's manifest")
        for name in set(self._seals) - set(expected):
            folder, _, last = name.partition("/")
            question = folder == "queries" and QUESTION.fullmatch(last)
            if not question or self._seals[name].size > LARGEST_QUESTION:
                raise damaged(self.where, name, "nothing that a pack has")


def _open(file: Path) -> IO[bytes]:
    try:
        return file.open("rb")
    except OSError as error:
        raise StoreError("the pack cannot be read", where=str(file), found=error.strerror or str(error)) from error


def check(file: Path) -> Packed:
    """What a pack holds, once every byte of it has been checked.

    Raises:
        StoreError: the first thing that is wrong with it.
    """
    with Pack(file) as opened:
        return opened.packed


def place_at(path: Path) -> AbstractContextManager[Place]:
    """The pack or the store at a path.

    Raises:
        StoreError: neither is there, or it is damaged or of another format.
    """
    return Pack(path) if path.is_file() else nullcontext(OtherStore(path))
