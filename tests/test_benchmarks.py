"""The benchmarks run, count what they say they count, and are summarised from what they wrote."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from query import open_atlas
from stats.factorization import RANK_CUT
from stats.layer import measure_layer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark's module as its script would."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_listing_names_every_benchmark_with_its_duration(benchmark: Any) -> None:
    listed = run("--list")
    suite = benchmark("run").SUITE
    assert listed.returncode == 0
    assert [line.split()[:2] for line in listed.stdout.splitlines()[:-1]] == [
        [item.name, str(item.seconds)] for item in suite
    ]
    assert sum(item.seconds for item in suite if not item.long) <= 720
    assert all((BENCHMARKS / f"{item.script}.py").exists() for item in suite)
    assert {item.name for item in suite} == benchmark("summary").SECTIONS.keys()


def test_a_name_that_is_none() -> None:
    ended = run("flor")
    assert ended.returncode == 2
    assert "no benchmark named flor" in ended.stderr


def test_a_quick_run_leaves_the_results_alone() -> None:
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}
    ended = run("--quick", "draws")
    assert ended.returncode == 0, ended.stderr
    assert "draws: done" in ended.stdout
    assert {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()} == before


def test_the_recorder_counts_products_and_decompositions(benchmark: Any) -> None:
    floor = benchmark("floor")
    a, b = torch.randn(3, 4, 5).double(), torch.randn(3, 5, 6).double()
    square = torch.randn(2, 4, 4).double()
    with floor.Recorder() as recorder:
        _ = a @ b, a[0] @ b[0]
        torch.linalg.svdvals(a)
        torch.linalg.svd(square)
        torch.linalg.eigvals(square)
        torch.linalg.eigh(square + square.mT)
        torch.linalg.cholesky(torch.eye(7).double())
    assert recorder.flops == (3 + 1) * 2 * 4 * 5 * 6
    assert recorder.problems == {
        floor.Problem("singular values", 4, 5): 3,
        floor.Problem("singular vectors", 4, 4): 2,
        floor.Problem("eigenvalues", 4, 4): 2,
        floor.Problem("eigenvectors", 4, 4): 2,
        floor.Problem("cholesky", 7, 7): 1,
    }


def test_a_layer_asks_for_what_its_formulas_say(benchmark: Any) -> None:
    """Of every head: K's singular values, its angles, eigenvalues, and the spectra of the query-key form."""
    floor = benchmark("floor")
    heads, groups, d_model, d_head = 4, 2, 48, 6

    def factor(count: int) -> Tensor:
        return torch.randn(count, d_model, d_head, dtype=torch.float64, generator=generator)

    generator = torch.Generator().manual_seed(0)
    factors = factor(heads), factor(groups), factor(heads), factor(groups)
    kv_head = torch.arange(heads) // (heads // groups)
    with floor.Recorder() as recorder:
        measure_layer(*factors, kv_head, RANK_CUT[torch.float64])
    problems = recorder.problems
    assert problems[floor.Problem("singular vectors", d_head, d_head)] == heads
    assert problems[floor.Problem("eigenvalues", d_head, d_head)] == heads
    assert problems[floor.Problem("eigenvectors", d_head, d_head)] == 2 * (heads + groups)
    pairs_of_a_group = 1
    assert problems[floor.Problem("singular values", d_head, d_head)] == 3 * heads + groups * pairs_of_a_group


def test_a_made_checkpoint_has_the_shape_asked_for(benchmark: Any, tmp_path: Path) -> None:
    synthetic = benchmark("synthetic")
    weights = synthetic.write(tmp_path / "made", synthetic.Shape(3, 32, 4, 2, 8, mlp=64, vocabulary=100))
    plan = plan_checkpoint(open_checkpoint(str(tmp_path / "made")))
    assert [(layer.n_heads, layer.n_kv_heads, layer.d_model, layer.d_head) for layer in plan.layers] == [
        (4, 2, 32, 8)
    ] * 3
    assert plan.bytes_to_read == 3 * 2 * 32 * (2 * 32 + 2 * 16)
    assert plan.bytes_to_read < weights.stat().st_size


def test_a_made_catalogue_has_the_rows_of_the_panel(benchmark: Any, tmp_path: Path) -> None:
    scale = benchmark("query_scale")
    scale.make(tmp_path / "atlas", 1)
    with open_atlas(tmp_path / "atlas") as atlas:
        counts = {
            name: atlas.sql(f"SELECT count(*) FROM {name}").item() for name in ("models", "heads", "nulls", "pairs")
        }
        shared = atlas.sql("SELECT max(kv_head) FROM heads WHERE model = 'made-2'").item()
    panel = scale.PANEL
    assert counts == {
        "models": 9,
        "heads": 7304,
        "nulls": 2 * 7304,
        "pairs": sum(shape.layers * shape.heads * (shape.heads - 1) for shape in panel),
    }
    assert shared == panel[2].kv_heads - 1


def test_differences_of_arrays(benchmark: Any) -> None:
    difference = benchmark("gpu_check").difference
    values = np.array([1.0, -4.0, np.nan])
    assert difference(values, values) == 0
    assert difference(values + np.array([0, 1e-3, 0]), values) == pytest.approx(2.5e-4)
    assert difference(np.array([1.0, np.nan, np.nan]), values) == np.inf
    assert difference(np.array([1, 2]), np.array([1, 3])) == np.inf


@pytest.mark.slow
def test_the_device_check_runs_on_the_cpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--self-check"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent)
    assert ended.returncode == 0, ended.stderr
    assert "float64 differs by 0.0e+00" in ended.stdout


def test_a_summary_of_what_there_is(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = benchmark("summary")
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 8, "load": 0.5, "python": "3.12", "commit": "abc1234"}
    medians = {
        "ingest, safetensors": {"wall_seconds": 2.0, "peak_mib": 100.0, "fetched_bytes": 1e6},
        "TransformerLens": {"wall_seconds": 8.0, "peak_mib": 400.0, "fetched_bytes": 2e6},
    }
    result = {"machine": machine, "repeats": 3, "medians": medians}
    (tmp_path / "ingest_against_loading.json").write_text(json.dumps(result))
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    monkeypatch.setattr(summary, "README", tmp_path / "README.md")
    monkeypatch.setattr(summary, "FIGURE", tmp_path / "figures" / "speed.svg")
    assert summary.summarise() == [tmp_path / "README.md", tmp_path / "figures" / "speed.svg"]
    text = (tmp_path / "README.md").read_text()
    assert "| TransformerLens | 8 | 400 | 2 | 0.25 | 0.25 | 0.5 |" in text
    assert "2 cores of a processor, 8 GiB, load 0.5, Python 3.12, commit abc1234, repeats: 3." in text
    assert "## floor" not in text
    assert summary.ratios() == [("TransformerLens", 4.0, "loading the whole model")]
    assert "<svg" in (tmp_path / "figures" / "speed.svg").read_text()
