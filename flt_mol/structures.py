"""Structures: a flat batch of atomic systems, the one schema that all rooms share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flt_mol._structures_checks import check_shapes, shaped, three, whole
from flt_mol._structures_pairs import cut, join

if TYPE_CHECKING:
    from flt_mol.functional.neighbors import NeighborPairs

_PER_ATOM = ("atomic_numbers", "positions", "tags", "fixed", "positions_relaxed")
_PER_SYSTEM = ("cell", "pbc", "energy", "energy_initial")


@dataclass(frozen=True, eq=False)
class Structures:
    """B atomic systems with N atoms in all, packed one after the other, without padding.

    Atoms of system b are rows ``ptr[b]:ptr[b + 1]``. Systems without atoms are allowed.

    Args:
        atomic_numbers: (N,) int64, 1 to 118.
        positions: (N, 3) float, Å, of the initial structure.
        cell: (B, 3, 3) float, Å; rows are the lattice vectors, zeros where there is none.
        pbc: (B, 3) bool, whether the system repeats along each lattice vector.
        tags: (N,) int64; 0 below the surface, 1 surface, 2 adsorbate.
        fixed: (N,) bool, held fixed while relaxing.
        ptr: (B + 1,) int64, first atom of each system, and N at the end.
        sid: B names, int or str, as stored.
        energy: (B,) float64, eV, the target: adsorption energy after relaxation. None if unknown.
        energy_initial: (B,) float64, eV, adsorption energy before relaxation. None if unknown.
        positions_relaxed: (N, 3) float, Å, possibly wrapped differently from `positions`.
        info: further plain values by name, each a tuple of B entries, as stored.
        pairs: neighbour pairs of the initial positions, rows of this batch, sorted; see
            :meth:`with_pairs`. They are not searched again when
            positions are replaced: whoever moves atoms drops them or makes them anew.
        cutoff: Å, within which `pairs` were searched; None without pairs.

    Raises:
        ValueError: dtypes of another kind (32 bits instead of 64 will do), or shapes that do not
            belong together, naming the field. Models look at the numbers, too.

    Example:
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> batch = Structures.cat([water, water])
        >>> batch
        Structures(2 systems, 6 atoms)
        >>> batch.system.tolist()
        [0, 0, 0, 1, 1, 1]
    """

    atomic_numbers: Tensor
    positions: Tensor
    cell: Tensor
    pbc: Tensor
    tags: Tensor
    fixed: Tensor
    ptr: Tensor
    sid: tuple[int | str, ...]
    energy: Tensor | None = None
    energy_initial: Tensor | None = None
    positions_relaxed: Tensor | None = None
    info: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    pairs: NeighborPairs | None = None
    cutoff: float | None = None

    def __post_init__(self) -> None:
        check_shapes(self)

    @classmethod
    def single(
        cls,
        atomic_numbers: Any,
        positions: Any,
        *,
        cell: Any = None,
        pbc: Any = False,
        tags: Any = None,
        fixed: Any = None,
        sid: int | str = 0,
        energy: float | None = None,
        energy_initial: float | None = None,
        positions_relaxed: Any = None,
        info: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Structures:
        """One system from lists, arrays or tensors; see the class for the fields.

        Missing `cell` is zeros, `tags` are 0, `fixed` is False.

        Raises:
            ValueError: an atomic number that is not 1 to 118, a tag not 0 to 2, a shape that
                does not fit, or a number that is not finite; naming `sid` and the field.
        """
        numbers = whole("atomic_numbers", atomic_numbers, None, 1, 118, sid)
        n = len(numbers)

        def floats(name: str, x: Any, *shape: int) -> Tensor:
            value = shaped(name, torch.as_tensor(x, dtype=dtype), shape, sid)
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} of {sid} holds a number that is not finite")
            return value

        def scalar(x: float | None) -> Tensor | None:
            return None if x is None else torch.tensor([float(x)], dtype=torch.float64)

        relaxed = positions_relaxed
        return cls(
            atomic_numbers=numbers,
            positions=floats("positions", positions, n, 3),
            cell=floats("cell", torch.zeros(3, 3) if cell is None else cell, 1, 3, 3),
            pbc=three(pbc, sid),
            tags=whole("tags", [0] * n if tags is None else tags, n, 0, 2, sid),
            fixed=whole("fixed", [0] * n if fixed is None else fixed, n, 0, 1, sid).bool(),
            ptr=torch.tensor([0, n], dtype=torch.int64),
            sid=(sid,),
            energy=scalar(energy),
            energy_initial=scalar(energy_initial),
            positions_relaxed=None
            if relaxed is None
            else floats("positions_relaxed", relaxed, n, 3),
            info={name: (value,) for name, value in (info or {}).items()},
        )

    def __len__(self) -> int:
        """Number of systems B."""
        return int(self.ptr.numel()) - 1

    def __repr__(self) -> str:
        return f"Structures({len(self)} systems, {self.num_atoms} atoms)"

    @property
    def num_atoms(self) -> int:
        """Number of atoms N of all systems."""
        return int(self.atomic_numbers.shape[0])

    @property
    def natoms(self) -> Tensor:
        """(B,) int64, atoms per system."""
        return self.ptr.diff()

    @cached_property
    def system(self) -> Tensor:
        """(N,) int64, the system of each atom, ascending."""
        index = torch.arange(len(self), device=self.ptr.device)
        return torch.repeat_interleave(index, self.natoms, output_size=self.num_atoms)

    def __getitem__(self, index: int) -> Structures:
        """System `index` alone, as a batch of one."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"system {index} of {len(self)}")
        b = index % len(self)
        start, stop = int(self.ptr[b]), int(self.ptr[b + 1])
        changes: dict[str, Any] = {}
        for name in (*_PER_ATOM, *_PER_SYSTEM):
            value = getattr(self, name)
            rows = slice(start, stop) if name in _PER_ATOM else slice(b, b + 1)
            changes[name] = None if value is None else value[rows]
        return Structures(
            **changes,
            ptr=torch.tensor([0, stop - start], dtype=torch.int64, device=self.ptr.device),
            sid=(self.sid[b],),
            info={name: (values[b],) for name, values in self.info.items()},
            pairs=None if self.pairs is None else cut(self.pairs, start, stop),
            cutoff=self.cutoff,
        )

    def __iter__(self) -> Iterator[Structures]:
        return (self[b] for b in range(len(self)))

    @classmethod
    def cat(cls, parts: Sequence[Structures]) -> Structures:
        """All systems of `parts` in one batch, in order.

        Optional fields stay only where every part has them, pairs only where all were searched
        within one cutoff. `info` keeps every name; a part that lacks it gives None.

        Raises:
            ValueError: `parts` is empty.
        """
        if not parts:
            raise ValueError("Structures.cat needs at least one batch")
        merged: dict[str, Any] = {}
        for name in (*_PER_ATOM, *_PER_SYSTEM):
            values = [getattr(part, name) for part in parts]
            merged[name] = None if any(v is None for v in values) else torch.cat(values)
        natoms = torch.cat([part.natoms for part in parts])
        pairs, cutoff = join(parts)
        names = dict.fromkeys(name for part in parts for name in part.info)
        return cls(
            **merged,
            ptr=torch.cat([natoms.new_zeros(1), natoms.cumsum(0)]),
            sid=tuple(s for part in parts for s in part.sid),
            info={
                name: tuple(
                    value for part in parts for value in part.info.get(name, (None,) * len(part))
                )
                for name in names
            },
            pairs=pairs,
            cutoff=cutoff,
        )

    def with_pairs(self, cutoff: float) -> Structures:
        """The same batch with all pairs within `cutoff`, in Å, periodic images included.

        Raises:
            ValueError: as :func:`flt_mol.functional.neighbors.neighbor_pairs`, naming the sid.

        Example:
            >>> pair = Structures.single([1, 1], [[0, 0, 0], [0, 0, 2]]).with_pairs(3.0)
            >>> pair.pairs.index_i.tolist(), pair.pairs.index_j.tolist()
            ([0, 1], [1, 0])
        """
        # Not at the top: whoever needs no pairs shall not wait for their module.
        from flt_mol.functional.neighbors import neighbor_pairs

        if not 0 < cutoff < math.inf:
            raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")
        try:
            pairs = neighbor_pairs(self.positions, self.cell, self.pbc, self.ptr, cutoff)
        except ValueError as error:
            if len(self) == 1:
                raise ValueError(f"sid {self.sid[0]}: {error}") from None
            for system in self:
                system.with_pairs(cutoff)
            raise
        return replace(self, pairs=pairs, cutoff=float(cutoff))

    def to(self, device: torch.device | str) -> Structures:
        """The same batch on `device`; float64 becomes float32 where the device has none (MPS)."""
        target = torch.device(device)

        def move(value: Tensor) -> Tensor:
            if target.type == "mps" and value.dtype == torch.float64:
                value = value.to(torch.float32)
            return value.to(target, non_blocking=True)

        return self._map(move)

    def pin_memory(self) -> Structures:
        """The same batch in page-locked memory; called by DataLoader(pin_memory=True)."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Any) -> Structures:
        tensors = {
            f.name: function(value)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        if self.pairs is not None:
            tensors["pairs"] = type(self.pairs)(*map(function, self.pairs))
        return replace(self, **tensors)
