"""Building tiny models with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.variant import SIZES, Variant


def random_model(variant: Variant) -> Any:
    """A tiny model in float32 whose biases, gains and matrices are all random; frozen tables of positions are not."""
    import transformers

    config = transformers.AutoConfig.for_model(variant.model_type, **{**SIZES, **variant.config})
    model = getattr(transformers, variant.auto).from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return randomised(model)


def randomised(model: Any) -> Any:
    """The model with random biases, gains and matrices, in evaluation mode; what is frozen stays."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model.eval()
