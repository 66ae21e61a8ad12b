"""Checkpoints at an address: what is fetched, that it is right, and what is said when it goes wrong."""

import itertools
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.utils
import pytest
import torch
import trustme
from click.testing import CliRunner, Result

import ingest.hub
import ingest.ranged_file
import ingest.transfers
from cli import main
from ingest.byte_ranges import LARGEST_SHARE_UNWANTED, Span, coalesced, pieces
from ingest.checkpoint import Checkpoint
from ingest.factors import ModelHashes, model_hashes
from ingest.pipeline import hash_layers
from ingest.plan import plan_checkpoint
from ingest.ranged_file import HEAD, RangedFile
from ingest.source import open_checkpoint
from ingest.transfers import ATTEMPTS, MOST_PATIENCE, Transfers
from stats.errors import CheckpointError
from tests.checkpoints import (
    Model,
    llama,
    save_bare_safetensors,
    save_gguf,
    save_safetensors,
    save_sharded_safetensors,
    save_torch,
)
from tests.range_server import RangeServer, serving


def wide(seed: int = 0) -> Model:
    """A model with enough attention, some 10 MB in four layers, to tell it from headers."""
    model = llama(layers=4, d_model=512, heads=8, kv_heads=2, d_head=64, seed=seed)
    return model.changed(**{f"model.layers.{layer}.mlp.other.weight": torch.zeros(2500, 512) for layer in range(4)})


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """No proxy, no waiting, and the waits there would have been."""
    seconds: list[float] = []
    monkeypatch.setattr(ingest.transfers, "pause", lambda wait, _: seconds.append(wait))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield seconds
    huggingface_hub.utils.close_session()


def content(directory: Path, at: str = "/model") -> dict[str, bytes | Path]:
    """The files of a directory by their path on a server."""
    return {f"{at}/{path.name}": path.read_bytes() for path in directory.iterdir()}


def tagged(server: RangeServer) -> RangeServer:
    """The server with an ETag for every file."""
    server.tags = {path: f'"{number}"' for number, path in enumerate(server.files)}
    return server


def hashes(checkpoint: Checkpoint) -> ModelHashes:
    """Digests of everything that is measured, read layer by layer."""
    return model_hashes(list(hash_layers(plan_checkpoint(checkpoint, ("raw", "folded")))))


def local(directory: Path) -> ModelHashes:
    return hashes(open_checkpoint(str(directory)))


def moved(checkpoint: Checkpoint) -> int:
    (transfers,) = checkpoint.transfers
    return transfers.moved


def failure(text: str, **options: object) -> CheckpointError:
    """The error of reading the checkpoint at an address."""
    with pytest.raises(CheckpointError) as caught:
        hashes(open_checkpoint(text, **options))
    return caught.value


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded_safetensors(wide(), tmp_path_factory.mktemp("place") / "model")


@pytest.fixture
def server(directory: Path) -> Iterator[RangeServer]:
    with serving(content(directory)) as running:
        yield tagged(running)


def test_coalesced_ranges_hold_every_span_at_little_cost() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        cuts = torch.randint(0, 5000, (40,), generator=generator).sort().values.tolist()
        spans = [Span(first, last) for first, last in zip(cuts[::2], cuts[1::2], strict=True)]
        spans.append(Span(cuts[3], cuts[8]))
        ranges = coalesced(spans)
        assert ranges == sorted(ranges)
        assert all(one.last < other.first for one, other in itertools.pairwise(ranges))
        wanted = {byte for span in spans for byte in range(span.first, span.last)}
        fetched = {byte for span in ranges for byte in range(span.first, span.last)}
        assert wanted <= fetched
        assert len(fetched) <= (1 + LARGEST_SHARE_UNWANTED) * len(wanted)
    assert coalesced([Span(0, 1000), Span(1003, 2000), Span(3000, 4000)]) == [Span(0, 2000), Span(3000, 4000)]
    assert coalesced([]) == coalesced([Span(5, 5)]) == []


