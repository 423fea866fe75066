"""ASE atoms and the files that ASE reads."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.oc20 import to_structures
from flt_mol.data.options import ReadOptions
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["AseDataset", "from_ase", "to_ase"]

_TARGETS = {
    "y_relaxed": ("y_relaxed", "energy_relaxed"),
    "y_init": ("y_init", "energy_init"),
    "pos_relaxed": ("pos_relaxed",),
}


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
    record = _record(atoms)
    if sid is not None or record["sid"] is None:
        record["sid"] = 0 if sid is None else sid
    if notes is not None:
        notes.update(_layer_note(record))
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


def _record(atoms: Any) -> dict[str, Any]:
    """The atoms in the names of the OC20 schema."""
    pairs = atoms.info.get("key_value_pairs", {})  # of rows of an ASE database
    known = {**(pairs if isinstance(pairs, dict) else {}), **atoms.info, **atoms.arrays}
    record: dict[str, Any] = {
        "pos": atoms.get_positions(),
        "atomic_numbers": atoms.get_atomic_numbers(),
        "cell": np.asarray(atoms.get_cell()),
        "pbc": np.asarray(atoms.get_pbc()),
        "tags": np.asarray(atoms.get_tags()),
        "fixed": _fixed(atoms),
        "natoms": len(atoms),
        "sid": known.get("sid"),
    }
    for field, names in _TARGETS.items():
        record[field] = next((known[name] for name in names if name in known), None)
    return record


def _layer_note(record: Mapping[str, Any]) -> dict[str, str]:
    """A warning where atoms of tag 0 lie above the others: ase.build tags adsorbates 0."""
    tags, cell = record["tags"], record["cell"]
    normal = np.cross(cell[0], cell[1])
    if not normal.any() or not tags.any() or tags.all():
        return {}
    heights = record["pos"] @ (normal * np.sign(np.linalg.det(cell) or 1.0))
    if heights[tags == 0].mean() <= max(heights[tags == t].mean() for t in set(tags) - {0}):
        return {}
    return {
        "layers": "atoms of tag 0 lie above the others, as if tags were the layer numbers of "
        "ase.build (expected: 0 below the surface, 1 surface, 2 adsorbate; set them anew if so)"
    }


def _occupancy_note(frames: list[Atoms]) -> dict[str, str]:
    """A warning of sites that several elements share, or that are empty in part."""
    for atoms in frames:
        sites = atoms.info.get("occupancy")
        for site, shares in sites.items() if isinstance(sites, dict) else ():
            if isinstance(shares, dict) and any(share < 1 for share in shares.values()):
                shown = ", ".join(f"{symbol} {share:g}" for symbol, share in shares.items())
                return {
                    "occupancy": f"site {site} is occupied in part ({shown}); ASE keeps one "
                    "element per site: give an ordered structure"
                }
    return {}


def _fixed(atoms: Atoms) -> NDArray[np.bool_]:
    """(N,), the atoms that constraints hold in all three directions."""
    from ase.constraints import FixAtoms, FixCartesian, FixScaled

    held = np.zeros((len(atoms), 3), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms):
            held[constraint.index] = True
        elif isinstance(constraint, FixCartesian | FixScaled):
            held[constraint.index] |= constraint.mask
    return np.asarray(held.all(axis=1))


class AseDataset(StructuresDataset):
    """All frames of a file that ASE reads, kept in memory.

    The sid of a frame is its `info["sid"]`, else the file's name, with #0, #1, … if there are
    several.

    Args:
        path: the file.
        options: how records are read; on_error="raise" raises here when the file is opened.
        notes: where warnings go.

    Raises:
        ValueError: ASE cannot read the file; a frame that :func:`from_ase` refuses.
    """

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
    ) -> None:
        super().__init__(path, options, notes=notes)
        frames = _read(self.path)
        if not frames:
            raise ValueError(f"no records in {path}: ASE finds no structures in it")
        self.notes.add(_occupancy_note(frames))
        self._records = [_record(atoms) for atoms in frames]
        several = len(frames) > 1
        self._names = [
            f"{self.path.name}#{i}" if several else self.path.name for i in range(len(frames))
        ]
        for record, name in zip(self._records, self._names, strict=True):
            record["sid"] = name if record["sid"] is None else record["sid"]
        self._check()
        for index, record in enumerate(self._records):
            if self.options.on_error == "raise":
                self[index]
            self.notes.add(_layer_note(record))

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

    def _keep(self, indices: list[int]) -> None:
        self._records = [self._records[i] for i in indices]
        self._names = [self._names[i] for i in indices]


def _read(path: Path) -> list[Atoms]:
    import ase.db
    import ase.io.formats

    if not path.is_file():
        raise ValueError(f"{path} is no regular file; copy its contents into one")

    try:
        kind = ase.io.formats.filetype(str(path))
        if kind in ("db", "json"):
            # ase.io.read drops the rows' own keys, among them the targets.
            rows = ase.db.connect(path, type=kind, use_lock_file=False).select()
            return [row.toatoms(add_additional_information=True) for row in rows]
        frames = ase.io.read(path, index=":", do_not_split_by_at_sign=True)
    except ase.io.formats.UnknownFileTypeError as error:
        raise ValueError(
            f"{path} is of unknown format; read are LMDB files, and what ASE reads (traj, extxyz, "
            "cif, POSCAR, …) under its usual suffix"
        ) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"ASE cannot read {path}: {reason}") from error
    return frames if isinstance(frames, list) else [frames]
