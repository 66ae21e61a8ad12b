"""Every named question on a panel of 7,304 heads once the store is open, and the start of `headatlas sql`.

The panel is that of panel_derivations.py with its nulls and capacities; medians of nine.

python benchmarks/query_latency.py [STORE]

A STORE that is there already is used as it is.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measuring import medians, run, save
from panel_derivations import HEADATLAS, ingest

sys.path.insert(0, str(Path(__file__).parent.parent))

from query import open_atlas
from query.named import questions

REPEATS = 9


def milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """Median wall time and median processor time, over all threads, of doing something again and again."""
    walls, processors = [], []
    for _ in range(REPEATS):
        started, used = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - started)
        processors.append(time.process_time() - used)
    return 1000 * median(walls), 1000 * median(processors)


def make(store: Path) -> None:
    """The panel with what is derived from it."""
    ingest(store)
    for command in (["null", "--draws", "1000"], ["capacity"]):
        run([*HEADATLAS, *command, "--store", str(store), "--format", "json"])


def main() -> None:
    """Measure and save."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "atlas"
        if not store.exists():
            make(store)
        started = [
            run([*HEADATLAS, "sql", "SELECT count(*) FROM heads", "--store", str(store)]) for _ in range(REPEATS)
        ]
        begun = time.perf_counter()
        with open_atlas(store) as atlas:
            opening = 1000 * (time.perf_counter() - begun)
            model = atlas.sql("SELECT model FROM models ORDER BY model LIMIT 1").item()
            needed = {"layer-profile": {"model": model}}
            times, rows = {}, {}
            for name in questions(store).by_name:
                values = needed.get(name, {})
                rows[name] = len(atlas.ask(name, **values))
                times[name] = milliseconds(lambda name=name, values=values: atlas.ask(name, **values))
            counts = {
                table: atlas.sql(f'SELECT count(*) FROM "{table}"').item()
                for table in ("models", "heads", "pairs", "nulls", "capacities")
            }
    path = save(
        "query_latency",
        {
            "rows_stored": counts,
            "sql_start_seconds": medians(started)["wall_seconds"],
            "opening_milliseconds": opening,
            "slowest_milliseconds": max(wall for wall, _ in times.values()),
            "milliseconds": {name: wall for name, (wall, _) in times.items()},
            "processor_milliseconds": {name: processor for name, (_, processor) in times.items()},
            "rows": rows,
        },
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
