"""Charts of a report, as Vega-Lite specifications without data.

The page puts the rows in under the name ``rows`` and sets the parameters: ``hovered`` and ``chosen``
are the index of a head, -1 for none; ``brush`` in the scatter and ``marked`` in the heatmap are the
rectangle that was drawn in the scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
from altair.utils.schemapi import debug_mode

ACCENT = "#d55e00"
BLUE = "#3f83c4"
UNDEFINED = "#9a9a9a"
ROWS = alt.NamedData(name="rows")
PICKED = "datum.i === hovered || datum.i === chosen"

Kind = Literal["share", "signed", "size", "probability"]


@dataclass(frozen=True, slots=True)
class Shown:
    """A column that the charts can show: its title, and which colours and axis suit its values."""

    column: str
    title: str
    kind: Kind


SHOWN = (
    Shown("closure", "closure", "share"),
    Shown("alpha", "alpha", "signed"),
    Shown("participation", "participation", "size"),
    Shown("cos_mean", "mean cosine", "size"),
    Shown("copying", "copying", "signed"),
    Shown("capacity", "capacity", "size"),
    Shown("null_median", "null median", "probability"),
    Shown("p", "null p", "probability"),
)
TOOLTIP = {
    "closure": "closure",
    "alpha": "alpha",
    "capacity": "capacity",
    "null_median": "null median",
    "p": "null p",
    "participation": "participation",
    "cos_mean": "mean cosine",
    "copying": "copying",
}


def _parameters() -> list[alt.Parameter]:
    return [alt.param(name="hovered", value=-1), alt.param(name="chosen", value=-1)]


def _tooltip(columns: set[str]) -> list[alt.Tooltip]:
    numbers = [
        alt.Tooltip(f"{name}:Q", title=title, format=".4~g") for name, title in TOOLTIP.items() if name in columns
    ]
    return [alt.Tooltip("label:N", title="head"), *numbers]


def _colour(shown: Shown, logarithmic: bool) -> alt.Scale:
    if shown.kind == "signed":
        return alt.Scale(scheme="blueorange", domainMid=0)
    if shown.kind == "probability":
        return alt.Scale(scheme="viridis", type="log", reverse=shown.column == "p")
    if shown.kind == "share":
        return alt.Scale(scheme="viridis", type="log") if logarithmic else alt.Scale(scheme="viridis", domain=[0, 1])
    return alt.Scale(scheme="viridis", zero=False)


def heatmap(shown: Shown, columns: set[str], logarithmic: bool = False) -> alt.LayerChart:
    """A cell for each layer and head, coloured by a column; grey where it is undefined."""
    base = alt.Chart(ROWS).encode(
        x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("layer:O", title="layer", axis=alt.Axis(labelOverlap=True)),
    )
    defined = f"isValid(datum['{shown.column}'])" + (f" && datum['{shown.column}'] > 0" if logarithmic else "")
    inside = (
        "!marked.closure || (inrange(datum.closure, marked.closure) && "
        "inrange(datum[marked_column], marked[marked_column]))"
    )
    cells = (
        base.mark_rect(invalid=None, cursor="pointer")
        .encode(
            color=alt.condition(
                defined,
                alt.Color(
                    f"{shown.column}:Q",
                    scale=_colour(shown, logarithmic),
                    legend=alt.Legend(title=shown.title, gradientLength=140, format=".2~g", tickCount=4),
                ),
                alt.value(UNDEFINED),
            ),
            opacity=alt.condition(inside, alt.value(1), alt.value(0.18)),
            tooltip=_tooltip(columns),
        )
        .add_params(
            *_parameters(), alt.param(name="marked", value={}), alt.param(name="marked_column", value="closure")
        )
    )
    outline = (
        base.transform_filter(PICKED)
        .mark_rect(filled=False, strokeWidth=2.5, invalid=None)
        .encode(stroke=alt.value(ACCENT))
    )
    return alt.LayerChart(layer=[cells, outline], width="container")


def scatter(shown: Shown, columns: set[str], threshold: float, logarithmic: bool = False) -> alt.LayerChart:
    """Closure against another column; a drawn rectangle is the parameter ``brush``."""
    upright = alt.Scale(type="log") if logarithmic else alt.Scale(domain=[0, 1])
    across = alt.Scale(type="log") if shown.kind == "probability" else alt.Scale(zero=False, nice=True)
    base = (
        alt.Chart(ROWS)
        .transform_filter(
            f"isValid(datum['{shown.column}']) && isValid(datum.closure)"
            + (" && datum.closure > 0" if logarithmic else "")
            + (f" && datum['{shown.column}'] > 0" if shown.kind == "probability" else "")
        )
        .encode(
            x=alt.X(f"{shown.column}:Q", title=shown.title, scale=across, axis=alt.Axis(format=".3~g", tickCount=6)),
            y=alt.Y("closure:Q", title="closure", scale=upright, axis=alt.Axis(format=".3~g", tickCount=6)),
        )
    )
    brush = alt.selection_interval(name="brush", encodings=["x", "y"])
    points = (
        base.mark_circle(size=28, cursor="pointer", clip=True)
        .encode(
            color=alt.condition(brush, alt.value(BLUE), alt.value(UNDEFINED)),
            opacity=alt.condition(brush, alt.value(0.75), alt.value(0.25)),
            tooltip=_tooltip(columns),
        )
        .add_params(*_parameters(), brush)
    )
    strong = alt.Chart(alt.InlineData(values=[{"y": threshold}])).mark_rule(
        strokeDash=[4, 3], color=ACCENT, opacity=0.7
    )
    picked = base.mark_point(size=110, strokeWidth=2.5, filled=False, clip=True).encode(
        color=alt.value(ACCENT), opacity=alt.condition(PICKED, alt.value(1), alt.value(0))
    )
    return alt.LayerChart(layer=[strong.encode(y="y:Q"), points, picked], width="container")


def levels() -> alt.LayerChart:
    """Where a head's closure stands between its null, its mismatches and its capacity."""
    powers = alt.Axis(format="~g", ticks=False, values=[10.0**power for power in range(-16, 1)], labelOverlap="greedy")
    base = alt.Chart(ROWS).encode(
        x=alt.X("value:Q", title="closure", scale=alt.Scale(type="log"), axis=powers),
        y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(grid=True, ticks=False, domain=False)),
    )
    points = base.mark_circle(size=70, opacity=1).encode(
        color=alt.condition("datum.own", alt.value(ACCENT), alt.value(BLUE))
    )
    text = base.mark_text(align="left", dx=8).encode(text=alt.Text("value:Q", format=".3~g"))
    return alt.LayerChart(layer=[points, text], width="container")


