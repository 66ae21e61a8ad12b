"""What will be read, decided from names, headers and configuration alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ingest.blocks import Block, find_blocks, no_attention, without_absent_stacks
from ingest.checkpoint import Checkpoint, TensorHeader
from ingest.family import NEUTRALISED, Norm, PieceName, Projections
from ingest.quantized import refuse_quantized, require_floating
from ingest.recognition import Recognition, Stack, recognise
from ingest.sizes import (
    Depth,
    HeadSizes,
    branch_multiplier,
    depth,
    head_sizes,
    layer_types,
    positive,
    scalar,
    without_heads,
)
from stats.errors import CheckpointError, shown

Operator = Literal["raw", "folded", "scaled"]
"""Weights as stored; with the norms multiplied in; with what multiplies the branch outside as well."""

GAINS = ("feeding_norm", "source_norm", "branch_norm")
"""Roles of the norm gains that only folding reads."""

BRANCH_SCALE = "branch_scale"
"""Role of the vector that multiplies the branch outside, which only the scaled operator reads."""

BESIDE = (*GAINS, BRANCH_SCALE)
"""Roles that are no projection."""

QK_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "attn_q_norm", "q_ln")
"""Names, beside the projections, of a norm that queries pass within attention."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One block of attention: its sizes and the tensors that hold it.

    ``tensors`` maps a role (those of ``Projections.roles``, and of ``BESIDE`` where they are to be
    multiplied in) to a tensor name. ``pruned`` lists heads the checkpoint has removed; the other sizes
    count them. ``pieces`` names what lies between a token and a head's output besides ``T``, and
    ``multiplier`` what the branch is multiplied with outside; ``layer_scale`` is the tensor of a
    vector that does the same, or of a number whose hyperbolic tangent does where ``gated``.
    """

    stack: str
    layer: int
    sizes: HeadSizes
    projections: Projections
    tensors: Mapping[str, str]
    feeding: Norm | None
    branch: Norm | None
    source: Norm | None = None
    two_spaces: bool = False
    pruned: tuple[int, ...] = ()
    pieces: tuple[PieceName, ...] = ()
    value_scale: float = 1.0
    multiplier: float = 1.0
    layer_scale: str | None = None
    gated: bool = False

    @property
    def n_heads(self) -> int:
        """Query heads, pruned ones included."""
        return self.sizes.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads, pruned ones included."""
        return self.sizes.n_kv_heads

    @property
    def d_model(self) -> int:
        """Width of the stream that heads write to."""
        return self.sizes.d_model

    @property
    def d_head(self) -> int:
        """Width of a head's value."""
        return self.sizes.d_head

    @property
    def stored_heads(self) -> int:
        """Query heads the file holds."""
        return self.n_heads - len(self.pruned)

    @property
    def stored_kv_heads(self) -> int:
        """Key/value heads the file holds; one that several heads share is never removed."""
        return self.n_kv_heads if self.n_kv_heads < self.n_heads else self.stored_heads

    @property
    def neutralised(self) -> tuple[PieceName, ...]:
        """The pieces that ``T`` leaves out."""
        return tuple(piece for piece in self.pieces if piece in NEUTRALISED)

    @property
    def numel(self) -> int:
        """Values of the layer's four projections as they are measured."""
        sizes = self.sizes
        reading = sizes.n_kv_heads * (sizes.d_key + sizes.d_head) * sizes.d_source
        return sizes.n_heads * (sizes.d_key + sizes.d_head) * sizes.d_model + reading


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
    recognition: Recognition
    operators: tuple[Operator, ...]
    layers: tuple[LayerPlan, ...]
    skipped: tuple[SkippedLayer, ...]
    ignored_prefixes: tuple[str, ...]

    @property
    def family(self) -> str:
        """The family rows that were used, joined by ``+``."""
        return "+".join(dict.fromkeys(stack.family.model_type for stack in self.recognition.stacks))

    @property
    def architecture(self) -> str | None:
        """What the configuration calls the model's class, as a text that can be stored and printed."""
        named = self.checkpoint.config.get("model_type")
        return None if named is None else shown(str(named))

    @cached_property
    def tensors(self) -> tuple[TensorHeader, ...]:
        """Headers of every tensor that will be read, each once, in reading order."""
        names = dict.fromkeys(name for layer in self.layers for name in layer.tensors.values())
        return tuple(self.checkpoint.header(name) for name in names)

    @property
    def bytes_to_read(self) -> int:
        """Stored size of those tensors and of what is read beside them; what an ingest records as ``bytes_read``."""
        beside = (name for tensor in self.tensors for name in self.checkpoint.companions(tensor.name))
        names = dict.fromkeys([*(tensor.name for tensor in self.tensors), *beside])
        return sum(self.checkpoint.header(name).nbytes for name in names)

    @property
    def source_dtype(self) -> str:
        """Storage types of the projections, joined by ``+``."""
        gains = {name for layer in self.layers for role, name in layer.tensors.items() if role in BESIDE}
        return "+".join(sorted({tensor.dtype for tensor in self.tensors if tensor.name not in gains}))


