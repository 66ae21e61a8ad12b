"""The benchmarks, one command each, and their summary.

    python benchmarks/run.py                 # the suite, without what takes long
    python benchmarks/run.py floor startup   # some of it
    python benchmarks/run.py --all           # and what takes long
    python benchmarks/run.py --list
    python benchmarks/run.py --summary       # benchmarks/README.md and docs/figures/speed.svg from the results

Each writes benchmarks/results/NAME.json with the machine and the commit. Expected durations are for two quiet cores;
`load` in a result says how busy the machine was. With --quick everything runs once on tiny inputs, to see that it
runs, and its results go to a temporary directory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
STORE = "{store}"
"""Stands for a store that the benchmarks of one run share."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script with its arguments, those of a quick try, and the seconds it is expected to take.

    ``quick`` is None where nothing of it is quick.
    """

    name: str
    script: str
    seconds: int
    what: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ("--quick",)
    long: bool = False


SUITE = (
    Benchmark("ingest", "ingest_against_loading", 200, "ingest against loading the whole model", ("--repeats", "3")),
    Benchmark("floor", "floor", 130, "ingest against reading, products and decompositions alone"),
    Benchmark("costs", "shape_costs", 75, "cost against layers, heads, d_model and d_head"),
    Benchmark(
        "remote",
        "remote_bytes",
        30,
        "bytes moved to read a checkpoint from a server",
        ("--layers", "4"),
        ("--layers", "1"),
    ),
    Benchmark("draws", "scramble_draws", 15, "scrambles per second, fast, independent and by QR"),
    Benchmark("capacity", "capacity", 15, "capacities per second, by assignment and by ascent"),
    Benchmark("queries", "query_scale", 60, "named questions at 7,304 and at 102,256 heads"),
    Benchmark("startup", "startup", 45, "start-up of the command line"),
    Benchmark("workers", "workers", 140, "one and two threads, processes and Dask workers"),
    Benchmark(
        "large", "large_checkpoint", 130, "a checkpoint of the shape of an 8B model", (), ("--layers", "1"), True
    ),
    Benchmark("panel", "panel_derivations", 280, "nulls and capacities of 7,304 heads", (STORE,), None, True),
    Benchmark("latency", "query_latency", 60, "named questions on that panel", (STORE,), None, True),
    Benchmark("report", "report_size", 60, "a report of that panel in a browser", (STORE,), None, True),
    Benchmark("remote-235b", "remote_bytes", 300, "bytes moved at the size of a 235B model", (), None, True),
)
BY_NAME = {benchmark.name: benchmark for benchmark in SUITE}


def listing() -> str:
    """Names, expected seconds and subjects."""
    lines = [f"{item.name:<12} {item.seconds:>5} s  {item.what}" + (" (--all)" if item.long else "") for item in SUITE]
    usual = sum(item.seconds for item in SUITE if not item.long)
    everything = sum(item.seconds for item in SUITE)
    return "\n".join([*lines, f"{'in all':<12} {usual:>5} s, with --all {everything} s"])


def run_one(benchmark: Benchmark, quick: bool, store: Path, results: Path) -> bool:
    """Run a benchmark as a process of its own; whether it succeeded."""
    arguments = (benchmark.quick or ()) if quick else benchmark.arguments
    script = str(HERE / f"{benchmark.script}.py")
    command = [sys.executable, script, *(argument.replace(STORE, str(store)) for argument in arguments)]
    print(f"{benchmark.name}: {benchmark.what}, about {benchmark.seconds} s", flush=True)
    started = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, "HEADATLAS_BENCHMARK_RESULTS": str(results), "PYTHONPATH": str(HERE.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    spent = time.perf_counter() - started
    print(f"{benchmark.name}: {'done' if done.returncode == 0 else 'failed'} after {spent:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    return done.returncode == 0


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all that do not take long if none is named")
    parser.add_argument("--quick", action="store_true", help="once, tiny, into a temporary directory")
    parser.add_argument("--all", action="store_true", help="also what takes long")
    parser.add_argument("--list", action="store_true", help="print names and expected durations")
    parser.add_argument("--summary", action="store_true", help="write README.md and the figure from the results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BY_NAME]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    if options.list:
        print(listing())
        return
    if options.summary:
        from summary import summarise

        for path in summarise():
            print(f"written to {path}")
        return
    chosen = [BY_NAME[name] for name in options.names] or [item for item in SUITE if options.all or not item.long]
    if options.quick:
        chosen = [item for item in chosen if item.quick is not None]
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results" if options.quick else HERE / "results"
        failed = [item.name for item in chosen if not run_one(item, options.quick, Path(temporary) / "atlas", results)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
