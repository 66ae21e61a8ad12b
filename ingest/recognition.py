"""Which row of the family tables describes a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingest.checkpoint import Checkpoint
from ingest.families import FAMILIES, GGUF_FAMILIES
from ingest.family import Family
from stats.errors import CheckpointError


def recognise(checkpoint: Checkpoint, family: str | None) -> tuple[Family, Mapping[str, Any], str]:
    """The family row, the configuration that describes it, and how it was recognised."""
    table = GGUF_FAMILIES if checkpoint.naming == "gguf" else FAMILIES
    config = checkpoint.config
    if family is not None:
        return _row(checkpoint, table, family, config), config, "--family"
    model_type = config.get("model_type")
    if model_type is None:
        raise CheckpointError(
            "the configuration does not name a model_type",
            where=checkpoint.source,
            expected="one of " + ", ".join(sorted(table)),
            found=f"architectures {config.get('architectures')}",
            remedy="say which with --family NAME",
        )
    nested = config.get("text_config")
    if str(model_type) not in table and isinstance(nested, dict) and str(nested.get("model_type")) in table:
        return _row(checkpoint, table, str(nested["model_type"]), nested), nested, "text_config.model_type"
    return _row(checkpoint, table, str(model_type), config), config, "model_type"


def _row(
    checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]], model_type: str, config: Mapping[str, Any]
) -> Family:
    """The row of a family that the configuration asks for."""
    for row in table.get(model_type, ()):
        if row.describes(config):
            return row
    if model_type in table:
        raise CheckpointError(
            f"an unknown form of the family {model_type}",
            where=checkpoint.source,
            expected=" or ".join(str(dict(row.when)) for row in table[model_type]),
            found=str({key: config.get(key) for row in table[model_type] for key in row.when}),
            remedy="correct the configuration",
        )
    raise CheckpointError(
        f"unknown model family {model_type!r}",
        where=checkpoint.source,
        expected="one of " + ", ".join(sorted(table)),
        found=model_type,
        remedy="if the checkpoint is laid out like a known family, say which with --family NAME",
    )
