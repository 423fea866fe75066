"""Relaxations that ASE wrote, as IS2RE records: initial structure, relaxed structure, target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from flt_mol.data.ase.files import records_of
from flt_mol.data.ase.folders import Found, repeated_sids, search
from flt_mol.data.ase.references import References
from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.options import OnError, ReadOptions
from flt_mol.data.slabs.numbered import layer_note

__all__ = ["TrajectoryDataset", "from_trajectories"]

_SAME_CELL = 1e-4  # Å: what text formats round off
_SHOWN = 5


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
        references: energies of clean slab and gas-phase adsorbate together, eV, as
            :class:`flt_mol.data.ase.references.References` takes them: by sid, or name of the file
            or subfolder, in a CSV or JSON table too; by a name in `info`; "none" if energies are
            adsorption energies.
        fmax: eV/Å; a last frame with a larger force on a free atom is warned of.
        on_error: "raise", or "skip": leave such trajectories out, and list them in `skipped`.

    Raises:
        ValueError: no trajectories; several in a subfolder; one that cannot be read, of a single
            frame, without energies or reference, or whose atoms or cell change; naming the file.

    Warns:
        UserWarning: last frames that are not relaxed, or were not written whole; files passed
            over; defaults taken; each kind once.
    """
    return TrajectoryDataset(paths, References(references), fmax, ReadOptions(on_error=on_error))


class TrajectoryDataset(StructuresDataset):
    """The records of :func:`from_trajectories`, kept in memory: two frames of each file.

    Args:
        paths: files, or a folder of them.
        references: reference energies.
        fmax: eV/Å, beyond which a last frame is warned of.
        options: how records are read.
        notes: where warnings go.
    """

    def __init__(
        self,
        paths: str | Path | Iterable[str | Path],
        references: References,
        fmax: float = 0.05,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
    ) -> None:
        whole = isinstance(paths, str | Path)
        given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
        name = given[0] if whole else f"{len(given)} trajectories"
        super().__init__(name, options, notes=notes)
        self.references = references
        self._records: list[dict[str, Any]] = []
        self._found: list[Found] = []
        kinds: dict[str, str] = {}
        loose = []
        for found in self._trajectories(given):
            try:
                if found.reason is not None:
                    raise ValueError(found.reason)
                record, force = read_relaxation(found.path, references, kinds, found.name)
            except ValueError as error:
                if self.options.on_error == "raise":
                    raise
                self.skipped.append(str(error))
                continue
            if force is not None and not force <= fmax:
                loose.append(f"{found.name or found.path.name} ({force:.3g})")
            self._records.append(record)
            self._found.append(found)
        self._finish(kinds, loose, fmax)

    def __len__(self) -> int:
        return len(self._records)

    def record(self, index: int) -> Mapping[str, Any]:
        """The fields of system `index` by OC20's names."""
        return self._records[index]

    def where(self, index: int) -> str:
        """The trajectory's file, for errors."""
        return str(self._found[index].path)

    def default_sid(self, index: int) -> int | str:
        """The file's name without suffix, or its subfolder's."""
        found = self._found[index]
        return found.path.stem if found.name is None else found.name

    def _trajectories(self, given: list[Path]) -> list[Found]:
        trajectories: list[Found] = []
        for path in given:
            if not path.is_dir():
                trajectories.append(Found(path))
                continue
            inside, others = search(path)
            if inside and others:
                shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
                self.notes.add({f"others {path}": f"passed over, as no trajectories: {shown}"})
            trajectories += inside
        if not trajectories:
            searched = ", nor in its subfolders (not those inside them)" if given else ""
            raise ValueError(f"no trajectories in {self.path}{searched}")
        return trajectories

    def _finish(self, kinds: dict[str, str], loose: list[str], fmax: float) -> None:
        if not self._records:
            raise ValueError(f"{self.path}: every file is bad; the first: {self.skipped[0]}")
        if loose:
            more = f" and {len(loose) - _SHOWN} more" if len(loose) > _SHOWN else ""
            kinds["fmax"] = (
                f"the last frame is not relaxed, with a force beyond {fmax:g} eV/Å on a free "
                f"atom: {', '.join(loose[:_SHOWN])}{more}"
            )
        for record in self._records:
            kinds |= layer_note(record)
        kinds |= repeated_sids(self._found, [record["sid"] for record in self._records])
        self.notes.add(kinds)
        self._check()

    def _keep(self, indices: list[int]) -> None:
        self._records = [self._records[i] for i in indices]
        self._found = [self._found[i] for i in indices]


def read_relaxation(
    path: Path,
    references: References,
    notes: dict[str, str] | None = None,
    name: str | None = None,
) -> tuple[dict[str, Any], float | None]:
    """One trajectory as a record, and the largest force on a free atom in its last frame, eV/Å.

    Frames between the first and the last are read and forgotten.

    Args:
        path: the file.
        references: reference energies.
        notes: filled with doubts about the file, kind → text.
        name: what the trajectory is called, if not by its file.

    Raises:
        ValueError: as :func:`from_trajectories`.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist (looked in {path.absolute().parent})")
    first: dict[str, Any] | None = None
    frame: Mapping[str, Any] = {}
    count = 0
    for frame in records_of(path, notes):
        first = dict(frame) if first is None else first
        count += 1
    if first is None or count < 2:
        raise ValueError(
            f"{path}: {count} frames, expected the initial and the relaxed structure at least"
        )
    final = dict(frame)
    if first.get("sid") is None:
        first["sid"] = path.stem if name is None else name
    _compare(first, final, path)
    own = {**final, **{field: value for field, value in first.items() if value is not None}}
    _need_energy(final, own["sid"], path)
    return _relaxation(first, final, references.of(own, path, name)), _largest_force(final)


def _compare(first: Mapping[str, Any], final: Mapping[str, Any], path: Path) -> None:
    """Refuse a trajectory that is not one system in one cell."""

    def fail(reason: str) -> NoReturn:
        raise ValueError(f"{path}, sid {first['sid']}: {reason}")

    if not np.array_equal(first["atomic_numbers"], final["atomic_numbers"]):
        fail(
            f"the first frame has {first['natoms']} atoms, the last {final['natoms']}, or in "
            "another order; give one relaxation per file"
        )
    change = np.abs(first["cell"] - final["cell"]).max()
    if not change <= _SAME_CELL or not np.array_equal(first["pbc"], final["pbc"]):
        fail(f"the cell changes between the frames (by {change:.3g} Å); relax in a fixed cell")


def _need_energy(final: Mapping[str, Any], sid: Any, path: Path) -> None:
    if final.get("calculator") is None:
        raise ValueError(
            f"{path}, sid {sid}: the last frame holds no energy; write frames with their "
            "calculator's results"
        )


def _relaxation(
    first: Mapping[str, Any], final: Mapping[str, Any], reference: float
) -> dict[str, Any]:
    gone = ("calculator", "energy", "free_energy")  # total energies, of the first frame only
    kept = {name: value for name, value in first.items() if name not in gone}
    initial = first.get("calculator")
    return {
        **kept,
        "y_init": None if initial is None else float(initial) - reference,
        "y_relaxed": float(final["calculator"]) - reference,
        "pos_relaxed": final["pos"],
        "reference_energy": reference,
    }


def _largest_force(record: Mapping[str, Any]) -> float | None:
    """On atoms that are not held, eV/Å; None where no forces are stored."""
    forces = record.get("forces")
    if forces is None or np.shape(forces) != np.shape(record["pos"]):
        return None
    free = np.asarray(forces)[~record["fixed"]]
    return float(np.linalg.norm(free, axis=1).max()) if len(free) else 0.0
