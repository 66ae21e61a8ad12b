"""The checkpoints of a training run: their steps, from what they are called or what the trainer wrote."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ingest.json_text import parsed_json
from stats.errors import CheckpointError

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter(?:ation)?)[-_=]?(\d+)", re.IGNORECASE)
TRAINER_STATE = "trainer_state.json"
"""What ``transformers.Trainer`` leaves in every checkpoint directory."""

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.index.json")


@dataclass(frozen=True, slots=True)
class Member:
    """One checkpoint of a training run: what to open, what to call it, and its step."""

    source: str
    name: str
    step: int


def step_of(source: str) -> int | None:
    """The training step of a checkpoint, or None where nothing tells.

    A ``trainer_state.json`` inside a directory counts first, then the last ``step``, ``checkpoint``,
    ``ckpt`` or ``iter`` followed by a number in the name or revision.
    """
    state = Path(source) / TRAINER_STATE
    try:
        recorded = parsed_json(state.read_bytes()).get("global_step") if state.is_file() else None
    except (OSError, ValueError, AttributeError):
        recorded = None
    if isinstance(recorded, int) and not isinstance(recorded, bool) and recorded >= 0:
        return recorded
    named = STEP.findall(source.rsplit("@", 1)[-1] if "@" in source else Path(source).name)
    return int(named[-1]) if named else None


def is_run(path: Path) -> bool:
    """Whether a directory holds checkpoints in directories of their own, and no weights itself."""
    return path.is_dir() and not _has_weights(path) and any(_has_weights(entry) for entry in path.iterdir())


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(next(path.glob(pattern), None) is not None for pattern in WEIGHTS)


def listed_checkpoints(path: Path) -> list[tuple[str, str | None]]:
    """Checkpoints of a list and their names in the store: a line each, ``MODEL`` or ``MODEL NAME``, ``#`` for comments.

    Raises:
        CheckpointError: a file that cannot be read, or a line with more.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError("the list cannot be read", where=str(path), found=str(error)) from error
    found: list[tuple[str, str | None]] = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            words = [str(error)] * 3
        if len(words) > 2:
            raise CheckpointError(
                "a line of the list is not understood",
                where=f"{path}, line {number}",
                expected="a checkpoint, and a name if it is to have another; quoted where they have spaces",
                found=line[:100],
            )
        if words:
            found.append((words[0], words[1] if len(words) == 2 else None))
    return found


def members(sources: tuple[str, ...], lineage: str) -> list[Member]:
    """The checkpoints of a run in order of their steps.

    Args:
        sources: checkpoints, or directories that hold a checkpoint in each subdirectory.
        lineage: the run's name; a checkpoint is called ``lineage@step<N>``.

    Raises:
        CheckpointError: a checkpoint whose step nothing tells, or two of one step.
    """
    found: list[Member] = []
    for source in sources:
        path = Path(source).expanduser()
        inside = sorted(str(entry) for entry in path.iterdir() if _has_weights(entry)) if is_run(path) else [source]
        for item in inside:
            step = step_of(item)
            if step is None:
                raise CheckpointError(
                    "the training step of a checkpoint is unknown",
                    where=item,
                    expected=f"a name such as step1000 or checkpoint-1000, or global_step in {TRAINER_STATE}",
                    found=Path(item).name,
                    remedy="rename the directory, or ingest the checkpoint alone with --step N",
                )
            found.append(Member(item, f"{lineage}@step{step}", step))
    found.sort(key=lambda member: member.step)
    for one, other in itertools.pairwise(found):
        if one.step == other.step:
            raise CheckpointError(
                f"two checkpoints of step {one.step}",
                where=lineage,
                expected="one checkpoint a step",
                found=f"{one.source} and {other.source}",
                remedy="ingest one of them under another lineage",
            )
    return found
