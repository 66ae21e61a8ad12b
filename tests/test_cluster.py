"""Ingests whose workers, schedulers and rivals die or stand in the way: the result is that of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from store.atlas import AtlasStore
from tests import checkpoints

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LAYERS = 8
PATIENCE = 120.0

HALT = """
import time
from pathlib import Path

from store.measured_layers import MeasuredLayers


def keep_and_halt(self, measurement, keep=MeasuredLayers.keep):
    keep(self, measurement)
    while len(list(self.directory.glob("*.npz"))) >= 2 and not Path({go!r}).exists():
        time.sleep(0.01)


MeasuredLayers.keep = keep_and_halt
"""
"""Run before anything else, it holds a process in the middle: two layers are kept, until a file says to go on."""

dask = pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="distributed is not installed")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python process whose output goes to files; what is left of them is killed at the end."""
    running: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, arguments)]
        with (tmp_path / f"{len(running)}.out").open("w") as out, (tmp_path / f"{len(running)}.err").open("w") as err:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=environment, text=True)
        process.args = tmp_path / f"{len(running)}.err"
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()


def errors(process: subprocess.Popen[str]) -> str:
    """What an ended process wrote to stderr."""
    return Path(str(process.args)).read_text()


def until(happened: Callable[[], object], watched: subprocess.Popen[str] | None = None) -> None:
    """Wait for something, as long as a process runs."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        assert watched is None or watched.poll() is None, errors(watched)
        time.sleep(0.003)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = checkpoints.llama(layers=LAYERS, d_model=256, heads=16, kv_heads=4, d_head=32)
    return checkpoints.save_safetensors(model, tmp_path_factory.mktemp("cluster") / "tiny")


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checksums of the arrays that one process writes."""
    path = tmp_path_factory.mktemp("reference") / "atlas"
    result = CliRunner().invoke(cli.main, ingest(checkpoint, path))
    assert result.exit_code == 0, result.stderr
    return arrays_of(path)


def ingest(checkpoint: Path, store: Path, *options: object) -> list[str]:
    """The arguments of the command."""
    return ["ingest", str(checkpoint), "--store", str(store), "--device", "cpu", *map(str, options)]


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
    verified = CliRunner().invoke(cli.main, ["verify", "--store", str(path)])
    assert verified.exit_code == 0, verified.output


def measured(store: Path) -> list[Path]:
    """Files of the layers measured so far."""
    return list((store / "staging").glob("*/*.npz"))


def scheduler(start: Start, folder: Path, name: str) -> tuple[subprocess.Popen[str], Path, str]:
    """A scheduler of its own, the file that names it, and its address."""
    file = folder / f"{name}.json"
    options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", file]
    process = start("-m", "distributed.cli.dask_scheduler", *options)

    def written() -> bool:
        return file.exists() and file.read_text().rstrip().endswith("}")

    until(written, process)
    return process, file, json.loads(file.read_text())["address"]


def worker(start: Start, file: Path, folder: Path, *options: object) -> subprocess.Popen[str]:
    """A worker of one thread that nobody starts again."""
    usual = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", folder / "scratch"]
    return start("-m", "distributed.cli.dask_worker", "--scheduler-file", file, *usual, *options)


def halting(folder: Path, then: str = "") -> Path:
    """A script that holds its process in the middle until ``folder/go`` is there."""
    script = folder / "halting.py"
    script.write_text(HALT.format(go=str(folder / "go")) + then)
    return script


@dask
def test_a_dask_worker_killed_in_the_middle(
    start: Start, checkpoint: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """The only worker is killed when it has two layers; another one that comes later measures the rest."""
    store = tmp_path / "atlas"
    _, file, address = scheduler(start, tmp_path, "scheduler")
    first = worker(start, file, tmp_path, "--preload", halting(tmp_path))
    command = start("cli.py", *ingest(checkpoint, store, "--cluster", address))
    until(lambda: len(measured(store)) == 2, command)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert command.poll() is None
    worker(start, file, tmp_path)
    assert command.wait(PATIENCE) == 0, errors(command)
    assert_same(store, reference)


@dask
def test_a_scheduler_killed_in_the_middle(
    start: Start, checkpoint: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """One error and no log of a library; the same command with a new scheduler goes on from what was measured."""
    store = tmp_path / "atlas"
    dying, file, address = scheduler(start, tmp_path, "first")
    old = worker(start, file, tmp_path, "--preload", halting(tmp_path))
    command = start("cli.py", *ingest(checkpoint, store, "--cluster", address))
    until(lambda: len(measured(store)) == 2, command)
    dying.kill()
    assert command.wait(PATIENCE) == 1
    told = errors(command)
    assert told.count("error: ") == 1
    assert "error: the scheduler went away" in told
    assert f"2 of {LAYERS} measured layers are kept; the same command goes on from there" in told
    assert "Traceback" not in told
    assert "distributed" not in told
    assert AtlasStore.open(store).models() == {}
    old.kill()
    assert len(measured(store)) == 2
    _, file, address = scheduler(start, tmp_path, "second")
    worker(start, file, tmp_path)
    again = start("cli.py", *ingest(checkpoint, store, "--cluster", address))
    assert again.wait(PATIENCE) == 0, errors(again)
    assert_same(store, reference)


def test_two_commands_at_one_model(start: Start, checkpoint: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """The first is held in the middle: the second has one error and publishes nothing, and the first ends well."""
    store = tmp_path / "atlas"
    script = halting(tmp_path, "import cli\ncli.main()\n")
    first = start(script, *ingest(checkpoint, store, "--threads", "1"))
    until(lambda: len(measured(store)) == 2, first)
    second = start("cli.py", *ingest(checkpoint, store))
    assert second.wait(PATIENCE) == 1
    told = errors(second)
    assert told.count("error: ") == 1
    assert "error: another process is ingesting 'tiny'" in told
    assert "Traceback" not in told
    assert AtlasStore.open(store).models() == {}
    assert list((store / "manifests").iterdir()) == []
    (tmp_path / "go").touch()
    assert first.wait(PATIENCE) == 0, errors(first)
    assert_same(store, reference)


def test_two_commands_started_together(
    start: Start, checkpoint: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """Whichever comes second has one error, or finds the model stored already."""
    store = tmp_path / "atlas"
    processes = [start("cli.py", *ingest(checkpoint, store)) for _ in range(2)]
    ended = sorted(process.wait(PATIENCE) for process in processes)
    assert ended in ([0, 0], [0, 1]), [errors(process) for process in processes]
    for process in processes:
        if process.returncode:
            assert errors(process).count("error: ") == 1
            assert "another process" in errors(process)
    assert_same(store, reference)
