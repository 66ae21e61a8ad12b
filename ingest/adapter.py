"""Low-rank adapters as the peft library saves them: what they change, and by how much."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ingest.checkpoint import TensorFile
from ingest.local import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Folder
from ingest.torch_file import TorchFile
from stats.errors import CheckpointError

PREFIX = "base_model.model."
"""What the library puts in front of the names of the model's modules."""

FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.(?P<adapter>[^.]+))?\.weight")
SAVED = re.compile(r"(?P<module>.+?)(\.modules_to_save(\.[^.]+)?|\.base_layer)?\.weight")
NOT_OF_ATTENTION = re.compile(r"\.lora_embedding_[AB]\b|\.original_module\.|\.bias$")

NAME = re.compile(r"[\w.]+")
"""A key of a pattern mapping that is the end of a module's name, its dots meant as dots."""

MOST_PATTERNS = 100
"""Keys of a pattern mapping that are more than a name; each is tried on every module."""

DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8}
INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it was; others move a part of it into the adapter."""

VARIANTS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "LoRA activated by tokens",
    "arrow_config": "routed LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "LoRA on replicated layers",
}
"""Keys that, when set, make an adapter something other than a product of two matrices on a base's layers."""


@dataclass(slots=True)
class Change:
    """What an adapter does to one module: tensors of its file, by name.

    ``saved`` takes the place of the module's weight; ``down`` A (r, in) and ``up`` B (out, r) are added.
    """

    module: str
    saved: str = ""
    down: str = ""
    up: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's configuration, its file, and its changes by module."""

    location: str
    config: Mapping[str, Any]
    file: TensorFile
    changes: Mapping[str, Change]

    def scale(self, module: str) -> tuple[int, float]:
        """Rank of a module's update and the factor it is multiplied with.

        ``rank_pattern`` and ``alpha_pattern`` have regular expressions of module names; the first that
        matches at the end of a name counts.
        """
        rank = self._setting("rank_pattern", "r", module)
        alpha = self._setting("alpha_pattern", "lora_alpha", module)
        if type(rank) is not int or not 0 < rank < 2**31 or type(alpha) not in (int, float) or not abs(alpha) <= 1e30:
            raise CheckpointError(
                "the adapter's configuration gives no scale",
                where=f"{self.location}, module {module}",
                expected="a positive integer r below 2^31 and a number lora_alpha up to 1e30",
                found=f"r {rank!r}, lora_alpha {alpha!r}"[:200],
                remedy="correct adapter_config.json",
            )
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _setting(self, patterns: str, key: str, module: str) -> Any:
        listed = self.config.get(patterns) or {}
        if not isinstance(listed, dict) or sum(not NAME.fullmatch(each) for each in listed) > MOST_PATTERNS:
            raise self._no_patterns(patterns, listed)
        for pattern, value in listed.items():
            matches = ends_with(pattern, module)
            if matches is None:
                raise self._no_patterns(patterns, pattern)
            if matches:
                return value
        return self.config.get(key, DEFAULTS[key])

    def _no_patterns(self, patterns: str, found: Any) -> CheckpointError:
        return CheckpointError(
            f"{patterns} does not map patterns of module names",
            where=self.location,
            expected=f"an object with regular expressions as keys, {MOST_PATTERNS} at most beside plain names",
            found=repr(found)[:200],
            remedy="correct adapter_config.json",
        )


def ends_with(pattern: str, module: str) -> bool | None:
    """Whether the end of a module's name matches a pattern; None if it is no pattern.

    Patterns run in an engine whose time is linear in the name's length: Python's own takes forever over
    some, and both come from the adapter.
    """
    if NAME.fullmatch(pattern):
        return f".{module}".endswith(f".{pattern}")
    import polars as pl

    try:
        return bool(pl.Series([module]).str.contains(rf"^(?:.*\.)?(?:{pattern})$")[0])
    except (pl.exceptions.PolarsError, UnicodeError):
        return None


def read_adapter(folder: Folder) -> Adapter:
    """Read an adapter's configuration and the headers of its file.

    Raises:
        CheckpointError: not an adapter, or one that is not a plain product of two matrices.
    """
    present = folder.names()
    weights = next((name for name in ADAPTER_WEIGHTS if name in present), None)
    if ADAPTER_CONFIG not in present or weights is None:
        raise CheckpointError(
            "a base is given for something that is no adapter",
            where=folder.location,
            expected=f"{ADAPTER_CONFIG} and {' or '.join(ADAPTER_WEIGHTS)}",
            found=", ".join(sorted(present)[:8]) or "nothing",
            remedy="leave out --base, or name the adapter's directory",
        )
    config = folder.json(ADAPTER_CONFIG)
    _refuse_other_methods(folder.location, config)
    file: TensorFile
    file = TorchFile(folder.path(weights)) if weights.endswith(".bin") else folder.safetensors(weights)
    return Adapter(folder.location, config, file, _changes(folder.location, file.headers))


def _refuse_other_methods(location: str, config: Mapping[str, Any]) -> None:
    method, start = config.get("peft_type"), config.get("init_lora_weights")
    if method != "LORA":
        raise _other_method(location, str(method), f"peft_type {method}")
    for key, variant in VARIANTS.items():
        if config.get(key):
            raise _other_method(location, variant, f"{key} is set")
    if start not in INITIALISATIONS:
        raise _other_method(location, f"LoRA that starts from a changed base ({start})", f"init_lora_weights {start}")


def _other_method(location: str, method: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter's method is {method}, which is not merged here",
        where=location,
        expected="LoRA: a product of two matrices added to a weight of the base",
        found=found[:200],
        remedy="merge it with the library it was made with (merge_and_unload in peft) and save the whole model",
    )


def _changes(location: str, names: Iterable[str]) -> dict[str, Change]:
    """Changes by module, from the names of the adapter's tensors."""
    changes: dict[str, Change] = {}
    for name in names:
        if NOT_OF_ATTENTION.search(name):
            continue
        factor = FACTOR.fullmatch(name)
        saved = None if ".lora_" in name else SAVED.fullmatch(name)
        match = factor or saved
        if match is None:
            if ".lora_" in name:
                raise _other_method(location, "LoRA with more than two matrices", f"tensor {name}")
            continue
        module = match["module"].removeprefix(PREFIX)
        change = changes.setdefault(module, Change(module))
        role = "saved" if factor is None else {"A": "down", "B": "up"}[factor["factor"]]
        if getattr(change, role):
            raise CheckpointError(
                "the file holds several adapters",
                where=f"{location}, module {module}",
                expected="one tensor of each kind for a module",
                found=f"{getattr(change, role)}, {name}",
                remedy="save the adapter that is wanted by itself",
            )
        setattr(change, role, name)
    for change in changes.values():
        if bool(change.down) != bool(change.up):
            raise CheckpointError(
                "half of an adapter's update is missing",
                where=f"{location}, module {change.module}",
                expected="lora_A and lora_B",
                found=change.down or change.up,
                remedy="download the adapter again",
            )
    return changes
