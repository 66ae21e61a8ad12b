"""What reading a checkpoint shaped like a 235B mixture of experts moves over the network.

    python benchmarks/remote_bytes.py [--layers 94] [--ingest]

Per layer 64 heads, 4 key/value heads, d_head 128, d_model 4096 and 128 experts of width 1536, in bfloat16
and in shards of about 4 GB, served from this machine by HTTP with ranges. All tensors but those of attention
are holes in sparse files; a layer's attention takes 143 MB of disk, in the temporary directory (TMPDIR). The
layers are read and hashed, or with --ingest measured and stored. The bytes are the server's count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from measuring import ROOT, python, run, save

sys.path.insert(0, str(ROOT))

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, EXPERTS, EXPERT_WIDTH, VOCABULARY = 4096, 64, 4, 128, 128, 1536, 151936
LAYERS = 94
SHARD_BYTES = 4 * 10**9
READ = """
import sys
from ingest.pipeline import hash_layers
from ingest.plan import plan_checkpoint
from ingest.source import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
print(sum(1 for _ in hash_layers(plan_checkpoint(checkpoint))), "layers read")
"""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint as transformers would name it, in the order of its layers."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = (WIDTH,)
        for expert in range(EXPERTS):
            for name in ("gate", "up", "down"):
                shape = (WIDTH, EXPERT_WIDTH) if name == "down" else (EXPERT_WIDTH, WIDTH)
                tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = shape
        tensors |= {
            prefix + "mlp.gate.weight": (EXPERTS, WIDTH),
            prefix + "post_attention_layernorm.weight": (WIDTH,),
            prefix + "self_attn.k_norm.weight": (HEAD_SIZE,),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
            prefix + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_SIZE),
            prefix + "self_attn.q_norm.weight": (HEAD_SIZE,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_SIZE, WIDTH),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
        }
    return tensors | {"lm_head.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}


def n_bytes(shape: tuple[int, ...]) -> int:
    """Stored size of a tensor."""
    size = 2
    for axis in shape:
        size *= axis
    return size


def write(directory: Path, layers: int) -> None:
    """Write config.json, the index, and sparse shards."""
    directory.mkdir()
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes(layers).items():
        if filled + n_bytes(shape) > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += n_bytes(shape)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, file)
        write_shard(directory / file, tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Write one sparse safetensors file; attention holds random values."""
    import torch

    generator = torch.Generator().manual_seed(0)
    header, offset = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + n_bytes(shape)]}
        offset += n_bytes(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = stream.tell()
        stream.truncate(start + offset)
        for name, shape in tensors.items():
            if "self_attn" in name:
                values = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
                stream.seek(start + header[name]["data_offsets"][0])
                stream.write(values.view(torch.uint8).numpy().data)


def main() -> None:
    """Write the checkpoint, read it from a server, and print the figures."""
    from tests.range_server import serving

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--ingest", action="store_true", help="measure and store the layers, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "shaped-235b"
        write(directory, arguments.layers)
        files = {f"/{directory.name}/{path.name}": path for path in directory.iterdir()}
        cli = [python(), str(ROOT / "cli.py")]
        direct = {"NO_PROXY": "*", "PYTHONPATH": str(ROOT)}
        with serving(files) as server:
            server.tags = {path: f'"{number}"' for number, path in enumerate(files)}
            address = f"{server.address}/{directory.name}"
            planned = run([*cli, "plan", address, "--format", "json"], environment=direct)
            plan = json.loads(planned.output)
            header_bytes, header_requests = server.sent(), len(server.requests)
            server.requests.clear()
            command = [*cli, "ingest", address, "--store", str(Path(temporary) / "atlas")]
            done = run(command if arguments.ingest else [python(), "-c", READ, address], environment=direct)
            figures = {
                "layers": arguments.layers,
                "heads": plan["heads"],
                "files": len(files),
                "stored_bytes": sum(path.stat().st_size for path in files.values()),
                "attention_bytes": plan["bytes_to_read"],
                "plan_moved_bytes": header_bytes,
                "plan_requests": header_requests,
                "moved_bytes": server.sent(),
                "requests": len(server.requests),
                "most_in_flight": server.most_in_flight,
                "measured": arguments.ingest,
                "wall_seconds": done.wall_seconds,
                "peak_mib": done.peak_mib,
            }
    print(done.output, end="")
    for name, value in figures.items():
        print(f"{name:<17} {value:,.6g}" if isinstance(value, float) else f"{name:<17} {value:,}")
    print(f"share of the checkpoint moved: {figures['moved_bytes'] / figures['stored_bytes']:.4%}")
    print(
        f"moved beyond attention and headers: {figures['moved_bytes'] - header_bytes - plan['bytes_to_read']:,} bytes"
    )
    name = "remote_bytes" if arguments.layers == LAYERS else "remote_bytes_few_layers"
    print(f"written to {save(name, figures)}")


if __name__ == "__main__":
    main()
