"""Size of a report and how fast a browser shows it: medians of several loads in headless Chromium.

python benchmarks/report_size.py [STORE]

Without a STORE, that of benchmarks/panel_derivations.py is made: nine random checkpoints, 7,304 heads. Needs
chromium on the PATH, and playwright.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measuring import ROOT, run, save
from panel_derivations import HEADATLAS, ingest

LOADS = 7
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMES = """() => {
const entry = performance.getEntriesByType("navigation")[0];
const paint = performance.getEntriesByType("paint").find((e) => e.name === "first-contentful-paint");
return { first_paint_ms: paint.startTime, dom_ms: entry.domContentLoadedEventEnd, load_ms: entry.loadEventEnd };
}"""


def panel_store(folder: Path) -> Path:
    """The nine checkpoints with nulls and capacities."""
    store = folder / "atlas"
    ingest(store)
    for command in (["null", "--draws", "1000"], ["capacity"]):
        run([*HEADATLAS, *command, "--store", str(store)])
    return store


def shown(page: Path, profile: Path) -> dict[str, float]:
    """Medians over loads: paint and load, the charts drawn, and a first card with its arrays unpacked."""
    from playwright.sync_api import sync_playwright

    loads = []
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=shutil.which("chromium"), args=ARGUMENTS, viewport={"width": 1440, "height": 1000}
        )
        for _ in range(LOADS):
            tab = context.new_page()
            started = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]")
            ready = time.perf_counter()
            times = tab.evaluate(TIMES)
            asked = time.perf_counter()
            tab.locator("#heads button.link").first.evaluate("button => button.click()")
            tab.wait_for_selector("#pairs")
            card = time.perf_counter() - asked
            memory = tab.evaluate("performance.memory.usedJSHeapSize") / 2**20
            charts = 1000 * (ready - started)
            loads.append({**times, "charts_ms": charts, "first_card_ms": 1000 * card, "heap_mib": memory})
            tab.close()
        context.close()
    return {name: round(median(load[name] for load in loads), 1) for name in loads[0]}


def sizes(text: str) -> dict[str, int]:
    """Bytes of the page by what they are for."""
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)
    (heads,) = [body for tag, body in scripts if 'id="data-heads"' in tag]
    arrays = [body for tag, body in scripts if 'id="data-' in tag and body != heads]
    (library,) = [body for tag, body in scripts if not tag]
    return {
        "page_bytes": len(text.encode()),
        "library_bytes": len(library.encode()),
        "heads_bytes": len(heads),
        "spectra_and_pairs_bytes": sum(map(len, arrays)),
    }


def main() -> None:
    """Measure and save."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(sys.argv[1]) if len(sys.argv) > 1 else panel_store(Path(folder))
        page = Path(folder) / "report.html"
        made = run([*HEADATLAS, "report", "--store", str(store), "-o", str(page)])
        figures: dict[str, float] = {"making_seconds": made.wall_seconds, "making_peak_mib": made.peak_mib}
        figures |= sizes(page.read_text(encoding="utf-8"))
        figures |= shown(page, Path(folder) / "profile")
    path = save("report_size", {"loads": LOADS, **figures})
    print(path.relative_to(ROOT), path.read_text(encoding="utf-8"), sep="\n")


if __name__ == "__main__":
    main()
