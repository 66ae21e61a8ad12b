"""What will be read, decided from names, headers and configuration alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ingest.checkpoint import Checkpoint, TensorHeader
from ingest.family import Family, Norm, Projections
from ingest.quantized import refuse_quantized, require_floating
from ingest.recognition import recognise
from stats.errors import CheckpointError

Operator = Literal["raw", "folded"]

WRAPPER_PREFIXES = (
    "module.", "_orig_mod.", "base_model.model.", "model.", "transformer.", "language_model.", "text_model.",
    "backbone.", "gpt_neox.", "bert.", "roberta.", "albert.", "encoder.", "vit.",
)  # fmt: skip
"""Prefixes that wrap a model without changing which stack it is."""

MOST_LAYERS = 10_000
"""Layers a configuration may speak of: each one that has no attention is listed."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer with attention: its sizes and the tensors that hold it.

    ``tensors`` maps a role (query, key, value, fused, output, feeding_norm, branch_norm) to a
    tensor name. ``pruned`` lists heads the checkpoint has removed; the other sizes count them.
    """

    stack: str
    layer: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    projections: Projections
    tensors: Mapping[str, str]
    feeding: Norm | None
    branch: Norm | None
    pruned: tuple[int, ...] = ()

    @property
    def stored_heads(self) -> int:
        """Query heads the file holds."""
        return self.n_heads - len(self.pruned)

    @property
    def stored_kv_heads(self) -> int:
        """Key/value heads the file holds; one that several heads share is never removed."""
        return self.n_kv_heads if self.n_kv_heads < self.n_heads else self.stored_heads


@dataclass(frozen=True, slots=True)
class SkippedLayer:
    """A layer of the configuration that has no attention to read, and why."""

    stack: str
    layer: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything an ingest will read and compute."""

    checkpoint: Checkpoint
    family: Family
    recognised_by: str
    operators: tuple[Operator, ...]
    layers: tuple[LayerPlan, ...]
    skipped: tuple[SkippedLayer, ...]
    ignored_prefixes: tuple[str, ...]

    @cached_property
    def tensors(self) -> tuple[TensorHeader, ...]:
        """Headers of every tensor that will be read, each once, in reading order."""
        names = dict.fromkeys(name for layer in self.layers for name in layer.tensors.values())
        return tuple(self.checkpoint.header(name) for name in names)

    @property
    def bytes_to_read(self) -> int:
        """Stored size of those tensors; what an ingest records as ``bytes_read``."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def source_dtype(self) -> str:
        """Storage types of the projections, joined by ``+``."""
        norms = {name for layer in self.layers for role, name in layer.tensors.items() if role.endswith("norm")}
        return "+".join(sorted({tensor.dtype for tensor in self.tensors if tensor.name not in norms}))


def plan_checkpoint(
    checkpoint: Checkpoint, operators: Sequence[Operator] = ("raw",), family: str | None = None
) -> Plan:
    """Decide what to read.

    Args:
        checkpoint: an open checkpoint.
        operators: operator variants; ``folded`` adds the norm gains.
        family: a ``model_type`` to assume, for a configuration that lacks one.

    Raises:
        CheckpointError: unknown family, quantised weights, no attention found, shapes that
            contradict the configuration, or a folded operator the architecture does not have.
    """
    row, config, recognised_by = recognise(checkpoint, family)
    refuse_quantized(checkpoint, config)
    if "folded" in operators and not row.can_fold:
        raise CheckpointError(
            f"{row.model_type} has no folded operator",
            where=checkpoint.source,
            expected="a norm in front of attention, or a gain on its output",
            found="a norm after the residual sum",
            remedy="use --operator raw",
        )
    depth, inner = _depth(checkpoint, row, config)
    blocks, ignored = _find_blocks(checkpoint, row, inner)
    layers = []
    skipped = []
    for layer in range(depth * inner):
        if layer in blocks:
            layers.append(_plan_layer(checkpoint, row, config, layer, *blocks[layer], operators))
        else:
            skipped.append(SkippedLayer(row.stack, layer, "no attention tensors in the checkpoint"))
    skipped += [
        SkippedLayer(row.stack, layer, f"beyond the {depth * inner} layers of the configuration")
        for layer in sorted(blocks)
        if layer >= depth * inner
    ]
    if not layers:
        raise _no_attention(checkpoint, row)
    return Plan(checkpoint, row, recognised_by, tuple(operators), tuple(layers), tuple(skipped), tuple(ignored))


def _no_attention(checkpoint: Checkpoint, row: Family) -> CheckpointError:
    projection = row.projections[0]
    return CheckpointError(
        "no attention found in the checkpoint",
        where=checkpoint.source,
        expected=", ".join(f"{row.block}{name}.weight" for name in projection.roles.values()),
        found=", ".join(list(checkpoint.location)[:6]) or "no tensors",
        remedy="check that the weights belong to the configuration, or name the family with --family",
    )


def _size(checkpoint: Checkpoint, keys: Sequence[str], value: Any, largest: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
        raise CheckpointError(
            "the configuration does not give a size",
            where=f"{checkpoint.source}, {' or '.join(keys)}",
            expected=f"an integer from 1 to {largest:,}",
            found=repr(value)[:100],
            remedy="correct the configuration the model was saved with",
        )
    return value


def _depth(checkpoint: Checkpoint, row: Family, config: Mapping[str, Any]) -> tuple[int, int]:
    """Numbered layers, and attention blocks in each."""
    keys = row.keys
    listed = row.setting(config, *keys.layer_list)
    counted = len(listed) if isinstance(listed, list) else row.setting(config, *keys.depth)
    depth = _size(checkpoint, (*keys.layer_list, *keys.depth), counted, MOST_LAYERS)
    if not row.inner_count:
        return depth, 1
    inner = row.setting(config, row.inner_count)
    return depth, _size(checkpoint, [row.inner_count], inner, MOST_LAYERS // depth)


def _head_sizes(checkpoint: Checkpoint, row: Family, config: Mapping[str, Any], layer: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and head size of one layer; per-layer lists are indexed."""

    def setting(keys: Sequence[str]) -> Any:
        value = row.setting(config, *keys)
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        return value

    keys = row.keys
    heads = _size(checkpoint, keys.heads, setting(keys.heads))
    kv_heads = row.fixed_kv_heads or setting(keys.kv_heads)
    kv_heads = heads if kv_heads is None else _size(checkpoint, keys.kv_heads, kv_heads)
    width = _size(checkpoint, keys.width, row.setting(config, *keys.width))
    d_head = setting(keys.head_dim)
    d_head = width // heads if d_head is None else _size(checkpoint, keys.head_dim, d_head)
    if heads % kv_heads:
        raise CheckpointError(
            "query heads cannot be grouped evenly",
            where=f"{checkpoint.source}, layer {layer}",
            expected="key/value heads that divide the query heads",
            found=f"{heads} query heads, {kv_heads} key/value heads",
            remedy="correct the configuration; a count it lacks is the model class's own default",
        )
    return heads, kv_heads, d_head


