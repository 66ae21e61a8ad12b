"""Checkpoints by hub name, against a hub on localhost."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.utils._http
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import ingest.ranged_file
import ingest.transfers
from cli import main
from ingest.hub import is_hub_name
from tests.hub_server import HubServer, running_hub

ROOT = Path(__file__).resolve().parents[1]
NAME = "org/tiny"
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 2, 32, 4, 2, 8, 64
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
}
SHARDS = tuple(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
INDEX = "model.safetensors.index.json"
ATTENTION_BYTES = LAYERS * 4 * (2 * HEADS + 2 * KV_HEADS) * HEAD_SIZE * WIDTH


def attention(layer: int, seed: int) -> dict[str, torch.Tensor]:
    """Attention projections of one layer by name, random."""
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    rows, kv_rows = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = {"q_proj": (rows, WIDTH), "k_proj": (kv_rows, WIDTH), "v_proj": (kv_rows, WIDTH), "o_proj": (WIDTH, rows)}
    return {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def rest() -> dict[str, torch.Tensor]:
    """Tensors outside attention."""
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(WIDTH, WIDTH) for layer in range(LAYERS)}
    return tensors | {"model.embed_tokens.weight": torch.ones(VOCABULARY, WIDTH)}


def config_file() -> dict[str, bytes]:
    return {"config.json": json.dumps(CONFIG).encode()}


def sharded(seed: int = 1) -> dict[str, bytes]:
    """A checkpoint in three shards: attention of one layer each in two, everything else in the third."""
    parts = dict(zip(SHARDS, (attention(0, seed), attention(1, seed), rest()), strict=True))
    index = {"metadata": {}, "weight_map": {name: shard for shard, part in parts.items() for name in part}}
    shards = {shard: safetensors.torch.save(part) for shard, part in parts.items()}
    return {**config_file(), INDEX: json.dumps(index).encode(), **shards, "README.md": b"tiny"}


def whole(seed: int = 1) -> dict[str, torch.Tensor]:
    return attention(0, seed) | attention(1, seed) | rest()


def torch_file(seed: int = 1) -> bytes:
    stream = io.BytesIO()
    torch.save(whole(seed), stream)
    return stream.getvalue()


def gguf_files(directory: Path, name: str, most_tensors: int = 0) -> dict[str, bytes]:
    """The same checkpoint as a GGUF model, split into files of so many tensors unless that is 0."""
    directory.mkdir()
    writer = gguf.GGUFWriter(directory / name, "llama", split_max_tensors=most_tensors)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    for layer in range(LAYERS):
        for name, values in attention(layer, seed=1).items():
            role = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}[name.split(".")[-2][0]]
            writer.add_tensor(f"blk.{layer}.{role}.weight", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def header_bytes(content: bytes) -> int:
    """Size of a safetensors file's header, the length field included."""
    return 8 + int.from_bytes(content[:8], "little")


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running hub that huggingface_hub in this process talks to, an empty cache and an empty working directory."""
    constants = huggingface_hub.constants
    home = tmp_path / "huggingface"
    with running_hub() as server:
        for name, value in {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HEADATLAS_STORE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setattr(ingest.transfers, "pause", lambda *_: None)
        work = tmp_path / "work"
        work.mkdir()
        monkeypatch.chdir(work)
        yield server
        huggingface_hub.utils._http.close_session()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between the hub client's attempts, recorded instead of spent."""
    waits: list[float] = []
    for module in (huggingface_hub.file_download, huggingface_hub.utils._http):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waits.append, time=time.time))
    return waits


