"""A store opened for questions, in SQL, as Polars frames and as arrays."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import polars as pl

from query import questions
from query.connection import connect, run
from query.named import questions as named_questions
from stats.errors import QueryError
from store.atlas import AtlasStore, check_directory_name
from store.tables import TABLE_BY_NAME

if TYPE_CHECKING:
    import numpy as np

    from query.intervals import RateMethod


class Atlas:
    """Answers questions about one store. It reads a snapshot: later ingests need a new one."""

    def __init__(self, root: Path) -> None:
        self._store = AtlasStore.open(root)
        self._connection = connect(self._store.catalogue_path)
        self.timeout: float | None = None
        """Seconds after which a query is stopped; never when None."""

    def __enter__(self) -> Atlas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the catalogue."""
        self._connection.close()

    @property
    def path(self) -> Path:
        """Directory of the store."""
        return self._store.root

    def sql(self, query: str, parameters: Mapping[str, Any] | None = None) -> pl.DataFrame:
        """Rows of one reading SQL statement.

        Args:
            query: DuckDB SQL over the tables and macros that ``headatlas schema`` lists.
            parameters: values for ``$name`` and ``:name`` in the query.

        Raises:
            QueryError: a statement that does more than read, or that DuckDB refuses.
        """
        return run(self._connection, query, parameters, self.timeout)

    def interrupt(self) -> None:
        """Stop the query that another thread is running."""
        self._connection.interrupt()

    def ask(self, question: questions.Question | str, /, **values: Any) -> pl.DataFrame:
        """Rows of a prepared question, or of one by its name with values for its parameters.

        Raises:
            QueryError: no question of that name, or values it cannot take.
        """
        if isinstance(question, questions.Question):
            return self.sql(question.sql, {**question.parameters, **values})
        named = named_questions(self.path).named(question)
        return named.answer(self, named.with_values(values))

    def questions(self) -> pl.DataFrame:
        """The questions that can be asked by name: name, description, parameters with defaults, origin."""
        return named_questions(self.path).frame()

    def table(self, name: str) -> pl.LazyFrame:
        """One table of the catalogue, in key order.

        Raises:
            QueryError: no such table.
        """
        if name not in TABLE_BY_NAME:
            raise questions.unknown_table(name)
        order = ", ".join(f'"{column}"' for column in TABLE_BY_NAME[name].key)
        return self.sql(f'SELECT * FROM "{name}" ORDER BY {order}').lazy()

    def array(
        self,
        model: str,
        name: str,
        operator: str = "raw",
        stack: str | None = None,
        layer: int | None = None,
        head: int | None = None,
    ) -> np.ndarray:
        """Values of a stored array, by the checkpoint's own layer numbers.

        Args:
            model: name of the model.
            name: an array such as ``core`` (layer, head, d_head, d_head) or ``sigma``.
            operator: raw, folded or scaled.
            stack: which attention; needed where the model has several.
            layer: one layer only; drops that axis.
            head: one head only, with ``layer``; drops that axis.

        Raises:
            QueryError: no such model, operator, stack, array, layer or head, or the model was replaced or removed
                after this atlas was opened.
        """
        name_of_group, found = self._stack_of(model, operator, stack)
        from query.remote_store import fetch_array

        fetch_array(self.path, name_of_group, operator, found, name)
        with self._still_stored(model, name_of_group, operator):
            return self._read(model, operator, name_of_group, found, name, layer, head)

    def _read(
        self, model: str, operator: str, stored: str, stack: str, name: str, layer: int | None, head: int | None
    ) -> np.ndarray:
        import numpy as np

        from store.arrays import open_stack, readable

        group = open_stack(self._store.arrays_path / stored / operator / stack)
        if name not in group:
            raise QueryError(
                f"no array named {name!r}",
                where=f"{model}, {operator}",
                expected="one of " + ", ".join(sorted(group.array_keys())),
                found=name,
                remedy="measure the model again with --keep-factors --replace" if name.endswith("_basis") else "",
            )
        array: Any = group[name]
        layer_array: Any = group["layer"]
        if layer is None:
            if head is not None:
                raise QueryError("head needs a layer", where=model, remedy="give layer and head together")
            with readable(self._store.arrays_path):
                return np.asarray(array[...])
        layers = np.asarray(layer_array[...]).tolist()
        if layer not in layers:
            raise QueryError(f"no layer {layer}", where=model, expected=f"one of {layers}", found=str(layer))
        with readable(self._store.arrays_path):
            values = np.asarray(array[layers.index(layer)])
        if head is None:
            return values
        heads: Any = group["n_heads"]
        n_heads = int(np.asarray(heads[...])[layers.index(layer)])
        if not 0 <= head < n_heads:
            raise QueryError(
                f"no head {head}", where=f"{model}, layer {layer}", expected=f"0 to {n_heads - 1}", found=str(head)
            )
        return np.asarray(values[head])

    @contextmanager
    def _still_stored(self, model: str, group: str, operator: str) -> Iterator[None]:
        """Refuse what was read of arrays that were deleted meanwhile: their manifest goes first.

        Without that, chunks that are gone would read as if they had never been written. What Zarr remarks of a
        directory that is just being deleted is for nobody.
        """
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Object at .* is not recognized as a component of a Zarr hierarchy")
                yield
        finally:
            if not self._store.manifest_path(group, operator).exists():
                raise QueryError(
                    "the store has changed since it was opened",
                    where=f"{model}, {operator}",
                    expected="the arrays that the opened catalogue names",
                    found="arrays that are gone: the model was replaced or removed",
                    remedy="open the store again and repeat the question",
                )

    def _stack_of(self, model: str, operator: str, stack: str | None) -> tuple[str, str]:
        """Array group and stack that a question means."""
        rows = self.sql(
            "SELECT DISTINCT models.array_group, heads.operator, heads.stack FROM models "
            "JOIN heads USING (model) WHERE model = $model ORDER BY ALL",
            {"model": model},
        )
        if rows.is_empty():
            names = self.sql("SELECT model FROM models ORDER BY model")["model"].to_list()
            raise QueryError(f"no model named {model!r}", expected="one of " + ", ".join(names), found=model)
        matching = [row for row in rows.rows() if row[1] == operator and stack in (None, row[2])]
        if len(matching) != 1:
            raise QueryError(
                "that operator and stack do not name one group of arrays",
                where=model,
                expected="one of " + ", ".join(f"{row[1]}/{row[2]}" for row in rows.rows()),
                found=f"{operator}/{stack or 'any stack'}",
                remedy="say which with operator and stack",
            )
        group, _, found = matching[0]
        for name in (group, operator, found):
            check_directory_name(name, str(self._store.catalogue_path))
        return group, found

    def closure(
        self,
        threshold: float = 0.9,
        by: str = "model",
        models: Sequence[str] | None = None,
        operator: str | None = None,
    ) -> pl.DataFrame:
        """Closure rates at a threshold by model, layer or head. See ``query.questions.closure``."""
        return self.ask(questions.closure(threshold, by, models, operator))

    def closure_intervals(
        self,
        threshold: float = 0.9,
        models: Sequence[str] | None = None,
        operator: str | None = None,
        method: RateMethod = "bootstrap",
    ) -> pl.DataFrame:
        """Closure rates and medians by model with 95% intervals. See ``query.intervals``."""
        from query.intervals import closure_intervals

        return closure_intervals(self, threshold, models, operator, method)

    def mismatch(
        self,
        threshold: float = 0.9,
        by: str = "model",
        models: Sequence[str] | None = None,
        operator: str | None = None,
    ) -> pl.DataFrame:
        """Closure of mismatched pairs by model or layer. See ``query.questions.mismatch``."""
        return self.ask(questions.mismatch(threshold, by, models, operator))

    def algebra(
        self,
        threshold: float = 0.9,
        by: str = "model",
        models: Sequence[str] | None = None,
        operator: str | None = None,
    ) -> pl.DataFrame:
        """The right-action law by model, group or pair. See ``query.questions.algebra``."""
        return self.ask(questions.algebra(threshold, by, models, operator))

    def compare(
        self,
        models: Sequence[str],
        column: str = "closure",
        by: str = "model",
        operator: str = "raw",
        stacks: Sequence[str] | None = None,
        threshold: float | None = None,
        bins: int = 10,
        seed: int = 0,
    ) -> pl.DataFrame:
        """Models against the first of them by model, depth, head or pair. See ``query.comparison.compare``."""
        from query.comparison import compare
        from query.selection import select

        return compare(select(self, models, column, operator, stacks), by, threshold, bins, seed)

    def panel(self, threshold: float = 0.9) -> pl.DataFrame:
        """Published panel numbers beside this store's. See ``query.panel``."""
        from query.panel import panel

        return panel(self, threshold)


def open_atlas(path: str | Path = "atlas") -> Atlas:
    """Open a store for questions.

    Args:
        path: the store's directory, or its address, such as https://host/atlas; see ``query.remote_store``.

    Raises:
        StoreError: no store there, an empty one, or one of another format.
    """
    if isinstance(path, str) and "://" in path:
        from query.remote_store import mirrored

        return Atlas(mirrored(path))
    return Atlas(Path(path))
