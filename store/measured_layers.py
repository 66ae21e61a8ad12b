"""Measured layers of an ingest that has not ended, one file each, so that it can go on where it stopped.

A file is written under a partial name and renamed, so it is whole or not there; the checks that the
format has on every array find what a disk damaged later.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ingest.factors import LayerDigests
from ingest.pipeline import LayerMeasurement
from stats.errors import StoreError
from store.locking import LOOK_SECONDS, Holder, Lock
from store.unfinished import FACTS, IN_USE, SUFFIX
from store.version import numerical_libraries, tool_version
from store.whole_files import written_whole

if TYPE_CHECKING:
    from ingest.pipeline import ComputeSettings
    from ingest.plan import LayerPlan, Operator, Plan
    from store.atlas import AtlasStore


class MeasuredLayers:
    """The measured layers of one ingest, on disk below the store's ``staging``.

    The directory's name follows from everything that decides the numbers, apart from the weights'
    values: the same command finds it again, on any machine that shares the store.
    """

    def __init__(self, store: AtlasStore, plan: Plan, model: str, settings: ComputeSettings) -> None:
        self._plan = plan
        self._model = model
        self.directory = store.staging_path / f"ingest-{_key(plan, model, settings)}"
        self.device = settings.device_name
        self.trusted = plan.checkpoint.commit is not None
        """Whether layers found here are known to be those of the checkpoint without reading it again."""
        self.devices: set[str] = set()
        """Devices of the layers recalled or kept so far."""

    def begin(self) -> None:
        """Make the directory, or find it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        facts = self.directory / FACTS
        if not facts.exists():
            source, layers = self._plan.checkpoint.source, len(self._plan.layers)
            started = datetime.now(UTC).isoformat(timespec="seconds")
            known = {"model": self._model, "source": source, "layers": layers, "started": started}
            with written_whole(facts) as partial:
                partial.write_text(json.dumps(known), encoding="utf-8")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Exclusive use, for the process that publishes. What was measured stays if it fails.

        Raises:
            StoreError: another process is at the same ingest.
        """
        lock = Lock(self.directory / "lock")
        with self.in_use():
            if not lock.acquire():
                raise StoreError(
                    f"another process is ingesting {self._model!r}",
                    where=str(self.directory),
                    found=str(Holder.of(lock.path) or "another process"),
                    remedy="wait until it has ended, then try again",
                )
            try:
                for leftover in self.directory.glob("arrays-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                yield
            finally:
                if not any(self.directory.glob(f"*{SUFFIX}")):
                    self.discard()
                lock.release()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Tell others that this process writes here; several may at once."""
        shared = Lock(self.directory / IN_USE)
        while True:
            self.begin()
            try:
                if shared.acquire(shared=True):
                    break
            except FileNotFoundError:
                continue
            time.sleep(LOOK_SECONDS)
        try:
            yield
        finally:
            shared.release()

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh directory for the arrays that are published, removed afterwards whatever happens."""
        directory = self.directory / f"arrays-{uuid.uuid4().hex}"
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def discard(self) -> None:
        """Delete everything that was measured."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def missing(self, layers: Sequence[LayerPlan]) -> list[LayerPlan]:
        """Layers that are not there."""
        return [layer for layer in layers if not self._path(layer).exists()]

    def recall(self, layer: LayerPlan) -> LayerMeasurement | None:
        """A layer measured before; None if it is not there, or not whole."""
        path = self._path(layer)
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                read = {name: stored[name] for name in stored.files}
            arrays: dict[Operator, dict[str, np.ndarray]] = {operator: {} for operator in self._plan.operators}
            gains: dict[Operator, bytes] = {}
            for name, array in read.items():
                kind, _, rest = name.partition("/")
                for operator in self._plan.operators:
                    if kind == operator:
                        arrays[operator][rest] = array
                    elif name == f"gain/{operator}":
                        gains[operator] = array.tobytes()
            digests = LayerDigests(read["content"].tobytes(), read["query_key"].tobytes(), gains)
            self.devices.add(str(read["device"]))
            return LayerMeasurement(layer, read["kv_head"], arrays, digests)
        except FileNotFoundError:
            return None
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            path.unlink(missing_ok=True)
            return None

    def keep(self, measurement: LayerMeasurement) -> None:
        """Write a layer to its file."""
        digests = measurement.digests
        named: dict[str, Any] = {
            f"{operator}/{name}": array
            for operator, arrays in measurement.arrays.items()
            for name, array in arrays.items()
        }
        named |= {f"gain/{operator}": _bytes(gain) for operator, gain in digests.gains.items()}
        named |= {"content": _bytes(digests.content), "query_key": _bytes(digests.query_key)}
        named |= {"kv_head": measurement.kv_head, "device": np.array(self.device)}
        with written_whole(self._path(measurement.plan)) as partial, partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **named)
        self.devices.add(self.device)

    def _path(self, layer: LayerPlan) -> Path:
        return self.directory / f"{layer.stack}.{layer.layer}{SUFFIX}"


def _bytes(digest: bytes) -> np.ndarray:
    return np.frombuffer(digest, np.uint8)


def _key(plan: Plan, model: str, settings: ComputeSettings) -> str:
    """What an ingest is known by: SHA-256, shortened, of all that decides its numbers but the weights' values."""
    checkpoint = plan.checkpoint
    headers = [[tensor.name, tensor.shape, tensor.dtype] for tensor in plan.tensors]
    decisive = [
        model,
        checkpoint.revision,
        plan.family,
        plan.operators,
        [settings.device, settings.dtype, settings.keep_factors],
        [tool_version(), numerical_libraries()],
        headers,
        [repr(layer) for layer in plan.layers],
    ]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]
