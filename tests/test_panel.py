"""The published panel beside a store: every number from a second route, and honest about what it cannot say."""

from __future__ import annotations

from pathlib import Path

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


def row(frame: pl.DataFrame, claim: str, model: str) -> dict[str, object]:
    return frame.filter(pl.col("claim").str.starts_with(claim), pl.col("model") == model).row(0, named=True)


def test_every_claim_stands_beside_every_model_and_all_of_them(answered: tuple[Path, pl.DataFrame]) -> None:
    frame = answered[1]
    assert frame.select("claim", "model").rows() == [
        (claim.claim, model) for claim in CLAIMS for model in ("bert", "llama", POOLED)
    ]
    assert set(frame["verdict"]) <= {"agrees", "differs", "not testable here"}
    assert frame.filter(pl.col("verdict") == "not testable here")["reason"].str.len_chars().min() > 10


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


def test_one_value_for_all_heads_has_no_mismatch(tmp_path: Path) -> None:
    source = checkpoints.save_safetensors(checkpoints.llama(kv_heads=1), tmp_path / "one-value")
    ingest_into(tmp_path / "atlas", source, "one-value")
    with open_atlas(tmp_path / "atlas") as atlas:
        frame = atlas.panel()
    assert frame["model"].unique().to_list() == ["one-value"]
    found = row(frame, "largest", "one-value")
    assert found["verdict"] == "not testable here"
    assert "one value for all heads" in str(found["reason"])


def test_the_same_store_gives_the_same_panel(answered: tuple[Path, pl.DataFrame]) -> None:
    with open_atlas(answered[0]) as atlas:
        assert atlas.panel(THRESHOLD).equals(answered[1])
    assert not answered[1]["estimate"].is_nan().any()
