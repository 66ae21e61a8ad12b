"""The macros that sum up nulls, capacities, ranks and algebra, against the rows they are made of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from cli import main
from query import Atlas, open_atlas

THRESHOLD = 0.02
STACK = ["model", "operator", "stack"]
HEAD = [*STACK, "layer", "head"]


@pytest.fixture(scope="module")
def atlas(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atlas]:
    """A store with nulls and capacities by both methods."""
    store = Path(shutil.copytree(sealed_store, tmp_path_factory.mktemp("summaries") / "atlas"))
    for command in (["null", "--draws", "150"], ["capacity", "--refine", "--starts", "1"]):
        assert CliRunner().invoke(main, [*command, "--store", str(store)]).exit_code == 0
    with open_atlas(store) as opened:
        yield opened


def same(found: pl.DataFrame, expected: pl.DataFrame, key: list[str]) -> None:
    found, expected = found.select(expected.columns).sort(key), expected.sort(key)
    assert len(found)
    for name in expected.columns:
        if expected[name].dtype.is_float():
            assert found[name].to_list() == pytest.approx(expected[name].to_list(), rel=1e-12), name
        else:
            assert found[name].to_list() == expected[name].to_list(), name


@pytest.mark.parametrize(
    ("macro", "by"), [("null_by_model()", []), ("null_by_layer()", ["layer"])], ids=["model", "layer"]
)
def test_nulls(macro: str, by: list[str], atlas: Atlas) -> None:
    key = [*STACK, *by, "kind"]
    rows = atlas.table("nulls").join(atlas.table("heads").select(*HEAD, "closure"), on=HEAD).collect()
    defined = pl.col("p").is_not_null()
    expected = rows.group_by(key).agg(
        pl.len().alias("heads"),
        defined.sum().alias("defined"),
        pl.col("closure").filter(defined).median().alias("trained_median"),
        pl.col("median").median().alias("null_median"),
        pl.col("wins").sum().alias("wins"),
        *([pl.col("p").min().alias("smallest_p")] if by else [(pl.col("q") <= 0.05).sum().alias("discoveries")]),
    )
    if by:
        expected = expected.with_columns((pl.col("trained_median") > pl.col("null_median")).alias("layer_wins"))
    same(atlas.sql(f"FROM {macro}"), expected, key)


def test_capacities_by_model_and_layer(atlas: Atlas) -> None:
    trained = atlas.table("heads").select(*HEAD, pl.col("closure").alias("trained"))
    rows = atlas.table("capacities").join(trained, on=HEAD).collect()
    closure, strong = pl.col("closure"), pl.col("trained") >= THRESHOLD
    layers = rows.group_by(*STACK, "method", "layer").agg(
        closure.median().alias("median"),
        closure.max().alias("maximum"),
        (closure >= THRESHOLD).sum().alias("feasible"),
        strong.sum().alias("attained"),
        pl.col("trained").max().alias("trained_maximum"),
    )
    same(atlas.sql(f"FROM capacity_by_layer({THRESHOLD})"), layers, [*STACK, "method", "layer"])
    models = rows.group_by(*STACK, "method").agg(
        pl.len().alias("heads"),
        closure.median().alias("median"),
        closure.min().alias("minimum"),
        (closure >= THRESHOLD).sum().alias("feasible"),
        strong.sum().alias("attained"),
        (pl.col("trained") / closure).median().alias("attainment_median"),
    )
    by_layer = layers.group_by(*STACK, "method").agg(
        (pl.col("maximum") >= THRESHOLD).sum().alias("feasible_layers"),
        pl.len().alias("layers"),
        pl.col("maximum").min().alias("lowest_layer_maximum"),
        pl.col("median").min().alias("lowest_layer_median"),
    )
    expected = models.join(by_layer, on=[*STACK, "method"])
    same(atlas.sql(f"FROM capacity_by_model({THRESHOLD})"), expected, [*STACK, "method"])


def test_the_rank_of_a_head_among_the_mismatched_pairs_of_its_layer(atlas: Atlas) -> None:
    heads, pairs = (atlas.table(name).collect() for name in ("heads", "pairs"))
    found = atlas.sql("FROM matched_ranks()")
    assert len(found) == len(heads.filter(pl.col("closure").is_not_null()))
    for row in found.iter_rows(named=True):
        own = pairs.filter(~pl.col("shared_value"), *(pl.col(name) == row[name] for name in (*STACK, "layer")))
        mismatched = own["mismatch_closure"].drop_nulls()
        assert row["rank"] == 1 + (mismatched > row["closure"]).sum()
        assert row["candidates"] == 1 + len(mismatched)
        assert row["largest_mismatch"] == mismatched.max()


def test_the_law_of_a_group_beside_its_controls(atlas: Atlas) -> None:
    heads, pairs = (atlas.table(name).collect() for name in ("heads", "pairs"))
    found = atlas.sql(f"FROM algebra_by_group({THRESHOLD})")
    assert len(found)
    for row in found.iter_rows(named=True):
        place = [pl.col(name) == row[name] for name in (*STACK, "layer")]
        acting = heads.filter(*place, pl.col("head") == row["read_head"]).row(0, named=True)
        products = pairs.filter(*place, pl.col("read_head") == row["read_head"])
        group, others = (products.filter(pl.col("shared_value") == shared) for shared in (True, False))
        distance = (group["right_alpha"] - acting["alpha"]).abs().max() / abs(acting["alpha"])
        assert row["products"] == len(group)
        assert row["right_median"] == pytest.approx(group["right_closure"].median())
        assert row["other_right_median"] == pytest.approx(others["right_closure"].median())
        assert row["alpha_distance"] == pytest.approx(distance)
        assert row["range_angle_min"] == group["range_angle_min"].min()
        assert row["range_angle_max"] == pytest.approx(group["range_angle_max"].median())
        assert row["projection_norm"] == pytest.approx(acting["sigma_max"] / abs(acting["alpha"]))
        assert row["oblique_norm"] == pytest.approx(1 / acting["cos_min"])
