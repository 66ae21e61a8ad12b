"""Ingests in units, in processes, on a cluster and from a list give what one process gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import cli
import store.units
from ingest.pipeline import ComputeSettings
from query.commands.options import ByteSize
from stats.errors import StoreError
from store.atlas import AtlasStore
from store.units import Source, Unit, part_of, run_in_processes, run_unit
from tests import checkpoints

ROOT = Path(__file__).parent.parent
LAYERS = 6


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_safetensors(checkpoints.llama(layers=LAYERS), tmp_path_factory.mktemp("units") / "tiny")


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checksums of the arrays that one process writes."""
    path = tmp_path_factory.mktemp("reference") / "atlas"
    assert invoke("ingest", checkpoint, "--store", path).exit_code == 0
    return arrays_of(path)


def arrays_of(path: Path) -> dict[str, str]:
    """Checksum of every array file of the only model."""
    (model,) = AtlasStore.open(path).models().values()
    group = path / "arrays.zarr" / model.array_group / "raw"
    return {
        file.relative_to(group).as_posix(): sha256(file.read_bytes()).hexdigest()
        for file in sorted(group.rglob("*"))
        if file.is_file() and file != group / "zarr.json"
    }


def assert_same(path: Path, reference: dict[str, str]) -> None:
    assert arrays_of(path) == reference
    assert list((path / "staging").iterdir()) == []
    assert invoke("verify", "--store", path).exit_code == 0


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 40])
def test_parts_are_all_the_layers_once(count: int) -> None:
    layers = tuple(range(LAYERS))
    parts = [part_of(layers, number, count) for number in range(1, count + 1)]
    assert sum(parts, ()) == layers
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_units_in_any_order_and_assemble(checkpoint: Path, reference: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "atlas"
    assert invoke("ingest", checkpoint, "--store", path, "--unit", "3/3").exit_code == 0
    result = invoke("assemble", checkpoint, "--store", path)
    assert result.exit_code == 1
    assert "4 missing: decoder 0, decoder 1, decoder 2, decoder 3" in result.stderr
    assert AtlasStore.open(path).models() == {}
    assert invoke("ingest", checkpoint, "--store", path, "--unit", "1/3").exit_code == 0
    again = invoke("ingest", checkpoint, "--store", path, "--unit", "1/3")
    assert "2 layers, 0 of them measured now" in again.stdout
    assert invoke("ingest", checkpoint, "--store", path, "--unit", "2/3").exit_code == 0
    assert invoke("assemble", checkpoint, "--store", path).exit_code == 0
    assert_same(path, reference)


def test_assembling_notices_that_the_weights_are_others(checkpoint: Path, tmp_path: Path) -> None:
    path, source = tmp_path / "atlas", tmp_path / "tiny"
    checkpoints.save_safetensors(checkpoints.llama(layers=LAYERS), source)
    assert invoke("ingest", source, "--store", path, "--unit", "1/1").exit_code == 0
    checkpoints.save_safetensors(checkpoints.llama(layers=LAYERS, seed=5), source)
    assert invoke("assemble", source, "--store", path).exit_code == 0
    assert invoke("ingest", source, "--store", tmp_path / "other").exit_code == 0
    assert arrays_of(path) == arrays_of(tmp_path / "other")


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_parts_that_are_none(text: str, checkpoint: Path, tmp_path: Path) -> None:
    result = invoke("ingest", checkpoint, "--store", tmp_path / "atlas", "--unit", text)
    assert result.exit_code == 2
    assert not (tmp_path / "atlas").exists()


def test_worker_processes(checkpoint: Path, reference: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "atlas"
    result = invoke("ingest", checkpoint, "--store", path, "--workers", "2")
    assert result.exit_code == 0, result.stderr
    assert f"measuring in units, {LAYERS} of {LAYERS} layers" in result.stderr
    assert_same(path, reference)


def test_a_missing_operator_in_worker_processes(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "atlas"
    assert invoke("ingest", checkpoint, "--store", path).exit_code == 0
    result = invoke("ingest", checkpoint, "--store", path, "--operator", "both", "--workers", "1")
    assert result.exit_code == 0, result.stderr
    assert "folded" in result.stdout
    assert "raw" not in result.stdout
    assert invoke("verify", "--store", path).exit_code == 0


def test_a_killed_worker_costs_its_unit_only(checkpoint: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """The first unit kills its process once, in the middle."""
    path = tmp_path / "atlas"
    AtlasStore.open_or_create(path)
    source = Source(str(checkpoint), ("raw",))
    settings = ComputeSettings(device="cpu", threads=1)
    units = [Unit(path, source, "tiny", settings, number, 3) for number in (1, 2, 3)]
    killer = threading.Thread(target=kill_a_child, args=(path,))
    killer.start()
    manifests = []
    run_in_processes(units, 1, manifests.append)
    killer.join()
    assert sorted(manifest.number for manifest in manifests) == [1, 2, 3]
    assert sum(manifest.measured for manifest in manifests) < LAYERS
    assert invoke("ingest", checkpoint, "--store", path, "--device", "cpu").exit_code == 0
    assert_same(path, reference)


def kill_a_child(path: Path) -> None:
    """Kill the worker that has measured a layer."""
    while not list((path / "staging").glob("*/*.npz")):
        time.sleep(0.005)
    kill_children()


def kill_children() -> None:
    """Kill the worker processes of this one."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    for child in {number for listed in children for number in listed.read_text().split()}:
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)


def test_workers_that_always_die(checkpoint: Path, tmp_path: Path) -> None:
    unit = Unit(tmp_path / "atlas", Source(str(checkpoint), ("raw",)), "tiny", ComputeSettings(device="cpu"), 1, 1)
    ended = threading.Event()

    def kill_them_all() -> None:
        while not ended.is_set():
            kill_children()
            time.sleep(0.05)

    killer = threading.Thread(target=kill_them_all)
    killer.start()
    try:
        with pytest.raises(StoreError, match="worker processes die"):
            run_in_processes([unit], 1, lambda _: None)
    finally:
        ended.set()
        killer.join()


def test_an_error_in_a_worker_is_the_error_of_the_command(tmp_path: Path) -> None:
    path = checkpoints.save_safetensors(checkpoints.llama(layers=4), tmp_path / "tiny")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])
    result = invoke("ingest", path, "--store", tmp_path / "atlas", "--workers", "1")
    assert result.exit_code == 1
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A scheduler and two workers, each a process of its own."""
    from distributed import LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**options) as running:
        yield running.scheduler_address


def test_a_dask_cluster(cluster: str, checkpoint: Path, reference: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "atlas"
    result = invoke("ingest", checkpoint, "--store", path, "--cluster", cluster)
    assert result.exit_code == 0, result.stderr
    assert_same(path, reference)


def test_no_scheduler(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.units, "CONNECT_SECONDS", 0.5)
    result = invoke("ingest", checkpoint, "--store", tmp_path / "atlas", "--cluster", "tcp://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no scheduler answers" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_list_of_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    bert = checkpoints.save_safetensors(checkpoints.bert(), tmp_path / "a bert")
    broken = tmp_path / "broken"
    broken.mkdir()
    listed = tmp_path / "list.txt"
    listed.write_text(f"# two that are good\n{checkpoint}\n'{bert}' named\n\n{broken}\n")
    path = tmp_path / "atlas"
    first = invoke("ingest", "--from", listed, "--store", path)
    assert first.exit_code == 1
    outcomes = [
        [word for word in line.split() if word in ("done", "failed", "skipped")] for line in first.stdout.splitlines()
    ]
    assert [found for found in outcomes if found] == [["done"], ["done"], ["failed"]]
    assert first.stderr.splitlines()[-1] == "2 done, 0 skipped, 1 failed"
    assert sorted(AtlasStore.open(path).models()) == ["named", "tiny"]
    broken.rmdir()
    checkpoints.save_safetensors(checkpoints.llama(seed=3), broken)
    second = invoke("ingest", "--from", listed, "--store", path)
    assert second.exit_code == 0
    assert second.stderr.splitlines()[-1] == "1 done, 2 skipped, 0 failed"


@pytest.mark.parametrize("line", ["a b c", "'open"])
def test_a_line_that_is_not_understood(line: str, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(f"# a comment\n{line}\n")
    result = invoke("ingest", "--from", listed, "--store", tmp_path / "atlas")
    assert result.exit_code == 1
    assert "list.txt, line 2" in result.stderr


@pytest.mark.parametrize(("text", "size"), [("500MB", 500e6), ("8GiB", 8 * 2**30), ("1.5 kb", 1500), ("77", 77)])
def test_sizes(text: str, size: float) -> None:
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GB", "-3MB", "5 apples", "0", "inf GB"])
def test_sizes_that_are_none(text: str, checkpoint: Path, tmp_path: Path) -> None:
    assert invoke("ingest", checkpoint, "--store", tmp_path / "atlas", "--memory", text).exit_code == 2


def test_a_budget_that_one_layer_exceeds(checkpoint: Path, reference: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "atlas"
    result = invoke("ingest", checkpoint, "--store", path, "--memory", "1kb")
    assert result.exit_code == 1
    assert "the memory budget is too small for one layer" in result.stderr
    assert invoke("ingest", checkpoint, "--store", path, "--memory", "1GB").exit_code == 0
    assert_same(path, reference)


def test_a_unit_in_a_process_of_its_own(checkpoint: Path, reference: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "atlas"
    command = [sys.executable, "cli.py", "ingest", str(checkpoint), "--store", str(path), "--unit"]
    processes = [subprocess.Popen([*command, f"{number}/2"], cwd=ROOT, stdout=subprocess.DEVNULL) for number in (1, 2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert run_unit(Unit(path, Source(str(checkpoint), ("raw",)), "tiny", ComputeSettings(), 1, 1)).measured == 0
    assert invoke("assemble", checkpoint, "--store", path).exit_code == 0
    assert_same(path, reference)
