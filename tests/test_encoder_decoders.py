"""Encoder, decoder and cross-attention of every encoder-decoder agree with the running heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import cli
from ingest.checkpoint import Checkpoint
from ingest.encoder_decoders import ENCODER_DECODERS
from ingest.factors import HeadFactors, head_factors, read_weights
from ingest.family import Family
from ingest.plan import LayerPlan, Operator, Plan, plan_checkpoint
from ingest.recognition import recognise
from ingest.source import open_checkpoint
from stats.errors import CheckpointError
from stats.registry import PAIR_STATISTICS
from tests import dense
from tests.building import randomised
from tests.encoder_decoder_variants import (
    ENCODER_DECODER_VARIANTS,
    ENCODER_LAYERS,
    T5,
    T5_STACKS,
    WIDTH,
    EncoderDecoderVariant,
)
from tests.measuring import operators_of
from tests.probing_cross import ProbedCross, probe_stack
from tests.test_families import CONFIG, EXACT, ROUNDED, WEIGHTS, largest_error, misalignment

pytestmark = pytest.mark.usefixtures("one_thread")

STACKS = ("encoder", "decoder", "cross")
CASES = [(name, stack) for name in ENCODER_DECODER_VARIANTS for stack in STACKS]
every_stack = pytest.mark.parametrize(("name", "stack"), CASES)
every_variant = pytest.mark.parametrize("name", ENCODER_DECODER_VARIANTS)


@dataclass(frozen=True)
class Subject:
    """A saved model, the same model saved without its head, and what probing each stack found."""

    folder: Path
    headless: Path
    stacks: dict[str, list[ProbedCross]]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Builds, saves and probes a variant at first use."""

    @cache
    def make(name: str) -> Subject:
        variant, folder = ENCODER_DECODER_VARIANTS[name], tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = random_model(variant)
            model.save_pretrained(folder / "whole")
            (model.model if variant.base_prefix else model).save_pretrained(folder / "headless")
            model = model.double()
            stacks = {stack: probe_stack(model, reading, variant.sound) for stack, reading in variant.stacks.items()}
        return Subject(folder / "whole", folder / "headless", stacks)

    return make


def random_model(variant: EncoderDecoderVariant) -> Any:
    """A tiny model in float32 whose biases, gains and matrices are all random."""
    import transformers

    config = transformers.AutoConfig.for_model(variant.model_type, **variant.config)
    auto = transformers.AutoModelForSpeechSeq2Seq if variant.sound else transformers.AutoModelForSeq2SeqLM
    return randomised(auto.from_config(config, attn_implementation="eager"))


def plan(folder: Path, *operators: Operator) -> Plan:
    return plan_checkpoint(open_checkpoint(str(folder)), operators or ("raw",))


def of_stack(planned: Plan, stack: str) -> list[LayerPlan]:
    return [layer for layer in planned.layers if layer.stack == stack]


def factors_of(planned: Plan, layer: LayerPlan, operator: Operator) -> HeadFactors:
    weights = read_weights(planned.checkpoint, layer)
    return head_factors(weights, layer, operator, torch.device("cpu"), torch.float64)


def operator_of(name: str) -> Operator:
    """The furthest operator a variant has."""
    return "raw" if ENCODER_DECODER_VARIANTS[name].post_norm else "folded"


def test_every_row_has_a_variant() -> None:
    probed = {(variant.model_type, stack) for variant in ENCODER_DECODER_VARIANTS.values() for stack in variant.stacks}
    rows = [(row.model_type, row.stack, *row.when) for row in ENCODER_DECODERS]
    assert rows == list(dict.fromkeys(rows))
    assert {(row.model_type, row.stack) for row in ENCODER_DECODERS} == probed


@every_stack
def test_operators_are_those_of_the_running_heads(name: str, stack: str, subject: Callable[[str], Subject]) -> None:
    planned, probed = plan(subject(name).folder), subject(name).stacks[stack]
    reading, layers = ENCODER_DECODER_VARIANTS[name].stacks[stack], of_stack(planned, stack)
    assert tuple(dict.fromkeys(layer.stack for layer in planned.layers)) == STACKS
    assert [layer.layer for layer in layers] == list(range(reading.layers)) == [block.layer for block in probed]
    assert {(layer.n_heads, layer.d_head, layer.two_spaces) for layer in layers} == {
        (reading.heads, reading.d_head, stack == "cross")
    }
    assert planned.ignored_prefixes == planned.skipped == ()
    for (ov, qk), block in zip(operators_of(planned, "raw", stack), probed, strict=True):
        assert largest_error(ov, block.ov).max() < EXACT
        assert misalignment(qk, block.qk).max() < ROUNDED


