"""Which rows of the family tables describe a checkpoint, one for each of its attention stacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingest.checkpoint import Checkpoint
from ingest.families import FAMILIES, GGUF_FAMILIES, WRAPPED
from ingest.family import Family
from stats.errors import CheckpointError

PARTS: Mapping[str, str] = {
    "text_config": "",
    "llm_config": "",
    "language_config": "",
    "vision_config": "vision",
    "audio_config": "audio",
    "speech_config": "audio",
}
"""Nested configurations of a multimodal model, and the stack their layers make up; empty keeps the family's."""

NESTING = ("thinker_config",)
"""Nested configurations that are multimodal models themselves."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One attention stack: its name in the store, its family row and the configuration that describes it."""

    name: str
    family: Family
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recognition:
    """The stacks of a checkpoint, what they were recognised by, and what had to be left aside."""

    stacks: tuple[Stack, ...]
    by: str
    notes: tuple[str, ...] = ()


def recognise(checkpoint: Checkpoint, family: str | None) -> Recognition:
    """Find the family rows of a checkpoint.

    Args:
        checkpoint: an open checkpoint.
        family: a ``model_type`` to assume in place of the configuration's.

    Raises:
        CheckpointError: no row describes the configuration.
    """
    table = GGUF_FAMILIES if checkpoint.naming == "gguf" else FAMILIES
    config = checkpoint.config
    if family is not None:
        return Recognition(_stacks(checkpoint, table, family, config), "--family")
    model_type = config.get("model_type")
    if str(model_type) in table:
        return Recognition(_stacks(checkpoint, table, str(model_type), config), "model_type")
    parts = list(_parts(config))
    if any(inner in table for _, inner, _, _ in parts):
        return _wrapped(checkpoint, table, parts)
    if model_type is None:
        raise CheckpointError(
            "the configuration does not name a model_type",
            where=checkpoint.source,
            expected="one of " + ", ".join(sorted(table)),
            found=f"architectures {config.get('architectures')}",
            remedy="say which with --family NAME",
        )
    raise _unknown(checkpoint, table, str(model_type))


def _parts(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Nested configurations: key, model_type, stack name and the configuration itself."""
    assumed = WRAPPED.get(str(config.get("model_type")), {})
    for key, stack in PARTS.items():
        part = config.get(key)
        if isinstance(part, dict):
            yield above + key, str(part.get("model_type") or assumed.get(key, "")), stack, part
    for key in NESTING:
        if isinstance(config.get(key), dict):
            yield from _parts(config[key], f"{above}{key}.")


def _wrapped(
    checkpoint: Checkpoint,
    table: Mapping[str, tuple[Family, ...]],
    parts: list[tuple[str, str, str, Mapping[str, Any]]],
) -> Recognition:
    """The stacks of a multimodal model; a text part must be known, a tower may be left aside."""
    stacks: list[Stack] = []
    notes = []
    known = []
    for key, model_type, name, part in parts:
        if model_type in table:
            known.append(key)
            stacks += [
                Stack(name or stack.name, stack.family, stack.config)
                for stack in _stacks(checkpoint, table, model_type, part)
            ]
        elif name:
            notes.append(f"{name} attention left aside: {key} names the unknown family {model_type!r}")
        else:
            raise _unknown(checkpoint, table, model_type)
    return Recognition(tuple(stacks), ", ".join(f"{key}.model_type" for key in known), tuple(notes))


def _stacks(
    checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]], model_type: str, config: Mapping[str, Any]
) -> tuple[Stack, ...]:
    """For each stack of a family, the row that the configuration asks for."""
    rows = table.get(model_type, ())
    if not rows:
        raise _unknown(checkpoint, table, model_type)
    stacks = []
    for name in dict.fromkeys(row.stack for row in rows):
        of_stack = [row for row in rows if row.stack == name]
        described = ((row, row.described_by(config)) for row in of_stack)
        chosen = next(((row, part) for row, part in described if row.describes(part)), None)
        if chosen is None:
            raise CheckpointError(
                f"an unknown form of the family {model_type}",
                where=checkpoint.source,
                expected=" or ".join(str(dict(row.when)) for row in of_stack),
                found=str({key: row.described_by(config).get(key) for row in of_stack for key in row.when}),
                remedy="correct the configuration",
            )
        stacks.append(Stack(name, *chosen))
    return tuple(stacks)


def _unknown(checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]], model_type: str) -> CheckpointError:
    return CheckpointError(
        f"unknown model family {model_type!r}",
        where=checkpoint.source,
        expected="one of " + ", ".join(sorted(table)),
        found=model_type,
        remedy="if the checkpoint is laid out like a known family, say which with --family NAME",
    )
