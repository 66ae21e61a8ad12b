"""Intervals of closure rates and medians: bounds by a second route, and nothing said where nothing is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.stats
import torch
from click.testing import CliRunner

from cli import main
from query import Atlas, open_atlas
from query.intervals import closure_intervals
from stats.errors import HeadatlasError, QueryError
from tests import checkpoints
from tests.ingesting import ingest_into

LAYERS, HEADS, GROUPS, D_HEAD = 10, 8, 2, 8
THRESHOLD = 0.3

pytestmark = pytest.mark.usefixtures("one_thread")


def alike_in_groups() -> checkpoints.Model:
    """80 heads whose closure depends mostly on their value group: O is noise and as much of V as the group says."""
    sizes: dict[str, int] = {"layers": LAYERS, "d_model": 64, "heads": HEADS, "kv_heads": GROUPS, "d_head": D_HEAD}
    model = checkpoints.llama(**sizes, seed=3)
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.self_attn.{{}}.weight"
        value = model.tensors[name.format("v_proj")].unflatten(0, (GROUPS, D_HEAD))
        share = 2 * torch.rand(GROUPS, 1, 1, generator=generator)
        added = (share * value).repeat_interleave(HEADS // GROUPS, 0).flatten(0, 1).T
        tensors[name.format("o_proj")] = (model.tensors[name.format("o_proj")] + added).contiguous()
    return model.changed(**tensors)


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atlas]:
    """Models with shared values, with own values, with a single layer, and with nothing but zeros."""
    root = tmp_path_factory.mktemp("intervals")
    zero = checkpoints.llama(layers=2)
    zero = zero.changed(**{name: 0 * tensor for name, tensor in zero.tensors.items() if "o_proj" in name})
    models = {
        "alike": alike_in_groups(),
        "own": checkpoints.bert(layers=4),
        "single": checkpoints.llama(layers=1),
        "zero": zero,
    }
    for name, model in models.items():
        source = checkpoints.save_safetensors(model, root / name)
        ingest_into(root / "atlas", source, name, ("raw", "folded") if name == "alike" else ("raw",))
    with open_atlas(root / "atlas") as opened:
        yield opened


def of(frame: pl.DataFrame, model: str, operator: str = "raw") -> dict[str, Any]:
    return frame.row(by_predicate=(pl.col("model") == model) & (pl.col("operator") == operator), named=True)


def layers_of(atlas: Atlas, model: str = "alike", operator: str = "raw") -> list[np.ndarray]:
    """Closure of the heads of every layer."""
    heads = atlas.table("heads").filter(model=model, operator=operator).collect()
    return [part["closure"].to_numpy() for _, part in heads.group_by("layer", maintain_order=True)]


def resampled(layers: list[np.ndarray], statistic: Any) -> np.ndarray:
    """The statistic of 10,000 models whose layers are drawn one by one."""
    picks = np.random.default_rng(99).integers(0, len(layers), (10_000, len(layers)))
    return np.array([statistic(np.concatenate([layers[pick] for pick in drawn])) for drawn in picks])


def design_effect(groups: list[np.ndarray]) -> float:
    """From Fisher's F over groups of m: rho = (F - 1) / (F + m - 1)."""
    (m,) = {len(group) for group in groups}
    ratio = scipy.stats.f_oneway(*groups).statistic
    return 1 + (m - 1) * max(0.0, (ratio - 1) / (ratio + m - 1))


def test_rates_and_medians_are_those_of_hand_written_sql(atlas: Atlas) -> None:
    found = atlas.closure_intervals(THRESHOLD)
    expected = atlas.sql(
        "SELECT model, operator, stack, count(*) AS heads, count(closure) AS defined, "
        f"count(*) FILTER (closure >= {THRESHOLD}) AS strong, "
        f"avg((closure >= {THRESHOLD})::INTEGER) AS rate, median(closure) AS median, "
        "count(DISTINCT layer) FILTER (closure IS NOT NULL) AS layers, "
        "count(DISTINCT (layer, kv_head)) FILTER (closure IS NOT NULL) AS value_groups "
        "FROM heads GROUP BY ALL ORDER BY model, operator DESC, stack"
    )
    assert found.select(expected.columns).equals(expected)
    assert 10 < of(found, "alike")["strong"] < 70
    with_bounds = found.drop_nulls("median_low")
    assert set(with_bounds["model"]) == {"alike", "own"}
    for name in ("rate", "median"):
        assert (with_bounds[f"{name}_low"] <= with_bounds[name]).all()
        assert (with_bounds[name] <= with_bounds[f"{name}_high"]).all()


