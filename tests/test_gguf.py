"""GGUF files of every architecture give what the models they were converted from give."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import MODEL_TENSORS, TENSOR_NAMES

from ingest.factors import model_hashes
from ingest.families import GGUF_FAMILIES
from ingest.pipeline import hash_layers
from ingest.plan import Operator
from tests.checkpoints import llama, permuted, save_gguf, save_safetensors
from tests.gguf_conversion import ARCHITECTURES, CONVERSIONS, convert, permute_rotary
from tests.measuring import numbers, operators_of, plan
from tests.test_families import VARIANTS, random_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Builds and saves a variant at first use, with gains that stay exact when one is added to them."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = random_model(VARIANTS[name])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.copy_((256 * parameter).round() / 256)
        model.save_pretrained(folder)
        return folder, model.config

    return make


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_model_gives_the_same_numbers(
    name: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    conversion, (folder, config) = CONVERSIONS[name], saved(name)
    operators: tuple[Operator, ...] = ("raw",) if VARIANTS[name].post_norm else ("raw", "folded")
    expected, found = plan(folder, operators), plan(convert(conversion, config, folder, tmp_path / "m.gguf"), operators)
    assert [layer.layer for layer in found.layers] == [layer.layer for layer in expected.layers]
    assert [layer.layer for layer in found.skipped] == [layer.layer for layer in expected.skipped]
    by_format = [model_hashes(list(hash_layers(planned))) for planned in (found, expected)]
    assert by_format[0].content == by_format[1].content
    is_permuted = conversion.change is permute_rotary
    assert (by_format[0].query_key == by_format[1].query_key) != is_permuted
    left, right = numbers(found), numbers(expected)
    assert left.keys() == right.keys()
    for key, array in left.items():
        if is_permuted and key[3].startswith("qk_"):
            np.testing.assert_allclose(array, right[key], rtol=1e-10, atol=1e-12, err_msg=str(key))
        else:
            np.testing.assert_array_equal(array, right[key], err_msg=str(key))


def test_permuted_queries_and_keys_change_no_number(tmp_path: Path) -> None:
    """Where only q, or only k, is in the other order, ``Q K^T`` is another matrix."""
    model = llama()
    name = "model.layers.0.self_attn.q_proj.weight"
    mixed = model.changed(**{name: permuted(model.tensors[name], 4)})
    reference, found = (
        plan(save_safetensors(model, tmp_path / "a")),
        plan(save_gguf(model, tmp_path / "b", permute=True)),
    )
    for (ov, qk), (same_ov, same_qk) in zip(operators_of(found), operators_of(reference), strict=True):
        assert torch.equal(ov, same_ov)
        torch.testing.assert_close(qk, same_qk, rtol=1e-12, atol=1e-12)
    (_, other), *_ = operators_of(plan(save_safetensors(mixed, tmp_path / "c")))
    assert (other - operators_of(reference)[0][1]).abs().amax((1, 2)).min() > 1e-3


LEFT_OUT = {
    "clip", "cogvlm", "kimi-linear", "neo-bert", "wavtokenizer-dec",
    "arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7",
}  # fmt: skip
"""Architectures of the gguf package that the table lacks; those of the second line have no attention."""


def test_the_architectures_are_those_of_the_package() -> None:
    assert set(GGUF_FAMILIES) == set(ARCHITECTURES) - LEFT_OUT


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_the_package_knows_every_tensor_a_row_names(name: str) -> None:
    known = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[ARCHITECTURES[name]]}
    anywhere = set(TENSOR_NAMES.values())
    for row in GGUF_FAMILIES[name]:
        stem = row.block.replace("{layer}", "{bid}")
        forms = [{stem + tensor for tensor in form.roles.values()} for form in row.projections]
        assert any(form <= known for form in forms)
        assert all(form <= anywhere for form in forms)
        for norm in (row.feeding, row.branch):
            if norm is not None and norm.tensor:
                assert known & {stem + norm.tensor, stem + norm.other_tensor}
        for piece in row.pieces:
            assert not piece.tensor or stem + piece.tensor.removesuffix(".weight") in known
