"""Questions by name: each against Polars on the tables, their files, and values that must stay values."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

import cli
from query import Atlas, open_atlas
from query.named import BUILT_IN, parsed, questions
from query.questions import closure
from stats.errors import QueryError
from tests import checkpoints
from tests.test_sql import HOSTILE

ROOT = Path(__file__).parent.parent
THRESHOLD = 0.02
STACK = ["model", "operator", "stack"]
HEAD = [*STACK, "layer", "head"]
NAMES = [
    "closure-by-model",
    "closure-by-layer",
    "closure-by-depth",
    "closure-thresholds",
    "strongest-heads",
    "layer-profile",
    "null-summary",
    "null-by-layer",
    "mismatch-summary",
    "capacity-gap",
    "group-algebra",
    "lineage-trajectory",
    "onsets",
    "compare-models",
    "compare-depth",
    "size-trends",
    "isometry-summary",
    "query-key-summary",
    "suspicious",
]
NEEDED = {"layer-profile": {"model": "llama"}}


def run(*arguments: object, store: Path) -> Result:
    return CliRunner().invoke(cli.main, [*map(str, arguments), "--store", str(store)])


@pytest.fixture(scope="module")
def store(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small store with a training run of three steps beside it, nulls and capacities."""
    root = tmp_path_factory.mktemp("named")
    path = Path(shutil.copytree(sealed_store, root / "atlas"))
    for step in (0, 5, 40):
        checkpoint = checkpoints.llama(layers=3, seed=step, d_model=40 if step == 40 else 24)
        checkpoints.save_safetensors(checkpoint, root / "run" / f"step{step}")
    for command in (["ingest", root / "run", "--lineage", "tiny"], ["null", "--draws", "40"], ["capacity"]):
        result = run(*command, store=path)
        assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture(scope="module")
def atlas(store: Path) -> Iterator[Atlas]:
    with open_atlas(store) as opened:
        yield opened


@pytest.fixture(scope="module")
def heads(atlas: Atlas) -> pl.DataFrame:
    return atlas.table("heads").collect()


def same(found: pl.DataFrame, expected: pl.DataFrame, key: list[str]) -> None:
    """Equal in every column of ``expected``, whose rows are all there are."""
    assert len(found) == len(expected) > 0
    found, expected = found.select(expected.columns).sort(key), expected.sort(key)
    for name in expected.columns:
        if expected[name].dtype.is_float():
            assert found[name].is_null().equals(expected[name].is_null()), name
            values = expected[name].drop_nulls().to_list()
            assert found[name].drop_nulls().to_list() == pytest.approx(values, rel=1e-9, abs=1e-12), name
        else:
            assert found[name].to_list() == expected[name].to_list(), name


STRONG = pl.col("closure") >= THRESHOLD
CLOSURE = pl.col("closure")


def depth_bins(heads: pl.DataFrame, bins: int) -> pl.DataFrame:
    depth = pl.col("layer") / pl.col("layer").max().over(STACK)
    return heads.with_columns((depth * bins).floor().clip(0, bins - 1).cast(pl.Int32).alias("bin"))


def test_the_questions_are_those_that_are_documented() -> None:
    assert set(questions().by_name) == set(NAMES)
    assert not questions().faults
    for question in questions().by_name.values():
        assert question.origin == BUILT_IN
        assert {"operator"} <= {parameter.name for parameter in question.parameters}


@pytest.mark.parametrize("name", NAMES)
def test_every_question_gives_the_same_rows_as_its_printed_form(atlas: Atlas, name: str) -> None:
    values = NEEDED.get(name, {})
    rows = atlas.ask(name, **values)
    assert rows.columns
    assert atlas.sql(str(questions().named(name).with_values(values))).equals(rows)


@pytest.mark.parametrize("name", NAMES)
def test_filters_keep_rows_as_they_are(atlas: Atlas, name: str) -> None:
    """One operator gives the rows of all operators that have it; so do models and runs where rows are theirs."""
    values = NEEDED.get(name, {}) | ({"threshold": THRESHOLD} if "threshold=" in signature(name) else {})
    rows = atlas.ask(name, **values)
    assert atlas.ask(name, **values, operator="raw").equals(rows.filter(operator="raw"))
    if "models=" in signature(name) and name not in ("compare-depth", "size-trends"):
        kept = atlas.ask(name, **values, models=["llama"])
        assert kept.equals(rows.filter(model="llama"))
    if "lineages=" in signature(name):
        assert len(rows) > 0
        assert atlas.ask(name, **values, lineages="tiny").equals(rows)


