"""Every known family by name. Adding a family adds a row to one of the tables.

``tests/test_families.py`` recovers every head's operator by probing the running modules of
``transformers`` and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ingest.decoders import DECODERS
from ingest.encoders import ENCODERS
from ingest.family import Family, Keys, Norm, Projections
from ingest.hybrids import HYBRIDS


def _by_name(rows: Iterable[Family]) -> dict[str, tuple[Family, ...]]:
    table: dict[str, tuple[Family, ...]] = {}
    for row in rows:
        table[row.model_type] = (*table.get(row.model_type, ()), row)
    return table


FAMILIES = _by_name((*DECODERS, *HYBRIDS, *ENCODERS))
"""Rows by ``model_type`` of ``config.json``; where there are several, the configuration decides."""

WRAPPED: Mapping[str, Mapping[str, str]] = {}
"""What a multimodal model's class assumes of nested configurations that do not name their ``model_type``."""

_GGUF = Family(
    "llama",
    "blk.{layer}.",
    (
        Projections("attn_output", "attn_q", "attn_k", "attn_v"),
        Projections("attn_output", fused="attn_qkv", layout="concatenated"),
    ),
    feeding=Norm("attn_norm", "rms"),
    keys=Keys(
        width=("embedding_length",),
        depth=("block_count",),
        heads=("attention.head_count",),
        kv_heads=("attention.head_count_kv",),
        head_dim=("attention.value_length", "attention.key_length"),
    ),
)
_GGUF_LAYER = replace(_GGUF, feeding=Norm("attn_norm", "layer"))
_GGUF_SANDWICH = replace(_GGUF, branch=Norm("post_attention_norm", "rms"))

GGUF_FAMILIES = _by_name(
    (
        _GGUF,
        replace(_GGUF, model_type="qwen2"),
        replace(_GGUF, model_type="qwen3"),
        replace(_GGUF, model_type="gemma"),
        replace(_GGUF_SANDWICH, model_type="gemma2"),
        replace(_GGUF_SANDWICH, model_type="gemma3"),
        replace(_GGUF, model_type="olmo", feeding=Norm("", "layer")),
        replace(_GGUF_SANDWICH, model_type="olmo2", feeding=None),
        replace(_GGUF, model_type="phi3"),
        replace(_GGUF, model_type="smollm3"),
        replace(_GGUF_LAYER, model_type="gptneox"),
        replace(_GGUF_LAYER, model_type="gpt2"),
        replace(_GGUF, model_type="bert", stack="encoder", feeding=None),
    )
)
"""Families by ``general.architecture`` of a GGUF file. Conversion to GGUF unifies the names, undoes
every per-head interleave and ``Conv1D`` transpose, and adds the one to Gemma's gains. For
architectures converted like llama it also permutes the rows of q and k within each head, both
alike, which no stored number depends on."""
