"""The notebook, run through on a small checkpoint from an empty store, and on the demo model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from matplotlib.figure import Figure

from tests.printed import DEMO_MODEL, ROOT

NOTEBOOK = ROOT / "examples" / "finding.py"
FIGURES = {"heatmap", "closure-distribution", "closure-capacity", "mismatch", "algebra", "head"}


def run(model: Path, store: Path, figures: Path, draws: int, threshold: float) -> Mapping[str, Any]:
    """What the notebook's cells define, in an interpreter of this process."""
    spec = spec_from_file_location("finding", NOTEBOOK)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    name = model.name.removesuffix(".gguf")
    arguments = {"model": str(model), "name": name, "store": store, "figures": figures}
    _, defined = module.app.run(defs={**arguments, "draws": draws, "threshold": threshold})
    return defined


def check(defined: Mapping[str, Any], figures: Path) -> None:
    """The pieces agree with each other, and the figures are there."""
    assert defined["by_hand"] == pytest.approx(defined["strongest"]["closure"][0], rel=1e-12)
    assert isinstance(defined["algebra"], Figure)
    assert {path.name for path in figures.iterdir()} == {f"{name}.pdf" for name in FIGURES}
    assert all(path.read_bytes().startswith(b"%PDF") for path in figures.iterdir())
    raw = defined["rates"].row(by_predicate=pl.col("operator") == "raw", named=True)
    assert defined["by_angle"]["heads"].sum() == raw["defined"]
    assert defined["by_angle"]["cos_mean"].is_sorted()
    defined["atlas"].close()


def test_from_an_empty_store_to_the_figures(llama_directory: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    defined = run(llama_directory, tmp_path / "atlas", figures, draws=100, threshold=0.01)
    assert defined["facts"]["n_layers"] == 3
    assert defined["against_chance"]["draws"].to_list() == [100, 100]
    check(defined, figures)


@pytest.mark.slow
def test_on_the_demo_model(demo_store: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(demo_store, tmp_path / "atlas"))
    defined = run(DEMO_MODEL, store, tmp_path / "figures", draws=1000, threshold=0.9)
    assert defined["strongest"]["label"][0] == "L10H8"
    assert defined["rates"]["strong"].to_list() == [13, 13]
    assert defined["by_angle"]["closure"].is_sorted()
    check(defined, tmp_path / "figures")
