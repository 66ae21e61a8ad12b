"""Seals, and what can be checked or made again from them.

A manifest lists every file of one sealed unit, and of the model's own attributes, with size and
SHA-256. A unit is an operator, or something derived from one: a directory below the model's group. One
without a manifest was never published.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import polars as pl

from stats.errors import HeadatlasError, StoreError
from store import catalogue
from store.arrays import LARGE, attributes_of, is_own_file, open_stack, read_stack, readable, unlike_ours
from store.atlas import FORMAT_VERSION, USER_KIND, AtlasStore, unknown_model
from store.catalogue_file import damaged_parts, models_without_a_row, other_tables
from store.derivation_rows import user_columns
from store.formats import FORMAT, NEEDS
from store.leftovers import Leftover, leftovers
from store.rows import catalogue_rows
from store.tables import TABLES, Column, Table
from store.whole_files import sync, written_whole

SEQUENCE = re.compile(rb'\s*\{\s*"sequence": (\d+),')
"""How a manifest begins."""

ROOT_GROUP = {"zarr_format": 3, "node_type": "group"}

CLOSURE_TOLERANCE = 1e-10
"""Largest difference between stored closure and closure from the stored core."""


Kind = Literal["arrays", "catalogue", "leftover", "unfinished", "running", "repaired"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check of a store found.

    ``kind`` says what is concerned: sealed ``arrays`` or their manifests, the ``catalogue``, a ``leftover`` of a
    command that ended early, an ``unfinished`` ingest that can go on, or a ``running`` command, which is no fault.
    ``repaired`` is what a repair has done.
    """

    model: str
    where: str
    problem: str
    kind: Kind = "arrays"


def _checksum(path: Path) -> dict[str, Any]:
    if not is_own_file(path):
        raise unlike_ours(path, "a regular file", "a link, or something else that is no file")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _files(group: Path, unit: str) -> Iterator[Path]:
    """The model's own attributes and every file of one unit, in a fixed order."""
    yield group / "zarr.json"
    for root, folders, names in os.walk(group / unit):
        folders.sort()
        yield from (Path(root) / name for name in sorted(names))


def seal(store: AtlasStore, group: str, unit: str) -> None:
    """Write the manifest of a unit whose arrays are in place, once all of it is on the disk.

    Manifests of a store are numbered as they are written: that is how the later of two is known, whatever
    the clock said.
    """
    directory = store.arrays_path / group
    paths = list(_files(directory, unit))
    _settle(paths, directory / unit)
    files = {path.relative_to(directory).as_posix(): _checksum(path) for path in paths}
    sequence = 1 + max(_sequences(store).values(), default=0)
    write_manifest(store, {"sequence": sequence, "group": group, "unit": unit, "files": files})


def write_manifest(store: AtlasStore, content: Mapping[str, Any]) -> None:
    """Write a manifest with its own checksum, durably."""
    target = store.manifest_path(content["group"], content["unit"])
    with written_whole(target, durable=True) as partial, partial.open("w", encoding="utf-8") as stream:
        json.dump({**content, "seal": seal_of(content)}, stream, indent=1)


def _settle(paths: Sequence[Path], unit: Path) -> None:
    """Have files, and the directories that name them, written to the disk."""
    folders = [Path(root) for root, _, _ in os.walk(unit)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [*paths, *folders, unit.parent, unit.parent.parent]))


def seal_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's other parts."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sequences(store: AtlasStore) -> dict[tuple[str, str], int]:
    """Number of every manifest by group and unit; 0 for those of a version that did not number them."""
    found = {}
    for path in store.manifests_path.glob("*.json"):
        with path.open("rb") as stream:
            number = SEQUENCE.match(stream.read(64))
        group, unit = path.name.removesuffix(".json").rsplit(".", 1)
        found[group, unit] = int(number[1]) if number else 0
    return found


def sealed_units(store: AtlasStore) -> dict[str, list[str]]:
    """Sealed units by array group, from the manifests."""
    found: dict[str, list[str]] = {}
    for path in sorted(store.manifests_path.glob("*.json")):
        group, unit = path.name.removesuffix(".json").rsplit(".", 1)
        found.setdefault(group, []).append(unit)
    return found


def operators_of(units: list[str]) -> list[str]:
    """The operators among sealed units; what is derived has a dash in its name."""
    return [unit for unit in units if "-" not in unit]


