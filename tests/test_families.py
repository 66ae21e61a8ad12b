"""Head operators read from a checkpoint equal what the running model does, for every family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ingest.encoder_decoders import ENCODER_DECODERS
from ingest.families import FAMILIES
from ingest.plan import LayerPlan, Operator, Plan, plan_checkpoint
from ingest.recognition import Stack
from ingest.sizes import branch_multiplier, depth, head_sizes
from ingest.source import open_checkpoint
from ingest.towers import TOWERS
from stats.errors import CheckpointError
from tests import checkpoints
from tests.building import random_model
from tests.decoder_variants import DECODER_VARIANTS
from tests.encoder_variants import ENCODER_VARIANTS
from tests.hybrid_variants import HYBRID_VARIANTS
from tests.irregular_variants import IRREGULAR_VARIANTS
from tests.latent_variants import LATENT_VARIANTS
from tests.measuring import operators_of
from tests.probing import ProbedBlock, probe
from tests.variant import N_LAYERS, WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT, ROUNDED = 1e-10, 1e-6
"""Tolerances in float64, and where the model itself rounds to float32: in softmax and some norms."""

WEIGHTS, CONFIG = "model.safetensors", "config.json"

VARIANTS = {
    **DECODER_VARIANTS,
    **LATENT_VARIANTS,
    **IRREGULAR_VARIANTS,
    **HYBRID_VARIANTS,
    **ENCODER_VARIANTS,
}
PRE_NORM = [name for name, variant in VARIANTS.items() if not variant.post_norm]
POST_NORM = [name for name, variant in VARIANTS.items() if variant.post_norm]
every_variant = pytest.mark.parametrize("name", VARIANTS)


@dataclass(frozen=True)
class Subject:
    """A saved model, the same model saved without its head, and what probing it found."""

    folder: Path
    headless: Path
    base_prefix: str
    blocks: list[ProbedBlock]
    skipped: int

    def measured(self, operator: Operator) -> list[tuple[Tensor, Tensor]]:
        """``O V^T`` and ``Q K^T`` of every layer with attention, from the saved model."""
        return measure(self.folder, operator, self.skipped)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Builds, saves and probes a variant at first use."""

    @cache
    def make(name: str) -> Subject:
        variant, folder = VARIANTS[name], tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = random_model(variant)
            model.save_pretrained(folder / "whole")
            model.base_model.save_pretrained(folder / "headless")
            prefix = variant.saved_prefix or f"{model.base_model_prefix}."
            blocks = probe(model.double(), variant)
        return Subject(folder / "whole", folder / "headless", prefix, blocks, variant.skipped)

    return make


def plan(folder: Path, *operators: Operator) -> Plan:
    return plan_checkpoint(open_checkpoint(str(folder)), operators)


def layers_below(prefix: str, planned: Plan) -> list[LayerPlan]:
    """Planned layers, their tensors named without a prefix."""
    return [
        replace(
            layer,
            tensors={role: name.removeprefix(prefix) for role, name in layer.tensors.items()},
            layer_scale=layer.layer_scale and layer.layer_scale.removeprefix(prefix),
        )
        for layer in planned.layers
    ]


def measure(folder: Path, operator: Operator, skipped: int = 0) -> list[tuple[Tensor, Tensor]]:
    """``O V^T`` and ``Q K^T`` (head, d_model, d_model) of every layer, from the checkpoint."""
    planned = plan(folder, operator)
    assert len(planned.skipped) == skipped
    return operators_of(planned, operator)


def largest_error(measured: Tensor, probed: Tensor) -> Tensor:
    """Largest absolute error of each head's matrix."""
    return (measured - probed).abs().amax((1, 2))


def misalignment(measured: Tensor, probed: Tensor) -> Tensor:
    """One minus the cosine of each head's matrices; blind to a positive factor."""
    return 1 - torch.cosine_similarity(measured.flatten(1), probed.flatten(1))


def test_every_family_has_a_variant() -> None:
    elsewhere = {row.model_type for row in (*ENCODER_DECODERS, *TOWERS)}
    assert {variant.model_type for variant in VARIANTS.values()} == set(FAMILIES) - elsewhere


