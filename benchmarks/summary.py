"""benchmarks/README.md and docs/figures/speed.svg, from the results that are there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT
from run import SUITE, listing

README = Path(__file__).parent / "README.md"
FIGURE = ROOT / "docs" / "figures" / "speed.svg"
Figures = dict[str, Any]

HEAD = """# Benchmarks

Written by `python benchmarks/run.py --summary` from `benchmarks/results/*.json`. Ratios say more than seconds: what is
compared ran in turns, in one run, on one machine. Times are medians of the repeats stated.
"""


def loaded(name: str) -> Figures | None:
    """A result, None if it has not been measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table; numbers to three significant digits, or whole."""
    header = list(header)

    def told(cell: object) -> str:
        if not isinstance(cell, float):
            return str(cell)
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"

    def line(cells: Iterable[object]) -> str:
        return f"| {' | '.join(map(told, cells))} |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows)]


def ingest(figures: Figures) -> list[str]:
    """Every route with the ratio of ingest to it."""
    medians = figures["medians"]
    rows = []
    for name, figure in medians.items():
        base = medians.get("ingest, GGUF" if name.endswith("GGUF") else "ingest, safetensors")
        ratios = [base[key] / figure[key] for key in ("wall_seconds", "peak_mib", "fetched_bytes")]
        rows.append([name, figure["wall_seconds"], figure["peak_mib"], figure["fetched_bytes"] / 1e6, *ratios])
    return table(["route", "wall, s", "peak, MiB", "read, MB", "ingest/it: wall", "memory", "bytes"], rows)


def floor(figures: Figures) -> list[str]:
    """The floor's parts and what ingest takes over it."""
    parts = ("reading", "products", "decompositions")
    rows = [
        [
            name,
            *(figure[f"{part}_seconds"] for part in parts),
            figure["floor_seconds"],
            figure["start_seconds"],
            figure["ingest_seconds"],
            figure["ingest_over_floor"],
            figure["ingest_less_start_over_floor"],
        ]
        for name, figure in figures["figures"].items()
    ]
    columns = ["floor, s", "start, s", "ingest, s", "ingest/floor", "less start"]
    return table(["checkpoint", *(f"{part}, s" for part in parts), *columns], rows)


def costs(figures: Figures) -> list[str]:
    """Slopes of log seconds."""
    rows = [
        [
            axis,
            ", ".join(map(str, found["sizes"])),
            ", ".join(f"{spent:.2f}" for spent in found["seconds"]),
            found["slope"],
            found["last_slope"],
        ]
        for axis, found in figures["figures"].items()
    ]
    return table(["varied", "sizes", "seconds", "slope", "between the last two"], rows)


def remote(figures: Figures) -> list[str]:
    """What was moved against what is stored."""
    moved, stored = figures["moved_bytes"], figures["stored_bytes"]
    row = [figures["layers"], stored / 1e9, figures["attention_bytes"] / 1e9, moved / 1e9, f"{moved / stored:.2%}"]
    return table(
        ["layers", "stored, GB", "attention, GB", "moved, GB", "share", "requests"], [[*row, figures["requests"]]]
    )


def draws(figures: Figures) -> list[str]:
    """Draws per second and the ratio to a QR for each."""
    rows = [
        [name.replace("_", " "), found["fast_draws_per_second"], found["qr_over_fast"], found["independent_over_fast"]]
        for name, found in figures.items()
        if name.startswith("d_head")
    ]
    return table(["", "draws per second", "QR of Gaussians/it", "one draw a pair/it"], rows)


def capacity(figures: Figures) -> list[str]:
    """Heads per second of both methods."""
    keys = ("assignment_heads_per_second", "refinement_heads_per_second", "largest_gain")
    rows = [[name, *(found[key] for key in keys)] for name, found in figures["figures"].items()]
    return table(["", "assignments per second", "ascents per second", "largest gain of the ascent"], rows)


def queries(figures: Figures) -> list[str]:
    """Latencies of the named questions by size."""
    rows = [
        [
            name,
            f"{found['pairs']:,}",
            found["opening_milliseconds"],
            found["median_milliseconds"],
            f"{found['slowest_milliseconds']:.3g} ({found['slowest']})",
            found["sql_process_seconds"],
        ]
        for name, found in figures["figures"].items()
    ]
    return table(["catalogue", "pairs", "opening, ms", "median question, ms", "slowest, ms", "`sql` process, s"], rows)


def startup(figures: Figures) -> list[str]:
    """Seconds of whole processes."""
    return table(["process", "wall, s"], figures["seconds"].items())


def workers(figures: Figures) -> list[str]:
    """Speedups."""
    keys = ("one_seconds", "two_seconds", "speedup", "two_against_one_thread")
    rows = [[kind, *(found[key] for key in keys)] for kind, found in figures["figures"].items()]
    return table(["", "one, s", "two, s", "one/two", "one thread/two"], rows)


