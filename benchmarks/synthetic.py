"""Checkpoints of any shape with random attention tensors; everything else is a hole in a sparse file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a llama-like decoder; ``mlp`` and ``vocabulary`` of 0 leave those tensors out."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    mlp: int = 0
    vocabulary: int = 0

    def attention(self, layer: int) -> dict[str, tuple[int, int]]:
        """The four projections of a layer as transformers would name them."""
        stem, rows, kv_rows = f"model.layers.{layer}.self_attn.", self.heads * self.d_head, self.kv_heads * self.d_head
        return {
            stem + "q_proj.weight": (rows, self.d_model),
            stem + "k_proj.weight": (kv_rows, self.d_model),
            stem + "v_proj.weight": (kv_rows, self.d_model),
            stem + "o_proj.weight": (self.d_model, rows),
        }

    def tensors(self) -> dict[str, tuple[int, int]]:
        """Every tensor of the checkpoint."""
        named: dict[str, tuple[int, int]] = {}
        if self.vocabulary:
            named |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (self.vocabulary, self.d_model))
        for layer in range(self.layers):
            named |= self.attention(layer)
            if self.mlp:
                stem = f"model.layers.{layer}.mlp."
                named |= {stem + f"{name}_proj.weight": (self.mlp, self.d_model) for name in ("gate", "up")}
                named[stem + "down_proj.weight"] = (self.d_model, self.mlp)
        return named


EIGHT_B = Shape(32, 4096, 32, 8, 128, 14336, 128256)
"""The shape of an 8B model."""

SEVENTY_B = Shape(80, 8192, 64, 8, 128, 28672, 128256)
"""The shape of a 70B model."""

MIXTURE_235B = Shape(94, 4096, 64, 4, 128)
"""The attention of a mixture of experts with 235B parameters."""


def write(directory: Path, shape: Shape, seed: int = 0) -> Path:
    """Write config.json and a sparse bfloat16 model.safetensors; returns the latter."""
    directory.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.d_head,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header, offset = {}, 0
    for name, sizes in shape.tensors().items():
        size = 2 * sizes[0] * sizes[1]
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
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
