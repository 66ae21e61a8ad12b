"""Commands and queries that a document shows with what they print, and the store that they are asked of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from store.atlas import AtlasStore, Derivation
from store.derivation import derive
from tests.ingesting import ingest_into

ROOT = Path(__file__).parent.parent
DEMO_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.gguf"
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPE = re.compile(r"^```sql\n(.*?)^```$\s*^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Shown:
    """Something to run and the output that a document gives for it."""

    text: str
    output: str


def consoles(document: str) -> Iterator[Shown]:
    """Commands of this program in console blocks that are followed by output."""
    for block in CONSOLE.findall(document):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if command.startswith("headatlas ") and output.strip():
                yield Shown(command, output)


def recipes(document: str) -> Iterator[Shown]:
    """Queries that are followed by their answer."""
    for query, output in RECIPE.findall(document):
        yield Shown(query, output)


def arguments(command: str) -> list[str]:
    """What a shell makes of a command of this program, without its name."""
    return shlex.split(command)[1:]


def cells(output: str) -> list[list[str]]:
    """Lines as cells: their words, however wide the columns are. Rules under headings go by what stands above."""
    lines = [line.split() for line in output.splitlines()]
    return [["-"] * len(line) if line and set("".join(line)) == {"-"} else line for line in lines if line]


def make_demo_store(store: Path) -> Path:
    """SmolLM2-135M-Instruct in both operators, with 1,000 scrambles of each head and capacities by assignment."""
    ingest_into(store, DEMO_MODEL, "SmolLM2-135M-Instruct", ("raw", "folded"))
    opened = AtlasStore.open(store)
    for operator in ("raw", "folded"):
        for wanted in (Derivation("scramble", n_draws=1000, seed=0, independent=False), Derivation("assignment")):
            derive(opened, "SmolLM2-135M-Instruct", operator, wanted, torch.device("cpu"), lambda *_: None)
    return store
