import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Headatlas: from a checkpoint to the figures")


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # From a checkpoint to the figures

    Every attention head writes through an operator `T = O V^T`. A few of these operators nearly close under
    composition, `T^2 ~ alpha T`. This notebook measures one checkpoint, asks how many of its heads close, what
    speaks against chance, how closed they could be, and draws the figures.

    ```sh
    marimo edit examples/finding.py                                   # read, change and run it
    python examples/finding.py --model MODEL --figures figures        # run it through, and keep the figures
    ```

    `--model` is whatever `headatlas ingest` takes; without it, the model that `make demo` fetches.
    """)
    return


@app.cell
def _():
    import subprocess
    import sys
    from pathlib import Path

    import marimo as mo
    import numpy as np
    import polars as pl

    from query import open_atlas
    from query.figures import draw, save_figure

    return Path, draw, mo, np, open_atlas, pl, save_figure, subprocess, sys


@app.cell
def _(Path, mo):
    _given = mo.cli_args()
    model = str(_given.get("model") or "models/SmolLM2-135M-Instruct.gguf")
    name = str(_given.get("name") or Path(model).name.removesuffix(".gguf"))
    store = Path(_given.get("store") or "atlas")
    figures = Path(_given.get("figures")) if _given.get("figures") else None
    draws = int(_given.get("draws") or 1000)
    threshold = float(_given.get("threshold") or 0.9)
    return draws, figures, model, name, store, threshold


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Measure

    Every head from the weights, then the scrambles and the capacities from what is stored, and a check of the store
    against itself. Nothing is done twice: a model that is there with the same content is left as it is.
    """)
    return


@app.cell
def _(draws, model, name, store, subprocess, sys):
    def headatlas(*arguments):
        command = [sys.executable, "-m", "cli", *map(str, arguments), "--store", str(store)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr)
        return run.stdout

    said = headatlas("ingest", model, "--name", name, "--operator", "both")
    headatlas("null", name, "--draws", draws)
    headatlas("capacity", name)
    headatlas("verify", name)
    print(said)
    return (said,)


@app.cell
def _(name, open_atlas, said, store):
    assert name in said
    atlas = open_atlas(store)
    facts = atlas.sql("SELECT * FROM models WHERE model = $model", {"model": name}).row(0, named=True)
    return atlas, facts


@app.cell(hide_code=True)
def _(facts, mo):
    mo.md(f"""
    `{facts["source"]}`: {facts["architecture"]}, {facts["n_layers"]} layers, content `{facts["content_hash"][:12]}`.

    ## Which heads close

    The questions of the command line are methods that return Polars frames. `raw` takes the weights as stored, `folded`
    has the norms multiplied in.
    """)
    return


@app.cell
def _(atlas, name, threshold):
    rates = atlas.closure(threshold, models=[name])
    rates
    return (rates,)


@app.cell
def _(atlas, name):
    strongest = atlas.sql(
        "SELECT label, layer, head, closure, alpha, trace_rank FROM heads "
        "WHERE model = $model AND operator = 'raw' AND closure IS NOT NULL ORDER BY closure DESC LIMIT 5",
        {"model": name},
    )
    strongest
    return (strongest,)


@app.cell
def _(atlas, draw, name):
    heatmap = draw(atlas, "heatmap", [name])
    heatmap
    return (heatmap,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Against chance

    The scramble null keeps a head's singular values and the angles between what it reads and writes, and draws the
    orientation between them at random.
    """)
    return


@app.cell
def _(atlas, name):
    against_chance = atlas.ask("null-summary", models=[name], kind="scramble")
    against_chance
    return (against_chance,)


@app.cell
def _(atlas, draw, name, threshold):
    distribution = draw(atlas, "closure-distribution", [name], threshold=threshold)
    distribution
    return (distribution,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## How closed heads could be

    Capacity is the largest closure that the same singular values and angles allow. Most heads could close and do not.
    """)
    return


@app.cell
def _(atlas, draw, name, threshold):
    capacity = draw(atlas, "closure-capacity", [name], threshold=threshold)
    capacity
    return (capacity,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Whose values, and who acts on whom

    With the values of another head nothing closes. Where heads share their values and head j is strong,
    `T_i T_j ~ alpha_j T_i`: it acts on the others from the right as a scalar.
    """)
    return


@app.cell
def _(atlas, draw, name, strongest):
    mismatch = draw(atlas, "mismatch", [name], layer=strongest["layer"][0])
    mismatch
    return (mismatch,)


@app.cell
def _(atlas, draw, name, threshold):
    algebra = draw(atlas, "algebra", [name], threshold=threshold)
    algebra
    return (algebra,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## One head, by hand

    The stored core is all that closure needs. With the cosines on a diagonal D, `T^2` has the core `K D K`.
    """)
    return


@app.cell
def _(atlas, name, np, strongest):
    _layer, _head = strongest.select("layer", "head").row(0)
    core = atlas.array(name, "core", layer=_layer, head=_head)
    cosine = atlas.array(name, "cosine", layer=_layer, head=_head)
    square = core @ np.diag(cosine) @ core
    by_hand = (square * core).sum() ** 2 / ((square**2).sum() * (core**2).sum())
    print(f"{strongest['label'][0]}: {by_hand:.6f} by hand, {strongest['closure'][0]:.6f} stored")
    return (by_hand,)


@app.cell
def _(atlas, draw, name, strongest):
    one_head = draw(atlas, "head", [name], layer=strongest["layer"][0], head=strongest["head"][0])
    one_head
    return (one_head,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## A question of one's own

    Tables are Polars lazy frames. Does closure go with the angles between what a head reads and what it writes?
    """)
    return


@app.cell
def _(atlas, name, pl):
    by_angle = (
        atlas.table("heads")
        .filter(pl.col("model") == name, pl.col("operator") == "raw", pl.col("closure").is_not_null())
        .with_columns(quarter=1 + 4 * (pl.col("cos_mean").rank("ordinal") - 1) // pl.len())
        .group_by("quarter")
        .agg(pl.len().alias("heads"), pl.col("cos_mean", "closure").median())
        .sort("quarter")
        .collect()
    )
    by_angle
    return (by_angle,)


@app.cell
def _(algebra, capacity, distribution, figures, heatmap, mismatch, one_head, save_figure):
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        drawn = {
            "heatmap": heatmap,
            "closure-distribution": distribution,
            "closure-capacity": capacity,
            "mismatch": mismatch,
            "algebra": algebra,
            "head": one_head,
        }
        for _name, _figure in drawn.items():
            save_figure(_figure, figures / f"{_name}.pdf")
        print(f"{len(drawn)} figures in {figures}")
    return


if __name__ == "__main__":
    app.run()
