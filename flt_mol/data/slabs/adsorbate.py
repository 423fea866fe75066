"""Which atoms of a slab with an adsorbate are the adsorbate."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ase import Atoms

    from flt_mol.data.slabs.frame import Frame

__all__ = ["Adsorbate", "adsorbate_atoms"]

Adsorbate = str | Iterable[int] | None
_GUESSED = ("H", "C", "N", "O")
_DEPTH = 2.0  # Å below the highest atom of the slab: in hollows and on lower terraces
_GAP = 0.5  # Å that atoms of the adsorbate are above those of its elements in the slab
_BOND = 1.2  # times the sum of covalent radii
_MEND = (
    'name the atoms: adsorbate="CO" or adsorbate=[12, 13], or adsorbate="none" for none (in the '
    "command: --adsorbate CO, 12,13 or none)"
)

Rows = NDArray[np.int64]


def adsorbate_atoms(atoms: Atoms, adsorbate: Adsorbate, frame: Frame) -> tuple[Rows, Frame]:
    """The rows (A,) of the adsorbate's atoms, and the frame with the adsorbate's side above.

    Args:
        atoms: the system.
        adsorbate: rows, a formula, "none", or None to guess.
        frame: of the system.

    Raises:
        ValueError: nothing that fits, or more than one way, with the mend.
    """
    if adsorbate is None:
        return _guessed(atoms, frame)
    if isinstance(adsorbate, str):
        if adsorbate == "none":
            return np.empty(0, dtype=np.int64), frame
        rows = _of_formula(atoms, adsorbate, frame)
    else:
        rows = _of_indices(atoms, adsorbate)
    return rows, _with_above(rows, frame)


def _of_indices(atoms: Atoms, indices: Iterable[int]) -> Rows:
    given = list(indices)
    if any(isinstance(i, bool | np.bool_) for i in given):  # True would be atom 1
        raise ValueError(
            "is to have an adsorbate given as a mask; give its atoms by number, "
            "np.flatnonzero(mask)"
        )
    wrong = [i for i in given if not _is_row(i, len(atoms))]
    if wrong:
        raise ValueError(f"has atoms 0 to {len(atoms) - 1}; the adsorbate is to have {wrong}")
    rows = np.unique(np.array([int(i) % len(atoms) for i in given], dtype=np.int64))
    if len(rows) == len(atoms):
        raise ValueError("is to be all adsorbate: no slab is left")
    return rows


def _is_row(index: object, count: int) -> bool:
    try:
        number = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return False
    return -count <= number < count


def _with_above(rows: Rows, frame: Frame) -> Frame:
    """The frame in which the adsorbate is on top."""
    if not len(rows):
        return frame
    slab = np.delete(frame.height, rows)
    middle = (slab.max() + slab.min()) / 2
    above = frame.height[rows] > middle
    if above.any() and not above.all():
        raise ValueError(
            "has adsorbate atoms above and below its middle; one adsorbate on one face is "
            "expected, or set tags by hand with atoms.set_tags"
        )
    return frame if above.all() else frame.upside_down()


def _guessed(atoms: Atoms, frame: Frame) -> tuple[Rows, Frame]:
    symbols = np.array(atoms.get_chemical_symbols())
    rows = np.flatnonzero(np.isin(symbols, _GUESSED))
    if not len(rows):
        raise ValueError(
            f"has no atoms of {', '.join(_GUESSED)}, which the adsorbate is guessed by; {_MEND}"
        )
    if len(rows) == len(symbols):
        raise ValueError(f"consists of {', '.join(_GUESSED)} alone; {_MEND}")
    sides = [side for side in (frame, frame.upside_down()) if _on_top(rows, side)]
    if len(sides) != 1:
        elements = ", ".join(dict.fromkeys(symbols[rows].tolist()))
        raise ValueError(
            f"has {elements} elsewhere than on one surface, so that the adsorbate cannot be "
            f"guessed; {_MEND}"
        )
    return rows, sides[0]


def _on_top(rows: Rows, frame: Frame) -> bool:
    return bool(frame.height[rows].min() > np.delete(frame.height, rows).max() - _DEPTH)


def _of_formula(atoms: Atoms, formula: str, frame: Frame) -> Rows:
    wanted = _counts(formula)
    symbols = np.array(atoms.get_chemical_symbols())
    rows = np.flatnonzero(np.isin(symbols, list(wanted)))
    there = Counter(symbols[rows].tolist())
    lacking = [s for s in wanted if there[s] < wanted[s]]
    if lacking:
        raise ValueError(
            f"has no {formula}: {', '.join(f'{there[s]} of {wanted[s]} {s}' for s in lacking)}"
        )
    if len(rows) < len(symbols) and there == Counter(wanted):
        return rows
    alike = [part for part in _molecules(atoms, rows) if Counter(symbols[part].tolist()) == wanted]
    found = alike[0] if len(alike) == 1 else _topmost(symbols, rows, wanted, frame)
    if found is None or len(found) == len(symbols):
        raise ValueError(
            f"has {len(alike) or 'no'} separate {formula}, and {_shown(there)} in all; give the "
            "adsorbate's atoms by number, adsorbate=[12, 13]"
        )
    return found


def _counts(formula: str) -> dict[str, int]:
    from ase.formula import Formula

    try:
        counts = {str(s): int(n) for s, n in Formula(formula).count().items()}
    except (ValueError, KeyError) as error:
        raise ValueError(f"is to have the adsorbate {formula!r}, which is no formula") from error
    if not counts:
        raise ValueError(f"is to have the adsorbate {formula!r}; {_MEND}")
    return counts


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {s}" for s, n in counts.items())


def _molecules(atoms: Atoms, rows: Rows) -> list[Rows]:
    """Parts of the atoms `rows` that are bonded to each other, periodic images included."""
    from ase.neighborlist import natural_cutoffs, neighbor_list
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    some = atoms[rows]
    i, j = neighbor_list("ij", some, natural_cutoffs(some, mult=_BOND))
    links = coo_array((np.ones(len(i)), (i, j)), shape=(len(rows), len(rows)))
    count, part = connected_components(links, directed=False)
    return [rows[part == k] for k in range(count)]


def _topmost(
    symbols: NDArray[np.str_], rows: Rows, wanted: dict[str, int], frame: Frame
) -> Rows | None:
    """The highest atoms of each element, where they are clearly above the others of it."""
    found: list[int] = []
    for symbol, count in wanted.items():
        same = rows[symbols[rows] == symbol]
        same = same[np.argsort(-frame.height[same], kind="stable")]
        lowest, *others = frame.height[same[count - 1 :]]
        if others and lowest - others[0] < _GAP:
            return None
        found += same[:count].tolist()
    return np.sort(np.array(found, dtype=np.int64))
