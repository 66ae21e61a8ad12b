"""Attention recognised by names and shapes, where no table has the ``model_type`` of a configuration.

Only separate query, key and value projections can be recognised: the shape of a fused matrix does not
tell the order of its rows, nor a square one whether it is transposed. Nor do names tell what a norm
multiplies with, so that nothing of such a model can be folded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingest.checkpoint import Checkpoint
from ingest.family import Family, Keys, Piece, Projections
from ingest.quantized import refuse_quantized
from stats.errors import CheckpointError

KEYS = Keys(
    width=("hidden_size", "n_embd", "n_embed", "d_model", "dim", "embed_dim", "emb_dim", "embedding_length"),
    depth=("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count"),
    trailing=("nextn_predict_layers",),
    heads=("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "attention.head_count"),
    kv_heads=("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "attention.head_count_kv"),
    head_dim=("head_dim", "d_head", "d_kv", "head_size", "kv_channels", "attention_head_dim", "attention.key_length"),
)
"""Names that configurations have for the sizes; several that are present must agree."""

NORMS_OF_SCORES = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "q_ln", "k_ln")
HARMLESS = re.compile(
    "|".join(
        (
            rf"({'|'.join(NORMS_OF_SCORES)})(\.norms\.\d+)?\.(weight|bias)",
            r"bias|masked_bias|[kv]_scale|rotary_emb\..*",
            r"(self\.distance_embedding|relative_attention_bias)\.weight",
            r"(output\.)?(LayerNorm|ln|self_attn_layer_norm)\.(weight|bias|gamma|beta)",
            r"attn_(norm|norm_2|output_norm)\.(weight|bias)",
        )
    )
)
"""What may stand beside the projections and leaves ``T`` alone: norms of queries and keys, masks, outer norms."""

OF_PROJECTION = r"\.(weight|bias|weight_scale|weight_scale_inv|input_scale)"
ATTENTION_WORDS = re.compile(r"att|query|key|value|qkv|[qkvo]_(proj|lin)|w[qkvo]\b|mixer", re.IGNORECASE)
OUTER_NORM = re.compile(r"norm\.\w+$")
NUMBER = re.compile(r"(?<![^.])\d{1,6}(?![^.])")
MOST_LISTED = 12
MOST_WORDS = 16
"""Words from the layer's block to the end of a tensor's name; what stands before is prefix."""

Knowing = list[tuple[Family, Projections]]
"""Rows that know attention of certain names, and their form of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where attention of one form stands, the rows that know it, and the numbers of its complete layers.

    Of the ways to part the path, ``block`` is the longest that a row has.
    """

    prefix: str
    block: str
    knowing: Knowing
    layers: Collection[int]

    def path(self, layer: int) -> str:
        """What every name of a layer begins with."""
        return self.prefix + self.block.format(layer=layer)

    @property
    def nearest(self) -> tuple[Family, Projections]:
        """The first row that names as much of the path."""
        return next(known for known in self.knowing if known[0].block == self.block)

    @property
    def layouts(self) -> dict[str, str]:
        """The first family that has each layout."""
        found: dict[str, str] = {}
        for row, projections in self.knowing:
            layout = projections.layout + (" and transposed" if projections.transposed else "")
            found.setdefault(layout, row.model_type)
        return found


def recognise_by_shape(
    checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]]
) -> tuple[Family, Mapping[str, Any]]:
    """A row made for a checkpoint of an unknown family, and its configuration with the sizes under the usual keys.

    Args:
        checkpoint: an open checkpoint; headers of its first layer are read.
        table: the families whose names are tried.

    Raises:
        CheckpointError: names, shapes and configuration do not leave exactly one reading.
    """
    refuse_quantized(checkpoint, checkpoint.config)
    places = [place for place in _places(checkpoint, table) if "mtp" not in place.prefix.split(".")]
    if len(places) != 1:
        raise _refusal(
            checkpoint,
            "one stack of attention under names that a known family has",
            ", ".join(f"{place.prefix}{place.block}" for place in places) or "no such name",
        )
    (place,) = places
    row, projections = place.nearest
    if set(place.layouts) != {"separate"} or any(row.two_spaces for row, _ in place.knowing):
        known = ", ".join(f"{layout} as in {family}" for layout, family in place.layouts.items())
        raise _refusal(
            checkpoint,
            "separate projections of queries, keys and values that read one stream: the shape of any other "
            "does not tell the order of its rows",
            f"names that are known as {known}",
        )
    sizes = _sizes(checkpoint, place, projections)
    pieces = _pieces(place)
    _refuse_unexplained(checkpoint, place, projections, pieces)
    stack = "decoder" if row.stack == "decoder" else "encoder"
    family = Family(f"{row.model_type}-like", row.block, (projections,), stack=stack, pieces=pieces)
    return family, {**checkpoint.config, **sizes}


def _places(checkpoint: Checkpoint, table: Mapping[str, tuple[Family, ...]]) -> list[Place]:
    """Where the checkpoint has all projections of a known form in at least one layer."""
    forms: dict[tuple[str, frozenset[str]], Knowing] = defaultdict(list)
    for row in (row for rows in table.values() for row in rows):
        for projections in row.projections:
            roles = frozenset(projections.roles.values())
            if len(roles) == len(projections.roles) and "{inner}" not in row.block + "".join(roles):
                forms[row.block, roles].append((row, projections))
    by_ending: dict[str, list[tuple[str, frozenset[str], str]]] = defaultdict(list)
    for block, roles in forms:
        for name in roles:
            by_ending[_without_numbers(f"{block}{name}.weight")].append((block, roles, name))

    seen: dict[tuple[str, str, frozenset[str]], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    last_words = {ending.split(".")[-2] for ending in by_ending}
    for tensor in checkpoint.location:
        if tensor.rpartition(".")[0].rpartition(".")[2] not in last_words:
            continue
        for prefix, ending in _endings(tensor):
            for block, roles, name in by_ending.get(_without_numbers(ending), ()):
                number = int(NUMBER.findall(ending)[0])
                if ending == f"{block.format(layer=number)}{name}.weight":
                    seen[prefix, block, roles][number].add(name)

    places: dict[frozenset[str], Place] = {}
    for (prefix, block, roles), layers in sorted(seen.items(), key=lambda item: -len(item[0][1])):
        complete = [number for number, names in layers.items() if names == roles]
        if complete:
            full = frozenset(prefix + block + name for name in roles)
            place = places.setdefault(full, Place(prefix, block, [], complete))
            place.knowing.extend(forms[block, roles])
    return list(places.values())


def _without_numbers(name: str) -> str:
    return NUMBER.sub("{layer}", name)


def _endings(name: str) -> Iterator[tuple[str, str]]:
    """Every way to part a dotted name in front of one of its last words."""
    words = name.rsplit(".", MOST_WORDS)
    for number in range(len(words)):
        ending = ".".join(words[number:])
        yield name.removesuffix(ending), ending


def _sizes(checkpoint: Checkpoint, place: Place, projections: Projections) -> dict[str, int]:
    """Sizes from the configuration, which the shapes of layer 0 must confirm."""
    width, depth, heads = (_size(checkpoint, names) for names in (KEYS.width, KEYS.depth, KEYS.heads))
    layers = depth - (_optional(checkpoint, KEYS.trailing) or 0)
    missing = next((number for number in range(layers) if number not in place.layers), None)
    if missing is not None:
        raise _refusal(
            checkpoint,
            f"{', '.join(projections.roles.values())} in each of {layers:,} layers",
            f"not all of them in layer {missing} under {place.path(missing)}",
        )
    shapes = {
        role: checkpoint.header(f"{place.path(0)}{name}.weight").shape for role, name in projections.roles.items()
    }
    kv_heads = _optional(checkpoint, KEYS.kv_heads) or heads
    head_dim = _optional(checkpoint, KEYS.head_dim) or next(iter(shapes["query"]), 0) // heads
    expected = {
        "query": (heads * head_dim, width),
        "key": (kv_heads * head_dim, width),
        "value": (kv_heads * head_dim, width),
        "output": (width, heads * head_dim),
    }
    if shapes != expected:
        raise _refusal(
            checkpoint,
            f"{_roles(expected)}, from {heads} heads, {kv_heads} key/value heads, head size {head_dim}, width {width}",
            _roles({role: shapes[role] for role in expected}),
        )
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _roles(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{role} {list(shape)}" for role, shape in shapes.items())


def _optional(checkpoint: Checkpoint, names: tuple[str, ...]) -> int | None:
    """A size under any of its names; None where none is present or all are null."""
    given = {name: checkpoint.config[name] for name in names if checkpoint.config.get(name) is not None}
    values = list(given.values())
    if any(type(value) is not int or value < 0 or value != values[0] for value in values):
        raise _refusal(checkpoint, f"one number for {' or '.join(given)}", repr(given)[:100])
    return values[0] if values else None


def _size(checkpoint: Checkpoint, names: tuple[str, ...]) -> int:
    value = _optional(checkpoint, names)
    if not value:
        raise _refusal(
            checkpoint,
            f"a size in the configuration, as {', '.join(names)}",
            f"only {', '.join(sorted(checkpoint.config)[:MOST_LISTED]) or 'an empty configuration'}",
        )
    return value


def _pieces(place: Place) -> tuple[Piece, ...]:
    """What known families of the same names may have between tokens and output, where tensors or settings show it."""
    pieces = (piece for row, _ in place.knowing if row.block == place.block for piece in row.pieces)
    return tuple(
        dict.fromkeys(piece for piece in pieces if piece.tensor or (piece.setting and not piece.layer_interval))
    )


def _refuse_unexplained(
    checkpoint: Checkpoint, place: Place, projections: Projections, pieces: tuple[Piece, ...]
) -> None:
    """Stop where attention holds tensors that no known family has: they may do anything to what it writes."""
    names = list(projections.roles.values())
    differing = (at for at, letters in enumerate(zip(*names, strict=False)) if len({*letters}) > 1)
    inside = names[0][: next(differing, 0)]
    of_projection = re.compile(f"({'|'.join(map(re.escape, names))}){OF_PROJECTION}")
    known = {piece.tensor for piece in pieces}
    path = re.compile(re.escape(place.prefix) + re.escape(place.block).replace(r"\{layer\}", r"\d{1,6}"))
    unexplained = []
    for tensor in checkpoint.location:
        start = path.match(tensor)
        name = tensor[start.end() :] if start else ""
        if (
            name.startswith(inside)
            and name not in known
            and not of_projection.fullmatch(name)
            and not HARMLESS.fullmatch(name)
            and not HARMLESS.fullmatch(name.removeprefix(inside))
        ):
            unexplained.append(tensor)
    if unexplained:
        raise _refusal(
            checkpoint,
            "nothing in attention that known families of these names lack",
            ", ".join(unexplained[:4]),
        )


def _refusal(checkpoint: Checkpoint, expected: str, found: str) -> CheckpointError:
    model_type = checkpoint.config.get("model_type")
    what = "the configuration does not name a model_type" if model_type is None else f"unknown family {model_type!r}"
    return CheckpointError(
        f"{what}, and names and shapes do not tell how to read its attention",
        where=checkpoint.source,
        expected=expected,
        found=f"{found}; {first_layer(checkpoint)}",
        remedy="if the checkpoint is laid out like a family of docs/families.md, say which with --family NAME",
    )


def first_layer(checkpoint: Checkpoint) -> str:
    """Names and shapes of what looks like attention in the layer of the smallest number."""
    numbers = {name: int(found[0]) for name in checkpoint.location if (found := NUMBER.findall(name))}
    first = min(numbers.values(), default=0)
    names = [name for name, number in numbers.items() if number == first]
    attention = [name for name in names if ATTENTION_WORDS.search(name) and not OUTER_NORM.search(name)]
    names = attention or names or list(checkpoint.location)
    if not names:
        return "no tensors"
    listed = ", ".join(f"{name} {list(checkpoint.header(name).shape)}" for name in names[:MOST_LISTED])
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"its layer {first} has {listed}{more}"
