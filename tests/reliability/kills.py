"""Kill commands at random moments and see what is left of the store.

    python -m tests.reliability.kills --trials 200 --seed 0

Every trial copies a small store, runs a command in a fork of a warm process and kills it with SIGKILL, at a
random moment of its duration or at a random one of its calls to the file system. Then: the store opens;
nothing is damaged, and all that lies about is told as unpublished; every model is as it was before the command
or as it is after it. Half of the trials run ``verify --repair`` then, which must leave nothing to find and
change no model. The command is run again: the arrays must equal those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.forks import Ended, Fork, command, contents, import_everything

STATISTIC = """
from store.user_statistics import statistic

@statistic(meaning="largest share of a direction", values="0 to 1")
def leading_share(sigma):
    return sigma[:, 0] ** 2 / (sigma**2).sum(-1)
"""

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")


@dataclass(frozen=True)
class Case:
    """A command, the store it starts from, and how often it is tried in a hundred trials."""

    name: str
    start: str
    arguments: tuple[str, ...]
    weight: int
    again_may_fail: bool = False
    """Whether there may be nothing left to do for the command when it is run again."""


@dataclass(frozen=True)
class Known:
    """What an undisturbed run of a case takes and leaves."""

    case: Case
    seconds: float
    events: int
    before: dict[str, str]
    after: dict[str, str]


def cases(root: Path) -> list[Case]:
    """Every command that writes to a store."""
    store, deep, other = ("--store", "{store}"), str(root / "deep"), str(root / "other")
    found = [
        Case("ingest", "base", ("ingest", deep, *store, "--operator", "both"), 18),
        Case("ingest --replace", "base", ("ingest", other, *store, "--name", "kept", "--replace"), 14),
        Case("ingest --operator both later", "base", ("ingest", str(root / "kept"), *store, "--operator", "both"), 12),
        Case("ingest --workers 2", "base", ("ingest", deep, *store, "--workers", "2"), 2),
        Case("null", "base", ("null", *store, "--draws", "40"), 10),
        Case("capacity", "base", ("capacity", *store), 10),
        Case("derive", "base", ("derive", str(root / "mine.py"), *store), 8),
        Case("derive --remove", "full", ("derive", "--remove", "leading_share", *store), 6, True),
        Case("rebuild", "full", ("rebuild", *store), 8),
        Case("remove", "full", ("remove", "kept", *store), 6, True),
    ]
    if has_merge():
        found.append(Case("merge", "base", ("merge", str(root / "second"), *store), 8))
    return found


def has_merge() -> bool:
    """Whether this version merges stores."""
    import cli

    return "merge" in cli.main.commands


class Kills:
    """The trials, in a folder of their own."""

    def __init__(self, root: Path, tell: Callable[[str], None] = print) -> None:
        self.root = root
        self.tell = tell
        self.store = root / "trial"

    def fork(self, work: Callable[[], Any]) -> Fork:
        """Run something in a child that imports nothing any more."""
        return Fork(work, self.root / "printed")

    def done(self, work: Callable[[], Any]) -> Ended:
        """Run something to its end, which must be a good one."""
        ended = self.fork(work).wait()
        assert ended.status == 0, ended.printed
        return ended

    def prepare(self) -> None:
        """Make the checkpoints and the stores that cases start from."""
        from tests.checkpoints import bert, llama, save_safetensors

        save_safetensors(llama(layers=3, seed=1), self.root / "kept")
        save_safetensors(llama(layers=3, seed=2), self.root / "other")
        save_safetensors(llama(layers=6, seed=3), self.root / "deep")
        save_safetensors(bert(), self.root / "bert")
        (self.root / "mine.py").write_text(STATISTIC)
        for name, models in (("base", ("kept", "bert")), ("second", ("other",))):
            for model in models:
                self.done(command("ingest", str(self.root / model), "--store", str(self.root / name)))
        shutil.copytree(self.root / "base", self.root / "full")
        full = ("--store", str(self.root / "full"))
        self.done(command("derive", str(self.root / "mine.py"), *full))
        self.done(command("null", *full, "--draws", "40"))

    def work_of(self, case: Case) -> Callable[[], None]:
        """The case's command on the trial's store."""
        return command(*(text.replace("{store}", str(self.store)) for text in case.arguments))

    def start(self, case: Case) -> None:
        """A fresh copy of the store that a case starts from."""
        shutil.rmtree(self.store, ignore_errors=True)
        shutil.copytree(self.root / case.start, self.store)
        if case.name == "rebuild":
            (self.store / "catalog.duckdb").write_bytes(b"damaged")

    def know(self, case: Case) -> Known:
        """Run a case undisturbed."""
        self.start(case)
        whole = case.name != "rebuild"
        before = self.done(lambda: contents(self.store)).returned if whole else {}
        work = self.work_of(case)
        events = self.root / "events"

        def counted() -> None:
            count = 0

            def hook(event: str, _: Any) -> None:
                nonlocal count
                count += event in FILE_EVENTS

            sys.addaudithook(hook)
            try:
                work()
            finally:
                events.write_text(str(count))

        ended = self.done(counted)
        after = self.done(lambda: contents(self.store)).returned
        return Known(case, ended.seconds, int(events.read_text()), before, after)

    def trial(self, known: Known, seed: int) -> str:
        """Kill once; says how it was killed and what was left."""
        case, chance = known.case, random.Random(seed)
        self.start(case)
        if chance.random() < 0.5 and "--workers" not in case.arguments:
            event = chance.randrange(1, known.events + 1)
            child, how = self.fork(dying_at(event, self.work_of(case))), f"event {event} of {known.events}"
        else:
            delay = chance.uniform(0, known.seconds)
            child, how = self.fork(self.work_of(case)), f"{delay:.3f} of {known.seconds:.3f} s"
            time.sleep(delay)
            child.kill()
        ended = child.wait()
        assert child.descendants_end(), "a process that the killed one had started goes on"
        if ended.status not in (0, -signal.SIGKILL):
            raise AssertionError(f"ended with {ended.status}: {ended.printed}")
        left = self.done(lambda: self.look(known)).returned
        if chance.random() < 0.5:
            self.done(self.mend)
            how += ", repaired"
        again = self.fork(self.work_of(case)).wait()
        if again.status != 0 and not (case.again_may_fail and again.status == 1):
            raise AssertionError(f"again: {again.status}: {again.printed}")
        assert "Traceback" not in again.printed, again.printed
        assert self.done(self.mended).returned == known.after, "arrays differ from an undisturbed run"
        return f"{'killed' if ended.status else 'ended'} at {how}; left: {left or 'nothing'}"

    def look(self, known: Known) -> str:
        """Check the store as the kill left it; says what is unpublished."""
        from query import open_atlas
        from store.atlas import AtlasStore
        from store.integrity import verify

        store = AtlasStore.open(self.store)
        kinds = Counter(finding.kind for finding in verify(store))
        if known.case.name == "rebuild":
            assert not kinds["arrays"], kinds
            return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        wrong = {kind: count for kind, count in kinds.items() if kind not in ("leftover", "unfinished")}
        assert not wrong, [finding for finding in verify(store) if finding.kind in wrong]
        with open_atlas(self.store) as atlas:
            assert atlas.sql("SELECT count(*) FROM heads WHERE closure IS NOT NULL").item() > 0
        found = units_of(contents(self.store))
        before, after = units_of(known.before), units_of(known.after)
        for unit in before.keys() | after.keys() | found.keys():
            assert found.get(unit) in (before.get(unit), after.get(unit)), f"{unit} is neither as before nor as after"
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items())

    def mend(self) -> None:
        """Repair, and see that nothing is left to find."""
        from store.atlas import AtlasStore
        from store.integrity import verify
        from store.repair import repair

        store = AtlasStore.open(self.store)
        done = list(repair(store))
        assert all(finding.kind == "repaired" for finding in done), done
        left = list(verify(store))
        assert not left, left

    def mended(self) -> dict[str, str]:
        """Repair, and say what is stored."""
        self.mend()
        return contents(self.store)

    def run(self, trials: int, seed: int, without: tuple[str, ...] = ()) -> Counter[str]:
        """That many trials over all cases; counts what was left.

        Raises:
            AssertionError: a trial that broke a promise, with its seed.
        """
        self.prepare()
        chance = random.Random(seed)
        listed = [case for case in cases(self.root) if case.name not in without]
        known: dict[str, Known] = {}
        tally: Counter[str] = Counter()
        for number in range(trials):
            case = listed[number] if number < len(listed) else chance.choices(listed, [c.weight for c in listed])[0]
            if case.name not in known:
                known[case.name] = self.know(case)
            own = chance.randrange(2**32)
            try:
                told = self.trial(known[case.name], own)
            except AssertionError as error:
                kept = self.root / f"failed-{number}"
                shutil.copytree(self.store, kept, dirs_exist_ok=True)
                raise AssertionError(f"trial {number}, {case.name}, seed {own}, see {kept}: {error}") from error
            tally[case.name] += 1
            tally["left " + told.rpartition("left: ")[2]] += 1
            tally[told.partition(" ")[0]] += 1
            self.tell(f"{number + 1}: {case.name}: {told}")
        return tally


def units_of(arrays: dict[str, str]) -> dict[str, dict[str, str]]:
    """Checksums by model and unit."""
    found: dict[str, dict[str, str]] = {}
    for name, checksum in arrays.items():
        model, unit, place = name.split(":")
        found.setdefault(f"{model}:{unit}", {})[place] = checksum
    return found


def dying_at(event: int, work: Callable[[], None]) -> Callable[[], None]:
    """The same work, which kills itself just before its n-th call to the file system."""

    def run() -> None:
        left = event

        def hook(name: str, _: Any) -> None:
            nonlocal left
            if name in FILE_EVENTS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    return run


def main() -> None:
    """Run trials and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="Where to work.  [default: a temporary one]")
    parser.add_argument("--without", action="append", default=[], help="Leave a command out.")
    given = parser.parse_args()
    import_everything()
    started = time.monotonic()
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    tally = Kills(folder).run(given.trials, given.seed, tuple(given.without))
    for name, count in sorted(tally.items()):
        print(f"{count:5} {name}")
    print(f"{given.trials} trials kept every promise, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
