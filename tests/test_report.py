"""The report: every number on the page against the store by another route, and nothing that gets out."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import vl_convert
from click.testing import CliRunner, Result

from cli import main
from query import open_atlas
from query.report import charts, report
from query.report.contents import contents, user_columns
from stats.errors import QueryError
from store.atlas import AtlasStore
from store.integrity import remove
from tests import checkpoints
from tests.ingesting import ingest_into
from tests.report_page import HOSTILE, Page, hostile_model, shown_number

THRESHOLD = 0.02
KEY = ["model", "operator", "stack", "layer", "head"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def store(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama with nulls and capacities, bert without, and a model of a hostile name with two undefined heads."""
    root = tmp_path_factory.mktemp("report")
    store = Path(shutil.copytree(sealed_store, root / "atlas"))
    for command in (["null", "llama", "--draws", "100"], ["capacity", "llama"]):
        assert run(*command, "--operator", "raw", "--store", store).exit_code == 0
    ingest_into(store, checkpoints.save_safetensors(hostile_model(), root / "other"), HOSTILE)
    return store


@pytest.fixture(scope="module")
def text(store: Path) -> str:
    with open_atlas(store) as atlas:
        return report(atlas, threshold=THRESHOLD, title=HOSTILE)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def heads_by_hand(store: Path) -> pl.DataFrame:
    """The heads with their derived numbers, joined here rather than in SQL."""
    with open_atlas(store) as atlas:
        heads, nulls, capacities = (atlas.table(name).collect() for name in ("heads", "nulls", "capacities"))
    scramble = nulls.filter(kind="scramble").select(*KEY, "n_draws", "p", "q", "wins", null_median="median")
    mismatch = nulls.filter(kind="mismatch").select(*KEY, mismatch_median="median", mismatch_p="p")
    capacity = capacities.select(*KEY, "attainment", capacity="closure")
    for derived in (scramble, mismatch, capacity):
        heads = heads.join(derived, on=KEY, how="left")
    return heads


def test_every_number_of_every_head_is_the_stores(store: Path, page: Page) -> None:
    columns = page.columns()
    expected = {row["model"] + row["operator"] + row["label"]: row for row in heads_by_hand(store).to_dicts()}
    seen = 0
    for part in page.about["parts"]:
        for index in range(part["start"], part["start"] + part["count"]):
            row = expected.pop(part["model"] + part["operator"] + columns["label"][index])
            assert row["stack"] == part["stack"]
            for name in set(row) - {"model", "operator", "stack"}:
                found = columns[name][index]
                assert found == (pytest.approx(row[name], rel=5e-6) if isinstance(row[name], float) else row[name])
            seen += 1
    assert not expected
    assert {len(values) for values in columns.values()} == {seen}
    assert None in columns["closure"]
    assert {"zero", "nonfinite"} <= set(columns["reason"])


def test_spectra_and_pairs_are_the_stores_to_three_digits(store: Path, page: Page) -> None:
    with open_atlas(store) as atlas:
        spectra, pairs = (atlas.table(name).collect() for name in ("spectra", "pairs"))
    for index, part in enumerate(page.about["parts"]):
        arrays = page.arrays(index)
        own = {name: part[name] for name in ("model", "operator", "stack")}
        for row in spectra.filter(**own).to_dicts():
            at = part["layers"].index(row["layer"]), row["head"]
            if row["sigma"] is None:
                assert all(np.isnan(arrays[name][at]).all() for name in ("sigma", "cosine", "re", "im"))
                continue
            largest = row["sigma"][0] or 1.0
            for name, stored, scale in (
                ("sigma", "sigma", largest),
                ("cosine", "cosine", 1.0),
                ("re", "eigenvalue_re", largest),
                ("im", "eigenvalue_im", largest),
            ):
                found = arrays[name][at][: len(row[stored])] * scale
                np.testing.assert_allclose(found, row[stored], rtol=6e-4, atol=1e-7 * scale)
        for row in pairs.filter(**own).to_dicts():
            at = part["layers"].index(row["layer"]), row["write_head"], row["read_head"]
            for name in ("mismatch", "right", "left"):
                value = row[f"{name}_closure"]
                assert arrays[name][at] ** 2 == pytest.approx(np.nan if value is None else value, 1e-3, 1e-9, True)