def signature(name: str) -> str:
    return questions().named(name).signature()


def test_closure_by_model_and_layer(atlas: Atlas, heads: pl.DataFrame) -> None:
    for name, key in (("closure-by-model", STACK), ("closure-by-layer", [*STACK, "layer"])):
        expected = heads.group_by(key).agg(
            pl.len().alias("heads"),
            CLOSURE.count().alias("defined"),
            STRONG.sum().alias("strong"),
            CLOSURE.median().alias("median"),
            CLOSURE.max().alias("maximum"),
        )
        same(atlas.ask(name, threshold=THRESHOLD), expected, key)


def test_closure_by_depth(atlas: Atlas, heads: pl.DataFrame) -> None:
    key = [*STACK, "bin"]
    expected = (
        depth_bins(heads, 3)
        .group_by(key)
        .agg(
            (pl.col("bin").first() / 3).alias("depth_from"),
            pl.col("layer").n_unique().alias("layers"),
            STRONG.sum().alias("strong"),
            CLOSURE.median().alias("median"),
            CLOSURE.quantile(0.9, "linear").alias("q90"),
            pl.col("label").sort_by("closure").last().alias("strongest"),
        )
    )
    same(atlas.ask("closure-by-depth", threshold=THRESHOLD, bins=3), expected, key)
    assert atlas.ask("closure-by-depth", bins=1)["layers"].max() == 3


def test_closure_thresholds(atlas: Atlas, heads: pl.DataFrame) -> None:
    sweep = [0.001, 0.01, 0.05]
    expected = pl.concat(
        heads.group_by(STACK).agg(
            pl.lit(threshold).alias("threshold"),
            CLOSURE.ge(threshold).sum().alias("strong"),
            CLOSURE.ge(threshold).mean().alias("rate"),
            (CLOSURE.ge(threshold) & (pl.col("alpha") < 0)).sum().alias("strong_negative"),
            pl.col("layer").filter(CLOSURE.ge(threshold)).n_unique().alias("layers_with_one"),
        )
        for threshold in sweep
    )
    same(atlas.ask("closure-thresholds", thresholds=sweep), expected, [*STACK, "threshold"])
    assert 0 < expected["strong"].sum() < 3 * len(heads)


def test_strongest_heads(atlas: Atlas, heads: pl.DataFrame) -> None:
    best = heads.sort("closure", descending=True).group_by(STACK, maintain_order=True).head(3)
    same(atlas.ask("strongest-heads", how_many=3), best.select(*HEAD, "label", "closure", "alpha"), HEAD)


def test_layer_profile(atlas: Atlas, heads: pl.DataFrame) -> None:
    key = ["operator", "layer"]
    mine = heads.filter(model="llama")
    pairs = atlas.table("pairs").filter(~pl.col("shared_value"), pl.col("model") == "llama").collect()
    capacities = atlas.table("capacities").filter(pl.col("model") == "llama", pl.col("method") == "assignment")
    nulls = atlas.table("nulls").filter(pl.col("model") == "llama", pl.col("kind") == "scramble")
    qk = atlas.table("qk").filter(pl.col("model") == "llama").collect()
    expected = (
        mine.group_by(key)
        .agg(
            CLOSURE.median().alias("closure"),
            *(pl.col(name).median() for name in ("alpha", "isometry", "participation", "cos_mean", "copying")),
        )
        .join(pairs.group_by(key).agg(pl.col("mismatch_closure").max().alias("mismatch_maximum")), on=key)
        .join(capacities.collect().group_by(key).agg(CLOSURE.median().alias("capacity")), on=key)
        .join(nulls.collect().group_by(key).agg(pl.col("wins").sum(), pl.col("p").min().alias("smallest_p")), on=key)
        .join(qk.group_by(key).agg(pl.col("symmetric_share").median()), on=key)
    )
    same(atlas.ask("layer-profile", model="llama"), expected, key)


