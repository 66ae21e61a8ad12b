"""Finding a checkpoint from what the user typed."""

from __future__ import annotations

from pathlib import Path

from ingest.checkpoint import Checkpoint
from ingest.local import LocalFolder, open_local
from stats.errors import CheckpointError


def open_checkpoint(text: str, config_path: Path | None = None, base: str | None = None) -> Checkpoint:
    """Open a local path, or a hub name where no such path exists.

    A local path always wins and never contacts the hub.

    Args:
        text: a directory, a ``.safetensors``, ``.bin`` or ``.gguf`` file, or ``org/name[@revision]``.
        config_path: a configuration to use instead of the checkpoint's own.
        base: where ``text`` is an adapter, the model it changes, which ``config_path`` then describes.
    """
    path = Path(text).expanduser()
    if base is not None:
        return _open_adapter(text, path, base, config_path)
    if path.exists():
        return open_local(path, config_path)
    from ingest.hub import is_hub_name, open_hub

    if is_hub_name(text):
        return open_hub(text, config_path)
    raise _nothing_there(text)


def _open_adapter(text: str, path: Path, base: str, config_path: Path | None) -> Checkpoint:
    """An adapter in a directory, named by itself or by its file, or in a hub repository; and its base."""
    from ingest.adapted import adapted
    from ingest.adapter import read_adapter
    from ingest.hub import hub_folder, is_hub_name

    if path.exists():
        directory = path.parent if path.is_file() else path
        adapter = read_adapter(LocalFolder(directory))
        return adapted(open_checkpoint(base, config_path), adapter, directory.resolve().name)
    if not is_hub_name(text):
        raise _nothing_there(text)
    folder = hub_folder(text)
    checkpoint = adapted(open_checkpoint(base, config_path), read_adapter(folder), text)
    checkpoint.revision = folder.commit
    return checkpoint


def _nothing_there(text: str) -> CheckpointError:
    return CheckpointError(
        "no such checkpoint",
        where=text,
        expected="an existing directory or file, or a hub name org/name[@revision]",
        found="neither",
        remedy="check the path",
    )
