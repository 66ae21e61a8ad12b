"""The route without a library for heads: load the model with transformers, loop over heads.

Closure, singular values and eigenvalues from k x k products; prints the number of strong heads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(source: str) -> None:
    """Measure every OV operator of the model in a directory or GGUF file."""
    path = Path(source)
    arguments = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    model = AutoModelForCausalLM.from_pretrained(str(path.parent if arguments else path), **arguments)
    config = model.config
    shared = config.num_attention_heads // config.num_key_value_heads
    strong = 0
    with torch.no_grad():
        for layer in model.model.layers:
            w_o, w_v = layer.self_attn.o_proj.weight.double(), layer.self_attn.v_proj.weight.double()
            size = w_v.shape[0] // config.num_key_value_heads
            for head in range(config.num_attention_heads):
                o = w_o[:, head * size : (head + 1) * size]
                v = w_v[head // shared * size : (head // shared + 1) * size].T
                m, g_o, g_v = v.T @ o, o.T @ o, v.T @ v
                norm = torch.trace(g_o @ g_v)
                inner = torch.trace(m.T @ g_o @ g_v)
                square = torch.trace(m.T @ g_o @ m @ g_v)
                strong += int(inner**2 / (square * norm) >= 0.9)
                torch.linalg.eigvals(m)
                torch.linalg.svdvals(torch.linalg.qr(o)[1] @ torch.linalg.qr(v)[1].T)
    print(f"strong {strong}")


if __name__ == "__main__":
    main(sys.argv[1])
