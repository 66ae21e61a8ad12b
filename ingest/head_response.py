"""What the heads of a running attention module write in answer to chosen tokens.

Every token of the sequence is the same one. Attention weights that sum to one then mix nothing,
wherever the module looks and whatever position code it uses, and each head passes on its value of
that token: ``T x``, and a constant that the answer to the zero token holds alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ingest.plan import LayerPlan
from ingest.running import NotComparableError, RunningAttention

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache", "cache_params")
"""Arguments of attention modules that remember earlier tokens."""

VALUE_NORMS = ("v_norm", "value_norm")
"""Names of a norm without a gain that values pass within attention."""

WITHIN_CLAMP = 2.0**-10
"""Size of tokens whose values stay within every clamp in use."""

LARGE = 2.0**20
"""Size of tokens beside which the epsilon of a norm vanishes."""


class _ReachedProjectionError(Exception):
    """An attention module has come to its output projection."""


class HeadResponse:
    """A copy of one attention module in float64, with what is not linear in its tokens taken out.

    Where ``T`` leaves out a gate or a norm behind the heads, or attention weights sum to less than
    one, heads are read where the module's attention function returns them.
    """

    def __init__(self, running: RunningAttention, layer: LayerPlan, latent_gain: Tensor | None) -> None:
        """Copy the module.

        Args:
            running: the module and how it was called.
            layer: the plan of its layer.
            latent_gain: (rank,) gain of the norm in latent attention, by whose values it is known.

        Raises:
            NotComparableError: a piece cannot be taken out.
        """
        self._attention = deepcopy(running.module).double()
        self._projection = self._attention.get_submodule(running.projection)
        self._running, self._layer = running, layer
        self._at_function = bool({"output_gate", "sub_norm", "sinks"} & set(layer.pieces))
        self._scale = WITHIN_CLAMP if "clamp" in layer.pieces else 1.0
        if running.feeding_within is not None:
            inner = [self._attention.get_submodule(running.feeding_within)]
            self._replace("feeding norm", inner, lambda x, _gain: x)
        if latent_gain is not None:
            self._replace("latent_norm", _holding(self._attention, latent_gain), lambda x, gain: x * gain)
        if "value_norm" in layer.pieces:
            named = [module for name, module in self._attention.named_children() if name in VALUE_NORMS]
            self._replace("value_norm", named, lambda x, _gain: x)

    def _replace(self, piece: str, modules: list[nn.Module], linear: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Let modules give something linear in what they read instead."""
        if not modules:
            raise NotComparableError(f"{piece}: not found in {type(self._attention).__name__}")

        def instead(module: nn.Module, args: tuple[Tensor], _result: Tensor) -> Tensor:
            return linear(args[0], getattr(module, "weight", args[0]))

        for module in modules:
            module.register_forward_hook(instead)

    def operators(self, tokens: Tensor) -> Tensor:
        """``T x`` of every head in the file (token, head, d_model) for tokens (token, d_source).

        Raises:
            NotComparableError: the module does not show its heads.
        """
        with torch.no_grad(), _float64():
            constant = self._written(torch.zeros_like(tokens[0]))
            written = [self._written(self._scale * token) - constant for token in tokens]
        return torch.stack(written) / self._scale

    def _written(self, token: Tensor) -> Tensor:
        """What each head alone writes (head, d_model), the others silenced in front of the projection."""
        heads = self._heads(token)
        alone = heads.new_zeros(len(heads), *heads.shape)
        alone[range(len(heads)), range(len(heads))] = heads
        written: Tensor = self._projection(alone.flatten(1)[None])
        return written[0]

    def _heads(self, token: Tensor) -> Tensor:
        """What the heads give for a sequence of one token repeated (head, d_head)."""
        args, kwargs = (_in_float64(part) for part in self._running.call)
        bound = inspect.signature(self._attention.forward).bind(*args, **kwargs)
        for name in CACHES:
            if name in bound.arguments:
                bound.arguments[name] = None
        for name in self._running.replaced:
            bound.arguments[name] = token.expand_as(bound.arguments[name])
        reached: list[Tensor] = []

        def stop(_module: nn.Module, given: tuple[Tensor]) -> None:
            reached.append(given[0])
            raise _ReachedProjectionError

        hook = self._projection.register_forward_pre_hook(stop)
        try:
            with recorded(type(self._attention)) as functions:
                self._attention(*bound.args, **bound.kwargs)
        except _ReachedProjectionError:
            pass
        finally:
            hook.remove()
        if not reached:
            raise NotComparableError(f"{type(self._attention).__name__} never called its output projection")
        shape = (self._layer.stored_heads, self._layer.d_head)
        if not self._at_function:
            return _last_row(reached[0], shape)
        if not functions:
            raise NotComparableError(f"{', '.join(self._layer.pieces)}: heads are not shown in front of it")
        given, weights = functions[0]
        total = weights[0, :, -1].sum(-1) if "sinks" in self._layer.pieces else torch.ones(shape[0])
        return _last_row(given, shape) / total[:, None]


def _last_row(heads: Tensor, shape: tuple[int, int]) -> Tensor:
    """The last of the positions, by head."""
    n_heads, d_head = shape
    if heads.numel() % (n_heads * d_head):
        raise NotComparableError(f"heads come as {list(heads.shape)}, not as {n_heads} of size {d_head}")
    return heads.reshape(-1, n_heads, d_head)[-1]


def _holding(attention: nn.Module, gain: Tensor) -> list[nn.Module]:
    """Modules whose only weight is a vector of these values."""
    found = []
    for module in attention.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == gain.shape and torch.equal(weight, gain.double()):
            found.append(module)
    return found


def _in_float64(value: Any) -> Any:
    """Arguments with every floating tensor in float64, however they are nested."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _in_float64(item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_in_float64(item) for item in value)
    return value


@contextmanager
def _float64() -> Iterator[None]:
    """New tensors in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def recorded(attention: type[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect the heads (batch, token, head, d_head) and weights that a module's own attention function gives."""
    modelling = sys.modules[attention.__module__]
    collected: list[tuple[Tensor, Tensor]] = []

    def recording(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            given = function(*args, **kwargs)
            collected.append(given)
            return given

        return attend

    with ExitStack() as replaced:
        for name, value in list(vars(modelling).items()):
            if name.endswith("eager_attention_forward"):
                replaced.enter_context(patch.object(modelling, name, recording(value)))
        yield collected


def linear_part(norm: nn.Module, tokens: Tensor) -> Tensor:
    """``M x`` for tokens (token, d_model), where ``norm(x) = M x / spread(x) + norm(0)``.

    The spread is the standard deviation where a constant shift of ``x`` changes nothing, else the
    root mean square.
    """
    module = deepcopy(norm).double()
    x = LARGE * tokens
    with torch.no_grad(), _float64():
        zero = module(torch.zeros_like(x))
        ignores_shift = torch.allclose(module(torch.ones_like(x)), zero)
        spread = x.std(-1, correction=0) if ignores_shift else x.square().mean(-1).sqrt()
        part: Tensor = (module(x) - zero) * spread[:, None] / LARGE
    return part
