"""Every stack of every multimodal model agrees with the running heads, and keeps apart from the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import cli
from ingest.checkpoint import Checkpoint
from ingest.family import Family
from ingest.plan import Operator, Plan, plan_checkpoint
from ingest.recognition import recognise
from ingest.source import open_checkpoint
from ingest.towers import TOWERS, WRAPPED
from stats.errors import CheckpointError
from tests.building import randomised
from tests.measuring import operators_of
from tests.probing_towers import ProbedAttention, probe_tower
from tests.test_families import CONFIG, EXACT, ROUNDED, WEIGHTS, largest_error, misalignment
from tests.tower_variants import TOWER_VARIANTS

pytestmark = pytest.mark.usefixtures("one_thread")

STACKS = [(name, stack) for name, variant in TOWER_VARIANTS.items() for stack in variant.stacks]
every_stack = pytest.mark.parametrize(("name", "stack"), STACKS)


@dataclass(frozen=True)
class Subject:
    """A saved model, and what probing each of its stacks found."""

    folder: Path
    stacks: dict[str, list[ProbedAttention]]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Builds, saves and probes a variant at first use."""

    @cache
    def make(name: str) -> Subject:
        variant, folder = TOWER_VARIANTS[name], tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = random_model(name)
            model.save_pretrained(folder)
            model = model.double()
            stacks = {stack: probe_tower(model, tower) for stack, tower in variant.stacks.items()}
        return Subject(folder, stacks)

    return make


def random_model(name: str) -> Any:
    """A tiny model in float32 whose biases, gains and matrices are all random."""
    import transformers

    variant = TOWER_VARIANTS[name]
    config = transformers.AutoConfig.for_model(variant.model_type, **variant.config)
    model_class = getattr(transformers, variant.model_class)
    build = model_class.from_config if variant.model_class.startswith("Auto") else model_class._from_config
    return randomised(build(config, attn_implementation="eager"))


def plan(folder: Path, *operators: Operator) -> Plan:
    return plan_checkpoint(open_checkpoint(str(folder)), operators or ("raw",))


def test_every_row_has_a_variant() -> None:
    planned = {(stack.model_type, stack.stack) for stack in TOWERS}
    assert planned <= recognised_rows()


def recognised_rows() -> set[tuple[str, str]]:
    """Families of the stacks of all variants, by configuration alone."""
    import transformers

    found = set()
    for variant in TOWER_VARIANTS.values():
        config = transformers.AutoConfig.for_model(variant.model_type, **variant.config).to_dict()
        checkpoint = Checkpoint("memory", variant.model_type, "safetensors", "transformers", config, {}, {})
        found |= {(stack.family.model_type, stack.family.stack) for stack in recognise(checkpoint, None).stacks}
    return found


@every_stack
def test_operators_are_those_of_the_running_heads(name: str, stack: str, subject: Callable[[str], Subject]) -> None:
    planned, probed = plan(subject(name).folder), subject(name).stacks[stack]
    assert list(TOWER_VARIANTS[name].stacks) == list(dict.fromkeys(layer.stack for layer in planned.layers))
    numbers = tuple(layer.layer for layer in planned.layers if layer.stack == stack)
    assert numbers == TOWER_VARIANTS[name].stacks[stack].layers == tuple(block.layer for block in probed)
    assert planned.ignored_prefixes == ()
    for (ov, qk), block in zip(operators_of(planned, "raw", stack), probed, strict=True):
        assert largest_error(ov, block.ov).max() < EXACT
        assert misalignment(qk, block.qk).max() < ROUNDED


@every_stack
def test_folded_operators_contain_the_running_norms(name: str, stack: str, subject: Callable[[str], Subject]) -> None:
    saved = subject(name)
    reading = TOWER_VARIANTS[name].stacks[stack]
    operator: Operator = "raw" if reading.post_norm else "folded"
    planned = plan(saved.folder, operator)
    for (ov, qk), block in zip(operators_of(planned, operator, stack), saved.stacks[stack], strict=True):
        assert (block.feeding is None) == reading.post_norm
        before = torch.eye(reading.width, dtype=torch.float64) if block.feeding is None else block.feeding
        source = torch.eye(block.ov.shape[-1], dtype=torch.float64) if reading.source_width else before
        after = torch.eye(reading.width, dtype=torch.float64) if block.branch is None else block.branch
        assert largest_error(ov, after @ block.ov @ source).max() < ROUNDED
        assert misalignment(qk, before.mT @ block.qk @ source).max() < ROUNDED
        if not reading.post_norm:
            assert misalignment(qk, block.qk).min() > 0.001


