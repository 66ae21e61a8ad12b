"""The route a researcher takes with TransformerLens: load the model, factored products per head.

Closure, singular values and eigenvalues of every head; prints the number of strong heads.
"""

from __future__ import annotations

import sys

import torch
from transformer_lens import FactoredMatrix
from transformer_lens.model_bridge import TransformerBridge


def main(directory: str) -> None:
    """Measure every OV circuit of the model in ``directory``."""
    model = TransformerBridge.boot_transformers(directory)
    circuits = model.OV
    strong = 0
    with torch.no_grad():
        for layer in range(circuits.A.shape[0]):
            circuit = FactoredMatrix(circuits.A[layer].double(), circuits.B[layer].double())
            square = circuit @ circuit
            inner = ((square.A.mT @ circuit.A) * (square.B @ circuit.B.mT)).sum((-2, -1))
            closure = inner.square() / (square.norm() * circuit.norm()).square()
            strong += int((closure >= 0.9).sum())
            assert circuit.S.shape[-1] == circuit.eigenvalues.shape[-1]
    print(f"strong {strong}")


if __name__ == "__main__":
    main(sys.argv[1])
