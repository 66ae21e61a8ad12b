"""What wrote a store: recorded with everything that is measured or derived."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def tool_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("headatlas")
    except PackageNotFoundError:
        return "unknown"


def numerical_libraries() -> str:
    """Versions of the libraries whose rounding the numbers carry."""
    return f"torch {version('torch')}, numpy {version('numpy')}, scipy {version('scipy')}"
