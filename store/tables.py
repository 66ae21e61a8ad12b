"""Tables of the catalogue, declared as data: names, SQL types and the comment on every column.

Statistics come from ``stats.registry``; keys and facts about models are declared here.
"""

from __future__ import annotations

from dataclasses import dataclass

from stats.registry import (
    CAPACITY_STATISTICS,
    HEAD_STATISTICS,
    NULL_STATISTICS,
    PAIR_STATISTICS,
    QK_STATISTICS,
    SPECTRA,
    Statistic,
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: name, SQL type, and the text of its ``COMMENT ON``."""

    name: str
    sql_type: str
    comment: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the catalogue; ``key`` are the columns that identify a row, in sort order."""

    name: str
    comment: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]


def _columns(statistics: tuple[Statistic, ...]) -> tuple[Column, ...]:
    return tuple(Column(item.name, item.sql_type, item.comment) for item in statistics)


MODEL = Column("model", "VARCHAR", "what the user called the model; unique")
OPERATOR = Column(
    "operator",
    "VARCHAR",
    "raw: weights as stored; folded: the norm in front of attention, and a gain on its output, multiplied in; "
    "scaled: also what multiplies the branch outside",
)
STACK = Column("stack", "VARCHAR", "which attention of the model: decoder, encoder, cross, text, vision, audio, ...")
LAYER = Column("layer", "INTEGER", "layer number in the checkpoint, from 0")
HEAD = Column("head", "INTEGER", "query head, from 0")
D_MODEL = Column("d_model", "INTEGER", "width of the residual stream")
D_HEAD = Column("d_head", "INTEGER", "width of a head's value, k")

MODEL_FACTS = (
    Column("source", "VARCHAR", "path, or hub name, as given"),
    Column("revision", "VARCHAR", "resolved commit of the hub; NULL for local files"),
    Column("lineage", "VARCHAR", "training run this checkpoint belongs to; NULL if none was named"),
    Column("step", "BIGINT", "training step within the lineage"),
    Column("format", "VARCHAR", "safetensors, torch or gguf"),
    Column("architecture", "VARCHAR", "model_type of the configuration, or GGUF architecture"),
    Column("family", "VARCHAR", "row of the family table that was used"),
    Column("recognised_by", "VARCHAR", "what named the family: configuration keys, --family, or names and shapes"),
    Column("notes", "VARCHAR", "what was assumed of the checkpoint, or left aside; NULL if nothing"),
    Column("n_layers", "INTEGER", "layers with attention that were measured, over all stacks"),
    Column("n_heads", "INTEGER", "query heads per layer; NULL where layers differ, see layers"),
    Column("n_kv_heads", "INTEGER", "key/value heads per layer; NULL where layers differ, see layers"),
    Column("d_model", "INTEGER", "width of the residual stream; NULL where layers differ, see layers"),
    Column("d_head", "INTEGER", "width of a head's value; NULL where layers differ, see layers"),
    Column("source_dtype", "VARCHAR", "storage types of the attention projections, joined by +"),
    Column("feeding_norm", "VARCHAR", "norm in front of attention: rms, rms_plus_one, layer; NULL if none"),
    Column("branch_norm", "VARCHAR", "gain on the attention output: rms, rms_plus_one, layer; NULL if none"),
    Column("attention_parameters", "BIGINT", "parameters of the query, key, value and output projections"),
    Column("total_parameters", "BIGINT", "parameters of the whole checkpoint; NULL where headers do not tell"),
    Column(
        "content_hash",
        "VARCHAR",
        "SHA-256 over the layers' content hashes in key order; the same whatever the format or sharding",
    ),
    Column("qk_hash", "VARCHAR", "SHA-256 over the layers' query and key hashes in key order, as stored"),
)
"""What is true of a model whichever operators are measured; attributes of its array group."""

RUN_FACTS = (
    Column("gain_hash", "VARCHAR", "SHA-256 of the gains and scales that were multiplied in; NULL for raw"),
    Column("bytes_read", "BIGINT", "stored size of the attention tensors and gains that were read, in bytes"),
    Column("device", "VARCHAR", "device the tall products ran on"),
    Column("compute_dtype", "VARCHAR", "dtype of the tall products; small matrices are float64"),
    Column("rank_cut", "DOUBLE", "share of the largest singular value below which one counts as zero"),
    Column("seconds", "DOUBLE", "wall time of reading, measuring and storing, in seconds"),
    Column("created_at", "TIMESTAMP", "when the measurement was published, UTC"),
    Column("tool_version", "VARCHAR", "version of headatlas that measured it"),
    Column("libraries", "VARCHAR", "versions of the numerical libraries"),
)
"""What is true of one run that measured an operator; attributes of the operator's array group."""

