"""Stores and queries from strangers: nothing outside the store is read, written or deleted."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from click.testing import CliRunner, Result

import cli
from query import open_atlas
from stats.errors import HeadatlasError, StoreError
from store.arrays import LARGEST_STACK, open_stack, read_stack
from store.atlas import AtlasStore
from store.integrity import rebuild, seal, verify

SECRET = "S3CRET-of-the-user"
MINE = """from store.user_statistics import statistic

@statistic(meaning="m", values="v")
def mine(sigma):
    return sigma[:, 0]
"""


def run(*arguments: str | Path, store: Path) -> Result:
    result = CliRunner().invoke(cli.main, [*map(str, arguments), "--store", str(store)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert SECRET not in result.output
    return result


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the store whose files nothing may read, write or delete."""
    place = tmp_path / "outside"
    (place / "deep").mkdir(parents=True)
    for name in ("secret.txt", "secret.csv", "secret.json", "deep/secret.parquet"):
        (place / name).write_text(f"a,b\n{SECRET},1\n")
    return place


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def changed_catalogue(store: Path, *statements: str) -> None:
    connection = duckdb.connect(str(store / "catalog.duckdb"))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def reading_commands(store: Path) -> None:
    """What a newcomer would try first; each gives rows or one error."""
    for arguments in (("models",), ("closure",), ("sql", "FROM heads"), ("verify",), ("rebuild",)):
        run(*arguments, store=store)


# -- names that are paths ----------------------------------------------------------------------------------

PATHS = [
    "../outside",
    "../../outside",
    "..",
    ".",
    "",
    "llama/../../../outside",
    "*",
    "[a-z]*",
    "a\0b",
    ".hidden",
    "a\nb",
]


@pytest.mark.parametrize(
    ("column", "name"), [*(("models.array_group", name) for name in PATHS), ("operators.operator", "../../outside")]
)
def test_a_catalogue_cannot_send_the_program_elsewhere(
    column: str, name: str, store_path: Path, outside: Path, tmp_path: Path
) -> None:
    """``remove`` deletes the directory that the catalogue gives a model: it has to be one of the store."""
    before, table = files(outside), column.split(".")[0]
    connection = duckdb.connect(str(store_path / "catalog.duckdb"))
    only = " AND operator = 'raw'" if table == "operators" else ""
    connection.execute(f"UPDATE {table} SET {column.split('.')[1]} = ? WHERE model = 'llama'{only}", [name])
    connection.close()
    kept = {path.name for path in store_path.iterdir()}
    for arguments in (("remove", "llama"), ("models",), ("verify",)):
        run(*arguments, store=store_path)
    store = AtlasStore.open(store_path)
    with pytest.raises(StoreError, match="outside the store's arrays"):
        store.models()
    assert files(outside) == before
    assert kept <= {path.name for path in store_path.iterdir()}
    rebuild(store)
    assert set(store.models()) == {"llama", "bert"}


@pytest.mark.parametrize("name", ["../../../outside", "..", "/etc", "a/b"])
@pytest.mark.parametrize("column", ["operator", "stack"])
def test_arrays_are_read_from_the_store_alone(column: str, name: str, store_path: Path) -> None:
    changed_catalogue(store_path, f"UPDATE heads SET {column} = '{name}' WHERE model = 'llama' AND operator = 'raw'")
    with open_atlas(store_path) as atlas, pytest.raises(HeadatlasError):
        atlas.array(
            "llama", "core", operator=name if column == "operator" else "raw", stack=name if column == "stack" else None
        )


@pytest.mark.parametrize("name", ["../../../outside/secret.txt", "/etc/passwd", "raw/../../../../outside/secret.txt"])
def test_a_manifest_reads_nothing_elsewhere(name: str, store_path: Path, outside: Path) -> None:
    manifest = next((store_path / "manifests").glob("llama*.raw.json"))
    content = json.loads(manifest.read_text())
    content["files"][name] = {"bytes": 3, "sha256": "0" * 64}
    content.pop("seal", None)
    manifest.write_text(json.dumps(content))
    os.chmod(outside / "secret.txt", 0)
    before = set(outside.iterdir())
    assert list(verify(AtlasStore.open(store_path)))
    reading_commands(store_path)
    assert set(outside.iterdir()) == before


