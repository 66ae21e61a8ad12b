"""Nulls and capacities of a panel of 7,304 heads, through the command line and a real store.

Nine random checkpoints, MHA and GQA mixed, d_head 64 to 128 and d_model 256 (which neither the null
nor the capacity depends on), are ingested once; then 1,000 scrambles and the capacity by assignment of
every head are timed.

python benchmarks/panel_derivations.py [STORE]

A STORE that is there already is used as it is, less what is derived.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import ROOT, run, save
from safetensors.torch import save_file

D_MODEL = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """A checkpoint's layers, heads, key/value heads and head size."""

    layers: int
    heads: int
    kv_heads: int
    d_head: int


PANEL = (
    Shape(24, 16, 16, 64),
    Shape(32, 32, 32, 80),
    Shape(32, 32, 8, 128),
    Shape(28, 28, 4, 128),
    Shape(36, 32, 8, 128),
    Shape(30, 9, 3, 64),
    Shape(26, 8, 4, 96),
    Shape(40, 40, 40, 128),
    Shape(33, 26, 2, 64),
)
HEADS = sum(shape.layers * shape.heads for shape in PANEL)
HEADATLAS = [sys.executable, str(ROOT / "cli.py")]


def write(directory: Path, number: int, shape: Shape) -> None:
    """A llama-shaped checkpoint whose singular values fall off as trained ones do."""
    generator = torch.Generator().manual_seed(number)
    decay = torch.linspace(0, -1.5, shape.d_head).exp()

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {}
    for layer in range(shape.layers):
        stem = f"model.layers.{layer}.self_attn."
        tensors[stem + "q_proj.weight"] = normal(shape.heads * shape.d_head, D_MODEL)
        tensors[stem + "k_proj.weight"] = normal(shape.kv_heads * shape.d_head, D_MODEL)
        tensors[stem + "v_proj.weight"] = normal(shape.kv_heads * shape.d_head, D_MODEL)
        tensors[stem + "o_proj.weight"] = normal(D_MODEL, shape.heads * shape.d_head) * decay.repeat(shape.heads)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": D_MODEL,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.d_head,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def ingest(store: Path) -> None:
    """Make the checkpoints one at a time and measure them."""
    for number, shape in enumerate(PANEL):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / f"panel-{number}"
            write(checkpoint, number, shape)
            run([*HEADATLAS, "ingest", str(checkpoint), "--store", str(store)])
            print(f"panel-{number}: {shape.layers * shape.heads} heads", file=sys.stderr)


def main() -> None:
    """Measure and save."""
    assert HEADS == 7304
    with tempfile.TemporaryDirectory() as folder:
        store = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "atlas"
        if not store.exists():
            ingest(store)
        null = run([*HEADATLAS, "null", "--draws", "1000", "--store", str(store), "--format", "json"])
        capacity = run([*HEADATLAS, "capacity", "--store", str(store), "--format", "json"])
        again = run([*HEADATLAS, "null", "--draws", "1000", "--store", str(store), "--format", "json"])
    path = save(
        "panel_derivations",
        {
            "heads": HEADS,
            "draws": 1000,
            "null_seconds": null.wall_seconds,
            "null_peak_mib": null.peak_mib,
            "capacity_seconds": capacity.wall_seconds,
            "capacity_peak_mib": capacity.peak_mib,
            "asking_again_seconds": again.wall_seconds,
            "draws_per_second": HEADS * 1000 / null.wall_seconds,
            "capacities_per_second": HEADS / capacity.wall_seconds,
        },
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
