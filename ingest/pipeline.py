"""The measuring pipeline: layers are read, hashed and measured, a few at a time, in order.

On the CPU every layer is measured by one thread and several layers at once. That uses the cores
better than threads inside small batched decompositions, and it makes each number independent of
how many cores there are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ingest.factors import LayerDigests, head_factors, layer_digests, read_weights
from ingest.plan import LayerPlan, Operator, Plan
from stats.errors import HeadatlasError
from stats.factorization import RANK_CUT
from stats.layer import REASON_CODE, measure_layer

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING = 3
"""Layers submitted per worker: one being measured, the others queued or waiting to be stored."""

WORKING_COPIES = 5
"""Copies of a layer's projections in the compute dtype alive at the peak: 3.3 at 8B size, with a margin."""


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Where and how precisely to compute; recorded with every model."""

    device: str = "auto"
    dtype: str = "float64"
    workers: int | None = None
    keep_factors: bool = False

    def resolve_device(self) -> torch.device:
        """The device to use: with ``auto`` a CUDA device when there is one.

        Raises:
            HeadatlasError: an unknown device, one that is not there, or one without float64.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, dtype=torch.float64, device=device)
        except (RuntimeError, TypeError, AssertionError, ValueError) as error:
            raise HeadatlasError(
                "the device cannot be used",
                where=f"--device {self.device}",
                expected="a device with float64, such as cpu or cuda",
                found=str(error).splitlines()[0],
                remedy="use --device cpu",
            ) from error
        return device

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tall products; small matrices are always float64."""
        return {"float64": torch.float64, "float32": torch.float32}[self.dtype]

    @property
    def rank_cut(self) -> float:
        """The numerical rank's cut that goes with the dtype."""
        return RANK_CUT[self.torch_dtype]


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """Everything about one layer: arrays by operator and name, and digests of its weights.

    Arrays have ``head`` (or ``head, head`` for pairs) as leading axes; ``kv_head`` (head,).
    """

    plan: LayerPlan
    kv_head: np.ndarray
    arrays: dict[Operator, dict[str, np.ndarray]]
    digests: LayerDigests


def hash_layers(plan: Plan) -> Iterator[LayerDigests]:
    """Digests of every layer, in order, with no linear algebra."""
    cpu = torch.device("cpu")

    def work(layer: LayerPlan) -> LayerDigests:
        return layer_digests(read_weights(plan.checkpoint, layer), layer, plan.operators)

    yield from in_order(plan.layers, work, _workers(plan, cpu, 8))


def measure(plan: Plan, settings: ComputeSettings) -> Iterator[LayerMeasurement]:
    """Measure every layer of a plan, in order; each tensor is read once."""
    device = settings.resolve_device()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    dtype, rank_cut = settings.torch_dtype, settings.rank_cut

    def work(layer: LayerPlan) -> LayerMeasurement:
        weights = read_weights(plan.checkpoint, layer)
        digests = layer_digests(weights, layer, plan.operators)
        arrays: dict[Operator, dict[str, np.ndarray]] = {}
        for operator in plan.operators:
            factors = head_factors(weights, layer, operator, device, dtype)
            kv_head = factors.kv_head.cpu().numpy()
            measured = measure_layer(
                factors.output,
                factors.value,
                factors.query,
                factors.key,
                factors.kv_head,
                rank_cut,
                two_spaces=layer.two_spaces,
                keep_bases=settings.keep_factors,
            )
            del factors
            for head in layer.pruned:
                measured["reason"][head] = REASON_CODE["pruned"]
            arrays[operator] = {name: tensor.cpu().numpy() for name, tensor in measured.items()}
        return LayerMeasurement(layer, kv_head, arrays, digests)

    workers = settings.workers or _workers(plan, device, dtype.itemsize)
    yield from in_order(plan.layers, work, workers)


def _workers(plan: Plan, device: torch.device, item_size: int) -> int:
    """Layers in flight: one per core, as far as half the available memory goes; two on a GPU."""
    if device.type != "cpu":
        return 2
    per_layer = max(layer.numel for layer in plan.layers) * item_size * WORKING_COPIES
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**32
    return max(1, min(cores(), len(plan.layers), available // 2 // max(1, per_layer)))


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(items: Sequence[Item], work: Callable[[Item], Result], workers: int) -> Iterator[Result]:
    """Results of ``work`` in the order of ``items``, ``workers`` at once.

    A few results may wait for the consumer, so that no worker waits while it writes. Each worker
    thread computes with one thread. When the consumer stops early, pending work is dropped and the
    thread setting of the process is restored.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            if len(pending) == WAITING * workers:
                yield pending.popleft().result()
            pending.append(pool.submit(work, item))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)
