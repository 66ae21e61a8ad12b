"""Which rows of the family tables describe a checkpoint, one for each of its attention stacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingest.by_shape import first_layer, recognise_by_shape
from ingest.checkpoint import Checkpoint
from ingest.families import FAMILIES, GGUF_FAMILIES
from ingest.family import Family
from ingest.refusals import REFUSED
from ingest.towers import WRAPPED
from stats.errors import CheckpointError, shown

PARTS: Mapping[str, str] = {
    "text_config": "",
    "llm_config": "",
    "language_config": "",
    "vision_config": "vision",
    "audio_config": "audio",
    "speech_config": "audio",
    "qformer_config": "qformer",
}
"""Nested configurations of a multimodal model, and the tower their layers make up; empty is the text."""

NESTING = ("thinker_config",)
"""Nested configurations that are multimodal models themselves."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One attention stack: its name in the store, its family row and the configuration that describes it.

    ``is_part`` says that the model has other parts, whose tensors may have the same form. Where
    ``norms_known`` is false the family has no norm because nothing says which it has.
    """

    name: str
    family: Family
    config: Mapping[str, Any]
    is_part: bool = False
    norms_known: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """A nested configuration of a multimodal model, by key, and the ``model_type`` that describes it.

    ``tower`` names the stack it makes up and is empty for the text. ``wrapper`` is the ``model_type``
    whose class assumes the part's; empty where the part names its own.
    """

    key: str
    model_type: str
    tower: str
    config: Mapping[str, Any]
    wrapper: str = ""

    @property
    def by(self) -> str:
        """What the part was recognised by."""
        return f"{self.key} as {self.wrapper} assumes it" if self.wrapper else f"{self.key}.model_type"


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
    parts = list(_parts(config, str(model_type)))
    if any(part.model_type in table for part in parts):
        return _wrapped(checkpoint, table, parts)
    if str(model_type) in REFUSED:
        raise _unknown(checkpoint, table, str(model_type))
    return _by_shape(checkpoint, table)


def _by_shape(checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]]) -> Recognition:
    """The one stack of a model of no known family, which a note says."""
    family, config = recognise_by_shape(checkpoint, table)
    model_type = checkpoint.config.get("model_type")
    unknown = "no model_type" if model_type is None else f"unknown model_type {model_type!r}"
    note = (
        f"{unknown}: read as {family.model_type}, separate {', '.join(family.projections[0].roles.values())}, "
        "by names and shapes; check with `headatlas verify MODEL --against transformers`"
    )
    stack = Stack(family.stack, family, config, norms_known=False)
    return Recognition((stack,), "names and shapes", (shown(note),))


def _parts(config: Mapping[str, Any], wrapper: str, above: str = "") -> Iterator[Part]:
    """Nested configurations of a multimodal model.

    A part that names no ``model_type``, or the wrapper's, is what the wrapper's class assumes; so is
    the text where older configurations describe it at the top level.
    """
    assumed = WRAPPED.get(wrapper, {})
    for key, tower in PARTS.items():
        config_of_part = config.get(key)
        if not isinstance(config_of_part, dict) and not tower and key in assumed:
            config_of_part = config
        if isinstance(config_of_part, dict):
            named = str(config_of_part.get("model_type") or wrapper)
            is_assumed = named == wrapper
            yield Part(
                above + key,
                assumed.get(key, "") if is_assumed else named,
                tower,
                config_of_part,
                wrapper if is_assumed else "",
            )
    for key in NESTING:
        if isinstance(config.get(key), dict):
            nested = config[key].get("model_type") or assumed.get(key, "")
            yield from _parts(config[key], str(nested), f"{above}{key}.")


def _wrapped(checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]], parts: list[Part]) -> Recognition:
    """The stacks of a multimodal model; a text part must be known, a tower may be left aside."""
    stacks: list[Stack] = []
    notes = []
    known = []
    for part in parts:
        if part.model_type in table:
            known.append(part.by)
            stacks += _stacks_of_part(part, _stacks(checkpoint, table, part.model_type, part.config))
        elif part.tower:
            unknown = f"{part.key} names the unknown family {part.model_type!r}"
            notes.append(shown(f"{part.tower} attention left aside: {unknown}"))
        elif part.model_type in REFUSED:
            raise _unknown(checkpoint, table, part.model_type)
        else:
            raise CheckpointError(
                f"unknown model family {part.model_type!r}",
                where=f"{checkpoint.source}, {part.by}",
                expected="a family of docs/families.md",
                found=first_layer(checkpoint),
                remedy="save the text as its own checkpoint, with its part of the configuration",
            )
    return Recognition(tuple(stacks), ", ".join(known), tuple(notes))


def _stacks_of_part(part: Part, stacks: tuple[Stack, ...]) -> list[Stack]:
    """Stacks under the names they have in a multimodal model; a tower of an encoder-decoder is its encoder."""
    if not part.tower:
        return [replace(stack, is_part=True) for stack in stacks]
    of_tower = [stack for stack in stacks if stack.name not in ("decoder", "cross")] or stacks
    return [
        replace(stack, name=part.tower if stack.name in ("encoder", "decoder") else stack.name, is_part=True)
        for stack in of_tower
    ]


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
        stacks.append(Stack(name, *chosen, is_part=bool(chosen[0].part)))
    return tuple(stacks)


def _unknown(checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]], model_type: str) -> CheckpointError:
    if model_type in REFUSED:
        return CheckpointError(
            f"the attention of {model_type} cannot be read",
            where=checkpoint.source,
            expected="heads whose outputs add up, each O V^T of the tokens",
            found=REFUSED[model_type],
            remedy="leave this model out",
        )
    return CheckpointError(
        f"unknown model family {model_type!r}",
        where=checkpoint.source,
        expected="one of " + ", ".join(sorted(table)),
        found=model_type,
        remedy="if the checkpoint is laid out like a known family, say which with --family NAME",
    )
