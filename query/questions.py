"""The common questions as queries over the macros: text and bound values, nothing run yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from query.parameters import rendered
from stats.errors import QueryError, nearest
from store.tables import TABLE_BY_NAME


@dataclass(frozen=True, slots=True)
class Question:
    """A query and the values bound to its ``$name`` parameters."""

    sql: str
    parameters: Mapping[str, Any]

    def __str__(self) -> str:
        """The query as a person would type it, values in place."""
        return rendered(self.sql, self.parameters)


MODELS = Question(
    "SELECT model, architecture, operators.names AS operators, n_layers, n_heads, n_kv_heads, d_model, d_head,\n"
    "    source_dtype, lineage, step, left(content_hash, 12) AS content\n"
    "FROM models\n"
    "JOIN (SELECT model, string_agg(operator, ', ' ORDER BY operator DESC) AS names FROM operators GROUP BY model)\n"
    "    AS operators USING (model)\n"
    "ORDER BY model",
    {},
)
SCHEMA_TABLES = Question(
    "SELECT table_name AS name, 'table' AS kind, comment AS meaning\n"
    "FROM duckdb_tables() WHERE database_name = 'atlas'\n"
    "UNION ALL\n"
    "SELECT function_name || '(' || array_to_string(parameters, ', ') || ')', 'macro', comment\n"
    "FROM duckdb_functions() WHERE function_type = 'table_macro' AND NOT internal\n"
    "ORDER BY kind DESC, name",
    {},
)


def unknown_table(name: str) -> QueryError:
    """The error for a table that the catalogue does not have."""
    return QueryError(
        f"no table named {name!r}",
        expected="one of " + ", ".join(TABLE_BY_NAME),
        found=name,
        remedy=nearest(name, TABLE_BY_NAME),
    )


def table_schema(table: str) -> Question:
    """Columns of one table with type and meaning, in order."""
    return Question(
        "SELECT column_name AS name, data_type AS type, comment AS meaning\n"
        "FROM duckdb_columns()\n"
        "WHERE database_name = 'atlas' AND table_name = $table\n"
        "ORDER BY column_index",
        {"table": table},
    )


DESCRIPTION = """WITH facts AS (
    SELECT 1 AS part, 'model' AS about, field, value
    FROM (SELECT COLUMNS(*)::VARCHAR FROM models WHERE model = $model) UNPIVOT (value FOR field IN (COLUMNS(*)))
    UNION ALL
    SELECT 2, 'operator ' || operator, field, value
    FROM (
        SELECT operator, COLUMNS(* EXCLUDE (model, operator))::VARCHAR FROM operators WHERE model = $model
    ) UNPIVOT (value FOR field IN (COLUMNS(* EXCLUDE (operator))))
    UNION ALL
    SELECT 3, 'heads', operator || ' ' || coalesce(reason, status), count(*)::VARCHAR
    FROM heads WHERE model = $model GROUP BY operator, status, reason
    UNION ALL
    SELECT 4, 'layers', stack || ' with ' || piece, count(*)::VARCHAR
    FROM (
        UNPIVOT (SELECT * FROM layers WHERE model = $model)
        ON output_gate, sinks, latent_norm, value_norm, clamp, sub_norm, qk_norm INTO NAME piece VALUE there
    ) WHERE there GROUP BY stack, piece
    UNION ALL
    SELECT 4, 'layers', stack || ' where T leaves out ' || neutralised, count(*)::VARCHAR
    FROM layers WHERE model = $model AND neutralised IS NOT NULL GROUP BY stack, neutralised
    UNION ALL
    SELECT 4, 'layers', stack || ' times ' || coalesce(layer_scale, multiplier::VARCHAR), count(*)::VARCHAR
    FROM layers WHERE model = $model AND (multiplier <> 1 OR layer_scale IS NOT NULL)
    GROUP BY stack, coalesce(layer_scale, multiplier::VARCHAR)
    UNION ALL
    SELECT 5, 'derived', operator || ' ' || kind,
        concat_ws(', ', n_draws || ' draws', 'seed ' || seed, random_starts || ' random starts', created_at)
    FROM derivations WHERE model = $model
    UNION ALL
    SELECT 6, 'skipped', stack || ' layer ' || layer, reason FROM skipped WHERE model = $model
)
SELECT about, field, value FROM facts ORDER BY part, about, field"""


ORIGINS = """WITH facts AS (
    SELECT 1 AS part, 'model' AS about, field, value
    FROM (
        SELECT source, revision, format, source_dtype, architecture, family, recognised_by, content_hash, qk_hash,
            array_group
        FROM models WHERE model = $model
    ) UNPIVOT (value FOR field IN (COLUMNS(*)))
    UNION ALL
    SELECT 2, 'operator ' || operator, field, value
    FROM (
        SELECT operator, COLUMNS(* EXCLUDE (model, operator))::VARCHAR FROM operators WHERE model = $model
    ) UNPIVOT (value FOR field IN (COLUMNS(* EXCLUDE (operator))))
    UNION ALL
    SELECT 3, kind || ' of ' || operator, field, value
    FROM (
        SELECT operator, kind, COLUMNS(* EXCLUDE (model, operator, kind))::VARCHAR
        FROM derivations WHERE model = $model
    ) UNPIVOT (value FOR field IN (COLUMNS(* EXCLUDE (operator, kind))))
    UNION ALL
    SELECT 4 + layer, stack || ' layer ' || layer, field, value
    FROM (
        SELECT stack, layer, content_hash, qk_hash FROM layers WHERE model = $model
    ) UNPIVOT (value FOR field IN (content_hash, qk_hash))
)
SELECT about, field, value FROM facts ORDER BY part, about, field"""


def description(model: str) -> Question:
    """Facts about one model: its row, its operators, its heads by status, layers skipped."""
    return Question(DESCRIPTION, {"model": model})


def origins(model: str) -> Question:
    """From which bytes, code and settings a model's rows came: the model, its operators, derivations and layers."""
    return Question(ORIGINS, {"model": model})


