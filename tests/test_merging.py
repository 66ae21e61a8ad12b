"""Taking models of another store: the same bytes and rows, whole or not at all, whatever happens on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from cli import main
from query import open_atlas
from stats.errors import StoreError
from store import catalogue, merging
from store.atlas import AtlasStore, Derivation
from store.derivation import derive, derive_user_statistics, remove_user_statistic
from store.integrity import rebuild, remove, sealed_units, verify
from store.leftovers import leftovers
from store.merging import Merged, merge, merge_questions
from store.offered import OtherStore
from store.tables import TABLES
from store.user_statistics import load, statistic
from tests import checkpoints
from tests.ingesting import ingest_into

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTION = "-- question: how many heads\nSELECT count(*) AS heads FROM heads\n"


@statistic(meaning="singular values above half the largest", values="1 to d_head", sql_type="INTEGER")
def wide(sigma: Any) -> Any:
    return (sigma > sigma[:, :1] / 2).sum(-1)


@pytest.fixture(scope="module")
def theirs(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two models, a null, a capacity, a user's statistic and a question of its own."""
    path = Path(shutil.copytree(sealed_store, tmp_path_factory.mktemp("theirs") / "atlas"))
    store = AtlasStore.open(path)
    derive(store, "llama", "raw", Derivation("scramble", 20, 0, False), torch.device("cpu"), lambda *_: None)
    derive(store, "bert", "raw", Derivation("assignment"), torch.device("cpu"), lambda *_: None)
    derive_user_statistics(store, ["llama"], load(Path(__file__)))
    (path / "queries").mkdir()
    (path / "queries" / "count-heads.sql").write_text(QUESTION, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sealed_mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with another model under the name llama."""
    root = tmp_path_factory.mktemp("mine")
    ingest_into(root / "atlas", checkpoints.save_safetensors(checkpoints.llama(seed=7), root / "m"), "llama")
    return root / "atlas"


@pytest.fixture
def mine(sealed_mine: Path, tmp_path: Path) -> AtlasStore:
    return AtlasStore.open(Path(shutil.copytree(sealed_mine, tmp_path / "mine")))


@pytest.fixture
def empty(tmp_path: Path) -> AtlasStore:
    return AtlasStore.open_or_create(tmp_path / "empty")


def take(store: AtlasStore, other: Path, *models: str, **options: Any) -> list[Merged]:
    return list(merge(store, OtherStore(other), models, **options))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def arrays(store: AtlasStore, model: str) -> dict[str, bytes]:
    """Every file of a model's group by path."""
    group = store.arrays_path / store.model(model).array_group
    return {path.relative_to(group).as_posix(): path.read_bytes() for path in group.rglob("*") if path.is_file()}


def rows(store: AtlasStore, model: str, without: str = "model") -> dict[str, list[tuple[Any, ...]]]:
    """Every row of a model in every table, in the columns that all stores have."""
    found = {}
    with catalogue.reading(store.catalogue_path) as connection:
        for table in TABLES:
            columns = ", ".join(f'"{each.name}"' for each in table.columns if each.name not in ("model", without))
            sql = f'SELECT {columns} FROM "{table.name}" WHERE model = ? ORDER BY ALL'
            found[table.name] = connection.execute(sql, [model]).fetchall()
    return found


def sound(store: AtlasStore) -> None:
    """The store verifies, and its rows are those that a rebuild makes."""
    assert list(verify(store)) == []
    before = {model: rows(store, model) for model in store.models()}
    rebuild(store)
    assert {model: rows(store, model) for model in store.models()} == before


def test_everything_comes_along_byte_by_byte(theirs: Path, empty: AtlasStore) -> None:
    there = AtlasStore.open(theirs)
    done = take(empty, theirs)
    assert [(each.model, each.action, len(each.units)) for each in done] == [
        ("bert", "added", 2),
        ("llama", "added", 5),
    ]
    for model in ("bert", "llama"):
        assert arrays(empty, model) == arrays(there, model)
        assert rows(empty, model) == rows(there, model)
    sound(empty)
    with open_atlas(empty.root) as atlas, open_atlas(theirs) as other:
        query = "SELECT label, operator, wide FROM heads WHERE model = 'llama' ORDER BY ALL"
        assert atlas.sql(query).rows() == other.sql(query).rows()


def test_again_nothing_is_done(theirs: Path, empty: AtlasStore) -> None:
    take(empty, theirs)
    before = empty.catalogue_path.read_bytes()
    assert [each.action for each in take(empty, theirs)] == ["unchanged", "unchanged"]
    assert empty.catalogue_path.read_bytes() == before


def test_a_model_gets_the_operators_and_derivations_it_lacks(theirs: Path, tmp_path: Path) -> None:
    mine = AtlasStore.open_or_create(tmp_path / "mine")
    llama = checkpoints.save_safetensors(checkpoints.llama(layers=3), tmp_path / "tiny-llama")
    ingest_into(mine.root, llama, "llama")
    own = arrays(mine, "llama")
    (done,) = take(mine, theirs, "llama")
    assert done.action == "extended"
    assert sorted(unit.split("-")[0] for unit in done.units) == ["folded", "scramble", "user_wide", "user_wide"]
    there, here = arrays(AtlasStore.open(theirs), "llama"), arrays(mine, "llama")
    assert here.keys() == there.keys()
    for name in here:
        assert here[name] == (own if name in own else there)[name]
    sound(mine)


def test_what_is_derived_from_other_precision_is_left(theirs: Path, tmp_path: Path) -> None:
    mine = AtlasStore.open_or_create(tmp_path / "mine")
    llama = checkpoints.save_safetensors(checkpoints.llama(layers=3), tmp_path / "tiny-llama")
    assert run("ingest", llama, "--name", "llama", "--dtype", "float32", "--store", mine.root).exit_code == 0
    (done,) = take(mine, theirs, "llama")
    assert sorted(unit.split("-")[0] for unit in done.units) == ["folded", "user_wide"]
    assert any("another precision" in note for note in done.notes)
    sound(mine)


def test_own_draws_are_kept(theirs: Path, empty: AtlasStore) -> None:
    take(empty, theirs)
    derive(empty, "llama", "raw", Derivation("scramble", 10, 5, False), torch.device("cpu"), lambda *_: None)
    before = rows(empty, "llama")["nulls"]
    done = take(empty, theirs, "llama")[0]
    assert done.action == "unchanged"
    assert any("kept as it is here" in note for note in done.notes)
    assert rows(empty, "llama")["nulls"] == before


def test_other_content_is_refused_for_all_at_once_and_can_be_renamed(theirs: Path, mine: AtlasStore) -> None:
    ingest_into(mine.root, checkpoints.save_safetensors(checkpoints.bert(seed=3), mine.root.parent / "b"), "bert")
    before = mine.catalogue_path.read_bytes()
    with pytest.raises(StoreError, match="other content") as caught:
        take(mine, theirs)
    assert caught.value.found is not None
    assert "bert: content" in caught.value.found
    assert "llama: content" in caught.value.found
    assert mine.catalogue_path.read_bytes() == before
    own = rows(mine, "llama")
    done = take(mine, theirs, renames={"llama": "llama=2", "bert": "theirs' bert"})
    assert [(each.model, each.source) for each in done] == [("theirs' bert", "bert"), ("llama=2", "llama")]
    assert rows(mine, "llama") == own
    there = AtlasStore.open(theirs)
    assert rows(mine, "llama=2", "array_group") == rows(there, "llama", "array_group")
    here, other = arrays(mine, "llama=2"), arrays(there, "llama")
    differing = {name for name in here.keys() | other.keys() if here.get(name) != other.get(name)}
    assert differing == {"zarr.json"}
    assert json.loads(here["zarr.json"])["attributes"] == json.loads(other["zarr.json"])["attributes"] | {
        "model": "llama=2"
    }
    sound(mine)


def test_a_model_can_be_replaced(theirs: Path, mine: AtlasStore) -> None:
    assert [each.action for each in take(mine, theirs, replace_existing=True)] == ["added", "replaced"]
    assert rows(mine, "llama") == rows(AtlasStore.open(theirs), "llama")
    assert len([path for path in mine.arrays_path.iterdir() if path.is_dir()]) == 2
    sound(mine)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\x00b"])
def test_names_that_nobody_can_read_are_refused(theirs: Path, empty: AtlasStore, name: str) -> None:
    with pytest.raises(StoreError, match="names that models cannot have"):
        take(empty, theirs, renames={"llama": name})


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/x", "a'; DROP TABLE heads; --", 'x" OR 1=1', "%s{0}$a", "C:\\x", "ä" * 300, "."]
)
def test_injection_in_a_name_is_only_a_name(theirs: Path, empty: AtlasStore, tmp_path: Path, name: str) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    take(empty, theirs, "llama", renames={"llama": name})
    assert list(empty.models()) == [name]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    sound(empty)


