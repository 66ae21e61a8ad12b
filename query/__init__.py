"""Questions about a store, answered without the weights."""

from query.atlas import Atlas, open_atlas

__all__ = ["Atlas", "open_atlas"]
