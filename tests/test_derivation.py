"""Nulls and capacities derived from a store: kept, extended, replaced, checked and made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.stats
import torch
from click.testing import CliRunner, Result

import store.derivation
from cli import main
from query import Atlas, open_atlas
from stats.capacity import attained_closure, oriented_closure
from stats.errors import StoreError
from stats.scramble import scramble_draws
from store.atlas import AtlasStore, Derivation
from store.derivation import derive
from store.integrity import rebuild, remove, verify
from tests import checkpoints
from tests.ingesting import ingest_into

CPU = torch.device("cpu")
DRAWS, SEED = 200, 7
SCRAMBLE = Derivation("scramble", n_draws=DRAWS, seed=SEED, independent=False)
ASSIGNMENT = Derivation("assignment")
RIEMANNIAN = Derivation("riemannian", seed=SEED, random_starts=1)
KEY = ("model", "operator", "stack", "layer", "head")


def run(path: Path, wanted: Derivation, model: str = "llama", operator: str = "raw") -> None:
    derive(AtlasStore.open(path), model, operator, wanted, CPU, lambda *_: None)


def command(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--store", str(path)])


def units(path: Path) -> list[str]:
    stored = AtlasStore.open(path).models()["llama"]
    group = AtlasStore.open(path).arrays_path / stored.array_group
    assert {entry.name for entry in group.iterdir() if entry.is_dir()} == {*stored.gain_hash, *stored.derivations}
    return sorted(stored.derivations)


def arrays(path: Path, kind: str, name: str) -> np.ndarray:
    import zarr

    stored = AtlasStore.open(path).models()["llama"]
    unit = next(unit for unit, (_, made) in stored.derivations.items() if made.kind == kind)
    group = zarr.open_group(str(AtlasStore.open(path).arrays_path / stored.array_group / unit / "decoder"), mode="r")
    return np.asarray(group[name])


def heads_with(atlas: Atlas, table: str, condition: str) -> pl.DataFrame:
    return atlas.sql(
        f"SELECT heads.*, spectra.sigma, spectra.cosine, other.* EXCLUDE ({', '.join(KEY)}) "
        f"RENAME (closure AS found) FROM {table} AS other JOIN heads USING ({', '.join(KEY)}) "
        f"JOIN spectra USING ({', '.join(KEY)}) WHERE {condition} ORDER BY layer, head"
        if table == "capacities"
        else f"SELECT heads.closure, heads.layer, heads.head, spectra.sigma, spectra.cosine, other.* "
        f"FROM nulls AS other JOIN heads USING ({', '.join(KEY)}) JOIN spectra USING ({', '.join(KEY)}) "
        f"WHERE {condition} ORDER BY heads.layer, heads.head"
    )


def test_the_null_of_a_head_follows_from_its_spectra_and_its_key(store_path: Path) -> None:
    run(store_path, SCRAMBLE)
    with open_atlas(store_path) as atlas:
        rows = heads_with(atlas, "nulls", "kind = 'scramble' AND model = 'llama'")
    stored = arrays(store_path, "scramble", "null_closure")
    assert len(rows) == 12
    assert stored.shape == (3, 4, DRAWS)
    for row in rows.iter_rows(named=True):
        key = f"llama\0raw\0decoder\0{row['layer']}\0{row['head']}".encode()
        sigma, cosine = (torch.tensor([row[name]], dtype=torch.float64) for name in ("sigma", "cosine"))
        draws = scramble_draws(sigma, cosine, [key], SEED, DRAWS)[0].numpy()
        np.testing.assert_allclose(stored[row["layer"], row["head"]], draws, rtol=1e-9)
        assert row["median"] == pytest.approx(np.median(draws), rel=1e-9)
        assert row["q95"] == pytest.approx(np.quantile(draws, 0.95), rel=1e-9)
        assert row["q99"] == pytest.approx(np.quantile(draws, 0.99), rel=1e-9)
        assert row["p"] == pytest.approx((1 + (draws >= row["closure"]).sum()) / (1 + DRAWS))
        assert row["wins"] == (row["closure"] > np.median(draws))
        assert row["p_closed_form"] == pytest.approx(
            scipy.stats.chi2.sf(
                row["closure"] * np.sum(np.square(row["sigma"])) ** 3 / np.sum(np.power(row["sigma"], 6)), 1
            )
        )
    np.testing.assert_allclose(rows["q"], scipy.stats.false_discovery_control(rows["p"].to_numpy()))


def test_the_mismatch_null_counts_each_other_value_once(store_path: Path) -> None:
    with open_atlas(store_path) as atlas:
        rows = heads_with(atlas, "nulls", "kind = 'mismatch' AND model = 'llama' AND other.operator = 'raw'")
        pairs = atlas.sql("SELECT * FROM pairs WHERE model = 'llama' AND operator = 'raw' AND NOT shared_value")
        bert = atlas.sql("SELECT n_draws FROM nulls WHERE model = 'bert'")["n_draws"].unique().to_list()
        bert_heads = atlas.sql("SELECT n_heads FROM models WHERE model = 'bert'").item()
    assert bert == [bert_heads - 1]
    for row in rows.iter_rows(named=True):
        group = row["head"] // 2
        reader = 2 * (1 - group)
        chosen = pairs.filter(
            (pl.col("layer") == row["layer"]) & (pl.col("write_head") == row["head"]) & (pl.col("read_head") == reader)
        )
        mismatch = chosen["mismatch_closure"].item()
        assert (row["n_draws"], row["median"]) == (1, mismatch)
        assert row["wins"] == (row["closure"] > mismatch)
        assert row["p"] == (0.5 if row["closure"] > mismatch else 1.0)


def test_capacities_are_attained_by_what_is_stored_with_them(store_path: Path) -> None:
    run(store_path, ASSIGNMENT)
    run(store_path, RIEMANNIAN)
    permutation = torch.from_numpy(arrays(store_path, "assignment", "permutation"))
    write, read = (torch.from_numpy(arrays(store_path, "riemannian", name)) for name in ("write", "read"))
    with open_atlas(store_path) as atlas:
        assigned = heads_with(atlas, "capacities", "method = 'assignment'")
        climbed = heads_with(atlas, "capacities", "method = 'riemannian'")
    assert len(assigned) == len(climbed) == 12
    for one, other in zip(assigned.iter_rows(named=True), climbed.iter_rows(named=True), strict=True):
        place = (one["layer"], one["head"])
        sigma, cosine = (torch.tensor(one[name], dtype=torch.float64) for name in ("sigma", "cosine"))
        assert one["found"] == pytest.approx(float(attained_closure(sigma, cosine, permutation[place])), abs=1e-12)
        assert other["found"] == pytest.approx(
            float(oriented_closure(sigma, cosine, write[place], read[place])), abs=1e-9
        )
        assert other["found"] >= one["found"] >= one["closure"] * 0.5
        assert one["attainment"] == pytest.approx(one["closure"] / one["found"])
        assert other["seed"] == SEED
        assert one["seed"] is None


def test_asking_again_reads_and_more_draws_add_to_the_stored_ones(store_path: Path) -> None:
    first = command(store_path, "null", "llama", "--draws", "200", "--operator", "raw", "--format", "csv")
    assert first.exit_code == 0, first.stderr
    before, draws = units(store_path), arrays(store_path, "scramble", "null_closure")
    again = command(store_path, "null", "llama", "--draws", "200", "--operator", "raw", "--format", "csv")
    assert (again.stdout, units(store_path)) == (first.stdout, before)
    assert again.stderr == ""
    fewer = command(store_path, "null", "llama", "--draws", "50", "--operator", "raw")
    assert fewer.exit_code == 0
    assert units(store_path) == before

    more = command(store_path, "null", "llama", "--draws", "500", "--operator", "raw")
    assert more.exit_code == 0
    assert len(units(store_path)) == 1
    assert units(store_path) != before
    extended = arrays(store_path, "scramble", "null_closure")
    assert extended.shape[-1] == 500
    np.testing.assert_allclose(extended[..., :200], draws, rtol=1e-9)

    other = command(store_path, "null", "llama", "--draws", "200", "--operator", "raw", "--seed", "1")
    assert other.exit_code == 0
    assert not np.allclose(arrays(store_path, "scramble", "null_closure"), draws)


@pytest.mark.parametrize("kept", ["llama", "bert"])
def test_draws_do_not_depend_on_what_else_is_in_the_store(kept: str, store_path: Path) -> None:
    with open_atlas(store_path) as atlas:
        everything = command(store_path, "null", "--draws", "100", "--by", "head", "--format", "csv").stdout
        assert atlas.sql("SELECT count(*) FROM nulls WHERE kind = 'scramble'").item() == 0
    remove(AtlasStore.open(store_path), "bert" if kept == "llama" else "llama")
    group = AtlasStore.open(store_path).models()[kept]
    assert group.derivations
    alone = command(store_path, "null", "--draws", "100", "--by", "head", "--format", "csv").stdout
    assert alone.splitlines()[1:] == [line for line in everything.splitlines() if line.startswith(kept)]


def test_a_store_with_derivations_verifies_and_is_made_again_alike(store_path: Path) -> None:
    for wanted in (SCRAMBLE, ASSIGNMENT, RIEMANNIAN):
        run(store_path, wanted)
    run(store_path, SCRAMBLE, operator="folded")
    store = AtlasStore.open(store_path)
    assert list(verify(store)) == []
    tables = ("derivations", "nulls", "capacities")
    with open_atlas(store_path) as atlas:
        before = {name: atlas.table(name).collect() for name in tables}
    rebuild(store)
    with open_atlas(store_path) as atlas:
        for name in tables:
            assert len(before[name])
            assert atlas.table(name).collect().equals(before[name])
    assert list(verify(store)) == []
    remove(store, "llama")
    assert list(verify(store)) == []
    assert not list(store.manifests_path.glob("llama*"))


def test_damage_to_a_derivation_is_found(store_path: Path) -> None:
    run(store_path, SCRAMBLE)
    store = AtlasStore.open(store_path)
    (chunk, *_) = sorted((store.arrays_path).glob("*/scramble-raw-*/decoder/null_closure/c/0/0/0"))
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    assert [finding.problem for finding in verify(store)] == ["checksum differs from the manifest"]


@pytest.mark.parametrize("where", ["seal", "publish_rows"])
def test_a_failure_while_publishing_leaves_the_earlier_derivation(
    where: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store_path, SCRAMBLE)
    before = units(store_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.derivation, where, fail)
    with pytest.raises(StoreError, match="cannot be written"):
        run(store_path, Derivation("scramble", n_draws=300, seed=SEED, independent=False))
    assert units(store_path) == before
    assert list(verify(AtlasStore.open(store_path))) == []


def test_a_model_replaced_meanwhile_is_not_given_stale_results(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., object] = store.derivation.scramble_draws

    def replace_then_draw(*args: object, **options: object) -> object:
        monkeypatch.setattr(store.derivation, "scramble_draws", original)
        other = checkpoints.save_safetensors(checkpoints.llama(layers=3, seed=5), tmp_path / "other")
        ingest_into(store_path, other, "llama", replace=True)
        return original(*args, **options)

    monkeypatch.setattr(store.derivation, "scramble_draws", replace_then_draw)
    with pytest.raises(StoreError, match="replaced or removed"):
        run(store_path, SCRAMBLE)
    assert units(store_path) == []
    assert list(verify(AtlasStore.open(store_path))) == []


def test_a_null_survives_another_operator_and_goes_with_a_replacement(store_path: Path, tmp_path: Path) -> None:
    run(store_path, SCRAMBLE)
    llama = checkpoints.save_safetensors(checkpoints.llama(layers=3), tmp_path / "tiny-llama")
    ingest_into(store_path, llama, "llama", ("raw", "folded"))
    assert len(units(store_path)) == 1
    ingest_into(store_path, llama, "llama", ("raw",), replace=True)
    assert units(store_path) == []


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("null", "nobody"), 1, "no model named 'nobody'"),
        (("null", "bert", "--operator", "folded"), 1, "not measured with the operator folded"),
        (("null", "--draws", "0"), 2, "0 is not in the range"),
        (("null", "--by", "pair"), 2, "'pair' is not one of"),
        (("capacity", "nobody"), 1, "no model named 'nobody'"),
        (("capacity", "--starts", "-1"), 2, "-1 is not in the range"),
    ],
)
def test_a_bad_request_is_one_error_and_changes_nothing(
    arguments: tuple[str, ...], status: int, said: str, store_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in store_path.rglob("*")}
    result = command(store_path, *arguments)
    assert result.exit_code == status
    assert said in result.stderr
    assert {path: path.stat().st_mtime_ns for path in store_path.rglob("*")}.keys() == before.keys()


def test_capacity_prints_a_row_for_each_method(store_path: Path) -> None:
    result = command(
        store_path, "capacity", "llama", "--refine", "--starts", "1", "--operator", "raw", "--format", "csv"
    )
    assert result.exit_code == 0, result.stderr
    assert [line.split(",")[3] for line in result.stdout.splitlines()] == ["method", "assignment", "riemannian"]
    with open_atlas(store_path) as atlas:
        mine = atlas.sql(
            "SELECT median(closure) AS median, min(closure) AS minimum FROM capacities WHERE method = 'assignment'"
        ).row(0)
    shown = dict(zip(*(line.split(",") for line in result.stdout.splitlines()[:2]), strict=True))
    assert (float(shown["median"]), float(shown["minimum"])) == pytest.approx(mine)
