"""Ingesting a checkpoint as the command line does."""

from __future__ import annotations

from pathlib import Path

from ingest.pipeline import ComputeSettings
from ingest.plan import Operator, plan_checkpoint
from ingest.source import open_checkpoint
from store.atlas import AtlasStore
from store.ingestion import Identity, Outcome, ingest_model


def ingest_into(
    store: Path,
    source: Path,
    name: str,
    operators: tuple[Operator, ...] = ("raw",),
    replace: bool = False,
    family: str | None = None,
) -> Outcome:
    """Ingest a checkpoint under a name, on the CPU."""
    return ingest_model(
        AtlasStore.open_or_create(store),
        plan_checkpoint(open_checkpoint(str(source)), operators, family),
        Identity(name),
        ComputeSettings(device="cpu"),
        replace_existing=replace,
        progress=lambda *_: None,
    )
