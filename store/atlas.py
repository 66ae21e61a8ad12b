"""A store on disk: where things are, what it holds, and how a model enters or leaves it.

    catalog.duckdb            the catalogue, made from the arrays
    arrays.zarr/<group>/      one group per model: <operator>/<stack>/<array>, and what is derived from
                              an operator beside it: <kind>-<operator>-<unique>/<stack>/<array>
    manifests/                checksums of every sealed unit: an operator, or a derivation of one
    staging/                  what is being written; never read
    write.lock                held while something is published

A model is published in this order: its arrays by one rename, its manifest, its catalogue rows.
Readers go by the catalogue, so they see all of a model or none of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import duckdb
from filelock import FileLock, Timeout

from stats.errors import StoreError, nearest
from store import catalogue

FORMAT_VERSION = 1
LOCK_SECONDS = 120.0

PARTS = ("arrays.zarr", "manifests", "staging", "queries", "write.lock")
"""What a store is made of before anything is published."""


USER_KIND = "user_"
"""What the kind of a user's own statistic begins with; the rest is its name."""


@dataclass(frozen=True, slots=True)
class Derivation:
    """Something derived from the stored arrays of an operator, and what decides its numbers.

    ``kind`` is ``scramble``, ``assignment``, ``riemannian``, or ``USER_KIND`` and the name of a user's
    statistic. ``n_draws``, ``seed`` and ``independent`` belong to the scramble null, ``seed`` and
    ``random_starts`` to capacities by ascent; the others need nothing.
    """

    kind: str
    n_draws: int | None = None
    seed: int | None = None
    independent: bool | None = None
    random_starts: int | None = None

    def answers(self, wanted: Derivation) -> bool:
        """Whether this holds all of what is wanted: the same numbers, and at least as many."""
        same = (self.kind, self.seed, self.independent) == (wanted.kind, wanted.seed, wanted.independent)
        amounts = ((self.n_draws, wanted.n_draws), (self.random_starts, wanted.random_starts))
        return same and all((have or 0) >= (need or 0) for have, need in amounts)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What the catalogue says about one model."""

    model: str
    content_hash: str
    qk_hash: str
    array_group: str
    revision: str | None
    lineage: str | None
    step: int | None
    gain_hash: dict[str, str | None]
    """Hash of the folded gains by stored operator."""
    derivations: dict[str, tuple[str, Derivation]]
    """Operator and content of everything derived from the stored arrays, by unit."""

    def has(self, operator: str, wanted: Derivation) -> bool:
        """Whether a derivation is stored already."""
        return any(name == operator and made.answers(wanted) for name, made in self.derivations.values())


class AtlasStore:
    """One store. Opening checks its format; creating makes an empty one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalogue_path = root / catalogue.FILE_NAME
        self.arrays_path = root / "arrays.zarr"
        self.manifests_path = root / "manifests"
        self.staging_path = root / "staging"

    @classmethod
    def open(cls, root: Path) -> AtlasStore:
        """Open an existing store.

        Raises:
            StoreError: nothing there, not a store, or a format this version does not read.
        """
        store = cls(root)
        if not (store.arrays_path / "zarr.json").is_file():
            raise StoreError(
                "no store here",
                where=str(root),
                expected="a directory with arrays.zarr",
                found="nothing" if not root.exists() else "something else",
                remedy="ingest a model first, or name the store with --store DIR or HEADATLAS_STORE",
            )
        store._check_format()
        return store

    @classmethod
    def open_or_create(cls, root: Path) -> AtlasStore:
        """Open a store, making an empty one where there is none."""
        if not (root / "arrays.zarr" / "zarr.json").is_file():
            _create(root)
        return cls.open(root)

    def _check_format(self) -> None:
        try:
            attributes = json.loads((self.arrays_path / "zarr.json").read_text(encoding="utf-8"))["attributes"]
            version = attributes["headatlas_format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                "the directory is not a store of this program",
                where=str(self.arrays_path),
                expected="headatlas_format in the root group's attributes",
                found=f"{type(error).__name__}: {error}",
            ) from error
        if version != FORMAT_VERSION:
            raise StoreError(
                "the store has another format",
                where=str(self.root),
                expected=f"format {FORMAT_VERSION}",
                found=f"format {version}",
                remedy="use the version of headatlas that wrote it"
                if version < FORMAT_VERSION
                else "upgrade headatlas",
            )

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Exclusive right to publish; waits for another writer, then gives up with a message."""
        lock = FileLock(str(self.root / "write.lock"), timeout=LOCK_SECONDS)
        try:
            with lock:
                yield
        except Timeout as error:
            raise StoreError(
                "another process is publishing to the store",
                where=str(self.root),
                expected=f"the write lock within {LOCK_SECONDS:g} seconds",
                found="a lock that is still held",
                remedy="wait for the other ingest to end, then try again",
            ) from error

    def models(self) -> dict[str, StoredModel]:
        """Every model of the catalogue by name."""
        if not self.catalogue_path.exists():
            return {}
        with catalogue.reading(self.catalogue_path) as connection, self._of_this_version():
            rows = connection.execute(
                "SELECT model, content_hash, qk_hash, array_group, revision, lineage, step FROM models ORDER BY model"
            ).fetchall()
            operators = connection.execute("SELECT model, operator, gain_hash FROM operators").fetchall()
            derived = connection.execute(
                "SELECT model, unit, operator, kind, n_draws, seed, independent, random_starts FROM derivations"
            ).fetchall()
        derivations: dict[str, dict[str, tuple[str, Derivation]]] = {row[0]: {} for row in rows}
        for model, unit, operator, *facts in derived:
            derivations[model][unit] = (operator, Derivation(*facts))
        hashes: dict[str, dict[str, str | None]] = {row[0]: {} for row in rows}
        for model, operator, gain_hash in operators:
            hashes[model][operator] = gain_hash
        return {
            name: StoredModel(name, content, qk, group, revision, lineage, step, hashes[name], derivations[name])
            for name, content, qk, group, revision, lineage, step in rows
        }

    def model(self, name: str) -> StoredModel:
        """One model of the catalogue.

        Raises:
            StoreError: the store does not hold it.
        """
        models = self.models()
        if name not in models:
            raise unknown_model(self, name)
        return models[name]

    @contextmanager
    def writing(self, again: str) -> Iterator[None]:
        """Report a failure of the file system as the store's own error; ``again`` says what to repeat."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                "the store cannot be written",
                where=str(error.filename or self.root),
                found=error.strerror or str(error),
                remedy=f"free space or fix permissions, then {again}; nothing was changed",
            ) from error

    def models_with_layers(self, content_hashes: list[str]) -> dict[str, int]:
        """How many layers of each model have one of these content hashes."""
        with catalogue.reading(self.catalogue_path) as connection:
            rows = connection.execute(
                "SELECT model, count(*) FROM layers WHERE list_contains($hashes, content_hash) "
                "GROUP BY model ORDER BY model",
                {"hashes": content_hashes},
            ).fetchall()
        return dict(rows)

    @contextmanager
    def _of_this_version(self) -> Iterator[None]:
        """Say what to do about a catalogue whose tables are not this version's."""
        try:
            yield
        except (duckdb.CatalogException, duckdb.BinderException) as error:
            raise StoreError(
                "the catalogue was made by another version of this program",
                where=str(self.catalogue_path),
                found=str(error).splitlines()[0],
                remedy="make it again from the arrays: headatlas rebuild",
            ) from error

    def manifest_path(self, group: str, unit: str) -> Path:
        """Where the checksums of one sealed unit are kept."""
        return self.manifests_path / f"{group}.{unit}.json"

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh directory to write in, removed afterwards whatever happens."""
        directory = self.staging_path / uuid.uuid4().hex
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def drop_unit(self, group: str, unit: str) -> None:
        """Delete one unit of a group that no catalogue row names any more."""
        self.manifest_path(group, unit).unlink(missing_ok=True)
        shutil.rmtree(self.arrays_path / group / unit, ignore_errors=True)

    def drop_group(self, group: str) -> None:
        """Delete the arrays and manifests of a group no catalogue row names any more."""
        for manifest in self.manifests_path.glob(f"{group}.*.json"):
            manifest.unlink()
        shutil.rmtree(self.arrays_path / group, ignore_errors=True)


def _create(root: Path) -> None:
    """Make an empty store; another process may be doing the same."""
    if root.exists() and any(entry.name not in PARTS for entry in root.iterdir()):
        raise StoreError(
            "the directory is in use for something else",
            where=str(root),
            expected="a store, an empty directory, or no directory",
            found=", ".join(sorted(entry.name for entry in root.iterdir())[:5]),
            remedy="name another with --store DIR",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name in ("manifests", "staging"):
            (root / name).mkdir(exist_ok=True)
        from store.arrays import write_group

        partial = root / "staging" / uuid.uuid4().hex
        write_group(partial, {"headatlas_format": FORMAT_VERSION})
        try:
            partial.replace(root / "arrays.zarr")
        except OSError:
            if not (root / "arrays.zarr" / "zarr.json").is_file():
                raise
            shutil.rmtree(partial)
    except OSError as error:
        raise StoreError(
            "the store cannot be created",
            where=str(root),
            found=error.strerror or str(error),
            remedy="check the path and its permissions, or name another with --store DIR",
        ) from error


def array_group_name(model: str, created_at: datetime, content_hash: str) -> str:
    """A directory name for a model's arrays: safe on any file system, unique per measurement."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[:60]
    unique = hashlib.sha256(f"{model}\0{created_at.isoformat()}\0{content_hash}".encode()).hexdigest()[:8]
    return f"{readable}-{unique}" if readable else unique


def unknown_model(store: AtlasStore, model: str) -> StoreError:
    """The error for a name the store does not hold."""
    stored = store.models()
    return StoreError(
        f"no model named {model!r}",
        where=str(store.root),
        expected="one of " + (", ".join(stored) or "none: the store is empty"),
        found=model,
        remedy=nearest(model, stored) or "list the models with: headatlas models",
    )