def test_nulls(atlas: Atlas, heads: pl.DataFrame) -> None:
    rows = atlas.table("nulls").collect().join(heads.select(*HEAD, "closure"), on=HEAD)
    for name, by in (("null-summary", []), ("null-by-layer", ["layer"])):
        key = [*STACK, "kind", *by]
        expected = rows.group_by(key).agg(
            CLOSURE.filter(pl.col("p").is_not_null()).median().alias("trained_median"),
            pl.col("median").median().alias("null_median"),
            pl.col("wins").sum(),
        )
        same(atlas.ask(name), expected, key)
        assert set(atlas.ask(name, kind="scramble")["kind"]) == {"scramble"}


def test_mismatch_summary(atlas: Atlas, heads: pl.DataFrame) -> None:
    value = pl.col("mismatch_closure")
    expected = (
        atlas.table("pairs")
        .filter(~pl.col("shared_value"))
        .group_by(STACK)
        .agg(value.median().alias("median"), value.max().alias("maximum"), (value >= THRESHOLD).sum().alias("strong"))
        .collect()
        .join(
            heads.group_by(STACK).agg(CLOSURE.median().alias("trained_median"), STRONG.sum().alias("trained_strong")),
            on=STACK,
        )
        .with_columns((pl.col("trained_median") / pl.col("median")).alias("trained_over_mismatched"))
    )
    same(atlas.ask("mismatch-summary", threshold=THRESHOLD), expected, STACK)


def test_capacity_gap(atlas: Atlas, heads: pl.DataFrame) -> None:
    rows = (atlas.table("capacities").rename({"closure": "capacity"}).collect().join(heads, on=HEAD)).with_columns(
        (pl.col("capacity") - CLOSURE).alias("gap")
    )
    key = [*STACK, "method"]
    expected = rows.group_by(key).agg(
        pl.col("gap").quantile(0.1, "linear").alias("gap_q10"),
        pl.col("gap").quantile(0.9, "linear").alias("gap_q90"),
        (CLOSURE / pl.col("capacity")).median().alias("attainment"),
        pl.col("label").sort_by(CLOSURE / pl.col("capacity")).last().alias("most_attaining"),
        ((pl.col("capacity") >= 0.5) & (CLOSURE < 0.5)).sum().alias("could_be_strong"),
        CLOSURE.median(),
        pl.col("capacity").median(),
        pl.col("gap").median(),
    )
    same(atlas.ask("capacity-gap", threshold=0.5), expected, key)


def test_group_algebra(atlas: Atlas, heads: pl.DataFrame) -> None:
    acting = heads.filter(STRONG).select(*HEAD, "closure", "kv_head").rename({"head": "read_head"})
    key = [*STACK, "layer", "kv_head", "read_head"]
    expected = (
        atlas.table("pairs")
        .filter("shared_value")
        .collect()
        .join(acting, on=[*STACK, "layer", "read_head"])
        .group_by(key)
        .agg(CLOSURE.first(), pl.len().alias("products"), pl.col("right_closure").median().alias("right_median"))
    )
    same(atlas.ask("group-algebra", threshold=THRESHOLD), expected, key)


def steps(atlas: Atlas, heads: pl.DataFrame) -> pl.DataFrame:
    run_of = atlas.table("models").filter(pl.col("lineage") == "tiny").select("model", "lineage", "step").collect()
    rows = heads.join(run_of, on="model")
    final = rows.filter(step=40).select("operator", "stack", "layer", "head", STRONG.alias("finally"))
    cohort = pl.when("finally").then(pl.lit("final strong")).otherwise(pl.lit("others")).alias("cohort")
    return rows.join(final, on=["operator", "stack", "layer", "head"]).with_columns(cohort)


def test_lineage_trajectory(atlas: Atlas, heads: pl.DataFrame) -> None:
    key = ["lineage", "operator", "stack", "cohort", "step"]
    expected = (
        steps(atlas, heads)
        .group_by(key)
        .agg(pl.len().alias("heads"), STRONG.sum().alias("strong"), CLOSURE.median(), pl.col("isometry").median())
    )
    assert set(expected["cohort"]) == {"final strong", "others"}
    same(atlas.ask("lineage-trajectory", threshold=THRESHOLD), expected, key)


