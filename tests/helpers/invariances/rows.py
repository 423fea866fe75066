"""Rows of B systems: what layers are checked on, and changes of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flt_mol.functional import system_index
from flt_mol.structures import Structures

ELEMENTS = torch.tensor((1, 6, 7, 8, 13, 28, 29, 46, 47, 78, 79))
_PER_ROW = ("x", "positions", "atomic_numbers", "tags", "fixed")
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
        atomic_numbers, tags, fixed: (N,), as in Structures; None where rows are no atoms.
    """

    x: Tensor
    ptr: Tensor
    positions: Tensor | None = None
    cell: Tensor | None = None
    pbc: Tensor | None = None
    atomic_numbers: Tensor | None = None
    tags: Tensor | None = None
    fixed: Tensor | None = None

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
        """The same systems as Structures, for layers and models that take these."""
        if self.positions is None or self.atomic_numbers is None:
            raise ValueError("these rows are not atoms: make them with random_rows(…, dim=3)")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "x"}
        return Structures(**values, sid=tuple(range(len(self))))

    @classmethod
    def of(cls, structures: Structures) -> Rows:
        """The systems of `structures`, with features (N, 0)."""
        values = {f.name: getattr(structures, f.name) for f in fields(cls) if f.name != "x"}
        return cls(structures.positions[:, :0], **values)

    def __iter__(self) -> Iterator[Rows]:
        """Each system, as a batch of one."""
        for b, (start, stop) in enumerate(itertools.pairwise(self.ptr.tolist())):
            rows = torch.arange(start, stop, device=self.ptr.device)
            yield self.taken(rows, self.ptr.new_tensor([0, len(rows)]), [b])

    @classmethod
    def cat(cls, parts: Sequence[Rows]) -> Rows:
        """All systems of `parts`, in order; all parts have the same fields."""
        merged: dict[str, Any] = {}
        for name in (*_PER_ROW, *_PER_SYSTEM):
            values = [getattr(part, name) for part in parts]
            merged[name] = None if values[0] is None else torch.cat(values)
        sizes = torch.cat([part.sizes for part in parts])
        return cls(ptr=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), **merged)

    def taken(
        self, rows: Tensor, ptr: Tensor | None = None, systems: list[int] | None = None
    ) -> Rows:
        """Rows by indices (N',), with their `ptr` (None keeps it), and some or all systems."""
        index: dict[str, Any] = dict.fromkeys(_PER_ROW, rows)
        if systems is not None:
            index |= dict.fromkeys(_PER_SYSTEM, systems)
        found = {n: v[at] for n, at in index.items() if (v := getattr(self, n)) is not None}
        return replace(self, ptr=self.ptr if ptr is None else ptr, **found)

    def moved(self, moves: Tensor) -> Rows:
        """Positions plus (N, ℓ)."""
        return replace(self, positions=self.placed() + moves.to(self.placed()))

    def turned(self, q: Tensor) -> Rows:
        """Positions and lattice vectors, as rows, times q (B, ℓ, ℓ) of their system, by float64."""
        positions = self.placed()
        turned = (positions.double().unsqueeze(-2) @ q[self.system]).squeeze(-2)
        cell = None if self.cell is None else (self.cell.double() @ q).to(self.cell)
        return replace(self, positions=turned.to(positions), cell=cell)

    def placed(self) -> Tensor:
        """`positions`, or ValueError where there are none."""
        if self.positions is None:
            raise ValueError("this check needs rows with positions")
        return self.positions

    def lattice(self) -> tuple[Tensor, Tensor]:
        """`cell` and `pbc`, or ValueError where nothing repeats."""
        if self.cell is None or self.pbc is None or not bool(self.pbc.any()):
            raise ValueError("this check needs periodic systems: random_rows(…, periodic=True)")
        return self.cell, self.pbc

    def to(self, target: torch.device | torch.dtype | str) -> Rows:
        """The same rows on a device, or with all floats in a dtype."""
        keeps = isinstance(target, torch.dtype)
        values = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        floats = {n: v for n, v in values.items() if v.is_floating_point() or not keeps}
        return replace(self, **{name: value.to(target) for name, value in floats.items()})


def seeded() -> torch.Generator:
    """One with seed 0: checks repeat, and leave torch's global one alone."""
    return torch.Generator().manual_seed(0)


def random_rows(
    generator: torch.Generator,
    sizes: Sequence[int] = (5, 0, 9, 1),
    width: int = 8,
    *,
    dim: int | None = 3,
    periodic: bool | Sequence[bool] = False,
    dtype: torch.dtype = torch.float32,
) -> Rows:
    """Random rows: standard normal features, and atoms of `random_structures` where ℓ = 3.

    Args:
        generator: of all numbers, on CPU.
        sizes: rows of each of the B systems, 0 allowed.
        width: C.
        dim: ℓ; None gives no positions, other numbers than 3 give normal ones of width 3.
        periodic: pbc of all systems, or one value for each lattice vector.
        dtype: of all floats.
    """
    x = torch.randn(sum(sizes), width, generator=generator, dtype=torch.float64).to(dtype)
    ptr = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
    if dim is None:
        return Rows(x, ptr)
    if dim != 3:
        places = 3 * torch.randn(sum(sizes), dim, generator=generator, dtype=torch.float64)
        return Rows(x, ptr, places.to(dtype))
    return replace(Rows.of(random_structures(generator, sizes, periodic, dtype=dtype)), x=x)


def random_structures(
    generator: torch.Generator,
    natoms: Sequence[int] = (5, 9, 14),
    periodic: bool | Sequence[bool] = True,
    *,
    dtype: torch.dtype = torch.float32,
) -> Structures:
    """Random systems with all fields: for checks, not physics.

    Atoms lie on jittered points of a grid of 2.5 Å in a random triclinic cell, none closer than
    about 1.2 Å. Tags are random, atoms of tag 0 fixed, energies standard normal.

    Args:
        generator: of all numbers, on CPU.
        natoms: atoms of each of the B systems, 0 allowed.
        periodic: pbc of all systems, or one value for each lattice vector.
        dtype: of positions and cells.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5

    def system(sid: int, n: int) -> Structures:
        side = max(1, round(n ** (1 / 3) + 0.4999))
        cell = side * 2.5 * (torch.eye(3, dtype=torch.float64) + 0.2 * uniform(3, 3))
        points = torch.randperm(side**3, generator=generator)[:n]
        grid = torch.stack([points // side**2, points // side % side, points % side], dim=1)
        positions = (grid + 0.5 + 0.4 * uniform(n, 3)) / side @ cell
        tags = torch.randint(3, (n,), generator=generator)
        return Structures.single(
            ELEMENTS[torch.randint(len(ELEMENTS), (n,), generator=generator)],
            positions,
            cell=cell,
            pbc=periodic,
            tags=tags,
            fixed=tags == 0,
            sid=sid,
            energy=float(torch.randn((), generator=generator, dtype=torch.float64)),
            positions_relaxed=positions + 0.2 * uniform(n, 3),
            dtype=dtype,
        )

    return Structures.cat([system(sid, n) for sid, n in enumerate(natoms)])