@pytest.mark.parametrize("operator", ["raw", "folded"])
def test_bootstrap_bounds_are_those_of_layers_drawn_one_by_one(atlas: Atlas, operator: str) -> None:
    """At percentiles widened for the number of layers (Hesterberg 2015), four standard errors either way."""
    row = of(atlas.closure_intervals(THRESHOLD), "alike", operator)
    layers = layers_of(atlas, operator=operator)
    wide = np.sqrt(LAYERS / (LAYERS - 1)) * scipy.stats.t.ppf(0.975, LAYERS - 1)
    tail = scipy.stats.norm.cdf(-wide)
    error = 4 * np.sqrt(tail * (1 / 2000 + 1 / 10_000))
    for name, statistic in (("rate", lambda heads: (heads >= THRESHOLD).mean()), ("median", np.median)):
        drawn = resampled(layers, statistic)
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        for beyond, up_to in (((drawn < low), (drawn <= low)), ((drawn > high), (drawn >= high))):
            assert beyond.mean() - error < tail < up_to.mean() + error
    assert row["rate_method"] == "bootstrap"


def test_wilson_bounds_solve_their_equation(atlas: Atlas) -> None:
    """``(p - rate)^2 = t^2 p (1 - p) / effective_heads`` (Wilson 1927), with Student's t for the number of layers."""
    row = of(atlas.closure_intervals(THRESHOLD, ["alike"], "raw", "wilson"), "alike")
    extra = scipy.stats.t.ppf(0.975, LAYERS - 1) ** 2 / row["effective_heads"]
    roots = np.roots([1 + extra, -2 * row["rate"] - extra, row["rate"] ** 2])
    assert [row["rate_low"], row["rate_high"]] == pytest.approx(sorted(roots), rel=1e-12)
    assert row["rate_method"] == "wilson"


def test_design_effects_follow_from_fishers_f(atlas: Atlas) -> None:
    row = of(atlas.closure_intervals(THRESHOLD), "alike")
    layers = layers_of(atlas)
    above = [layer > np.median(np.concatenate(layers)) for layer in layers]
    groups = [group for layer in above for group in np.split(layer, GROUPS)]
    assert row["design_effect"] == pytest.approx(design_effect([layer >= THRESHOLD for layer in layers]))
    assert row["median_design_effect"] == pytest.approx(design_effect(above))
    assert row["value_group_effect"] == pytest.approx(design_effect(groups))
    assert row["effective_heads"] == pytest.approx(80 / row["design_effect"])
    assert row["median_effective_heads"] == pytest.approx(80 / row["median_design_effect"])
    assert (row["layers"], row["value_groups"]) == (LAYERS, LAYERS * GROUPS)
    assert row["value_group_effect"] > 2


def test_heads_that_share_values_widen_the_interval(atlas: Atlas) -> None:
    row = of(atlas.closure_intervals(THRESHOLD, method="wilson"), "alike")
    naive = scipy.stats.binomtest(row["strong"], row["heads"]).proportion_ci(method="wilson")
    assert row["rate_high"] - row["rate_low"] > 1.3 * (naive.high - naive.low)


def test_own_values_cost_nothing(atlas: Atlas) -> None:
    row = of(atlas.closure_intervals(THRESHOLD), "own")
    assert (row["value_groups"], row["value_group_effect"]) == (row["heads"], 1)


@pytest.mark.parametrize("method", ["bootstrap", "wilson"])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_all_or_none_has_wilson_bounds_with_a_layer_as_one_head(atlas: Atlas, method: Any, threshold: float) -> None:
    row = of(atlas.closure_intervals(threshold, method=method), "alike")
    square = scipy.stats.t.ppf(0.975, LAYERS - 1) ** 2
    reach = square / (LAYERS + square)
    bounds = (1 - reach, 1) if threshold == 0 else (0, reach)
    assert (row["rate_low"], row["rate_high"]) == pytest.approx(bounds, abs=1e-12)
    assert (row["rate"], row["rate_method"]) == (1 - threshold, "wilson")
    assert (row["design_effect"], row["effective_heads"]) == (HEADS, LAYERS)


