"""Damage, full disks, permissions, clocks, signals, crashes: one clear error, and nothing published is lost."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import cli
import store.derivation
import store.ingestion
from query import open_atlas
from stats.errors import StoreError
from store.atlas import AtlasStore, Derivation
from store.catalogue_file import damaged_parts
from store.derivation import derive, derive_user_statistics, remove_user_statistic
from store.integrity import Finding, rebuild, remove, seal, verify
from store.locking import Lock
from store.repair import repair
from store.unfinished import IN_USE
from store.user_statistics import load, statistic
from tests import checkpoints
from tests.ingesting import ingest_into

ROOT = Path(__file__).parent.parent


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@statistic(meaning="largest share of a direction", values="0 to 1")
def leading(sigma: Any) -> Any:
    return sigma[:, 0] ** 2 / (sigma**2).sum(-1)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one small model, with a null."""
    root = tmp_path_factory.mktemp("faults")
    model = checkpoints.save_safetensors(checkpoints.llama(layers=1, heads=2, kv_heads=1), root / "tiny")
    ingest_into(root / "atlas", model, "tiny")
    null(AtlasStore.open(root / "atlas"))
    return root / "atlas"


@pytest.fixture
def small(sealed: Path, tmp_path: Path) -> AtlasStore:
    return AtlasStore.open(Path(shutil.copytree(sealed, tmp_path / "atlas")))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint that is not stored."""
    return checkpoints.save_safetensors(checkpoints.llama(layers=2, seed=9), tmp_path / "other")


def null(atlas: AtlasStore, seed: int = 0) -> None:
    wanted = Derivation("scramble", n_draws=10, seed=seed, independent=False)
    derive(atlas, "tiny", "raw", wanted, torch.device("cpu"), lambda *_: None)


def problems(atlas: AtlasStore) -> list[tuple[str, str]]:
    return [(finding.kind, finding.problem) for finding in verify(atlas)]


def heads(atlas: AtlasStore) -> list[tuple[Any, ...]]:
    with open_atlas(atlas.root) as opened:
        return opened.sql("SELECT model, operator, label, closure FROM heads ORDER BY ALL").rows()


def flip(path: Path, chance: random.Random) -> tuple[int, int]:
    """Change one byte; returns its place and the byte it was."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    was = data[place]
    data[place] ^= chance.randrange(1, 256)
    path.write_bytes(bytes(data))
    return place, was


def irrelevant(path: Path, was: bytes) -> bool:
    """Whether a file says the same as before to whoever reads it: white space of a manifest, or who wrote the store."""
    try:
        now, before = json.loads(path.read_bytes()), json.loads(was)
    except ValueError:
        return False
    for content in (now, before):
        content.get("attributes", {}).pop("headatlas_needs", None)
    return bool(now == before)


@pytest.mark.parametrize("share", [0.04, pytest.param(1.0, marks=pytest.mark.slow)])
def test_every_flipped_byte_is_found(small: AtlasStore, share: float) -> None:
    chance = random.Random(0)
    files = sorted(path for path in small.arrays_path.rglob("*") if path.is_file())
    chosen = chance.sample(files, int(share * len(files)))
    chosen += [*small.manifests_path.iterdir(), small.arrays_path / "zarr.json", small.catalogue_path]
    missed = []
    for path in chosen:
        whole = path.read_bytes()
        flip(path, chance)
        try:
            found = bool(problems(AtlasStore.open(small.root)))
        except StoreError:
            found = True
        if not found and not irrelevant(path, whole):
            missed.append(path)
        path.write_bytes(whole)
    assert missed == []
    assert problems(small) == []


