from dataclasses import replace

import pytest
import torch

from flt_mol import Structures, testing
from flt_mol.structures import relaxed_displacement
from flt_mol.training.augmentation import move_atoms, rotate, shift_images


def systems():
    slab = testing.random_structures(torch.Generator().manual_seed(0), natoms=(6, 9, 4))
    molecule = Structures.single([1, 8], [[0.0, 0, 0], [1, 0, 0]])
    slab = replace(slab, energy=None, energy_initial=None, positions_relaxed=None)
    both = Structures.cat([slab, molecule])
    return replace(both, positions_relaxed=both.positions + 0.1)


def images(structures):
    """Fractional coordinates mod 1 of the periodic systems, whichever frame they are in."""
    first = int(structures.ptr[3])
    inverse = torch.linalg.inv(structures.cell[:3].double())[structures.system[:first]]
    fractional = torch.einsum("ni,nij->nj", structures.positions[:first].double(), inverse)
    turn = 2 * torch.pi * fractional
    return torch.stack([turn.cos(), turn.sin()])


@pytest.mark.parametrize("kind", ["z", "full"])
def test_rotation_keeps_distances_cell_and_periodic_images(kind):
    before = systems()
    torch.manual_seed(3)
    after = rotate(before, kind)
    assert not torch.allclose(after.positions, before.positions, atol=0.1)
    for a, b in zip(after, before, strict=True):
        assert torch.allclose(
            torch.cdist(a.positions, a.positions), torch.cdist(b.positions, b.positions), atol=1e-4
        )
        gram = a.cell @ a.cell.transpose(1, 2)
        assert torch.allclose(gram, b.cell @ b.cell.transpose(1, 2), atol=1e-3)
    assert torch.allclose(images(after), images(before), atol=1e-4)
    moved = (after.positions_relaxed - after.positions).norm(dim=-1)
    assert torch.allclose(moved, torch.full_like(moved, 0.1 * 3**0.5), atol=1e-4)


def test_rotation_about_z_keeps_heights_and_mirrors_half():
    system = Structures.single([1] * 3, [[1.0, 0, 2], [0, 1.0, 3], [0, 0, 5]])
    torch.manual_seed(0)
    turned = rotate(Structures.cat([system] * 400), "z")
    assert torch.equal(turned.positions[:, 2], torch.tensor([2.0, 3.0, 5.0]).repeat(400))
    pairs = turned.positions.view(400, 3, 3)[:, :2, :2]
    determinants = torch.linalg.det(pairs)
    assert torch.allclose(determinants.abs(), torch.ones(400), atol=1e-5)
    assert 150 < int((determinants > 0).sum()) < 250


def test_full_rotation_has_no_preferred_direction():
    system = Structures.single([1], [[0.0, 0.0, 1.0]])
    torch.manual_seed(0)
    directions = rotate(Structures.cat([system] * 4000), "full").positions
    # The mean of 4000 unit vectors has components of sd 0.009, the second moments 0.005.
    assert directions.mean(0).abs().max() < 0.05
    moments = directions.T @ directions / 4000
    assert (moments - torch.eye(3) / 3).abs().max() < 0.03


def test_images_move_by_lattice_vectors_along_a_and_b_only():
    before = systems()
    torch.manual_seed(1)
    after = shift_images(before)
    shift = after.positions - before.positions
    assert torch.allclose(images(after), images(before), atol=1e-4)
    assert shift.abs().max() > 1.0
    for b, system in enumerate(after):
        inside = slice(int(after.ptr[b]), int(after.ptr[b + 1]))
        if system.pbc.all():
            along = shift[inside] @ torch.linalg.inv(system.cell[0])
            assert torch.allclose(along, along.round(), atol=1e-4)
            assert along[:, 2].abs().max() < 1e-4
            # All atoms are within one cell along a and b.
            fractional = system.positions @ torch.linalg.inv(system.cell[0])
            assert (fractional.amax(0) - fractional.amin(0))[:2].max() <= 1.0
        else:
            assert torch.equal(shift[inside], torch.zeros_like(shift[inside]))
    assert torch.allclose(after.positions_relaxed - after.positions, torch.tensor(0.1), atol=1e-4)


@pytest.mark.parametrize("kind", ["z", "full", "images"])
def test_pairs_follow(kind):
    before = systems().with_pairs(4.0)
    torch.manual_seed(2)
    after = shift_images(before) if kind == "images" else rotate(before, kind)
    anew = replace(after, pairs=None, cutoff=None).with_pairs(4.0)
    assert after.cutoff == 4.0
    assert len(anew.pairs.index_i) > 100
    for kept, made in zip(after.pairs, anew.pairs, strict=True):
        assert torch.equal(kept, made)


@pytest.mark.parametrize(
    "vectors",
    [
        [[3.0, 0, 0], [0, 4, 0], [0, 0, 0]],
        [[3.0, 0, 0], [0, 4, 0], [3, 4, 0]],
        [[3.0, 0, 0], [0, 4, 0], [1, 0.7, 1e-7]],
        [[3.0, 0, 0], [0, 4, 0], [0, 0, torch.nan]],
    ],
)
def test_singular_periodic_cells_are_named(vectors):
    before = systems()
    cell = before.cell.clone()
    cell[1] = torch.tensor(vectors)
    before = replace(before, cell=cell, sid=("a", "flat-7", "c", "d"))
    with pytest.raises(ValueError, match=r"cell of sid flat-7 is \[\[3.0.*shift_images=false"):
        shift_images(before)
    pbc = before.pbc.clone()
    pbc[1, 2] = False
    open_one = replace(before, pbc=pbc)
    assert torch.equal(shift_images(open_one)[1].positions, before[1].positions)


