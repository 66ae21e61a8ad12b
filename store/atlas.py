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
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stats.errors import StoreError, nearest
from store import catalogue, locking
from store.formats import FORMAT, checked_version, steps_between

FORMAT_VERSION = 1
LOCK_SECONDS = 120.0
"""How long a writer waits for others, unless HEADATLAS_LOCK_SECONDS says otherwise."""

PARTS = ("arrays.zarr", "manifests", "staging", "queries", "write.lock")
"""What a store is made of before anything is published."""


LOCK_SUFFIX = ".lock"
"""Ending of the file beside a staged directory that its writer holds a lock on."""

DIRECTORY_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,199}")
"""What a group of arrays, or a unit of one, is called on disk: one name, neither hidden nor above."""

REMOTE = "remote.json"
"""File of a directory that has the catalogue of a store elsewhere: says where that is."""

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
        store = cls.open(root)
        store.check_writable()
        return store

    def _check_format(self) -> None:
        version = self.format_version()
        steps = steps_between(version, FORMAT_VERSION, str(self.root))
        if not all(step.readable for step in steps):
            raise StoreError(
                "the store has an older format, which has to be brought up to date before it is read",
                where=str(self.root),
                expected=f"format {FORMAT_VERSION}",
                found=f"format {version}",
                remedy=f"headatlas migrate --store {shlex.quote(str(self.root))} does it, with a backup",
            )

    def format_version(self) -> int:
        """Version of the store's format, never newer than ``FORMAT_VERSION``.

        Raises:
            StoreError: a newer one, or a directory that is no store.
        """
        try:
            attributes = json.loads((self.arrays_path / "zarr.json").read_text(encoding="utf-8"))["attributes"]
            return checked_version(attributes, FORMAT_VERSION, str(self.root))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                "the directory is not a store of this program",
                where=str(self.arrays_path),
                expected="headatlas_format in the root group's attributes",
                found=f"{type(error).__name__}: {error}",
            ) from error

    def check_writable(self) -> None:
        """Refuse to begin what could not be stored.

        Raises:
            StoreError: the store has an older format, or this process may not write to it.
        """
        self.check_whole()
        version = self.format_version()
        if version < FORMAT_VERSION:
            raise StoreError(
                "the store has an older format, which is only read",
                where=str(self.root),
                expected=f"format {FORMAT_VERSION}",
                found=f"format {version}",
                remedy=f"bring it up to date, with a backup: headatlas migrate --store {shlex.quote(str(self.root))}",
            )
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise StoreError(
                "the store can only be read",
                where=str(self.root),
                expected="a directory that this process may write to",
                found="a read-only file system or no permission",
                remedy="copy the store to where it can be written, or fix its permissions; nothing was changed",
            )

    def check_whole(self) -> None:
        """Refuse what needs every file of the store, or changes it, where the store is at an address.

        Raises:
            StoreError: only its catalogue and some arrays are on this machine.
        """
        if (self.root / REMOTE).is_file():
            address = json.loads((self.root / REMOTE).read_bytes())["address"]
            raise StoreError(
                "a store at an address can only be asked",
                where=address,
                expected="a store's directory",
                found="its catalogue, and the arrays that were read",
                remedy="download the store, or a pack of it for headatlas unpack, to do this",
            )

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Exclusive right to publish; waits for another writer and says so on stderr, then gives up with a message.

        Raises:
            StoreError: the store is not to be written, or another writer does not end.
        """
        self.check_writable()
        with self.exclusively():
            yield

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """The same whatever the store's format."""
        with locking.publishing(self.root / "write.lock", _lock_seconds()):
            yield

    def models(self) -> dict[str, StoredModel]:
        """Every model of the catalogue by name."""
        if not self.catalogue_path.exists():
            return {}
        with catalogue.reading(self.catalogue_path) as connection:
            rows = connection.execute(
                "SELECT model, content_hash, qk_hash, array_group, revision, lineage, step FROM models ORDER BY model"
            ).fetchall()
            operators = connection.execute("SELECT model, operator, gain_hash FROM operators").fetchall()
            derived = connection.execute(
                "SELECT model, unit, operator, kind, n_draws, seed, independent, random_starts FROM derivations"
            ).fetchall()
        for name in (*(row[3] for row in rows), *(row[1] for row in operators), *(row[1] for row in derived)):
            check_directory_name(name, str(self.catalogue_path))
        derivations: dict[str, dict[str, tuple[str, Derivation]]] = {row[0]: {} for row in rows}
        for model, unit, operator, *facts in derived:
            derivations.setdefault(model, {})[unit] = (operator, Derivation(*facts))
        hashes: dict[str, dict[str, str | None]] = {row[0]: {} for row in rows}
        for model, operator, gain_hash in operators:
            hashes.setdefault(model, {})[operator] = gain_hash
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

    def manifest_path(self, group: str, unit: str) -> Path:
        """Where the checksums of one sealed unit are kept."""
        return self.manifests_path / f"{group}.{unit}.json"

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh directory to write in, removed afterwards whatever happens."""
        self.check_writable()
        self.staging_path.mkdir(exist_ok=True)
        directory = self.staging_path / uuid.uuid4().hex
        with locking.in_use(directory.with_name(directory.name + LOCK_SUFFIX)):
            directory.mkdir()
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def withdrawn_on_failure(self, model: str, group: str, units: Iterable[str]) -> Iterator[None]:
        """Take units that were put in place out again, unless the catalogue names them by then."""
        try:
            yield
        except BaseException:
            stored = self.models().get(model)
            if stored is None or stored.array_group != group:
                self.drop_group(group)
            else:
                for unit in set(units).difference(stored.gain_hash, stored.derivations):
                    self.drop_unit(group, unit)
            raise

    def drop_unit(self, group: str, unit: str) -> None:
        """Delete one unit of a group that no catalogue row names any more."""
        self.manifest_path(group, unit).unlink(missing_ok=True)
        shutil.rmtree(self.arrays_path / group / unit, ignore_errors=True)

    def drop_group(self, group: str) -> None:
        """Delete the arrays and manifests of a group no catalogue row names any more."""
        for manifest in self.manifests_path.glob(f"{group}.*.json"):
            manifest.unlink()
        shutil.rmtree(self.arrays_path / group, ignore_errors=True)


def check_directory_name(name: Any, where: str) -> None:
    """Refuse what a catalogue gives as the name of a directory of arrays unless it stays where it belongs.

    Raises:
        StoreError: another form than this program's names have.
    """
    if not isinstance(name, str) or not DIRECTORY_NAME.fullmatch(name):
        raise StoreError(
            "the catalogue names a directory outside the store's arrays",
            where=where,
            expected="letters, digits, - and _ and dots",
            found=repr(name)[:200],
            remedy="do not trust this store; make its catalogue again from the arrays: headatlas rebuild",
        )


def _lock_seconds() -> float:
    given = os.environ.get("HEADATLAS_LOCK_SECONDS", "")
    try:
        return float(given) if given else LOCK_SECONDS
    except ValueError as error:
        raise StoreError(
            "HEADATLAS_LOCK_SECONDS is no number", where="environment", expected="seconds", found=given
        ) from error


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
        write_group(partial, {FORMAT: FORMAT_VERSION})
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
