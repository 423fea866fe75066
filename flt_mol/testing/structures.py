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


def repeated(structures: Structures, counts: Sequence[int]) -> tuple[Structures, Tensor]:
    """Each system `counts` times along its vectors that are periodic, and how often that is (B,).

    Copies of atoms keep their tags and marks; targets, and neighbour pairs, are left out.
    """
    steps = torch.cartesian_prod(*(torch.arange(n) for n in counts)).reshape(-1, 3)
    parts, numbers = [], []
    for system in structures:
        wanted = torch.tensor(counts).to(system.pbc.device)
        along = torch.where(system.pbc[0], wanted, 1)
        kept = steps.to(along.device)
        kept = kept[(kept < along).all(dim=1)]
        moves = (kept.to(system.cell)[:, :, None] * system.cell[0]).sum(1)
        part = Structures.single(
            system.atomic_numbers.repeat(len(kept)).cpu(),
            (system.positions + moves[:, None]).reshape(-1, 3).cpu(),
            cell=(along.to(system.cell)[:, None] * system.cell[0]).cpu(),
            pbc=system.pbc[0].cpu(),
            tags=system.tags.repeat(len(kept)).cpu(),
            fixed=system.fixed.repeat(len(kept)).cpu(),
            sid=system.sid[0],
            dtype=system.positions.dtype,
        )
        parts.append(part.to(along.device))
        numbers.append(len(kept))
    return Structures.cat(parts), torch.tensor(numbers)


def reordered(structures: Structures, generator: torch.Generator) -> tuple[Structures, Tensor]:
    """The atoms of each system in random order, without pairs, and (N,) which atom each was."""
    order = torch.cat(
        [
            int(start) + torch.randperm(int(n), generator=generator)
            for start, n in zip(structures.ptr, structures.natoms, strict=False)
        ]
        or [torch.empty(0, dtype=torch.int64)]
    ).to(structures.ptr.device)
    relaxed = structures.positions_relaxed
    after = replace(
        structures,
        atomic_numbers=structures.atomic_numbers[order],
        positions=structures.positions[order],
        tags=structures.tags[order],
        fixed=structures.fixed[order],
        positions_relaxed=None if relaxed is None else relaxed[order],
        pairs=None,
        cutoff=None,
    )
    return after, order


def random_orthogonal(count: int, generator: torch.Generator, *, mirrored: bool = False) -> Tensor:
    """(B, 3, 3) float64 rotations; of determinant −1 if `mirrored`."""
    normal = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    q: Tensor = torch.linalg.qr(normal).Q
    sign: Tensor = torch.linalg.det(q).sign() * (-1 if mirrored else 1)
    return q * sign[:, None, None]


def turned(structures: Structures, q: Tensor) -> Structures:
    """Positions, relaxed ones too, and lattice vectors, as rows, times q (B, 3, 3) of their system.

    Multiplied in float64, then rounded to the dtype of each; neighbour pairs stay what they are.
    """
    relaxed, per_atom = structures.positions_relaxed, q[structures.system.cpu()]
    return replace(
        structures,
        positions=times(structures.positions, per_atom),
        cell=times(structures.cell, q[:, None]),
        positions_relaxed=None if relaxed is None else times(relaxed, per_atom),
    )


def times(rows: Tensor, q: Tensor) -> Tensor:
    """Rows (…, 3) times q (…, 3, 3), by float64, in the dtype of the rows."""
    product: Tensor = rows.double().unsqueeze(-2) @ q.to(rows.device)
    return product.squeeze(-2).to(rows.dtype)
