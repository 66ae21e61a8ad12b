"""Checkpoints in buckets: S3 against moto's server, Google Cloud Storage against a plain web server."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

import ingest.object_store
import ingest.transfers
from ingest.byte_ranges import Span
from ingest.checkpoint import Checkpoint
from ingest.factors import ModelHashes, model_hashes
from ingest.pipeline import hash_layers
from ingest.plan import plan_checkpoint
from ingest.ranged_file import HEAD, RangedFile
from ingest.source import open_checkpoint
from ingest.transfers import ATTEMPTS
from stats.errors import CheckpointError
from tests.checkpoints import llama, save_gguf, save_sharded_safetensors, save_torch
from tests.range_server import serving

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded_safetensors(
        llama(layers=2, d_model=256, heads=4, d_head=64), tmp_path_factory.mktemp("place") / "model"
    )


@pytest.fixture(scope="module")
def buckets(moto: str, directory: Path) -> str:
    """A bucket for those with keys and one for everybody, with the model under ``some/model``."""
    client = boto3.client(
        "s3", endpoint_url=moto, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )
    for bucket, rights in (("private", "private"), ("public", "public-read")):
        client.create_bucket(Bucket=bucket, ACL=rights)
        for path in directory.iterdir():
            client.put_object(Bucket=bucket, Key=f"some/model/{path.name}", Body=path.read_bytes(), ACL=rights)
    return moto


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """No credentials, no waiting, and the waits there would have been."""
    seconds: list[float] = []
    monkeypatch.setattr(ingest.transfers, "pause", lambda wait, _: seconds.append(wait))
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return seconds


@pytest.fixture
def s3(buckets: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", buckets)
    return buckets


def hashes(checkpoint: Checkpoint) -> ModelHashes:
    return model_hashes(list(hash_layers(plan_checkpoint(checkpoint, ("raw", "folded")))))


def failure(text: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        hashes(open_checkpoint(text))
    return caught.value


def test_a_public_bucket_is_read_without_keys(s3: str, directory: Path) -> None:
    checkpoint = open_checkpoint("s3://public/some/model")
    plan = plan_checkpoint(checkpoint)
    assert hashes(checkpoint) == hashes(open_checkpoint(str(directory)))
    (transfers,) = checkpoint.transfers
    small = sum((directory / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    assert transfers.moved <= 1.01 * plan.bytes_to_read + 2 * HEAD + small
    assert (checkpoint.source, checkpoint.name) == ("s3://public/some/model", "model")


def test_a_private_bucket_is_read_with_keys(s3: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = failure("s3://private/some/model/")
    assert "does not give access" in error.what
    assert "AWS_ACCESS_KEY_ID" in error.remedy
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    assert hashes(open_checkpoint("s3://private/some/model/")) == hashes(open_checkpoint(str(directory)))


def test_keys_of_a_profile(s3: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = "[work]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    (tmp_path / "credentials").write_text(profile, encoding="utf-8")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert hashes(open_checkpoint("s3://private/some/model")) == hashes(open_checkpoint(str(directory)))


def test_a_single_object(s3: str, tmp_path: Path) -> None:
    file = save_gguf(llama(), tmp_path / "model")
    client = boto3.client(
        "s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    client.put_object(Bucket="public", Key="deep/er/model.gguf", Body=file.read_bytes(), ACL="public-read")
    assert hashes(open_checkpoint("s3://public/deep/er/model.gguf")) == hashes(open_checkpoint(str(file)))
    assert hashes(open_checkpoint("s3://public/deep/er")) == hashes(open_checkpoint(str(file)))
    for path in save_torch(llama(), tmp_path / "torch").iterdir():
        client.put_object(Bucket="public", Key=f"torch/{path.name}", Body=path.read_bytes(), ACL="public-read")
    assert "cannot be read in parts" in failure("s3://public/torch").what


def test_nothing_there(s3: str) -> None:
    assert "does not have the file" in failure("s3://absent/model").what
    assert "no weights found" in failure("s3://public/absent").what
    assert "does not have the file" in failure("s3://public/absent.gguf").what


def test_an_object_that_changes_is_refused(s3: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = boto3.client(
        "s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    client.create_bucket(Bucket="changing", ACL="public-read")
    for path in directory.iterdir():
        client.put_object(Bucket="changing", Key=path.name, Body=path.read_bytes(), ACL="public-read")
    prefetch = RangedFile.prefetch

    def change(file: RangedFile, spans: list[Span]) -> None:
        for path in directory.glob("*.safetensors"):
            other = bytearray(path.read_bytes())
            other[-1] ^= 1
            client.put_object(Bucket="changing", Key=path.name, Body=bytes(other), ACL="public-read")
        prefetch(file, spans)

    monkeypatch.setattr(RangedFile, "prefetch", change)
    assert "changed while it was read" in failure("s3://changing").what


def test_no_connection(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        error = failure("s3://public/some/model.gguf")
    assert "no connection" in error.what
    assert str(closed) not in error.found
    assert waits == []


def test_without_the_library_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest.object_store, "find_spec", lambda _: None)
    error = failure("s3://public/some/model")
    assert "obstore" in error.what
    assert "headatlas[remote]" in error.remedy


def test_google_cloud_storage(directory: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    files = {f"/bucket/some/model/{path.name}": path.read_bytes() for path in directory.iterdir()}
    with serving(files) as server:
        monkeypatch.setenv("GOOGLE_BASE_URL", server.address)
        server.tags = {path: f'"{number}"' for number, path in enumerate(files)}
        server.modified = "Wed, 21 Oct 2015 07:28:00 GMT"
        server.statuses = {"/bucket": 403}
        checkpoint = open_checkpoint("gs://bucket/some/model")
        assert hashes(checkpoint) == hashes(open_checkpoint(str(directory)))
        assert checkpoint.source == "gs://bucket/some/model"
        server.busy = [(503, None), (429, None)]
        server.break_after = 100_000
        checkpoint = open_checkpoint("gs://bucket/some/model")
        assert hashes(checkpoint) == hashes(open_checkpoint(str(directory)))
        assert waits
        server.busy = [(500, None)] * 100
        waits.clear()
        assert "the object store failed" in failure("gs://bucket/some/model/model.gguf").what
        assert len(waits) == ATTEMPTS - 1
