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
from pathlib import Path

from measuring import ROOT, python, run, save

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, MLP, VOCABULARY = 4096, 32, 8, 128, 14336, 128256


def shapes(layers: int) -> dict[str, tuple[int, int]]:
    """Every tensor of the checkpoint as transformers would name it."""
    kv = KV_HEADS * HEAD_SIZE
    tensors = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_SIZE, WIDTH),
            prefix + "self_attn.k_proj.weight": (kv, WIDTH),
            prefix + "self_attn.v_proj.weight": (kv, WIDTH),
            prefix + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_SIZE),
            prefix + "mlp.gate_proj.weight": (MLP, WIDTH),
            prefix + "mlp.up_proj.weight": (MLP, WIDTH),
            prefix + "mlp.down_proj.weight": (WIDTH, MLP),
        }
    return tensors


def write(directory: Path, layers: int) -> Path:
    """Write config.json and a sparse model.safetensors."""
    import torch

    directory.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header, offset = {}, 0
    for name, shape in shapes(layers).items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = stream.tell()
        stream.truncate(start + offset)
        for name, entry in header.items():
            if "self_attn" in name:
                values = torch.randn(entry["shape"], generator=generator).mul_(0.02).bfloat16()
                stream.seek(start + entry["data_offsets"][0])
                stream.write(values.view(torch.uint8).numpy().data)
    return path


def main() -> None:
    """Write the checkpoint, ingest it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "shaped-8b"
        weights = write(directory, layers)
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
    print(f"written to {save('large_checkpoint', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
