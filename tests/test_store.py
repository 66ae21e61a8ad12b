"""The store as other programs see it, and what ingesting again, replacing and removing do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest
import torch
import xarray
import zarr

from query import open_atlas
from stats.errors import StoreError
from store import catalogue
from store.atlas import AtlasStore, array_group_name
from store.integrity import rebuild, remove, verify
from store.rows import catalogue_rows
from store.tables import TABLES
from tests import checkpoints
from tests.ingesting import ingest_into


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def group_of(store_path: Path, model: str) -> Path:
    store = AtlasStore.open(store_path)
    return store.arrays_path / store.models()[model].array_group


def test_duckdb_alone_opens_the_catalogue(store_path: Path) -> None:
    with duckdb.connect(str(store_path / "catalog.duckdb"), read_only=True) as connection:
        models = connection.execute("SELECT model, n_heads, status FROM models ORDER BY model").fetchall()
        assert models == [("bert", 4, "complete"), ("llama", 4, "complete")]
        closure = connection.execute("SELECT count(*), min(closure) > 0, max(closure) <= 1 FROM heads").fetchone()
        assert closure == (32, True, True)


def test_every_table_and_column_is_commented(store_path: Path) -> None:
    with duckdb.connect(str(store_path / "catalog.duckdb"), read_only=True) as connection:
        found = connection.execute(
            "SELECT table_name, column_name, data_type, comment FROM duckdb_columns() "
            "WHERE schema_name = 'main' AND NOT internal ORDER BY table_oid, column_index"
        ).fetchall()
        declared = [
            (table.name, column.name, column.sql_type, column.comment) for table in TABLES for column in table.columns
        ]
        assert sorted(found) == sorted(declared)
        assert all(comment for *_, comment in found)
        tables = connection.execute("SELECT table_name, comment FROM duckdb_tables()").fetchall()
        assert dict(tables) == {table.name: table.comment for table in TABLES}


def test_the_catalogue_is_readable_by_earlier_duckdb(store_path: Path) -> None:
    with duckdb.connect(str(store_path / "catalog.duckdb"), read_only=True) as connection:
        tags = connection.execute("SELECT tags FROM duckdb_databases() WHERE database_name = 'catalog'").fetchone()
    assert tags is not None
    assert catalogue.STORAGE_VERSION in str(tags[0])


def test_zarr_alone_opens_the_arrays(store_path: Path) -> None:
    root = zarr.open_group(str(store_path / "arrays.zarr"), mode="r")
    model = group_of(store_path, "llama").name
    assert root[model].attrs["model"] == "llama"
    group = root[f"{model}/raw/decoder"]
    assert group["core"].shape == (3, 4, 8, 8)
    assert group["core"].chunks == (1, 1, 8, 8)
    assert group["core"].shards == (1, 4, 8, 8)
    for name, array in group.arrays():
        assert array.metadata.dimension_names, name
        assert array.metadata.dimension_names[0] == "layer", name
        assert array.attrs["long_name"], name
    singular = np.linalg.svd(group["core"][1, 2], compute_uv=False)
    np.testing.assert_allclose(group["sigma"][1, 2], singular, rtol=1e-12)


def test_xarray_alone_opens_the_arrays(store_path: Path) -> None:
    group = group_of(store_path, "llama") / "folded" / "decoder"
    with xarray.open_zarr(group, consolidated=False) as dataset:
        assert dataset["closure"].dims == ("layer", "head")
        assert dataset["core"].dims == ("layer", "head", "principal_o", "principal_v")
        strongest = dataset["closure"].max().compute().item()
    with open_atlas(store_path) as atlas:
        assert (
            atlas.sql("SELECT max(closure) FROM heads WHERE model = 'llama' AND operator = 'folded'").item()
            == strongest
        )


def test_arrays_and_catalogue_hold_the_same_numbers(store_path: Path) -> None:
    with open_atlas(store_path) as atlas:
        for table, name in (("heads", "alpha"), ("heads", "cos_mean"), ("qk", "symmetric_share")):
            column = atlas.sql(
                f"SELECT {name} FROM {table} WHERE model = 'llama' AND operator = 'raw' ORDER BY layer, head"
            )[name]
            array = atlas.array("llama", f"qk_{name}" if table == "qk" else name)
            np.testing.assert_array_equal(column.to_numpy(), array.ravel())
        sigma = atlas.sql(
            "SELECT sigma FROM spectra WHERE (model, operator, layer, head) = ('llama', 'raw', 2, 3)"
        ).item()
        np.testing.assert_array_equal(sigma.to_numpy(), atlas.array("llama", "sigma", layer=2, head=3))
        pair = atlas.sql(
            "SELECT right_alpha FROM pairs "
            "WHERE (model, operator, layer, write_head, read_head) = ('llama', 'raw', 1, 0, 3)"
        ).item()
        assert pair == atlas.array("llama", "right_alpha", layer=1)[0, 3]


def test_the_same_content_again_does_nothing(store_path: Path, llama_directory: Path) -> None:
    before = tree(store_path)
    outcome = ingest_into(store_path, llama_directory, "llama", ("raw", "folded"))
    assert outcome.action == "unchanged"
    assert tree(store_path) == before


def test_other_content_is_refused_until_replaced(store_path: Path, tmp_path: Path) -> None:
    other = checkpoints.save_safetensors(checkpoints.llama(layers=3, seed=1), tmp_path / "other")
    before = tree(store_path)
    with pytest.raises(StoreError, match="other weights"):
        ingest_into(store_path, other, "llama")
    assert tree(store_path) == before
    old_group = group_of(store_path, "llama")
    assert ingest_into(store_path, other, "llama", replace=True).action == "ingested"
    assert not old_group.exists()
    assert list(verify(AtlasStore.open(store_path))) == []
    with open_atlas(store_path) as atlas:
        assert atlas.sql("SELECT DISTINCT operator FROM heads WHERE model = 'llama'").rows() == [("raw",)]


@pytest.mark.parametrize("changed", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_change_in_any_projection_is_other_content(store_path: Path, tmp_path: Path, changed: str) -> None:
    model = checkpoints.llama(layers=3)
    name = f"model.layers.2.self_attn.{changed}.weight"
    weights = model.tensors[name].clone()
    weights[0, 0] += 1e-3
    other = checkpoints.save_safetensors(model.changed(**{name: weights}), tmp_path / "other")
    with pytest.raises(StoreError, match="other weights"):
        ingest_into(store_path, other, "llama")


def test_a_change_in_a_folded_gain_is_other_content(store_path: Path, tmp_path: Path) -> None:
    model = checkpoints.llama(layers=3)
    name = "model.layers.0.input_layernorm.weight"
    other = checkpoints.save_safetensors(model.changed(**{name: 2 * model.tensors[name]}), tmp_path / "other")
    assert ingest_into(store_path, other, "llama").action == "unchanged"
    with pytest.raises(StoreError, match="norm gains"):
        ingest_into(store_path, other, "llama", ("raw", "folded"))


def test_a_scaled_operator_is_known_by_its_multiplier(tmp_path: Path) -> None:
    model = checkpoints.llama(layers=2, model_type="granite").configured(residual_multiplier=0.25)
    source = checkpoints.save_safetensors(model, tmp_path / "granite")
    store = tmp_path / "atlas"
    ingest_into(store, source, "granite", ("raw", "folded"))
    assert ingest_into(store, source, "granite", ("scaled",)).operators == ("scaled",)
    assert ingest_into(store, source, "granite", ("raw", "folded", "scaled")).action == "unchanged"
    with open_atlas(store) as atlas:
        heads = atlas.table("heads").collect()
        gains = dict(atlas.sql("SELECT operator, gain_hash FROM operators").rows())
    folded, scaled = (heads.filter(operator=operator) for operator in ("folded", "scaled"))
    np.testing.assert_allclose(scaled["alpha"], 0.25 * folded["alpha"], rtol=1e-12)
    np.testing.assert_allclose(scaled["norm"], 0.25 * folded["norm"], rtol=1e-12)
    np.testing.assert_allclose(scaled["closure"], folded["closure"], rtol=1e-10)
    assert len(set(gains.values())) == 3
    other = checkpoints.save_safetensors(model.configured(residual_multiplier=0.5), tmp_path / "other")
    assert ingest_into(store, other, "granite", ("raw", "folded")).action == "unchanged"
    with pytest.raises(StoreError, match="norm gains or scales"):
        ingest_into(store, other, "granite", ("scaled",))
    rebuild(AtlasStore.open(store))
    assert list(verify(AtlasStore.open(store))) == []


def test_a_missing_operator_is_added(tmp_path: Path, llama_directory: Path, store_path: Path) -> None:
    separate = tmp_path / "separate"
    ingest_into(separate, llama_directory, "llama", ("folded",))
    assert ingest_into(separate, llama_directory, "llama", ("raw", "folded")).operators == ("raw",)
    assert list(verify(AtlasStore.open(separate))) == []
    query = "SELECT * FROM heads WHERE model = 'llama' ORDER BY operator, layer, head"
    with open_atlas(separate) as one, open_atlas(store_path) as other:
        assert one.sql(query).equals(other.sql(query))


def test_two_names_with_one_content_are_told_apart_and_named(store_path: Path, llama_directory: Path) -> None:
    assert ingest_into(store_path, llama_directory, "twin").same_content == ("llama",)


def test_readers_keep_their_snapshot(store_path: Path, tmp_path: Path) -> None:
    other = checkpoints.save_safetensors(checkpoints.llama(layers=1), tmp_path / "third")
    with open_atlas(store_path) as early:
        ingest_into(store_path, other, "third")
        assert early.sql("SELECT count(*) FROM models").item() == 2
    with open_atlas(store_path) as late:
        assert late.sql("SELECT count(*) FROM models").item() == 3


def test_the_catalogue_is_replaced_and_never_written_over(store_path: Path, tmp_path: Path) -> None:
    other = checkpoints.save_safetensors(checkpoints.llama(layers=1), tmp_path / "third")
    with (store_path / "catalog.duckdb").open("rb") as held:
        before = held.read()
        ingest_into(store_path, other, "third")
        held.seek(0)
        assert held.read() == before
    assert (store_path / "catalog.duckdb").read_bytes() != before


def test_remove_leaves_the_rest(store_path: Path) -> None:
    store = AtlasStore.open(store_path)
    group = group_of(store_path, "llama")
    remove(store, "llama")
    assert list(store.models()) == ["bert"]
    assert not group.exists()
    assert list(verify(store)) == []
    with pytest.raises(StoreError, match="no model named 'llama'"):
        remove(store, "llama")


def test_rebuild_makes_an_equal_catalogue(store_path: Path) -> None:
    store = AtlasStore.open(store_path)

    def contents() -> dict[str, pl.DataFrame]:
        with catalogue.reading(store.catalogue_path) as connection:
            return {
                table.name: connection.sql(f"FROM {table.name} ORDER BY {', '.join(table.key)}").pl()
                for table in TABLES
            }

    before = contents()
    store.catalogue_path.unlink()
    assert store.models() == {}
    assert rebuild(store) == 2
    after = contents()
    assert all(before[name].equals(after[name]) for name in before)
    assert before["heads"].height == 32


def test_verify_is_silent_on_a_sound_store(store_path: Path) -> None:
    assert list(verify(AtlasStore.open(store_path))) == []


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 0x40
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["core/c/1/0/0/0", "closure/c/0/0", "closure/zarr.json", "zarr.json"])
def test_verify_finds_a_flipped_byte(store_path: Path, name: str) -> None:
    flip_byte(group_of(store_path, "llama") / "raw" / "decoder" / name, 37)
    findings = list(verify(AtlasStore.open(store_path), "llama"))
    assert [finding.problem for finding in findings] == ["checksum differs from the manifest"]
    assert name in findings[0].where


def test_verify_finds_a_missing_and_an_extra_file(store_path: Path) -> None:
    directory = group_of(store_path, "llama") / "raw" / "decoder"
    (directory / "alpha" / "c" / "0" / "0").unlink()
    (directory / "stray").write_bytes(b"")
    problems = sorted(finding.problem for finding in verify(AtlasStore.open(store_path)))
    assert problems == ["file is missing", "file is not in the manifest"]


def change_catalogue(store: AtlasStore, statement: str) -> None:
    catalogue.change(store.catalogue_path, lambda connection: connection.execute(statement))


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("UPDATE heads SET closure = closure + 1e-9 WHERE (model, layer, head) = ('llama', 1, 1)", "heads"),
        ("DELETE FROM pairs WHERE (model, layer, write_head) = ('llama', 0, 0)", "pairs"),
        ("UPDATE models SET lineage = 'invented' WHERE model = 'llama'", "models"),
    ],
)
def test_verify_finds_rows_the_arrays_do_not_give(store_path: Path, statement: str, table: str) -> None:
    store = AtlasStore.open(store_path)
    change_catalogue(store, statement)
    assert [(finding.model, finding.where) for finding in verify(store)] == [("llama", f"table {table}")]


def test_verify_recomputes_closure_from_the_core(store_path: Path) -> None:
    """A closure that is consistently wrong in array, manifest and catalogue is still found."""
    store = AtlasStore.open(store_path)
    group = group_of(store_path, "llama")
    array = zarr.open_array(str(group / "raw" / "decoder" / "closure"), mode="r+")
    array[1, 2] = 0.999
    from store.integrity import publish_rows, seal

    seal(store, group.name, "raw")
    publish_rows(store, "llama", group.name)
    findings = list(verify(store))
    assert len(findings) == 1
    assert "L1H2" in findings[0].where
    assert "from the core" in findings[0].problem


def test_verify_reports_what_was_never_published(store_path: Path) -> None:
    store = AtlasStore.open(store_path)
    (store.staging_path / "abandoned").mkdir()
    (store.arrays_path / "orphan").mkdir()
    assert sorted(finding.problem for finding in verify(store)) == [
        "arrays that no catalogue row names",
        "left by a command that ended early, or one that is running",
    ]


@pytest.mark.parametrize(
    "name",
    ["a/b", "../../escape", "Ünï çødé 模型", "'; DROP TABLE models; --", 'quo"te', "x" * 300, ".", "con", "a.b@c"],
)
def test_any_text_can_name_a_model(tmp_path: Path, llama_directory: Path, name: str) -> None:
    store_path = tmp_path / "names"
    ingest_into(store_path, llama_directory, name)
    store = AtlasStore.open(store_path)
    assert list(store.models()) == [name]
    assert list(verify(store)) == []
    assert group_of(store_path, name).parent == store.arrays_path
    with open_atlas(store_path) as atlas:
        assert atlas.closure(models=[name])["heads"].item() == 12
    remove(store, name)
    assert {path.name for path in tmp_path.iterdir()} == {"names", "tiny-llama"}


def test_group_names_differ_even_when_readable_parts_agree() -> None:
    from datetime import UTC, datetime

    moment = datetime(2026, 1, 1, tzinfo=UTC)
    names = {array_group_name(model, moment, "hash") for model in ("a/b", "a-b", "a b", "A/b")}
    assert len({name.lower() for name in names}) == 4


def test_a_store_of_another_format_is_refused(store_path: Path) -> None:
    path = store_path / "arrays.zarr" / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"]["headatlas_format"] = 999
    path.write_text(json.dumps(metadata))
    with pytest.raises(StoreError, match="newer format"):
        AtlasStore.open(store_path)


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("{"), lambda path: path.write_text("[]")])
def test_a_directory_that_is_no_store_is_refused(tmp_path: Path, spoil: Callable[[Path], int]) -> None:
    (tmp_path / "arrays.zarr").mkdir()
    spoil(tmp_path / "arrays.zarr" / "zarr.json")
    with pytest.raises(StoreError, match="not a store"):
        AtlasStore.open(tmp_path)
    with pytest.raises(StoreError, match="no store here"):
        AtlasStore.open(tmp_path / "nothing")


def test_results_do_not_depend_on_threads_or_repetition(tmp_path: Path, llama_directory: Path) -> None:
    """Arrays are identical to the bit from run to run and for any number of threads."""
    from ingest.pipeline import ComputeSettings, measure
    from ingest.plan import plan_checkpoint
    from ingest.source import open_checkpoint

    def arrays(threads: int) -> list[dict[str, np.ndarray]]:
        plan = plan_checkpoint(open_checkpoint(str(llama_directory)), ("raw",))
        return [item.arrays["raw"] for item in measure(plan, ComputeSettings(device="cpu", threads=threads))]

    first = arrays(1)
    for threads in (1, 2, 3):
        for one, other in zip(first, arrays(threads), strict=True):
            for name in one:
                np.testing.assert_array_equal(other[name], one[name], err_msg=name)


def test_measuring_restores_the_thread_setting(llama_directory: Path) -> None:
    from ingest.pipeline import ComputeSettings, measure
    from ingest.plan import plan_checkpoint
    from ingest.source import open_checkpoint

    threads = torch.get_num_threads()
    iterator = measure(plan_checkpoint(open_checkpoint(str(llama_directory))), ComputeSettings(device="cpu"))
    next(iterator)
    iterator.close()
    assert torch.get_num_threads() == threads


def test_layers_of_different_sizes_are_padded_and_read_back(tmp_path: Path) -> None:
    """Two stacks' worth of shapes in one: per-layer sizes survive the padded arrays."""
    from dataclasses import replace

    from ingest.pipeline import ComputeSettings, measure
    from ingest.plan import plan_checkpoint
    from ingest.source import open_checkpoint
    from store.arrays import StackWriter, write_group

    plans, measurements = [], []
    for index, (heads, d_head) in enumerate(((4, 8), (2, 16))):
        model = checkpoints.llama(layers=1, heads=heads, kv_heads=heads // 2, d_head=d_head, seed=index)
        plan = plan_checkpoint(open_checkpoint(str(checkpoints.save_safetensors(model, tmp_path / str(index)))))
        (measurement,) = measure(plan, ComputeSettings(device="cpu"))
        numbered = replace(measurement.plan, layer=3 * index + 1)
        plans.append(numbered)
        measurements.append(replace(measurement, plan=numbered))
    group = tmp_path / "group"
    writer = StackWriter(group / "raw" / "decoder", plans)
    for measurement in measurements:
        writer.add(measurement, measurement.arrays["raw"])
    writer.close()
    layers = [
        {"stack": "decoder", "layer": plan.layer, "n_heads": plan.n_heads, "n_kv_heads": plan.n_kv_heads,
         "d_model": plan.d_model, "d_head": plan.d_head, "content_hash": "", "qk_hash": ""}
        for plan in plans
    ]  # fmt: skip
    write_group(group, {"model": "mixed", "layers": layers, "skipped": []})
    write_group(group / "raw", {"created_at": "2026-01-01T00:00:00+00:00"})
    rows = catalogue_rows(group, ["raw"], [])
    assert rows["heads"].select("layer", "head", "d_head").rows() == [
        *((1, head, 8) for head in range(4)),
        *((4, head, 16) for head in range(2)),
    ]
    for offset, measurement in ((0, measurements[0]), (4, measurements[1])):
        for head in range(measurement.plan.n_heads):
            np.testing.assert_array_equal(
                rows["spectra"]["sigma"][offset + head], measurement.arrays["raw"]["sigma"][head]
            )
            np.testing.assert_array_equal(
                rows["qk"]["cosine"][offset + head], measurement.arrays["raw"]["qk_cosine"][head]
            )
            assert rows["heads"]["closure"][offset + head] == measurement.arrays["raw"]["closure"][head]
    assert rows["pairs"].group_by("layer").len().sort("layer").rows() == [(1, 12), (4, 2)]


IMPORT_ORDER = ("stats", "ingest", "store", "query", "cli")


def test_no_folder_imports_from_one_to_its_right() -> None:
    import ast

    root = Path(__file__).parent.parent
    for position, package in enumerate(IMPORT_ORDER):
        later = set(IMPORT_ORDER[position + 1 :])
        for path in [root / "cli.py"] if package == "cli" else (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                assert later.isdisjoint(name.split(".")[0] for name in names), f"{path} imports {names}"


def test_questions_and_plans_start_without_torch(store_path: Path, llama_directory: Path) -> None:
    script = (
        "import sys; from click.testing import CliRunner; import cli\n"
        "for arguments in (['--help'], ['ingest', '--help'], ['models'], ['closure'], ['schema', 'heads'],\n"
        f"                  ['describe', 'llama'], ['plan', {str(llama_directory)!r}], ['panel'],\n"
        "                  ['sql', 'SELECT 1']):\n"
        f"    result = CliRunner().invoke(cli.main, arguments, env={{'HEADATLAS_STORE': {str(store_path)!r}}})\n"
        "    assert result.exit_code == 0, (arguments, result.output)\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent)
