"""JSON from strangers: parsed within bounds on its depth and on the memory it takes."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""Objects and lists inside one another; what reads them may then recurse."""

MOST_VALUES = 5_000_000
"""Values of a file: each can take some seventy bytes of memory for two of text."""


def parsed_json(content: bytes, unique: bool = False) -> Any:
    """The value that a text in JSON has.

    Args:
        content: the text in UTF-8.
        unique: refuse an object that has a key twice, of which otherwise the last counts.

    Raises:
        ValueError: no JSON, or more or deeper nested values than a file of a checkpoint has.
    """
    count = content.count(b",") + content.count(b"[") + content.count(b"{")
    if count > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep: too deep a recursion")
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [inside for item in containers for inside in (item.values() if isinstance(item, dict) else item)]
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} twice")
    return found
