"""One head: its singular values, principal cosines, eigenvalues and core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from query.figures.colour import Scale, draw_matrix
from query.figures.selection import Choice, Drawn, head_rows, one_population, strongest
from query.figures.style import DARK, GREY, PALETTE, WARM, Style, legend_below, new_figure, settle, styled
from stats.errors import QueryError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from query.atlas import Atlas

STORED = ("sigma", "sigma_o", "sigma_v", "cosine", "eigenvalue_re", "eigenvalue_im")

SPECTRA = f"""SELECT reason, alpha, closure, label, d_head, {", ".join(STORED)}
FROM spectra JOIN heads USING (model, operator, stack, layer, head)
WHERE model = $model AND stack = $stack AND operator = $operator AND layer = $layer AND head = $head"""


@dataclass(frozen=True, slots=True)
class Spectra:
    """What is stored of one head: every array (d_head,), ``core`` (d_head, d_head).

    ``alpha`` is None, and ``cosine`` and ``eigenvalue`` are NaN, where the head maps between two streams.
    """

    sigma: np.ndarray
    sigma_o: np.ndarray
    sigma_v: np.ndarray
    cosine: np.ndarray
    eigenvalue: np.ndarray
    core: np.ndarray
    alpha: float | None

    @property
    def scramble_radius(self) -> float:
        """Radius of the disc that the eigenvalues of a scramble fill as d_head grows, in weight units squared.

        ``sqrt(mean sigma^2 mean cosine^2)``, by the single ring theorem (Guionnet, Krishnapur and Zeitouni 2011).
        """
        return float(np.sqrt((self.sigma**2).mean() * (self.cosine**2).mean()))


def head_figure(spectra: Spectra, style: Style = "screen", title: str = "") -> Figure:
    """Four panels: singular values of O, V and T, principal cosines, eigenvalues, and the size of the core's entries.

    Args:
        spectra: what is stored of the head.
        style: ``screen`` or ``paper``.
        title: what stands above on a screen.
    """
    with styled(style):
        figure = new_figure(style, 0.95 if style == "screen" else 1.02, title, square=True)
        grid = figure.subplots(2, 2)
        handles, labels = [], []
        for axes, draw in zip(grid.ravel(), (_singular_values, _cosines, _eigenvalues, _core), strict=True):
            draw(axes, spectra)
            axes.set_box_aspect(1)
            _few_ticks(axes)
            drawn = axes.get_legend_handles_labels()
            handles += drawn[0]
            labels += drawn[1]
        legend_below(figure, handles, labels, style)
        return settle(figure)


def _singular_values(axes: Axes, spectra: Spectra) -> None:
    index = np.arange(1, len(spectra.sigma) + 1)
    for values, colour, line, name in (
        (spectra.sigma_o, PALETTE[0], "--", "factor O"),
        (spectra.sigma_v, PALETTE[1], "-.", "factor V"),
        (spectra.sigma, PALETTE[2], "-", "T = O Vᵀ"),
    ):
        axes.plot(index, np.where(values > 0, values, np.nan) / values[0], color=colour, linestyle=line, label=name)
    if spectra.sigma[-1] < spectra.sigma[0] / 50:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"index [1 to {len(spectra.sigma)}]")
    axes.set_ylabel("sigma / largest")


def _cosines(axes: Axes, spectra: Spectra) -> None:
    axes.set_xlabel(f"index [1 to {len(spectra.sigma)}]")
    axes.set_ylabel("cosine [0 to 1]")
    axes.set_ylim(0, 1.02)
    if not np.isfinite(spectra.cosine).all():
        _undefined(axes)
        return
    axes.plot(np.arange(1, len(spectra.cosine) + 1), spectra.cosine, color=PALETTE[2])


def _eigenvalues(axes: Axes, spectra: Spectra) -> None:
    axes.set_xlabel("Re λ [weight units²]")
    axes.set_ylabel("Im λ [weight units²]")
    if not np.isfinite(spectra.eigenvalue).all():
        _undefined(axes)
        return
    hollow: dict[str, Any] = {"linestyle": "", "markerfacecolor": "none", "markeredgewidth": 0.6}
    axes.plot(
        spectra.eigenvalue.real, spectra.eigenvalue.imag, marker="o", color=DARK, label="eigenvalue of T", **hollow
    )
    radius = spectra.scramble_radius
    turn = np.linspace(0, 2 * np.pi, 181)
    axes.plot(
        radius * np.cos(turn),
        radius * np.sin(turn),
        color=GREY,
        linestyle="--",
        linewidth=0.9,
        label="radius of scrambles",
    )
    if spectra.alpha is not None:
        star: dict[str, Any] = {
            "linestyle": "",
            "marker": "*",
            "markeredgecolor": "black",
            "markeredgewidth": 0.8,
            "zorder": 4,
        }
        axes.plot(
            [spectra.alpha], [0], color=WARM, markersize=2.2 * axes.lines[0].get_markersize(), label="alpha", **star
        )
    reach = 1.08 * max(radius, float(np.abs(spectra.eigenvalue).max()), abs(spectra.alpha or 0.0)) or 1.0
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-reach, reach)


def _core(axes: Axes, spectra: Spectra) -> None:
    size = np.abs(spectra.core)
    scale = Scale(float(size.max()) * 1e-3, float(size.max()), False, True, "min")
    count = len(size)
    image = draw_matrix(axes, size, scale, (0.5, count + 0.5, count + 0.5, 0.5))
    bar = axes.get_figure().colorbar(image, ax=axes, extend=scale.extend, pad=0.03)  # type: ignore[union-attr]
    bar.set_label("|K| [weight units²]" + scale.note)
    axes.set_xlabel("direction of V")
    axes.set_ylabel("direction of O")


def _few_ticks(axes: Axes) -> None:
    """At most four ticks along the bottom; whole numbers where indices are counted."""
    from matplotlib.ticker import MaxNLocator

    counted = axes.get_xlabel().startswith(("index", "direction"))
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=counted))
    if axes.images:
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))


def _undefined(axes: Axes) -> None:
    axes.text(
        0.5, 0.5, "undefined:\nT maps one stream\ninto another", ha="center", va="center", transform=axes.transAxes
    )


def draw_head(atlas: Atlas, choice: Choice) -> Drawn:
    """The spectra of one head, by default the one of highest closure.

    Raises:
        QueryError: several models or stacks, no such layer or head, a head without a layer, or a head
            whose operator is zero or not finite.
    """
    selected = one_population(atlas, choice)
    population = selected.populations[0]
    if choice.head is not None and choice.layer is None:
        raise QueryError("--head needs --layer", where=population.name, remedy="give both")
    layer, head = strongest(atlas, choice, population, choice.layer)
    if choice.head is None:
        selected.notes.append(f"L{layer}H{head}, the head of highest closure; another with --layer and --head")
    else:
        known = head_rows(atlas, choice, [population]).filter(layer=layer)["head"].to_list()
        if choice.head not in known:
            raise QueryError(
                f"no head {choice.head}",
                where=f"{population.name}, layer {layer}",
                expected=f"{known[0]} to {known[-1]}",
                found=str(choice.head),
            )
        head = choice.head
    key = {
        "model": population.model, "stack": population.stack, "operator": choice.operator, "layer": layer, "head": head,
    }  # fmt: skip
    row = atlas.sql(SPECTRA, key).row(0, named=True)
    if row["reason"] in ("zero", "nonfinite", "pruned"):
        raise QueryError(
            "the head has no spectra to draw",
            where=f"{population.name}, {row['label']}",
            found=row["reason"],
            remedy="choose another --head",
        )
    size = row["d_head"]
    core = atlas.array(population.model, "core", choice.operator, population.stack, layer, head)
    stored = {name: np.array(row[name], dtype=np.float64) for name in STORED}
    spectra = Spectra(
        sigma=stored["sigma"],
        sigma_o=stored["sigma_o"],
        sigma_v=stored["sigma_v"],
        cosine=stored["cosine"],
        eigenvalue=stored["eigenvalue_re"] + 1j * stored["eigenvalue_im"],
        core=core[:size, :size],
        alpha=row["alpha"],
    )
    said = "" if row["closure"] is None else f": closure {row['closure']:.3g}, alpha {row['alpha']:.3g}"
    title = f"{population.name} {row['label']}, {choice.operator}{said}"
    return Drawn(head_figure(spectra, choice.style, title), selected)
