"""GGUF layouts beyond one size for all layers, against operators composed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ingest.factors import model_hashes
from ingest.pipeline import hash_layers
from ingest.plan import Operator, Plan
from stats.errors import CheckpointError
from tests.gguf_conversion import save
from tests.measuring import numbers, operators_of, plan
from tests.variant import N_HEADS, WIDTH

SIZES = {
    "embedding_length": WIDTH,
    "attention.head_count": N_HEADS,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + 1000 * seed))


def block(layer: int, rows: dict[str, int], width: int = WIDTH, stem: str = "blk") -> dict[str, Tensor]:
    """Random projections of one layer, by rows, an output that reads what the values give, and a norm."""
    names = {name: f"{stem}.{layer}.{name}.weight" for name in (*rows, "attn_norm")}
    tensors = {names[name]: normal(count, width, seed=layer) for name, count in rows.items()}
    return tensors | {names["attn_norm"]: 1 + normal(width, seed=layer)}


def heads_of(matrix: Tensor, count: int) -> Tensor:
    """Rows by head, in float64."""
    return matrix.double().view(count, -1, matrix.shape[-1])


def written(output: Tensor, value: Tensor, heads: int, kv_heads: int) -> Tensor:
    """``O V^T`` of every head, by a loop over heads."""
    size = output.shape[1] // heads
    return torch.stack(
        [
            output.double()[:, head * size : (head + 1) * size] @ heads_of(value, kv_heads)[head * kv_heads // heads]
            for head in range(heads)
        ]
    )


def assert_written(planned: Plan, expected: list[Tensor], operator: Operator = "raw") -> None:
    found = operators_of(planned, operator)
    assert len(found) == len(expected)
    for (ov, _), each in zip(found, expected, strict=True):
        torch.testing.assert_close(ov, each, rtol=1e-12, atol=1e-12)


SKIPPED_BY_COUNT = "the configuration gives the layer no heads"
SKIPPED_BY_NAME = "no attention tensors in the checkpoint"
SKIPPED_BY_SHARING = "reads keys and values of an earlier layer"

NOPE, ROPE, VALUE, RANK, QUERY_RANK = 8, 4, 6, 10, 12


def latent_block() -> dict[str, Tensor]:
    """One layer of multi-head latent attention as it is before conversion."""
    return {
        "attn_q_a": normal(QUERY_RANK, WIDTH),
        "attn_q_a_norm": 1 + normal(QUERY_RANK),
        "attn_q_b": normal(N_HEADS * (NOPE + ROPE), QUERY_RANK),
        "attn_kv_a_mqa": normal(RANK + ROPE, WIDTH),
        "attn_kv_a_norm": 1 + normal(RANK),
        "attn_kv_b": normal(N_HEADS * (NOPE + VALUE), RANK),
        "attn_output": normal(WIDTH, N_HEADS * VALUE),
        "attn_norm": 1 + normal(WIDTH),
    }


def with_full_query(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: values for name, values in tensors.items() if not name.startswith("attn_q")}
    return kept | {"attn_q": normal(N_HEADS * (NOPE + ROPE), WIDTH)}


def with_ups_by_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Newer files: keys (heads, rank, nope) and values (heads, value, rank) apart."""
    up = tensors["attn_kv_b"].view(N_HEADS, NOPE + VALUE, RANK)
    kept = {name: values for name, values in tensors.items() if name != "attn_kv_b"}
    return kept | {"attn_k_b": up[:, :NOPE].mT, "attn_v_b": up[:, NOPE:]}


OLD_LENGTHS = {"attention.key_length": NOPE + ROPE, "attention.value_length": VALUE, "attention.head_count_kv": N_HEADS}
NEW_LENGTHS = {
    "attention.key_length": RANK + ROPE,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUE,
    "attention.head_count_kv": 1,
}