ARRAY_GROUP = Column("array_group", "VARCHAR", "group of the model in arrays.zarr")

TABLES: tuple[Table, ...] = (
    Table(
        "models",
        "one row per checkpoint; the columns of a run are those of the latest one",
        ("model",),
        (
            MODEL,
            *MODEL_FACTS,
            *(column for column in RUN_FACTS if column.name != "gain_hash"),
            Column("status", "VARCHAR", "complete: every layer that can be read is stored"),
            ARRAY_GROUP,
        ),
    ),
    Table(
        "operators",
        "one row per measured operator of a model, with the run that measured it",
        ("model", "operator"),
        (MODEL, OPERATOR, *RUN_FACTS),
    ),
    Table(
        "layers",
        "one row per layer with attention",
        ("model", "stack", "layer"),
        (
            MODEL,
            STACK,
            LAYER,
            Column("n_heads", "INTEGER", "query heads"),
            Column("n_kv_heads", "INTEGER", "key/value heads"),
            D_MODEL,
            Column("d_source", "INTEGER", "width of the stream that keys and values read"),
            D_HEAD,
            Column("d_key", "INTEGER", "width of a head's query and key"),
            Column("feeding_norm", "VARCHAR", "norm in front of attention that folded contains; NULL if none"),
            Column("source_norm", "VARCHAR", "norm of the other stream that keys and values read; NULL if none"),
            Column("branch_norm", "VARCHAR", "gain on the attention output that folded contains; NULL if none"),
            Column("output_gate", "BOOLEAN", "heads are multiplied by a gate that depends on the query's token"),
            Column("sinks", "BOOLEAN", "attention weights sum to less than 1; T is not affected"),
            Column("latent_norm", "BOOLEAN", "values pass a norm within; its gain is part of T, its scalar is not"),
            Column("value_norm", "BOOLEAN", "each head's value is normalised for each token; T has it before that"),
            Column("clamp", "BOOLEAN", "queries, keys and values are clamped; T is exact within the bounds"),
            Column("sub_norm", "BOOLEAN", "a norm over all heads lies in front of W_O; T leaves it out"),
            Column("qk_norm", "BOOLEAN", "queries and keys pass a norm; the table qk has them before that"),
            Column("neutralised", "VARCHAR", "which of these T leaves out; NULL where it leaves out nothing"),
            Column("multiplier", "DOUBLE", "scalar on the branch outside the module; part of T in scaled only"),
            Column(
                "layer_scale",
                "VARCHAR",
                "tensor that scales the branch; part of T in scaled only; NULL if none",
            ),
            Column(
                "content_hash",
                "VARCHAR",
                "SHA-256 of W_V (kv_head d_head, d_source) and W_O (d_model, head d_head), or of the factors "
                "whose product W_V is, as little-endian float64 in row-major order, each preceded by its shape",
            ),
            Column("qk_hash", "VARCHAR", "SHA-256 of W_Q and W_K in the same form, rows as stored"),
        ),
    ),
    Table(
        "skipped",
        "layers whose attention was not read, and why",
        ("model", "stack", "layer"),
        (MODEL, STACK, LAYER, Column("reason", "VARCHAR", "why the layer has no rows")),
    ),
    Table(
        "heads",
        "one row per head and operator",
        ("model", "operator", "stack", "layer", "head"),
        (
            MODEL,
            OPERATOR,
            STACK,
            LAYER,
            HEAD,
            Column("kv_head", "INTEGER", "value and key projection the head reads, from 0"),
            Column("label", "VARCHAR", "human label, L<layer>H<head>"),
            D_MODEL,
            D_HEAD,
            Column("status", "VARCHAR", "ok: closure is defined; undefined: reason says why not"),
            Column("reason", "VARCHAR", "zero, nilpotent, nonfinite, pruned or two spaces; NULL where status is ok"),
            Column("neutralised", "VARCHAR", "pieces of the module that T leaves out, see layers; NULL if none"),
            *_columns(HEAD_STATISTICS),
        ),
    ),
    Table(
        "spectra",
        "one row per head and operator: every spectrum as a list of d_head doubles",
        ("model", "operator", "stack", "layer", "head"),
        (MODEL, OPERATOR, STACK, LAYER, HEAD, *_columns(SPECTRA)),
    ),
    Table(
        "qk",
        "one row per query head and operator: its query-key form B = W_Q W_K^T, without position code",
        ("model", "operator", "stack", "layer", "head"),
        (MODEL, OPERATOR, STACK, LAYER, HEAD, *_columns(QK_STATISTICS)),
    ),
    Table(
        "pairs",
        "one row per ordered pair of different heads of a layer; T_i is write_head's, T_j read_head's",
        ("model", "operator", "stack", "layer", "write_head", "read_head"),
        (
            MODEL,
            OPERATOR,
            STACK,
            LAYER,
            Column("write_head", "INTEGER", "head i, whose O writes"),
            Column("read_head", "INTEGER", "head j, whose V reads"),
            Column("shared_value", "BOOLEAN", "whether the two heads share one value projection"),
            *_columns(PAIR_STATISTICS),
        ),
    ),
    Table(
        "derivations",
        "one row per result derived from stored spectra, without the weights",
        ("model", "operator", "kind"),
        (
            MODEL,
            OPERATOR,
            Column("kind", "VARCHAR", "scramble: the null; assignment, riemannian: capacities"),
            Column("n_draws", "INTEGER", "draws for each head; NULL where nothing is drawn"),
            Column("seed", "BIGINT", "seed of the random numbers; NULL where there are none"),
            Column("independent", "BOOLEAN", "every draw has a Haar pair of its own; NULL where nothing is drawn"),
            Column("random_starts", "INTEGER", "ascents from Haar orientations; NULL where nothing is climbed"),
            Column("seconds", "DOUBLE", "wall time, in seconds"),
            Column("created_at", "TIMESTAMP", "when it was published, UTC"),
            Column("tool_version", "VARCHAR", "version of headatlas that made it"),
            Column("libraries", "VARCHAR", "versions of the numerical libraries"),
            Column("unit", "VARCHAR", "its group below the model's in arrays.zarr"),
        ),
    ),
    Table(
        "nulls",
        "closure under a null, one row per head, operator and kind of null",
        ("model", "operator", "stack", "layer", "head", "kind"),
        (
            MODEL,
            OPERATOR,
            STACK,
            LAYER,
            HEAD,
            Column(
                "kind",
                "VARCHAR",
                "scramble: orientation of the core destroyed; mismatch: values of the layer's other groups",
            ),
            Column("n_draws", "INTEGER", "draws, or mismatched values"),
            Column("seed", "BIGINT", "seed of the draws; NULL for mismatch"),
            *_columns(NULL_STATISTICS),
            Column(
                "q",
                "DOUBLE",
                "false discovery rate at which p is significant among the heads of the model and operator; NULL for "
                "mismatch [0 to 1] (Benjamini and Hochberg 1995)",
            ),
        ),
    ),
    Table(
        "capacities",
        "how closed a head could be with its own singular values and cosines, by method",
        ("model", "operator", "stack", "layer", "head", "method"),
        (
            MODEL,
            OPERATOR,
            STACK,
            LAYER,
            HEAD,
            Column("method", "VARCHAR", "assignment: signed permutations; riemannian: ascent over all orientations"),
            *_columns(CAPACITY_STATISTICS),
            Column("seed", "BIGINT", "seed of the starts; NULL for assignment"),
            Column("attainment", "DOUBLE", "share of the capacity that the head attains [0 to 1] = P / capacity"),
        ),
    ),
)

TABLE_BY_NAME = {table.name: table for table in TABLES}


def schema_sql() -> str:
    """Statements that create every table with its comments."""
    statements = []
    for table in TABLES:
        columns = ",\n  ".join(f'"{column.name}" {column.sql_type}' for column in table.columns)
        keys = ", ".join(f'"{name}"' for name in table.key)
        statements.append(f'CREATE TABLE "{table.name}" (\n  {columns},\n  PRIMARY KEY ({keys})\n);')
        statements.append(f"COMMENT ON TABLE \"{table.name}\" IS '{_quoted(table.comment)}';")
        statements += [
            f'COMMENT ON COLUMN "{table.name}"."{column.name}" IS \'{_quoted(column.comment)}\';'
            for column in table.columns
        ]
    return "\n".join(statements)


def _quoted(text: str) -> str:
    return text.replace("'", "''")
