"""Print the data dictionary: every table, column and array as declared in the code.

python docs/make_data_dictionary.py > docs/data-dictionary.md
"""

from __future__ import annotations

from collections.abc import Iterator

from stats.registry import STATUS_REASONS, Statistic
from store.arrays import ARRAYS, SIZES
from store.tables import TABLES


def cell(text: str) -> str:
    """Text that stays inside one cell of a Markdown table."""
    return text.replace("|", "\\|")


def lines() -> Iterator[str]:
    """The document, line by line."""
    yield "# Data dictionary"
    yield ""
    yield "Generated from the declarations in the code by `make docs`; do not edit."
    yield ""
    yield "A head writes `T x` with `T = O V^T`. `s` are the singular values of T, `c` the cosines of the"
    yield "principal angles between span(V) and span(O), K the core in principal coordinates, `D = diag(c)`."
    yield "Weight units are those of the checkpoint: T has weight units squared. A statistic that is not"
    yield "defined is NULL in the catalogue and NaN in the arrays."
    yield ""
    yield "## Catalogue: `catalog.duckdb`"
    for table in TABLES:
        yield ""
        yield f"### {table.name}"
        yield ""
        yield f"{table.comment[0].upper()}{table.comment[1:]}. Key: {', '.join(f'`{name}`' for name in table.key)}."
        yield ""
        yield "| column | type | meaning |"
        yield "|---|---|---|"
        for column in table.columns:
            yield f"| `{column.name}` | {column.sql_type} | {cell(column.comment)} |"
    yield ""
    yield "## Arrays: `arrays.zarr/<array_group>/<operator>/<stack>/`"
    yield ""
    yield "`models.array_group` names the group. The first axis follows the array `layer`, which holds the"
    yield "checkpoint's layer numbers; where layers differ in size, arrays are padded with NaN."
    yield ""
    yield "| array | axes | meaning |"
    yield "|---|---|---|"
    for name, (statistic, axes) in ARRAYS.items():
        yield f"| `{name}` | {', '.join(axes)} | {cell(meaning(statistic))} |"
    yield "| `kv_head` | layer, head | value and key projection a head reads |"
    yield f"| `reason` | layer, head | why closure is undefined: {reasons()} |"
    yield "| `layer` | layer | layer number in the checkpoint |"
    for name, text in SIZES.items():
        yield f"| `{name}` | layer | {text} |"


def meaning(statistic: Statistic) -> str:
    """An array's meaning without the wording that belongs to tables."""
    return f"{statistic.meaning} [{statistic.values}]"


def reasons() -> str:
    """The reason codes in words."""
    return ", ".join(f"{code} {reason or 'ok'} ({text})" for code, (reason, text) in enumerate(STATUS_REASONS.items()))


if __name__ == "__main__":
    print("\n".join(lines()))