@every_stack
def test_operators_and_attention_number_heads_alike(name: str, stack: str, subject: Callable[[str], Subject]) -> None:
    planned = plan(subject(name).folder)
    for (ov, qk), block in zip(operators_of(planned, "raw", stack), subject(name).stacks[stack], strict=True):
        by_head = block.weights @ block.tokens @ ov.mT
        torch.testing.assert_close(by_head.sum(0), block.written, rtol=0, atol=ROUNDED)
        shifted = block.weights.roll(1, 0) @ block.tokens @ ov.mT
        assert (shifted.sum(0) - block.written).abs().max() > 0.1
        assert largest_error(ov.roll(1, 0), block.ov).min() > 0.1
        assert misalignment(qk.roll(1, 0), block.qk).min() > 0.1


def renamed(folder: Path, target: Path, prefixes: dict[str, str], config: dict[str, Any] | None = None) -> Path:
    """The checkpoint with every prefix of a tensor's name replaced, and another configuration if given."""
    target.mkdir(exist_ok=True)
    tensors = {new_name(name, prefixes): values for name, values in load_file(folder / WEIGHTS).items()}
    save_file(tensors, target / WEIGHTS)
    if config is None:
        shutil.copy(folder / CONFIG, target)
    else:
        (target / CONFIG).write_text(json.dumps(config))
    return target


