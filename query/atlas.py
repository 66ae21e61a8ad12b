"""A store opened for questions, in SQL, as Polars frames and as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import polars as pl

from query import questions
from query.connection import connect, run
from query.named import questions as named_questions
from stats.errors import QueryError
from store.atlas import AtlasStore
from store.tables import TABLE_BY_NAME

if TYPE_CHECKING:
    import numpy as np
    import zarr

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
            QueryError: no such model, operator, stack, array, layer or head.
        """
        import numpy as np

        group = self._stack_group(model, operator, stack)
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
            return np.asarray(array[...])
        layers = np.asarray(layer_array[...]).tolist()
        if layer not in layers:
            raise QueryError(f"no layer {layer}", where=model, expected=f"one of {layers}", found=str(layer))
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

    def _stack_group(self, model: str, operator: str, stack: str | None) -> zarr.Group:
        import zarr

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
        return zarr.open_group(str(self._store.arrays_path / group / operator / found), mode="r")

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
        path: the store's directory.

    Raises:
        StoreError: no store there, an empty one, or one of another format.
    """
    return Atlas(Path(path))
