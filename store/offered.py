"""What another place offers to a store: sealed models whose files are checked as they are read.

A place is a store's directory or a pack file. Nothing in it is trusted: names have to be those that a store
gives, and bytes those that the manifests say.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from stats.errors import StoreError
from store.atlas import FORMAT_VERSION, AtlasStore, Derivation
from store.file_names import ODD, check_name
from store.integrity import seal_of

GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
UNIT = re.compile(r"\w[\w-]{0,150}")
QUESTION = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\.sql")
NODE = "zarr.json"
LARGEST_JSON = 2**28
LARGEST_QUESTION = 2**20
PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Seal:
    """Size in bytes and SHA-256, in hexadecimal, of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, listed: Any) -> Seal:
        """From a manifest.

        Raises:
            ValueError: something else.
        """
        match listed:
            case {"bytes": int(size), "sha256": str(digest)} if size >= 0 and re.fullmatch(r"[0-9a-f]{64}", digest):
                return cls(size, digest)
        raise ValueError(f"no size and checksum: {str(listed)[:80]}")

    def as_json(self) -> dict[str, Any]:
        """As manifests have it."""
        return {"bytes": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class OfferedUnit:
    """An operator, or something derived from one: its attributes, and its files by path below the group."""

    attributes: Mapping[str, Any]
    files: Mapping[str, Seal]

    @property
    def derivation(self) -> tuple[str, Derivation] | None:
        """Operator and content of something derived; None for an operator."""
        facts = self.attributes
        if "kind" not in facts:
            return None
        amounts = (facts.get(name) for name in ("n_draws", "seed", "independent", "random_starts"))
        return facts["operator"], Derivation(facts["kind"], *amounts)


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A sealed model: the name of its group, its attributes, its units by name."""

    model: str
    group: str
    facts: Mapping[str, Any]
    units: Mapping[str, OfferedUnit]

    @property
    def operators(self) -> dict[str, OfferedUnit]:
        """Its operators by name."""
        return {name: unit for name, unit in self.units.items() if unit.derivation is None}


class Place(Protocol):
    """Where models are offered."""

    where: str

    def models(self) -> dict[str, OfferedModel]:
        """Every model by name."""

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file, by its path below the store's directory."""

    def questions(self) -> dict[str, bytes]:
        """Text of the questions of the store's own, by file name."""


def damaged(where: str, name: str, problem: str) -> StoreError:
    """The error for a file that is not what its manifest says."""
    return StoreError(
        "files are not as they were sealed",
        where=f"{where}, {name[:200]!r}" if ODD.search(name) else f"{where}, {name[:200]}".removesuffix(", "),
        found=problem,
        remedy="nothing of it was taken; get it again, or see what is damaged with headatlas verify or pack --check",
    )


def checked_pieces(stream: IO[bytes], seal: Seal, where: str, name: str) -> Iterator[bytes]:
    """The bytes of a file, never more than its seal says.

    Raises:
        StoreError: after the last piece, where size or checksum are other than sealed.
    """
    digest, size = hashlib.sha256(), 0
    while piece := stream.read(min(PIECE, seal.size - size + 1)):
        size += len(piece)
        if size > seal.size:
            raise damaged(where, name, f"more than the {seal.size:,} bytes of its manifest")
        digest.update(piece)
        yield piece
    if size < seal.size:
        raise damaged(where, name, f"{size:,} bytes, not {seal.size:,}")
    if digest.hexdigest() != seal.sha256:
        raise damaged(where, name, "checksum differs from the manifest")


def offered_model(
    where: str, model: str, group: str, units: list[str], read: Callable[[str, Seal | None], bytes]
) -> OfferedModel:
    """A model of a place, from its manifests and attributes.

    Args:
        where: the place.
        model: its name.
        group: its group.
        units: its units.
        read: bytes of a file by path below the store's directory, checked where a seal is given.

    Raises:
        StoreError: a manifest or attributes that no store has.
    """
    if not GROUP.fullmatch(group):
        raise damaged(where, "arrays.zarr", f"no name of a group: {group[:80]!r}")
    found: dict[str, OfferedUnit] = {}
    facts: dict[str, Any] = {}
    for unit in units:
        manifest = f"manifests/{group}.{unit}.json"
        try:
            if not UNIT.fullmatch(unit):
                raise ValueError(f"no name of a unit: {unit[:80]!r}")
            listed = _object(read(manifest, None))
            files = {name: Seal.of(seal) for name, seal in listed["files"].items()}
            if (listed["group"], listed["unit"]) != (group, unit):
                raise ValueError("of another unit")
            if listed.pop("seal", None) not in (None, seal_of(listed)):
                raise ValueError("the manifest does not have its own checksum")
            for name in files:
                check_below(unit, name)
            facts = _attributes(read(f"arrays.zarr/{group}/{NODE}", files[NODE]))
            attributes = _attributes(read(f"arrays.zarr/{group}/{unit}/{NODE}", files[f"{unit}/{NODE}"]))
            if facts["model"] != model:
                raise ValueError(f"of a model named {str(facts['model'])[:80]!r}, not {model[:80]!r}")
            facts["content_hash"], facts["qk_hash"], attributes["created_at"]
            found[unit] = OfferedUnit(attributes, files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise damaged(where, manifest, told or type(error).__name__) from error
    return OfferedModel(model, group, facts, found)


def check_below(unit: str, name: str) -> None:
    """Refuse a path that is not one of a unit's files.

    Raises:
        ValueError: it leads elsewhere, or is none that a store writes.
    """
    check_name(name)
    if name != NODE and not name.startswith(f"{unit}/"):
        raise ValueError(f"a path that is none of the unit's: {name[:120]!r}")


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _attributes(data: bytes) -> dict[str, Any]:
    return dict(_object(data)["attributes"])


class OtherStore:
    """A store's directory as a place; it is only read.

    Raises:
        StoreError: no store there, an older format, or a catalogue of another version.
    """

    def __init__(self, root: Path) -> None:
        self.store = AtlasStore.open(root)
        self.store.check_whole()
        self.where = str(root)
        version = self.store.format_version()
        if version < FORMAT_VERSION:
            raise StoreError(
                "the other store has an older format",
                where=self.where,
                expected=f"format {FORMAT_VERSION}",
                found=f"format {version}",
                remedy="bring it, or a copy of it, up to date first: headatlas migrate --store DIR",
            )

    def models(self) -> dict[str, OfferedModel]:
        return {
            name: offered_model(
                self.where, name, stored.array_group, [*stored.gain_hash, *stored.derivations], self._read
            )
            for name, stored in self.store.models().items()
        }

    def _read(self, name: str, seal: Seal | None) -> bytes:
        path = self.store.root / name
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError("too large to be read")
        if seal is None:
            return path.read_bytes()
        with path.open("rb") as stream:
            return b"".join(checked_pieces(stream, seal, self.where, name))

    def open(self, name: str) -> IO[bytes]:
        return (self.store.root / name).open("rb")

    def questions(self) -> dict[str, bytes]:
        found = sorted((self.store.root / "queries").glob("*.sql"))
        return {
            path.name: path.read_bytes()
            for path in found
            if QUESTION.fullmatch(path.name) and path.is_file() and path.stat().st_size <= LARGEST_QUESTION
        }