def latest_derivations(store: AtlasStore, group: str, units: list[str]) -> list[str]:
    """Of the sealed units derived from operators that are there, the latest of each kind and operator."""
    latest: dict[tuple[str, str], tuple[int, str, str]] = {}
    operators, sequences = operators_of(units), _sequences(store)
    for unit in units:
        if unit not in operators:
            attributes = attributes_of(store.arrays_path / group / unit)
            key = (attributes["kind"], attributes["operator"])
            made = (sequences.get((group, unit), 0), attributes["created_at"], unit)
            if attributes["operator"] in operators and made > latest.get(key, (-1, "", "")):
                latest[key] = made
    return sorted(unit for *_, unit in latest.values())


def publish_rows(store: AtlasStore, model: str, group: str) -> None:
    """Make the catalogue's rows of one model from its sealed arrays. The caller holds the lock."""
    units = sealed_units(store)[group]
    derived = latest_derivations(store, group, units)
    rows = catalogue_rows(store.arrays_path / group, operators_of(units), derived)
    columns = user_columns(store.arrays_path / group, derived)

    def apply(connection: duckdb.DuckDBPyConnection) -> None:
        catalogue.delete(connection, model)
        catalogue.add_user_columns(connection, columns.values())
        catalogue.insert(connection, rows)
        catalogue.drop_unused_columns(connection, USER_KIND)

    catalogue.change(store.catalogue_path, apply)


def rebuild(store: AtlasStore, tell: Callable[[Finding], None] | None = None) -> int:
    """Make the whole catalogue again from the sealed arrays; returns the number of models.

    Where a crash left two sealed groups of one model, the one that was sealed last counts. A model whose
    arrays are damaged is left out, and its arrays are left alone.

    Args:
        store: the store.
        tell: given what is wrong with the arrays of models that are left out.

    Raises:
        StoreError: the catalogue cannot be written.
    """
    with store.writing("rebuild again"), store.write_lock():
        return rebuild_from(store, sealed_units(store), tell or (lambda _: None))


def rebuild_from(store: AtlasStore, sealed: Mapping[str, list[str]], tell: Callable[[Finding], None]) -> int:
    """The same from given units by group. The caller holds the write lock."""
    newest: dict[str, tuple[Any, dict[str, pl.DataFrame]]] = {}
    columns: dict[str, Column] = {}
    sequences = _sequences(store)
    for group, units in sealed.items():
        directory = store.arrays_path / group
        if not operators_of(units) or not directory.is_dir():
            continue
        damage = [finding for unit in units for finding in _verify_files(store, "", directory, unit, LARGE)]
        for finding in damage:
            tell(finding)
        if damage:
            continue
        try:
            with readable(directory):
                derived = latest_derivations(store, group, units)
                rows = catalogue_rows(directory, operators_of(units), derived)
                columns |= user_columns(directory, derived)
        except (HeadatlasError, OSError) as error:
            tell(Finding("", str(directory), f"unreadable: {error}"))
            continue
        model, created_at = rows["models"].select("model", "created_at").row(0)
        made = (max(sequences.get((group, unit), 0) for unit in units), created_at)
        if model not in newest or made > newest[model][0]:
            newest[model] = (made, rows)

    def apply(connection: duckdb.DuckDBPyConnection) -> None:
        catalogue.add_user_columns(connection, columns.values())
        for _, rows in newest.values():
            catalogue.insert(connection, rows)
        catalogue.drop_unused_columns(connection, USER_KIND)

    fresh = store.root / f".rebuild.{os.getpid()}.duckdb"
    try:
        catalogue.change(fresh, apply)
        fresh.replace(store.catalogue_path)
        sync(store.root)
    finally:
        fresh.unlink(missing_ok=True)
    return len(newest)


def remove(store: AtlasStore, model: str) -> None:
    """Remove a model: its rows first, so that no reader sees half of it, then its arrays.

    Raises:
        StoreError: no such model.
    """
    with store.writing("remove it again"), store.write_lock():
        stored = store.model(model)

        def apply(connection: duckdb.DuckDBPyConnection) -> None:
            catalogue.delete(connection, model)
            catalogue.drop_unused_columns(connection, USER_KIND)

        catalogue.change(store.catalogue_path, apply)
        store.drop_group(stored.array_group)


def verify(store: AtlasStore, model: str | None = None) -> Iterator[Finding]:
    """Everything wrong with a store, or with one model of it.

    Checks every checksum, that the catalogue's file is whole and its tables, comments and rows equal those made
    from the arrays, that closure follows from the stored core and cosines, and that nothing lies about
    unpublished. What is found without a lock is looked at again under the write lock, so that what other
    commands publish meanwhile is no finding.

    Raises:
        StoreError: no such model, or a store that is not on this machine.
    """
    store.check_whole()
    models = _models_if_readable(store)
    if model is not None:
        if model not in store.models():
            raise unknown_model(store, model)
        models = [model]
    for name in models:
        if any(_verify_one(store, name)):
            with _standing_still(store):
                yield from _verify_one(store, name)
    if model is None:
        with _standing_still(store):
            yield from _verify_whole(store)
            yield from _verify_leftovers(store)


