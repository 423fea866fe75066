"""Checks of what periodic systems have in common with their images and multiples."""

import pytest
import torch

from flt_mol.testing import check_periodic_images, check_permutation, check_supercell
from flt_mol.testing import random_structures as drawn
from flt_mol.testing.structures import repeated


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def total(structures, values):
    out = torch.zeros(len(structures), dtype=torch.float64)
    return out.index_add(0, structures.system, values.double())


def atoms(structures):
    return total(structures, structures.atomic_numbers)


def mean(structures):
    return atoms(structures) / structures.natoms.clamp(min=1)


KINDS = [True, (True, False, True)]


@pytest.mark.parametrize("periodic", KINDS)
def test_supercells(periodic):
    structures = drawn(seeded(), (3, 0, 5), periodic)
    check_supercell(lambda s: 0.1 * atoms(s), structures)
    check_supercell(lambda s: 0.1 * atoms(s) - 7.0, structures)
    check_supercell(mean, structures, extensive=False)
    for wrong, extensive in ((mean, True), (atoms, False)):
        with pytest.raises(AssertionError, match="per cell from one cell to 2×1×1 of them"):
            check_supercell(wrong, structures, extensive=extensive)


def test_supercells_that_tell_in_one_direction_only():
    def by_depth(structures):
        return mean(structures) + structures.cell[:, 2].norm(dim=-1).double()

    with pytest.raises(AssertionError, match="2×2×2"):
        check_supercell(by_depth, drawn(seeded(), (3,)), extensive=False)
    check_supercell(by_depth, drawn(seeded(), (3,)), extensive=False, repeats=[(3, 1, 1)])


def test_the_tolerance_is_for_one_cell():
    structures = drawn(seeded(), (3, 5))

    def off(s):
        return 0.01 * atoms(s) + 1e-4 * (total(s, torch.ones(s.num_atoms)) > 8)

    check_supercell(off, structures, repeats=[(2, 2, 2)], tolerance=2e-5)
    with pytest.raises(AssertionError, match="2×2×2"):
        check_supercell(off, structures, repeats=[(2, 2, 2)], tolerance=1e-6)


def test_nothing_repeats():
    with pytest.raises(ValueError, match="needs periodic systems"):
        check_supercell(atoms, drawn(seeded(), (3,), False))


def test_repeated_systems():
    one = drawn(seeded(), (3, 2), (True, True, False))
    more, times = repeated(one, (2, 3, 4))
    assert times.tolist() == [6, 6]
    assert more.natoms.tolist() == [18, 12]
    expected = one.cell * torch.tensor([2, 3, 1])[:, None]
    torch.testing.assert_close(more.cell, expected)
    assert torch.equal(more.pbc, one.pbc)
    assert torch.equal(more.fixed[:18], one.fixed[:3].repeat(6))
    moves = more.positions[:18] - one.positions[:3].repeat(6, 1)
    fractional = torch.linalg.solve(one.cell[0].T, moves.T)
    steps = {tuple(step) for step in fractional.T.round().int().tolist()}
    assert (fractional - fractional.round()).abs().max() < 1e-5
    assert steps == {(i, j, 0) for i in range(2) for j in range(3)}


@pytest.mark.parametrize("check", [check_permutation, check_periodic_images])
def test_pairs_of_atoms_that_moved_are_not_handed_on(check):
    """They would name other atoms, or other images, than those that are near now."""
    structures = drawn(seeded(), (4, 5)).with_pairs(3.0)

    def near(s):
        given = s if s.pairs is not None else s.with_pairs(3.0)
        lengths = given.pairs.vectors(s.positions, s.cell, s.ptr).double().norm(dim=-1)
        out = torch.zeros(s.num_atoms, dtype=torch.float64)
        weight = s.atomic_numbers[given.pairs.index_i] * (3 - lengths) ** 3
        return total(s, 0.01 * out.index_add(0, given.pairs.index_i, weight))

    check(near, structures, tolerance=1e-4)