def save_latent(tensors: dict[str, Tensor], lengths: dict[str, int], path: Path, architecture: str) -> Path:
    settings = {
        "block_count": 1,
        "embedding_length": WIDTH,
        "attention.head_count": N_HEADS,
        "attention.kv_lora_rank": RANK,
        "attention.q_lora_rank": QUERY_RANK,
        "rope.dimension_count": ROPE,
    }
    named = {f"blk.0.{name}.weight": values for name, values in tensors.items()}
    return save(architecture, settings | lengths, named, path)


@pytest.mark.parametrize("query", ["low-rank", "full"])
@pytest.mark.parametrize("form", ["joint", "joint with newer lengths", "by head"])
@pytest.mark.parametrize("operator", ["raw", "folded"])
def test_latent_attention_is_composed_from_either_form(
    form: str, query: str, operator: Operator, tmp_path: Path
) -> None:
    original = latent_block() if query == "low-rank" else with_full_query(latent_block())
    tensors = with_ups_by_head(original) if form == "by head" else original
    lengths = OLD_LENGTHS if form == "joint" else NEW_LENGTHS
    planned = plan(save_latent(tensors, lengths, tmp_path / "m.gguf", "deepseek2"), (operator,))
    reference = plan(save_latent(original, OLD_LENGTHS, tmp_path / "reference.gguf", "deepseek2"), (operator,))
    assert model_hashes(list(hash_layers(planned))) == model_hashes(list(hash_layers(reference)))
    assert "latent_norm" in planned.layers[0].pieces

    weights = {name: values.double() for name, values in original.items()}
    gain = weights["attn_norm"] if operator == "folded" else torch.ones(WIDTH).double()
    latent = weights["attn_kv_a_norm"][:, None] * weights["attn_kv_a_mqa"][:RANK] * gain
    whole = (
        weights["attn_q"] if query == "full" else (weights["attn_q_b"] * weights["attn_q_a_norm"] @ weights["attn_q_a"])
    )
    ((ov, qk),) = operators_of(planned, operator)
    for head in range(N_HEADS):
        first = head * (NOPE + VALUE)
        key_up, value_up = weights["attn_kv_b"][first : first + NOPE], weights["attn_kv_b"][first + NOPE :][:VALUE]
        output = weights["attn_output"][:, head * VALUE : (head + 1) * VALUE]
        torch.testing.assert_close(ov[head], output @ value_up @ latent, rtol=1e-10, atol=1e-10)
        key = torch.cat([key_up @ latent, weights["attn_kv_a_mqa"][RANK:] * gain])
        rows = (whole * gain)[head * (NOPE + ROPE) : (head + 1) * (NOPE + ROPE)]
        torch.testing.assert_close(qk[head], rows.mT @ key, rtol=1e-10, atol=1e-10)


def test_a_latent_value_has_the_usual_size_where_the_file_does_not_say(tmp_path: Path) -> None:
    tensors = latent_block()
    size = WIDTH // N_HEADS
    tensors |= {"attn_kv_b": normal(N_HEADS * (NOPE + size), RANK), "attn_output": normal(WIDTH, WIDTH)}
    lengths = {name: value for name, value in OLD_LENGTHS.items() if "value" not in name}
    assert plan(save_latent(tensors, lengths, tmp_path / "m.gguf", "minicpm3")).layers[0].d_head == size


def test_a_key_no_longer_than_its_rotary_part_is_refused(tmp_path: Path) -> None:
    path = save_latent(latent_block(), OLD_LENGTHS | {"attention.key_length": ROPE}, tmp_path / "m.gguf", "deepseek2")
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count"):
        plan(path)


