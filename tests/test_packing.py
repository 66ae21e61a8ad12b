"""A store as one file: the same bytes each time, every damage found, nothing outside touched."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli import main
from query import open_atlas
from stats.errors import StoreError
from store.atlas import AtlasStore
from store.file_names import check_name, check_together
from store.integrity import verify
from store.merging import merge
from store.pack_file import COMMENT_LENGTH, CONTENTS, MARK, Pack, check
from store.packing import pack
from tests.making_store import DATA, answers

pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[["Parts"], None]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(DATA / "store-format-1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "atlas"


@pytest.fixture(scope="module")
def packed(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("packed") / "all.headatlas"
    pack(kept, file)
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


class Parts:
    """A pack taken apart, to be put together again with something wrong in it."""

    def __init__(self, file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            self.entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        self.kinds: dict[str, dict[str, Any]] = {}
        self.contents = json.loads(self.entries.pop(0)[1])

    def put(self, name: str, data: bytes, listed: bool = True) -> None:
        self.entries = [(other, text) for other, text in self.entries if other != name]
        self.entries.append((name, data))
        if listed:
            self.contents["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def drop(self, name: str, listed: bool = True) -> None:
        self.entries = [(other, text) for other, text in self.entries if other != name]
        if listed:
            del self.contents["files"][name]

    def find(self, end: str) -> str:
        return next(name for name, _ in self.entries if name.endswith(end))

    def write(self, file: Path) -> Path:
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in [(CONTENTS, json.dumps(self.contents).encode()), *self.entries]:
                entry = zipfile.ZipInfo(name)
                for attribute, value in self.kinds.get(name, {}).items():
                    setattr(entry, attribute, value)
                archive.writestr(entry, data)
            archive.comment = MARK + b"0" * 64
        return sign(file)


def sign(file: Path) -> Path:
    """Give a file the checksum at its end that belongs to it."""
    data = file.read_bytes()[:-COMMENT_LENGTH]
    file.write_bytes(data + MARK + hashlib.sha256(data).hexdigest().encode())
    return file


def test_the_same_content_gives_the_same_bytes(kept: Path, packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(kept, tmp_path / "elsewhere"))
    pack(copy, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_pack_unzipped_by_hand_is_a_store(kept: Path, packed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "atlas")
    assert answers(tmp_path / "atlas") == answers(kept)
    for path in (path for path in (kept / "arrays.zarr").rglob("*") if path.is_file()):
        assert (tmp_path / "atlas" / path.relative_to(kept)).read_bytes() == path.read_bytes()
    assert list(verify(AtlasStore.open(tmp_path / "atlas"))) == []


def test_unpacking_gives_the_store_back(kept: Path, packed: Path, tmp_path: Path) -> None:
    assert run("pack", "--check", packed).stdout.startswith("ok: 2 models, ")
    result = run("unpack", packed, "--store", tmp_path / "atlas")
    assert result.exit_code == 0, result.output
    store = AtlasStore.open(tmp_path / "atlas")
    assert list(verify(store)) == []
    assert answers(store.root) == answers(kept)
    there = {path.relative_to(kept): path.read_bytes() for path in kept.glob("arrays.zarr/**/*") if path.is_file()}
    here = {
        path.relative_to(store.root): path.read_bytes()
        for path in store.root.glob("arrays.zarr/**/*")
        if path.is_file()
    }
    assert here == there
    assert (store.root / "queries" / "count-heads.sql").read_bytes() == (
        kept / "queries" / "count-heads.sql"
    ).read_bytes()
    assert "unchanged" in run("unpack", packed, "--store", store.root).stdout


def test_some_models_only(kept: Path, tmp_path: Path) -> None:
    file = tmp_path / "one"
    assert run("pack", file, "tiny-bert", "--store", kept).exit_code == 0
    assert check(file).models == ("tiny-bert",)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "atlas")
    with open_atlas(tmp_path / "atlas") as atlas:
        assert atlas.sql("SELECT DISTINCT model FROM heads").rows() == [("tiny-bert",)]
        assert "wide" not in atlas.sql("FROM heads LIMIT 1").columns
    assert run("pack", file, "tiny-brt", "--store", kept).exit_code == 1


def test_a_damaged_store_is_not_packed(kept: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(kept, tmp_path / "atlas"))
    file = next(iter(sorted(store.rglob("core/c/*/*/*/*"))))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="checksum differs"):
        pack(store, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["atlas"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(packed: Path, tmp_path: Path, place: float, bit: int) -> None:
    data = bytearray(packed.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    file = tmp_path / "flipped"
    file.write_bytes(bytes(data))
    with pytest.raises(StoreError):
        check(file)


@pytest.mark.parametrize("kept_bytes", [0, 3, 4, 100, -1, -22, -COMMENT_LENGTH, -COMMENT_LENGTH - 30])
def test_a_cut_file_is_found(packed: Path, tmp_path: Path, kept_bytes: int) -> None:
    (tmp_path / "cut").write_bytes(packed.read_bytes()[:kept_bytes])
    with pytest.raises(StoreError):
        check(tmp_path / "cut")


@pytest.mark.parametrize("added", [b"x", b"\x00" * 100, MARK + b"0" * 64])
def test_anything_added_is_found(packed: Path, tmp_path: Path, added: bytes) -> None:
    for data in (packed.read_bytes() + added, added + packed.read_bytes()):
        (tmp_path / "longer").write_bytes(data)
        with pytest.raises(StoreError):
            check(tmp_path / "longer")


def outside(name: str) -> Change:
    return lambda parts: parts.put(name, b"evil")


def as_kind(**attributes: Any) -> Change:
    def change(parts: Parts) -> None:
        parts.kinds[parts.find("sigma/zarr.json")] = attributes

    return change


def twice(parts: Parts) -> None:
    name = parts.find("sigma/zarr.json")
    parts.entries.append((name, dict(parts.entries)[name]))


def case_clash(parts: Parts) -> None:
    parts.put("queries/a.sql", b"x")
    parts.put("queries/A.sql", b"y")


def file_and_directory(parts: Parts) -> None:
    parts.put("queries/a.sql", b"x")
    parts.put("queries/a.sql/b", b"y")


def larger_than_listed(parts: Parts) -> None:
    parts.put(parts.find("sigma/zarr.json"), b"0" * 10**6, listed=False)


def smaller_than_listed(parts: Parts) -> None:
    parts.put(parts.find("sigma/zarr.json"), b"", listed=False)


def other_bytes(parts: Parts) -> None:
    name = parts.find("sigma/zarr.json")
    parts.put(name, dict(parts.entries)[name].replace(b"a", b"b"), listed=False)


def resealed(parts: Parts) -> None:
    name = parts.find("sigma/zarr.json")
    parts.put(name, dict(parts.entries)[name].replace(b"a", b"b"))


def listed_badly(value: Any) -> Change:
    return lambda parts: parts.contents["files"].update({parts.find("sigma/zarr.json"): value})


def told(**facts: Any) -> Change:
    return lambda parts: parts.contents.update(facts)


def model(**facts: Any) -> Change:
    return lambda parts: parts.contents["models"][0].update(facts)


WRONG: dict[str, Change] = {
    "a path outside": outside("../evil"),
    "a path outside, deeper": outside("queries/../../evil"),
    "an absolute path": outside("/tmp/evil"),
    "a drive": outside("C:/evil"),
    "a backslash": outside("queries\\evil.sql"),
    "a device": outside("queries/con.sql"),
    "a dot at the end": outside("queries/a.sql."),
    "an empty part": outside("queries//a.sql"),
    "a control character": outside("queries/a\x01.sql"),
    "something else": outside("evil.py"),
    "a lock file": outside("write.lock"),
    "something staged": outside("staging/x"),
    "an array of no model": outside("arrays.zarr/other/zarr.json"),
    "a symlink": as_kind(external_attr=0o120777 << 16),
    "a device node": as_kind(external_attr=0o060644 << 16),
    "compressed": as_kind(compress_type=zipfile.ZIP_DEFLATED),
    "twice": twice,
    "case": case_clash,
    "file and directory": file_and_directory,
    "larger than listed": larger_than_listed,
    "smaller than listed": smaller_than_listed,
    "other bytes": other_bytes,
    "other bytes, listed so": resealed,
    "a file less": lambda parts: parts.drop(parts.find("sigma/zarr.json"), listed=False),
    "a file less, not listed": lambda parts: parts.drop(parts.find("sigma/zarr.json")),
    "a manifest less": lambda parts: parts.drop(parts.find(".raw.json")),
    "no catalogue": lambda parts: parts.drop("catalog.duckdb"),
    "a manifest emptied": lambda parts: parts.put(parts.find(".raw.json"), b"{}"),
    "not listed": lambda parts: parts.put("queries/b.sql", b"x", listed=False),
    "no size": listed_badly({"sha256": "0" * 64}),
    "a negative size": listed_badly({"bytes": -1, "sha256": "0" * 64}),
    "a size of the moon": listed_badly({"bytes": 2**60, "sha256": "0" * 64}),
    "no checksum": listed_badly({"bytes": 1, "sha256": "xyz"}),
    "no seal": listed_badly(None),
    "files that are none": told(files=[1]),
    "models that are none": told(models=[1]),
    "no models": told(models=None),
    "a group outside": model(array_group="../../evil"),
    "another name": model(model="someone"),
    "no units": model(units=[]),
    "units that are none": model(units=["../raw"]),
    "a unit twice named": model(units=["raw", "raw", 3]),
    "a newer pack": told(headatlas_pack=9, headatlas_needs="9.9"),
    "a newer format": told(headatlas_format=9, headatlas_needs="9.9"),
    "an older format": told(headatlas_format=0),
    "a format that is none": told(headatlas_format="1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_in_a_well_signed_pack_is_found(packed: Path, tmp_path: Path, kind: str) -> None:
    parts = Parts(packed)
    WRONG[kind](parts)
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.warns(UserWarning, match="Duplicate name") if kind == "twice" else pytest.MonkeyPatch.context():
        file = parts.write(folder / "pack")
    with pytest.raises(StoreError):
        check(file)
    result = run("unpack", file, "--store", tmp_path / "deep" / "atlas")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert run("pack", "--check", file).exit_code == 1


def test_taken_apart_and_put_together_a_pack_is_sound(packed: Path, tmp_path: Path) -> None:
    assert check(Parts(packed).write(tmp_path / "same")).models == ("tiny llama", "tiny-bert")


def test_entries_over_one_another_are_refused(packed: Path, tmp_path: Path) -> None:
    """An entry whose bytes are those of another entry with its header: everything else about both is right."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr(zipfile.ZipInfo("queries/b.sql"), b"inner")
    quoted = inner.getvalue()[: inner.getvalue().index(b"PK\x01\x02")]
    parts = Parts(packed)
    parts.put("queries/b.sql", b"inner")
    parts.drop("queries/b.sql", listed=False)
    parts.put("queries/a.sql", quoted)
    file = tmp_path / "over"
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in [(CONTENTS, json.dumps(parts.contents).encode()), *parts.entries]:
            archive.writestr(zipfile.ZipInfo(name), data)
        with zipfile.ZipFile(io.BytesIO(inner.getvalue())) as other:
            entry = other.infolist()[0]
        outer = archive.getinfo("queries/a.sql")
        entry.header_offset = outer.header_offset + 30 + len(outer.filename)
        archive.filelist.append(entry)
        archive.comment = MARK + b"0" * 64
    with pytest.raises(StoreError, match="over another"):
        check(sign(file))


def test_a_pack_is_merged_as_a_store_is(packed: Path, tmp_path: Path) -> None:
    store = AtlasStore.open_or_create(tmp_path / "atlas")
    with Pack(packed) as place:
        done = list(merge(store, place, ["tiny llama"], {"tiny llama": "theirs"}))
    assert [each.model for each in done] == ["theirs"]
    assert list(verify(store)) == []


def test_a_file_that_cannot_be_written_leaves_nothing(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        pack(kept, tmp_path / "taken")
    with pytest.raises(StoreError, match="cannot be written"):
        pack(kept, tmp_path / "missing" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("name", ["a", "a/b", "ä/zarr.json", "..a", "a..b"])
def test_names_that_are_paths(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("pair", [("a/B", "a/b"), ("ä", "a\u0308"), ("a", "a/b"), ("A/x", "a")])
def test_names_that_are_one_file_somewhere(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"differ in case|both a file"):
        check_together(pair)
