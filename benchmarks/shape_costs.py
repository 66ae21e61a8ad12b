"""How the cost of ingest grows with layers, heads, d_model and d_head.

    python benchmarks/shape_costs.py [--repeats 3] [--quick]

Random checkpoints around one shape, one size changed at a time, are ingested into fresh stores by one process, in
turns, one layer at a time; the medians of the seconds between plan and end. A slope is that of log seconds against
log size, by least squares over all sizes and between the two largest: 1 is proportional. Pairs of heads make the
slope of heads larger than 1, decompositions that of d_head. The fixed cost of opening and publishing is part of every
run and makes slopes at small sizes smaller.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from measuring import ROOT, save
from synthetic import Shape, write

sys.path.insert(0, str(ROOT))

from ingest.pipeline import ComputeSettings
from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
from store.atlas import AtlasStore
from store.ingestion import Identity, ingest_model

BASE = Shape(4, 1024, 16, 4, 64)
SIZES: dict[str, tuple[Shape, ...]] = {
    "layers": tuple(replace(BASE, layers=size) for size in (2, 4, 8, 16)),
    "heads": tuple(replace(BASE, heads=size, kv_heads=size // 4) for size in (8, 16, 32, 64)),
    "d_model": tuple(replace(BASE, d_model=size) for size in (512, 1024, 2048, 4096)),
    "d_head": tuple(replace(BASE, d_head=size) for size in (32, 64, 96, 128)),
}
QUICK = Shape(1, 64, 4, 2, 8)
QUICK_SIZES = {
    name: tuple(replace(QUICK, **{name: size * getattr(QUICK, name)}) for size in (1, 2))
    for name in ("layers", "d_head")
}


def seconds(directory: Path, store: Path) -> float:
    """One ingest into a fresh store."""
    plan = plan_checkpoint(open_checkpoint(str(directory)))
    started = time.perf_counter()
    ingest_model(
        AtlasStore.open_or_create(store),
        plan,
        Identity("random"),
        ComputeSettings(device="cpu", threads=1),
        progress=lambda *_: None,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure every size and write seconds and slopes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two small sizes of two axes, once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats, wanted = (1, QUICK_SIZES) if options.quick else (options.repeats, SIZES)
    shapes = list(dict.fromkeys(shape for axis in wanted.values() for shape in axis))
    taken: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, shape in enumerate(shapes):
            write(folder / f"random-{number}", shape)
        for repeat in range(repeats + 1):
            for number, shape in enumerate(shapes if repeat else shapes[:1]):
                spent = seconds(folder / f"random-{number}", folder / f"atlas-{repeat}-{number}")
                if repeat:
                    taken[shape].append(spent)
    figures = {}
    for axis, varied in wanted.items():
        sizes = [getattr(shape, axis) for shape in varied]
        spent = [median(taken[shape]) for shape in varied]
        logs = np.log(sizes), np.log(spent)
        figures[axis] = {
            "sizes": sizes,
            "seconds": spent,
            "slope": float(np.polyfit(*logs, 1)[0]),
            "last_slope": float(np.polyfit(logs[0][-2:], logs[1][-2:], 1)[0]),
        }
    base = QUICK if options.quick else BASE
    shape = {name: getattr(base, name) for name in ("layers", "d_model", "heads", "kv_heads", "d_head")}
    path = save("shape_costs", {"repeats": repeats, "around": shape, "figures": figures})
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
