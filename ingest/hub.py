"""Checkpoints named ``org/name[@revision]``: the local hub cache first, the hub where it is needed.

``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_HUB_CACHE`` act as everywhere, because
huggingface_hub does the talking. The configuration and the index are put in the cache; of safetensors
and GGUF files no more than headers and the ranges that hold attention are fetched, and nothing of them is
kept. ``.bin`` files are downloaded. A branch or tag whose weights are in the cache is taken as it is there.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ingest.checkpoint import Checkpoint
from ingest.gguf_checkpoint import gguf_parts
from ingest.gguf_file import GgufFile
from ingest.http_files import PASSING, HttpFile, Response, client_name, retry_after
from ingest.hub_errors import failed_request, meaning
from ingest.local import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEXES, open_folder, read_json
from ingest.ranged_file import RangedFile
from ingest.safetensors_file import LocalFile, SafetensorsFile
from ingest.transfers import Answer, PassingError, Transfers, patiently
from stats.errors import CheckpointError

_PART = r"\w[\w.-]*"
HUB_NAME = re.compile(rf"{_PART}/{_PART}(@{_PART}(/{_PART})*)?")
PAGE = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:/tree/(?P<revision>{_PART}(?:/{_PART})*))?/?")
TIMEOUT_SECONDS = 30.0


def is_hub_name(text: str) -> bool:
    """Whether a text has the form ``org/name[@revision]``."""
    return HUB_NAME.fullmatch(text) is not None


def hub_address(text: str) -> str | None:
    """The hub name of a repository whose page a text is the address of, or None."""
    match = PAGE.fullmatch(text.partition("://")[2].partition("/")[2]) if is_on_hub(text) else None
    if match is None:
        return None
    return f"{match['repository']}@{match['revision']}" if match["revision"] else match["repository"]


def is_on_hub(address: str) -> bool:
    """Whether an address is one of the hub's own."""
    from huggingface_hub import constants

    return address.startswith(f"{constants.ENDPOINT}/")


def request_headers(address: str) -> dict[str, str]:
    """Headers that introduce this program to a server, with the hub's token for the hub alone."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers: dict[str, str] = build_hf_headers(token=None if is_on_hub(address) else False, **client_name())
    return headers


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
    checkpoint.transfers = (folder.transfers,)
    return checkpoint


def hub_folder(text: str) -> HubFolder:
    """The files of a hub name; raises as ``open_hub`` does."""
    repository, _, revision = text.partition("@")
    return HubFolder(repository, revision or "main")


class HubFolder:
    """One revision of a hub repository: its cached snapshot, completed from the hub on demand.

    Every request names the commit that the revision was at when the folder was made.
    """

    def __init__(self, repository: str, revision: str) -> None:
        self.transfers = Transfers()
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
        return (commit, names) if _shows_weights(names, constants.HF_HUB_OFFLINE) else None

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

        def ask() -> tuple[str, frozenset[str]]:
            info = HfApi(**client_name()).model_info(self._repository, revision=self._revision, timeout=TIMEOUT_SECONDS)
            if info.sha is None:
                raise errors.FileMetadataError("a description of the repository without a commit")
            return info.sha, frozenset(file.rfilename for file in info.siblings or () if "/" not in file.rfilename)

        return self._patiently("the list of files", ask)

    def names(self) -> Collection[str]:
        return self._names

    def path(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        cached = self._cached(name)
        if cached is not None:
            return Path(cached)

        with self._explained(name):
            path = Path(hf_hub_download(self._repository, name, revision=self.commit, **client_name()))
            if self._revision != self.commit:
                self._remember_commit(path.parent.parent.parent / "refs" / self._revision)
        self.transfers.count(path.stat().st_size)
        if not name.endswith(".json"):
            self.transfers.notes[f"{name} was downloaded whole: PyTorch files are not read in parts"] = None
        return path

    def json(self, name: str) -> dict[str, Any]:
        return read_json(self.path(name))

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
        return SafetensorsFile(self._ranged(name))

    def gguf(self, name: str) -> GgufFile:
        return GgufFile(self._ranged(name))

    def _ranged(self, name: str) -> LocalFile | RangedFile:
        """A file's bytes: those of the cache where it is there."""
        from huggingface_hub import hf_hub_url

        cached = self._cached(name)
        if cached is not None:
            return LocalFile(Path(cached))
        url = hf_hub_url(self._repository, name, revision=self.commit)
        file = HttpFile(
            url, f"{self.location}/{name}", request_headers(url), lambda response: self._refusal(name, response)
        )
        return RangedFile(file, self.transfers)

    def _refusal(self, name: str, response: Response) -> CheckpointError:
        """The error for an answer of the hub that refuses."""
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        try:
            hf_raise_for_status(response)
        except OSError as error:
            return self._error(name, error)
        return CheckpointError("the hub answered with an error", where=f"{self.location}, {name}")

    def _patiently(self, name: str, ask: Callable[[], Answer]) -> Answer:
        """An answer of the hub's client, asked again where the hub says it is busy."""
        from huggingface_hub.errors import HfHubHTTPError

        def ask_once() -> Answer:
            try:
                with self._explained(name):
                    return ask()
            except CheckpointError as error:
                refused = error.__cause__
                if isinstance(refused, HfHubHTTPError) and refused.response.status_code in PASSING:
                    raise PassingError(error, retry_after(refused.response)) from error
                raise

        return patiently(ask_once, self.transfers.stopped)

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn the hub client's errors into one message each."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        try:
            yield
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            raise self._error(name, error) from error

    def _error(self, name: str, error: Exception) -> CheckpointError:
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError

        cause = failed_request(error)
        what, remedy = meaning(cause)
        if isinstance(cause, GatedRepoError):
            remedy = f"{remedy}: {constants.ENDPOINT}/{self._repository}"
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        found = " ".join(lines[:2]) or type(cause).__name__
        return CheckpointError(what, where=f"{self.location}, {name}", found=found[:200], remedy=remedy)


def _shows_weights(names: Collection[str], offline: bool) -> bool:
    """Whether a snapshot, which may be incomplete, holds a whole weight file, an adapter, or an index with a shard.

    An index alone, which reading by ranges leaves there, counts where nothing else can be had.
    """
    if ADAPTER_CONFIG in names and any(name in names for name in ADAPTER_WEIGHTS):
        return True
    models = {gguf_parts(name) for name in names if name.endswith(".gguf")}
    whole = [parts for parts in models if all(part in names for part in parts)]
    shard = offline or any(name.endswith((".safetensors", ".bin")) for name in names)
    return len(whole) == 1 or ("config.json" in names and shard and any(name in names for name, _ in INDEXES))
