"""Reading layers while the bytes of the next ones are on their way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType

from ingest.byte_ranges import Span
from ingest.checkpoint import Checkpoint
from ingest.factors import LayerWeights, read_weights
from ingest.plan import LayerPlan, Plan
from ingest.ranged_file import RangedFile

MOST_LAYERS = 4
"""Layers fetched ahead of those being measured."""


class ReadAhead:
    """Reads the layers of a plan in about their order; of a local checkpoint nothing is read ahead.

    As a context, it abandons at its end what is still on its way.
    """

    def __init__(self, plan: Plan, workers: int) -> None:
        self._checkpoint = plan.checkpoint
        self._layers = plan.layers
        self._number = {id(layer): number for number, layer in enumerate(plan.layers)}
        self._ahead = min(workers, MOST_LAYERS)
        self._lock = threading.Lock()
        self._asked = 0
        self._files: set[RangedFile] = set()

    def __enter__(self) -> ReadAhead:
        if self._checkpoint.transfers:
            expected = _spans(self._checkpoint, self._layers)
            self._files = set(expected)
            for file, spans in expected.items():
                file.expect(spans)
        return self

    def read(self, layer: LayerPlan) -> LayerWeights:
        """Weights of one layer, also of one that was not expected."""
        if self._files and id(layer) in self._number:
            self._fetch_until(self._number[id(layer)] + 1 + self._ahead)
        return read_weights(self._checkpoint, layer)

    def _fetch_until(self, number: int) -> None:
        """Have every layer before a number on its way, each once."""
        with self._lock:
            for layer in self._layers[self._asked : number]:
                for file, spans in _spans(self._checkpoint, [layer]).items():
                    file.prefetch(spans)
            self._asked = max(self._asked, number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for transfers in self._checkpoint.transfers:
            transfers.stop()
        for file in self._files:
            file.forget_ahead()


def _spans(checkpoint: Checkpoint, layers: Iterable[LayerPlan]) -> Mapping[RangedFile, list[Span]]:
    """Where the tensors of layers lie in remote files, and what is read beside them."""
    spans: dict[RangedFile, list[Span]] = {}
    names = dict.fromkeys(name for layer in layers for name in layer.tensors.values())
    beside = [companion for name in names for companion in checkpoint.companions(name)]
    for name in dict.fromkeys([*names, *beside]):
        place = checkpoint.place(name)
        file, first = place if place is not None else (None, 0)
        if isinstance(file, RangedFile):
            spans.setdefault(file, []).append(Span(first, first + checkpoint.header(name).nbytes))
    return spans
