"""Weights in floats of eight bits: which tensor holds their scales, and their values.

A value is the stored number times its scale. A scale stands for the whole matrix, for a row, or for a
block of rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stats.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.checkpoint import Checkpoint, TensorHeader

FP8 = ("F8_E4M3", "F8_E5M2")
SCALES = ("F64", "F32", "F16", "BF16", "F8_E8M0")
"""Types a scale can have."""

USUAL_BLOCK = (128, 128)
"""Rows and columns of a block where the configuration does not say."""


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """The ``quantization_config`` of a configuration or of one nested in it; None where there is none."""
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    return next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)


def weight_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says about each group of weights; empty where any is not described."""
    groups = settings.get("config_groups")
    described = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return described if all(isinstance(weights, dict) for weights in described) else []


def block_size(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Rows and columns of a block; None where a scale stands for rows or whole matrices only."""
    settings = quantization_settings(checkpoint.config)
    if not isinstance(settings, dict):
        return USUAL_BLOCK
    groups = weight_groups(settings)
    sizes = [group.get("block_structure") for group in groups] or [settings.get("weight_block_size", USUAL_BLOCK)]
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        return None
    if not isinstance(size, (list, tuple)) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        raise CheckpointError(
            "the block of an fp8 scale has no size",
            where=f"{checkpoint.source}, quantization_config",
            expected="rows and columns, such as [128, 128]",
            found=repr(size)[:100],
            remedy="correct the configuration the model was saved with",
        )
    return size[0], size[1]


def scale_of(checkpoint: Checkpoint, header: TensorHeader) -> TensorHeader:
    """Header of the scale that belongs to an fp8 weight.

    It is called ``weight_scale_inv`` (a factor all the same), ``weight_scale``, or ``scale`` in place of
    ``weight``.

    Raises:
        CheckpointError: no scale, several, a zero point, or a scale of another type or shape.
    """
    where = f"{checkpoint.source}, tensor {header.name}"
    names = [f"{header.name}_scale_inv", f"{header.name}_scale", f"{header.name.removesuffix('.weight')}.scale"]
    present = [name for name in (*names, f"{header.name}_zero_point") if name in checkpoint]
    if len(present) != 1 or present[0] not in names:
        raise CheckpointError(
            f"the scale of {header.dtype} weights is not known",
            where=where,
            expected="one of " + ", ".join(names),
            found=", ".join(present) or "none of them",
            remedy="complete the download, or use a checkpoint in a float of 16 bits or more",
        )
    scale = checkpoint.header(present[0])
    if scale.dtype not in SCALES:
        raise CheckpointError(
            "an fp8 scale is no float",
            where=f"{checkpoint.source}, tensor {scale.name}",
            expected=", ".join(SCALES),
            found=scale.dtype,
            remedy="use a checkpoint in a float of 16 bits or more",
        )
    block = block_size(checkpoint)
    shapes = _scale_shapes(header.shape, block)
    if scale.shape not in shapes:
        raise CheckpointError(
            "the shape of an fp8 scale does not fit its weights",
            where=f"{checkpoint.source}, tensor {scale.name}",
            expected=" or ".join(str(list(shape)) for shape in shapes)
            + f" for weights {list(header.shape)}"
            + (f" in blocks of {block[0]} x {block[1]}" if block else ""),
            found=str(list(scale.shape)),
            remedy="correct weight_block_size in the configuration, or download the checkpoint again",
        )
    return scale


def _scale_shapes(shape: tuple[int, ...], block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """Shapes a scale can have: one value, one for each row, one for each block."""
    shapes: list[tuple[int, ...]] = [(), (1,)]
    if len(shape) == 2:
        shapes += [(shape[0],), (shape[0], 1)]
        if block is not None:
            shapes.append((-(-shape[0] // block[0]), -(-shape[1] // block[1])))
    return shapes


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Values of fp8 weights (out, in) in float64, which holds their products with a float32 scale exactly.

    Args:
        weight: the stored numbers.
        scale: () or (1,); (out,) or (out, 1); or a value for each block, the last ones ragged.
        block: rows and columns of a block.
    """
    values, factors = weight.double(), scale.double()
    if factors.shape in ((), (1,)):
        return values.mul_(factors)
    if factors.shape in (values.shape[:1], (values.shape[0], 1)) or block is None:
        return values.mul_(factors.reshape(-1, 1))
    for number, factor in enumerate(factors):
        rows = values[number * block[0] : (number + 1) * block[0]]
        rows.mul_(factor.repeat_interleave(min(block[1], rows.shape[1]))[: rows.shape[1]])
    return values
