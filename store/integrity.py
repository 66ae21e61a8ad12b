"""Seals, and what can be checked or made again from them.

A manifest lists every file of one sealed unit, and of the model's own attributes, with size and
SHA-256. A unit is an operator, or something derived from one: a directory below the model's group. One
without a manifest was never published.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import zarr

from stats.errors import HeadatlasError
from store import catalogue
from store.arrays import attributes_of, read_stack
from store.atlas import USER_KIND, AtlasStore, unknown_model
from store.derivation_rows import user_columns
from store.rows import catalogue_rows
from store.tables import TABLES, Column, Table
from store.unfinished import UnfinishedIngest

CLOSURE_TOLERANCE = 1e-10
"""Largest difference between stored closure and closure from the stored core."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a store."""

    model: str
    where: str
    problem: str


def _checksum(path: Path) -> dict[str, Any]:
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
    """Write the manifest of a unit whose arrays are in place, durably."""
    directory = store.arrays_path / group
    files = {path.relative_to(directory).as_posix(): _checksum(path) for path in _files(directory, unit)}
    target = store.manifest_path(group, unit)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            json.dump({"group": group, "unit": unit, "files": files}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


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
    latest: dict[tuple[str, str], tuple[str, str]] = {}
    operators = operators_of(units)
    for unit in units:
        if unit not in operators:
            attributes = attributes_of(store.arrays_path / group / unit)
            key, made = (attributes["kind"], attributes["operator"]), (attributes["created_at"], unit)
            if attributes["operator"] in operators and made > latest.get(key, ("", "")):
                latest[key] = made
    return sorted(unit for _, unit in latest.values())


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


def rebuild(store: AtlasStore) -> int:
    """Make the whole catalogue again from the sealed arrays; returns the number of models.

    Where a crash left two sealed groups of one model, the later one counts.
    """
    with store.write_lock():
        newest: dict[str, tuple[Any, dict[str, pl.DataFrame]]] = {}
        columns: dict[str, Column] = {}
        for group, units in sealed_units(store).items():
            if not operators_of(units):
                continue
            derived = latest_derivations(store, group, units)
            rows = catalogue_rows(store.arrays_path / group, operators_of(units), derived)
            columns |= user_columns(store.arrays_path / group, derived)
            model, created_at = rows["models"].select("model", "created_at").row(0)
            if model not in newest or created_at > newest[model][0]:
                newest[model] = (created_at, rows)

        def apply(connection: duckdb.DuckDBPyConnection) -> None:
            catalogue.add_user_columns(connection, columns.values())
            for _, rows in newest.values():
                catalogue.insert(connection, rows)

        fresh = store.root / f".rebuild.{os.getpid()}.duckdb"
        catalogue.change(fresh, apply)
        fresh.replace(store.catalogue_path)
    return len(newest)


def remove(store: AtlasStore, model: str) -> None:
    """Remove a model: its rows first, so that no reader sees half of it, then its arrays.

    Raises:
        StoreError: no such model.
    """
    with store.write_lock():
        stored = store.model(model)

        def apply(connection: duckdb.DuckDBPyConnection) -> None:
            catalogue.delete(connection, model)
            catalogue.drop_unused_columns(connection, USER_KIND)

        catalogue.change(store.catalogue_path, apply)
        store.drop_group(stored.array_group)


def verify(store: AtlasStore, model: str | None = None) -> Iterator[Finding]:
    """Everything wrong with a store, or with one model of it.

    Checks every checksum, that the catalogue's rows equal those made from the arrays, that closure
    follows from the stored core and cosines, and that nothing lies about unpublished.
    """
    models = store.models()
    if model is not None and model not in models:
        raise unknown_model(store, model)
    sealed = sealed_units(store)
    for name, stored in models.items():
        if model in (None, name):
            group = store.arrays_path / stored.array_group
            units = sealed.get(stored.array_group, [])
            named = {*stored.gain_hash, *stored.derivations}
            if set(units) != named:
                yield Finding(name, str(store.manifests_path), f"sealed units {units}, catalogue {sorted(named)}")
            yield from _verify_model(store, name, group, [item for item in units if item in named])
    if model is None:
        yield from _verify_leftovers(store, {stored.array_group for stored in models.values()})


def _verify_model(store: AtlasStore, model: str, group: Path, units: list[str]) -> Iterator[Finding]:
    damaged = False
    operators = operators_of(units)
    for unit in units:
        for finding in _verify_files(store, model, group, unit):
            damaged = True
            yield finding
    if damaged or not operators:
        return
    try:
        made = catalogue_rows(group, operators, [unit for unit in units if unit not in operators])
        with catalogue.reading(store.catalogue_path) as connection:
            for table in TABLES:
                order = ", ".join(f'"{name}"' for name in table.key)
                kept = connection.sql(
                    f'SELECT * FROM "{table.name}" WHERE model = ? ORDER BY {order}', params=[model]
                ).pl()
                expected = _expected(made.get(table.name), kept, table)
                if not kept.equals(expected):
                    yield Finding(model, f"table {table.name}", "rows differ from those made from the arrays")
        for operator in operators:
            for stack in sorted(path for path in (group / operator).iterdir() if path.is_dir()):
                yield from _verify_closure(model, stack)
    except (OSError, ValueError, KeyError, HeadatlasError) as error:
        yield Finding(model, str(group), f"unreadable: {error}")


def _expected(made: pl.DataFrame | None, kept: pl.DataFrame, table: Table) -> pl.DataFrame:
    """Rows made from the arrays in the order and columns of the catalogue's."""
    if made is None:
        return kept.clear()
    of_others = [name for name in kept.columns if name not in made.columns]
    filled = made.with_columns(pl.lit(None, kept.schema[name]).alias(name) for name in of_others)
    return filled.sort(table.key).select(kept.columns)


def _verify_files(store: AtlasStore, model: str, group: Path, unit: str) -> Iterator[Finding]:
    manifest = store.manifest_path(group.name, unit)
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(model, str(manifest), f"unreadable manifest: {error}")
        return
    present = {path.relative_to(group).as_posix() for path in _files(group, unit) if path.exists()}
    for name in sorted(present | set(listed)):
        if name not in listed:
            yield Finding(model, str(group / name), "file is not in the manifest")
        elif name not in present:
            yield Finding(model, str(group / name), "file is missing")
        elif _checksum(group / name) != listed[name]:
            yield Finding(model, str(group / name), "checksum differs from the manifest")


def _verify_closure(model: str, stack: Path) -> Iterator[Finding]:
    """Closure from the stored core and cosines, one layer at a time."""
    arrays = read_stack(stack)
    core = zarr.open_array(str(stack / "core"), mode="r")
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


def _verify_leftovers(store: AtlasStore, groups: set[str]) -> Iterator[Finding]:
    for path in sorted(store.arrays_path.iterdir()):
        if path.is_dir() and path.name not in groups:
            yield Finding("", str(path), "arrays that no catalogue row names")
    for path in sorted(store.staging_path.iterdir()):
        ingest = UnfinishedIngest.of(path)
        if ingest is None:
            yield Finding("", str(path), "left by a command that ended early, or one that is running")
        else:
            problem = f"an ingest that ended early, or is running: {ingest.measured} of {ingest.layers} layers measured"
            yield Finding(ingest.model, str(path), problem)
