"""Fuzzing in one process: ``python -m tests.fuzzing.run --count 100000``.

Every input is a valid file with a few seeded changes, read as the commands read it. Whatever is raised that
is no error of the project, takes longer than ``--seconds`` or more memory than ``--memory`` is a finding:
the input is written to ``--findings`` under the names of its target and of what happened. With ``--atheris``
libFuzzer chooses the changes instead, guided by coverage of the readers.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType

from tests.fuzzing.targets import TARGETS, Seed, Target, lay_out, outcome

RELAID_AFTER = 500
"""Inputs after which a target's valid files are written again."""


class TooSlowError(BaseException):
    """An input took longer than it may."""


def too_slow(signum: int, frame: FrameType | None) -> None:
    raise TooSlowError


def place_of(scratch: Path, target: Target, number: int) -> Path:
    """Directory of one seed of a target."""
    return scratch / target.name / str(number)


def tried(target: Target, seed: Seed, place: Path, data: bytes, seconds: float) -> str:
    """``read``, ``refused``, or what went wrong: the exception and where it was raised."""
    (place / seed.hostile).write_bytes(data)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return outcome(target, place)
    except TooSlowError:
        frames = traceback.extract_tb(sys.exc_info()[2])
        return "slow-" + next((f.name for f in reversed(frames) if "/ingest/" in f.filename), "unknown")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/fuzzing/" not in frame.filename and "site-packages" not in frame.filename]
        at = own[-1] if own else frames[-1]
        return f"{type(error).__name__}-{Path(at.filename).stem}-{at.name}-{at.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(
    target: Target, count: int, rng: random.Random, scratch: Path, seconds: float, findings: Path | None = None
) -> Counter[str]:
    """Outcomes of that many inputs of one target."""
    seeds, outcomes = target.seeds(), Counter[str]()
    for number, seed in enumerate(seeds):
        lay_out(seed, place_of(scratch, target, number))
    for step in range(count):
        number = rng.randrange(len(seeds))
        seed, place = seeds[number], place_of(scratch, target, number)
        data = target.mutate(rng, seed.data)
        result = tried(target, seed, place, data, seconds)
        new = result not in outcomes
        outcomes[result] += 1
        if result not in ("read", "refused") and new and findings is not None:
            digest = hashlib.sha256(data).hexdigest()[:8]
            (findings / f"{target.name}.{number}.{result}.{digest}.{target.suffix}").write_bytes(data)
        (place / seed.hostile).write_bytes(seed.data)
        if step % RELAID_AFTER == RELAID_AFTER - 1:
            lay_out(seed, place)
    return outcomes


def main() -> None:
    """Fuzz every target, or the named ones, and print counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--memory", type=int, default=3 * 2**30, help="bytes that the process may grow by")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "headatlas-findings")
    parser.add_argument("--atheris", action="store_true")
    arguments = parser.parse_args()
    arguments.findings.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_slow)
    chosen = [TARGETS[name] for name in arguments.target or TARGETS]
    shares = sum(target.share for target in chosen)
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    scratch = Path(tempfile.mkdtemp(prefix="headatlas-fuzzing-", dir=base))
    try:
        if arguments.atheris:
            guided(chosen[0], scratch, arguments)
            return
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + arguments.memory, resource.RLIM_INFINITY))
        failed = False
        for target in chosen:
            started = time.perf_counter()
            count = round(arguments.count * target.share / shares)
            rng = random.Random(f"{arguments.seed} {target.name}")
            outcomes = fuzz(target, count, rng, scratch, arguments.seconds, arguments.findings)
            failed |= bool(set(outcomes) - {"read", "refused"})
            print(
                target.name, count, f"{time.perf_counter() - started:.0f} s", dict(outcomes.most_common()), flush=True
            )
        sys.exit(1 if failed else 0)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def guided(target: Target, scratch: Path, arguments: argparse.Namespace) -> None:
    """Fuzz one target with libFuzzer's own changes, guided by what they reach."""
    import atheris

    seed = target.seeds()[0]
    place = place_of(scratch, target, 0)
    lay_out(seed, place)
    start = scratch / "start"
    start.mkdir()
    (start / "valid").write_bytes(seed.data)
    atheris.instrument_all()

    def one(data: bytes) -> None:
        (place / seed.hostile).write_bytes(data)
        outcome(target, place)

    atheris.Setup(
        [
            sys.argv[0],
            f"-runs={arguments.count}",
            "-max_len=65536",
            f"-artifact_prefix={arguments.findings}/",
            str(start),
        ],
        one,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
