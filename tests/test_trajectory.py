"""Training runs: found by their directories, kept in order, and followed head by head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.linalg
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from cli import main
from ingest.lineage import step_of
from query import open_atlas
from query.drift import drift
from store.atlas import AtlasStore
from store.integrity import verify
from tests import checkpoints

THRESHOLD = 0.02
STEPS = {"step0": 0, "step9": 9, "step10": 10, "step200": 200}


def command(store: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--store", str(store)])


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Four steps of a run, whose names do not sort like their numbers; the last layer stands still at first."""
    run = tmp_path / "run"
    run.mkdir()
    still = {name: tensor for name, tensor in checkpoints.llama(layers=3).tensors.items() if ".layers.2." in name}
    for seed, name in enumerate(STEPS):
        model = checkpoints.llama(layers=3, seed=seed)
        if name in ("step0", "step9"):
            model = model.changed(**still)
        checkpoints.save_safetensors(model, run / name)
    (run / "logs").mkdir()
    return run


@pytest.fixture
def lineage_store(run_directory: Path, tmp_path: Path) -> Path:
    result = command(tmp_path / "atlas", "ingest", run_directory, "--lineage", "tiny")
    assert result.exit_code == 0, result.stderr
    return tmp_path / "atlas"


def test_a_directory_of_steps_is_one_command(run_directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "atlas"
    result = command(store, "ingest", run_directory, "--lineage", "tiny")
    rows = [line.split() for line in result.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows] == [[str(run_directory / name), f"tiny@{name}", "done"] for name in STEPS]
    assert "1 of 3 layers of tiny@step9 hold the same values and outputs as those of tiny@step0" in result.stderr
    with open_atlas(store) as atlas:
        rows = atlas.sql("SELECT model, lineage, step FROM models ORDER BY step").rows()
        repeated = atlas.sql("FROM repeated_layers()").rows(named=True)
    assert rows == [(f"tiny@{name}", "tiny", step) for name, step in STEPS.items()]
    assert [(row["model"], row["same_as"], row["layers"], row["whole_model"]) for row in repeated] == [
        ("tiny@step9", "tiny@step0", 1, False)
    ]
    again = command(store, "ingest", run_directory, "--lineage", "tiny")
    assert again.stdout.count("already stored") == 4


def test_a_step_that_is_a_copy_is_named_loudly(run_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(run_directory / "step200", run_directory / "step300")
    result = command(tmp_path / "atlas", "ingest", run_directory, "--lineage", "tiny")
    assert "warning: tiny@step300 and tiny@step200 hold the same values and outputs" in result.stderr


def test_a_trainer_checkpoint_knows_its_step(tmp_path: Path) -> None:
    folder = checkpoints.save_safetensors(checkpoints.llama(), tmp_path / "output" / "checkpoint-500")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 512}))
    assert step_of(str(folder)) == 512
    result = command(tmp_path / "atlas", "ingest", folder, "--lineage", "trained")
    assert result.exit_code == 0, result.stderr
    with open_atlas(tmp_path / "atlas") as atlas:
        assert atlas.sql("SELECT model, lineage, step FROM models").rows() == [("checkpoint-500", "trained", 512)]


@pytest.mark.parametrize(
    ("source", "step"),
    [
        ("EleutherAI/pythia-70m@step3000", 3000),
        ("org/name@main", None),
        ("runs/checkpoint-12", 12),
        ("runs/global_step77", 77),
        ("runs/iter_0000500", 500),
        ("runs/ckpt=3", 3),
        ("runs/llama-7b", None),
        ("runs/step10-of-step20", 20),
    ],
)
def test_steps_are_read_from_names(source: str, step: int | None) -> None:
    assert step_of(source) == step


def test_every_head_is_followed_and_final_strong_ones_apart(lineage_store: Path) -> None:
    assert command(lineage_store, "capacity").exit_code == 0
    with open_atlas(lineage_store) as atlas:
        heads = atlas.sql(
            "SELECT step, layer, head, heads.closure, alpha, capacities.closure AS capacity FROM heads "
            "JOIN models USING (model) JOIN capacities USING (model, operator, stack, layer, head)"
        )
        by_step = atlas.sql(f"FROM trajectory_by_step({THRESHOLD})")
        onsets = atlas.sql(f"FROM onsets({THRESHOLD})")
    final = heads.filter(pl.col("step") == 200).select("layer", "head", strong=pl.col("closure") >= THRESHOLD)
    assert 0 < final["strong"].sum() < len(final)
    followed = heads.join(final, on=["layer", "head"])
    for row in by_step.iter_rows(named=True):
        chosen = followed.filter(
            (pl.col("step") == row["step"]) & (pl.col("strong") == (row["cohort"] == "final strong"))
        )
        assert row["heads"] == len(chosen)
        for name in ("closure", "alpha", "capacity"):
            assert row[name] == pytest.approx(chosen[name].median())
    assert len(by_step) == 8
    for row in onsets.iter_rows(named=True):
        steps = followed.filter((pl.col("layer") == row["layer"]) & (pl.col("head") == row["head"])).sort("step")
        expected = None
        for step, closure in reversed(steps.select("step", "closure").rows()):
            if closure < THRESHOLD:
                break
            expected = step
        assert row["onset"] == expected
        assert row["final_closure"] == steps["closure"][-1]
        assert row["first_capacity"] == steps["capacity"][0]


def test_the_command_prints_the_trajectory(lineage_store: Path) -> None:
    result = command(lineage_store, "trajectory", "tiny", "--threshold", THRESHOLD, "--format", "csv")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("lineage,operator,stack,cohort,step,heads,strong,closure,alpha,capacity")
    assert len(result.stdout.splitlines()) == 9
    assert command(lineage_store, "trajectory", "--by", "head", "--format", "csv").stdout.count("\n") == 13
    assert command(lineage_store, "trajectory", "--by", "all", "--format", "csv").stdout.count("\n") == 49


