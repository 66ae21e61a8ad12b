"""A base checkpoint with a low-rank adapter merged into the tensors that are read.

A weight becomes ``W + (alpha / r) B A``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ingest.adapter import Adapter, Change
from ingest.checkpoint import Checkpoint, TensorHeader
from ingest.local import ADAPTER_CONFIG
from ingest.safetensors_file import FLOATING
from stats.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.safetensors_file import ByteSource

ATTENTION = re.compile("attn|attention|mixer", re.IGNORECASE)
"""Modules that a base must have when an adapter changes them."""


@dataclass(slots=True, kw_only=True)
class AdaptedCheckpoint(Checkpoint):
    """A base checkpoint as it is with an adapter; tensors keep the base's names.

    ``changes`` is by the name of the base's tensor. Only tensors that are read are ever merged.
    """

    base: Checkpoint
    adapter: Adapter
    changes: Mapping[str, Change]

    @property
    def commit(self) -> None:
        """The adapter's commit says nothing of the base."""
        return None

    def header(self, name: str) -> TensorHeader:
        """Header of one tensor of the base, or of one of ``companions``.

        Raises:
            CheckpointError: the adapter's update has another shape, or is no float.
        """
        headers, change = self.adapter.file.headers, self.changes.get(name)
        if change is None:
            return headers[name] if name in headers else self.base.header(name)
        header = replace(headers[change.saved], name=name) if change.saved else self.base.header(name)
        if change.down:
            self._check_update(header, change)
        return header

    def _check_update(self, header: TensorHeader, change: Change) -> None:
        down, up = (self.adapter.file.headers[name] for name in (change.down, change.up))
        rank, _ = self.adapter.scale(change.module)
        shape = header.shape[::-1] if self.adapter.config.get("fan_in_fan_out") else header.shape
        where = f"{self.adapter.location}, module {change.module}"
        if len(shape) != 2 or down.shape != (rank, shape[-1]) or up.shape != (shape[0], rank):
            raise CheckpointError(
                "an adapter's update does not fit the base",
                where=where,
                expected=f"rank {rank} from {ADAPTER_CONFIG} and {list(header.shape)} from {header.name} in the base",
                found=f"lora_A {list(down.shape)}, lora_B {list(up.shape)}, "
                f"fan_in_fan_out {bool(self.adapter.config.get('fan_in_fan_out'))}",
                remedy=_another_base(self.adapter),
            )
        if down.dtype not in FLOATING or up.dtype not in FLOATING:
            raise CheckpointError(
                "an adapter's update is no float",
                where=where,
                expected=", ".join(FLOATING),
                found=f"lora_A {down.dtype}, lora_B {up.dtype}",
                remedy="save the adapter in a float of 16 bits or more",
            )

    def companions(self, name: str) -> tuple[str, ...]:
        """Names of the tensors read beside one: the base's own and those of the adapter."""
        change = self.changes.get(name)
        if change is None:
            return self.base.companions(name)
        own = () if change.saved else self.base.companions(name)
        return (*own, change.down, change.up) if change.down else own

    def place(self, name: str) -> tuple[ByteSource, int] | None:
        """Where the stored values of one tensor begin, or of one of ``companions``."""
        change = self.changes.get(name)
        own = change.saved if change is not None and change.saved else name
        return self.adapter.file.place(own) if own in self.adapter.file.headers else self.base.place(name)

    def read(self, name: str) -> Tensor:
        """Values of one tensor as the adapter leaves them; a sum is in float64 and not rounded to storage."""
        change = self.changes.get(name)
        if change is None:
            return self.base.read(name)
        weight = self.adapter.file.read(change.saved) if change.saved else self.base.read(name)
        if not change.down:
            return weight
        down, up = (self.adapter.file.read(factor).double() for factor in (change.down, change.up))
        update = up @ down * self.adapter.scale(change.module)[1]
        return weight.double() + (update.mT if self.adapter.config.get("fan_in_fan_out") else update)


def adapted(base: Checkpoint, adapter: Adapter, name: str) -> AdaptedCheckpoint:
    """A base with an adapter, under a name.

    Raises:
        CheckpointError: a base with other tensor names, or one without a tensor of attention that the
            adapter changes.
    """
    if base.naming != "transformers":
        raise CheckpointError(
            "an adapter's names are not those of the base",
            where=base.source,
            expected="a base as safetensors or .bin",
            found=base.format,
            remedy=_another_base(adapter),
        )
    commit = f" at {base.revision}" if base.revision else ""
    return AdaptedCheckpoint(
        source=f"{adapter.location} on {base.source}{commit}",
        name=name,
        format=f"{base.format}+lora",
        naming=base.naming,
        config=base.config,
        location=base.location,
        files=base.files,
        transfers=base.transfers,
        base=base,
        adapter=adapter,
        changes=_changes_by_tensor(base, adapter),
    )


def _changes_by_tensor(base: Checkpoint, adapter: Adapter) -> dict[str, Change]:
    by_ending: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for tensor in base.location:
        if tensor.endswith(".weight"):
            words = tensor.removesuffix(".weight").split(".")
            by_ending[_ending(words)].append(words)
    changes: dict[str, Change] = {}
    for module, change in adapter.changes.items():
        words = module.split(".")
        tensors = [".".join([*found, "weight"]) for found in _nearest(words, by_ending[_ending(words)])]
        taken = [tensor for tensor in tensors if tensor in changes]
        if len(tensors) == 1 and not taken:
            changes[tensors[0]] = change
        elif tensors or ATTENTION.search(module):
            raise CheckpointError(
                "the base has no one tensor for a module that the adapter changes",
                where=f"{adapter.location}, base {base.source}",
                expected=f"{module}.weight",
                found=", ".join(tensors[:3]) + (", changed twice" if taken else "") or "no such tensor",
                remedy=_another_base(adapter),
            )
    if not changes:
        raise CheckpointError(
            "the adapter changes nothing that the base has",
            where=f"{adapter.location}, base {base.source}",
            expected=", ".join(f"{module}.weight" for module in list(adapter.changes)[:3]) or "any update",
            found=", ".join(list(base.location)[:3]),
            remedy=_another_base(adapter),
        )
    return changes


def _ending(words: list[str]) -> tuple[str, ...]:
    """What the names of one module share however the model around it is wrapped: its numbers and last word."""
    return (*(word for word in words if word.isdigit()), words[-1])


def _nearest(module: list[str], candidates: list[list[str]]) -> list[list[str]]:
    """Names in the base for a module, several only when none is nearer.

    Running models and files differ in the words before the layers: ``transformer.h`` and ``h``,
    ``model.language_model.layers`` and ``language_model.model.layers``. One name's words must hold the
    other's; the longest common ending decides.
    """
    if module in candidates:
        return [module]
    tails: dict[int, list[list[str]]] = defaultdict(list)
    for words in candidates:
        tail = 0
        while tail < min(len(words), len(module)) and words[-1 - tail] == module[-1 - tail]:
            tail += 1
        left, right = set(words[: len(words) - tail]), set(module[: len(module) - tail])
        if left <= right or right <= left:
            tails[tail].append(words)
    return tails[max(tails)] if tails else []


def _another_base(adapter: Adapter) -> str:
    trained_on = adapter.config.get("base_model_name_or_path")
    return "give --base the model that the adapter was trained on" + (f": {trained_on}" if trained_on else "")