def test_every_flipped_byte_of_the_catalogue_is_found(small: AtlasStore) -> None:
    chance, path = random.Random(1), small.catalogue_path
    assert list(damaged_parts(path)) == []
    whole = path.read_bytes()
    places = [chance.randrange(3 * 4096) for _ in range(10)] + [chance.randrange(len(whole)) for _ in range(40)]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ chance.randrange(1, 256)]) + whole[place + 1 :])
        assert list(damaged_parts(path)), place
    for length in (0, 5000, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert list(damaged_parts(path)), length


@pytest.mark.parametrize(
    "statement", ["COMMENT ON COLUMN heads.closure IS 'other'", "ALTER TABLE qk ADD COLUMN x INTEGER"]
)
def test_tables_that_are_not_this_versions(small: AtlasStore, statement: str) -> None:
    from store import catalogue

    catalogue.change(small.catalogue_path, lambda connection: connection.execute(statement))
    assert [kind for kind, _ in problems(small)] == ["catalogue"]
    assert all(finding.kind == "repaired" for finding in repair(small))
    assert problems(small) == []


@pytest.mark.parametrize("damage", [None, b"no catalogue", "block"])
def test_a_damaged_or_missing_catalogue_is_made_again(small: AtlasStore, damage: bytes | str | None) -> None:
    before, path = heads(small), small.catalogue_path
    if damage is None:
        path.unlink()
    elif isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(bytes(data))
    assert "catalogue" in [kind for kind, _ in problems(small)]
    result = invoke("verify", "--repair", "--store", small.root)
    assert result.exit_code == 0, result.output
    assert "made again from the arrays of 1 models" in result.stdout
    assert (heads(small), problems(small)) == (before, [])


def test_damaged_arrays_stay_and_are_told(small: AtlasStore, other: Path) -> None:
    ingest_into(small.root, other, "other")
    group = small.arrays_path / small.models()["tiny"].array_group
    flip(group / "raw" / "decoder" / "sigma" / "c" / "0" / "0" / "0", random.Random(0))
    assert [kind for kind, _ in problems(small)] == ["arrays"]
    small.catalogue_path.unlink()
    kinds = [finding.kind for finding in repair(small)]
    assert "arrays" in kinds
    assert list(small.models()) == ["other"]
    assert (group / "raw").is_dir()
    told: list[Finding] = []
    assert (rebuild(small, told.append), len(told)) == (1, 1)
    assert invoke("rebuild", "--store", small.root).exit_code == 1


def test_leftovers_are_told_as_what_they_are_and_go(small: AtlasStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = heads(small)
    group = small.models()["tiny"].array_group
    (small.arrays_path / group / "folded").mkdir()
    (small.arrays_path / "orphan-1").mkdir()
    (small.staging_path / "dead").mkdir()
    (small.staging_path / "dead.lock").touch()
    (small.manifests_path / f"{'x' * 8}.raw.json").write_text("{}")
    (small.manifests_path / ".half.json.1.partial").write_text("{")
    (small.root / ".catalog.duckdb.1.partial").write_text("half")
    derive_user_statistics(small, ["tiny"], load(Path(__file__)))
    with monkeypatch.context() as patch:
        patch.setattr(AtlasStore, "drop_unit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove_user_statistic(small, "leading")
        patch.setattr(AtlasStore, "drop_group", interrupted)
    found = problems(small)
    assert {kind for kind, _ in found} == {"leftover"}
    assert len(found) == 7
    assert any("sealed units that the catalogue does not name: user_leading-raw-" in problem for _, problem in found)
    assert len(list(repair(small))) == 7
    assert (problems(small), heads(small)) == ([], before)
    assert list(small.staging_path.iterdir()) == []


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_model_half_removed_is_told_and_goes(small: AtlasStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(AtlasStore, "drop_group", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove(small, "tiny")
    (finding,) = verify(small)
    assert "tiny was removed or replaced" in finding.problem
    list(repair(small))
    assert problems(small) == []
    assert [path.name for path in small.arrays_path.iterdir()] == ["zarr.json"]


def test_what_a_living_process_has_staged_stays(small: AtlasStore, other: Path) -> None:
    with small.staging() as staged:
        assert [kind for kind, _ in problems(small)] == ["running"]
        assert invoke("verify", "--repair", "--store", small.root).exit_code == 0
        assert staged.is_dir()
    with pytest.raises(KeyboardInterrupt):
        ingest_into_and_stop(small, other)
    (left,) = small.staging_path.iterdir()
    lock = Lock(left / IN_USE)
    assert lock.acquire(shared=True)
    assert invoke("verify", "--store", small.root).exit_code == 0
    list(repair(small))
    assert left.is_dir()
    lock.release()
    result = invoke("verify", "--repair", "--store", small.root)
    assert "thrown away: an ingest that ended early: 2 of 2 layers measured" in result.stdout
    assert not left.exists()


def ingest_into_and_stop(atlas: AtlasStore, source: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.ingestion, "seal", interrupted)
        ingest_into(atlas.root, source, "other")


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of a number of KiB."""
    path = tmp_path / "volume"
    path.mkdir()

    def mount(kib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting is not permitted here")
        return path

    yield mount
    while os.path.ismount(path):
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(small: AtlasStore, other: Path, volume: Callable[[int], Path]) -> None:
    size = sum(path.stat().st_size + 4096 for path in small.root.rglob("*")) // 1024
    place = volume(size + 100)
    atlas = AtlasStore.open(Path(shutil.copytree(small.root, place / "atlas")))
    before, outcomes = heads(atlas), []
    for more in (100, 900, 3000, 12000, 40000):
        subprocess.run(["mount", "-o", f"remount,size={size + more}k", str(place)], check=True)
        result = invoke("ingest", other, "--store", atlas.root, "--name", "other")
        outcomes.append(result.exit_code)
        if result.exit_code:
            assert result.stderr.count("error:") == 1, result.stderr
            assert heads(atlas) == before
            assert {kind for kind, _ in problems(atlas)} <= {"unfinished"}
    assert outcomes == sorted(outcomes, reverse=True)
    assert (outcomes[0], outcomes[-1]) == (1, 0)
    assert problems(atlas) == []


@pytest.mark.slow
def test_no_space_at_any_call(small: AtlasStore, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th call that makes or moves a file below the store fails, for n over all of an ingest."""
    before, calls = heads(small), 0
    failing = [0]

    def counted(
        real: Callable[..., Any], writes: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            if str(arguments[0]).startswith(str(small.root)) and writes(arguments, named):
                calls += 1
                if calls == failing[0]:
                    raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))
            return real(*arguments, **named)

        return call

    def ingested(at: int) -> Result:
        nonlocal calls
        calls, failing[0] = 0, at
        with monkeypatch.context() as patch:
            for module in (io, builtins):
                patch.setattr(
                    module, "open", counted(open, lambda a, n: set("wax+") & set(n.get("mode", (*a, "r")[1])))
                )
            for name in ("mkdir", "replace", "rename", "ftruncate"):
                patch.setattr(os, name, counted(getattr(os, name), lambda *_: True))
            return invoke("ingest", other, "--store", small.root, "--name", "other")

    assert ingested(0).exit_code == 0
    remove(small, "other")
    total = calls
    assert total > 100
    for at in (*range(1, total, total // 5), total - 3):
        result = ingested(at)
        if result.exit_code == 0:
            remove(small, "other")
            continue
        assert result.stderr.count("error:") == 1, result.stderr
        assert "No space left" in result.stderr
        assert heads(small) == before
        assert {kind for kind, _ in problems(small)} <= {"unfinished", "leftover"}, at
        list(repair(small))
    assert problems(small) == []


NOBODY = """
import os, sys
import cli
import concurrent.futures.process, multiprocessing.spawn, query.output, query.atlas, query.named
from click.testing import CliRunner
from tests.reliability.forks import import_everything
import_everything()
os.setgid(65534); os.setuid(65534)
for arguments in (sys.argv[2:], ["remove", "tiny"], ["rebuild"], ["verify", "--repair"], ["verify"]):
    result = CliRunner().invoke(cli.main, [*arguments, "--store", sys.argv[1]])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    print(result.exit_code, result.output.splitlines()[0])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_without_permission(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        model = checkpoints.save_safetensors(checkpoints.llama(layers=1, heads=2, kv_heads=1), place / "tiny")
        for path in model.iterdir():
            path.chmod(0o644)
        ingest_into(place / "atlas", model, "tiny")
        before = heads(AtlasStore.open(place / "atlas"))
        command = [sys.executable, "-c", NOBODY, str(place / "atlas"), "ingest", str(model), "--replace"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        *refused, verified = done.stdout.splitlines()
        assert all(line.startswith("1 error: the store can") for line in refused), refused
        assert verified == "0 ok: 1 model verified"
        assert heads(AtlasStore.open(place / "atlas")) == before


def test_a_store_removed_while_an_ingest_runs(small: AtlasStore, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal_before = store.ingestion.seal

    def gone(*arguments: Any) -> None:
        shutil.rmtree(small.root)
        seal_before(*arguments)

    monkeypatch.setattr(store.ingestion, "seal", gone)
    result = invoke("ingest", other, "--store", small.root)
    assert result.exit_code == 1
    assert result.stderr.count("error:") == 1, result.stderr


class Earlier(datetime):
    """A clock that went back."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) - timedelta(days=400)


def test_a_clock_that_was_set_back(small: AtlasStore, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.derivation, "datetime", Earlier)
    monkeypatch.setattr(store.ingestion, "datetime", Earlier)
    (first,) = small.models()["tiny"].derivations
    kept = shutil.copytree(small.arrays_path / small.models()["tiny"].array_group / first, small.root.parent / "kept")
    manifest = small.manifest_path(small.models()["tiny"].array_group, first)
    text = manifest.read_text()
    null(small, seed=5)
    group = small.models()["tiny"].array_group
    shutil.copytree(kept, small.arrays_path / group / first)
    manifest.write_text(text)
    rebuild(small)
    ((_, made),) = small.models()["tiny"].derivations.values()
    assert made.seed == 5
    list(repair(small))
    with monkeypatch.context() as patch:
        patch.setattr(AtlasStore, "drop_group", lambda *_: None)
        ingest_into(small.root, other, "tiny", replace=True)
    after = heads(small)
    assert small.models()["tiny"].array_group != group
    rebuild(small)
    assert heads(small) == after
    list(repair(small))
    assert (heads(small), problems(small)) == (after, [])


def test_a_manifest_that_was_not_numbered_is_earlier(small: AtlasStore) -> None:
    group = small.models()["tiny"].array_group
    path = small.manifest_path(group, "raw")
    listed = json.loads(path.read_text())
    path.write_text(json.dumps({name: listed[name] for name in ("group", "unit", "files")}, indent=1))
    assert problems(small) == []
    seal(small, group, "raw")
    assert json.loads(path.read_text())["sequence"] > listed["sequence"]


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import cli
cli.main()
"""


def test_few_file_descriptors(small: AtlasStore, other: Path) -> None:
    command = [sys.executable, "-c", FEW_FILES, "ingest", str(other), "--store", str(small.root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or done.stderr.count("error:") == 1, done.stderr
    assert {kind for kind, _ in problems(small)} <= {"unfinished"}


SLOW = """
import time
import cli, ingest.read_ahead

read_weights = ingest.read_ahead.read_weights

def read_slowly(*arguments):
    time.sleep(0.2)
    return read_weights(*arguments)

ingest.read_ahead.read_weights = read_slowly
if __name__ == "__main__":
    cli.main()
"""


def test_sigterm_is_like_an_interruption(small: AtlasStore, tmp_path: Path) -> None:
    path, before = checkpoints.save_safetensors(checkpoints.llama(layers=40), tmp_path / "model"), heads(small)
    command = [sys.executable, "-c", SLOW, "ingest", str(path), "--store", str(small.root), "--device", "cpu"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "10 of 40" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
    assert process.returncode == 143
    assert stderr.splitlines()[-1] == "terminated: the store is as it was"
    assert "of 40 measured layers are kept" in stderr
    assert heads(small) == before
    assert [kind for kind, _ in problems(small)] == ["unfinished"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_coordinator(small: AtlasStore, tmp_path: Path, number: int) -> None:
    path = checkpoints.save_safetensors(checkpoints.llama(layers=200), tmp_path / "model")
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    command = [sys.executable, str(script), "ingest", str(path), "--store", str(small.root), "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL, env=environment)
    while not list(small.staging_path.glob("*/*.npz")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.wait()
    deadline = time.monotonic() + 10
    while group_members(process.pid):
        assert time.monotonic() < deadline, "workers go on"
        time.sleep(0.05)
    count = len(list(small.staging_path.glob("*/*.npz")))
    time.sleep(1)
    assert len(list(small.staging_path.glob("*/*.npz"))) == count < 200
    assert [kind for kind, _ in problems(small)] == ["unfinished"]
    list(repair(small))
    assert problems(small) == []


def group_members(group: int) -> list[int]:
    from tests.reliability.forks import members_of

    return members_of(group)


def test_two_ingests_of_one_name_at_once(small: AtlasStore, other: Path, tmp_path: Path) -> None:
    third = checkpoints.save_safetensors(checkpoints.llama(layers=2, seed=10), tmp_path / "third")
    real = store.ingestion._write_staged

    def overtaken(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.ingestion, "_write_staged", real)
            ingest_into(small.root, third, "same")
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.ingestion, "_write_staged", overtaken)
        result = invoke("ingest", other, "--store", small.root, "--name", "same")
    assert result.exit_code == 1
    assert "another process has just stored a model named 'same'" in result.stderr
    with open_atlas(small.root) as atlas:
        source = atlas.sql("SELECT source FROM models WHERE model = 'same'").item()
    assert source == str(third)
    assert [kind for kind, _ in problems(small)] == ["unfinished"]


@pytest.mark.parametrize(
    ("trials", "without"),
    [(3, True), pytest.param(200, False, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_kills_at_random_moments(trials: int, without: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.reliability.kills", "--trials", str(trials), "--folder", str(tmp_path)]
    command += ["--without", "ingest --workers 2"] if without else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{trials} trials kept every promise" in done.stdout