@every_stack
def test_folded_operators_contain_the_running_norms(name: str, stack: str, subject: Callable[[str], Subject]) -> None:
    post_norm = ENCODER_DECODER_VARIANTS[name].post_norm
    planned = plan(subject(name).folder, operator_of(name))
    for (ov, qk), block in zip(
        operators_of(planned, operator_of(name), stack), subject(name).stacks[stack], strict=True
    ):
        assert (block.before is None) == (block.source is None) == post_norm
        folded_ov, folded_qk = block.folded()
        assert largest_error(ov, folded_ov).max() < ROUNDED
        assert misalignment(qk, folded_qk).max() < ROUNDED
        if not post_norm:
            assert largest_error(ov, block.ov).min() > 0.01
            assert misalignment(qk, block.qk).min() > 0.001


@pytest.mark.parametrize("name", [name for name, item in ENCODER_DECODER_VARIANTS.items() if not item.post_norm])
def test_cross_queries_and_values_have_different_norms(name: str, subject: Callable[[str], Subject]) -> None:
    planned = plan(subject(name).folder, "folded")
    for (ov, qk), block in zip(operators_of(planned, "folded", "cross"), subject(name).stacks["cross"], strict=True):
        swapped_ov, swapped_qk = replace(block, before=block.source, source=block.before).folded()
        assert largest_error(ov, swapped_ov).min() > 0.01
        assert misalignment(qk, swapped_qk).min() > 0.001


@pytest.mark.parametrize("name", [name for name, item in ENCODER_DECODER_VARIANTS.items() if item.post_norm])
def test_nothing_is_folded_where_norms_follow_the_sum(name: str, subject: Callable[[str], Subject]) -> None:
    with pytest.raises(CheckpointError, match="no folded operator"):
        plan(subject(name).folder, "folded")


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
        assert misalignment(qk.mT, block.qk).min() > 0.1


@every_variant
def test_a_save_without_the_head_gives_the_same_plan(name: str, subject: Callable[[str], Subject]) -> None:
    saved, prefix = subject(name), ENCODER_DECODER_VARIANTS[name].base_prefix
    whole, headless = plan(saved.folder, operator_of(name)), plan(saved.headless, operator_of(name))
    assert layers_below(prefix, whole) == list(headless.layers)


def layers_below(prefix: str, planned: Plan) -> list[LayerPlan]:
    """Planned layers, their tensors named without a prefix."""
    return [
        replace(layer, tensors={role: name.removeprefix(prefix) for role, name in layer.tensors.items()})
        for layer in planned.layers
    ]


