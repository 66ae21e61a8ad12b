"""An ingest in units: a part of a checkpoint's layers that any process on any machine can measure.

A unit opens the checkpoint itself, measures its layers into the store's ``staging`` and returns a small
manifest. Layers that are there are not measured again, so a unit can be run twice, and a worker that dies
costs the layers it had not finished. Publishing is for one process.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.pipeline import ComputeSettings, measure
from ingest.plan import Operator, Plan, plan_checkpoint
from ingest.source import open_checkpoint
from stats.errors import StoreError
from store.atlas import AtlasStore
from store.measured_layers import MeasuredLayers

if TYPE_CHECKING:
    from ingest.plan import LayerPlan

UNITS_PER_WORKER = 4
"""Units a worker gets in all: a lost one costs little, and the last ones end at about the same time."""

MOST_TRIES = 3
"""Pools that are started before an ingest is said to fail: each goes on from what the last one measured."""

CONNECT_SECONDS = 20.0
"""How long a scheduler has to answer."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint as a command names it, for processes that open it themselves."""

    model: str
    operators: tuple[Operator, ...]
    config: Path | None = None
    family: str | None = None
    base: str | None = None

    def plan(self) -> Plan:
        """Open the checkpoint and plan it; headers only."""
        return plan_checkpoint(open_checkpoint(self.model, self.config, self.base), self.operators, self.family)


@dataclass(frozen=True, slots=True)
class Unit:
    """Part ``number`` of ``count`` of an ingest, in the order of layers, from 1."""

    store: Path
    source: Source
    model: str
    settings: ComputeSettings
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class UnitManifest:
    """What a unit did: how many layers it has, how many of them it measured, and where."""

    number: int
    layers: int
    measured: int
    seconds: float
    host: str
    process: int
    device: str


def part_of(layers: tuple[LayerPlan, ...], number: int, count: int) -> tuple[LayerPlan, ...]:
    """Part ``number`` (from 1) of ``count`` parts of almost the same length."""
    first, last = (len(layers) * edge // count for edge in (number - 1, number))
    return layers[first:last]


def run_unit(unit: Unit) -> UnitManifest:
    """Measure the layers of one unit that are not there.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        StoreError: the store cannot be written.
    """
    started = time.perf_counter()
    store = AtlasStore.open_or_create(unit.store)
    plan = unit.source.plan()
    kept = MeasuredLayers(store, plan, unit.model, unit.settings)
    layers = part_of(plan.layers, unit.number, unit.count)
    with store.writing("run the unit again"), kept.in_use():
        absent = len(kept.missing(layers))
        if layers:
            with closing(measure(replace(plan, layers=layers), unit.settings, kept)) as measurements:
                for _ in measurements:
                    pass
    seconds = time.perf_counter() - started
    return UnitManifest(
        unit.number, len(layers), absent, seconds, socket.gethostname(), os.getpid(), unit.settings.device_name
    )


Done = Callable[[UnitManifest], None]
"""Called with the manifest of every unit that has ended."""


@dataclass(frozen=True, slots=True)
class WorkersElsewhere:
    """Measures a plan's layers in worker processes of this machine, or on a Dask cluster where it has an address."""

    source: Source
    settings: ComputeSettings
    model: str
    store: Path
    workers: int
    cluster: str | None = None

    def __call__(self, plan: Plan, measured: MeasuredLayers, progress: Callable[[str, int, int], None]) -> None:
        """Run what is missing as units; ``plan`` may have fewer operators than were asked for.

        Raises:
            StoreError: workers die again and again, no scheduler answers, or one goes away.
            HeadatlasError: what a unit raised.
        """
        if measured.trusted and not measured.missing(plan.layers):
            return
        source = replace(self.source, operators=plan.operators)
        count = max(1, min(len(plan.layers), self.workers * UNITS_PER_WORKER))
        units = [Unit(self.store, source, self.model, self.settings, number, count) for number in range(1, count + 1)]
        there = 0

        def done(manifest: UnitManifest) -> None:
            nonlocal there
            there += manifest.layers
            progress("measuring in units", there, len(plan.layers))

        progress("measuring in units", 0, len(plan.layers))
        if self.cluster is not None:
            run_on_cluster(units, self.cluster, done)
        else:
            run_in_processes(units, self.workers, done)


def run_in_processes(units: Sequence[Unit], workers: int, done: Done) -> None:
    """Run units in worker processes of this machine.

    A worker that dies takes the others of its pool with it; what they had not finished is given to a
    new pool.

    Raises:
        StoreError: workers die again and again.
        HeadatlasError: what a unit raised.
    """
    left = list(units)
    for _ in range(MOST_TRIES):
        left = _run_in_pool(left, workers, done)
        if not left:
            return
    raise StoreError(
        "worker processes die while they measure",
        where=f"{units[0].source.model}, unit {left[0].number} of {left[0].count}",
        expected=f"an end within {MOST_TRIES} tries",
        found="a process that was killed, or ran out of memory",
        remedy="use fewer --workers if memory is short; what was measured is kept",
    )


def _run_in_pool(units: Sequence[Unit], workers: int, done: Done) -> list[Unit]:
    """Run units; returns those that a dead worker left."""
    ended = set()
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    with (
        closing(reader),
        closing(writer),
        ProcessPoolExecutor(min(workers, len(units)), context, end_with_coordinator, (reader,)) as pool,
    ):
        futures = [pool.submit(run_unit, unit) for unit in units]
        try:
            for future in as_completed(futures):
                manifest = future.result()
                ended.add(manifest.number)
                done(manifest)
        except BrokenProcessPool:
            return [unit for unit in units if unit.number not in ended]
        except BaseException:
            writer.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return []


def end_with_coordinator(pipe: Connection) -> None:
    """End this worker as soon as the other end of a pipe is closed, as it is when the coordinator is killed."""

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_on_cluster(units: Sequence[Unit], address: str, done: Done) -> None:
    """Run units on a Dask cluster whose workers see the store and the checkpoint under the same paths.

    A unit whose worker dies is given to another one.

    Raises:
        StoreError: no scheduler there, it goes away, or workers die again and again.
        HeadatlasError: what a unit raised.
    """
    try:
        from distributed import Client, KilledWorker
        from distributed import as_completed as completed
    except ImportError as error:
        raise StoreError(
            "dask is not installed",
            where=f"--cluster {address}",
            remedy="install it with: pip install 'headatlas[dask]'",
        ) from error
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise StoreError(
            "no scheduler answers",
            where=f"--cluster {address}",
            expected="the address of a Dask scheduler, such as tcp://host:8786",
            found=f"{type(error).__name__}: {error}",
            remedy="start one, or leave --cluster out",
        ) from error
    try:
        with _unlogged("distributed.client"):
            for future in completed(client.map(run_unit, units, pure=False), loop=client.loop):
                done(future.result())
    except KilledWorker as error:
        raise StoreError(
            "workers of the cluster die while they measure",
            where=f"--cluster {address}",
            found=str(error),
            remedy="give the workers more memory; what was measured is kept",
        ) from error
    except (CancelledError, OSError) as error:
        raise StoreError(
            "the scheduler went away",
            where=f"--cluster {address}",
            found=f"{type(error).__name__}: {error}".splitlines()[0],
            remedy="start it again and repeat the command: what was measured is kept",
        ) from error
    finally:
        with _unlogged("distributed.client"):
            client.close(timeout=CONNECT_SECONDS)


@contextmanager
def _unlogged(name: str) -> Iterator[None]:
    """Keep a library from logging, traceback and all, what becomes an error of this program."""
    logger = logging.getLogger(name)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
