"""Every known family by name. Adding a family adds a row to one of the tables.

``tests/test_families.py``, ``tests/test_encoder_decoders.py`` and ``tests/test_towers.py`` recover every
head's operator by probing the running modules of ``transformers`` and compare.
"""

from __future__ import annotations

from collections.abc import Iterable

from ingest.decoders import DECODERS
from ingest.encoder_decoders import ENCODER_DECODERS
from ingest.encoders import ENCODERS
from ingest.family import Family
from ingest.gguf_families import ARCHITECTURES
from ingest.hybrids import HYBRIDS
from ingest.irregular_decoders import IRREGULAR
from ingest.latent_decoders import LATENT_DECODERS
from ingest.towers import TOWERS


def _by_name(rows: Iterable[Family]) -> dict[str, tuple[Family, ...]]:
    table: dict[str, tuple[Family, ...]] = {}
    for row in rows:
        table[row.model_type] = (*table.get(row.model_type, ()), row)
    return table


FAMILIES = _by_name((*DECODERS, *LATENT_DECODERS, *IRREGULAR, *HYBRIDS, *ENCODERS, *ENCODER_DECODERS, *TOWERS))
"""Rows by ``model_type`` of ``config.json``; where there are several, the configuration decides."""

GGUF_FAMILIES = _by_name(ARCHITECTURES)
"""Rows by ``general.architecture`` of a GGUF file."""
