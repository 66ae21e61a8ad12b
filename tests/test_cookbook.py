"""The queries of the cookbook, run on the demo model, and what it says of them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.stats

from query import Atlas, open_atlas
from query.output import encode
from tests.printed import ROOT, Shown, cells, recipes

COOKBOOK = (ROOT / "docs" / "cookbook.md").read_text()
RECIPES = list(recipes(COOKBOOK))
TITLES = re.findall(r"^## \d+\. (.*)$", COOKBOOK, re.MULTILINE)
BY_TITLE = dict(zip(TITLES, RECIPES, strict=True))

pytestmark = pytest.mark.xdist_group("demo")


@pytest.fixture(scope="module")
def atlas(demo_store: Path) -> Atlas:
    return open_atlas(demo_store)


@pytest.mark.parametrize("shown", RECIPES, ids=TITLES)
def test_an_answer_is_the_one_shown(shown: Shown, atlas: Atlas) -> None:
    assert cells(encode(atlas.sql(shown.text), "table").decode()) == cells(shown.output)


def raw(atlas: Atlas, table: str) -> pl.DataFrame:
    return atlas.table(table).filter(operator="raw").collect()


def test_rank_correlations_are_those_of_scipy(atlas: Atlas) -> None:
    answer = atlas.sql(BY_TITLE["What goes with closure"].text).row(0, named=True)
    heads = raw(atlas, "heads")
    for name, column in (
        ("cos_mean", heads["cos_mean"]),
        ("participation", heads["participation"]),
        ("copying_modulus", heads["copying"].abs()),
    ):
        expected = scipy.stats.spearmanr(heads["closure"], column).statistic
        assert answer[name] == pytest.approx(expected, abs=1e-12)


def test_effective_ranks_are_those_of_numpy(atlas: Atlas) -> None:
    answer = atlas.sql(BY_TITLE["Effective rank from the spectrum"].text)
    heads = raw(atlas, "heads").join(raw(atlas, "spectra"), on=["model", "stack", "layer", "head"])
    ranks = {}
    for label, sigma in heads.select("label", "sigma").rows():
        share = np.square(sigma) / np.square(sigma).sum()
        ranks[label] = math.exp(scipy.stats.entropy(share))
    expected = dict(sorted(ranks.items(), key=lambda item: item[1])[:4])
    assert dict(answer.select("label", "effective_rank").rows()) == pytest.approx(expected, rel=1e-12)


def test_unusual_capacities_are_those_of_polars(atlas: Atlas) -> None:
    answer = atlas.sql(BY_TITLE["Strong, significant, and of unusual capacity"].text)
    key = ["model", "operator", "stack", "layer", "head"]
    capacity = pl.col("closure_capacity")
    joined = (
        raw(atlas, "heads")
        .join(raw(atlas, "nulls").filter(kind="scramble"), on=key)
        .join(raw(atlas, "capacities").filter(method="assignment"), on=key, suffix="_capacity")
        .with_columns(z=(capacity - capacity.mean().over("layer")) / capacity.std().over("layer"))
    )
    expected = joined.filter(pl.col("closure") >= 0.9, pl.col("p_tail") <= 1e-6, pl.col("z").abs() >= 1)
    expected = expected.sort(pl.col("z").abs(), descending=True)
    assert answer["label"].to_list() == expected["label"].to_list()
    assert answer["z"].to_list() == pytest.approx(expected["z"].to_list())
    assert joined["z"].abs().max() <= (9 - 1) / math.sqrt(9)


def test_the_text_around_the_answers_is_true(atlas: Atlas) -> None:
    heads = raw(atlas, "heads")
    weakest = heads.group_by("layer", "kv_head").agg(pl.col("closure").min()).filter(pl.col("closure") >= 0.9)
    assert weakest.select("layer", "kv_head").rows() == [(29, 0)]
    strong = heads.filter(pl.col("closure") >= 0.9)
    assert (strong["copying"].abs() > 0.99).all()
    assert (strong["copying"].sign() == strong["alpha"].sign()).all()
    assert len(RECIPES) == len(TITLES) >= 15
