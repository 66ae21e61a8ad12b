"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file the demo fetches."""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def write(gguf_path: Path, directory: Path) -> None:
    """Dequantise every tensor, undo the row order of q and k, and save with transformers."""
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    weights = {}
    for tensor in GGUFReader(gguf_path).tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if not tensor.name.startswith("blk."):
            weights[TOP[tensor.name]] = torch.from_numpy(values)
            continue
        _, layer, role, _ = tensor.name.split(".")
        if role in ("attn_q", "attn_k"):
            values = values.reshape(-1, 32, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        weights[f"model.layers.{layer}.{NAMES[role]}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
    source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
