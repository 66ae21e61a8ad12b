"""A plan in words and rows, for people and for ``--format json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ingest.family import NEUTRALISED, Layout, Norm, NormKind, PieceName
from ingest.plan import LayerPlan, Plan
from ingest.recognition import Stack

LAYOUTS: Mapping[Layout, str] = {
    "separate": "query, key and value each have a tensor",
    "concatenated": "one tensor has the rows of all queries, then all keys, then all values",
    "interleaved": "one tensor has the query, key and value rows of one head after another",
    "grouped": "one tensor has, for each key/value head, its queries, its key and its value",
    "four_blocks": "one tensor has four blocks, each of queries, values and keys of a quarter of the heads",
    "latent": "keys and values are read through one narrow projection that all heads share",
}
"""What a layout means, in words."""

PIECE_WORDS: Mapping[PieceName, str] = {
    "output_gate": "each token multiplies what its heads read by a gate",
    "sinks": "attention weights sum to less than one",
    "latent_norm": "the narrow projection passes a norm, whose gain is in T and whose scale is not",
    "value_norm": "values pass a norm",
    "clamp": "queries, keys and values are clamped",
    "sub_norm": "what the heads read passes a norm in front of the output projection",
    "qk_norm": "queries and keys pass a norm before they meet",
}
"""What lies between a token and a head's output besides matrices, in words."""

NORM_KINDS: Mapping[NormKind, str] = {
    "rms": "RMSNorm, gain w",
    "rms_plus_one": "RMSNorm, gain 1 + w",
    "layer": "LayerNorm, gain w, mean removed",
    "layer_plus_one": "LayerNorm, gain 1 + w, mean removed",
}
"""What folding a norm multiplies with, in words."""


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What was recognised and what would be read, as plain values; ``stacks`` has an entry for each stack."""
    layers, checkpoint = plan.layers, plan.checkpoint
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "format": checkpoint.format,
        "architecture": plan.architecture,
        "family": plan.family,
        "recognised_by": plan.recognition.by,
        "notes": list(plan.recognition.notes),
        "operators": ", ".join(plan.operators),
        "layers": len(layers),
        "heads": sum(layer.n_heads for layer in layers),
        "source_dtype": plan.source_dtype,
        "tensors": len(plan.tensors),
        "bytes_to_read": plan.bytes_to_read,
        "ignored_prefixes": list(plan.ignored_prefixes),
        "stacks": [_stack_summary(plan, stack) for stack in plan.recognition.stacks],
    }


def _stack_summary(plan: Plan, stack: Stack) -> dict[str, Any]:
    """One stack: which layers have attention, its sizes, and what surrounds its heads."""
    layers = [layer for layer in plan.layers if layer.stack == stack.name]
    headers = [plan.checkpoint.header(name) for name in dict.fromkeys(_names(layers))]
    two_spaces = any(layer.two_spaces for layer in layers)
    return {
        "stack": stack.name,
        "family": stack.family.model_type,
        "layers_with_attention": _numbers(layer.layer for layer in layers),
        "layers_without": _without_attention(plan, stack),
        "heads_per_layer": _values(layer.n_heads for layer in layers),
        "kv_heads_per_layer": _values(layer.n_kv_heads for layer in layers),
        "pruned": [f"layer {layer.layer}: heads {_numbers(layer.pruned)}" for layer in layers if layer.pruned],
        "d_model": _values(layer.d_model for layer in layers),
        "d_source": _values(layer.sizes.d_source for layer in layers) if two_spaces else None,
        "d_head": _values(layer.d_head for layer in layers),
        "d_key": _values(layer.sizes.d_key for layer in layers),
        "layout": [f"{layout}: {LAYOUTS[layout]}" for layout in dict.fromkeys(_layouts(layers))],
        "tensors": len(headers),
        "bytes_to_read": sum(header.nbytes for header in headers),
        "dtypes": ", ".join(sorted({header.dtype for header in headers})),
        "between_token_and_output": _pieces(layers),
        "multiplier": _multipliers(layers),
        "folded": _folded(stack, layers),
    }


def _names(layers: Iterable[LayerPlan]) -> Iterable[str]:
    return (name for layer in layers for name in layer.tensors.values())


def _layouts(layers: Iterable[LayerPlan]) -> Iterable[Layout]:
    return ("latent" if layer.projections.latent else layer.projections.layout for layer in layers)


def _values(values: Iterable[int]) -> int | str:
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else ", ".join(map(str, distinct))


def _numbers(numbers: Iterable[int]) -> str:
    """Numbers in order, runs shortened: ``0-11, 13``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _without_attention(plan: Plan, stack: Stack) -> list[str]:
    """Layers that are skipped, by reason."""
    by_reason: dict[str, list[int]] = {}
    for item in plan.skipped:
        if item.stack == stack.name:
            by_reason.setdefault(item.reason, []).append(item.layer)
    return [f"{_numbers(numbers)}: {reason}" for reason, numbers in by_reason.items()]


