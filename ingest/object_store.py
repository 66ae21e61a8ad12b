"""Objects in S3 and Google Cloud Storage by ranges, through the obstore library where it is installed.

Addresses and credentials come from the environment, as for the clouds' own programs: ``AWS_ENDPOINT_URL``,
``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``GOOGLE_APPLICATION_CREDENTIALS`` and so on. Without any, requests
are anonymous, as public buckets want them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.http_files import PASSING, TIMEOUT_SECONDS
from ingest.transfers import NoAccessError, NoSuchFileError, Part, PassingError
from stats.errors import CheckpointError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSStore, RetryConfig, S3Store

CHUNK = 1
"""Bytes the library collects before it hands them on; those it holds when a connection breaks are lost."""

S3_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
GS_CREDENTIALS = (
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)
GS_LOGIN = Path("~/.config/gcloud/application_default_credentials.json")
"""Where ``gcloud auth application-default login`` puts what it got."""

HOW_TO_SIGN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install boto3 to use a profile or a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
}
STATUS = re.compile(r"status code: (\d{3})")
MESSAGE = re.compile(r"<Message>(.*?)</Message>")
DETAIL = re.compile(r"Debug source:.*", re.DOTALL)


class Bucket:
    """A bucket of a store; objects are named by their whole key.

    Raises:
        CheckpointError: obstore is not installed, or cannot make use of the environment.
    """

    def __init__(self, scheme: str, name: str) -> None:
        self.name = f"{scheme}://{name}"
        self._scheme = scheme
        if find_spec("obstore") is None:
            raise CheckpointError(
                f"reading {scheme}:// needs the obstore library",
                where=self.name,
                remedy="pip install 'headatlas[remote]'",
            )
        try:
            self._store = _s3(name) if scheme == "s3" else _gs(name)
        except Exception as error:  # a setting in the environment, of which the library says what is wrong
            raise CheckpointError(
                "the bucket cannot be opened with the settings in the environment",
                where=self.name,
                found=str(error)[:300],
            ) from error

    def names(self, prefix: str) -> Collection[str] | None:
        """Names right under a prefix that ends with a slash; None where they may not be listed.

        Raises:
            PassingError: something that may go better the next time.
            CheckpointError: something that will not.
        """
        import obstore

        try:
            listed = obstore.list_with_delimiter(self._store, prefix)
        except (obstore.exceptions.BaseError, OSError) as error:
            failure = self._failure(f"{self.name}/{prefix}", error)
            if isinstance(failure, NoAccessError):
                return None
            raise failure from error
        return {entry["path"].rpartition("/")[2] for entry in listed["objects"]}

    @contextmanager
    def request(self, key: str, first: int, last: int) -> Iterator[Part]:
        """Ask for bytes of an object; as ``Transport.request`` does."""
        import obstore

        where = f"{self.name}/{key}"
        try:
            result = obstore.get(self._store, key, options={"range": (first, last)})
            meta = result.meta
            content = (meta["e_tag"] or str(meta["last_modified"])).strip('"')
            yield Part(result.range[0], meta["size"], content, False, map(bytes, result.stream(CHUNK)))
        except (obstore.exceptions.BaseError, OSError) as error:
            raise self._failure(where, error) from error

    def _failure(self, where: str, error: Exception) -> Exception:
        """What an error of the library means, ``PassingError`` where it may pass."""
        from obstore import exceptions

        text = str(error)
        status, message = STATUS.search(text), MESSAGE.search(text)
        code = int(status[1]) if status else 0
        brief = " ".join(DETAIL.sub("", text).split())
        found = (f"{code}: {message[1]}" if message else brief)[:300]
        if isinstance(error, FileNotFoundError) or code == 404:
            return NoSuchFileError(
                "the bucket does not have the file", where=where, found=found, remedy="check the address"
            )
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or code in (401, 403):
            return NoAccessError(
                "the bucket does not give access to the file",
                where=where,
                found=found,
                remedy=f"check the address and the permissions; {HOW_TO_SIGN[self._scheme]}",
            )
        unreachable = not code and "error sending request" in text
        failure = CheckpointError(
            "there is no connection to the object store" if unreachable else "the object store failed",
            where=where,
            found=found,
            remedy="check the connection, and AWS_ENDPOINT_URL if it is set" if unreachable else "try again later",
        )
        return failure if code and code not in PASSING else PassingError(failure, unreachable=unreachable)


class StoredObject:
    """One object of a bucket as a transport."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self.name = f"{bucket.name}/{key}"
        self._bucket = bucket
        self._key = key

    def request(self, first: int, last: int) -> Any:
        """Ask for bytes."""
        return self._bucket.request(self._key, first, last)


def _once(endpoint: str) -> tuple[ClientConfig, RetryConfig]:
    """Settings that leave the tries to this program, and allow an endpoint without TLS where it is named so."""
    seconds = timedelta(seconds=TIMEOUT_SECONDS)
    client: ClientConfig = {"connect_timeout": seconds, "read_timeout": seconds, "timeout": timedelta(hours=1)}
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    return client, {"max_retries": 0}


def _s3(bucket: str) -> S3Store:
    from obstore.store import S3Store

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    client, retry = _once(endpoint)
    if any(os.environ.get(name) for name in S3_CREDENTIALS) or "AWS_SKIP_SIGNATURE" in os.environ:
        return S3Store(bucket, client_options=client, retry_config=retry)
    if find_spec("boto3") is not None:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = boto3.session.Session()
        if session.get_credentials() is not None:
            provider = Boto3CredentialProvider(session)
            return S3Store(bucket, client_options=client, retry_config=retry, credential_provider=provider)
    return S3Store(bucket, client_options=client, retry_config=retry, skip_signature=True)


def _gs(bucket: str) -> GCSStore:
    from obstore.store import GCSStore

    client, retry = _once(os.environ.get("GOOGLE_BASE_URL", ""))
    if any(os.environ.get(name) for name in GS_CREDENTIALS) or GS_LOGIN.expanduser().is_file():
        return GCSStore(bucket, client_options=client, retry_config=retry)
    return GCSStore(bucket, client_options=client, retry_config=retry, skip_signature=True)
