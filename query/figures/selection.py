"""What a figure is asked to show, found in the store or refused with what to do about it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from query.figures.style import MAX_PANELS, Style
from stats.errors import QueryError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from query.atlas import Atlas

ORDER = "ORDER BY coalesce(lineage, model), step, model, stack"

POPULATIONS = f"""SELECT model, stack, count(*) OVER (PARTITION BY model) AS stacks
FROM models JOIN (SELECT DISTINCT model, stack FROM layers JOIN operators USING (model)
    WHERE operator = $operator) AS stored USING (model)
{ORDER}"""

OPERATORS = "SELECT model, string_agg(operator, ', ' ORDER BY operator DESC) FROM operators GROUP BY model"

STACKS = "SELECT DISTINCT model, stack FROM layers ORDER BY model, stack"

UNITS = (
    "SELECT array_group, unit FROM derivations JOIN models USING (model) "
    "WHERE model = $model AND operator = $operator AND kind = 'scramble'"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a store a figure shows, and in which style; None leaves it to the figure."""

    models: tuple[str, ...] = ()
    operator: str = "raw"
    stack: str | None = None
    column: str | None = None
    layer: int | None = None
    head: int | None = None
    threshold: float | None = None
    style: Style = "screen"

    @property
    def strong(self) -> float:
        """Closure of a strong head, 0 to 1."""
        return 0.9 if self.threshold is None else self.threshold


@dataclass(frozen=True, slots=True)
class Population:
    """Heads of one stack of a model; ``name`` mentions the stack where the model has several."""

    model: str
    stack: str
    name: str


@dataclass(slots=True)
class Selected:
    """Populations to draw, and what has to be said about those left out."""

    populations: list[Population]
    notes: list[str] = field(default_factory=list)

    def leave_out(self, kept: Sequence[Population], why: str) -> None:
        """Keep some only; the others are named with the reason."""
        gone = [item.name for item in self.populations if item not in kept]
        if gone:
            shown = ", ".join(gone[:4]) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
            self.notes.append(f"left out, {why}: {shown}")
        self.populations = list(kept)

    def limit(self, named: bool) -> None:
        """Keep what fits into one figure.

        Raises:
            QueryError: more models were named than fit.
        """
        if len(self.populations) > MAX_PANELS and named:
            raise QueryError(
                "too many models for one figure",
                expected=f"at most {MAX_PANELS}",
                found=f"{len(self.populations)}",
                remedy="name fewer, or choose one stack with --stack",
            )
        self.leave_out(self.populations[:MAX_PANELS], f"{MAX_PANELS} fit into one figure")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure and what it shows."""

    figure: Figure
    selected: Selected


def populations(atlas: Atlas, choice: Choice) -> Selected:
    """The populations of a choice: of the named models, else of all; training runs in order of their steps.

    Raises:
        QueryError: an unknown model or stack, or one that was not measured with the operator.
    """
    operators = dict(atlas.sql(OPERATORS).rows())
    for model in choice.models:
        if model not in operators:
            raise unknown("model", model, list(operators), str(atlas.path), "list the models with: headatlas models")
        if choice.operator not in operators[model].split(", "):
            raise QueryError(
                f"{model} was not measured with the operator {choice.operator}",
                where=str(atlas.path),
                expected="one of " + operators[model],
                found=choice.operator,
                remedy=f"ingest it again with --operator {choice.operator}, or choose another",
            )
    stacks = atlas.sql(STACKS)
    if choice.models:
        stacks = stacks.filter(pl.col("model").is_in(choice.models))
    known = stacks["stack"].unique().sort().to_list()
    if choice.stack is not None and choice.stack not in known:
        raise unknown("stack", choice.stack, known, str(atlas.path))
    rows = atlas.sql(POPULATIONS, {"operator": choice.operator}).filter(
        pl.lit(not choice.models) | pl.col("model").is_in(choice.models),
        pl.lit(choice.stack is None) | (pl.col("stack") == (choice.stack or "")),
    )
    found = [Population(m, stack, m if count == 1 else f"{m}, {stack}") for m, stack, count in rows.rows()]
    place = {model: number for number, model in enumerate(choice.models)}
    found.sort(key=lambda item: place.get(item.model, 0))
    if not found:
        raise QueryError(
            f"no model was measured with the operator {choice.operator}",
            where=str(atlas.path),
            expected="one of " + ", ".join(sorted({name for text in operators.values() for name in text.split(", ")})),
            found=choice.operator,
            remedy="choose another with --operator",
        )
    absent = [model for model in choice.models if model not in {item.model for item in found}]
    if absent:
        raise QueryError(f"{absent[0]} has no stack {choice.stack}", where=str(atlas.path), remedy="leave out --stack")
    return Selected(found)


def one_population(atlas: Atlas, choice: Choice) -> Selected:
    """A choice that is a single population.

    Raises:
        QueryError: several models or stacks, or as in ``populations``.
    """
    selected = populations(atlas, choice)
    found = selected.populations
    if len(found) > 1:
        models = list(dict.fromkeys(item.model for item in found))
        raise QueryError(
            "the figure shows a single model" if len(models) > 1 else "the figure shows a single stack",
            where=str(atlas.path) if len(models) > 1 else models[0],
            expected="one of " + ", ".join(models if len(models) > 1 else [item.stack for item in found]),
            found=f"{len(models)} models" if len(models) > 1 else f"{len(found)} stacks",
            remedy="name one" if len(models) > 1 else "choose with --stack",
        )
    return selected


def head_rows(atlas: Atlas, choice: Choice, wanted: Sequence[Population]) -> pl.DataFrame:
    """Rows of ``heads`` of the chosen operator, with ``panel``, the population's name, and in their order."""
    rows = atlas.sql("SELECT * FROM heads WHERE operator = $operator", {"operator": choice.operator})
    return _in_panels(rows, wanted)


