"""A GGUF model, in one file or split over several, as a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingest.checkpoint import Checkpoint
from ingest.gguf_file import GgufFile
from stats.errors import CheckpointError

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
"""Names of the files of a split model, counted from 1."""

MOST_PARTS = 10_000


def gguf_parts(name: str) -> tuple[str, ...]:
    """Names of all files of the model that a file belongs to, by the name of any of them; alone if it is whole."""
    match = PART.fullmatch(name)
    if match is None or not 0 < int(match["number"]) <= int(match["count"]) <= MOST_PARTS:
        return (name,)
    end = f"-of-{match['count']}{name[match.end('count') :]}"
    return tuple(f"{match['stem']}-{number:05d}{end}" for number in range(1, int(match["count"]) + 1))


def open_gguf(location: str, name: str, present: Collection[str], opened: Callable[[str], GgufFile]) -> Checkpoint:
    """Open a GGUF model; the metadata of its first file serves as the configuration, keys without the architecture.

    Args:
        location: what the checkpoint is called in messages.
        name: a plain file name; any part of a split model stands for all of it.
        present: files that are there.
        opened: opens a file by its name.

    Raises:
        CheckpointError: a part is missing or belongs to another model, or the architecture is not named.
    """
    names = gguf_parts(name)
    missing = [part for part in names if part not in present]
    if missing:
        raise CheckpointError(
            "a part of the split GGUF model is missing",
            where=location,
            expected=", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
            found=f"{len(names) - len(missing)} of {len(names)} parts",
            remedy="download every part into the same directory",
        )
    files = {part: opened(part) for part in names}
    for number, part in enumerate(names):
        _check_part(f"{location}, {part}", files[part].metadata, number, len(names))
    metadata = files[names[0]].metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(
            "the GGUF file does not name its architecture",
            where=location,
            expected="general.architecture",
            found="nothing",
        )
    tensors = {tensor: part for part in names for tensor in files[part].headers}
    announced = metadata.get("split.tensors.count", len(tensors))
    if len(names) > 1 and announced != len(tensors):
        raise CheckpointError(
            "the parts of the split GGUF model do not belong together",
            where=location,
            expected=f"{announced} tensors, as split.tensors.count of the first part says",
            found=f"{len(tensors)} in {len(names)} parts",
            remedy="download every part from the same place",
        )
    match = PART.fullmatch(name)
    stem = match["stem"] if match and len(names) > 1 else Path(name).stem
    return Checkpoint(location, stem, "gguf", "gguf", _configuration(architecture, metadata), tensors, files)


def _check_part(where: str, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """What a file says of its place in a split model must be what its name says; merged files say 0 parts."""
    said = metadata.get("split.no", 0), metadata.get("split.count", 1) or 1
    if said != (number, count):
        raise CheckpointError(
            "a part of a split GGUF model has another part's name",
            where=where,
            expected=f"split.no {number} and split.count {count}, as the file is named",
            found=f"split.no {said[0]} and split.count {said[1]}",
            remedy="give every part the name it was published with",
        )


def _configuration(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the architecture, and what it calls its layers where it lists which ones slide."""
    prefix = architecture + "."
    config = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    config["model_type"] = architecture
    sliding: Sequence[bool] | Any = config.get("attention.sliding_window_pattern")
    if isinstance(sliding, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return config
