"""What is derived from stored spectra: scramble nulls and capacities, kept beside the operators.

A derivation is a unit of its own below the model's group, staged, sealed and published like an
operator. It is replaced whole; the weights are never needed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import torch
import zarr

from ingest.pipeline import cores, in_order
from stats.capacity import assignment_capacity
from stats.errors import StoreError
from stats.refinement import Orientation, haar_start, refine_assignment, refine_capacity
from stats.registry import CAPACITY_STATISTICS, NULL_STATISTICS, Statistic
from stats.scramble import draws_per_pair, scramble_draws, scramble_summary
from stats.tail import closed_form_p, closed_form_trust, tail_p, tail_trust
from store import catalogue
from store.arrays import COMPRESSOR, read_stack, statistic_attributes, write_group
from store.atlas import USER_KIND, AtlasStore, Derivation, StoredModel
from store.integrity import publish_rows, seal, sealed_units
from store.user_statistics import UserStatistic, compute
from store.version import numerical_libraries, tool_version

HEAD = ("layer", "head")
DRAWS = Statistic("null_closure", "DOUBLE[]", "closure of every draw of the null", "0 to 1", "P'")
PERMUTATION = Statistic(
    "permutation", "DOUBLE[]", "cosine that each singular direction returns with", "0 to d_head - 1", "A = B = p"
)
START = Statistic("start", "INTEGER", "where the ascent began", "0: near the assignment; n: the n-th Haar pair", "")
WRITE = Statistic("write", "DOUBLE[]", "orientation of the written directions", "orthogonal", "A")
READ = Statistic("read", "DOUBLE[]", "orientation of the read directions", "orthogonal", "B")
ARRAYS: Mapping[str, Mapping[str, tuple[Statistic, tuple[str, ...]]]] = {
    "scramble": {
        **{item.name: (item, HEAD) for item in NULL_STATISTICS},
        "null_closure": (DRAWS, (*HEAD, "draw")),
    },
    "assignment": {
        **{item.name: (item, HEAD) for item in CAPACITY_STATISTICS},
        "permutation": (PERMUTATION, (*HEAD, "singular")),
    },
    "riemannian": {
        **{item.name: (item, HEAD) for item in CAPACITY_STATISTICS},
        "start": (START, HEAD),
        "write": (WRITE, (*HEAD, "principal_o", "singular")),
        "read": (READ, (*HEAD, "principal_v", "singular")),
    },
}
"""Arrays of every kind of derivation, with their declarations and axis names."""

Progress = Callable[[str, int, int], None]
"""Called with a stage, layers done and layers in all."""


@dataclass(frozen=True, slots=True)
class Spectra:
    """What derivations start from: one stack's layers that have heads of one size.

    ``layers`` (layer,) are row numbers in the stack's arrays; ``sigma`` and ``cosine``
    (layer, head, d_head), NaN for absent heads; ``closure`` (layer, head). Cosines of a stack that
    reads and writes different streams do not exist: they are NaN.
    """

    stack: str
    rows: np.ndarray
    layers: np.ndarray
    sigma: np.ndarray
    cosine: np.ndarray
    closure: np.ndarray

    def tensors(self, row: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Singular values and cosines (head, d_head) of one layer."""
        return torch.from_numpy(self.sigma[row]).to(device), torch.from_numpy(self.cosine[row]).to(device)

    def free_tensors(self, row: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with cosines of 1 for heads that map between two streams and so have none.

        Their capacity is that of the singular values alone.
        """
        sigma, cosine = self.tensors(row, device)
        without = ~sigma.isnan().any(-1, keepdim=True) & cosine.isnan().all(-1, keepdim=True)
        return sigma, torch.where(without, 1.0, cosine)

    def keys(self, model: str, operator: str, row: int) -> list[bytes]:
        """What seeds the random numbers of each head of a layer."""
        label = f"{model}\0{operator}\0{self.stack}\0{self.layers[row]}"
        return [f"{label}\0{head}".encode() for head in range(self.sigma.shape[1])]


def spectra(store: AtlasStore, stored: StoredModel, operator: str) -> Iterator[Spectra]:
    """The stored spectra of one operator.

    Raises:
        StoreError: the model was not measured with that operator.
    """
    if operator not in stored.gain_hash:
        raise StoreError(
            f"{stored.model} was not measured with the operator {operator}",
            where=str(store.root),
            expected="one of " + ", ".join(stored.gain_hash),
            found=operator,
            remedy=f"ingest it again with --operator {operator}",
        )
    group = store.arrays_path / stored.array_group / operator
    for directory in sorted(path for path in group.iterdir() if path.is_dir()):
        arrays = read_stack(directory)
        for d_head in np.unique(arrays["d_head"]):
            rows = np.flatnonzero(arrays["d_head"] == d_head)
            yield Spectra(
                directory.name,
                rows,
                arrays["layer"][rows],
                arrays["sigma"][rows, :, :d_head],
                arrays["cosine"][rows, :, :d_head],
                arrays["closure"][rows],
            )


def derive(
    store: AtlasStore,
    model: str,
    operator: str,
    wanted: Derivation,
    device: torch.device,
    progress: Progress,
) -> None:
    """Compute something from the stored spectra of every head of a model, and store it.

    What was stored of the same kind is replaced. Draws of the same seed repeat the stored ones, so
    that more draws add to them.

    Raises:
        StoreError: no such model or operator, or the store cannot be written.
    """
    store.check_writable()
    stored = store.model(model)
    started = time.perf_counter()
    parts = list(spectra(store, stored, operator))
    measure, stage = {
        "scramble": (_scramble, "drawing"),
        "assignment": (_assignment, "assigning"),
        "riemannian": (_riemannian, "climbing"),
    }[wanted.kind]
    collected = _Collected(ARRAYS[wanted.kind])
    progress(stage, 0, sum(len(part.rows) for part in parts))
    layers = [(part, row) for part in parts for row in range(len(part.rows))]

    def work(layer: tuple[Spectra, int]) -> dict[str, np.ndarray]:
        part, row = layer
        made = measure(part, row, part.keys(model, operator, row), wanted, device)
        return {name: array.cpu().numpy() for name, array in made.items()}

    workers = cores() if device.type == "cpu" else 1
    for done, ((part, row), arrays) in enumerate(zip(layers, in_order(layers, work, workers), strict=True), 1):
        collected.add(part.stack, int(part.rows[row]), arrays)
        progress(stage, done, len(layers))
    _publish(store, stored, operator, wanted, collected, started)


def derive_user_statistics(store: AtlasStore, models: Sequence[str], declared: Sequence[UserStatistic]) -> None:
    """Compute a user's own statistics for every head of models, and store them in place of earlier ones.

    Everything is computed before anything is stored.

    Raises:
        StoreError: no such model, or the store cannot be written.
        QueryError: a function fails, or does not return a number for each head.
    """
    store.check_writable()
    computed = []
    for model in models:
        stored = store.model(model)
        for operator in sorted(stored.gain_hash, reverse=True):
            for mine in declared:
                started = time.perf_counter()
                collected = _Collected({mine.declared.name: (mine.declared, HEAD)})
                for stack, values in compute(store, stored, operator, mine).items():
                    for row, layer in enumerate(values):
                        collected.add(stack, row, {mine.declared.name: layer})
                computed.append((stored, operator, Derivation(USER_KIND + mine.declared.name), collected, started))
    for parts in computed:
        _publish(store, *parts)


def remove_user_statistic(store: AtlasStore, name: str) -> list[str]:
    """Take a user's statistic out of the store; returns the models that had it.

    The catalogue lets go of it first, for all models at once, then its arrays go: whoever reads meanwhile
    has all of it or nothing. What a crash leaves is sealed and whole; removing again takes it away, too.

    Raises:
        StoreError: no model has it, or the catalogue cannot be written.
    """
    kind = USER_KIND + name
    with store.write_lock():
        models, sealed = store.models(), sealed_units(store)
        units = {
            model: {
                unit
                for unit in (
                    *sealed.get(stored.array_group, []),
                    *stored.derivations,
                    *(path.name for path in (store.arrays_path / stored.array_group).iterdir()),
                )
                if _kind(unit) == kind
            }
            for model, stored in models.items()
        }
        having = [model for model, own in units.items() if own]
        if having:

            def apply(connection: duckdb.DuckDBPyConnection) -> None:
                connection.execute("DELETE FROM derivations WHERE kind = ?", [kind])
                catalogue.drop_unused_columns(connection, USER_KIND)

            catalogue.change(store.catalogue_path, apply)
        for model in having:
            for unit in units[model]:
                store.drop_unit(models[model].array_group, unit)
    if not having:
        kinds = {made.kind for stored in models.values() for _, made in stored.derivations.values()}
        mine = sorted(kind.removeprefix(USER_KIND) for kind in kinds if kind.startswith(USER_KIND))
        raise StoreError(
            f"no statistic of your own named {name!r}",
            where=str(store.root),
            expected="one of " + (", ".join(mine) or "none: the store has no statistic of your own"),
            found=name,
        )
    return having


def _kind(unit: str) -> str:
    """The kind of a derivation, from the name that ``_publish`` gives its unit."""
    return unit.rsplit("-", 2)[0]


def _scramble(
    part: Spectra, row: int, keys: list[bytes], wanted: Derivation, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draws of every head of a layer, and what they say about its closure."""
    assert wanted.n_draws is not None
    assert wanted.seed is not None
    sigma, cosine = part.tensors(row, device)
    closure = torch.from_numpy(part.closure[row]).to(device)
    independent = bool(wanted.independent)
    draws = scramble_draws(sigma, cosine, keys, wanted.seed, wanted.n_draws, independent=independent)
    summary = scramble_summary(closure, draws, 1 if independent else draws_per_pair(sigma.shape[-1]))
    undefined = summary.p.isnan()
    return {
        "null_closure": draws,
        "median": summary.median,
        "q95": summary.q95,
        "q99": summary.q99,
        "median_se": summary.median_error,
        "p": summary.p,
        "p_tail": torch.where(undefined, torch.nan, tail_p(closure, sigma)),
        "tail_trusted": tail_trust(sigma, cosine).double(),
        "p_closed_form": torch.where(undefined, torch.nan, closed_form_p(closure, sigma)),
        "closed_form_trusted": closed_form_trust(sigma, cosine).double(),
        "wins": summary.wins,
    }


def _assignment(
    part: Spectra, row: int, _keys: list[bytes], _wanted: Derivation, _device: torch.device
) -> dict[str, torch.Tensor]:
    """Capacity by assignment of every head of a layer."""
    found = assignment_capacity(*part.free_tensors(row, torch.device("cpu")))
    return {"closure": found.closure, "permutation": found.permutation, "iterations": found.iterations}


def _riemannian(
    part: Spectra, row: int, keys: list[bytes], wanted: Derivation, device: torch.device
) -> dict[str, torch.Tensor]:
    """Capacity by ascent from the assignment and from random orientations, the best of each head kept."""
    assert wanted.seed is not None
    sigma, cosine = part.free_tensors(row, device)
    permutation = assignment_capacity(sigma, cosine).permutation
    best = refine_assignment(sigma, cosine, permutation, keys, wanted.seed)
    start = torch.zeros(len(keys), dtype=torch.int32, device=device)
    for number in range(1, (wanted.random_starts or 0) + 1):
        turned = haar_start([key + b"\0%d" % number for key in keys], wanted.seed, sigma.shape[-1])
        best, start = _better(best, start, refine_capacity(sigma, cosine, *turned), number)
    return {
        "closure": best.closure,
        "iterations": best.iterations,
        "start": start,
        "write": best.write,
        "read": best.read,
    }


def _better(
    best: Orientation, start: torch.Tensor, other: Orientation, number: int
) -> tuple[Orientation, torch.Tensor]:
    """For every head the orientation of higher closure, and where it came from."""
    higher = other.closure > best.closure
    wide = higher[:, None, None]
    return Orientation(
        torch.where(higher, other.closure, best.closure),
        torch.where(wide, other.write, best.write),
        torch.where(wide, other.read, best.read),
        torch.where(higher, other.iterations, best.iterations),
    ), torch.where(higher, number, start)


class _Collected:
    """Arrays of a derivation by stack, with the stack's rows as first axis."""

    def __init__(self, declared: Mapping[str, tuple[Statistic, tuple[str, ...]]]) -> None:
        self.declared = declared
        self.layers: dict[str, dict[int, dict[str, np.ndarray]]] = {}

    def add(self, stack: str, row: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Take one layer's arrays, ``head`` first."""
        self.layers.setdefault(stack, {})[row] = dict(arrays)

    def write(self, directory: Path) -> None:
        """One Zarr group a stack; layers with smaller heads are padded with NaN, or -1."""
        for stack, layers in self.layers.items():
            group = zarr.open_group(str(directory / stack), mode="w-", zarr_format=3)
            for name, (statistic, axes) in self.declared.items():
                parts = [arrays[name] for _, arrays in sorted(layers.items())]
                fill: Any = np.nan if parts[0].dtype.kind == "f" else -1
                largest = np.max([part.shape for part in parts], 0)
                whole = np.full((len(parts), *largest), fill, parts[0].dtype)
                for row, part in enumerate(parts):
                    whole[row][tuple(slice(size) for size in part.shape)] = part
                array = group.create_array(
                    name,
                    shape=whole.shape,
                    dtype=whole.dtype,
                    chunks=(1, *whole.shape[1:]) if whole.ndim > 2 else whole.shape,
                    compressors=COMPRESSOR,
                    fill_value=fill,
                    dimension_names=axes,
                    attributes=statistic_attributes(statistic) | {"sql_type": statistic.sql_type},
                )
                array[...] = whole


def _publish(
    store: AtlasStore,
    stored: StoredModel,
    operator: str,
    made: Derivation,
    collected: _Collected,
    started: float,
) -> None:
    """Seal a derivation and make it visible in place of an earlier one of its kind."""
    unit = f"{made.kind}-{operator}-{uuid.uuid4().hex[:8]}"
    group = stored.array_group
    with store.writing("try again"), store.staging() as staging:
        collected.write(staging)
        with store.write_lock():
            now = store.models().get(stored.model)
            if now is None or now.array_group != group:
                raise StoreError(
                    f"{stored.model} was replaced or removed while something was derived from it",
                    where=str(store.root),
                    remedy="run the command again",
                )
            facts = {
                "operator": operator,
                "seconds": time.perf_counter() - started,
                "created_at": datetime.now(UTC).isoformat(),
                "tool_version": tool_version(),
                "libraries": numerical_libraries(),
            }
            write_group(staging, asdict(made) | facts)
            staging.replace(store.arrays_path / group / unit)
            with store.withdrawn_on_failure(stored.model, group, [unit]):
                seal(store, group, unit)
                publish_rows(store, stored.model, group)
            for earlier, (name, other) in now.derivations.items():
                if (name, other.kind) == (operator, made.kind):
                    store.drop_unit(group, earlier)
