"""Many writers and readers on one store at once.

    python -m tests.reliability.many --writers 8 --readers 8 --seconds 120

Writers ingest models of their own, one after another, replace some, derive from some and remove some. Readers
open the store again and again: every model they see has all its heads and layers in every table, and the arrays
hold what the catalogue says, unless the store says that it has changed meanwhile. In the end every model that a
writer left is there, and ``verify`` finds nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.reliability.forks import Ended, Fork, import_everything

CHANGED = "the store has changed since it was opened"
LAYERS = {"one": 2, "two": 3, "three": 4}
WHOLE = """
SELECT model, (SELECT sum(n_heads) FROM layers AS l WHERE l.model = m.model) AS expected,
    (SELECT count(*) FROM layers AS l WHERE l.model = m.model) AS layers, n_layers,
    (SELECT count(*) FROM operators AS o WHERE o.model = m.model) AS operators,
    (SELECT count(*) FROM heads AS h WHERE h.model = m.model) AS heads,
    (SELECT count(*) FROM spectra AS s WHERE s.model = m.model) AS spectra,
    (SELECT count(*) FROM qk AS q WHERE q.model = m.model) AS qk,
    (SELECT count(*) FROM derivations AS d WHERE d.model = m.model AND kind = 'scramble') AS derived,
    (SELECT count(*) FROM nulls AS n WHERE n.model = m.model AND kind = 'scramble') AS nulls
FROM models AS m ORDER BY model
"""


@dataclass(frozen=True)
class Total:
    """What all did together."""

    published: int
    removed: int
    looks: int
    models_seen: int
    changed_meanwhile: int
    waited: int
    left: int
    seconds: float


def writer(store: Path, checkpoints: Path, number: int, ends: float) -> Callable[[], Any]:
    """Work of one writer; returns the names it left, and how much it published and removed."""

    def work() -> tuple[dict[str, str], int, int]:
        import torch

        from store.atlas import AtlasStore, Derivation
        from store.derivation import derive
        from store.integrity import remove
        from tests.ingesting import ingest_into

        chance = random.Random(number)
        mine: dict[str, str] = {}
        published = removed = 0
        count = 0
        while count == 0 or time.time() < ends:
            kind, name = chance.choice(list(LAYERS)), f"w{number}-{count}"
            if not mine or chance.random() < 0.45:
                ingest_into(store, checkpoints / kind, name)
                mine[name] = kind
                count += 1
            elif (step := chance.random()) < 0.3:
                name = chance.choice(list(mine))
                ingest_into(store, checkpoints / kind, name, replace=True)
                mine[name] = kind
            elif step < 0.7:
                name = chance.choice(list(mine))
                wanted = Derivation("scramble", n_draws=20, seed=count, independent=False)
                derive(AtlasStore.open(store), name, "raw", wanted, torch.device("cpu"), lambda *_: None)
            else:
                name = chance.choice(list(mine))
                remove(AtlasStore.open(store), name)
                del mine[name]
                removed += 1
                continue
            published += 1
        return mine, published, removed

    return work


def reader(store: Path, number: int, ends: float) -> Callable[[], Any]:
    """Work of one reader; returns looks, models seen whole, and arrays that had gone."""

    def work() -> tuple[int, int, int]:
        from query import open_atlas
        from stats.errors import QueryError

        chance = random.Random(1000 + number)
        looks = seen = gone = 0
        while time.time() < ends:
            with open_atlas(store) as atlas:
                for model, expected, layers, n_layers, operators, *counts in atlas.sql(WHOLE).rows():
                    heads, spectra, qk, derived, nulls = counts
                    assert layers == n_layers, model
                    assert heads == spectra == qk == expected * operators, (model, counts)
                    assert nulls == derived * expected, (model, counts)
                    seen += 1
                names = atlas.sql("SELECT model FROM models ORDER BY model")["model"].to_list()
                for model in chance.sample(names, min(2, len(names))):
                    query = "SELECT closure FROM heads WHERE model = $model AND operator = 'raw' ORDER BY layer, head"
                    told = atlas.sql(query, {"model": model})["closure"].to_numpy()
                    try:
                        np.testing.assert_array_equal(atlas.array(model, "closure").ravel(), told)
                        core = atlas.array(model, "core")
                        assert not np.isnan(core).any(), model
                        sigma = np.linalg.svd(core, compute_uv=False)
                        np.testing.assert_allclose(atlas.array(model, "sigma"), sigma, rtol=1e-8, atol=1e-12)
                    except QueryError as error:
                        if error.what != CHANGED:
                            raise
                        gone += 1
                looks += 1
        return looks, seen, gone

    return work


def run(root: Path, writers: int, readers: int, seconds: float) -> Total:
    """Let them all go, and check what is left.

    Raises:
        AssertionError: a writer or reader failed, a model is missing, or the store is not sound.
    """
    from tests.checkpoints import llama, save_safetensors

    store, checkpoints = root / "atlas", root / "checkpoints"
    for seed, (kind, layers) in enumerate(LAYERS.items()):
        save_safetensors(llama(layers=layers, seed=seed), checkpoints / kind)
    started = time.monotonic()
    first = Fork(writer(store, checkpoints, 0, time.time() + 0.01), root / "printed-first").wait()
    good(first)
    ends = time.time() + seconds
    writing = [
        Fork(writer(store, checkpoints, number, ends), root / f"printed-{number}") for number in range(1, writers + 1)
    ]
    reading = [Fork(reader(store, number, ends), root / f"printed-r{number}") for number in range(readers)]
    wrote, read = [first, *(child.wait() for child in writing)], [child.wait() for child in reading]
    for ended in (*wrote, *read):
        good(ended)
    for ended in read:
        assert not ended.printed, ended.printed
    expected = {name: LAYERS[kind] for ended in wrote for name, kind in ended.returned[0].items()}
    stored = Fork(lambda: sound(store), root / "printed-last").wait()
    good(stored)
    assert stored.returned == expected, "models are missing, or there are others"
    lines = [line for ended in wrote for line in ended.printed.splitlines()]
    return Total(
        sum(ended.returned[1] for ended in wrote),
        sum(ended.returned[2] for ended in wrote),
        *(sum(ended.returned[part] for ended in read) for part in range(3)),
        len(lines),
        len(expected),
        time.monotonic() - started,
    )


def good(ended: Ended) -> None:
    """A child ended well and said nothing but whom it waited for."""
    assert ended.status == 0, ended.printed
    for line in ended.printed.splitlines():
        assert line.startswith("waiting for "), ended.printed


def sound(store: Path) -> dict[str, int]:
    """Layers of every model, of a store in which nothing is to be found."""
    from query import open_atlas
    from store.atlas import AtlasStore
    from store.integrity import verify

    left = list(verify(AtlasStore.open(store)))
    assert not left, left
    with open_atlas(store) as atlas:
        return dict(atlas.sql("SELECT model, n_layers FROM models").rows())


def main() -> None:
    """Run once and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    import_everything()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(run(root, given.writers, given.readers, given.seconds))


if __name__ == "__main__":
    main()
