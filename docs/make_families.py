"""Print the list of model families as the code declares them.

python docs/make_families.py > docs/families.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ingest.families import FAMILIES, GGUF_FAMILIES
from ingest.family import Family, Norm


def lines() -> Iterator[str]:
    """The document, line by line."""
    yield "# Model families"
    yield ""
    yield "Generated from the declarations in the code by `make docs`; do not edit. Every family of the"
    yield "first two tables is compared, head by head, with the running modules of `transformers` in the"
    yield "tests. `{layer}` is the layer's number; a prefix such as `model.` may stand before it."
    for title, rows in (
        ("Decoders, by `model_type`", [row for row in every(FAMILIES.values()) if row.stack == "decoder"]),
        ("Encoders, by `model_type`", [row for row in every(FAMILIES.values()) if row.stack != "decoder"]),
        ("GGUF, by `general.architecture`", every(GGUF_FAMILIES.values())),
    ):
        yield ""
        yield f"## {title}"
        yield ""
        yield "| family | layer | projections | layout | norm in front | gain on the output |"
        yield "|---|---|---|---|---|---|"
        yield from (row_line(row) for row in rows)


def every(table: Iterable[tuple[Family, ...]]) -> list[Family]:
    """Rows of a family table by name."""
    return sorted((row for rows in table for row in rows), key=lambda row: row.model_type)


def row_line(row: Family) -> str:
    """One family as a row of a Markdown table."""
    conditions = ", ".join(f"{key} = {str(value).lower()}" for key, value in row.when.items())
    name = f"`{row.model_type}`" + (f" ({conditions})" if conditions else "")
    projections = "; or ".join(
        ", ".join(f"`{tensor}`" for tensor in projections.roles.values()) for projections in row.projections
    )
    layouts = " or ".join(
        projections.layout.replace("_", " ") + (", stored transposed" if projections.transposed else "")
        for projections in row.projections
    )
    return f"| {name} | `{row.block}` | {projections} | {layouts} | {norm(row.feeding)} | {norm(row.branch)} |"


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
