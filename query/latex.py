"""Tables for LaTeX: booktabs rules, numbers aligned by siunitx, every name escaped."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from string import ascii_letters

from query.typesetting import NUMERIC, Column, Table, cells

ROWS_ON_A_PAGE = 45
"""A table of more rows is broken over pages."""

SIZES = ((72, r"\small"), (82, r"\footnotesize"), (96, r"\scriptsize"))
"""Type of a table that cannot be shrunk as a whole, by the characters of its longest row."""
TOO_WIDE = r"\tiny % wider than most pages even so: export fewer columns with --query"

SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "\N{EN DASH}": "--",
    "\N{EM DASH}": "---",
    "\N{MINUS SIGN}": r"\ensuremath{-}",
    "\N{MULTIPLICATION SIGN}": r"\ensuremath{\times}",
    "≥": r"\ensuremath{\geq}",
    "≤": r"\ensuremath{\leq}",
    "≈": r"\ensuremath{\approx}",
    "→": r"\ensuremath{\to}",
}
SYMBOLS = {
    "alpha": r"$\alpha$",
    "closure": "$P$",
    "cos_max": r"$\cos_{\max}$",
    "cos_mean": r"mean $\cos$",
    "cos_min": r"$\cos_{\min}$",
    "d_head": r"$d_{\mathrm{head}}$",
    "d_model": r"$d_{\mathrm{model}}$",
    "mismatch_closure": "mismatch $P$",
    "p": "$p$",
    "q": "$q$",
    "sigma_max": r"$\sigma_{\max}$",
    "sigma_min": r"$\sigma_{\min}$",
    "trace": r"$\mathrm{tr}\,T$",
}
"""LaTeX of columns that the field writes as symbols; others are named in words."""

LETTERS = "\N{LATIN SMALL LETTER DOTLESS I}ßæœøåłÆŒØÅŁ"
ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"
"""Marks that LaTeX puts on a letter in any font: grave to caron, and the cedilla."""

GREEK = re.compile(
    "GREEK (SMALL|CAPITAL) LETTER (ALPHA|BETA|GAMMA|DELTA|EPSILON|THETA|LAMDA|MU|PI|RHO|SIGMA|TAU|PHI|CHI|PSI|OMEGA)"
)
NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:e(-?)(\d+))?")


def escape(text: str) -> str:
    r"""Text that LaTeX sets as it is, with any fonts.

    Greek letters become mathematics. A character that the standard fonts lack is set as its equivalent in
    ASCII, and where there is none as its number, ``U+4E2D``.
    """
    return "".join(map(_escaped, " ".join(text.split())))


def _escaped(character: str) -> str:
    if character in SPECIAL:
        return SPECIAL[character]
    if " " <= character <= "~":
        return character
    name = unicodedata.name(character, "")
    greek = GREEK.fullmatch(name)
    if greek:
        return _greek(*greek.groups())
    letter = unicodedata.normalize("NFD", character)
    if character in LETTERS or (len(letter) == 2 and letter[0] in ascii_letters and letter[1] in ACCENTS):
        return unicodedata.normalize("NFC", character)
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return "".join(SPECIAL.get(part, part) for part in plain) or rf"\texttt{{U+{ord(character):04X}}}"


def _greek(case: str, letter: str) -> str:
    command = letter.lower().replace("lamda", "lambda")
    if case == "CAPITAL":
        if letter in ("ALPHA", "BETA", "EPSILON", "MU", "RHO", "TAU", "CHI"):
            return {"RHO": "P", "CHI": "X"}.get(letter, letter[0])
        command = command.capitalize()
    return rf"\ensuremath{{\{command}}}"


def packages(table: Table) -> list[str]:
    """Packages that the table needs, as lines of a preamble."""
    needed = ("booktabs", "siunitx", "longtable" if len(table.rows) > ROWS_ON_A_PAGE else "graphicx")
    return [rf"\usepackage{{{package}}}" for package in needed]


def tabular(table: Table, digits: int) -> list[str]:
    """The rows between their rules, as lines, without caption or label."""
    body, columns = cells(table, digits), table.shown()
    return [
        rf"\begin{{tabular}}{{{_preamble(columns, body)}}}",
        r"\toprule",
        _heading(columns),
        r"\midrule",
        *_rows(table, columns, body),
        r"\bottomrule",
        r"\end{tabular}",
    ]


def typeset(table: Table, digits: int, caption: str, label: str) -> list[str]:
    r"""The table as a float, or over several pages where it is long, as lines.

    Args:
        table: rows and columns; its notes go below.
        digits: as ``query.typesetting.cells`` has them.
        caption: LaTeX; nothing is escaped.
        label: for ``\ref``.
    """
    below = []
    if table.notes:
        below = [r"\par\smallskip", r"{\footnotesize " + " ".join(map(escape, table.notes)) + r"\par}"]
    if len(table.rows) <= ROWS_ON_A_PAGE:
        return [
            r"\begin{table}[tbp]",
            r"\centering\small\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{caption}}}",
            rf"\label{{{label}}}",
            r"\smallskip",
            r"\sbox{0}{%",
            *tabular(table, digits),
            "}% shrunk to the width of the text where it is wider",
            r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox{0}}\else\usebox{0}\fi",
            *below,
            r"\end{table}",
        ]
    body, columns = cells(table, digits), table.shown()
    head = [r"\toprule", _heading(columns), r"\midrule"]
    width = _width(columns, body)
    return [
        r"\begingroup",
        r"\setlength{\tabcolsep}{3pt}" + next((size for limit, size in SIZES if width <= limit), TOO_WIDE),
        rf"\begin{{longtable}}{{{_preamble(columns, body)}}}",
        rf"\caption{{{caption}}}\label{{{label}}}\\",
        *head,
        r"\endfirsthead",
        *head,
        r"\endhead",
        r"\bottomrule",
        r"\endlastfoot",
        *_rows(table, columns, body),
        r"\end{longtable}",
        *below,
        r"\endgroup",
    ]


def read_rows(lines: Iterable[str]) -> list[list[str]]:
    r"""Cells of the rows of a table that was set here, as they stand in the file."""
    found: list[list[str]] = []
    within = False
    for line in map(str.strip, lines):
        if line in (r"\midrule", r"\endlastfoot"):
            within, found = True, []
        elif line in (r"\bottomrule", r"\end{longtable}") and within:
            within = False
        elif within and line.endswith(r"\\"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r"\\"))])
    return found


def _width(columns: Sequence[Column], body: list[list[str]]) -> int:
    """Characters of the longest row, with the gaps between columns."""
    headings = [re.sub(r"\\[a-z]+|[${}\\]", "", _title(column)) for column in columns]
    return sum(max(map(len, column)) + 1 for column in zip(headings, *body, strict=True))


def _preamble(columns: Sequence[Column], body: list[list[str]]) -> str:
    """Letters of the columns: numbers are aligned at the point, intervals and fractions to the right."""
    letters = []
    for place, column in enumerate(columns):
        if column.kind in NUMERIC:
            form = _table_format([row[place] for row in body])
            exponents = ",table-align-exponent=false" if "e" in form else ""
            letters.append(f"S[table-format={form},group-digits=integer{exponents}]")
        else:
            letters.append("l" if column.kind == "text" else "r")
    return "@{}" + "".join(letters) + "@{}"


def _table_format(texts: Iterable[str]) -> str:
    """Room for the numbers of a column, as siunitx wants it: ``-2.3e-1``."""
    found = [match.groups("") for match in map(NUMBER.fullmatch, texts) if match]
    sign = "-" if any(number[0] for number in found) else ""
    whole, part, power = (max((len(number[place]) for number in found), default=0) for place in (1, 2, 4))
    exponent = f"e{'-' if any(number[3] for number in found) else ''}{power}" if power else ""
    return f"{sign}{max(whole, 1)}{f'.{part}' if part else ''}{exponent}"


def _heading(columns: Sequence[Column]) -> str:
    return " & ".join(f"{{{_title(column)}}}" for column in columns) + r" \\"


def _title(column: Column) -> str:
    """Heading of a column: a symbol, or its name in words."""
    if r"\\" in column.latex:
        return rf"\shortstack{{{column.latex}}}"
    return column.latex or SYMBOLS.get(column.heading) or escape(column.heading.replace("_", " "))


def _rows(table: Table, columns: Sequence[Column], body: list[list[str]]) -> list[str]:
    groups = table.rows[table.group].to_list() if table.group else [None] * len(body)
    lines: list[str] = []
    for place, row in enumerate(body):
        if place and groups[place] != groups[place - 1]:
            lines.append(r"\addlinespace")
        lines.append(" & ".join(_cell(column, text) for column, text in zip(columns, row, strict=True)) + r" \\")
    return lines


def _cell(column: Column, text: str) -> str:
    if column.kind in NUMERIC:
        return text if NUMBER.fullmatch(text) or not text else f"{{{escape(text)}}}"
    return "{" + text + "}" if column.kind == "interval" else escape(text)
