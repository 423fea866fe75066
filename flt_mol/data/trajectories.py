"""Relaxations that ASE wrote, as IS2RE records: initial structure, relaxed structure, target."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flt_mol.data.ase import frames_of, holds_structures
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.schema import OnError, ReadOptions, Record
from flt_mol.files import natural_key, readable

__all__ = ["TrajectoryDataset", "from_trajectories"]

_SAME_CELL = 1e-4  # Å: what text formats round off
_SHOWN = 5
_TABLES = (".csv", ".tsv", ".json")


def from_trajectories(
    paths: str | Path | Iterable[str | Path],
    *,
    references: Mapping[Any, float] | str | Path,
    fmax: float = 0.05,
    on_error: OnError = "raise",
) -> TrajectoryDataset:
    """IS2RE records out of relaxations: the first frame is the input, the last gives the target.

    The target is E(last) − reference, y_init is E(first) − reference where the first frame holds
    an energy, all as the frames' calculators found them. Positions, cell, tags and fixed atoms are
    the first frame's, relaxed positions the last one's. The sid is `info["sid"]` of the first
    frame, else the file's name without suffix, or its subfolder's name.

    Args:
        paths: files, or a folder of them, or one of subfolders with one trajectory each
            (``Cu111/relax.traj``); read in the order of the numbers in the names.
        references: energies of clean slab and gas-phase adsorbate together, eV: a mapping from
            sid, or name of the file or subfolder; a CSV or JSON table of such; the name under
            which each trajectory keeps its own in `info`; or "none" if energies are adsorption
            energies.
        fmax: eV/Å; a last frame with a larger force on a free atom is warned of.
        on_error: "raise", or "skip": skip such trajectories, and list them in `skipped`.

    Raises:
        ValueError: no trajectories; several in a subfolder; one that cannot be read, of a single
            frame, without energies or reference, or whose atoms or cell change; naming the file.

    Warns:
        UserWarning: last frames that are not relaxed; files passed over; repeated sids; defaults
            taken; each kind once.
    """
    table = _References(references)
    return TrajectoryDataset(paths, table, fmax, ReadOptions(on_error=on_error))


class TrajectoryDataset(StructuresDataset):
    """The records of :func:`from_trajectories`, kept in memory: two frames of each file."""

    def __init__(
        self,
        paths: str | Path | Iterable[str | Path],
        references: _References,
        fmax: float,
        options: ReadOptions,
    ) -> None:
        whole = isinstance(paths, str | Path)
        given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
        super().__init__(given[0] if whole else f"{len(given)} trajectories", options)
        self._found: list[tuple[Path, dict[str, Any]]] = []
        loose = []
        for path, name in self._trajectories(given):
            try:
                record, force = _relaxation(path, name, references)
            except ValueError as error:
                if options.on_error == "raise":
                    raise
                self.skipped.append(str(error))
                continue
            self._found.append((path, record))
            if force is not None and not force <= fmax:
                loose.append(f"{name} ({force:.3g})")
        if not self._found:
            reason = self.skipped[0] if self.skipped else "no trajectories in it"
            raise ValueError(f"{self.path}: every file is invalid; the first: {reason}")
        self.notes.add(self._doubts(loose, fmax))
        self._finish(len(self._found))

    def _records(self, rows: Sequence[int]) -> list[Record]:
        return [self._found[row][1] for row in rows]

    def _where(self, row: int) -> str:
        return str(self._found[row][0])

    def _trajectories(self, given: list[Path]) -> Iterator[tuple[Path, str]]:
        """Files and names: of a folder all in it, or if there is none one of each subfolder."""
        for path in given:
            if not path.is_dir():
                if not path.exists():
                    raise ValueError(f"{path} does not exist (looked in {path.absolute().parent})")
                yield path, path.stem
                continue
            inside = _files(path)
            others = [e.name for e in path.iterdir() if e not in inside and e.name[0] != "."]
            found = [(file, file.stem) for file in inside]
            if not inside:
                folders = [e for e in sorted(path.iterdir(), key=natural_key) if e.is_dir()]
                found = [(folder, folder.name) for folder in folders if _files(folder)]
                others = sorted({*others} - {name for _, name in found})
            if not found:
                raise ValueError(f"no trajectories in {path}, nor in its subfolders")
            if others:
                shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
                self.notes.add({f"others {path}": f"passed over, as no trajectories: {shown}"})
            yield from found

    def _doubts(self, loose: list[str], fmax: float) -> dict[str, str]:
        kinds: dict[str, str] = {}
        if loose:
            kinds["fmax"] = (
                f"the last frame is not relaxed, with a force beyond {fmax:g} eV/Å on a free "
                f"atom: {', '.join(loose[:_SHOWN])}{', …' if len(loose) > _SHOWN else ''}"
            )
        counts = Counter(str(record["sid"]) for _, record in self._found)
        repeated = [sid for sid, count in counts.items() if count > 1]
        if repeated:
            kinds["repeated sids"] = (
                f"several trajectories have one sid: {', '.join(repeated[:_SHOWN])}; rename them"
            )
        return kinds


def _files(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir(), key=natural_key)
    return [e for e in entries if e.name[0] != "." and e.is_file() and holds_structures(e)]


def _only(folder: Path) -> Path:
    """The one trajectory of a subfolder: of several files, that of several frames."""
    files = _files(folder)
    if len(files) > 1:
        files = [file for file in files if len(list(islice(frames_of(file), 2))) > 1] or files
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} holds {len(files)} trajectories, expected one: {names}")
    return files[0]


def _relaxation(
    path: Path, name: str, references: _References
) -> tuple[dict[str, Any], float | None]:
    """One trajectory as a record, and the largest force on a free atom in its last frame, eV/Å."""
    path = _only(path) if path.is_dir() else path
    first: dict[str, Any] | None = None
    final: dict[str, Any] = {}
    count = 0
    for final in frames_of(path):
        first = final if first is None else first
        count += 1
    if first is None or count < 2:
        raise ValueError(
            f"{path}: {count} frames, expected the initial and the relaxed structure at least"
        )
    first = {**first, "sid": name if first.get("sid") is None else first["sid"]}
    where = f"{path}, sid {first['sid']}"
    if not np.array_equal(first["atomic_numbers"], final["atomic_numbers"]):
        raise ValueError(
            f"{where}: the first frame has {first['natoms']} atoms, the last {final['natoms']}, or "
            "in another order; give one relaxation per file"
        )
    change = np.abs(first["cell"] - final["cell"]).max()
    if not change <= _SAME_CELL or not np.array_equal(first["pbc"], final["pbc"]):
        raise ValueError(f"{where}: the cell changes (by {change:.3g} Å); relax in a fixed cell")
    if final.get("calculator") is None:
        raise ValueError(
            f"{where}: the last frame holds no energy; write frames with their calculator's results"
        )
    own = {**final, **{field: value for field, value in first.items() if value is not None}}
    reference = references.of(own, where, (str(first["sid"]), path.name, name))
    initial = first.pop("calculator", None)
    record = {
        **first,
        "y_init": None if initial is None else float(initial) - reference,
        "y_relaxed": float(final["calculator"]) - reference,
        "pos_relaxed": final["pos"],
        "reference_energy": reference,
    }
    forces = final.get("forces")
    if forces is None or np.shape(forces) != np.shape(final["pos"]):
        return record, None
    free = np.asarray(forces)[~final["fixed"]]
    return record, float(np.linalg.norm(free, axis=1).max()) if len(free) else 0.0


class _References:
    """Reference energies, eV; see :func:`from_trajectories`."""

    def __init__(self, given: Mapping[Any, Any] | str | Path) -> None:
        self.key: str | None = None
        self.table: dict[str, float] = {}
        self.none = given == "none"
        self.source = "the mapping given"
        pairs: Iterable[tuple[Any, Any]] = ()
        if isinstance(given, Mapping):
            pairs = given.items()
        elif isinstance(given, Path) or Path(given).suffix.lower() in _TABLES:
            self.source, pairs = str(given), _read_table(Path(given))
        elif not self.none:
            self.key = given
        for name, value in pairs:
            energy = _energy(value, f"{self.source}: the reference energy of {name}")
            if self.table.setdefault(str(name), energy) != energy:
                raise ValueError(f"{self.source}: two reference energies of {name}: keep one")

    def of(self, record: Record, where: str, names: Sequence[str]) -> float:
        """The reference energy of one trajectory, by the first of its `names` that is known."""
        if self.none:
            return 0.0
        if self.key is not None:
            if record.get(self.key) is None:
                stored = ", ".join(name for name in record if record[name] is not None)
                raise ValueError(f"{where}: no reference energy {self.key}; stored are: {stored}")
            return _energy(record[self.key], f"{where}: {self.key}")
        for name in names:
            if name in self.table:
                return self.table[name]
        known = ", ".join(list(self.table)[:_SHOWN]) or "none"
        raise ValueError(
            f"{where}: no reference energy in {self.source} under {' or '.join(names)}; "
            f"there are: {known}"
        )


def _read_table(path: Path) -> list[tuple[Any, Any]]:
    """Names and energies of a CSV file with the columns sid and energy, or of JSON."""
    try:
        with readable(path):
            text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            rows = json.loads(text)
        else:
            lines = text.splitlines()
            delimiter = max(",;\t", key=lines[0].count) if lines else ","
            rows = list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))
        if isinstance(rows, Mapping):
            return list(rows.items())
        names = ("sid", "file", "name"), ("energy", "reference", "reference_energy")
        columns = [next(name for name in some if name in rows[0]) for some in names]
        return [(row[columns[0]], row[columns[1]]) for row in rows]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: reference energies cannot be read: {error}") from error
    except (StopIteration, IndexError, KeyError, TypeError):
        raise ValueError(f"{path}: expected the columns sid and energy") from None


def _energy(value: Any, what: str) -> float:
    try:
        energy = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        energy = math.nan
    if not math.isfinite(energy):
        raise ValueError(f"{what} is {value!r}, expected a finite energy in eV")
    return energy
