"""Figures show what the store holds, say what they show, and look the same in grey and for everyone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
import torch
import zarr
from click.testing import CliRunner, Result
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from cli import main
from query import open_atlas
from query.figures import (
    Choice,
    Spectra,
    draw,
    drawing,
    figure_list,
    head_figure,
    heatmap_figure,
    mismatch_figure,
    save_figure,
)
from query.figures.colour import scale_of
from query.figures.style import LINES, MARKERS, PALETTE, series_style
from stats.errors import QueryError
from tests import checkpoints
from tests.ingesting import ingest_into

ROOT = Path(__file__).parents[1]
NAMES = figure_list()["figure"].to_list()
THRESHOLD = 0.02


def command(store: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--store", str(store)])


@pytest.fixture(scope="module")
def full_store(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small store with draws and capacities, a training run, and a model with heads that have no closure."""
    root = tmp_path_factory.mktemp("figures")
    store = Path(shutil.copytree(sealed_store, root / "atlas"))
    model = checkpoints.llama(layers=2, seed=7)
    value = "model.layers.1.self_attn.v_proj.weight"
    cut = model.tensors[value].clone()
    cut[:8] = 0
    broken = checkpoints.save_safetensors(model.changed(**{value: cut}), root / "broken")
    ingest_into(store, broken, "$broken$")
    for number, step in enumerate(("step1", "step20")):
        checkpoints.save_safetensors(checkpoints.llama(layers=2, seed=number), root / "run" / step)
    assert command(store, "ingest", root / "run", "--lineage", "tiny").exit_code == 0
    for arguments in (("null", "--draws", "40"), ("capacity",)):
        result = command(store, *arguments, "llama", "bert", "$broken$", "--operator", "raw")
        assert result.exit_code == 0, result.stderr
    return store


@pytest.fixture(scope="module")
def read(full_store: Path) -> Any:
    """Rows of hand-written SQL on the catalogue file itself."""
    connection = duckdb.connect(str(full_store / "catalog.duckdb"), read_only=True)
    yield lambda query: connection.execute(query).fetchall()
    connection.close()


def figure_of(store: Path, name: str, *models: str, **options: Any) -> Figure:
    with open_atlas(store) as atlas:
        return draw(atlas, name, models, **options)


def texts(figure: Figure) -> str:
    """All labels, titles and legends."""
    parts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        parts += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title()]
    return "\n".join(parts)


def line(axes: Any, label: str) -> Any:
    return next(item for item in axes.lines if item.get_label() == label)


def points(axes: Any, label: str) -> set[tuple[float, ...]]:
    found = next(item for item in axes.collections if item.get_label() == label)
    return {tuple(point) for point in np.asarray(found.get_offsets())}


@pytest.mark.parametrize("column", ["closure", "rank"])
def test_a_heatmap_holds_every_head(full_store: Path, read: Any, column: str) -> None:
    figure = figure_of(full_store, "heatmap", "llama", "$broken$", column=column)
    for axes, model in zip(figure.axes, ("llama", "$broken$"), strict=False):
        image = axes.images[0]
        values = np.ma.filled(image.get_array().astype(float), np.nan)
        left, right, bottom, top = image.get_extent()
        assert (left, bottom) == (-0.5, -0.5)
        assert values.shape == (top + 0.5, right + 0.5)
        expected = read(f"SELECT layer, head, {column} FROM heads WHERE model = '{model}' AND operator = 'raw'")
        assert len(expected) == values.size
        for layer, head, value in expected:
            np.testing.assert_equal(values[head, layer], np.nan if value is None else value)
    assert figure.axes[1].get_title() == r"\$broken\$", "no part of a name is mathematics"


def test_undefined_heads_are_hatched_and_said(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "heatmap", "$broken$")
    cells = next(item for item in figure.axes[0].collections if isinstance(item, PolyCollection))
    assert cells.get_hatch()
    hatched = {tuple(np.round(path.vertices[:4].mean(0), 6)) for path in cells.get_paths()}
    undefined = read("SELECT layer, head FROM heads WHERE model = '$broken$' AND closure IS NULL")
    assert hatched == {(float(layer), float(head)) for layer, head in undefined}
    assert len(undefined) == 2
    assert "undefined (2 of 8 heads)" in texts(figure)
    assert "undefined" not in texts(figure_of(full_store, "heatmap", "llama"))