def closure(
    threshold: float = 0.9, by: str = "model", models: Sequence[str] | None = None, operator: str | None = None
) -> Question:
    """How many heads nearly close.

    Args:
        threshold: closure at or above which a head is strong, 0 to 1.
        by: ``model``, ``layer``, or ``head`` for every head at or above the threshold.
        models: names to keep; all when None.
        operator: raw, folded or scaled; each on its own rows when None.
    """
    order = {
        "model": ("closure_by_model($threshold)", "model, operator DESC, stack"),
        "layer": ("closure_by_layer($threshold)", "model, operator DESC, stack, layer"),
        "head": (STRONG_HEADS, "model, operator DESC, stack, layer, head"),
    }
    return _filtered(order, by, threshold, models, operator)


def mismatch(
    threshold: float = 0.9, by: str = "model", models: Sequence[str] | None = None, operator: str | None = None
) -> Question:
    """Closure of one head's O with another head's V, over heads that share no values.

    Arguments as in ``closure``, with ``by`` one of ``model`` and ``layer``.
    """
    order = {
        "model": ("mismatch_by_model($threshold)", "model, operator DESC, stack"),
        "layer": ("mismatch_by_layer($threshold)", "model, operator DESC, stack, layer"),
    }
    return _filtered(order, by, threshold, models, operator)


def algebra(
    threshold: float = 0.9, by: str = "model", models: Sequence[str] | None = None, operator: str | None = None
) -> Question:
    """The right-action law ``T_i T_j ~ alpha_j T_i`` where head j is at or above the threshold.

    Arguments as in ``closure``, with ``by`` one of ``model``, ``group`` (a row per strong head,
    over the heads that share its values) and ``pair``.
    """
    order = {
        "model": ("algebra_by_model($threshold)", "model, operator DESC, stack, pairing DESC"),
        "group": ("algebra_by_group($threshold)", "model, operator DESC, stack, layer, kv_head, read_head"),
        "pair": ("products($threshold)", "model, operator DESC, stack, layer, write_head, read_head"),
    }
    return _filtered(order, by, threshold, models, operator)


def null(
    kind: str = "scramble", by: str = "model", models: Sequence[str] | None = None, operator: str | None = None
) -> Question:
    """Trained heads against a null.

    Args:
        kind: ``scramble``, which has to be drawn first, or ``mismatch``.
        by: ``model``, ``layer`` or ``head``.
        models: names to keep; all when None.
        operator: raw, folded or scaled; each on its own rows when None.
    """
    order = {
        "model": ("null_by_model()", "model, operator DESC, stack"),
        "layer": ("null_by_layer()", "model, operator DESC, stack, layer"),
        "head": (NULL_HEADS, "model, operator DESC, stack, layer, head"),
    }
    kinds = ("scramble", "mismatch")
    if kind not in kinds:
        raise QueryError("unknown kind of null", expected="one of " + ", ".join(kinds), found=kind)
    return _selected(order, by, {"kind": ("kind = $kind", kind)}, models, operator)