def spectrum(title: str, bounded: bool = False) -> alt.LayerChart:
    """Values in descending order."""
    scale = alt.Scale(domain=[0, 1]) if bounded else alt.Scale(domainMin=0)
    base = alt.Chart(ROWS).encode(
        x=alt.X("index:Q", title="index", axis=alt.Axis(tickMinStep=1, tickCount=4, format="d")),
        y=alt.Y("value:Q", title=title, scale=scale, axis=alt.Axis(tickCount=4, format=".3~g")),
        tooltip=[alt.Tooltip("index:Q"), alt.Tooltip("value:Q", title=title, format=".3~g")],
    )
    line, points = base.mark_line(color=BLUE, strokeWidth=1), base.mark_circle(color=BLUE, size=14, opacity=1)
    return alt.LayerChart(layer=[line, points], width="container", height=130)


def plane() -> alt.LayerChart:
    """Eigenvalues in the complex plane, as far as ``radius``, and alpha."""
    scale = alt.Scale(domain=[{"expr": "-radius"}, {"expr": "radius"}])
    base = alt.Chart(ROWS).encode(
        x=alt.X("re:Q", title="Re eigenvalue", scale=scale, axis=alt.Axis(grid=True, tickCount=4, format=".2~g")),
        y=alt.Y("im:Q", title="Im eigenvalue", scale=scale, axis=alt.Axis(tickCount=4, format=".2~g")),
        tooltip=[alt.Tooltip("re:Q", format=".3~g"), alt.Tooltip("im:Q", format=".3~g")],
    )
    values = base.transform_filter("!datum.alpha").mark_circle(size=20, opacity=0.6, color=BLUE)
    alpha = (
        base.transform_filter("datum.alpha")
        .mark_point(shape="cross", filled=True, size=110, opacity=1)
        .encode(color=alt.value(ACCENT))
    )
    return alt.LayerChart(layer=[values, alpha], width=250, height=250).add_params(alt.param(name="radius", value=1.0))


def specifications(columns: set[str], extra: Mapping[str, str], threshold: float) -> dict[str, Any]:
    """Every chart of a report by place, column and scale.

    Args:
        columns: columns that have a number for at least one head.
        extra: title by column of a user's own statistics, shown beside the usual ones.
        threshold: closure at which the scatter draws a line.
    """
    shown = [item for item in SHOWN if item.column in columns]
    shown += [Shown(name, title, "size") for name, title in extra.items() if name in columns]
    scales = {"linear": False, "log": True}
    with debug_mode(False):  # validation takes seconds; the tests build them with it
        return {
            "shown": [[item.column, item.title] for item in shown],
            "heatmap": {item.column: heatmap(item, columns).to_dict(validate=False) for item in shown}
            | {"closure log": heatmap(SHOWN[0], columns, logarithmic=True).to_dict(validate=False)},
            "scatter": {
                f"{item.column} {scale}": scatter(item, columns, threshold, logarithmic).to_dict(validate=False)
                for item in shown
                for scale, logarithmic in scales.items()
                if item.column != "closure"
            },
            "levels": levels().to_dict(validate=False),
            "sigma": spectrum("singular value").to_dict(validate=False),
            "cosine": spectrum("cosine", bounded=True).to_dict(validate=False),
            "eigenvalue": plane().to_dict(validate=False),
        }
