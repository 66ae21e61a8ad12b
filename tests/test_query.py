"""Questions against hand-written SQL and numpy, and what ad hoc SQL must not be able to do."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest

from query import Atlas, open_atlas
from query.connection import connect
from query.output import FORMATS, deliver, encode
from stats.errors import QueryError, StoreError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def atlas(sealed_store: Path) -> Iterator[Atlas]:
    with open_atlas(sealed_store) as opened:
        yield opened


@pytest.fixture(scope="module")
def closures(atlas: Atlas) -> dict[tuple[str, str], np.ndarray]:
    """Closure (layer, head) by model and operator, from the arrays."""
    keys = [("llama", "raw"), ("llama", "folded"), ("bert", "raw")]
    return {key: atlas.array(key[0], "closure", key[1]) for key in keys}


THRESHOLD = 0.02
"""Random heads close at about 1 / d_head^2; this splits them."""


def test_closure_by_model(atlas: Atlas, closures: dict[tuple[str, str], np.ndarray]) -> None:
    rows = {(row["model"], row["operator"]): row for row in atlas.closure(THRESHOLD).iter_rows(named=True)}
    assert set(rows) == set(closures)
    for key, values in closures.items():
        row = rows[key]
        strong = int((values >= THRESHOLD).sum())
        assert 0 < strong < values.size
        assert (row["heads"], row["defined"], row["strong"]) == (values.size, values.size, strong)
        assert row["rate"] == pytest.approx(strong / values.size)
        assert row["median"] == pytest.approx(np.median(values))
        assert row["q90"] == pytest.approx(np.quantile(values, 0.9))
        assert row["maximum"] == values.max()


def test_closure_by_layer(atlas: Atlas, closures: dict[tuple[str, str], np.ndarray]) -> None:
    rows = atlas.closure(THRESHOLD, by="layer", models=["llama"], operator="raw")
    values = closures["llama", "raw"]
    assert rows["layer"].to_list() == [0, 1, 2]
    np.testing.assert_allclose(rows["median"], np.median(values, axis=1))
    assert rows["strongest"].to_list() == [f"L{layer}H{head}" for layer, head in enumerate(values.argmax(1))]
    assert rows["strong"].to_list() == (values >= THRESHOLD).sum(1).tolist()


def test_closure_by_head_lists_the_strong_ones(atlas: Atlas, closures: dict[tuple[str, str], np.ndarray]) -> None:
    rows = atlas.closure(THRESHOLD, by="head", models=["bert"])
    expected = np.argwhere(closures["bert", "raw"] >= THRESHOLD)
    assert rows.select("layer", "head").rows() == [tuple(pair) for pair in expected.tolist()]


def test_mismatch(atlas: Atlas) -> None:
    array = atlas.array("llama", "mismatch_closure")
    kv_head = atlas.array("llama", "kv_head")
    different = kv_head[:, :, None] != kv_head[:, None, :]
    row = atlas.mismatch(0.5, models=["llama"], operator="raw").row(0, named=True)
    assert row["mismatched_pairs"] == different.sum() == 24
    assert row["maximum"] == array[different].max()
    assert row["median"] == pytest.approx(np.median(array[different]))
    layer, write, read = np.unravel_index(np.where(different, array, -1).argmax(), array.shape)
    assert row["largest_pair"].split()[:2] == [f"L{layer}", f"O{write}"]
    assert kv_head[layer, int(row["largest_pair"].split("V")[1])] == kv_head[layer, read]
    by_layer = atlas.mismatch(0.5, by="layer", models=["llama"], operator="raw")
    np.testing.assert_allclose(by_layer["maximum"], np.where(different, array, -1).max((1, 2)))
    np.testing.assert_allclose(by_layer["matched_maximum"], atlas.array("llama", "closure").max(1))


def test_algebra(atlas: Atlas) -> None:
    closure = atlas.array("llama", "closure")
    right, left = atlas.array("llama", "right_closure"), atlas.array("llama", "left_closure")
    right_alpha, kv_head = atlas.array("llama", "right_alpha"), atlas.array("llama", "kv_head")
    shared = kv_head[:, :, None] == kv_head[:, None, :]
    acting = np.broadcast_to((closure >= THRESHOLD)[:, None, :], shared.shape)
    other_head = ~np.eye(4, dtype=bool)[None]
    rows = {
        row["pairing"]: row for row in atlas.algebra(THRESHOLD, models=["llama"], operator="raw").iter_rows(named=True)
    }
    for pairing, chosen in (("same group", shared), ("other group", ~shared)):
        chosen = chosen & acting & other_head
        assert rows[pairing]["products"] == chosen.sum() > 0
        assert rows[pairing]["right_median"] == pytest.approx(np.median(right[chosen]))
        assert rows[pairing]["right_minimum"] == right[chosen].min()
        assert rows[pairing]["left_median"] == pytest.approx(np.median(left[chosen]))
    groups = atlas.algebra(THRESHOLD, by="group", models=["llama"], operator="raw")
    assert groups.height == (closure >= THRESHOLD).sum()
    for row in groups.iter_rows(named=True):
        chosen = (shared & other_head)[row["layer"], :, row["read_head"]]
        alphas = right_alpha[row["layer"], :, row["read_head"]][chosen]
        assert row["right_alpha_mean"] == pytest.approx(alphas.mean())
        assert row["right_alpha_spread"] == pytest.approx(alphas.std(), abs=1e-12)
    pairs = atlas.algebra(THRESHOLD, by="pair", models=["llama"], operator="raw")
    assert pairs.height == (acting & other_head).sum()


def test_operators_are_never_mixed(atlas: Atlas) -> None:
    for frame in (atlas.closure(), atlas.closure(by="layer"), atlas.mismatch(), atlas.algebra(THRESHOLD)):
        assert "operator" in frame.columns


def test_tables_as_lazy_frames(atlas: Atlas) -> None:
    heads = atlas.table("heads").filter(pl.col("operator") == "raw").collect()
    assert heads.height == 20
    with pytest.raises(QueryError, match="no table named 'haeds'"):
        atlas.table("haeds")


def test_parameters_are_bound(atlas: Atlas) -> None:
    count = "SELECT count(*) AS n FROM heads WHERE model = $model AND closure >= $t"
    assert atlas.sql(count, {"model": "bert", "t": 0}).item() == 8
    assert atlas.sql(count, {"model": "' OR true --", "t": 0}).item() == 0


def test_a_question_prints_as_sql_that_gives_the_same_rows(atlas: Atlas) -> None:
    from query import questions

    for question in (
        questions.closure(0.01, "layer", ["llama", "o'brien"], "raw"),
        questions.mismatch(0.5),
        questions.algebra(THRESHOLD, "group"),
        questions.description("llama"),
        questions.MODELS,
        questions.SCHEMA_TABLES,
        questions.table_schema("qk"),
    ):
        assert atlas.sql(str(question)).equals(atlas.ask(question))


FORBIDDEN = [
    "COPY heads TO '{path}'",
    "COPY (SELECT 1) TO '{path}' (FORMAT parquet)",
    "EXPORT DATABASE '{path}'",
    "ATTACH '{path}' AS other",
    "CREATE TABLE x AS SELECT 1",
    "CREATE TEMP TABLE x AS SELECT 1",
    "INSERT INTO models SELECT * FROM models",
    "DELETE FROM heads",
    "UPDATE heads SET closure = 1",
    "DROP TABLE heads",
    "SET memory_limit = '100GB'",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "PRAGMA database_list",
    "INSTALL httpfs",
    "LOAD json",
    "USE memory",
    "DETACH atlas",
    "CHECKPOINT",
    "CALL pragma_version()",
    "PREPARE p AS SELECT 1",
    "BEGIN",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY heads TO '{path}'",
    "",
    "-- nothing",
]
UNREACHABLE = [
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_blob('{secret}')",
    "SELECT * FROM '{secret}'",
    "SELECT * FROM glob('/*')",
    "SELECT * FROM read_parquet('http://127.0.0.1:9/x.parquet')",
    "FROM sniff_csv('{secret}')",
    "SELECT getenv('HOME')",
    "SELECT * FROM sqlite_scan('{secret}', 'x')",
    "EXPLAIN ANALYZE COPY heads TO '{path}'",
]


@pytest.mark.parametrize("query", FORBIDDEN + UNREACHABLE)
def test_sql_can_only_read_the_store(sealed_store: Path, tmp_path: Path, query: str) -> None:
    secret, path = tmp_path / "secret.csv", tmp_path / "written"
    secret.write_text("a,b\n1,2\n")
    catalogue = (sealed_store / "catalog.duckdb").read_bytes()
    with open_atlas(sealed_store) as atlas:
        with pytest.raises(QueryError):
            atlas.sql(query.format(path=path, secret=secret))
        assert atlas.sql("SELECT count(*) FROM heads").item() == 32
    assert {entry.name for entry in tmp_path.iterdir()} == {"secret.csv"}
    assert (sealed_store / "catalog.duckdb").read_bytes() == catalogue


def test_the_connection_itself_is_locked(sealed_store: Path) -> None:
    """Settings and files stay out of reach even for a statement that was not checked."""
    with connect(sealed_store / "catalog.duckdb") as connection:
        for statement in ("SET memory_limit = '100GB'", "SET enable_external_access = true"):
            with pytest.raises(duckdb.Error):
                connection.execute(statement)


READING = [
    "FROM heads LIMIT 1",
    "WITH a AS (SELECT 1 AS x) SELECT * FROM a",
    "DESCRIBE heads",
    "SUMMARIZE heads",
    "EXPLAIN SELECT 1",
    "VALUES (1)",
    "SELECT 1;",
]


@pytest.mark.parametrize("query", READING)
def test_reading_statements_run(atlas: Atlas, query: str) -> None:
    assert atlas.sql(query).height > 0


def test_sql_errors_name_the_problem(atlas: Atlas) -> None:
    with pytest.raises(QueryError, match="closur") as caught:
        atlas.sql("SELECT closur FROM heads")
    assert "closure" in str(caught.value)


def test_arrays_by_name(atlas: Atlas) -> None:
    assert atlas.array("llama", "core", layer=1, head=2).shape == (8, 8)
    assert atlas.array("llama", "core", operator="folded").shape == (3, 4, 8, 8)
    for wrong, message in (
        ({"model": "lama", "name": "core"}, "no model named 'lama'"),
        ({"model": "llama", "name": "cores"}, "no array named 'cores'"),
        ({"model": "llama", "name": "core", "layer": 3}, "no layer 3"),
        ({"model": "llama", "name": "core", "layer": 0, "head": 4}, "no head 4"),
        ({"model": "llama", "name": "core", "head": 0}, "head needs a layer"),
        ({"model": "bert", "name": "core", "operator": "folded"}, "do not name one group"),
        ({"model": "bert", "name": "core", "stack": "cross"}, "do not name one group"),
    ):
        with pytest.raises(QueryError, match=message):
            atlas.array(**wrong)


@pytest.mark.parametrize(("arguments", "message"), [((1.5,), "out of range"), ((0.9, "galaxy"), "unknown grouping")])
def test_bad_questions(atlas: Atlas, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        atlas.closure(*arguments)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store here"):
        open_atlas(tmp_path / "none")


FRAME = pl.DataFrame(
    {"name": ["a_b%", None], "value": [0.1234567, None], "count": [3, 4], "list": [[1.0, 0.5], None]},
    schema_overrides={"list": pl.List(pl.Float64)},
)


def test_formats_keep_values() -> None:
    assert pl.read_csv(encode(FRAME, "csv")).drop("list").equals(FRAME.drop("list"))
    assert json.loads(pl.read_csv(encode(FRAME, "csv"))["list"][0]) == [1.0, 0.5]
    assert pl.read_parquet(encode(FRAME, "parquet")).equals(FRAME)
    assert json.loads(encode(FRAME, "json")) == FRAME.to_dicts()
    assert [json.loads(line) for line in encode(FRAME, "ndjson").splitlines()] == FRAME.to_dicts()
    assert b"a\\_b\\%" in encode(FRAME, "latex")
    assert b"\\toprule" in encode(FRAME, "latex")
    assert encode(FRAME, "markdown").splitlines()[1].startswith(b"|")
    assert b"0.1235" in encode(FRAME, "table")


@pytest.mark.parametrize("style", FORMATS)
def test_every_format_takes_no_rows(style: str) -> None:
    assert isinstance(encode(FRAME.clear(), style), bytes)


def test_an_output_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "rows.csv"
    deliver(FRAME, "csv", target)
    assert pl.read_csv(target).height == 2
    with pytest.raises(QueryError, match="cannot be written"):
        deliver(FRAME, "csv", tmp_path / "missing" / "rows.csv")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("script", "document"), [("make_data_dictionary", "data-dictionary.md"), ("make_families", "families.md")]
)
def test_generated_documents_are_up_to_date(script: str, document: str) -> None:
    spec = importlib.util.spec_from_file_location(script, ROOT / "docs" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / document).read_text() == "\n".join(module.lines()) + "\n"
