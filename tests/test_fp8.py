"""Weights in fp8 with scales, against values decoded from their bits in numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from ingest.factors import ModelHashes, model_hashes
from ingest.pipeline import ComputeSettings, hash_layers, measure
from ingest.plan import plan_checkpoint
from ingest.safetensors_file import LocalFile
from ingest.source import open_checkpoint
from query import open_atlas
from stats.errors import CheckpointError
from tests.checkpoints import FORMATS, Model, llama, save_safetensors
from tests.ingesting import ingest_into

QUERY = "model.layers.0.self_attn.q_proj.weight"
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def decoded(bits: np.ndarray, exponent_bits: int, bias: int, *, infinities: bool) -> np.ndarray:
    """Values of 8-bit floats from sign, exponent and mantissa."""
    mantissa_bits = 7 - exponent_bits
    sign = np.where(bits >> 7, -1.0, 1.0)
    exponent = (bits >> mantissa_bits & (1 << exponent_bits) - 1).astype(int)
    mantissa = (bits & (1 << mantissa_bits) - 1) / 2.0**mantissa_bits
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    top = exponent == (1 << exponent_bits) - 1
    if infinities:
        value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    else:
        value[bits & 127 == 127] = np.nan
    return sign * value


def e4m3(bits: np.ndarray) -> np.ndarray:
    return decoded(bits, 4, 7, infinities=False)


def e5m2(bits: np.ndarray) -> np.ndarray:
    return decoded(bits, 5, 15, infinities=True)


NUMBERS: Mapping[torch.dtype, Callable[[np.ndarray], np.ndarray]] = {
    torch.float8_e4m3fn: e4m3,
    torch.float8_e5m2: e5m2,
}


def compressed_tensors(strategy: str, **weights: Any) -> dict[str, Any]:
    described = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": described}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@dataclass(frozen=True)
class Form:
    """How scales are stored: the name beside ``weight``, the shape for a weight's, the dtype, the configuration."""

    settings: Mapping[str, Any]
    name: str
    block: tuple[int, int] | None = None
    shape: Callable[[int, int], tuple[int, ...]] = lambda out, width: ()
    scale_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float8_e4m3fn