def test_a_layer_without_a_head_stays_blank() -> None:
    rows = [("m", layer, head, 0.5) for layer in (2, 5) for head in range(2 if layer == 2 else 3)]
    heads = pl.DataFrame(rows, schema=["panel", "layer", "head", "closure"], orient="row")
    figure = heatmap_figure(heads)
    image = figure.axes[0].images[0]
    assert "blank: no head" in texts(figure)
    assert "blank" not in texts(heatmap_figure(heads.filter(layer=2)))
    assert image.get_extent() == [1.5, 5.5, -0.5, 2.5]
    assert np.ma.getmaskarray(image.get_array()).tolist() == [[False, True, True, False]] * 2 + [
        [True, True, True, False]
    ]


def test_signed_columns_are_centred_and_negative_cells_dotted(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "heatmap", "llama", column="alpha")
    axes = figure.axes[0]
    image = axes.images[0]
    low, high = image.get_clim()
    assert low == -high
    assert image.get_cmap().name == "coolwarm"
    dots = next(item for item in axes.collections if isinstance(item, PathCollection))
    negative = read("SELECT layer, head FROM heads WHERE model = 'llama' AND operator = 'raw' AND alpha < 0")
    assert {tuple(point) for point in np.asarray(dots.get_offsets())} == set(negative)
    assert "negative" in texts(figure)
    assert "alpha [weight units squared]" in texts(figure)


def test_models_share_a_scale_unless_their_units_differ(full_store: Path) -> None:
    shared = figure_of(full_store, "heatmap", "llama", "bert")
    assert shared.axes[0].images[0].get_clim() == shared.axes[1].images[0].get_clim()
    assert len(shared.axes) == 3
    own = figure_of(full_store, "heatmap", "llama", "bert", column="norm")
    assert own.axes[0].images[0].get_clim() != own.axes[1].images[0].get_clim()
    assert len(own.axes) == 4
    assert "on each model's own scale" in texts(own).replace("\n", " ")


def test_scales() -> None:
    assert scale_of(np.array([0.1, 0.8]), "0 to 1").upper == 1.0
    wide = scale_of(np.geomspace(1e-6, 1, 50), "0 to 1")
    assert (wide.logarithmic, wide.note) == (True, ", log scale")
    cut = scale_of(np.array([*np.linspace(0, 1, 200), 30.0]), "weight units")
    assert cut.extend == "max"
    assert cut.upper < 2
    assert scale_of(np.array([np.nan, np.inf])).upper == 1.0
    assert scale_of(np.array([-0.2, 0.1]), "-1 to 1").lower == -1.0
    assert scale_of(np.zeros(4)).upper > 0


def test_a_users_own_column_is_drawn_with_its_unit(full_store: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(full_store, tmp_path / "atlas"))
    file = tmp_path / "mine.py"
    file.write_text(
        "from store.user_statistics import statistic\n"
        "@statistic(meaning='spread [of sorts]', values='furlongs')\n"
        "def spread(sigma):\n    return sigma[:, 0] - sigma[:, -1]\n"
    )
    assert command(store, "derive", file, "llama").exit_code == 0
    figure = figure_of(store, "heatmap", "llama", column="spread")
    assert "spread [furlongs]" in texts(figure)
    with open_atlas(store) as atlas:
        sigma = atlas.array("llama", "sigma")
    np.testing.assert_allclose(figure.axes[0].images[0].get_array().T, sigma[..., 0] - sigma[..., -1])