def test_the_summary_is_that_of_hand_written_polars(store: Path, page: Page) -> None:
    with open_atlas(store) as atlas:
        pairs = atlas.table("pairs").collect()
    heads = heads_by_hand(store)
    rows = page.tables["summary"][1:]
    assert [row[:3] for row in rows] == [
        [part["model"], part["operator"], part["stack"]] for part in page.about["parts"]
    ]
    for row in rows:
        own = dict(zip(("model", "operator", "stack"), row[:3], strict=True))
        mine = heads.filter(**own)
        strong = mine.filter(pl.col("closure") >= THRESHOLD)
        mismatch = pairs.filter(**own).filter(~pl.col("shared_value"))["mismatch_closure"].max()
        acting = strong.select("layer", read_head="head")
        right = (
            pairs.filter(**own).filter("shared_value").join(acting, on=["layer", "read_head"])["right_closure"].median()
        )
        assert [int(cell) for cell in (row[3], row[4], row[5], row[6])] == [
            mine["layer"].n_unique(), len(mine), mine["d_head"][0], len(strong)
        ]  # fmt: skip
        assert float(row[7].rstrip("%")) / 100 == pytest.approx(len(strong) / mine["closure"].count(), abs=5e-5)
        numbers = (mine["closure"].median(), mine["closure"].max(), mine["null_median"].median(), None,
                   mine["capacity"].median(), mismatch, right)  # fmt: skip
        for cell, number in zip(row[8:], numbers, strict=True):
            if number is not None:
                assert shown_number(cell) == pytest.approx(number, rel=5e-4)
        assert row[11] == ("\u2013" if mine["wins"].is_null().all() else f"{mine['wins'].mean():.2%}")
        assert (row[10] == "\u2013") == mine["null_median"].is_null().all()


def test_the_claims_are_those_of_the_panel(store: Path, page: Page) -> None:
    with open_atlas(store) as atlas:
        claims = atlas.panel(THRESHOLD)
    plain = [
        [row["claim"].replace(">=", "≥"), row["model"], row["value"] or row["reason"], row["verdict"]]
        for row in claims.to_dicts()
    ]
    assert page.tables["claims-by-model"][1:] == [row for row in plain if row[1] != "all models"]
    assert [[row[0], row[2], row[3]] for row in page.tables["claims"][1:]] == [
        [row[0], row[2], row[3]] for row in plain if row[1] == "all models"
    ]


def test_where_it_comes_from_is_told(store: Path, page: Page, text: str) -> None:
    with open_atlas(store) as atlas:
        hashes = atlas.sql("SELECT model, content_hash FROM models ORDER BY model").rows()
    assert [tuple(row) for row in page.tables["origin"][1:]] == hashes
    assert str(store) in text
    assert f"headatlas report --threshold {THRESHOLD}" in text


def test_hostile_names_stay_text(page: Page, text: str) -> None:
    assert page.title == HOSTILE
    assert HOSTILE in {part["model"] for part in page.about["parts"]}
    assert HOSTILE in {row[0] for row in page.tables["summary"]}
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "embed", "base")]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    kinds = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    assert kinds == ["application/json", *["text/plain"] * (1 + len(page.about["parts"])), None, "module"]
    assert "<img" not in text.replace(page.scripts["None"], "")
    assert "\u2028" not in page.scripts["about"]
    assert "<" not in page.scripts["about"]


def test_nothing_is_fetched_and_the_policy_forbids_it(page: Page) -> None:
    assert not page.attribute("src")
    assert all(target.startswith("#") or target == "data:," for target in page.attribute("href"))
    directives = dict(part.strip().split(" ", 1) for part in page.policy().split(";"))
    assert directives["default-src"] == directives["base-uri"] == directives["form-action"] == "'none'"
    assert directives["img-src"] == "data:"
    assert "connect-src" not in directives
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(page.scripts[name].encode()).digest()).decode()}'"
        for name in ("None", "module")
    }
    assert set(directives["script-src"].split()) == hashes


