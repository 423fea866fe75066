"""Rows of B systems: what layers are checked on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flt_mol.functional.groups import system_index, system_sizes
from flt_mol.structures import Structures
from flt_mol.testing.structures import random_structures

SIZES = (5, 0, 9, 1)
_PER_ROW = ("x", "positions", "atomic_numbers")
_PER_SYSTEM = ("cell", "pbc")


@dataclass(frozen=True, eq=False)
class Rows:
    """N rows of B systems, packed: the one argument of a layer under test.

    Args:
        x: (N, C) float, features.
        ptr: (B + 1,) int64, first row of each system, and N at the end.
        positions: (N, ℓ) float, Å or token indices; None for layers without.
        cell: (B, 3, 3) float, Å, rows are lattice vectors; None where there is no lattice.
        pbc: (B, 3) bool, with `cell`.
        atomic_numbers: (N,) int64; None where rows are no atoms.
    """

    x: Tensor
    ptr: Tensor
    positions: Tensor | None = None
    cell: Tensor | None = None
    pbc: Tensor | None = None
    atomic_numbers: Tensor | None = None

    def __post_init__(self) -> None:
        system_sizes(self.ptr, self.num_rows)

    def __len__(self) -> int:
        """Number of systems B."""
        return self.ptr.numel() - 1

    @property
    def num_rows(self) -> int:
        """N."""
        return self.x.shape[0]

    @property
    def sizes(self) -> Tensor:
        """(B,) int64, rows per system."""
        return self.ptr.diff()

    @property
    def system(self) -> Tensor:
        """(N,) int64, the system of each row."""
        return system_index(self.ptr, self.num_rows)

    @property
    def structures(self) -> Structures:
        """The same systems as Structures, for layers and models that take these.

        Raises:
            ValueError: rows without atomic numbers, positions or cells.
        """
        if self.atomic_numbers is None or self.cell is None or self.pbc is None:
            raise ValueError("these rows are no atoms: make them with random_rows(…, dim=3)")
        return Structures(
            atomic_numbers=self.atomic_numbers,
            positions=self.needed_positions(),
            cell=self.cell,
            pbc=self.pbc,
            tags=self.atomic_numbers % 3,  # some of each, and they follow their atoms
            fixed=torch.zeros_like(self.atomic_numbers, dtype=torch.bool),
            ptr=self.ptr,
            sid=tuple(range(len(self))),
        )

    def needed_positions(self) -> Tensor:
        """`positions`, or ValueError where there are none."""
        if self.positions is None:
            raise ValueError("this check needs rows with positions")
        return self.positions

    def needed_lattice(self) -> tuple[Tensor, Tensor, Tensor]:
        """`positions`, `cell` and `pbc`, or ValueError where nothing repeats."""
        if self.cell is None or self.pbc is None or not bool(self.pbc.any()):
            raise ValueError(
                "this check needs rows with periodic cells: make them with "
                "random_rows(…, dim=3, periodic=True)"
            )
        return self.needed_positions(), self.cell, self.pbc

    def __getitem__(self, index: int) -> Rows:
        """System `index` alone, as a batch of one."""
        if not 0 <= index < len(self):
            raise IndexError(f"system {index} of {len(self)}")
        start, stop = self.ptr[index : index + 2].tolist()
        device = self.ptr.device
        return self.taken(
            torch.arange(start, stop, device=device),
            torch.tensor([0, stop - start], dtype=torch.int64, device=device),
            torch.tensor([index], device=device),
        )

    def __iter__(self) -> Iterator[Rows]:
        return (self[b] for b in range(len(self)))

    @classmethod
    def cat(cls, parts: Sequence[Rows]) -> Rows:
        """All systems of `parts`, in order; all parts have the same fields."""
        merged: dict[str, Any] = {}
        for name in (*_PER_ROW, *_PER_SYSTEM):
            values = [getattr(part, name) for part in parts]
            merged[name] = None if values[0] is None else torch.cat(values)
        sizes = torch.cat([part.sizes for part in parts])
        return cls(ptr=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), **merged)

    def taken(self, rows: Tensor, ptr: Tensor | None = None, systems: Tensor | None = None) -> Rows:
        """Rows and systems by their indices, in that order.

        Args:
            rows: (N',) int64.
            ptr: (B' + 1,) int64, of the new rows; None keeps the old.
            systems: (B',) int64; None keeps all.
        """
        chosen = {n: v[rows] for n in _PER_ROW if (v := getattr(self, n)) is not None}
        if systems is not None:
            chosen |= {n: v[systems] for n in _PER_SYSTEM if (v := getattr(self, n)) is not None}
        return replace(self, ptr=self.ptr if ptr is None else ptr, **chosen)

    def to(self, target: torch.device | torch.dtype | str) -> Rows:
        """The same rows on a device, or with all floats in a dtype."""

        def moved(value: Tensor) -> Tensor:
            if isinstance(target, torch.dtype) and not value.is_floating_point():
                return value
            return value.to(target)

        tensors = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return Rows(**{name: moved(value) for name, value in tensors.items()})


def random_rows(
    generator: torch.Generator,
    sizes: Sequence[int] = SIZES,
    width: int = 8,
    *,
    dim: int | None = 3,
    periodic: bool | Sequence[bool] = False,
    dtype: torch.dtype = torch.float32,
) -> Rows:
    """Random rows: standard normal features, and atoms of :func:`random_structures` where ℓ = 3.

    Args:
        generator: source of all draws, on CPU.
        sizes: rows of each of the B systems, 0 allowed.
        width: C.
        dim: ℓ; None gives no positions, other numbers than 3 give normal ones of width 3.
        periodic: pbc of all systems, or one value for each lattice vector.
        dtype: of all floats.

    Raises:
        ValueError: a lattice in other than three dimensions.

    Example:
        >>> rows = random_rows(torch.Generator().manual_seed(0), sizes=(2, 0, 3), dim=1)
        >>> rows.x.shape, rows.positions.shape, rows.ptr.tolist()
        (torch.Size([5, 8]), torch.Size([5, 1]), [0, 2, 2, 5])
    """
    if dim != 3 and periodic is not False:
        raise ValueError(f"only rows in three dimensions can be periodic, dim is {dim}")
    count = sum(sizes)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64).to(dtype)
    ptr = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
    if dim is None:
        return Rows(x, ptr)
    if dim != 3:
        spread = 3 * torch.randn(count, dim, generator=generator, dtype=torch.float64)
        return Rows(x, ptr, spread.to(dtype))
    atoms = random_structures(generator, sizes, periodic, dtype=dtype)
    return Rows(x, ptr, atoms.positions, atoms.cell, atoms.pbc, atoms.atomic_numbers)
