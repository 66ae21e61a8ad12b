"""Converting tiny models of ``transformers`` to GGUF as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import permuted

ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}

Change = Callable[[str, Tensor, "Sizes"], Tensor]
"""What the converter does to the values of a tensor, by its new name."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model as its converter writes them."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Conversion:
    """How a model becomes a GGUF file of an architecture: changed values, and metadata beside the sizes.

    ``variant`` names the model to build; ``kv_heads`` overrules what its configuration says.
    """

    architecture: str
    variant: str
    change: Change = lambda _name, values, _sizes: values
    kv_heads: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def sizes_of(config: Any, kv_heads: int | None = None) -> Sizes:
    """Sizes by the usual names, whatever the configuration calls them."""
    heads = config.num_attention_heads
    return Sizes(
        config.hidden_size,
        config.num_hidden_layers,
        heads,
        kv_heads or getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def permute_rotary(name: str, values: Tensor, sizes: Sizes) -> Tensor:
    """Rows of q and k from half to pair order."""
    counts = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
    count = counts.get(name.split(".")[2])
    return values if count is None or values.ndim < 2 else permuted(values, count)


def add_one(name: str, values: Tensor, _sizes: Sizes) -> Tensor:
    """Gains that the model stores less one."""
    return values + 1 if name.endswith("norm.weight") else values


def group_by_kind(name: str, values: Tensor, sizes: Sizes) -> Tensor:
    """Rows of a fused matrix from groups of ``[q .. q, k, v]`` to all q, all k, all v."""
    if ".attn_qkv." not in name:
        return values
    groups = values.view(sizes.kv_heads, sizes.heads // sizes.kv_heads + 2, sizes.head_dim, *values.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])


def untranspose(name: str, values: Tensor, _sizes: Sizes) -> Tensor:
    """``Conv1D`` weights as those of linear layers."""
    return values.mT.contiguous() if values.ndim == 2 and ("attn" in name or "ffn" in name) else values


CONVERSIONS = {
    conversion.variant: conversion
    for conversion in (
        Conversion("llama", "llama", permute_rotary),
        Conversion("llama", "mistral", permute_rotary),
        Conversion("smollm3", "smollm3", permute_rotary),
        Conversion("granite", "granite", permute_rotary),
        Conversion("arcee", "arcee", permute_rotary),
        Conversion("olmo", "olmo", permute_rotary),
        Conversion("qwen2", "qwen2"),
        Conversion("qwen3", "qwen3"),
        Conversion("gemma", "gemma", add_one),
        Conversion("gemma2", "gemma2", add_one),
        Conversion("gemma3", "gemma3_text", add_one),
        Conversion("olmo2", "olmo2"),
        Conversion("exaone4", "exaone4"),
        Conversion("glm4", "glm4"),
        Conversion("phi2", "phi"),
        Conversion("phi3", "phi3"),
        Conversion("phimoe", "phimoe"),
        Conversion("stablelm", "stablelm"),
        Conversion("starcoder2", "starcoder2"),
        Conversion("command-r", "cohere"),
        Conversion("cohere2", "cohere2"),
        Conversion("nemotron", "nemotron", add_one),
        Conversion("seed_oss", "seed_oss"),
        Conversion("ernie4_5", "ernie4_5"),
        Conversion("apertus", "apertus"),
        Conversion("jais2", "jais2"),
        Conversion("gpt2", "gpt2", untranspose),
        Conversion("starcoder", "gpt_bigcode", kv_heads=1),
        Conversion("gptneox", "gpt_neox", group_by_kind),
        Conversion("bloom", "bloom", group_by_kind),
        Conversion("falcon", "falcon-one-kv-head", group_by_kind, kv_heads=1),
        Conversion("falcon", "falcon-all-kv-heads", group_by_kind),
        Conversion("falcon", "falcon-grouped", group_by_kind, kv_heads=2),
        Conversion("mpt", "mpt", metadata={"attention.clamp_kqv": 8.0}),
        Conversion("dbrx", "dbrx", kv_heads=2, metadata={"attention.clamp_kqv": 8.0}),
        Conversion("jamba", "jamba", metadata={"attention.head_count_kv": [0, 2]}),
        Conversion("lfm2", "lfm2", metadata={"attention.head_count_kv": [0, 2]}),
        Conversion("nemotron_h", "nemotron_h", metadata={"attention.head_count_kv": [0, 2, 0]}),
        Conversion("granitehybrid", "granitemoehybrid", permute_rotary, metadata={"attention.head_count_kv": [0, 2]}),
        Conversion("bert", "bert"),
        Conversion("modern-bert", "modernbert"),
        Conversion("nomic-bert", "nomic_bert"),
        Conversion("eurobert", "eurobert"),
    )
}


def convert(conversion: Conversion, config: Any, folder: Path, path: Path) -> Path:
    """Write the attention and norm tensors of a saved model as a GGUF file."""
    sizes = sizes_of(config, conversion.kv_heads)
    names = gguf.get_tensor_name_map(ARCHITECTURES[conversion.architecture], sizes.depth)
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        shorter = name.partition(".")[2]
        renamed = next((found for each in (name, shorter) if (found := names.get_name(each, (".weight", ".bias")))), "")
        if renamed.startswith("blk.") and values.ndim <= 2:
            tensors[renamed] = conversion.change(renamed, values, sizes)
    return save(conversion.architecture, metadata(sizes) | dict(conversion.metadata), tensors, path)


def metadata(sizes: Sizes) -> dict[str, Any]:
    """The sizes as metadata."""
    return {
        "block_count": sizes.depth,
        "embedding_length": sizes.width,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
    }


def save(
    architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path, **split: Any
) -> Path:
    """Write a GGUF file in float32; settings are named without the architecture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, **split)
    for key, value in settings.items():
        add(writer, f"{architecture}.{key}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, values.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One setting in the type its Python value has."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)
