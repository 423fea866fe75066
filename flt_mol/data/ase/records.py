"""ASE atoms as records of the OC20 schema."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.aselmdb.rows import disagreement

if TYPE_CHECKING:
    from ase import Atoms

__all__ = [
    "ALSO",
    "AtomsRecord",
    "atoms_record",
    "fixed_atoms",
    "occupancy_note",
]

# Other names under which targets were written.
ALSO = {"y_relaxed": "energy_relaxed", "y_init": "energy_init"}
# Of a calculator's results; those with one number per atom have no place in a record.
_RESULTS = ("energy", "free_energy", "forces", "stress", "dipole", "magmom")
_OF_ATOMS = ("numbers", "positions", "tags")  # arrays that are fields under other names
_MADE = ("pos", "atomic_numbers", "cell", "pbc", "tags", "fixed", "natoms")


class AtomsRecord(dict[str, Any]):
    """Fields by name, which of them the atoms hold two values of, and which a calculator found."""

    def __init__(
        self, fields: Mapping[str, Any], conflicts: Mapping[str, str], found: Collection[str] = ()
    ) -> None:
        super().__init__(fields)
        self.conflicts = dict(conflicts)
        self.found = frozenset(found)

    def conflict(self, name: str) -> str | None:
        """What to say of a field with two values, None of any other."""
        return self.conflicts.get(name)

    def of_calculator(self, name: str) -> bool:
        """Whether a field is what a calculator found, and stored by nobody else."""
        return name in self.found


def atoms_record(atoms: Any) -> AtomsRecord:
    """The atoms in the names of the OC20 schema.

    Further fields are, by name: the plain values of `info`, of a database row's data and of its
    key-value pairs, vectors per atom of `arrays`, and what the calculator found ("energy",
    "forces", …); of several values of one name the first in this order is taken, and a target of
    which data and key-value pairs hold different ones is an error where it is read.
    "calculator" is the calculator's energy too, by the name that asks for it as target.

    Args:
        atoms: of ASE.

    Returns:
        Fields by name; those that are None are missing.
    """
    results = dict(_results(atoms))
    stored = {**dict(_vectors(atoms)), **dict(_further(atoms.info))}
    fields: dict[str, Any] = {
        **results,
        **stored,
        "pos": atoms.get_positions(),
        "atomic_numbers": atoms.get_atomic_numbers(),
        "cell": np.asarray(atoms.get_cell()),
        "pbc": np.asarray(atoms.get_pbc()),
        "tags": np.asarray(atoms.get_tags()),
        "fixed": fixed_atoms(atoms),
        "natoms": len(atoms),
    }
    record = AtomsRecord(fields, _conflicts(atoms.info), results.keys() - stored.keys())
    if "energy" in results:
        record["calculator"] = results["energy"]
    for name in ("sid", "y_relaxed", "y_init", "pos_relaxed"):
        record.setdefault(name, None)
    for name, other in ALSO.items():
        if record[name] is None:
            record[name] = record.get(other)
            if other in record.conflicts:
                record.conflicts[name] = record.conflicts[other]
    return record


def _results(atoms: Any) -> Iterator[tuple[str, Any]]:
    """What a calculator has found for these very positions; nothing is calculated."""
    calculator = atoms.calc
    found = getattr(calculator, "results", None)
    if not isinstance(found, Mapping) or _stale(calculator, atoms):
        return
    for name in _RESULTS:
        value = found.get(name)
        if isinstance(value, int | float | np.ndarray | np.generic):
            yield name, float(value) if np.ndim(value) == 0 else value


def _stale(calculator: Any, atoms: Any) -> bool:
    check = getattr(calculator, "check_state", None)
    return bool(check(atoms)) if callable(check) else False


def _vectors(atoms: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in atoms.arrays.items():
        if name not in _OF_ATOMS and array.ndim == 2 and array.dtype.kind in "biuf":
            yield name, array


def _further(info: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Plain values, those that count more last: of a row's pairs, its data, `info` itself."""
    for part in ("key_value_pairs", "data"):
        yield from _plain(_part(info, part))
    rest = {name: v for name, v in info.items() if name not in ("data", "key_value_pairs")}
    yield from _plain(rest)


def _part(info: Mapping[Any, Any], part: str) -> Mapping[Any, Any]:
    inside = info.get(part)
    return inside if isinstance(inside, Mapping) else {}


def _conflicts(info: Mapping[Any, Any]) -> dict[str, str]:
    """What to say of names of which a row's data and key-value pairs hold different values."""
    pairs, data = (dict(_plain(_part(info, part))) for part in ("key_value_pairs", "data"))
    both = {name: disagreement(name, data[name], pairs[name]) for name in pairs if name in data}
    return {name: told for name, told in both.items() if told is not None and name not in info}


def _plain(fields: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if not isinstance(name, str) or name in ("unique_id", "calculator"):
            continue
        if isinstance(value, np.ndarray):
            good = value.dtype.kind in "biufU"
        elif isinstance(value, list | tuple):
            good = all(isinstance(v, str | bool | int | float | np.generic) for v in value)
        else:
            good = isinstance(value, str | bool | int | float | np.generic)
        if good:
            yield name, value


def fixed_atoms(atoms: Atoms) -> NDArray[np.bool_]:
    """(N,), the atoms that constraints hold in all three directions.

    Raises:
        ValueError: a constraint of atoms that are not there.
    """
    from ase.constraints import FixAtoms, FixCartesian, FixScaled

    held = np.zeros((len(atoms), 3), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms | FixCartesian | FixScaled):
            index = np.asarray(constraint.index).reshape(-1)
            beyond = [int(i) for i in index if not -len(atoms) <= i < len(atoms)]
            if beyond:
                raise ValueError(
                    f"a {type(constraint).__name__} holds atom {beyond[0]}, and there are "
                    f"{len(atoms)}, counted from 0: set the constraint anew"
                )
        if isinstance(constraint, FixAtoms):
            held[constraint.index] = True
        elif isinstance(constraint, FixCartesian | FixScaled):
            held[constraint.index] |= constraint.mask
    return np.asarray(held.all(axis=1))


def occupancy_note(atoms: Atoms) -> dict[str, str]:
    """A warning of sites that several elements share, or that are empty in part."""
    sites = atoms.info.get("occupancy")
    for site, shares in sites.items() if isinstance(sites, dict) else ():
        if not isinstance(shares, dict):
            continue
        shown = ", ".join(f"{symbol} {share:g}" for symbol, share in shares.items())
        told = "in part" if any(share < 1 for share in shares.values()) else "by several elements"
        if told == "in part" or len(shares) > 1:
            return {
                "occupancy": f"site {site} is occupied {told} ({shown}); ASE keeps one element per "
                "site: give an ordered structure"
            }
    return {}
