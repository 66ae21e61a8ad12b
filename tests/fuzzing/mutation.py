"""Changing valid files into hostile ones, from a seeded generator."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

EDGES: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    2**16,
    10_001,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**31),
    -(2**63),
    10**12,
    10**30,
    10**400,
    10**4299,
    -(10**4299),
    0.5,
    2.0,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    False,
    None,
    "",
    " ",
    "8",
    "F32",
    "x" * 300,
    "x" * 20_000,
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "a/b",
    "a\\b",
    "a\0b",
    "line\nbreak",
    "\u202emodel",
    "\ud800",
    "\udcff",
    "'; DROP TABLE heads; --",
    '"',
    "(a+)+$",
    "{layer}",
    "{0.__class__}",
    "%s",
    [],
    [[]],
    {},
    {"a": {}},
    [0],
    [None],
    [1, 2],
    ["a"],
    {"": ""},
)
"""Values that programs trip over, for any place in a JSON file."""

DEPTHS = (50, 99, 101, 300, 700, 900, 990)
"""Nesting below and around the depths at which Python stops to recurse."""

INTEGERS = (0, 1, 2, 9, 127, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)


DEEP = re.compile(rb'"@(\d+) (list|object)@"')
"""Stands for a nested value, which is written as text: Python could neither copy nor write it."""


def _nested(mark: re.Match[bytes]) -> bytes:
    depth = int(mark[1])
    opening, closing = (b"[", b"]") if mark[2] == b"list" else (b'{"thinker_config":', b"}")
    return opening * depth + b"0" + closing * depth


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        found += _places(inside, (*path, key))
    return found


def _container(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def mutated_value(rng: random.Random, value: Any, words: tuple[str, ...]) -> Any:
    """A JSON value with one to four of its places changed; ``words`` are keys that mean something to the reader."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(value)
        if not places:
            return rng.choice(EDGES)
        path = rng.choice(places)
        inside, key = _container(value, path), path[-1]
        other = _container(value, rng.choice(places))
        kind = rng.randrange(10)
        if kind <= 3:
            inside[key] = copy.deepcopy(rng.choice(EDGES))
        elif kind == 4:
            del inside[key]
        elif kind == 5 and isinstance(inside, dict):
            inside[rng.choice([*words, *(edge for edge in EDGES if isinstance(edge, str))])] = copy.deepcopy(
                rng.choice((inside[key], rng.choice(EDGES)))
            )
        elif kind == 6:
            inside[key] = [inside[key]] if rng.random() < 0.5 else {rng.choice(words) if words else "a": inside[key]}
        elif kind == 7:
            inside[key] = f"@{rng.choice(DEPTHS)} {rng.choice(('list', 'object'))}@"
        elif kind == 8 and isinstance(inside[key], int):
            inside[key] = inside[key] + rng.choice((-1, 1)) if rng.random() < 0.5 else -inside[key]
        elif isinstance(other, dict) and isinstance(inside, dict):
            inside[key] = copy.deepcopy(other.get(rng.choice(list(other)) if other else "", None))
        elif isinstance(inside, list):
            inside += [copy.deepcopy(item) for item in inside[:64]]
    return value


def written_json(rng: random.Random, value: Any) -> bytes:
    """JSON text of a value, now and then with a key twice, bytes changed, or cut short."""
    kind = rng.randrange(20)
    raw = json.dumps(value, ensure_ascii=kind != 2).encode("utf-8", "surrogatepass")
    text = DEEP.sub(_nested, raw)
    if kind == 0 and text.startswith(b"{") and len(text) > 2:
        return text[:-1] + b"," + text[1:]
    return mutated_bytes(rng, text) if kind == 1 else text


def mutated_bytes(rng: random.Random, data: bytes, within: int | None = None) -> bytes:
    """Bytes with one to eight changes, most of them before byte ``within``."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        if not changed:
            return bytes(rng.randbytes(rng.randrange(64)))
        end = min(len(changed), within) if within and rng.random() < 0.9 else len(changed)
        at = rng.randrange(max(1, end))
        kind = rng.randrange(9)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            code, size = rng.choice((("<H", 2), ("<I", 4), ("<Q", 8), ("<q", 8)))
            number = rng.choice(INTEGERS) % 256**size
            changed[at : at + size] = struct.pack(
                code, number - 256**size if code == "<q" and number >= 2**63 else number
            )
        elif kind == 3:
            del changed[at:]
        elif kind == 4:
            del changed[at : at + rng.randrange(1, 32)]
        elif kind == 5:
            other = rng.randrange(len(changed))
            changed[at:at] = changed[other : other + rng.randrange(1, 64)]
        elif kind == 6:
            other = rng.randrange(len(changed))
            length = rng.randrange(1, 32)
            changed[at : at + length] = changed[other : other + length]
        elif kind == 7:
            changed[at:at] = rng.randbytes(rng.randrange(1, 16))
        else:
            changed[at] = rng.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(changed)


def mutated_json(words: tuple[str, ...] = ()) -> Callable[[random.Random, bytes], bytes]:
    """A mutation of files of JSON."""

    def mutate(rng: random.Random, data: bytes) -> bytes:
        return written_json(rng, mutated_value(rng, json.loads(data), words))

    return mutate
