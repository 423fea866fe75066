"""Checks of what must not matter to a layer: order, place, orientation, choice of lattice vectors.

Each compares a layer's outputs before and after a change of :class:`~flt_mol.testing.Rows`, in
eval mode, raises AssertionError where they differ by more than ``tolerance · max|y|`` (y all
outputs before), naming the row that differs most, and returns the error found. NaN never agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flt_mol.testing._common import seeded
from flt_mol.testing.layers import Layer, agree_at, evaluated
from flt_mol.testing.rows import Rows


def check_layer_permutation(
    layer: Layer, rows: Rows, *, tolerance: float = 1e-5, generator: torch.Generator | None = None
) -> float:
    """Rows of a system in another order have the same outputs, in that order."""
    generator = seeded(generator)
    order = torch.cat(
        [
            torch.randperm(size, generator=generator) + start
            for start, size in zip(rows.ptr.tolist(), rows.sizes.tolist(), strict=False)
        ]
    ).to(rows.ptr.device)
    first, second = evaluated(layer, rows), evaluated(layer, rows.taken(order))
    change = "when the rows of each system were reordered"
    return agree_at(rows, first[order], second, tolerance, change, order)


def check_layer_system_order(layer: Layer, rows: Rows, *, tolerance: float = 1e-5) -> float:
    """Systems in reverse order have the same outputs."""
    systems = range(len(rows) - 1, -1, -1)
    other = Rows.cat([rows[b] for b in systems])
    places = torch.arange(rows.num_rows, device=rows.ptr.device)
    order = torch.cat([places[rows.ptr[b] : rows.ptr[b + 1]] for b in systems])
    first, second = evaluated(layer, rows), evaluated(layer, other)
    change = "when the systems came in reverse order"
    return agree_at(rows, first[order], second, tolerance, change, order)


def check_layer_translation(
    layer: Layer,
    rows: Rows,
    *,
    tolerance: float = 1e-5,
    distance: int = 100,
    generator: torch.Generator | None = None,
) -> float:
    """A system shifted as a whole by up to `distance` Å (or tokens) per axis.

    Positions are first rounded to 1/1024 and shifts are whole, so that the shift itself is exact
    in float32 (below 8,000): what differs is the layer's doing. Each system has its own shift.
    """
    before = _rounded(rows)
    positions = before.needed_positions()
    shape = (len(rows), positions.shape[1])
    shift = torch.randint(-distance, distance + 1, shape, generator=seeded(generator))
    after = replace(before, positions=positions + shift.to(positions)[rows.system])
    change = f"when each system was shifted by up to {distance}"
    return _compare(layer, before, after, tolerance, change)


def check_layer_rotation(
    layer: Layer, rows: Rows, *, tolerance: float = 1e-5, generator: torch.Generator | None = None
) -> float:
    """Positions, with the cell where there is one, of each system rotated together.

    For layers that are invariant only nearly, `tolerance` is the error that they state; what is
    returned is the error that they have.

    Raises:
        ValueError: positions of one dimension, where nothing can turn.
    """
    positions = rows.needed_positions()
    dim = positions.shape[1]
    if dim < 2:
        raise ValueError("rows with positions of one dimension cannot be rotated")
    shape = (len(rows), dim, dim)
    normal = torch.randn(shape, generator=seeded(generator), dtype=torch.float64)
    q, _ = torch.linalg.qr(normal)
    q[..., 0] *= torch.linalg.det(q).sign()[:, None]  # proper rotations only
    q = q.to(positions.device)
    turned = (positions.double().unsqueeze(-2) @ q[rows.system]).squeeze(-2).to(positions.dtype)
    after = replace(rows, positions=turned)
    if rows.cell is not None:
        after = replace(after, cell=(rows.cell.double() @ q).to(rows.cell.dtype))
    return _compare(layer, rows, after, tolerance, "when each system was rotated")


def check_layer_lattice_shifts(
    layer: Layer, rows: Rows, *, tolerance: float = 1e-5, generator: torch.Generator | None = None
) -> float:
    """Each row moved by −1, 0 or 1 of each periodic vector of its system.

    Positions and cells are first rounded to 1/1024 Å, so that the moves are exact in float32.
    """
    before = _rounded(rows)
    positions, cell, pbc = before.needed_lattice()
    shape = (rows.num_rows, 3)
    counts = torch.randint(-1, 2, shape, generator=seeded(generator)).to(positions.device)
    moves = (counts * pbc[rows.system])[:, :, None] * cell[rows.system]
    after = replace(before, positions=positions + moves.sum(dim=1))
    return _compare(layer, before, after, tolerance, "when rows were moved by lattice vectors")


def check_layer_cell_basis(
    layer: Layer, rows: Rows, *, tolerance: float = 1e-5, generator: torch.Generator | None = None
) -> float:
    """The same lattice told by other vectors: sheared into one another, reversed and renumbered.

    Only periodic vectors are added to others and reversed; open ones stay as they are, but all
    three, with their `pbc`, change places.
    """
    generator = seeded(generator)
    before = _rounded(rows)
    _, cell, pbc = before.needed_lattice()
    cells, repeats = [], []
    for vectors, periodic in zip(cell.cpu().double(), pbc.cpu(), strict=True):
        order = torch.randperm(3, generator=generator)
        cells.append((_change_of_basis(periodic, generator) @ vectors)[order])
        repeats.append(periodic[order])
    new_cell = torch.stack(cells).to(cell)
    after = replace(before, cell=new_cell, pbc=torch.stack(repeats).to(pbc.device))
    change = "when each lattice was given by other vectors"
    return _compare(layer, before, after, tolerance, change)


def check_layer_supercell(
    layer: Layer,
    rows: Rows,
    *,
    repeats: Sequence[tuple[int, int, int]] = ((2, 2, 1), (2, 2, 2)),
    tolerance: float = 1e-5,
) -> float:
    """Every copy of a row in a repeated cell has the outputs of the row in the single cell.

    Vectors that are not periodic are not repeated.
    """
    before = _rounded(rows)
    before.needed_lattice()
    first = evaluated(layer, before)
    errors = []
    for counts in repeats:
        after, source = supercell(before, counts)
        change = f"from a single cell to {'×'.join(map(str, counts))} of them"
        second = evaluated(layer, after)
        errors.append(agree_at(rows, first[source], second, tolerance, change, source))
    return max(errors)


def supercell(
    rows: Rows, counts: tuple[int, int, int], *, everywhere: bool = False
) -> tuple[Rows, Tensor]:
    """`rows` repeated along their periodic vectors, or along all, and the row each is a copy of.

    Args:
        rows: with cells.
        counts: copies along each vector.
        everywhere: whether vectors that are not periodic are repeated as well.
    """
    if rows.cell is None or rows.pbc is None:
        raise ValueError("these rows have no cells to repeat")
    steps = torch.cartesian_prod(*(torch.arange(n) for n in counts)).reshape(-1, 3)
    parts, sources = [], []
    for b, part in enumerate(rows):
        assert part.cell is not None
        assert part.pbc is not None
        free = part.pbc[0] | everywhere
        times = torch.where(free, torch.tensor(counts).to(free.device), 1)
        kept = steps.to(free.device)
        kept = kept[(kept < times).all(dim=1)]
        source = torch.arange(part.num_rows, device=free.device).repeat(len(kept))
        ptr = torch.tensor([0, len(source)], dtype=torch.int64, device=free.device)
        copies = part.taken(source, ptr)
        cell = part.cell[0]
        moves = (kept[:, :, None] * cell).sum(dim=1).repeat_interleave(part.num_rows, dim=0)
        positions = copies.needed_positions() + moves
        parts.append(replace(copies, positions=positions, cell=(times[:, None] * cell)[None]))
        sources.append(source + rows.ptr[b])
    return Rows.cat(parts), torch.cat(sources)


def _compare(layer: Layer, before: Rows, after: Rows, tolerance: float, change: str) -> float:
    first, second = evaluated(layer, before), evaluated(layer, after)
    return agree_at(before, first, second, tolerance, change)


def _rounded(rows: Rows) -> Rows:
    """Positions and cells rounded to 1/1024."""

    def rounded(x: Tensor) -> Tensor:
        return (x * 1024).round() / 1024

    return replace(
        rows,
        positions=rounded(rows.needed_positions()),
        cell=None if rows.cell is None else rounded(rows.cell),
    )


def _change_of_basis(periodic: Tensor, generator: torch.Generator) -> Tensor:
    """(3, 3) whole numbers, float64, of determinant ±1, that mix periodic vectors only."""
    change = torch.eye(3, dtype=torch.float64)
    axes = [i for i in range(3) if bool(periodic[i])]
    if axes:
        change[axes[0], axes[0]] = -1
    for i in axes:
        for j in axes:
            if i != j:
                sign = 1 if bool(torch.rand((), generator=generator) < 0.5) else -1
                shear = torch.eye(3, dtype=torch.float64)
                shear[i, j] = sign
                change = shear @ change
    return change