def _in_panels(rows: pl.DataFrame, wanted: Sequence[Population]) -> pl.DataFrame:
    """Rows of the wanted populations, with ``panel``, in the order of the populations and of the heads."""
    names = pl.DataFrame(
        [(item.model, item.stack, item.name, number) for number, item in enumerate(wanted)],
        schema={"model": pl.String, "stack": pl.String, "panel": pl.String, "place": pl.Int64},
        orient="row",
    )
    keys = [key for key in ("layer", "head", "write_head", "read_head") if key in rows.columns]
    return rows.join(names, on=["model", "stack"]).sort("place", *keys).drop("place")


def rows_of(atlas: Atlas, query: str, parameters: Mapping[str, Any], wanted: Sequence[Population]) -> pl.DataFrame:
    """Rows of a query that has columns ``model`` and ``stack``, as ``head_rows`` gives them."""
    return _in_panels(atlas.sql(query, parameters), wanted)


def numeric_columns(atlas: Atlas) -> list[str]:
    """Columns of heads that hold numbers, the user's own among them; keys are none."""
    keys = {"layer", "head", "kv_head", "d_model", "d_head"}
    schema = atlas.sql("SELECT * FROM heads LIMIT 0").schema
    return [name for name, kind in schema.items() if kind.is_numeric() and name not in keys]


def values_of(atlas: Atlas, column: str) -> str:
    """Unit or range of a column of heads, from the comment that travels with it."""
    found = atlas.sql(
        "SELECT comment FROM duckdb_columns() WHERE database_name = 'atlas' AND table_name = 'heads' "
        "AND column_name = $column",
        {"column": column},
    )
    text = str(found.item() or "") if len(found) else ""
    described, marked, _ = text.partition("] = ")
    return described.rpartition(" [")[2] if marked else ""


def strongest(atlas: Atlas, choice: Choice, population: Population, layer: int | None = None) -> tuple[int, int]:
    """Layer and head of highest closure; where closure is defined nowhere, of the largest norm.

    Raises:
        QueryError: the population has no such layer.
    """
    heads = head_rows(atlas, choice, [population])
    if layer is not None:
        layers = heads["layer"].unique().sort().to_list()
        if layer not in layers:
            raise QueryError(
                f"no layer {layer}",
                where=population.name,
                expected="one of " + ", ".join(map(str, layers)),
                found=str(layer),
            )
        heads = heads.filter(layer=layer)
    row = heads.sort("closure", "norm", descending=True, nulls_last=True).row(0, named=True)
    return row["layer"], row["head"]


def null_draws(atlas: Atlas, population: Population, operator: str) -> np.ndarray | None:
    """Closure of every stored scramble (draw,), of all heads; None where the draws are not stored."""
    from store.arrays import open_stack
    from store.atlas import check_directory_name

    found = atlas.sql(UNITS, {"model": population.model, "operator": operator})
    if found.is_empty():
        return None
    group, unit = found.row(0)
    path = atlas.path / "arrays.zarr" / group / unit / population.stack / "null_closure"
    if not (path / "zarr.json").is_file():
        return None
    for name in (group, unit, population.stack):
        check_directory_name(name, str(atlas.path))
    array: Any = open_stack(path.parent)[path.name]
    draws: np.ndarray = np.asarray(array[...]).ravel()
    defined: np.ndarray = draws[np.isfinite(draws)]
    return defined


def unknown(kind: str, found: str, known: Sequence[str], where: str, remedy: str | None = None) -> QueryError:
    """The error for a name that is not known, with the nearest that are."""
    return QueryError(
        f"no {kind} named {found!r}",
        where=where,
        expected="one of " + ", ".join(known),
        found=found,
        remedy=nearest(found, known) or remedy,
    )


def needs(what: str, lacking: Sequence[str], command: str, operator: str, where: str) -> QueryError:
    """The error for a figure of something that has not been derived yet."""
    return QueryError(
        f"{what} are not stored",
        where=where,
        expected=f"{what} of every model that is drawn",
        found="none for " + ", ".join(lacking),
        remedy=f"derive them with: headatlas {command} {shlex.join(lacking)} --operator {operator}",
    )
