"""ASE atoms and the files that ASE reads."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flt_mol.data.ase.files import IncompleteError, MutableRecord, records_of
from flt_mol.data.ase.records import atoms_record
from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.oc20 import to_structures
from flt_mol.data.options import ReadOptions
from flt_mol.data.slabs.numbered import layer_note
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["AseDataset", "from_ase", "to_ase"]


def from_ase(
    atoms: Atoms,
    sid: int | str | None = None,
    *,
    ignore_energy: bool = False,
    notes: MutableMapping[str, str] | None = None,
) -> Structures:
    """ASE atoms as a batch of B = 1.

    Tags are those of the atoms (0 below the surface, 1 surface, 2 adsorbate); fixed are the atoms
    that `FixAtoms`, or `FixCartesian` and `FixScaled` in all three directions, hold. The energy of
    a calculator is never taken for the target: only `atoms.info["y_relaxed"]` (or
    "energy_relaxed") is, an adsorption energy in eV; likewise "y_init". Relaxed positions are
    those of `atoms.arrays["pos_relaxed"]`.

    Args:
        atoms: the structure, with cell and pbc.
        sid: its name; None takes `atoms.info["sid"]`, else 0.
        ignore_energy: targets and relaxed positions are not read, bad or good.
        notes: filled with the defaults taken (kind → text), such as all tags 0; no warning is
            issued here.

    Raises:
        ValueError: no atoms, positions not finite, tags outside 0 to 2, a cell singular along a
            periodic direction, a y_relaxed that is no finite number.

    Example:
        >>> from ase.build import molecule
        >>> from_ase(molecule("H2O"), sid="water")
        Structures(1 systems, 3 atoms)
    """
    try:
        record = atoms_record(atoms)
    except ValueError as error:
        raise ValueError(f"ASE atoms, sid {atoms.info.get('sid', sid or 0)}: {error}") from error
    if sid is not None or record["sid"] is None:
        record["sid"] = 0 if sid is None else sid
    if notes is not None:
        notes.update(layer_note(record))
    options = ReadOptions(ignore_energy=ignore_energy)
    return to_structures(record, where="ASE atoms", options=options, notes=notes)


def to_ase(structures: Structures, index: int = 0) -> Atoms:
    """System `index` as ASE atoms: tags, `FixAtoms`, and sid and targets in `info`."""
    from ase import Atoms
    from ase.constraints import FixAtoms

    system = structures[index]
    info: dict[str, Any] = {"sid": system.sid[0]}
    if system.energy is not None:
        info["y_relaxed"] = float(system.energy[0])
    if system.energy_initial is not None:
        info["y_init"] = float(system.energy_initial[0])
    atoms: Any = Atoms(
        numbers=system.atomic_numbers.cpu().numpy(),
        positions=system.positions.cpu().double().numpy(),
        cell=system.cell[0].cpu().double().numpy(),
        pbc=system.pbc[0].cpu().numpy(),
        tags=system.tags.cpu().numpy(),
        info=info,
    )
    fixed = system.fixed.cpu().numpy()
    if fixed.any():
        hold: Any = FixAtoms
        atoms.set_constraint(hold(mask=fixed))
    return cast("Atoms", atoms)


class AseDataset(StructuresDataset):
    """All frames of a file that ASE reads, kept in memory.

    The sid of a frame is its `info["sid"]`, else the file's name, with #0, #1, … if there are
    several. The plain values of `info`, of a database row's data and key-value pairs (in this
    order, where several hold a name), and what a calculator found are further fields of the record.

    Args:
        path: the file.
        options: how records are read; bad ones are found when the file is opened.
        notes: where warnings go.

    Raises:
        ValueError: ASE cannot read the file, or not all of it; a frame that :func:`from_ase`
            refuses.

    Warns:
        UserWarning: signs that the last frame was not written whole; defaults taken; once each.
    """

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
    ) -> None:
        super().__init__(path, options, notes=notes)
        self._records: list[MutableRecord] = []
        self._read()
        several = len(self._records) > 1
        self._names = [
            f"{self.path.name}#{i}" if several else self.path.name
            for i in range(len(self._records))
        ]
        for record, name in zip(self._records, self._names, strict=True):
            if not isinstance(record, dict):
                record.fill("sid", name)
            elif record["sid"] is None:
                record["sid"] = name
        self._check()
        for index, record in enumerate(self._records):
            if self.options.on_error == "raise":
                self[index]
            self.notes.add(layer_note(record, self.options.layer_numbers))

    def __len__(self) -> int:
        return len(self._records)

    def record(self, index: int) -> Mapping[str, Any]:
        """The frame in the names of the OC20 schema."""
        return self._records[index]

    def where(self, index: int) -> str:
        """The frame's name, for errors."""
        return str(self.path.parent / self._names[index])

    def default_sid(self, index: int) -> int | str:
        """File name and frame."""
        return self._names[index]

    def _read(self) -> None:
        kinds: dict[str, str] = {}
        try:
            self._records.extend(records_of(self.path, kinds))
        except IncompleteError as error:
            if self.options.on_error == "raise":
                raise
            self.skipped.append(str(error))
        if not self._records:
            raise ValueError(f"no records in {self.path}: ASE finds no structures in it")
        self.notes.add(kinds)

    def _may_be_relaxation(self) -> bool:
        return len(self) > 1

    def _keep(self, indices: list[int]) -> None:
        self._records = [self._records[i] for i in indices]
        self._names = [self._names[i] for i in indices]
