"""Several processes on one store: writers queue and say for whom, readers never fail or see half a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import store.atlas
from query import open_atlas
from stats.errors import QueryError, StoreError
from store.atlas import AtlasStore
from store.integrity import remove
from store.locking import Holder, Lock, is_held, publishing
from tests import checkpoints
from tests.ingesting import ingest_into

ROOT = Path(__file__).parent.parent

HOLDING = """
import sys, time
from pathlib import Path
from store.locking import publishing
with publishing(Path(sys.argv[1]), 5):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that publishes for a while."""
    command = [sys.executable, "-c", HOLDING, str(path), str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_writer_says_for_whom_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.locking.FIRST_MESSAGE_SECONDS", 0.1)
    path, told = tmp_path / "write.lock", []
    with holder(path, 1.0) as process:
        with publishing(path, 20, told.append):
            own = Holder.of(path)
            assert own is not None
            assert own.pid == os.getpid()
        assert process.wait() == 0
    (line,) = told
    known = f"waiting for PID {process.pid} on {own.host}, which has been publishing for "
    assert line.startswith(known)
    assert str(path) in line
    assert path.read_bytes() == b""


def test_waiting_has_a_limit_and_a_killed_holder_is_none(tmp_path: Path) -> None:
    path = tmp_path / "write.lock"
    with holder(path, 60) as process:
        assert is_held(path)
        with pytest.raises(StoreError) as caught, publishing(path, 0.2):
            pass
        assert f"PID {process.pid} on " in str(caught.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = Holder.of(path)
    assert left is not None
    assert left.pid == process.pid
    assert not is_held(path)
    with publishing(path, 0.0):
        pass


def test_a_holder_on_another_host_has_advice(tmp_path: Path) -> None:
    path = tmp_path / "write.lock"
    lock = Lock(path)
    assert lock.acquire()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "command": "headatlas ingest x", "since": time.time()}))
    with pytest.raises(StoreError, match="PID 7 on elsewhere") as caught, publishing(path, 0.0):
        pass
    assert "if elsewhere has crashed" in str(caught.value.remedy)
    lock.release()


def test_a_lock_file_that_was_deleted_is_no_lock(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    (tmp_path / "lock").unlink()
    assert second.acquire()
    assert is_held(tmp_path / "lock")
    first.release()
    assert is_held(tmp_path / "lock")
    second.release()


def test_a_file_replaced_while_it_is_locked_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, replaced = tmp_path / "lock", os.open, []

    def opened(name: Path, *arguments: int) -> int:
        descriptor = real(name, *arguments)
        if not replaced:
            replaced.append(name)
            path.unlink()
            path.touch()
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr("store.locking.os.open", opened)
        lock = Lock(path)
        assert lock.acquire()
    assert replaced
    assert is_held(path)
    lock.release()


def test_shared_locks_keep_an_exclusive_one_out(tmp_path: Path) -> None:
    one, two, alone = (Lock(tmp_path / "lock") for _ in range(3))
    assert one.acquire(shared=True)
    assert two.acquire(shared=True)
    assert not alone.acquire()
    one.release()
    assert is_held(tmp_path / "lock")
    two.release()
    assert alone.acquire()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 3}', "\udcff"])
def test_a_lock_file_with_something_else_in_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "write.lock"
    path.write_text(text, errors="surrogateescape")
    assert Holder.of(path) is None
    with publishing(path, 0.0):
        assert Holder.of(path) is not None


def test_the_time_limit_is_the_users(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADATLAS_LOCK_SECONDS", "0.05")
    atlas = AtlasStore.open(store_path)
    with atlas.write_lock(), pytest.raises(StoreError, match=r"within 0\.05 seconds"):
        remove(atlas, "bert")
    monkeypatch.setenv("HEADATLAS_LOCK_SECONDS", "soon")
    with pytest.raises(StoreError, match="no number"):
        remove(atlas, "bert")
    assert set(atlas.models()) == {"bert", "llama"}
    assert store.atlas.LOCK_SECONDS == 120


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "removed"])
def test_arrays_that_go_while_a_reader_has_the_store_open(store_path: Path, tmp_path: Path, replaced: bool) -> None:
    """The catalogue it opened still answers; of the arrays it is told that they are gone."""
    with open_atlas(store_path) as atlas:
        before = atlas.sql("FROM heads ORDER BY ALL")
        assert atlas.array("llama", "core").shape == (3, 4, 8, 8)
        if replaced:
            other = checkpoints.save_safetensors(checkpoints.llama(layers=3, seed=4), tmp_path / "other")
            ingest_into(store_path, other, "llama", replace=True)
        else:
            remove(AtlasStore.open(store_path), "llama")
        assert atlas.sql("FROM heads ORDER BY ALL").equals(before)
        with pytest.raises(QueryError, match="the store has changed since it was opened"):
            atlas.array("llama", "core")
        assert atlas.array("bert", "closure").shape == (2, 4)
    with open_atlas(store_path) as atlas:
        assert ("llama" in atlas.sql("FROM models")["model"].to_list()) is replaced


def test_chunks_that_go_while_they_are_read_are_no_values(store_path: Path) -> None:
    """Zarr reads a missing chunk as never written: without the manifest, nothing that was read counts."""
    atlas_store = AtlasStore.open(store_path)
    group = atlas_store.models()["llama"].array_group
    with open_atlas(store_path) as atlas:
        (atlas_store.arrays_path / group / "raw" / "decoder" / "core" / "c" / "1" / "0" / "0" / "0").unlink()
        atlas_store.manifest_path(group, "raw").unlink()
        with pytest.raises(QueryError, match="the store has changed"):
            atlas.array("llama", "core")


@pytest.mark.parametrize(
    ("processes", "seconds"), [(2, 2), pytest.param(8, 20, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_writers_and_readers_at_once(processes: int, seconds: int) -> None:
    command = [sys.executable, "-m", "tests.reliability.many", "--seconds", str(seconds)]
    command += ["--writers", str(processes), "--readers", str(processes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Total(published=")