def test_pieces_are_the_span() -> None:
    parts = list(pieces(Span(10, 110), largest=33))
    assert [len(part) for part in parts] == [25, 25, 25, 25]
    assert [part.first for part in parts] + [110] == [10] + [part.last for part in parts]


def test_only_headers_and_attention_move(server: RangeServer, directory: Path) -> None:
    checkpoint = open_checkpoint(f"{server.address}/model")
    plan = plan_checkpoint(checkpoint, ("raw", "folded"))
    small = sum(server.sent(name) for name in ("config.json", "index.json"))
    shards = {path for path in server.files if path.endswith(".safetensors")}
    asked = [request.path for request in server.requests if request.path in shards]
    assert sorted(asked) == sorted(set(asked))
    assert server.sent(".safetensors") <= HEAD * len(asked)
    model_hashes(list(hash_layers(plan)))
    assert server.sent(".safetensors") <= 1.01 * plan.bytes_to_read + HEAD * len(asked)
    assert server.sent(".safetensors") >= plan.bytes_to_read
    assert server.sent() == moved(checkpoint) == small + server.sent(".safetensors")
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert server.sent(".safetensors") < stored / 2
    ranges = [request for request in server.requests if request.path in shards and request.range[0] > 0]
    assert len(ranges) <= 3 * len(plan.layers) < sum(len(layer.tensors) for layer in plan.layers)
    assert checkpoint.source == f"{server.address}/model"
    assert checkpoint.name == "model"


def test_what_is_read_is_what_is_stored(server: RangeServer, directory: Path) -> None:
    assert hashes(open_checkpoint(f"{server.address}/model/")) == local(directory)
    assert server.most_in_flight <= ingest.transfers.CONNECTIONS
    named = open_checkpoint(str(directory))
    remote = open_checkpoint(f"{server.address}/model")
    for name in named.location:
        assert torch.equal(named.read(name), remote.read(name))


