"""Asking a store on a web server: the same answers as of the directory, nothing fetched twice, nothing written."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cli import main
from query import open_atlas
from stats.errors import CheckpointError, HeadatlasError, QueryError, StoreError
from tests.making_store import DATA, QUERIES
from tests.range_server import RangeServer, serving

CATALOGUE = "/atlas/catalog.duckdb"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(DATA / "store-format-1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "atlas"


@pytest.fixture
def server(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files: dict[str, bytes | Path] = {
        f"/atlas/{path.relative_to(kept).as_posix()}": path for path in kept.rglob("*") if path.is_file()
    }
    with serving(files) as running:
        running.tags[CATALOGUE] = '"one"'
        yield running


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_answers_and_arrays_are_those_of_the_directory(server: RangeServer, kept: Path) -> None:
    with open_atlas(f"{server.address}/atlas/") as atlas, open_atlas(kept) as local:
        for query in QUERIES.values():
            assert atlas.sql(query).equals(local.sql(query))
        for name in ("core", "sigma", "eigenvalue"):
            for place in ({}, {"layer": 1}, {"layer": 0, "head": 2}):
                mine = atlas.array("tiny llama", name, operator="folded", **place)
                np.testing.assert_array_equal(mine, local.array("tiny llama", name, operator="folded", **place))
        with pytest.raises(QueryError, match="no array"):
            atlas.array("tiny llama", "nothing")


def test_nothing_is_fetched_twice_until_it_changes(server: RangeServer, kept: Path) -> None:
    size = (kept / "catalog.duckdb").stat().st_size
    for _ in range(3):
        with open_atlas(f"{server.address}/atlas") as atlas:
            atlas.array("tiny-bert", "sigma")
    assert size <= server.sent("catalog.duckdb") < 1.1 * size
    assert sum(request.path.endswith("sigma/zarr.json") for request in server.requests) == 1
    server.tags[CATALOGUE] = '"two"'
    with open_atlas(f"{server.address}/atlas") as atlas:
        assert atlas.sql("FROM models").height == 2
    assert server.sent("catalog.duckdb") >= 2 * size


def test_a_file_that_is_not_as_sealed_is_refused(server: RangeServer, kept: Path) -> None:
    (path,) = [name for name in server.files if "/raw/decoder/sigma/c/" in name]
    data = bytearray(Path(str(server.files[path])).read_bytes())
    data[-1] ^= 1
    server.files[path] = bytes(data)
    with open_atlas(f"{server.address}/atlas") as atlas, pytest.raises(QueryError, match="changed or is damaged"):
        atlas.array("tiny llama", "sigma")


def test_commands_read_and_do_not_write(server: RangeServer, tmp_path: Path) -> None:
    where = f"{server.address}/atlas"
    for command in (["models"], ["closure"], ["sql", "FROM heads LIMIT 1"], ["describe", "tiny-bert"]):
        result = run(*command, "--store", where)
        assert result.exit_code == 0, result.output
    for command in (
        ["verify"],
        ["rebuild"],
        ["remove", "tiny-bert"],
        ["pack", tmp_path / "x"],
        ["null", "--draws", "99"],
    ):
        result = run(*command, "--store", where)
        assert result.exit_code == 1, result.output
        assert "can only be asked" in result.stderr, result.output


@pytest.mark.parametrize("address", ["ftp://host/atlas", "file:///tmp/atlas"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(StoreError, match="not read"):
        open_atlas(address)


def test_nothing_there_is_said(server: RangeServer) -> None:
    with pytest.raises(CheckpointError, match="does not have the file"):
        open_atlas(f"{server.address}/other")
    with pytest.raises(HeadatlasError):
        open_atlas("http://127.0.0.1:9/atlas")