def verify_standing(store: AtlasStore) -> Iterator[Finding]:
    """The same but for what is unpublished. The caller holds the write lock."""
    for name in _models_if_readable(store):
        yield from _verify_one(store, name)
    yield from _verify_whole(store)


def _models_if_readable(store: AtlasStore) -> list[str]:
    try:
        return list(store.models())
    except (StoreError, duckdb.Error):
        return []


def _verify_leftovers(store: AtlasStore) -> Iterator[Finding]:
    """What is unpublished, as far as the catalogue tells."""
    try:
        models = store.models()
    except (StoreError, duckdb.Error):
        return
    if (
        models
        or not any(operators_of(units) for units in sealed_units(store).values())
        or store.catalogue_path.exists()
    ):
        for left in leftovers(store, models, sealed_units(store)):
            yield finding_of(left)


def finding_of(left: Leftover) -> Finding:
    """What a check says of something unpublished."""
    kind: Kind = "running" if left.running else "unfinished" if left.unfinished else "leftover"
    return Finding(left.model, left.where, left.problem, kind)


@contextmanager
def _standing_still(store: AtlasStore) -> Iterator[None]:
    """Keep writers out where this process may; a store that cannot be written stands still anyway."""
    if not os.access(store.root, os.W_OK) or not os.access(store.manifests_path, os.W_OK):
        yield
        return
    with store.exclusively():
        yield


def _verify_sealed(store: AtlasStore) -> Iterator[Finding]:
    """Files of every sealed unit, where there is no catalogue that names them."""
    for group, units in sealed_units(store).items():
        for unit in units:
            yield from _verify_files(store, "", store.arrays_path / group, unit)


def _verify_whole(store: AtlasStore) -> Iterator[Finding]:
    """What concerns no single model: the root group, the catalogue's file and tables."""
    root = store.arrays_path / "zarr.json"
    content = json.loads(root.read_bytes())
    attributes = content.pop("attributes")
    if content != ROOT_GROUP or not attributes.keys() <= {FORMAT, NEEDS}:
        yield Finding("", str(root), "the root group is not as this program writes it")
    path = store.catalogue_path
    if not path.exists():
        if any(operators_of(units) for units in sealed_units(store).values()):
            yield Finding("", str(path), "the catalogue is missing", "catalogue")
            yield from _verify_sealed(store)
        return
    for problem in damaged_parts(path):
        yield Finding("", str(path), problem, "catalogue")
    try:
        store.models()
    except (StoreError, duckdb.Error) as error:
        yield Finding("", str(path), str(error).splitlines()[0], "catalogue")
        yield from _verify_sealed(store)
        return
    if store.format_version() < FORMAT_VERSION:
        return
    try:
        columns: list[Column] = []
        for stored in store.models().values():
            for unit in stored.derivations:
                columns += user_columns(store.arrays_path / stored.array_group, [unit]).values()
        for table in other_tables(path, columns):
            yield Finding("", f"table {table}", "columns, types, keys or comments are not this version's", "catalogue")
        for name in models_without_a_row(path):
            yield Finding(name, str(path), "rows of a model that is not stored", "catalogue")
    except (duckdb.Error, HeadatlasError, OSError, ValueError, KeyError, StopIteration) as error:
        yield Finding("", str(path), f"unreadable: {str(error).splitlines()[0]}", "catalogue")


def _verify_one(store: AtlasStore, model: str) -> Iterator[Finding]:
    """One model as the catalogue has it now; nothing where it has been removed meanwhile."""
    stored = store.models().get(model)
    if stored is None:
        return
    units = sealed_units(store).get(stored.array_group, [])
    named = {*stored.gain_hash, *stored.derivations}
    unsealed = sorted(named.difference(units))
    if unsealed:
        problem = f"sealed units {units} lack {', '.join(unsealed)}, which the catalogue names"
        yield Finding(model, str(store.manifests_path), problem)
    yield from _verify_model(store, model, store.arrays_path / stored.array_group, [u for u in units if u in named])


