"""The tables of a paper: every number by another route, and LaTeX that compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from pylatexenc.latexwalker import LatexEnvironmentNode, LatexGroupNode, LatexMacroNode, LatexNode, LatexWalker

from cli import main
from query import Atlas, latex, open_atlas
from query.export import export
from query.paper_tables import PAPER_TABLES, Choice, algebra_table, closure_table, null_table, trajectory_table
from query.provenance import provenance
from query.sources import Request
from query.typesetting import Table, cells
from stats.errors import QueryError
from stats.inference import ClusteredHeads, rate_interval
from tests import checkpoints
from tests.ingesting import ingest_into

THRESHOLD = 0.02
"""Random heads close at about 1 / d_head^2; this splits them."""

ODD = "100%_odd & name"
UNICODE = "a\\b{c}^d~e#f$g|h<i>\"j'k` α≥Ω ÉçßŁ中🙂 ą–þ"  # noqa: RUF001
STEPS = {"step0": 0, "step9": 9, "step10": 10}

pytestmark = pytest.mark.usefixtures("one_thread")


def run(store: Path, *arguments: object) -> None:
    result = CliRunner().invoke(main, [*map(str, arguments), "--store", str(store)])
    assert result.exit_code == 0, result.stderr


@pytest.fixture(scope="module")
def store(sealed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with nulls, two with awkward names and without, and a training run with capacities."""
    root = tmp_path_factory.mktemp("paper")
    store = Path(shutil.copytree(sealed_store, root / "atlas"))
    run(store, "null", "--draws", 200)
    one_value = checkpoints.save_safetensors(checkpoints.llama(kv_heads=1, seed=7), root / "one-value")
    ingest_into(store, one_value, ODD)
    ingest_into(store, checkpoints.save_safetensors(checkpoints.gpt2(), root / "gpt2"), UNICODE)
    (root / "run").mkdir()
    for seed, name in enumerate(STEPS):
        checkpoints.save_safetensors(checkpoints.llama(layers=2, seed=seed), root / "run" / name)
    run(store, "ingest", root / "run", "--lineage", "tiny_run")
    run(store, "capacity", "tiny_run@step9", "tiny_run@step10")
    return store


@pytest.fixture(scope="module")
def atlas(store: Path) -> Atlas:
    with open_atlas(store) as opened:
        yield opened


CHOICE = Choice(("llama", "bert"), "raw", THRESHOLD)


def rows_of(table: Table) -> dict[str, dict[str, object]]:
    return {row["model"]: row for row in table.rows.iter_rows(named=True)}


@pytest.mark.parametrize(("model", "layers", "kv_heads"), [("llama", 3, 2), ("bert", 2, 4)])
def test_closure(atlas: Atlas, model: str, layers: int, kv_heads: int) -> None:
    row = rows_of(closure_table(atlas, CHOICE))[model]
    values = atlas.array(model, "closure")
    strong = values >= THRESHOLD
    assert (row["layers"], row["heads"], row["n_heads"], row["n_kv_heads"], row["d_head"]) == (
        layers,
        values.size,
        4,
        kv_heads,
        8,
    )
    assert row["rate"] == pytest.approx(strong.mean())
    assert row["median"] == pytest.approx(np.median(values))
    assert row["maximum"] == values.max()
    interval = rate_interval(ClusteredHeads(strong.ravel(), np.repeat(np.arange(layers), 4)))
    assert (row["rate_low"], row["rate_high"]) == (interval.low, interval.high)
    assert interval.low < strong.mean() < interval.high


def test_where_no_head_is_strong_the_interval_has_width(atlas: Atlas) -> None:
    row = rows_of(closure_table(atlas, Choice(("llama",), "raw", 0.9)))["llama"]
    assert row["rate"] == row["rate_low"] == 0 < row["rate_high"] < 1


