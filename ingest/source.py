"""Finding a checkpoint from what the user typed."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from ingest.checkpoint import Checkpoint
from ingest.local import LocalFolder, open_local
from stats.errors import CheckpointError


def open_checkpoint(text: str, config_path: Path | None = None, base: str | None = None) -> Checkpoint:
    """Open a local path, or an address or a hub name where no such path exists.

    A local path always wins and never makes a request.

    Args:
        text: a directory, a ``.safetensors``, ``.bin`` or ``.gguf`` file, ``org/name[@revision]``, or a directory
            or file at an ``https://``, ``s3://`` or ``gs://`` address.
        config_path: a configuration to use instead of the checkpoint's own.
        base: where ``text`` is an adapter, the model it changes, which ``config_path`` then describes.
    """
    path = Path(text).expanduser()
    if base is not None:
        return _open_adapter(text, path, base, config_path)
    if path.exists():
        return open_local(path, config_path)
    from ingest.hub import hub_address, is_hub_name, open_hub
    from ingest.remote import is_address, open_address

    text = hub_address(text) or text
    if is_address(text):
        return open_address(text, config_path)
    if is_hub_name(text):
        return open_hub(text, config_path)
    raise _nothing_there(text)


def _open_adapter(text: str, path: Path, base: str, config_path: Path | None) -> Checkpoint:
    """An adapter in a directory, named by itself or by its file, or in a hub repository; and its base."""
    from ingest.adapted import adapted
    from ingest.adapter import read_adapter
    from ingest.hub import HubFolder, hub_address, hub_folder, is_hub_name
    from ingest.remote import RemoteFolder, is_address, remote_folder

    if path.exists():
        directory = path.parent if path.is_file() else path
        adapter = read_adapter(LocalFolder(directory))
        return adapted(open_checkpoint(base, config_path), adapter, directory.resolve().name)
    text = hub_address(text) or text
    folder: HubFolder | RemoteFolder
    if is_address(text):
        folder = remote_folder(text)[0]
    elif is_hub_name(text):
        folder = hub_folder(text)
    else:
        raise _nothing_there(text)
    name = PurePosixPath(folder.location).name if isinstance(folder, RemoteFolder) else text
    checkpoint = adapted(open_checkpoint(base, config_path), read_adapter(folder), name)
    checkpoint.revision = folder.commit if isinstance(folder, HubFolder) else None
    checkpoint.transfers += (folder.transfers,)
    return checkpoint


def _nothing_there(text: str) -> CheckpointError:
    return CheckpointError(
        "no such checkpoint",
        where=text,
        expected="an existing directory or file, a hub name org/name[@revision], or an address",
        found="neither",
        remedy="check the path",
    )
