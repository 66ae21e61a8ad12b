"""Models of unknown families: read where names and shapes leave one reading, refused with what was found otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

import cli
from ingest.families import FAMILIES
from ingest.family import Family, Projections
from ingest.plan import Operator, Plan, plan_checkpoint
from ingest.refusals import REFUSED
from ingest.source import open_checkpoint
from query import open_atlas
from stats.errors import CheckpointError
from tests.checkpoints import Model, bert, gpt2, llama, save_gguf, save_safetensors
from tests.measuring import operators_of

WIDTH, HEADS, KV_HEADS, D_HEAD, LAYERS = 24, 4, 2, 8, 2
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": D_HEAD,
}
LLAMA_NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def attention(path: str, names: tuple[str, str, str, str], layers: int = LAYERS, gated: int = 1) -> dict[str, Tensor]:
    """Separate projections of every layer under a path, in the order query, key, value, output."""
    generator = torch.Generator().manual_seed(len(path))
    shapes = (
        (gated * HEADS * D_HEAD, WIDTH),
        (KV_HEADS * D_HEAD, WIDTH),
        (KV_HEADS * D_HEAD, WIDTH),
        (WIDTH, HEADS * D_HEAD),
    )
    return {
        f"{path.format(layer=layer)}{name}.weight": torch.randn(shape, generator=generator)
        for layer in range(layers)
        for name, shape in zip(names, shapes, strict=True)
    }


def nimbus(tensors: Mapping[str, Tensor] | None = None, **settings: Any) -> Model:
    """A model of a family that nobody knows; ``...`` takes a setting out."""
    held = attention("model.layers.{layer}.", LLAMA_NAMES) if tensors is None else tensors
    return Model({"model_type": "nimbus", **SIZES}, held).configured(**settings)


def plan(model: Model, place: Path, *operators: Operator, family: str | None = None) -> Plan:
    return plan_checkpoint(open_checkpoint(str(save_safetensors(model, place))), operators or ("raw",), family)


def refusal(model: Model, place: Path, *operators: Operator, family: str | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        plan(model, place, *operators, family=family)
    assert str(place) in str(caught.value.where)
    assert caught.value.remedy
    return caught.value


def by_hand(tensors: Mapping[str, Tensor], path: str, names: tuple[str, str, str, str]) -> list[Tensor]:
    """``O V^T`` of every head of every layer, cut out of the tensors."""
    found = []
    for layer in range(LAYERS):
        _, _, value, output = (tensors[f"{path.format(layer=layer)}{name}.weight"].double() for name in names)
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            rows = slice(shared * D_HEAD, (shared + 1) * D_HEAD)
            heads.append(output[:, head * D_HEAD : (head + 1) * D_HEAD] @ value[rows])
        found.append(torch.stack(heads))
    return found


def assert_heads(planned: Plan, tensors: Mapping[str, Tensor], path: str, names: tuple[str, str, str, str]) -> None:
    expected = by_hand(tensors, path, names)
    for (ov, _), same in zip(operators_of(planned), expected, strict=True):
        torch.testing.assert_close(ov, same, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Known:
    """Names as a family has them, and what they are called when nothing else says so."""

    path: str
    names: tuple[str, str, str, str]
    family: str
    stack: str = "decoder"
    config: Mapping[str, Any] = field(default_factory=lambda: SIZES)


def projections(stem: str, output: str) -> tuple[str, str, str, str]:
    return f"{stem}q_proj", f"{stem}k_proj", f"{stem}v_proj", f"{stem}{output}"


KNOWN = {
    "llama": Known("model.layers.{layer}.", LLAMA_NAMES, "llama-like"),
    "phi": Known("model.layers.{layer}.", projections("self_attn.", "dense"), "phi-like"),
    "opt": Known("model.decoder.layers.{layer}.", projections("self_attn.", "out_proj"), "opt-like"),
    "gptj": Known(
        "transformer.h.{layer}.",
        projections("attn.", "out_proj"),
        "gptj-like",
        config={"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_head_kv": KV_HEADS},
    ),
    "gpt_neo": Known(
        "h.{layer}.",
        projections("attn.attention.", "out_proj"),
        "exaone-like",
        config={"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "kv_channels": D_HEAD},
    ),
    "ctrl": Known(
        "transformer.h.{layer}.multi_head_attention.", ("Wq", "Wk", "Wv", "dense"), "ctrl-like", config=SIZES
    ),
    "bert": Known(
        "bert.encoder.layer.{layer}.attention.",
        ("self.query", "self.key", "self.value", "output.dense"),
        "bert-like",
        "encoder",
    ),
    "distilbert": Known(
        "distilbert.transformer.layer.{layer}.attention.",
        ("q_lin", "k_lin", "v_lin", "out_lin"),
        "distilbert-like",
        "encoder",
        {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": None},
    ),
    "clip": Known("encoder.layers.{layer}.", projections("self_attn.", "out_proj"), "bart-like", "encoder"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_separate_projections_are_read_whatever_the_family_is_called(name: str, tmp_path: Path) -> None:
    known = KNOWN[name]
    tensors = attention(known.path, known.names)
    planned = plan(Model({"model_type": "nimbus", **known.config}, tensors), tmp_path / "model")
    assert planned.family == known.family
    assert planned.recognition.by == "names and shapes"
    assert {layer.stack for layer in planned.layers} == {known.stack}
    assert [(item.n_heads, item.n_kv_heads, item.d_head) for item in planned.layers] == [(4, 2, 8)] * LAYERS
    assert_heads(planned, tensors, known.path, known.names)
    (note,) = planned.recognition.notes
    assert note.startswith(f"unknown model_type 'nimbus': read as {known.family}, separate ")
    assert "by names and shapes" in note
    assert "headatlas verify MODEL --against transformers" in note


def distinct_forms() -> list[tuple[Family, Projections]]:
    """Every way a known family names attention, with the row that has it."""
    rows = (row for rows in FAMILIES.values() for row in rows)
    forms = {(row.block, form): (row, form) for row in rows for form in row.projections}
    return [(row, form) for row, form in forms.values() if "{inner}" not in row.block + form.output]


def test_no_known_form_is_read_as_another(tmp_path: Path) -> None:
    """Attention with four matrices of its own is read right, every other form refused."""
    read = 0
    for number, (row, form) in enumerate(distinct_forms()):
        place = tmp_path / str(number)
        names = (form.query, form.key, form.value, form.output)
        if form.layout == "separate" and len({*names}) == 4:
            tensors = attention(row.block, names, gated=2 if form.gated_query else 1)
        else:
            names_held = [f"{row.block}{name}.weight" for name in form.roles.values()]
            tensors = dict(fused(*names_held).tensors)
        if form.layout != "separate" or form.gated_query or row.two_spaces or form.key == form.value:
            assert "names and shapes do not tell" in refusal(nimbus(tensors), place).what
        else:
            assert_heads(plan(nimbus(tensors), place), tensors, row.block, names)
            read += 1
    assert read >= 15


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": ...},
        {"model_type": None},
        {"head_dim": ...},
        {"head_dim": None},
        {"head_dim": ..., "num_attention_heads": ..., "n_head": HEADS},
        {"n_embd": WIDTH, "n_layer": LAYERS},
    ],
    ids=str,
)
def test_sizes_come_from_the_configuration(settings: dict[str, Any], tmp_path: Path) -> None:
    model = nimbus(**settings)
    planned = plan(model, tmp_path / "model")
    assert_heads(planned, model.tensors, "model.layers.{layer}.", LLAMA_NAMES)
    called = "unknown model_type 'nimbus'" if "model_type" not in settings else "no model_type"
    assert planned.recognition.notes[0].startswith(called)


def test_an_unknown_name_changes_no_number(tmp_path: Path) -> None:
    for model in (llama(), bert()):
        known, unknown = model, model.configured(model_type="nimbus")
        place = tmp_path / str(model.config["model_type"])
        for (ov, qk), (same_ov, same_qk) in zip(
            operators_of(plan(unknown, place / "a")), operators_of(plan(known, place / "b")), strict=True
        ):
            assert torch.equal(ov, same_ov)
            assert torch.equal(qk, same_qk)


def beside(**tensors: Tensor) -> Model:
    """``nimbus`` with further tensors in each layer, by name within it; ``__`` is a dot."""
    added = {
        f"model.layers.{layer}.{name.replace('__', '.')}": tensor.clone()
        for name, tensor in tensors.items()
        for layer in range(LAYERS)
    }
    return nimbus({**attention("model.layers.{layer}.", LLAMA_NAMES), **added})


def test_what_leaves_the_operator_alone_may_stand_beside_it(tmp_path: Path) -> None:
    model = beside(
        self_attn__q_norm__weight=torch.ones(D_HEAD),
        self_attn__k_norm__weight=torch.ones(D_HEAD),
        self_attn__q_proj__bias=torch.ones(HEADS * D_HEAD),
        self_attn__rotary_emb__inv_freq=torch.ones(4),
        self_attn__bias=torch.ones(1, 1, 9, 9),
        self_attn__masked_bias=torch.ones(()),
        mlp__gate_proj__weight=torch.ones(3, WIDTH),
        input_layernorm__weight=torch.ones(WIDTH),
    )
    planned = plan(model, tmp_path / "model")
    assert_heads(planned, model.tensors, "model.layers.{layer}.", LLAMA_NAMES)
    assert planned.layers[0].pieces == ("qk_norm",)


def test_known_pieces_are_named(tmp_path: Path) -> None:
    model = beside(
        self_attn__sinks=torch.ones(HEADS),
        self_attn__gate_proj__weight=torch.ones(HEADS * D_HEAD, WIDTH),
        self_attn__attn_sub_norm__weight=torch.ones(HEADS * D_HEAD),
    ).configured(clip_qkv=8.0)
    planned = plan(model, tmp_path / "model")
    assert set(planned.layers[0].pieces) == {"sinks", "output_gate", "sub_norm", "clamp"}
    assert set(planned.layers[0].neutralised) == {"output_gate", "sub_norm", "clamp"}


def test_layers_that_predict_further_tokens_are_no_part_of_the_stack(tmp_path: Path) -> None:
    tensors = attention("model.layers.{layer}.", LLAMA_NAMES, LAYERS + 1)
    ahead = attention("mtp.layers.{layer}.", LLAMA_NAMES, 1)
    planned = plan(nimbus(tensors | ahead), tmp_path / "model")
    assert_heads(planned, tensors, "model.layers.{layer}.", LLAMA_NAMES)
    assert [(item.layer, item.reason) for item in planned.skipped] == [(2, "beyond the 2 layers of the configuration")]
    assert planned.ignored_prefixes == ("mtp.",)


def swapped(**shapes: tuple[int, ...]) -> Model:
    """``nimbus`` with projections of other shapes in layer 0."""
    tensors = attention("model.layers.{layer}.", LLAMA_NAMES)
    return nimbus(
        tensors | {f"model.layers.0.self_attn.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    )


def fused(*names: str, shape: tuple[int, int] = (64, WIDTH)) -> Model:
    return nimbus({name.format(layer=layer): torch.ones(shape) for name in names for layer in range(LAYERS)})


SECOND = attention("model.other.layers.{layer}.", LLAMA_NAMES)
CROSS = attention("model.layers.{layer}.", tuple(name.replace("self", "cross") for name in LLAMA_NAMES))  # type: ignore[arg-type]
PLAIN = attention("model.layers.{layer}.", LLAMA_NAMES)
UNDECIDED: dict[str, tuple[Model, str, str]] = {
    "a square transposed matrix": (
        gpt2().configured(model_type="nimbus"),
        "separate projections",
        "concatenated and transposed as in gpt2, concatenated as in gpt_bigcode, interleaved as in gpt_bigcode",
    ),
    "fused, known in one order": (
        fused("model.layers.{layer}.self_attn.qkv_proj.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
        "does not tell the order of its rows",
        "concatenated as in phi3",
    ),
    "fused, known in three orders": (
        fused("h.{layer}.self_attention.query_key_value.weight", "h.{layer}.self_attention.dense.weight"),
        "does not tell the order of its rows",
        "concatenated as in falcon, interleaved as in falcon, grouped as in falcon",
    ),
    "a narrow projection that heads share": (
        fused(
            *(f"layers.{{layer}}.self_attn.{name}.weight" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
            "layers.{layer}.self_attn.kv_a_layernorm.weight",
            "layers.{layer}.self_attn.o_proj.weight",
        ),
        "does not tell",
        "latent as in deepseek_v3",
    ),
    "names nobody has": (
        nimbus(attention("model.layers.{layer}.", ("attention.wq", "attention.wk", "attention.wv", "attention.wo"))),
        "names that a known family has",
        "no such name; its layer 0 has model.layers.0.attention.wk.weight [16, 24]",
    ),
    "no numbered layers": (nimbus({"proj.weight": torch.ones(2, 3)}), "one stack", "layer 0 has proj.weight [2, 3]"),
    "two stacks": (nimbus(PLAIN | SECOND), "one stack", "model.layers.{layer}., model.other.layers.{layer}."),
    "two kinds in a layer": (nimbus(PLAIN | CROSS), "one stack", "model.layers.{layer}., model.layers.{layer}."),
    "another stream": (nimbus(CROSS), "that read one stream", "separate as in mllama_text_model"),
    "a layer without": (
        nimbus(num_hidden_layers=3),
        "in each of 3 layers",
        "not all of them in layer 2 under model.layers.2.",
    ),
    "layers beyond counting": (nimbus(num_hidden_layers=10**12), "in each of 1,000,000,000,000 layers", "layer 2"),
    "no head count": (
        nimbus(num_attention_heads=...),
        "a size in the configuration, as num_attention_heads, n_head",
        "only head_dim, hidden_size, model_type, num_hidden_layers, num_key_value_heads",
    ),
    "a head count of null": (nimbus(num_attention_heads=None), "a size in the configuration", "q_proj.weight [32, 24]"),
    "heads by layer": (nimbus(num_attention_heads=[4, 4]), "one number for num_attention_heads", "[4, 4]"),
    "heads below zero": (nimbus(num_attention_heads=-4), "one number", "-4"),
    "two head counts": (nimbus(n_head=8), "one number for num_attention_heads or n_head", "'n_head': 8"),
    "no count of shared heads": (
        nimbus(num_key_value_heads=...),
        "key [32, 24], value [32, 24], output [24, 32], from 4 heads, 4 key/value heads, head size 8, width 24",
        "query [32, 24], key [16, 24], value [16, 24], output [24, 32]",
    ),
    "heads that give another size": (nimbus(head_dim=16), "query [64, 24]", "query [32, 24]"),
    "heads that do not divide": (nimbus(head_dim=..., num_attention_heads=5), "query [30, 24]", "query [32, 24]"),
    "values of another size": (swapped(v_proj=(8, 24)), "value [16, 24]", "value [8, 24]"),
    "transposed": (swapped(k_proj=(24, 16)), "key [16, 24]", "key [24, 16]"),
    "a scalar": (swapped(q_proj=()), "query [32, 24]", "query []"),
    "differences of heads": (
        beside(self_attn__lambda_q1=torch.ones(4)),
        "nothing in attention that known families",
        "model.layers.0.self_attn.lambda_q1",
    ),
    "a norm of values": (
        beside(self_attn__v_norm__weight=torch.ones(8)),
        "nothing in attention",
        "self_attn.v_norm.weight",
    ),
    "a norm in one layer only": (
        nimbus({**PLAIN, "model.layers.1.self_attn.v_norm.weight": torch.ones(8)}),
        "nothing in attention",
        "model.layers.1.self_attn.v_norm.weight",
    ),
    "a norm of nobody knows what": (
        beside(self_attn__norm__weight=torch.ones(8)),
        "nothing in attention",
        "self_attn.norm.weight",
    ),
}


@pytest.mark.parametrize("case", UNDECIDED)
def test_anything_else_is_refused_with_what_was_found(case: str, tmp_path: Path) -> None:
    model, expected, found = UNDECIDED[case]
    error = refusal(model, tmp_path / "model")
    assert error.what == "unknown family 'nimbus', and names and shapes do not tell how to read its attention"
    assert expected in str(error.expected)
    assert found in str(error.found)
    assert "its layer 0 has " in str(error.found)
    assert "--family NAME" in str(error.remedy)


def test_a_gate_within_queries_needs_the_family(tmp_path: Path) -> None:
    tensors = attention("model.layers.{layer}.", LLAMA_NAMES, gated=2)
    error = refusal(nimbus(tensors, head_dim=D_HEAD), tmp_path / "unnamed")
    assert "query [64, 24]" in str(error.found)
    assert "query [64, 24]" in str(refusal(nimbus(tensors, head_dim=...), tmp_path / "sizeless").expected)
    planned = plan(nimbus(tensors), tmp_path / "named", family="qwen3_next")
    assert_heads(planned, tensors, "model.layers.{layer}.", LLAMA_NAMES)


def test_packed_weights_are_refused_by_their_scheme(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj."
    packed = {f"{name}qweight": torch.zeros(3, 32, dtype=torch.int32), f"{name}g_idx": torch.zeros(24)}
    model = nimbus({**PLAIN, **packed}).without(f"{name}weight")
    assert refusal(model, tmp_path / "tensors").what == "the weights are quantised with GPTQ"
    named = nimbus(quantization_config={"quant_method": "awq"})
    assert refusal(named, tmp_path / "configuration").what == "the weights are quantised with AWQ"


@pytest.mark.parametrize("model_type", ["diffllama", "jetmoe"])
def test_families_known_to_be_unreadable_stay_refused(model_type: str, tmp_path: Path) -> None:
    error = refusal(nimbus(model_type=model_type), tmp_path / "model")
    assert error.found == REFUSED[model_type]


def test_a_text_of_an_unknown_family_is_refused_with_what_was_found(tmp_path: Path) -> None:
    config = {"text_config": {"model_type": "parchment", **SIZES}, "vision_config": {"model_type": "clip_vision_model"}}
    tensors = {name.replace("model.", "language_model.model."): tensor for name, tensor in PLAIN.items()}
    error = refusal(Model({"model_type": "nimbus", **config}, tensors), tmp_path / "model")
    assert error.what == "unknown model family 'parchment'"
    assert "text_config.model_type" in str(error.where)
    assert "language_model.model.layers.0.self_attn.q_proj.weight [32, 24]" in str(error.found)
    config["text_config"]["model_type"] = "jetmoe"
    error = refusal(Model({"model_type": "nimbus", **config}, tensors), tmp_path / "refused")
    assert error.found == REFUSED["jetmoe"]


def test_nothing_is_folded_where_no_norm_is_known(tmp_path: Path) -> None:
    error = refusal(nimbus(), tmp_path / "model", "raw", "folded")
    assert error.what == "llama-like has no folded operator"
    assert "cannot be told from names and shapes" in str(error.found)
    assert error.remedy == "use --operator raw"


def test_a_family_named_overrules_names_and_shapes(tmp_path: Path) -> None:
    named = plan(llama(model_type="nimbus"), tmp_path / "model", "raw", "folded", family="mistral")
    assert (named.family, named.recognition.by, named.recognition.notes) == ("mistral", "--family", ())
    error = refusal(nimbus(), tmp_path / "other", family="gpt2")
    assert error.what == "no attention found in the checkpoint"
    assert "attn.c_attn.weight" in str(error.expected)
    assert "model.layers.0.self_attn.q_proj.weight" in str(error.found)


def gguf_of(place: Path, names: Mapping[str, str], layers: int = LAYERS, **metadata: int) -> Path:
    """A GGUF file of an architecture nobody knows, and its tensors named by hand."""
    writer = gguf.GGUFWriter(place, "nimbus")
    sizes = {"embedding_length": WIDTH, "block_count": layers, "attention.head_count": HEADS}
    sizes |= {"attention.head_count_kv": KV_HEADS, "attention.key_length": D_HEAD, "attention.value_length": D_HEAD}
    for key, value in {**sizes, **metadata}.items():
        writer.add_uint32(f"nimbus.{key}", value)
    for name, tensor in PLAIN.items():
        stem, _, projection = name.removesuffix(".weight").rpartition(".")
        if projection in names:
            layer = stem.split(".")[2]
            writer.add_tensor(f"blk.{layer}.{names[projection]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


IN_GGUF = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}


def test_an_unknown_architecture_of_gguf(tmp_path: Path) -> None:
    planned = plan_checkpoint(open_checkpoint(str(gguf_of(tmp_path / "m.gguf", IN_GGUF))))
    assert (planned.family, planned.recognition.by) == ("llama-like", "names and shapes")
    assert_heads(planned, PLAIN, "model.layers.{layer}.", LLAMA_NAMES)


def test_blocks_of_gguf_that_predict_further_tokens_are_not_counted(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "m.gguf", IN_GGUF, layers=LAYERS + 1, nextn_predict_layers=1)
    planned = plan_checkpoint(open_checkpoint(str(path)))
    assert [layer.layer for layer in planned.layers] == [0, 1]


@pytest.mark.parametrize(
    ("names", "metadata", "found"),
    [
        ({**IN_GGUF, "q_proj": "attn_qkv"}, {}, "concatenated as in llama"),
        ({**IN_GGUF, "k_proj": "attn_kk"}, {}, "no such name; its layer 0 has blk.0.attn_q.weight [32, 24]"),
        (IN_GGUF, {"attention.value_length": 16, "attention.head_count_kv": 1}, "key [16, 24]"),
    ],
)
def test_what_gguf_does_not_tell(
    names: Mapping[str, str], metadata: dict[str, int], found: str, tmp_path: Path
) -> None:
    path = gguf_of(tmp_path / "m.gguf", names, **metadata)
    with pytest.raises(CheckpointError, match="unknown family 'nimbus', and names and shapes") as caught:
        plan_checkpoint(open_checkpoint(str(path)))
    assert found in str(caught.value.found)


def test_a_known_architecture_is_still_known(tmp_path: Path) -> None:
    planned = plan_checkpoint(open_checkpoint(str(save_gguf(llama(), tmp_path))))
    assert (planned.family, planned.recognition.by) == ("llama", "model_type")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def test_it_is_said_loudly_and_recorded(tmp_path: Path) -> None:
    path = save_safetensors(nimbus(), tmp_path / "model")
    planned = invoke("plan", path)
    assert planned.exit_code == 0, planned.output
    assert "unknown model_type 'nimbus': read as llama-like" in planned.output
    assert "not possible: the norms of the family are not known" in planned.output
    stored = invoke("ingest", path, "--store", tmp_path / "atlas")
    assert stored.exit_code == 0, stored.output
    assert "model: unknown model_type 'nimbus': read as llama-like" in stored.stderr
    with open_atlas(tmp_path / "atlas") as atlas:
        family, by, notes = atlas.sql("SELECT family, recognised_by, notes FROM models").row(0)
    assert (family, by) == ("llama-like", "names and shapes")
    assert "headatlas verify MODEL --against transformers" in notes
    folded = invoke("ingest", path, "--store", tmp_path / "atlas", "--operator", "both")
    assert folded.exit_code == 1
    assert "llama-like has no folded operator" in folded.stderr
