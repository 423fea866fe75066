"""Checks of energy models that know periodicity; see :mod:`flt_mol.testing.energy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flt_mol.modes import evaluating
from flt_mol.structures import Structures
from flt_mol.testing._common import seeded
from flt_mol.testing._energies import Model, compare, energies_agree, energies_of
from flt_mol.testing.structures import repeated, rounded_to_1024ths, shifted


def check_periodic_images(
    model: Model,
    structures: Structures,
    *,
    tolerance: float = 1e-5,
    generator: torch.Generator | None = None,
) -> None:
    """For models that know periodicity: each atom moved by −1, 0 or 1 of each periodic vector.

    Positions and cells are first rounded to 1/1024 Å, so that the moves are exact in float32.
    """
    generator = seeded(generator)
    before = rounded_to_1024ths(structures)
    counts = torch.randint(-1, 2, (before.num_atoms, 3), generator=generator).to(before.positions)
    counts = counts * before.pbc[before.system]
    moves = (counts.unsqueeze(2) * before.cell[before.system]).sum(dim=1)
    after = replace(shifted(before, moves), pairs=None, cutoff=None)
    compare(model, before, after, tolerance, "its atoms were moved by lattice vectors")


def check_supercell(
    model: Model,
    structures: Structures,
    *,
    extensive: bool = True,
    repeats: Sequence[tuple[int, int, int]] = ((2, 1, 1), (2, 2, 2)),
    tolerance: float = 1e-5,
) -> None:
    """Repeated cells have the multiple of the energy, or the same energy.

    What a system without atoms has, such as the mean that a normaliser adds, is not multiplied:
    E(n cells) − E(no atoms) = n (E(one cell) − E(no atoms)). Compared are the energies per cell, so
    `tolerance` is for one cell. Vectors that are not periodic are not repeated.

    Args:
        model: see :mod:`flt_mol.testing.energy`.
        structures: with periodic vectors.
        extensive: whether energies grow with the system; else they stay.
        repeats: copies along each vector.
        tolerance: see :mod:`flt_mol.testing.energy`.

    Raises:
        ValueError: nothing repeats.
    """
    if not bool(structures.pbc.any()):
        raise ValueError("this check needs periodic systems: random_structures(…, periodic=True)")
    before = rounded_to_1024ths(structures)
    dtype, device = before.positions.dtype, before.positions.device
    empty = Structures.single([], [], sid="no atoms", dtype=dtype).to(device)
    with evaluating(model), torch.no_grad():
        first = energies_of(model, before)
        for counts in repeats:
            after, times = repeated(before, counts)
            second = energies_of(model, after)
            if extensive:
                offset = energies_of(model, empty)
                second = offset + (second - offset) / times.to(second)
            change = f"per cell from one cell to {'×'.join(map(str, counts))} of them"
            energies_agree(structures, first, second, tolerance, change)
