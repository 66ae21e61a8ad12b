"""The named questions on catalogues of 7,304 and of 100,000 heads, and their growth.

    python benchmarks/query_scale.py [--repeats 5] [--quick]

The catalogues have the layers, heads and key/value heads of the panel of panel_derivations.py, once and fourteen times
over, with random numbers in every column and lists of 16; no arrays lie beside them. Rows go in through the store's own
tables. Each question is asked once before it is timed; `opening` is from nothing to the first answer in one process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import duckdb
from measuring import ROOT, medians, run, save
from panel_derivations import HEADATLAS, PANEL, Shape

sys.path.insert(0, str(ROOT))

from query import open_atlas
from query.named import questions
from store import catalogue
from store.atlas import AtlasStore
from store.tables import TABLE_BY_NAME

COPIES = {"7,304 heads": 1, "102,256 heads": 14}
LIST = 16
BY_TYPE = {
    "VARCHAR": "'made'",
    "INTEGER": "1",
    "BIGINT": "1",
    "DOUBLE": "random()",
    "BOOLEAN": "false",
    "TIMESTAMP": "TIMESTAMP '2026-01-01'",
    "DOUBLE[]": f"list_transform(range({LIST}), lambda i: random())",
}
EVERYWHERE = {"operator": "'raw'", "stack": "'decoder'", "lineage": "NULL", "step": "NULL", "reason": "NULL"}
"""Columns that a question selects by, where a made-up text would leave nothing."""

HEAD_TABLES = {
    "heads": {"status": "'ok'", "label": "'L' || layer || 'H' || head"},
    "spectra": {},
    "qk": {},
    "nulls": {"kind": "'scramble'"},
    "capacities": {"method": "'assignment'"},
}


def sizes(copies: int) -> str:
    """The made models as an SQL relation: model, n_layers, n_heads, n_kv_heads, d_head."""
    shapes: list[Shape] = [*PANEL] * copies
    rows = (f"('made-{i}', {s.layers}, {s.heads}, {s.kv_heads}, {s.d_head})" for i, s in enumerate(shapes))
    return f"(VALUES {', '.join(rows)}) AS made(model, n_layers, n_heads, n_kv_heads, d_head)"


def fill(connection: duckdb.DuckDBPyConnection, table: str, source: str, known: dict[str, str]) -> None:
    """Insert a row for every one of a relation; what is not known of a column is made up by its type."""
    expressions = ", ".join(
        f'{(EVERYWHERE | known).get(column.name, BY_TYPE[column.sql_type])} AS "{column.name}"'
        for column in TABLE_BY_NAME[table].columns
    )
    connection.execute(f'INSERT INTO "{table}" BY NAME SELECT {expressions} FROM {source}')


def make(store: Path, copies: int) -> None:
    """A store with a catalogue and no arrays."""
    model = {name: name for name in ("model", "n_layers", "n_heads", "n_kv_heads", "d_head")}
    layer = {"model": "model", "layer": "layer", "d_head": "d_head"}
    head = {**layer, "head": "head", "kv_head": "head // (n_heads // n_kv_heads)"}
    pair = {**layer, "write_head": "head", "read_head": "other", "shared_value": "head % 4 = other % 4"}

    def action(connection: duckdb.DuckDBPyConnection) -> None:
        models = sizes(copies)
        layers = f"{models}, LATERAL (SELECT unnest(range(n_layers)) AS layer)"
        heads = f"{layers}, LATERAL (SELECT unnest(range(n_heads)) AS head)"
        fill(connection, "models", models, {**model, "status": "'complete'"})
        fill(connection, "operators", models, model)
        fill(connection, "layers", layers, {**model, **layer, "neutralised": "NULL"})
        for table, known in HEAD_TABLES.items():
            fill(connection, table, heads, {**head, "neutralised": "NULL", **known})
        fill(connection, "nulls", heads, {**head, "kind": "'mismatch'"})
        for kind in ("scramble", "assignment"):
            fill(connection, "derivations", models, {**model, "kind": f"'{kind}'"})
        others = f"(SELECT *, unnest(range(n_heads)) AS other FROM {heads})"
        fill(connection, "pairs", f"{others} WHERE head <> other", pair)

    catalogue.change(AtlasStore.open_or_create(store).catalogue_path, action)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time after one that is not counted."""
    spent = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        work()
        if repeat:
            spent.append(1000 * (time.perf_counter() - started))
    return median(spent)


def ask_all(store: Path, repeats: int) -> dict[str, object]:
    """Time of every named question, of opening the store, and of a whole process that counts the heads."""
    counting = [*HEADATLAS, "sql", "SELECT count(*) FROM heads", "--store", str(store)]
    processes = [run(counting) for _ in range(repeats)]
    started = time.perf_counter()
    with open_atlas(store) as atlas:
        heads = atlas.sql("SELECT count(*) FROM heads").item()
        opening = 1000 * (time.perf_counter() - started)
        pairs = atlas.sql("SELECT count(*) FROM pairs").item()
        needed = {"layer-profile": {"model": "made-0"}}
        times = {}
        for name in questions(store).by_name:
            values = needed.get(name, {})
            times[name] = milliseconds(lambda name=name, values=values: atlas.ask(name, **values), repeats)
    slowest = max(times, key=lambda name: times[name])
    return {
        "heads": heads,
        "pairs": pairs,
        "catalogue_bytes": (store / catalogue.FILE_NAME).stat().st_size,
        "opening_milliseconds": opening,
        "sql_process_seconds": medians(processes)["wall_seconds"],
        "median_milliseconds": median(times.values()),
        "slowest": slowest,
        "slowest_milliseconds": times[slowest],
        "milliseconds": times,
    }


def main() -> None:
    """Make the catalogues, ask, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the smaller catalogue alone, once")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, copies in list(COPIES.items())[: 1 if options.quick else None]:
            store = Path(temporary) / f"atlas-{copies}"
            make(store, copies)
            figures[name] = ask_all(store, repeats)
    path = save("query_scale", {"repeats": repeats, "figures": figures})
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