def test_closure_stands_against_every_stored_draw(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "closure-distribution", "llama", "$broken$")
    for axes, model in zip(figure.axes, ("llama", "$broken$"), strict=True):
        trained = line(axes, "trained heads")
        rows = read(
            f"SELECT closure FROM heads WHERE model = '{model}' AND operator = 'raw' AND closure IS NOT NULL ORDER BY 1"
        )
        assert trained.get_xdata().tolist() == [value for (value,) in rows]
        assert trained.get_ydata()[-1] == 1.0
        [(group, unit)] = read(
            f"SELECT array_group, unit FROM derivations JOIN models USING (model) "
            f"WHERE model = '{model}' AND kind = 'scramble'"
        )
        draws = zarr.open_group(full_store / "arrays.zarr" / group / unit / "decoder", mode="r")["null_closure"][...]
        draws = draws[np.isfinite(draws)]
        scrambled = line(axes, "scrambled heads, every draw")
        for value, share in zip(scrambled.get_xdata(), scrambled.get_ydata(), strict=True):
            assert (draws <= value).mean() == pytest.approx(share, abs=1.01 / len(scrambled.get_xdata()))
    assert "share [0 to 1]" in texts(figure)
    assert "closure [0 to 1]" in texts(figure)


def test_medians_stand_in_where_the_draws_are_gone(full_store: Path, tmp_path: Path, read: Any) -> None:
    store = Path(shutil.copytree(full_store, tmp_path / "atlas"))
    for array in store.glob("arrays.zarr/llama-*/scramble-*/*/null_closure"):
        shutil.rmtree(array)
    figure = figure_of(store, "closure-distribution", "llama")
    shown = line(figure.axes[0], "scrambled heads, each head's median").get_xdata()
    rows = read("SELECT median FROM nulls WHERE model = 'llama' AND operator = 'raw' AND kind = 'scramble' ORDER BY 1")
    assert shown.tolist() == [value for (value,) in rows]


def test_closure_stands_against_capacity(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "closure-capacity", "llama", "bert", threshold=0.7)
    axes = figure.axes[0]
    for model in ("llama", "bert"):
        rows = read(
            "SELECT c.closure, h.closure FROM heads h JOIN capacities c ON (h.model, h.operator, h.stack, h.layer, "
            f"h.head) = (c.model, c.operator, c.stack, c.layer, c.head) WHERE h.model = '{model}' "
            "AND h.operator = 'raw'"
        )
        assert points(axes, model) == set(rows)
    equal = line(axes, "closure = capacity")
    assert list(equal.get_xdata()) == list(equal.get_ydata())
    assert set(line(axes, "threshold 0.7").get_ydata()) == {0.7}
    assert any(set(item.get_xdata()) == {0.7} for item in axes.lines)
    assert "capacity [0 to 1], found by assignment" in texts(figure)


def test_a_mismatch_matrix_is_the_layers_pairs(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "mismatch", "llama", layer=1)
    axes = figure.axes[0]
    matrix = np.ma.filled(axes.images[0].get_array(), np.nan)
    where = "model = 'llama' AND operator = 'raw' AND layer = 1"
    for head, closure in read(f"SELECT head, closure FROM heads WHERE {where}"):
        assert matrix[head, head] == closure
    pairs = read(f"SELECT write_head, read_head, mismatch_closure FROM pairs WHERE {where}")
    assert len(pairs) == 12
    for write, reading, closure in pairs:
        assert matrix[write, reading] == closure
    edges = next(item for item in axes.collections if isinstance(item, LineCollection))
    drawn = {tuple(sorted(map(tuple, np.asarray(segment).tolist()))) for segment in edges.get_segments()}
    for group in (0, 2):
        low, high = group - 0.5, group + 1.5
        assert ((low, low), (low + 1, low)) in drawn
        assert ((high, low), (high, low + 1)) in drawn
    assert ((0.5, -0.5), (0.5, 0.5)) not in drawn
    assert "head i, whose O writes" in texts(figure)
    assert "heads that share values" in texts(figure)
    assert "share values" not in texts(figure_of(full_store, "mismatch", "bert"))