def plan_checkpoint(
    checkpoint: Checkpoint, operators: Sequence[Operator] = ("raw",), family: str | None = None
) -> Plan:
    """Decide what to read.

    Args:
        checkpoint: an open checkpoint.
        operators: operator variants; ``folded`` adds the norm gains, ``scaled`` also layer scales.
        family: a ``model_type`` to assume, for a configuration that lacks one.

    Raises:
        CheckpointError: unknown family, quantised weights, no attention found, shapes that
            contradict the configuration, or a folded or scaled operator the architecture does not have.
    """
    recognition = without_absent_stacks(checkpoint, recognise(checkpoint, family))
    for stack in recognition.stacks:
        refuse_quantized(checkpoint, stack.config)
    if "folded" in operators and not any(stack.family.can_fold for stack in recognition.stacks):
        raise CheckpointError(
            f"{recognition.stacks[0].family.model_type} has no folded operator",
            where=checkpoint.source,
            expected="a norm in front of attention, or a gain on its output",
            found="a norm after the residual sum"
            if recognition.stacks[0].norms_known
            else "a family of unknown norms: what theirs multiplies with cannot be told from names and shapes",
            remedy="use --operator raw",
        )
    layers: list[LayerPlan] = []
    skipped: list[SkippedLayer] = []
    ignored: dict[str, str] = {}
    own: set[str] = set()
    for stack in recognition.stacks:
        planned = _plan_stack(checkpoint, stack, operators)
        layers += planned.layers
        skipped += planned.skipped
        ignored |= {prefix + stack.family.block: prefix for prefix in planned.ignored}
        own.add(planned.prefix + stack.family.block)
    if "scaled" in operators and all(layer.multiplier == 1 and layer.layer_scale is None for layer in layers):
        raise CheckpointError(
            f"{recognition.stacks[0].family.model_type} has no scaled operator",
            where=checkpoint.source,
            expected="a number or a vector that multiplies what attention writes, outside its module",
            found="none" if all(stack.norms_known for stack in recognition.stacks) else "a family read by its shapes",
            remedy="use --operator raw or folded",
        )
    left_aside = sorted({prefix for path, prefix in ignored.items() if path not in own})
    return Plan(checkpoint, recognition, tuple(operators), tuple(layers), tuple(skipped), tuple(left_aside))


@dataclass(frozen=True, slots=True)
class _PlannedStack:
    layers: list[LayerPlan]
    skipped: list[SkippedLayer]
    prefix: str
    ignored: list[str]


def _plan_stack(checkpoint: Checkpoint, stack: Stack, operators: Sequence[Operator]) -> _PlannedStack:
    stack = _as_spelled(checkpoint, stack)
    extent = depth(checkpoint, stack)
    types = layer_types(stack.config)
    borrowing = _borrowing_layers(checkpoint, stack, extent)
    headless = without_heads(stack, extent.blocks)
    blocks, ignored = find_blocks(checkpoint, stack, extent.inner, types, {*borrowing, *headless})
    layers, skipped = [], []
    for number in range(extent.blocks):
        if number in borrowing:
            skipped.append(SkippedLayer(stack.name, number, "reads keys and values of an earlier layer"))
        elif number in headless:
            skipped.append(SkippedLayer(stack.name, number, "the configuration gives the layer no heads"))
        elif number not in blocks:
            called = f" ({shown(types[number])[:100]})" if number < len(types) else ""
            skipped.append(SkippedLayer(stack.name, number, f"no attention tensors in the checkpoint{called}"))
        else:
            sizes = head_sizes(checkpoint, stack, blocks[number].projections, number)
            layers.append(_plan_layer(checkpoint, stack, extent, number, blocks[number], sizes, operators))
    skipped += [
        SkippedLayer(stack.name, number, f"beyond the {extent.blocks} layers of the configuration")
        for number in sorted(blocks)
        if number >= extent.blocks
    ]
    if not layers:
        raise no_attention(checkpoint, stack.family)
    return _PlannedStack(layers, skipped, next(iter(blocks.values())).prefix, ignored)


def _as_spelled(checkpoint: Checkpoint, stack: Stack) -> Stack:
    """The stack with its blocks named as the checkpoint names them."""
    other = stack.family.other_block
    first = other.format(layer=0, inner=0)
    if other and any(f".{first}" in f".{name}" for name in checkpoint.location):
        return replace(stack, family=replace(stack.family, block=other))
    return stack


