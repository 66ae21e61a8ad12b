"""Inputs that once did harm, and a short run of new ones: nothing but the project's errors may come out."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.fuzzing.run import fuzz
from tests.fuzzing.targets import TARGETS, lay_out, outcome

CORPUS = sorted((Path(__file__).parent / "fuzzing" / "corpus").iterdir())
OF_STORES = ("manifest", "attributes", "chunk")
"""Targets whose inputs take a fraction of a second each."""


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_fuzzing_found_stays_found(path: Path, tmp_path: Path) -> None:
    name, number, _ = path.name.split(".", 2)
    target = TARGETS[name]
    seeds = target.seeds()
    seed = seeds[int(number) % len(seeds)]
    lay_out(seed, tmp_path / "place")
    shutil.copyfile(path, tmp_path / "place" / seed.hostile)
    assert outcome(target, tmp_path / "place") in ("read", "refused")


def _nothing_else(name: str, count: int, place: Path) -> None:
    target = TARGETS[name]
    outcomes = fuzz(target, count, random.Random(f"make test {name}"), place, 60)
    assert set(outcomes) <= {"read", "refused"}, outcomes
    assert outcomes.total() == count


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_a_few_hundred_hostile_files(name: str, tmp_path: Path) -> None:
    _nothing_else(name, 2 if name in OF_STORES else 60, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_thousands_of_hostile_files(name: str, tmp_path: Path) -> None:
    _nothing_else(name, 100 if name in OF_STORES else 5000, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_the_files_that_are_changed_are_valid(name: str, tmp_path: Path) -> None:
    """Fuzzing of files that are refused as they are would show nothing."""
    target = TARGETS[name]
    for number, seed in enumerate(target.seeds()[:3]):
        lay_out(seed, tmp_path / str(number))
        assert outcome(target, tmp_path / str(number)) == "read"
