"""The published panel beside a store: every number from a second route, and honest about what it cannot say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import scipy.stats
from click.testing import CliRunner

from cli import main
from query import open_atlas
from query.panel import CLAIMS, POOLED
from tests import checkpoints
from tests.ingesting import ingest_into

THRESHOLD = 0.02


@pytest.fixture(scope="module")
def answered(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.DataFrame]:
    """A store with nulls and capacities, and its panel at a threshold that random heads reach."""
    import shutil

    store = Path(shutil.copytree(sealed_store, tmp_path_factory.mktemp("panel") / "atlas"))
    for command in (["null", "--draws", "200"], ["capacity"]):
        assert CliRunner().invoke(main, [*command, "--store", str(store)]).exit_code == 0
    with open_atlas(store) as atlas:
        return store, atlas.panel(THRESHOLD)


def row(frame: pl.DataFrame, claim: str, model: str) -> dict[str, Any]:
    return frame.filter(pl.col("claim").str.starts_with(claim), pl.col("model") == model).row(0, named=True)


def test_every_claim_stands_beside_every_model_and_all_of_them(answered: tuple[Path, pl.DataFrame]) -> None:
    frame = answered[1]
    assert frame.select("claim", "model").rows() == [
        (claim.claim, model) for claim in CLAIMS for model in ("bert", "llama", POOLED)
    ]
    assert set(frame["verdict"]) <= {"agrees", "differs", "not testable here"}
    assert frame["reason"].str.len_chars().min() > 10
    assert frame["pooled"].to_list() == [None, None, "bert, llama"] * len(CLAIMS)


def test_a_verdict_is_where_the_interval_lies(answered: tuple[Path, pl.DataFrame]) -> None:
    published = {"median closure, trained": 0.336, "median closure, scrambled": 1.04e-4, "trained beats": 0.9864}
    verdicts = set()
    for claim, number in published.items():
        for model in ("bert", "llama", POOLED):
            found = row(answered[1], claim, model)
            where = "below" if found["high"] < number else "above" if found["low"] > number else "holds"
            assert found["verdict"] == ("agrees" if where == "holds" else "differs")
            assert where in found["reason"]
            verdicts.add(where)
    assert verdicts >= {"below", "above"}


def test_small_closures_keep_their_digits(answered: tuple[Path, pl.DataFrame]) -> None:
    for claim in ("median closure", "largest", "right action"):
        for found in answered[1].filter(pl.col("claim").str.starts_with(claim)).iter_rows(named=True):
            if found["value"]:
                shown = float(found["value"].removeprefix("right ").split()[0])
                assert shown == pytest.approx(found["estimate"], rel=5e-3)
                assert shown > 0


def test_counts_published_for_one_closure_are_not_tested_at_another(answered: tuple[Path, pl.DataFrame]) -> None:
    store, at_threshold = answered
    with open_atlas(store) as atlas:
        published = atlas.panel()
    for claim in ("heads at", "closure >= 0.9 feasible"):
        assert row(published, claim, "llama")["verdict"] != "not testable here"
        found = row(at_threshold, claim, "llama")
        assert found["verdict"] == "not testable here"
        assert found["reason"] == "published for a closure of 0.9, counted here at 0.02"
        assert found["estimate"] is not None
    for claim in ("median closure, trained", "trained beats", "largest"):
        assert row(published, claim, "llama") == row(at_threshold, claim, "llama")


@pytest.mark.parametrize("model", ["bert", "llama", POOLED])
def test_the_numbers_are_those_of_hand_written_sql(answered: tuple[Path, pl.DataFrame], model: str) -> None:
    store, frame = answered
    own = "true" if model == POOLED else f"heads.model = '{model}'"
    with open_atlas(store) as atlas:
        heads = atlas.sql(f"SELECT * FROM heads WHERE operator = 'raw' AND {own}")
        nulls = atlas.sql(f"SELECT * FROM nulls AS heads WHERE operator = 'raw' AND kind = 'scramble' AND {own}")
        mismatch = atlas.sql(
            f"SELECT max(mismatch_closure) FROM pairs AS heads WHERE operator = 'raw' AND NOT shared_value AND {own}"
        ).item()
        capacity = atlas.sql(f"SELECT * FROM capacities AS heads WHERE operator = 'raw' AND {own}")
    strong = (heads["closure"] >= THRESHOLD).mean()
    assert row(frame, "heads at", model)["estimate"] == pytest.approx(strong)
    assert row(frame, "median closure, trained", model)["estimate"] == pytest.approx(heads["closure"].median())
    assert row(frame, "median closure, scrambled", model)["estimate"] == pytest.approx(nulls["median"].median())
    assert row(frame, "trained beats scrambled, heads", model)["estimate"] == pytest.approx(nulls["wins"].mean())
    assert row(frame, "largest", model)["estimate"] == pytest.approx(mismatch)
    layers = capacity.group_by("model", "layer").agg(pl.col("closure").max())
    assert row(frame, "closure >= 0.9 feasible", model)["estimate"] == (layers["closure"] >= THRESHOLD).mean()
    for claim in ("heads at", "median closure, trained", "median closure, scrambled"):
        found = row(frame, claim, model)
        assert found["low"] <= found["estimate"] <= found["high"]


def test_intervals_are_at_least_as_wide_as_those_of_independent_heads(answered: tuple[Path, pl.DataFrame]) -> None:
    found = row(answered[1], "heads at", "llama")
    naive = scipy.stats.binomtest(round(found["estimate"] * 12), 12).proportion_ci(method="wilson")
    assert found["high"] - found["low"] >= 0.9 * (naive.high - naive.low)


def test_what_was_not_computed_is_not_testable(sealed_store: Path) -> None:
    with open_atlas(sealed_store) as atlas:
        frame = atlas.panel()
    reasons = {row["claim"]: (row["verdict"], row["reason"]) for row in frame.iter_rows(named=True)}
    assert reasons["trained beats scrambled, heads"] == (
        "not testable here",
        "no scrambles are stored: draw them with headatlas null",
    )
    assert reasons["closure >= 0.9 feasible"][1] == "no capacities are stored: compute them with headatlas capacity"


def test_what_some_models_lack_is_named(store_path: Path) -> None:
    for command in ("null", "capacity"):
        assert CliRunner().invoke(main, [command, "bert", "--store", str(store_path)]).exit_code == 0
    with open_atlas(store_path) as atlas:
        frame = atlas.panel()
    assert row(frame, "trained beats", "bert")["value"]
    assert row(frame, "trained beats", "llama")["reason"].startswith("no scrambles are stored: ")
    assert row(frame, "trained beats", POOLED)["reason"].startswith("no scrambles are stored for llama: ")
    assert row(frame, "closure >= 0.9 feasible", POOLED)["reason"].startswith("no capacities are stored for llama: ")


def test_weights_are_pooled_once_and_runs_by_their_last_step(tmp_path: Path) -> None:
    store = tmp_path / "atlas"
    sources = [
        checkpoints.save_safetensors(checkpoints.llama(seed=seed), tmp_path / f"model-{seed}") for seed in range(3)
    ]
    ingest_into(store, sources[0], "copied")
    ingest_into(store, sources[0], "original")
    for step in (1, 2):
        named = ["--name", f"step-{step}", "--lineage", "run", "--step", str(step)]
        done = CliRunner().invoke(main, ["ingest", str(sources[step]), *named, "--store", str(store)])
        assert done.exit_code == 0, done.output
    with open_atlas(store) as atlas:
        frame = atlas.panel()
        median = atlas.sql("SELECT median(closure) FROM heads WHERE model IN ('copied', 'step-2')").item()
        names = sorted(set(frame["model"]))
    assert names == sorted(["copied", "original", "step-1", "step-2", POOLED])
    found = row(frame, "median closure, trained", POOLED)
    assert found["pooled"] == "copied, step-2"
    assert found["estimate"] == pytest.approx(median)
    assert "16 heads" in found["value"]


@pytest.mark.parametrize(
    ("model", "threshold", "reason"),
    [
        ("bert", 0.02, "no values are shared: every head has its own"),
        ("llama", 0.9, "no head closes to 0.9"),
    ],
)
def test_why_there_is_no_right_action(sealed_store: Path, model: str, threshold: float, reason: str) -> None:
    with open_atlas(sealed_store) as atlas:
        found = row(atlas.panel(threshold), "right action", model)
    assert (found["value"], found["verdict"], found["reason"]) == ("", "not testable here", reason)


def test_one_value_for_all_heads_and_one_layer(tmp_path: Path) -> None:
    source = checkpoints.save_safetensors(checkpoints.llama(kv_heads=1, layers=1), tmp_path / "one-value")
    ingest_into(tmp_path / "atlas", source, "one-value")
    with open_atlas(tmp_path / "atlas") as atlas:
        frame = atlas.panel()
    assert frame["model"].unique().to_list() == ["one-value"]
    found = row(frame, "largest", "one-value")
    assert found["verdict"] == "not testable here"
    assert "one value for all heads" in str(found["reason"])
    for claim in ("heads at", "median closure, trained"):
        found = row(frame, claim, "one-value")
        assert (found["verdict"], found["low"]) == ("not testable here", None)
        assert found["reason"] == "a single layer shows no variation between layers"


def test_the_same_store_gives_the_same_panel(answered: tuple[Path, pl.DataFrame]) -> None:
    with open_atlas(answered[0]) as atlas:
        assert atlas.panel(THRESHOLD).equals(answered[1])
    assert not answered[1]["estimate"].is_nan().any()
