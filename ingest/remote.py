"""Checkpoints at an address: ``https://``, ``s3://`` or ``gs://``, a directory or a single file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ingest.checkpoint import Checkpoint
from ingest.gguf_checkpoint import gguf_parts
from ingest.gguf_file import GgufFile
from ingest.http_files import HttpFile, shown
from ingest.hub import request_headers
from ingest.local import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEXES, LARGEST_JSON, open_file, open_folder, parse_json
from ingest.ranged_file import RangedFile
from ingest.safetensors_file import SafetensorsFile, read_bytes
from ingest.transfers import NoAccessError, NoSuchFileError, Transfers, Transport, patiently
from stats.errors import CheckpointError

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://.*", re.IGNORECASE)
SCHEMES = ("https", "http", "s3", "gs")
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def is_address(text: str) -> bool:
    """Whether a text has the form of a URL."""
    return ADDRESS.fullmatch(text) is not None


def open_address(text: str, config_path: Path | None = None) -> Checkpoint:
    """Open the checkpoint at an address; only small files and headers are read.

    Args:
        text: a directory with ``config.json`` and safetensors files, or a ``.safetensors`` or ``.gguf`` file.
        config_path: a configuration to use instead of the checkpoint's own.

    Raises:
        CheckpointError: another kind of address, nothing there, no permission, or no connection.
    """
    folder, name = remote_folder(text)
    where = shown(text)
    if name is None:
        checkpoint = open_folder(
            folder, PurePosixPath(urlsplit(where).path).name or urlsplit(where).netloc, config_path
        )
    else:
        checkpoint = open_file(folder, name, folder.beside(name), where, config_path)
    checkpoint.source = where
    checkpoint.transfers = (folder.transfers,)
    return checkpoint


def remote_folder(text: str) -> tuple[RemoteFolder, str | None]:
    """The folder that an address names or that holds the file it names, and the file's name.

    Raises:
        CheckpointError: another kind of address, or a library it needs is not installed.
    """
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        raise CheckpointError(
            "an address of a kind that is not read",
            where=shown(text),
            expected=", ".join(f"{known}://" for known in SCHEMES),
            found=f"{scheme}://",
            remedy="download the files and name their directory",
        )
    directory, name = parts.path, None
    if directory.lower().endswith(WEIGHTS):
        directory, _, name = directory.rpartition("/")
    directory = directory.rstrip("/")
    location = shown(urlunsplit((scheme, parts.netloc, directory, "", "")))
    if scheme in ("s3", "gs"):
        return _object_folder(scheme, parts.netloc, directory.lstrip("/"), location), name

    def transport(file: str) -> HttpFile:
        url = urlunsplit((scheme, parts.netloc, f"{directory}/{quote(file)}", parts.query, ""))
        return HttpFile(url, headers=request_headers(url))

    return RemoteFolder(location, transport), name and unquote(name)


def _object_folder(scheme: str, bucket_name: str, directory: str, location: str) -> RemoteFolder:
    from ingest.object_store import Bucket, StoredObject

    bucket, prefix = Bucket(scheme, bucket_name), f"{directory}/" if directory else ""
    return RemoteFolder(location, lambda file: StoredObject(bucket, prefix + file), lambda: bucket.names(prefix))


class RemoteFolder:
    """Files at an address; where they cannot be listed, the usual names are tried."""

    def __init__(
        self,
        location: str,
        transport: Callable[[str], Transport],
        listing: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self.location = location
        self.transfers = Transfers()
        self._transport = transport
        self._listing = listing
        self._files: dict[str, RangedFile] = {}

    def names(self) -> Collection[str]:
        listed = patiently(self._listing, self.transfers.stopped)
        if listed is not None:
            return listed
        found, refused = self._first_of(["config.json"])
        weights, refused_weights = self._first_of([name for name, _ in INDEXES])
        if weights:
            return [*found, *weights]
        adapter = [*self._first_of([ADAPTER_CONFIG])[0], *self._first_of(ADAPTER_WEIGHTS)[0]]
        if not adapter:
            raise refused or refused_weights or self._nothing_there()
        return [*found, *adapter]

    def _nothing_there(self) -> CheckpointError:
        return CheckpointError(
            "no weights found under the usual names",
            where=self.location,
            expected="one of " + ", ".join(name for name, _ in INDEXES),
            found="none of them; the files cannot be listed",
            remedy="check the address, or name the .safetensors or .gguf file itself",
        )

    def beside(self, name: str) -> Collection[str]:
        """What a file and a configuration beside it consist of, as far as it is there."""
        others = [] if name.lower().endswith(".gguf") else ["config.json", ADAPTER_CONFIG]
        return [*gguf_parts(name), *(other for other in others if self._first_of([other])[0])]

    def _first_of(self, names: Iterable[str]) -> tuple[list[str], CheckpointError | None]:
        """The first of some names that there is, and why another was not shown."""
        refused: CheckpointError | None = None
        for name in names:
            try:
                self._file(name).open()
            except NoSuchFileError:
                continue
            except NoAccessError as error:
                refused = refused or error
                continue
            return [name], refused
        return [], refused

    def _file(self, name: str) -> RangedFile:
        if name not in self._files:
            self._files[name] = RangedFile(self._transport(name), self.transfers)
        return self._files[name]

    def path(self, name: str) -> Path:
        raise CheckpointError(
            "a PyTorch file cannot be read in parts from another machine",
            where=f"{self.location}/{name}",
            expected="safetensors or GGUF",
            found=PurePosixPath(name).suffix,
            remedy="download the files and name their directory, or save them as safetensors",
        )

    def json(self, name: str) -> dict[str, Any]:
        file = self._file(name)
        if file.size > LARGEST_JSON:
            raise CheckpointError(
                "a JSON file is too large to be one",
                where=file.name,
                expected=f"at most {LARGEST_JSON:,} bytes",
                found=f"{file.size:,} bytes",
            )
        return parse_json(read_bytes(file, 0, file.size), file.name)

    def safetensors(self, name: str) -> SafetensorsFile:
        return SafetensorsFile(self._file(name))

    def gguf(self, name: str) -> GgufFile:
        return GgufFile(self._file(name))
