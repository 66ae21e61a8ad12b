"""Every row can say where it came from, and the same input gives the same arrays in every process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from ingest.factors import model_hashes
from ingest.pipeline import hash_layers
from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from query import open_atlas
from store.atlas import AtlasStore, Derivation
from store.derivation import derive
from store.version import numerical_libraries, tool_version
from tests import checkpoints
from tests.reliability.forks import contents

ROOT = Path(__file__).parent.parent

ONE_AFTER_THE_OTHER = """
import sys
from click.testing import CliRunner
import cli
model, *store = sys.argv[1:]
for command in (
    ["ingest", model, "--operator", "both"], ["null", "--draws", "50"], ["capacity", "--refine", "--starts", "0"]
):
    result = CliRunner().invoke(cli.main, [*command, *store])
    assert result.exit_code == 0, result.output
"""


@pytest.fixture
def described(store_path: Path) -> dict[tuple[str, str], str]:
    """What ``describe --provenance`` says of the model ``llama`` with a null."""
    import torch

    wanted = Derivation("scramble", n_draws=10, seed=3, independent=False)
    derive(AtlasStore.open(store_path), "llama", "folded", wanted, torch.device("cpu"), lambda *_: None)
    arguments = ["describe", "llama", "--provenance", "--store", str(store_path), "--format", "csv"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    rows = [line.split(",", 2) for line in result.stdout.splitlines()[1:]]
    return {(about, field): value.strip('"') for about, field, value in rows}


def test_a_model_says_where_it_came_from(described: dict[tuple[str, str], str]) -> None:
    source = described["model", "source"]
    plan = plan_checkpoint(open_checkpoint(source), ("raw", "folded"))
    digests = list(hash_layers(plan))
    hashes = model_hashes(digests)
    assert described["model", "content_hash"] == hashes.content
    assert described["model", "qk_hash"] == hashes.query_key
    assert described["operator folded", "gain_hash"] == hashes.gains["folded"]
    assert ("operator raw", "gain_hash") not in described
    for layer, digest in enumerate(digests):
        assert described[f"decoder layer {layer}", "content_hash"] == digest.content.hex()
        assert described[f"decoder layer {layer}", "qk_hash"] == digest.query_key.hex()
    for about in ("operator raw", "operator folded"):
        assert described[about, "device"] == "cpu"
        assert described[about, "compute_dtype"] == "float64"
        assert float(described[about, "rank_cut"]) == 1e-7
        assert float(described[about, "seconds"]) > 0
    for about in ("operator raw", "operator folded", "scramble of folded"):
        assert described[about, "tool_version"] == tool_version()
        assert described[about, "libraries"] == numerical_libraries()
        assert described[about, "created_at"].startswith("20")
    assert (described["scramble of folded", "n_draws"], described["scramble of folded", "seed"]) == ("10", "3")


def test_every_row_joins_its_provenance(described: dict[tuple[str, str], str], store_path: Path) -> None:
    with open_atlas(store_path) as atlas:
        rows = atlas.sql("SELECT operator, kind, unit, content_hash FROM provenance('llama')").rows()
        assert [row[:2] for row in rows] == [("raw", "measured"), ("folded", "measured"), ("folded", "scramble")]
        assert {row[3] for row in rows} == {described["model", "content_hash"]}
        joined = (
            "SELECT count(*), count(p.tool_version), count(l.content_hash) FROM heads "
            "JOIN provenance('llama') AS p USING (model, operator) "
            "JOIN layers AS l USING (model, stack, layer) WHERE p.kind = 'measured'"
        )
        assert atlas.sql(joined).row(0) == (24, 24, 24)
        assert atlas.sql("FROM provenance('nobody')").is_empty()


@pytest.mark.slow
def test_two_processes_give_the_same_arrays(tmp_path: Path) -> None:
    model = checkpoints.save_safetensors(checkpoints.llama(layers=1, heads=2, kv_heads=1), tmp_path / "tiny")
    found = []
    for name in ("one", "two"):
        path = tmp_path / name
        command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(model), "--store", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(contents(path))
    assert found[0] == found[1]
    units = {name.split(":")[1] for name in found[0]}
    kinds = ("scramble", "assignment", "riemannian")
    assert units == {"raw", "folded"} | {f"{kind}-{operator}" for kind in kinds for operator in ("raw", "folded")}
