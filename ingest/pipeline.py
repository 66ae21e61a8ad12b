"""The measuring pipeline: layers are read, hashed and measured, a few at a time, in order.

On the CPU every layer is measured by one thread and several layers at once. That uses the cores
better than threads inside small batched decompositions, and it makes each number independent of
how many cores there are.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch

from ingest.factors import LayerDigests, LayerWeights, head_factors, layer_digests
from ingest.plan import LayerPlan, Operator, Plan
from ingest.read_ahead import ReadAhead
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
    """Where and how precisely to compute; recorded with every model.

    ``threads`` is how many layers are measured at once in one process, and ``memory`` how many bytes
    the layers in flight may take; neither changes a number.
    """

    device: str = "auto"
    dtype: str = "float64"
    threads: int | None = None
    keep_factors: bool = False
    memory: int | None = None

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
    def device_name(self) -> str:
        """What the tall products run on, as it is recorded."""
        device = self.resolve_device()
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

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


class KeptLayers(Protocol):
    """Where measured layers are kept until all are there; used from several threads."""

    trusted: bool
    """Whether what is recalled is known to be the checkpoint's without comparing digests."""

    def missing(self, layers: Sequence[LayerPlan]) -> list[LayerPlan]:
        """Layers of which nothing is kept."""

    def recall(self, layer: LayerPlan) -> LayerMeasurement | None:
        """A layer measured before."""

    def keep(self, measurement: LayerMeasurement) -> None:
        """Keep a layer."""


def hash_layers(plan: Plan) -> Iterator[LayerDigests]:
    """Digests of every layer, in order, with no linear algebra."""
    workers = _at_once(plan, ComputeSettings(device="cpu"))
    ahead = ReadAhead(plan, workers)

    def work(layer: LayerPlan) -> LayerDigests:
        return layer_digests(ahead.read(layer), layer, plan.operators)

    with ahead:
        yield from in_order(plan.layers, work, workers)


def measure(plan: Plan, settings: ComputeSettings, kept: KeptLayers | None = None) -> Generator[LayerMeasurement]:
    """Measure every layer of a plan, in order; each tensor is read once.

    Layers that ``kept`` recalls are not measured again, where their digests are those of the weights.
    """
    device = settings.resolve_device()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    dtype, rank_cut = settings.torch_dtype, settings.rank_cut
    workers = _at_once(plan, settings)
    unread = kept.missing(plan.layers) if kept is not None and kept.trusted else plan.layers
    ahead = ReadAhead(replace(plan, layers=tuple(unread)), workers)
    own = threading.local()

    def work(layer: LayerPlan) -> LayerMeasurement:
        recalled = kept.recall(layer) if kept else None
        if recalled is not None and kept is not None and kept.trusted:
            return recalled
        weights = ahead.read(layer)
        digests = layer_digests(weights, layer, plan.operators)
        if recalled is not None and recalled.digests == digests:
            return recalled
        arrays: dict[Operator, dict[str, np.ndarray]] = {}
        with _stream(device, own):
            weights = _moved(weights, device)
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
        measurement = LayerMeasurement(layer, kv_head, arrays, digests)
        if kept is not None:
            kept.keep(measurement)
        return measurement

    with ahead:
        yield from in_order(plan.layers, work, workers)


def _stream(device: torch.device, own: threading.local) -> AbstractContextManager[object]:
    """A CUDA stream of the calling thread's own, so that one layer is moved while another is measured."""
    if device.type != "cuda":
        return nullcontext()
    if not hasattr(own, "stream"):
        own.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(own.stream)


def _moved(weights: LayerWeights, device: torch.device) -> LayerWeights:
    """Projections on a CUDA device in the checkpoint's dtype, from pinned memory; as they are on any other.

    They become the compute dtype there: copying them in it would move up to four times the bytes.
    """
    if device.type != "cuda":
        return weights
    w_q, w_k, w_v, w_o = (
        w.pin_memory().to(device, non_blocking=True) for w in (weights.w_q, weights.w_k, weights.w_v, weights.w_o)
    )
    return replace(weights, w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o)


def _at_once(plan: Plan, settings: ComputeSettings) -> int:
    """Layers in flight: one per core, two on a GPU, as far as the memory goes; without a budget, half of what is free.

    Raises:
        HeadatlasError: a single layer needs more than the budget.
    """
    per_layer = max(1, layer_memory(plan, settings))
    if settings.memory is not None and per_layer > settings.memory:
        raise HeadatlasError(
            "the memory budget is too small for one layer",
            where=f"--memory, {plan.checkpoint.source}",
            expected=f"at least {per_layer:,} bytes",
            found=f"{settings.memory:,} bytes",
            remedy="allow more, or compute in --dtype float32, which takes half",
        )
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**32
    device = settings.resolve_device()
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(device)[0])
    wanted = settings.threads or (cores() if device.type == "cpu" else 2)
    fitting = (settings.memory or free // 2) // per_layer
    if settings.threads and settings.memory is None:
        fitting = wanted
    return max(1, min(wanted, len(plan.layers), fitting))


def layer_memory(plan: Plan, settings: ComputeSettings) -> int:
    """Bytes that the largest layer takes while it is measured, estimated from its shapes."""
    return max(layer.numel for layer in plan.layers) * settings.torch_dtype.itemsize * WORKING_COPIES


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
