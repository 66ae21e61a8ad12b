"""Ad hoc SQL: parameters, errors that point and suggest, queries that can be stopped, and a quick start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import cli
from query import Atlas, interruption, open_atlas
from query.parameters import assignment, dollars, literal, marks, rendered
from stats.errors import QueryError

ROOT = Path(__file__).parent.parent
ENDLESS = "SELECT count(*) FROM range(1000000000000) WHERE (range * 3) % 7 = 1"
HOSTILE = [
    "' OR true --",
    "'; DROP TABLE heads; --",
    "x'; COPY heads TO '/tmp/stolen",
    '"',
    "''",
    "\\'",
    "/* */",
    "-- comment",
    ";",
    ":t",
    "$t",
    "../../etc/passwd",
    "..",
    "",
    " ",
    "NULL",
    "true",
    "1e400",
    "é日本語\u202e\u00a0",
    "line\nbreak",
    "tab\t",
    "x" * 300,
    "{'a': 1}",
    "[1,",
    "$$ $$",
]


@pytest.fixture(scope="module")
def atlas(sealed_store: Path) -> Iterator[Atlas]:
    with open_atlas(sealed_store) as opened:
        yield opened


def run(*arguments: object, store: Path) -> Result:
    return CliRunner().invoke(cli.main, [*map(str, arguments), "--store", str(store)])


COLONS = [
    ("SELECT :t", ["t"]),
    ("SELECT closure::INT, closure :: DOUBLE", []),
    ("SELECT :t::DOUBLE", ["t"]),
    ("SELECT ':t', \":t\", $$:t$$, $q$ :t $q$, e'\\':t'", []),
    ("SELECT 1 -- :t\n, :u /* :v */", ["u"]),
    ("SELECT x[1:n], x[:n], x[1:], x[:], x[-1:n]", []),
    ("SELECT x[$a:$b], x[1:(:c)]", ["a", "b", "c"]),
    ("SELECT x[1][:n], f(x)[:n], {'a': [1]}['a'][:n], MAP {[1]:n}, MAP {(1):n}", []),
    ("SELECT [:a, :b], [(:c)]", ["a", "b", "c"]),
    ("SELECT {'a':b, c:d, 'e': :f, g: :h}", ["f", "h"]),
    ("SELECT MAP {1:n, 'x': :y}", ["y"]),
    ("SELECT TIME '12:00:00', TIMESTAMP '2020-01-01 12:00:30'", []),
    ("SELECT name:closure, type:layer", []),
    ("SELECT list_transform(x, lambda y:y + :z)", ["z"]),
    ("SELECT f(threshold := :t)", ["t"]),
    ("SELECT 1 WHERE a > :a AND b>=:b OR c<>:c", ["a", "b", "c"]),
    ("SELECT CASE WHEN :a THEN :b ELSE :c END LIMIT :d", ["a", "b", "c", "d"]),
    ("SELECT x[CASE WHEN a THEN 1 END:n], x[NULL:n]", []),
    ("SELECT 1 ORDER BY :x", ["x"]),
    ("SELECT a BETWEEN :low AND :high", ["low", "high"]),
    ("SELECT :select, $from", ["select", "from"]),
    ("SELECT 'é日', :é, $ t", ["é", "t"]),
    ("SELECT : t", []),
    (":t", ["t"]),
    ("", []),
    (":", []),
    ("SELECT 'open :t", []),
    ("/* open :t", []),
]


@pytest.mark.parametrize(("text", "names"), COLONS)
def test_parameters_are_told_from_other_colons(text: str, names: list[str]) -> None:
    assert [mark.name for mark in marks(text)] == names
    assert len(dollars(text).encode()) == len(text.encode())


PIECES = st.sampled_from(
    [
        "1",
        "'a'",
        "':p'",
        "'it''s :p'",
        '"q:p"',
        "/* :p */",
        "-- :p\n",
        "$$ :p $$",
        "x::INT",
        "x[1:n]",
        "x[:n]",
        "{'k':n}",
        "{'k': n}",
        "TIME '10:20:30'",
        "e'\\':p'",
        "'日本:p'",
        "\n",
    ]
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(PIECES, NAMES.map(lambda name: ("parameter", name))), max_size=12))
def test_a_text_put_together_gives_back_its_parameters(pieces: list[Any]) -> None:
    """The parameters are those that were put in, and DuckDB's own parser sees the same ones."""
    text, expected = "SELECT 0", []
    for piece in pieces:
        if isinstance(piece, tuple):
            text += f", :{piece[1]}"
            expected.append(piece[1])
        elif piece.startswith(("/*", "--", "\n")):
            text += " " + piece
        else:
            text += ", " + piece
    assert [mark.name for mark in marks(text)] == expected
    (statement,) = duckdb.extract_statements(dollars(text))
    assert statement.named_parameters == {name.lower() for name in expected}


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_marked_without_harm(text: str) -> None:
    try:
        found = list(marks(text))
    except QueryError as error:
        assert "not Unicode" in str(error)  # noqa: PT017
        return
    encoded = text.encode()
    for mark in found:
        assert encoded[mark.start : mark.start + 1] in (b":", b"$")
        assert mark.name.encode() in encoded[mark.start : mark.end].replace(b'""', b'"')


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
)


