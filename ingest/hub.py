"""Checkpoints named ``org/name[@revision]``: the local hub cache first, the hub where it is needed.

``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_HUB_CACHE`` act as everywhere, because
huggingface_hub does the talking. Only the configuration, the index and the files that hold
attention are fetched; planning a safetensors checkpoint fetches no more than headers. A
branch or tag that is in the cache is taken as it is there; the hub is asked for what is missing.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from ingest.checkpoint import Checkpoint
from ingest.gguf_checkpoint import gguf_parts
from ingest.local import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEXES, open_folder
from ingest.safetensors_file import LocalFile, SafetensorsFile
from stats.errors import CheckpointError

_PART = r"\w[\w.-]*"
HUB_NAME = re.compile(rf"{_PART}/{_PART}(@{_PART}(/{_PART})*)?")
TIMEOUT_SECONDS = 30.0


def is_hub_name(text: str) -> bool:
    """Whether a text has the form ``org/name[@revision]``."""
    return HUB_NAME.fullmatch(text) is not None


def open_hub(text: str, config_path: Path | None = None) -> Checkpoint:
    """Open a checkpoint by its hub name, with the commit it resolves to.

    Raises:
        CheckpointError: no such repository, revision or file; no permission; no connection; or
            offline and not in the cache.
    """
    folder = hub_folder(text)
    checkpoint = open_folder(folder, text, config_path)
    checkpoint.source = text
    checkpoint.revision = folder.commit
    return checkpoint


def hub_folder(text: str) -> HubFolder:
    """The files of a hub name; raises as ``open_hub`` does."""
    repository, _, revision = text.partition("@")
    return HubFolder(repository, revision or "main")


class HubFolder:
    """One revision of a hub repository: its cached snapshot, completed from the hub on demand."""

    def __init__(self, repository: str, revision: str) -> None:
        self.location = repository if revision == "main" else f"{repository}@{revision}"
        self._repository = repository
        self._revision = revision
        self.commit, self._names = self._cached_snapshot() or self._ask_hub()

    def _cached_snapshot(self) -> tuple[str, frozenset[str]] | None:
        """Commit and files of the cached snapshot, if they show what the checkpoint consists of."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        with self._explained("the cached snapshot"):
            storage = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self._repository, repo_type="model")
            reference = storage / "refs" / self._revision
            commit = reference.read_text(encoding="utf-8") if reference.is_file() else self._revision
            snapshot = storage / "snapshots" / commit
            names = frozenset(entry.name for entry in snapshot.iterdir()) if snapshot.is_dir() else frozenset()
        return (commit, names) if _shows_weights(names) else None

    def _ask_hub(self) -> tuple[str, frozenset[str]]:
        """Commit and files of the revision on the hub."""
        from huggingface_hub import HfApi, constants, errors

        if constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                "offline, and the checkpoint is not in the local hub cache",
                where=self.location,
                expected=f"a snapshot under {constants.HF_HUB_CACHE}",
                found="none with weights",
                remedy="unset HF_HUB_OFFLINE, or download the model where there is a connection",
            )
        with self._explained("the list of files"):
            info = HfApi().model_info(self._repository, revision=self._revision, timeout=TIMEOUT_SECONDS)
            if info.sha is None:
                raise errors.FileMetadataError("a description of the repository without a commit")
        return info.sha, frozenset(file.rfilename for file in info.siblings or () if "/" not in file.rfilename)

    def names(self) -> Collection[str]:
        return self._names

    def path(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        cached = self._cached(name)
        if cached is not None:
            return Path(cached)
        with self._explained(name):
            path = Path(hf_hub_download(self._repository, name, revision=self.commit))
            if self._revision != self.commit:
                self._remember_commit(path.parent.parent.parent / "refs" / self._revision)
        return path

    def _remember_commit(self, reference: Path) -> None:
        """Note in the cache which commit a branch or tag is at; a download by commit does not."""
        if reference.is_file() and reference.read_text(encoding="utf-8") == self.commit:
            return
        reference.parent.mkdir(parents=True, exist_ok=True)
        unfinished = reference.with_name(f"{reference.name}.{uuid.uuid4().hex}.tmp")
        unfinished.write_text(self.commit, encoding="utf-8")
        unfinished.replace(reference)

    def _cached(self, name: str) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self._repository, name, revision=self.commit)
        return found if isinstance(found, str) else None

    def safetensors(self, name: str) -> SafetensorsFile:
        cached = self._cached(name)
        if cached is not None:
            return SafetensorsFile(LocalFile(Path(cached)))
        return SafetensorsFile(_HubHeader(self, name), lambda: LocalFile(self.path(name)))

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn the hub client's errors into one message each."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        try:
            yield
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            cause = _failed_request(error)
            what, remedy = _meaning(cause)
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            found = " ".join(lines[:2]) or type(cause).__name__
            raise CheckpointError(what, where=f"{self.location}, {name}", found=found[:200], remedy=remedy) from error


