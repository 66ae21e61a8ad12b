"""Figures to files: whole or not at all, the same bytes for the same input, and saying what they show."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from query.figures.style import Style, styled
from query.output import deliver_bytes
from stats.errors import QueryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from query.provenance import Provenance

SUFFIXES = (".pdf", ".svg", ".png")


def form_of(path: Path) -> str:
    """``pdf``, ``svg`` or ``png``, as the file's ending says.

    Raises:
        QueryError: another ending.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise QueryError("an unknown form of figure", where=str(path), expected=", ".join(SUFFIXES), found=path.suffix)
    return path.suffix.lower()[1:]


def save_figure(
    figure: Figure, path: Path, source: Provenance | None = None, style: Style = "screen", title: str = "figure"
) -> None:
    """Write a figure as the file's ending says: PDF, SVG or PNG.

    Args:
        figure: what to write.
        path: the file; it appears whole or stays as it was.
        source: what the figure was made from, for the file's metadata; its day is the file's date.
        style: the style it was drawn in.
        title: title in the metadata.

    Raises:
        QueryError: another ending, or a file that cannot be written.
    """
    form = form_of(path)
    buffer = io.BytesIO()
    with styled(style):
        figure.savefig(buffer, format=form, metadata=_metadata(form, source, title))
    deliver_bytes(buffer.getvalue(), path)


def _metadata(form: str, source: Provenance | None, title: str) -> dict[str, Any]:
    """What the file says about itself, under the names its format has for it; no time of writing."""
    lines = source.lines() if source is not None else []
    program = f"Headatlas {source.version}" if source is not None else "Headatlas"
    text = "\n".join(lines)
    if form == "pdf":
        day = datetime.strptime(source.created, "%Y-%m-%d").replace(tzinfo=UTC) if source is not None else None
        return {"Title": title, "Subject": text, "Creator": program, "CreationDate": day}
    if form == "svg":
        created = source.created if source is not None else None
        return {"Title": title, "Description": text, "Creator": program, "Date": created}
    dated = {"Creation Time": source.created} if source is not None else {}
    return {"Title": title, "Description": text, "Software": program, **dated}
