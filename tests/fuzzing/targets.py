"""What is fuzzed: valid files of every kind, how they are changed, and what then reads them.

A target writes one hostile file into a directory that holds its valid companions and reads the whole as the
commands do. Nothing but an error of the project may come out.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import polars as pl
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from ingest.factors import layer_digests, model_hashes, read_weights
from ingest.families import FAMILIES
from ingest.family import Keys
from ingest.identification import identification_rows
from ingest.plan import Plan, plan_checkpoint
from ingest.source import open_checkpoint
from stats.errors import HeadatlasError
from store.atlas import AtlasStore
from store.ingestion import Identity, _model_facts
from tests import checkpoints
from tests.checkpoints import Model
from tests.fuzzing.mutation import mutated_bytes, mutated_json, mutated_value, written_json
from tests.ingesting import ingest_into

Mutate = Callable[[random.Random, bytes], bytes]
MOST_BYTES = 32_000_000
"""Tensors of a plan are read only where they are no larger: fuzzing is after errors, not after memory."""

KEYS = {
    key
    for rows in FAMILIES.values()
    for row in rows
    for keys in (row.keys, *row.by_layer_type.values())
    for value in (getattr(keys, name) for name in Keys.__dataclass_fields__)
    for key in ((value,) if isinstance(value, str) else value if isinstance(value, tuple) else ())
}
WORDS = (
    *sorted(KEYS),
    "model_type",
    "text_config",
    "vision_config",
    "thinker_config",
    "audio_config",
    "quantization_config",
    "layer_types",
    "layers_block_type",
    "per_layer_config",
    "pruned_heads",
    "num_kv_shared_layers",
    "rope_parameters",
    "rotary_dim",
    "weight_block_size",
    "quant_method",
    "config_groups",
    "weights",
    "block_structure",
    "rank_pattern",
    "alpha_pattern",
    "dtype",
    "shape",
    "data_offsets",
    "__metadata__",
    "weight_map",
    "residual_multiplier",
    "partial_rotary_factor",
)


@dataclass(frozen=True)
class Seed:
    """Valid files by name, and the one that is changed."""

    files: Mapping[str, bytes]
    hostile: str

    @property
    def data(self) -> bytes:
        """The file that is changed, as it is when valid."""
        return self.files[self.hostile]


@dataclass(frozen=True)
class Target:
    """A kind of file: valid ones, how they are changed, and what reads them from a directory."""

    name: str
    suffix: str
    seeds: Callable[[], list[Seed]]
    mutate: Mutate
    read: Callable[[Path], None]
    share: float
    """Part of all inputs that this target gets."""


def tiny() -> Model:
    """One layer with two heads on one value."""
    return checkpoints.llama(layers=1, d_model=8, heads=2, kv_heads=1, d_head=4)


@cache
def _saved(save: Callable[[Model, Path], Path], model: Callable[[], Model] = tiny) -> Mapping[str, bytes]:
    """The files of a saved model."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "model"
        save(model(), place)
        return {path.name: path.read_bytes() for path in sorted(place.iterdir())}


def plan_and_read(plan: Plan) -> None:
    """Everything a plan leads to short of linear algebra: rows of identify, facts of the store, hashed values."""
    for n_tokens in (1, 2048):
        identification_rows(plan, None, n_tokens)
    if plan.bytes_to_read > MOST_BYTES or sum(layer.numel for layer in plan.layers) > MOST_BYTES:
        return
    digests = [layer_digests(read_weights(plan.checkpoint, layer), layer, plan.operators) for layer in plan.layers]
    facts = _model_facts(plan, Identity("model"), digests, model_hashes(digests))
    json.dumps(facts).encode()
    rows = facts["skipped"] + [facts]
    for column in ("architecture", "reason"):
        pl.Series([row.get(column) for row in rows], dtype=pl.String)


def read_checkpoint(path: Path, base: Path | None = None) -> None:
    """Open, plan every operator, and read."""
    checkpoint = open_checkpoint(str(path), base=None if base is None else str(base))
    plan = plan_checkpoint(checkpoint, ("raw",))
    plan_and_read(plan)
    if any(stack.family.can_fold for stack in plan.recognition.stacks):
        plan_and_read(plan_checkpoint(checkpoint, ("raw", "folded")))


# -- safetensors -------------------------------------------------------------------------------------------


