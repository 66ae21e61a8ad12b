"""Ingest against the least its arithmetic and its bytes can take, measured in the same run.

    python benchmarks/floor.py [--layers 4] [--repeats 3] [--quick]

Three things no program that computes these numbers gets around: reading the bytes of the attention tensors from
storage, as many floating point operations in matrix products, and as many eigen-, singular value and Cholesky
decompositions of the same sizes. One layer is measured under a recorder that notes every such call; bytes are read
with the file out of the page cache, products are charged at the rate of large square ones, and random matrices of
the sizes noted are decomposed. Everything runs on as many threads as ingest measures layers with, one each. The
floor is the sum; start is a process that only imports what ingest imports. Hashing, which identity asks for, is
measured beside the floor and is no part of it.

SmolLM2-135M-Instruct is read from models/SmolLM2-135M-Instruct.gguf as a directory of safetensors, and some layers
of the shape of an 8B model are made of random numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import ROOT, evict, medians, python, run, save
from synthetic import EIGHT_B, Shape, write
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(ROOT))

from ingest.checkpoint import Checkpoint
from ingest.factors import head_factors, layer_digests, read_weights
from ingest.pipeline import cores
from ingest.plan import LayerPlan, Plan, plan_checkpoint
from ingest.source import open_checkpoint
from stats.factorization import RANK_CUT
from stats.layer import measure_layer

GGUF = ROOT / "models" / "SmolLM2-135M-Instruct.gguf"
SQUARE = 1024
"""Width of the square products whose rate is the machine's."""

START = "import gc; gc.disable(); import store.ingestion; gc.freeze()"

DECOMPOSITIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "eigenvectors": torch.linalg.eigh,
    "singular vectors": torch.linalg.svd,
    "singular values": torch.linalg.svdvals,
    "eigenvalues": torch.linalg.eigvals,
    "cholesky": torch.linalg.cholesky,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One decomposition: what is asked for, and the rows and columns of the matrix."""

    kind: str
    rows: int
    columns: int

    def matrix(self) -> torch.Tensor:
        """A random matrix it can be asked of."""
        matrix = torch.randn(self.rows, self.columns, dtype=torch.float64)
        if self.kind not in ("eigenvectors", "cholesky"):
            return matrix
        return matrix @ matrix.mT + self.rows * torch.eye(self.rows, dtype=torch.float64)


class Recorder(TorchDispatchMode):
    """Counts the floating point operations of products and the decompositions of everything run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.problems: Counter[Problem] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            left, right = args[:2]
            self.flops += 2 * left.numel() * right.shape[-1]
        elif name in ("mv", "dot"):
            self.flops += 2 * args[0].numel()
        elif name in ("_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_eigvals", "linalg_cholesky_ex"):
            kind = {"_linalg_eigh": "eigenvectors", "linalg_cholesky_ex": "cholesky"}.get(name, "eigenvalues")
            self._note(kind, args[0])
        elif name == "_linalg_svd":
            full = len(args) > 1 and args[1]  # svdvals asks for thin ones, and for vectors only because it is recorded
            self._note("singular vectors" if full else "singular values", args[0])
        return func(*args, **kwargs)

    def _note(self, kind: str, matrices: torch.Tensor) -> None:
        *batch, rows, columns = matrices.shape
        self.problems[Problem(kind, rows, columns)] += int(torch.Size(batch).numel())


def record(plan: Plan, layer: LayerPlan) -> Recorder:
    """What measuring one layer asks of the machine."""
    cpu = torch.device("cpu")
    factors = head_factors(read_weights(plan.checkpoint, layer), layer, "raw", cpu, torch.float64)
    cut = RANK_CUT[torch.float64]
    with Recorder() as recorder:
        measure_layer(factors.output, factors.value, factors.query, factors.key, factors.kv_head, cut)
    return recorder


def together(work: Callable[[], object], threads: int) -> float:
    """Seconds until every one of some threads has done the same work once."""
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(lambda _: time.sleep(0.01), range(threads)))
        started = time.perf_counter()
        list(pool.map(lambda _: work(), range(threads)))
        return time.perf_counter() - started


def reading_seconds(checkpoint: Checkpoint, plan: Plan, weights: Path) -> float:
    """Seconds of reading the tensors of a plan into memory, with the file out of the page cache."""
    evict([weights])
    started = time.perf_counter()
    with weights.open("rb", buffering=0) as stream:
        for name in dict.fromkeys(name for layer in plan.layers for name in layer.tensors.values()):
            place = checkpoint.place(name)
            assert place is not None
            stream.seek(place[1])
            buffer = bytearray(checkpoint.header(name).nbytes)
            view = memoryview(buffer)
            while view:
                view = view[stream.readinto(view) :]
    return time.perf_counter() - started


