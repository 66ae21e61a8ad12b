"""What commands that ended early have left in a store, and what running ones are writing.

None of it is published: no row of the catalogue names it. Whether its writer lives is told by the lock
that the writer holds, never by age.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stats.errors import HeadatlasError
from store.arrays import attributes_of
from store.atlas import LOCK_SUFFIX, AtlasStore, StoredModel
from store.locking import is_held
from store.unfinished import UnfinishedIngest


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something unpublished: ``paths`` are what it consists of, in the order in which it goes."""

    model: str
    paths: tuple[Path, ...]
    problem: str
    running: bool = False
    unfinished: bool = False
    """Whether it is measured layers, which the same ingest can go on from."""
    sealed: bool = False
    """Whether it is whole, with a manifest: without a catalogue it would count as published."""

    @property
    def where(self) -> str:
        """The directory or file to look at."""
        return str(self.paths[-1])

    def drop(self) -> None:
        """Delete it. A directory is renamed first, so that nobody takes half of it for something."""
        for path in self.paths:
            if path.is_dir() and not path.is_symlink():
                doomed = path.with_name(f".{uuid.uuid4().hex}.partial")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def leftovers(
    store: AtlasStore, models: Mapping[str, StoredModel], sealed: Mapping[str, Sequence[str]]
) -> Iterator[Leftover]:
    """Everything unpublished in a store.

    Args:
        store: the store. Unless its write lock is held, what is just being published is found, too.
        models: what the catalogue names.
        sealed: sealed units by array group.
    """
    groups = {stored.array_group: stored for stored in models.values()}
    yield from _groups(store, groups, sealed)
    for group, units in sealed.items():
        if group not in groups and not (store.arrays_path / group).is_dir():
            manifests = tuple(store.manifest_path(group, unit) for unit in units)
            yield Leftover("", manifests, "manifests without arrays")
    partial = (
        *store.manifests_path.glob(".*.partial"),
        *store.arrays_path.glob(".*.partial"),
        *store.root.glob(f".{store.catalogue_path.name}.*"),
        *store.root.glob(".rebuild.*"),
        *store.root.glob("..rebuild.*"),
    )
    for path in sorted(partial):
        yield Leftover("", (path,), "half written by a command that ended early")
    yield from _staged(store)


def _groups(
    store: AtlasStore, groups: Mapping[str, StoredModel], sealed: Mapping[str, Sequence[str]]
) -> Iterator[Leftover]:
    for path in sorted(store.arrays_path.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        units = sealed.get(path.name, ())
        manifests = tuple(store.manifest_path(path.name, unit) for unit in units)
        stored = groups.get(path.name)
        if stored is not None:
            yield from _units(store, path, stored, units)
        elif units:
            model = model_of(path)
            problem = f"sealed arrays that no catalogue row names: {model or 'a model'} was removed or replaced, "
            problem += "or its ingest ended just before it was published"
            yield Leftover(model, (*manifests, path), problem, sealed=True)
        else:
            yield Leftover("", (path,), "arrays that no catalogue row names")


def _units(store: AtlasStore, group: Path, stored: StoredModel, sealed: Sequence[str]) -> Iterator[Leftover]:
    """Units of a published model that the catalogue does not name."""
    named = {*stored.gain_hash, *stored.derivations}
    present = {path.name for path in group.iterdir() if path.is_dir()}
    for unit in sorted((present | set(sealed)) - named):
        directory = (group / unit,) if unit in present else ()
        if unit in sealed:
            problem = (
                f"sealed units that the catalogue does not name: {unit}, left by a command that ended between "
                "the catalogue and the arrays"
            )
            paths = (store.manifest_path(group.name, unit), *directory)
            yield Leftover(stored.model, paths, problem, sealed=True)
        else:
            yield Leftover(
                stored.model, directory, f"arrays that are no sealed units: {unit}, of a command that ended early"
            )


def model_of(group: Path) -> str:
    """The model whose arrays a directory holds, as its attributes say; empty where they do not."""
    try:
        return str(attributes_of(group)["model"])
    except (OSError, HeadatlasError, KeyError):
        return ""


def _staged(store: AtlasStore) -> Iterator[Leftover]:
    """What lies in ``staging``: layers of ingests, and directories with a lock file beside them."""
    if not store.staging_path.is_dir():
        return
    entries = sorted(store.staging_path.iterdir())
    names = {path.name for path in entries}
    for path in entries:
        ingest = UnfinishedIngest.of(path)
        if ingest is not None:
            layers = f"{ingest.measured} of {ingest.layers} layers measured"
            if ingest.running:
                yield Leftover(ingest.model, (path,), f"an ingest that is running: {layers}", True, True)
            else:
                yield Leftover(ingest.model, (path,), f"an ingest that ended early: {layers}", False, True)
            continue
        if path.suffix == LOCK_SUFFIX:
            if path.with_suffix("").name not in names and not is_held(path):
                yield Leftover("", (path,), "left by a command that ended early")
            continue
        lock = path.with_name(path.name + LOCK_SUFFIX)
        if is_held(lock):
            yield Leftover("", (path,), "being written by a command that is running", True)
        elif lock.exists():
            yield Leftover("", (path, lock), "left by a command that ended early")
        else:
            yield Leftover("", (path,), "left by a command that ended early, or one that is running")