def test_the_gate_beside_each_query_is_no_part_of_the_operator(tmp_path: Path) -> None:
    settings = {**SIZES, "block_count": 2, "full_attention_interval": 2}
    query, gate = normal(N_HEADS, 16, WIDTH, seed=1), normal(N_HEADS, 16, WIDTH, seed=2)
    full = block(1, {"attn_k": 32, "attn_v": 32, "attn_output": WIDTH})
    linear = block(0, {"attn_qkv": 96, "attn_gate": 32, "ssm_out": WIDTH})
    gated = {"blk.1.attn_q.weight": torch.cat([query, gate], 1).flatten(0, 1)}
    plain = {"blk.1.attn_q.weight": query.flatten(0, 1)}
    found = plan(save("qwen3next", settings, linear | full | gated, tmp_path / "gated.gguf"), ("raw", "folded"))
    expected = plan(save("qwen3", settings, full | plain, tmp_path / "plain.gguf"), ("raw", "folded"))
    assert [(layer.layer, layer.reason) for layer in found.skipped] == [(0, SKIPPED_BY_NAME)]
    assert found.layers[0].pieces == ("output_gate",)
    left, right = numbers(found), numbers(expected)
    assert left.keys() == right.keys()
    for key, array in left.items():
        np.testing.assert_array_equal(array, right[key], err_msg=str(key))


