"""Finding the attention blocks of a stack among a checkpoint's tensor names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ingest.checkpoint import Checkpoint
from ingest.family import Family, Projections
from ingest.recognition import Recognition, Stack
from stats.errors import CheckpointError

WRAPPER_PREFIXES = (
    "module.", "_orig_mod.", "base_model.model.", "model.", "transformer.", "language_model.", "text_model.",
    "backbone.", "gpt_neox.", "bert.", "roberta.", "albert.", "encoder.", "vit.", "thinker.",
    "vision_tower.", "vision_model.", "visual.", "audio_tower.", "qformer.",
)  # fmt: skip
"""Prefixes that wrap a model without changing which stack it is."""

VISION, AUDIO, QFORMER = ("vision", "visual", "image"), ("audio", "speech"), ("qformer",)
MARKERS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "vision": VISION,
    "vision_global": VISION,
    "audio": AUDIO,
    "qformer": QFORMER,
    "qformer_cross": QFORMER,
}
"""What the prefix of a part contains, by the stack it makes up; a decoder's is any other."""


@dataclass(frozen=True, slots=True)
class Block:
    """One attention block: what stands before it in the file, its path, and the form it has.

    ``layer`` and ``inner`` are the numbers in the path.
    """

    prefix: str
    path: str
    layer: int
    inner: int
    projections: Projections

    @property
    def stem(self) -> str:
        """What every name in the block begins with."""
        return self.prefix + self.path

    def name(self, within: str) -> str:
        """Full name of something in the block."""
        return self.stem + within.format(layer=self.layer, inner=self.inner)


Names = dict[int, set[str]]
"""Projections that exist, as the family writes them, by the number of their block."""


def find_blocks(
    checkpoint: Checkpoint, stack: Stack, inner_count: int, layer_types: Sequence[str], not_own: Collection[int]
) -> tuple[dict[int, Block], list[str]]:
    """The attention blocks of a stack, by number, and prefixes of the same form left aside.

    Args:
        checkpoint: an open checkpoint.
        stack: the stack to look for.
        inner_count: blocks in each numbered layer; block ``number = layer inner_count + inner``.
        layer_types: what the configuration calls each layer; empty where it does not.
        not_own: numbers of layers that may lack projections: they have no heads, or another layer's keys and values.

    Raises:
        CheckpointError: no block, an incomplete one, or several stacks of the same form.
    """
    family = stack.family
    by_prefix = _names_by_prefix(checkpoint, family, inner_count)
    chosen = {
        prefix: {number: _form(family, present, number, layer_types) for number, present in blocks.items()}
        for prefix, blocks in by_prefix.items()
    }
    complete = [prefix for prefix, forms in chosen.items() if any(forms.values())]
    if not complete:
        if by_prefix:
            prefix, blocks = next(iter(by_prefix.items()))
            raise _incomplete(checkpoint, family, prefix, blocks, chosen[prefix], inner_count, layer_types)
        raise no_attention(checkpoint, family)
    prefix = _own_prefix(checkpoint, stack, complete)
    found = {}
    for number, projections in chosen[prefix].items():
        if projections is not None:
            layer, inner = divmod(number, inner_count)
            found[number] = Block(prefix, family.block.format(layer=layer, inner=inner), layer, inner, projections)
        elif number not in not_own:
            raise _incomplete(checkpoint, family, prefix, by_prefix[prefix], chosen[prefix], inner_count, layer_types)
    return found, sorted(set(complete) - {prefix})


def _numbered(text: str) -> str:
    """A pattern for a name with its placeholders as numbers."""
    return re.escape(text).replace(r"\{layer\}", r"(?P<layer>\d{1,6})").replace(r"\{inner\}", r"(?P<inner>\d{1,6})")


def _names_by_prefix(checkpoint: Checkpoint, family: Family, inner_count: int) -> dict[str, Names]:
    """Projections of the family that the file has, by what stands before the block."""
    names = sorted({name for projections in family.projections for name in projections.roles.values()})
    patterns = {name: re.compile(_numbered(name)) for name in names}
    alternatives = "|".join(re.sub(r"\(\?P<inner>(.*?)\)", r"\1", _numbered(name)) for name in names)
    whole = re.compile(rf"(?P<prefix>(?:.*\.)?){_numbered(family.block)}(?P<name>{alternatives})\.weight")
    by_prefix: dict[str, Names] = defaultdict(lambda: defaultdict(set))
    for tensor in checkpoint.location:
        match = whole.fullmatch(tensor)
        if match:
            for name, pattern in patterns.items():
                within = pattern.fullmatch(match["name"])
                if within:
                    inner = int((match.groupdict() | within.groupdict()).get("inner") or 0)
                    by_prefix[match["prefix"]][int(match["layer"]) * inner_count + inner].add(name)
    return by_prefix


def _form(family: Family, present: set[str], number: int, layer_types: Sequence[str]) -> Projections | None:
    """The first form of the family whose projections are all there and that the layer may have."""
    forms = _allowed(family, number, layer_types)
    return next((projections for projections in forms if present.issuperset(projections.roles.values())), None)