def test_two_models_do_not_get_one_name(theirs: Path, empty: AtlasStore) -> None:
    with pytest.raises(StoreError, match="same name"):
        take(empty, theirs, renames={"llama": "bert"})
    assert not empty.models()


def test_an_unknown_model_is_named(theirs: Path, empty: AtlasStore) -> None:
    with pytest.raises(StoreError, match="did you mean llama"):
        take(empty, theirs, "lama")


def test_statistics_declared_otherwise_are_refused(theirs: Path, mine: AtlasStore, tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text(
        "from store.user_statistics import statistic\n@statistic(meaning='other', values='any')\n"
        "def wide(sigma):\n    return sigma[:, 0]\n",
        encoding="utf-8",
    )
    derive_user_statistics(mine, ["llama"], load(file))
    with pytest.raises(StoreError, match="declared in different ways"):
        take(mine, theirs, renames={"llama": "two"})
    done = take(mine, theirs, renames={"llama": "two"}, without=["wide"])
    assert [len(each.units) for each in done] == [2, 3]
    sound(mine)


def test_questions_come_along_where_they_do_not_clash(theirs: Path, empty: AtlasStore) -> None:
    assert merge_questions(empty, OtherStore(theirs)) == (["count-heads.sql"], [])
    path = empty.root / "queries" / "count-heads.sql"
    assert path.read_text() == QUESTION
    assert merge_questions(empty, OtherStore(theirs)) == ([], [])
    path.write_text("mine")
    assert merge_questions(empty, OtherStore(theirs)) == ([], ["count-heads.sql"])
    assert path.read_text() == "mine"


def damage_array(path: Path) -> None:
    file = next(iter(sorted(path.glob("arrays.zarr/llama*/raw/decoder/sigma/c/*/*/*"))))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def lose_array(path: Path) -> None:
    next(iter(sorted(path.glob("arrays.zarr/llama*/raw/decoder/sigma/c/*/*/*")))).unlink()


def lengthen_array(path: Path) -> None:
    with next(iter(sorted(path.glob("arrays.zarr/llama*/raw/decoder/sigma/c/*/*/*")))).open("ab") as stream:
        stream.write(b"x")


def shorten_array(path: Path) -> None:
    file = next(iter(sorted(path.glob("arrays.zarr/llama*/raw/decoder/sigma/c/*/*/*"))))
    file.write_bytes(file.read_bytes()[:-1])


def _edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        manifest = next(iter(sorted(path.glob("manifests/*llama*.raw.json"))))
        content = json.loads(manifest.read_text())
        content.pop("seal", None)
        change(content)
        manifest.write_text(json.dumps(content))

    return damage


def _listing(name: str) -> Callable[[Path], None]:
    seal = {"bytes": 3, "sha256": "0" * 64}
    return _edited(lambda content: content["files"].update({name: seal}))


DAMAGE = {
    "a bit": damage_array,
    "a lost chunk": lose_array,
    "a longer chunk": lengthen_array,
    "a shorter chunk": shorten_array,
    "no manifest": lambda path: next(iter(path.glob("manifests/*llama*.raw.json"))).unlink(),
    "no JSON": lambda path: next(iter(path.glob("manifests/*llama*.raw.json"))).write_text("{"),
    "a path outside": _listing("raw/../../../../outside"),
    "an absolute path": _listing("/tmp/outside"),
    "a path of another unit": _listing("folded/zarr.json.x"),
    "a list": lambda path: next(iter(path.glob("manifests/*llama*.raw.json"))).write_text("[]"),
    "a manifest of another": _edited(lambda content: content.update(unit="folded")),
    "no size": _edited(lambda content: content["files"].update({"zarr.json": {"sha256": "0" * 64}})),
    "attributes": lambda path: next(iter(path.glob("arrays.zarr/llama*/zarr.json"))).write_text("{}"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_before_anything_is_published(theirs: Path, empty: AtlasStore, kind: str) -> None:
    other = Path(shutil.copytree(theirs, empty.root.parent / "theirs"))
    DAMAGE[kind](other)
    with pytest.raises(StoreError, match="not as they were sealed"):
        take(empty, other, "llama")
    assert not empty.models()
    assert list(verify(empty)) == []
    assert not (empty.root.parent / "outside").exists()


CASES = ("added", "renamed", "replaced", "extended")


class Crash(BaseException):
    """The process ends here."""


class Dying:
    """Counts changes of the file system and, from one of them on, lets none happen any more."""

    def __init__(self, patched: pytest.MonkeyPatch, last: int) -> None:
        self.last, self.count = last, 0
        for owner, name in (
            (Path, "replace"),
            (Path, "rename"),
            (Path, "unlink"),
            (shutil, "rmtree"),
            (merging, "seal"),
            (merging, "publish_rows"),
        ):
            patched.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count > self.last:
                raise Crash
            return action(*arguments, **options)

        return counted


def steps_of(action: Callable[[], object]) -> int:
    with pytest.MonkeyPatch.context() as patched:
        dying = Dying(patched, 10**9)
        action()
    return dying.count


@pytest.mark.parametrize(
    "every", [pytest.param(12, marks=pytest.mark.slow), 40, pytest.param(1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", CASES)
def test_a_crash_at_any_step_leaves_a_sound_store_and_a_second_run_completes(
    theirs: Path, sealed_mine: Path, tmp_path: Path, case: str, every: int
) -> None:
    base = Path(shutil.copytree(sealed_mine, tmp_path / "base"))
    name = "two" if case == "renamed" else "llama"
    options: dict[str, Any] = {"renames": {"llama": "two"}} if case == "renamed" else {}
    options |= {"replace_existing": True} if case == "replaced" else {}
    if case in ("added", "extended"):
        remove(AtlasStore.open(base), "llama")
    if case == "extended":
        take(AtlasStore.open(base), theirs, "llama")
        remove_user_statistic(AtlasStore.open(base), "wide")
    wanted = rows(AtlasStore.open(theirs), "llama", "array_group")["heads"]
    before = {model: rows(AtlasStore.open(base), model) for model in AtlasStore.open(base).models()}

    def attempt(path: Path) -> None:
        take(AtlasStore.open(path), theirs, "llama", **options)

    counted = Path(shutil.copytree(base, tmp_path / "counted"))
    total = steps_of(lambda: attempt(counted))
    assert total > 8
    for last in range(CASES.index(case) * every // len(CASES), total, every):
        path = Path(shutil.copytree(base, tmp_path / f"crash-{last}"))
        store = AtlasStore.open(path)
        with pytest.MonkeyPatch.context() as patched:
            Dying(patched, last)
            with pytest.raises(Crash):
                attempt(path)
        wrong = [each for each in verify(store) if each.kind not in ("leftover", "unfinished")]
        assert wrong == [], (last, wrong)
        for model in store.models():
            now = rows(store, model)
            assert now == before.get(model) or (model == name and now["heads"] == wanted), (last, model)
        attempt(path)
        assert rows(store, name)["heads"] == wanted
        with open_atlas(path) as atlas:
            assert atlas.sql("SELECT count(wide) FROM heads WHERE model = $model", {"model": name}).item() == 24
        left = [each.where for each in leftovers(store, store.models(), sealed_units(store))]
        assert [where for where in left if "staging" not in where and ".partial" not in where] == [], last
        shutil.rmtree(path)
    assert list(verify(AtlasStore.open(counted))) == []


def test_the_command_says_what_it_did(theirs: Path, mine: AtlasStore) -> None:
    refused = run("merge", theirs, "--store", mine.root)
    assert refused.exit_code == 1
    assert "--rename OLD=NEW" in refused.stderr
    result = run("merge", theirs, "--store", mine.root, "--rename", "llama=llama two")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "bert: added, 2 units",
        "llama two (there llama): added, 5 units",
        "questions: count-heads.sql",
    ]
    assert run("merge", theirs, "--store", mine.root, "--rename", "llama").exit_code == 2
    assert run("ask", "count-heads", "--store", mine.root).exit_code == 0


def test_a_store_into_itself_changes_nothing(theirs: Path) -> None:
    before = (theirs / "catalog.duckdb").read_bytes()
    assert {each.action for each in take(AtlasStore.open(theirs), theirs)} == {"unchanged"}
    assert (theirs / "catalog.duckdb").read_bytes() == before