USUAL, SMALL = (128, 128), (24, 20)
FORMS = {
    "usual block": Form(BLOCK_FP8, "weight_scale_inv", USUAL),
    "stated block": Form(BLOCK_FP8 | {"weight_block_size": [128, 128]}, "weight_scale_inv", USUAL),
    "small block": Form(BLOCK_FP8 | {"weight_block_size": [24, 20]}, "weight_scale_inv", SMALL),
    "block by scale": Form(BLOCK_FP8, "scale", USUAL, scale_dtype=torch.float8_e8m0fnu),
    "block in bfloat16": Form(BLOCK_FP8, "weight_scale_inv", USUAL, scale_dtype=torch.bfloat16),
    "block of compressed-tensors": Form(compressed_tensors("block", block_structure=[24, 20]), "weight_scale", SMALL),
    "block of e5m2": Form(BLOCK_FP8, "weight_scale_inv", USUAL, dtype=torch.float8_e5m2),
    "tensor": Form(BLOCK_FP8 | {"weight_block_size": None}, "weight_scale_inv"),
    "tensor by scale": Form(BLOCK_FP8, "scale", scale_dtype=torch.float8_e8m0fnu),
    "tensor of one value": Form(compressed_tensors("tensor"), "weight_scale", None, lambda out, width: (1,)),
    "tensor of modelopt": Form({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale"),
    "channel": Form(compressed_tensors("channel"), "weight_scale", None, lambda out, width: (out, 1)),
    "flat channel": Form(compressed_tensors("channel"), "weight_scale", None, lambda out, width: (out,), torch.float16),
}


def quantised(model: Model, form: Form, seed: int = 0) -> tuple[Model, Model]:
    """The model with random fp8 attention, and the same values as dense float64 matrices."""
    random = np.random.default_rng(seed)
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in model.tensors.items():
        if "self_attn" not in name:
            continue
        out, width = tensor.shape
        bits = random.integers(0, 256, (out, width), dtype=np.uint8)
        bits[~np.isfinite(NUMBERS[form.dtype](bits))] = 0
        rows, columns = form.block or (1, 1)
        shape = (-(-out // rows), -(-width // columns)) if form.block else form.shape(out, width)
        if form.scale_dtype == torch.float8_e8m0fnu:
            powers = random.integers(120, 131, shape, dtype=np.uint8)
            scale, factors = (
                torch.from_numpy(np.array(powers)).view(form.scale_dtype),
                2.0 ** (powers.astype(float) - 127),
            )
        else:
            scale = torch.tensor(random.uniform(0.001, 0.1, shape)).to(form.scale_dtype)
            factors = scale.double().numpy()
        if form.block:
            factors = np.kron(factors, np.ones(form.block))[:out, :width]
        elif factors.size > 1:
            factors = factors.reshape(out, 1)
        stored[name] = torch.from_numpy(bits).view(form.dtype)
        stored[name.removesuffix("weight") + form.name] = scale
        dense[name] = torch.from_numpy(NUMBERS[form.dtype](bits) * factors)
    return model.changed(**stored).configured(quantization_config=form.settings), model.changed(**dense)


def ragged() -> Model:
    """Projections of 576 and 192 rows: four blocks and a half, and one and a half."""
    return llama(layers=1, d_model=192, heads=9, kv_heads=3, d_head=64)


def hashes(path: Path) -> ModelHashes:
    return model_hashes(list(hash_layers(plan_checkpoint(open_checkpoint(str(path)), ("raw", "folded")))))


@pytest.mark.parametrize("form", FORMS)
def test_values_are_the_stored_numbers_times_their_scale(form: str, tmp_path: Path) -> None:
    stored, dense = quantised(ragged(), FORMS[form])
    checkpoint = open_checkpoint(str(save_safetensors(stored, tmp_path / "fp8")))
    for name, expected in dense.tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name).double(), expected.double(), err_msg=name)
    assert hashes(tmp_path / "fp8") == hashes(save_safetensors(dense, tmp_path / "dense"))


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_number_is_decoded(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = np.arange(256, dtype=np.uint8).reshape(8, 32)
    stored, _ = quantised(llama(layers=1, heads=1, kv_heads=1), FORMS["tensor"])
    scaled = {QUERY: torch.from_numpy(bits).view(dtype), QUERY + "_scale_inv": torch.tensor(0.5)}
    path = save_safetensors(stored.changed(**scaled), tmp_path / "fp8")
    np.testing.assert_array_equal(open_checkpoint(str(path)).read(QUERY), NUMBERS[dtype](bits) / 2)


@pytest.mark.parametrize("save", ["safetensors", "sharded safetensors", "torch", "sharded torch"])
def test_whatever_file_holds_them(save: str, tmp_path: Path) -> None:
    stored, dense = quantised(llama(), FORMS["small block"])
    found = FORMATS[save](stored, tmp_path / "fp8")
    assert hashes(found) == hashes(save_safetensors(dense, tmp_path / "dense"))
    assert hashes(found) != hashes(save_safetensors(llama(), tmp_path / "other"))


def test_an_ingested_model_has_the_numbers_of_its_dense_values(tmp_path: Path) -> None:
    stored, dense = quantised(llama(), FORMS["small block"])
    store = tmp_path / "atlas"
    ingest_into(store, save_safetensors(stored, tmp_path / "fp8"), "fp8", ("raw", "folded"))
    ingest_into(store, save_safetensors(dense, tmp_path / "dense"), "dense", ("raw", "folded"))
    with open_atlas(store) as atlas:
        columns = "operator, label, status, closure, alpha, norm, sigma_max, cos_mean, spectral_radius"
        found, expected = (
            atlas.sql(f"SELECT {columns} FROM heads WHERE model = '{name}' ORDER BY ALL") for name in ("fp8", "dense")
        )
        dtype = atlas.sql("SELECT source_dtype FROM models WHERE model = 'fp8'").item()
    assert found.equals(expected)
    assert found.height == 16
    assert found.select(pl.col("closure").is_between(0, 1, closed="none").all()).item()
    assert dtype == "F8_E4M3"


def test_matrices_left_as_they_were_are_read_plainly(tmp_path: Path) -> None:
    stored, dense = quantised(llama(), FORMS["small block"])
    left = {name: tensor.bfloat16() for name, tensor in llama().tensors.items() if "v_proj" in name}
    plain = stored.without("v_proj").changed(**left)
    settings = {**FORMS["small block"].settings, "modules_to_not_convert": ["v_proj"]}
    path = save_safetensors(plain.configured(quantization_config=settings), tmp_path / "fp8")
    plan = plan_checkpoint(open_checkpoint(str(path)))
    assert plan.source_dtype == "BF16+F8_E4M3"
    assert hashes(path) == hashes(save_safetensors(dense.changed(**left), tmp_path / "dense"))


def test_the_settings_of_a_nested_configuration_count(tmp_path: Path) -> None:
    stored, dense = quantised(llama(), FORMS["small block"])
    config = {"model_type": "llava", "text_config": dict(stored.config)}
    path = save_safetensors(Model(config, stored.tensors), tmp_path / "fp8")
    checkpoint = open_checkpoint(str(path))
    np.testing.assert_array_equal(checkpoint.read(QUERY), dense.tensors[QUERY])


def test_a_scale_is_read_once_beside_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = quantised(llama(), FORMS["small block"])
    plan = plan_checkpoint(open_checkpoint(str(save_safetensors(stored, tmp_path / "fp8"))))
    checkpoint = plan.checkpoint
    assert checkpoint.companions(QUERY) == (QUERY + "_scale_inv",)
    assert checkpoint.companions("model.norm.weight") == ()
    names = [name for tensor in plan.tensors for name in (tensor.name, *checkpoint.companions(tensor.name))]
    expected = Counter(checkpoint.header(name).nbytes for name in names)
    reads: list[int] = []
    read_into = LocalFile.read_into

    def counted(file: LocalFile, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        read_into(file, offset, buffer)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    assert len(list(measure(plan, ComputeSettings(device="cpu")))) == 2
    assert Counter(reads) == expected
    assert len(names) == 16


def test_a_block_larger_than_the_matrix_costs_nothing(tmp_path: Path) -> None:
    huge = 2**62
    form = Form(BLOCK_FP8 | {"weight_block_size": [huge, huge]}, "weight_scale_inv", None, lambda out, width: (1, 1))
    stored, dense = quantised(llama(), form)
    checkpoint = open_checkpoint(str(save_safetensors(stored, tmp_path / "fp8")))
    np.testing.assert_array_equal(checkpoint.read(QUERY), dense.tensors[QUERY])


def changed(**tensors: Tensor) -> Model:
    return quantised(llama(), FORMS["small block"])[0].changed(**tensors)


def configured(**settings: Any) -> Model:
    return changed().configured(quantization_config={**FORMS["small block"].settings, **settings})


SCALE = QUERY + "_scale_inv"
CASES = {
    "no scale": (changed().without(SCALE), "the scale of F8_E4M3 weights is not known", SCALE, "none of them"),
    "two scales": (
        changed(**{QUERY + "_scale": torch.ones(1)}),
        "the scale of F8_E4M3 weights is not known",
        SCALE,
        f"{SCALE}, {QUERY}_scale",
    ),
    "a zero point": (
        changed(**{QUERY + "_zero_point": torch.ones(1)}),
        "the scale of F8_E4M3 weights is not known",
        SCALE,
        "_zero_point",
    ),
    "too few blocks": (
        changed(**{SCALE: torch.ones(2, 1)}),
        "the shape of an fp8 scale does not fit",
        "[] or [1] or [32] or [32, 1] or [2, 2] for weights [32, 32] in blocks of 24 x 20",
        "[2, 1]",
    ),
    "one block": (changed(**{SCALE: torch.ones(1, 1)}), "the shape of an fp8 scale does not fit", "[2, 2]", "[1, 1]"),
    "transposed rows": (
        changed(**{SCALE: torch.ones(1, 32)}),
        "the shape of an fp8 scale does not fit",
        "[32, 1]",
        "[1, 32]",
    ),
    "blocks of another size": (
        configured(weight_block_size=[16, 16, 1]),
        "the block of an fp8 scale has no size",
        "[128, 128]",
        "[16, 16, 1]",
    ),
    "an empty block": (
        configured(weight_block_size=[0, 16]),
        "the block of an fp8 scale has no size",
        "[128, 128]",
        "[0, 16]",
    ),
    "no blocks": (
        configured(weight_block_size=None),
        "the shape of an fp8 scale does not fit",
        "[32, 1] for weights [32, 32]",
        "[2, 2]",
    ),
    "an integer scale": (
        changed(**{SCALE: torch.ones(2, 2, dtype=torch.int32)}),
        "an fp8 scale is no float",
        "F8_E8M0",
        "I32",
    ),
    "integer weights": (
        changed(**{QUERY: torch.zeros(32, 32, dtype=torch.int8)}),
        "quantised with an unknown scheme with I8 weights",
        "fp8 with scales",
        QUERY,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_known_is_refused_from_headers(case: str, tmp_path: Path) -> None:
    model, what, expected, found = CASES[case]
    checkpoint = open_checkpoint(str(save_safetensors(model, tmp_path / "fp8")))
    with pytest.raises(CheckpointError) as caught:
        plan_checkpoint(checkpoint)
    assert what in caught.value.what
    assert expected in str(caught.value.expected)
    assert found in str(caught.value.found)
    assert str(tmp_path) in str(caught.value.where)


OTHER_SCHEMES = {
    "four bits": compressed_tensors("channel", num_bits=4),
    "integers": compressed_tensors("channel", type="int"),
    "groups": compressed_tensors("group", group_size=16),
    "packed": compressed_tensors("channel") | {"format": "pack-quantized"},
    "sparse": compressed_tensors("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "undescribed": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "modelopt without an algorithm": {"quant_method": "modelopt"},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
}


@pytest.mark.parametrize("scheme", OTHER_SCHEMES)
def test_other_schemes_stay_refused_by_name(scheme: str, tmp_path: Path) -> None:
    settings = OTHER_SCHEMES[scheme]
    stored, _ = quantised(llama(), FORMS["channel"])
    checkpoint = open_checkpoint(
        str(save_safetensors(stored.configured(quantization_config=settings), tmp_path / "model"))
    )
    named = {"modelopt": "ModelOpt"}.get(settings["quant_method"], settings["quant_method"])
    with pytest.raises(CheckpointError, match=f"quantised with {named}"):
        plan_checkpoint(checkpoint)