def test_onsets(atlas: Atlas, heads: pl.DataFrame) -> None:
    found = atlas.ask("onsets", threshold=THRESHOLD)
    rows = steps(atlas, heads)
    assert len(found) == len(rows) // 3
    onsets = set()
    for (layer, head), of_head in rows.sort("step").group_by("layer", "head"):
        strong = (of_head["closure"] >= THRESHOLD).to_list()
        held = [step for i, step in enumerate(of_head["step"]) if all(strong[i:])]
        (row,) = found.filter(layer=layer, head=head).iter_rows(named=True)
        assert row["onset"] == (held[0] if held else None)
        assert row["final_closure"] == of_head["closure"][-1]
        onsets.add(row["onset"])
    assert len(onsets) > 2


def test_compare_models(atlas: Atlas, heads: pl.DataFrame) -> None:
    expected = heads.group_by(STACK).agg(
        CLOSURE.quantile(0.1, "linear").alias("q10"),
        CLOSURE.quantile(0.75, "linear").alias("q75"),
        STRONG.mean().alias("rate"),
        pl.col("isometry").median(),
    )
    pairs = atlas.table("pairs").filter(~pl.col("shared_value")).group_by(STACK)
    expected = expected.join(pairs.agg(pl.col("mismatch_closure").max().alias("mismatch_maximum")).collect(), on=STACK)
    scrambles = atlas.table("nulls").filter(pl.col("kind") == "scramble").group_by(STACK)
    expected = expected.join(scrambles.agg(pl.col("wins").mean().alias("win_rate")).collect(), on=STACK)
    possible = atlas.table("capacities").filter(pl.col("method") == "assignment").group_by(STACK)
    expected = expected.join(possible.agg(pl.col("closure").median().alias("capacity_median")).collect(), on=STACK)
    same(atlas.ask("compare-models", threshold=THRESHOLD), expected, STACK)


def test_compare_depth(atlas: Atlas, heads: pl.DataFrame) -> None:
    key = ["operator", "stack", "bin", "model"]
    rows = depth_bins(heads, 2).group_by(key).agg(CLOSURE.median().alias("median"), STRONG.mean().alias("rate"))
    others = [
        rows.filter(pl.col("model") != row["model"], operator=row["operator"], stack=row["stack"], bin=row["bin"])[
            "median"
        ].mean()
        for row in rows.iter_rows(named=True)
    ]
    expected = rows.with_columns(pl.Series("others_median", others)).with_columns(
        (pl.col("median") - pl.col("others_median")).alias("difference")
    )
    assert sum(value is not None for value in others) >= 8
    same(atlas.ask("compare-depth", threshold=THRESHOLD, bins=2), expected, key)


def test_size_trends(atlas: Atlas, heads: pl.DataFrame) -> None:
    """Ranks by scipy, which shares those of ties, and slopes by numpy."""
    from scipy.stats import spearmanr

    found = atlas.ask("size-trends", threshold=THRESHOLD, operator="raw")
    models = atlas.table("models").collect()
    rows = (
        heads.filter(operator="raw", stack="decoder")
        .group_by("model")
        .agg(
            CLOSURE.median(),
            STRONG.mean().alias("strong_rate"),
            pl.col("isometry").median(),
            pl.col("participation").median(),
            (pl.col("participation") / pl.col("d_head")).median().alias("participation_share"),
        )
        .join(models.select("model", "d_model", "n_layers", "attention_parameters", "total_parameters"), on="model")
    )
    mine = found.filter(stack="decoder")
    assert len(mine) == 5 * 4
    assert len(found) == 2 * len(mine)
    compared = 0
    for row in mine.iter_rows(named=True):
        extent, measure = rows[row["size"]].to_numpy(), rows[row["statistic"]].to_numpy()
        assert row["models"] == 4
        assert (row["smallest"], row["largest"]) == (extent.min(), extent.max())
        if len(set(extent)) == 1:
            assert row["rank_correlation"] is None
            assert row["slope_per_decade"] is None
            continue
        compared += 1
        assert row["slope_per_decade"] == pytest.approx(np.polyfit(np.log10(extent), measure, 1)[0], rel=1e-6)
        if len(set(measure)) > 1:
            assert row["rank_correlation"] == pytest.approx(spearmanr(extent, measure).statistic)
    assert compared == 15


