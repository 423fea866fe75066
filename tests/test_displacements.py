from dataclasses import replace

import pytest
import torch

from flt_mol import Structures, testing
from flt_mol.structures import relaxed_displacement


def moved(dtype=torch.float32, **changes):
    """Random systems whose free atoms move by up to 0.6 Å, and by how much."""
    generator = torch.Generator().manual_seed(0)
    before = testing.random_structures(generator, natoms=(5, 0, 9, 4), dtype=dtype)
    move = 0.5 * torch.randn(before.positions.shape, generator=generator, dtype=dtype)
    move = move.clamp(-0.35, 0.35)
    return replace(before, positions_relaxed=before.positions + move, **changes), move


def rewrapped(structures, seed=1):
    """The same relaxed atoms, each shifted by some lattice vectors."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(-2, 3, structures.positions.shape, generator=generator)
    lattice = structures.cell[structures.system]
    far = structures.positions_relaxed + (shift[:, :, None] * lattice).sum(1)
    return replace(structures, positions_relaxed=far)


def test_how_far_free_atoms_move():
    structures, move = moved()
    out = relaxed_displacement(structures)
    assert out.dtype == torch.float32
    assert structures.fixed.any()
    assert not structures.fixed.all()
    expected = torch.where(structures.fixed[:, None], 0.0, move)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert not out[structures.fixed].any()


def test_relaxed_positions_wrapped_into_other_cells():
    structures, move = moved(torch.float64)
    other = rewrapped(structures)
    assert (other.positions_relaxed - other.positions).norm(dim=-1).max() > 3
    expected = torch.where(structures.fixed[:, None], 0.0, move)
    torch.testing.assert_close(relaxed_displacement(other), expected, rtol=0, atol=1e-10)


def test_open_axes_are_not_wrapped():
    far = Structures.single(
        [1, 1], [[0.0, 0, 0]] * 2, cell=3 * torch.eye(3), pbc=[True, False, False],
        positions_relaxed=[[2.5, 2.5, 0.0], [0.0, 2.5, 2.5]],
    )  # fmt: skip
    assert relaxed_displacement(far).tolist() == [[-0.5, 2.5, 0.0], [0.0, 2.5, 2.5]]


def test_batch_is_alone():
    structures, _ = moved()
    structures = rewrapped(structures)
    alone = torch.cat([relaxed_displacement(system) for system in structures])
    assert torch.equal(relaxed_displacement(structures), alone)


def test_what_is_missing_is_named():
    structures, _ = moved(sid=("a-1", "a-2", 77, "b"))
    with pytest.raises(
        ValueError, match="positions_relaxed, missing for some of sids a-1, a-2, 77, b$"
    ):
        relaxed_displacement(replace(structures, positions_relaxed=None))
    many = Structures.cat([replace(structures, positions_relaxed=None)] * 2)
    with pytest.raises(ValueError, match="77, b, a-1 and 3 more$"):
        relaxed_displacement(many)


def test_bad_systems_are_named():
    structures, _ = moved(sid=("a-1", "a-2", 77, "b"))
    relaxed, cell = structures.positions_relaxed.clone(), structures.cell.clone()
    relaxed[-1, 0] = torch.nan
    with pytest.raises(ValueError, match="displacements of sid b: .*finite"):
        relaxed_displacement(replace(structures, positions_relaxed=relaxed))
    cell[2, 2] = 0.0
    with pytest.raises(ValueError, match="sid 77.*singular"):
        relaxed_displacement(replace(structures, cell=cell))
