"""Makes the store that is kept in ``data/``: ``python -m tests.making_store``, once for each version of the format.

Two tiny models, one with two operators, with scrambles, capacities, a statistic of a user's own and a question.
What it answers is written down beside it.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path

import torch

from query import open_atlas
from store.atlas import FORMAT_VERSION, AtlasStore, Derivation
from store.derivation import derive, derive_user_statistics
from store.user_statistics import load
from tests import checkpoints
from tests.ingesting import ingest_into

DATA = Path(__file__).parent / "data"
QUESTION = "-- question: how many heads each model has\nSELECT model, count(*) AS heads FROM heads GROUP BY model\n"
STATISTIC = """
from store.user_statistics import statistic

@statistic(meaning="singular values above half the largest", values="1 to d_head", sql_type="INTEGER")
def wide(sigma):
    return (sigma > sigma[:, :1] / 2).sum(-1)
"""
QUERIES = {
    "heads": "SELECT model, operator, stack, label, closure, alpha, norm, rank, wide FROM heads ORDER BY ALL",
    "pairs": "SELECT * FROM pairs ORDER BY ALL",
    "spectra": "SELECT * FROM spectra ORDER BY model, operator, stack, layer, head",
    "nulls": "SELECT model, operator, stack, layer, head, kind, n_draws, median, p, q FROM nulls ORDER BY ALL",
    "capacities": (
        "SELECT model, operator, stack, layer, head, method, closure, attainment FROM capacities ORDER BY ALL"
    ),
    "models": "SELECT model, content_hash, qk_hash, n_layers, n_heads FROM models ORDER BY ALL",
    "layers": "SELECT * FROM layers ORDER BY model, stack, layer",
}
"""What the numbers that are written down answer."""


def answers(store: Path) -> dict[str, list[list[object]]]:
    """Rows of every query, as JSON has them."""
    with open_atlas(store) as atlas:
        found = {name: [list(row) for row in atlas.sql(query).rows()] for name, query in QUERIES.items()}
    return json.loads(json.dumps(found))


def make_store(store: Path, beside: Path) -> None:
    """The store, with its checkpoints beside it."""
    sizes = {"layers": 2, "d_model": 16, "d_head": 4}
    tiny = checkpoints.save_safetensors(checkpoints.llama(**sizes), beside / "tiny-llama")
    ingest_into(store, tiny, "tiny llama", ("raw", "folded"))
    ingest_into(store, checkpoints.save_safetensors(checkpoints.bert(d_model=16), beside / "tiny-bert"), "tiny-bert")
    opened = AtlasStore.open(store)
    for model, operator in (("tiny llama", "raw"), ("tiny llama", "folded"), ("tiny-bert", "raw")):
        for wanted in (Derivation("scramble", 50, 0, False), Derivation("assignment")):
            derive(opened, model, operator, wanted, torch.device("cpu"), lambda *_: None)
    statistics = beside / "mine.py"
    statistics.write_text(STATISTIC, encoding="utf-8")
    derive_user_statistics(opened, ["tiny llama"], load(statistics))
    (store / "queries").mkdir()
    (store / "queries" / "count-heads.sql").write_text(QUESTION, encoding="utf-8")


def main() -> None:
    """Write the files of today's format."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "atlas"
        make_store(store, Path(folder))
        name = DATA / f"store-format-{FORMAT_VERSION}"
        with tarfile.open(name.with_suffix(".tar.xz"), "w:xz", preset=9) as archive:
            archive.add(store, "atlas")
        name.with_suffix(".json").write_text(json.dumps(answers(store)), encoding="utf-8")


if __name__ == "__main__":
    main()
