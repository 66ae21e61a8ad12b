"""Ingest against the routes that load the whole model, in one run on the same checkpoint.

    python benchmarks/ingest_against_loading.py [--repeats 5] [--quick]

Needs models/SmolLM2-135M-Instruct.gguf (`make demo` fetches it), transformers, and for the
TransformerLens route its package; a route whose package is missing is left out and said so. The
routes take turns, so that a drifting machine slows all of them, and medians are compared. A first
round warms the libraries up; bytes are counted in a second one, with the checkpoint out of the page
cache; wall time and memory are those of the following rounds, with it in. Every route must find the
same number of strong heads.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

from measuring import ROOT, Run, medians, python, run, save

GGUF = ROOT / "models" / "SmolLM2-135M-Instruct.gguf"
HERE = Path(__file__).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def strong_heads(store: Path) -> int:
    """What the ingest just stored says."""
    query = "SELECT count(*) AS strong FROM heads WHERE closure >= 0.9"
    command = [python(), str(ROOT / "cli.py"), "sql", query, "--store", str(store), "--format", "csv"]
    return int(run(command).output.split()[-1])


def main() -> None:
    """Run every route in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two routes, once")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    if not GGUF.exists():
        raise SystemExit(f"{GGUF} is not there; make demo fetches it")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "SmolLM2-135M-Instruct"
        run([python(), str(HERE / "smollm2_directory.py"), str(GGUF), str(directory)])
        weights = directory / "model.safetensors"
        cli = [python(), str(ROOT / "cli.py"), "ingest"]
        routes = {
            "ingest, safetensors": ([*cli, str(directory)], weights),
            "ingest, GGUF": ([*cli, str(GGUF)], GGUF),
            "transformers and a loop": ([python(), str(HERE / "route_transformers.py"), str(directory)], weights),
            "transformers and a loop, GGUF": ([python(), str(HERE / "route_transformers.py"), str(GGUF)], GGUF),
        }
        if options.quick:
            routes = {name: routes[name] for name in ("ingest, safetensors", "transformers and a loop")}
        elif importlib.util.find_spec("transformer_lens"):
            routes["TransformerLens"] = ([python(), str(HERE / "route_transformerlens.py"), str(directory)], weights)
        else:
            print("TransformerLens is not installed: its route is left out")
        runs: dict[str, list[Run]] = {name: [] for name in routes}
        fetched: dict[str, int] = {}
        for repeat in range(repeats + 2):
            for name, (command, weights) in routes.items():
                store = Path(temporary) / f"{len(runs[name])}-{repeat}-{name}".replace(" ", "-")
                own = "cli.py" in command[1]
                cold = [weights] if repeat == 1 else []
                done = run([*command, "--store", str(store)] if own else command, cold, OFFLINE)
                strong = strong_heads(store) if own else int(done.output.split()[-1])
                assert strong == 13, f"{name} finds {strong} strong heads"
                if repeat == 1:
                    fetched[name] = done.fetched_bytes
                elif repeat:
                    runs[name].append(done)
        figures = {name: {**medians(done), "fetched_bytes": fetched[name]} for name, done in runs.items()}
    ours = figures["ingest, safetensors"]
    print(f"{'route':<30} {'wall s':>8} {'peak MiB':>9} {'fetched MB':>11}   ratio of ingest to it")
    for name, figure in figures.items():
        base = figures["ingest, GGUF"] if name.endswith("GGUF") else ours
        ratios = ", ".join(f"{base[key] / figure[key]:.2f}" for key in ("wall_seconds", "peak_mib", "fetched_bytes"))
        print(
            f"{name:<30} {figure['wall_seconds']:8.2f} {figure['peak_mib']:9.0f} "
            f"{figure['fetched_bytes'] / 1e6:11.1f}   {ratios}"
        )
    path = save("ingest_against_loading", {"repeats": repeats, "medians": figures})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
