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

from tests.neutral import module_pieces, neutralised
from tests.variant import Variant

SAMPLE_TOKENS = 9
"""Length of the random sequence; an image and a sound bring their own."""

FIRST_WORD, WORDS = 5, 50
"""Words of the sequence that models run on, after those with a meaning of their own."""

SAMPLE_SOUND = 200
"""Length of a sound."""

ROTATIONS, DISTANCES = ("position_embeddings", "sinusoidal_pos"), ("position_bias", "relative_pos")
"""Arguments of attention modules with a row for each token, and with a number for each pair of tokens."""

LARGE = 2.0**20
"""Size of the tokens that probe a norm: its epsilon vanishes beside them."""


@dataclass(frozen=True)
class Block:
    """A layer and its number, the attention module within it and that module's output projection."""

    number: int
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
    """What the attention block of one layer, by number, does.

    ``ov`` (head, d_model, d_model) maps a token to what a head writes when it attends to it. ``qk``
    (head, d_model, d_model) is the bilinear form of a head's scores at one position, without q/k
    norms. ``feeding`` and ``branch`` (d_model, d_model) are the linear parts of the norm in front
    of attention and of the norm on its output, None where the layer has no such norm. ``pieces`` are
    what the attention module holds besides matrices. ``multiplier`` (d_model,) is what the layer
    multiplies the branch with, None where no module reads that sum alone.
    """

    layer: int
    ov: Tensor
    qk: Tensor
    feeding: Tensor | None
    branch: Tensor | None
    sample: Sample
    pieces: frozenset[str]
    multiplier: Tensor | None

    def folded(self) -> tuple[Tensor, Tensor]:
        """``ov`` and ``qk`` composed with the linear parts of the norms."""
        identity = torch.eye(self.ov.shape[-1], dtype=self.ov.dtype)
        before = identity if self.feeding is None else self.feeding
        after = identity if self.branch is None else self.branch
        return after @ self.ov @ before, before.mT @ self.qk @ before


class Run:
    """One forward pass: the arguments and the result of every module."""

    def __init__(self, model: nn.Module, n_tokens: int, *, batch: int = 1, one_position: bool = False) -> None:
        self._calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._results: dict[nn.Module, Any] = {}
        self._one_position = one_position
        hooks = [module.register_forward_hook(self._record, with_kwargs=True) for module in model.modules()]
        with hooked(*hooks):
            model(**model_inputs(model, n_tokens, batch, one_position))

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._calls[module] = (args, kwargs)
        self._results[module] = result

    def _arguments(self, module: nn.Module) -> inspect.BoundArguments:
        args, kwargs = self._calls[module]
        return inspect.signature(module.forward).bind(*args, **kwargs)

    def read(self, block: Block) -> Tensor:
        """What attention reads (batch, token, d_model)."""
        return next(iter(self._arguments(block.attention).arguments.values()))

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
        read = self.read(block)
        call.arguments.update({name: tokens for name, value in call.arguments.items() if value is read})
        if "output_attentions" in call.signature.parameters:
            call.arguments["output_attentions"] = True
        self._fit(call, tokens)
        with hooked(*hooks):
            result, weights, *_ = block.attention(*call.args, **call.kwargs)
            if not written:
                assert self._calls[block.projection][0][0] is self._results[block.attention][0]
                block.projection(result)
        return written[0], weights

    def _fit(self, call: inspect.BoundArguments, tokens: Tensor) -> None:
        """Drop what a cache holds of the pass, and fit positions to the tokens."""
        if "cache" in call.arguments:
            call.arguments["cache"] = None
        if self._one_position:
            for name in {*ROTATIONS, *DISTANCES} & call.arguments.keys():
                call.arguments[name] = at_first_position(name, call.arguments[name], tokens.shape[1])

    def feeding_norm(self, block: Block) -> nn.Module | None:
        """The module of the layer whose result attention reads, itself or times a number."""
        return self._fed_by(block)[0]

    def _fed_by(self, block: Block) -> tuple[nn.Module | None, float]:
        """The norm in front of attention, and what its result is multiplied with."""
        read = self.read(block)
        for module in self._within(block):
            result = self._results[module]
            if same_shape(result, read):
                factor = float((result * read).sum() / result.square().sum())
                if torch.allclose(factor * result, read, rtol=1e-9, atol=0) and normalises(module, read.shape[-1]):
                    return module, factor
        return None, 1.0

    def branch_norm(self, block: Block) -> nn.Module | None:
        """The module of the layer that reads what the output projection gives."""
        written = self._results[block.projection]
        candidates = (module for module in self._within(block) if self._calls[module][0][0] is written)
        return next((module for module in candidates if normalises(module, written.shape[-1])), None)

    def multiplier(self, block: Block) -> Tensor | None:
        """What multiplies the branch (d_model,), in front of attention and before a module reads the residual sum."""
        branch = self.branch_norm(block)
        written = self._results[block.projection if branch is None else branch]
        given = self._arguments(block.layer).arguments if block.layer in self._calls else {}
        residuals = [x for x in (*given.values(), self.read(block)) if same_shape(x, written)]
        for module in self._within(block):
            read = next(iter(self._arguments(module).arguments.values()), None)
            for residual in residuals if same_shape(read, written) else []:
                vector = constant_ratio(read - residual, written)
                if vector is not None:
                    return self._fed_by(block)[1] * vector
        return None

    def _within(self, block: Block) -> Iterator[nn.Module]:
        """Modules without submodules of the layer that took part."""
        for module in block.layer.modules():
            if module in self._calls and not list(module.children()):
                yield module