@settings(max_examples=50, deadline=None)
@given(
    st.one_of(VALUES, st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=3))
)
def test_a_literal_is_the_value_that_is_bound(value: Any) -> None:
    """What is printed in place of a parameter gives what the bound parameter gives."""
    with duckdb.connect() as connection:
        (bound,) = connection.execute("SELECT $v", {"v": value}).fetchone()
        (written,) = connection.execute(rendered("SELECT :v", {"v": value})).fetchone()
        (after_minus,) = connection.execute(rendered("SELECT 1 -:v", {"v": 3})).fetchone()
    assert after_minus == -2
    if isinstance(value, float):
        assert float(written) == pytest.approx(bound, rel=1e-15, nan_ok=True)
    else:
        assert written == bound


def test_a_literal_minus_is_no_comment() -> None:
    assert duckdb.sql(rendered("SELECT 1 -$v", {"v": -3})).fetchall() == [(4,)]
    assert literal(True) == "TRUE"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("t=1", 1),
        ("t=-2", -2),
        ("t=0.5", 0.5),
        ("t=1e-3", 0.001),
        ("t=true", True),
        ("t=False", False),
        ("t=null", None),
        ("t=[1, 2.5]", [1, 2.5]),
        ('t=["a", "b"]', ["a", "b"]),
        ("t=abc", "abc"),
        ("t=a=b", "a=b"),
        ("t=", ""),
        ("t=1_000", "1_000"),
        ("t=nan", "nan"),
        ("t=[1,", "[1,"),
        ("t=[[1]]", "[[1]]"),
        ('t={"a": 1}', '{"a": 1}'),
        ("t=٣", "٣"),
        ("t:VARCHAR=1", "1"),
        ("t:double=1", 1.0),
        ("t:BIGINT[]=7", [7]),
        ('t:VARCHAR[]=["1"]', ["1"]),
    ],
)
def test_values_by_their_text(text: str, value: object) -> None:
    name, found = assignment(text)
    assert name == "t"
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    ["t", "=1", "1t=2", "a b=1", "t:FLOAT=1", "t:=1", "t:BIGINT=1.5", "t:BIGINT=99999999999999999999", "t:BOOLEAN=1"],
)
def test_values_that_cannot_be_read(text: str, sealed_store: Path) -> None:
    with pytest.raises(QueryError):
        assignment(text)
    result = run("sql", "SELECT 1", "--set", text, store=sealed_store)
    assert (result.exit_code, result.stdout) == (2, "")


def test_parameters_on_the_command_line(sealed_store: Path) -> None:
    query = "SELECT count(*) AS n FROM heads WHERE closure > :t AND list_contains($models, model)"
    arguments = ["--set", "t=0", "--set", 'models=["bert"]', "--format", "csv"]
    assert run("sql", query, *arguments, store=sealed_store).stdout == "n\n8\n"
    shown = run("sql", query, *arguments, "--sql", store=sealed_store).stdout
    assert shown == "SELECT count(*) AS n FROM heads WHERE closure > 0 AND list_contains(['bert'], model);\n"


@pytest.mark.parametrize(
    ("query", "given_values", "words"),
    [
        ("SELECT :t", [], "a parameter has no value"),
        ("SELECT :t + :u", [], "2 parameters have no value"),
        ("SELECT :t", ["t=1", "u=2"], "no parameter named 'u'"),
        ("SELECT :threshold", ["treshold=1"], "did you mean threshold?"),
        ("SELECT 1", ["t=1"], "no parameter named 't'"),
        ("SELECT ?", [], "a parameter without a name"),
        ("SELECT $1", [], "a parameter without a name"),
    ],
)
def test_too_few_and_too_many_parameters(sealed_store: Path, query: str, given_values: list[str], words: str) -> None:
    arguments = [part for value in given_values for part in ("--set", value)]
    result = run("sql", query, *arguments, store=sealed_store)
    assert result.exit_code == 1
    assert words in result.stderr


