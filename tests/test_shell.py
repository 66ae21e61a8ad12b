"""The SQL prompt: where statements end, completion, what is typed, a real terminal, and a stream."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pexpect
import polars as pl
import pytest
from click.testing import CliRunner
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import cli
from query.completion import StoreCompleter
from query.shell import HELP, Shell, from_stream, from_terminal, history_path, prompt_session
from query.statements import open_literal, split

ROOT = Path(__file__).parent.parent
TAB, ENTER, UP, CTRL_C, CTRL_D = "\t", "\r", "\x1b[A", "\x03", "\x04"
ENDLESS = "SELECT count(*) FROM range(10000000) AS a, range(10000000) AS b WHERE a.range + b.range = 7;"
TEXTS = [
    "SELECT 1;",
    "SELECT 1; SELECT ';'; FROM heads;",
    "SELECT 'it''s; é€';\nSELECT \"a;b\" FROM x;",
    "SELECT $$a;b$$; -- not; this\n/* nor; this */ SELECT 2;",
    ";;SELECT 1;;",
]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def shell(sealed_store: Path) -> Iterator[Shell]:
    opened = Shell(sealed_store, terminal=False)
    yield opened
    opened.close()


def table(store: Path, query: str) -> str:
    """What ``headatlas sql`` prints."""
    return CliRunner().invoke(cli.main, ["sql", query, "--store", str(store)]).stdout


@pytest.mark.parametrize("text", TEXTS)
def test_statements_end_where_duckdb_ends_them(text: str) -> None:
    with duckdb.connect() as connection:
        expected = [statement.query.strip(" ;\n") for statement in connection.extract_statements(text)]
    finished, rest = split(text)
    assert [statement.splitlines()[-1].removeprefix("/* nor; this */ ") for statement in finished] == [
        statement.splitlines()[-1].removeprefix("/* nor; this */ ") for statement in expected
    ]
    assert rest == ""


@pytest.mark.parametrize("rest", ["SELECT 1", "SELECT 'a;\n", 'SELECT "a;', "SELECT 1 -- ;", "SELECT $$;"])
def test_what_no_semicolon_ends_waits(rest: str) -> None:
    assert split(f"SELECT 0; {rest}") == (["SELECT 0"], rest.strip())


@pytest.mark.parametrize(
    ("text", "inside"), [("a = 'ra", "'ra"), ("a = 'raw'", None), ("'it''s", "'it''s"), ("", None)]
)
def test_a_literal_is_open_until_its_quote_closes(text: str, inside: str | None) -> None:
    found = open_literal(text)
    assert (found and found.text) == inside


def offered(shell: Shell, text: str, after: str = "") -> list[str]:
    """Texts that completion offers where the cursor is, Tab being pressed."""
    completer = StoreCompleter(shell.words, shell.arguments())
    document = Document(text + after, len(text))
    return [found.text for found in completer.get_completions(document, CompleteEvent(completion_requested=True))]


def test_columns_of_a_table_are_offered_in_its_order(shell: Shell) -> None:
    columns = shell.atlas.sql("DESCRIBE heads")["column_name"].to_list()
    assert offered(shell, "SELECT heads.", " FROM heads") == columns
    assert offered(shell, "SELECT h.", " FROM heads AS h JOIN pairs AS p USING (layer)") == columns
    assert offered(shell, "SELECT h.cos_m", " FROM heads h") == ["cos_max", "cos_mean", "cos_min"]
    assert offered(shell, "SELECT p.right_", " FROM heads h, pairs p") == ["right_closure", "right_alpha"]
    assert offered(shell, "SELECT p.closure", " FROM pairs p") == []
    assert offered(shell, "SELECT ", " FROM heads")[: len(columns)] == columns
    assert offered(shell, "SELECT la")[:2] == ["layer", "label"]


def test_the_meaning_of_a_column_stands_beside_it(shell: Shell) -> None:
    completer = StoreCompleter(shell.words)
    document = Document("SELECT alph", 11)
    (found, *_) = completer.get_completions(document, CompleteEvent())
    assert "least-squares coefficient of T^2 ~ alpha T" in found.display_meta_text


def test_after_from_there_are_tables_and_macros(shell: Shell) -> None:
    schema = shell.atlas.sql("SELECT table_name FROM duckdb_tables() WHERE database_name = 'atlas'")
    found = offered(shell, "SELECT * FROM ")
    assert set(schema["table_name"]) <= set(found)
    assert {"strongest_heads(", "repeated_layers()"} <= set(found)
    assert "alpha" not in found
    assert "SELECT" not in found
    assert offered(shell, "FROM heads JOIN pai") == ["pairs"]


def test_keywords_and_functions(shell: Shell) -> None:
    assert "QUALIFY" in offered(shell, "SELECT 1 QUAL")
    assert "qualify" in offered(shell, "SELECT 1 qual")
    assert "quantile_cont" in offered(shell, "SELECT quantile")
    assert offered(shell, "SELECT 1; FROM mod") == ["models"]


def test_quotes_hold_names_of_models_and_values(shell: Shell) -> None:
    assert offered(shell, "SELECT * FROM heads WHERE model = '") == ["bert", "llama"]
    assert offered(shell, "FROM heads WHERE model IN ('ll") == ["llama"]
    assert offered(shell, "FROM heads WHERE model = 'llama' AND operator = '") == ["folded", "raw"]
    assert offered(shell, "FROM heads WHERE operator = 'raw' AND ") != ["folded", "raw"]
    assert offered(shell, "SELECT 'b") == ["bert"]


def test_commands_and_what_follows_them(shell: Shell) -> None:
    assert offered(shell, ".") == list(HELP) == list(shell.commands)
    assert offered(shell, ".schema he") == ["heads"]
    assert offered(shell, ".format n") == ["ndjson"]
    assert offered(shell, ".timer ") == ["on", "off"]


def typed(store: Path, keys: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Standard output and error of a prompt at which keys are typed and then Ctrl-D."""
    with create_pipe_input() as pipe:
        pipe.send_text(keys + CTRL_D)
        from_terminal(store, input=pipe, output=DummyOutput())
    return capsys.readouterr()


