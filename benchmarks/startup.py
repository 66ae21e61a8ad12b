"""Start-up of the command line: whole processes, from start to exit, on a small store.

    python benchmarks/startup.py [--repeats 9] [--quick]

`--help` and the first commands of a session, beside an interpreter that does nothing; they take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measuring import ROOT, Run, medians, python, run, save
from synthetic import Shape, write


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="once")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint, store = Path(temporary) / "small", Path(temporary) / "atlas"
        write(checkpoint, Shape(4, 64, 4, 2, 8))
        cli = [python(), str(ROOT / "cli.py")]
        here = ["--store", str(store)]
        run([*cli, "ingest", str(checkpoint), *here])
        commands = {
            "python -c pass": [python(), "-c", "pass"],
            "headatlas --help": [*cli, "--help"],
            "headatlas models": [*cli, "models", *here],
            "headatlas sql": [*cli, "sql", "SELECT count(*) FROM heads", *here],
            "headatlas closure": [*cli, "closure", *here],
            "headatlas plan": [*cli, "plan", str(checkpoint)],
        }
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        for repeat in range(repeats + 1):
            for name, command in commands.items():
                done = run(command)
                if repeat:
                    runs[name].append(done)
    seconds = {name: medians(done)["wall_seconds"] for name, done in runs.items()}
    path = save("startup", {"repeats": repeats, "seconds": seconds})
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