def test_the_strongest_heads_layer_is_the_default(full_store: Path, read: Any) -> None:
    [(layer, head)] = read(
        "SELECT layer, head FROM heads WHERE model = 'llama' AND operator = 'folded' ORDER BY closure DESC LIMIT 1"
    )
    with open_atlas(full_store) as atlas:
        mismatch = drawing(atlas, "mismatch", Choice(("llama",), "folded"))
        spectra = drawing(atlas, "head", Choice(("llama",), "folded"))
    assert mismatch.notes == (f"layer {layer}, that of the head of highest closure; another with --layer",)
    assert spectra.notes[0].startswith(f"L{layer}H{head}, ")


def test_a_heads_spectra_are_those_of_its_dense_operator(full_store: Path) -> None:
    figure = figure_of(full_store, "head", "llama", layer=1, head=3)
    values, cosines, plane, core, _ = figure.axes
    tensors = checkpoints.llama(layers=3).tensors
    output = tensors["model.layers.1.self_attn.o_proj.weight"].double()[:, 24:32].numpy()
    value = tensors["model.layers.1.self_attn.v_proj.weight"].double()[8:16].T.numpy()
    dense = output @ value.T
    for label, matrix in (("factor O", output), ("factor V", value), ("T = O Vᵀ", dense)):
        sigma = np.linalg.svd(matrix, compute_uv=False)[:8]
        np.testing.assert_allclose(line(values, label).get_ydata(), sigma / sigma[0], rtol=1e-6)
    frames = [np.linalg.qr(matrix)[0] for matrix in (output, value)]
    angles = np.linalg.svd(frames[1].T @ frames[0], compute_uv=False)
    np.testing.assert_allclose(cosines.lines[0].get_ydata(), angles, atol=1e-9)
    shown = line(plane, "eigenvalue of T")
    found = np.sort_complex(np.round(shown.get_xdata() + 1j * shown.get_ydata(), 9))
    expected = np.linalg.eigvals(value.T @ output)
    np.testing.assert_allclose(found, np.sort_complex(np.round(expected, 9)), atol=1e-8)
    square = dense @ dense
    alpha = (square * dense).sum() / (dense**2).sum()
    assert line(plane, "alpha").get_xdata()[0] == pytest.approx(alpha)
    size = np.ma.filled(core.images[0].get_array(), np.nan)
    assert (size >= 0).all()
    assert np.linalg.norm(size) == pytest.approx(np.linalg.norm(dense))
    np.testing.assert_allclose(size, np.abs(frames_core(output, value)), atol=1e-8)