def flops_per_second(threads: int) -> float:
    """Rate of float64 products of large square matrices, of all threads together, the best of five."""
    square = torch.randn(SQUARE, SQUARE, dtype=torch.float64)
    return max(
        threads * 2 * SQUARE**3 * 2 / together(lambda: (square @ square, square @ square), threads) for _ in "12345"
    )


def decomposing_seconds(recorder: Recorder, threads: int) -> float:
    """Seconds of one layer's decompositions where every thread has a layer."""
    given = [(DECOMPOSITIONS[problem.kind], problem.matrix(), count) for problem, count in recorder.problems.items()]

    def work() -> None:
        for solve, matrix, count in given:
            for _ in range(count):
                solve(matrix)

    return min(together(work, threads) for _ in range(2)) / threads


def hashing_seconds(plan: Plan, threads: int) -> float:
    """Seconds of one layer's digests where every thread has a layer."""
    layer = plan.layers[0]
    weights = read_weights(plan.checkpoint, layer)
    return together(lambda: layer_digests(weights, layer, plan.operators), threads) / threads


def floor_of(directory: Path, repeats: int) -> dict[str, float | int]:
    """Ingest a checkpoint in a process of its own, in turns with its floor."""
    weights = directory / "model.safetensors"
    checkpoint = open_checkpoint(str(directory))
    plan = plan_checkpoint(checkpoint)
    threads = min(cores(), len(plan.layers))
    recorded = [record(plan, layer) for layer in (plan.layers[0], plan.layers[len(plan.layers) // 2])]
    layers, scale = len(plan.layers), len(plan.layers) / len(recorded)
    parts: dict[str, list[float]] = {name: [] for name in ("reading", "products", "decompositions", "hashing")}
    ingests, starts, rates = [], [], []
    for repeat in range(repeats + 1):
        with tempfile.TemporaryDirectory() as store:
            command = [python(), str(ROOT / "cli.py"), "ingest", str(directory), "--device", "cpu"]
            ingest = run([*command, "--store", store], [weights])
        start = run([python(), "-c", START], environment={"PYTHONPATH": str(ROOT)})
        if repeat == 0:
            continue
        ingests.append(ingest)
        starts.append(start)
        parts["reading"].append(reading_seconds(checkpoint, plan, weights))
        rates.append(flops_per_second(threads))
        parts["products"].append(scale * sum(found.flops for found in recorded) / rates[-1])
        parts["decompositions"].append(scale * sum(decomposing_seconds(found, threads) for found in recorded))
        parts["hashing"].append(layers * hashing_seconds(plan, threads))
    seconds = {name: median(values) for name, values in parts.items()}
    floor = sum(value for name, value in seconds.items() if name != "hashing")
    wall, start_seconds = medians(ingests)["wall_seconds"], medians(starts)["wall_seconds"]
    counted: Counter[str] = Counter()
    for found in recorded:
        for problem, count in found.problems.items():
            counted[problem.kind] += count
    return {
        "layers": layers,
        "threads": threads,
        "bytes": plan.bytes_to_read,
        "flops": round(scale * sum(found.flops for found in recorded)),
        **{name.replace(" ", "_"): round(scale * count) for name, count in counted.items()},
        "flops_per_second": median(rates),
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "floor_seconds": floor,
        "start_seconds": start_seconds,
        "ingest_seconds": wall,
        "ingest_over_floor": wall / floor,
        "ingest_less_start_over_floor": (wall - start_seconds) / floor,
        "ingest_over_floor_and_start": wall / (floor + start_seconds),
    }


def main() -> None:
    """Measure both checkpoints and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the 8B shape")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small random checkpoints, once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 1 if options.quick else options.repeats
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shaped = Shape(2, 512, 8, 2, 64) if options.quick else replace(EIGHT_B, layers=options.layers)
        write(folder / "shaped-8b", shaped)
        checkpoints: Sequence[str] = ("shaped-8b",)
        if GGUF.exists() and not options.quick:
            script = Path(__file__).parent / "smollm2_directory.py"
            run([python(), str(script), str(GGUF), str(folder / "SmolLM2-135M-Instruct")])
            checkpoints = ("SmolLM2-135M-Instruct", "shaped-8b")
        figures = {name: floor_of(folder / name, repeats) for name in checkpoints}
    path = save("floor", {"repeats": repeats, "square": SQUARE, "figures": figures})
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