def test_small_and_skewed_cells_are_not_singular():
    cell = 1e-3 * torch.tensor([[1.0, 0, 0], [0.99, 0.1, 0], [0, 0, 1000]])
    one = Structures.single([1], [[0.0, 0, 0]], cell=cell, pbc=True)
    assert torch.isfinite(shift_images(one).positions).all()


def test_nothing_to_do_and_unknown():
    structures = systems()
    assert rotate(structures, "none") is structures
    with pytest.raises(ValueError, match="'x'; known: none, z, full"):
        rotate(structures, "x")


def movable(count=200):
    """Systems of a free atom that relaxes across its cell's boundary, and a fixed one."""
    system = Structures.single(
        [1, 29],
        [[0.5, 0.0, 0.0], [2.0, 2.0, 2.0]],
        cell=4 * torch.eye(3),
        pbc=True,
        fixed=[False, True],
        positions_relaxed=[[3.5, 0.5, 0.0], [2.0, 2.5, 2.0]],
        energy=1.0,
        energy_initial=2.0,
    )
    return Structures.cat([system] * count)


def test_interpolation_starts_between_initial_and_relaxed():
    before = movable(2000)
    torch.manual_seed(0)
    after, moved = move_atoms(before, interpolation=0.4)
    step = (after.positions - before.positions)[::2]
    reach = step[:, 1] / 0.5
    assert torch.allclose(step, reach[:, None] * torch.tensor([-1.0, 0.5, 0.0]), atol=1e-5)
    assert torch.equal(after.positions[1::2], before.positions[1::2]), "fixed atoms stay"
    assert torch.equal(moved, reach > 0)
    # 2000 draws of 0.4: sd of the share 0.011; of means of uniform numbers of 800 draws 0.010.
    assert abs(float(moved.float().mean()) - 0.4) < 0.05
    assert abs(float(reach[moved].mean()) - 0.5) < 0.05
    assert float(reach.max()) <= 1.0
    left = relaxed_displacement(after)[::2]
    expected = (1 - reach)[:, None] * torch.tensor([-1.0, 0.5, 0.0])
    assert torch.allclose(left, expected, atol=1e-5), "the target follows"
    assert torch.equal(after.energy, before.energy)


def test_noise_moves_free_atoms_and_its_target_leads_back():
    before = movable(2000)
    torch.manual_seed(0)
    after, moved = move_atoms(before, noise=0.2)
    step = after.positions - before.positions
    assert torch.equal(step[1::2], torch.zeros(2000, 3))
    assert step[::2].std(0).sub(0.2).abs().max() < 0.02, "sd of 2000 draws: 0.003"
    assert step[::2].mean(0).abs().max() < 0.03
    assert bool(moved.all())
    left = relaxed_displacement(after)
    assert torch.allclose(left + step, relaxed_displacement(before), atol=1e-5)


def test_both_at_once_and_dtype():
    before = replace(movable(3), positions=movable(3).positions.double())
    torch.manual_seed(1)
    after, moved = move_atoms(before, noise=0.1, interpolation=1.0)
    assert after.positions.dtype == torch.float64
    assert moved.tolist() == [True] * 3
    step = (after.positions - before.positions)[::2]
    assert (step[:, 2].abs() > 1e-4).all(), "noise"
    assert step[:, 0].mean() < -0.1, "and interpolation"


def test_systems_without_free_atoms_are_not_moved():
    fixed = replace(movable(2), fixed=torch.tensor([True, True, False, True]))
    for settings in ({"noise": 0.1}, {"interpolation": 1.0}):
        after, moved = move_atoms(fixed, **settings)
        assert moved.tolist() == [False, True]
        assert torch.equal(after.positions[:2], fixed.positions[:2])


def test_pairs_of_moved_atoms_are_dropped():
    before = movable(2).with_pairs(3.0)
    after, _ = move_atoms(before, noise=0.1)
    assert after.pairs is None
    assert after.cutoff is None


def test_nothing_is_drawn_for_nothing():
    before = movable(2).with_pairs(3.0)
    state = torch.get_rng_state()
    after, moved = move_atoms(before)
    assert after is before
    assert not bool(moved.any())
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_are_torchs_own():
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(move_atoms(movable(4), noise=0.1, interpolation=0.5)[0].positions)
    assert torch.equal(*found)


def test_interpolation_needs_a_relaxed_structure():
    before = replace(movable(2), positions_relaxed=None)
    with pytest.raises(ValueError, match=r"needs relaxed .* some of sids 0, 0: .*polation=0$"):
        move_atoms(before, interpolation=0.5)
    with pytest.raises(ValueError, match=r"training.interpolation needs .* for sid 0: give"):
        move_atoms(before[1], interpolation=0.5)
    move_atoms(before, noise=0.1)
