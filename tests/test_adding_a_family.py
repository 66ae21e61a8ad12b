"""What docs/adding-a-family.md says, done: a made-up family, its row and its variant taken from the document."""

from __future__ import annotations

import re
import runpy
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import tests.test_families as families
from ingest import decoders
from ingest.families import FAMILIES
from ingest.family import Family, Layout
from stats.errors import CheckpointError
from tests import decoder_variants
from tests.probing import probe
from tests.test_families import Subject, random_model
from tests.variant import Variant

DOCS = Path(__file__).parent.parent / "docs"


class CumulusConfig(PretrainedConfig):
    model_type = "cumulus"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    }

    def __init__(
        self,
        d_model: int = 512,
        n_layers: int = 8,
        n_heads: int = 8,
        n_kv_heads: int | None = None,
        vocab_size: int = 128,
        **others: Any,
    ) -> None:
        self.d_model, self.n_layers, self.n_heads = d_model, n_layers, n_heads
        self.n_kv_heads = n_kv_heads
        self.vocab_size = vocab_size
        super().__init__(**others)


class CumulusNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class CumulusMixer(nn.Module):
    """Causal attention; the fused matrix has all queries, then all keys, then all values."""

    def __init__(self, config: CumulusConfig) -> None:
        super().__init__()
        self.heads, self.size = config.n_heads, config.d_model // config.n_heads
        self.kv_heads = config.n_kv_heads or config.n_heads
        self.qkv = nn.Linear(config.d_model, (self.heads + 2 * self.kv_heads) * self.size)
        self.out = nn.Linear(self.heads * self.size, config.d_model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        by_head = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = by_head.split([self.heads, self.kv_heads, self.kv_heads], 1)
        key, value = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (key, value))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.mT / self.size**0.5).masked_fill(future, -torch.inf)
        weights = scores.softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2)), weights


class CumulusBlock(nn.Module):
    def __init__(self, config: CumulusConfig) -> None:
        super().__init__()
        self.norm_in = CumulusNorm(config.d_model)
        self.mixer = CumulusMixer(config)
        self.norm_mlp = CumulusNorm(config.d_model)
        self.mlp = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_in(x))[0]
        return x + self.mlp(self.norm_mlp(x))


class CumulusPreTrainedModel(PreTrainedModel):
    config_class = CumulusConfig
    base_model_prefix = "transformer"


class CumulusModel(CumulusPreTrainedModel):
    def __init__(self, config: CumulusConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(CumulusBlock(config) for _ in range(config.n_layers))
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


class CumulusForCausalLM(CumulusPreTrainedModel):
    def __init__(self, config: CumulusConfig) -> None:
        super().__init__(config)
        self.transformer = CumulusModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.transformer(input_ids))


def python_of_the_document() -> list[str]:
    """The document's blocks of Python, in order."""
    text = (DOCS / "adding-a-family.md").read_text(encoding="utf-8")
    return [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def documented_row() -> Family:
    """The row, as it reads among those of ``ingest/decoders.py``."""
    (row,) = eval(python_of_the_document()[0].strip(), vars(decoders))
    assert isinstance(row, Family)
    return row


def documented_variant() -> Variant:
    """The variant, as it reads among those of ``tests/decoder_variants.py``."""
    (variant,) = eval("{" + python_of_the_document()[1] + "}", vars(decoder_variants)).items()
    assert variant[0] == "cumulus"
    assert isinstance(variant[1], Variant)
    return variant[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """The made-up model, built by transformers, saved with and without its head, and probed."""
    AutoConfig.register("cumulus", CumulusConfig, exist_ok=True)
    AutoModelForCausalLM.register(CumulusConfig, CumulusForCausalLM, exist_ok=True)
    variant, folder = documented_variant(), tmp_path_factory.mktemp("cumulus")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = random_model(variant)
        model.save_pretrained(folder / "whole")
        model.base_model.save_pretrained(folder / "headless")
        blocks = probe(model.double(), variant)
    yield Subject(folder / "whole", folder / "headless", "transformer.", blocks, variant.skipped)
    torch.set_num_threads(threads)


Add = Callable[[Family, Variant | None], None]


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Add:
    """Adds a row and its variant to the tables for one test."""

    def add_both(row: Family, variant: Variant | None) -> None:
        monkeypatch.setitem(FAMILIES, row.model_type, (row,))
        if variant is not None:
            monkeypatch.setitem(families.VARIANTS, row.model_type, variant)

    return add_both


COMPARISONS = (
    families.test_operators_are_those_of_the_running_heads,
    families.test_folded_operators_contain_the_running_norms,
    families.test_operators_and_attention_number_heads_alike,
    families.test_pieces_are_those_of_the_running_module,
    families.test_multipliers_are_those_of_the_running_layer,
    families.test_shifted_heads_are_noticed,
    families.test_folding_changes_the_operators,
    families.test_a_save_without_the_head_gives_the_same_plan,
)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.__name__)
def test_the_documented_row_passes_what_every_family_passes(
    comparison: Callable[..., None], saved: Subject, add: Add
) -> None:
    add(documented_row(), documented_variant())
    comparison("cumulus", lambda _name: saved)


def test_before_the_row_is_there_the_model_is_refused_with_its_names(saved: Subject) -> None:
    with pytest.raises(CheckpointError, match="unknown family 'cumulus'") as caught:
        families.plan(saved.folder, "raw")
    assert "transformer.blocks.0.mixer.qkv.weight [128, 64]" in str(caught.value.found)


def with_layout(row: Family, layout: Layout) -> Family:
    (form,) = row.projections
    return replace(row, projections=(replace(form, layout=layout),))


def test_a_wrong_layout_is_found(saved: Subject, add: Add) -> None:
    add(with_layout(documented_row(), "grouped"), documented_variant())
    with pytest.raises(AssertionError):
        families.test_operators_are_those_of_the_running_heads("cumulus", lambda _name: saved)


def test_a_layout_that_cannot_be_is_refused(saved: Subject, add: Add) -> None:
    add(with_layout(documented_row(), "interleaved"), documented_variant())
    with pytest.raises(CheckpointError, match="a key and a value for every query head"):
        families.plan(saved.folder, "raw")


def test_a_row_without_a_variant_is_noticed(add: Add) -> None:
    add(documented_row(), None)
    with pytest.raises(AssertionError):
        families.test_every_family_has_a_variant()
    add(documented_row(), documented_variant())
    families.test_every_family_has_a_variant()


def test_the_list_of_families_names_it(add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    add(documented_row(), None)
    runpy.run_path(str(DOCS / "make_families.py"), run_name="__main__")
    assert re.search(r"^\| `cumulus` .*mixer\.qkv", capsys.readouterr().out, re.MULTILINE)
