"""Stores of other versions of the format or the program, and stores that can only be read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import duckdb
import pytest
import torch
from click.testing import CliRunner, Result

from cli import main
from query import open_atlas
from stats.errors import StoreError
from store import formats, migration
from store.atlas import AtlasStore, Derivation
from store.derivation import derive
from store.formats import FORMAT, NEEDS, Step
from store.integrity import rebuild, remove, verify
from store.migration import migrate
from store.version import tool_version
from tests.making_store import DATA, answers

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of format 1 that is kept in the repository."""
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(DATA / "store-format-1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "atlas"


@pytest.fixture
def store(kept: Path, tmp_path: Path) -> AtlasStore:
    return AtlasStore.open(Path(shutil.copytree(kept, tmp_path / "atlas")))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def set_root(store: AtlasStore, **attributes: Any) -> None:
    path = store.arrays_path / "zarr.json"
    node = json.loads(path.read_text())
    node["attributes"] = attributes
    path.write_text(json.dumps(node, indent=2))


def test_a_store_of_format_1_answers_as_it_did(store: AtlasStore) -> None:
    written = json.loads((DATA / "store-format-1.json").read_text())
    assert list(verify(store)) == []
    assert answers(store.root) == written
    assert sum(len(rows) for rows in written.values()) > 100
    rebuild(store)
    assert answers(store.root) == written
    assert run("ask", "count-heads", "--store", store.root).exit_code == 0


def renamed(path: PurePosixPath, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A step: format 0 called a model's content hash ``weights``, and an operator's device ``machine``."""
    names = {0: ("weights", "content_hash"), 1: ("machine", "device")}
    old, new = names.get(len(path.parts), ("", ""))
    return {new if name == old else name: value for name, value in attributes.items()}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    known = Step("a model's weights are its content_hash", renamed)
    monkeypatch.setitem(formats.STEPS, 0, known)
    return known


@pytest.fixture
def older(store: AtlasStore, step: Step) -> AtlasStore:
    """The same store as an older program would have written it: by the opposite renaming, sealed by hand."""
    import hashlib

    back = {"content_hash": "weights", "device": "machine"}
    for manifest in store.manifests_path.glob("*.json"):
        content = json.loads(manifest.read_text())
        for name in ("zarr.json", f"{content['unit']}/zarr.json"):
            path = store.arrays_path / content["group"] / name
            node = json.loads(path.read_text())
            node["attributes"] = {back.get(key, key): value for key, value in node["attributes"].items()}
            path.write_text(json.dumps(node, indent=2))
            data = path.read_bytes()
            content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps({key: content[key] for key in ("group", "unit", "files")}, indent=1))
    set_root(store, headatlas_format=0)
    return AtlasStore(store.root)


def chunks(store: AtlasStore) -> dict[str, bytes]:
    files = (path for path in store.arrays_path.rglob("*") if path.is_file() and path.name != "zarr.json")
    return {path.relative_to(store.arrays_path).as_posix(): path.read_bytes() for path in files}


def test_an_older_store_is_read_and_offers_to_migrate(older: AtlasStore) -> None:
    written = json.loads((DATA / "store-format-1.json").read_text())
    assert answers(older.root) == written
    assert run("closure", "--store", older.root).exit_code == 0
    assert run("verify", "--store", older.root).output.startswith("ok")
    for command in (["rebuild"], ["remove", "tiny-bert"], ["derive", "--remove", "wide"], ["merge", older.root]):
        result = run(*command, "--store", older.root)
        assert result.exit_code == 1, command
        assert "headatlas migrate" in result.stderr
        assert "Traceback" not in result.output


def test_migrating_changes_attributes_and_keeps_a_backup(older: AtlasStore) -> None:
    before = chunks(older)
    saved = {path: path.read_bytes() for path in older.root.rglob("*") if path.name == "zarr.json"}
    result = run("migrate", "--store", older.root)
    assert result.exit_code == 0, result.output
    assert "a model's weights are its content_hash" in result.stdout
    assert chunks(older) == before
    store = AtlasStore.open(older.root)
    assert list(verify(store)) == []
    assert answers(store.root) == json.loads((DATA / "store-format-1.json").read_text())
    root = json.loads((store.arrays_path / "zarr.json").read_text())["attributes"]
    assert root == {FORMAT: 1, NEEDS: tool_version()}
    for path, data in saved.items():
        if "backups" not in path.parts:
            assert (store.root / "backups" / "format-0" / path.relative_to(store.root)).read_bytes() == data
    assert "nothing to do" in run("migrate", "--store", store.root).stdout
    remove(store, "tiny-bert")


def test_the_backup_can_be_put_back(older: AtlasStore) -> None:
    before = {path: path.read_bytes() for path in older.root.rglob("*") if path.is_file() and path.name != "write.lock"}
    migrate(older.root)
    shutil.copytree(older.root / "backups" / "format-0", older.root, dirs_exist_ok=True)
    assert {path: path.read_bytes() for path in before} == before


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_migration_that_ended_anywhere_can_be_repeated(every: bool, older: AtlasStore, tmp_path: Path) -> None:
    written = json.loads((DATA / "store-format-1.json").read_text())
    original = Path.replace
    count, last = 0, 10**9

    def replace(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count > last:
            raise Crash
        return original(path, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        migrate(Path(shutil.copytree(older.root, tmp_path / "counted")))
        total = count
        tail = range(total - 9, total)
        for last in sorted({0, 1, total // 3, total // 2, *tail} if every else {total // 2, total - 4, total - 1}):
            count = 0
            path = Path(shutil.copytree(older.root, tmp_path / f"crash-{last}"))
            with pytest.raises(Crash):
                migrate(path)
            assert answers(path) == written, last
            count = -(10**9)
            migrate(path)
            assert answers(path) == written, last
            assert [each for each in verify(AtlasStore.open(path)) if each.kind != "leftover"] == [], last
            assert [each.name for each in (path / "backups").iterdir()] == ["format-0"]
            shutil.rmtree(path)


def test_damage_stops_a_migration_before_it_begins(older: AtlasStore) -> None:
    file = next(iter(sorted(older.arrays_path.rglob("sigma/c/*/*/*"))))
    file.write_bytes(b"x" + file.read_bytes()[1:])
    before = {path: path.read_bytes() for path in older.arrays_path.rglob("zarr.json")}
    with pytest.raises(StoreError, match="not as they were sealed"):
        migrate(older.root)
    assert {path: path.read_bytes() for path in older.arrays_path.rglob("zarr.json")} == before


def test_an_older_store_that_cannot_be_read_says_so(older: AtlasStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.STEPS, 0, Step("all is new", renamed, readable=False))
    result = run("closure", "--store", older.root)
    assert result.exit_code == 1
    assert "headatlas migrate" in result.stderr
    assert run("migrate", "--store", older.root).exit_code == 0
    assert run("closure", "--store", older.root).exit_code == 0


def test_a_format_without_a_step_is_refused(store: AtlasStore) -> None:
    set_root(store, headatlas_format=0)
    for command in ("closure", "migrate", "verify"):
        result = run(command, "--store", store.root)
        assert result.exit_code == 1
        assert "no longer known" in result.stderr


@pytest.mark.parametrize("command", ["closure", "migrate", "verify", "rebuild"])
def test_a_newer_store_says_what_is_needed(store: AtlasStore, command: str) -> None:
    set_root(store, headatlas_format=2, headatlas_needs="0.9.0")
    result = run(command, "--store", store.root)
    assert result.exit_code == 1
    assert "upgrade to headatlas 0.9.0 or later" in result.stderr


@pytest.mark.parametrize("version", ["1", True, None, -1, 1.0, [1]])
def test_a_version_that_is_none_is_refused(store: AtlasStore, version: Any) -> None:
    set_root(store, headatlas_format=version)
    with pytest.raises(StoreError, match="no version"):
        AtlasStore.open(store.root)


@pytest.mark.parametrize(
    "change",
    ["ALTER TABLE nulls DROP COLUMN p_tail", "DROP TABLE capacities", "ALTER TABLE models RENAME step TO steps"],
)
def test_a_catalogue_of_another_version_is_made_again(store: AtlasStore, change: str) -> None:
    with duckdb.connect(str(store.catalogue_path)) as connection:
        connection.execute(change)
    with pytest.raises(StoreError, match="headatlas rebuild"):
        open_atlas(store.root)
    for command in (["closure"], ["sql", "FROM heads"], ["models"], ["remove", "tiny-bert"]):
        result = run(*command, "--store", store.root)
        assert result.exit_code == 1, command
        assert "another version" in result.stderr
        assert "headatlas rebuild" in result.stderr
    assert run("rebuild", "--store", store.root).exit_code == 0
    assert answers(store.root) == json.loads((DATA / "store-format-1.json").read_text())
    assert list(verify(store)) == []


READING = """
set -eu
mount -o bind "$STORE" "$PLACE"
mount -o remount,bind,ro "$PLACE"
if touch "$PLACE/x" 2>/dev/null; then exit 77; fi
exec "$PYTHON" -m tests.reading "$PLACE" "$OUT"
"""


def can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_every_reading_command_works_on_a_read_only_file_system(store: AtlasStore, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs to mount")
    place, out = tmp_path / "place", tmp_path / "out"
    place.mkdir()
    out.mkdir()
    where = {"STORE": str(store.root), "PLACE": str(place), "OUT": str(out), "PYTHON": sys.executable}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", READING],
        env=os.environ | where,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_writing_commands_say_that_a_store_can_only_be_read(
    store: AtlasStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(StoreError, match="can only be read"):
        derive(store, "tiny-bert", "raw", Derivation("riemannian", None, 0), torch.device("cpu"), lambda *_: None)
    for command in (["rebuild"], ["remove", "tiny-bert"], ["merge", store.root]):
        result = run(*command, "--store", store.root)
        assert result.exit_code == 1
        assert "can only be read" in result.stderr


def test_the_mechanism_knows_every_format_up_to_this_one() -> None:
    assert formats.steps_between(1, migration.FORMAT_VERSION, "") == []
    assert sorted(formats.STEPS) == list(range(1, migration.FORMAT_VERSION))
