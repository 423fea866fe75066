from dataclasses import replace

import pytest
import torch

from flt_mol import Structures
from flt_mol.structures import relaxed_displacement
from flt_mol.training.augmentation import move_atoms, rotate, shift_images


def slabs(count=3):
    """Skewed periodic cells, free and fixed atoms, each free atom relaxing across a boundary."""
    made = []
    for b in range(count):
        generator = torch.Generator().manual_seed(b)
        cell = torch.tensor([[5.0, 0, 0], [1, 6, 0], [0, 0.5, 18]]) + 0.3 * torch.rand(
            3, 3, generator=generator
        )
        fractional = torch.rand(6, 3, generator=generator) * torch.tensor([1, 1, 0.3])
        relaxed = fractional + torch.tensor([0.97, -1.04, 0.02])
        made.append(
            Structures.single(
                [29, 8, 1, 6, 29, 29],
                fractional @ cell,
                cell=cell,
                pbc=True,
                fixed=[True, False, False, False, True, False],
                positions_relaxed=relaxed @ cell,
                energy=1.0,
                energy_initial=2.0,
                sid=f"slab-{b}",
            )
        )
    return Structures.cat(made)


def fractional(structures):
    inverse = torch.linalg.inv(structures.cell.double())[structures.system]
    return torch.einsum("ni,nij->nj", structures.positions.double(), inverse)


@pytest.mark.parametrize("kind", ["z", "full", "images"])
def test_targets_and_pairs_follow(kind):
    before = slabs().with_pairs(4.0)
    before = replace(before, forces=relaxed_displacement(before))
    torch.manual_seed(2)
    after = shift_images(before) if kind == "images" else rotate(before, kind)
    assert not torch.allclose(after.positions, before.positions, atol=0.1)
    # The matrix that takes the cell of each system takes its displacements along.
    matrix = torch.linalg.solve(before.cell.double(), after.cell.double())
    expected = torch.einsum(
        "ni,nij->nj", relaxed_displacement(before).double(), matrix[before.system]
    )
    torch.testing.assert_close(relaxed_displacement(after).double(), expected, atol=1e-4, rtol=0)
    assert expected.norm(dim=-1).max() > 0.1
    torch.testing.assert_close(after.forces.double(), expected, atol=1e-4, rtol=0)
    again = replace(after, pairs=None, cutoff=None).with_pairs(4.0)
    assert len(again.pairs.index_i) > 50
    for kept, searched in zip(after.pairs, again.pairs, strict=True):
        assert torch.equal(kept, searched)


@pytest.mark.parametrize("kind", ["z", "full"])
def test_rotation_is_orthogonal_and_mirrors_half(kind):
    before = Structures.cat([slabs(1)] * 400)
    torch.manual_seed(3)
    after = rotate(before, kind)
    matrix = torch.linalg.solve(before.cell.double(), after.cell.double())
    eye = torch.eye(3, dtype=torch.float64).expand_as(matrix)
    torch.testing.assert_close(matrix @ matrix.transpose(1, 2), eye, atol=1e-5, rtol=0)
    torch.testing.assert_close(fractional(after), fractional(before), atol=1e-4, rtol=0)
    mirrored = int((torch.linalg.det(matrix) < 0).sum())
    assert 150 < mirrored < 250  # sd 10
    # Directions have no preference: the mean of 400 unit vectors has components of sd 0.03.
    assert matrix[:, 0].mean(0).abs().max() < 0.15
    if kind == "z":
        torch.testing.assert_close(after.positions[:, 2], before.positions[:, 2])
    else:
        second = (matrix[:, 2, :, None] * matrix[:, 2, None, :]).mean(0)
        assert (second - torch.eye(3) / 3).abs().max() < 0.1


def test_images_move_by_whole_lattice_vectors_along_a_and_b():
    molecule = Structures.single(
        [1], [[0.0, 0, 0]], positions_relaxed=[[0, 0, 1]], energy=1.0, energy_initial=0.0
    )
    before = Structures.cat([slabs(), molecule])
    torch.manual_seed(1)
    after = shift_images(before)
    assert torch.equal(after[3].positions, before[3].positions)
    for system, old in zip(list(after)[:3], list(before)[:3], strict=True):
        moves = fractional(system) - fractional(old)
        torch.testing.assert_close(moves, moves.round(), atol=1e-5, rtol=0)
        assert moves[:, :2].abs().max() > 0.5
        assert moves[:, 2].abs().max() < 1e-5
        extent = fractional(system).amax(0) - fractional(system).amin(0)
        assert extent[:2].max() <= 1.0, "all within one cell"


