"""Models side by side, against hand-written Polars, NumPy and SciPy, and what may not be compared."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.stats
import torch
from click.testing import CliRunner, Result

import cli
from query import Atlas, open_atlas
from query.comparison import GROUPINGS, compare
from query.selection import Selection, select
from stats.errors import QueryError
from stats.inference import ClusteredHeads, cluster_interval, rate_difference_interval, rate_interval, weighted_median
from tests import checkpoints
from tests.ingesting import ingest_into

THRESHOLD = 0.02
NAMES = ["llama", "deep", "tuned", "twin"]
STATISTIC = """from store.user_statistics import statistic

@statistic(meaning="largest share of a direction", values="0 to 1")
def largest_share(sigma):
    return sigma[:, 0] ** 2 / (sigma**2).sum(-1)
"""


@pytest.fixture(scope="module")
def store(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside ``llama`` and ``bert``: one deeper, one with a layer tuned and a head dead, a copy, two T5."""
    root = tmp_path_factory.mktemp("comparison")
    store = Path(shutil.copytree(sealed_store, root / "atlas"))
    base = checkpoints.llama(layers=3)
    value, output = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "vo")
    generator = torch.Generator().manual_seed(5)
    written = base.tensors[output] + 0.05 * torch.randn(base.tensors[output].shape, generator=generator)
    written[:, -8:] = 0
    models = {
        "deep": checkpoints.llama(layers=7, seed=1),
        "tuned": base.changed(**{output: written, value: 1.01 * base.tensors[value]}),
        "twin": base,
        "t5": t5(seed=0),
        "other": t5(seed=1),
    }
    for name, model in models.items():
        ingest_into(store, checkpoints.save_safetensors(model, root / name), name)
    (root / "mine.py").write_text(STATISTIC, encoding="utf-8")
    derived = CliRunner().invoke(cli.main, ["derive", str(root / "mine.py"), "llama", "deep", "--store", str(store)])
    assert derived.exit_code == 0, derived.output
    return store


@pytest.fixture(scope="module")
def atlas(store: Path) -> Iterator[Atlas]:
    with open_atlas(store) as opened:
        yield opened


def values(atlas: Atlas, model: str, column: str = "closure") -> pl.DataFrame:
    return atlas.sql(
        f"SELECT layer, head, label, {column} AS value FROM heads "
        "WHERE model = $model AND operator = 'raw' ORDER BY layer, head",
        {"model": model},
    )


def invented(**models: list[list[float | None]]) -> Selection:
    """Models with given closures, a list of heads for each layer."""
    rows = [
        ("raw", "decoder", model, layer, head, f"L{layer}H{head}", head, 32, 8, value)
        for model, layers in models.items()
        for layer, heads in enumerate(layers)
        for head, value in enumerate(heads)
    ]
    names = ["operator", "stack", "model", "layer", "head", "label", "kv_head", "d_model", "d_head", "value"]
    heads = pl.DataFrame(rows, schema=names, orient="row").with_columns(
        pl.col("value").cast(pl.Float64), pl.col("layer", "head").cast(pl.Int32)
    )
    return Selection(tuple(models), "closure", ("decoder",), {}, heads)


