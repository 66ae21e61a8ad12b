"""Capacity: heads per second of the assignment and of the refinement, on made-up spectra.

    python benchmarks/capacity.py [--heads 8] [--iterations 100] [--quick]

Spectra have the shape of a trained head's: singular values over a decade, cosines from near one to
near zero. The assignment runs on one core, the refinement on torch's threads; on a busy machine set
OMP_NUM_THREADS=1, since threads that wait for a core cost more than they bring. What 7,304 heads
would take is the rate scaled up.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from measuring import save

from stats.capacity import assignment_capacity
from stats.refinement import refine_assignment

SURVEY = 7304
"""Heads of the nine published models."""


def spectra(heads: int, d_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values and cosines (head, d_head), descending, the same on every run."""
    generator = np.random.default_rng(d_head)
    sigma = np.exp(generator.normal(0, 0.5, (heads, d_head)))
    cosine = generator.beta(1, 2, (heads, d_head))
    return torch.from_numpy(-np.sort(-sigma)), torch.from_numpy(-np.sort(-cosine))


def measure(heads: int, d_head: int, iterations: int) -> dict[str, float]:
    """Rates, what they come to for a survey, and what the refinement adds."""
    sigma, cosine = spectra(heads, d_head)
    keys = [str(head).encode() for head in range(heads)]
    assignment_capacity(sigma[:1], cosine[:1])
    started = time.perf_counter()
    found = assignment_capacity(sigma, cosine)
    assigned = time.perf_counter()
    refined = refine_assignment(sigma, cosine, found.permutation, keys, 0, iterations)
    climbed = time.perf_counter()
    return {
        "assignment_heads_per_second": heads / (assigned - started),
        "assignment_survey_seconds": SURVEY * (assigned - started) / heads,
        "assignments_per_head": float(found.iterations.double().mean()),
        "refinement_heads_per_second": heads / (climbed - assigned),
        "refinement_steps_per_second": float(refined.iterations.sum()) / (climbed - assigned),
        "median_assignment": float(found.closure.median()),
        "median_refined": float(refined.closure.median()),
        "largest_gain": float((refined.closure - found.closure).max()),
    }


def main() -> None:
    """Measure d_head 64 and 128 and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="one head, two steps")
    options = parser.parse_args()
    if options.quick:
        options.heads, options.iterations = 1, 2
    figures = {f"d_head {d_head}": measure(options.heads, d_head, options.iterations) for d_head in (64, 128)}
    for name, figure in figures.items():
        print(name)
        for key, value in figure.items():
            print(f"  {key:<30} {value:12.4f}")
    settings = {"heads": options.heads, "iterations": options.iterations, "threads": torch.get_num_threads()}
    path = save("capacity", {**settings, "figures": figures})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
