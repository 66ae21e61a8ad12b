"""LoRA adapters merged into their base as it is read, against dense sums in numpy and against peft."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

import cli
from ingest.checkpoint import Checkpoint
from ingest.factors import ModelHashes, model_hashes
from ingest.pipeline import ComputeSettings, hash_layers, measure
from ingest.plan import plan_checkpoint
from ingest.safetensors_file import LocalFile
from ingest.source import open_checkpoint
from query import open_atlas
from stats.errors import CheckpointError
from tests.checkpoints import FORMATS, Model, gpt2, llama, save_gguf, save_safetensors

CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 4,
    "lora_alpha": 16,
    "fan_in_fan_out": False,
    "use_rslora": False,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
}
QUERY, VALUE, OUTPUT = (f"model.layers.1.self_attn.{name}_proj" for name in "qvo")
PREFIX = "base_model.model."


def factors(model: Model, modules: tuple[str, ...], rank: Callable[[str], int] = lambda module: 4) -> dict[str, Tensor]:
    """A and B of every module, in eighths so that their products are exact."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for module in modules:
        out, width = model.tensors[module + ".weight"].shape
        if module.split(".")[-1].startswith("c_"):
            out, width = width, out
        for name, shape in (("lora_A", (rank(module), width)), ("lora_B", (out, rank(module)))):
            tensors[f"{module}.{name}.weight"] = torch.randint(-8, 9, shape, generator=generator) / 8
    return tensors


def save_adapter(
    tensors: Mapping[str, Tensor], directory: Path, *, prefix: str = PREFIX, binary: bool = False, **config: Any
) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    (directory / "README.md").touch()
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    if binary:
        torch.save(named, directory / "adapter_model.bin")
    else:
        save_file(named, directory / "adapter_model.safetensors")
    return directory


