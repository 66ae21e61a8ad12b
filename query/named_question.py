"""A question that has a name: its parameters, the values they take, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from query.parameters import checked, literal, typed
from query.questions import Question
from stats.errors import QueryError, nearest

if TYPE_CHECKING:
    import polars as pl

    from query.atlas import Atlas


@dataclass(frozen=True, slots=True)
class Parameter:
    """A declared parameter of a question.

    ``bounds`` limit a number, ``column`` is the table and column that holds the possible values, and
    ``default`` has a meaning where ``required`` is false.
    """

    name: str
    sql_type: str
    meaning: str
    required: bool
    default: Any = None
    bounds: tuple[float | None, float | None] = (None, None)
    column: tuple[str, str] | None = None

    def value(self, given: Any, question: str) -> Any:
        """A value as text of the command line or from Python, checked.

        Raises:
            QueryError: another type, out of bounds, or NULL where that has no meaning.
        """
        where = f"{question}, {self.name}"
        nothing = given is None or (isinstance(given, str) and given.lower() == "null")
        if nothing and not self.required and self.default is None:
            return None
        if given is None:
            raise QueryError("a parameter that must have a value", where=where, expected=self.sql_type, found="NULL")
        text = isinstance(given, str) and self.sql_type != "VARCHAR"
        found = typed(given, self.sql_type, where) if text else checked(given, self.sql_type, where)
        low, high = self.bounds
        for number in found if isinstance(found, list) else [found]:
            if (low is not None and number < low) or (high is not None and number > high):
                raise QueryError("a value out of range", where=where, expected=self.bounds_text(), found=str(number))
        return found

    def bounds_text(self) -> str:
        """The bounds in words; empty where there are none."""
        low, high = ("" if bound is None else f"{bound:g}" for bound in self.bounds)
        return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else ""

    def default_text(self) -> str:
        """The default as SQL; empty where a value has to be given."""
        return "" if self.required else literal(self.default)


@dataclass(frozen=True, slots=True)
class NamedQuestion:
    """A question that has a name: what it answers, its parameters, and its statement with ``$name`` in it."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    sql: str
    origin: str

    def signature(self) -> str:
        """The parameters in a line: with their defaults, without one where a value has to be given."""
        parts = (
            parameter.name if parameter.required else f"{parameter.name}={parameter.default_text()}"
            for parameter in self.parameters
        )
        return ", ".join(parts)

    def with_values(self, given: Mapping[str, Any]) -> Question:
        """The question with every parameter bound: as given, as text or as Python values, else the default.

        Raises:
            QueryError: an unknown parameter, one without a value, or a value it cannot take.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                raise QueryError(
                    f"{self.name} has no parameter named {name!r}",
                    expected=self.signature() or "no parameters",
                    found=name,
                    remedy=nearest(name, known),
                )
        values = {}
        for name, parameter in known.items():
            if name in given:
                values[name] = parameter.value(given[name], self.name)
            elif parameter.required:
                raise QueryError(
                    f"{self.name} needs a value for {name}",
                    expected=f"{parameter.sql_type}: {parameter.meaning}",
                    remedy=f"give it with --set {name}=VALUE",
                )
            else:
                values[name] = parameter.default
        return Question(self.sql, values)

    def answer(self, atlas: Atlas, bound: Question) -> pl.DataFrame:
        """Rows of the question with its values.

        Raises:
            QueryError: a value that names nothing of the store, or a query that is refused.
        """
        self.check_in_store(atlas, bound.parameters)
        return atlas.sql(bound.sql, bound.parameters)

    def frame(self) -> pl.DataFrame:
        """A row per parameter: name, type, values it can take, default, meaning."""
        import polars as pl

        rows = [
            (
                parameter.name,
                parameter.sql_type,
                parameter.bounds_text() or ".".join(parameter.column or ()),
                parameter.default_text() or None,
                parameter.meaning,
            )
            for parameter in self.parameters
        ]
        columns = ("name", "type", "values", "default", "meaning")
        return pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String), orient="row")

    def check_in_store(self, atlas: Atlas, values: Mapping[str, Any]) -> None:
        """Refuse values that the store does not hold where they name something of it.

        Raises:
            QueryError: no such value.
        """
        for parameter in self.parameters:
            value = values[parameter.name]
            if parameter.column is None or value is None:
                continue
            table, column = parameter.column
            rows = atlas.sql(f'SELECT DISTINCT "{column}" FROM "{table}" WHERE "{column}" IS NOT NULL ORDER BY ALL')
            stored = rows.to_series().to_list()
            for wanted in value if isinstance(value, list) else [value]:
                if wanted not in stored:
                    raise QueryError(
                        f"no {column} {str(wanted)[:80]!r} in the store",
                        where=f"{self.name}, {parameter.name}",
                        expected="one of " + (", ".join(map(str, stored[:20])) or "none: there is none"),
                        found=str(wanted)[:80],
                        remedy=nearest(str(wanted), map(str, stored)),
                    )
