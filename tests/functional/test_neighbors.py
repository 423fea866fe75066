import itertools

import pytest
import torch
from periodic import ALL_PBC, F64, batch, lattice_shifts, rotation, seeded

from flt_mol.functional import UnfitSystemError, neighbor_pairs
from flt_mol.functional.neighbors import pair_lengths


def listed(pairs):
    return [tuple(row) for row in torch.column_stack(list(pairs)).tolist()]


def by_images(positions, cell, pbc, ptr, cutoff, reach=5):
    found = set()
    for b, (start, stop) in enumerate(itertools.pairwise(ptr.tolist())):
        r = positions[start:stop]
        for shift in lattice_shifts(cell[b], pbc[b], reach).tolist():
            d = r[:, None] - r[None] - torch.tensor(shift, dtype=F64) @ cell[b]
            for i, j in (d.norm(dim=-1) < cutoff).nonzero().tolist():
                if i != j or any(shift):
                    found.add((start + i, start + j, *shift))
    return sorted(found)


@pytest.mark.parametrize("pbc", ALL_PBC)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("cutoff", [1.0, 4.2])
def test_pairs_are_those_of_a_loop_over_images(pbc, skewed, cutoff):
    positions, cell, _, ptr = batch((5, 0, 1, 6))
    on = torch.tensor(pbc).expand(4, 3)
    positions[2] = positions[1]  # one place, two atoms
    if skewed:
        cell[:, 1] += 2 * cell[:, 0]
    found = neighbor_pairs(positions, cell, on, ptr, cutoff)
    assert listed(found) == by_images(positions, cell, on, ptr, cutoff)
    assert not found.shift[:, ~on[0]].any()


def test_vectors_point_from_the_image_of_the_sender_to_the_receiver():
    positions, cell, pbc, ptr = batch((5, 0, 1, 6))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 4.2)
    found = pairs.vectors(positions, cell, ptr)
    system = torch.bucketize(pairs.index_i, ptr, right=True) - 1
    for p in range(0, len(found), 7):
        image = positions[pairs.index_j[p]] + pairs.shift[p].double() @ cell[system[p]]
        torch.testing.assert_close(found[p], positions[pairs.index_i[p]] - image)
    assert (pair_lengths(found) < 4.2).all()
    both = {(i, j, *t): v for (i, j, *t), v in zip(listed(pairs), found.tolist(), strict=True)}
    for (i, j, *t), v in both.items():
        assert both[(j, i, *(-x for x in t))] == [-x for x in v]


@pytest.mark.parametrize("change", ["rotation", "lattice shifts", "basis", "translation"])
def test_distances_do_not_depend_on_how_a_system_is_written(change):
    positions, cell, _, ptr = batch((7,))
    pbc = torch.tensor([[True, True, False]])
    at, box = positions, cell
    if change == "rotation":
        at, box = positions @ rotation().T, cell @ rotation().T
    elif change == "translation":
        at = positions + 1e4
    elif change == "basis":
        box = torch.tensor([[1, 5, 0], [0, 1, 0], [0, 0, 1]], dtype=F64) @ cell
    else:
        steps = torch.randint(-9, 10, (7, 3), generator=seeded()) * pbc
        at = positions + steps.double() @ cell[0]
    found = []
    for r, c in ((positions, cell), (at, box)):
        pairs = neighbor_pairs(r, c, pbc, ptr, 4.0)
        r_ij = pair_lengths(pairs.vectors(r, c, ptr))
        found.append((torch.stack([pairs.index_i, pairs.index_j]), r_ij))
    (one, near), (other, moved) = found
    assert torch.equal(one, other)
    for i in range(7):
        mine = [r[one[0] == i].sort().values for r in (near, moved)]
        torch.testing.assert_close(*mine, rtol=0, atol=1e-9)


