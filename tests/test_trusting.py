"""When what is stored, or kept of an earlier try, may stand for the weights without reading them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import save

import store.ingestion
from cli import main
from ingest.pipeline import ComputeSettings
from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from query import open_atlas
from stats.errors import StoreError
from store.atlas import AtlasStore
from store.ingestion import Identity, ingest_model
from tests import checkpoints
from tests.test_adapters import plain_adapter
from tests.test_hub import hub  # noqa: F401

COMMIT = "c0ffee"
SETTINGS = ComputeSettings(device="cpu")


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def closures(path: Path, model: str) -> list[float]:
    with open_atlas(path) as atlas:
        return atlas.sql("SELECT closure FROM heads WHERE model = $m ORDER BY layer, head", {"m": model})[
            "closure"
        ].to_list()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "atlas"


def test_workers_do_not_take_kept_layers_of_other_weights(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints.save_safetensors(checkpoints.llama(seed=7), tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(store.ingestion, "seal", interrupted)
        assert run("ingest", source, "--store", path, "--workers", "1").exit_code == 130
    checkpoints.save_safetensors(checkpoints.llama(seed=8), source)
    assert run("ingest", source, "--store", path, "--workers", "1").exit_code == 0
    assert run("ingest", source, "--store", path, "--name", "fresh").exit_code == 0
    assert closures(path, "model") == closures(path, "fresh")


def stored_with_commit(path: Path, source: Path, base: Path | None = None, config: Path | None = None) -> str:
    """Ingest what a hub would call one commit; what was done."""
    checkpoint = open_checkpoint(str(source), config, str(base) if base else None)
    checkpoint.revision = COMMIT
    plan = plan_checkpoint(checkpoint)
    where = AtlasStore.open_or_create(path)
    return ingest_model(where, plan, Identity("model"), SETTINGS, progress=lambda *_: None).action


def test_one_commit_is_one_content(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoints.save_safetensors(checkpoints.llama(), tmp_path / "model")
    assert stored_with_commit(path, source) == "ingested"
    monkeypatch.setattr(store.ingestion, "hash_layers", interrupted)
    assert stored_with_commit(path, source) == "unchanged"


def test_a_commit_that_is_read_another_way_is_compared(path: Path, tmp_path: Path) -> None:
    model = checkpoints.llama()
    source = checkpoints.save_safetensors(model, tmp_path / "model")
    assert stored_with_commit(path, source) == "ingested"
    other = tmp_path / "config.json"
    wider = model.configured(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    shutil.copy(checkpoints.save_safetensors(wider, tmp_path / "wider") / "config.json", other)
    first = tmp_path / "alone.safetensors"
    shutil.copy(source / "model.safetensors", first)
    planned = plan_checkpoint(open_checkpoint(str(first), other))
    assert [layer.n_heads for layer in planned.layers] == [2, 2]
    read: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.ingestion, "hash_layers", lambda plan: read.append(plan) or interrupted())
        with pytest.raises(KeyboardInterrupt):
            stored_with_commit(path, first, config=other)
    assert read


def test_an_adapters_commit_does_not_speak_for_its_base(path: Path, tmp_path: Path) -> None:
    adapter = plain_adapter(tmp_path / "adapter")
    one = checkpoints.save_safetensors(checkpoints.llama(), tmp_path / "one")
    other = checkpoints.save_safetensors(checkpoints.llama(seed=9), tmp_path / "other")
    assert stored_with_commit(path, adapter, one) == "ingested"
    assert stored_with_commit(path, adapter, one) == "unchanged"
    with pytest.raises(StoreError, match="other weights"):
        stored_with_commit(path, adapter, other)


def test_a_damaged_kept_layer_of_a_hub_model_is_fetched_again(
    hub: object,  # noqa: F811
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = checkpoints.llama(layers=4)
    config = json.dumps(model.config).encode()
    hub.add("org/model", {"config.json": config, "model.safetensors": save(dict(model.tensors))})  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(store.ingestion, "seal", interrupted)
        assert run("ingest", "org/model", "--store", path).exit_code == 130
    (directory,) = (path / "staging").iterdir()
    (directory / "decoder.3.npz").unlink()
    damaged = directory / "decoder.1.npz"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    again = run("ingest", "org/model", "--store", path)
    assert again.exit_code == 0, again.stderr
    assert run("ingest", "org/model", "--store", path, "--name", "fresh").exit_code == 0
    assert closures(path, "org/model") == closures(path, "fresh")