def t5(seed: int) -> checkpoints.Model:
    """One layer of each of an encoder, a decoder and cross-attention."""
    generator = torch.Generator().manual_seed(seed)
    places = {
        "encoder.block.0.layer.0.SelfAttention": "encoder.block.0.layer.0",
        "decoder.block.0.layer.0.SelfAttention": "decoder.block.0.layer.0",
        "decoder.block.0.layer.1.EncDecAttention": "decoder.block.0.layer.1",
    }
    tensors = {f"{layer}.layer_norm.weight": torch.ones(32) for layer in places.values()}
    for place in places:
        tensors |= {f"{place}.{name}.weight": torch.randn(32, 32, generator=generator) for name in "qkvo"}
    tensors["shared.weight"] = torch.randn(48, 32, generator=generator)
    config = {"model_type": "t5", "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1}
    return checkpoints.Model(config, tensors)


def run(store: Path, *arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["compare", *map(str, arguments), "--store", str(store)])


@pytest.mark.parametrize(("column", "threshold"), [("closure", THRESHOLD), ("norm", 2.0), ("rank", 8)])
def test_each_model_is_described_as_numpy_describes_it(atlas: Atlas, column: str, threshold: float) -> None:
    frame = atlas.compare(NAMES, column, threshold=threshold)
    assert frame["model"].to_list() == NAMES
    for row in frame.iter_rows(named=True):
        all_values = values(atlas, row["model"], column)["value"]
        own = all_values.drop_nulls().to_numpy()
        assert (row["operator"], row["stack"]) == ("raw", "decoder")
        assert (row["heads"], row["defined"]) == (len(all_values), len(own))
        for name, share in (("q25", 0.25), ("median", 0.5), ("q75", 0.75), ("q90", 0.9), ("maximum", 1)):
            assert row[name] == pytest.approx(np.quantile(own, share), rel=1e-12)
        assert row["strong"] == (own >= threshold).sum()
        assert row["rate"] == pytest.approx((own >= threshold).mean())


def test_effects_against_the_first_model_are_those_of_brute_force(atlas: Atlas) -> None:
    frame = atlas.compare(NAMES, threshold=THRESHOLD)
    first = values(atlas, "llama")["value"].drop_nulls().to_numpy()
    assert frame.row(0, named=True)["delta"] is None
    for row in frame[1:].iter_rows(named=True):
        own = values(atlas, row["model"])["value"].drop_nulls().to_numpy()
        delta = np.sign(own[:, None] - first[None, :]).mean()
        assert row["delta"] == pytest.approx(delta, abs=1e-12)
        statistic = scipy.stats.mannwhitneyu(own, first).statistic
        assert (1 + row["delta"]) / 2 == pytest.approx(statistic / (len(own) * len(first)), abs=1e-12)
        assert row["median_difference"] == pytest.approx(np.median(own) - np.median(first), abs=1e-15)
        assert row["rate_difference"] == pytest.approx((own >= THRESHOLD).mean() - (first >= THRESHOLD).mean())
        for name in ("median_difference", "rate_difference", "delta"):
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def test_the_interval_of_a_difference_is_that_of_layers_drawn_by_hand() -> None:
    generator = np.random.default_rng(3)
    layers = {name: generator.gamma(2, 0.05 + 0.05 * (name == "b"), (12, 6)) for name in "ab"}
    row = compare(invented(**{name: drawn.tolist() for name, drawn in layers.items()})).row(1, named=True)
    found = [
        [np.median(drawn[generator.integers(0, 12, 12)]) for _ in range(4000)] for drawn in (layers["b"], layers["a"])
    ]
    widened = np.sqrt(24 / 22) * scipy.stats.t.isf(0.025, 22)
    low, high = np.quantile(np.subtract(*found), scipy.stats.norm.cdf([-widened, widened]))
    width = high - low
    assert row["median_difference_low"] == pytest.approx(low, abs=0.1 * width)
    assert row["median_difference_high"] == pytest.approx(high, abs=0.1 * width)


def test_a_planted_difference_is_found_and_none_where_there_is_none() -> None:
    generator = np.random.default_rng(0)
    base = generator.uniform(0.1, 0.5, (20, 8))
    planted = invented(
        base=base.tolist(), same=generator.uniform(0.1, 0.5, (20, 8)).tolist(), higher=(base + 0.3).tolist()
    )
    _, same, higher = compare(planted, threshold=0.45).iter_rows(named=True)
    for name, expected in (("median_difference", 0.3), ("rate_difference", None), ("delta", None)):
        assert same[f"{name}_low"] < 0 < same[f"{name}_high"]
        assert higher[f"{name}_low"] > 0
        assert expected is None or higher[f"{name}_low"] <= expected <= higher[f"{name}_high"]
    pair = compare(planted, "pair").row(1, named=True)
    for bound in ("", "_low", "_high"):
        assert pair[f"paired_difference{bound}"] == pytest.approx(0.3)


def test_the_difference_of_rates_recovers_both_wilson_intervals() -> None:
    generator = np.random.default_rng(8)
    layer = np.repeat(np.arange(15), 6)
    samples = [ClusteredHeads(generator.random(90) < rate, layer) for rate in (0.2, 0.4)]
    (p, q), found = [rate_interval(sample) for sample in samples], rate_difference_interval(*samples)
    assert found.estimate == p.estimate - q.estimate
    low = found.estimate - np.sqrt((p.estimate - p.low) ** 2 + (q.high - q.estimate) ** 2)
    high = found.estimate + np.sqrt((p.high - p.estimate) ** 2 + (q.estimate - q.low) ** 2)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert (found.n_heads, found.n_clusters) == (180, 30)
    mirrored = rate_difference_interval(*samples[::-1])
    assert (-mirrored.high, -mirrored.low) == pytest.approx((found.low, found.high))
    none = [ClusteredHeads(np.zeros(90), layer)] * 2
    assert rate_difference_interval(*none).low < 0 < rate_difference_interval(*none).high
    single = ClusteredHeads(np.zeros(4), np.zeros(4))
    assert np.isnan(rate_difference_interval(single, none[0]).low)


def test_the_difference_of_rates_agrees_with_newcombe_where_heads_are_independent() -> None:
    """Newcombe 1998, table II (a), method 10: 56/70 less 48/80 is 0.0524 to 0.3339; t is near normal here."""
    samples = [ClusteredHeads(np.arange(n) < count, np.arange(n)) for count, n in ((56, 70), (48, 80))]
    found = rate_difference_interval(*samples)
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=0.003)