def _shows_weights(names: Collection[str]) -> bool:
    """Whether a snapshot, which may be incomplete, holds an index, a whole weight file or an adapter."""
    if ADAPTER_CONFIG in names and any(name in names for name in ADAPTER_WEIGHTS):
        return True
    models = {gguf_parts(name) for name in names if name.endswith(".gguf")}
    whole = [parts for parts in models if all(part in names for part in parts)]
    return len(whole) == 1 or ("config.json" in names and any(name in names for name, _ in INDEXES))


def _failed_request(error: Exception) -> Exception:
    """The error of the request itself where the client only says that a file is not in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause = error.__cause__
    return cause if isinstance(error, LocalEntryNotFoundError) and isinstance(cause, Exception) else error


HTTP_MEANINGS = {
    401: ("the hub does not know the token", "set HF_TOKEN to a valid token"),
    403: ("the token may not read the repository", "ask for access, or use another token"),
    404: ("the hub does not have it", "check the name and the revision"),
    429: ("the hub asks for fewer requests", "wait some minutes; a token in HF_TOKEN raises the limit"),
}


def _meaning(error: Exception) -> tuple[str, str]:
    """What an error of the hub client means, and what to do about it."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    match error:
        case errors.HFValidationError():
            return "not a name the hub can have", "check the spelling"
        case errors.GatedRepoError():
            return (
                "the repository is gated",
                "accept the model's terms on the hub, then set HF_TOKEN to a token of that account",
            )
        case errors.RepositoryNotFoundError():
            return (
                "no such repository, or no permission to see it",
                "check the name, which is no local path either; if it is private, set HF_TOKEN to a token with access",
            )
        case errors.RevisionNotFoundError():
            return "no such revision", "name a branch, tag or commit after @"
        case errors.EntryNotFoundError():
            return "the repository lacks a file", "check the revision"
        case errors.HfHubHTTPError():
            other = ("the hub answered with an error", "try again later")
            return HTTP_MEANINGS.get(error.response.status_code, other)
        case errors.OfflineModeIsEnabled():
            return (
                "offline, and a file is not in the local hub cache",
                "unset HF_HUB_OFFLINE, or download the file where there is a connection",
            )
        case HTTPError():
            return "the connection to the hub failed", "check the connection and HF_ENDPOINT, or use a downloaded copy"
        case errors.FileMetadataError() | json.JSONDecodeError():
            return "this is not the answer of a hub", "check HF_ENDPOINT, and proxies in between"
        case OSError() if error.errno is not None:
            return (
                "the local hub cache cannot be used",
                "free space or fix permissions, or set HF_HUB_CACHE to another folder",
            )
    return "the download failed", "try again, or use a downloaded copy"


class _HubHeader:
    """The first bytes of a hub file by range requests; asked for the header only."""

    def __init__(self, folder: HubFolder, name: str) -> None:
        self.name = f"{folder.location}/{name}"
        self._folder = folder
        self._file = name

    @cached_property
    def _url(self) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._folder._repository, self._file, revision=self._folder.commit)

    @cached_property
    def size(self) -> int:
        from huggingface_hub import get_hf_file_metadata

        with self._folder._explained(self._file):
            size = get_hf_file_metadata(self._url, timeout=TIMEOUT_SECONDS).size
        if size is None:
            raise CheckpointError("the hub does not tell a file's size", where=self.name)
        return size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        last = offset + len(buffer)
        headers = {**build_hf_headers(), "Range": f"bytes={offset}-{last - 1}", "Accept-Encoding": "identity"}
        with (
            self._folder._explained(self._file),
            get_session().stream(
                "GET", self._url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True
            ) as response,
        ):
            hf_raise_for_status(response)
            position = offset if response.status_code == 206 else 0
            for chunk in response.iter_bytes():
                if position >= last:
                    break
                first = max(offset, position)
                part = chunk[first - position : last - position]
                buffer[first - offset : first - offset + len(part)] = part
                position += len(chunk)
        if position < last:
            raise CheckpointError(
                "the hub sent less than was asked for",
                where=self.name,
                expected=f"{len(buffer):,} bytes from {offset:,}",
                found=f"{max(0, position - offset):,} bytes",
                remedy="try again",
            )
