"""Both ways to search against all images written out: the same pairs, in the same order."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from periodic import ALL_PBC

from flt_mol.functional import _dense_pairs, _pair_search
from flt_mol.functional.neighbors import neighbor_pairs


def written_out(positions, cell, pbc, ptr, cutoff, self_pairs=False):
    """i, j and T of all pairs, from all images in some cells more than could be near."""
    rows = []
    for b, (first, last) in enumerate(itertools.pairwise(ptr.tolist())):
        points = positions[first:last].double().numpy()
        lattice = np.where(pbc[b].numpy()[:, None], cell[b].double().numpy(), 0.0)
        # How far i and j are apart in cells, and how many cells are surely beyond the cutoff.
        duals = np.linalg.pinv(lattice)
        reach = np.where(pbc[b].numpy(), 2 + cutoff * np.linalg.norm(duals, axis=0), 0).astype(int)
        around = np.array(list(itertools.product(*(range(-k, k + 1) for k in reach.tolist()))))
        for i, j in itertools.product(range(last - first), repeat=2):
            shift = around + np.rint((points[i] - points[j]) @ duals).astype(int)
            parts = (shift[:, axis, None] * lattice[axis] for axis in range(3))
            x, y, z = ((points[j] - points[i]) + sum(parts)).T
            near = x * x + y * y + z * z < cutoff * cutoff
            if i == j and not self_pairs:
                near &= shift.any(axis=1)
            rows += [(first + i, first + j, *t) for t in shift[near].tolist()]
    return rows


def found(*system, cutoff, self_pairs=False):
    pairs = neighbor_pairs(*system, cutoff, self_pairs=self_pairs)
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in pairs)
    table = torch.cat([pairs.index_i[:, None], pairs.index_j[:, None], pairs.shift], 1)
    return [tuple(row) for row in table.tolist()]


@pytest.fixture
def only_vesin(monkeypatch):
    monkeypatch.setattr(_pair_search, "_MOST_DISTANCES", 0)


@pytest.fixture
def no_vesin(monkeypatch):
    def search(*_):
        raise AssertionError("a small system went to vesin")

    monkeypatch.setattr(_pair_search._vesin, "search", search)


def check(*system, cutoff, self_pairs=False):
    """All ways agree with what is written out; how many pairs there are."""
    truth = written_out(*system, cutoff, self_pairs)
    assert found(*system, cutoff=cutoff, self_pairs=self_pairs) == truth
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pair_search, "_MOST_DISTANCES", 0)
        assert found(*system, cutoff=cutoff, self_pairs=self_pairs) == truth
    return len(truth)


def one(points, cell, pbc=(True, True, True)):
    points = torch.as_tensor(np.asarray(points))
    ptr = torch.tensor([0, len(points)])
    return points, torch.as_tensor(np.asarray(cell))[None], torch.tensor([list(pbc)]), ptr


def joined(systems):
    points, cells, pbc, ptr = zip(*systems, strict=True)
    sizes = [int(x[1]) for x in ptr]
    offsets = torch.tensor([0, *itertools.accumulate(sizes)])
    return torch.cat(points), torch.cat(cells), torch.cat(pbc), offsets


def turned(rng):
    q, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    return q


def slab(rng, pbc=ALL_PBC[-1]):
    cell = np.diag([5.0, 6.0, 30.0]) + rng.normal(size=(3, 3)) * 0.4
    return rng.random((7, 3)) * [1, 1, 0.2] @ cell, cell


def slab_over_the_edge(rng, pbc=ALL_PBC[-1]):
    points, cell = slab(rng)
    return points + np.floor((points @ np.linalg.inv(cell)) + [0, 0, -0.1]) @ cell * -1.0, cell


def smaller_than_the_cutoff(rng, pbc=ALL_PBC[-1]):
    cell = np.diag([1.4, 2.0, 2.5]) + rng.normal(size=(3, 3)) * 0.1
    return rng.random((2, 3)) @ cell, cell


def skewed(rng, pbc=ALL_PBC[-1]):
    cell = np.diag([4.0, 5.0, 6.0]) @ np.array([[1, 0, 0], [2, 1, 0], [-2, 1.5, 1]])
    turn = turned(rng)
    return rng.random((5, 3)) @ cell @ turn, cell @ turn


def vacuum(rng, pbc=ALL_PBC[-1]):
    return rng.random((6, 3)) * 5, np.diag([1e3, 2e3, 900.0])


def outside(rng, pbc=ALL_PBC[-1]):
    points, cell = slab(rng)
    return points + rng.integers(-40, 40, (7, 3)) * pbc @ cell, cell


def far_away(rng, pbc=ALL_PBC[-1]):
    points, cell = slab(rng)
    return points + 1e5 * rng.normal(size=3), cell


def on_top_of_each_other(rng, pbc=ALL_PBC[-1]):
    cell = np.diag([4.0, 4.0, 5.0])
    return np.repeat(rng.integers(0, 3, (3, 3)) * 2.0, 2, axis=0), cell


def parts_far_apart(rng, pbc=ALL_PBC[-1]):
    points, cell = slab(rng)
    points[3:] += 1e4 * rng.normal(size=3)
    return points, cell


def needle(rng, pbc=ALL_PBC[-1]):
    # Angles so small that moving atoms into the cell would lose digits.
    cell = np.array([[5.0, 0, 0], [5.0, 0.04, 0], [0, 0, 5.0]])
    return rng.random((3, 3)) @ cell, cell


KINDS = [
    slab,
    slab_over_the_edge,
    smaller_than_the_cutoff,
    skewed,
    vacuum,
    outside,
    far_away,
    on_top_of_each_other,
    parts_far_apart,
]


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_find_what_is_written_out(kind):
    rng = np.random.default_rng(0)
    few = 0
    for pbc in ALL_PBC:
        few += check(*one(*kind(rng, pbc), pbc), cutoff=4.0) < 10
    assert few <= len(ALL_PBC) / 2


def test_needles():
    assert check(*one(*needle(np.random.default_rng(0))), cutoff=1.5) > 100


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(ALL_PBC), st.integers(0, 7)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
    st.sampled_from([0.5, 2.0, 3.7]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_batches_of_all_kinds(systems, seed, cutoff, self_pairs, dtype):
    rng, parts = np.random.default_rng(seed), []
    for kind, pbc, atoms in systems:
        points, cell = kind(rng, pbc)
        parts.append(one(points[:atoms], cell, pbc))
    points, cell, pbc, ptr = joined(parts)
    check(points.to(dtype), cell.to(dtype), pbc, ptr, cutoff=cutoff, self_pairs=self_pairs)


@pytest.mark.parametrize("cutoff", [6.0, np.nextafter(6.0, 7), np.nextafter(6.0, 5)])
@pytest.mark.parametrize("moved", [0.0, 1e3])
@pytest.mark.parametrize("rotated", [False, True])
def test_at_the_cutoff_the_last_bit_decides_for_both_ways_and_directions(cutoff, moved, rotated):
    rng = np.random.default_rng(0)
    turn = turned(rng) if rotated else np.eye(3)
    points = np.array(list(itertools.product(range(2), repeat=3))) * 3.0
    system = one((points + moved) @ turn, 6.0 * turn)
    rows = written_out(*system, cutoff)
    assert sorted((j, i, -x, -y, -z) for i, j, x, y, z in rows) == rows
    check(*system, cutoff=cutoff)
    # 8 atoms with 26 neighbours each within 2 steps, and 6 at two steps, at the cutoff itself.
    shells = sum(0 < sum(v * v for v in x) < 4 for x in itertools.product(range(-2, 3), repeat=3))
    assert shells == 26
    if not rotated and moved == 0:
        assert len(rows) == 8 * (shells + 6 * (cutoff > 6))


def test_rounding_of_the_product_is_made_good(monkeypatch):
    # Neighbours a little on either side of the cutoff, by less than float32 can tell.
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(150, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    gap = rng.choice([-1, 1], (150, 1)) * 10 ** rng.uniform(-12, -4, (150, 1))
    system = one(
        np.concatenate([np.zeros((1, 3)), directions * (6 + gap)]) + 20, np.eye(3), [0] * 3
    )
    system = (*system[:2], system[2].bool(), system[3])
    truth = written_out(*system, 6.0)
    assert found(*system, cutoff=6.0) == truth
    assert 30 < sum(i == 0 for i, *_ in truth) < 120
    monkeypatch.setattr(_dense_pairs, "_slack", lambda *_: 0.0)
    assert found(*system, cutoff=6.0) != truth


DIVISIONS = [
    {"_pair_search._MOST_TOGETHER": 2000},
    {"_pair_search._MOST_DISTANCES": 700},
    {"_pair_search.MOST_IMAGES": 80, "_dense_pairs.MOST_IMAGES": 80, "_dense_pairs._ROOM": 200},
    {"_dense_pairs._SLOW_SHARE": (0.0, 1.0)},
    {"_dense_pairs._SLOW_SHARE": (1.0, 1.0)},
]


@pytest.mark.parametrize("self_pairs", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
def test_how_the_work_is_divided_changes_nothing(monkeypatch, division, self_pairs):
    rng = np.random.default_rng(0)
    system = joined([one(*kind(rng)) for kind in (*KINDS[:6], needle, *KINDS)])
    truth = found(*system, cutoff=3.0, self_pairs=self_pairs)
    for name, value in division.items():
        monkeypatch.setattr(f"flt_mol.functional.{name}", value)
    assert found(*system, cutoff=3.0, self_pairs=self_pairs) == truth


def test_small_systems_need_no_vesin(no_vesin):
    rng = np.random.default_rng(0)
    system = joined([one(*kind(rng)) for kind in KINDS[:-1]])
    assert len(found(*system, cutoff=4.0)) > 100


@pytest.mark.parametrize("points", [np.zeros((1200, 3)), np.diag([0.0, 9e3, 0])])
def test_what_is_large_or_wide_goes_to_vesin(no_vesin, points):
    spread = points + np.arange(len(points))[:, None] * 1e-3
    with pytest.raises(AssertionError, match="went to vesin"):
        found(*one(spread, np.eye(3), [False] * 3), cutoff=1.0)


def test_cells_seen_at_an_angle_cost_no_more_images_than_the_span_of_the_atoms():
    # A layer in a tall cell: no image above or below it, and those around it within the cutoff.
    points = np.random.default_rng(0).random((50, 3)) * [10, 10, 5]
    lattices = _pair_search_lattices(np.diag([10.0, 10.0, 30.0]), 6.0)
    images = _pair_search.images_of(points, lattices, np.array([0, 50]), 6.0)
    assert images.sound.all()
    assert (images.counts[2] == 1).all()
    assert images.per_system[0] < 50 * 1.1 * 2.2**2


def _pair_search_lattices(cell, cutoff):
    from flt_mol.functional._pair_lattices import lattices_of

    return lattices_of(cell[None], np.ones((1, 3), bool), cutoff)


def test_one_key_for_pair_and_shift_is_no_limit(only_vesin):
    # Spans of 10⁷ cells along three axes do not fit into an integer next to the pair.
    pair, apart = np.array([[0.0, 0, 0], [1.0, 0, 0]]), np.array([[0.0], [4e7]])
    rows = found(*one(pair + apart, 4.0 * np.eye(3)), cutoff=4.5, self_pairs=True)
    home = found(*one(pair, 4.0 * np.eye(3)), cutoff=4.5, self_pairs=True)
    assert rows == [(i, j, *(t - (j - i) * 10**7 for t in shift)) for i, j, *shift in home]


@pytest.mark.parametrize("cutoff", [1e-20, 1e20])
def test_cutoffs_of_no_earthly_size(cutoff):
    points = np.array([[0.0, 0, 0], [0.0, 0, 0], [1.0, 0, 0]])
    rows = found(*one(points, np.eye(3), [False] * 3), cutoff=cutoff)
    assert rows == [
        (i, j, 0, 0, 0) for i, j in itertools.permutations(range(3), 2) if cutoff > 1 or i + j < 2
    ]


def test_a_lone_atom_in_open_space_sees_at_most_itself():
    lone = one(np.zeros((1, 3)), np.eye(3), [False] * 3)
    assert found(*lone, cutoff=2.0) == []
    assert found(*lone, cutoff=2.0, self_pairs=True) == [(0, 0, 0, 0, 0)]


@pytest.mark.parametrize("width", [1, 90, 1000, 40_000, 50_000])
def test_products_stay_below_what_threads_are_started_for(width):
    ptr = np.array([0, 3, 200, 201, 1000])
    parts = list(_dense_pairs._blocks(ptr, np.full(1000, width)))
    assert all(5 * (stop - start) * width < 2**18 for part in parts for start, stop in part)
    assert all(sum(b - a for a, b in part) * width <= _dense_pairs._ROOM for part in parts)
    rows = [row for part in parts for start, stop in part for row in range(start, stop)]
    assert rows == list(range(1000))