def test_depth_is_matched_layer_by_layer(atlas: Atlas) -> None:
    bins = 3
    frame = atlas.compare(["llama", "deep"], by="depth", bins=bins)
    assert frame.select("bin", "model").rows() == [
        (number, name) for number in range(bins) for name in ("llama", "deep")
    ]
    medians = {}
    for row in frame.iter_rows(named=True):
        heads = values(atlas, row["model"])
        depth = heads["layer"].to_numpy() / heads["layer"].max()
        last = row["bin"] == bins - 1
        inside = (depth >= row["bin"] / bins) & ((depth < (row["bin"] + 1) / bins) | last)
        assert row["heads"] == row["defined"] == inside.sum() > 0
        assert row["layers"] == len(set(heads["layer"].to_numpy()[inside]))
        medians[row["model"]] = np.median(heads["value"].to_numpy()[inside])
        assert row["median"] == pytest.approx(medians[row["model"]], rel=1e-12)
        if row["model"] == "deep":
            assert row["difference"] == pytest.approx(medians["deep"] - medians["llama"])
        else:
            assert row["difference"] is None
        assert (row["depth_from"], row["depth_to"]) == pytest.approx((row["bin"] / bins, (row["bin"] + 1) / bins))


def test_depth_counts_layers_with_rows_and_leaves_empty_bins() -> None:
    selection = invented(thin=[[0.1], [0.2], [0.9]], one=[[0.4, 0.6]])
    gaps = selection.heads.with_columns(pl.col("layer") * 5)
    rows = compare(Selection(selection.models, "closure", ("decoder",), {}, gaps), "depth", bins=4)
    thin, one = (rows.filter(pl.col("model") == name) for name in ("thin", "one"))
    assert thin["median"].to_list() == [0.1, None, 0.2, 0.9]
    assert thin["heads"].to_list() == [1, 0, 1, 1]
    assert one["median"].to_list() == [0.5, None, None, None]
    assert one["difference"].to_list() == [pytest.approx(0.4), None, None, None]


def test_heads_are_paired_and_the_largest_difference_comes_first(atlas: Atlas) -> None:
    frame = atlas.compare(["llama", "tuned"], by="head")
    first, tuned = (values(atlas, name).rows_by_key(["layer", "head"], unique=True) for name in ("llama", "tuned"))
    assert len(frame) == len(first) == 12
    for row in frame.iter_rows(named=True):
        place = (row["layer"], row["head"])
        assert (row["label"], row["first_value"]) == first[place]
        assert row["value"] == tuned[place][1]
        if row["value"] is not None:
            assert row["difference"] == row["value"] - row["first_value"]
            assert (row["difference"] == 0) == (row["layer"] != 1)
    sizes = frame["difference"].abs().to_list()
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[-1] is None
    assert frame.row(-1, named=True)["label"] == "L1H3"
    tied = frame.filter(pl.col("difference") == 0).select("layer", "head").rows()
    assert tied == sorted(tied)