def test_capital_letters_name_the_same_parameter(atlas: Atlas) -> None:
    assert atlas.sql("SELECT :T + $t AS x", {"t": 2}).item() == 4
    assert atlas.sql("SELECT :t AS x", {"T": 2}).item() == 2


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_stay_values(atlas: Atlas, sealed_store: Path, value: str) -> None:
    catalogue = (sealed_store / "catalog.duckdb").read_bytes()
    assert atlas.sql("SELECT :v AS v, $v || '' AS w", {"v": value}).row(0) == (value, value)
    assert atlas.sql(rendered("SELECT :v AS v", {"v": value})).item() == value
    assert atlas.sql("SELECT * FROM heads WHERE model = :v", {"v": value}).height == 0
    through = run("sql", "SELECT :v AS v", "--set", f"v:VARCHAR={value}", "--format", "json", store=sealed_store)
    assert through.exit_code == 0
    assert (sealed_store / "catalog.duckdb").read_bytes() == catalogue


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_queries_are_one_error_or_rows(sealed_store: Path, text: str) -> None:
    for query in (text, f"SELECT {text}", f"FROM heads WHERE {text}"):
        result = run("sql", query, store=sealed_store)
        assert result.exit_code in (0, 1, 2)
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_surrogates_are_refused(atlas: Atlas) -> None:
    with pytest.raises(QueryError, match="not Unicode"):
        atlas.sql("SELECT '\udcff'")


POINTED = [
    ("SELECT closur FROM heads", "line 1, column 8", "SELECT closur", "closur", "did you mean closure?"),
    ("SELECT 'é日',\n\t closur FROM heads", "line 2, column 3", "closur FROM heads", "closur", "closure"),
    ("SELECT heads.closur FROM heads", "line 1, column 8", "heads.closur", "heads.closur", "closure"),
    ("SELECT 1 FROM haeds", "line 1, column 15", "haeds", "haeds", "did you mean heads?"),
    ("SELECT mediam(closure) FROM heads", "column 8", "mediam", "mediam(closure)", "median"),
    ("FROM closure_by_modl(0.9)", "column 6", "closure_by_modl", "closure_by_modl(0.9)", "closure_by_model"),
    ("SELECT strng FROM closure_by_model(0.9)", "column 8", "strng", "strng", "strong"),
    ("SELECT attainment FROM heads", "column 8", "attainment", "attainment", "attainment is a column of capacities"),
    ("SELECT 1\nFROM heads\nWHERE lable = :l", "line 3, column 7", "lable", "lable", "label"),
    ("SELEC 1", "line 1, column 1", "SELEC", "SELEC", "headatlas schema"),
    ("SELECT label::INT FROM heads", "column 13", "label::INT", "::INT", "headatlas schema"),
]


@pytest.mark.parametrize(("query", "place", "line", "marked", "remedy"), POINTED)
def test_errors_point_and_suggest(atlas: Atlas, query: str, place: str, line: str, marked: str, remedy: str) -> None:
    with pytest.raises(QueryError) as caught:
        atlas.sql(query, {"l": "L0H0"} if ":l" in query else None)
    error = caught.value
    where = (error.where or "").split("\n")
    assert place in where[0]
    assert line in where[1]
    at = where[2].index("^")
    assert where[1][at:].startswith(marked)
    assert where[2].count("^") == len(marked)
    assert remedy in (error.remedy or "")
    assert "{" not in str(error)


def test_every_misspelt_column_is_named(atlas: Atlas) -> None:
    """One letter left out of each column of heads: the column itself is among the suggestions."""
    for column in atlas.table("heads").collect_schema().names():
        if len(column) > 5:
            with pytest.raises(QueryError) as caught:
                atlas.sql(f"SELECT {column[:2] + column[3:]} FROM heads")
            assert column in (caught.value.remedy or ""), column


def test_a_long_line_is_cut_around_its_error(atlas: Atlas) -> None:
    query = "SELECT " + "closure, " * 50 + "closur, " + "closure, " * 50 + "1 FROM heads"
    with pytest.raises(QueryError) as caught:
        atlas.sql(query)
    _, shown, under = (caught.value.where or "").split("\n")
    assert len(shown) < 120
    assert shown[under.index("^") :].startswith("closur,")