def test_counts_of_crystals():
    fcc = torch.tensor([[[0, 1.8, 1.8], [1.8, 0, 1.8], [1.8, 1.8, 0]]])  # a = 3.6
    on, ptr = torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 1])
    for cutoff, count in ((2.0, 0), (2.6, 12), (3.7, 18), (4.5, 42), (5.2, 54)):
        assert len(neighbor_pairs(torch.zeros(1, 3), fcc, on, ptr, cutoff).index_i) == count
    chain = torch.tensor([[False, True, False]])
    found = neighbor_pairs(torch.ones(1, 3), 2 * torch.eye(3)[None], chain, ptr, 4.1)
    assert found.shift[:, 1].tolist() == [-2, -1, 1, 2]


@pytest.mark.parametrize(
    ("extent", "repeats", "cell"),
    [
        ([1e7, 0, 0], [0, 0, 0], None),
        ([1e6, 1e6, 0], [0, 0, 0], None),
        ([1e6, 1e6, 1e6], [0, 0, 0], None),
        ([0, 1e4, 1e4], [1, 0, 0], [3.0, 0, 0]),
        ([1e3, 1e3, 0], [1, 1, 1], [2e3, 2e3, 3.0]),
        ([4e6, 0, 0], [1, 1, 1], [4.0, 4.0, 4.0]),
    ],
)
def test_wide_and_thin_systems_neither_crash_nor_hang(extent, repeats, cell):
    positions = torch.tensor([[0, 0, 0], [1.0, 0, 0], [0, 0, 0]], dtype=F64)
    positions[2] += torch.tensor(extent, dtype=F64) + 0.25
    box = torch.diag(torch.tensor(cell or [0.0] * 3, dtype=F64))[None]
    pbc, ptr = torch.tensor([repeats]).bool(), torch.tensor([0, 3])
    pairs = neighbor_pairs(positions, box, pbc, ptr, 3.5)
    assert (pair_lengths(pairs.vectors(positions, box, ptr)) < 3.5).all()
    joined = {(i, j) for i, j, *_ in listed(pairs)}
    assert {(0, 1), (1, 0)} <= joined
    assert ((0, 2) in joined) == (extent[0] == 4e6)


def test_self_pairs_and_groups():
    positions, cell, pbc, ptr = batch((3, 2))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 4.2, self_pairs=True)
    assert int(pairs.is_self().sum()) == 5
    without = neighbor_pairs(positions, cell, pbc, ptr, 4.2)
    assert sorted(listed(pairs)) == sorted([*listed(without), *[(i, i, 0, 0, 0) for i in range(5)]])
    groups = pairs.groups()
    assert torch.equal(groups.index_i[groups.group], pairs.index_i)
    assert torch.equal(groups.index_j[groups.group], pairs.index_j)
    both = torch.stack([groups.index_i, groups.index_j])
    assert both.shape[1] == len(torch.unique(both, dim=1).T) < len(pairs.index_i)


def test_nothing_and_what_does_not_fit():
    none = neighbor_pairs(torch.zeros(0, 3), None, None, torch.tensor([0]), 3.0)
    assert none.shift.shape == (0, 3)
    positions, cell, pbc, ptr = batch((3, 2))
    for cutoff in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="cutoff"):
            neighbor_pairs(positions, cell, pbc, ptr, cutoff)
    for bad, name in ((positions, "positions"), (cell, "cell")):
        bad[-1] = float("nan")
        with pytest.raises(UnfitSystemError, match=name) as caught:
            neighbor_pairs(positions, cell, pbc, ptr, 3.0)
        assert caught.value.system == 1
        bad[-1] = 4 * torch.eye(3) if name == "cell" else 0.0
    with pytest.raises(UnfitSystemError, match="singular"):
        neighbor_pairs(positions, 0 * cell, pbc, ptr, 3.0)


def test_lengths_have_no_gradient_where_atoms_coincide():
    x = torch.tensor([[0.0, 0, 0], [0, 3, 4]], requires_grad=True)
    (gradient,) = torch.autograd.grad(pair_lengths(x).sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0, 0], [0, 0.6, 0.8]]))