def rewritten(folder: Path, target: Path, rename: Callable[[str], str | None], **changes: Any) -> Path:
    """The checkpoint with other tensor names, None for those left out, and a changed configuration."""
    renamed = {rename(name): values for name, values in load_file(folder / WEIGHTS).items()}
    save_file({name: values for name, values in renamed.items() if name is not None}, target / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text()) | changes
    (target / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_wrapper_prefixes_give_the_same_plan(
    name: str, prefix: str, subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder, operator = subject(name).folder, operator_of(name)
    wrapped = plan(rewritten(folder, tmp_path, lambda tensor: prefix + tensor), operator)
    assert layers_below(prefix, wrapped) == list(plan(folder, operator).layers)


@pytest.mark.parametrize(
    ("name", "held", "stacks"),
    [
        ("t5", "encoder", ("encoder",)),
        ("umt5", "encoder", ("encoder",)),
        ("whisper", "encoder", ("encoder",)),
        ("bart", "decoder", ("decoder", "cross")),
        ("mbart", "decoder", ("decoder", "cross")),
    ],
)
def test_stacks_that_are_not_there_are_left_aside(
    name: str, held: str, stacks: tuple[str, ...], subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder = subject(name).folder
    planned = plan(rewritten(folder, tmp_path, lambda tensor: tensor if f"{held}." in tensor else None))
    assert list(planned.layers) == [layer for layer in plan(folder).layers if layer.stack in stacks]
    assert planned.recognition.notes == tuple(
        f"{stack} attention left aside: the checkpoint holds no tensors of it"
        for stack in STACKS
        if stack not in stacks
    )


def test_an_encoder_saved_alone(tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model("t5", **T5)
    randomised(transformers.T5EncoderModel(config)).save_pretrained(tmp_path)
    planned = plan(tmp_path, "folded")
    assert [(layer.stack, layer.layer) for layer in planned.layers] == [("encoder", 0), ("encoder", 1)]
    assert len(planned.recognition.notes) == 2


def test_an_encoder_that_does_not_name_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = random_model(ENCODER_DECODER_VARIANTS["whisper"])
    model.save_pretrained(tmp_path / "whole")
    model.model.encoder.save_pretrained(tmp_path / "alone")
    whole, alone = (plan(tmp_path / saved, "raw", "folded") for saved in ("whole", "alone"))
    assert layers_below("model.encoder.", whole)[:ENCODER_LAYERS] == list(alone.layers)
    assert len(alone.recognition.notes) == 2
    for operator in ("raw", "folded"):
        for heads, same in zip(
            operators_of(alone, operator, "encoder"), operators_of(whole, operator, "encoder"), strict=True
        ):
            assert all(map(torch.equal, heads, same))


def test_a_checkpoint_without_any_stack_is_refused(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("t5").folder
    with pytest.raises(CheckpointError, match="no attention found"):
        plan(rewritten(folder, tmp_path, lambda tensor: tensor if tensor.startswith("shared") else None))


def test_a_layer_that_lost_a_projection_is_refused(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    folder = subject("t5").folder
    lost = "decoder.block.1.layer.1.EncDecAttention.v.weight"
    with pytest.raises(
        CheckpointError,
        match=r"(?s)incomplete.*layer 1.*expected: decoder\.block\.1\.layer\.1\.EncDecAttention\.v\.weight",
    ):
        plan(rewritten(folder, tmp_path, lambda tensor: None if tensor == lost else tensor))


def test_a_lost_norm_of_the_encoder_is_missed_by_cross_attention(
    subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder, lost = subject("whisper").folder, "model.encoder.layer_norm.weight"
    rewritten(folder, tmp_path, lambda tensor: None if tensor == lost else tensor)
    assert len(plan(tmp_path).layers) == len(plan(folder).layers)
    with pytest.raises(CheckpointError, match=r"model\.encoder\.layer_norm\.weight"):
        plan(tmp_path, "folded")


@pytest.mark.parametrize("name", ["t5", "mt5", "umt5"])
def test_a_decoder_of_unnamed_depth_is_as_deep_as_the_encoder(
    name: str, subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    folder = subject(name).folder
    planned = plan(rewritten(folder, tmp_path, lambda tensor: tensor, num_decoder_layers=None))
    assert [len(of_stack(planned, stack)) for stack in STACKS] == [2, 2, 2]
    assert [(item.stack, item.layer) for item in planned.skipped] == [("decoder", 2), ("cross", 2)]


@pytest.mark.parametrize("row", ENCODER_DECODERS, ids=lambda row: f"{row.model_type}-{row.stack}")
@pytest.mark.parametrize("given", [{}, {"num_layers": 5, "encoder_layers": 5}])
def test_absent_sizes_are_those_of_the_class(row: Family, given: dict[str, int]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {key: value for key, value in given.items() if key in row.defaults}
    spelled = CONFIG_MAPPING[row.model_type](**given).to_dict()
    for names in (row.keys.width, row.keys.depth, row.keys.heads, row.keys.head_dim):
        assert row.setting(given, *names) == row.setting(spelled, *names)


def test_a_text_of_a_seeing_model(tmp_path: Path) -> None:
    import transformers

    small = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 16}
    config = transformers.Blip2Config(
        text_config={"model_type": "t5", **T5},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        qformer_config={**small, "encoder_hidden_size": 12, "vocab_size": 31},
        num_query_tokens=4,
    )
    torch.manual_seed(0)
    model = randomised(transformers.Blip2ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    text = model.double().language_model
    planned = plan(tmp_path, "raw", "folded")
    assert tuple(dict.fromkeys(layer.stack for layer in planned.layers)) == (
        *STACKS, "vision", "qformer", "qformer_cross",
    )  # fmt: skip
    assert planned.family == "t5+blip_2_vision_model+blip_2_qformer"
    for stack, reading in T5_STACKS.items():
        for operator in ("raw", "folded"):
            for (ov, qk), block in zip(
                operators_of(planned, operator, stack), probe_stack(text, reading, sound=False), strict=True
            ):
                probed_ov, probed_qk = (block.ov, block.qk) if operator == "raw" else block.folded()
                assert largest_error(ov, probed_ov).max() < ROUNDED
                assert misalignment(qk, probed_qk).max() < ROUNDED

    (tmp_path / "encoder").mkdir()
    halved = plan(rewritten(tmp_path, tmp_path / "encoder", lambda name: None if "decoder" in name else name))
    assert halved.recognition.notes == tuple(
        f"{stack} attention left aside: the checkpoint holds no tensors of it" for stack in ("decoder", "cross")
    )
    (tmp_path / "textless").mkdir()
    with pytest.raises(CheckpointError, match="no attention found"):
        plan(rewritten(tmp_path, tmp_path / "textless", lambda name: None if "language" in name else name))


def test_the_ear_of_a_language_model_is_the_encoder() -> None:
    config = {"text_config": {"model_type": "llama"}, "audio_config": {"model_type": "whisper"}, "model_type": "other"}
    recognition = recognise(Checkpoint("memory", "other", "safetensors", "transformers", config, {}, {}), None)
    assert [(stack.name, stack.family.block) for stack in recognition.stacks] == [
        ("decoder", "layers.{layer}."),
        ("audio", "encoder.layers.{layer}."),
    ]


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def rows_of(store: Path, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(invoke("sql", query, "--store", store, "--format", "json"))
    return rows


@pytest.fixture(scope="module")
def store(subject: Callable[[str], Subject], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model like T5, raw and folded, and one like BART."""
    path = tmp_path_factory.mktemp("store") / "atlas"
    invoke("ingest", subject("t5").folder, "--store", path, "--name", "t5", "--operator", "both", "--device", "cpu")
    invoke("ingest", subject("bart").folder, "--store", path, "--name", "bart", "--device", "cpu")
    return path


STORED: list[tuple[str, Operator]] = [("t5", "raw"), ("t5", "folded"), ("bart", "raw")]


@pytest.mark.parametrize(("name", "operator"), STORED)
def test_cross_attention_is_stored_as_far_as_it_is_defined(
    name: str, operator: Operator, store: Path, subject: Callable[[str], Subject]
) -> None:
    stored = rows_of(
        store,
        "SELECT * FROM heads JOIN spectra USING (model, operator, stack, layer, head) "
        f"WHERE stack = 'cross' AND model = '{name}' AND operator = '{operator}' ORDER BY layer, head",
    )
    planned = plan(subject(name).folder, operator)
    operators = [ov.numpy() for ovs, _ in operators_of(planned, operator, "cross") for ov in ovs]
    assert len(stored) == len(operators) == 12
    for row, ov in zip(stored, operators, strict=True):
        sigma = np.linalg.svd(ov, compute_uv=False)[: row["d_head"]]
        np.testing.assert_allclose(row["sigma"], sigma, rtol=1e-10)
        assert row["norm"] == pytest.approx(np.linalg.norm(ov), rel=1e-10)
        assert (row["d_model"], row["rank"]) == (WIDTH, row["d_head"])
        assert (row["status"], row["reason"]) == ("undefined", "two spaces")
        for column in ("closure", "alpha", "trace", "cos_max", "spectral_radius", "copying", "null_scale"):
            assert row[column] is None, column
        for column in ("cosine", "eigenvalue_re", "eigenvalue_im"):
            assert row[column] is None, column
        assert row["participation"] == pytest.approx((sigma**2).sum() ** 2 / (sigma**4).sum())


@pytest.mark.parametrize(("name", "operator"), STORED)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_encoder_and_decoder_are_stored_as_any_other(
    name: str, operator: Operator, stack: str, store: Path, subject: Callable[[str], Subject]
) -> None:
    stored = rows_of(
        store,
        f"SELECT layer, head, status, closure, cos_max, alpha FROM heads WHERE stack = '{stack}' "
        f"AND model = '{name}' AND operator = '{operator}' ORDER BY layer, head",
    )
    planned = plan(subject(name).folder, operator)
    expected = []
    for layer in of_stack(planned, stack):
        factors = factors_of(planned, layer, operator)
        for head, (output, value) in enumerate(zip(factors.output, factors.value, strict=True)):
            expected.append((layer.layer, head, dense.head(output.numpy(), value.numpy())))
    assert [(row["layer"], row["head"]) for row in stored] == [(layer, head) for layer, head, _ in expected]
    for row, (*_, statistics) in zip(stored, expected, strict=True):
        assert row["status"] == "ok"
        for column in ("closure", "cos_max", "alpha"):
            assert row[column] == pytest.approx(statistics[column], rel=1e-8)


@pytest.mark.parametrize(("name", "operator"), STORED)
def test_scores_of_cross_attention_have_a_spectrum_and_no_angles(
    name: str, operator: Operator, store: Path, subject: Callable[[str], Subject]
) -> None:
    stored = rows_of(
        store,
        f"SELECT * FROM qk WHERE stack = 'cross' AND model = '{name}' AND operator = '{operator}' ORDER BY layer, head",
    )
    forms = [
        qk.numpy() for _, qks in operators_of(plan(subject(name).folder, operator), operator, "cross") for qk in qks
    ]
    for row, form in zip(stored, forms, strict=True):
        sigma = np.linalg.svd(form, compute_uv=False)[: len(row["sigma"])]
        np.testing.assert_allclose(row["sigma"], sigma, rtol=1e-10)
        assert row["norm"] == pytest.approx(np.linalg.norm(form), rel=1e-10)
        assert {row[column] for column in ("cosine", "cos_max", "cos_mean", "symmetric_share")} == {None}


def test_pairs_of_cross_attention_are_all_undefined(store: Path) -> None:
    counts = ", ".join(f"count({item.name}) AS {item.name}" for item in PAIR_STATISTICS)
    query = f"SELECT stack, count(*) AS pairs, {counts} FROM pairs GROUP BY stack"
    by_stack = {row.pop("stack"): row for row in rows_of(store, query)}
    pairs = by_stack["cross"].pop("pairs")
    assert pairs == by_stack["decoder"]["pairs"] == 3 * 3 * 4 * 3
    assert set(by_stack["cross"].values()) == {0}
    for stack in ("encoder", "decoder"):
        assert by_stack[stack]["mismatch_closure"] == by_stack[stack]["right_closure"] == by_stack[stack]["pairs"]


def test_every_command_works_beside_cross_attention(store: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(store, tmp_path / "atlas")

    def listed(command: str, *options: object) -> dict[tuple[str, str, str], dict[str, Any]]:
        rows = json.loads(invoke(command, *options, "--store", copied, "--format", "json"))
        return {(row["model"], row["operator"], row["stack"]): row for row in rows}

    every = {(*model, stack) for model in STORED for stack in STACKS}
    own = {key for key in every if key[-1] != "cross"}
    nulls = listed("null", "--draws", 50, "--device", "cpu")
    capacities = listed("capacity", "--device", "cpu")
    closures, mismatches = listed("closure"), listed("mismatch")
    assert set(nulls) == set(capacities) == set(closures) == set(mismatches) == every
    for key in every:
        heads = closures[key]["heads"]
        assert nulls[key]["defined"] == closures[key]["defined"] == (0 if key not in own else heads)
        assert capacities[key]["defined"] == heads
        assert (mismatches[key]["median"] is None) == (key not in own)
    assert set(listed("algebra", "--threshold", 0.01)) == set(listed("null", "--mismatch")) == own
    invoke("verify", "--store", copied)
    before = [rows_of(copied, f"SELECT * FROM {table} ORDER BY ALL") for table in ("heads", "spectra", "nulls")]
    invoke("rebuild", "--store", copied)
    assert [rows_of(copied, f"SELECT * FROM {table} ORDER BY ALL") for table in ("heads", "spectra", "nulls")] == before