def test_layers_that_slide_and_layers_that_do_not_have_heads_of_their_own_size(tmp_path: Path) -> None:
    settings = {
        **SIZES,
        "block_count": 4,
        "attention.head_count_kv": [2, 1, 2, 2],
        "attention.key_length_swa": 8,
        "attention.value_length_swa": 8,
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.shared_kv_layers": 1,
    }
    tensors = block(0, {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": WIDTH})
    tensors |= block(1, {"attn_q": 64, "attn_k": 16, "attn_output": WIDTH})
    tensors |= block(2, {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": WIDTH})
    tensors |= block(3, {"attn_q": 64, "attn_output": WIDTH})
    for layer in (0, 2):
        tensors[f"blk.{layer}.attn_output.weight"] = normal(WIDTH, 32, seed=layer)
    planned = plan(save("gemma4", settings, tensors, tmp_path / "m.gguf"))
    assert [(layer.n_kv_heads, layer.d_head) for layer in planned.layers] == [(2, 8), (1, 16), (2, 8)]
    assert [(layer.layer, layer.reason) for layer in planned.skipped] == [(3, SKIPPED_BY_SHARING)]
    values = [tensors[f"blk.{layer}.{name}.weight"] for layer, name in ((0, "attn_v"), (1, "attn_k"), (2, "attn_v"))]
    outputs = [tensors[f"blk.{layer}.attn_output.weight"] for layer in range(3)]
    expected = [written(o, v, N_HEADS, g) for o, v, g in zip(outputs, values, (2, 1, 2), strict=True)]
    assert_written(planned, expected)
    assert all("value_norm" in layer.neutralised for layer in planned.layers)


def test_heads_are_counted_by_layer(tmp_path: Path) -> None:
    settings = {**SIZES, "block_count": 2, "attention.head_count": [4, 2], "attention.head_count_kv": [2, 1]}
    tensors = block(0, {"attn_qkv": 128, "attn_output": WIDTH}) | block(1, {"attn_qkv": 64, "attn_output": WIDTH})
    tensors["blk.1.attn_output.weight"] = normal(WIDTH, 32)
    planned = plan(save("openelm", settings, tensors, tmp_path / "m.gguf"))
    assert [(layer.n_heads, layer.n_kv_heads) for layer in planned.layers] == [(4, 2), (2, 1)]
    values = tensors["blk.0.attn_qkv.weight"][96:], tensors["blk.1.attn_qkv.weight"][48:]
    outputs = [tensors[f"blk.{layer}.attn_output.weight"] for layer in range(2)]
    assert_written(planned, [written(outputs[0], values[0], 4, 2), written(outputs[1], values[1], 2, 1)])


def test_layers_without_heads_are_skipped_whatever_they_hold_instead(tmp_path: Path) -> None:
    settings = {**SIZES, "block_count": 3, "attention.head_count": [4, 0, 4], "attention.head_count_kv": [2, 0, 0]}
    tensors = block(0, {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": WIDTH})
    tensors |= block(2, {"attn_output": WIDTH})
    planned = plan(save("deci", settings, tensors, tmp_path / "m.gguf"))
    assert [layer.layer for layer in planned.layers] == [0]
    assert [(layer.layer, layer.reason) for layer in planned.skipped] == [(1, SKIPPED_BY_COUNT), (2, SKIPPED_BY_COUNT)]


def test_layers_that_predict_further_tokens_are_no_part_of_the_stack(tmp_path: Path) -> None:
    settings = {**SIZES, "block_count": 3, "nextn_predict_layers": 1}
    rows = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": WIDTH}
    tensors = block(0, rows) | block(1, rows) | block(2, rows)
    planned = plan(save("glm4moe", settings, tensors, tmp_path / "m.gguf"))
    assert [layer.layer for layer in planned.layers] == [0, 1]
    assert [(layer.layer, layer.reason) for layer in planned.skipped] == [
        (2, "beyond the 2 layers of the configuration")
    ]


def test_values_narrower_than_keys_and_scaled(tmp_path: Path) -> None:
    settings = {**SIZES, "block_count": 1, "attention.value_length": 8, "attention.value_scale": 0.5}
    tensors = block(0, {"attn_q": 64, "attn_k": 32, "attn_v": 16, "attn_output": WIDTH})
    tensors |= {"blk.0.attn_output.weight": normal(WIDTH, 32), "blk.0.attn_sinks.weight": normal(N_HEADS)}
    planned = plan(save("mimo2", settings, tensors, tmp_path / "m.gguf"))
    output, value = tensors["blk.0.attn_output.weight"], tensors["blk.0.attn_v.weight"]
    assert_written(planned, [0.5 * written(output, value, N_HEADS, 2)])
    assert planned.layers[0].pieces == ("sinks",)


@pytest.mark.parametrize("operator", ["raw", "folded"])
def test_an_encoder_a_decoder_and_what_joins_them(operator: Operator, tmp_path: Path) -> None:
    settings = {**SIZES, "block_count": 1, "decoder_block_count": 2, "attention.head_count_kv": N_HEADS}
    rows = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_o"), WIDTH)
    cross = {f"cross_{name}": count for name, count in rows.items()}
    tensors = block(0, rows, stem="enc.blk") | {"enc.output_norm.weight": 1 + normal(WIDTH, seed=9)}
    for layer in range(2):
        tensors |= block(layer, rows | cross, stem="dec.blk")
        tensors[f"dec.blk.{layer}.cross_attn_norm.weight"] = 1 + normal(WIDTH, seed=layer + 3)
    planned = plan(save("t5", settings, tensors, tmp_path / "m.gguf"), (operator,))
    stacks = [("encoder", 0), ("decoder", 0), ("decoder", 1), ("cross", 0), ("cross", 1)]
    assert [(layer.stack, layer.layer) for layer in planned.layers] == stacks
    assert planned.ignored_prefixes == ()
    ones = torch.ones(WIDTH)
    for (stack, number), (ov, qk) in zip(stacks, operators_of(planned, operator), strict=True):
        stem = f"{'enc' if stack == 'encoder' else 'dec'}.blk.{number}.{'cross_' * (stack == 'cross')}"
        query_gain, value_gain = (
            (
                tensors[f"{stem}attn_norm.weight"],
                tensors["enc.output_norm.weight" if stack == "cross" else f"{stem}attn_norm.weight"],
            )
            if operator == "folded"
            else (ones, ones)
        )
        q, k, v, o = (tensors[f"{stem}attn_{name}.weight"] for name in "qkvo")
        torch.testing.assert_close(ov, written(o, v.double() * value_gain, N_HEADS, N_HEADS), rtol=1e-12, atol=1e-12)
        expected = heads_of(q.double() * query_gain, N_HEADS).mT @ heads_of(k.double() * value_gain, N_HEADS)
        torch.testing.assert_close(qk, expected, rtol=1e-12, atol=1e-12)