def test_isometry_summary(atlas: Atlas, heads: pl.DataFrame) -> None:
    value = pl.col("isometry")
    expected = heads.group_by(STACK).agg(
        value.median(),
        value.quantile(0.9, "linear").alias("isometry_q90"),
        value.filter(STRONG).median().alias("isometry_of_strong"),
        value.filter(~STRONG).median().alias("isometry_of_others"),
        pl.col("condition").median(),
        pl.corr("isometry", "closure").alias("correlation_with_closure"),
    )
    same(atlas.ask("isometry-summary", threshold=THRESHOLD), expected, STACK)


def test_query_key_summary(atlas: Atlas) -> None:
    ratio = pl.col("participation_q") / pl.col("participation_k")
    expected = (
        atlas.table("qk")
        .group_by(STACK)
        .agg(ratio.median().alias("q_over_k"), pl.col("symmetric_share").median(), pl.col("cos_mean").median())
    )
    same(atlas.ask("query-key-summary"), expected.collect(), STACK)


def test_suspicious(atlas: Atlas, heads: pl.DataFrame) -> None:
    capacities = atlas.table("capacities").filter(pl.col("method") == "assignment").collect()
    capacity, middle = pl.col("capacity"), pl.col("capacity").median().over(STACK)
    spread = 1.4826 * (capacity - middle).abs().median().over(STACK)
    scrambles = atlas.table("nulls").filter(pl.col("kind") == "scramble").select(*HEAD, "p").collect()
    expected = (
        capacities.rename({"closure": "capacity"})
        .with_columns(middle.alias("capacity_median"))
        .with_columns(((capacity - middle) / spread).alias("capacity_deviations"))
        .join(scrambles, on=HEAD)
        .join(heads, on=HEAD)
        .filter(STRONG, pl.col("p") <= 0.5, pl.col("capacity_deviations").abs() >= 0.7)
        .select(*HEAD, "label", "closure", "p", "capacity", "capacity_median", "capacity_deviations", "attainment")
    )
    assert len(expected) < len(heads)
    same(atlas.ask("suspicious", threshold=THRESHOLD, p=0.5, deviations=0.7), expected, HEAD)


