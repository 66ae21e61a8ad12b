"""Fast scramble draws against independent ones by QR, in one run.

Three routes to the same null are timed on the same heads, in turn, five times over; figures are
medians of the five. ``qr`` draws A and B as the Q of Gaussian matrices by torch's batched QR and
multiplies out C for every draw. ``independent`` takes one draw from each pair of
``stats.scramble``. ``fast`` takes ``draws_per_pair`` of them. The p-value tail is timed beside them.

    python benchmarks/scramble_draws.py [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from measuring import save
from torch import Tensor

from stats.scramble import CHUNK_ENTRIES, draws_per_pair, scramble_draws, scrambled_closure
from stats.tail import tail_p

REPEATS = 5
DRAWS = 1000
PANEL_HEADS = 7304
FAST_HEADS = 32
QR_DRAWS = 256


def by_qr(sigma: Tensor, cosine: Tensor, count: int) -> Tensor:
    """Closures (count,) of one head's scrambles, every one from its own QR factorizations.

    Blocks are as large as those of ``scramble_draws``, so that the cache serves both alike.
    """
    d_head = len(sigma)
    block = CHUNK_ENTRIES // d_head**2
    closures = []
    for _ in range(0, count, block):
        rotations, triangular = torch.linalg.qr(torch.randn(2, block, d_head, d_head, dtype=torch.float64))
        rotations = rotations * torch.sign(triangular.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
        closures.append(scrambled_closure(sigma, rotations[0].mT @ (cosine.unsqueeze(-1) * rotations[1])))
    return torch.cat(closures)


def seconds(action: Callable[[], Tensor]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(d_head: int, repeats: int) -> dict[str, float]:
    """Seconds for a draw by every route, their ratios, and what the panel would take."""
    generator = torch.Generator().manual_seed(d_head)
    sigma = torch.rand(FAST_HEADS, d_head, generator=generator, dtype=torch.float64).sort(-1, descending=True).values
    cosine = torch.rand(FAST_HEADS, d_head, generator=generator, dtype=torch.float64).sort(-1, descending=True).values
    closure = torch.rand(FAST_HEADS, generator=generator, dtype=torch.float64) / 2
    keys = [b"%d" % head for head in range(FAST_HEADS)]
    routes: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "qr": (QR_DRAWS, lambda: by_qr(sigma[0], cosine[0], QR_DRAWS)),
        "independent": (
            QR_DRAWS,
            lambda: scramble_draws(sigma[:1], cosine[:1], keys[:1], 0, QR_DRAWS, independent=True),
        ),
        "fast": (FAST_HEADS * DRAWS, lambda: scramble_draws(sigma, cosine, keys, 0, DRAWS)),
        "tail": (FAST_HEADS, lambda: tail_p(closure, sigma)),
    }
    for _, action in routes.values():
        action()
    taken: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(repeats):
        for name, (count, action) in routes.items():
            taken[name].append(seconds(action) / count)
    each = {name: median(values) for name, values in taken.items()}
    return {
        "draws_per_pair": draws_per_pair(d_head),
        "qr_seconds_per_draw": each["qr"],
        "independent_seconds_per_draw": each["independent"],
        "fast_seconds_per_draw": each["fast"],
        "fast_draws_per_second": 1 / each["fast"],
        "qr_over_fast": median(a / b for a, b in zip(taken["qr"], taken["fast"], strict=True)),
        "independent_over_fast": median(a / b for a, b in zip(taken["independent"], taken["fast"], strict=True)),
        "panel_seconds": each["fast"] * DRAWS * PANEL_HEADS,
        "panel_tail_seconds": each["tail"] * PANEL_HEADS,
    }


def main() -> None:
    """Measure at both widths on one thread and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, d_head 64 alone")
    quick = parser.parse_args().quick
    repeats = 1 if quick else REPEATS
    torch.set_num_threads(1)
    figures = {f"d_head_{d_head}": compare(d_head, repeats) for d_head in ((64,) if quick else (64, 128))}
    path = save(
        "scramble_draws",
        {"threads": 1, "panel_heads": PANEL_HEADS, "draws": DRAWS, "repeats": repeats, **figures},
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
