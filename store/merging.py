"""Taking sealed models of another place into a store: as they are, every file checked on the way.

A model is published as ingest does it, its arrays by a rename, its manifests, its catalogue rows, so that it
is there as a whole or not at all. What is refused is refused for all models before anything is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from stats.errors import StoreError, nearest
from store.arrays import attributes_of
from store.atlas import USER_KIND, AtlasStore, StoredModel, array_group_name
from store.integrity import publish_rows, seal, sealed_units
from store.leftovers import leftovers, model_of
from store.offered import NODE, OfferedModel, OfferedUnit, Place, Seal, checked_pieces, damaged
from store.whole_files import written_whole

Action = Literal["added", "extended", "replaced", "unchanged"]
NUMBERS = ("compute_dtype", "rank_cut")
"""Attributes of an operator that what is derived from it depends on."""

DECLARED = ("sql_type", "long_name", "values", "formula", "source")
"""Attributes of an array by which a user's statistic says what it is."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of one model: its name here and there, what was done, the units taken, and what was left."""

    model: str
    source: str
    action: Action
    units: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Taking:
    """What is going to be done with one model."""

    offered: OfferedModel
    model: str
    action: Action
    units: tuple[str, ...]
    notes: tuple[str, ...]
    stored: StoredModel | None


def merge(
    store: AtlasStore,
    place: Place,
    models: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    *,
    replace_existing: bool = False,
) -> Iterator[Merged]:
    """Take models of another place into a store, one after the other.

    The same name and content is left as it is, but gets the operators and derivations that it lacks.

    Args:
        store: where to.
        place: where from.
        models: names there; all where none is given.
        renames: names here by names there, where they differ.
        without: statistics of a user's own that are left there.
        replace_existing: whether models of other content under the same names are replaced.

    Raises:
        StoreError: names that are not there, names taken by other content, statistics that are declared in
            another way, anything damaged, or a store that cannot be written. Damage is found before the
            model that has it is published.
    """
    store.check_writable()
    takings = _planned(store, place, models, renames or {}, without, replace_existing)
    for taking in takings:
        if taking.units:
            with store.writing("merge again"):
                _take(store, place, taking)
        yield Merged(taking.model, taking.offered.model, taking.action, taking.units, taking.notes)
    _drop_left(store, {taking.model for taking in takings})


def merge_questions(store: AtlasStore, place: Place) -> tuple[list[str], list[str]]:
    """Take the questions of the other store's own; returns file names taken, and those that differ here."""
    taken, differing = [], []
    folder = store.root / "queries"
    for name, text in place.questions().items():
        path = folder / name
        if path.is_file():
            if path.read_bytes() != text:
                differing.append(name)
            continue
        with store.writing("merge again"):
            folder.mkdir(exist_ok=True)
            with written_whole(path) as partial:
                partial.write_bytes(text)
        taken.append(name)
    return taken, differing


def _planned(
    store: AtlasStore,
    place: Place,
    models: Sequence[str],
    renames: Mapping[str, str],
    without: Sequence[str],
    replace_existing: bool,
) -> list[_Taking]:
    there = place.models()
    for name in (*models, *renames):
        if name not in there:
            raise StoreError(
                f"no model named {name!r}",
                where=place.where,
                expected="one of " + (", ".join(there) or "none: nothing is there"),
                found=name,
                remedy=nearest(name, there),
            )
    chosen = list(dict.fromkeys((*models, *renames))) if models else list(there)
    names = {name: renames.get(name, name) for name in chosen}
    _check_names(place, names)
    here = store.models()
    takings, clashes = [], []
    for name, called in names.items():
        offered, stored = there[name], here.get(called)
        units = {unit: found for unit, found in offered.units.items() if _user_statistic(found) not in without}
        if stored is None:
            takings.append(_Taking(offered, called, "added", tuple(units), (), None))
        elif _same_content(offered, stored):
            lacking, notes = _lacking(store, units, stored)
            action: Action = "extended" if lacking else "unchanged"
            takings.append(_Taking(offered, called, action, lacking, notes, stored))
        elif replace_existing:
            takings.append(_Taking(offered, called, "replaced", tuple(units), (), stored))
        else:
            clashes.append(
                f"{called}: content {str(offered.facts['content_hash'])[:12]} there, {stored.content_hash[:12]} here"
                + (" (values and outputs are the same)" if _same_values(offered, stored) else "")
            )
    if clashes:
        raise StoreError(
            "the store has other content under the same names",
            where=f"{place.where} into {store.root}",
            expected="names that are free here, or the same content",
            found="; ".join(clashes),
            remedy="give each another name with --rename OLD=NEW, or replace those here with --replace; "
            "nothing was changed",
        )
    _check_statistics(store, place, here, takings)
    return takings