def _pieces(layers: Iterable[LayerPlan]) -> list[str]:
    by_piece: dict[PieceName, list[int]] = {}
    layers = list(layers)
    for layer in layers:
        for piece in layer.pieces:
            by_piece.setdefault(piece, []).append(layer.layer)
    lines = []
    for piece, numbers in by_piece.items():
        where = "" if len(numbers) == len(layers) else f" (layers {_numbers(numbers)})"
        left_out = "; left out of T" if piece in NEUTRALISED else "; T is the same without"
        lines.append(f"{piece}: {PIECE_WORDS[piece]}{left_out}{where}")
    return lines


def _multipliers(layers: Iterable[LayerPlan]) -> list[str]:
    """What values and the branch are multiplied with."""
    lines = [f"values times {layer.value_scale:g}, in T" for layer in layers if layer.value_scale != 1]
    lines += [
        f"the branch times {layer.multiplier:g}, in T only where scaled" for layer in layers if layer.multiplier != 1
    ]
    scales = [layer.layer_scale for layer in layers if layer.layer_scale is not None]
    if scales:
        lines.append(f"the branch is scaled by {scales[0]} and its like; in T only where scaled")
    return list(dict.fromkeys(lines))


def _folded(stack: Stack, layers: list[LayerPlan]) -> list[str]:
    """What the folded operator multiplies into which factor."""
    family = stack.family
    if not stack.norms_known:
        return ["not possible: the norms of the family are not known"]
    fed = "queries" if family.two_spaces else "queries, keys and values"
    lines = []
    if family.feeding is not None:
        numbers = [layer.layer for layer in layers if layer.feeding is not None]
        where = "" if len(numbers) == len(layers) else f" (layers {_numbers(numbers)})"
        lines.append(f"{_norm_words(family.feeding)} in front of attention, into {fed}{where}")
    if family.source is not None:
        lines.append(f"{_norm_words(family.source)} on what keys and values read, into keys and values")
    if family.branch is not None:
        lines.append(f"{_norm_words(family.branch)} on what attention writes, into outputs")
    return lines or ["nothing: attention reads and writes the residual stream through no norm of its own"]


def _norm_words(norm: Norm) -> str:
    names = " or ".join(name for name in (norm.tensor, norm.other_tensor) if name)
    kind = NORM_KINDS[norm.kind]
    return f"{names} ({kind})" if names else f"{kind.split(',')[0]} without a gain"


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per tensor that would be read, in reading order."""
    rows = []
    for layer in plan.layers:
        for role, name in layer.tensors.items():
            header = plan.checkpoint.header(name)
            rows.append(
                {
                    "stack": layer.stack,
                    "layer": layer.layer,
                    "role": role,
                    "tensor": name,
                    "shape": list(header.shape),
                    "dtype": header.dtype,
                    "bytes": header.nbytes,
                    "file": header.file,
                }
            )
    return rows
