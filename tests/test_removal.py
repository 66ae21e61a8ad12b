"""Taking a user's statistic away is safe to interrupt: readers never see half of it, and the rest can be taken away."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query import open_atlas
from stats.errors import StoreError
from store import catalogue
from store.atlas import AtlasStore
from store.derivation import derive_user_statistics, remove_user_statistic
from store.integrity import publish_rows, rebuild, verify
from store.user_statistics import load, statistic

MODELS = ["bert", "llama"]


@statistic(meaning="singular values above half the largest", values="1 to d_head", sql_type="INTEGER")
def wide(sigma: np.ndarray) -> np.ndarray:
    return (sigma > sigma[:, :1] / 2).sum(-1)


@statistic(meaning="the same as a share", values="0 to 1")
def wide_share(sigma: np.ndarray) -> np.ndarray:
    return (sigma > sigma[:, :1] / 2).mean(-1)


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def derived(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two statistics of a user's own for two models, one of them with two operators."""
    path = Path(shutil.copytree(sealed_store, tmp_path_factory.mktemp("derived") / "atlas"))
    derive_user_statistics(AtlasStore.open(path), MODELS, load(Path(__file__)))
    return path


@pytest.fixture
def store(derived: Path, tmp_path: Path) -> AtlasStore:
    """A copy of it."""
    return AtlasStore.open(Path(shutil.copytree(derived, tmp_path / "atlas")))


def columns(store: AtlasStore) -> set[str]:
    """The user's own columns."""
    with open_atlas(store.root) as atlas:
        return {"wide", "wide_share"}.intersection(atlas.sql("FROM heads LIMIT 1").columns)


def wide_heads(store: AtlasStore) -> list[tuple[Any, ...]]:
    with open_atlas(store.root) as atlas:
        return atlas.sql("SELECT model, operator, label, wide FROM heads ORDER BY ALL").rows()


def files(store: AtlasStore) -> set[str]:
    """What is left of ``wide``: manifests and folders of arrays."""
    return {path.name for path in store.root.rglob("user_wide-*")} | {
        path.name for path in store.manifests_path.glob("*.user_wide-*")
    }


def remove_and_crash(store: AtlasStore, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(where, name, crash)
        with pytest.raises(Crash):
            remove_user_statistic(store, "wide")


def test_nothing_is_left(store: AtlasStore) -> None:
    assert len(files(store)) == 6
    assert remove_user_statistic(store, "wide") == MODELS
    assert (columns(store), files(store)) == ({"wide_share"}, set())
    assert list(verify(store)) == []


@pytest.mark.parametrize(
    ("where", "name", "gone"),
    [
        pytest.param(catalogue, "drop_unused_columns", False, id="inside the catalogue's change"),
        pytest.param(AtlasStore, "drop_unit", True, id="before any array goes"),
        pytest.param(shutil, "rmtree", True, id="after a manifest, before its arrays"),
    ],
)
def test_a_crash_leaves_a_store_that_answers_and_the_removal_can_be_repeated(
    store: AtlasStore, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, gone: bool
) -> None:
    remove_and_crash(store, monkeypatch, where, name)
    assert columns(store) == ({"wide_share"} if gone else {"wide", "wide_share"})
    left = list(verify(store))
    assert {finding.model for finding in left} <= (set(MODELS) if gone else set())
    assert all("sealed units" in finding.problem and "user_wide-" in finding.problem for finding in left)
    assert remove_user_statistic(store, "wide")
    assert columns(store) == {"wide_share"}
    assert list(verify(store)) == []
    with pytest.raises(StoreError, match="no statistic of your own named 'wide'"):
        remove_user_statistic(store, "wide")


def test_what_a_crash_leaves_is_whole(store: AtlasStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes rows from the arrays before the removal is repeated brings back all of it."""
    before = wide_heads(store)
    remove_and_crash(store, monkeypatch, AtlasStore, "drop_unit")
    rebuild(store)
    assert wide_heads(store) == before
    assert list(verify(store)) == []
    remove_and_crash(store, monkeypatch, AtlasStore, "drop_unit")
    for name, stored in store.models().items():
        publish_rows(store, name, stored.array_group)
        assert {finding.model for finding in verify(store)} == {other for other in MODELS if other > name}
    assert wide_heads(store) == before
    assert remove_user_statistic(store, "wide") == MODELS
    assert (columns(store), files(store), list(verify(store))) == ({"wide_share"}, set(), [])
