"""Cleaning a store after crashes: what is unpublished goes, a bad catalogue is made again.

What is published is never touched, nor what a running command has staged.
"""

from __future__ import annotations

from collections.abc import Iterator

from stats.errors import StoreError
from store.atlas import AtlasStore
from store.integrity import Finding, finding_of, rebuild_from, sealed_units, verify_standing
from store.leftovers import leftovers


def repair(store: AtlasStore) -> Iterator[Finding]:
    """Mend what can be mended; yields what was done, and what is left as it is, under the write lock.

    The catalogue is made again from sealed arrays when it is missing or damaged. As long as it can tell what it
    names, only that is taken; otherwise everything that is sealed counts, and of two groups of one model the
    one sealed last. Damaged arrays are left alone, and so is a catalogue that is the last to have their rows.

    Raises:
        StoreError: the store cannot be written, or others do not stop writing to it.
    """
    with store.writing("repair again"), store.write_lock():
        found = list(verify_standing(store))
        damaged = [finding for finding in found if finding.kind == "arrays"]
        broken = [finding for finding in found if finding.kind == "catalogue"]
        yield from damaged
        if broken:
            yield from _mend_catalogue(store, broken, bool(damaged))
        try:
            models = store.models()
        except StoreError:
            return
        for left in list(leftovers(store, models, sealed_units(store))):
            told = finding_of(left)
            if left.running or (left.sealed and damaged):
                yield told
                continue
            left.drop()
            done = "thrown away" if left.unfinished else "deleted"
            yield Finding(left.model, left.where, f"{done}: {left.problem}", "repaired")


def _mend_catalogue(store: AtlasStore, broken: list[Finding], damaged: bool) -> Iterator[Finding]:
    sealed = sealed_units(store)
    where = str(store.catalogue_path)
    try:
        models = store.models() if store.catalogue_path.exists() else None
    except StoreError:
        models = None
    if models is not None and damaged:
        yield from broken
        problem = "kept: it is the last to have the rows of damaged arrays; replace or remove their models first"
        yield Finding("", where, problem, "catalogue")
        return
    if models is not None:
        named = {stored.array_group: {*stored.gain_hash, *stored.derivations} for stored in models.values()}
        sealed = {
            group: [unit for unit in units if unit in named[group]] for group, units in sealed.items() if group in named
        }
    left_out: list[Finding] = []
    count = rebuild_from(store, sealed, left_out.append)
    for finding in broken:
        yield Finding(finding.model, finding.where, f"mended: {finding.problem}", "repaired")
    yield Finding("", where, f"made again from the arrays of {count} models", "repaired")
