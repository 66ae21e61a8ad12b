"""What all figures look like: sizes, colours, markers, scales, panels and legends.

Colours of series differ in lightness, so that they stay apart in grey, and under simulated protanopia,
deuteranopia and tritanopia; markers and line styles differ besides.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from stats.registry import CAPACITY_STATISTICS, HEAD_STATISTICS, PAIR_STATISTICS, Statistic

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = Literal["screen", "paper"]
STYLES: tuple[Style, ...] = ("screen", "paper")

WIDTH: dict[Style, float] = {"screen": 7.5, "paper": 3.3}
"""Inches of a figure; ``paper`` is one column of two."""

FONT: dict[Style, float] = {"screen": 10, "paper": 8}
"""Points of all text."""

PALETTE = ("#2062ab", "#d86a1e", "#0d1b45", "#6bb2ea", "#7d2a10", "#ecc84a")
"""Colours of series, L* 41, 57, 11, 70, 30 and 82; the faintest comes last."""

DARK, WARM, GREY, FAINT = PALETTE[0], PALETTE[1], "#7f7f7f", "#c4c4c4"
LETTER = 0.54
"""Width of an average letter, in ems."""

MARKERS = ("o", "^", "s", "D", "v", "P", "X", "<", ">", "p", "h", "*")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MAX_PANELS = 12
"""Panels, or series, that one figure has room for."""

SEQUENTIAL, DIVERGING = "viridis", "coolwarm"
"""Colour maps of nearly even steps in CIELAB; the second for values of both signs."""

SIGNED = ("alpha", "trace", "trace_rank", "copying")
"""Columns of heads that are negative for some heads of most models."""


def settings(style: Style) -> dict[str, Any]:
    """Matplotlib's settings on top of its defaults, whatever the user's own are."""
    size, paper = FONT[style], style == "paper"
    sizes = ("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    return dict.fromkeys(sizes, size) | {
        "figure.titlesize": size + 1,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.minor.width": 0.4,
        "lines.linewidth": 1.1 if paper else 1.5,
        "lines.markersize": 3.5 if paper else 5,
        "hatch.linewidth": 0.6,
        "legend.handlelength": 2.2,
        "legend.columnspacing": 1.5,
        "legend.frameon": False,
        "svg.fonttype": "path" if paper else "none",
        "svg.hashsalt": "headatlas",
        "pdf.fonttype": 42,
        "savefig.dpi": 300 if paper else 160,
    }


@contextmanager
def styled(style: Style) -> Iterator[None]:
    """Draw or save in a style; the settings of whoever calls are as before afterwards."""
    import matplotlib.style

    with matplotlib.style.context(["default", settings(style)]):
        yield


def new_figure(style: Style, height: float, title: str, square: bool = False) -> Figure:
    """An empty figure of a style's width and ``height`` in widths; on paper the caption says the title.

    ``square`` is for panels of a fixed shape, which then lie close together.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH[style], WIDTH[style] * height), layout="compressed" if square else "constrained")
    if style == "screen":
        figure.suptitle(literal(title))
    return figure


def panels(
    names: Sequence[str], style: Style, title: str, shape: float, columns: int = 3, drawn: float = 0.82
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each name, in rows of at most ``columns``.

    ``shape`` is height over width, and ``drawn`` the share of the width that is not labels and colour bars.
    """
    count = len(names)
    across = columns_for(count, columns)
    down = -(-count // across)
    font = FONT[style] / 72
    rows_height = down * (WIDTH[style] / across * shape + 2 * font)
    figure = new_figure(style, (rows_height + (5 if style == "screen" else 3) * font) / WIDTH[style], title)
    grid = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for axes in grid[count:]:
        axes.remove()
    used = grid[:count]
    if count > 1 or style == "screen":
        for axes, name in zip(used, names, strict=True):
            panel_title(axes, name, WIDTH[style] / across * drawn, style)
    return figure, used


def columns_for(count: int, most: int = 3) -> int:
    """Columns of a grid of panels: four make a square."""
    return 2 if count == 4 and most > 2 else min(count, most)


def panel_title(axes: Axes, name: str, width: float, style: Style) -> None:
    """A panel's name above it, broken where it is wider than ``width`` inches."""
    letters = max(8, int(width * 72 / FONT[style] / LETTER))
    axes.set_title("\n".join(textwrap.wrap(literal(name), letters)))


def outer_labels(used: Sequence[Axes], x: str, y: str) -> None:
    """Label the lowest panel of every column and the first of every row."""
    for axes in used:
        place = axes.get_subplotspec()
        assert place is not None
        below = [other for other in used if other is not axes and _is_below(other, place)]
        if not below:
            axes.set_xlabel(x)
        if place.colspan.start == 0:
            axes.set_ylabel(y)


def _is_below(axes: Axes, place: Any) -> bool:
    other = axes.get_subplotspec()
    assert other is not None
    return bool(other.colspan.start == place.colspan.start and other.rowspan.start > place.rowspan.start)


def literal(text: str) -> str:
    """Text that is shown as it is, with no part of it taken for mathematics."""
    return text.replace("$", r"\$")


def legend_below(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], style: Style) -> None:
    """A legend under the whole figure, in as many columns as fit."""
    if not labels:
        return
    ems = WIDTH[style] * 72 / FONT[style]
    wrapped = ["\n".join(textwrap.wrap(literal(label), int((ems - 5) / LETTER))) for label in labels]
    columns = next(count for count in range(len(labels), 0, -1) if count == 1 or _legend_width(labels, count) < ems)
    figure.legend(list(handles), wrapped, loc="outside lower center", ncols=columns)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """Width of a legend in ems; entries run down the columns, of which the first are the longer."""
    rows, more = divmod(len(labels), columns)
    starts = [column * rows + min(column, more) for column in range(columns + 1)]
    longest = [max(map(len, labels[first:last])) for first, last in pairwise(starts)]
    return sum(longest) * LETTER + columns * 4.6


def series_style(number: int) -> dict[str, Any]:
    """Colour, line and marker of a series; twelve are different in the last two, whatever the colour."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": LINES[number % len(LINES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markerfacecolor": PALETTE[number % len(PALETTE)] if number < len(PALETTE) else "white",
    }


def settle(figure: Figure) -> Figure:
    """Lay a figure out once while its style holds, so that ticks made later do not take another."""
    figure.draw_without_rendering()
    return figure


def declared(column: str) -> Statistic | None:
    """Declaration of a column of heads; None for a user's own."""
    return next((item for item in HEAD_STATISTICS if item.name == column), None)


def label_of(column: str, values: str | None = None) -> str:
    """Name of a column with its unit or range, as an axis carries it."""
    known = [item for item in (*HEAD_STATISTICS, *PAIR_STATISTICS, *CAPACITY_STATISTICS) if item.name == column]
    text = values if values is not None else known[0].values if known else ""
    name = column.replace("_", " ")
    return literal(f"{name} [{text}]" if text else name)
