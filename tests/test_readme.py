"""What the README shows of commands and their output, run on the demo model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli import main
from tests.printed import ROOT, Shown, arguments, cells, consoles

README = list(consoles((ROOT / "README.md").read_text()))

pytestmark = pytest.mark.xdist_group("demo")


@pytest.fixture(scope="module")
def store(demo_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, which commands may add to."""
    return Path(shutil.copytree(demo_store, tmp_path_factory.mktemp("readme") / "atlas"))


@pytest.mark.parametrize("shown", README, ids=lambda shown: shown.text)
def test_a_command_prints_what_the_readme_shows(
    shown: Shown, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(main, arguments(shown.text), env={"HEADATLAS_STORE": str(store)})
    assert ran.exit_code == 0, ran.stderr
    assert cells(ran.stdout) == cells(shown.output)


def test_the_readme_shows_commands() -> None:
    assert len(README) >= 5


def test_cells_are_compared_whatever_the_width_of_columns() -> None:
    text = "$ headatlas models\nname    n\n----  ---\na       1\nb\n$ ls\nfile\n$ headatlas remove x\n"
    (shown,) = consoles(f"```console\n{text}```\n")
    assert shown.text == "headatlas models"
    assert cells(shown.output) == cells("name      n\n------  ---\na         1\nb\n")
    for other in ("name n\n---- ---\na 2\nb", "name n\n---- ---\na 1", "name n\n---- ---\na 1 b", "name\n----\na 1\nb"):
        assert cells(shown.output) != cells(other)