def _verify_model(store: AtlasStore, model: str, group: Path, units: list[str]) -> Iterator[Finding]:
    damaged = False
    operators = operators_of(units)
    for unit in units:
        for finding in _verify_files(store, model, group, unit):
            damaged = True
            yield finding
    if damaged or not operators or store.format_version() < FORMAT_VERSION:
        return
    try:
        with readable(group):
            made = catalogue_rows(group, operators, [unit for unit in units if unit not in operators])
            yield from _verify_rows(store, model, made)
            for operator in operators:
                for stack in sorted(path for path in (group / operator).iterdir() if path.is_dir()):
                    yield from _verify_closure(model, stack)
    except (OSError, ValueError, KeyError, HeadatlasError) as error:
        yield Finding(model, str(group), f"unreadable: {error}")


def _verify_rows(store: AtlasStore, model: str, made: Mapping[str, pl.DataFrame]) -> Iterator[Finding]:
    """Rows of every table against those made from the arrays."""
    try:
        with catalogue.reading(store.catalogue_path) as connection:
            for table in TABLES:
                order = ", ".join(f'"{name}"' for name in table.key)
                kept = connection.sql(
                    f'SELECT * FROM "{table.name}" WHERE model = ? ORDER BY {order}', params=[model]
                ).pl()
                if not kept.equals(_expected(made.get(table.name), kept, table)):
                    problem = "rows differ from those made from the arrays"
                    yield Finding(model, f"table {table.name}", problem, "catalogue")
    except (duckdb.Error, StoreError) as error:
        yield Finding(model, str(store.catalogue_path), f"unreadable: {str(error).splitlines()[0]}", "catalogue")


def _expected(made: pl.DataFrame | None, kept: pl.DataFrame, table: Table) -> pl.DataFrame:
    """Rows made from the arrays in the order and columns of the catalogue's."""
    if made is None:
        return kept.clear()
    of_others = [name for name in kept.columns if name not in made.columns]
    filled = made.with_columns(pl.lit(None, kept.schema[name]).alias(name) for name in of_others)
    return filled.sort(table.key).select(kept.columns)


def _verify_files(
    store: AtlasStore, model: str, group: Path, unit: str, without: Sequence[str] = ()
) -> Iterator[Finding]:
    """Files of a unit against its manifest; of the arrays in ``without`` only that they are there."""
    manifest = store.manifest_path(group.name, unit)
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        listed, seal_there = content["files"], content.pop("seal", None)
        parts = {"group", "unit", "files"} if seal_there is None else {"sequence", "group", "unit", "files"}
        if set(content) != parts or (content["group"], content["unit"]) != (group.name, unit):
            yield Finding(model, str(manifest), "the manifest is of something else")
            return
        if seal_there is not None and seal_there != seal_of(content):
            yield Finding(model, str(manifest), "the manifest does not have its own checksum")
            return
        present = {path.relative_to(group).as_posix() for path in _files(group, unit) if path.exists()}
        for name in sorted(present | set(listed)):
            if name not in listed:
                yield Finding(model, str(group / name), "file is not in the manifest")
            elif name not in present:
                yield Finding(model, str(group / name), "file is missing")
            elif set(without).isdisjoint(name.split("/")) and _checksum(group / name) != listed[name]:
                yield Finding(model, str(group / name), "checksum differs from the manifest")
    except FileNotFoundError as error:
        yield Finding(model, str(error.filename or manifest), "file is missing")
    except StoreError as error:
        yield Finding(model, str(error.where), f"{error.what}: {error.found}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield Finding(model, str(manifest), f"unreadable manifest: {error}")


def _verify_closure(model: str, stack: Path) -> Iterator[Finding]:
    """Closure from the stored core and cosines, one layer at a time."""
    arrays = read_stack(stack)
    core: Any = open_stack(stack)["core"]
    for row, layer in enumerate(arrays["layer"]):
        n_heads, d_head = int(arrays["n_heads"][row]), int(arrays["d_head"][row])
        kept = np.asarray(core[row])[:n_heads, :d_head, :d_head]
        stored = arrays["closure"][row, :n_heads]
        square = (kept * arrays["cosine"][row, :n_heads, None, :d_head]) @ kept
        inner = (square * kept).sum((1, 2))
        with np.errstate(invalid="ignore", divide="ignore"):
            again = inner**2 / ((square**2).sum((1, 2)) * (kept**2).sum((1, 2)))
        wrong = np.flatnonzero(~np.isnan(stored) & ~(np.abs(again - stored) < CLOSURE_TOLERANCE))
        for head in wrong:
            yield Finding(
                model, f"{stack} L{layer}H{head}", f"closure {stored[head]:.12g} but {again[head]:.12g} from the core"
            )
