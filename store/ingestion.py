"""Taking a planned checkpoint into the store: measure, stage, seal, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ingest.factors import LayerDigests, ModelHashes, model_hashes
from ingest.family import PIECES, Norm
from ingest.pipeline import ComputeSettings, LayerMeasurement, hash_layers, measure
from ingest.plan import BESIDE, LayerPlan, Operator, Plan
from stats.errors import StoreError
from store.arrays import StackWriter, attributes_of, write_group
from store.atlas import AtlasStore, StoredModel, array_group_name
from store.integrity import publish_rows, seal
from store.measured_layers import MeasuredLayers
from store.version import numerical_libraries, tool_version

LAYER_SIZES = ("n_heads", "n_kv_heads", "d_model", "d_source", "d_head", "d_key")
OTHER_NAME = "choose another name with --name, or replace the stored model with --replace"

Progress = Callable[[str, int, int], None]
"""Called with a stage, layers done and layers in all."""

MeasuringElsewhere = Callable[[Plan, MeasuredLayers, Progress], None]
"""Has the layers of a plan measured by other processes, into where measured layers are kept."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an ingest did.

    ``same_content`` lists other models with the same content hash, ``same_layers`` how many layers
    are the same as those of other models, which are not the same as a whole. ``lineage`` and ``step``
    are what is stored.
    """

    action: Literal["ingested", "unchanged"]
    model: str
    operators: tuple[str, ...]
    bytes_read: int
    seconds: float
    same_content: tuple[str, ...] = ()
    same_layers: Mapping[str, int] = field(default_factory=dict)
    lineage: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What the user says about a checkpoint: its name in the store and its place in a lineage."""

    model: str
    lineage: str | None = None
    step: int | None = None


def ingest_model(
    store: AtlasStore,
    plan: Plan,
    identity: Identity,
    settings: ComputeSettings,
    *,
    replace_existing: bool = False,
    progress: Progress,
    elsewhere: MeasuringElsewhere | None = None,
    only_assemble: bool = False,
) -> Outcome:
    """Measure a planned checkpoint and publish it under a name.

    The same content under the same name is left as it is; operators it lacks are added. Until the
    last step nothing of the store changes. What was measured when an ingest is interrupted is kept
    aside, and the same ingest goes on from there. ``elsewhere`` measures layers in other processes
    first; ``only_assemble`` refuses to measure any, and publishes what units have left.

    Raises:
        StoreError: the name holds other content and ``replace_existing`` is false, the store
            cannot be written, or layers that have to be there are not.
        CheckpointError: the checkpoint turns out to be unreadable.
    """
    started = time.perf_counter()
    model = identity.model
    stored = store.models().get(model)
    operators = plan.operators
    if stored is not None and not replace_existing:
        operators = _missing_operators(store, plan, stored, progress)
        if not operators:
            seconds = time.perf_counter() - started
            place = (stored.lineage, stored.step)
            return Outcome("unchanged", model, plan.operators, plan.bytes_to_read, seconds, (), {}, *place)
    plan = replace(plan, operators=operators)
    measured = MeasuredLayers(store, plan, model, settings)
    with store.writing("ingest again"), measured.claimed(), measured.staging() as staging:
        if elsewhere is not None:
            elsewhere(plan, measured, progress)
            measured.trusted = True
        if only_assemble:
            _require_all(plan, measured)
        with closing(measure(plan, settings, measured)) as measurements:
            digests = _write_staged(staging, plan, measurements, progress)
        outcome = _publish(
            store, staging, plan, identity, settings, digests, measured.devices, started, replace_existing
        )
        measured.discard()
        return outcome