def flat(*keys: str) -> Callable[[Figures], list[str]]:
    """A table of some figures of a result."""
    return lambda figures: table(
        keys and [key.replace("_", " ") for key in keys],
        [[figures[key] if isinstance(figures[key], float) else f"{figures[key]:,}" for key in keys]],
    )


SECTIONS: dict[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "ingest": ("ingest_against_loading", ingest),
    "floor": ("floor", floor),
    "costs": ("shape_costs", costs),
    "remote": ("remote_bytes_few_layers", remote),
    "draws": ("scramble_draws", draws),
    "capacity": ("capacity", capacity),
    "queries": ("query_scale", queries),
    "startup": ("startup", startup),
    "workers": ("workers", workers),
    "large": ("large_checkpoint", flat("layers", "heads", "file_bytes", "fetched_bytes", "wall_seconds", "peak_mib")),
    "panel": (
        "panel_derivations",
        flat("heads", "null_seconds", "capacity_seconds", "draws_per_second", "capacities_per_second"),
    ),
    "latency": ("query_latency", flat("sql_start_seconds", "opening_milliseconds", "slowest_milliseconds")),
    "report": ("report_size", flat("page_bytes", "making_seconds", "first_paint_ms", "charts_ms", "first_card_ms")),
    "remote-235b": ("remote_bytes", remote),
}
"""The result of each benchmark and how it is told."""


def readme() -> str:
    """The text of benchmarks/README.md."""
    lines = [HEAD, "```", listing(), "```", ""]
    for benchmark in SUITE:
        result, tell = SECTIONS[benchmark.name]
        figures = loaded(result)
        if figures is None:
            continue
        machine = figures["machine"]
        load = f", load {machine['load']:g}" if "load" in machine else ""
        repeats = f", repeats: {figures['repeats']}" if "repeats" in figures else ""
        where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB{load}"
        lines += [f"## {benchmark.name}", "", f"{benchmark.what[0].upper()}{benchmark.what[1:]}.", ""]
        lines += [*tell(figures), "", f"{where}, Python {machine['python']}, commit {machine['commit']}{repeats}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def ratios() -> list[tuple[str, float, str]]:
    """What the figure draws: a label, a time over that of ingest, and the group it belongs to."""
    drawn: list[tuple[str, float, str]] = []
    against = loaded("ingest_against_loading")
    if against:
        medians = against["medians"]
        for name, figure in medians.items():
            if not name.startswith("ingest"):
                base = medians.get("ingest, GGUF" if name.endswith("GGUF") else "ingest, safetensors")
                drawn.append((name, figure["wall_seconds"] / base["wall_seconds"], "loading the whole model"))
    found = loaded("floor")
    for name, figure in (found["figures"] if found else {}).items():
        start = (figure["floor_seconds"] + figure["start_seconds"]) / figure["ingest_seconds"]
        drawn.append((f"{name}, floor and start", start, "the floor"))
        drawn.append((f"{name}, floor", figure["floor_seconds"] / figure["ingest_seconds"], "the floor"))
    return drawn


def draw(path: Path) -> None:
    """Bars of time over that of ingest, on a logarithmic axis: above 1 what ingest saves, below 1 what it could."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    colours = {"loading the whole model": "#b8554a", "the floor": "#4a7fb8"}
    drawn = ratios()[::-1]
    with mpl.rc_context({"svg.hashsalt": "headatlas", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.34 * len(drawn)), layout="constrained")
        values = [value for _, value, _ in drawn]
        bars = axes.barh(
            [name for name, _, _ in drawn],
            [value - 1 for value in values],
            left=1,
            color=[colours[group] for _, _, group in drawn],
            height=0.62,
        )
        for bar, value in zip(bars, values, strict=True):
            beside, side = (5, "left") if value >= 1 else (-5, "right")
            axes.annotate(
                f"{value:.2g}",
                (value, bar.get_y() + bar.get_height() / 2),
                (beside, 0),
                textcoords="offset points",
                ha=side,
                va="center",
            )
        axes.set_xscale("log")
        axes.set_xlim(min([0.5, *values]) / 1.6, max([2.0, *values]) * 1.6)
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if axes.get_xlim()[0] < tick]
        axes.set_xticks([tick for tick in ticks if tick < axes.get_xlim()[1]])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel("time over that of headatlas ingest")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        groups = [name for name in colours if any(group == name for _, _, group in drawn)]
        axes.legend(handles=[Patch(color=colours[name], label=name) for name in groups], frameon=False, loc="best")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def summarise() -> list[Path]:
    """Write the summary and the figure; returns where."""
    README.write_text(readme(), encoding="utf-8")
    written = [README]
    if ratios():
        draw(FIGURE)
        written.append(FIGURE)
    return written
