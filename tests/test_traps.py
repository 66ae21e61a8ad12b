"""Traps of real checkpoints that no other test sets: read right, or refused in words that say what to do."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import Tensor

import cli
from ingest.families import FAMILIES
from query import open_atlas
from query.atlas import Atlas
from stats.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import Model, bert, gpt2, llama, save_config, save_gguf, save_safetensors, save_torch
from tests.ingesting import ingest_into
from tests.measuring import numbers, operators_of, plan

STEM = "model.layers.{layer}.self_attn."


def operators(model: Model, place: Path, operator: Any = "raw") -> list[tuple[Tensor, Tensor]]:
    return operators_of(plan(save_safetensors(model, place), (operator,)), operator)


def assert_same_operators(model: Model, expected: Model, place: Path, operator: Any = "raw") -> None:
    found, same = operators(model, place / "found", operator), operators(expected, place / "expected", operator)
    assert len(found) == len(same)
    for (ov, qk), (same_ov, same_qk) in zip(found, same, strict=True):
        assert torch.equal(ov, same_ov)
        assert torch.equal(qk, same_qk)


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        plan(path)
    return caught.value


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Configurations


KV_ABSENT = {
    "mistral": 8, "mixtral": 8, "phimoe": 8, "jamba": 8, "bamba": 8, "falcon_h1": 8, "lfm2": 8, "nemotron_h": 8,
    "qwen2": 32, "qwen3": 32, "qwen2_moe": 16, "qwen3_moe": 4, "gemma": 16, "gemma2": 4, "gemma3_text": 4,
    "stablelm": 32, "starcoder2": 2, "gpt_oss": 8, "glm": 2, "glm4": 2, "glm4_moe": 8, "smollm3": 4, "helium": 20,
    "seed_oss": 8, "ernie4_5": 2, "exaone4": 32, "bitnet": 5, "dots1": 32, "minimax_m2": 8, "minimax": 8,
    "llama4_text": 8, "qwen3_next": 2, "qwen3_5_text": 4, "gemma3n_text": 2,
    "llama": None, "olmo": None, "phi": None, "phi3": None, "cohere": None, "granite": None, "nemotron": None,
}  # fmt: skip
"""Key/value heads of the model classes where the configuration has none; None is as many as query heads."""

HEAD_DIM_ABSENT = {
    "gemma": 256, "gemma2": 256, "gemma3_text": 256, "gemma3n_text": 256, "qwen3": 128, "qwen3_moe": None,
    "glm": 128, "glm4": 128, "glm4_moe": None, "gpt_oss": 64, "helium": 128, "seed_oss": 128, "ernie4_5": 128,
    "minimax_m2": 128, "llama4_text": 128, "nemotron_h": 128, "qwen3_next": 256, "qwen3_5_text": 256,
    "mistral": None, "llama": None, "t5": 64, "mt5": 64,
}  # fmt: skip


def test_absent_counts_are_those_of_the_class() -> None:
    for name, expected in KV_ABSENT.items():
        row = FAMILIES[name][0]
        heads = row.setting({}, *row.keys.heads)
        found = row.setting({}, *row.keys.kv_heads)
        assert (heads if found is None else found) == (heads if expected is None else expected), name
    for name, expected in HEAD_DIM_ABSENT.items():
        row = FAMILIES[name][0]
        width, heads = row.setting({}, *row.keys.width), row.setting({}, *row.keys.heads)
        found = row.setting({}, *row.keys.head_dim)
        assert (found or width // heads) == (expected or width // heads), name


def test_falcon_has_one_key_value_head_whatever_its_configuration_says(tmp_path: Path) -> None:
    heads, size, width = 71, 2, 142
    fused, output = normal((heads + 2) * size, width), normal(width, width, seed=1)
    config = {
        "model_type": "falcon",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_kv_heads": heads,
        "multi_query": True,
        "new_decoder_architecture": False,
    }
    stem = "transformer.h.0.self_attention."
    model = Model(config, {f"{stem}query_key_value.weight": fused, f"{stem}dense.weight": output})
    planned = plan(save_safetensors(model, tmp_path / "model"))
    assert (planned.layers[0].n_heads, planned.layers[0].n_kv_heads, planned.layers[0].d_head) == (71, 1, 2)
    ((ov, qk),) = operators_of(planned)
    value, key = fused[-size:].double(), fused[-2 * size : -size].double()
    for head in (0, 1, 70):
        rows = slice(head * size, (head + 1) * size)
        torch.testing.assert_close(ov[head], output[:, rows].double() @ value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(qk[head], fused[rows].double().mT @ key, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("said", [{}, {"head_dim": 4, "num_key_value_heads": 1}, {"head_dim": None}], ids=str)
def test_latent_attention_ignores_the_usual_head_keys(said: dict[str, Any], tmp_path: Path) -> None:
    width, heads, rank, nope, rope, value = 24, 3, 10, 6, 4, 5
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }
    shapes = {
        "q_proj": (heads * (nope + rope), width),
        "kv_a_proj_with_mqa": (rank + rope, width),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (width, heads * value),
    }
    tensors = {f"{STEM.format(layer=0)}{name}.weight": normal(*shape) for name, shape in shapes.items()}
    ((ov, _),) = operators(Model(config | said, tensors), tmp_path / "model")
    down, gain, up, output = (
        tensors[f"{STEM.format(layer=0)}{name}.weight"].double()
        for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    )
    for head in range(heads):
        read = up.view(heads, nope + value, rank)[head, nope:] @ torch.diag(gain) @ down[:rank]
        expected = output[:, head * value : (head + 1) * value] @ read
        torch.testing.assert_close(ov[head], expected, rtol=1e-12, atol=1e-12)


def test_a_width_that_heads_fill_does_not_hide_a_default_head_size(tmp_path: Path) -> None:
    model = llama(model_type="helium").configured(head_dim=...)
    error = refused(save_safetensors(model, tmp_path / "model"))
    assert error.what == "a tensor's shape contradicts the configuration"
    assert "head size 128" in str(error.expected)


def test_shared_values_where_the_layout_has_none_are_refused(tmp_path: Path) -> None:
    model = llama(model_type="gpt_neox").without("self_attn")
    fused = {"query_key_value.weight": normal(64, 32), "dense.weight": normal(32, 32)}
    tensors = {f"gpt_neox.layers.{layer}.attention.{name}": fused[name] + layer for layer in range(2) for name in fused}
    error = refused(save_safetensors(Model(model.config, tensors), tmp_path / "model"))
    assert error.what == "the layout has a key and a value for every query head"
    assert (error.expected, error.found) == ("4 key/value heads", "2 key/value heads in the configuration")


def test_words_for_layers_differ_by_version(tmp_path: Path) -> None:
    model = llama(model_type="granitemoehybrid", layers=2).without("layers.0.self_attn")
    for number, words in enumerate((["mamba", "attention"], ["linear_attention", "full_attention"], None)):
        planned = plan(save_safetensors(model.configured(layer_types=words), tmp_path / str(number)))
        assert [layer.layer for layer in planned.layers] == [1]
        assert [item.layer for item in planned.skipped] == [0]


def test_rotary_settings_are_irrelevant(tmp_path: Path) -> None:
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": None, "rope_theta": 3}
    assert_same_operators(llama().configured(**settings), llama(), tmp_path)


def test_a_shared_block_that_reads_two_streams_is_refused(tmp_path: Path) -> None:
    error = refused(save_safetensors(llama(model_type="zamba2"), tmp_path / "model"))
    assert error.what == "the attention of zamba2 cannot be read"
    assert "T is not square" in str(error.found)


# Tensors beside the projections, and their names


def test_square_transposed_matrices_are_read_as_the_family_has_them(tmp_path: Path) -> None:
    model = gpt2()
    for layer, (ov, qk) in enumerate(operators(model, tmp_path / "model")):
        fused = model.tensors[f"h.{layer}.attn.c_attn.weight"].double()
        output = model.tensors[f"h.{layer}.attn.c_proj.weight"].double()
        for head in range(4):
            rows = slice(8 * head, 8 * head + 8)
            query, key, value = (fused[:, 32 * part : 32 * part + 32][:, rows] for part in range(3))
            torch.testing.assert_close(ov[head], output[rows].mT @ value.mT, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(qk[head], query @ key.mT, rtol=1e-12, atol=1e-12)
            assert (ov[head] - output.mT[rows].mT @ value.mT).abs().max() > 0.01


def with_added(model: Model, stem: str, **added: Tensor) -> Model:
    """The model with tensors below a stem in both layers; ``__`` is a dot."""
    return model.changed(
        **{
            f"{stem.format(layer=layer)}{name.replace('__', '.')}": tensor.clone()
            for name, tensor in added.items()
            for layer in range(2)
        }
    )


def test_masks_and_rotary_tables_are_no_weights(tmp_path: Path) -> None:
    mask = torch.ones(1, 1, 16, 16)
    masked = with_added(gpt2(), "h.{layer}.attn.", bias=mask, masked_bias=torch.tensor(-1e4))
    assert_same_operators(masked, gpt2(), tmp_path / "gpt2", "folded")
    scale = torch.ones(())
    rotary = with_added(llama(), STEM, rotary_emb__inv_freq=torch.ones(4), k_scale=scale, v_scale=scale)
    assert_same_operators(rotary, llama(), tmp_path / "llama", "folded")
    neox = llama(model_type="gpt_neox").without("self_attn").configured(num_key_value_heads=...)
    fused = with_added(
        neox, "model.layers.{layer}.attention.", query_key_value__weight=normal(96, 32), dense__weight=normal(32, 32)
    )
    masked = with_added(
        fused, "model.layers.{layer}.attention.", bias=mask.bool(), masked_bias=scale, rotary_emb__inv_freq=scale
    )
    assert_same_operators(masked, fused, tmp_path / "neox", "folded")


def test_gains_called_gamma_are_gains(tmp_path: Path) -> None:
    plain = with_added(
        bert().configured(model_type="esm"),
        "bert.encoder.layer.{layer}.attention.",
        LayerNorm__weight=1 + normal(32),
        LayerNorm__bias=normal(32),
    )
    old = plain.renamed(
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    )
    assert any(name.endswith("LayerNorm.gamma") for name in old.tensors)
    assert_same_operators(old, plain, tmp_path, "folded")
    (ov, _), *_ = operators(plain, tmp_path / "folded", "folded")
    (raw, _), *_ = operators(plain, tmp_path / "raw")
    assert (ov - raw).abs().max() > 0.01


def test_a_prefix_written_twice(tmp_path: Path) -> None:
    doubled = bert().renamed(lambda name: name.replace("encoder.layer.", "encoder.encoder.layer."))
    assert_same_operators(doubled, bert(), tmp_path)


def test_blocks_that_predict_further_tokens_stand_apart(tmp_path: Path) -> None:
    ahead = {
        name.replace("model.layers.0.", "mtp.layers.0."): tensor.clone()
        for name, tensor in llama(layers=1, seed=3).tensors.items()
        if "layers.0" in name
    }
    model = llama().changed(**ahead)
    assert_same_operators(model, llama(), tmp_path)
    assert plan(tmp_path / "found").ignored_prefixes == ("mtp.",)


# Files


def test_a_tied_name_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert_same_operators(llama().without("lm_head"), llama(), tmp_path / "head", "folded")
    assert_same_operators(llama().without("embed_tokens"), llama(), tmp_path / "embedding", "folded")


def test_names_that_share_storage_in_a_torch_file(tmp_path: Path) -> None:
    query, key, value, output = (STEM.format(layer=0) + f"{name}_proj.weight" for name in "qkvo")
    model = llama(kv_heads=4)
    shared = torch.cat([model.tensors[name] for name in (query, key, value)])
    aliased = dict(model.tensors) | {
        query: shared[:32],
        key: shared[32:64],
        value: shared[64:],
        output: model.tensors[query],
    }
    apart = model.changed(**{output: model.tensors[query].clone()})
    path = save_torch(Model(model.config, aliased), tmp_path / "aliased")
    before = (path / "pytorch_model.bin").read_bytes()
    found = numbers(plan(path, ("raw", "folded")))
    expected = numbers(plan(save_safetensors(apart, tmp_path / "apart"), ("raw", "folded")))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=str(name))
    assert (path / "pytorch_model.bin").read_bytes() == before


class TensorsApart(pickle.Pickler):
    """Pickles tensors as numbers that stand for them."""

    def __init__(self, stream: io.BytesIO, numbers: Mapping[int, int]) -> None:
        super().__init__(stream, protocol=2)
        self.numbers = numbers

    def persistent_id(self, value: Any) -> str | None:
        return str(self.numbers[id(value)]) if isinstance(value, Tensor) else None


def save_tar(model: Model, directory: Path) -> Path:
    """``pytorch_model.bin`` as PyTorch wrote it before 0.1.10: a tar of pickles and storages."""
    save_config(model, directory)
    count = len(model.tensors)
    storages, tensors, whole = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pickle.dump(count, storages, protocol=2)
    pickle.dump(count, tensors, protocol=2)
    for key, tensor in enumerate(model.tensors.values()):
        pickle.dump((key, "cpu", torch.FloatStorage), storages, protocol=2)
        storages.write(struct.pack("<q", tensor.numel()) + tensor.numpy().tobytes())
        pickle.dump((count + key, key, torch.FloatTensor), tensors, protocol=2)
        tensors.write(struct.pack(f"<ii{2 * tensor.ndim + 1}q", tensor.ndim, 0, *tensor.shape, *tensor.stride(), 0))
    pickle.dump([], storages, protocol=2)
    TensorsApart(whole, {id(tensor): count + key for key, tensor in enumerate(model.tensors.values())}).dump(
        dict(model.tensors)
    )
    parts = {
        "sys_info": pickle.dumps({"protocol_version": 1000, "little_endian": True}, protocol=2),
        "pickle": whole.getvalue(),
        "storages": storages.getvalue(),
        "tensors": tensors.getvalue(),
    }
    with tarfile.open(directory / "pytorch_model.bin", "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return directory


def test_a_file_of_another_layout_of_names_is_listed(tmp_path: Path) -> None:
    names = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk"}
    names |= {"self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "model.layers": "layers"}

    def original(name: str) -> str:
        for new, old in names.items():
            name = name.replace(new, old)
        return name

    model = llama().renamed(original)
    save_config(model, tmp_path / "alone")
    save_file(dict(model.tensors), tmp_path / "alone" / "consolidated.safetensors")
    error = refused(tmp_path / "alone")
    assert error.what == "no attention found in the checkpoint"
    assert "layers.0.attention.wq.weight" in str(error.found)

    save_safetensors(llama(), tmp_path / "both")
    save_file(dict(model.tensors), tmp_path / "both" / "consolidated.safetensors")
    (ov, _), *_ = operators_of(plan(tmp_path / "both"))
    assert torch.equal(ov, operators(llama(), tmp_path / "plain")[0][0])


def test_products_beyond_half_precision(tmp_path: Path) -> None:
    large = llama(d_model=32).cast(torch.float16)
    grown = {
        name: (3000 * tensor.double()).to(torch.float16) if "_proj" in name else tensor
        for name, tensor in large.tensors.items()
    }
    model = large.changed(**grown)
    (ov, qk), *_ = operators(model, tmp_path / "half")
    stem = STEM.format(layer=0)
    value, output = (grown[f"{stem}{name}_proj.weight"] for name in "vo")
    assert (output[:, :8] @ value[:8]).isinf().any()
    torch.testing.assert_close(ov[0], output[:, :8].double() @ value[:8].double(), rtol=1e-12, atol=0)
    assert ov.isfinite().all()
    assert qk.isfinite().all()
    with_store = tmp_path / "atlas"
    ingest_into(with_store, tmp_path / "half", "half")
    with open_atlas(with_store) as atlas:
        assert set(atlas.sql("SELECT status FROM heads")["status"]) == {"ok"}
        norm = atlas.sql("SELECT norm FROM heads WHERE layer = 0 AND head = 0").item()
    assert norm == pytest.approx(torch.linalg.matrix_norm(ov[0]).item(), rel=1e-9)


# Quantised weights


QUERY = STEM.format(layer=1) + "q_proj"
SMALL = torch.ones(2, 2)
BYTES = torch.zeros(32, 16, dtype=torch.uint8)

BY_CONFIGURATION = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "compressed-tensors of NVFP4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "MXFP4": {"quant_method": "mxfp4"},
    "BitNet": {"quant_method": "bitnet"},
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "HQQ": {"quant_method": "hqq"},
}

BY_TENSORS: dict[str, dict[str, Tensor]] = {
    "compressed-tensors": {".weight_packed": torch.zeros(32, 4, dtype=torch.int32), ".weight_scale": SMALL},
    "NVFP4": {
        ".weight_packed": BYTES,
        ".weight_scale": torch.ones(32, 2).to(torch.float8_e4m3fn),
        ".weight_global_scale": torch.ones(1),
    },
    "MXFP4": {"_blocks": BYTES, "_scales": torch.zeros(32, 1, dtype=torch.uint8)},
    "MLX": {".weight": torch.zeros(32, 4, dtype=torch.uint32), ".scales": SMALL, ".biases": SMALL + 1},
    "an unknown scheme with U8 weights": {".weight": BYTES, ".weight_scale": torch.ones(1)},
}
"""What each scheme stores in the place of a projection; a BitNet file does not say so itself."""


@pytest.mark.parametrize("scheme", BY_CONFIGURATION)
def test_a_scheme_that_the_configuration_names(scheme: str, tmp_path: Path) -> None:
    model = llama().configured(quantization_config=BY_CONFIGURATION[scheme])
    error = refused(save_safetensors(model, tmp_path / "model"))
    assert error.what == f"the weights are quantised with {scheme.removesuffix(' of NVFP4')}"
    assert "dequantised copy" in str(error.remedy)


@pytest.mark.parametrize("save", [save_safetensors, save_torch])
@pytest.mark.parametrize("scheme", BY_TENSORS)
def test_a_scheme_that_only_tensors_give_away(scheme: str, save: Callable[..., Path], tmp_path: Path) -> None:
    packed = {QUERY + ending: tensor for ending, tensor in BY_TENSORS[scheme].items()}
    error = refused(save(llama().without(QUERY).changed(**packed), tmp_path / "model"))
    assert error.what == f"the weights are quantised with {scheme}"
    assert QUERY in str(error.found)


# The command line


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def test_a_tar_from_the_first_pytorch_is_refused_with_how_to_convert_it(tmp_path: Path) -> None:
    path = save_tar(llama(layers=1), tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.load(path / "pytorch_model.bin", weights_only=False)
    for name, tensor in llama(layers=1).tensors.items():
        assert torch.equal(loaded[name], tensor)
    result = invoke("ingest", path, "--store", tmp_path / "atlas")
    assert result.exit_code == 1
    assert "not a readable PyTorch checkpoint" in result.stderr
    assert "tar format" in result.stderr
    assert "load it where you trust it and save it as safetensors" in result.stderr
    assert "weights_only=False" not in result.stderr
    assert not (tmp_path / "atlas").exists()


def test_a_nested_configuration_without_head_counts(tmp_path: Path) -> None:
    held = llama(heads=8, kv_heads=4, d_head=256).tensors
    tensors = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in held.items()}
    text = {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 2}
    path = save_safetensors(Model({"model_type": "gemma3", "text_config": text}, tensors), tmp_path / "model")
    result = invoke("plan", path, "--format", "json")
    assert result.exit_code == 0, result.output
    (stack,) = json.loads(result.stdout)["stacks"]
    assert (stack["heads_per_layer"], stack["kv_heads_per_layer"], stack["d_head"]) == (8, 4, 256)
    plain = llama(heads=8, kv_heads=4, d_head=256)
    for (ov, qk), (same_ov, same_qk) in zip(
        operators_of(plan(path)), operators(plain, tmp_path / "plain"), strict=True
    ):
        assert torch.equal(ov, same_ov)
        assert torch.equal(qk, same_qk)


# One model, three formats, three shardings


def save_sharded(model: Model, directory: Path, count: int, binary: bool) -> Path:
    """The tensors dealt over files in turn, so that every layer is torn, with an index."""
    save_config(model, directory)
    stem, ending = ("pytorch_model", "bin") if binary else ("model", "safetensors")
    names = list(model.tensors)
    files = {
        f"{stem}-{number + 1:05d}-of-{count:05d}.{ending}": {name: model.tensors[name] for name in names[number::count]}
        for number in range(count)
    }
    for file, tensors in files.items():
        (torch.save if binary else save_file)(dict(tensors), directory / file)
    checkpoints.save_index(files, directory / f"{stem}.{ending}.index.json")
    return directory


def save_gguf_parts(model: Model, directory: Path, count: int) -> Path:
    """The tensors of a GGUF file over several, each with as many as the first."""
    from ingest.gguf_file import GgufFile
    from tests.gguf_conversion import save

    whole = GgufFile(save_gguf(model, directory / "whole"))
    settings = {key.removeprefix("llama."): value for key, value in whole.metadata.items() if key.startswith("llama.")}
    tensors = {name: whole.read(name) for name in whole.headers}
    (directory / "parts").mkdir()
    save("llama", settings, tensors, directory / "parts" / "model.gguf", split_max_tensors=-(-len(tensors) // count))
    assert len(list((directory / "parts").iterdir())) == count
    return directory / "parts"


SAVED: Mapping[str, Callable[[Model, Path], Path]] = {
    "safetensors": save_safetensors,
    "safetensors in 2": lambda model, place: save_sharded(model, place, 2, binary=False),
    "safetensors in 5": lambda model, place: save_sharded(model, place, 5, binary=False),
    "torch": save_torch,
    "torch in 2": lambda model, place: save_sharded(model, place, 2, binary=True),
    "torch in 5": lambda model, place: save_sharded(model, place, 5, binary=True),
    "gguf": save_gguf,
    "gguf in 2": lambda model, place: save_gguf_parts(model, place, 2),
    "gguf in 5": lambda model, place: save_gguf_parts(model, place, 5),
}


def rows(atlas: Atlas, table: str, model: str) -> Any:
    return atlas.sql(f"SELECT * EXCLUDE (model) FROM {table} WHERE model = $model ORDER BY ALL", {"model": model})


def test_three_formats_in_three_shardings_are_one_model(tmp_path: Path) -> None:
    model = llama()
    saved = {form: save(model, tmp_path / form) for form, save in SAVED.items()}
    saved["other"] = save_safetensors(llama(seed=1), tmp_path / "other")
    for form, path in saved.items():
        ingest_into(tmp_path / "atlas", path, form)
    with open_atlas(tmp_path / "atlas") as atlas:
        hashes = dict(atlas.sql("SELECT model, content_hash FROM models").iter_rows())
        assert len({hashes[form] for form in SAVED}) == 1
        assert hashes["other"] != hashes["gguf"]
        for table in ("heads", "spectra", "qk", "pairs", "layers"):
            expected = rows(atlas, table, "safetensors")
            assert expected.height > 0
            for form in SAVED:
                assert rows(atlas, table, form).equals(expected), (table, form)
            assert not rows(atlas, table, "other").equals(expected), table