def test_pairs_are_summed_up_as_scipy_does(atlas: Atlas) -> None:
    for column in ("closure", "norm"):
        frame = atlas.compare(["llama", "tuned", "twin"], column, by="pair")
        assert frame["model"].to_list() == ["tuned", "twin"]
        first = values(atlas, "llama", column)
        for row in frame.iter_rows(named=True):
            own = values(atlas, row["model"], column)
            both = (first["value"].is_not_null() & own["value"].is_not_null()).to_numpy()
            x, y = first["value"].to_numpy()[both], own["value"].to_numpy()[both]
            assert (row["heads"], row["defined"], row["first"]) == (12, len(x), "llama")
            assert row["pearson"] == pytest.approx(scipy.stats.pearsonr(x, y).statistic)
            assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
            assert row["within_1_percent"] == pytest.approx((abs(y - x) <= 0.01 * abs(x)).mean())
            largest = np.argmax(abs(y - x))
            assert row["largest_difference"] == (y - x)[largest]
            assert row["largest_head"] == first["label"].to_list()[np.flatnonzero(both)[largest]]
            layers = first["layer"].to_numpy()[both]
            interval = cluster_interval(ClusteredHeads(y - x, layers), weighted_median)
            found = tuple(row[f"paired_difference{bound}"] for bound in ("", "_low", "_high"))
            assert found == (interval.estimate, interval.low, interval.high)
            assert row["paired_difference"] == np.median(y - x)
    assert atlas.compare(["llama", "tuned"], by="pair")["defined"].item() == 11


def test_one_percent_is_of_the_first_models_value() -> None:
    pairs = invented(a=[[0.1, 0.2], [0.4, 0.5]], b=[[0.1009, 0.2021], [0.3961, 0.5075]])
    assert compare(pairs, "pair")["within_1_percent"].item() == 0.5


def test_spearman_shares_ranks_between_ties() -> None:
    x, y = [0.1, 0.1, 0.2, 0.4, 0.4, 0.9], [0.3, 0.1, 0.1, 0.2, 0.8, 0.8]
    row = compare(invented(x=[x[:3], x[3:]], y=[y[:3], y[3:]]), "pair").row(0, named=True)
    assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(x, y).statistic)


def test_models_that_are_the_same_differ_by_nothing(atlas: Atlas) -> None:
    pair = atlas.compare(["llama", "twin"], by="pair").row(0, named=True)
    assert [pair[f"paired_difference{bound}"] for bound in ("", "_low", "_high")] == [0, 0, 0]
    assert pair["pearson"] == pytest.approx(1)
    assert pair["spearman"] == pytest.approx(1)
    assert (pair["within_1_percent"], pair["largest_difference"]) == (1, 0)
    assert set(atlas.compare(["llama", "twin"], by="head")["difference"]) == {0.0}
    effects = atlas.compare(["llama", "twin"]).row(1, named=True)
    assert [effects[name] for name in ("median_difference", "rate_difference", "delta")] == [0, 0, 0]
    depth = atlas.compare(["llama", "twin"], by="depth", bins=3)
    assert set(depth.filter(pl.col("model") == "twin")["difference"]) == {0.0}


def test_seeds_reproduce_and_differ(atlas: Atlas) -> None:
    for by in ("model", "pair"):
        frames = [atlas.compare(["llama", "tuned"], by=by, seed=seed) for seed in (0, 0, 1)]
        assert frames[0].equals(frames[1])
    selection = invented(
        a=np.random.default_rng(1).random((9, 5)).tolist(), b=np.random.default_rng(2).random((9, 5)).tolist()
    )
    for by in ("model", "pair"):
        assert compare(selection, by).equals(compare(selection, by, seed=0))
        drawn, other = (compare(selection, by, seed=seed).row(-1, named=True) for seed in (0, 1))
        for name in ("median_difference", "delta") if by == "model" else ("paired_difference",):
            bounds = [[row[f"{name}_low"], row[f"{name}_high"]] for row in (drawn, other)]
            assert bounds[0] != bounds[1], name


