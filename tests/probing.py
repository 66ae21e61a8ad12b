"""Recovers attention operators from a running model: every number is a response, none is a weight."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

SAMPLE_TOKENS = 9
"""Length of the random sequence; an image brings its own."""

LARGE = 2.0**20
"""Size of the tokens that probe a norm: its epsilon vanishes beside them."""


@dataclass(frozen=True)
class Block:
    """A layer, the attention module within it and that module's output projection."""

    layer: nn.Module
    attention: nn.Module
    projection: nn.Module


@dataclass(frozen=True)
class Sample:
    """A random sequence through a model's untouched attention.

    ``tokens`` (token, d_model) went in, ``weights`` (head, token, token) mixed them and ``written``
    (token, d_model) came out, beyond what zero tokens give.
    """

    tokens: Tensor
    weights: Tensor
    written: Tensor


@dataclass(frozen=True)
class ProbedBlock:
    """What one attention block does.

    ``ov`` (head, d_model, d_model) maps a token to what a head writes when it attends to it. ``qk``
    (head, d_model, d_model) is the bilinear form of a head's scores at one position, without q/k
    norms. ``feeding`` and ``branch`` (d_model, d_model) are the linear parts of the norm in front
    of attention and of the norm on its output, None where the layer has no such norm.
    """

    ov: Tensor
    qk: Tensor
    feeding: Tensor | None
    branch: Tensor | None
    sample: Sample

    def folded(self) -> tuple[Tensor, Tensor]:
        """``ov`` and ``qk`` composed with the linear parts of the norms."""
        identity = torch.eye(self.ov.shape[-1], dtype=self.ov.dtype)
        before = identity if self.feeding is None else self.feeding
        after = identity if self.branch is None else self.branch
        return after @ self.ov @ before, before.mT @ self.qk @ before