@contextmanager
def hooked(*hooks: RemovableHandle) -> Iterator[None]:
    """Run without gradients, new tensors in float64, and remove the hooks afterwards."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(default)
        for hook in hooks:
            hook.remove()


def same_shape(x: Any, tokens: Tensor) -> bool:
    """Whether an argument is tokens of this shape."""
    return isinstance(x, Tensor) and x.shape == tokens.shape


def constant_ratio(added: Tensor, written: Tensor) -> Tensor | None:
    """The vector (d_model,) that takes every token of one to the other, where there is one."""
    vector = (added * written).sum((0, 1)) / written.square().sum((0, 1))
    return vector if torch.allclose(written * vector, added, rtol=0, atol=1e-6) and vector.abs().min() > 0 else None


def at_first_position(name: str, value: Any, n_tokens: int) -> Any:
    """A positional argument of attention that puts every token where the first one was."""
    if isinstance(value, tuple):
        return tuple(at_first_position(name, part, n_tokens) for part in value)
    if value is None:
        return None
    if name in ROTATIONS:
        return value[..., :1, :].expand(*value.shape[:-2], n_tokens, -1)
    return value[..., :1, :1].expand(*value.shape[:-2], n_tokens, n_tokens)


def normalises(module: nn.Module, width: int) -> bool:
    """Whether a module ignores the scale of what it reads, as norms do, and dropouts and layer scales do not."""
    tokens = LARGE * torch.eye(width, dtype=torch.float64)
    with torch.no_grad():
        return torch.allclose(module(2 * tokens), module(tokens))


def model_inputs(model: nn.Module, n_tokens: int, batch: int, one_position: bool) -> dict[str, Tensor]:
    """Something to run a model on: ``batch`` times ``n_tokens`` unmasked tokens, a blank image, or silence."""
    if model.main_input_name == "input_values":
        return {"input_values": torch.zeros(batch, SAMPLE_SOUND, dtype=model.dtype)}
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return {"pixel_values": torch.zeros(batch, model.config.num_channels, size, size, dtype=model.dtype)}
    positions = torch.zeros(n_tokens, dtype=torch.long) if one_position else torch.arange(n_tokens)
    inputs = {
        "input_ids": (FIRST_WORD + torch.arange(n_tokens) % WORDS).repeat(batch, 1),
        "attention_mask": torch.ones(batch, n_tokens, dtype=torch.long),
        "position_ids": positions.repeat(batch, 1),
    }
    return {name: values for name, values in inputs.items() if name in inspect.signature(model.forward).parameters}


def find_blocks(model: nn.Module, variant: Variant) -> list[Block]:
    """Attention blocks with keys and values of their own, in order."""
    found = []
    for inner in range(variant.inner_count):
        attention, projection = variant.attention.format(inner=inner), variant.projection.format(inner=inner)
        suffix = f".{projection}"
        names = [name.removesuffix(suffix) for name, _ in model.named_modules() if name.endswith(suffix)]
        for number, name in zip(layer_numbers(model, names), names, strict=True):
            layer = model.get_submodule(name)
            place = number * variant.inner_count + inner
            found.append(Block(place, layer, layer.get_submodule(attention), layer.get_submodule(projection)))
    found.sort(key=lambda block: block.number)
    return found[: len(found) - variant.borrowing]


def layer_numbers(model: nn.Module, names: list[str]) -> list[int]:
    """Numbers of layers by path, counted through the lists of modules that hold them."""
    places = [name.split(".") for name in names]
    ends = [max(end for end, part in enumerate(place) if part.isdigit()) for place in places]
    stacks = [".".join(place[:end]) for place, end in zip(places, ends, strict=True)]
    starts, start = {}, 0
    for stack in dict.fromkeys(stacks):
        starts[stack] = start
        start += len(list(model.get_submodule(stack).children()))
    return [starts[stack] + int(place[end]) for stack, place, end in zip(stacks, places, ends, strict=True)]


def probe(model: nn.Module, variant: Variant) -> list[ProbedBlock]:
    """Recover every attention block of a float64 model in evaluation mode."""
    width = model.config.hidden_size
    natural = Run(model, SAMPLE_TOKENS)
    alone = Run(model, 1, batch=model.config.num_attention_heads * (width + 1), one_position=True)
    aligned = Run(model, 2 * (width + 1), one_position=True)
    probed = []
    for block in find_blocks(model.base_model, variant):
        pieces = module_pieces(block.attention)
        feeding, branch = natural.feeding_norm(block), natural.branch_norm(block)
        with neutralised(block.attention, variant.neutralised):
            sample = draw_sample(natural, block)
            ov = head_operators(alone, block, width, len(sample.weights))
            qk = score_forms(aligned, block, width)
        probed.append(
            ProbedBlock(
                block.number,
                ov,
                qk,
                None if feeding is None else linear_part(feeding, width),
                None if branch is None else linear_part(branch, width),
                sample,
                pieces,
                natural.multiplier(block),
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
    with neutralised(block.attention, ("qk_norm",)):
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
