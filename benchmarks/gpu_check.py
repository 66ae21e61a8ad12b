"""What a CUDA device computes, against the CPU, and how fast.

    python benchmarks/gpu_check.py                # under five minutes on one large GPU
    python benchmarks/gpu_check.py --self-check   # the same code on the CPU, with small sizes

Agreement: a small checkpoint is ingested on both, in float64 and in float32, and every stored number that does not
depend on a choice of basis is compared; in float64 the largest difference must be at most 1e-10 of its array's largest
entry. Rates: matrix products, decompositions of d_head x d_head matrices on the device and on the host, and transfers.
Layers of the shapes of a 70B model and of a 235B mixture are measured with several threads and compared with the
floor, which is their products and decompositions at those rates. Scrambles and capacities are drawn and climbed on
both. Without a CUDA device it says so and ends with status 0. Exit status 1 means that the numbers do not agree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capacity import spectra
from floor import DECOMPOSITIONS, Problem, Recorder
from measuring import ROOT, save
from synthetic import MIXTURE_235B, SEVENTY_B, Shape, write

sys.path.insert(0, str(ROOT))

from ingest.factors import head_factors, read_weights
from ingest.pipeline import ComputeSettings, cores, measure
from ingest.plan import Plan, plan_checkpoint
from ingest.source import open_checkpoint
from stats.capacity import assignment_capacity
from stats.factorization import RANK_CUT
from stats.layer import measure_layer
from stats.refinement import refine_assignment
from stats.scramble import scramble_draws
from stats.tail import tail_p
from store.arrays import read_stack
from store.atlas import AtlasStore
from store.ingestion import Identity, ingest_model

AGREEMENT = 1e-10
SMALL = Shape(4, 512, 8, 2, 64)
TINY = Shape(2, 64, 4, 2, 8)
UNCOMPARED = ("eigenvalue", "core", "o_basis", "v_basis")
"""Defined up to an order or a rotation that rounding decides; spectral_radius and copying stand for the eigenvalues."""

CPU = torch.device("cpu")


def wait(device: torch.device) -> None:
    """Until everything given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The best of some runs, after one that is not counted."""
    work()
    spent = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        spent.append(time.perf_counter() - started)
    return min(spent)


def stored_arrays(checkpoint: Path, store: Path, device: str, dtype: str) -> dict[str, np.ndarray]:
    """What an ingest on a device stores."""
    atlas = AtlasStore.open_or_create(store)
    plan = plan_checkpoint(open_checkpoint(str(checkpoint)))
    ingest_model(atlas, plan, Identity("checked"), ComputeSettings(device, dtype), progress=lambda *_: None)
    group = atlas.arrays_path / atlas.model("checked").array_group
    return read_stack(group / "raw" / "decoder")


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest entry; infinite where one is defined and the other is not."""
    if found.dtype.kind in "iub":
        return 0.0 if np.array_equal(found, expected) else np.inf
    if not np.array_equal(np.isnan(found), np.isnan(expected)):
        return np.inf
    largest = np.nanmax(np.abs(expected), initial=0.0)
    return float(np.nanmax(np.abs(found - expected), initial=0.0) / (largest or 1.0))


def agreement(folder: Path, device: torch.device, shape: Shape) -> dict[str, Any]:
    """Largest difference of every stored array from the CPU's in float64, by dtype, and the largest of all."""
    write(folder / "small", shape)
    expected = stored_arrays(folder / "small", folder / "cpu", "cpu", "float64")
    found = {}
    for dtype in ("float64", "float32"):
        arrays = stored_arrays(folder / "small", folder / dtype, str(device), dtype)
        assert arrays.keys() == expected.keys()
        by_name = {name: difference(array, expected[name]) for name, array in arrays.items() if name not in UNCOMPARED}
        worst = max(by_name, key=lambda name: by_name[name])
        found[dtype] = {"largest": by_name[worst], "in": worst, "arrays": by_name}
    return found


