"""What the errors of the hub's client mean, and what to do about them."""

from __future__ import annotations

import json


def failed_request(error: Exception) -> Exception:
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


def meaning(error: Exception) -> tuple[str, str]:
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
