"""Questions about a store, answered without the weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from query.atlas import Atlas, open_atlas

__all__ = ["Atlas", "open_atlas"]


def __getattr__(name: str) -> Any:
    """What the package offers, imported at first use: the command line reads the names of formats from here."""
    if name in __all__:
        from query import atlas

        return getattr(atlas, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
