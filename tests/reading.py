"""Runs every command on a store that cannot be written; for ``test_versions``, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from click.testing import CliRunner

from cli import main


def commands(out: Path) -> tuple[list[list[str]], list[list[str]]]:
    """Commands that read, and commands that write."""
    statistic = out / "mine.py"
    statistic.write_text(
        "from store.user_statistics import statistic\n@statistic(meaning='m', values='v')\n"
        "def top(sigma):\n    return sigma[:, 0]\n"
    )
    reading = [
        ["models"],
        ["describe", "tiny-bert"],
        ["schema", "heads"],
        ["closure", "--by", "head"],
        ["mismatch"],
        ["algebra"],
        ["null", "--draws", "50", "tiny-bert"],
        ["capacity", "tiny-bert"],
        ["sql", "FROM heads LIMIT 1"],
        ["ask"],
        ["ask", "count-heads"],
        ["export", "heads", "-o", str(out / "heads.parquet")],
        ["report", "-o", str(out / "report.html")],
        ["plot", "heatmap", "tiny-bert", "-o", str(out / "map.svg")],
        ["pack", str(out / "all.headatlas")],
        ["verify"],
    ]
    writing = [
        ["rebuild"],
        ["remove", "tiny-bert"],
        ["derive", str(statistic)],
        ["derive", "--remove", "wide"],
        ["null", "--draws", "400"],
        ["unpack", str(out / "all.headatlas")],
    ]
    return reading, writing


def run(store: str, out: Path) -> list[str]:
    """What went wrong."""
    reading, writing = commands(out)
    wrong = []
    for command in reading:
        result = CliRunner().invoke(main, [*command, "--store", store])
        if result.exit_code != 0:
            wrong.append(f"{command}: {result.output} {result.exception!r}")
    for command in writing:
        result = CliRunner().invoke(main, [*command, "--store", store])
        if result.exit_code != 1 or "the store can only be read" not in result.stderr:
            wrong.append(f"{command}: {result.exit_code} {result.output} {result.exception!r}")
    return wrong


if __name__ == "__main__":
    found = run(sys.argv[1], Path(sys.argv[2]))
    print("\n".join(found))
    sys.exit(bool(found))