def _check_names(place: Place, names: Mapping[str, str]) -> None:
    unfit = [name for name in names.values() if not name.strip() or not name.isprintable()]
    twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
    if unfit or twice:
        raise StoreError(
            "names that models cannot have" if unfit else "two models would have the same name",
            where=place.where,
            expected="a printable name for each" if unfit else "another name for each",
            found=", ".join(repr(name[:80]) for name in unfit or twice),
            remedy="name them with --rename OLD=NEW",
        )


def _same_values(offered: OfferedModel, stored: StoredModel) -> bool:
    return bool(offered.facts["content_hash"] == stored.content_hash)


def _same_content(offered: OfferedModel, stored: StoredModel) -> bool:
    """Whether weights and, where both are known, folded gains are the same."""
    gains = {name: unit.attributes.get("gain_hash") for name, unit in offered.operators.items()}
    both = [name for name in gains if gains[name] is not None and stored.gain_hash.get(name) is not None]
    same = _same_values(offered, stored) and offered.facts["qk_hash"] == stored.qk_hash
    return same and all(gains[name] == stored.gain_hash[name] for name in both)


def _lacking(
    store: AtlasStore, units: Mapping[str, OfferedUnit], stored: StoredModel
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Units that a stored model of the same content lacks, and why others are left."""
    lacking = [name for name, unit in units.items() if unit.derivation is None and name not in stored.gain_hash]
    kept = {(operator, made.kind): made for operator, made in stored.derivations.values()}
    notes = []
    for name, unit in units.items():
        if unit.derivation is None:
            continue
        operator, made = unit.derivation
        own = kept.get((operator, made.kind))
        if own is not None:
            if not own.answers(made):
                notes.append(f"{made.kind} of {operator} is kept as it is here; the other has other draws or more")
        elif operator in lacking:
            lacking.append(name)
        elif operator in stored.gain_hash:
            here = attributes_of(store.arrays_path / stored.array_group / operator)
            if any(here.get(fact) != units[operator].attributes.get(fact) for fact in NUMBERS):
                notes.append(f"{made.kind} of {operator} is left: it was made from numbers of another precision")
            else:
                lacking.append(name)
    return tuple(lacking), tuple(notes)


def _user_statistic(unit: OfferedUnit) -> str | None:
    """Name of the user's statistic that a unit holds."""
    if unit.derivation is None or not unit.derivation[1].kind.startswith(USER_KIND):
        return None
    return unit.derivation[1].kind.removeprefix(USER_KIND)


def _check_statistics(
    store: AtlasStore, place: Place, here: Mapping[str, StoredModel], takings: Sequence[_Taking]
) -> None:
    """Refuse statistics of one name that are not declared alike: they would share a column."""
    declared: dict[str, set[str]] = {}
    for stored in here.values():
        for unit, (_, made) in stored.derivations.items():
            if made.kind.startswith(USER_KIND):
                name = made.kind.removeprefix(USER_KIND)
                folder = store.arrays_path / stored.array_group / unit
                stack = next(path for path in sorted(folder.iterdir()) if path.is_dir())
                declared.setdefault(name, set()).add(_declaration(attributes_of(stack / name)))
    for taking in takings:
        for unit in taking.units:
            own = _user_statistic(taking.offered.units[unit])
            if own is not None:
                declared.setdefault(own, set()).add(_offered_declaration(place, taking.offered, unit, own))
    differing = sorted(name for name, ways in declared.items() if len(ways) > 1)
    if differing:
        raise StoreError(
            "statistics of the same name are declared in different ways",
            where=f"{place.where} into {store.root}",
            found=", ".join(differing),
            remedy="leave them there with --without NAME, or remove them on one side with headatlas derive --remove; "
            "nothing was changed",
        )


def _offered_declaration(place: Place, offered: OfferedModel, unit: str, name: str) -> str:
    files = offered.units[unit].files
    path = next((path for path in sorted(files) if path.endswith(f"/{name}/{NODE}")), "")
    if not path:
        raise StoreError("a statistic without its array", where=f"{place.where}, {offered.model}", found=name)
    full = f"arrays.zarr/{offered.group}/{path}"
    with place.open(full) as stream:
        return _declaration(json.loads(b"".join(checked_pieces(stream, files[path], place.where, full)))["attributes"])


def _declaration(attributes: Mapping[str, Any]) -> str:
    return json.dumps([attributes.get(name) for name in DECLARED])


def _take(store: AtlasStore, place: Place, taking: _Taking) -> None:
    """Copy the units of a model into staging and publish them."""
    offered = taking.offered
    with store.staging() as staging:
        for unit in taking.units:
            for path, sealed in offered.units[unit].files.items():
                _copy(place, f"arrays.zarr/{offered.group}/{path}", sealed, staging / path)
        if taking.model != offered.model:
            _rename(staging / NODE, taking.model)
        with store.write_lock():
            _check_unchanged(store, taking)
            if taking.action == "extended" and taking.stored is not None:
                _publish_units(store, taking, staging, taking.stored.array_group)
            else:
                _publish_model(store, taking, staging)


def _check_unchanged(store: AtlasStore, taking: _Taking) -> None:
    if store.models().get(taking.model) != taking.stored:
        raise StoreError(
            f"another process has just changed {taking.model!r}",
            where=str(store.root),
            remedy="merge again",
        )


def _publish_model(store: AtlasStore, taking: _Taking, staging: Path) -> None:
    offered, model = taking.offered, taking.model
    group = offered.group
    if model != offered.model or (store.arrays_path / group).exists():
        group = array_group_name(model, datetime.now(UTC), str(offered.facts["content_hash"]))
    with store.withdrawn_on_failure(model, group, taking.units):
        staging.replace(store.arrays_path / group)
        for unit in taking.units:
            seal(store, group, unit)
        publish_rows(store, model, group)
    if taking.stored is not None:
        store.drop_group(taking.stored.array_group)


def _publish_units(store: AtlasStore, taking: _Taking, staging: Path, group: str) -> None:
    with store.withdrawn_on_failure(taking.model, group, taking.units):
        for unit in taking.units:
            store.drop_unit(group, unit)
            (staging / unit).replace(store.arrays_path / group / unit)
        for unit in taking.units:
            seal(store, group, unit)
        publish_rows(store, taking.model, group)


def _drop_left(store: AtlasStore, models: set[str]) -> None:
    """Take away what earlier commands left of these models when they ended early.

    Under the lock, arrays that no catalogue row names are nobody's.
    """
    with store.write_lock():
        for left in leftovers(store, store.models(), sealed_units(store)):
            arrays = left.paths[-1].parent == store.arrays_path
            if not (left.running or left.unfinished) and (
                left.model in models or (arrays and model_of(left.paths[-1]) in models)
            ):
                left.drop()


def _copy(place: Place, name: str, sealed: Seal, target: Path) -> None:
    """Copy one file, checked on the way."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        stream = place.open(name)
    except FileNotFoundError as error:
        raise damaged(place.where, name, "file is missing") from error
    with stream as opened, target.open("wb") as copy:
        for piece in checked_pieces(opened, sealed, place.where, name):
            copy.write(piece)


def _rename(path: Path, model: str) -> None:
    """Give a model's attributes another name."""
    node = json.loads(path.read_bytes())
    node["attributes"]["model"] = model
    with written_whole(path) as partial:
        partial.write_text(json.dumps(node, indent=2), encoding="utf-8")