@pytest.mark.parametrize("name", sorted({variant.model_type for variant in VARIANTS.values()}))
def test_absent_sizes_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    checkpoint = open_checkpoint(str(checkpoints.save_safetensors(checkpoints.llama(), tmp_path)))
    spelled = CONFIG_MAPPING[name]().to_dict()
    called = {key: spelled.get(key) for key in ("layer_types", "layers_block_type")}
    for row in FAMILIES[name]:
        absent, whole = (Stack(row.stack, row, {**config, **row.when}) for config in (called, spelled))
        extent = depth(checkpoint, whole)
        assert depth(checkpoint, absent) == extent
        for form, layer in product(row.projections, range(extent.blocks)):
            assert head_sizes(checkpoint, absent, form, layer) == head_sizes(checkpoint, whole, form, layer)
        factors = [branch_multiplier(checkpoint, stack, row.multiplier, extent.layers) for stack in (absent, whole)]
        assert factors[0] == factors[1]
        of_pieces = (name for piece in row.pieces for name in (piece.setting, piece.layer_interval))
        for setting in filter(None, (row.value_scale, row.shared_layers, *of_pieces)):
            assert (row.setting({}, setting) or 0) == (row.setting(spelled, setting) or 0)


@every_variant
def test_operators_are_those_of_the_running_heads(name: str, subject: Callable[[str], Subject]) -> None:
    probed = subject(name).blocks
    planned = plan(subject(name).folder, "raw")
    assert len(probed) == VARIANTS[name].n_blocks
    assert [layer.layer for layer in planned.layers] == [block.layer for block in probed]
    numbers = {layer.layer for layer in (*planned.layers, *planned.skipped)}
    assert numbers == set(range(VARIANTS[name].n_blocks + VARIANTS[name].skipped))
    for (ov, qk), block in zip(subject(name).measured("raw"), probed, strict=True):
        assert largest_error(ov, block.ov).max() < EXACT
        assert misalignment(qk, block.qk).max() < ROUNDED


@pytest.mark.parametrize("name", PRE_NORM)
def test_folded_operators_contain_the_running_norms(name: str, subject: Callable[[str], Subject]) -> None:
    for (ov, qk), block in zip(subject(name).measured("folded"), subject(name).blocks, strict=True):
        folded_ov, folded_qk = block.folded()
        assert largest_error(ov, folded_ov).max() < ROUNDED
        assert misalignment(qk, folded_qk).max() < ROUNDED


@pytest.mark.parametrize("name", POST_NORM)
def test_nothing_is_folded_where_no_norm_touches_attention(name: str, subject: Callable[[str], Subject]) -> None:
    assert all(block.feeding is None and block.branch is None for block in subject(name).blocks)
    with pytest.raises(CheckpointError, match="no folded operator"):
        plan(subject(name).folder, "folded")


@every_variant
def test_operators_and_attention_number_heads_alike(name: str, subject: Callable[[str], Subject]) -> None:
    for (ov, _), block in zip(subject(name).measured("raw"), subject(name).blocks, strict=True):
        sample = block.sample
        by_head = sample.weights @ sample.tokens @ ov.mT
        torch.testing.assert_close(by_head.sum(0), sample.written, rtol=0, atol=ROUNDED)
        shifted = sample.weights.roll(1, 0) @ sample.tokens @ ov.mT
        assert (shifted.sum(0) - sample.written).abs().max() > 0.1


@every_variant
def test_pieces_are_those_of_the_running_module(name: str, subject: Callable[[str], Subject]) -> None:
    planned = plan(subject(name).folder, "raw").layers
    assert [frozenset(layer.pieces) for layer in planned] == [block.pieces for block in subject(name).blocks]
    assert set(VARIANTS[name].neutralised) == {
        piece for layer in planned for piece in layer.pieces if piece not in ("qk_norm", "clamp")
    }


@every_variant
def test_multipliers_are_those_of_the_running_layer(name: str, subject: Callable[[str], Subject]) -> None:
    planned = plan(subject(name).folder, "raw")
    for layer, block in zip(planned.layers, subject(name).blocks, strict=True):
        vector = torch.full((layer.d_model,), layer.multiplier, dtype=torch.float64)
        if layer.layer_scale is not None:
            vector *= planned.checkpoint.read(layer.layer_scale).double()
        if block.multiplier is not None:
            torch.testing.assert_close(vector, block.multiplier, rtol=1e-6, atol=0)
        else:
            assert vector.eq(1).all()


@every_variant
def test_scaled_operators_contain_what_multiplies_the_branch(name: str, subject: Callable[[str], Subject]) -> None:
    saved = subject(name)
    ones = torch.ones(WIDTH, dtype=torch.float64)
    multipliers = [ones if block.multiplier is None else block.multiplier for block in saved.blocks]
    if all(torch.allclose(vector, ones, rtol=1e-6) for vector in multipliers):
        with pytest.raises(CheckpointError, match="has no scaled operator"):
            plan(saved.folder, "scaled")
        return
    for (ov, qk), block, vector in zip(saved.measured("scaled"), saved.blocks, multipliers, strict=True):
        folded_ov, folded_qk = block.folded()
        assert largest_error(ov, vector[:, None] * folded_ov).max() < ROUNDED
        assert misalignment(qk, folded_qk).max() < ROUNDED


