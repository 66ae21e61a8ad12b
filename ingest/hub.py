"""Checkpoints named ``org/name[@revision]``: the local hub cache first, the hub where it is needed.

``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_HUB_CACHE`` act as everywhere, because
huggingface_hub does the talking. Only the configuration, the index and the files that hold
attention are fetched; planning a safetensors checkpoint fetches no more than headers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from ingest.checkpoint import Checkpoint
from ingest.local import INDEXES, open_folder
from ingest.safetensors_file import LocalFile, SafetensorsFile
from stats.errors import CheckpointError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
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
    repository, _, revision = text.partition("@")
    folder = HubFolder(repository, revision or "main")
    checkpoint = open_folder(folder, text, config_path)
    checkpoint.source = text
    checkpoint.revision = folder.commit
    return checkpoint


class HubFolder:
    """One revision of a hub repository: its cached snapshot, completed from the hub on demand."""

    def __init__(self, repository: str, revision: str) -> None:
        self.location = repository if revision == "main" else f"{repository}@{revision}"
        self._repository = repository
        self._revision = revision
        self.commit, self._names = self._cached_snapshot() or self._ask_hub()

    def _cached_snapshot(self) -> tuple[str, frozenset[str]] | None:
        """Commit and files of the cached snapshot, if it has a configuration and weights."""
        from huggingface_hub import try_to_load_from_cache

        with self._explained("config.json"):
            config = try_to_load_from_cache(self._repository, "config.json", revision=self._revision)
        if not isinstance(config, str):
            return None
        snapshot = Path(config).parent
        names = frozenset(entry.name for entry in snapshot.iterdir())
        weights = {name for name, _ in INDEXES}
        if names.isdisjoint(weights) and not any(name.endswith((".safetensors", ".gguf")) for name in names):
            return None
        return snapshot.name, names

    def _ask_hub(self) -> tuple[str, frozenset[str]]:
        """Commit and files of the revision on the hub."""
        from huggingface_hub import HfApi, constants

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
        return str(info.sha), frozenset(file.rfilename for file in info.siblings or () if "/" not in file.rfilename)

    def names(self) -> Collection[str]:
        return self._names

    def path(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        with self._explained(name):
            return Path(self._cached(name) or hf_hub_download(self._repository, name, revision=self.commit))

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
        from huggingface_hub import errors
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        try:
            yield
        except errors.HFValidationError as error:
            raise self._failure("not a name the hub can have", name, error, "check the spelling") from error
        except errors.GatedRepoError as error:
            remedy = "accept the model's terms on the hub, then set HF_TOKEN to a token of that account"
            raise self._failure("the repository is gated", name, error, remedy) from error
        except errors.RepositoryNotFoundError as error:
            remedy = "check the name; for a private repository set HF_TOKEN to a token that may read it"
            raise self._failure("no such repository, or no permission to see it", name, error, remedy) from error
        except errors.RevisionNotFoundError as error:
            raise self._failure("no such revision", name, error, "name a branch, tag or commit after @") from error
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            remedy = "check the connection and HF_ENDPOINT; offline, download the missing file first"
            raise self._failure(
                "a file is not in the cache and the hub was not reached", name, error, remedy
            ) from error
        except errors.EntryNotFoundError as error:
            raise self._failure("the repository lacks a file", name, error, "check the revision") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else None
            what, remedy = HTTP_MEANINGS.get(status or 0, ("the hub answered with an error", "try again later"))
            raise self._failure(what, name, error, remedy) from error
        except HTTPError as error:
            remedy = "check the connection and HF_ENDPOINT, or use a downloaded copy"
            raise self._failure("the hub cannot be reached", name, error, remedy) from error

    def _failure(self, what: str, name: str, error: Exception, remedy: str) -> CheckpointError:
        found = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return CheckpointError(what, where=f"{self.location}, {name}", found=found[:200], remedy=remedy)


HTTP_MEANINGS = {
    401: ("the hub does not know the token", "set HF_TOKEN to a valid token"),
    403: ("the token may not read the repository", "ask for access, or use another token"),
    404: ("the hub does not have it", "check the name and the revision"),
    429: ("the hub asks for fewer requests", "wait some minutes; a token in HF_TOKEN raises the limit"),
}


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
        headers = {**build_hf_headers(), "Range": f"bytes={offset}-{last - 1}"}
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