def _borrowing_layers(checkpoint: Checkpoint, stack: Stack, extent: Depth) -> range:
    """Layers at the end that use the keys and values of earlier ones."""
    key = stack.family.shared_layers
    shared = stack.family.setting(stack.config, key) if key else 0
    if not shared:
        return range(0)
    return range(extent.blocks - positive(checkpoint, [key], shared, extent.blocks), extent.blocks)


def _plan_layer(
    checkpoint: Checkpoint,
    stack: Stack,
    extent: Depth,
    number: int,
    block: Block,
    sizes: HeadSizes,
    operators: Sequence[Operator],
) -> LayerPlan:
    family = stack.family
    tensors = {role: f"{block.name(name)}.weight" for role, name in block.projections.roles.items()}
    feeding = family.feeding if family.feeding is not None and number >= family.feeding.first_layer else None
    if not {"folded", "scaled"}.isdisjoint(operators):
        for role, norm in zip(GAINS, (feeding, family.source, family.branch), strict=True):
            names = norm.names(block.prefix, block.path, block.layer, block.inner) if norm is not None else []
            if names:
                tensors[role] = next((name for name in names if name in checkpoint), names[0])
    multiplier, scale = family.multiplier, None
    if multiplier is not None and multiplier.gain and block.name(multiplier.gain) in checkpoint:
        scale = block.name(multiplier.gain)
        if "scaled" in operators:
            tensors[BRANCH_SCALE] = scale
    plan = LayerPlan(
        stack.name,
        number,
        sizes,
        block.projections,
        tensors,
        feeding,
        family.branch,
        family.source,
        family.two_spaces,
        _pruned(checkpoint, stack.config, number, sizes.n_heads),
        _pieces(checkpoint, stack, block),
        scalar(checkpoint, stack, family.value_scale),
        branch_multiplier(checkpoint, stack, multiplier, extent.layers),
        scale,
        multiplier is not None and multiplier.gated,
    )
    _check_tensors(checkpoint, plan)
    return plan


def _pieces(checkpoint: Checkpoint, stack: Stack, block: Block) -> tuple[PieceName, ...]:
    """What lies between tokens and the head's output besides matrices, by name."""
    found: list[PieceName] = []
    for piece in stack.family.pieces:
        there = not piece.tensor or block.name(piece.tensor) in checkpoint
        if piece.setting:
            there = there and bool(stack.family.setting(stack.config, piece.setting))
        by_layer = stack.config.get(piece.layer_setting)
        if isinstance(by_layer, list) and block.layer < len(by_layer):
            there = there and bool(by_layer[block.layer])
        elif piece.layer_interval:
            interval = stack.family.setting(stack.config, piece.layer_interval)
            interval = positive(checkpoint, [piece.layer_interval], interval)
            there = there and (block.layer + 1) % interval != 0
        if there:
            found.append(piece.name)
    if block.projections.latent is not None:
        found.append("latent_norm")
    if block.projections.gated_query:
        found.append("output_gate")
    beside = block.name(block.projections.output).rpartition(".")[0]
    endings = ("weight", "norms.0.weight")
    names = (f"{beside}.{norm}.{ending}" for norm in QK_NORMS for ending in endings)
    if any(name in checkpoint for name in names):
        found.append("qk_norm")
    return tuple(dict.fromkeys(found))


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
    sizes, heads, kv_heads = plan.sizes, plan.stored_heads, plan.stored_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "query": (heads * sizes.d_key * (2 if plan.projections.gated_query else 1), sizes.d_model),
        "key": (kv_heads * sizes.d_key, sizes.d_source),
        "value": (kv_heads * sizes.d_head, sizes.d_source),
        "fused": ((heads + kv_heads) * sizes.d_key + kv_heads * sizes.d_head, sizes.d_model),
        "output": (sizes.d_model, heads * sizes.d_head),
    }
    if plan.projections.transposed:
        shapes = {role: shape[::-1] for role, shape in shapes.items()}
    if sizes.latent is not None:
        latent = sizes.latent
        shapes |= {
            "latent_down": (latent.rank + latent.rope, sizes.d_source),
            "latent_gain": (latent.rank,),
            "latent_up": (heads * (latent.nope + sizes.d_head), latent.rank),
            "key_up": (heads, latent.rank, latent.nope),
            "value_up": (heads, sizes.d_head, latent.rank),
            "query_down": (latent.query_rank, sizes.d_model),
            "query_gain": (latent.query_rank,),
            "query_up": (heads * sizes.d_key, latent.query_rank),
        }
    return shapes | {
        "feeding_norm": (sizes.d_model,),
        "branch_norm": (sizes.d_model,),
        "source_norm": (sizes.d_source,),
        BRANCH_SCALE: (1,) if plan.gated else (sizes.d_model,),
    }


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
