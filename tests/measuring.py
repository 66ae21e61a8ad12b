"""Planning and measuring what a path holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ingest.factors import head_factors, read_weights
from ingest.pipeline import ComputeSettings, measure
from ingest.plan import Operator, Plan, plan_checkpoint
from ingest.source import open_checkpoint

CPU = ComputeSettings(device="cpu")


def plan(path: Path, operators: tuple[Operator, ...] = ("raw",)) -> Plan:
    return plan_checkpoint(open_checkpoint(str(path)), operators)


def numbers(planned: Plan) -> dict[tuple[str, int, str, str], np.ndarray]:
    """Every measured array by stack, layer, operator and name."""
    return {
        (item.plan.stack, item.plan.layer, operator, name): array
        for item in measure(planned, CPU)
        for operator, arrays in item.arrays.items()
        for name, array in arrays.items()
    }


def operators_of(planned: Plan, operator: Operator = "raw", stack: str | None = None) -> list[tuple[Tensor, Tensor]]:
    """``O V^T`` and ``Q K^T`` (head, d_model, d_source) of every planned layer, or of those of one stack."""
    found = []
    for layer in planned.layers:
        if stack not in (None, layer.stack):
            continue
        weights = read_weights(planned.checkpoint, layer)
        factors = head_factors(weights, layer, operator, torch.device("cpu"), torch.float64)
        value, key = factors.value[factors.kv_head], factors.key[factors.kv_head]
        found.append((factors.output @ value.mT, factors.query @ key.mT))
    return found
