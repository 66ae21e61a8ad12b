"""Parts of a running attention module that are no matrices: what it has, and how to leave them out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

NORMS = {
    "q_norm": "qk_norm",
    "k_norm": "qk_norm",
    "qk_norm": "qk_norm",
    "q_layernorm": "qk_norm",
    "k_layernorm": "qk_norm",
    "query_layernorm": "qk_norm",
    "key_layernorm": "qk_norm",
    "kv_a_layernorm": "latent_norm",
    "q_a_layernorm": "latent_norm",
    "v_norm": "value_norm",
    "attn_sub_norm": "sub_norm",
}
"""Names of the norms within attention modules, by what they do."""


class Gain(nn.Module):
    """What is left of a norm when it does not divide."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Open(nn.Module):
    """A gate whose sigmoid is one, in place of the projection that computes it."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.width = projection.out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((*x.shape[:-1], self.width), torch.inf)


def module_pieces(attention: nn.Module) -> frozenset[str]:
    """Names of the pieces an attention module has."""
    children = {name for name, _ in attention.named_children()}
    pieces = {NORMS[name] for name in children & NORMS.keys()}
    if gate_rows(attention) or "gate_proj" in children:
        pieces.add("output_gate")
    if getattr(attention, "sinks", None) is not None:
        pieces.add("sinks")
    config = getattr(attention, "config", None)
    if getattr(attention, "clip_qkv", getattr(config, "clip_qkv", None)):
        pieces.add("clamp")
    return frozenset(pieces)


def gate_rows(attention: nn.Module) -> int:
    """Rows of a head's gate where the query projection holds as many again as the output projection reads."""
    query, output = getattr(attention, "q_proj", None), getattr(attention, "o_proj", None)
    if isinstance(query, nn.Linear) and isinstance(output, nn.Linear):
        return int(attention.head_dim) if query.out_features == 2 * output.in_features else 0
    return 0


@contextmanager
def neutralised(attention: nn.Module, pieces: Collection[str]) -> Iterator[None]:
    """Leave pieces of an attention module out for a while.

    Norms of queries, keys, values and of all heads' outputs pass what they read; norms of latents
    only multiply by their gain. Output gates are one, and attention sinks have no share.
    """
    with ExitStack() as stack:
        for name, child in list(attention.named_children()):
            if NORMS.get(name) in pieces:
                replacement = Gain(child) if NORMS[name] == "latent_norm" else nn.Identity()
                stack.enter_context(replaced(attention, name, replacement))
        if "output_gate" in pieces:
            if hasattr(attention, "gate_proj"):
                stack.enter_context(replaced(attention, "gate_proj", Open(attention.gate_proj)))
            else:
                hook = attention.q_proj.register_forward_hook(opened(gate_rows(attention)))
                stack.callback(hook.remove)
        if "sinks" in pieces and attention.sinks is not None:
            none = nn.Parameter(torch.full_like(attention.sinks, -torch.inf), requires_grad=False)
            stack.enter_context(replaced(attention, "sinks", none))
        yield


@contextmanager
def replaced(attention: nn.Module, name: str, replacement: nn.Module | nn.Parameter) -> Iterator[None]:
    """Another attribute of this name for a while."""
    kept = getattr(attention, name)
    setattr(attention, name, replacement)
    try:
        yield
    finally:
        setattr(attention, name, kept)


def opened(rows: int) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    """A hook that replaces each head's gate, which follows its query, by one that lets all pass."""

    def open_gates(_module: nn.Module, _args: tuple[Tensor], result: Tensor) -> Tensor:
        by_head = result.unflatten(-1, (-1, 2, rows)).clone()
        by_head[..., 1, :] = torch.inf
        return by_head.flatten(-3)

    return open_gates
