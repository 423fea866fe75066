import pytest
import torch
from periodic import ALL_PBC, F64, batch, lattice_shifts, over_images, rotation, seeded

from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs, pair_lengths

CUTOFF = 4.2  # longer than two of the three lattice vectors


def found(pairs):
    rows = torch.cat([pairs.index_i[:, None], pairs.index_j[:, None], pairs.shift], 1)
    return [tuple(row) for row in rows.tolist()]


def expected(positions, cell, pbc, ptr, *, self_pairs=False, reach=4):
    triples = []
    for rows, shift, vectors in over_images(positions, cell, pbc, ptr, CUTOFF, reach):
        near = vectors.norm(dim=-1) < CUTOFF
        if not self_pairs and not shift.any():
            near.fill_diagonal_(False)
        triples += [
            (rows.start + i, rows.start + j, *shift.tolist()) for i, j in near.nonzero().tolist()
        ]
    return sorted(triples)


@pytest.mark.parametrize("pbc", ALL_PBC)
@pytest.mark.parametrize("left_handed", [False, True])
def test_all_pairs_are_found_whatever_repeats(pbc, left_handed):
    positions, cell, _, ptr = batch((6,))
    cell = cell * torch.tensor([-1.0 if left_handed else 1.0, 1.0, 1.0], dtype=F64)[:, None]
    pairs = neighbor_pairs(positions, cell, torch.tensor([pbc]), ptr, CUTOFF)
    truth = expected(positions, cell, torch.tensor([pbc]), ptr)
    assert found(pairs) == truth  # sorted, too
    assert len(truth) > 20


@pytest.mark.parametrize("pbc", ALL_PBC)
def test_vectors_of_axes_that_do_not_repeat_are_ignored(pbc):
    positions, cell, _, ptr = batch((6,))
    pbc = torch.tensor([pbc])
    zeros = torch.where(pbc[:, :, None], cell, 0.0)
    nonsense = torch.where(pbc[:, :, None], cell, 7.0)  # singular as a whole
    pairs = [neighbor_pairs(positions, c, pbc, ptr, CUTOFF) for c in (cell, zeros, nonsense)]
    assert found(pairs[0]) == found(pairs[1]) == found(pairs[2])


def test_a_batch_with_empty_systems_and_mixed_pbc():
    system = batch((5, 0, 1, 6, 0))
    pairs = neighbor_pairs(*system, CUTOFF)
    assert found(pairs) == expected(*system)
    assert 5 in pairs.index_i  # the single atom sees images of itself
    assert all(x.dtype == torch.int64 for x in pairs)


@pytest.mark.parametrize("self_pairs", [False, True])
def test_self_pairs_add_each_atom_once(self_pairs):
    system = batch((5, 0, 1, 6))
    pairs = neighbor_pairs(*system, CUTOFF, self_pairs=self_pairs)
    assert found(pairs) == expected(*system, self_pairs=self_pairs)
    assert pairs.is_self().sum() == (12 if self_pairs else 0)
    assert found(pairs.without_self()) == expected(*system)


@pytest.mark.parametrize("ptr", [[0], [0, 0], [0, 0, 0]])
@pytest.mark.parametrize("self_pairs", [False, True])
def test_no_atoms(ptr, self_pairs):
    systems = len(ptr) - 1
    cell, pbc = torch.zeros(systems, 3, 3), torch.zeros(systems, 3, dtype=torch.bool)
    pairs = neighbor_pairs(
        torch.zeros(0, 3), cell, pbc, torch.tensor(ptr), 5.0, self_pairs=self_pairs
    )
    assert pairs.shift.shape == (0, 3)
    assert pairs.groups().group.shape == (0,)
    assert pairs.vectors(torch.zeros(0, 3), cell, torch.tensor(ptr)).shape == (0, 3)


def test_lone_and_distant_atoms_have_no_pairs():
    open_axes = torch.zeros(2, 3, dtype=torch.bool)
    positions = torch.tensor([[0.0, 0, 0], [0.0, 0, 0], [9e7, 0, 0]])
    pairs = neighbor_pairs(positions, torch.zeros(2, 3, 3), open_axes, torch.tensor([0, 1, 3]), 5.0)
    assert len(pairs.index_i) == 0


