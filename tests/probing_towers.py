"""Recovers the operators of one stack by calling its running layers on chosen tokens.

Images and sounds have rotary positions of their own, which every call replaces by no rotation.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.neutral import neutralised
from tests.probing import hooked, linear_part, zero_and_units
from tests.tower_variants import Tower

SAMPLE_TOKENS = 9


@dataclass(frozen=True)
class ProbedAttention:
    """What one attention block does, by the number of its layer.

    ``ov`` (head, d_model, d_source) maps a token to what a head writes when it attends to it. ``qk``
    (head, d_model, d_source) is the bilinear form of a head's scores without q/k norms. ``feeding``
    and ``branch`` (d_model, d_model) are the linear parts of what stands in front of attention and
    of the norm on its output, None where nothing does. ``tokens`` went into a random sequence,
    ``weights`` (head, token, token) mixed them and ``written`` came out, beyond what zeros give.
    """

    layer: int
    ov: Tensor
    qk: Tensor
    feeding: Tensor | None
    branch: Tensor | None
    tokens: Tensor
    weights: Tensor
    written: Tensor


class ReachedAttention(Exception):
    """A layer has come to its attention with these tokens."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class LayerCall:
    """A layer of a stack, called on its own."""

    def __init__(self, layer: nn.Module, tower: Tower) -> None:
        self.layer, self.tower = layer, tower
        self.attention = layer.get_submodule(tower.attention)
        self.projection = layer.get_submodule(tower.projection)

    def attend(self, tokens: Tensor, source: Tensor, heads: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the projection gives and the weights, for tokens (batch, token, width) and what they attend to.

        ``heads`` (batch, head) is 0 where a head is silenced in front of the projection.
        """
        written: list[Tensor] = []
        batch = len(tokens)

        def silence(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
            by_head = args[0].reshape(batch, -1, args[0].shape[-1]).unflatten(-1, (heads.shape[1], -1))
            return (by_head * heads[:, None, :, None]).flatten(-2).reshape(args[0].shape)

        hooks = [self.projection.register_forward_hook(lambda _module, _args, result: written.append(result))]
        if heads is not None:
            hooks.append(self.projection.register_forward_pre_hook(silence))
        with hooked(*hooks), recorded_weights(self.attention) as weights:
            self._call(self.attention, tokens, source)
        return written[0].reshape(tokens.shape), torch.cat(weights)

    def fed(self, tokens: Tensor) -> Tensor:
        """What attention reads when the layer reads tokens (token, width)."""

        def reached(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = inspect.signature(self.attention.forward).bind(*args, **kwargs)
            raise ReachedAttention(next(iter(bound.arguments.values())))

        hook = self.attention.register_forward_pre_hook(reached, with_kwargs=True)
        batched = tokens.reshape(1, -1, self.tower.width)
        try:
            with hooked(hook):
                self._call(self.layer, batched, torch.zeros(1, 1, self.tower.source_width or self.tower.width))
        except ReachedAttention as found:
            return found.tokens.reshape(tokens.shape)
        raise AssertionError("the layer never called its attention")

    def _call(self, module: nn.Module, tokens: Tensor, source: Tensor) -> None:
        batch, length, _ = tokens.shape
        rows = batch * length if self.tower.flat else length
        known = {
            "attention_mask": None,
            "cu_seqlens": torch.arange(0, batch * length + 1, length),
            "position_embeddings": no_rotation(self, rows),
            "freqs_ci": no_turn(self, length),
            "cross_attention_states": source,
            "cross_attention_mask": None,
            "full_text_row_masked_out_mask": None,
            "encoder_hidden_states": source if self.tower.source_width else None,
        }
        parameters = inspect.signature(module.forward).parameters
        first, *_ = parameters
        given = tokens.flatten(0, 1) if self.tower.flat else tokens
        module(**{first: given}, **{name: value for name, value in known.items() if name in parameters})


def no_turn(call: LayerCall, rows: int) -> Tensor:
    """The complex numbers of no rotation."""
    return torch.ones(rows, getattr(call.attention, "head_dim", 2) // 2, dtype=torch.complex128)


def no_rotation(call: LayerCall, rows: int) -> Tensor | tuple[Tensor, Tensor]:
    """Cosines and sines of no rotation, or complex numbers, shaped as the attention takes them."""
    if call.tower.complex_rotation:
        return no_turn(call, rows)[None]
    size = getattr(call.attention, "head_dim", 1)
    shape = (rows, size) if call.tower.flat else (1, rows, size)
    return torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)


@contextmanager
def recorded_weights(attention: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the weights that the modelling file's own attention functions give."""
    modelling = sys.modules[type(attention).__module__]
    weights: list[Tensor] = []
    functions = {name: value for name, value in vars(modelling).items() if name.endswith("eager_attention_forward")}

    def recording(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            output, given = function(*args, **kwargs)
            weights.append(given)
            return output, given

        return attend

    for name, function in functions.items():
        setattr(modelling, name, recording(function))
    try:
        yield weights
    finally:
        for name, function in functions.items():
            setattr(modelling, name, function)


def probe_tower(model: nn.Module, tower: Tower) -> list[ProbedAttention]:
    """Recover every attention block of one stack of a float64 model in evaluation mode."""
    layers = list(model.get_submodule(tower.path).children())
    found = []
    for number, layer in enumerate(layers):
        if hasattr(layer, tower.attention.split(".")[0]):
            found.append(probe_layer(number, LayerCall(layer, tower)))
    return found


def probe_layer(number: int, call: LayerCall) -> ProbedAttention:
    """Recover one attention block."""
    width, source_width = call.tower.width, call.tower.source_width or call.tower.width
    tokens = torch.randn(1, SAMPLE_TOKENS, source_width, dtype=torch.float64)
    reading = tokens if source_width == width else torch.randn(1, SAMPLE_TOKENS, width, dtype=torch.float64)
    written, weights = call.attend(reading, tokens)
    constant, _ = call.attend(0 * reading, 0 * tokens)
    return ProbedAttention(
        number,
        head_operators(call, width, source_width),
        score_forms(call, width, source_width),
        None if call.tower.second else feeding_part(call, width),
        linear_part(call.layer.get_submodule(call.tower.branch), width) if call.tower.branch else None,
        tokens[0],
        weights[0],
        (written - constant)[0],
    )


def head_operators(call: LayerCall, width: int, source_width: int) -> Tensor:
    """What each head alone writes for each unit token, beyond what it writes for the zero token."""
    n_heads = call.tower.heads
    source = zero_and_units(source_width).repeat(n_heads, 1)[:, None]
    reading = source if source_width == width else torch.zeros(len(source), 1, width, dtype=torch.float64)
    heads = torch.eye(n_heads, dtype=torch.float64).repeat_interleave(source_width + 1, 0)
    written, _ = call.attend(reading, source, heads)
    response = written.view(n_heads, source_width + 1, width)
    return (response[:, 1:] - response[:, :1]).mT


def score_forms(call: LayerCall, width: int, source_width: int) -> Tensor:
    """Second differences of log attention weights between unit tokens, as in ``tests.probing``."""
    with neutralised(call.attention, ("qk_norm",)):
        _, weights = call.attend(zero_and_units(width)[None], zero_and_units(source_width)[None])
    log = weights[0].log()
    differences = log - log[:, :1] - log[:, :, :1] + log[:, :1, :1]
    return differences[:, 1:, 1:]


def feeding_part(call: LayerCall, width: int) -> Tensor | None:
    """The linear part of what a layer does to tokens before attention; None where it does nothing."""
    tokens = torch.randn(SAMPLE_TOKENS, width, dtype=torch.float64)
    if torch.equal(call.fed(tokens), tokens):
        return None

    def norm(x: Tensor) -> Tensor:
        return call.fed(x[None] if x.ndim == 1 else x).reshape(x.shape)

    return linear_part(norm, width)  # type: ignore[arg-type]
