"""Configurations and files of decoders whose layers differ, in the forms that other versions write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingest.families import FAMILIES
from ingest.plan import Plan
from ingest.refusals import REFUSED
from stats.errors import CheckpointError
from tests import checkpoints
from tests.building import random_model
from tests.hybrid_variants import HYBRID_VARIANTS
from tests.irregular_variants import IRREGULAR_VARIANTS
from tests.measuring import operators_of, plan
from tests.probing import hooked, model_inputs
from tests.test_latent_attention import model_of

SHARED = "reads keys and values of an earlier layer"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], checkpoints.Model]:
    """A variant's model as it is saved."""

    @cache
    def make(name: str) -> checkpoints.Model:
        folder = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random_model(IRREGULAR_VARIANTS[name]).save_pretrained(folder)
        return model_of(folder)

    return make


def planned(model: checkpoints.Model, folder: Path) -> Plan:
    return plan(checkpoints.save_safetensors(model, folder))


def assert_same_operators(one: Plan, other: Plan) -> None:
    assert [layer.sizes for layer in one.layers] == [layer.sizes for layer in other.layers]
    for pair, same in zip(operators_of(one), operators_of(other), strict=True):
        torch.testing.assert_close(pair, same, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text-shared-layers"])
def test_projections_that_a_borrowing_layer_does_not_use_are_not_read(
    name: str, saved: Callable[[str], checkpoints.Model], tmp_path: Path
) -> None:
    model = saved(name)
    stem = "model.layers.{}.self_attn.{}.weight"
    dead = {
        stem.format(layer, projection): torch.randn_like(model.tensors[stem.format(layer - 2, projection)])
        for layer in (2, 3)
        for projection in ("k_proj", "v_proj")
    }
    with_dead = planned(model.changed(**dead), tmp_path / "dead")
    assert [(item.layer, item.reason) for item in with_dead.skipped] == [(2, SHARED), (3, SHARED)]
    assert_same_operators(with_dead, planned(model, tmp_path / "plain"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma4_text", {"global_head_dim": 32}),
        ("gemma4_text-values-are-keys", {"global_head_dim": 32, "num_global_key_value_heads": 1}),
    ],
)
def test_sizes_of_full_layers_have_two_spellings(
    name: str, settings: dict[str, int], saved: Callable[[str], checkpoints.Model], tmp_path: Path
) -> None:
    model = saved(name)
    assert "per_layer_config" in model.config
    older = model.configured(per_layer_config=..., **settings)
    one, other = planned(model, tmp_path / "newer"), planned(older, tmp_path / "older")
    assert [layer.d_head for layer in one.layers] == [24, 32, 24, 32]
    assert_same_operators(one, other)


def test_values_are_keys_in_full_layers_alone(saved: Callable[[str], checkpoints.Model], tmp_path: Path) -> None:
    model = saved("gemma4_text-values-are-keys")
    layers = planned(model, tmp_path / "whole").layers
    assert [layer.tensors["value"] == layer.tensors["key"] for layer in layers] == [False, True, False, True]
    assert [layer.n_kv_heads for layer in layers] == [2, 1, 2, 1]
    with pytest.raises(CheckpointError, match="incomplete") as caught:
        planned(model.without("layers.2.self_attn.v_proj"), tmp_path / "cut")
    assert "layers.2.self_attn.v_proj.weight" in str(caught.value)


def test_sliding_layers_may_have_sizes_of_their_own(saved: Callable[[str], checkpoints.Model], tmp_path: Path) -> None:
    model = saved("mimo_v2_flash")
    original = model.configured(
        layer_types=...,
        hybrid_layer_pattern=[0, 1],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_head_dim=24,
        swa_v_head_dim=20,
    )
    one, other = planned(model, tmp_path / "saved"), planned(original, tmp_path / "original")
    assert [layer.n_kv_heads for layer in one.layers] == [2, 4]
    assert [layer.value_scale for layer in one.layers] == [0.707, 0.707]
    assert_same_operators(one, other)


@pytest.mark.parametrize("listed", [..., None, []])
@pytest.mark.parametrize(("interval", "without"), [(..., [3]), (2, [1, 3])])
def test_layers_without_query_norms_are_listed_or_follow_an_interval(
    listed: Any, interval: Any, without: list[int], tmp_path: Path
) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {"no_rope_layers": listed, "no_rope_layer_interval": interval}
    model = checkpoints.llama(layers=4).configured(model_type="llama4_text", head_dim=8, **given)
    layers = planned(model, tmp_path).layers
    assert [layer.layer for layer in layers if "qk_norm" not in layer.pieces] == without
    spelled = CONFIG_MAPPING["llama4_text"](
        num_hidden_layers=4, **{key: value for key, value in given.items() if value is not ...}
    )
    assert ["qk_norm" in layer.pieces for layer in layers] == [bool(entry) for entry in spelled.no_rope_layers]


def test_a_branch_beside_another_is_scaled_on_its_way_in_and_out(tmp_path: Path) -> None:
    entering, leaving = 0.7, 0.9
    variant = HYBRID_VARIANTS["falcon_h1"]
    settings = {"attention_in_multiplier": entering, "attention_out_multiplier": leaving}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = random_model(replace(variant, config={**variant.config, **settings}))
    model.save_pretrained(tmp_path)
    layer = model.double().model.layers[0]
    seen: dict[str, Tensor] = {}
    with hooked(
        layer.input_layernorm.register_forward_hook(lambda _module, _args, result: seen.update(norm=result)),
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, given: seen.update(read=given["hidden_states"]), with_kwargs=True
        ),
        layer.self_attn.o_proj.register_forward_hook(lambda _module, _args, result: seen.update(written=result)),
        layer.pre_ff_layernorm.register_forward_pre_hook(lambda _module, args: seen.update(stream=args[0])),
    ):
        model(**model_inputs(model, 9, 1, False))
        whole = dict(seen)
        with hooked(
            layer.self_attn.o_proj.register_forward_hook(lambda _module, _args, result: torch.zeros_like(result))
        ):
            model(**model_inputs(model, 9, 1, False))
    torch.testing.assert_close(whole["read"], entering * whole["norm"])
    torch.testing.assert_close(whole["stream"] - seen["stream"], leaving * whole["written"])
    assert [item.multiplier for item in plan(tmp_path).layers] == [pytest.approx(entering * leaving)] * 2


def test_a_value_scale_that_is_no_number_is_refused(saved: Callable[[str], checkpoints.Model], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not give a multiplier"):
        planned(saved("mimo_v2_flash").configured(attention_value_scale="large"), tmp_path)


def test_a_list_of_sizes_by_layer_that_is_none_contradicts_the_tensors(
    saved: Callable[[str], checkpoints.Model], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="contradicts the configuration"):
        planned(saved("gemma4_text").configured(per_layer_config={"1": 5}), tmp_path)


def test_no_family_is_both_known_and_refused() -> None:
    assert not REFUSED.keys() & FAMILIES.keys()


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_without_operators_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"the attention of {model_type} cannot be read") as caught:
        planned(checkpoints.llama().configured(model_type=model_type), tmp_path)
    assert REFUSED[model_type] in str(caught.value)
