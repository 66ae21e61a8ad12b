"""Tiny checkpoints with seeded weights, and every way of saving them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

Save = Callable[["Model", Path], Path]
"""Writes a model into an empty directory and returns the path to ingest."""

GGUF_TYPES = {
    torch.float64: GGMLQuantizationType.F64,
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


@dataclass(frozen=True)
class Model:
    """A configuration and tensors, named as ``save_pretrained`` names them."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def configured(self, **settings: Any) -> Model:
        """The same tensors under a changed configuration; ``...`` takes a key out."""
        changed = {key: value for key, value in {**self.config, **settings}.items() if value is not ...}
        return replace(self, config=changed)

    def changed(self, **tensors: Tensor) -> Model:
        """The same model with tensors added or replaced."""
        return replace(self, tensors={**self.tensors, **tensors})

    def without(self, fragment: str) -> Model:
        """The same model less every tensor whose name contains ``fragment``."""
        return replace(self, tensors={name: value for name, value in self.tensors.items() if fragment not in name})

    def renamed(self, rename: Callable[[str], str]) -> Model:
        """The same model with other tensor names."""
        return replace(self, tensors={rename(name): value for name, value in self.tensors.items()})

    def cast(self, dtype: torch.dtype) -> Model:
        """The same model stored in another dtype."""
        return replace(self, tensors={name: value.to(dtype) for name, value in self.tensors.items()})


def _normal(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (0.1 * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype)


def llama(
    *,
    model_type: str = "llama",
    layers: int = 2,
    d_model: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    d_head: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A model with separate projections, RMSNorm, grouped values, an MLP and embeddings."""
    normal = _normal(seed, dtype)
    tensors = {"model.embed_tokens.weight": normal(48, d_model)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": 1 + normal(d_model),
            prefix + "self_attn.q_proj.weight": normal(heads * d_head, d_model),
            prefix + "self_attn.k_proj.weight": normal(kv_heads * d_head, d_model),
            prefix + "self_attn.v_proj.weight": normal(kv_heads * d_head, d_model),
            prefix + "self_attn.o_proj.weight": normal(d_model, heads * d_head),
            prefix + "post_attention_layernorm.weight": 1 + normal(d_model),
            prefix + "mlp.gate_proj.weight": normal(64, d_model),
            prefix + "mlp.up_proj.weight": normal(64, d_model),
            prefix + "mlp.down_proj.weight": normal(d_model, 64),
        }
    tensors |= {"model.norm.weight": 1 + normal(d_model), "lm_head.weight": normal(48, d_model)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": model_type,
        "hidden_size": d_model,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d_head,
    }
    return Model(config, tensors)


def bert(*, layers: int = 2, d_model: int = 32, heads: int = 4, seed: int = 0) -> Model:
    """A model with separate projections and biases, one value per head."""
    normal = _normal(seed, torch.float32)
    tensors = {"bert.embeddings.word_embeddings.weight": normal(48, d_model)}
    for layer in range(layers):
        prefix = f"bert.encoder.layer.{layer}.attention."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            tensors[f"{prefix}{name}.weight"] = normal(d_model, d_model)
            tensors[f"{prefix}{name}.bias"] = normal(d_model)
    config = {
        "model_type": "bert",
        "hidden_size": d_model,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return Model(config, tensors)


def gpt2(*, layers: int = 2, d_model: int = 32, heads: int = 4, seed: int = 0) -> Model:
    """A model with fused, transposed projections."""
    normal = _normal(seed, torch.float32)
    tensors = {"wte.weight": normal(48, d_model)}
    for layer in range(layers):
        tensors[f"h.{layer}.ln_1.weight"] = 1 + normal(d_model)
        tensors[f"h.{layer}.attn.c_attn.weight"] = normal(d_model, 3 * d_model)
        tensors[f"h.{layer}.attn.c_proj.weight"] = normal(d_model, d_model)
    config = {"model_type": "gpt2", "n_embd": d_model, "n_layer": layers, "n_head": heads}
    return Model(config, tensors)


def save_config(model: Model, directory: Path) -> None:
    """Write ``config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")


def save_safetensors(model: Model, directory: Path) -> Path:
    """One ``model.safetensors``."""
    save_config(model, directory)
    save_file(dict(model.tensors), directory / "model.safetensors")
    return directory


def save_bare_safetensors(model: Model, directory: Path) -> Path:
    """A file of another name with its configuration beside it."""
    save_config(model, directory)
    save_file(dict(model.tensors), directory / "weights.safetensors")
    return directory / "weights.safetensors"


def save_torch(model: Model, directory: Path) -> Path:
    """One zip ``pytorch_model.bin``."""
    save_config(model, directory)
    torch.save(dict(model.tensors), directory / "pytorch_model.bin")
    return directory


def save_legacy_torch(model: Model, directory: Path) -> Path:
    """One ``pytorch_model.bin`` in the form from before PyTorch 1.6."""
    save_config(model, directory)
    torch.save(dict(model.tensors), directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return directory


def shards(model: Model, pattern: str) -> dict[str, dict[str, Tensor]]:
    """Tensors by file name, every layer torn over both files."""
    names = list(model.tensors)
    return {pattern.format(number + 1): {name: model.tensors[name] for name in names[number::2]} for number in range(2)}


def save_index(files: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """Write the index of sharded files."""
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def save_sharded_safetensors(model: Model, directory: Path) -> Path:
    """Two safetensors shards with an index."""
    save_config(model, directory)
    files = shards(model, "model-{:05d}-of-00002.safetensors")
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    save_index(files, directory / "model.safetensors.index.json")
    return directory


def save_sharded_torch(model: Model, directory: Path) -> Path:
    """Two ``.bin`` shards with an index."""
    save_config(model, directory)
    files = shards(model, "pytorch_model-{:05d}-of-00002.bin")
    for file, tensors in files.items():
        torch.save(tensors, directory / file)
    save_index(files, directory / "pytorch_model.bin.index.json")
    return directory


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in the order llama.cpp's converter gives them."""
    return weight.view(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def save_gguf(
    model: Model, directory: Path, *, permute: bool = False, quantisation: GGMLQuantizationType | None = None
) -> Path:
    """A GGUF file of architecture llama; matrices quantised, or in the dtype they have."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_token_list([f"token {number}" for number in range(48)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in model.tensors.items():
        if permute and "q_proj" in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        if permute and "k_proj" in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        kind = quantisation if quantisation is not None and tensor.ndim == 2 else GGUF_TYPES[tensor.dtype]
        values = tensor.double().numpy()
        if kind != GGMLQuantizationType.F64:
            values = gguf.quantize(values.astype("float32"), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "model.gguf"


def save_permuted_gguf(model: Model, directory: Path) -> Path:
    """A GGUF file as llama.cpp's converter writes it."""
    return save_gguf(model, directory, permute=True)


FORMATS: dict[str, Save] = {
    "safetensors": save_safetensors,
    "sharded safetensors": save_sharded_safetensors,
    "bare safetensors": save_bare_safetensors,
    "torch": save_torch,
    "legacy torch": save_legacy_torch,
    "sharded torch": save_sharded_torch,
    "gguf": save_gguf,
    "permuted gguf": save_permuted_gguf,
}