@every_variant
def test_shifted_heads_are_noticed(name: str, subject: Callable[[str], Subject]) -> None:
    for (ov, qk), block in zip(subject(name).measured("raw"), subject(name).blocks, strict=True):
        assert largest_error(ov.roll(1, 0), block.ov).min() > 0.1
        assert misalignment(qk.roll(1, 0), block.qk).min() > 0.1


@pytest.mark.parametrize("name", PRE_NORM)
def test_folding_changes_the_operators(name: str, subject: Callable[[str], Subject]) -> None:
    blocks = subject(name).blocks
    bare = [block.feeding is None and block.branch is None for block in blocks]
    assert not all(bare)
    for (raw, _), (folded, _), is_bare in zip(
        subject(name).measured("raw"), subject(name).measured("folded"), bare, strict=True
    ):
        if is_bare or VARIANTS[name].bare_norm:
            assert torch.equal(raw, folded)
        else:
            assert largest_error(raw, folded).min() > 0.01


@every_variant
def test_a_save_without_the_head_gives_the_same_plan(name: str, subject: Callable[[str], Subject]) -> None:
    saved = subject(name)
    operator: Operator = "raw" if VARIANTS[name].post_norm else "folded"
    whole, headless = plan(saved.folder, operator), plan(saved.headless, operator)
    assert layers_below(saved.base_prefix, whole) == layers_below(VARIANTS[name].headless_prefix, headless)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@every_variant
def test_wrapper_prefixes_give_the_same_plan(
    name: str, prefix: str, subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder = subject(name).folder
    tensors = load_file(folder / WEIGHTS)
    save_file({prefix + tensor: values for tensor, values in tensors.items()}, tmp_path / WEIGHTS)
    shutil.copy(folder / CONFIG, tmp_path)
    assert layers_below(prefix, plan(tmp_path, "raw")) == list(plan(folder, "raw").layers)


@pytest.mark.parametrize("counted", [{"num_hidden_layers": 3}, {"layers_block_type": ["mamba", "attention", "mlp"]}])
def test_layers_are_counted_by_number_or_by_list(
    counted: dict[str, Any], subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder = subject("nemotron_h").folder
    config = json.loads((folder / CONFIG).read_text())
    del config["layers_block_type"]
    (tmp_path / CONFIG).write_text(json.dumps(config | counted))
    shutil.copy(folder / WEIGHTS, tmp_path)
    same = plan(folder, "raw")
    assert plan(tmp_path, "raw").layers == same.layers
    assert [item.layer for item in plan(tmp_path, "raw").skipped] == [item.layer for item in same.skipped]


def test_a_norm_is_found_under_its_other_name(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("olmo_hybrid").folder
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.1.post_attention_layernorm.weight"] = tensors.pop(
        "model.layers.1.feedforward_layer_norm.weight"
    )
    save_file(tensors, tmp_path / WEIGHTS)
    shutil.copy(folder / CONFIG, tmp_path)
    for (ov, qk), (same_ov, same_qk) in zip(
        measure(tmp_path, "folded", skipped=1), subject("olmo_hybrid").measured("folded"), strict=True
    ):
        assert torch.equal(ov, same_ov)
        assert torch.equal(qk, same_qk)


@pytest.mark.parametrize(
    ("vision_output", "ignored"), [("out_proj", ()), ("o_proj", ("vision_tower.vision_model.encoder.",))]
)
@pytest.mark.parametrize("text", ["language_model.model.", "model.language_model."])
def test_text_stack_is_found_beside_a_vision_tower(
    text: str, vision_output: str, ignored: tuple[str, ...], subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder = subject("gemma3_text").folder
    tensors = {text + name.removeprefix("model."): values for name, values in load_file(folder / WEIGHTS).items()}
    for layer in range(N_LAYERS + 1):
        for projection in ("q_proj", "k_proj", "v_proj", vision_output):
            name = f"vision_tower.vision_model.encoder.layers.{layer}.self_attn.{projection}.weight"
            tensors[name] = torch.ones(WIDTH, WIDTH)
    save_file(tensors, tmp_path / WEIGHTS)
    text_config = json.loads((folder / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "gemma3", "text_config": text_config}))

    planned = plan(tmp_path, "raw", "folded")
    assert planned.recognition.by == "text_config.model_type"
    assert planned.ignored_prefixes == ignored
    for (ov, _), block in zip(measure(tmp_path, "raw"), subject("gemma3_text").blocks, strict=True):
        assert largest_error(ov, block.ov).max() < EXACT