def rates(device: torch.device, width: int, d_head: int, batch: int) -> dict[str, Any]:
    """Products per second by dtype, decompositions per second on device and host, and bytes moved per second."""
    found: dict[str, Any] = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        square = torch.randn(width, width, dtype=dtype, device=device)
        found[f"{name}_flops_per_second"] = 2 * width**3 / seconds(lambda square=square: square @ square, device)
    for kind, solve in DECOMPOSITIONS.items():
        matrix = Problem(kind, d_head, d_head).matrix().repeat(batch, 1, 1)
        for place, where in (("device", device), ("host", CPU)):
            moved = matrix.to(where)
            spent = seconds(lambda moved=moved, solve=solve: solve(moved), where, 1)
            found[f"{kind.replace(' ', '_')}_per_second_{place}"] = batch / spent
    pageable = torch.zeros(width * width, dtype=torch.float64)
    pinned = pageable.pin_memory() if device.type == "cuda" else pageable
    for name, source in (("pageable", pageable), ("pinned", pinned)):
        spent = seconds(lambda source=source: source.to(device, copy=True), device)
        found[f"{name}_bytes_per_second"] = source.numel() * 8 / spent
    return found


def recorded(plan: Plan, device: torch.device) -> Recorder:
    """Products and decompositions of the first layer."""
    layer = plan.layers[0]
    factors = head_factors(read_weights(plan.checkpoint, layer), layer, "raw", device, torch.float64)
    cut = RANK_CUT[torch.float64]
    with Recorder() as recorder:
        measure_layer(factors.output, factors.value, factors.query, factors.key, factors.kv_head, cut)
    return recorder


def stack(folder: Path, shape: Shape, layers: int, device: torch.device, rate: dict[str, Any]) -> dict[str, Any]:
    """Seconds a layer takes by number of threads, against its floor, with the peak of device memory."""
    write(folder, replace(shape, layers=layers))
    plan = plan_checkpoint(open_checkpoint(str(folder)))
    needed = recorded(plan, device)
    kinds: Counter[str] = Counter()
    for problem, count in needed.problems.items():
        kinds[problem.kind] += count

    def fastest(kind: str) -> float:
        return max(rate[f"{kind.replace(' ', '_')}_per_second_{place}"] for place in ("device", "host"))

    products = needed.flops / rate["float64_flops_per_second"]
    decompositions = sum(count / fastest(kind) for kind, count in kinds.items())
    found: dict[str, Any] = {
        "layers_measured": layers,
        "layers_of_the_model": shape.layers,
        "flops_a_layer": needed.flops,
        "decompositions_a_layer": dict(kinds),
        "floor_products_seconds": products,
        "floor_decompositions_seconds": decompositions,
    }
    for dtype in ("float64", "float32"):
        for threads in (1, 2, 4, 8) if dtype == "float64" else (4,):
            if threads > layers:
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            started = time.perf_counter()
            count = sum(1 for _ in measure(plan, ComputeSettings(str(device), dtype, threads)))
            spent = (time.perf_counter() - started) / count
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
            found[f"{dtype}_{threads}_threads"] = {
                "layer_seconds": spent,
                "over_floor": spent / (products + decompositions),
                "model_seconds": spent * shape.layers,
                "device_peak_gib": peak,
            }
    return found


def one_layer(folder: Path, device: torch.device) -> dict[str, float]:
    """One layer of a written stack on both: seconds of its arithmetic, and the largest difference of its closures."""
    plan = plan_checkpoint(open_checkpoint(str(folder)))
    layer = plan.layers[0]
    weights = read_weights(plan.checkpoint, layer)
    made, spent = {}, {}
    for place in (CPU, device):
        factors = head_factors(weights, layer, "raw", place, torch.float64)
        given = (factors.output, factors.value, factors.query, factors.key, factors.kv_head, RANK_CUT[torch.float64])
        if place.type == "cuda":
            measure_layer(*given)
        wait(place)
        started = time.perf_counter()
        made[place] = measure_layer(*given)["closure"].cpu().numpy()
        wait(place)
        spent[place] = time.perf_counter() - started
    return {
        "cpu_seconds": spent[CPU],
        "device_seconds": spent[device],
        "closure_difference": float(np.abs(made[device] - made[CPU]).max()),
    }


