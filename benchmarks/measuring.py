"""Whole processes measured from outside: wall time, peak memory, bytes fetched from storage."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("HEADATLAS_BENCHMARK_RESULTS") or Path(__file__).parent / "results")
"""Where figures are written; runs that only try a benchmark write elsewhere."""


@dataclass(frozen=True, slots=True)
class Run:
    """One finished process; ``peak_mib`` is never below what the measuring process took when it started it."""

    wall_seconds: float
    peak_mib: float
    fetched_bytes: int
    output: str


def evict(paths: Sequence[Path]) -> None:
    """Ask the kernel to drop files from its page cache, so that reading them is counted."""
    for path in paths:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(command: Sequence[str], cold: Sequence[Path] = (), environment: Mapping[str, str] | None = None) -> Run:
    """Run a command to its end.

    Args:
        command: what to run.
        cold: files that must come from storage; ``fetched_bytes`` then counts what was fetched,
            read-ahead included, through ``read`` and through memory maps alike.
        environment: added to this process's environment.

    Raises:
        RuntimeError: the command failed.
    """
    evict(cold)
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})}, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    output = process.stdout.read()
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}\n{errors[-2000:]}")
    return Run(wall, usage.ru_maxrss / 1024, usage.ru_inblock * 512, output)


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """Median of every figure over repeated runs."""
    return {name: median(asdict(item)[name] for item in runs) for name in ("wall_seconds", "peak_mib")}


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
    }


def save(name: str, figures: Mapping[str, object]) -> Path:
    """Write figures, with the machine, to ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def python() -> str:
    """The interpreter that runs the benchmark."""
    return sys.executable