def new_name(name: str, prefixes: dict[str, str]) -> str:
    old = next((old for old in prefixes if name.startswith(old)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return config


def assert_same_heads(planned: Plan, original: Plan, prefixes: dict[str, str]) -> None:
    """The same layers of the same stacks, read from the renamed tensors."""
    assert [(layer.stack, layer.layer, layer.sizes) for layer in planned.layers] == [
        (layer.stack, layer.layer, layer.sizes) for layer in original.layers
    ]
    for layer, same in zip(planned.layers, original.layers, strict=True):
        assert layer.tensors == {role: new_name(name, prefixes) for role, name in same.tensors.items()}


HUB_TOWER = {"vision_tower.": "vision_tower.vision_model."}
PREFIXES: dict[str, tuple[str, dict[str, str]]] = {
    "hub and 4.x tower": ("gemma3", HUB_TOWER),
    "tower and text under model": (
        "llava",
        {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower.vision_model."},
    ),
    "text under text_model": ("idefics3", {"model.text_model.": "text_model.model."}),
    "visual under model": ("qwen2.5-vl", {"visual.": "model.visual.", "model.": "model.language_model."}),
    "tripled language_model": (
        "qwen3-vl",
        {"model.language_model.": "model.language_model.language_model.language_model."},
    ),
    "doubled encoder": ("clip-vision", {"encoder.": "encoder.encoder."}),
    "doubled encoder beside text": ("llava", {"vision_tower.encoder.": "vision_tower.encoder.encoder."}),
    "text model with its prefix": ("clip-text", {"": "text_model."}),
    "vision model with its prefix": ("siglip-vision", {"": "vision_model."}),
    "thinker": ("qwen2.5-omni", {"": "thinker."}),
    "distributed": ("clip", {"": "module."}),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_stacks_are_found_under_other_prefixes(case: str, subject: Callable[[str], Subject], tmp_path: Path) -> None:
    name, prefixes = PREFIXES[case]
    folder = subject(name).folder
    planned = plan(renamed(folder, tmp_path, prefixes), "folded")
    assert_same_heads(planned, plan(folder, "folded"), prefixes)
    assert planned.ignored_prefixes == ()


def test_the_talker_beside_a_thinker_is_left_aside(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("qwen2.5-omni").folder
    thinker = config_of(folder)
    thinker.pop("model_type")
    renamed(folder, tmp_path, {"": "thinker."}, {"model_type": "qwen2_5_omni", "thinker_config": thinker})
    tensors = load_file(tmp_path / WEIGHTS)
    talker = {
        name.replace("thinker.model.", "talker.model."): values.clone()
        for name, values in tensors.items()
        if name.startswith("thinker.model.")
    }
    save_file(tensors | talker, tmp_path / WEIGHTS)
    planned = plan(tmp_path)
    assert_same_heads(planned, plan(folder), {"": "thinker."})
    assert planned.ignored_prefixes == ("talker.model.",)
    assert planned.recognition.by.startswith("thinker_config.text_config.model_type, ")


def test_sizes_of_a_text_at_the_top_level(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("qwen2-vl").folder
    config = config_of(folder)
    flat = config.pop("text_config") | config
    flat["vision_config"]["model_type"] = "qwen2_vl"
    planned = plan(renamed(folder, tmp_path, {}, flat))
    assert_same_heads(planned, plan(folder), {})
    assert planned.family == "qwen2_vl_text+qwen2_vl_vision"
    assert planned.recognition.by == "text_config as qwen2_vl assumes it, vision_config as qwen2_vl assumes it"


@pytest.mark.parametrize("name", [name for name, variant in TOWER_VARIANTS.items() if variant.model_type in WRAPPED])
def test_parts_that_name_no_family_are_what_the_class_assumes(
    name: str, subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder = subject(name).folder
    config = config_of(folder)
    for part in config.values():
        if isinstance(part, dict):
            part.pop("model_type", None)
    planned = plan(renamed(folder, tmp_path, {}, config))
    assert_same_heads(planned, plan(folder), {})


def test_a_text_without_head_counts_has_those_of_its_own_class(tmp_path: Path) -> None:
    tensors = {}
    for layer in range(2):
        for projection, shape in {
            "q_proj": (2048, 40),
            "k_proj": (1024, 40),
            "v_proj": (1024, 40),
            "o_proj": (40, 2048),
        }.items():
            name = f"language_model.model.layers.{layer}.self_attn.{projection}.weight"
            tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / WEIGHTS)
    text = {"model_type": "gemma3_text", "hidden_size": 40, "num_hidden_layers": 2}
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    planned = plan(tmp_path)
    assert [(layer.n_heads, layer.n_kv_heads, layer.d_head) for layer in planned.layers] == [(8, 4, 256)] * 2
    assert planned.recognition.notes == ("vision attention left aside: the checkpoint holds no tensors of it",)


def test_a_tower_of_an_unknown_family_is_left_aside(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("llava").folder
    config = config_of(folder)
    config["vision_config"]["model_type"] = "telescope"
    planned = plan(renamed(folder, tmp_path, {}, config))
    assert {layer.stack for layer in planned.layers} == {"decoder"}
    assert planned.recognition.notes == (
        "vision attention left aside: vision_config names the unknown family 'telescope'",
    )


def test_a_text_of_an_unknown_family_is_refused(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("llava").folder
    config = config_of(folder)
    config["text_config"]["model_type"] = "parchment"
    with pytest.raises(CheckpointError, match="unknown model family 'parchment'"):
        plan(renamed(folder, tmp_path, {}, config))


def test_a_text_that_is_not_there_is_refused(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("llama4").folder
    tensors = load_file(folder / WEIGHTS)
    save_file({name: values for name, values in tensors.items() if "language" not in name}, tmp_path / WEIGHTS)
    shutil.copy(folder / CONFIG, tmp_path)
    with pytest.raises(CheckpointError, match="no attention found"):
        plan(tmp_path)


@pytest.mark.parametrize(("kept", "left"), [("vision", "text"), ("text", "vision")])
def test_half_of_a_comparing_model(kept: str, left: str, subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("clip").folder
    tensors = load_file(folder / WEIGHTS)
    save_file({name: values for name, values in tensors.items() if name.startswith(kept)}, tmp_path / WEIGHTS)
    shutil.copy(folder / CONFIG, tmp_path)
    planned = plan(tmp_path)
    assert {layer.stack for layer in planned.layers} == {kept}
    assert planned.recognition.notes == (f"{left} attention left aside: the checkpoint holds no tensors of it",)


def test_an_unmarked_stack_is_not_guessed_to_be_a_part(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("clip-vision").folder
    renamed(folder, tmp_path, {}, config_of(subject("clip").folder))
    with pytest.raises(CheckpointError, match="no attention found"):
        plan(tmp_path)


def test_an_encoder_may_be_a_tower(subject: Callable[[str], Subject]) -> None:
    config = config_of(subject("llava").folder)
    config["vision_config"] = {"model_type": "dinov2"}
    recognition = recognise(Checkpoint("memory", "llava", "safetensors", "transformers", config, {}, {}), None)
    assert [(stack.name, stack.family.model_type) for stack in recognition.stacks] == [
        ("decoder", "llama"),
        ("vision", "dinov2"),
    ]


def test_old_comparing_models_are_described_twice(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("clip").folder
    config = config_of(folder)
    config["text_config_dict"] = config["text_config"]
    config["text_config"] = {}
    assert_same_heads(plan(renamed(folder, tmp_path, {}, config)), plan(folder), {})


def test_assumptions_are_those_of_the_classes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for wrapper, parts in WRAPPED.items():
        specs = CONFIG_MAPPING[wrapper].sub_configs_defaults
        assert parts == {key: specs[key].model_type for key in parts}, wrapper


@pytest.mark.parametrize(
    "row", [row for row in TOWERS if not row.part], ids=lambda row: f"{row.model_type}-{row.stack}"
)
def test_absent_sizes_are_those_of_the_class(row: Family) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    spelled = CONFIG_MAPPING[row.model_type]().to_dict()
    keys = row.keys
    for names in (keys.width, keys.depth, keys.heads, keys.source_width):
        assert row.setting({}, *names) == row.setting(spelled, *names)
    heads, width = row.setting({}, *keys.heads), row.setting({}, *keys.width)
    assert (row.setting({}, *keys.kv_heads) or heads) == (row.setting(spelled, *keys.kv_heads) or heads)
    size = width // heads
    assert (row.setting({}, *keys.head_dim) or size) == (row.setting(spelled, *keys.head_dim) or size)


def test_three_stacks_from_the_command_line(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("qwen2.5-omni").folder
    planned = invoke("plan", folder, "--format", "json")
    stacks = {stack["stack"]: stack for stack in json.loads(planned)["stacks"]}
    assert list(stacks) == ["decoder", "vision", "audio"]
    assert [stack["d_model"] for stack in stacks.values()] == [32, 24, 24]
    store = tmp_path / "atlas"
    invoke("ingest", folder, "--store", store, "--name", "omni", "--operator", "both")
    query = (
        "SELECT stack, count(*) AS heads, count(DISTINCT layer) AS layers, min(closure) >= 0 AS measured "
        "FROM heads WHERE operator = 'raw' GROUP BY stack ORDER BY stack"
    )
    assert invoke("sql", query, "--store", store, "--format", "csv").splitlines()[1:] == [
        "audio,6,2,true",
        "decoder,8,2,true",
        "vision,6,2,true",
    ]
    sizes = "SELECT DISTINCT stack, d_model FROM layers ORDER BY stack"
    assert invoke("sql", sizes, "--store", store, "--format", "csv").splitlines()[1:] == [
        "audio,24",
        "decoder,32",
        "vision,24",
    ]


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_gate_multiplies_by_its_hyperbolic_tangent(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = random_model("mllama").double().eval()
        (layer,) = model.model.vision_model.global_transformer.layers
        torch.nn.init.constant_(layer.gate_attn, 0.7)
        model.float().save_pretrained(tmp_path)
        model.double()
        tokens = torch.randn(1, 3, layer.hidden_size, dtype=torch.float64)
    read, written = [], []
    layer.self_attn.register_forward_hook(lambda module, given, result: written.append(result[0]))
    layer.post_attention_layernorm.register_forward_pre_hook(lambda module, given: read.append(given[0]))
    with torch.no_grad():
        layer(tokens, None)
    added = read[0] - tokens
    planned = plan(tmp_path, "scaled")
    folded, scaled = (operators_of(planned, operator, "vision_global") for operator in ("folded", "scaled"))
    factor = (added / written[0]).mean()
    torch.testing.assert_close(added, factor * written[0])
    torch.testing.assert_close(scaled[0][0], factor * folded[0][0], rtol=1e-6, atol=1e-9)
