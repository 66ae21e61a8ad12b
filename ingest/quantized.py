"""Quantised layouts are refused by name, other than GGUF's and matrices of fp8 with scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingest.checkpoint import Checkpoint, TensorHeader
from ingest.fp8 import FP8, quantization_settings, scale_of, weight_groups
from ingest.gguf_file import can_dequantize
from ingest.safetensors_file import FLOATING
from stats.errors import CheckpointError

SCHEMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
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
    (".weight_global_scale", "NVFP4"),
    (".weight_scale_2", "NVFP4"),
    ("_proj_blocks", "MXFP4"),
    (".biases", "MLX"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale_inv", "block-scaled fp8"),
    (".qweight", "GPTQ or AWQ"),
)
"""Companion tensors that give a scheme away, most specific first."""

MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Values of ``quant_algo`` that store matrices of fp8 with a scale for all of it or for each row."""


def refuse_quantized(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Stop with the scheme's name when the weights are packed.

    GGUF is not concerned: its tensors say themselves how they are quantised. Nor is fp8 that the
    configuration describes.

    Raises:
        CheckpointError: a ``quantization_config``, or tensors only a packed layout has.
    """
    if checkpoint.naming == "gguf":
        return
    settings = config.get("quantization_config") or quantization_settings(checkpoint.config)
    if _is_fp8(settings):
        return
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


def _is_fp8(settings: Any) -> bool:
    """Whether a ``quantization_config`` describes matrices of fp8 with scales."""
    if not isinstance(settings, dict):
        return False
    method = settings.get("quant_method")
    if method == "modelopt":
        return settings.get("quant_algo") in MODELOPT_FP8
    if method == "compressed-tensors":
        groups = weight_groups(settings)
        sparsity = settings.get("sparsity_config")
        return (
            settings.get("format") in ("float-quantized", "naive-quantized")
            and (not sparsity or (isinstance(sparsity, dict) and sparsity.get("format") == "dense"))
            and len({str(group.get("block_structure")) for group in groups}) == 1
            and all(_is_fp8_group(group) for group in groups)
        )
    return method == "fp8"


def _is_fp8_group(weights: Mapping[str, Any]) -> bool:
    return (
        weights.get("type") == "float"
        and weights.get("num_bits") == 8
        and weights.get("strategy") in ("tensor", "channel", "block")
    )


def require_floating(checkpoint: Checkpoint, header: TensorHeader) -> None:
    """Stop when a tensor is stored as integers, or as fp8 whose scale is not known."""
    if checkpoint.naming == "gguf":
        if not can_dequantize(header.dtype):
            raise CheckpointError(
                f"values stored as {header.dtype} cannot be read",
                where=f"{checkpoint.source}, tensor {header.name}",
                expected="floats, or a quantisation the gguf package can undo",
                found=header.dtype,
                remedy="use a file in another quantisation",
            )
    elif header.dtype in FP8 and _is_fp8(quantization_settings(checkpoint.config)):
        scale_of(checkpoint, header)
    elif header.dtype not in FLOATING:
        raise _refusal(checkpoint, f"an unknown scheme with {header.dtype} weights", f"tensor {header.name}")


def _refusal(checkpoint: Checkpoint, scheme: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"the weights are quantised with {scheme}",
        where=checkpoint.source,
        expected="plain matrices in a float of 16 bits or more, fp8 with scales that a quantization_config describes, "
        "or a GGUF file",
        found=found,
        remedy="use the original checkpoint, or save a dequantised copy",
    )
