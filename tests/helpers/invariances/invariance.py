"""Checks of invariances: order, batch, padding, position, orientation, lattice vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flt_mol.structures import Structures
from helpers.invariances.layers import (
    EnergyLayer,
    Layer,
    evaluated,
    evaluating,
    fitted,
    same,
)
from helpers.invariances.rows import Rows, seeded


def check_permutation(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """Rows of a system in another order have the same outputs, in that order."""
    layer, rows = fitted(layer, rows)
    keys = torch.rand(rows.num_rows, generator=seeded(), dtype=torch.float64)
    order = (keys.to(rows.ptr.device) + rows.system).argsort()
    first, second = evaluated(layer, rows), evaluated(layer, rows.taken(order))
    return same(layer, first[order], second, tolerance, "when rows were reordered")


def check_translation(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """Each system may be shifted as a whole by up to 100 Å (or tokens) per axis.

    Positions are first rounded to 1/1024 and shifts are whole, so that the shift itself is exact
    in float32 (below 8,000): what differs is the layer's doing.
    """
    layer, rows = fitted(layer, rows)
    before = _rounded(rows)
    shape = (len(rows), before.placed().shape[1])
    shift = torch.randint(-100, 101, shape, generator=seeded())
    after = before.moved(shift.to(rows.ptr.device)[rows.system])
    return _compare(layer, before, after, tolerance, "when shifted by up to 100")


def check_rotation(layer: Layer, rows: Any, *, tolerance: float = 1e-4) -> float:
    """Each system may be rotated, with its cell where there is one.

    The default tolerance leaves room for the rounding of rotated float32 positions. For layers that
    are invariant only nearly, pass the error that they state; what they have is returned.
    """
    layer, rows = fitted(layer, rows)
    dim = rows.placed().shape[1]
    q = torch.linalg.qr(torch.randn(len(rows), dim, dim, generator=seeded()).double()).Q
    q[..., 0] *= torch.linalg.det(q).sign()[:, None]
    after = rows.turned(q.to(rows.ptr.device))
    return _compare(layer, rows, after, tolerance, "when each system was rotated")


def check_periodic_images(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """Each row may be moved by −1, 0 or 1 of each periodic vector of its system."""
    layer, rows = fitted(layer, rows)
    before = _rounded(rows)
    cell, pbc = before.lattice()
    counts = torch.randint(-1, 2, (rows.num_rows, 3), generator=seeded()).to(cell.device)
    moves = ((counts * pbc[rows.system])[:, :, None] * cell[rows.system]).sum(1)
    change = "when rows were moved by lattice vectors"
    return _compare(layer, before, before.moved(moves), tolerance, change)


def check_cell_basis(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """A lattice may be given by other vectors: sheared, reversed and renumbered.

    Only periodic vectors are added to others and reversed; all three change places with their pbc.
    """
    layer, rows = fitted(layer, rows)
    generator = seeded()
    before = _rounded(rows)
    cell, pbc = before.lattice()
    cells, repeats = [], []
    for vectors, periodic in zip(cell.cpu().double().clone(), pbc.cpu(), strict=True):
        order = torch.randperm(3, generator=generator)
        axes = periodic.nonzero().flatten().tolist()
        for i in axes:
            for j in axes:
                sign = 1 if bool(torch.rand((), generator=generator) < 0.5) else -1
                vectors[i] = -vectors[i] if i == j else vectors[i] + sign * vectors[j]
        cells.append(vectors[order])
        repeats.append(periodic[order])
    after = replace(before, cell=torch.stack(cells).to(cell), pbc=torch.stack(repeats).to(pbc))
    return _compare(layer, before, after, tolerance, "when lattices were given by other vectors")


def check_supercell(
    layer: Layer,
    rows: Any,
    *,
    extensive: bool = True,
    repeats: Sequence[tuple[int, int, int]] = ((2, 2, 1), (2, 2, 2)),
    tolerance: float = 1e-5,
) -> float:
    """Every copy of a row in a repeated cell has the outputs of the row in the single cell.

    Vectors that are not periodic are not repeated. Energies are compared per cell: with
    `extensive`, E(n cells) − E(no atoms) = n (E(one cell) − E(no atoms)); else they stay.
    """
    layer, rows = fitted(layer, rows)
    before, errors = _rounded(rows), [0.0]
    before.lattice()
    first = evaluated(layer, before)
    for counts in repeats:
        after, source = _supercells(before, counts)
        second = evaluated(layer, after)
        if extensive and isinstance(layer, EnergyLayer):
            nothing = Structures.single([], [], dtype=rows.placed().dtype).to(rows.ptr.device)
            with evaluating(layer), torch.no_grad():
                offset = layer.energies(nothing)
            times = (after.sizes / before.sizes.clamp(min=1))[after.system]
            second = offset + (second - offset) / times[:, None]
        change = f"from one cell to {'×'.join(map(str, counts))} of them"
        errors.append(same(layer, first[source], second, tolerance, change))
    return max(errors)


def check_batch_equals_alone(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """A system's outputs do not depend on its batch, nor on the order of systems."""
    layer, rows = fitted(layer, rows)
    parts = list(rows)
    outs = [evaluated(layer, part) for part in parts]
    change = "from a system alone to a batch"
    first = same(layer, torch.cat(outs), evaluated(layer, rows), tolerance, change)
    turned = evaluated(layer, Rows.cat(parts[::-1]))
    return max(first, same(layer, torch.cat(outs[::-1]), turned, tolerance, f"{change}, reversed"))


def _compare(layer: Layer, before: Rows, after: Rows, tolerance: float, change: str) -> float:
    return same(layer, evaluated(layer, before), evaluated(layer, after), tolerance, change)


def _rounded(rows: Rows) -> Rows:
    """Positions and cells rounded to 1/1024 Å: whole shifts are then exact in float32."""
    names = [name for name in ("positions", "cell") if getattr(rows, name) is not None]
    return replace(rows, **{name: (getattr(rows, name) * 1024).round() / 1024 for name in names})


def _supercells(rows: Rows, counts: Sequence[int]) -> tuple[Rows, Tensor]:
    """Systems repeated along their periodic vectors, and the row each is a copy of."""
    cell, pbc = rows.lattice()
    steps = torch.cartesian_prod(*(torch.arange(n) for n in counts)).reshape(-1, 3).to(cell)
    parts, sources = [], []
    for b, part in enumerate(rows):
        times = torch.where(pbc[b], torch.tensor(counts).to(cell), 1)
        moves = steps[(steps < times).all(1)] @ cell[b]
        source = torch.arange(part.num_rows, device=cell.device).repeat(len(moves))
        copies = part.taken(source, rows.ptr.new_tensor([0, len(source)]))
        copies = copies.moved(moves.repeat_interleave(part.num_rows, 0))
        parts.append(replace(copies, cell=(times[:, None] * cell[b])[None]))
        sources.append(source + rows.ptr[b])
    return Rows.cat(parts), torch.cat(sources)