def _require_all(plan: Plan, measured: MeasuredLayers) -> None:
    missing = measured.missing(plan.layers)
    if missing:
        numbers = ", ".join(f"{layer.stack} {layer.layer}" for layer in missing[:8])
        raise StoreError(
            "not every layer has been measured",
            where=f"{plan.checkpoint.source}, {measured.directory}",
            expected=f"{len(plan.layers)} layers",
            found=f"{len(missing)} missing: {numbers}" + (", ..." if len(missing) > 8 else ""),
            remedy="run the other units, ingest --unit i/n with the same options, or ingest without --unit",
        )


def _read_alike(store: AtlasStore, stored: StoredModel, plan: Plan) -> bool:
    """Whether the layers were taken for what the plan takes them for: a configuration may have been given since."""
    hashes = {"content_hash", "qk_hash"}
    layers = attributes_of(store.arrays_path / stored.array_group)["layers"]
    known = [{name: fact for name, fact in layer.items() if name not in hashes} for layer in layers]
    return known == [_layer_facts(layer) for layer in plan.layers]


def _missing_operators(store: AtlasStore, plan: Plan, stored: StoredModel, progress: Progress) -> tuple[Operator, ...]:
    """Operators of the plan the store lacks, once the content is known to be the same."""
    missing = tuple(operator for operator in plan.operators if operator not in stored.gain_hash)
    if stored.revision is not None and stored.revision == plan.checkpoint.commit and _read_alike(store, stored, plan):
        return missing
    layers = []
    for digests in hash_layers(plan):
        layers.append(digests)
        progress("comparing with the store", len(layers), len(plan.layers))
    hashes = model_hashes(layers)
    gains = {name: found for name, found in hashes.gains.items() if stored.gain_hash.get(name) is not None}
    same = (hashes.content, hashes.query_key) == (stored.content_hash, stored.qk_hash)
    if not same or any(stored.gain_hash[name] != found for name, found in gains.items()):
        raise StoreError(
            f"the store already has a model named {stored.model!r} with other weights",
            where=plan.checkpoint.source,
            expected=f"content {stored.content_hash[:16]}, query-key {stored.qk_hash[:16]}",
            found=f"content {hashes.content[:16]}, query-key {hashes.query_key[:16]}"
            + (", other norm gains or scales" if same else ""),
            remedy=OTHER_NAME,
        )
    return missing


def _write_staged(
    staging: Path, plan: Plan, measurements: Iterator[LayerMeasurement], progress: Progress
) -> list[LayerDigests]:
    """Write every layer as it is measured into ``staging/<operator>/<stack>``."""
    stacks: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        stacks.setdefault(layer.stack, []).append(layer)
    writers = {
        (operator, stack): StackWriter(staging / operator / stack, layers)
        for operator in plan.operators
        for stack, layers in stacks.items()
    }
    digests: list[LayerDigests] = []
    progress("measuring", 0, len(plan.layers))
    for measurement in measurements:
        digests.append(measurement.digests)
        for operator, arrays in measurement.arrays.items():
            writers[operator, measurement.plan.stack].add(measurement, arrays)
        progress("measuring", len(digests), len(plan.layers))
    for writer in writers.values():
        writer.close()
    return digests


