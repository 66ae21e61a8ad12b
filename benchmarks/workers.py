"""How ingest scales with threads, worker processes and workers of a Dask cluster on one machine.

    python benchmarks/workers.py [--repeats 3] [--quick]

One random checkpoint is ingested by whole processes: by one and two threads, by one and two worker processes of one
thread, and by one and two workers of a local Dask cluster of one thread, if distributed is installed. Each speedup is
one over two of the same kind; what is missing from 2 is start-up and publishing, which one process does. Each kind's
time is also compared with one thread's in one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from measuring import ROOT, Run, medians, python, run, save
from synthetic import Shape, write

SHAPE = Shape(16, 2048, 16, 4, 128)
QUICK = Shape(2, 64, 4, 2, 8)


@contextmanager
def dask(workers: int) -> Iterator[list[str]]:
    """Options that use a local cluster of some workers of one thread."""
    from distributed import LocalCluster

    quiet = {"dashboard_address": None, "silence_logs": "CRITICAL"}
    with LocalCluster(n_workers=workers, threads_per_worker=1, **quiet) as cluster:
        yield ["--cluster", cluster.scheduler_address]


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny checkpoint, once")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    kinds = {
        "threads": lambda count: nullcontext(["--threads", str(count)]),
        "processes": lambda count: nullcontext(["--workers", str(count), "--threads", "1"]),
    }
    if importlib.util.find_spec("distributed"):
        kinds["dask"] = dask
    else:
        print("distributed is not installed: the cluster is left out")
    runs: dict[tuple[str, int], list[Run]] = {(kind, count): [] for kind in kinds for count in (1, 2)}
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "random"
        shape = QUICK if options.quick else SHAPE
        write(checkpoint, shape)
        command = [python(), str(ROOT / "cli.py"), "ingest", str(checkpoint), "--device", "cpu"]
        for repeat in range(repeats):
            for kind, count in runs:
                with kinds[kind](count) as chosen:
                    store = Path(temporary) / f"{kind}-{count}-{repeat}"
                    # A local cluster's workers are as old as the cluster: only the command itself is timed.
                    runs[kind, count].append(run([*command, *chosen, "--store", str(store)], environment=one_thread()))
    seconds = {key: medians(done)["wall_seconds"] for key, done in runs.items()}
    alone = seconds["threads", 1]
    figures = {
        kind: {
            "one_seconds": seconds[kind, 1],
            "two_seconds": seconds[kind, 2],
            "speedup": seconds[kind, 1] / seconds[kind, 2],
            "two_against_one_thread": alone / seconds[kind, 2],
        }
        for kind in kinds
    }
    sizes = {"layers": shape.layers, "d_model": shape.d_model, "heads": shape.heads, "d_head": shape.d_head}
    path = save("workers", {"repeats": repeats, "shape": sizes, "figures": figures})
    print(path.read_text(encoding="utf-8"))


def one_thread() -> dict[str, str]:
    """Keeps the libraries' own threads out of the comparison."""
    return {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
