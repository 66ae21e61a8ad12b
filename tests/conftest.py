"""Fixtures shared by the tests: a small checkpoint and a small store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.ingesting import ingest_into
from tests.printed import DEMO_MODEL, make_demo_store


@pytest.fixture(scope="session", autouse=True)
def no_power_is_lost() -> Iterator[None]:
    """Waiting for the disk is most of the time of small stores, and matters only when the power goes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def llama_directory(tmp_path: Path) -> Path:
    """A grouped-query checkpoint of 3 layers, 4 heads, 2 value heads."""
    return checkpoints.save_safetensors(checkpoints.llama(layers=3), tmp_path / "tiny-llama")


@pytest.fixture(scope="session")
def sealed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that ``store_path`` copies, made once."""
    root = tmp_path_factory.mktemp("sealed")
    store = root / "atlas"
    llama = checkpoints.save_safetensors(checkpoints.llama(layers=3), root / "tiny-llama")
    ingest_into(store, llama, "llama", ("raw", "folded"))
    ingest_into(store, checkpoints.save_safetensors(checkpoints.bert(), root / "tiny-bert"), "bert")
    return store


@pytest.fixture
def store_path(tmp_path: Path, sealed_store: Path) -> Path:
    """A store with that checkpoint under ``llama``, both operators, and a BERT under ``bert``."""
    return Path(shutil.copytree(sealed_store, tmp_path / "atlas"))


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the documents' answers are of. Tests that use it belong to the xdist group ``demo``."""
    if not DEMO_MODEL.exists():
        pytest.skip(f"{DEMO_MODEL.name} is not there: run make test")
    return make_demo_store(tmp_path_factory.mktemp("demo") / "atlas")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules of matrices so small that they gain nothing from more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