def _publish(
    store: AtlasStore,
    staging: Path,
    plan: Plan,
    identity: Identity,
    settings: ComputeSettings,
    digests: list[LayerDigests],
    devices: Collection[str],
    started: float,
    replace_existing: bool,
) -> Outcome:
    """Seal what is staged and make it visible: arrays, manifests, catalogue, in that order."""
    created_at = datetime.now(UTC)
    hashes = model_hashes(digests)
    run = {
        "bytes_read": plan.bytes_to_read,
        "device": "+".join(sorted(devices)),
        "compute_dtype": settings.dtype,
        "rank_cut": settings.rank_cut,
        "seconds": time.perf_counter() - started,
        "created_at": created_at.isoformat(),
        "tool_version": tool_version(),
        "libraries": numerical_libraries(),
    }
    for operator in plan.operators:
        write_group(staging / operator, run | {"gain_hash": hashes.gains.get(operator)})
    with store.write_lock():
        models = store.models()
        stored = models.get(identity.model)
        adding = stored is not None and not replace_existing
        if stored is not None and adding:
            if stored.content_hash != hashes.content or not set(stored.gain_hash).isdisjoint(plan.operators):
                raise StoreError(
                    f"another process has just stored a model named {identity.model!r}",
                    where=str(store.root),
                    remedy=OTHER_NAME,
                )
            group = stored.array_group
        else:
            write_group(staging, _model_facts(plan, identity, digests, hashes))
            group = array_group_name(identity.model, created_at, hashes.content)
        with store.withdrawn_on_failure(identity.model, group, plan.operators):
            if adding:
                for operator in plan.operators:
                    store.drop_unit(group, operator)
                    (staging / operator).replace(store.arrays_path / group / operator)
            else:
                staging.replace(store.arrays_path / group)
            for operator in plan.operators:
                seal(store, group, operator)
            publish_rows(store, identity.model, group)
        if stored is not None and not adding:
            store.drop_group(stored.array_group)
    same = [name for name, other in models.items() if other.content_hash == hashes.content]
    seconds = time.perf_counter() - started
    others = tuple(name for name in same if name != identity.model)
    repeated = store.models_with_layers([digest.content.hex() for digest in digests])
    partly = {name: count for name, count in repeated.items() if name not in (*others, identity.model)}
    kept = (identity.lineage, identity.step)
    return Outcome("ingested", identity.model, plan.operators, plan.bytes_to_read, seconds, others, partly, *kept)


def _model_facts(plan: Plan, identity: Identity, digests: list[LayerDigests], hashes: ModelHashes) -> dict[str, Any]:
    """Attributes of the model's group: what is true whichever operators are measured."""
    checkpoint, layers = plan.checkpoint, plan.layers
    parameters = sum(
        checkpoint.header(name).numel for layer in layers for role, name in layer.tensors.items() if role not in BESIDE
    )

    def uniform(name: str) -> int | None:
        values = {getattr(layer, name) for layer in layers}
        return values.pop() if len(values) == 1 else None

    return {
        "model": identity.model,
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "lineage": identity.lineage,
        "step": identity.step,
        "format": checkpoint.format,
        "architecture": plan.architecture,
        "family": plan.family,
        "recognised_by": plan.recognition.by,
        "notes": "; ".join(plan.recognition.notes) or None,
        "n_layers": len(layers),
        **{name: uniform(name) for name in ("n_heads", "n_kv_heads", "d_model", "d_head")},
        "source_dtype": plan.source_dtype,
        "feeding_norm": layers[0].feeding.kind if layers[0].feeding else None,
        "branch_norm": layers[0].branch.kind if layers[0].branch else None,
        "attention_parameters": parameters,
        "total_parameters": checkpoint.total_parameters(),
        "content_hash": hashes.content,
        "qk_hash": hashes.query_key,
        "layers": [
            _layer_facts(layer) | {"content_hash": digest.content.hex(), "qk_hash": digest.query_key.hex()}
            for layer, digest in zip(layers, digests, strict=True)
        ],
        "skipped": [{"stack": item.stack, "layer": item.layer, "reason": item.reason} for item in plan.skipped],
    }


def _layer_facts(layer: LayerPlan) -> dict[str, Any]:
    """What the catalogue says of a layer, apart from its hashes."""

    def kind(norm: Norm | None) -> str | None:
        return norm.kind if norm is not None else None

    return {
        "stack": layer.stack,
        "layer": layer.layer,
        **{name: getattr(layer.sizes, name) for name in LAYER_SIZES},
        "feeding_norm": kind(layer.feeding),
        "source_norm": kind(layer.source),
        "branch_norm": kind(layer.branch),
        **{piece: piece in layer.pieces for piece in PIECES},
        "neutralised": ", ".join(layer.neutralised) or None,
        "multiplier": layer.multiplier,
        "layer_scale": layer.layer_scale,
    }