def test_the_order_of_models_changes_no_description(atlas: Atlas) -> None:
    described = ["model", "heads", "defined", "q25", "median", "q75", "q90", "maximum", "strong", "rate"]
    for by, columns in (("model", described), ("depth", ["bin", "model", "layers", "heads", "defined", "median"])):
        frames = [atlas.compare(names, by=by).select(columns) for names in (NAMES, NAMES[::-1])]
        keys = columns[: columns.index("model") + 1]
        assert frames[0].sort(keys).equals(frames[1].sort(keys))
        assert frames[1]["model"].to_list()[: len(NAMES)] == NAMES[::-1]


def test_undefined_heads_leave_effects_undefined(atlas: Atlas) -> None:
    selection = invented(a=[[None, None], [None, None]], b=[[0.1, 0.2], [0.3, None]])
    first, second = compare(selection).iter_rows(named=True)
    assert (first["heads"], first["defined"], first["median"], first["rate"]) == (4, 0, None, None)
    assert (second["median"], second["strong"]) == (0.2, 0)
    assert [value for name, value in second.items() if "difference" in name or "delta" in name] == [None] * 9
    pair = compare(selection, "pair").row(0, named=True)
    assert (pair["heads"], pair["defined"]) == (4, 0)
    assert {pair[name] for name in ("pearson", "spearman", "paired_difference", "largest_head")} == {None}
    flat = compare(invented(a=[[0.5], [0.5]], b=[[0.1], [0.2]]), "pair").row(0, named=True)
    assert (flat["pearson"], flat["spearman"]) == (None, None)
    for by in GROUPINGS:
        assert compare(selection, by).schema == atlas.compare(["llama", "twin"], by=by).schema


def test_a_column_without_a_threshold_has_no_rate(atlas: Atlas) -> None:
    frame = atlas.compare(["llama", "deep"], "participation")
    assert frame["strong"].to_list() == frame["rate"].to_list() == frame["rate_difference"].to_list() == [None, None]
    assert frame.columns == atlas.compare(["llama", "deep"]).columns
    assert frame.schema == atlas.compare(["llama", "deep"]).schema


REFUSED = {
    "one model": (["llama"], {}, "two or more models"),
    "no model": ([], {}, "two or more models"),
    "one twice": (["llama", "deep", "llama"], {}, "each once"),
    "an unknown model": (["llama", "lama"], {}, "did you mean llama"),
    "an unknown column": (["llama", "deep"], {"column": "closur"}, "did you mean closure"),
    "a column of text": (["llama", "deep"], {"column": "label"}, "'label' is not a numeric column"),
    "a column that is an injection": (["llama", "deep"], {"column": 'closure" FROM heads --'}, "no column"),
    "an operator one lacks": (["llama", "deep"], {"operator": "folded"}, "deep: raw"),
    "an operator all lack": (["llama", "deep"], {"operator": "scaled"}, "llama: folded, raw"),
    "no stack in common": (["llama", "bert"], {}, "no stack in common"),
    "a stack one lacks": (["llama", "deep"], {"stacks": ["vision"]}, "not every model has the stack vision"),
    "a threshold": (["llama", "deep"], {"threshold": 1.5}, "threshold out of range"),
    "no bins": (["llama", "deep"], {"by": "depth", "bins": 0}, "1 to 1000"),
    "a grouping": (["llama", "deep"], {"by": "layer"}, "one of model, depth, head, pair"),
    "other shapes by head": (["llama", "deep"], {"by": "head"}, "3 layers against 7"),
    "other shapes by pair": (["llama", "twin", "deep"], {"by": "pair"}, "llama and deep, decoder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_be_compared_is_one_error(case: str, atlas: Atlas) -> None:
    models, asked, said = REFUSED[case]
    with pytest.raises(QueryError, match=said):
        atlas.compare(models, **asked)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (pl.when(pl.col("layer") == 1).then(7).otherwise("layer").alias("layer"), "layer 1 against layer 7"),
        (pl.when(pl.col("layer") == 1).then(16).otherwise("d_head").alias("d_head"), "layer 1: d_head 8 against 16"),
        (pl.lit(64).alias("d_model"), "layer 0: d_model 32 against 64"),
        (pl.col("head").floordiv(2).alias("kv_head"), "layer 0: value heads 2 against 1"),
    ],
)
def test_shapes_are_refused_by_what_differs(change: pl.Expr, said: str) -> None:
    selection = invented(a=[[0.1, 0.2], [0.3, 0.4]], b=[[0.1, 0.2], [0.3, 0.4]])
    own = pl.col("model") == "a"
    heads = pl.concat(
        [selection.heads.filter(own), selection.heads.filter(~own).with_columns(change)], how="vertical_relaxed"
    )
    with pytest.raises(QueryError, match=said):
        compare(Selection(selection.models, "closure", ("decoder",), {}, heads), "head")


