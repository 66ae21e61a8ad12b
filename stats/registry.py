"""Every stored statistic, declared once.

The catalogue's columns and their comments, the data dictionary and the command line all read these
declarations. ``formula`` uses the notation of ``stats``: ``s`` are the singular values of
``T = O V^T`` in descending order, ``c`` the cosines of the principal angles between span(V) and
span(O), ``K`` the core in principal coordinates and ``D = diag(c)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SqlType = Literal["DOUBLE", "INTEGER", "DOUBLE[]", "BOOLEAN", "VARCHAR"]

PAPER = "scaled idempotence of OV operators"
SPECTRAL = "linear algebra"


@dataclass(frozen=True, slots=True)
class Statistic:
    """One stored number per head, pair or query head.

    ``values`` is a unit or a range; ``axes`` names the axes a list-valued statistic runs over.
    """

    name: str
    sql_type: SqlType
    meaning: str
    values: str
    formula: str
    source: str = SPECTRAL

    @property
    def comment(self) -> str:
        """The text that travels with the column as ``COMMENT ON`` and with the array."""
        return f"{self.meaning} [{self.values}] = {self.formula} ({self.source})"


HEAD_STATISTICS: tuple[Statistic, ...] = (
    Statistic(
        "closure",
        "DOUBLE",
        "scaled idempotence P of the head; NULL where T or T^2 vanishes",
        "0 to 1",
        "<T^2,T>^2 / (||T^2||^2 ||T||^2)",
        PAPER,
    ),
    Statistic(
        "alpha",
        "DOUBLE",
        "least-squares coefficient of T^2 ~ alpha T; may be negative",
        "weight units squared",
        "<T^2,T> / ||T||^2",
        PAPER,
    ),
    Statistic("norm", "DOUBLE", "Frobenius norm of T", "weight units squared", "||T|| = sqrt(sum s^2)"),
    Statistic("trace", "DOUBLE", "trace of T", "weight units squared", "tr(V^T O) = sum of eigenvalues"),
    Statistic(
        "trace_rank",
        "DOUBLE",
        "trace over alpha: the rank, if T is alpha times a projection",
        "dimensionless",
        "tr(T) / alpha",
        PAPER,
    ),
    Statistic(
        "rank",
        "INTEGER",
        "numerical rank of T: singular values above models.rank_cut times the largest",
        "0 to d_head",
        "#{s_i > rank_cut * s_1}",
    ),
    Statistic("sigma_max", "DOUBLE", "largest singular value of T", "weight units squared", "s_1"),
    Statistic(
        "sigma_min",
        "DOUBLE",
        "smallest of the d_head singular values of T; 0 where rank < d_head",
        "weight units squared",
        "s_k",
    ),
    Statistic(
        "participation",
        "DOUBLE",
        "participation ratio of the singular values",
        "1 to d_head",
        "(sum s^2)^2 / sum s^4",
    ),
    Statistic("stable_rank", "DOUBLE", "stable rank of T", "1 to d_head", "sum s^2 / s_1^2"),
    Statistic(
        "condition",
        "DOUBLE",
        "condition number of T on its support; NULL where rank < d_head",
        "at least 1",
        "s_1 / s_k",
    ),
    Statistic(
        "isometry",
        "DOUBLE",
        "how nearly the transport is a scaled isometry, T^T T ~ c I",
        "0 to 1",
        "(sum s^2)^2 / (d_head sum s^4)",
    ),
    Statistic(
        "cos_max",
        "DOUBLE",
        "largest cosine of the principal angles between span(V) and span(O)",
        "0 to 1",
        "c_1",
    ),
    Statistic("cos_mean", "DOUBLE", "mean of the d_head principal cosines", "0 to 1", "sum c / d_head"),
    Statistic("cos_min", "DOUBLE", "smallest of the d_head principal cosines", "0 to 1", "c_k"),
    Statistic(
        "spectral_radius",
        "DOUBLE",
        "largest eigenvalue modulus of T",
        "weight units squared",
        "max |lambda|",
    ),
    Statistic(
        "copying",
        "DOUBLE",
        "eigenvalue copying score; NULL where every eigenvalue vanishes",
        "-1 to 1",
        "sum Re(lambda) / sum |lambda|",
        "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits",
    ),
    Statistic(
        "null_scale",
        "DOUBLE",
        "scale of the scramble null to leading order: closure of a scramble ~ null_scale * chi^2_1, "
        "median 0.4549 * null_scale",
        "0 to 1",
        "sum s^6 / (sum s^2)^3",
        PAPER,
    ),
)

SPECTRA: tuple[Statistic, ...] = (
    Statistic(
        "sigma",
        "DOUBLE[]",
        "singular values of T, descending, padded with zeros to d_head",
        "weight units squared",
        "singular values of K",
    ),
    Statistic(
        "cosine",
        "DOUBLE[]",
        "cosines of the principal angles between span(V) and span(O), descending, padded with zeros",
        "0 to 1",
        "singular values of Q_V^T Q_O",
    ),
    Statistic(
        "eigenvalue_re",
        "DOUBLE[]",
        "real parts of the d_head eigenvalues of T, by descending modulus",
        "weight units squared",
        "Re eig(D K)",
    ),
    Statistic(
        "eigenvalue_im",
        "DOUBLE[]",
        "imaginary parts of the d_head eigenvalues of T, in the order of eigenvalue_re",
        "weight units squared",
        "Im eig(D K)",
    ),
    Statistic(
        "sigma_o",
        "DOUBLE[]",
        "singular values of the factor O as stored in the checkpoint, descending",
        "weight units",
        "singular values of O",
    ),
    Statistic(
        "sigma_v",
        "DOUBLE[]",
        "singular values of the factor V as stored in the checkpoint, descending",
        "weight units",
        "singular values of V",
    ),
)

QK_NOTE = "B = W_Q W_K^T of the query head and its group's key"

QK_STATISTICS: tuple[Statistic, ...] = (
    Statistic("norm", "DOUBLE", f"Frobenius norm of {QK_NOTE}", "weight units squared", "||B||"),
    Statistic("sigma_max", "DOUBLE", "largest singular value of B", "weight units squared", "first of sigma"),
    Statistic("sigma_min", "DOUBLE", "smallest singular value of B", "weight units squared", "last of sigma"),
    Statistic(
        "participation",
        "DOUBLE",
        "participation ratio of the singular values of B",
        "1 to d_head",
        "(sum sigma^2)^2 / sum sigma^4",
    ),
    Statistic(
        "symmetric_share",
        "DOUBLE",
        "share of ||B||^2 in the symmetric part of B (the zero-offset form where positions are rotary)",
        "0 to 1",
        "(||B||^2 + tr(B^2)) / (2 ||B||^2)",
    ),
    Statistic("cos_max", "DOUBLE", "largest principal cosine of span(Q) and span(K)", "0 to 1", "first of cosine"),
    Statistic("cos_mean", "DOUBLE", "mean principal cosine of span(Q) and span(K)", "0 to 1", "mean of cosine"),
    Statistic(
        "participation_q",
        "DOUBLE",
        "participation ratio of the singular values of W_Q",
        "1 to d_head",
        "tr(G)^2 / ||G||^2 with G = W_Q^T W_Q",
    ),
    Statistic(
        "participation_k",
        "DOUBLE",
        "participation ratio of the singular values of W_K",
        "1 to d_head",
        "tr(G)^2 / ||G||^2 with G = W_K^T W_K",
    ),
    Statistic("sigma", "DOUBLE[]", "singular values of B, descending", "weight units squared", "singular values of B"),
    Statistic(
        "cosine",
        "DOUBLE[]",
        "cosines of the principal angles between span(Q) and span(K), descending",
        "0 to 1",
        "singular values of Q_K^T Q_Q",
    ),
)

PAIR_STATISTICS: tuple[Statistic, ...] = (
    Statistic(
        "mismatch_closure",
        "DOUBLE",
        "closure of O_i V_j^T: head i writing from head j's values; equals the closure of head i "
        "where shared_value is true, which is no mismatch",
        "0 to 1",
        "closure of O_i V_j^T",
        PAPER,
    ),
    Statistic(
        "right_closure",
        "DOUBLE",
        "right-action law T_i T_j ~ alpha T_i; NULL where T_i T_j vanishes",
        "0 to 1",
        "<T_i T_j, T_i>^2 / (||T_i T_j||^2 ||T_i||^2)",
        PAPER,
    ),
    Statistic(
        "right_alpha",
        "DOUBLE",
        "least-squares coefficient of T_i T_j ~ alpha T_i",
        "weight units squared",
        "<T_i T_j, T_i> / ||T_i||^2",
        PAPER,
    ),
    Statistic(
        "left_closure",
        "DOUBLE",
        "left action T_i T_j ~ alpha T_j, the control; NULL where T_i T_j vanishes",
        "0 to 1",
        "<T_i T_j, T_j>^2 / (||T_i T_j||^2 ||T_j||^2)",
        PAPER,
    ),
    Statistic(
        "left_alpha",
        "DOUBLE",
        "least-squares coefficient of T_i T_j ~ alpha T_j",
        "weight units squared",
        "<T_i T_j, T_j> / ||T_j||^2",
        PAPER,
    ),
    Statistic(
        "range_angle_min",
        "DOUBLE",
        "smallest principal angle between what the two heads write to; NULL unless they share values",
        "0 to pi/2, radians",
        "min angle(range O_i, range O_j)",
        PAPER,
    ),
    Statistic(
        "range_angle_max",
        "DOUBLE",
        "largest principal angle between what the two heads write to; NULL unless they share values",
        "0 to pi/2, radians",
        "max angle(range O_i, range O_j)",
        PAPER,
    ),
)

NULL_STATISTICS: tuple[Statistic, ...] = (
    Statistic("median", "DOUBLE", "median closure under the null", "0 to 1", "median P'", PAPER),
    Statistic("q95", "DOUBLE", "95% quantile of closure under the null", "0 to 1", "Q_0.95 P'"),
    Statistic("q99", "DOUBLE", "99% quantile of closure under the null", "0 to 1", "Q_0.99 P'"),
    Statistic(
        "median_se",
        "DOUBLE",
        "standard error of the median from independent batches of draws; NULL for mismatch",
        "at least 0",
        "batch means over Haar pairs",
    ),
    Statistic(
        "p", "DOUBLE", "share of the null at or above the head's closure", "0 to 1", "(1 + #{P' >= P}) / (1 + n)", PAPER
    ),
    Statistic(
        "p_tail",
        "DOUBLE",
        "the same from the distribution of the scramble, not limited by the number of draws; NULL for mismatch",
        "0 to 1",
        "P(P' >= P)",
    ),
    Statistic(
        "tail_trusted",
        "BOOLEAN",
        "whether p_tail is measured to be close for spectra like the head's; NULL for mismatch",
        "true or false",
        "near-Gaussian entries of C",
    ),
    Statistic(
        "p_closed_form",
        "DOUBLE",
        "the same to leading order, from null_scale alone; NULL for mismatch",
        "0 to 1",
        "P(null_scale chi^2_1 >= P)",
        PAPER,
    ),
    Statistic(
        "closed_form_trusted",
        "BOOLEAN",
        "whether p_closed_form is measured to be close for spectra like the head's; NULL for mismatch",
        "true or false",
        "agreement with p_tail at 0.01",
    ),
    Statistic("wins", "BOOLEAN", "the head's closure exceeds the median of its null", "true or false", "P > median P'"),
)

CAPACITY_STATISTICS: tuple[Statistic, ...] = (
    Statistic(
        "closure",
        "DOUBLE",
        "largest closure found over orientations with the head's own singular values and cosines, which are 1 "
        "where T maps between two streams",
        "0 to 1",
        "max over A, B in O(k) of P'",
        PAPER,
    ),
    Statistic("iterations", "INTEGER", "assignments solved, or steps of the ascent", "at least 0", "count"),
)

STATUS_REASONS: dict[str, str] = {
    "": "closure is defined",
    "zero": "T = 0",
    "nilpotent": "T^2 = 0 although T is not",
    "nonfinite": "a factor holds NaN or infinity",
    "pruned": "the checkpoint has removed the head",
    "two spaces": "T maps one stream into another, so that T^2 does not exist",
}
"""Reasons a head has no closure, in the order of the stored ``reason`` code."""