@pytest.mark.parametrize("pbc", ALL_PBC[:-1])
@pytest.mark.parametrize("distance", [1e4, 1e6, 5e7])
def test_parts_of_a_system_may_be_far_apart(pbc, distance):
    positions, cell, _, _ = batch((6,))
    pbc = torch.tensor([pbc])
    vectors = cell[0][pbc[0]]
    away = torch.linalg.svd(vectors)[2][-1] if len(vectors) else torch.ones(3, dtype=F64)
    apart = torch.cat([positions, positions + distance * away])
    once = found(neighbor_pairs(positions, cell, pbc, torch.tensor([0, 6]), CUTOFF))
    twice = found(neighbor_pairs(apart, cell, pbc, torch.tensor([0, 12]), CUTOFF))
    assert twice == once + [(i + 6, j + 6, *shift) for i, j, *shift in once]


def test_a_wide_flat_layer():
    # 150² cells of one cutoff, one cell thick: more than are laid over it.
    grid = 1.5 * CUTOFF * torch.cartesian_prod(*[torch.arange(100, dtype=F64)] * 2)
    layer = torch.cat([grid, torch.zeros(len(grid), 1, dtype=F64)], 1)
    twice = torch.cat([layer, layer[:100] + torch.tensor([0.3 * CUTOFF, 0, 0], dtype=F64)])
    system = torch.zeros(1, 3, 3), torch.zeros(1, 3, dtype=torch.bool)
    pairs = neighbor_pairs(twice, *system, torch.tensor([0, len(twice)]), CUTOFF)
    assert pairs.index_i.tolist() == [*range(100), *range(len(layer), len(twice))]
    assert pairs.index_j.tolist() == [*range(len(layer), len(twice)), *range(100)]


def test_atoms_at_the_same_place_are_pairs():
    system = torch.zeros(2, 3), torch.zeros(1, 3, 3), torch.zeros(1, 3, dtype=torch.bool)
    assert found(neighbor_pairs(*system, torch.tensor([0, 2]), 1.0)) == [
        (0, 1, 0, 0, 0),
        (1, 0, 0, 0, 0),
    ]


def test_a_system_alone_has_the_pairs_it_has_in_the_batch():
    positions, cell, pbc, ptr = batch((5, 0, 1, 6))
    together = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    alone = neighbor_pairs(positions[6:], cell[3:], pbc[3:], torch.tensor([0, 6]), CUTOFF)
    rows = together.index_i >= 6
    assert torch.equal(together.index_i[rows] - 6, alone.index_i)
    assert torch.equal(together.index_j[rows] - 6, alone.index_j)
    assert torch.equal(together.shift[rows], alone.shift)


def test_unwrapped_atoms_have_the_same_vectors():
    positions, cell, pbc, ptr = batch((6,))
    moved = positions + (torch.randint(-2000, 2000, (6, 3, 1), generator=seeded()) * cell[0]).sum(1)
    pairs, truth = (neighbor_pairs(r, cell, pbc, ptr, CUTOFF) for r in (moved, positions))
    vectors = sorted_rows(pairs, pairs.vectors(moved, cell, ptr))
    torch.testing.assert_close(
        vectors, sorted_rows(truth, truth.vectors(positions, cell, ptr)), rtol=0, atol=1e-9
    )


def sorted_rows(pairs, vectors):
    """i, j and vector of all pairs, ordered by what does not depend on the shift."""
    table = torch.cat([pairs.index_i[:, None].to(F64), pairs.index_j[:, None].to(F64), vectors], 1)
    keys = (table * 1e6).round().tolist()
    return table[torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))]


def test_one_key_for_pair_and_shift_is_no_limit():
    # Spans of 10⁷ cells along three axes do not fit into an integer next to the pair.
    positions = torch.tensor([[0.0, 0, 0], [1.0, 0, 0]], dtype=F64)
    far = positions + torch.tensor([[0.0], [4e7]], dtype=F64)
    system = 4.0 * torch.eye(3, dtype=F64)[None], torch.ones(1, 3, dtype=torch.bool)
    near, moved = (neighbor_pairs(r, *system, torch.tensor([0, 2]), 4.5) for r in (positions, far))
    offset = (moved.index_j - moved.index_i)[:, None] * 10**7
    assert found(NeighborPairs(moved.index_i, moved.index_j, moved.shift + offset)) == found(near)


def test_far_from_the_origin_float32_vectors_are_exact():
    positions, cell, pbc, ptr = batch((5, 0, 1, 6))
    positions = (positions * 512).round() / 512  # so that adding 10⁴ is exact in float32
    near = positions.float()
    far = near + 8192.0
    pairs = [neighbor_pairs(r, cell.float(), pbc, ptr, CUTOFF) for r in (near, far)]
    assert found(pairs[0]) == found(pairs[1])
    vectors = [p.vectors(r, cell.float(), ptr) for p, r in zip(pairs, (near, far), strict=True)]
    assert torch.equal(*vectors)