def test_errors_within_a_macro_do_not_point_into_the_query(atlas: Atlas) -> None:
    with pytest.raises(QueryError, match="Could not convert") as caught:
        atlas.sql("FROM closure_by_model('x')")
    assert "^" not in str(caught.value)


def test_braces_in_a_message_are_no_parts(atlas: Atlas) -> None:
    for text in ('{"a"', "{}", '{"exception_message": 1}', '[{"exception_type": 1}]', "plain"):
        with pytest.raises(QueryError) as caught:
            atlas.sql("SELECT error(:e)", {"e": text})
        assert text in str(caught.value)


def test_schema_and_describe_suggest(sealed_store: Path) -> None:
    assert "did you mean heads?" in run("schema", "haeds", store=sealed_store).stderr
    assert "did you mean llama?" in run("describe", "lama", store=sealed_store).stderr
    assert "did you mean bert?" in run("closure", "bret", store=sealed_store).stderr


def test_types_and_names_without_a_counterpart(atlas: Atlas) -> None:
    with pytest.raises(QueryError, match="i: INTERVAL"):
        atlas.sql("SELECT INTERVAL 3 days AS i")
    with pytest.raises(QueryError, match="INTERVAL"):
        atlas.sql("SELECT [INTERVAL 3 days] AS i")
    assert atlas.sql("SELECT 1 AS a, 2 AS a").row(0) == (1, 2)
    assert atlas.sql("SELECT INTERVAL 3 days::VARCHAR AS i").item() == "3 days"


def test_rows_keep_their_order(atlas: Atlas) -> None:
    assert atlas.sql("SELECT range FROM range(300000)")["range"].to_list() == list(range(300000))


def test_a_query_is_stopped_after_its_time(sealed_store: Path) -> None:
    result = run("sql", ENDLESS, "--timeout", 0.3, store=sealed_store)
    assert result.exit_code == 1
    assert "stopped after its time" in result.stderr
    assert result.stdout == ""
    assert run("sql", "SELECT 1", "--timeout", 0, store=sealed_store).exit_code == 2
    assert run("sql", "SELECT 1 AS x", "--timeout", 60, "--format", "csv", store=sealed_store).stdout == "x\n1\n"


def test_a_stopped_query_leaves_the_store_open(sealed_store: Path) -> None:
    with open_atlas(sealed_store) as atlas:
        atlas.timeout = 0.2
        for query in (ENDLESS, "FROM range(100000000000)"):
            with pytest.raises(QueryError, match="stopped after its time"):
                atlas.sql(query)
            assert atlas.sql("SELECT count(*) FROM heads").item() == 32


def test_an_answer_that_fills_the_memory_is_stopped(atlas: Atlas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "ANSWER_LIMIT_GIB", 0.1)
    monkeypatch.setattr(interruption, "LOOK_SECONDS", 0.02)
    with pytest.raises(QueryError, match="too much memory"):
        atlas.sql("SELECT range, md5(range::VARCHAR) FROM range(100000000000)")


def test_another_thread_can_stop_a_query(sealed_store: Path) -> None:
    with open_atlas(sealed_store) as atlas:
        stopper = threading.Timer(0.3, atlas.interrupt)
        stopper.start()
        with pytest.raises(QueryError, match="interrupted"):
            atlas.sql(ENDLESS)
        stopper.join()


@pytest.mark.parametrize("query", [ENDLESS, "FROM range(100000000000)"])
def test_ctrl_c_stops_a_query(sealed_store: Path, tmp_path: Path, query: str) -> None:
    """SIGINT while the query runs, which a line on stderr announces."""
    announce = (
        "import sys, cli, query.connection as c; f = c._frame\n"
        "def g(relation):\n    print('running', file=sys.stderr, flush=True); return f(relation)\n"
        "c._frame = g; cli.main()"
    )
    command = [sys.executable, "-c", announce, "sql", query, "--store", str(sealed_store)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "running\n"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
    assert errors == "interrupted: the store is as it was\n"


def test_plain_sql_imports_nothing_heavy(sealed_store: Path) -> None:
    code = (
        "import sys, cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'scipy', 'zarr', 'numpy', 'pyarrow', 'pandas', 'matplotlib'} & sys.modules.keys()))"
    )
    query = "SELECT label, closure, sigma FROM heads JOIN spectra USING (model, operator, stack, layer, head)"
    for arguments in (["sql", query], ["ask", "closure-by-model"], ["schema", "heads"]):
        command = [sys.executable, "-c", code, *arguments, "--store", str(sealed_store)]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert printed.splitlines()[-1] == "[]", arguments