def test_ranges_are_fetched_side_by_side(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_checkpoint(open_checkpoint(f"{server.address}/model"))
    both = threading.Barrier(2)
    serve, places = server._server.RequestHandlerClass._serve, iter(range(2))

    def together(*arguments: object) -> None:
        if next(places, None) is not None:
            both.wait(timeout=20)
        serve(*arguments)

    monkeypatch.setattr(server._server.RequestHandlerClass, "_serve", together)
    list(hash_layers(plan))
    assert not both.broken


def test_plan_reads_headers_only(server: RangeServer) -> None:
    result = CliRunner().invoke(main, ["plan", f"{server.address}/model", "--format", "json"])
    assert result.exit_code == 0, result.output
    asked = [request for request in server.requests if request.path.endswith(".safetensors")]
    assert all(request.range == (0, HEAD - 1) for request in asked)
    assert len({request.path for request in asked}) == len(asked)


def test_a_header_longer_than_the_first_request(
    server: RangeServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest.ranged_file, "HEAD", 100)
    plan_checkpoint(open_checkpoint(f"{server.address}/model"))
    for path in (path for path in server.files if path.endswith(".safetensors")):
        header = 8 + int.from_bytes(server.files[path][:8], "little")
        assert server.sent(path) == header
    assert hashes(open_checkpoint(f"{server.address}/model")) == local(directory)


def test_long_ranges_are_cut(server: RangeServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "__defaults__", (300_000,))
    checkpoint = open_checkpoint(f"{server.address}/model")
    assert hashes(checkpoint) == local(directory)
    lengths = [request.range[1] - request.range[0] + 1 for request in server.requests]
    assert max(lengths) <= 300_000
    assert moved(checkpoint) <= 1.01 * plan_checkpoint(checkpoint).bytes_to_read + HEAD * len(server.files)


def test_without_room_ahead_tensors_are_read_one_by_one(
    server: RangeServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest.transfers, "MOST_AHEAD", 0)
    assert hashes(open_checkpoint(f"{server.address}/model")) == local(directory)


def test_what_was_fetched_ahead_is_let_go(server: RangeServer) -> None:
    checkpoint = open_checkpoint(f"{server.address}/model")
    plan = plan_checkpoint(checkpoint)
    held = [checkpoint.transfers[0]._held for _ in hash_layers(plan)]
    assert held[-1] == 0
    layers = hash_layers(plan)
    next(layers)
    layers.close()
    (transfers,) = checkpoint.transfers
    assert transfers._held == 0
    first = model_hashes(list(hash_layers(plan)))
    assert transfers._held == 0
    assert first == model_hashes(list(hash_layers(plan)))
    assert all(not file._source._windows for file in checkpoint.files.values())


def test_a_single_file_with_its_configuration_beside_it(tmp_path: Path) -> None:
    path = save_safetensors(wide(), tmp_path / "model")
    with serving(content(path)) as server:
        checkpoint = open_checkpoint(f"{server.address}/model/model.safetensors")
        assert hashes(checkpoint) == local(path)
        assert checkpoint.name == "model"
        assert hashes(open_checkpoint(f"{server.address}/model")) == local(path)


def test_a_single_file_with_a_configuration_named(tmp_path: Path) -> None:
    file = save_bare_safetensors(wide(), tmp_path / "model")
    config = file.parent / "config.json"
    moved_config = config.rename(tmp_path / "elsewhere.json")
    with serving(content(file.parent)) as server:
        address = f"{server.address}/model/{file.name}"
        assert "--config" in failure(address).remedy
        remote = hashes(open_checkpoint(address, moved_config))
        assert remote == hashes(open_checkpoint(str(file), moved_config))


def test_gguf_by_ranges(tmp_path: Path) -> None:
    file = save_gguf(wide().without("other"), tmp_path / "model.gguf")
    with serving({"/some/model.gguf": file.read_bytes()}) as server:
        checkpoint = open_checkpoint(f"{server.address}/some/model.gguf")
        plan = plan_checkpoint(checkpoint)
        assert server.sent() <= 2 * HEAD
        assert hashes(checkpoint) == local(file)
        assert server.sent() <= 1.01 * plan.bytes_to_read + 2 * HEAD
        assert checkpoint.name == "model"


def test_a_gguf_header_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(llama(), tmp_path / "model.gguf")
    monkeypatch.setattr(ingest.ranged_file, "HEAD", 16)
    monkeypatch.setattr("ingest.gguf_file.FIRST_PIECE", 50)
    with serving({"/model.gguf": file.read_bytes()}) as server:
        plan = plan_checkpoint(open_checkpoint(f"{server.address}/model.gguf"))
        first = min(plan.checkpoint.place(name)[1] for name in plan.checkpoint.location)
        assert len(server.requests) > 3
        assert server.sent() < 1.5 * first
        assert hashes(plan.checkpoint) == local(file)


def test_torch_files_are_to_be_downloaded(tmp_path: Path) -> None:
    with serving(content(save_torch(llama(), tmp_path / "model"))) as server:
        error = failure(f"{server.address}/model")
    assert "cannot be read in parts" in error.what
    assert "download" in error.remedy


def test_a_server_without_ranges_sends_each_file_once(server: RangeServer, directory: Path) -> None:
    server.ignore_range = True
    checkpoint = open_checkpoint(f"{server.address}/model")
    assert hashes(checkpoint) == local(directory)
    for path in (path for path in server.files if path.endswith(".safetensors")):
        assert sum(request.sent == len(server.files[path]) for request in server.requests if request.path == path) <= 1
        assert sum(request.path == path for request in server.requests) == 2
    (transfers,) = checkpoint.transfers
    assert all("whole files" in note for note in transfers.notes)
    assert len(transfers.notes) == sum(path.endswith(".safetensors") for path in server.files)


def test_a_server_without_ranges_may_drop_the_connection(
    server: RangeServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ignore_range = True
    checkpoint = open_checkpoint(f"{server.address}/model")
    plan = plan_checkpoint(checkpoint, ("raw", "folded"))
    answers = iter([100_000, 2_000_000])
    serve = server._server.RequestHandlerClass._serve

    def breaking(handler: object, owner: RangeServer, *rest: object) -> None:
        owner.break_after = next(answers, None)
        serve(handler, owner, *rest)

    monkeypatch.setattr(server._server.RequestHandlerClass, "_serve", breaking)
    assert model_hashes(list(hash_layers(plan))) == local(directory)


def test_a_server_without_ranges_or_lengths_is_refused(server: RangeServer) -> None:
    server.ignore_range = server.without_length = True
    assert "Content-Length" in failure(f"{server.address}/model").expected


def test_a_connection_that_breaks_off_is_continued(server: RangeServer, directory: Path, waits: list[float]) -> None:
    server.break_after = 200_000
    checkpoint = open_checkpoint(f"{server.address}/model")
    assert hashes(checkpoint) == local(directory)
    assert waits
    assert moved(checkpoint) <= 1.01 * plan_checkpoint(checkpoint).bytes_to_read + HEAD * len(server.files)


def test_a_connection_that_always_breaks_off_is_an_error(server: RangeServer, waits: list[float]) -> None:
    server.break_after = 0
    error = failure(f"{server.address}/model")
    assert "broke off" in error.what
    assert server.address.removeprefix("http://") in error.found
    assert len(waits) == ATTEMPTS - 1
    assert waits == sorted(waits)


def test_a_busy_server_is_asked_again_when_it_says(server: RangeServer, directory: Path, waits: list[float]) -> None:
    server.busy = [(429, "7"), (503, "11"), (502, None)]
    assert hashes(open_checkpoint(f"{server.address}/model")) == local(directory)
    assert waits[:2] == [7, 11]
    assert len(waits) == 3


@pytest.mark.parametrize(("status", "words"), [(429, "fewer requests"), (500, "an error"), (503, "an error")])
def test_a_server_that_stays_busy_is_an_error(server: RangeServer, status: int, words: str, waits: list[float]) -> None:
    server.busy = [(status, "3")] * 100
    error = failure(f"{server.address}/model")
    assert words in error.what
    assert str(status) in error.found
    assert waits == [3.0] * (ATTEMPTS - 1)


def test_a_server_that_asks_for_too_much_patience(server: RangeServer, waits: list[float]) -> None:
    server.busy = [(429, str(int(MOST_PATIENCE) + 1))]
    assert f"{MOST_PATIENCE + 1:.0f} s" in failure(f"{server.address}/model").found
    assert waits == []


def test_a_date_to_come_back_at_is_understood(server: RangeServer) -> None:
    class Answer:
        status_code = 503
        headers = {"Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT", "Date": "Wed, 21 Oct 2015 07:28:00 GMT"}  # noqa: RUF012

    assert ingest.http_files.retry_after(Answer()) == 30
    Answer.headers = {"Retry-After": "soon"}
    assert ingest.http_files.retry_after(Answer()) is None
    Answer.headers, Answer.status_code = {"RateLimit": '"api";r=0;t=55'}, 429
    assert ingest.http_files.retry_after(Answer()) == 55


@pytest.mark.parametrize("change", ["tag", "size"])
def test_a_file_that_changes_is_refused(
    server: RangeServer, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setenv("HEADATLAS_STORE", str(tmp_path / "atlas"))
    other = content(save_sharded_safetensors(wide(seed=1), tmp_path / "other"))
    assert run("ingest", str(save_safetensors(llama(), tmp_path / "kept"))).exit_code == 0
    prefetch, calls = RangedFile.prefetch, []

    def change_meanwhile(file: RangedFile, spans: list[Span]) -> None:
        calls.append(file)
        for path in (path for path in server.files if path.endswith(".safetensors") and len(calls) == 2):
            if change == "tag":
                server.files[path], server.tags[path] = other[path], '"another"'
            else:
                server.files[path] = server.files[path] + b"more"
        prefetch(file, spans)

    monkeypatch.setattr(RangedFile, "prefetch", change_meanwhile)
    result = run("ingest", f"{server.address}/model")
    assert result.exit_code == 1
    assert "changed while it was read" in result.stderr
    assert [row["model"] for row in json.loads(run("models", "--format", "json").stdout)] == ["kept"]
    assert run("verify").exit_code == 0
    assert list((tmp_path / "atlas" / "staging").iterdir()) == []


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_ingest_says_what_moved(
    server: RangeServer, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADATLAS_STORE", str(tmp_path / "atlas"))
    result = run("ingest", f"{server.address}/model", "--name", "afar")
    assert result.exit_code == 0, result.output
    assert f"{server.sent():,} moved over the network" in result.stdout
    assert run("ingest", str(directory), "--name", "near").exit_code == 0
    rows = json.loads(
        run("sql", "SELECT content_hash, qk_hash, n_layers, d_model FROM models", "--format", "json").stdout
    )
    assert rows[0] == rows[1]
    again = run("ingest", f"{server.address}/model", "--name", "afar")
    assert "nothing to do" in again.stdout


def test_redirects_are_followed_once_and_carry_no_secret(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(content(directory)) as storage, serving({}) as front:
        front.redirects = {path: f"{storage.address}{path}?signature=s" for path in storage.files}
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", front.address)
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert hashes(open_checkpoint(f"{front.address}/org/../model")) == local(directory)
        followed = [request for request in front.requests if request.status == 302]
        assert len(followed) == len({request.path for request in followed})
        assert {request.headers.get("authorization", request.headers.get("Authorization")) for request in followed} == {
            "Bearer secret"
        }
        assert storage.requests
        assert not any("secret" in value for request in storage.requests for value in request.headers.values())


def test_a_redirect_within_a_server_keeps_its_token(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(content(directory, "/new")) as server:
        server.redirects = {path.replace("/new", "/old"): path for path in server.files}
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert hashes(open_checkpoint(f"{server.address}/old")) == local(directory)
        for request in server.requests:
            assert request.headers.get("authorization", request.headers.get("Authorization")) == "Bearer secret"
        followed = [request.path for request in server.requests if request.status == 302]
        assert len(followed) == len(set(followed))


def test_a_place_that_is_no_longer_good_is_asked_for_again(directory: Path) -> None:
    with serving(content(directory)) as old, serving(content(directory)) as new, serving({}) as front:
        front.redirects = {path: old.address + path for path in old.files}
        plan = plan_checkpoint(open_checkpoint(f"{front.address}/model"), ("raw", "folded"))
        front.redirects = {path: new.address + path for path in new.files}
        old.statuses = dict.fromkeys(old.files, 403)
        assert model_hashes(list(hash_layers(plan))) == local(directory)
        assert new.requests


def test_a_token_is_for_the_hub_alone(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    plan_checkpoint(open_checkpoint(f"{server.address}/model"))
    assert not any("secret" in value for request in server.requests for value in request.headers.values())
    assert all("headatlas" in request.headers.get("user-agent", "") for request in server.requests)


def test_secrets_in_an_address_are_not_stored_or_shown(server: RangeServer) -> None:
    address = server.address.replace("//", "//user:password@") + "/model?key=secret"
    checkpoint = open_checkpoint(address)
    assert checkpoint.source == f"{server.address}/model"
    assert not any("secret" in name or "password" in name for name in [*checkpoint.files, *checkpoint.location])
    server.statuses = dict.fromkeys(server.files, 500)
    message = str(failure(address))
    assert "secret" not in message
    assert "password" not in message


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "who asks"), (403, "does not give access"), (418, "an error")],
)
def test_refusals_have_their_own_messages(server: RangeServer, status: int, words: str) -> None:
    server.statuses = dict.fromkeys(server.files, status)
    error = failure(f"{server.address}/model")
    assert words in error.what
    assert str(status) in error.found
    assert "config.json" in error.where


def test_nothing_there(server: RangeServer) -> None:
    error = failure(f"{server.address}/absent")
    assert "no weights found" in error.what
    assert "does not have the file" in failure(f"{server.address}/absent.gguf").what
    shard = next(path for path in server.files if path.endswith(".safetensors"))
    del server.files[shard]
    error = failure(f"{server.address}/model")
    assert "does not have the file" in error.what
    assert shard in error.where


def test_a_server_that_hides_what_it_does_not_have(server: RangeServer, directory: Path, tmp_path: Path) -> None:
    path = save_safetensors(wide(), tmp_path / "whole")
    server.files = content(path)
    server.statuses = {"/model/model.safetensors.index.json": 403}
    assert hashes(open_checkpoint(f"{server.address}/model")) == local(path)


def test_a_truncated_file(server: RangeServer) -> None:
    shard = next(path for path in server.files if path.endswith(".safetensors"))
    server.files[shard] = server.files[shard][:-1000]
    error = failure(f"{server.address}/model")
    assert "truncated" in error.what
    assert shard in error.where
    server.files[shard] = b""
    assert "truncated" in failure(f"{server.address}/model").what


def test_compressed_answers_are_refused(server: RangeServer) -> None:
    server.encoding = "gzip"
    assert "gzip" in failure(f"{server.address}/model").found


def test_a_closed_port_is_reported_at_once(server: RangeServer, waits: list[float]) -> None:
    server.stop()
    error = failure(f"{server.address}/model")
    assert "no connection" in error.what
    assert server.address.removeprefix("http://") in error.found
    assert waits == []


def test_a_server_lost_halfway_is_waited_for(server: RangeServer, waits: list[float]) -> None:
    plan = plan_checkpoint(open_checkpoint(f"{server.address}/model"))
    server.stop()
    huggingface_hub.utils.close_session()
    with pytest.raises(CheckpointError, match="no connection"):
        list(hash_layers(plan))
    assert len(waits) >= ATTEMPTS - 1


def test_a_certificate_nobody_knows(
    directory: Path, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with serving(content(directory), context) as server:
        error = failure(f"{server.address}/model")
        assert "certificate is not trusted" in error.what
        assert server.address.removeprefix("https://") in error.expected
        assert "SSL_CERT_FILE" in error.remedy
        assert waits == []
        authority.cert_pem.write_to_path(tmp_path / "authority.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        huggingface_hub.utils.close_session()
        assert hashes(open_checkpoint(f"{server.address}/model")) == local(directory)


def test_offline_makes_no_request(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "offline" in failure(f"{server.address}/model").what
    assert server.requests == []


@pytest.mark.parametrize("text", ["ftp://host/model", "file:///model", "hf://org/name"])
def test_other_kinds_of_address(text: str) -> None:
    assert "kind that is not read" in failure(text).what


def test_a_loop_of_redirects(server: RangeServer) -> None:
    server.redirects = {"/model/config.json": f"{server.address}/model/config.json"}
    assert "cannot be made" in failure(f"{server.address}/model").what


def test_a_directory_on_this_machine_wins(server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_safetensors(llama(), Path("https:") / "host" / "model")
    open_checkpoint("https://host/model")
    assert server.requests == []


def test_a_page_of_the_hub_is_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.example")
    names = {
        "https://hub.example/org/name": "org/name",
        "https://hub.example/org/name/": "org/name",
        "https://hub.example/org/name/tree/step1000": "org/name@step1000",
        "https://hub.example/org/name/tree/refs/pr/1": "org/name@refs/pr/1",
        "https://hub.example/org/name/resolve/main/model.gguf": None,
        "https://other.example/org/name": None,
        "org/name": None,
    }
    assert {text: ingest.hub.hub_address(text) for text in names} == names


def test_transfers_can_be_stopped() -> None:
    transfers = Transfers()
    stop = transfers.stopped
    started = transfers.submit(lambda event: event.wait(20))
    transfers.stop()
    assert stop.is_set()
    assert not transfers.stopped.is_set()
    started.result(timeout=20)