def split_header(data: bytes) -> tuple[bytes, bytes]:
    """The JSON of a safetensors file and its values."""
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    header, values = split_header(data)
    if rng.random() < 0.3:
        return mutated_bytes(rng, data, 8 + len(header))
    text = written_json(rng, mutated_value(rng, json.loads(header), WORDS))
    return struct.pack("<Q", len(text)) + text + values


def _safetensors_seeds() -> list[Seed]:
    files = [_saved(checkpoints.save_safetensors), _saved(checkpoints.save_safetensors, _tiny_bert)]
    return [Seed(each, "model.safetensors") for each in files]


def _tiny_bert() -> Model:
    return checkpoints.bert(layers=1, d_model=8, heads=2)


def _tiny_gpt2() -> Model:
    return checkpoints.gpt2(layers=1, d_model=8, heads=2)


def _tiny_fp8() -> Model:
    """Projections in fp8 with a scale for each block."""
    model = tiny().configured(quantization_config={"quant_method": "fp8", "weight_block_size": [4, 4]})
    for name, weight in tiny().tensors.items():
        if "self_attn" in name:
            blocks = tuple(-(-size // 4) for size in weight.shape)
            model = model.changed(
                **{name: weight.to(torch.float8_e4m3fn), name + "_scale_inv": torch.ones(blocks, dtype=torch.float32)}
            )
    return model


# -- the other files of a checkpoint -----------------------------------------------------------------------


def _index_seeds() -> list[Seed]:
    return [
        Seed(_saved(checkpoints.save_sharded_safetensors), "model.safetensors.index.json"),
        Seed(_saved(checkpoints.save_sharded_torch), "pytorch_model.bin.index.json"),
    ]


@cache
def _family_seeds() -> list[Seed]:
    """For every known family the names its tables give, in shapes that no configuration asks for."""
    import tempfile

    found = []
    for model_type, rows in FAMILIES.items():
        tensors, config = {}, {"model_type": model_type}
        for row in rows:
            settings = {**row.defaults, **row.when}
            config |= settings if not row.part else {row.part[0]: settings}
            for layer in range(2):
                for name in row.projections[0].roles.values():
                    tensors[(row.block + name).format(layer=layer, inner=0) + ".weight"] = torch.zeros(1)
        with tempfile.TemporaryDirectory() as scratch:
            save_file(tensors, Path(scratch) / "model.safetensors")
            weights = (Path(scratch) / "model.safetensors").read_bytes()
        files = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
        found.append(Seed(files, "config.json"))
    return found


def _config_seeds() -> list[Seed]:
    whole = [_saved(checkpoints.save_safetensors, model) for model in (tiny, _tiny_bert, _tiny_gpt2, _tiny_fp8)]
    plain = [Seed(files, "config.json") for files in whole]
    return plain * 12 + _family_seeds()


def _adapter_files() -> Mapping[str, bytes]:
    def save(model: Model, place: Path) -> Path:
        place.mkdir()
        tensors = {}
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.0.self_attn.{name}"
            out, width = model.tensors[f"model.layers.0.self_attn.{name}.weight"].shape
            tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = (
                torch.ones(2, width),
                torch.ones(out, 2),
            )
        save_file(tensors, place / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "rank_pattern": {".*q_proj": 2},
            "alpha_pattern": {"layers.0.self_attn.v_proj": 8},
            "use_rslora": False,
            "fan_in_fan_out": False,
            "init_lora_weights": True,
        }
        (place / "adapter_config.json").write_text(json.dumps(config))
        return place

    return _saved(save)


@cache
def _adapter_seed_files() -> Mapping[str, bytes]:
    base = {f"base/{name}": data for name, data in _saved(checkpoints.save_safetensors).items()}
    return {**base, **_adapter_files()}


def _adapter_config_seeds() -> list[Seed]:
    return [Seed(_adapter_seed_files(), "adapter_config.json")]


def _adapter_weights_seeds() -> list[Seed]:
    return [Seed(_adapter_seed_files(), "adapter_model.safetensors")]


def read_adapter(path: Path) -> None:
    read_checkpoint(path, path / "base")


# -- GGUF --------------------------------------------------------------------------------------------------


def _quantised() -> Model:
    return checkpoints.llama(layers=1, d_model=32, heads=2, kv_heads=1, d_head=16)


@cache
def _gguf_seeds() -> list[Seed]:
    def quantised(model: Model, place: Path) -> Path:
        return checkpoints.save_gguf(model, place, quantisation=GGMLQuantizationType.Q8_0)

    return [
        Seed(_saved(checkpoints.save_gguf), "model.gguf"),
        Seed(_saved(quantised, _quantised), "model.gguf"),
    ]


def mutate_gguf(rng: random.Random, data: bytes) -> bytes:
    """Counts and metadata more often than values."""
    return mutated_bytes(rng, data, rng.choice((64, 1600, 4000)))


def read_gguf(path: Path) -> None:
    read_checkpoint(path / "model.gguf")


# -- PyTorch files -----------------------------------------------------------------------------------------


@cache
def _torch_seeds() -> list[Seed]:
    return [
        Seed(_saved(save, _attention_only), "pytorch_model.bin")
        for save in (checkpoints.save_torch, checkpoints.save_legacy_torch)
    ]


def _attention_only() -> Model:
    model = tiny()
    return Model(
        model.config,
        {name: tensor for name, tensor in model.tensors.items() if "self_attn" in name or "input_" in name},
    )


def mutate_torch(rng: random.Random, data: bytes) -> bytes:
    return mutated_bytes(rng, data, rng.choice((200, 1200, len(data))))


# -- stores ------------------------------------------------------------------------------------------------


@cache
def sealed() -> Mapping[str, bytes]:
    """Files of a small store with one model."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        ingest_into(root / "atlas", checkpoints.save_safetensors(tiny(), root / "model"), "llama", ("raw", "folded"))
        store = root / "atlas"
        files = {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}
        return {name: data for name, data in files.items() if name != "write.lock"}


def _store_seeds(wanted: Callable[[str], bool]) -> list[Seed]:
    return [Seed(sealed(), name) for name in sealed() if wanted(name)]


def manifest_seeds() -> list[Seed]:
    return _store_seeds(lambda name: name.startswith("manifests/"))


def attribute_seeds() -> list[Seed]:
    return _store_seeds(lambda name: name.endswith("zarr.json"))


def chunk_seeds() -> list[Seed]:
    return _store_seeds(lambda name: "/c/" in name and "/core/" not in name)


def read_store(path: Path) -> None:
    """What the reading commands, ``verify`` and ``rebuild`` do."""
    from query import open_atlas
    from store.integrity import rebuild, verify

    store = AtlasStore.open(path)
    list(verify(store))
    atlas = open_atlas(path)
    try:
        for name in ("sigma", "core"):
            with suppress(HeadatlasError):
                atlas.array("llama", name)
    finally:
        atlas.close()
    if len((path / "arrays.zarr" / "zarr.json").read_bytes()) % 8 == 0 or random.random() < 0.2:
        before = (path / "catalog.duckdb").read_bytes()
        try:
            rebuild(store)
        finally:
            (path / "catalog.duckdb").write_bytes(before)


def mutate_attributes(rng: random.Random, data: bytes) -> bytes:
    words = ("attributes", "codecs", "chunk_grid", "data_type", "fill_value", "shape", "kind", "operator", "stack")
    return mutated_json(words)(rng, data)


TARGETS = {
    target.name: target
    for target in (
        Target("safetensors", "safetensors", _safetensors_seeds, mutate_safetensors, read_checkpoint, 0.24),
        Target("gguf", "gguf", _gguf_seeds, mutate_gguf, read_gguf, 0.24),
        Target("index", "json", _index_seeds, mutated_json(WORDS), read_checkpoint, 0.1),
        Target("config", "json", _config_seeds, mutated_json(WORDS), read_checkpoint, 0.25),
        Target("adapter_config", "json", _adapter_config_seeds, mutated_json(WORDS), read_adapter, 0.04),
        Target("adapter_weights", "safetensors", _adapter_weights_seeds, mutate_safetensors, read_adapter, 0.03),
        Target("torch", "bin", _torch_seeds, mutate_torch, read_checkpoint, 0.06),
        Target("manifest", "json", manifest_seeds, mutated_json(("files", "group", "unit")), read_store, 0.004),
        Target("attributes", "json", attribute_seeds, mutate_attributes, read_store, 0.01),
        Target("chunk", "chunk", chunk_seeds, lambda rng, data: mutated_bytes(rng, data), read_store, 0.003),
    )
}


def lay_out(seed: Seed, place: Path) -> None:
    """Write a seed's files into an empty directory."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "staging").mkdir(parents=True)
    for name, data in seed.files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def outcome(target: Target, place: Path) -> str:
    """``read`` or ``refused``; anything else that happens is raised."""
    try:
        target.read(place)
    except HeadatlasError as error:
        str(error).encode()
        return "refused"
    return "read"