class Run:
    """One forward pass: the arguments and the result of every module."""

    def __init__(self, model: nn.Module, n_tokens: int, *, one_position: bool = False) -> None:
        self._calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._results: dict[nn.Module, Any] = {}
        hooks = [module.register_forward_hook(self._record, with_kwargs=True) for module in model.modules()]
        with hooked(*hooks):
            model(**model_inputs(model, n_tokens, one_position))

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._calls[module] = (args, kwargs)
        self._results[module] = result

    def _arguments(self, module: nn.Module) -> inspect.BoundArguments:
        args, kwargs = self._calls[module]
        return inspect.signature(module.forward).bind(*args, **kwargs)

    def read(self, block: Block) -> Tensor:
        """What attention reads (batch, token, d_model)."""
        return self._arguments(block.attention).arguments["hidden_states"]

    def attend(self, block: Block, tokens: Tensor, heads: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Call a block's attention as this pass did, on other tokens.

        Args:
            block: the block.
            tokens: (batch, token, d_model).
            heads: (batch, head), 0 where a head is silenced in front of the output projection.

        Returns:
            What the output projection gives (batch, token, d_model) and the attention weights
            (batch, head, token, token).
        """
        written = []

        def silence(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
            by_head = args[0].unflatten(-1, (heads.shape[1], -1))
            return (by_head * heads[:, None, :, None]).flatten(-2)

        hooks = [block.projection.register_forward_hook(lambda _module, _args, result: written.append(result))]
        if heads is not None:
            hooks.append(block.projection.register_forward_pre_hook(silence))
        call = self._arguments(block.attention)
        call.arguments["hidden_states"] = tokens
        with hooked(*hooks):
            _, weights = block.attention(*call.args, **call.kwargs)
        return written[0], weights

    def feeding_norm(self, block: Block) -> nn.Module | None:
        """The module of the layer whose result is what attention reads."""
        read = self.read(block)
        return next((module for module in self._within(block) if self._results[module] is read), None)

    def branch_norm(self, block: Block) -> nn.Module | None:
        """The module of the layer that reads what the output projection gives."""
        written = self._results[block.projection]
        return next((module for module in self._within(block) if self._calls[module][0][0] is written), None)

    def _within(self, block: Block) -> Iterator[nn.Module]:
        """Modules without submodules of the layer that took part, dropouts aside."""
        for module in block.layer.modules():
            if module in self._calls and not list(module.children()) and not isinstance(module, nn.Dropout):
                yield module


@contextmanager
def hooked(*hooks: RemovableHandle) -> Iterator[None]:
    """Run without gradients, and remove the hooks afterwards."""
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_qk_norms(attention: nn.Module) -> Iterator[None]:
    """Let queries and keys pass their norms unchanged."""
    norms = {name: module for name, module in attention.named_children() if name in ("q_norm", "k_norm")}
    for name in norms:
        setattr(attention, name, nn.Identity())
    try:
        yield
    finally:
        for name, module in norms.items():
            setattr(attention, name, module)


def model_inputs(model: nn.Module, n_tokens: int, one_position: bool) -> dict[str, Tensor]:
    """Something to run a model on: ``n_tokens`` unmasked tokens, or one blank image."""
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return {"pixel_values": torch.zeros(1, model.config.num_channels, size, size, dtype=model.dtype)}
    positions = torch.zeros(n_tokens, dtype=torch.long) if one_position else torch.arange(n_tokens)
    return {
        "input_ids": torch.ones(1, n_tokens, dtype=torch.long),
        "attention_mask": torch.ones(1, n_tokens, dtype=torch.long),
        "position_ids": positions[None],
    }


def find_blocks(model: nn.Module, attention: str, projection: str) -> list[Block]:
    """Attention blocks in order, given the paths of the two modules within their layer."""
    names = [name.removesuffix(f".{attention}") for name, _ in model.named_modules() if name.endswith(f".{attention}")]
    layers = [model.get_submodule(name) for name in names]
    return [Block(layer, layer.get_submodule(attention), layer.get_submodule(projection)) for layer in layers]


def probe(model: nn.Module, attention: str, projection: str) -> list[ProbedBlock]:
    """Recover every attention block of a float64 model in evaluation mode."""
    width = model.config.hidden_size
    natural = Run(model, SAMPLE_TOKENS)
    alone = Run(model, 1)
    aligned = Run(model, 2 * (width + 1), one_position=True)
    probed = []
    for block in find_blocks(model, attention, projection):
        sample = draw_sample(natural, block)
        feeding, branch = natural.feeding_norm(block), natural.branch_norm(block)
        probed.append(
            ProbedBlock(
                head_operators(alone, block, width, len(sample.weights)),
                score_forms(aligned, block, width),
                None if feeding is None else linear_part(feeding, width),
                None if branch is None else linear_part(branch, width),
                sample,
            )
        )
    return probed


def draw_sample(run: Run, block: Block) -> Sample:
    """A random sequence through attention, against a sequence of zeros."""
    tokens = torch.randn(run.read(block).shape, dtype=torch.float64)
    written, weights = run.attend(block, tokens)
    constant, _ = run.attend(block, torch.zeros_like(tokens))
    return Sample(tokens[0], weights[0], (written - constant)[0])


def zero_and_units(width: int) -> Tensor:
    """The zero token, then the unit tokens (1 + d_model, d_model)."""
    return torch.eye(width + 1, width, dtype=torch.float64).roll(1, 0)


def head_operators(run: Run, block: Block, width: int, n_heads: int) -> Tensor:
    """What each head alone writes for each unit token, beyond what it writes for the zero token."""
    tokens = zero_and_units(width).repeat(n_heads, 1)[:, None]
    heads = torch.eye(n_heads, dtype=torch.float64).repeat_interleave(width + 1, 0)
    written, _ = run.attend(block, tokens, heads)
    response = written.view(n_heads, width + 1, width)
    return (response[:, 1:] - response[:, :1]).mT


def score_forms(run: Run, block: Block, width: int) -> Tensor:
    """Second differences of log attention weights between unit tokens.

    A log weight is the score less a constant of its row. Differences against the zero token along
    both axes remove that constant and the biases. The tokens come twice, so that under a causal
    mask the second copy attends to all of the first.
    """
    tokens = zero_and_units(width).repeat(2, 1)[None]
    with without_qk_norms(block.attention):
        _, weights = run.attend(block, tokens)
    log = weights[0, :, width + 1 :, : width + 1].log()
    differences = log - log[:, :1] - log[:, :, :1] + log[:, :1, :1]
    return differences[:, 1:, 1:]


def linear_part(norm: nn.Module, width: int) -> Tensor:
    """The matrix ``M`` of ``norm(x) = M x / spread(x) + norm(0)``, whose form random tokens confirm.

    The spread is the standard deviation where a constant shift of ``x`` changes nothing, else the
    root mean square.
    """
    zero, one = torch.zeros(width, dtype=torch.float64), torch.ones(width, dtype=torch.float64)

    def scaled_response(x: Tensor) -> Tensor:
        spread = x.std(-1, correction=0) if ignores_shift else x.square().mean(-1).sqrt()
        return (norm(x) - norm(zero)) * spread[:, None]

    with torch.no_grad():
        ignores_shift = torch.allclose(norm(one), norm(zero))
        matrix = scaled_response(LARGE * torch.eye(width, dtype=torch.float64)).mT / LARGE
        tokens = LARGE * torch.randn(SAMPLE_TOKENS, width, dtype=torch.float64)
        torch.testing.assert_close(scaled_response(tokens), tokens @ matrix.mT, rtol=1e-6, atol=1e-6 * LARGE)
    return matrix
