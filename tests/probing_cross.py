"""Recovers the operators of an encoder-decoder by calling its attention modules on chosen tokens.

Positions that attention adds to its scores are left out. Which norms stand in front is read off one run of the
whole model: they are the modules whose results attention reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.encoder_decoder_variants import Stack
from tests.probing import hooked, linear_part, normalises, zero_and_units
from tests.probing_towers import recorded_weights

SAMPLE_TOKENS = 7
SOURCES = ("key_value_states", "encoder_hidden_states")
"""Arguments of attention modules for tokens of another stream that keys and values read."""


@dataclass(frozen=True)
class ProbedCross:
    """What one attention block does, by the number of its layer.

    ``ov`` (head, d_model, d_source) maps a token of the source to what a head writes when it attends to it, and
    ``qk`` (head, d_model, d_source) is the bilinear form of a head's scores. ``before`` and ``source`` are the
    linear parts of the norms that queries, and keys and values, read through, None where there is none. ``tokens``
    were the source of a random sequence, ``weights`` (head, token, source token) mixed them and ``written`` came
    out, beyond what zeros give.
    """

    layer: int
    ov: Tensor
    qk: Tensor
    before: Tensor | None
    source: Tensor | None
    tokens: Tensor
    weights: Tensor
    written: Tensor

    def folded(self) -> tuple[Tensor, Tensor]:
        """``ov`` and ``qk`` composed with the linear parts of the norms."""
        identity = torch.eye(self.ov.shape[-1], dtype=self.ov.dtype)
        before = identity if self.before is None else self.before
        source = identity if self.source is None else self.source
        return self.ov @ source, before.mT @ self.qk @ source


class WholeRun:
    """What every module of a model read and gave in one pass."""

    def __init__(self, model: nn.Module, sound: bool) -> None:
        self._read: dict[nn.Module, dict[str, Any]] = {}
        self._given: dict[nn.Module, Any] = {}
        self._names = {module: name for name, module in model.named_modules()}
        tokens = torch.arange(2 * SAMPLE_TOKENS).view(2, -1) % 29 + 2
        inputs: dict[str, Tensor] = {"decoder_input_ids": tokens}
        if sound:
            frames = 2 * model.config.max_source_positions
            inputs["input_features"] = torch.randn(2, model.config.num_mel_bins, frames, dtype=torch.float64)
        else:
            inputs["input_ids"] = tokens.flip(-1)
        with hooked(*(module.register_forward_hook(self._record, with_kwargs=True) for module in model.modules())):
            model(**inputs, use_cache=False)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> None:
        self._read[module] = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        self._given[module] = given

    def read(self, attention: nn.Module) -> tuple[Tensor, Tensor]:
        """What the queries of an attention module read, and its keys and values."""
        arguments = self._read[attention]
        queries: Tensor = next(iter(arguments.values()))
        others = (arguments.get(name) for name in SOURCES)
        return queries, next((tokens for tokens in others if tokens is not None), queries)

    def is_residual(self, attention: nn.Module, projection: nn.Module) -> bool:
        """Whether what attention reads is what its output is added to, and a norm then reads the sum."""
        total = self.read(attention)[0] + self._given[projection]
        reading = (next(iter(arguments.values()), None) for arguments in self._read.values())
        return any(
            isinstance(tokens, Tensor)
            and (tokens.shape, tokens.dtype) == (total.shape, total.dtype)
            and torch.allclose(tokens, total)
            for tokens in reading
        )

    def norm_before(self, tokens: Tensor) -> tuple[str, nn.Module]:
        """The norm whose result these tokens are, and its path."""
        width = tokens.shape[-1]
        found = [
            module
            for module, given in self._given.items()
            if isinstance(given, Tensor) and given.shape == tokens.shape and torch.equal(given, tokens)
            if not list(module.children()) and normalises(module, width)
        ]
        assert len(found) == 1
        return self._names[found[0]], found[0]


def probe_stack(model: nn.Module, stack: Stack, sound: bool) -> list[ProbedCross]:
    """Recover every attention block of one stack of a float64 model in evaluation mode."""
    run = WholeRun(model, sound)
    return [
        probe_layer(run, number, layer, stack)
        for number, layer in enumerate(model.get_submodule(stack.path).children())
    ]


def probe_layer(run: WholeRun, number: int, layer: nn.Module, stack: Stack) -> ProbedCross:
    """Recover one attention block."""
    attention, projection = layer.get_submodule(stack.attention), layer.get_submodule(stack.projection)
    read, source = run.read(attention)
    width = read.shape[-1]
    before = after = None
    if not run.is_residual(attention, projection):
        before = linear_part(run.norm_before(read)[1], width)
        after = before
    if source is not read:
        name, norm = run.norm_before(source)
        is_of_layer = any(part.isdigit() for part in name.split("."))
        assert stack.source == ("" if is_of_layer else name)
        after = None if is_of_layer else linear_part(norm, width)
    call = AttentionCall(attention, projection, source is not read)
    tokens = torch.randn(1, SAMPLE_TOKENS, width, dtype=torch.float64)
    reading = torch.randn(1, SAMPLE_TOKENS, width, dtype=torch.float64) if call.is_cross else tokens
    written, weights = call.attend(reading, tokens)
    constant, _ = call.attend(0 * reading, 0 * tokens)
    return ProbedCross(
        number,
        head_operators(call, stack.heads, width),
        score_forms(call, width),
        before,
        after,
        tokens[0],
        weights[0],
        (written - constant)[0],
    )


class AttentionCall:
    """An attention module, called on its own."""

    def __init__(self, attention: nn.Module, projection: nn.Module, is_cross: bool) -> None:
        self.attention, self.projection, self.is_cross = attention, projection, is_cross

    def attend(self, reading: Tensor, source: Tensor, heads: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the projection gives and the weights, for tokens (batch, token, width) and what they attend to.

        ``heads`` (batch, head) is 0 where a head is silenced in front of the projection.
        """

        def silence(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
            by_head = args[0].unflatten(-1, (heads.shape[1], -1))
            return (by_head * heads[:, None, :, None]).flatten(-2)

        written: list[Tensor] = []
        hooks = [self.projection.register_forward_hook(lambda _module, _args, result: written.append(result))]
        if heads is not None:
            hooks.append(self.projection.register_forward_pre_hook(silence))
        parameters = inspect.signature(self.attention.forward).parameters
        other = {name: source for name in SOURCES if name in parameters} if self.is_cross else {}
        with hooked(*hooks), without_positions(self.attention), recorded_weights(self.attention) as weights:
            self.attention(reading, **other)
        return written[0], weights[0]


@contextmanager
def without_positions(attention: nn.Module) -> Iterator[None]:
    """Let scores be without a number for each distance."""
    had = getattr(attention, "has_relative_attention_bias", None)
    if had is not None:
        attention.has_relative_attention_bias = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if had is not None:
            attention.has_relative_attention_bias = had


def head_operators(call: AttentionCall, n_heads: int, width: int) -> Tensor:
    """What each head alone writes for each unit token, beyond what it writes for the zero token."""
    source = zero_and_units(width).repeat(n_heads, 1)[:, None]
    reading = torch.zeros_like(source) if call.is_cross else source
    written, _ = call.attend(reading, source, torch.eye(n_heads, dtype=torch.float64).repeat_interleave(width + 1, 0))
    response = written.view(n_heads, width + 1, width)
    return (response[:, 1:] - response[:, :1]).mT


def score_forms(call: AttentionCall, width: int) -> Tensor:
    """Second differences of log attention weights between unit tokens, as in ``tests.probing``."""
    tokens = zero_and_units(width)[None]
    _, weights = call.attend(tokens, tokens)
    log = weights[0].log()
    differences = log - log[:, :1] - log[:, :, :1] + log[:, :1, :1]
    return differences[:, 1:, 1:]
