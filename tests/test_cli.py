"""The command line: what is printed where, exit statuses, and the options every command shares."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import polars as pl
import pytest
from click.testing import CliRunner, Result

import cli
from query.formats import FORMATS
from tests import checkpoints

ROOT = Path(__file__).parent.parent
ROW_COMMANDS = {
    "models": [],
    "describe": ["llama"],
    "schema": [],
    "sql": ["SELECT label, closure FROM heads WHERE model = 'llama' AND operator = 'raw' ORDER BY label"],
    "closure": [],
    "mismatch": [],
    "algebra": ["--threshold", "0.01"],
}


def run(*arguments: object, store: Path | None = None) -> Result:
    environment = {"HEADATLAS_STORE": str(store)} if store else {}
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], env=environment)


def test_every_command_has_help_and_stands_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert set(cli.main.commands) >= set(ROW_COMMANDS)
    for name, command in cli.main.commands.items():
        assert command.help, name
        assert run(name, "--help").exit_code == 0
        assert f"headatlas {name}" in readme, f"{name} is not in the README"
        for parameter in command.params:
            assert isinstance(parameter, click.Argument) or parameter.help, f"{name} {parameter.name}"


def test_ingest_prints_data_to_stdout_and_progress_to_stderr(tmp_path: Path, llama_directory: Path) -> None:
    store = tmp_path / "atlas"
    result = run("ingest", llama_directory, "--store", store)
    assert result.exit_code == 0
    assert result.stdout.startswith("tiny-llama: 12 heads in 3 layers, raw, ")
    assert "tiny-llama: measuring, 3 of 3 layers" in result.stderr
    again = run("ingest", llama_directory, "--store", store)
    assert again.exit_code == 0
    assert "already stored with the same content, nothing to do" in again.stdout
    assert run("ingest", llama_directory, "--store", store, "--name", "twin").stderr.endswith(
        "warning: twin and tiny-llama hold the same values and outputs\n"
    )


def test_bytes_read_are_those_the_plan_announced(tmp_path: Path, llama_directory: Path) -> None:
    planned = json.loads(run("plan", llama_directory, "--operator", "both", "--format", "json").stdout)
    run("ingest", llama_directory, "--operator", "both", "--store", tmp_path / "atlas")
    stored = run("sql", "SELECT bytes_read FROM models", "--format", "csv", "--store", tmp_path / "atlas")
    assert int(stored.stdout.split()[1]) == planned["bytes_to_read"]
    assert planned["bytes_to_read"] == sum(tensor["bytes"] for tensor in planned["tensor_list"])
    assert {tensor["role"] for tensor in planned["tensor_list"]} == {"query", "key", "value", "output", "feeding_norm"}


@pytest.mark.parametrize("style", ["json", "csv"])
def test_a_plan_that_cannot_be_written_is_one_error(llama_directory: Path, tmp_path: Path, style: str) -> None:
    result = run("plan", llama_directory, "--format", style, "--output", tmp_path / "missing" / "plan")
    assert result.exit_code == 1
    assert "the output cannot be written" in result.stderr
    written = tmp_path / "plan"
    assert run("plan", llama_directory, "--format", style, "--output", written).stdout == ""
    assert written.read_bytes() == run("plan", llama_directory, "--format", style).stdout_bytes


def test_plan_for_people_and_for_programs(llama_directory: Path) -> None:
    text = run("plan", llama_directory).stdout
    assert "kv_heads_per_layer     2" in text
    assert "model.layers.0.self_attn.q_proj.weight" in text
    assert "layers_with_attention  0-2" in text
    (stack,) = json.loads(run("plan", llama_directory, "--format", "json").stdout)["stacks"]
    assert stack["layout"][0] in text
    rows = pl.read_csv(run("plan", llama_directory, "--format", "csv").stdout.encode())
    assert rows.height == 12
    assert rows["shape"][0] == "[32, 32]"


@pytest.mark.parametrize("command", ROW_COMMANDS)
@pytest.mark.parametrize("style", FORMATS)
def test_rows_in_every_format(store_path: Path, tmp_path: Path, command: str, style: str) -> None:
    target = tmp_path / f"rows.{style}"
    printed = run(command, *ROW_COMMANDS[command], "--format", style, store=store_path)
    assert printed.exit_code == 0
    written = run(command, *ROW_COMMANDS[command], "--format", style, "--output", target, store=store_path)
    assert written.exit_code == 0
    assert written.stdout == ""
    assert target.read_bytes() == printed.stdout_bytes


@pytest.mark.parametrize("command", ROW_COMMANDS)
def test_sql_shows_the_query_and_runs_nothing(store_path: Path, command: str) -> None:
    shown = run(command, *ROW_COMMANDS[command], "--sql", store=store_path / "nowhere")
    assert shown.exit_code == 0
    rows = run(command, *ROW_COMMANDS[command], "--format", "csv", store=store_path).stdout
    assert run("sql", shown.stdout, "--format", "csv", store=store_path).stdout == rows


def test_panel_and_verify(store_path: Path) -> None:
    panel = run("panel", store=store_path)
    assert panel.exit_code == 0
    assert "0.336 (nine models, 7,304 heads)" in panel.stdout
    assert run("verify", store=store_path).stdout == "ok: 2 models verified\n"
    (next((store_path / "arrays.zarr").glob("llama-*")) / "raw" / "decoder" / "alpha" / "zarr.json").write_text("{}")
    broken = run("verify", "llama", "--format", "json", store=store_path)
    assert broken.exit_code == 1
    assert json.loads(broken.stdout)[0]["problem"] == "checksum differs from the manifest"
    assert run("verify", "bert", store=store_path).stdout == "ok: 1 model verified\n"


def test_rebuild_and_remove(store_path: Path) -> None:
    (store_path / "catalog.duckdb").unlink()
    assert run("models", store=store_path).exit_code == 1
    assert "2 models" in run("rebuild", store=store_path).stdout
    assert run("remove", "bert", store=store_path).exit_code == 0
    assert "bert" not in run("models", store=store_path).stdout


def test_schema_of_a_table(store_path: Path) -> None:
    rows = json.loads(run("schema", "pairs", "--format", "json", store=store_path).stdout)
    assert [row["name"] for row in rows][:6] == ["model", "operator", "stack", "layer", "write_head", "read_head"]
    assert all(row["meaning"] for row in rows)
    listed = run("schema", store=store_path).stdout
    assert "closure_by_model(threshold)" in listed
    assert "heads" in listed


def test_sql_parameters_and_standard_input(store_path: Path) -> None:
    result = run(
        "sql", "SELECT $t + 1 AS x, $m AS m", "-p", "t=0.5", "-p", "m=a=b", "--format", "csv", store=store_path
    )
    assert result.stdout == "x,m\n1.5,a=b\n"
    piped = CliRunner().invoke(
        cli.main, ["sql", "-", "--store", str(store_path), "--format", "csv"], input="SELECT 7 AS n"
    )
    assert piped.stdout == "n\n7\n"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["closure", "nobody"], 1, "no model named 'nobody'"),
        (["describe", "nobody"], 1, "no model named 'nobody'"),
        (["verify", "nobody"], 1, "no model named 'nobody'"),
        (["remove", "nobody"], 1, "no model named 'nobody'"),
        (["schema", "haeds"], 1, "no table named 'haeds'"),
        (["sql", "SELECT nothing FROM heads"], 1, "nothing"),
        (["sql", "DROP TABLE heads"], 1, "single reading statement"),
        (["sql", "SELECT $x"], 1, "x"),
        (["sql", "SELECT 1", "-p", "broken"], 2, "NAME=VALUE"),
        (["sql"], 2, "Missing argument"),
        (["closure", "--threshold", "2"], 2, "threshold"),
        (["closure", "--by", "galaxy"], 2, "galaxy"),
        (["models", "--format", "xml"], 2, "xml"),
        (["nonsense"], 2, "nonsense"),
        (["models", "--output", "/nonexistent/file", "--format", "csv"], 1, "cannot be written"),
    ],
)
def test_errors_go_to_stderr_with_their_status(store_path: Path, arguments: list[str], status: int, words: str) -> None:
    result = run(*arguments, store=store_path)
    assert result.exit_code == status
    assert words in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_no_store_says_what_to_do(tmp_path: Path) -> None:
    result = run("closure", store=tmp_path / "none")
    assert result.exit_code == 1
    assert "no store here" in result.stderr
    assert "ingest a model first" in result.stderr


def test_unusable_devices_are_refused_before_anything_is_read(tmp_path: Path, llama_directory: Path) -> None:
    for device in ("cuda:77", "quantum"):
        result = run("ingest", llama_directory, "--device", device, "--store", tmp_path / "atlas")
        assert result.exit_code == 1
        assert f"--device {device}" in result.stderr
        assert not (tmp_path / "atlas").exists()


def test_float32_is_recorded_with_its_cut(tmp_path: Path, llama_directory: Path) -> None:
    run("ingest", llama_directory, "--dtype", "float32", "--store", tmp_path / "atlas")
    rows = run(
        "sql", "SELECT compute_dtype, rank_cut, device FROM models", "--format", "csv", "--store", tmp_path / "atlas"
    )
    assert rows.stdout.splitlines()[1] == "float32,0.001,cpu"


def test_a_lineage_step_is_recorded(tmp_path: Path, llama_directory: Path) -> None:
    run("ingest", llama_directory, "--lineage", "run", "--step", "30", "--store", tmp_path / "atlas")
    rows = run("sql", "SELECT lineage, step FROM models", "--format", "csv", "--store", tmp_path / "atlas")
    assert rows.stdout.splitlines()[1] == "run,30"


def test_a_bar_on_a_terminal(tmp_path: Path, llama_directory: Path) -> None:
    """Layers, rate and time left, drawn on a pseudo-terminal."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, str(ROOT / "cli.py"), "ingest", str(llama_directory), "--store", str(tmp_path / "atlas")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    drawn = b""
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:
            break
        if not chunk:
            break
        drawn += chunk
    assert process.stdout is not None
    assert process.stdout.read().startswith(b"tiny-llama: 12 heads")
    process.stdout.close()
    assert process.wait() == 0
    os.close(reader)
    assert b"measuring: 100%" in drawn
    assert b"3/3" in drawn
    assert b"layer/s" in drawn


def test_the_program_runs_from_its_file(sealed_store: Path) -> None:
    command = [sys.executable, str(ROOT / "cli.py"), "models", "--store", str(sealed_store), "--format", "csv"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[1].startswith("bert,bert,raw,2,4,4,32,8,F32")


def test_skipped_layers_are_said(tmp_path: Path) -> None:
    model = checkpoints.llama(layers=3).without("model.layers.1.self_attn")
    directory = checkpoints.save_safetensors(model, tmp_path / "gap")
    result = run("ingest", directory, "--store", tmp_path / "atlas")
    assert result.exit_code == 0
    assert "decoder layer 1 skipped: no attention tensors" in result.stderr
    assert "skipped" in run("describe", "gap", "--store", tmp_path / "atlas").stdout