def test_models_come_in_the_order_asked_for(atlas: Atlas) -> None:
    for make in (closure_table, null_table, algebra_table):
        assert make(atlas, CHOICE).rows["model"].to_list() == ["llama", "bert"]


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_null(atlas: Atlas, model: str) -> None:
    row = rows_of(null_table(atlas, CHOICE))[model]
    nulls = atlas.sql(
        "SELECT * FROM nulls WHERE operator = 'raw' AND kind = 'scramble' AND model = $m ORDER BY layer, head",
        {"m": model},
    ).with_columns(closure=pl.Series(atlas.array(model, "closure").ravel()))
    assert row["trained_median"] == pytest.approx(nulls["closure"].median())
    assert row["scrambled_median"] == pytest.approx(nulls["median"].median())
    assert row["wins"] == (nulls["closure"] > nulls["median"]).sum()
    assert row["discoveries"] == (nulls["q"] <= 0.05).sum()
    layers = nulls.group_by("layer").agg(pl.col("closure", "median").median())
    assert (row["layers_won"], row["layers"]) == ((layers["closure"] > layers["median"]).sum(), layers.height)
    kv_head = atlas.array(model, "kv_head")
    apart = kv_head[:, :, None] != kv_head[:, None, :]
    assert row["largest_mismatch"] == atlas.array(model, "mismatch_closure")[apart].max()
    panel = atlas.panel(THRESHOLD).filter(claim="trained beats scrambled, heads", model=model).row(0, named=True)
    assert (row["win_rate"], row["win_rate_low"], row["win_rate_high"]) == (
        pytest.approx(panel["estimate"]),
        panel["low"],
        panel["high"],
    )


def test_what_was_not_drawn_is_blank_and_said(atlas: Atlas) -> None:
    table = null_table(atlas, Choice((ODD, "llama"), "raw"))
    row = rows_of(table)[ODD]
    assert [name for name, value in row.items() if value is None] == [
        "draws",
        "scrambled_median",
        "wins",
        "win_rate",
        "win_rate_low",
        "win_rate_high",
        "discoveries",
        "layers_won",
        "layers",
        "largest_mismatch",
    ]
    assert f"No scrambles drawn: {ODD}." in table.notes
    assert f"No mismatched pair, one value for all heads of a layer: {ODD}." in table.notes
    assert cells(table, 3)[0] == [ODD, f"{row['trained_median']:.3f}", *[""] * 6]
    with pytest.raises(QueryError, match="no scrambles are stored") as caught:
        null_table(atlas, Choice((ODD,), "raw"))
    assert "headatlas null" in str(caught.value)


def test_algebra(atlas: Atlas) -> None:
    row = rows_of(algebra_table(atlas, CHOICE))["llama"]
    names = ("closure", "alpha", "kv_head", "right_closure", "left_closure", "right_alpha")
    closure, alpha, kv_head, right, left, right_alpha = (atlas.array("llama", name) for name in names)
    acting = np.broadcast_to((closure >= THRESHOLD)[:, None, :], right.shape) & ~np.eye(4, dtype=bool)[None]
    shared = kv_head[:, :, None] == kv_head[:, None, :]
    assert row["strong"] == (closure >= THRESHOLD).sum()
    assert row["products"] == (acting & shared).sum()
    assert row["right_median"] == pytest.approx(np.median(right[acting & shared]))
    assert row["left_median"] == pytest.approx(np.median(left[acting & shared]))
    assert row["other_right_median"] == pytest.approx(np.median(right[acting & ~shared]))
    assert row["alpha_spread"] is None, "a group of two has one product for each strong head"
    wide = rows_of(algebra_table(atlas, Choice((ODD,), "raw", 0.01)))[ODD]
    closure, alpha, right_alpha = (atlas.array(ODD, name) for name in ("closure", "alpha", "right_alpha"))
    spreads = [
        np.std(np.delete(right_alpha[layer, :, head], head)) / abs(alpha[layer, head])
        for layer, head in np.argwhere(closure >= 0.01)
    ]
    assert len(spreads) == wide["strong"] > 0
    assert wide["alpha_spread"] == pytest.approx(np.median(spreads))


def test_algebra_without_value_sharing_or_strong_heads(atlas: Atlas) -> None:
    table = algebra_table(atlas, CHOICE)
    assert rows_of(table)["bert"]["products"] == 0
    assert rows_of(table)["bert"]["right_median"] is None
    assert "No strong head shares its values with another: bert." in table.notes
    with pytest.raises(QueryError, match=r"no head of these models has closure 0\.9999 or more"):
        algebra_table(atlas, Choice((), "raw", 0.9999))