def test_questions_of_both_kinds_from_python(atlas: Atlas) -> None:
    by_name = atlas.ask("closure-by-model", threshold=THRESHOLD, operator="raw", models=("llama", "bert"))
    assert by_name.equals(atlas.ask(closure(THRESHOLD, "model", ["llama", "bert"], "raw")))
    listed = atlas.questions()
    assert listed.columns == ["name", "description", "parameters", "origin"]
    assert listed["name"].to_list() == sorted(NAMES)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("closure-by-modle", {}, "did you mean closure-by-model"),
        ("", {}, "no question named ''"),
        ("closure-by-model", {"treshold": 0.9}, "did you mean threshold?"),
        ("closure-by-model", {"threshold": 1.5}, "expected: 0 to 1"),
        ("closure-by-model", {"threshold": "x"}, "DOUBLE: a number"),
        ("closure-by-model", {"threshold": "nan"}, "DOUBLE: a number"),
        ("closure-by-model", {"threshold": float("nan")}, "DOUBLE: a number"),
        ("closure-by-model", {"threshold": True}, "DOUBLE: a number"),
        ("closure-by-model", {"threshold": None}, "must have a value"),
        ("closure-by-model", {"models": "lama"}, "did you mean llama?"),
        ("closure-by-model", {"models": ["llama", 3]}, "VARCHAR: text"),
        ("closure-by-model", {"models": "[1"}, "in JSON"),
        ("closure-by-model", {"operator": "scaled"}, "one of folded, raw"),
        ("closure-thresholds", {"thresholds": [0.5, 2]}, "expected: 0 to 1"),
        ("strongest-heads", {"how_many": 0}, "at least 1"),
        ("strongest-heads", {"how_many": 2.5}, "BIGINT"),
        ("strongest-heads", {"how_many": 10**30}, "BIGINT"),
        ("layer-profile", {}, "needs a value for model"),
        ("layer-profile", {"model": None}, "must have a value"),
    ],
)
def test_what_cannot_be_asked(atlas: Atlas, store: Path, name: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(QueryError) as caught:
        atlas.ask(name, **values)
    assert words in str(caught.value)
    if all(isinstance(value, str) for value in values.values()):
        arguments = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        result = run("ask", name, *arguments, store=store)
        assert (result.exit_code, result.stdout) == (1, "")
        assert words in result.stderr


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_and_values(atlas: Atlas, store: Path, text: str) -> None:
    """Each is refused or finds nothing, through every entrance, and the store stays what it was."""
    catalogue = (store / "catalog.duckdb").read_bytes()
    with pytest.raises(QueryError, match="no question named"):
        atlas.ask(text)
    with pytest.raises(QueryError):
        atlas.ask("closure-by-model", **{text: 1})
    with pytest.raises(QueryError):
        atlas.ask("layer-profile", model=text)
    bound = questions().named("layer-profile").with_values({"model": text})
    assert atlas.sql(str(bound)).height == atlas.ask(bound).height == 0
    for arguments in (
        ["ask", text or "?"],
        ["ask", "layer-profile", "--set", f"model={text}"],
        ["ask", "closure-by-model", "--set", f"threshold={text}"],
        ["ask", "closure-by-model", "--set", text],
    ):
        result = run(*arguments, store=store)
        assert result.exit_code in (1, 2), arguments
        assert isinstance(result.exception, SystemExit)
    assert (store / "catalog.duckdb").read_bytes() == catalogue


def test_the_command(store: Path) -> None:
    listed = json.loads(run("ask", "--format", "json", store=store).stdout)
    assert [row["name"] for row in listed] == sorted(NAMES)
    answer = ["ask", "closure-by-model", "--set", "threshold=0.02", "--set", "operator=raw", "--set", 'models=["bert"]']
    rows = json.loads(run(*answer, "--format", "json", store=store).stdout)
    assert [row["model"] for row in rows] == ["bert"]
    printed = run(*answer, "--sql", store=store).stdout
    assert "closure_by_model(0.02)" in printed
    assert json.loads(run("sql", printed, "--format", "json", store=store).stdout) == rows
    meanings = json.loads(run("ask", "suspicious", "--parameters", "--format", "json", store=store).stdout)
    assert [row["name"] for row in meanings] == ["threshold", "p", "deviations", "models", "operator"]
    assert run("ask", "layer-profile", "--set", "model=null", store=store).exit_code == 1


def copied(store: Path, folder: Path) -> Path:
    """A store of the same catalogue, to put questions in."""
    own = folder / "atlas"
    (own / "arrays.zarr").mkdir(parents=True)
    (own / "queries").mkdir()
    for name in ("catalog.duckdb", "arrays.zarr/zarr.json"):
        shutil.copyfile(store / name, own / name)
    return own


OWN = """-- question: heads whose alpha is large
-- param size DOUBLE 0.. = 0.5: alpha at or above which a head is kept
-- param names VARCHAR[] of models.model = ["llama"]: models
-- param note VARCHAR: a text to repeat

-- heads of either operator
SELECT label, alpha, :note AS note FROM heads
WHERE alpha >= :size AND list_contains($names, model) AND ':none' <> $note -- :nothing
ORDER BY ALL;
"""


def test_a_question_of_ones_own(store: Path, tmp_path: Path, heads: pl.DataFrame) -> None:
    own = copied(store, tmp_path)
    (own / "queries" / "large-alpha.sql").write_text(OWN)
    with open_atlas(own) as atlas:
        rows = atlas.ask("large-alpha", size=0.01, note="it's")
        assert atlas.questions().filter(name="large-alpha")["parameters"].item() == ("size=0.5, names=['llama'], note")
    expected = heads.filter(pl.col("alpha") >= 0.01, model="llama").sort("label", "alpha")
    assert rows["alpha"].to_list() == expected["alpha"].to_list()
    assert set(rows["note"]) == {"it's"}
    assert "needs a value for note" in run("ask", "large-alpha", store=own).stderr


BAD = {
    "empty": ("", "line 1"),
    "no-question": ("SELECT 1", "line 1"),
    "not-a-parameter": ("-- question: x\n-- threshold 0.9\nSELECT 1", "line 2"),
    "unknown-type": ("-- question: x\n-- param t FLOAT = 1: t\nSELECT $t", "line 2"),
    "no-meaning": ("-- question: x\n-- param t DOUBLE = 1\nSELECT $t", "line 2"),
    "wrong-default": ('-- question: x\n-- param t DOUBLE = "a": t\nSELECT $t', "line 2"),
    "default-out-of-bounds": ("-- question: x\n-- param t DOUBLE 0..1 = 2: t\nSELECT $t", "line 2"),
    "broken-default": ("-- question: x\n-- param t VARCHAR[] = [a]: t\nSELECT $t", "line 2"),
    "bounds-of-text": ("-- question: x\n-- param t VARCHAR 0..1: t\nSELECT $t", "line 2"),
    "bad-bounds": ("-- question: x\n-- param t DOUBLE 0.0.1..1: t\nSELECT $t", "line 2"),
    "no-column": ("-- question: x\n-- param t VARCHAR of models.nam: t\nSELECT $t", "line 2"),
    "twice": ("-- question: x\n-- param t DOUBLE: t\n-- param T DOUBLE: t\nSELECT $t", "line 3"),
    "no-statement": ("-- question: x\n-- param t DOUBLE: t\n", "line 3"),
    "undeclared": ("-- question: x\n-- param t DOUBLE: t\n\nSELECT $t,\n :u", "line 5"),
    "unused": ("-- question: x\n-- param t DOUBLE: t\n-- param u DOUBLE: u\nSELECT $t, ':u'", "line 3"),
    "Capital": ("-- question: x\nSELECT 1", "Capital.sql"),
    "a b": ("-- question: x\nSELECT 1", "a b.sql"),
    "closure-by-model": ("-- question: mine\nSELECT 1", "belongs to a question of the program"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_with_a_fault_is_one_error_and_takes_nothing_away(tmp_path: Path, name: str) -> None:
    text, place = BAD[name]
    folder = tmp_path / "queries"
    folder.mkdir()
    (folder / f"{name}.sql").write_text(text)
    (folder / "good.sql").write_text("-- question: good\nSELECT 1 AS one")
    found = questions(tmp_path)
    assert set(found.by_name) == {*NAMES, "good"}
    with pytest.raises(QueryError) as caught:
        found.named(name)
    assert place in str(caught.value)
    assert str(folder / f"{name}.sql") in str(caught.value)
    result = run("ask", store=tmp_path)
    assert result.exit_code == 0
    assert "good" in result.stdout
    assert result.stderr.count("warning:") == 1
    assert found.by_name["closure-by-model"].origin == BUILT_IN


def test_files_that_are_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "queries"
    folder.mkdir()
    (folder / "bytes.sql").write_bytes(b"-- question: \xff\nSELECT 1")
    (folder / "directory.sql").mkdir()
    (folder / "dangling.sql").symlink_to(tmp_path / "nothing")
    (folder / "marked.sql").write_bytes(b"\xef\xbb\xbf-- question: with a mark\r\nSELECT 1\r\n")
    found = questions(tmp_path)
    assert set(found.faults) == {"bytes", "directory", "dangling"}
    assert found.by_name["marked"].description == "with a mark"


def test_a_question_that_does_more_than_read_is_refused(store: Path, tmp_path: Path) -> None:
    own = copied(store, tmp_path)
    for name, statement in (("copies", f"COPY heads TO '{tmp_path}/x'"), ("two", "SELECT 1; SELECT 2")):
        (own / "queries" / f"{name}.sql").write_text(f"-- question: x\n{statement}")
        assert "single reading statement" in run("ask", name, store=own).stderr
    assert not (tmp_path / "x").exists()


def test_defaults_keep_their_type() -> None:
    text = '-- question: x\n-- param a DOUBLE = 1: a: b\n-- param b VARCHAR = "c: d": e\n-- param c BOOLEAN = true: f\n'
    question = parsed("x", text + "SELECT $a, $b, $c", "x.sql", "x")
    assert question.with_values({}).parameters == {"a": 1.0, "b": "c: d", "c": True}
    assert [parameter.meaning for parameter in question.parameters] == ["a: b", "e", "f"]
    assert question.with_values({"c": "FALSE", "b": "null"}).parameters == {"a": 1.0, "b": "null", "c": False}


def test_the_list_of_questions_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_questions", ROOT / "docs" / "make_questions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "questions.md").read_text() == "\n".join(module.lines()) + "\n"