def test_the_charts_are_valid_vega_lite(page: Page) -> None:
    specifications = page.about["charts"]
    filled = set(page.about["filled"])
    assert {name for name, _ in specifications["shown"]} == {item.column for item in charts.SHOWN}
    for item in charts.SHOWN:
        assert charts.heatmap(item, filled).to_dict() == specifications["heatmap"][item.column]
    for item, scale in ((charts.SHOWN[5], "log"), (charts.SHOWN[6], "linear")):
        made = charts.scatter(item, filled, THRESHOLD, scale == "log").to_dict()
        assert made == specifications["scatter"][f"{item.column} {scale}"]
    flat = [*specifications["heatmap"].values(), *specifications["scatter"].values()]
    flat += [specifications[name] for name in ("levels", "sigma", "cosine", "eigenvalue")]
    for specification in flat:
        assert vl_convert.vegalite_to_vega(specification)["marks"]


def test_the_command_writes_what_the_function_gives(store: Path, tmp_path: Path) -> None:
    output = tmp_path / "llama.html"
    result = run("report", "llama", "--operator", "raw", "--store", store, "-o", output)
    assert result.exit_code == 0, result.output
    assert result.output == f"{output}: {output.stat().st_size / 1e6:.1f} MB\n"
    with open_atlas(store) as atlas:
        assert report(atlas, ["llama"], "raw") == output.read_text(encoding="utf-8")
    page = Page(output.read_text(encoding="utf-8"))
    assert [part["model"] for part in page.about["parts"]] == ["llama"]
    assert "headatlas report llama --operator raw --threshold 0.9" in output.read_text(encoding="utf-8")
    assert "claims-by-model" not in page.tables


def test_a_users_own_statistic_is_a_column(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from store.user_statistics import statistic\n"
        "@statistic(meaning='share', values='0 to 1')\n"
        "def leading_share(sigma):\n    return sigma[:, 0] ** 2 / (sigma**2).sum(-1)\n",
        encoding="utf-8",
    )
    copy = Path(shutil.copytree(store, tmp_path / "atlas"))
    assert run("derive", file, "llama", "--store", copy).exit_code == 0
    with open_atlas(copy) as atlas:
        shown = contents(atlas, ["llama"])
        stored = atlas.sql("SELECT leading_share FROM heads WHERE model = 'llama' ORDER BY operator DESC, layer, head")
    assert shown.columns()["leading_share"] == pytest.approx(stored["leading_share"].to_list(), rel=5e-6)
    assert user_columns(shown.heads) == ["leading_share"]
    made = charts.specifications({"closure", "leading_share"}, {"leading_share": "leading_share"}, THRESHOLD)
    assert set(made["heatmap"]) == {"closure", "closure log", "leading_share"}


def test_mistakes_get_one_clear_message_and_no_file(store: Path, tmp_path: Path) -> None:
    unknown = run("report", "lama", "--store", store, "-o", tmp_path / "r.html")
    assert unknown.exit_code == 1
    assert "did you mean llama?" in unknown.output
    folded = run("report", "bert", "--operator", "folded", "--store", store, "-o", tmp_path / "r.html")
    assert folded.exit_code == 1
    assert "headatlas ingest" in folded.output
    missing = run("report", "llama", "--store", store, "-o", tmp_path / "nowhere" / "r.html")
    assert missing.exit_code == 1
    assert "cannot be written" in missing.output
    empty = tmp_path / "empty"
    shutil.copytree(store, empty)
    for model in AtlasStore.open(empty).models():
        remove(AtlasStore.open(empty), model)
    nothing = run("report", "--store", empty, "-o", tmp_path / "r.html")
    assert nothing.exit_code == 1
    assert "the store is empty" in nothing.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]
    with open_atlas(store) as atlas, pytest.raises(QueryError, match="out of range"):
        report(atlas, threshold=1.5)


def test_help_does_not_load_the_charts() -> None:
    code = "import sys, cli; cli.main(['report', '--help'], standalone_mode=False); print([*sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    ).stdout
    assert "to explore in a browser" in output
    assert not {"altair", "vl_convert", "jinja2", "polars", "numpy"} & set(
        output.rsplit("[", 1)[1].replace("'", "").split(", ")
    )
