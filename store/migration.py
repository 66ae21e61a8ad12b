"""Bringing a store of an older format up to date: attributes rewritten by steps, the catalogue made again.

Arrays' values are left alone, so the backup holds what changes: attributes, manifests and catalogue, laid
out as in the store, below ``backups/format-N``. New attributes are made from the backup, so that a migration
that ended early is repeated from the beginning; the root's version comes last. Until then readers have what
they had.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from store.atlas import FORMAT_VERSION, AtlasStore
from store.catalogue import FILE_NAME
from store.formats import FORMAT, NEEDS, Step, steps_between
from store.integrity import Finding, rebuild_from, seal_of, sealed_units, write_manifest
from store.offered import NODE, Seal, check_below, checked_pieces, damaged
from store.version import tool_version

UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class Migration:
    """What a migration did: from which format to which, how many models, and where the backup is."""

    found: int
    wanted: int
    models: int
    backup: Path | None
    summaries: tuple[str, ...] = ()


def migrate(root: Path) -> Migration:
    """Bring a store up to date; one that is, is left as it is.

    Raises:
        StoreError: a newer format, one that is no longer known, damaged attributes, or a store that cannot
            be written.
    """
    store = AtlasStore(root)
    if store.format_version() == FORMAT_VERSION:
        done = _finished(store)
        return Migration(FORMAT_VERSION, FORMAT_VERSION, len(store.models()), done)
    with store.writing("migrate again"), store.exclusively():
        found = store.format_version()
        steps = steps_between(found, FORMAT_VERSION, str(root))
        backup = _backed_up(store, found)
        for group, units in sealed_units(store).items():
            _bring_up(store, backup, group, units, steps)
        count = rebuild_from(store, sealed_units(store), _refuse)
        _write_root(store, backup)
        kept = _finished(store)
        return Migration(found, FORMAT_VERSION, count, kept, tuple(step.summary for step in steps))


def _refuse(finding: Finding) -> None:
    raise damaged(finding.where, "", finding.problem)


def _backed_up(store: AtlasStore, version: int) -> Path:
    """The backup of what changes; that of a migration that ended early gets what has come since."""
    backup = store.root / "backups" / f"format-{version}{UNFINISHED}"
    wanted = [Path("arrays.zarr") / NODE]
    if store.catalogue_path.exists():
        wanted.append(Path(FILE_NAME))
    for group, units in sealed_units(store).items():
        for unit in units:
            manifest = store.manifest_path(group, unit).relative_to(store.root)
            if not (backup / manifest).exists():
                nodes = _checked_nodes(store, group, unit)
                wanted += [Path("arrays.zarr") / group / name for name in nodes]
                wanted.append(manifest)
    for name in wanted:
        if not (backup / name).exists():
            (backup / name).parent.mkdir(parents=True, exist_ok=True)
            partial = (backup / name).with_name(f".{name.name}.partial")
            shutil.copyfile(store.root / name, partial)
            with partial.open("rb") as stream:
                os.fsync(stream.fileno())
            partial.replace(backup / name)
    return backup


def _checked_nodes(store: AtlasStore, group: str, unit: str) -> list[str]:
    """Paths below the group of a unit's Zarr nodes; every file of the unit is checked to be as sealed."""
    manifest = store.manifest_path(group, unit)
    try:
        files = json.loads(manifest.read_bytes())["files"]
        for name, listed in files.items():
            check_below(unit, name)
            with (store.arrays_path / group / name).open("rb") as stream:
                for _ in checked_pieces(stream, Seal.of(listed), str(store.arrays_path / group), name):
                    pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(str(store.manifests_path), manifest.name, str(error)) from error
    return [name for name in files if PurePosixPath(name).name == NODE]


def _bring_up(store: AtlasStore, backup: Path, group: str, units: Sequence[str], steps: Sequence[Step]) -> None:
    """Write the new attributes of a model's sealed units, and their manifests."""
    saved = backup / "arrays.zarr" / group
    for unit in units:
        content = json.loads((backup / store.manifest_path(group, unit).relative_to(store.root)).read_bytes())
        content.pop("seal", None)
        for name in content["files"]:
            if PurePosixPath(name).name == NODE:
                node = json.loads((saved / name).read_bytes())
                for step in steps:
                    node["attributes"] = step.change(PurePosixPath(name).parent, node.get("attributes", {}))
                content["files"][name] = _replace(store.arrays_path / group / name, node)
        current = json.loads(store.manifest_path(group, unit).read_bytes())
        if current.pop("seal", None) != seal_of(content) or current != content:
            write_manifest(store, {"sequence": content.pop("sequence", 0), **content})


def _replace(path: Path, node: Mapping[str, Any]) -> dict[str, Any]:
    """Write a Zarr node's metadata, unless it is so already; returns what a manifest lists of it."""
    data = json.dumps(node, indent=2).encode()
    if path.read_bytes() != data:
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    return _listed(data)


def _listed(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write_root(store: AtlasStore, backup: Path) -> None:
    node = json.loads((backup / "arrays.zarr" / NODE).read_bytes())
    node["attributes"] |= {FORMAT: FORMAT_VERSION, NEEDS: tool_version()}
    _replace(store.arrays_path / NODE, node)


def _finished(store: AtlasStore) -> Path | None:
    """Give the backup of a migration that is done its name; the latest there is."""
    folder = store.root / "backups"
    for path in sorted(folder.glob(f"format-*{UNFINISHED}")):
        name = path.name.removesuffix(UNFINISHED)
        taken = sum(1 for other in folder.glob(f"{name}*") if other != path)
        path.replace(folder / (f"{name}-{taken + 1}" if taken else name))
    return max(folder.glob("format-*"), key=lambda path: path.stat().st_mtime, default=None)
