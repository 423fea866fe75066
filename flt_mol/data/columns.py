"""Many systems as columns of numbers, checked at once: the fast way past `to_structures`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data.cells import SMALLEST_HEIGHT
from flt_mol.structures import Structures
from flt_mol.targets import LARGEST_ENERGY

__all__ = ["Columns"]

_LARGEST = float(np.finfo(np.float32).max)
_SAFE_CENTRE = 99.9  # Å, below the distance from where a system is moved to the origin
_SAFE_HEIGHT = SMALLEST_HEIGHT * (1 + 1e-6)  # Å, with room for rounding
_SAFE_VOLUME = 1e-6  # of the box with the same edges; far above rounding


class _UnusualError(Exception):
    """Something that the slow path has to judge."""


@dataclass(frozen=True, eq=False)
class Columns:
    """B systems of N atoms in all, as stored: numbers of any real dtype, not yet checked.

    What :meth:`structures` returns equals what :func:`flt_mol.data.oc20.to_structures` and
    `Structures.cat` make of the same records, bit for bit. It does not say what is wrong: of
    anything out of the ordinary it makes nothing, and the caller then goes record by record.

    Args:
        sid: B names.
        natoms: (B,) int64.
        atomic_numbers: (N,).
        positions: (N, 3), Å.
        tags: (N,), None where no system has them.
        fixed: (N,), None where no system has them.
        cell: (B, 3, 3), Å; zeros where there is none.
        pbc: (B, 3) bool, None where no system stores it: vectors that are not zero are periodic.
        energy: (B,), eV, None if unknown.
        energy_initial: (B,), eV, None if unknown.
        positions_relaxed: (N, 3), Å, None if unknown.
        info: further values by name, each a tuple of B entries.

    Example:
        >>> columns = Columns(
        ...     sid=(7,), natoms=np.array([1]), atomic_numbers=np.array([29.0]),
        ...     positions=np.zeros((1, 3)), tags=np.array([2]), fixed=np.array([0]),
        ...     cell=np.diag([9.0, 9.0, 20.0])[None])
        >>> columns.structures()
        Structures(1 systems, 1 atoms)
    """

    sid: tuple[int | str, ...]
    natoms: NDArray[np.int64]
    atomic_numbers: NDArray[Any]
    positions: NDArray[Any]
    tags: NDArray[Any] | None
    fixed: NDArray[Any] | None
    cell: NDArray[Any]
    pbc: NDArray[np.bool_] | None = None
    energy: NDArray[Any] | None = None
    energy_initial: NDArray[Any] | None = None
    positions_relaxed: NDArray[Any] | None = None
    info: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def structures(self, known: Collection[str] = ()) -> Structures | None:
        """All systems in one batch, or None where anything is out of the ordinary.

        Args:
            known: kinds of notes that have been given already: "tags", "fixed", "cell". Without
                them, a system of which such a note would be made is out of the ordinary.
        """
        try:
            # Numbers that are refused must not warn of themselves.
            with np.errstate(invalid="ignore", over="ignore"):
                return self._checked(known)
        except _UnusualError:
            return None

    def _checked(self, known: Collection[str]) -> Structures:
        ptr = self._ptr()
        atoms = int(ptr[-1])
        _need(all(map(_is_name, self.sid)))
        numbers = _whole(self.atomic_numbers, atoms, 1, 118)
        positions = _vectors(self.positions, atoms)
        self._need_near_origin(ptr)
        tags, fixed = self._tags(ptr, known), self._fixed(atoms, known)
        cell, pbc = self._cell(known)
        energies = [_energies(e, len(self.sid)) for e in (self.energy, self.energy_initial)]
        relaxed = self.positions_relaxed
        if relaxed is not None:
            relaxed = _vectors(relaxed, atoms)
        return Structures(
            atomic_numbers=torch.from_numpy(numbers),
            positions=torch.from_numpy(positions),
            cell=torch.from_numpy(cell),
            pbc=torch.from_numpy(pbc),
            tags=torch.from_numpy(tags),
            fixed=torch.from_numpy(fixed),
            ptr=torch.from_numpy(ptr),
            sid=self.sid,
            energy=energies[0],
            energy_initial=energies[1],
            positions_relaxed=None if relaxed is None else torch.from_numpy(relaxed),
            info=self.info,
        )

    def _ptr(self) -> NDArray[np.int64]:
        """First atom of each system, and N (B + 1,)."""
        systems = len(self.sid)
        _need(systems > 0 and self.natoms.shape == (systems,) and int(self.natoms.min()) > 0)
        ptr = np.zeros(systems + 1, dtype=np.int64)
        np.cumsum(self.natoms, out=ptr[1:])
        return ptr

    def _need_near_origin(self, ptr: NDArray[np.int64]) -> None:
        """No system whose centre is so far off that it has to be moved."""
        if max(float(self.positions.max()), -float(self.positions.min())) > _SAFE_CENTRE:
            sums = np.add.reduceat(self.positions.astype(np.float64), ptr[:-1])
            _need(bool((np.abs(sums) <= _SAFE_CENTRE * self.natoms[:, None]).all()))

    def _tags(self, ptr: NDArray[np.int64], known: Collection[str]) -> NDArray[np.int64]:
        if self.tags is None:
            _need("tags" in known)
            return np.zeros(int(ptr[-1]), dtype=np.int64)
        tags = _whole(self.tags, int(ptr[-1]), 0, 2)
        _need("tags" in known or bool(np.maximum.reduceat(tags, ptr[:-1]).all()))
        return tags

    def _fixed(self, atoms: int, known: Collection[str]) -> NDArray[np.bool_]:
        if self.fixed is None:
            _need("fixed" in known)
            return np.zeros(atoms, dtype=np.bool_)
        _whole(self.fixed, atoms)
        return np.asarray(self.fixed != 0)

    def _cell(self, known: Collection[str]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Cells and the directions that repeat, none of them singular."""
        cell = self.cell.astype(np.float64)
        _need(cell.shape == (len(self.sid), 3, 3) and bool((np.abs(cell) <= _LARGEST).all()))
        vectors: NDArray[np.bool_] = (cell != 0).any(axis=2)
        _need("cell" in known or bool(vectors.any(1).all()))
        pbc = vectors if self.pbc is None else self.pbc.astype(np.bool_)
        _need(pbc.shape == vectors.shape)
        if pbc.all():
            _need_heights(cell)
        else:
            for pattern in np.unique(pbc, axis=0):
                _need_heights(cell[(pbc == pattern).all(1)][:, pattern])
        return cell.astype(np.float32), pbc


