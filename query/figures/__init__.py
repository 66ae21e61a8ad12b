"""Figures for papers and screens: from frames and arrays to Matplotlib figures, and from a store to files."""

from query.figures.capacity import closure_capacity_figure
from query.figures.comparison import comparison_figure
from query.figures.distribution import closure_distribution_figure
from query.figures.drawing import Drawing, draw, drawing, figure_list
from query.figures.head import Spectra, head_figure
from query.figures.heatmap import heatmap_figure
from query.figures.pairs import algebra_figure, mismatch_figure
from query.figures.saving import form_of, save_figure
from query.figures.selection import Choice
from query.figures.style import STYLES, Style
from query.figures.trajectory import trajectory_figure

__all__ = [
    "STYLES",
    "Choice",
    "Drawing",
    "Spectra",
    "Style",
    "algebra_figure",
    "closure_capacity_figure",
    "closure_distribution_figure",
    "comparison_figure",
    "draw",
    "drawing",
    "figure_list",
    "form_of",
    "head_figure",
    "heatmap_figure",
    "mismatch_figure",
    "save_figure",
    "trajectory_figure",
]
