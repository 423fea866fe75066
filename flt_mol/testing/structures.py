"""Systems to run checks on: random ones, and changes of given ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flt_mol.structures import Structures


def random_structures(
    generator: torch.Generator,
    natoms: Sequence[int] = (5, 9, 14),
    periodic: bool | Sequence[bool] = True,
    *,
    elements: Sequence[int] = (1, 6, 7, 8, 13, 28, 29, 46, 47, 78, 79),
    spacing: float = 2.5,
    dtype: torch.dtype = torch.float32,
) -> Structures:
    """Random systems with all fields: for checks, not physics.

    Atoms lie on jittered points of a grid of a random triclinic cell, none closer than about half
    of `spacing`, so that no potential is singular. Tags are random, atoms of tag 0 fixed, energies
    standard normal.

    Args:
        generator: source of all draws.
        natoms: atoms of each of the B systems, 0 allowed.
        periodic: pbc of all systems, or one value for each lattice vector.
        elements: atomic numbers to draw from.
        spacing: of the grid, Å.
        dtype: of positions and cells.

    Example:
        >>> random_structures(torch.Generator().manual_seed(0), natoms=(3, 0, 4))
        Structures(3 systems, 7 atoms)
    """
    choices = torch.tensor(elements, dtype=torch.int64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5

    def system(sid: int, n: int) -> Structures:
        side = max(1, round(n ** (1 / 3) + 0.4999))
        cell = side * spacing * (torch.eye(3, dtype=torch.float64) + 0.2 * uniform(3, 3))
        points = torch.randperm(side**3, generator=generator)[:n]
        grid = torch.stack([points // side**2, points // side % side, points % side], dim=1)
        fractional = (grid + 0.5 + 0.4 * uniform(n, 3)) / side
        tags = torch.randint(3, (n,), generator=generator)
        positions = fractional @ cell
        return Structures.single(
            choices[torch.randint(len(choices), (n,), generator=generator)],
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


def rounded_to_1024ths(structures: Structures) -> Structures:
    """Positions and cells rounded to 1/1024 Å."""

    def rounded(x: Tensor) -> Tensor:
        return (x * 1024).round() / 1024

    return replace(
        structures, positions=rounded(structures.positions), cell=rounded(structures.cell)
    )


def shifted(structures: Structures, shift: Tensor) -> Structures:
    """Positions, relaxed ones too, moved by shift (N, 3), Å."""
    relaxed = structures.positions_relaxed
    return replace(
        structures,
        positions=structures.positions + shift,
        positions_relaxed=None if relaxed is None else relaxed + shift,
    )


def tiled(system: Structures, times: int) -> Structures:
    """`system` repeated along its first lattice vector, or beside itself where it has none."""
    first = system.cell[0, 0]
    positions, cell = system.positions, system.cell[0].clone()
    if not bool(first.any()):
        width = 0.0 if not len(positions) else float(positions[:, 0].max() - positions[:, 0].min())
        first = torch.tensor([width + 3.0, 0, 0]).to(positions)
    else:
        cell[0] = times * first
    steps = torch.arange(times, device=positions.device).to(positions)[:, None, None] * first
    return Structures.single(
        system.atomic_numbers.repeat(times),
        (positions + steps).reshape(-1, 3),
        cell=cell,
        pbc=system.pbc[0],
        tags=system.tags.repeat(times),
        fixed=system.fixed.repeat(times),
        sid="partner",
        dtype=positions.dtype,
    ).to(positions.device)
