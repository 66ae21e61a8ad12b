"""Exports: every form read back by another program, what a file says of itself, and whether it still holds."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openpyxl
import pandas
import polars as pl
import pyarrow.feather
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from cli import main
from query import Atlas, open_atlas
from query.checking import check
from query.export import export
from query.formats import ENDINGS, EXPORT_FORMATS
from query.paper_tables import PAPER_TABLES
from query.provenance import Provenance, html_comment, read_provenance
from query.sources import Request, listing, table
from stats.errors import QueryError
from store.version import tool_version
from tests import checkpoints
from tests.ingesting import ingest_into

QUERY = """SELECT label, layer, closure, alpha, wins, '=1+1' AS formula, '#' || label AS mark
FROM heads LEFT JOIN nulls USING (model, operator, stack, layer, head)
-- a remark --> with 100% of marks & <brackets>
WHERE model = 'llama' AND operator = 'raw'
ORDER BY closure"""
FORMS = [form for form in EXPORT_FORMATS if form != "table"]


@pytest.fixture(scope="module")
def atlas(sealed_store: Path) -> Iterator[Atlas]:
    with open_atlas(sealed_store) as opened:
        yield opened


def ending(form: str) -> str:
    return next(suffix for suffix, each in ENDINGS.items() if each == form)


def written(atlas: Atlas, folder: Path, form: str, request: Request | None = None) -> Path:
    path = folder / f"rows{ending(form)}"
    export(atlas, request or Request(sql=QUERY), path)
    return path


def run(store: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--store", str(store)])


# forms


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_where_its_rows_come_from(atlas: Atlas, tmp_path: Path, form: str) -> None:
    found = read_provenance(written(atlas, tmp_path, form))
    assert found.query == QUERY
    assert found.models == dict(atlas.sql("SELECT model, content_hash FROM models").rows())
    assert found.version == tool_version()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.created)
    assert found.digits == (3 if form in ("latex", "markdown") else None)


READERS: dict[str, Callable[[Path], pl.DataFrame]] = {
    "csv": lambda path: pl.read_csv(path, comment_prefix="#"),
    "csv, pandas": lambda path: pl.from_pandas(pandas.read_csv(path, comment="#")),
    "parquet": lambda path: pl.from_arrow(pyarrow.parquet.read_table(path)),
    "arrow": lambda path: pl.from_arrow(pyarrow.feather.read_table(path)),
    "json": lambda path: pl.DataFrame(json.loads(path.read_text())["rows"]),
    "ndjson": lambda path: pl.read_ndjson(path.read_bytes().partition(b"\n")[2]),
    "ndjson, whole": lambda path: pl.read_ndjson(path)[1:].drop("provenance"),
    "xlsx": lambda path: pl.from_pandas(pandas.read_excel(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_other_programs_read_the_same_rows(atlas: Atlas, tmp_path: Path, reader: str) -> None:
    expected = atlas.sql(QUERY)
    rows = READERS[reader](written(atlas, tmp_path, reader.partition(",")[0]))
    assert rows.columns == expected.columns
    assert rows.height == expected.height == 12
    for name in ("label", "layer", "formula", "mark"):
        assert rows[name].to_list() == expected[name].to_list()
    for name in ("closure", "alpha"):
        assert rows[name].to_list() == pytest.approx(expected[name].to_list(), rel=1e-15)


def test_key_value_metadata_as_other_programs_see_it(atlas: Atlas, tmp_path: Path) -> None:
    metadata = pyarrow.parquet.read_metadata(written(atlas, tmp_path, "parquet")).metadata
    assert json.loads(metadata[b"headatlas"])["query"] == QUERY
    metadata = pyarrow.feather.read_table(written(atlas, tmp_path, "arrow")).schema.metadata
    assert json.loads(metadata[b"headatlas"])["query"] == QUERY


def test_a_workbook_keeps_text_as_text(atlas: Atlas, tmp_path: Path) -> None:
    workbook = openpyxl.load_workbook(written(atlas, tmp_path, "xlsx"))
    assert workbook.active["F2"].value == "=1+1"
    assert workbook.active["F2"].data_type == "s"
    assert "query: SELECT label" in workbook.properties.description


def test_text_forms_begin_with_a_comment(atlas: Atlas, tmp_path: Path) -> None:
    for form, first in (("csv", "# Headatlas"), ("latex", "% Headatlas"), ("markdown", "<!--")):
        assert written(atlas, tmp_path, form).read_text().startswith(first)
    text = written(atlas, tmp_path, "markdown").read_text()
    assert text.count("-->") == 1
    assert "<brackets>" in text


@pytest.mark.parametrize("form", FORMS)
def test_without_provenance(atlas: Atlas, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"bare{ending(form)}"
    export(atlas, Request("models"), path, sourced=False)
    assert b"headatlas" not in path.read_bytes().lower().replace(b"headatlas export", b"")
    with pytest.raises(QueryError, match="no provenance"):
        read_provenance(path)
    assert check(atlas, path).outcome == "cannot be checked"


@given(
    st.text(min_size=1).map(lambda text: "\n".join(text.splitlines()).strip()).filter(bool),
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: len(name.splitlines()) == 1 and name.strip() == name),
        st.just("ab12"),
        max_size=3,
    ),
    st.none() | st.integers(1, 16),
)
def test_comments_give_back_what_they_were_made_from(query: str, models: dict[str, str], digits: int | None) -> None:
    source = Provenance(query, models, "0.1.0", "2026-01-01", digits)
    assert Provenance.from_lines(["before", *source.lines(), "after"]) == source
    comment = html_comment(source.lines())
    assert comment.count("-->") == 1
    assert Provenance.from_json(json.loads(json.dumps(source.as_json()))) == source


# names


def test_everything_listed_can_be_exported(atlas: Atlas) -> None:
    values = {"threshold": "0.02", "how_many": "2", "bins": "4", "name": "'llama'"}
    for name, kind in listing(atlas).select("name", "kind").rows():
        if kind in ("table", "macro"):
            call = re.sub(r"\w+(?=\))", lambda match: values[match[0]], name)
            found = table(atlas, Request(call)).rows
            assert found.sort(found.columns[:6]).equals(atlas.sql(f"FROM {call}").sort(found.columns[:6])), name
    kinds = dict(listing(atlas).group_by("kind").len().rows())
    assert kinds["paper"] == len(PAPER_TABLES) == 4
    assert kinds["question"] == atlas.questions().height


def test_tables_are_in_key_order_and_can_be_narrowed(atlas: Atlas) -> None:
    found = table(atlas, Request("heads", models=("llama",), operator="folded"))
    expected = atlas.sql("FROM heads WHERE model = 'llama' AND operator = 'folded' ORDER BY layer, head")
    assert found.rows.equals(expected)
    assert atlas.sql(found.query).equals(expected)
    assert table(atlas, Request("closure_by_model(0.02)", models=("bert",))).rows["model"].to_list() == ["bert"]


def test_questions_of_ask(atlas: Atlas) -> None:
    request = Request("closure-by-model", parameters={"threshold": "0.02"}, models=("bert",), operator="raw")
    found = table(atlas, request)
    assert found.rows.equals(atlas.ask("closure-by-model", threshold=0.02, models=["bert"], operator="raw"))
    assert atlas.sql(found.query).equals(found.rows)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("hedas"), "did you mean heads"),
        (Request("paper-closur"), "did you mean paper-closure"),
        (Request("strongest_head(5)"), "did you mean strongest_heads"),
        (Request("closure-by-modle"), "did you mean closure-by-model"),
        (Request("closure_by_model"), r"expected: closure_by_model\(threshold\)"),
        (Request("SELECT 1"), "--query"),
        (Request(), "a name or a query"),
        (Request("heads", sql="SELECT 1"), "a name or a query"),
        (Request("heads", models=("lama",)), "did you mean llama"),
        (Request("heads", operator="scaled"), "no operator named 'scaled' in the store"),
        (Request("models", operator="raw"), "has no column operator"),
        (Request("heads", threshold=0.5), "takes no threshold"),
        (Request("heads", parameters={"a": 1}), "has no parameters"),
        (Request(sql="SELECT 1", operator="raw"), "chooses its own rows"),
        (Request(sql="SELECT $x"), "x"),
        (Request(sql="COPY heads TO 'x'"), "only a single reading statement"),
        (Request("paper-closure", threshold=1.5), "threshold out of range"),
        (Request("heads)--(x)"), "nothing to export"),
    ],
)
def test_mistakes_are_named(atlas: Atlas, request_: Request, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        table(atlas, request_)


def test_paper_requests_survive_their_own_command() -> None:
    for request in (
        Request("paper-null", models=("100%_odd & name", "it's", "--operator"), operator="folded", threshold=0.0),
        Request("paper-closure", operator="raw", threshold=0.123456789),
    ):
        assert Request.from_query(request.command()) == request


# check


CHANGES = {
    "csv": lambda data: data.replace(b"L0H1", b"L0H9", 2),
    "json": lambda data: re.sub(rb'"alpha":(-?)\d', rb'"alpha":\g<1>7', data, count=1),
    "ndjson": lambda data: data.rpartition(b"\n{")[0] + b"\n",
    "markdown": lambda data: re.sub(rb"(\| L0H1 +\| +0 \| +)\d", rb"\g<1>8", data),
    "latex": lambda data: re.sub(rb"(\nL0H1 & 0 & )\d", rb"\g<1>8", data),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_matches_the_store_it_comes_from(atlas: Atlas, tmp_path: Path, form: str) -> None:
    for request in (Request(sql=QUERY), Request("repeated_layers"), Request("spectra")):
        assert check(atlas, written(atlas, tmp_path, form, request)).outcome == "ok"
    path = tmp_path / f"digits{ending(form)}"
    export(atlas, Request("paper-closure", threshold=0.02), path, digits=6, caption="Another", label="other")
    assert check(atlas, path).outcome == "ok"


@pytest.mark.parametrize("form", CHANGES)
def test_a_changed_cell_is_found(atlas: Atlas, tmp_path: Path, form: str) -> None:
    path = written(atlas, tmp_path, form)
    changed = CHANGES[form](path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    finding = check(atlas, path)
    assert finding.outcome == "differs"
    assert "L0H1" in finding.detail or form in ("json", "ndjson")
    if form == "ndjson":
        assert "11 rows in the file, 12 in the store" in finding.detail


@pytest.mark.parametrize("form", ["parquet", "arrow", "xlsx"])
def test_a_changed_value_is_found_in_a_binary_file(atlas: Atlas, tmp_path: Path, form: str) -> None:
    path, source = tmp_path / f"rows{ending(form)}", Request(sql=QUERY)
    export(atlas, Request(sql=QUERY.replace("closure, alpha", "closure * (1 + 1e-7) AS closure, alpha")), path)
    data = path.read_bytes()
    if form == "xlsx":
        workbook = openpyxl.load_workbook(io.BytesIO(data))
        workbook.properties.description = workbook.properties.description.replace(" * (1 + 1e-7) AS closure", "")
        workbook.save(path)
    else:
        rows = pyarrow.parquet.read_table(path) if form == "parquet" else pyarrow.feather.read_table(path)
        own = read_provenance(path).as_json() | {"query": source.sql}
        rows = rows.replace_schema_metadata({b"headatlas": json.dumps(own).encode()})
        if form == "parquet":
            pyarrow.parquet.write_table(rows, path)
        else:
            pyarrow.feather.write_feather(rows, path, compression="zstd")
    finding = check(atlas, path)
    assert finding.outcome == "differs"
    assert "closure is" in finding.detail
    assert "12 rows differ in all" in finding.detail


def test_rounding_of_another_machine_and_another_order_are_no_difference(atlas: Atlas, tmp_path: Path) -> None:
    path = written(atlas, tmp_path, "json")
    whole = json.loads(path.read_text())
    for row in whole["rows"]:
        row["closure"] *= 1 + 1e-13
    whole["rows"].reverse()
    for indent in (None, 2):
        path.write_text(json.dumps(whole, indent=indent))
        assert check(atlas, path).outcome == "ok"


def test_other_columns_are_a_difference(atlas: Atlas, tmp_path: Path) -> None:
    path = written(atlas, tmp_path, "csv")
    path.write_text(path.read_text().replace('"label"', '"head"', 1))
    assert "columns head, layer" in check(atlas, path).detail


def test_what_cannot_be_checked_says_why(atlas: Atlas, tmp_path: Path) -> None:
    reasons = {
        "missing.csv": None,
        "plain.csv": b"a,b\n1,2\n",
        "empty.tex": b"",
        "damaged.parquet": b"PAR1 and nothing more",
        "damaged.xlsx": b"PK\x03\x04 and nothing more",
        "damaged.arrow": b"ARROW1 and nothing more",
        "binary": bytes(range(256)),
        "query.csv": b"# Headatlas 0.1.0, 2026-01-01\n# query: SELECT nothing FROM heads\na\n1\n",
        "writes.csv": b"# Headatlas 0.1.0, 2026-01-01\n# query: COPY heads TO 'here.csv'\na\n1\n",
        "command.csv": b"# Headatlas 0.1.0, 2026-01-01\n# query: headatlas export nothing\na\n1\n",
        "cut.json": b'{"provenance": {"query": "SELECT 1", "models": {}, "version": "1", "created": ""},\n"rows": [{]}',
        "parts.ndjson": b'{"provenance": {"question": "SELECT 1"}}\n',
    }
    for name, content in reasons.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        finding = check(atlas, tmp_path / name)
        assert finding.outcome == "cannot be checked", name
        assert len(finding.detail) > 10


def test_the_command_checks_against_a_store_that_went_on(store_path: Path, tmp_path: Path) -> None:
    files = [tmp_path / "paper.tex", tmp_path / "heads.csv", tmp_path / "bert.parquet"]
    assert run(store_path, "export", "paper-closure", "-o", files[0], "--threshold", 0.02).exit_code == 0
    assert run(store_path, "export", "heads", "llama", "-o", files[1]).exit_code == 0
    assert run(store_path, "export", "heads", "bert", "-o", files[2]).exit_code == 0
    sound = run(store_path, "export", "--check", *files)
    assert sound.exit_code == 0, sound.stdout
    assert sound.stdout.count(" ok") == 3

    other = checkpoints.save_safetensors(checkpoints.llama(layers=3, seed=5), tmp_path / "other")
    ingest_into(store_path, other, "llama", ("raw", "folded"), replace=True)
    result = run(store_path, "export", "--check", *files)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()[2:]
    assert [re.split(r"\s{2,}", line)[1] if "differs" in line else "ok" for line in lines] == [
        "differs",
        "differs",
        "ok",
    ]
    assert "model llama holds other values than those of the file" in lines[0]
    assert "row 2 (llama)" in lines[0]
    assert "24 rows differ in all" in lines[1]

    assert run(store_path, "remove", "bert").exit_code == 0
    gone = run(store_path, "export", "--check", files[2])
    assert gone.exit_code == 1
    assert "model bert is not in the store" in gone.stdout


# files


def test_an_existing_file_is_replaced_and_a_failure_leaves_it(store_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "rows.csv"
    target.write_text("old")
    failed = run(store_path, "export", "--query", "SELECT nothing FROM heads", "-o", target)
    assert failed.exit_code == 1
    assert "Traceback" not in failed.stderr
    assert target.read_text() == "old"
    assert run(store_path, "export", "models", "-o", target).exit_code == 0
    assert pl.read_csv(target, comment_prefix="#")["model"].to_list() == ["bert", "llama"]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "atlas"}


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_written_leaves_nothing(store_path: Path, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    result = run(store_path, "export", "models", "-o", folder / "no" / f"rows{ending(form)}")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
    assert not list(folder.iterdir())


def test_the_ending_or_the_option_says_the_form(store_path: Path, tmp_path: Path) -> None:
    wrong = run(store_path, "export", "models", "-o", tmp_path / "rows.cvs")
    assert wrong.exit_code == 1
    assert "did you mean .csv" in wrong.stderr
    assert run(store_path, "export", "models", "-o", tmp_path / "rows.cvs", "--format", "ndjson").exit_code == 0
    assert read_provenance(tmp_path / "rows.cvs").models.keys() == {"bert", "llama"}


def test_the_command_line(store_path: Path, tmp_path: Path) -> None:
    shown = run(store_path, "export")
    assert shown.exit_code == 0
    assert "paper-trajectory" in shown.stdout
    assert "strongest_heads(how_many)" in shown.stdout
    latex = run(
        store_path,
        "export",
        "paper-closure",
        "llama",
        "--threshold",
        0.02,
        "--format",
        "latex",
        "--caption",
        "My $P$",
        "--label",
        "tab:my",
        "--digits",
        5,
    )
    assert r"\caption{My $P$}" in latex.stdout
    assert r"\label{tab:my}" in latex.stdout
    assert re.search(r"& 0\.\d{5} & 0\.\d{5} \\\\\n\\bottomrule", latex.stdout)
    assert "Brackets" in latex.stderr
    query = run(
        store_path,
        "export",
        "--query",
        "SELECT count(*) AS n FROM heads WHERE closure > $t",
        "-p",
        "t=0.02",
        "--format",
        "csv",
        "--no-provenance",
    )
    with open_atlas(store_path) as atlas:
        assert query.stdout == f"n\n{atlas.sql('SELECT count(*) FROM heads WHERE closure > 0.02').item()}\n"
    for wrong in (("models", "--query", "SELECT 1"), ("--check",), ("--digits", 0), ("models", "--format", "docx")):
        assert run(store_path, "export", *wrong).exit_code == 2


def test_no_store_is_one_error(tmp_path: Path) -> None:
    result = run(tmp_path / "none", "export", "models")
    assert result.exit_code == 1
    assert "no store here" in result.stderr


def test_a_store_is_not_changed_by_exports(sealed_store: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sealed_store.rglob("*")}
    copy = shutil.copytree(sealed_store, tmp_path / "atlas")
    assert run(copy, "export", "heads", "-o", tmp_path / "heads.xlsx").exit_code == 0
    assert run(copy, "export", "--check", tmp_path / "heads.xlsx").exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in sealed_store.rglob("*")} == before