def test_drift_is_that_of_the_dense_operators(run_directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "kept"
    assert command(store, "ingest", run_directory, "--lineage", "tiny", "--keep-factors").exit_code == 0
    assert list(verify(AtlasStore.open(store))) == []
    with open_atlas(store) as atlas:
        rows = drift(atlas, "tiny")
    assert len(rows) == 3 * 12

    def factors(step: str, layer: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        tensors = load_file(run_directory / step / "model.safetensors")
        stem = f"model.layers.{layer}.self_attn."
        output = tensors[stem + "o_proj.weight"].double().numpy()[:, 8 * head : 8 * head + 8]
        value = tensors[stem + "v_proj.weight"].double().numpy()[8 * (head // 2) : 8 * (head // 2) + 8].T
        return output, value

    names = {step: name for name, step in STEPS.items()}
    for row in rows.iter_rows(named=True):
        (o_a, v_a), (o_b, v_b) = (
            factors(names[row[key]], row["layer"], row["head"]) for key in ("from_step", "to_step")
        )
        a, b = o_a @ v_a.T, o_b @ v_b.T
        assert row["operator_cosine"] == pytest.approx((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
        for name, first, second in (("write_overlap", o_a, o_b), ("read_overlap", v_a, v_b)):
            cosines = np.cos(scipy.linalg.subspace_angles(first, second))
            assert row[name] == pytest.approx((cosines**2).mean())
    still = rows.filter((pl.col("layer") == 2) & (pl.col("to_step") == 9))
    assert still["operator_cosine"].to_list() == pytest.approx([1.0] * 4)
    shown = command(store, "drift", "tiny", "--format", "csv")
    assert shown.stdout.count("\n") == 37


def test_drift_without_kept_factors_says_how_to_keep_them(lineage_store: Path) -> None:
    result = command(lineage_store, "drift", "tiny")
    assert result.exit_code == 1
    assert "--keep-factors" in result.stderr


@pytest.mark.parametrize("suffix", ["pdf", "svg", "png"])
def test_the_trajectory_is_drawn(suffix: str, lineage_store: Path, tmp_path: Path) -> None:
    file = tmp_path / f"figure.{suffix}"
    assert command(lineage_store, "capacity").exit_code == 0
    result = command(lineage_store, "trajectory", "--threshold", THRESHOLD, "--figure", file)
    assert result.exit_code == 0, result.stderr
    start = file.read_bytes()[:5]
    assert start in (b"%PDF-", b"<?xml", b"\x89PNG\r")
    if suffix == "svg":
        text = file.read_text()
        for word in ("training step", "median closure", "capacity", "heads finally at 0.02 or more", "other heads"):
            assert word in text


def test_a_figure_of_an_unknown_form_is_refused(lineage_store: Path, tmp_path: Path) -> None:
    result = command(lineage_store, "trajectory", "--figure", tmp_path / "figure.doc")
    assert result.exit_code == 1
    assert "unknown form of figure" in result.stderr


def test_a_bad_request_is_one_error_and_changes_nothing(run_directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "atlas"
    without = command(store, "ingest", run_directory)
    assert without.exit_code == 1
    assert "several checkpoints, not one" in without.stderr
    assert not store.exists()
    assert command(store, "ingest", run_directory, "--lineage", "x", "--step", "3").exit_code == 2
    assert command(store, "ingest", run_directory, run_directory, "--name", "x").exit_code in (1, 2)

    (run_directory / "step200").rename(run_directory / "final")
    unnumbered = command(store, "ingest", run_directory, "--lineage", "x")
    assert unnumbered.exit_code == 1
    assert "training step of a checkpoint is unknown" in unnumbered.stderr
    assert not store.exists()

    shutil.copytree(run_directory / "step9", run_directory / "checkpoint-9")
    shutil.rmtree(run_directory / "final")
    assert "two checkpoints of step 9" in command(store, "ingest", run_directory, "--lineage", "x").stderr


def test_a_lineage_of_one_step_has_no_trajectory(run_directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "atlas"
    assert command(store, "ingest", run_directory / "step0", "--lineage", "short").exit_code == 0
    result = command(store, "trajectory", "short")
    assert result.exit_code == 1
    assert "no training run 'short' with at least two steps" in result.stderr
    assert "1 steps" in result.stderr


def test_a_broken_step_does_not_keep_the_others_out(run_directory: Path, tmp_path: Path) -> None:
    (run_directory / "step10" / "model.safetensors").write_bytes(b"broken")
    result = command(tmp_path / "atlas", "ingest", run_directory, "--lineage", "tiny")
    assert result.exit_code == 1
    (failed,) = [line for line in result.stdout.splitlines() if "failed" in line]
    assert failed.split()[0] == str(run_directory / "step10")
    assert "header" in failed or "short" in failed or "truncated" in failed
    assert result.stderr.splitlines()[-1] == "3 done, 0 skipped, 1 failed"
    assert sorted(AtlasStore.open(tmp_path / "atlas").models()) == ["tiny@step0", "tiny@step200", "tiny@step9"]


def test_a_stored_model_keeps_its_lineage_and_says_so(run_directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "atlas"
    assert command(store, "ingest", run_directory / "step0", "--name", "a").exit_code == 0
    result = command(store, "ingest", run_directory / "step0", "--name", "a", "--lineage", "late")
    assert "it is stored as step None of no lineage; --replace stores it with the one given" in result.stderr