def test_trajectory(atlas: Atlas) -> None:
    table = trajectory_table(atlas, Choice((), "raw", THRESHOLD))
    assert table.rows["step"].to_list() == sorted(STEPS.values())
    final = atlas.array("tiny_run@step10", "closure") >= THRESHOLD
    assert 0 < final.sum() < final.size
    for row in table.rows.iter_rows(named=True):
        model = f"tiny_run@step{row['step']}"
        closure = atlas.array(model, "closure")
        assert (row["model"], row["heads"], row["strong"]) == (model, closure.size, (closure >= THRESHOLD).sum())
        assert row["final_strong_median"] == pytest.approx(np.median(closure[final]))
        assert row["others_median"] == pytest.approx(np.median(closure[~final]))
        assert row["null_level"] == pytest.approx(0.4549 * np.median(atlas.array(model, "null_scale")))
        capacity = atlas.sql(
            "SELECT median(closure) FROM capacities WHERE model = $m AND method = 'assignment'", {"m": model}
        ).item()
        assert row["capacity_median"] == (None if capacity is None else pytest.approx(capacity))
    assert table.rows["capacity_median"].null_count() == 1
    assert [note.split()[0] for note in table.notes] == ["Blank", "Null"]


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_unknown_names_and_operators(atlas: Atlas, name: str) -> None:
    make = PAPER_TABLES[name][1]
    with pytest.raises(QueryError, match=r"no (model|training run) named 'lama'") as caught:
        make(atlas, Choice(("lama",), "raw", THRESHOLD))
    assert name == "paper-trajectory" or "did you mean llama" in str(caught.value)
    with pytest.raises(QueryError, match="measured with the operator scaled"):
        make(atlas, Choice((), "scaled", THRESHOLD))


def test_a_model_without_the_operator_is_named_in_a_note(atlas: Atlas) -> None:
    table = closure_table(atlas, Choice(("llama", "bert"), "folded", THRESHOLD))
    assert table.rows["model"].to_list() == ["llama"]
    assert table.notes[-1] == "Not measured with the operator folded: bert."


def test_no_training_run(sealed_store: Path) -> None:
    with open_atlas(sealed_store) as atlas, pytest.raises(QueryError, match="no training run in the store"):
        trajectory_table(atlas, Choice())


# LaTeX


