from dataclasses import replace

import pytest
import torch

from flt_mol import Structures, testing
from flt_mol.training.augmentation import rotate, shift_images


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


def test_nothing_to_do_and_unknown():
    structures = systems()
    assert rotate(structures, "none") is structures
    with pytest.raises(ValueError, match="'x'; known: none, z, full"):
        rotate(structures, "x")