def derivations(device: torch.device, heads: int, d_head: int, draws: int, steps: int) -> dict[str, Any]:
    """Scrambles, their tails and capacities on both: seconds, and the largest difference."""
    sigma, cosine = spectra(heads, d_head)
    closure = torch.linspace(0.01, 0.9, heads, dtype=torch.float64)
    keys = [str(head).encode() for head in range(heads)]
    permutation = assignment_capacity(sigma, cosine).permutation

    def refined(place: torch.device) -> torch.Tensor:
        moved = sigma.to(place), cosine.to(place)
        return refine_assignment(*moved, permutation, keys, 0, steps).closure

    work: dict[str, Callable[[torch.device], torch.Tensor]] = {
        "scrambles": lambda place: scramble_draws(sigma.to(place), cosine.to(place), keys, 0, draws),
        "tails": lambda place: tail_p(closure.to(place), sigma.to(place)),
        "ascents": refined,
    }
    found: dict[str, Any] = {"heads": heads, "d_head": d_head, "draws": draws, "steps": steps}
    for name, action in work.items():
        expected, made = action(CPU), action(device).cpu()
        found[name] = {
            "cpu_seconds": seconds(lambda action=action: action(CPU), CPU, 1),
            "device_seconds": seconds(lambda action=action: action(device), device, 1),
            "largest_difference": float((made - expected).abs().max()),
        }
    started = time.perf_counter()
    assignment_capacity(sigma, cosine)
    found["assignments_cpu_seconds"] = time.perf_counter() - started
    return found


def main() -> None:
    """Check, measure, save, and say whether the numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-check", action="store_true", help="run on the CPU with small sizes, saving nothing")
    small = parser.parse_args().self_check
    if not small and not torch.cuda.is_available():
        print("no CUDA device here: nothing to check (--self-check runs the same code on the CPU)")
        return
    device = CPU if small else torch.device("cuda", torch.cuda.current_device())
    if small:
        torch.set_num_threads(1)
    stacks = {"tiny": (TINY, 2)} if small else {"70B": (SEVENTY_B, 4), "235B": (MIXTURE_235B, 8)}
    figures: dict[str, Any] = {"device": "cpu", "torch": torch.__version__, "host_cores": cores()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        figures |= {
            "device": properties.name,
            "device_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
        }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        steps: dict[str, Callable[[], Any]] = {
            "agreement": lambda: agreement(folder, device, TINY if small else SMALL),
            "rates": lambda: rates(device, *((128, 8, 4) if small else (8192, 128, 64))),
        }
        for name, (shape, layers) in stacks.items():
            steps[name] = lambda name=name, shape=shape, layers=layers: stack(
                folder / name, shape, layers, device, figures["rates"]
            )
        last = list(stacks)[-1]
        steps["one layer"] = lambda: one_layer(folder / last, device)
        steps["derivations"] = lambda: derivations(device, *((2, 8, 20, 2) if small else (64, 128, 1000, 20)))
        for name, step in steps.items():
            started = time.perf_counter()
            figures[name] = step()
            print(f"{name}, {time.perf_counter() - started:.1f} s: {shown(figures[name])}", flush=True)
    if not small:
        print(f"written to {save('gpu_check', figures)}")
    exact, rounded = (figures["agreement"][dtype] for dtype in ("float64", "float32"))
    print(f"float64 differs by {exact['largest']:.1e} ({exact['in']}), float32 by {rounded['largest']:.1e}")
    if not exact["largest"] <= AGREEMENT:
        print(f"the device does not agree with the CPU to {AGREEMENT:g}", file=sys.stderr)
        sys.exit(1)


def shown(figures: Any) -> str:
    """Figures on one line, without the arrays one by one."""
    if isinstance(figures, dict):
        return "{" + ", ".join(f"{name}: {shown(value)}" for name, value in figures.items() if name != "arrays") + "}"
    return f"{figures:.3g}" if isinstance(figures, float) else str(figures)


if __name__ == "__main__":
    main()
