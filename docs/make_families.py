"""Print the list of model families as the code declares them.

python docs/make_families.py > docs/families.md
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from ingest.encoder_decoders import ENCODER_DECODERS
from ingest.families import FAMILIES, GGUF_FAMILIES
from ingest.family import Family, Norm, Projections
from ingest.refusals import REFUSED
from ingest.towers import TOWERS, WRAPPED


def lines() -> Iterator[str]:
    """The document, line by line."""
    yield "# Model families"
    yield ""
    yield "Generated from the declarations in the code by `make docs`; do not edit. Every family of the"
    yield "first four tables is compared, head by head, with the running modules of `transformers` in the"
    yield "tests. `{layer}` is the layer's number; a prefix such as `model.` may stand before it. Rows for GGUF"
    yield "follow llama.cpp; the tests convert models to many of the architectures and compare the numbers."
    towers = sorted(TOWERS, key=lambda row: row.model_type)
    others = [row for row in every(FAMILIES.values()) if row not in (*TOWERS, *ENCODER_DECODERS)]
    for title, rows in (
        ("Decoders, by `model_type`", [row for row in others if row.stack == "decoder"]),
        ("Encoders, by `model_type`", [row for row in others if row.stack != "decoder"]),
        ("Parts of models that see, hear or compare, by `model_type`", towers),
    ):
        yield from table(title, rows)
    yield from encoder_decoders()
    yield from table("GGUF, by `general.architecture`", every(GGUF_FAMILIES.values()))
    yield ""
    yield "## Families that are refused, by `model_type`"
    yield ""
    yield "| family | why |"
    yield "|---|---|"
    for model_type, reason in REFUSED.items():
        yield f"| `{model_type}` | {reason} |"
    yield ""
    yield "## Multimodal models, by `model_type`"
    yield ""
    yield "A part is read as the `model_type` it names. Where it names none, it is what the model's class assumes."
    yield ""
    yield "| model | assumed of its parts |"
    yield "|---|---|"
    for wrapper, parts in sorted(WRAPPED.items()):
        assumed = ", ".join(f"`{key}`: `{model_type}`" for key, model_type in parts.items())
        yield f"| `{wrapper}` | {assumed} |"


def table(title: str, rows: Iterable[Family]) -> Iterator[str]:
    """Families of one kind."""
    yield ""
    yield f"## {title}"
    yield ""
    yield "| family | layer | projections | layout | norm in front | gain on the output | besides |"
    yield "|---|---|---|---|---|---|---|"
    yield from (row_line(row) for row in rows)


def encoder_decoders() -> Iterator[str]:
    """Families of three stacks, and what cross-attention reads the encoder through."""
    yield ""
    yield "## Encoder-decoders, by `model_type`"
    yield ""
    yield "Queries of cross-attention come from the decoder, through the norm in front; its keys and values come from"
    yield "the encoder's output, through the norm of the source."
    yield ""
    yield "| family | stack | layer | projections | norm in front | norm of the source |"
    yield "|---|---|---|---|---|---|"
    for row in sorted(ENCODER_DECODERS, key=lambda row: row.model_type):
        source = norm(row.source) if row.two_spaces else "as in front"
        cells = (name_of(row), row.stack, f"`{row.block}`", projections_of(row), norm(row.feeding), source)
        yield f"| {' | '.join(cells)} |"


def every(table: Iterable[tuple[Family, ...]]) -> list[Family]:
    """Rows of a family table by name."""
    return sorted((row for rows in table for row in rows), key=lambda row: row.model_type)


def row_line(row: Family) -> str:
    """One family as a row of a Markdown table."""
    name = name_of(row)
    if row in TOWERS:
        name += f", {row.stack.replace('_', ' ')}"
    layouts = " or ".join(dict.fromkeys(layout(projections) for projections in row.projections))
    block = " or ".join(f"`{path}`" for path in (row.block, row.other_block) if path)
    cells = (name, block, projections_of(row), layouts, norm(row.feeding), norm(row.branch), besides(row))
    return f"| {' | '.join(cells)} |"


def besides(row: Family) -> str:
    """What lies between tokens and the stream besides matrices and norms, where the row knows it beforehand."""
    parts = [piece.name for piece in row.pieces]
    parts += ["latent_norm" for form in row.projections if form.latent]
    parts += ["output_gate" for form in row.projections if form.gated_query]
    words = [part.replace("_", " ") for part in dict.fromkeys(parts)]
    if row.value_scale:
        words.append(f"values times `{row.value_scale}`")
    if row.multiplier is not None:
        factors = [*row.multiplier.settings, *([row.multiplier.gain] if row.multiplier.gain else [])]
        product = " times ".join(f"`{factor}`" for factor in factors)
        if row.multiplier.gated:
            product = f"the hyperbolic tangent of {product}"
        words.append(
            f"branch times {product}" + (", over the root of the depth" if row.multiplier.over_sqrt_depth else "")
        )
    if row.shared_layers:
        words.append(f"the last `{row.shared_layers}` layers have no keys and values of their own")
    return ", ".join(words) or "none"


def name_of(row: Family) -> str:
    """The family and the settings that this row is for."""
    conditions = ", ".join(f"{key} = {json.dumps(value)}" for key, value in row.when.items())
    return f"`{row.model_type}`" + (f" ({conditions})" if conditions else "")


def layout(projections: Projections) -> str:
    """How the projections are stored."""
    return projections.layout.replace("_", " ") + (", stored transposed" if projections.transposed else "")


def projections_of(row: Family) -> str:
    """Names of the tensors, for every form."""
    return "; or ".join(
        ", ".join(f"`{tensor}`" for tensor in projections.roles.values()) for projections in row.projections
    )


def norm(item: Norm | None) -> str:
    """A norm by tensor and kind."""
    if item is None:
        return "none"
    kind = item.kind.replace("_plus_one", ", 1 + w").replace("layer", "LayerNorm").replace("rms", "RMSNorm")
    where = f" (from layer {item.first_layer})" if item.first_layer else ""
    names = " or ".join(f"`{name}`" for name in (item.tensor, item.other_tensor) if name)
    return (f"{names}, {kind}" if names else f"{kind} without a gain") + where


if __name__ == "__main__":
    print("\n".join(lines()))
