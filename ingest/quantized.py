"""Quantised layouts that are not plain matrices are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingest.checkpoint import Checkpoint, TensorHeader
from ingest.gguf_file import can_dequantize
from ingest.safetensors_file import FLOATING
from stats.errors import CheckpointError

SCHEMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "block-scaled fp8",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "quanto": "Quanto",
    "torchao": "torchao",
    "bitnet": "BitNet",
    "higgs": "HIGGS",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "modelopt": "ModelOpt",
}
SUFFIXES = (
    (".g_idx", "GPTQ"),
    (".weight.absmax", "bitsandbytes 4-bit"),
    (".weight.quant_state.bitsandbytes__nf4", "bitsandbytes 4-bit"),
    (".SCB", "bitsandbytes 8-bit"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale_inv", "block-scaled fp8"),
    (".qweight", "GPTQ or AWQ"),
)
"""Companion tensors that give a scheme away, most specific first."""


def refuse_quantized(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Stop with the scheme's name when the weights are packed.

    GGUF is not concerned: its tensors say themselves how they are quantised.

    Raises:
        CheckpointError: a ``quantization_config``, or tensors only a packed layout has.
    """
    if checkpoint.naming == "gguf":
        return
    settings = config.get("quantization_config") or checkpoint.config.get("quantization_config")
    if settings:
        raise _refusal(checkpoint, _scheme(settings), "quantization_config in the configuration")
    for suffix, scheme in SUFFIXES:
        name = next((name for name in checkpoint.location if name.endswith(suffix)), None)
        if name is not None:
            raise _refusal(checkpoint, scheme, f"tensor {name}")


def _scheme(settings: Any) -> str:
    """The scheme a ``quantization_config`` names; the first bitsandbytes files did not name theirs."""
    if not isinstance(settings, dict):
        return "an unnamed scheme"
    method = settings.get("quant_method", "bitsandbytes" if "load_in_8bit" in settings else "an unnamed scheme")
    return SCHEMES.get(str(method), str(method))


def require_floating(checkpoint: Checkpoint, header: TensorHeader) -> None:
    """Stop when a tensor is stored as integers, or in a form that does not stand alone."""
    if checkpoint.naming == "gguf":
        if not can_dequantize(header.dtype):
            raise CheckpointError(
                f"values stored as {header.dtype} cannot be read",
                where=f"{checkpoint.source}, tensor {header.name}",
                expected="floats, or a quantisation the gguf package can undo",
                found=header.dtype,
                remedy="use a file in another quantisation",
            )
    elif header.dtype not in FLOATING:
        raise _refusal(checkpoint, f"an unknown scheme with {header.dtype} weights", f"tensor {header.name}")


def _refusal(checkpoint: Checkpoint, scheme: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"the weights are quantised with {scheme}",
        where=checkpoint.source,
        expected="plain matrices in a float of 16 bits or more, or a GGUF file",
        found=found,
        remedy="use the original checkpoint, or save a dequantised copy",
    )