def download(*files: str, revision: str = "main") -> None:
    """Put files of the repository into the cache."""
    for file in files:
        huggingface_hub.hf_hub_download(NAME, file, revision=revision)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def run(*arguments: str) -> Result:
    """The command line in this process; an unexpected exception is raised here."""
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: str) -> str:
    """The message of a command that is to fail: one, with status 1 and nothing on stdout."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("error: "))
    return "\n".join(lines[start:])


def stored(model: str = NAME) -> dict[str, object]:
    """What the store says about a model."""
    question = (
        "SELECT m.source, m.revision, m.format, m.content_hash, m.qk_hash, o.bytes_read, "
        "(SELECT list(closure ORDER BY layer, head) FROM heads h WHERE h.model = m.model) AS closures "
        "FROM models m JOIN operators o USING (model) WHERE m.model = $model"
    )
    (row,) = json.loads(succeed("sql", question, "-p", f"model={model}", "--format", "json"))
    return row


def planned(model: str = NAME) -> dict[str, object]:
    return json.loads(succeed("plan", model, "--format", "json"))


def test_ingest_fetches_only_files_with_attention(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add(NAME, sharded())
    succeed("ingest", NAME)
    assert hub.files() == {"config.json", INDEX, SHARDS[0], SHARDS[1]}
    remote = stored()
    assert (remote["source"], remote["revision"], remote["format"]) == (NAME, commit, "safetensors")
    succeed("ingest", str(write(tmp_path / "copy", sharded())))
    local = stored("copy")
    assert local["revision"] is None
    for fact in ("content_hash", "qk_hash", "bytes_read", "closures"):
        assert remote[fact] == local[fact]


def test_revision_resolves_to_its_own_commit(hub: HubServer) -> None:
    commits = hub.add(NAME, sharded(1)), hub.add(NAME, sharded(2), "step1000")
    names = NAME, f"{NAME}@step1000"
    for name in names:
        succeed("ingest", name)
    main_facts, step_facts = (stored(name) for name in names)
    assert (main_facts["revision"], step_facts["revision"]) == commits
    for fact in ("content_hash", "qk_hash", "closures"):
        assert main_facts[fact] != step_facts[fact]


def test_only_small_files_are_kept(hub: HubServer) -> None:
    hub.add(NAME, sharded())
    succeed("ingest", NAME)
    snapshots = Path(huggingface_hub.constants.HF_HUB_CACHE).glob("*/snapshots/*/*")
    assert {path.name for path in snapshots} == {"config.json", INDEX}


def test_a_downloaded_model_needs_no_request(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, sharded())
    succeed("ingest", NAME)
    assert hub.requests
    download("config.json", INDEX, *SHARDS)
    hub.requests.clear()
    succeed("ingest", NAME, "--name", "again")
    assert hub.requests == []
    hub.stop()
    go_offline(monkeypatch)
    succeed("ingest", NAME, "--name", "offline")
    assert stored("offline") == stored("again") == stored()


@pytest.mark.parametrize("revision", ["step1000", "refs/pr/1", "commit"])
def test_cached_revision_is_found_again(hub: HubServer, monkeypatch: pytest.MonkeyPatch, revision: str) -> None:
    commit = hub.add(NAME, {**config_file(), "pytorch_model.bin": torch_file()}, revision)
    name = f"{NAME}@{commit if revision == 'commit' else revision}"
    first = planned(name)
    assert first["revision"] == commit
    hub.requests.clear()
    assert planned(name) == first
    go_offline(monkeypatch)
    assert planned(name) == first
    assert hub.requests == []


def test_cached_branch_stays_at_its_commit(hub: HubServer) -> None:
    first = hub.add(NAME, sharded(1))
    download("config.json", INDEX, *SHARDS)
    second = hub.add(NAME, sharded(2))
    hub.requests.clear()
    assert planned()["revision"] == first
    assert hub.requests == []
    assert planned(f"{NAME}@{second}")["revision"] == second


def test_branch_without_weights_in_the_cache_is_followed(hub: HubServer) -> None:
    hub.add(NAME, sharded(1))
    succeed("ingest", NAME)
    second = hub.add(NAME, sharded(2))
    assert planned()["revision"] == second


def test_half_downloaded_model_is_completed_by_ranges(hub: HubServer) -> None:
    hub.add(NAME, sharded())
    download("config.json", INDEX, SHARDS[0])
    hub.requests.clear()
    succeed("ingest", NAME)
    assert hub.files() == {SHARDS[1]}
    assert stored()["bytes_read"] == ATTENTION_BYTES


def test_offline_without_cache_is_one_error(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, sharded())
    go_offline(monkeypatch)
    message = fail("ingest", NAME)
    assert "offline" in message
    assert "not in the local hub cache" in message
    assert hub.requests == []


def test_offline_with_headers_only_says_which_file_is_missing(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, sharded())
    succeed("plan", NAME)
    hub.requests.clear()
    go_offline(monkeypatch)
    message = fail("ingest", NAME)
    assert "offline" in message
    assert SHARDS[0] in message
    assert hub.requests == []


def test_plan_fetches_headers_only(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest.ranged_file, "HEAD", 8)
    files = sharded()
    hub.add(NAME, files)
    plan = planned()
    assert hub.sent(".safetensors") == sum(header_bytes(files[shard]) for shard in SHARDS[:2])
    assert hub.sent(".safetensors") < sum(len(files[shard]) for shard in SHARDS[:2]) / 10
    assert SHARDS[2] not in hub.files()
    assert plan["bytes_to_read"] == ATTENTION_BYTES
    succeed("ingest", NAME)
    assert stored()["bytes_read"] == plan["bytes_to_read"]


def test_plan_of_one_file_fetches_its_header_only(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest.ranged_file, "HEAD", 8)
    content = safetensors.torch.save(whole())
    hub.add(NAME, {**config_file(), "model.safetensors": content})
    assert planned()["bytes_to_read"] == ATTENTION_BYTES
    assert hub.sent(".safetensors") == header_bytes(content)


def test_server_without_ranges_gives_the_same_plan(hub: HubServer, tmp_path: Path) -> None:
    hub.add(NAME, sharded())
    hub.ignore_range = True
    local = planned(str(write(tmp_path / "copy", sharded())))
    remote = planned()
    assert any(request.range and request.status == 200 for request in hub.requests)
    for plan in (local, remote):
        del plan["source"], plan["revision"]
        for tensor in plan["tensor_list"]:
            tensor["file"] = Path(tensor["file"]).name
    assert remote == local


def test_token_is_sent(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, sharded())
    hub.private.add(NAME)
    hub.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    succeed("ingest", NAME)
    assert {request.token for request in hub.requests} == {"secret"}


def test_token_stays_on_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sharded()
    hub.add(NAME, files)
    hub.tokens.add("secret")
    hub.separate_storage = True
    monkeypatch.setattr(ingest.ranged_file, "HEAD", 8)
    monkeypatch.setenv("HF_TOKEN", "secret")
    succeed("plan", NAME)
    on_storage = [request for request in hub.requests if request.path.startswith("/blobs/")]
    assert sum(request.sent for request in on_storage) == sum(header_bytes(files[shard]) for shard in SHARDS[:2])
    succeed("ingest", NAME)
    on_storage = [request for request in hub.requests if request.path.startswith("/blobs/")]
    assert {request.token for request in on_storage} == {None}
    assert {request.token for request in hub.requests if request not in on_storage} == {"secret"}


def test_private_repository_without_token(hub: HubServer) -> None:
    hub.add(NAME, sharded())
    hub.private.add(NAME)
    message = fail("ingest", NAME)
    assert "no such repository, or no permission to see it" in message
    assert "HF_TOKEN" in message


def test_unknown_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, sharded())
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert "does not know the token" in fail("ingest", NAME)


@pytest.mark.parametrize("token", [None, "secret"])
def test_gated_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    hub.add(NAME, sharded())
    hub.gated.add(NAME)
    if token:
        hub.tokens.add(token)
        monkeypatch.setenv("HF_TOKEN", token)
    message = fail("ingest", NAME)
    assert "gated" in message
    assert (
        f"accept the model's terms on the hub, then set HF_TOKEN to a token of that account: {hub.endpoint}/{NAME}"
        in message
    )


def test_missing_repository(hub: HubServer) -> None:
    message = fail("plan", "org/absent")
    assert "no such repository" in message
    assert "org/absent" in message


def test_missing_revision(hub: HubServer) -> None:
    hub.add(NAME, sharded())
    message = fail("ingest", f"{NAME}@absent")
    assert "no such revision" in message
    assert f"{NAME}@absent" in message


def test_missing_shard(hub: HubServer) -> None:
    files = sharded()
    del files[SHARDS[1]]
    hub.add(NAME, files)
    message = fail("ingest", NAME)
    assert "lacks a file" in message
    assert SHARDS[1] in message


@pytest.mark.parametrize(
    ("status", "words"),
    [(403, "may not read"), (429, "fewer requests"), (500, "answered with an error"), (503, "answered with an error")],
)
@pytest.mark.parametrize("refused", ["refuse_info", "refuse_files"])
def test_refused_request(hub: HubServer, no_waiting: list[float], refused: str, status: int, words: str) -> None:
    hub.add(NAME, sharded())
    setattr(hub, refused, status)
    message = fail("ingest", NAME)
    assert words in message
    assert str(status) in message
    assert sum(no_waiting) < 60


def test_busy_hub_is_asked_again_when_it_says(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ingest.transfers, "pause", lambda seconds, _: waits.append(seconds))
    hub.add(NAME, sharded())
    hub.busy = [(429, "9"), (503, "4")]
    succeed("plan", NAME)
    assert waits == [9, 4]
    hub.busy = [(429, "2")]
    succeed("ingest", f"{NAME}@main")
    assert waits == [9, 4, 2]


def test_commit_that_does_not_hold_still(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest.ranged_file, "HEAD", 1024)
    commit = hub.add(NAME, sharded(1))
    prefetch = ingest.ranged_file.RangedFile.prefetch

    def change(*arguments: object) -> None:
        hub.repositories[NAME].commits[commit] = sharded(2)
        prefetch(*arguments)

    monkeypatch.setattr(ingest.ranged_file.RangedFile, "prefetch", change)
    assert "changed while it was read" in fail("ingest", NAME)


def test_lost_storage_is_named(hub: HubServer) -> None:
    hub.add(NAME, sharded())
    hub.separate_storage = True
    succeed("plan", NAME)
    hub._storage.stop()
    message = fail("plan", NAME)
    assert "no connection to the server" in message
    assert hub.storage.removeprefix("http://") in message


def test_address_of_a_page(hub: HubServer) -> None:
    commit = hub.add(NAME, sharded())
    assert planned(f"{hub.endpoint}/{NAME}")["revision"] == commit
    assert planned(f"{hub.endpoint}/{NAME}/tree/{commit}")["source"] == f"{NAME}@{commit}"


def test_address_of_one_file_takes_the_token(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = gguf_files(tmp_path / "model", "tiny.gguf")
    hub.add(NAME, {**files, "other.gguf": files["tiny.gguf"]})
    hub.private.add(NAME)
    hub.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "name the file itself" in fail("plan", NAME)
    assert planned(f"{hub.endpoint}/{NAME}/resolve/main/tiny.gguf")["layers"] == LAYERS


def test_refused_headers(hub: HubServer) -> None:
    hub.add(NAME, sharded())
    succeed("plan", NAME)
    hub.refuse_files = 429
    assert "fewer requests" in fail("plan", NAME)


def test_address_of_something_else(hub: HubServer) -> None:
    hub.page = "<html>Welcome</html>"
    message = fail("ingest", NAME)
    assert "not the answer of a hub" in message
    assert "HF_ENDPOINT" in message


def test_local_path_wins(hub: HubServer) -> None:
    hub.add(NAME, sharded(1))
    write(Path(NAME), sharded(2))
    succeed("ingest", NAME)
    assert hub.requests == []
    assert stored("tiny")["revision"] is None


@pytest.mark.parametrize("name", ["./absent", "../absent", "models/.absent", "/absent/model", "absent"])
def test_paths_are_no_hub_names(hub: HubServer, name: str) -> None:
    assert not is_hub_name(name)
    assert "no such checkpoint" in fail("plan", name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["org/name@../../outside", "org/name@refs/../x", "org/name@", "org/name@.hidden"])
def test_revisions_stay_in_their_folder(name: str) -> None:
    assert not is_hub_name(name)


def test_unreachable_hub(hub: HubServer) -> None:
    hub.stop()
    started = time.perf_counter()
    message = fail("ingest", NAME)
    assert time.perf_counter() - started < 5
    assert "connection to the hub failed" in message
    assert "HF_ENDPOINT" in message


def test_hub_lost_before_a_download(hub: HubServer, no_waiting: list[float]) -> None:
    shards, index = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)], "pytorch_model.bin.index.json"
    weight_map = json.dumps({"weight_map": {name: shards["layers.1" in name] for name in whole()}}).encode()
    hub.add(NAME, {**config_file(), index: weight_map, shards[0]: torch_file(), shards[1]: torch_file()})
    download("config.json", index, shards[0])
    hub.stop()
    message = fail("plan", NAME)
    assert "connection to the hub failed" in message
    assert shards[1] in message


def test_failed_transfer_outside_http(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object, **__: object) -> str:
        raise RuntimeError("Task error: File reconstruction error")

    hub.add(NAME, sharded())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", break_off)
    message = fail("plan", NAME)
    assert "the download failed" in message
    assert "Task error" in message


def test_broken_download_leaves_no_model(hub: HubServer, no_waiting: list[float]) -> None:
    files = sharded()
    hub.add("org/other", {**config_file(), "model.safetensors": safetensors.torch.save(whole())})
    succeed("ingest", "org/other")
    hub.add(NAME, files)
    hub.break_at[SHARDS[1]] = len(files[SHARDS[1]]) // 2
    message = fail("ingest", NAME)
    assert "the connection to the server broke off" in message
    assert hub.endpoint.removeprefix("http://") in message
    assert SHARDS[1] in message
    assert [row["model"] for row in json.loads(succeed("models", "--format", "json"))] == ["org/other"]
    assert "ok: 1 model" in succeed("verify")
    assert list(Path("atlas/staging").iterdir()) == []
    hub.break_at.clear()
    succeed("ingest", NAME)
    assert stored()["bytes_read"] == ATTENTION_BYTES


def test_unwritable_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.add(NAME, sharded())
    (tmp_path / "file").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    message = fail("ingest", NAME)
    assert "local hub cache cannot be used" in message
    assert "HF_HUB_CACHE" in message


def test_torch_repository(hub: HubServer) -> None:
    commit = hub.add(NAME, {**config_file(), "pytorch_model.bin": torch_file()})
    result = run("ingest", NAME)
    assert "pytorch_model.bin was downloaded whole" in result.stderr
    assert f"{hub.sent('.json') + hub.sent('.bin'):,} moved over the network" in result.stdout
    facts = stored()
    assert (facts["source"], facts["format"], facts["revision"]) == (NAME, "torch", commit)
    assert facts["bytes_read"] == ATTENTION_BYTES


def test_gguf_repository(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(NAME, {**gguf_files(tmp_path / "model", "tiny.gguf"), "README.md": b"tiny"})
    succeed("ingest", NAME)
    facts = stored()
    assert (facts["source"], facts["format"], facts["revision"]) == (NAME, "gguf", commit)
    assert facts["bytes_read"] == ATTENTION_BYTES
    download("tiny.gguf")
    hub.requests.clear()
    go_offline(monkeypatch)
    assert planned()["revision"] == commit
    assert hub.requests == []


def test_split_gguf_repository(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = gguf_files(tmp_path / "model", "tiny.gguf", most_tensors=3)
    assert len(files) == -(-4 * LAYERS // 3) > 1
    commit = hub.add(NAME, files)
    huggingface_hub.hf_hub_download(NAME, next(iter(files)))
    succeed("ingest", NAME)
    facts = stored()
    assert (facts["format"], facts["revision"], facts["bytes_read"]) == ("gguf", commit, ATTENTION_BYTES)
    download(*files)
    hub.requests.clear()
    go_offline(monkeypatch)
    assert planned()["revision"] == commit
    assert hub.requests == []


def test_partial_snapshot_is_not_taken_for_the_whole(hub: HubServer) -> None:
    hub.add(NAME, sharded())
    for name in ("config.json", SHARDS[0]):
        huggingface_hub.hf_hub_download(NAME, name)
    assert planned()["layers"] == LAYERS


def test_environment_rules_the_hub_client(hub: HubServer, tmp_path: Path) -> None:
    hub.add(NAME, sharded())
    hub.private.add(NAME)
    hub.tokens.add("secret")
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN": "secret",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }

    def command(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "cli.py"), *arguments],
            env=environment | changes,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    refused = command("plan", NAME, HF_HUB_OFFLINE="1")
    assert refused.returncode == 1
    assert str(tmp_path / "cache") in refused.stderr
    assert hub.requests == []
    assert command("ingest", NAME).returncode == 0
    assert {request.token for request in hub.requests} == {"secret"}
    for file in ("config.json", INDEX, *SHARDS):
        huggingface_hub.hf_hub_download(NAME, file, cache_dir=tmp_path / "cache", token="secret")
    hub.stop()
    offline = command("plan", NAME, "--format", "json", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert json.loads(offline.stdout)["revision"] == stored()["revision"]
