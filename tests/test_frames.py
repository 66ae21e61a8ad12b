"""The questions as functions on Polars frames, each against the SQL route on the same store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from cli import main
from query import Atlas, open_atlas
from query.frames import (
    capacity_gap,
    closure_rates,
    comparison,
    lineage_heads,
    null_summary,
    trajectory,
)
from stats.errors import QueryError
from tests import checkpoints

THRESHOLD = 0.02
STEPS = ("step0", "step9", "step10")
LINEAGE_TABLES = ("heads", "models", "capacities", "nulls")


def ask(store: Path, *arguments: object) -> None:
    result = CliRunner().invoke(main, [*map(str, arguments), "--store", str(store)])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def atlas(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atlas]:
    """A store with undefined heads, a training run, nulls and capacities, both only where the macros join them."""
    root = tmp_path_factory.mktemp("frames")
    store = Path(shutil.copytree(sealed_store, root / "atlas"))
    value = "model.layers.1.self_attn.v_proj.weight"
    for seed, step in enumerate(STEPS):
        model = checkpoints.llama(layers=2, seed=seed)
        silent = model.tensors[value].clone()
        silent[:8] = 0
        checkpoints.save_safetensors(model.changed(**{value: silent}), root / "run" / step)
    ask(store, "ingest", root / "run", "--lineage", "tiny")
    ask(store, "null", "llama", "bert", "tiny@step9", "--draws", 150)
    ask(store, "capacity", "llama", "tiny@step0", "tiny@step10")
    ask(store, "capacity", "tiny@step0", "--refine", "--starts", 0)
    with open_atlas(store) as opened:
        yield opened


def same(found: pl.LazyFrame, expected: pl.DataFrame) -> None:
    """Names, types, rows and their order; floats to 1e-12."""
    assert isinstance(found, pl.LazyFrame)
    rows = found.collect()
    assert len(rows)
    assert rows.columns == expected.columns
    for name in expected.columns:
        if expected[name].dtype.is_float():
            assert rows[name].dtype == pl.Float64, name
            assert rows[name].is_null().to_list() == expected[name].is_null().to_list(), name
            wanted = expected[name].drop_nulls().to_list()
            assert rows[name].drop_nulls().to_list() == pytest.approx(wanted, rel=1e-12, abs=0), name
        else:
            assert rows[name].to_list() == expected[name].to_list(), name
            assert rows[name].dtype == expected[name].dtype, name


@pytest.mark.parametrize("threshold", [THRESHOLD, 0.0, 1.0])
def test_the_default_grouping_is_that_of_the_macros(atlas: Atlas, threshold: float) -> None:
    heads, nulls, capacities = (atlas.table(name) for name in ("heads", "nulls", "capacities"))
    assert heads.collect()["closure"].null_count() == 2 * len(STEPS)
    same(closure_rates(heads, threshold), atlas.sql(f"FROM closure_by_model({threshold})"))
    same(null_summary(heads, nulls), atlas.sql("FROM null_by_model()"))
    same(capacity_gap(heads, capacities, threshold), atlas.sql(f"FROM capacity_by_model({threshold})"))
    frames = [atlas.table(name) for name in LINEAGE_TABLES]
    same(trajectory(*frames, threshold=threshold), atlas.sql(f"FROM trajectory_by_step({threshold})"))


def test_every_head_of_a_run_is_that_of_the_macro(atlas: Atlas) -> None:
    expected = atlas.sql(f"FROM lineage_heads({THRESHOLD})")
    found = lineage_heads(*(atlas.table(name) for name in LINEAGE_TABLES), threshold=THRESHOLD)
    same(found.select(expected.columns), expected)
    assert expected["null_level"].to_list() != expected["null_median"].to_list()
    assert 0 < expected["capacity"].null_count() < len(expected)
    assert expected["cohort"].n_unique() == 2


def test_filtered_frames_answer_as_filtered_tables(atlas: Atlas) -> None:
    heads = atlas.table("heads").filter(pl.col("layer") > 0, pl.col("operator") == "raw")
    shown = "SELECT count(*) AS heads, count(closure) AS defined, median(closure) AS median, max(closure) AS maximum"
    expected = atlas.sql(f"SELECT d_model, {shown[7:]} FROM heads WHERE layer > 0 AND operator = 'raw' GROUP BY 1")
    same(closure_rates(heads, THRESHOLD, by="d_model").select(expected.columns), expected)
    same(
        capacity_gap(heads, atlas.table("capacities"), THRESHOLD, by="model").select(
            "model", "method", "heads", "layers"
        ),
        atlas.sql(
            "SELECT model, method, count(*) AS heads, count(DISTINCT layer) AS layers FROM capacities "
            "WHERE layer > 0 AND operator = 'raw' GROUP BY ALL ORDER BY ALL"
        ),
    )
    same(
        null_summary(heads, atlas.table("nulls"), by="model").select("model", "kind", "heads", "wins", "null_median"),
        atlas.sql(
            "SELECT model, kind, count(*) AS heads, count(*) FILTER (wins) AS wins, median(median) AS null_median "
            "FROM nulls WHERE layer > 0 AND operator = 'raw' GROUP BY model, kind ORDER BY ALL"
        ),
    )


def test_a_column_of_ones_own_groups_every_question(atlas: Atlas) -> None:
    mine = pl.when(pl.col("head") < 2).then(pl.lit("early"))
    heads, case = atlas.table("heads").with_columns(mine=mine), "CASE WHEN head < 2 THEN 'early' END AS mine"
    same(
        closure_rates(heads, THRESHOLD, by=["mine"]).select("mine", "heads", "median"),
        atlas.sql(
            f"SELECT {case}, count(*) AS heads, median(closure) AS median FROM heads GROUP BY mine ORDER BY mine"
        ),
    )
    same(
        null_summary(heads, atlas.table("nulls"), by="mine").select("mine", "kind", "heads", "draws", "largest_error"),
        atlas.sql(
            f"SELECT {case}, kind, count(*) AS heads, min(n_draws) FILTER (kind = 'scramble') AS draws, "
            "max(median_se) AS largest_error FROM nulls GROUP BY ALL ORDER BY mine, kind"
        ),
    )
    same(
        capacity_gap(heads, atlas.table("capacities"), 0.5, by="mine"),
        atlas.sql(
            f"""WITH grouped AS (
                SELECT {case}, method, model, operator, stack, layer, capacities.closure AS capacity,
                    heads.closure, attainment
                FROM capacities JOIN heads USING (model, operator, stack, layer, head)
            ), of_layers AS (
                SELECT mine, method, max(capacity) AS highest, median(capacity) AS middle
                FROM grouped GROUP BY mine, method, model, operator, stack, layer
            ), layers AS (
                SELECT mine, method, count(*) FILTER (highest >= 0.5) AS feasible_layers, count(*) AS layers,
                    min(highest) AS lowest_layer_maximum, min(middle) AS lowest_layer_median
                FROM of_layers GROUP BY mine, method
            ), own AS (
                SELECT mine, method, count(*) AS heads, count(capacity) AS defined, median(capacity) AS median,
                    min(capacity) AS minimum, count(*) FILTER (capacity >= 0.5) AS feasible,
                    count(*) FILTER (closure >= 0.5) AS attained, median(attainment) AS attainment_median
                FROM grouped GROUP BY mine, method
            )
            SELECT own.*, layers.* EXCLUDE (mine, method) FROM own JOIN layers
                ON own.mine IS NOT DISTINCT FROM layers.mine AND own.method = layers.method
            ORDER BY own.mine, own.method"""
        ),
    )
    models, capacities, nulls = (atlas.table(name) for name in LINEAGE_TABLES[1:])
    same(
        trajectory(heads, models, capacities, nulls, THRESHOLD, by=("lineage", "mine")).select(
            "mine", "step", "closure"
        ),
        atlas.sql(
            f"SELECT {case}, step, median(closure) AS closure FROM lineage_heads({THRESHOLD}) "
            "GROUP BY ALL ORDER BY mine, step"
        ),
    )


def test_a_head_without_p_is_no_part_of_the_trained_median(atlas: Atlas) -> None:
    untested = atlas.table("nulls").with_columns(p=pl.when(pl.col("head") > 0).then("p"))
    same(
        null_summary(atlas.table("heads"), untested).select("model", "kind", "defined", "trained_median"),
        atlas.sql(
            "SELECT model, kind, count(p) AS defined, median(closure) FILTER (p IS NOT NULL) AS trained_median "
            "FROM nulls JOIN heads USING (model, operator, stack, layer, head) WHERE head > 0 "
            "GROUP BY model, operator, stack, kind ORDER BY model, operator, stack, kind"
        ),
    )


def test_distributions_side_by_side_are_those_of_sql(atlas: Atlas) -> None:
    for column, threshold in (("closure", THRESHOLD), ("participation", 4.0), ("rank", 8)):
        expected = atlas.sql(
            f"SELECT model, operator, stack, count(*) AS heads, count({column}) AS defined, "
            f"quantile_cont({column}, 0.25)::DOUBLE AS q25, median({column})::DOUBLE AS median, "
            f"quantile_cont({column}, 0.75)::DOUBLE AS q75, quantile_cont({column}, 0.9)::DOUBLE AS q90, "
            f"max({column})::DOUBLE AS maximum, count(*) FILTER ({column} >= {threshold}) AS strong, "
            f"count(*) FILTER ({column} >= {threshold}) / count({column}) AS rate FROM heads GROUP BY ALL ORDER BY ALL"
        )
        same(comparison(atlas.table("heads"), column, threshold), expected)
    without = comparison(atlas.table("heads"), "norm", None).collect()
    assert without["strong"].null_count() == without["rate"].null_count() == len(without)


def test_no_grouping_is_one_row_and_no_head_is_none(atlas: Atlas) -> None:
    heads = atlas.table("heads")
    row = closure_rates(heads, THRESHOLD, by=()).collect()
    assert row["heads"].to_list() == [len(heads.collect())]
    assert row["median"].item() == pytest.approx(heads.collect()["closure"].median(), rel=1e-12)
    assert closure_rates(heads.filter(pl.col("layer") > 99)).collect().is_empty()
    undefined = closure_rates(heads.filter(pl.col("closure").is_null()), by="layer").collect()
    assert undefined.select("defined", "strong", "rate", "median").rows() == [(0, 0, None, None)]
    assert closure_rates(heads.collect(), THRESHOLD).collect().equals(closure_rates(heads, THRESHOLD).collect())


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (lambda a: closure_rates(a.table("heads"), by="modle"), "did you mean model"),
        (lambda a: closure_rates(a.table("heads").drop("alpha")), "no column 'alpha'"),
        (lambda a: closure_rates(a.table("heads"), 1.5), "threshold out of range"),
        (lambda a: null_summary(a.table("nulls"), a.table("heads")), "no column 'kind'"),
        (lambda a: null_summary(a.table("heads"), a.table("nulls"), by="mine"), "no column 'mine'"),
        (lambda a: capacity_gap(a.table("heads"), a.table("nulls")), "no column 'method'"),
        (lambda a: capacity_gap(a.table("heads"), a.table("capacities"), float("nan")), "out of range"),
        (lambda a: comparison(a.table("heads"), "label"), "without numbers"),
        (lambda a: trajectory(*[a.table(name) for name in LINEAGE_TABLES], by="run"), "no column 'run'"),
        (lambda a: trajectory(*[a.table("heads")] * 4), "no column 'lineage'"),
    ],
)
def test_a_frame_that_cannot_answer_is_one_error(question: Callable[[Atlas], Any], said: str, atlas: Atlas) -> None:
    with pytest.raises(QueryError, match=said):
        question(atlas)


def test_tables_outlive_their_store(atlas: Atlas) -> None:
    with open_atlas(atlas.path) as opened:
        heads = opened.table("heads")
        expected = opened.sql(f"FROM closure_by_model({THRESHOLD})")
    same(closure_rates(heads, THRESHOLD), expected)