def capacity(
    threshold: float = 0.9, by: str = "model", models: Sequence[str] | None = None, operator: str | None = None
) -> Question:
    """How closed heads could be, beside what they attain.

    Arguments as in ``closure``, with ``by`` one of ``model``, ``layer`` and ``head``.
    """
    order = {
        "model": ("capacity_by_model($threshold)", "model, operator DESC, stack, method"),
        "layer": ("capacity_by_layer($threshold)", "model, operator DESC, stack, method, layer"),
        "head": (CAPACITY_HEADS, "model, operator DESC, stack, method, layer, head"),
    }
    return _filtered(order, by, threshold, models, operator)


def trajectory(
    threshold: float = 0.9, by: str = "step", lineages: Sequence[str] | None = None, operator: str | None = None
) -> Question:
    """Training runs step by step.

    Args:
        threshold: closure at or above which a head of the final step is strong.
        by: ``step`` for medians of the finally strong heads and the others, ``head`` for the onset of
            every head, ``all`` for every head at every step.
        lineages: runs to keep; all when None.
        operator: raw, folded or scaled; each on its own rows when None.
    """
    order = {
        "step": ("trajectory_by_step($threshold)", "lineage, operator DESC, stack, cohort, step"),
        "head": ("onsets($threshold)", "lineage, operator DESC, stack, final_closure DESC, layer, head"),
        "all": ("lineage_heads($threshold)", "lineage, operator DESC, stack, layer, head, step"),
    }
    if not 0 <= threshold <= 1:
        raise QueryError("a closure threshold out of range", expected="0 to 1", found=str(threshold))
    bound: dict[str, tuple[str, Any]] = {"threshold": ("", float(threshold))}
    if lineages:
        bound["lineages"] = ("list_contains($lineages, lineage)", list(lineages))
    return _selected(order, by, bound, None, operator)


NULL_HEADS = (
    "(SELECT model, operator, stack, label, layer, head, kind, closure, nulls.median, q95, q99, median_se, p, p_tail,\n"
    "    q, wins, n_draws, seed FROM nulls JOIN heads USING (model, operator, stack, layer, head))"
)
CAPACITY_HEADS = (
    "(SELECT model, operator, stack, label, layer, head, method, heads.closure, capacities.closure AS capacity,\n"
    "    attainment, iterations, seed FROM capacities JOIN heads USING (model, operator, stack, layer, head)\n"
    "    WHERE capacities.closure >= $threshold)"
)
STRONG_HEADS = (
    "(SELECT model, operator, stack, label, layer, head, kv_head, closure, alpha, trace_rank, norm, participation,\n"
    "    cos_mean, copying FROM heads WHERE closure >= $threshold)"
)


def _filtered(
    order: Mapping[str, tuple[str, str]],
    by: str,
    threshold: float,
    models: Sequence[str] | None,
    operator: str | None,
) -> Question:
    if not 0 <= threshold <= 1:
        raise QueryError("a closure threshold out of range", expected="0 to 1", found=str(threshold))
    return _selected(order, by, {"threshold": ("", float(threshold))}, models, operator)


def _selected(
    order: Mapping[str, tuple[str, str]],
    by: str,
    bound: Mapping[str, tuple[str, Any]],
    models: Sequence[str] | None,
    operator: str | None,
) -> Question:
    """Rows of a source in order; ``bound`` has a condition, which may be empty, and a value by parameter."""
    if by not in order:
        raise QueryError("unknown grouping", expected="one of " + ", ".join(order), found=by)
    source, columns = order[by]
    wanted = dict(bound)
    if models:
        wanted["models"] = ("list_contains($models, model)", list(models))
    if operator is not None:
        wanted["operator"] = ("operator = $operator", operator)
    conditions = [condition for condition, _ in wanted.values() if condition]
    where = f"WHERE {' AND '.join(conditions)}\n" if conditions else ""
    parameters = {name: value for name, (_, value) in wanted.items()}
    return Question(f"SELECT *\nFROM {source}\n{where}ORDER BY {columns}", parameters)
