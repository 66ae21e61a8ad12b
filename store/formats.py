"""Versions of the store's format: how one becomes the next, and which can be read as they are.

The version is an attribute of the root group, ``headatlas_format``, beside ``headatlas_needs``, the version
of this program that wrote it. A new version of the format comes with a step in ``STEPS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from stats.errors import StoreError

FORMAT = "headatlas_format"
NEEDS = "headatlas_needs"

Attributes = dict[str, Any]
Change = Callable[[PurePosixPath, Mapping[str, Any]], Attributes]
"""New attributes of one Zarr node, from its path below the model's group and those it has.

The path has no part for the model itself, one for an operator or derivation, two for a stack and three for
an array."""


@dataclass(frozen=True, slots=True)
class Step:
    """What makes a store of one version one of the next.

    ``readable`` says that stores of the older version can be asked without the step, from the catalogue
    they have; they are then open for reading only.
    """

    summary: str
    change: Change
    readable: bool = True


STEPS: dict[int, Step] = {}
"""Steps by the version they start from; a step changes attributes, never the values of arrays."""


def steps_between(found: int, wanted: int, where: str) -> list[Step]:
    """The steps from one version to another, in order.

    Raises:
        StoreError: a step is not known.
    """
    missing = [version for version in range(found, wanted) if version not in STEPS]
    if missing:
        raise StoreError(
            "the store has a format that is no longer known",
            where=where,
            expected=f"format {max(missing) + 1} to {wanted}",
            found=f"format {found}",
            remedy="use the version of headatlas that wrote it",
        )
    return [STEPS[version] for version in range(found, wanted)]


def checked_version(attributes: Mapping[str, Any], known: int, where: str) -> int:
    """The version that a root group's attributes name.

    Raises:
        StoreError: none, or a newer one than this program knows.
        KeyError: the attributes say nothing of it.
    """
    version = attributes[FORMAT]
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise StoreError("the store's format is no version", where=where, expected="a number", found=repr(version)[:80])
    if version > known:
        needed = attributes.get(NEEDS)
        raise StoreError(
            "the store has a newer format than this version of headatlas knows",
            where=where,
            expected=f"format {known} or older",
            found=f"format {version}",
            remedy=f"upgrade to headatlas {needed} or later" if isinstance(needed, str) else "upgrade headatlas",
        )
    return version
