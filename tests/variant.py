"""What a tiny model of a family is built from, and where its attention sits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingest.family import PieceName

WIDTH, N_HEADS, N_LAYERS = 64, 4, 2
SIZES = {
    "vocab_size": 131,
    "hidden_size": WIDTH,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "sliding_window": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


@dataclass(frozen=True)
class Variant:
    """A model to build: its class and configuration, and two modules of a layer by path.

    ``n_blocks`` counts the attention blocks and ``skipped`` the layers that have none.
    ``saved_prefix`` is what stands before the stack in files, where the running model has another name for it,
    and ``headless_prefix`` the same for a save without the head.
    ``inner_count`` blocks share a numbered layer, whose ``{inner}`` the paths contain. The last
    ``borrowing`` layers use the keys and values of earlier ones and are skipped. ``neutralised`` names
    what is replaced while probing by something that leaves ``T`` alone (``tests.neutral``).
    ``post_norm`` says that attention reads the residual stream and writes to it through no norm;
    ``bare_norm`` that its only norm has no gain and keeps the mean, so that folding it changes nothing.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    attention: str = "self_attn"
    projection: str = "self_attn.o_proj"
    n_blocks: int = N_LAYERS
    skipped: int = 0
    saved_prefix: str = ""
    headless_prefix: str = ""
    inner_count: int = 1
    borrowing: int = 0
    neutralised: tuple[PieceName, ...] = ()
    post_norm: bool = False
    bare_norm: bool = False
