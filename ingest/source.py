"""Finding a checkpoint from what the user typed."""

from __future__ import annotations

from pathlib import Path

from ingest.checkpoint import Checkpoint
from ingest.local import open_local
from stats.errors import CheckpointError


def open_checkpoint(text: str, config_path: Path | None = None) -> Checkpoint:
    """Open a local path, or a hub name where no such path exists.

    A local path always wins and never contacts the hub.

    Args:
        text: a directory, a ``.safetensors``, ``.bin`` or ``.gguf`` file, or ``org/name[@revision]``.
        config_path: a configuration to use instead of the checkpoint's own.
    """
    path = Path(text).expanduser()
    if path.exists():
        return open_local(path, config_path)
    from ingest.hub import is_hub_name, open_hub

    if is_hub_name(text):
        return open_hub(text, config_path)
    raise CheckpointError(
        "no such checkpoint",
        where=text,
        expected="an existing directory or file, or a hub name org/name[@revision]",
        found="neither",
        remedy="check the path",
    )
