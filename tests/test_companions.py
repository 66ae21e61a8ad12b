"""The macros on scaled isometry and query-key spectra, against the rows they are made of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from query import Atlas, open_atlas
from tests import checkpoints
from tests.ingesting import ingest_into

STACK = ["model", "operator", "stack"]


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atlas]:
    """Seven layers with shared values, two with own, one alone, and heads that are zero."""
    root = tmp_path_factory.mktemp("companions")
    zero = checkpoints.llama(layers=2, seed=5)
    zero = zero.changed(**{name: 0 * zero.tensors[name] for name in zero.tensors if "0.self_attn." in name})
    models = {
        "seven": checkpoints.llama(layers=7, heads=5, kv_heads=1, d_head=6, d_model=30),
        "bert": checkpoints.bert(),
        "one": checkpoints.llama(layers=1),
        "zero": zero,
    }
    for name, model in models.items():
        source = checkpoints.save_safetensors(model, root / name)
        ingest_into(root / "atlas", source, name, ("raw", "folded") if name == "seven" else ("raw",))
    with open_atlas(root / "atlas") as opened:
        yield opened


def same(found: pl.DataFrame, expected: pl.DataFrame, key: list[str]) -> None:
    assert len(found)
    assert_frame_equal(
        found.select(expected.columns).sort(key), expected.sort(key), check_dtypes=False, rel_tol=1e-12, abs_tol=0
    )


def spread(heads: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    isometry = pl.col("isometry")
    return heads.group_by(key).agg(
        pl.col("layer").n_unique().alias("layers"),
        isometry.is_not_null().sum().alias("heads"),
        isometry.median().alias("median"),
        isometry.quantile(0.25, "linear").alias("q25"),
        isometry.quantile(0.75, "linear").alias("q75"),
        pl.col("d_model").first(),
        pl.col("d_head").first(),
    )


@pytest.mark.parametrize(
    ("bins", "of_seven"),
    [(1, [0] * 7), (2, [0, 0, 0, 1, 1, 1, 1]), (4, [0, 0, 1, 2, 2, 3, 3]), (7, [0, 1, 2, 3, 4, 5, 6])],
)
def test_isometry_by_depth(bins: int, of_seven: list[int], atlas: Atlas) -> None:
    """Layers 0 to 6 are at depths 0, 1/6, ..., 1; the last bin holds its upper end."""
    heads = atlas.table("heads").collect()
    last = {"seven": 6, "bert": 1, "one": 1, "zero": 1}
    depth = pl.col("layer") / pl.col("model").replace_strict(last)
    binned = heads.with_columns(
        pl.min_horizontal((depth * bins + 1e-9).floor(), pl.lit(bins - 1)).cast(pl.Int32).alias("bin")
    )
    seven = binned.filter(model="seven", operator="raw", head=0).sort("layer")
    assert seven["bin"].to_list() == of_seven
    found = atlas.sql(f"FROM isometry_by_depth({bins})")
    same(found, spread(binned, [*STACK, "bin"]), [*STACK, "bin"])
    assert len(found) == binned.select(*STACK, "bin").n_unique()
    np.testing.assert_allclose(found["depth_from"], found["bin"] / bins)
    np.testing.assert_allclose(found["depth_to"], (found["bin"] + 1) / bins)
    empty = found.filter(pl.col("heads") == 0)
    assert empty["median"].null_count() == len(empty) == (bins > 1)


def test_no_bins_have_no_rows(atlas: Atlas) -> None:
    assert atlas.sql("FROM isometry_by_depth(0)").is_empty()


def test_isometry_is_participation_over_d_head(atlas: Atlas) -> None:
    """By model, medians beside the sizes that the model's own row has."""
    heads = atlas.table("heads").collect()
    medians = [pl.col(name).median() for name in ("isometry", "participation", "cos_mean")]
    models = atlas.table("models").select(
        "model", "n_layers", "d_model", "d_head", "attention_parameters", "total_parameters"
    )
    expected = heads.group_by(STACK).agg(pl.col("isometry").count().alias("heads"), *medians)
    found = atlas.sql("FROM isometry_by_model()")
    same(found, expected.join(models.collect(), on="model"), STACK)
    np.testing.assert_allclose(found["isometry"], found["participation"] / found["d_head"])
    assert found.filter(model="seven")["attention_parameters"].to_list() == [7 * 30 * (30 + 6 + 6 + 30)] * 2


@pytest.mark.parametrize("by", ["model", "layer"])
def test_query_and_key(by: str, atlas: Atlas) -> None:
    key = STACK if by == "model" else [*STACK, "layer"]
    query, own_key = pl.col("participation_q"), pl.col("participation_k")
    expected = (
        atlas.table("qk")
        .collect()
        .group_by(key)
        .agg(
            (query * own_key).is_not_null().sum().alias("heads"),
            query.median(),
            own_key.median(),
            (query / own_key).median().alias("q_over_k"),
            (query > own_key).mean().alias("q_larger"),
            pl.col("symmetric_share").median(),
            pl.col("cos_mean").median(),
        )
    )
    found = atlas.sql(f"FROM query_key_by_{by}()")
    same(found, expected, key)
    if by == "model":
        sizes = atlas.table("layers").select("model", "d_model", "d_key").unique().collect()
        same(found, found.select(STACK).join(sizes, on="model"), STACK)
        assert 0 < found.filter(model="seven", operator="raw")["q_larger"].item() < 1


def test_every_macro_says_what_it_holds(atlas: Atlas) -> None:
    comments = atlas.sql(
        "SELECT function_name, comment FROM duckdb_functions() WHERE function_type = 'table_macro' AND NOT internal"
    )
    assert comments["comment"].null_count() == 0
    assert {"isometry_by_depth", "isometry_by_model", "query_key_by_model", "query_key_by_layer"} <= set(
        comments["function_name"]
    )
