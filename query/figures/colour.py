"""Colour scales: which map and range a matrix of numbers is shown with, and what is undefined in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from query.figures.style import DIVERGING, SEQUENTIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

WIDE_SPAN = 1000.0
"""Positive values that differ by more than this factor are shown on a logarithmic scale."""

OUTLIER = 10.0
"""A range is cut where its end lies this many times beyond the 98% quantile of magnitudes."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Colour map and range of values; ``extend`` says on which sides values lie beyond the range."""

    lower: float
    upper: float
    signed: bool
    logarithmic: bool
    extend: Literal["neither", "both", "min", "max"]

    def options(self) -> dict[str, Any]:
        """What ``imshow`` takes."""
        from matplotlib.colors import LogNorm, Normalize

        kind = LogNorm if self.logarithmic else Normalize
        return {"cmap": DIVERGING if self.signed else SEQUENTIAL, "norm": kind(self.lower, self.upper)}

    @property
    def note(self) -> str:
        """What a colour bar's label adds."""
        return ", log scale" if self.logarithmic else ""


def scale_of(values: np.ndarray, declared: str = "", signed: bool = False) -> Scale:
    """The scale of finite values of any shape.

    Args:
        values: numbers; NaN and infinity are left out.
        declared: unit or range as the registry has it.
        signed: whether zero is the middle even if no value is negative.
    """
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return Scale(0.0, 1.0, signed, False, "neither")
    lowest, highest = float(finite.min()), float(finite.max())
    if signed or lowest < 0:
        limit, cut = (1.0, False) if declared == "-1 to 1" else _limit(np.abs(finite))
        return Scale(-limit, limit, True, False, "both" if cut else "neither")
    positive = finite[finite > 0]
    if positive.size and highest > WIDE_SPAN * float(np.quantile(positive, 0.05)):
        floor = max(float(positive.min()), highest * 1e-6)
        return Scale(floor, highest, False, True, "min" if lowest < floor else "neither")
    if declared == "0 to 1" and highest > 0.5:
        return Scale(0.0, 1.0, False, False, "neither")
    limit, cut = _limit(finite)
    lower = min(lowest, limit) if declared.startswith(("1 to", "at least 1")) else 0.0
    return Scale(lower if lower < limit else 0.0, limit, False, False, "max" if cut else "neither")


def _limit(magnitudes: np.ndarray) -> tuple[float, bool]:
    """Upper end of a range and whether values lie beyond it; a few outliers do not set it."""
    highest, usual = float(magnitudes.max()), float(np.quantile(magnitudes, 0.98))
    if usual > 0 and highest > OUTLIER * usual:
        return usual, True
    return highest or 1.0, False


def draw_matrix(axes: Axes, values: np.ndarray, scale: Scale, extent: tuple[float, float, float, float]) -> AxesImage:
    """A matrix as coloured cells; NaN stays blank. ``extent`` as ``imshow`` has it."""
    image = axes.imshow(
        np.ma.masked_invalid(values),
        extent=extent,
        origin="upper" if extent[2] > extent[3] else "lower",
        aspect="auto",
        interpolation="nearest",
        **scale.options(),
    )
    for spine in axes.spines.values():
        spine.set_visible(True)
    return image


def hatch_cells(axes: Axes, rows: np.ndarray, columns: np.ndarray) -> None:
    """Hatch cells whose value is undefined, so that they are no colour of the map.

    Args:
        axes: where the matrix is drawn.
        rows: (cell,) vertical middles of the cells.
        columns: (cell,) horizontal middles.
    """
    from matplotlib.collections import PolyCollection

    if len(rows) == 0:
        return
    corner = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
    cells = np.stack([columns, rows], -1)[:, None, :] + corner
    axes.add_collection(
        PolyCollection(list(cells), facecolor="white", edgecolor="0.35", hatch="/////", linewidth=0),
        autolim=False,
    )


def dot_negative(axes: Axes, image: AxesImage, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
    """Dot cells of negative value: in grey the two ends of the map look the same.

    Args:
        axes: where the matrix is drawn; its layout has been settled, since dots are sized by the cells.
        image: the matrix.
        rows: (cell,) vertical middles of the cells.
        columns: (cell,) horizontal middles.
        values: (cell,) what the cells hold.
    """
    negative = values < 0
    if not negative.any():
        return
    box = axes.get_window_extent()
    down, across = image.get_size()
    cell = min(box.width / across, box.height / down) / axes.figure.dpi * 72
    size = float(np.clip(0.3 * cell, 0.7, 4.0))
    strong = np.abs(values[negative]) > 0.7 * image.get_clim()[1]
    axes.scatter(
        columns[negative],
        rows[negative],
        s=size**2,
        c=np.where(strong, "white", "black"),
        linewidths=0,
        rasterized=bool(negative.sum() > 400),
    )


def numbers(column: pl.Series) -> np.ndarray:
    """A column as doubles, NaN where it is NULL."""
    return column.cast(pl.Float64).fill_null(np.nan).to_numpy()