def test_float32_positions_are_judged_in_float64():
    positions, cell, pbc, ptr = batch((5, 0, 1, 6))
    single = positions.float(), cell.float(), pbc, ptr
    assert found(neighbor_pairs(*single, CUTOFF)) == expected(
        single[0].double(), single[1].double(), pbc, ptr
    )


def distances_per_atom(positions, cell, pbc, ptr):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    r = pairs.vectors(positions, cell, ptr).norm(dim=-1)
    return [r[pairs.index_i == i].sort().values for i in range(len(positions))]


@pytest.mark.parametrize("change", ["rotation", "translation", "basis", "order"])
def test_what_atoms_see_does_not_depend_on_the_description(change):
    positions, cell, pbc, ptr = batch((6,))
    before = distances_per_atom(positions, cell, pbc, ptr)
    order = torch.arange(6)
    if change == "rotation":
        positions, cell = positions @ rotation().T, cell @ rotation().T
    elif change == "translation":
        positions = positions + torch.tensor([3.3, -20.0, 7.7], dtype=F64)
    elif change == "basis":
        cell = torch.tensor([[1.0, 1, 0], [0, 1, 0], [2, 0, 1]], dtype=F64) @ cell
    else:
        order = torch.tensor([3, 5, 0, 1, 4, 2])
        positions = positions[order]
    after = distances_per_atom(positions, cell, pbc, ptr)
    for k, i in enumerate(order.tolist()):
        torch.testing.assert_close(after[k], before[i], rtol=0, atol=1e-10)


@pytest.mark.parametrize("pbc", [(True, True, True), (True, False, True)])
def test_a_skewed_basis_of_the_same_lattice(pbc):
    """Vectors of 70 Å and more whose planes lie 4 hundredths of an Å apart."""
    positions, cell, _, ptr = batch((6, 5))
    steps = torch.tensor([[1.0, 0, 0], [0, 1, 0], [-29, 0, 1]], dtype=F64)
    if all(pbc):
        steps = steps @ torch.tensor([[1.0, 0, 0], [30, 1, 0], [-17, 23, 1]], dtype=F64)
    skewed = torch.stack([cell[0], steps @ cell[1]])  # the first is as before
    where = torch.tensor([pbc] * 2), ptr, CUTOFF
    usual, pairs = (neighbor_pairs(positions, c, *where) for c in (cell, skewed))
    assert found(pairs) == sorted(found(pairs))
    assert pairs.shift.abs().max() > 20

    def seen(pairs, cell):
        vectors = (pairs.vectors(positions, cell, ptr) * 1e6).round().tolist()
        return sorted(
            (i, j, *v)
            for i, j, v in zip(pairs.index_i.tolist(), pairs.index_j.tolist(), vectors, strict=True)
        )

    assert seen(pairs, skewed) == seen(usual, cell)
    alone = neighbor_pairs(positions[6:], skewed[1:], where[0][1:], ptr[1:] - ptr[1], CUTOFF)
    rows = pairs.index_i >= 6
    assert torch.equal(alone.shift, pairs.shift[rows])
    assert torch.equal(alone.index_j + 6, pairs.index_j[rows])


def test_both_directions_are_listed():
    pairs = neighbor_pairs(*batch((5, 0, 1, 6)), CUTOFF)
    back = NeighborPairs(pairs.index_j, pairs.index_i, -pairs.shift)
    assert sorted(found(back)) == found(pairs)


def test_vectors_point_from_the_image_to_the_receiver():
    positions = torch.tensor([[0.5, 0, 0], [3.5, 0, 0]])
    cell, ptr = 4.0 * torch.eye(3)[None], torch.tensor([0, 2])
    pairs = neighbor_pairs(positions, cell, torch.tensor([[True, False, False]]), ptr, 1.5)
    assert found(pairs) == [(0, 1, -1, 0, 0), (1, 0, 1, 0, 0)]
    assert pairs.vectors(positions, cell, ptr)[:, 0].tolist() == [1.0, -1.0]


def test_vectors_have_gradients_to_positions_and_cell():
    positions, cell, pbc, ptr = batch((3, 0, 2))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    inputs = [positions.requires_grad_(), cell.requires_grad_()]
    assert torch.autograd.gradcheck(lambda r, c: pairs.vectors(r, c, ptr), inputs)
    seeds = torch.randn(len(pairs.shift), 3, generator=seeded(), dtype=F64)
    (gradient,) = torch.autograd.grad((pairs.vectors(*inputs, ptr) * seeds).sum(), cell)
    truth = torch.zeros_like(cell)
    system = (pairs.index_i >= 3).long() * 2
    for s, shift, seed in zip(system, pairs.shift, seeds, strict=True):
        truth[s] -= shift[:, None] * seed
    torch.testing.assert_close(gradient, truth)