@pytest.mark.parametrize("target", ["/dev/zero", "secret.txt"])
def test_links_within_a_store_are_not_followed(target: str, store_path: Path, outside: Path) -> None:
    stack = next((store_path / "arrays.zarr").glob("llama*")) / "raw" / "decoder"
    chunk = next(path for path in (stack / "closure").rglob("*") if path.is_file() and path.name != "zarr.json")
    chunk.unlink()
    chunk.symlink_to(target if target.startswith("/") else outside / target)
    with pytest.raises(StoreError, match="not as this program writes"):
        read_stack(stack)
    assert any("link" in finding.problem for finding in verify(AtlasStore.open(store_path)))
    reading_commands(store_path)


# -- arrays ------------------------------------------------------------------------------------------------


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.path}",)


def stack_of(store: Path) -> Path:
    return next((store / "arrays.zarr").glob("llama*")) / "raw" / "decoder"


def sealed_again(store: Path) -> None:
    """Give every unit of llama a manifest that fits: a stranger can do that, too."""
    atlas = AtlasStore.open(store)
    for manifest in (store / "manifests").glob("llama*.json"):
        group, unit = manifest.name.removesuffix(".json").rsplit(".", 1)
        seal(atlas, group, unit)


def test_the_older_form_of_zarr_runs_no_code(store_path: Path, tmp_path: Path) -> None:
    """Its arrays can name a filter that unpickles every chunk."""
    stack, marker = stack_of(store_path), tmp_path / "marker"
    shutil.rmtree(stack / "closure")
    (stack / "closure").mkdir()
    metadata = {
        "zarr_format": 2,
        "shape": [3, 4],
        "chunks": [3, 4],
        "dtype": "<f8",
        "compressor": None,
        "fill_value": 0,
    }
    metadata |= {"order": "C", "filters": [{"id": "pickle"}]}
    (stack / "closure" / ".zarray").write_text(json.dumps(metadata))
    (stack / "closure" / "0.0").write_bytes(pickle.dumps(Touches(marker)))
    for make_older in (False, True):
        if make_older:
            (stack / "zarr.json").unlink()
            (stack / ".zgroup").write_text('{"zarr_format": 2}')
        sealed_again(store_path)
        reading_commands(store_path)
        with pytest.raises(HeadatlasError), open_atlas(store_path) as atlas:
            atlas.array("llama", "closure")
        assert not marker.exists()