def test_other_stacks_are_left_out_aloud(store: Path, atlas: Atlas) -> None:
    selection = select(atlas, ["t5", "llama"])
    assert selection.stacks == ("decoder",)
    assert selection.left_out == {"t5": ("cross", "encoder")}
    assert set(compare(selection)["stack"]) == {"decoder"}
    assert select(atlas, ["t5", "bert"], stacks=["encoder"]).stacks == ("encoder",)
    result = run(store, "t5", "llama")
    assert result.exit_code == 0
    assert result.stderr == "t5: left out cross, encoder, which not every model has\n"


def test_every_shared_stack_has_rows_of_its_own(store: Path, atlas: Atlas) -> None:
    models, stacks = ["t5", "other"], ["cross", "decoder", "encoder"]
    frame = atlas.compare(models, "norm")
    assert frame.select("stack", "model").rows() == [(stack, model) for stack in stacks for model in models]
    chosen = run(store, *models, "--column", "norm", "--stack", "decoder", "--stack", "encoder", "--format", "csv")
    kept = frame.filter(pl.col("stack") != "cross").select("stack", "median")
    assert pl.read_csv(io.BytesIO(chosen.stdout_bytes)).select("stack", "median").equals(kept)
    assert atlas.compare(models, by="pair").select("stack", "defined").rows() == [
        ("cross", 0),
        ("decoder", 4),
        ("encoder", 4),
    ]
    depth = atlas.compare(models, "norm", by="depth", bins=1)
    assert depth["median"].to_list() == frame["median"].to_list()
    medians = frame["median"].to_list()
    assert depth["difference"].to_list()[1::2] == [medians[place + 1] - medians[place] for place in (0, 2, 4)]
    heads = atlas.compare(models, "norm", by="head")
    assert len(heads) == 12
    assert heads["difference"].abs().is_sorted(descending=True)


@pytest.mark.parametrize("by", GROUPINGS)
def test_the_command_prints_what_python_answers(store: Path, by: str, tmp_path: Path) -> None:
    result = run(store, "llama", "tuned", "--by", by, "--format", "csv")
    assert result.exit_code == 0, result.output
    with open_atlas(store) as atlas:
        expected = atlas.compare(["llama", "tuned"], by=by)
    assert pl.read_csv(io.BytesIO(result.stdout_bytes), schema=expected.schema).equals(expected)
    file = tmp_path / "rows.parquet"
    assert run(store, "llama", "tuned", "--by", by, "--format", "parquet", "--output", file).exit_code == 0
    assert pl.read_parquet(file).equals(expected)


def test_the_command_refuses_as_other_commands_do(store: Path) -> None:
    assert run(store).exit_code == 2
    assert run(store, "llama", "tuned", "--bins", 3).exit_code == 2
    assert run(store, "llama", "tuned", "--by", "depth", "--threshold", 0.5).exit_code == 2
    refused = run(store, "llama", "deep", "--by", "head")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: models of different shape have no heads to pair")
    assert "Traceback" not in refused.stderr


def test_ones_own_statistic_is_a_column_like_any(atlas: Atlas) -> None:
    frame = atlas.compare(["llama", "deep", "twin"], "largest_share", threshold=0.3)
    shares = [1 / values(atlas, name, "stable_rank")["value"].to_numpy() for name in ("llama", "deep")]
    assert frame["median"].to_list() == [*(pytest.approx(np.median(share)) for share in shares), None]
    assert frame["rate"].to_list() == [*((share >= 0.3).mean() for share in shares), None]