def test_length_of_nothing_has_no_slope():
    vectors = torch.tensor([[0.0, 0, 0], [3.0, 0, 4.0]], requires_grad=True)
    pair_lengths(vectors).sum().backward()
    torch.testing.assert_close(vectors.grad, torch.tensor([[0.0, 0, 0], [0.6, 0, 0.8]]))


def test_groups_hold_all_images_of_a_pair():
    pairs = neighbor_pairs(*batch((5, 0, 1, 6)), CUTOFF, self_pairs=True)
    groups = pairs.groups()
    assert torch.equal(groups.index_i[groups.group], pairs.index_i)
    assert torch.equal(groups.index_j[groups.group], pairs.index_j)
    distinct = sorted(set(zip(pairs.index_i.tolist(), pairs.index_j.tolist(), strict=True)))
    assert list(zip(groups.index_i.tolist(), groups.index_j.tolist(), strict=True)) == distinct
    assert len(distinct) < len(pairs.index_i)


def test_pairs_move_to_another_device():
    pairs = neighbor_pairs(*batch((5,)), CUTOFF)
    moved = pairs.to("meta")
    assert isinstance(moved, NeighborPairs)
    assert {x.device.type for x in moved} == {"meta"}
    assert {x.device.type for x in pairs.groups().to("meta")} == {"meta"}
    system = torch.zeros(4, 3, device="meta"), torch.zeros(1, 3, 3, device="meta")
    made = NeighborPairs(*(x[:0] for x in moved)).vectors(*system, torch.zeros(2, device="meta"))
    assert made.device.type == "meta"


def test_vectors_compile_as_one_graph():
    positions, cell, pbc, ptr = batch((5, 0, 1, 6))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    call = torch.compile(NeighborPairs.vectors, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        call(pairs, positions, cell, ptr), pairs.vectors(positions, cell, ptr), rtol=0, atol=0
    )


FLAT = [
    [[4.0, 0, 0], [4.0, 0, 0], [0, 0, 4.0]],
    [[0.0] * 3] * 3,
    [[4.0, 0, 0], [0, 4, 0], [0, 0, 0.01]],
]


@pytest.mark.parametrize("cell", FLAT)
def test_singular_cells_are_refused_along_periodic_axes(cell):
    cells = torch.stack([4.0 * torch.eye(3), torch.tensor(cell)])
    pbc, ptr = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"cell\[1\] .*singular.*or set pbc False"):
        neighbor_pairs(torch.zeros(2, 3), cells, pbc, ptr, 4.0)
    pbc[1] = False
    assert found(neighbor_pairs(torch.zeros(2, 3), cells, pbc, ptr, 3.9)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.zeros(2, 2)}, "positions has shape"),
        ({"cell": torch.zeros(3, 3)}, "cell has shape"),
        ({"pbc": torch.zeros(3, dtype=torch.bool)}, "pbc has shape"),
        ({"pbc": torch.zeros(1, 3)}, "pbc is torch.float32"),
        ({"positions": torch.tensor([[0.0, 0, 0], [0, float("nan"), 0]])}, r"positions\[1\]"),
        ({"positions": torch.tensor([[0.0, 0, 0], [0, 0, -2e8]])}, r"positions\[1\] .*origin"),
        ({"cell": torch.full((1, 3, 3), float("inf"))}, r"cell\[0\]"),
        ({"cutoff": 0.0}, "cutoff is 0.0"),
        ({"cutoff": float("nan")}, "cutoff is nan"),
        ({"ptr": torch.tensor([0, 3])}, "ptr must"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, message):
    arguments = {
        "positions": torch.zeros(2, 3),
        "cell": torch.zeros(1, 3, 3),
        "pbc": torch.zeros(1, 3, dtype=torch.bool),
        "ptr": torch.tensor([0, 2]),
        "cutoff": 4.0,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        neighbor_pairs(**arguments)


def test_the_reach_of_the_written_out_sums_is_long_enough():
    system = batch((5, 0, 1, 6))
    assert expected(*system, reach=4) == expected(*system, reach=5)
    assert len(lattice_shifts(system[1][0], system[2][0])) == 9**3


def test_arrays_are_refused_by_name():
    positions, cell = torch.zeros(1, 3), torch.eye(3)[None]
    pbc, ptr = torch.zeros(1, 3, dtype=torch.bool), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="cell is a ndarray"):
        neighbor_pairs(positions, cell.numpy(), pbc, ptr, 3.0)