METADATA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a shape of 2^60": lambda data: data.update(shape=[2**60, 4]),
    "chunks of 2^60": lambda data: data["chunk_grid"]["configuration"].update(chunk_shape=[2**60, 4]),
    "a shape of 2^62 by 2^62": lambda data: data.update(shape=[2**62, 2**62]),
    "a negative shape": lambda data: data.update(shape=[-1, 4]),
    "texts": lambda data: data.update(data_type="string"),
    "objects": lambda data: data.update(data_type="object"),
    "an unknown codec": lambda data: data.update(codecs=[{"name": "bytes"}, {"name": "numcodecs.pickle"}]),
    "a codec of numcodecs": lambda data: data.update(
        codecs=[{"name": "bytes"}, {"name": "numcodecs.zlib", "configuration": {}}]
    ),
    "no codecs": lambda data: data.update(codecs=[]),
    "a node of another kind": lambda data: data.update(node_type="group"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_arrays_are_not_believed(name: str, store_path: Path) -> None:
    stack = stack_of(store_path)
    path = stack / "closure" / "zarr.json"
    data = json.loads(path.read_text())
    METADATA[name](data)
    path.write_text(json.dumps(data))
    sealed_again(store_path)
    if name not in ("a node of another kind",):
        with pytest.raises(StoreError):
            read_stack(stack)
    assert list(verify(AtlasStore.open(store_path)))
    rebuild(AtlasStore.open(store_path))
    assert "llama" not in AtlasStore.open(store_path).models()
    assert run("models", store=store_path).exit_code == 0


def test_sound_arrays_pass(store_path: Path) -> None:
    group = open_stack(stack_of(store_path))
    assert sum(np.asarray(array[...]).nbytes for _, array in group.arrays()) < LARGEST_STACK


# -- SQL in a stranger's store -----------------------------------------------------------------------------


def test_a_statistic_cannot_carry_sql(store_path: Path, tmp_path: Path) -> None:
    """The type of a user's column comes from attributes and goes into a statement: it is one of three words."""
    (tmp_path / "mine.py").write_text(MINE)
    assert run("derive", tmp_path / "mine.py", store=store_path).exit_code == 0
    stolen = tmp_path / "stolen.csv"
    for key, value in (
        ("sql_type", f"DOUBLE; COPY (SELECT 1) TO '{stolen}'; --"),
        ("sql_type", "DOUBLE DEFAULT (SELECT count(*) FROM heads)"),
    ):
        for path in (store_path / "arrays.zarr").glob("llama*/user_mine*/*/mine/zarr.json"):
            data = json.loads(path.read_text())
            data["attributes"][key] = value
            path.write_text(json.dumps(data))
        sealed_again(store_path)
        run("rebuild", store=store_path)
        run("verify", store=store_path)
        assert "llama" not in AtlasStore.open(store_path).models()
        assert not stolen.exists()


@pytest.mark.parametrize("name", ['x" DOUBLE; DROP TABLE models; --', "../../x", "a b", "é-", ""])
def test_the_name_of_a_statistic_is_a_name(name: str, store_path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    assert run("derive", tmp_path / "mine.py", store=store_path).exit_code == 0
    for path in (store_path / "arrays.zarr").glob("llama*/user_mine*/zarr.json"):
        data = json.loads(path.read_text())
        data["attributes"]["kind"] = "user_" + name
        path.write_text(json.dumps(data))
    sealed_again(store_path)
    run("rebuild", store=store_path)
    assert "bert" in AtlasStore.open(store_path).models()


def test_a_view_in_place_of_a_table_reads_nothing(store_path: Path, outside: Path) -> None:
    """A view is a query that the stranger wrote and the reader runs."""
    secret = outside / "secret.txt"
    for table in ("models", "heads"):
        changed_catalogue(
            store_path,
            f"ALTER TABLE {table} RENAME TO old_{table}",
            f"CREATE VIEW {table} AS SELECT * REPLACE ((SELECT content FROM read_text('{secret}')) AS model) "
            f"FROM old_{table}",
        )
    before = files(outside)
    with pytest.raises(HeadatlasError):
        AtlasStore.open(store_path).models()
    reading_commands(store_path)
    assert sorted(AtlasStore.open(store_path).models()) == ["bert", "llama"], "rebuild has made the tables again"
    assert files(outside) == before


def test_macros_and_other_tables_of_a_stranger_do_no_harm(store_path: Path, outside: Path) -> None:
    secret = outside / "secret.txt"
    changed_catalogue(
        store_path,
        f"CREATE MACRO spy() AS TABLE SELECT * FROM read_text('{secret}')",
        "CREATE MACRO median(x) AS 42",
        "CREATE TABLE incoming (a INTEGER)",
        'CREATE TABLE "\'; DROP TABLE heads; --" ("\x1b[2J" INTEGER)',
        "COMMENT ON TABLE heads IS '\x1b]0;owned\x07 ''; DROP TABLE heads; --'",
        f"CREATE VIEW spying AS SELECT * FROM read_csv('{outside}/*.csv')",
    )
    assert run("sql", "FROM spy()", store=store_path).exit_code == 1
    assert run("sql", "FROM spying", store=store_path).exit_code == 1
    reading_commands(store_path)
    result = run("schema", "heads", store=store_path)
    assert "\x1b" not in result.output
    assert run("sql", "SELECT count(*) FROM heads", store=store_path).exit_code == 0


def test_a_catalogue_of_noise_is_one_error(store_path: Path) -> None:
    (store_path / "catalog.duckdb").write_bytes(os.urandom(50_000))
    assert run("models", store=store_path).exit_code == 1
    assert run("rebuild", store=store_path).exit_code == 0
    assert run("models", store=store_path).exit_code == 0


# -- SQL that a user is given ------------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[tuple[int, list[bytes]]]:
    """A port, and what has been sent to it."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                heard.append(b"connected")
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1], heard


ESCAPES = [
    "COPY heads TO '{new}'",
    "COPY (SELECT 1) TO '{new}' (FORMAT parquet)",
    "COPY models FROM '{dir}/secret.csv'",
    "ATTACH '{new}' AS other",
    "ATTACH '{dir}/secret.txt' AS other (READ_ONLY)",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{new}'",
    "FORCE INSTALL spatial",
    "SELECT * FROM read_csv('{dir}/secret.csv')",
    "SELECT * FROM read_text('{dir}/*')",
    "SELECT * FROM read_blob('{dir}/secret.txt')",
    "SELECT * FROM read_json('{dir}/secret.json')",
    "SELECT * FROM read_parquet('{dir}/deep/*.parquet')",
    "SELECT * FROM parquet_metadata('{dir}/deep/secret.parquet')",
    "SELECT * FROM parquet_scan('{dir}/deep/secret.parquet')",
    "SELECT * FROM sniff_csv('{dir}/secret.csv')",
    "SELECT * FROM glob('{dir}/*')",
    "FROM '{dir}/secret.csv'",
    'FROM "{dir}/secret.csv"',
    "FROM '{dir}/*.json'",
    "SELECT * FROM read_csv('http://127.0.0.1:{port}/x.csv')",
    "FROM 'http://127.0.0.1:{port}/x.csv'",
    "FROM read_parquet('s3://127.0.0.1:{port}/x')",
    "SELECT getenv('OF_THE_USER')",
    "PRAGMA database_list",
    "PRAGMA enable_external_access",
    "SET enable_external_access = true",
    "RESET enable_external_access",
    "SET temp_directory = '{new}'",
    "SET threads = 1",
    "EXPORT DATABASE '{new}'",
    "IMPORT DATABASE '{dir}'",
    "CREATE MACRO m() AS 1",
    "CREATE TEMP TABLE t AS SELECT 1",
    "CREATE OR REPLACE TEMP MACRO closure_by_model(x) AS TABLE SELECT 1",
    "DROP TABLE heads",
    "DELETE FROM heads",
    "UPDATE heads SET closure = 1",
    "INSERT INTO heads SELECT * FROM heads",
    "CHECKPOINT",
    "VACUUM",
    "CALL pragma_version()",
    "USE memory",
    "BEGIN",
    "DETACH atlas",
    "EXECUTE x",
    "PREPARE x AS SELECT 1",
    "SELECT 1; COPY heads TO '{new}'",
    "SELECT 1 /* ; */ ; DROP TABLE heads",
    "SELECT 1 -- \n; COPY heads TO '{new}'",
    "EXPLAIN ANALYZE COPY heads TO '{new}'",
    "EXPLAIN COPY heads TO '{new}'",
    "FROM query('COPY heads TO ''{new}''')",
    "FROM query_table('{dir}/secret.csv')",
    "FROM query('SELECT * FROM read_text(''{dir}/secret.txt'')')",
    "FROM values",
    "FROM text",
    "FROM connection",
    "FROM rows",
    "FROM pl",
    "SELECT * FROM frame",
    "FROM catalogue",
    "WITH x AS (INSERT INTO heads SELECT * FROM heads RETURNING 1) FROM x",
    "FROM duckdb_secrets(which_secret => '')",
    "CREATE SECRET (TYPE s3)",
    "SELECT * FROM which_secret('{dir}', 's3')",
    "FROM duckdb_logs()",
    "SELECT write_log('x')",
    "FROM write_blob('{new}')",
    "SELECT * FROM read_duckdb('{dir}/secret.txt')",
    "FROM sqlite_scan('{dir}/secret.txt', 't')",
    "COMMENT ON TABLE heads IS 'x'",
    "ALTER TABLE heads ADD COLUMN x INTEGER",
    "SUMMARIZE '{dir}/secret.csv'",
    "DESCRIBE '{dir}/secret.csv'",
    "SHOW ALL TABLES; DROP TABLE heads",
    "PIVOT '{dir}/secret.csv' ON a",
]


HARMLESS = {
    "FROM duckdb_logs()",
    "FROM duckdb_secrets(which_secret => '')",
    "SELECT write_log('x')",
    "EXPLAIN COPY heads TO '{new}'",
    "CALL pragma_version()",
}
"""Those of them that may give rows: they look at the catalogue or at the query itself."""


def test_no_query_leaves_the_store(
    sealed_store: Path, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By files before and after, a secret that no answer may show, and a port that nobody may call."""
    monkeypatch.chdir(outside)
    monkeypatch.setenv("OF_THE_USER", SECRET)
    before, stored, new = files(tmp_path), files(sealed_store), tmp_path / "new"
    answered = set()
    with listening() as (port, heard), open_atlas(sealed_store) as atlas:
        for number, query in enumerate(ESCAPES):
            text = query.format(new=new, dir=outside, port=port)
            for variant in (
                text,
                f"SELECT * FROM ({text})",
                f"SELECT (SELECT count(*) FROM ({text}))",
                f"/* ; */ {text};",
            ):
                try:
                    rows = atlas.sql(variant)
                except HeadatlasError as error:
                    assert SECRET not in str(error)  # noqa: PT017
                else:
                    assert SECRET not in str(rows.rows())
                    answered.add(query)
                assert not new.exists(), text
            if number % 8 == 0:
                run("sql", text, store=sealed_store)
                run("export", text, "-o", new.with_suffix(".csv"), store=sealed_store)
    assert answered <= HARMLESS
    assert files(tmp_path) == before
    assert files(sealed_store) == stored
    assert heard == []


INJECTIONS = [
    "'; DROP TABLE heads; --",
    '"',
    "llama'",
    "llama' OR '1'='1",
    "../../etc/passwd",
    "llama\0",
    "a\nb",
    "\u202eamall",
    "x" * 300,
    "--store",
    "-h",
    "%s",
    "{0}",
    "$model",
    ":model",
    "llama; COPY heads TO '/tmp/x'",
    "é日本",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_names_are_values_and_never_statements(text: str, sealed_store: Path, tmp_path: Path) -> None:
    before, stored = files(tmp_path), files(sealed_store)
    separated = text if not text.startswith("-") else None
    for arguments in (
        ("ask", separated),
        ("ask", "strongest-heads", "--set", f"model={text}"),
        ("ask", "closure-by-layer", "--set", f"{text}=1"),
        ("describe", "--", text),
        ("closure", "--", text),
        ("schema", "--", text),
        ("trajectory", "--", text),
        ("export", separated),
        ("export", "closure-by-model", "--set", f"model={text}"),
    ):
        if None not in arguments:
            result = run(*[str(argument) for argument in arguments], store=sealed_store)
            assert result.exit_code in (0, 1, 2)
    assert files(tmp_path) == before
    assert files(sealed_store) == stored


QUESTION_FILES = [
    "../outside.sql",
    "a b.sql",
    "-x.sql",
    "\u202e.sql",
    "a\nb.sql",
    "CAPITAL.sql",
    "x" * 100 + ".sql",
    ".sql",
    "a;b.sql",
]


@pytest.mark.parametrize("name", QUESTION_FILES)
def test_questions_of_a_strangers_store(name: str, store_path: Path, outside: Path) -> None:
    """A question is a query in a file: it can do what ``sql`` can, and its file's name is checked."""
    (store_path / "queries").mkdir(exist_ok=True)
    body = f"-- question: reads a file\nSELECT content FROM read_text('{outside}/secret.txt')\n"
    (store_path / "queries" / name).write_text(body)
    (store_path / "queries" / "good.sql").write_text(body)
    assert run("ask", store=store_path).exit_code == 0
    assert run("ask", "good", store=store_path).exit_code == 1
    run("ask", "--", name.removesuffix(".sql"), store=store_path)


def test_terminals_are_not_steered_by_names(store_path: Path) -> None:
    changed_catalogue(store_path, "UPDATE models SET source = '\x1b[2J\x1b]0;owned\x07\u202e' || source")
    for arguments in (("models",), ("sql", 'SELECT source, source AS "\x1b[1m" FROM models')):
        output = run(*arguments, store=store_path).output
        assert not {"\x1b", "\x07", "\u202e"} & {*output}
    assert "\\x1b[2J" in run("sql", "SELECT source FROM models", store=store_path).output