def frames_core(output: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The core of ``O V^T`` in principal coordinates, up to signs."""
    (frame_o, _), (frame_v, _) = np.linalg.qr(output), np.linalg.qr(value)
    left, _, right = np.linalg.svd(frame_v.T @ frame_o)
    return (frame_o @ right.T).T @ output @ value.T @ (frame_v @ left)


def test_scrambles_fill_the_disc_that_is_drawn() -> None:
    generator = np.random.default_rng(0)
    size = 300
    sigma, cosine = np.geomspace(4, 0.5, size), np.linspace(0.9, 0.1, size)
    first, second = (np.linalg.qr(generator.standard_normal((size, size)))[0] for _ in range(2))
    core = first @ np.diag(sigma) @ second.T
    eigenvalue = np.linalg.eigvals(np.diag(cosine) @ core)
    spectra = Spectra(sigma, sigma, sigma, cosine, eigenvalue, core, None)
    assert np.abs(eigenvalue).max() == pytest.approx(spectra.scramble_radius, rel=0.06)
    plane = head_figure(spectra).axes[2]
    circle = line(plane, "radius of scrambles")
    np.testing.assert_allclose(np.hypot(circle.get_xdata(), circle.get_ydata()), spectra.scramble_radius)


def test_algebra_shows_every_product_by_group(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "algebra", "llama", threshold=THRESHOLD)
    axes = figure.axes[0]
    for shared, label in ((True, "heads that share values"), (False, "other group (control)")):
        rows = read(
            "SELECT left_closure, right_closure FROM pairs p JOIN heads h ON (p.model, p.operator, p.stack, p.layer, "
            "p.read_head) = (h.model, h.operator, h.stack, h.layer, h.head) WHERE p.model = 'llama' "
            f"AND p.operator = 'raw' AND shared_value = {shared} AND h.closure >= {THRESHOLD}"
        )
        assert rows
        assert points(axes, label) == set(rows)
    assert axes.get_xlabel() == "left closure [0 to 1]"
    assert axes.get_ylabel() == "right closure [0 to 1]"


def test_comparison_shows_every_closure_and_the_quartiles_by_depth(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "comparison", "llama", "bert")
    whole, *lower = figure.axes
    for axes, model, last in zip(lower, ("llama", "bert"), (2, 1), strict=True):
        where = f"model = '{model}' AND operator = 'raw' AND closure IS NOT NULL"
        rows = read(f"SELECT closure FROM heads WHERE {where} ORDER BY 1")
        assert line(whole, model).get_xdata().tolist() == [value for (value,) in rows]
        rows = read(
            f"SELECT layer / {last}, median(closure), quantile_cont(closure, 0.25), quantile_cont(closure, 0.75) "
            f"FROM heads WHERE {where} GROUP BY layer ORDER BY layer"
        )
        middle = axes.lines[-1]
        assert middle.get_xdata().tolist() == [row[0] for row in rows]
        np.testing.assert_allclose(middle.get_ydata(), [row[1] for row in rows])
        band = axes.collections[0].get_paths()[0].vertices
        for depth, _, low, high in rows:
            edge = band[np.isclose(band[:, 0], depth), 1]
            assert (edge.min(), edge.max()) == pytest.approx((low, high))
        assert axes.get_title() == model


def test_a_trajectory_shows_the_medians_of_its_steps(full_store: Path, read: Any) -> None:
    figure = figure_of(full_store, "trajectory", "tiny", threshold=1.0)
    shown = line(figure.axes[0], "other heads")
    rows = read(
        "SELECT step, median(closure) FROM heads JOIN models USING (model) WHERE lineage = 'tiny' "
        "GROUP BY step ORDER BY step"
    )
    assert list(zip(shown.get_xdata(), shown.get_ydata(), strict=True)) == rows


ASKED: dict[str, dict[str, Any]] = {
    "heatmap": {"models": ("llama", "$broken$"), "column": "alpha"},
    "closure-distribution": {"models": ("llama", "bert")},
    "closure-capacity": {"models": ("llama", "bert")},
    "mismatch": {"models": ("llama",)},
    "head": {"models": ("llama",)},
    "algebra": {"models": ("llama",), "threshold": THRESHOLD},
    "trajectory": {"models": ("tiny",)},
    "comparison": {"models": ("llama", "bert", "$broken$")},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_both_styles(full_store: Path, name: str, tmp_path: Path) -> None:
    with open_atlas(full_store) as atlas:
        screen = drawing(atlas, name, Choice(**ASKED[name]))
        paper = drawing(atlas, name, Choice(**ASKED[name], style="paper"))
    assert screen.figure.get_suptitle()
    assert paper.figure.get_suptitle() == ""
    assert paper.figure.get_size_inches()[0] == pytest.approx(3.3)
    paper.save(tmp_path / "paper.png")
    with Image.open(tmp_path / "paper.png") as image:
        assert image.width == 990
        edge = np.asarray(image.convert("L"))
    assert min(edge[:, 0].min(), edge[:, -1].min(), edge[0].min(), edge[-1].min()) == 255, "something is cut off"
    assert edge.std() > 5
    for figure in (screen.figure, paper.figure):
        assert figure.legends
        names = {text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())}
        assert len(names - {""}) >= 2
        for axes in figure.axes:
            place = axes.get_subplotspec()
            if place is not None and place.colspan.start == 0 and axes.lines + axes.images:
                assert axes.get_ylabel()
    for axes in paper.figure.axes:
        assert {text.get_fontsize() for text in [axes.title, axes.xaxis.label, *axes.get_xticklabels()]} == {8.0}


@pytest.mark.parametrize("suffix", ["pdf", "svg", "png"])
def test_files_say_what_they_show_and_repeat(full_store: Path, suffix: str, tmp_path: Path, read: Any) -> None:
    files = [tmp_path / f"{number}.{suffix}" for number in range(2)]
    for file in files:
        result = command(full_store, "plot", "closure-distribution", "llama", "--style", "paper", "-o", file)
        assert result.exit_code == 0, result.stderr
        assert result.output == ""
    assert files[0].read_bytes() == files[1].read_bytes()
    [(content,)] = read("SELECT content_hash FROM models WHERE model = 'llama'")
    asked = "query: headatlas plot closure-distribution llama --operator raw --style paper"
    if suffix == "png":
        with Image.open(files[0]) as image:
            said, title = image.info["Description"], image.info["Title"]
    else:
        said = title = files[0].read_bytes().decode("latin-1")
    assert "Headatlas closure-distribution" in title
    assert asked in said
    assert f"model: llama {content}" in said.replace("\\\n", "")
    assert "bert" not in said
    if suffix == "pdf":
        day = re.search(r"/CreationDate \(D:(\d{8})000000Z\)", said)
        assert day is not None
        assert b"/FontFile2" in files[0].read_bytes() or b"/FontFile2" in inflated(files[0])
        assert b"/Type3" not in files[0].read_bytes()
    if suffix == "svg":
        assert re.search(r"<dc:date>\d{4}-\d\d-\d\d</dc:date>", said)
        assert "<text" not in said


def inflated(file: Path) -> bytes:
    """Every compressed stream of a PDF."""
    streams = re.findall(rb"stream\r?\n(.*?)endstream", file.read_bytes(), re.DOTALL)
    parts = []
    for stream in streams:
        try:
            parts.append(zlib.decompress(stream))
        except zlib.error:
            continue
    return b"\n".join(parts)


def test_text_of_a_screen_svg_is_text(full_store: Path, tmp_path: Path) -> None:
    file = tmp_path / "closure.svg"
    assert command(full_store, "plot", "heatmap", "llama", "-o", file).exit_code == 0
    for word in ("layer", "head", "closure [0 to 1]", "llama", "closure of every head, raw"):
        assert f">{word}<" in file.read_text()


def test_a_users_settings_change_nothing_and_stay(full_store: Path, tmp_path: Path) -> None:
    import matplotlib

    with open_atlas(full_store) as atlas:
        plain = drawing(atlas, "comparison", Choice(("llama", "bert")))
        plain.save(tmp_path / "plain.svg")
        with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red"}):
            odd = drawing(atlas, "comparison", Choice(("llama", "bert")))
            odd.save(tmp_path / "odd.svg")
            assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "plain.svg").read_bytes() == (tmp_path / "odd.svg").read_bytes()


def test_the_list_of_figures(full_store: Path) -> None:
    result = command(full_store, "plot")
    assert result.exit_code == 0
    for name in NAMES:
        assert name in result.stdout


def test_matplotlib_is_loaded_only_to_draw(full_store: Path) -> None:
    program = (
        "import sys; from click.testing import CliRunner; from cli import main; import query.figures\n"
        "for arguments in (['plot'], ['plot', 'heatmap', 'none', '-o', 'x.png']):\n"
        f"    CliRunner().invoke(main, [*arguments, '--store', {str(full_store)!r}])\n"
        "print([name for name in sys.modules if name.startswith('matplotlib')])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("heatmop",), ("no figure named 'heatmop'", "did you mean heatmap?")),
        (("heatmap", "lama"), ("no model named 'lama'", "did you mean llama?")),
        (("heatmap", "--column", "closur"), ("no column of numbers", "did you mean closure?")),
        (("heatmap", "--column", "label"), ("no column of numbers in heads named 'label'",)),
        (("heatmap", "bert", "--operator", "folded"), ("bert was not measured with the operator folded",)),
        (("heatmap", "--operator", "scaled"), ("no model was measured with the operator scaled", "folded, raw")),
        (("heatmap", "llama", "--stack", "decodr"), ("no stack named 'decodr'", "did you mean decoder?")),
        (("heatmap", "--layer", "1"), ("the figure heatmap has no --layer", "mismatch, head, algebra")),
        (("closure-distribution", "llama", "--operator", "folded"), ("headatlas null llama --operator folded",)),
        (("closure-capacity", "tiny@step1"), ("headatlas capacity tiny@step1 --operator raw",)),
        (("mismatch",), ("a single model", "name one")),
        (("mismatch", "llama", "--layer", "9"), ("no layer 9", "one of 0, 1, 2")),
        (("head", "llama", "--head", "1"), ("--head needs --layer",)),
        (("head", "llama", "--layer", "1", "--head", "4"), ("no head 4", "0 to 3")),
        (("head", "$broken$", "--layer", "1", "--head", "0"), ("no spectra to draw", "zero")),
        (("algebra", "llama"), ("no head that shares its values is strong", "at most", "lower --threshold")),
        (("algebra", "bert"), ("no two heads share values",)),
        (("algebra", "llama", "--layer", "2", "--threshold", "0.5"), ("llama, layer 2", "choose another --layer")),
        (("trajectory", "tinny"), ("did you mean tiny?",)),
        (("trajectory", "zzz"), ("no training run 'zzz'",)),
    ],
)
def test_what_cannot_be_drawn_is_one_error(
    full_store: Path, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    result = command(full_store, "plot", *arguments, "-o", tmp_path / "figure.pdf")
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_figure_needs_a_file_of_a_known_form(full_store: Path, tmp_path: Path) -> None:
    assert command(full_store, "plot", "heatmap").exit_code == 2
    result = command(full_store, "plot", "heatmap", "-o", tmp_path / "figure.doc")
    assert result.exit_code == 1
    assert ".pdf, .svg, .png" in result.stderr


def test_a_failed_write_leaves_the_old_file(full_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figure.pdf"
    file.write_bytes(b"old")

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as stream:
            stream.write(data[:10])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    result = command(full_store, "plot", "heatmap", "llama", "-o", file)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    result = command(full_store, "plot", "heatmap", "llama", "-o", tmp_path / "none" / "figure.pdf")
    assert "cannot be written" in result.stderr


def test_models_without_what_is_drawn_are_left_out_by_name(full_store: Path, tmp_path: Path) -> None:
    result = command(full_store, "plot", "closure-distribution", "-o", tmp_path / "figure.png")
    assert result.exit_code == 0, result.stderr
    assert "left out, nothing drawn: tiny@step1, tiny@step20" in result.stderr


def test_more_models_than_fit_are_refused_when_named_and_left_out_else(full_store: Path, tmp_path: Path) -> None:
    from query.figures import selection

    items = [selection.Population(f"m{number}", "decoder", f"m{number}") for number in range(14)]
    with pytest.raises(QueryError, match="too many models"):
        selection.Selected(list(items)).limit(named=True)
    selected = selection.Selected(list(items))
    selected.limit(named=False)
    assert len(selected.populations) == 12
    assert selected.notes == ["left out, 12 fit into one figure: m12, m13"]


def test_a_mismatch_of_undefined_pairs_is_hatched() -> None:
    closure = np.array([[0.9, np.nan], [0.1, 0.5]])
    figure = mismatch_figure(closure, np.array([0, 1]))
    cells = next(item for item in figure.axes[0].collections if isinstance(item, PolyCollection))
    [middle] = [path.vertices[:4].mean(0).tolist() for path in cells.get_paths()]
    assert middle == [1.0, 0.0]
    assert "undefined" in texts(figure)


def test_saving_refuses_other_endings(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="unknown form"):
        save_figure(Figure(), tmp_path / "a.jpg")


# Machado, Oliveira and Fernandes 2009, severity 1, on linear light.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colours: Any) -> np.ndarray:
    channels = np.asarray([to_rgb(colour) for colour in colours])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def cielab(light: np.ndarray) -> np.ndarray:
    """CIELAB of linear sRGB (colour, 3)."""
    matrix = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    white = np.array([0.95047, 1.0, 1.08883])
    ratio = light @ matrix.T / white
    root = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.stack([116 * root[:, 1] - 16, 500 * (root[:, 0] - root[:, 1]), 200 * (root[:, 1] - root[:, 2])], -1)


def smallest_distance(points: np.ndarray) -> float:
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return float(apart[np.triu_indices(len(points), 1)].min())


def test_series_stay_apart_in_grey_and_for_colour_blind_readers() -> None:
    light = linear(PALETTE)
    lightness = cielab(light)[:, :1]
    assert smallest_distance(lightness) > 9
    for matrix in BLINDNESS.values():
        assert smallest_distance(cielab(np.clip(light @ np.array(matrix).T, 0, 1))) > 20
    looks = [series_style(number) for number in range(12)]
    assert len({look["marker"] for look in looks}) == 12
    assert len({(look["color"], look["markerfacecolor"]) for look in looks}) == 12
    assert len(set(MARKERS)) == 12
    assert len(set(map(str, LINES))) == 6


def test_maps_have_even_steps_and_their_ends_stay_apart() -> None:
    import matplotlib

    ramp = np.linspace(0, 1, 129)
    sequential = cielab(linear(matplotlib.colormaps["viridis"](ramp)))
    assert (np.diff(sequential[:, 0]) > 0).all()
    for name in ("viridis", "coolwarm"):
        light = linear(matplotlib.colormaps[name](ramp))
        steps = np.linalg.norm(np.diff(cielab(light), axis=0), axis=1)
        assert steps.std() / steps.mean() < 0.25
        for matrix in BLINDNESS.values():
            assert smallest_distance(cielab(np.clip(light[[0, -1]] @ np.array(matrix).T, 0, 1))) > 60


def test_a_cross_stack_has_a_heatmap_of_norms_and_no_distribution(tmp_path: Path) -> None:
    """T5: decoder, encoder and cross stacks; the last maps between two streams."""
    normal = torch.Generator().manual_seed(0)
    width, heads, size = 16, 2, 8
    tensors = {"shared.weight": torch.randn(20, width, generator=normal)}
    for side, parts in (
        ("encoder", ("layer.0.SelfAttention",)),
        ("decoder", ("layer.0.SelfAttention", "layer.1.EncDecAttention")),
    ):
        for part in parts:
            stem = f"{side}.block.0.{part}"
            for name in "qkv":
                tensors[f"{stem}.{name}.weight"] = torch.randn(heads * size, width, generator=normal)
            tensors[f"{stem}.o.weight"] = torch.randn(width, heads * size, generator=normal)
            number = part.split(".")[1]
            tensors[f"{side}.block.0.layer.{number}.layer_norm.weight"] = torch.ones(width)
    config = {"model_type": "t5", "d_model": width, "d_kv": size, "num_heads": heads, "num_layers": 1}
    config |= {"num_decoder_layers": 1, "d_ff": 16, "vocab_size": 20, "is_encoder_decoder": True}
    source = checkpoints.save_safetensors(checkpoints.Model(config, tensors), tmp_path / "t5")
    ingest_into(tmp_path / "atlas", source, "t5")
    store = tmp_path / "atlas"
    names = [axes.get_title() for axes in figure_of(store, "heatmap", column="norm").axes if axes.get_title()]
    assert names == ["t5, cross", "t5, decoder", "t5, encoder"]
    assert "undefined (2 of 6 heads)" in texts(figure_of(store, "heatmap"))
    with open_atlas(store) as atlas:
        compared = drawing(atlas, "comparison", Choice())
    assert compared.notes == ("left out, no head has a closure: t5, cross",)
    assert "T maps one stream" in "".join(
        text.get_text() for axes in figure_of(store, "head", stack="cross").axes for text in axes.texts
    )
    result = command(store, "plot", "mismatch", "t5", "--stack", "cross", "-o", tmp_path / "x.png")
    assert "two spaces" in result.stderr
    result = command(store, "plot", "mismatch", "t5", "-o", tmp_path / "x.png")
    assert "a single stack" in result.stderr