@pytest.fixture(scope="module")
def sources(atlas: Atlas, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """LaTeX of every paper table, of a query with every kind of column, and of one that is broken over pages."""
    folder = tmp_path_factory.mktemp("latex")
    requests = {name: Request(name, threshold=THRESHOLD) for name in PAPER_TABLES}
    mixed = """SELECT *, closure > 0.02 AS strong, [alpha, closure] AS both, 'a_b' AS "c%d_e", current_date AS day
    FROM strongest_heads(2) -- 100% of them"""
    requests["mixed"] = Request(sql=mixed)
    requests["long"] = Request("pairs", operator="raw", models=("llama", ODD))
    for name, request in requests.items():
        export(atlas, request, folder / f"{name}.tex", label=f"tab:{name}")
    return {name: folder / f"{name}.tex" for name in requests}


KNOWN = {
    *(
        "begin",
        "end",
        "caption",
        "label",
        "centering",
        "small",
        "footnotesize",
        "scriptsize",
        "tiny",
        "smallskip",
        "par",
    ),
    *("toprule", "midrule", "bottomrule", "addlinespace", "endfirsthead", "endhead", "endlastfoot", "begingroup"),
    *("endgroup", "setlength", "tabcolsep", "sbox", "ifdim", "wd", "linewidth", "resizebox", "usebox", "else", "fi"),
    *("shortstack", "geq", "leq", "max", "min", "mathrm", "alpha", "Omega", "approx", "cos", "sigma", "ensuremath"),
    *("textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar", "textquotesingle"),
    *("textasciigrave", "texttt", "%", "_", "&", "#", "$", "{", "}", "\\"),
}
"""Macros of LaTeX and of the packages that the first lines of a file name."""


def nodes_within(nodes: list[LatexNode]) -> list[LatexNode]:
    found = []
    for node in nodes:
        found.append(node)
        arguments = [each for each in (node.nodeargd.argnlist if getattr(node, "nodeargd", None) else []) if each]
        found += nodes_within([*arguments, *(getattr(node, "nodelist", None) or [])])
    return found


def test_the_latex_is_balanced_known_and_rectangular(sources: dict[str, Path]) -> None:
    """What can be said without a TeX: groups, macros, and equally many cells in every row."""
    for name, path in sources.items():
        text = path.read_text()
        nodes, _, _ = LatexWalker(text, tolerant_parsing=False).get_latex_nodes()
        everything = nodes_within(nodes)
        macros = {node.macroname for node in everything if isinstance(node, LatexMacroNode)}
        assert macros <= KNOWN, (name, macros - KNOWN)
        table = "longtable" if name == "long" else "tabular"
        (tabular,) = (
            node for node in everything if isinstance(node, LatexEnvironmentNode) and node.environmentname == table
        )
        rows, count = [], 1
        preamble = re.match(r"\\begin\{\w+\}\{(.*)\}\n", tabular.latex_verbatim())[1]
        columns = re.sub(r"@\{\}|\[.*?\]", "", preamble)
        assert set(columns) <= set("lrS")
        for node in tabular.nodelist:
            if isinstance(node, LatexMacroNode) and node.macroname == "\\":
                rows.append(count)
                count = 1
            elif node.latex_verbatim().strip() and not isinstance(node, LatexMacroNode | LatexGroupNode):
                count += len(re.findall(r"(?<!\\)&", node.latex_verbatim()))
        assert set(rows[1 if name == "long" else 0 :]) == {len(columns)}, name
        assert text.isascii() or "É" in text


TEX = next((tex for tex in ("pdflatex", "lualatex", "tectonic") if shutil.which(tex)), None)


@pytest.mark.skipif(TEX is None, reason="no TeX on the path; the parser's check above has to do")
def test_every_table_compiles(sources: dict[str, Path], tmp_path: Path) -> None:
    preamble = {
        line.removeprefix("% ")
        for path in sources.values()
        for line in path.read_text().splitlines()
        if line.startswith(r"% \usepackage")
    }
    body = "\n".join(rf"\input{{{path}}}" for path in sources.values())
    lines = [r"\documentclass{article}", *sorted(preamble), r"\begin{document}", body, r"\end{document}"]
    (tmp_path / "paper.tex").write_text("\n".join(lines))
    options = [] if TEX == "tectonic" else ["-interaction=nonstopmode", "-halt-on-error"]
    done = subprocess.run([TEX, *options, "paper.tex"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    if shutil.which("pdftotext"):
        subprocess.run(["pdftotext", "-layout", "paper.pdf"], cwd=tmp_path, check=True)
        text = (tmp_path / "paper.txt").read_text()
        assert text.count("100% odd & name") + text.count(ODD) >= 3
        assert "U+4E2D" in text
        assert "tiny_run" in text or "tiny run" in text


def test_escaping_leaves_nothing_that_tex_would_act_on() -> None:
    text = latex.escape(UNICODE + ODD)
    bare = re.sub(r"\\[A-Za-z]+(\{\})?|\\[%_&#${}]", "", text)
    assert not set(bare) & set('%_&#$~^\\<>|"`')
    assert latex.escape("a_b\nc") == r"a\_b c"
    assert latex.escape("中α≥Éą") == r"\texttt{U+4E2D}\ensuremath{\alpha}\ensuremath{\geq}Éa"


def test_rows_are_read_back_from_the_latex(atlas: Atlas, sources: dict[str, Path]) -> None:
    table = closure_table(atlas, Choice((), "raw", THRESHOLD))
    found = latex.read_rows(sources["paper-closure"].read_text().splitlines())
    assert [row[-1] for row in found] == [f"{value:.3f}" for value in table.rows["maximum"]]
    assert found[0][0] == r"100\%\_odd \& name"
    pairs = atlas.sql("SELECT count(*) FROM pairs WHERE operator = 'raw' AND model IN ('llama', $odd)", {"odd": ODD})
    assert len(latex.read_rows(sources["long"].read_text().splitlines())) == pairs.item() > latex.ROWS_ON_A_PAGE


def test_provenance_names_the_models_of_the_table(atlas: Atlas) -> None:
    table = trajectory_table(atlas, Choice((), "raw", THRESHOLD))
    assert set(provenance(atlas, "", table.rows).models) == {f"tiny_run@{step}" for step in STEPS}
