"""A store as one HTML file to explore and to hand on, without a network or a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from query.atlas import Atlas

__all__ = ["report"]


def report(
    atlas: Atlas,
    models: Sequence[str] = (),
    operator: str | None = None,
    threshold: float = 0.9,
    title: str = "Attention heads",
) -> str:
    """The report as HTML that opens in any browser.

    It has summaries, the published panel, and every head in a heatmap, a scatter, a table and a card with
    its numbers, spectra, null and pairs. It fetches nothing, and its policy forbids it to.

    Args:
        atlas: the store.
        models: names to show; all when empty.
        operator: raw or folded; all that are stored when None.
        threshold: closure at or above which a head is strong, 0 to 1.
        title: what stands above the page.

    Raises:
        StoreError: an empty store.
        QueryError: an unknown model, an operator that none of the models has, or a threshold out of range.
    """
    from query.report.contents import contents
    from query.report.document import render

    return render(contents(atlas, models, operator, threshold), title)
