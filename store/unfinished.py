"""Ingests that ended early, known by the measured layers they left below the store's ``staging``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from store.locking import is_held

if TYPE_CHECKING:
    from store.atlas import AtlasStore

FACTS = "ingest.json"
"""File that says which ingest the layers belong to."""

SUFFIX = ".npz"

IN_USE = "in-use"
"""File that every process which measures into the directory holds a lock on."""


@dataclass(frozen=True, slots=True)
class UnfinishedIngest:
    """What is known of an ingest from what it left."""

    directory: Path
    model: str
    source: str
    layers: int
    started: str
    measured: int

    @classmethod
    def of(cls, directory: Path) -> UnfinishedIngest | None:
        """The ingest whose layers a directory holds; None if it is something else."""
        try:
            facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
            measured = sum(1 for _ in directory.glob(f"*{SUFFIX}"))
            return cls(directory, facts["model"], facts["source"], facts["layers"], facts["started"], measured)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @property
    def running(self) -> bool:
        """Whether a process is at it, on this machine or another that shares the store."""
        return is_held(self.directory / IN_USE)


def unfinished_ingests(store: AtlasStore) -> list[UnfinishedIngest]:
    """Ingests that ended early, or are running."""
    if not store.staging_path.is_dir():
        return []
    found = (UnfinishedIngest.of(path) for path in sorted(store.staging_path.iterdir()) if path.is_dir())
    return [ingest for ingest in found if ingest is not None]