def test_what_is_not_known_is_null(atlas: Atlas) -> None:
    found = atlas.closure_intervals(0.01)
    single, zero = of(found, "single"), of(found, "zero")
    assert single["median"] is not None
    assert {single[name] for name in ("rate_low", "rate_high", "rate_method", "median_low", "median_high")} == {None}
    assert (zero["heads"], zero["defined"], zero["strong"], zero["layers"], zero["value_groups"]) == (8, 0, 0, 0, 0)
    numbers = [name for name, kind in found.schema.items() if kind == pl.Float64]
    assert {zero[name] for name in numbers} == {None}
    assert not any(found[name].is_nan().any() for name in numbers)


def test_models_operators_seeds_and_levels(atlas: Atlas) -> None:
    everything = atlas.closure_intervals(THRESHOLD)
    assert everything.select("model", "operator").rows() == [
        ("alike", "raw"), ("alike", "folded"), ("own", "raw"), ("single", "raw"), ("zero", "raw"),
    ]  # fmt: skip
    assert atlas.closure_intervals(THRESHOLD).equals(everything)
    folded = atlas.closure_intervals(THRESHOLD, operator="folded")
    assert folded.equals(everything.filter(operator="folded"))
    assert atlas.closure_intervals(THRESHOLD, ["own"]).equals(everything.filter(model="own"))
    other = of(closure_intervals(atlas, THRESHOLD, ["alike"], seed=1), "alike")
    assert other["median_low"] != of(everything, "alike")["median_low"]
    for method in ("bootstrap", "wilson"):
        narrow, wide = (
            of(closure_intervals(atlas, THRESHOLD, ["alike"], method=method, level=level), "alike")
            for level in (0.8, 0.99)
        )
        for name in ("rate", "median"):
            assert wide[f"{name}_low"] < narrow[f"{name}_low"] < narrow[f"{name}_high"] < wide[f"{name}_high"]


def test_the_panel_has_the_same_intervals(atlas: Atlas) -> None:
    panel = atlas.panel(THRESHOLD).filter(model="alike")
    row = of(atlas.closure_intervals(THRESHOLD, method="wilson"), "alike")
    for claim, name in (("heads at closure >= 0.9", "rate"), ("median closure, trained heads", "median")):
        answer = panel.row(by_predicate=pl.col("claim") == claim, named=True)
        assert [answer[key] for key in ("estimate", "low", "high")] == pytest.approx(
            [row[key] for key in (name, f"{name}_low", f"{name}_high")]
        )


@pytest.mark.parametrize("method", ["bootstrap", "wilson"])
def test_the_command(atlas: Atlas, method: Any) -> None:
    arguments = ["closure", "alike", "own", "--threshold", str(THRESHOLD), "--operator", "raw", "--intervals", method]
    done = CliRunner().invoke(main, [*arguments, "--format", "json", "--store", str(atlas.path)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == atlas.closure_intervals(THRESHOLD, ["alike", "own"], "raw", method).to_dicts()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--by", "layer"], 2, "--intervals goes with --by model"),
        (["--sql"], 2, "no query that --sql could print"),
        (["alikee"], 1, "did you mean alike?"),
    ],
)
def test_what_the_command_refuses(atlas: Atlas, arguments: list[str], status: int, said: str) -> None:
    command = ["closure", *arguments, "--intervals", "wilson", "--store", str(atlas.path)]
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stdout) == (status, "")
    assert said in done.stderr


def test_what_the_function_refuses(atlas: Atlas) -> None:
    with pytest.raises(QueryError, match="0 to 1"):
        atlas.closure_intervals(1.5)
    with pytest.raises(QueryError, match="one of bootstrap, wilson"):
        atlas.closure_intervals(method="jackknife")  # type: ignore[arg-type]
    with pytest.raises(HeadatlasError, match="write 95% as"):
        closure_intervals(atlas, level=95)