def _block_pattern(row: Family, projections: Projections) -> re.Pattern[str]:
    """Matches a projection's weight, with its prefix, layer, inner number and role's name."""
    block = (
        re.escape(row.block).replace(r"\{layer\}", r"(?P<layer>\d{1,6})").replace(r"\{inner\}", r"(?P<inner>\d{1,6})")
    )
    names = "|".join(re.escape(name) for name in projections.roles.values())
    return re.compile(rf"(?P<prefix>(?:.*\.)?)(?P<block>{block})(?P<projection>{names})\.weight")


def _find_blocks(
    checkpoint: Checkpoint, row: Family, inner: int
) -> tuple[dict[int, tuple[str, Projections]], list[str]]:
    """The attention blocks of the model's own stack, by layer number, and prefixes left aside."""
    for projections in row.projections:
        by_prefix: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        pattern = _block_pattern(row, projections)
        for name in checkpoint.location:
            match = pattern.fullmatch(name)
            if match:
                number = int(match["layer"]) * inner + int(match.groupdict().get("inner") or 0)
                stem = match["prefix"] + match["block"]
                by_prefix[match["prefix"]][number][match["projection"]] = stem
        complete = {
            prefix: found
            for prefix, found in by_prefix.items()
            if any(len(names) == len(projections.roles) for names in found.values())
        }
        if not complete:
            if by_prefix:
                _raise_incomplete(checkpoint, projections, next(iter(by_prefix.values())))
            continue
        prefix = _own_prefix(checkpoint, list(complete))
        for found in complete[prefix].values():
            if len(found) != len(projections.roles):
                _raise_incomplete(checkpoint, projections, complete[prefix])
        blocks = {layer: (next(iter(found.values())), projections) for layer, found in complete[prefix].items()}
        return blocks, sorted(set(complete) - {prefix})
    raise _no_attention(checkpoint, row)


def _raise_incomplete(
    checkpoint: Checkpoint, projections: Projections, blocks: Mapping[int, Mapping[str, str]]
) -> None:
    layer, found = next(
        (layer, found) for layer, found in sorted(blocks.items()) if len(found) < len(projections.roles)
    )
    stem = next(iter(found.values()))
    missing = [f"{stem}{name}.weight" for name in projections.roles.values() if name not in found]
    raise CheckpointError(
        "a layer's attention is incomplete",
        where=f"{checkpoint.source}, layer {layer}",
        expected=", ".join(missing),
        found=", ".join(f"{stem}{name}.weight" for name in found),
        remedy="complete the download; if the weights are stored in another form, convert them to plain matrices",
    )


