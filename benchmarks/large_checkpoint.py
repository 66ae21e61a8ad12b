"""Memory and time of ingesting a checkpoint shaped like an 8B model.

    python benchmarks/large_checkpoint.py [--layers 32]

32 layers, d_model 4096, 32 heads, 8 key/value heads, d_head 128, bfloat16. The attention tensors
hold random values; the MLP and embedding tensors are holes in a sparse file, so the checkpoint is
16 GB long and takes 2.7 GB of disk. The file is written to a temporary directory (TMPDIR).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from measuring import ROOT, python, run, save
from synthetic import EIGHT_B, write


def main() -> None:
    """Write the checkpoint, ingest it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=EIGHT_B.layers)
    layers = parser.parse_args().layers
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "shaped-8b"
        weights = write(directory, replace(EIGHT_B, layers=layers))
        cli = [python(), str(ROOT / "cli.py")]
        plan = json.loads(run([*cli, "plan", str(directory), "--format", "json"]).output)
        done = run([*cli, "ingest", str(directory), "--store", str(Path(temporary) / "atlas")], [weights])
        figures = {
            "layers": layers,
            "heads": plan["heads"],
            "file_bytes": weights.stat().st_size,
            "planned_bytes": plan["bytes_to_read"],
            "fetched_bytes": done.fetched_bytes,
            "wall_seconds": done.wall_seconds,
            "peak_mib": done.peak_mib,
        }
    print(done.output, end="")
    for name, value in figures.items():
        print(f"{name:<15} {value:,.6g}" if isinstance(value, float) else f"{name:<15} {value:,}")
    print(f"share of the file fetched: {figures['fetched_bytes'] / figures['file_bytes']:.4f}")
    print(f"peak memory: {figures['peak_mib'] / 1024:.2f} GiB")
    print(f"written to {save('large_checkpoint', figures)}")


if __name__ == "__main__":
    main()
