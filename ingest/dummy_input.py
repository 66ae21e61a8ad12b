"""Something short to run a model of ``transformers`` on, from its configuration and signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

N_TOKENS, N_SAMPLES, N_FRAMES = 1, 1600, 16
"""Tokens in a sequence: the attention weight of a single one is exactly 1. Samples and frames in a sound."""


def dummy_input(model: nn.Module) -> dict[str, Any]:
    """Arguments of the model's ``forward``: a token, a noisy image, a noisy sound, as far as it takes them."""
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        for name, make in BESIDE.items():
            if name in accepted:
                return make(model, config, next(iter(accepted)))
    main = str(model.main_input_name)
    names = [main if main in accepted else next(iter(accepted))]
    names += [name for name in ("decoder_input_ids", "query_embeds", "use_cache") if name in accepted]
    if hasattr(config, "vision_config") and "pixel_values" in accepted and "image_grid_thw" not in accepted:
        names.append("pixel_values")
    if hasattr(config, "encoder_hidden_size") and "encoder_hidden_states" in accepted:
        names.append("encoder_hidden_states")
    if hasattr(config, "cross_attention_layers") and "cross_attention_states" in accepted:
        names.append("cross_attention_states")
    return {name: MAKERS[name](model, config) for name in names if name in MAKERS}


def _noise(model: nn.Module, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    return torch.randn(*shape, generator=generator).to(dtype)


def _token_ids(_model: nn.Module, config: Any) -> Tensor:
    """A token that is not the very first of the vocabulary, which is often padding."""
    size = int(config.get_text_config(decoder=True).vocab_size)
    return (torch.arange(1, N_TOKENS + 1) % size)[None]


def _image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images a model was made for."""
    vision = getattr(config, "vision_config", config)
    size = vision.image_size
    if isinstance(size, dict):
        size = [size["height"], size["width"]]
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(vision, "num_channels", 3), height, width


MAKERS: Mapping[str, Callable[[nn.Module, Any], Any]] = {
    "input_ids": _token_ids,
    "decoder_input_ids": _token_ids,
    "pixel_values": lambda model, config: _noise(model, 1, *_image_shape(config)),
    "input_values": lambda model, _config: _noise(model, 1, N_SAMPLES),
    "input_features": lambda model, config: _noise(model, 1, config.num_mel_bins, 2 * config.max_source_positions),
    "query_embeds": lambda model, config: _noise(model, 1, N_TOKENS, config.hidden_size),
    "encoder_hidden_states": lambda model, config: _noise(model, 1, N_TOKENS, config.encoder_hidden_size),
    "cross_attention_states": lambda model, config: _noise(model, 1, N_TOKENS, config.hidden_size),
    "use_cache": lambda _model, _config: False,
}
"""One argument by name."""


def _patches(model: nn.Module, config: Any, first: str) -> dict[str, Any]:
    """The smallest image of a model that takes the patches of all images as one row."""
    side = 2 * config.spatial_merge_size
    width = getattr(config, "in_channels", 3) * config.temporal_patch_size * config.patch_size**2
    return {first: _noise(model, side * side, width), "grid_thw": torch.tensor([[1, side, side]])}


def _flat_patches(model: nn.Module, config: Any, first: str) -> dict[str, Any]:
    """An image of two by two patches for a model that takes images of any shape."""
    pixels = _noise(model, 1, 4, config.num_channels * config.patch_size**2)
    return {
        first: pixels,
        "pixel_attention_mask": torch.ones(1, 4, dtype=torch.long),
        "spatial_shapes": torch.tensor([[2, 2]]),
    }


def _tiles(model: nn.Module, config: Any, first: str) -> dict[str, Any]:
    """An image that fills every tile."""
    tiles = config.max_num_tiles
    return {
        first: _noise(model, 1, 1, tiles, *_image_shape(config)),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }


def _frames(model: nn.Module, config: Any, first: str) -> dict[str, Any]:
    """A sound for a model that takes the frames of all sounds as one row."""
    return {
        first: _noise(model, config.num_mel_bins, N_FRAMES),
        "feature_lens": torch.tensor([N_FRAMES]),
        "aftercnn_lens": torch.tensor([N_FRAMES // 2]),
    }


BESIDE: Mapping[str, Callable[[nn.Module, Any, str], dict[str, Any]]] = {
    "grid_thw": _patches,
    "spatial_shapes": _flat_patches,
    "aspect_ratio_ids": _tiles,
    "feature_lens": _frames,
}
"""All arguments of a part that needs one of these beside its first."""