def _need(good: bool) -> None:
    if not good:
        raise _UnusualError


def _is_name(sid: Any) -> bool:
    return type(sid) is str or (type(sid) is int and -(1 << 63) <= sid < 1 << 63)


def _whole(
    given: NDArray[Any], atoms: int, low: int | None = None, high: int | None = None
) -> NDArray[np.int64]:
    """Whole numbers of any dtype (N,), from `low` to `high`, as new int64."""
    _need(given.shape == (atoms,) and given.dtype.kind in ("biuf" if low is None else "iuf"))
    with np.errstate(invalid="ignore"):
        value = given.astype(np.int64)
    _need(given.dtype.kind != "f" or bool((value == given).all()))
    _need(low is None or high is None or (value.min() >= low and value.max() <= high))
    return value


def _vectors(given: NDArray[Any], atoms: int) -> NDArray[np.float32]:
    """Finite vectors (N, 3) as new float32, rounded once from what float64 holds."""
    _need(given.shape == (atoms, 3) and given.dtype.kind in "iuf")
    exact = given if given.dtype in (np.float32, np.float64) else given.astype(np.float64)
    # A number that is not one compares as False.
    _need(exact.max() <= _LARGEST and exact.min() >= -_LARGEST)
    return exact.astype(np.float32)


def _energies(given: NDArray[Any] | None, systems: int) -> torch.Tensor | None:
    if given is None:
        return None
    _need(given.shape == (systems,) and given.dtype.kind in "iuf")
    energies = given.astype(np.float64)
    _need(bool((np.abs(energies) <= LARGEST_ENERGY).all()))  # not so of nan
    return torch.from_numpy(energies)


def _need_heights(vectors: NDArray[np.float64]) -> None:
    """Enough distance between the lattice planes of (B, n, 3) vectors; see `cells.heights`."""
    lengths = np.sqrt((vectors * vectors).sum(2))
    n = vectors.shape[1]
    if n < 2:
        _need(bool((lengths >= _SAFE_HEIGHT).all()))
        return
    if n == 2:
        volume = np.sqrt((_cross(vectors[:, 0], vectors[:, 1]) ** 2).sum(1))
        faces = lengths
    else:
        normals = _cross(vectors[:, [1, 2, 0]], vectors[:, [2, 0, 1]])
        volume = np.abs((vectors[:, 0] * normals[:, 0]).sum(1))
        faces = np.sqrt((normals * normals).sum(2))
    _need(bool((volume > _SAFE_VOLUME * lengths.prod(1)).all()))
    _need(bool((volume >= _SAFE_HEIGHT * faces.max(1)).all()))


def _cross(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    following, last = [1, 2, 0], [2, 0, 1]
    return a[..., following] * b[..., last] - a[..., last] * b[..., following]