def _own_prefix(checkpoint: Checkpoint, prefixes: list[str]) -> str:
    """The prefix of the model's own stack when a file holds several."""

    def is_wrapper(prefix: str) -> bool:
        while prefix:
            stripped = next(
                (prefix.removeprefix(known) for known in WRAPPER_PREFIXES if prefix.startswith(known)), None
            )
            if stripped is None:
                return False
            prefix = stripped
        return True

    own = [prefix for prefix in prefixes if is_wrapper(prefix)] if len(prefixes) > 1 else prefixes
    if len(own) != 1:
        raise CheckpointError(
            "the checkpoint holds several attention stacks of the same form",
            where=checkpoint.source,
            expected="one stack, or one under a usual prefix",
            found=", ".join(repr(prefix) for prefix in prefixes),
            remedy="save the stack you want as its own checkpoint",
        )
    return own[0]


def _plan_layer(
    checkpoint: Checkpoint,
    row: Family,
    config: Mapping[str, Any],
    layer: int,
    stem: str,
    projections: Projections,
    operators: Sequence[Operator],
) -> LayerPlan:
    heads, kv_heads, d_head = _head_sizes(checkpoint, row, config, layer)
    width = _size(checkpoint, row.keys.width, row.setting(config, *row.keys.width))
    tensors = {role: f"{stem}{name}.weight" for role, name in projections.roles.items()}
    feeding = row.feeding if row.feeding is not None and layer >= row.feeding.first_layer else None
    branch = row.branch
    if "folded" in operators:
        for role, norm in (("feeding_norm", feeding), ("branch_norm", branch)):
            if norm is not None and norm.tensor:
                names = [name for name in (norm.tensor, norm.other_tensor) if name]
                spellings = [f"{stem}{name}.{gain}" for name in names for gain in ("weight", "gamma")]
                tensors[role] = next((name for name in spellings if name in checkpoint), spellings[0])
    pruned = _pruned(checkpoint, config, layer, heads)
    plan = LayerPlan(row.stack, layer, heads, kv_heads, width, d_head, projections, tensors, feeding, branch, pruned)
    _check_tensors(checkpoint, plan)
    return plan


def _pruned(checkpoint: Checkpoint, config: Mapping[str, Any], layer: int, heads: int) -> tuple[int, ...]:
    """Heads that ``pruned_heads`` of the configuration says the checkpoint no longer holds."""
    pruned = config.get("pruned_heads") or {}
    listed = pruned.get(str(layer), []) if isinstance(pruned, dict) else pruned
    if not isinstance(listed, list) or any(type(head) is not int or not 0 <= head < heads for head in listed):
        raise CheckpointError(
            "pruned_heads does not list heads of the layer",
            where=f"{checkpoint.source}, layer {layer}",
            expected=f"a list of numbers from 0 to {heads - 1} by layer",
            found=repr(listed)[:100],
            remedy="correct the configuration the model was saved with",
        )
    return tuple(sorted(set(listed)))


def expected_shapes(plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Shape in the file, by role, that the sizes of a layer ask for."""
    rows, kv_rows = plan.stored_heads * plan.d_head, plan.stored_kv_heads * plan.d_head
    shapes: dict[str, tuple[int, ...]] = {
        "query": (rows, plan.d_model),
        "key": (kv_rows, plan.d_model),
        "value": (kv_rows, plan.d_model),
        "fused": (rows + 2 * kv_rows, plan.d_model),
        "output": (plan.d_model, rows),
    }
    if plan.projections.transposed:
        shapes = {role: shape[::-1] for role, shape in shapes.items()}
    return shapes | {"feeding_norm": (plan.d_model,), "branch_norm": (plan.d_model,)}


def _check_tensors(checkpoint: Checkpoint, plan: LayerPlan) -> None:
    shapes = expected_shapes(plan)
    for role, name in plan.tensors.items():
        if name not in checkpoint:
            raise CheckpointError(
                "a tensor of the layer is missing",
                where=f"{checkpoint.source}, layer {plan.layer}",
                expected=name,
                found="no such tensor",
                remedy="complete the download",
            )
        header = checkpoint.header(name)
        require_floating(checkpoint, header)
        if header.shape != shapes[role]:
            raise CheckpointError(
                "a tensor's shape contradicts the configuration",
                where=f"{checkpoint.source}, layer {plan.layer}, tensor {name}",
                expected=f"{list(shapes[role])} from {plan.n_heads} heads, {plan.n_kv_heads} key/value heads, "
                f"head size {plan.d_head}, width {plan.d_model}",
                found=f"{list(header.shape)}",
                remedy="the configuration and the weights belong to different models: check both",
            )
