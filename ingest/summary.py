"""A plan in words and rows, for people and for ``--format json``."""

from __future__ import annotations

from typing import Any

from ingest.plan import LayerPlan, Plan


def _uniform(layers: tuple[LayerPlan, ...], name: str) -> int | str:
    values = sorted({getattr(layer, name) for layer in layers})
    return values[0] if len(values) == 1 else ", ".join(map(str, values))


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What was recognised and what would be read, as plain values."""
    layers, checkpoint = plan.layers, plan.checkpoint
    feeding, branch = layers[0].feeding, layers[0].branch
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "format": checkpoint.format,
        "architecture": checkpoint.config.get("model_type"),
        "family": plan.family,
        "recognised_by": plan.recognition.by,
        "notes": list(plan.recognition.notes),
        "stack": ", ".join(dict.fromkeys(layer.stack for layer in layers)),
        "operators": ", ".join(plan.operators),
        "layers": len(layers),
        "heads": sum(layer.n_heads for layer in layers),
        "heads_per_layer": _uniform(layers, "n_heads"),
        "kv_heads_per_layer": _uniform(layers, "n_kv_heads"),
        "d_model": _uniform(layers, "d_model"),
        "d_head": _uniform(layers, "d_head"),
        "layout": ", ".join(dict.fromkeys(layer.projections.layout for layer in layers)),
        "feeding_norm": f"{feeding.kind} {feeding.tensor}".strip() if feeding else None,
        "branch_norm": f"{branch.kind} {branch.tensor}".strip() if branch else None,
        "source_dtype": plan.source_dtype,
        "tensors": len(plan.tensors),
        "bytes_to_read": plan.bytes_to_read,
        "skipped": [f"{item.stack} layer {item.layer}: {item.reason}" for item in plan.skipped],
        "ignored_prefixes": list(plan.ignored_prefixes),
    }


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