def merged(
    model: Model, tensors: Mapping[str, Tensor], scale: Callable[[str], float], *, transposed: bool = False
) -> Model:
    """The model with every update added, in float64 by numpy."""
    sums = {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            a, b = (tensors[f"{module}.lora_{factor}.weight"].double().numpy() for factor in "AB")
            update = scale(module) * (b @ a)
            weight = model.tensors[module + ".weight"].double().numpy()
            sums[module + ".weight"] = torch.from_numpy(weight + (update.T if transposed else update))
    return model.changed(**sums)


def opened(adapter: Path, base: Path) -> Checkpoint:
    return open_checkpoint(str(adapter), base=str(base))


def hashes(checkpoint: Checkpoint) -> ModelHashes:
    return model_hashes(list(hash_layers(plan_checkpoint(checkpoint, ("raw", "folded")))))


def dense_hashes(model: Model, directory: Path) -> ModelHashes:
    return hashes(open_checkpoint(str(save_safetensors(model, directory))))


MODULES = (QUERY, VALUE, OUTPUT, "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj", "model.embed_tokens")
MODULES_OF_LAYERS = MODULES[:-1]


@pytest.mark.parametrize("form", ["safetensors", "sharded safetensors", "torch"])
@pytest.mark.parametrize("binary", [False, True])
def test_an_adapter_adds_its_product_to_the_base(form: str, binary: bool, tmp_path: Path) -> None:
    model = llama()
    update = factors(model, MODULES_OF_LAYERS)
    embedding = {"model.embed_tokens.lora_embedding_A": torch.ones(4, 48), QUERY + ".lora_B.bias": torch.ones(32)}
    base = FORMATS[form](model, tmp_path / "base")
    checkpoint = opened(save_adapter(update | embedding, tmp_path / "adapter", binary=binary), base)
    expected = merged(model, update, lambda module: 16 / 4)
    for name in (module + ".weight" for module in MODULES):
        torch.testing.assert_close(
            checkpoint.read(name).double(), expected.tensors[name].double(), rtol=0, atol=0, msg=name
        )
    assert hashes(checkpoint) == dense_hashes(expected, tmp_path / "dense")
    assert hashes(checkpoint) != hashes(open_checkpoint(str(base)))
    assert checkpoint.format == f"{'torch' if form == 'torch' else 'safetensors'}+lora"
    assert (checkpoint.name, checkpoint.source) == ("adapter", f"{tmp_path / 'adapter'} on {base}")


def layer_rank(module: str) -> int:
    return {QUERY: 3, VALUE: 2}.get(module, 4)


SCALES: dict[str, tuple[dict[str, Any], Callable[[str], float]]] = {
    "rslora": ({"use_rslora": True}, lambda module: 16 / math.sqrt(4)),
    "alpha a fraction": ({"lora_alpha": 0.5}, lambda module: 0.5 / 4),
    "alpha by name": (
        {"alpha_pattern": {"self_attn.v_proj": 6}},
        lambda module: (6 if "v_proj" in module else 16) / 4,
    ),
    "alpha by expression, the first counts": (
        {"alpha_pattern": {r"layers\.1\..*_proj": 2, "q_proj": 40, "proj": 50}},
        lambda module: (2 if ".1." in module else 16) / 4,
    ),
    "alpha by the end of a word only": ({"alpha_pattern": {"v_pro": 6, "proj": 7}}, lambda module: 16 / 4),
    "rank by name": (
        {"rank_pattern": {QUERY: 3, "1.self_attn.v_proj": 2}},
        lambda module: 16 / layer_rank(module),
    ),
    "rank and rslora": (
        {"rank_pattern": {QUERY: 3, "1.self_attn.v_proj": 2}, "use_rslora": True},
        lambda module: 16 / math.sqrt(layer_rank(module)),
    ),
    "null patterns": ({"alpha_pattern": None, "rank_pattern": None}, lambda module: 16 / 4),
}


@pytest.mark.parametrize("case", SCALES)
def test_scales(case: str, tmp_path: Path) -> None:
    config, scale = SCALES[case]
    model = llama()
    update = factors(
        model,
        MODULES_OF_LAYERS,
        layer_rank if config.get("rank_pattern") else lambda module: 4,
    )
    base = save_safetensors(model, tmp_path / "base")
    checkpoint = opened(save_adapter(update, tmp_path / "adapter", **config), base)
    expected = merged(model, update, scale)
    assert hashes(checkpoint) == dense_hashes(expected, tmp_path / "dense")


def test_factors_in_half_precision_are_multiplied_in_double(tmp_path: Path) -> None:
    model = llama(dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    update = {
        f"{VALUE}.lora_A.weight": torch.randn(4, 32, generator=generator).bfloat16(),
        f"{VALUE}.lora_B.weight": torch.randn(16, 4, generator=generator).bfloat16(),
    }
    checkpoint = opened(save_adapter(update, tmp_path / "adapter"), save_safetensors(model, tmp_path / "base"))
    expected = merged(model, update, lambda module: 4.0).tensors[VALUE + ".weight"]
    torch.testing.assert_close(checkpoint.read(VALUE + ".weight"), expected, rtol=1e-15, atol=1e-15)


def test_transposed_weights(tmp_path: Path) -> None:
    model = gpt2()
    update = factors(model, ("h.0.attn.c_attn", "h.1.attn.c_attn", "h.1.attn.c_proj"))
    base = save_safetensors(model, tmp_path / "base")
    adapter = save_adapter(update, tmp_path / "adapter", prefix=PREFIX + "transformer.", fan_in_fan_out=True)
    expected = merged(model, update, lambda module: 4.0, transposed=True)
    assert hashes(opened(adapter, base)) == dense_hashes(expected, tmp_path / "dense")
    wrong = save_adapter(update, tmp_path / "wrong", prefix=PREFIX + "transformer.", fan_in_fan_out=False)
    with pytest.raises(CheckpointError, match="does not fit the base") as caught:
        plan_checkpoint(opened(wrong, base))
    assert "fan_in_fan_out False" in str(caught.value.found)


def test_names_as_other_saves_have_them(tmp_path: Path) -> None:
    model, other = llama(), llama(seed=4)
    update = factors(model, (QUERY, VALUE, OUTPUT))
    base = save_safetensors(model, tmp_path / "base")
    expected = merged(
        model.changed(**{VALUE + ".weight": other.tensors[VALUE + ".weight"]}), update, lambda module: 4.0
    )
    norm = "model.layers.0.input_layernorm.weight"
    expected = expected.changed(**{norm: other.tensors[norm], OUTPUT + ".weight": other.tensors[OUTPUT + ".weight"]})
    named = {
        name.replace(".weight", ".default.weight"): tensor for name, tensor in update.items() if OUTPUT not in name
    }
    saved = {
        VALUE + ".base_layer.weight": other.tensors[VALUE + ".weight"],
        OUTPUT + ".modules_to_save.default.weight": other.tensors[OUTPUT + ".weight"],
        OUTPUT + ".original_module.weight": torch.zeros(1),
        norm: other.tensors[norm],
        "score.modules_to_save.weight": torch.ones(2, 32),
        "model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 32),
    }
    checkpoint = opened(save_adapter(named | saved, tmp_path / "adapter"), base)
    assert hashes(checkpoint) == dense_hashes(expected, tmp_path / "dense")
    assert checkpoint.companions(OUTPUT + ".weight") == ()
    assert checkpoint.header(OUTPUT + ".weight").file.endswith("adapter_model.safetensors")


WRAPPINGS: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {
    "the module has a word more": (lambda name: name.removeprefix("model."), lambda name: name),
    "the file has a word more": (lambda name: "module." + name, lambda name: name),
    "words in another order": (
        lambda name: "language_model." + name,
        lambda name: name.replace("model.", "model.language_model.", 1),
    ),
}


@pytest.mark.parametrize("case", WRAPPINGS)
def test_files_and_running_models_name_a_module_differently(case: str, tmp_path: Path) -> None:
    in_file, in_adapter = WRAPPINGS[case]
    model = llama()
    update = factors(model, MODULES_OF_LAYERS)
    tower = {
        f"vision_tower.encoder.layers.{layer}.self_attn.{name}_proj.weight": torch.ones(8, 8)
        for layer in range(2)
        for name in "qkvo"
    }
    base = save_safetensors(model.renamed(in_file), tmp_path / "base")
    adapter = save_adapter({in_adapter(name): tensor for name, tensor in update.items()}, tmp_path / "adapter")
    expected = merged(model, update, lambda module: 4.0)
    assert hashes(opened(adapter, base)) == dense_hashes(expected, tmp_path / "dense")
    with_tower = save_safetensors(model.renamed(in_file).changed(**tower), tmp_path / "with tower")
    name = in_file(VALUE + ".weight")
    assert torch.equal(opened(adapter, with_tower).read(name), expected.tensors[VALUE + ".weight"])


NEAREST: dict[str, tuple[str, list[str], str | None]] = {
    "the same name": ("layers.0.attn.q", ["model.layers.0.attn.q", "layers.0.attn.q"], "layers.0.attn.q"),
    "the longest common ending": (
        "model.tower.encoder.layers.0.attn.q",
        ["model.layers.0.attn.q", "tower.encoder.layers.0.attn.q"],
        "tower.encoder.layers.0.attn.q",
    ),
    "the numbers in order": ("decoder.block.1.layer.0.attn.q", ["decoder.block.0.layer.1.attn.q"], None),
    "another stack": ("decoder.layers.0.attn.q", ["encoder.layers.0.attn.q"], None),
}


@pytest.mark.parametrize("case", NEAREST)
def test_the_nearest_name_in_the_base_counts(case: str, tmp_path: Path) -> None:
    module, stored, expected = NEAREST[case]
    names = [name + ".weight" for name in stored]
    base = save_safetensors(Model({}, {name: torch.zeros(8, 8) for name in names}), tmp_path / "base")
    update = {f"{module}.lora_A.weight": torch.ones(4, 8), f"{module}.lora_B.weight": torch.ones(8, 4)}
    adapter = save_adapter(update, tmp_path / "adapter")
    if expected is None:
        with pytest.raises(CheckpointError, match="no one tensor for a module"):
            opened(adapter, base)
        return
    checkpoint = opened(adapter, base)
    assert [name for name in names if checkpoint.read(name).any()] == [expected + ".weight"]


def test_an_fp8_base_is_scaled_before_the_update_is_added(tmp_path: Path) -> None:
    model = llama()
    weight = model.tensors[VALUE + ".weight"].to(torch.float8_e4m3fn)
    scaled = {VALUE + ".weight": weight, VALUE + ".weight_scale_inv": torch.full((1, 1), 0.25)}
    update = factors(model, (VALUE,))
    stored = model.changed(**scaled).configured(quantization_config={"quant_method": "fp8"})
    base = save_safetensors(stored, tmp_path / "base")
    checkpoint = opened(save_adapter(update, tmp_path / "adapter"), base)
    expected = merged(model.changed(**{VALUE + ".weight": weight.double() / 4}), update, lambda module: 4.0)
    assert hashes(checkpoint) == dense_hashes(expected, tmp_path / "dense")
    names = ("weight_scale_inv", PREFIX + VALUE + ".lora_A.weight", PREFIX + VALUE + ".lora_B.weight")
    assert checkpoint.companions(VALUE + ".weight") == (f"{VALUE}.{names[0]}", *names[1:])
    saved = {VALUE + ".base_layer.weight": torch.ones(16, 32)}
    replacing = opened(save_adapter(update | saved, tmp_path / "replacing"), base)
    assert replacing.companions(VALUE + ".weight") == names[1:]
    expected = merged(model.changed(**{VALUE + ".weight": torch.ones(16, 32)}), update, lambda module: 4.0)
    assert torch.equal(replacing.read(VALUE + ".weight"), expected.tensors[VALUE + ".weight"])


def test_only_what_is_planned_is_read_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    base = save_safetensors(model, tmp_path / "base")
    adapter = save_adapter(factors(model, MODULES_OF_LAYERS), tmp_path / "adapter")
    plan = plan_checkpoint(opened(adapter, base))
    names = [name for tensor in plan.tensors for name in (tensor.name, *plan.checkpoint.companions(tensor.name))]
    expected = Counter(plan.checkpoint.header(name).nbytes for name in names)
    reads: list[int] = []
    read_into = LocalFile.read_into

    def counted(file: LocalFile, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        read_into(file, offset, buffer)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    assert len(list(measure(plan, ComputeSettings(device="cpu")))) == 2
    assert Counter(reads) == expected
    assert len(names) == 8 + 2 * 4


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def test_an_adapter_from_the_command_line(tmp_path: Path) -> None:
    model = llama()
    base = save_safetensors(model, tmp_path / "base")
    update = factors(model, MODULES_OF_LAYERS)
    adapter, store = save_adapter(update, tmp_path / "adapter"), tmp_path / "atlas"
    dense = save_safetensors(merged(model, update, lambda module: 4.0), tmp_path / "dense")
    planned = invoke("plan", adapter, "--base", base, "--format", "json")
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["format"] == "safetensors+lora"
    for arguments in ((adapter, "--base", base), (dense,), (base,)):
        result = invoke("ingest", *arguments, "--store", store)
        assert result.exit_code == 0, result.output
    with open_atlas(store) as atlas:
        columns = "label, closure, alpha, norm, trace"
        found, expected, before = (
            atlas.sql(f"SELECT {columns} FROM heads WHERE model = '{name}' ORDER BY ALL")
            for name in ("adapter", "dense", "base")
        )
        facts = atlas.sql("SELECT source, format FROM models WHERE model = 'adapter'").row(0)
    assert found.equals(expected)
    assert not found.equals(before)
    assert facts == (f"{adapter} on {base}", "safetensors+lora")


def plain_adapter(place: Path, **config: Any) -> Path:
    return save_adapter(factors(llama(), MODULES_OF_LAYERS), place, **config)


def base_and_adapter(place: Path, **config: Any) -> tuple[Path, Path]:
    place.mkdir()
    return plain_adapter(place / "adapter", **config), save_safetensors(llama(), place / "base")


def test_an_adapter_named_by_its_file(tmp_path: Path) -> None:
    adapter, base = base_and_adapter(tmp_path / "place")
    named = opened(adapter / "adapter_model.safetensors", base)
    assert (named.name, named.source) == ("adapter", f"{adapter} on {base}")
    with pytest.raises(CheckpointError, match="an adapter, not a model"):
        open_checkpoint(str(adapter / "adapter_model.safetensors"))


def test_a_cached_adapter_needs_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, base = base_and_adapter(tmp_path / "place")
    commits = {"adapter": "a" * 40, "base": "b" * 40}
    for folder in (adapter, base):
        storage = tmp_path / "hub" / f"models--org--{folder.name}"
        shutil.copytree(folder, storage / "snapshots" / commits[folder.name])
        (storage / "refs").mkdir()
        (storage / "refs" / "main").write_text(commits[folder.name], encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = open_checkpoint("org/adapter", base="org/base")
    assert hashes(checkpoint) == hashes(opened(adapter, base))
    assert (checkpoint.name, checkpoint.revision) == ("org/adapter", commits["adapter"])
    assert checkpoint.source == f"org/adapter on org/base at {commits['base']}"
    with pytest.raises(CheckpointError, match="an adapter, not a model"):
        open_checkpoint("org/adapter")
    with pytest.raises(CheckpointError, match="no adapter"):
        open_checkpoint("org/base", base="org/base")


@pytest.mark.parametrize("local", [False, True])
def test_without_its_base_an_adapter_asks_for_it(local: bool, tmp_path: Path) -> None:
    base = str(save_safetensors(llama(), tmp_path / "base")) if local else "org/base"
    adapter = plain_adapter(tmp_path / "adapter", base_model_name_or_path=base)
    with pytest.raises(CheckpointError, match="an adapter, not a model") as caught:
        open_checkpoint(str(adapter))
    assert base in str(caught.value.found)
    assert str(caught.value.remedy).endswith(f"--base {base}")


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "IA3": ({"peft_type": "IA3"}, "IA3"),
    "LoHa": ({"peft_type": "LOHA"}, "LOHA"),
    "prompts": ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING"),
    "no method": ({"peft_type": None}, "None"),
    "DoRA": ({"use_dora": True}, "DoRA"),
    "QALoRA": ({"use_qalora": True}, "QALoRA"),
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, "activated by tokens"),
    "replication": ({"layer_replication": [[0, 2], [1, 2]]}, "replicated layers"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    "OLoRA": ({"init_lora_weights": "olora"}, "olora"),
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    config, name = METHODS[method]
    adapter, base = base_and_adapter(tmp_path / "place", **config)
    with pytest.raises(CheckpointError, match="the adapter's method is") as caught:
        opened(adapter, base)
    assert name in caught.value.what
    assert "merge_and_unload" in str(caught.value.remedy)


def test_a_third_factor_is_refused(tmp_path: Path) -> None:
    update = factors(llama(), MODULES_OF_LAYERS) | {QUERY + ".lora_magnitude_vector": torch.ones(32)}
    with pytest.raises(CheckpointError, match="more than two matrices") as caught:
        opened(save_adapter(update, tmp_path / "adapter"), save_safetensors(llama(), tmp_path / "base"))
    assert QUERY + ".lora_magnitude_vector" in str(caught.value.found)


def edited(**tensors: Tensor | None) -> dict[str, Tensor]:
    """A's and B's with some replaced or, where None, taken out."""
    update: dict[str, Tensor | None] = {**factors(llama(), MODULES_OF_LAYERS), **tensors}
    return {name: tensor for name, tensor in update.items() if tensor is not None}


DOWN, UP = f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight"
DAMAGE: dict[str, tuple[dict[str, Tensor], dict[str, Any], str, str]] = {
    "half an update": (edited(**{UP: None}), {}, "half of an adapter's update", "lora_A.weight"),
    "two adapters": (
        edited(**{f"{QUERY}.lora_A.other.weight": torch.ones(4, 32)}),
        {},
        "the file holds several adapters",
        "lora_A.other.weight",
    ),
    "another width": (edited(**{DOWN: torch.ones(4, 16)}), {}, "does not fit the base", "lora_A [4, 16]"),
    "another height": (edited(**{UP: torch.ones(16, 4)}), {}, "does not fit the base", "lora_B [16, 4]"),
    "another rank": (edited(), {"r": 8}, "does not fit the base", "lora_A [4, 32]"),
    "no rank": (edited(), {"r": 0}, "gives no scale", "r 0"),
    "no alpha": (edited(), {"lora_alpha": "much"}, "gives no scale", "'much'"),
    "patterns a list": (edited(), {"rank_pattern": ["q_proj"]}, "rank_pattern does not map", "['q_proj']"),
    "no expression": (edited(), {"alpha_pattern": {"(": 3}}, "alpha_pattern does not map", "'('"),
    "integers": (edited(**{DOWN: torch.ones(4, 32, dtype=torch.int8)}), {}, "is no float", "lora_A I8"),
    "a module the base lacks": (
        factors(llama(layers=3), ("model.layers.2.self_attn.q_proj",)),
        {},
        "no one tensor for a module",
        "no such tensor",
    ),
    "nothing the base has": (
        {"experts.lora_A.weight": torch.ones(4, 32), "experts.lora_B.weight": torch.ones(32, 4)},
        {},
        "changes nothing that the base has",
        "model.embed_tokens.weight",
    ),
    "no updates": ({"unrelated": torch.ones(1)}, {}, "changes nothing that the base has", ""),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_adapters_that_do_not_fit(case: str, tmp_path: Path) -> None:
    update, config, what, found = DAMAGE[case]
    adapter, base = save_adapter(update, tmp_path / "adapter", **config), save_safetensors(llama(), tmp_path / "base")
    with pytest.raises(CheckpointError) as caught:
        plan_checkpoint(opened(adapter, base))
    assert what in caught.value.what
    assert found in str(caught.value.found)
    assert str(adapter) in str(caught.value.where)


def test_a_module_with_two_tensors_in_the_base(tmp_path: Path) -> None:
    model = llama()
    twice = {f"{part}.{name}": tensor.clone() for part in "ab" for name, tensor in model.tensors.items()}
    base = save_safetensors(Model(model.config, twice), tmp_path / "base")
    adapter = save_adapter(factors(model, (QUERY,)), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="no one tensor for a module") as caught:
        opened(adapter, base)
    assert f"a.{QUERY}.weight, b.{QUERY}.weight" in str(caught.value.found)


def test_a_gguf_base_has_other_names(tmp_path: Path) -> None:
    base = save_gguf(llama(), tmp_path / "base")
    with pytest.raises(CheckpointError, match="names are not those of the base") as caught:
        opened(plain_adapter(tmp_path / "adapter"), base)
    assert str(caught.value.remedy).endswith("trained on: org/base")


def test_a_quantised_base_is_refused_by_its_scheme(tmp_path: Path) -> None:
    model = llama().configured(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    base = save_safetensors(model, tmp_path / "base")
    with pytest.raises(CheckpointError, match="quantised with bitsandbytes"):
        plan_checkpoint(opened(plain_adapter(tmp_path / "adapter"), base))


@pytest.mark.parametrize("kind", ["model", "file", "absent", "no weights"])
def test_a_base_for_what_is_no_adapter(kind: str, tmp_path: Path) -> None:
    base = save_safetensors(llama(), tmp_path / "base")
    path = {"model": base, "file": base / "model.safetensors", "absent": tmp_path / "absent"}.get(kind)
    if path is None:
        path = plain_adapter(tmp_path / "adapter")
        (path / "adapter_model.safetensors").unlink()
    what = "no such checkpoint" if kind == "absent" else "no adapter"
    with pytest.raises(CheckpointError, match=what):
        opened(path, base)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("rslora", [False, True])
def test_a_merge_equals_that_of_peft(kind: str, rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model, targets = LlamaForCausalLM(config), ["q_proj", "v_proj", "o_proj", "up_proj", "embed_tokens"]
        patterns = {"rank_pattern": {"layers.1.self_attn.v_proj": 2}, "alpha_pattern": {r".*\.0\..*v_proj": 5}}
        saved = ["k_proj"]
    else:
        config = GPT2Config(vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=4)
        model, targets = GPT2LMHeadModel(config), ["c_attn", "attn.c_proj"]
        patterns = {"rank_pattern": {"h.1.attn.c_attn": 3}, "alpha_pattern": {}}
        saved = None
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=rslora,
        target_modules=targets,
        modules_to_save=saved,
        init_lora_weights=False,
        fan_in_fan_out=kind == "gpt2",
        **patterns,
    )
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    whole = adapted.merge_and_unload().state_dict()
    checkpoint = opened(tmp_path / "adapter", tmp_path / "base")
    plan = plan_checkpoint(checkpoint)
    before = open_checkpoint(str(tmp_path / "base"))
    different = 0
    for tensor in plan.tensors:
        expected = whole[tensor.name].double()
        torch.testing.assert_close(checkpoint.read(tensor.name).double(), expected, rtol=1e-6, atol=1e-6)
        different += not torch.allclose(before.read(tensor.name).double(), expected, rtol=1e-3, atol=1e-3)
    assert different == len(plan.tensors)
