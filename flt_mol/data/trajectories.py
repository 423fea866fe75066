"""Relaxations that ASE wrote, as IS2RE records: initial structure, relaxed structure, target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.data.ase import frames_of, holds_structures, relaxation_name, what_changes
from flt_mol.data.opening import MemoryDataset
from flt_mol.data.schema import OnError, ReadOptions, Record, Tagger
from flt_mol.data.tables import finite, read_energies
from flt_mol.files import natural_key, some


def from_trajectories(
    paths: str | Path | Iterable[str | Path],
    *,
    references: Mapping[Any, float] | str | Path,
    fmax: float = 0.05,
    on_error: OnError = "raise",
    tag_slab: Tagger | None = None,
) -> MemoryDataset:
    """IS2RE records from relaxations: the first frame is the input, the last gives the target.

    The target is E(last) − reference, y_init is E(first) − reference where the first frame holds
    an energy, all as the frames' calculators found them. Positions, cell, tags and fixed atoms are
    the first frame's, relaxed positions the last one's. The sid is `info["sid"]` of the first
    frame, else X of ``X.traj`` and of ``X/relax.traj``; in subfolders, always that of its folder.

    Args:
        paths: files, or a folder of them, or one of subfolders with one trajectory each
            (``Cu111/relax.traj``); read in the order of the numbers in the names.
        references: energies of clean slab and gas-phase adsorbate together, eV: a mapping from
            sid, or name of the file (without suffix) or subfolder; a table with the columns sid
            and energy; the name under which each trajectory keeps its own in `info`; or "none" if
            energies are adsorption energies.
        fmax: eV/Å; a last frame with a larger force on a free atom is warned of.
        on_error: "raise", or "skip": skip such trajectories, and list them in `skipped`.
        tag_slab: sets tags, as of `flt_mol.data.open_dataset`.

    Raises:
        ValueError: no trajectories; several in a subfolder; one that cannot be read, of a single
            frame, without energies or reference, or whose atoms or cell change; naming the file.

    Warns:
        UserWarning: last frames that are not relaxed; files passed over; defaults taken.
    """
    whole = isinstance(paths, str | Path)
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    table = _reference_table(references)
    found: list[tuple[Path, Record]] = []
    skipped, loose, others = (list[str]() for _ in range(3))
    for path, name in [item for place in given for item in _trajectories(place, others)]:
        try:
            record, force = _relaxation(path, name, table)
        except ValueError as error:
            if on_error == "raise":
                raise
            skipped.append(str(error))
            continue
        found.append((path, record))
        if not force <= fmax:
            loose.append(f"{name} ({force:.3g})")
    if not found:
        first = skipped[0] if skipped else "no files"
        raise ValueError(f"{paths}: every file is invalid; the first: {first}")
    name = str(paths) if whole else f"{len(given)} trajectories"
    files, records = zip(*found, strict=True)
    options = ReadOptions(on_error=on_error, tag_slab=tag_slab)
    dataset = MemoryDataset(list(records), options, name=name, places=list(map(str, files)))
    dataset.skipped[:0] = skipped
    notes = {
        f"not relaxed, with a force beyond {fmax:g} eV/Å on a free atom": loose,
        "ignored, not trajectories": others,
    }
    dataset.notes.add({text: f"{text}: {some(names)}" for text, names in notes.items() if names})
    return dataset


def _trajectories(path: Path, others: list[str]) -> list[tuple[Path, str]]:
    """Files and names: of a folder all in it, or if there is none one of each subfolder.

    What else is in the folder is added to `others`.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist (looked in {path.absolute().parent})")
    if not path.is_dir():
        return [(path, relaxation_name(path))]
    entries = [e for e in sorted(path.iterdir(), key=natural_key) if e.name[0] != "."]
    files = [e for e in entries if e.is_file() and holds_structures(e)]
    found = [(file, relaxation_name(file)) for file in files]
    for folder in [e for e in entries if e.is_dir() and not files]:
        inside = [e for e in sorted(folder.iterdir()) if e.is_file() and holds_structures(e)]
        if len(inside) > 1:
            raise ValueError(f"{folder} holds several trajectories: list the files")
        found += [(file, folder.name) for file in inside]
    if not found:
        raise ValueError(f"no trajectories in {path}, nor in its subfolders")
    used = {place for file, _ in found for place in (file, file.parent)}
    others += [e.name for e in entries if e not in used]
    return found


def _relaxation(
    path: Path, name: str, references: Mapping[str, float] | str
) -> tuple[dict[str, Any], float]:
    """One trajectory as a record, and the largest force on a free atom in its last frame, eV/Å."""
    first: dict[str, Any] = {}
    final: dict[str, Any] = {}
    count = 0
    for count, final in enumerate(frames_of(path), 1):  # noqa: B007
        first = first or final
    if count < 2:
        raise ValueError(f"{path}: {count} frames, expected the initial and the relaxed structure")
    sid = name if first.get("sid") is None else first["sid"]
    where = f"{path}, sid {sid}"
    if text := what_changes(first, final):
        raise ValueError(f"{where}: the last frame has {text}")
    if final.get("calculator") is None:
        raise ValueError(f"{where}: the last frame holds no energy of a calculator")
    stored = {**final, **{field: value for field, value in first.items() if value is not None}}
    reference = _reference(references, stored, where, (str(sid), name))
    initial = first.get("calculator")
    record = {
        **{field: value for field, value in first.items() if field != "calculator"},
        "sid": sid,
        "y_init": None if initial is None else float(initial) - reference,
        "y_relaxed": float(final["calculator"]) - reference,
        "pos_relaxed": final["pos"],
        "reference_energy": reference,
    }
    forces = np.asarray(final.get("forces", np.zeros_like(final["pos"])))
    free = forces[~final["fixed"]]
    return record, float(np.linalg.norm(free, axis=1).max(initial=0.0))


def _reference_table(given: Mapping[Any, Any] | str | Path) -> Mapping[str, float] | str:
    """Name → eV; or the name of a key of `info`, or "none"."""
    if isinstance(given, Mapping):
        what = "references: the reference energy of"
        return {str(name): finite(value, f"{what} {name}") for name, value in given.items()}
    if isinstance(given, str) and not (Path(given).is_file() or given.lower().endswith(".csv")):
        return given
    return {sid: energy for (_, sid), energy in read_energies(given, ("energy",)).energies.items()}


def _reference(
    table: Mapping[str, float] | str, record: Record, where: str, names: Sequence[str]
) -> float:
    """The reference energy of one trajectory, by the first of its `names` that is known, eV."""
    if table == "none":
        return 0.0
    if isinstance(table, str):
        if record.get(table) is None:
            raise ValueError(f"{where}: no reference energy {table} among {', '.join(record)}")
        return finite(record[table], f"{where}: {table}")
    for name in names:
        if name in table:
            return table[name]
    under = " or ".join(dict.fromkeys(names))
    known = some(list(table))
    raise ValueError(f"{where}: no reference energy under {under}; there are: {known}")
