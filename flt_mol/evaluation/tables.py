"""Predictions in files compared with their targets."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flt_mol.data import open_dataset
from flt_mol.data.recipes import find_recipe
from flt_mol.data.tables import EnergyTable, Key, named, read_energies
from flt_mol.evaluation.splits import SplitResult
from flt_mol.files import some
from flt_mol.prediction.energies import energies_of

_TARGET = ("target", "y_relaxed", "energy")
_TABLES = (".csv", ".tsv", ".txt", ".json", ".npz", ".gz")


def score_files(
    predictions: str | Path,
    targets: str | Path | None = None,
    splits: Sequence[str] | None = None,
    *,
    common_ids: bool = False,
) -> dict[str, SplitResult]:
    """Compare the predictions in one file with the targets in another, without any model.

    Systems are matched by sid, and by split where both files have it.

    Args:
        predictions: table of sid and energy (eV), with a column split or not; see `read_energies`.
        targets: table of sid and target, y_relaxed or energy (the first of these that is there);
            or structures that hold them, as `flt_mol.open_dataset` takes them; or a data
            set, of which the splits that are named here or in `predictions` are taken. None takes
            the column target of `predictions`, as `flt-mol evaluate` writes it.
        splits: only these.
        common_ids: compare only the ids that both have; the others are counted in a warning.

    Returns:
        {split: result}, systems in the order of `targets`; without a column split in either, the
        one split is called after the file of targets.

    Raises:
        ValueError: a file that cannot be read, missing or surplus ids, or an id in two splits of
            which only one file tells them apart, naming file and sid.

    Warns:
        UserWarning: repeated lines that were dropped, ids that are not common, and how many.
    """
    predicted = read_energies(predictions)
    if targets is None:
        wanted = read_energies(predictions, ("target",))
    elif Path(targets).suffix.lower() in _TABLES:
        same = Path(targets).resolve() == predicted.path.resolve()
        wanted = read_energies(targets, _TARGET[:2] if same else _TARGET)
    else:
        wanted = _stored_targets(targets, splits or predicted.splits)
    known = dict.fromkeys([*predicted.splits, *wanted.splits])
    for split in splits or ():
        if split not in known:
            there = ", ".join(known) or "none, without a column split"
            raise ValueError(f"{predicted.path}: no split '{split}'; there are: {there}")
    both = bool(predicted.splits and wanted.splits)
    ours, theirs = (_by_id(table, both, splits or ()) for table in (predicted, wanted))
    missing = [named(theirs[key]) for key in theirs if key not in ours]
    surplus = [named(ours[key]) for key in ours if key not in theirs]
    theirs = {key: theirs[key] for key in theirs if key in ours or not common_ids}
    where = f"{predicted.path} against {wanted.path}"
    if common_ids and theirs and (missing or surplus):
        text = f"{len(missing):,} targets and {len(surplus):,} predictions are without the other"
        warnings.warn(f"{where}: {text}", stacklevel=2)
        missing = surplus = []
    hint = "choose splits with --split, or --common-ids for those of both"
    if both and not {*predicted.splits} & {*wanted.splits}:
        hint = f"splits are {', '.join(predicted.splits)} against {', '.join(wanted.splits)}"
    for found, what in ((missing, "no prediction"), (surplus, "no target")):
        if found:
            raise ValueError(f"{where}: {what} for sid {some(found)}; {hint}")
    ids: dict[str, list[Key]] = {}
    file = wanted.path.parent if wanted.path.name == "data.lmdb" else wanted.path
    for key in theirs:
        name = theirs[key][0] or ours[key][0] or file.name.partition(".")[0]
        ids.setdefault(name, []).append(key)
    return {
        split: SplitResult(
            sid=tuple(sid for _, sid in keys),
            prediction=np.array([predicted.energies[ours[key]] for key in keys]),
            target=np.array([wanted.energies[theirs[key]] for key in keys]),
            path=str(predicted.path),
        )
        for split, keys in ids.items()
    }


def _stored_targets(source: str | Path, splits: Sequence[str]) -> EnergyTable:
    found = find_recipe(source)
    if found is not None and not splits:
        raise ValueError(f"{source}: choose its splits with --split: {', '.join(found.splits)}")
    opened = {split: found.open(split, require_energy=True) for split in splits} if found else {}
    energies, places = dict[Key, float](), dict[Key, str]()
    for split, dataset in (opened or {"": open_dataset(source, require_energy=True)}).items():
        for i, system in enumerate(dataset):
            key = split, str(system.sid[0])
            energy = float(energies_of(system.energy, system)[0])
            if energies.setdefault(key, energy) != energy:
                where = f"{dataset.where(i)}, sid {named(key)}: the target is {energy!r}"
                raise ValueError(f"{where}, in {places[key]} {energies[key]!r}")
            places.setdefault(key, dataset.where(i))
    return EnergyTable(Path(source), energies)


def _by_id(table: EnergyTable, with_split: bool, splits: Sequence[str]) -> dict[Key, Key]:
    """{id: key} of some splits, ids with or without split; no two keys are the same id."""
    keys = [key for key in table.energies if not (splits and key[0]) or key[0] in splits]
    found = {key if with_split else ("", key[1]): key for key in keys}
    if len(found) < len(keys):
        ((sid, _),) = Counter(sid for _, sid in keys).most_common(1)
        text = f"{table.path}: sid {sid} is in several splits"
        raise ValueError(f"{text}, and the other file has no column split")
    return found
