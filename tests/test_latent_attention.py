"""Multi-head latent attention: what the norm of the latent leaves, both parts of the scores, and one content hash."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ingest.factors import ModelHashes, head_factors, layer_digests, model_hashes, read_weights
from ingest.plan import Plan
from tests import checkpoints, dense
from tests.building import random_model
from tests.latent_variants import LATENT_VARIANTS
from tests.measuring import numbers, operators_of, plan
from tests.neutral import neutralised, replaced
from tests.probing import Run, draw_sample, find_blocks, head_operators, score_forms
from tests.variant import N_HEADS, WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT, ROUNDED = 1e-10, 1e-6

WITHOUT_BIASES = [name for name in LATENT_VARIANTS if "biases" not in name]
SOME = ["deepseek_v2-full-query", "deepseek_v3", "longcat_flash"]


class Nothing(nn.Module):
    """Takes the place of a norm and gives zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A variant's model in float64, and the folder it was saved to in float32."""

    @cache
    def make(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = random_model(LATENT_VARIANTS[name])
        model.save_pretrained(folder)
        return model.double(), folder

    return make


@pytest.mark.parametrize("name", WITHOUT_BIASES)
def test_the_untouched_module_divides_by_the_size_of_the_latent(
    name: str, saved: Callable[[str], tuple[Any, Path]]
) -> None:
    model, folder = saved(name)
    rank = model.config.kv_lora_rank
    token = 3 * torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = Run(model, 1, batch=N_HEADS, one_position=True)
    for block, (ov, _) in zip(
        find_blocks(model.base_model, LATENT_VARIANTS[name]), operators_of(plan(folder)), strict=True
    ):
        written, _ = alone.attend(block, token.expand(N_HEADS, 1, -1), torch.eye(N_HEADS, dtype=torch.float64))
        latent = block.attention.kv_a_proj_with_mqa.weight[:rank] @ token
        size = (latent.square().mean() + block.attention.kv_a_layernorm.variance_epsilon).sqrt()
        expected = ov @ token / size
        torch.testing.assert_close(written[:, 0], expected, rtol=1e-5, atol=1e-5)
        assert (written[:, 0] - ov @ token).abs().max() > 0.1


@pytest.mark.parametrize("name", SOME)
def test_both_parts_of_the_scores_are_those_of_the_running_heads(
    name: str, saved: Callable[[str], tuple[Any, Path]]
) -> None:
    model, folder = saved(name)
    nope = model.config.qk_nope_head_dim
    planned = plan(folder)
    aligned = Run(model, 2 * (WIDTH + 1), one_position=True)
    for block, layer in zip(find_blocks(model.base_model, LATENT_VARIANTS[name]), planned.layers, strict=True):
        factors = head_factors(
            read_weights(planned.checkpoint, layer), layer, "raw", torch.device("cpu"), torch.float64
        )
        with neutralised(block.attention, ("latent_norm",)):
            both = score_forms(aligned, block, WIDTH)
            with replaced(block.attention, "kv_a_layernorm", Nothing()):
                rotary = score_forms(aligned, block, WIDTH)
        scale = block.attention.scaling
        for part, measured in ((slice(nope), both - rotary), (slice(nope, None), rotary)):
            form = factors.query[..., part] @ factors.key[..., part].mT
            torch.testing.assert_close(scale * form, measured, rtol=0, atol=1e-5)
            assert (scale * form - measured.roll(1, 0)).abs().amax((1, 2)).min() > 0.1


@pytest.mark.parametrize("name", SOME)
def test_heads_are_numbered_as_in_the_file(name: str, saved: Callable[[str], tuple[Any, Path]]) -> None:
    model, folder = saved(name)
    alone = Run(model, 1, batch=N_HEADS * (WIDTH + 1), one_position=True)
    natural = Run(model, 9)
    for block, (ov, _) in zip(
        find_blocks(model.base_model, LATENT_VARIANTS[name]), operators_of(plan(folder)), strict=True
    ):
        with neutralised(block.attention, ("latent_norm",)):
            assert (head_operators(alone, block, WIDTH, N_HEADS) - ov).abs().max() < EXACT
            sample = draw_sample(natural, block)
        by_head = sample.weights @ sample.tokens @ ov.mT
        torch.testing.assert_close(by_head.sum(0), sample.written, rtol=0, atol=ROUNDED)


def model_of(folder: Path) -> checkpoints.Model:
    """A saved model as configuration and tensors."""
    return checkpoints.Model(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def hashes(planned: Plan) -> ModelHashes:
    return model_hashes(
        [layer_digests(read_weights(planned.checkpoint, layer), layer, planned.operators) for layer in planned.layers]
    )


@pytest.mark.parametrize("name", SOME)
def test_storage_does_not_change_the_hashes(
    name: str, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model = model_of(saved(name)[1]).cast(torch.bfloat16)
    one = plan(checkpoints.save_safetensors(model, tmp_path / "one"), ("raw", "folded"))
    other = plan(checkpoints.save_sharded_torch(model.cast(torch.float32), tmp_path / "other"), ("raw", "folded"))
    assert hashes(one) == hashes(other)
    left, right = numbers(one), numbers(other)
    assert left.keys() == right.keys()
    for key, array in left.items():
        np.testing.assert_array_equal(array, right[key], err_msg=str(key))


def test_fp8_blocks_that_end_within_the_latent_are_read_as_their_values(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model = model_of(saved("deepseek_v3")[1])
    generator = torch.Generator().manual_seed(0)
    stored, values = {}, {}
    for name, tensor in model.tensors.items():
        if "self_attn" in name and "_proj" in name:
            rows, columns = tensor.shape
            powers = torch.randint(-6, 3, (-(-rows // 16), -(-columns // 24)), generator=generator)
            scales = 2.0**powers
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scales
            by_value = scales.repeat_interleave(16, 0)[:rows].repeat_interleave(24, 1)[:, :columns]
            values[name] = stored[name].float() * by_value
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24]}
    in_fp8 = model.changed(**stored).configured(quantization_config=settings)
    one = plan(checkpoints.save_safetensors(in_fp8, tmp_path / "fp8"))
    other = plan(checkpoints.save_safetensors(model.changed(**values), tmp_path / "values"))
    assert hashes(one) == hashes(other)
    for pair, same in zip(operators_of(one), operators_of(other), strict=True):
        torch.testing.assert_close(pair, same, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tensor", "of_content", "of_scores"),
    [
        ("kv_a_proj_with_mqa", True, False),
        ("kv_a_layernorm", True, False),
        ("o_proj", True, False),
        ("q_a_proj", False, True),
        ("q_a_layernorm", False, True),
        ("q_b_proj", False, True),
    ],
)
def test_the_hashes_notice_each_factor(
    tensor: str, of_content: bool, of_scores: bool, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model = model_of(saved("deepseek_v3")[1])
    name = f"model.layers.1.self_attn.{tensor}.weight"
    changed = model.tensors[name].clone()
    changed.view(-1)[0] += 1
    found = hashes(plan(checkpoints.save_safetensors(model.changed(**{name: changed}), tmp_path / "changed")))
    reference = hashes(plan(checkpoints.save_safetensors(model, tmp_path / "reference")))
    assert (found.content != reference.content) == of_content
    assert (found.query_key != reference.query_key) == of_scores


def test_ingested_closures_are_those_of_dense_operators(saved: Callable[[str], tuple[Any, Path]]) -> None:
    folder = saved("deepseek_v3")[1]
    tensors = {name: values.double().numpy() for name, values in load_file(folder / "model.safetensors").items()}
    closures = {key[1]: array for key, array in numbers(plan(folder)).items() if key[3] == "closure"}
    nope, value, rank = 24, 20, 36
    for layer, found in closures.items():
        stem = f"model.layers.{layer}.self_attn."
        down = tensors[stem + "kv_a_layernorm.weight"][:, None] * tensors[stem + "kv_a_proj_with_mqa.weight"][:rank]
        up = tensors[stem + "kv_b_proj.weight"].reshape(N_HEADS, nope + value, rank)
        output = tensors[stem + "o_proj.weight"].reshape(WIDTH, N_HEADS, value)
        expected = [dense.closure(output[:, head] @ up[head, nope:] @ down) for head in range(N_HEADS)]
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert len(closures) == 2
