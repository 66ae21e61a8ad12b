"""A user's own statistics become columns of heads, and go again."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

from cli import main
from query import Atlas, open_atlas
from store import catalogue
from store.atlas import AtlasStore
from store.integrity import rebuild, verify
from store.tables import TABLES

QUERY = Path(__file__).parent.parent / "query"
SQL_FILES = [QUERY / "macros.sql", *sorted((QUERY / "named").glob("*.sql"))]

HEADER = "import numpy as np\nfrom store.user_statistics import statistic\n"
GOOD = (
    HEADER
    + """
@statistic(meaning="closure from the core", values="0 to 1", formula="P", source="it's mine")
def closure_again(core, cosine):
    square = (core * cosine[:, None, :]) @ core
    return (square * core).sum((1, 2)) ** 2 / ((square**2).sum((1, 2)) * (core**2).sum((1, 2)))

@statistic(meaning="singular values above half the largest", values="1 to d_head", sql_type="INTEGER")
def wide(sigma):
    return (sigma > sigma[:, :1] / 2).sum(-1)

@statistic(meaning="whether the largest query-key value exceeds one", values="true or false", sql_type="BOOLEAN")
def loud(qk_sigma):
    return qk_sigma[:, 0] > 1
"""
)


def derive(store: Path, tmp_path: Path, text: str, *arguments: str) -> Result:
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    return CliRunner().invoke(main, ["derive", str(file), *arguments, "--store", str(store)])


def test_every_head_gets_the_columns_and_they_survive_a_rebuild(store_path: Path, tmp_path: Path) -> None:
    result = derive(store_path, tmp_path, GOOD)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == ["closure_again: 2 models", "wide: 2 models", "loud: 2 models"]
    store = AtlasStore.open(store_path)
    assert list(verify(store)) == []
    query = (
        "SELECT heads.*, spectra.sigma, qk.sigma[1] AS loudest FROM heads "
        "JOIN spectra USING (model, operator, stack, layer, head) "
        "JOIN qk USING (model, operator, stack, layer, head) ORDER BY model, operator, layer, head"
    )
    with open_atlas(store_path) as atlas:
        rows = atlas.sql(query)
        comment = atlas.sql("SELECT comment FROM duckdb_columns() WHERE column_name = 'closure_again'").item()
    assert comment == "closure from the core [0 to 1] = P (it's mine)"
    np.testing.assert_allclose(rows["closure_again"], rows["closure"], rtol=1e-9)
    for row in rows.iter_rows(named=True):
        assert row["wide"] == sum(value > row["sigma"][0] / 2 for value in row["sigma"])
        assert row["loud"] == (row["loudest"] > 1)
    rebuild(store)
    with open_atlas(store_path) as atlas:
        assert atlas.sql(query).select(rows.columns).equals(rows)
    assert list(verify(store)) == []


def test_a_statistic_of_one_model_is_null_for_the_others_and_can_be_removed(store_path: Path, tmp_path: Path) -> None:
    assert derive(store_path, tmp_path, GOOD, "bert").exit_code == 0
    store = AtlasStore.open(store_path)
    with open_atlas(store_path) as atlas:
        counts = dict(atlas.sql("SELECT model, count(wide) FROM heads GROUP BY model").rows())
        heads = atlas.sql("SELECT count(*) FROM heads WHERE model = 'bert'").item()
    assert counts == {"bert": heads, "llama": 0}
    assert list(verify(store)) == []
    removed = CliRunner().invoke(main, ["derive", "--remove", "wide", "--store", str(store_path)])
    assert removed.stdout == "bert: wide removed\n"
    with open_atlas(store_path) as atlas:
        names = atlas.sql("SELECT column_name FROM (DESCRIBE heads)")["column_name"].to_list()
    assert "wide" not in names
    assert {"closure_again", "loud"} <= set(names)
    assert list(verify(store)) == []
    again = CliRunner().invoke(main, ["derive", "--remove", "wide", "--store", str(store_path)])
    assert again.exit_code == 1
    assert "no statistic of your own named 'wide'" in again.stderr


def test_deriving_again_replaces(store_path: Path, tmp_path: Path) -> None:
    assert derive(store_path, tmp_path, GOOD).exit_code == 0
    changed = (
        HEADER + "@statistic(meaning='seven', values='7')\ndef wide(sigma):\n    return np.full(len(sigma), 7.0)\n"
    )
    assert derive(store_path, tmp_path, changed).exit_code == 0
    with open_atlas(store_path) as atlas:
        assert atlas.sql("SELECT DISTINCT wide FROM heads").rows() == [(7,)]
    assert list(verify(AtlasStore.open(store_path))) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def nothing():\n    pass\n", "declares no statistic"),
        ("raise RuntimeError('broken')\n", "RuntimeError: broken"),
        ("def (\n", "SyntaxError"),
        (HEADER + "@statistic(meaning='', values='')\ndef closure(sigma):\n    return sigma[:, 0]\n", "already"),
        (HEADER + "@statistic(meaning='', values='')\ndef x(weights):\n    return weights\n", "takes stored arrays"),
        (HEADER + "@statistic(meaning='', values='')\ndef x():\n    return 1\n", "takes stored arrays"),
        (HEADER + "@statistic(meaning='', values='')\ndef x(sigma):\n    return sigma\n", "wrong shape"),
        (HEADER + "@statistic(meaning='', values='')\ndef x(sigma):\n    return 1 / 0\n", "ZeroDivisionError"),
        (HEADER + "@statistic(meaning='', values='')\ndef x(sigma):\n    return ['a'] * len(sigma)\n", "ValueError"),
        (
            HEADER + "@statistic(meaning='', values='', sql_type='BLOB')\ndef x(sigma):\n    return sigma[:, 0]\n",
            "unknown type",
        ),
        (
            HEADER
            + "seen = []\n@statistic(meaning='', values='')\ndef x(sigma):\n    seen.append(1)\n"
            + "    return sigma[:, 0] if len(seen) < 5 else 1\n",
            "wrong shape",
        ),
    ],
)
def test_a_bad_file_is_one_error_and_stores_nothing(text: str, said: str, store_path: Path, tmp_path: Path) -> None:
    before = sorted(store_path.rglob("*"))
    result = derive(store_path, tmp_path, text)
    assert result.exit_code == 1
    assert said in result.stderr
    assert sorted(store_path.rglob("*")) == before


def test_a_column_of_any_allowed_name_changes_no_answer(store_path: Path) -> None:
    """Names that macros use within are no reserved words: a user's column of that name is not taken for them."""
    store = AtlasStore.open(store_path)
    assert CliRunner().invoke(main, ["null", "--draws", "20", "--store", str(store_path)]).exit_code == 0
    assert CliRunner().invoke(main, ["capacity", "--store", str(store_path)]).exit_code == 0
    arguments = {"threshold": "0.02", "how_many": "3", "bins": "2", "name": "'llama'"}

    def answers(atlas: Atlas) -> dict[str, pl.DataFrame]:
        macros = atlas.sql(
            "SELECT function_name, parameters FROM duckdb_functions() "
            "WHERE function_type = 'table_macro' AND NOT internal ORDER BY 1"
        ).rows()
        queries = [f"{name}({', '.join(arguments[item] for item in given)})" for name, given in macros]
        found = {query: atlas.sql(f"FROM {query}") for query in queries}
        found |= {name: atlas.ask(name, **({"model": "llama"} if name == "layer-profile" else {})) for name in named}
        return found | {"panel": atlas.panel(0.02)}

    with open_atlas(store_path) as atlas:
        named = atlas.questions()["name"].to_list()
        before = answers(atlas)
    reserved = {column.name for table in TABLES for column in table.columns}
    aliases = set(re.findall(r"\bAS (\w+)\b", "".join(path.read_text() for path in SQL_FILES)))
    names = sorted((aliases | {name for frame in before.values() for name in frame.columns}) - reserved - {"TABLE"})
    assert len(names) > 60

    def add(connection: duckdb.DuckDBPyConnection) -> None:
        for name in names:
            connection.execute(f'ALTER TABLE heads ADD COLUMN "{name}" DOUBLE DEFAULT 0.5')

    catalogue.change(store.catalogue_path, add)
    with open_atlas(store_path) as atlas:
        after = answers(atlas)
    for query, frame in before.items():
        assert after[query].equals(frame), query