def _allowed(family: Family, number: int, layer_types: Sequence[str]) -> list[Projections]:
    """The forms that a layer may have."""
    layer_type = layer_types[number] if number < len(layer_types) else None
    return [form for form in family.projections if not form.layer_types or layer_type in form.layer_types]


def _incomplete(
    checkpoint: Checkpoint,
    family: Family,
    prefix: str,
    blocks: Names,
    forms: Mapping[int, Projections | None],
    inner_count: int,
    layer_types: Sequence[str],
) -> CheckpointError:
    number = min(number for number, form in forms.items() if form is None)
    layer, inner = divmod(number, inner_count)
    present = blocks[number]
    possible = _allowed(family, number, layer_types) or family.projections
    nearest = max(possible, key=lambda form: len(present.intersection(form.roles.values())))
    block = Block(prefix, family.block.format(layer=layer, inner=inner), layer, inner, nearest)

    def full(names: list[str]) -> str:
        return ", ".join(f"{block.name(name)}.weight" for name in names)

    return CheckpointError(
        "a layer's attention is incomplete",
        where=f"{checkpoint.source}, layer {number}",
        expected=full([name for name in nearest.roles.values() if name not in present]),
        found=full(sorted(present)),
        remedy="complete the download; if the weights are stored in another form, convert them to plain matrices",
    )


def no_attention(checkpoint: Checkpoint, family: Family) -> CheckpointError:
    """The error for a checkpoint that holds no attention of its family."""
    return CheckpointError(
        "no attention found in the checkpoint",
        where=checkpoint.source,
        expected=", ".join(f"{family.block}{name}.weight" for name in family.projections[0].roles.values()),
        found=", ".join(list(checkpoint.location)[:6]) or "no tensors",
        remedy="check that the weights belong to the configuration, or name the family with --family",
    )


def without_absent_stacks(checkpoint: Checkpoint, recognition: Recognition) -> Recognition:
    """The recognition less stacks that the configuration describes and the checkpoint does not hold.

    A tower may be absent, and stacks of an encoder-decoder beside one that is there.
    """
    absent = [stack for stack in recognition.stacks if not _holds(checkpoint, stack)]
    held = [stack for stack in recognition.stacks if stack not in absent]
    aside = [stack for stack in absent if (stack.is_part and stack.name in MARKERS) or _completes(stack, absent, held)]
    if not aside or len(aside) == len(recognition.stacks):
        return recognition
    return replace(
        recognition,
        stacks=tuple(stack for stack in recognition.stacks if stack not in aside),
        notes=(
            *recognition.notes,
            *(f"{stack.name} attention left aside: the checkpoint holds no tensors of it" for stack in aside),
        ),
    )


def _holds(checkpoint: Checkpoint, stack: Stack) -> bool:
    """Whether a checkpoint has tensors that may belong to a stack."""
    prefixes = list(_names_by_prefix(checkpoint, stack.family, 1))
    return bool(_beside_others(stack, prefixes) if stack.is_part else prefixes)


def _completes(stack: Stack, absent: list[Stack], held: list[Stack]) -> bool:
    """Whether a stack makes up an encoder-decoder together with one that is held."""

    def siblings(stacks: list[Stack]) -> list[str]:
        return [other.name for other in stacks if other.family.model_type == stack.family.model_type]

    return bool(siblings(held)) and "encoder" in siblings(absent + held)


def _beside_others(stack: Stack, prefixes: list[str]) -> list[str]:
    """Prefixes that may belong to a stack when every other part of the model is under a prefix of its own."""
    if stack.name in MARKERS:
        return [prefix for prefix in prefixes if _marked(prefix + stack.family.block, MARKERS[stack.name])]
    return [prefix for prefix in prefixes if not _marked(prefix, (*VISION, *AUDIO, *QFORMER))]


def _own_prefix(checkpoint: Checkpoint, stack: Stack, prefixes: list[str]) -> str:
    """The prefix of the stack among several of the same form."""
    own = _beside_others(stack, prefixes)
    if not own:
        if stack.is_part:
            raise no_attention(checkpoint, stack.family)
        own = prefixes
    if len(own) > 1:
        own = [prefix for prefix in own if _is_wrapper(prefix)]
    if len(own) != 1:
        raise CheckpointError(
            "the checkpoint holds several attention stacks of the same form",
            where=checkpoint.source,
            expected=f"one {stack.name} stack, or one under a usual prefix",
            found=", ".join(repr(prefix) for prefix in prefixes),
            remedy="save the stack you want as its own checkpoint",
        )
    return own[0]


def _marked(path: str, words: Sequence[str]) -> bool:
    return any(word in path for word in words)


def _is_wrapper(prefix: str) -> bool:
    while prefix:
        stripped = next((prefix.removeprefix(known) for known in WRAPPER_PREFIXES if prefix.startswith(known)), None)
        if stripped is None:
            return False
        prefix = stripped
    return True