def test_small_and_skewed_cells_are_not_singular():
    cell = 1e-3 * torch.tensor([[1.0, 0, 0], [0.99, 0.1, 0], [0, 0, 1000]])
    one = Structures.single([1], [[0.0, 0, 0]], cell=cell, pbc=True)
    assert shift_images(one).positions.isfinite().all()


def test_nothing_to_do():
    before = slabs()
    state = torch.get_rng_state()
    assert rotate(before, "none") is before
    after, moved = move_atoms(before)
    assert after is before
    assert not bool(moved.any())
    assert torch.equal(torch.get_rng_state(), state)


def movable(count, fixed=(False, True)):
    """A free atom that relaxes by (-1, 0.5, 0) Å across the boundary of its cell, a fixed one."""
    system = Structures.single(
        [1, 29],
        [[0.5, 0.0, 0.0], [2.0, 2.0, 2.0]],
        cell=4 * torch.eye(3),
        pbc=True,
        fixed=list(fixed),
        positions_relaxed=[[3.5, 0.5, 0.0], [2.0, 2.5, 2.0]],
        energy=1.0,
        energy_initial=2.0,
    )
    return Structures.cat([system] * count)


def test_interpolation_starts_between_initial_and_relaxed():
    before = movable(2000).with_pairs(3.0)
    torch.manual_seed(0)
    after, moved = move_atoms(before, interpolation=0.4)
    step = (after.positions - before.positions)[::2]
    reach = step[:, 1] / 0.5
    target = torch.tensor([-1.0, 0.5, 0.0])
    torch.testing.assert_close(step, reach[:, None] * target, atol=1e-5, rtol=0)
    assert torch.equal(after.positions[1::2], before.positions[1::2]), "fixed atoms stay"
    assert torch.equal(moved, reach > 0)
    # 2000 draws of 0.4: sd of the share 0.011; of means of uniform numbers of 800 draws 0.010.
    assert abs(float(moved.float().mean()) - 0.4) < 0.05
    assert abs(float(reach[moved].mean()) - 0.5) < 0.05
    left = relaxed_displacement(after)[::2]
    torch.testing.assert_close(left, (1 - reach)[:, None] * target, atol=1e-5, rtol=0)
    assert torch.equal(after.energy, before.energy)
    assert after.pairs is None
    assert after.cutoff is None


def test_noise_moves_free_atoms_and_its_target_leads_back():
    before = movable(2000)
    torch.manual_seed(0)
    after, moved = move_atoms(before, noise=0.2)
    step = after.positions - before.positions
    assert torch.equal(step[1::2], torch.zeros(2000, 3))
    assert step[::2].std(0).sub(0.2).abs().max() < 0.02, "sd of 2000 draws: 0.003"
    assert step[::2].mean(0).abs().max() < 0.03
    assert bool(moved.all())
    back = relaxed_displacement(after) + step
    torch.testing.assert_close(back, relaxed_displacement(before), atol=1e-5, rtol=0)


def test_systems_without_free_atoms_are_not_moved():
    both = Structures.cat([movable(1, (True, True)), movable(1)])
    for settings in ({"noise": 0.1}, {"interpolation": 1.0}):
        after, moved = move_atoms(both, **settings)
        assert moved.tolist() == [False, True]
        assert torch.equal(after.positions[:2], both.positions[:2])


def test_draws_are_torchs_own():
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(move_atoms(movable(4), noise=0.1, interpolation=0.5)[0].positions)
    assert torch.equal(*found)


def test_interpolation_needs_a_relaxed_structure():
    before = replace(movable(1), positions_relaxed=None, sid=("odd-1",))
    with pytest.raises(ValueError, match="odd-1"):
        move_atoms(before, interpolation=0.5)
    move_atoms(before, noise=0.1)
