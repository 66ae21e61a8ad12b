"""A user's own statistics: functions of stored arrays that become columns of ``heads``.

A Python file declares them::

    from store.user_statistics import statistic

    @statistic(meaning="entropy of the squared singular values", values="0 to log d_head", formula="-sum p log p")
    def spectral_entropy(sigma):
        power = sigma**2 / (sigma**2).sum(-1, keepdims=True)
        return -(power * np.log(power)).sum(-1)

The parameters are names of stored arrays, given for one layer with ``head`` as their first axis; the
result has one number a head, NaN where the statistic is undefined.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stats.errors import HeadatlasError, QueryError
from stats.registry import Statistic
from store.arrays import ARRAYS, open_stack
from store.atlas import AtlasStore, StoredModel
from store.tables import TABLES

SQL_TYPES = {"DOUBLE": np.float64, "INTEGER": np.int64, "BOOLEAN": np.bool_}
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class UserStatistic:
    """A declared function: what it computes and which stored arrays it takes."""

    declared: Statistic
    function: Function
    arrays: tuple[str, ...]


def statistic(
    *, meaning: str, values: str, formula: str = "", source: str = "", sql_type: str = "DOUBLE"
) -> Callable[[Function], Function]:
    """Declare a function as a statistic of every head, under the function's own name.

    Args:
        meaning: what it tells, in a sentence.
        values: its unit or range.
        formula: how it is computed; the function's parameters when empty.
        source: where it comes from; the file when empty.
        sql_type: DOUBLE, INTEGER or BOOLEAN.
    """

    def declare(function: Function) -> Function:
        function.__dict__["_declared"] = (meaning, values, formula, source, sql_type)
        return function

    return declare


def load(path: Path) -> list[UserStatistic]:
    """Run a file and collect what it declares.

    Raises:
        QueryError: the file fails, declares nothing, or declares something that cannot be a column.
    """
    try:
        names = runpy.run_path(str(path))
    except HeadatlasError:
        raise
    except Exception as error:
        raise QueryError(
            "the file of statistics cannot be run",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            remedy="run it with python to see where",
        ) from error
    found = [_checked(path, name, item) for name, item in names.items() if "_declared" in getattr(item, "__dict__", {})]
    if not found:
        raise QueryError(
            "the file declares no statistic",
            where=str(path),
            expected="a function decorated with store.user_statistics.statistic",
            found=", ".join(name for name in names if not name.startswith("_")) or "nothing",
        )
    return found


def _checked(path: Path, name: str, function: Function) -> UserStatistic:
    meaning, values, formula, source, sql_type = function.__dict__["_declared"]
    parameters = tuple(inspect.signature(function).parameters)
    known = sorted(name for name, (_, axes) in ARRAYS.items() if axes[:2] == ("layer", "head"))
    taken = {column.name: table.name for table in reversed(TABLES) for column in table.columns}

    def refuse(what: str, expected: str, shown: str) -> QueryError:
        return QueryError(what, where=f"{path}, {name}", expected=expected, found=shown)

    if name in taken:
        raise refuse(f"the table {taken[name]} has a column {name!r} already", "another name", name)
    if sql_type not in SQL_TYPES:
        raise refuse("a statistic of an unknown type", "one of " + ", ".join(SQL_TYPES), str(sql_type))
    if not parameters or not set(parameters) <= set(known):
        raise refuse("a statistic takes stored arrays", "one or more of " + ", ".join(known), ", ".join(parameters))
    text = formula or f"{name}({', '.join(parameters)})"
    declared = Statistic(name, sql_type, meaning, values, text, source or path.name)
    return UserStatistic(declared, function, parameters)


def compute(store: AtlasStore, stored: StoredModel, operator: str, mine: UserStatistic) -> dict[str, np.ndarray]:
    """The statistic of every head of one operator: (layer, head) float64 by stack, NaN where undefined.

    Raises:
        QueryError: the function fails, or returns something else than a number for each head.
    """
    group = store.arrays_path / stored.array_group / operator
    result = {}
    for directory in sorted(path for path in group.iterdir() if path.is_dir()):
        arrays: Any = open_stack(directory)
        layers, heads, sizes = (np.asarray(arrays[name][...]) for name in ("layer", "n_heads", "d_head"))
        values = np.full((len(layers), heads.max()), np.nan)
        for row, layer in enumerate(layers):
            where = f"{stored.model}, {operator}, {directory.name}, layer {layer}"
            given = {name: _layer(arrays[name], row, heads[row], sizes[row]) for name in mine.arrays}
            values[row, : heads[row]] = _called(mine, given, heads[row], where)
        result[directory.name] = values
    return result


def _layer(array: Any, row: int, n_heads: int, d_head: int) -> np.ndarray:
    """One layer of an array without its padding."""
    axes = array.metadata.dimension_names[2:]
    kept = tuple(slice(None) if axis == "d_head_qk" else slice(d_head) for axis in axes)
    return np.asarray(array[row])[(slice(n_heads), *kept)]


def _called(mine: UserStatistic, given: Mapping[str, np.ndarray], n_heads: int, where: str) -> np.ndarray:
    name = mine.declared.name
    try:
        with np.errstate(all="ignore"):
            values = np.asarray(mine.function(**given))
            numbers = values.astype(np.float64)
    except Exception as error:
        raise QueryError(
            f"the statistic {name} failed",
            where=where,
            expected="a number for each head",
            found=f"{type(error).__name__}: {error}",
            remedy="nothing was stored; correct the function",
        ) from error
    if numbers.shape != (n_heads,):
        raise QueryError(
            f"the statistic {name} has the wrong shape",
            where=where,
            expected=f"({n_heads},), a number for each head",
            found=str(values.shape),
            remedy="nothing was stored; correct the function",
        )
    return np.where(np.isinf(numbers), np.nan, numbers)