def test_a_statement_is_answered_with_the_table_of_sql(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT label, closure FROM heads WHERE model = 'llama' AND operator = 'raw' ORDER BY label"
    out, err = typed(sealed_store, query.replace("FROM", ENTER + "FROM") + ";" + ENTER, capsys)
    assert out == table(sealed_store, query)
    assert err.splitlines()[1:] == ["12 rows"]


def test_tab_completes_what_is_typed(shell: Shell) -> None:
    with create_pipe_input() as pipe:
        session = prompt_session(shell, input=pipe, output=DummyOutput())

        def until(reached: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 30
            while not reached() and time.monotonic() < deadline:
                time.sleep(0.01)

        def type_on() -> None:
            pipe.send_text("SELECT count(*) FROM pai")
            until(lambda: session.default_buffer.complete_state is not None)
            pipe.send_text(TAB)
            until(lambda: session.default_buffer.text.endswith("pairs"))
            pipe.send_text(";" + ENTER + CTRL_C)

        typist = threading.Thread(target=type_on, daemon=True)
        typist.start()
        assert session.prompt() == "SELECT count(*) FROM pairs;"
        typist.join()


def test_ctrl_c_drops_what_is_typed(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = typed(sealed_store, f"SELECT nonsense{CTRL_C}SELECT 7 AS n;{ENTER}", capsys)
    assert out == table(sealed_store, "SELECT 7 AS n")
    assert "error" not in err


def test_errors_are_shown_and_the_prompt_goes_on(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = f"FROM nowhere;{ENTER}DROP TABLE heads;{ENTER}.nonsense{ENTER}.schema head{ENTER}SELECT 1 AS n;{ENTER}"
    out, err = typed(sealed_store, keys, capsys)
    assert out == table(sealed_store, "SELECT 1 AS n")
    assert "nowhere does not exist" in err
    assert "only a single reading statement can run" in err
    assert "no command .nonsense" in err
    assert "did you mean heads" in err
    assert "Traceback" not in err


def test_history_is_kept(sealed_store: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(sealed_store, f"SELECT 41 AS n;{ENTER}", capsys)
    assert history_path() == state / "headatlas" / "history"
    assert "+SELECT 41 AS n;" in history_path().read_text()
    out, _ = typed(sealed_store, f"{UP}{ENTER}", capsys)
    assert out == table(sealed_store, "SELECT 41 AS n")


def test_a_history_that_cannot_be_kept_stops_nothing(
    sealed_store: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state.write_text("in the way")
    out, err = typed(sealed_store, f"SELECT 1 AS n;{ENTER}", capsys)
    assert out == table(sealed_store, "SELECT 1 AS n")
    assert "history is not kept" in err


def test_history_lies_in_the_home_directory_where_xdg_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert history_path() == Path.home() / ".local" / "state" / "headatlas" / "history"


def test_a_real_terminal(sealed_store: Path, tmp_path: Path) -> None:
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "cli", "shell", "--store", str(sealed_store)],
        env={**os.environ, "TERM": "xterm", "PAGER": "cat", "PROMPT_TOOLKIT_NO_CPR": "1"},
        cwd=str(ROOT),
        dimensions=(40, 160),
        encoding="utf-8",
        timeout=60,
    )
    terminal.expect("help lists commands")
    terminal.expect("atlas>")
    terminal.send(f"SELECT 6 * 7 AS answer{ENTER};{ENTER}")
    terminal.expect("42\r\n1 row\r\n")
    terminal.send(f"FROM nowhere;{ENTER}")
    terminal.expect("error: the query cannot be answered")
    terminal.expect("atlas>")
    terminal.send(ENDLESS + ENTER)
    for _ in range(50):  # the keys reach the prompt first, then the program
        terminal.sendintr()
        if terminal.expect(["interrupted", pexpect.TIMEOUT], timeout=1) == 0:
            break
    else:
        pytest.fail("Ctrl-C did not stop the query")
    terminal.send(f"SELECT 'a' || 'b' AS two;{ENTER}")
    terminal.expect("ab\r\n1 row")
    terminal.send(f"FROM heads;{ENTER}")  # wider than the terminal, so that it goes through the pager
    terminal.expect("bert +raw")
    terminal.expect(r"\d\d rows")
    terminal.expect("atlas>")
    terminal.send(f".format parquet{ENTER}SELECT 1;{ENTER}")
    terminal.expect("error: parquet is not text")
    terminal.expect("atlas>")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert "+SELECT 'a' || 'b' AS two;" in history_path().read_text()


def streamed(store: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str, str]:
    sound = from_stream(store, io.StringIO(text))
    return sound, *capsys.readouterr()


def test_a_stream_is_run_statement_by_statement(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "SELECT count(*) AS n\nFROM heads;\n.format csv\nSELECT ';' AS semicolon; SELECT 2 AS two"
    sound, out, err = streamed(sealed_store, text, capsys)
    assert sound
    assert out == table(sealed_store, "SELECT count(*) AS n FROM heads") + "semicolon\n;\ntwo\n2\n"
    assert err == ""


def test_a_stream_goes_on_after_an_error_and_says_so(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound, out, err = streamed(sealed_store, ".format csv\nSELECT nope;\nSELECT 1 AS n;\n", capsys)
    assert not sound
    assert out == "n\n1\n"
    assert err.count("error:") == 1
    assert streamed(sealed_store, ".quit\nSELECT nope;", capsys) == (True, "", "")


def test_the_command_reads_standard_input(sealed_store: Path) -> None:
    command = [sys.executable, "-m", "cli", "shell", "--store", str(sealed_store)]
    ran = subprocess.run(command, input="SELECT 1 AS n;\nnonsense;", capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout) == (1, table(sealed_store, "SELECT 1 AS n"))
    missing = CliRunner().invoke(cli.main, ["shell", "--store", str(sealed_store / "nowhere")], input="SELECT 1;")
    assert missing.exit_code == 1
    assert missing.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("ending", "style"), [("csv", "csv"), ("parquet", "parquet"), ("md", "markdown"), ("x", "json")]
)
def test_an_answer_goes_to_a_file_once(
    sealed_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, style: str
) -> None:
    query, file, expected = "SELECT label, closure FROM heads", tmp_path / f"rows.{ending}", tmp_path / "expected"
    text = f".format json\n.output {file}\n{query};\nSELECT 1 AS n;"
    sound, out, err = streamed(sealed_store, text, capsys)
    assert sound
    assert out == '[{"n":1}]\n'
    assert str(file) in err
    arguments = ["sql", query, "--store", str(sealed_store), "--format", style, "--output", str(expected)]
    CliRunner().invoke(cli.main, arguments)
    assert file.read_bytes() == expected.read_bytes()


def test_a_file_that_cannot_be_written_is_one_error(
    sealed_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, out, err = streamed(sealed_store, f".output {tmp_path}/no/rows.csv\nSELECT 1;\nSELECT 2 AS n;", capsys)
    assert not sound
    assert "the output cannot be written" in err
    assert out == table(sealed_store, "SELECT 2 AS n")
    assert list(tmp_path.iterdir()) == []


def test_commands_answer_as_their_namesakes_do(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound, out, _ = streamed(sealed_store, ".tables\n.schema heads\n.help\n.format\n", capsys)
    schema = [
        CliRunner().invoke(cli.main, ["schema", *table, "--store", str(sealed_store)]) for table in ([], ["heads"])
    ]
    assert sound
    assert out.startswith(schema[0].stdout + schema[1].stdout)
    assert all(name in out.splitlines()[-len(HELP) - 2 + place] for place, name in enumerate(HELP))
    assert out.endswith("\ntable\n")


def test_questions_are_asked_by_name(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = CliRunner().invoke(cli.main, ["ask", "--store", str(sealed_store)]).stdout
    asked = CliRunner().invoke(
        cli.main, ["ask", "strongest-heads", "--set", "how_many=2", "--store", str(sealed_store)]
    )
    sound, out, _ = streamed(sealed_store, ".questions\n.ask strongest-heads how_many=2\n", capsys)
    assert (sound, out) == (True, names + asked.stdout)


@pytest.mark.parametrize(
    "command",
    [
        ".ask",
        ".ask nothing",
        ".ask suspicious x",
        ".format nonsense",
        ".timer",
        ".pager maybe",
        ".output",
        ".schema",
        ".tabels",
    ],
)
def test_a_command_used_wrongly_is_one_error(
    sealed_store: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    sound, out, err = streamed(sealed_store, command, capsys)
    assert (sound, out) == (False, "")
    assert err.startswith("error: ")
    assert "None" not in err


def test_a_timer_tells_rows_and_seconds(sealed_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = streamed(sealed_store, ".timer on\nSELECT unnest([1, 2]);\n.timer off\nSELECT 1;", capsys)
    (line,) = err.splitlines()
    assert line.startswith("2 rows, ")
    assert line.endswith(" s")


def test_an_answer_is_of_the_store_as_it_is_now(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell(store_path, terminal=False)
    try:
        shell.run(".format csv")
        shell.run("SELECT model FROM models ORDER BY model;")
        assert offered(shell, "SELECT 'b") == ["bert"]
        assert CliRunner().invoke(cli.main, ["remove", "bert", "--store", str(store_path)]).exit_code == 0
        shell.run("SELECT model FROM models;")
        assert offered(shell, "SELECT 'b") == []
        assert capsys.readouterr().out == "model\nbert\nllama\nmodel\nllama\n"
        (store_path / "catalog.duckdb").unlink()
        assert not shell.run("SELECT 1;")
        assert "error: the store is empty" in capsys.readouterr().err
    finally:
        shell.close()


def test_rows_that_do_not_fit_are_paged(sealed_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paged: list[str] = []
    monkeypatch.setattr("click.echo_via_pager", paged.append)
    shell = Shell(sealed_store, terminal=True)
    try:
        shell.run("SELECT label FROM heads LIMIT 3;")
        assert paged == []
        shell.run("FROM heads LIMIT 1;")
        shell.run("SELECT label FROM heads;")
        assert paged == [table(sealed_store, query) for query in ("FROM heads LIMIT 1", "SELECT label FROM heads")]
        shell.run(".pager off")
        shell.run("SELECT label FROM heads;")
        assert len(paged) == 2
    finally:
        shell.close()


def test_the_vocabulary_is_that_of_the_catalogue(shell: Shell) -> None:
    words = shell.words()
    for name, columns in words.columns.items():
        assert list(columns) == shell.atlas.sql(f"DESCRIBE {name}")["column_name"].to_list()
    heads = shell.atlas.table("heads").collect()
    assert words.values["label"] == tuple(heads["label"].unique().sort())
    assert isinstance(heads, pl.DataFrame)
