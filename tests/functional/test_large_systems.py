"""Reciprocal vectors of systems near and beyond what is looked at, and of far-apart fragments."""

import math

import pytest
import torch

from flt_mol.functional import _shortest_vectors, lattice
from flt_mol.functional.lattice import (
    TooManyVectorsError,
    check_vectors,
    fractional_positions,
    reciprocal_vectors,
)
from flt_mol.functional.virtual_cells import UnfitSystemError

F64 = torch.float64
SIGMA = 2.0
OPTIONS = {"k_max": 5 / (2 * math.pi * SIGMA), "padding": 5 * SIGMA}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(places, size=4.0, atoms=3):
    """A few atoms about each place, Å."""
    places = torch.tensor(places, dtype=F64)
    around = size * torch.rand(len(places), atoms, 3, generator=seeded(), dtype=F64)
    return (places[:, None] + around).flatten(0, 1)


def vectors_of(positions, cell=None, pbc=(False,) * 3, **options):
    cell = torch.zeros(3, 3, dtype=F64) if cell is None else cell
    ptr = torch.tensor([0, len(positions)])
    return reciprocal_vectors(
        cell[None], torch.tensor([pbc]), positions, ptr, **{**OPTIONS, **options}
    )


def sums(found, positions):
    """Σ_k weight g(k) cos 2πk·(r_i − r_j) (N, N) of a Gaussian of width SIGMA, 1 at distance 0."""
    volume = (2 * math.pi) ** 1.5 * SIGMA**3
    g = volume * torch.exp(-2 * (math.pi * SIGMA * found.vectors.norm(dim=-1)) ** 2)
    fraction = fractional_positions(positions, torch.tensor([0, len(positions)]), found)
    turns = 2 * math.pi * fraction @ found.integers.to(F64).T
    waves = turns.cos(), turns.sin()
    return sum((w * (found.weight * g)) @ w.T for w in waves)


def image_sums(positions, cell=None, pbc=(False,) * 3):
    """The same in real space."""
    cell = torch.zeros(3, 3, dtype=F64) if cell is None else cell
    steps = [torch.arange(-3, 4, dtype=F64) if p else torch.zeros(1, dtype=F64) for p in pbc]
    images = torch.cartesian_prod(*steps).view(-1, 3) @ cell
    apart = positions[:, None, None] - positions[None, :, None] + images
    return torch.exp(-apart.square().sum(-1) / (2 * SIGMA**2)).sum(-1)


FAR = {
    "four corners": ([[0, 0, 0], [700, 1, 30], [30, 900, 0], [10, 20, 800]], None, (0, 0, 0)),
    "spread in a box": (
        [[97.0 * i % 1000, 331.0 * i % 1000, 583.0 * i % 1000] for i in range(12)],
        None,
        (0, 0, 0),
    ),
    "above a sheet": ([[0, 0, 0], [2, 2, 30000], [0, 1, 90000]], [[9, 0, 0], [3, 9, 0]], (1, 1, 0)),
    "beside a chain": (
        [[0, 0, 0], [1, 2000, 0], [0, 0, 2000], [2, 1500, 900]],
        [[9, 0, 0]],
        (1, 0, 0),
    ),
    "in a wide cell": (
        [[10, 10, 10], [700, 10, 10], [10, 700, 300]],
        [[1200, 0, 0], [0, 1300, 0], [0, 9, 1200]],
        (1, 1, 1),
    ),
}


@pytest.fixture
def limit(monkeypatch):
    """At most so many candidates: twelve fragments in a row have fewer."""
    for module in (lattice, _shortest_vectors):
        monkeypatch.setattr(module, "MOST_CANDIDATES", 200_000)


@pytest.mark.parametrize("case", FAR)
def test_far_fragments_are_summed_exactly(case, limit):
    places, rows, pbc = FAR[case]
    positions, pbc = blobs(places), tuple(map(bool, pbc))
    cell = torch.zeros(3, 3, dtype=F64)
    for k, row in enumerate(rows or []):
        cell[k] = torch.tensor(row, dtype=F64)
    found = vectors_of(positions, cell, pbc)
    expected = image_sums(positions, cell, pbc)
    assert (sums(found, positions) - expected).abs().max() < 5e-5
    assert (found.offset != 0).any()
    # Atoms of a fragment keep their distances.
    moved = positions - found.offset
    for start in range(0, len(positions), 3):
        kept, now = positions[start : start + 3], moved[start : start + 3]
        torch.testing.assert_close(now.diff(dim=0), kept.diff(dim=0), rtol=0, atol=1e-9)


def test_far_fragments_turn_and_swap_with_the_system():
    positions = blobs(FAR["four corners"][0])
    expected = sums(vectors_of(positions), positions)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=seeded(1), dtype=F64)).Q
    turned = positions @ turn.T + 50.0
    torch.testing.assert_close(sums(vectors_of(turned), turned), expected, rtol=0, atol=1e-9)
    order = torch.randperm(len(positions), generator=seeded(2))
    swapped = sums(vectors_of(positions[order]), positions[order])
    torch.testing.assert_close(swapped, expected[order][:, order], rtol=0, atol=1e-9)


def test_fragments_that_fit_stay_where_they_are():
    positions = blobs([[0, 0, 0], [60, 0, 0], [0, 50, 40]])
    found = vectors_of(positions)
    assert (found.offset == 0).all()
    lengths = found.cell[0].norm(dim=-1)
    assert lengths.max() > 60 + OPTIONS["padding"]


def test_gradients_do_not_see_that_fragments_were_moved():
    positions = blobs(FAR["four corners"][0]).requires_grad_()

    def total(found, r):
        return sums(found, r).square().sum()

    (slope,) = torch.autograd.grad(total(vectors_of(positions), positions), positions)
    direct = image_sums(positions).square().sum()
    (expected,) = torch.autograd.grad(direct, positions)
    torch.testing.assert_close(slope, expected, rtol=0, atol=2e-3)


def diagonal(length):
    """A periodic cell with atoms along its diagonal, which has no vacuum anywhere."""
    steps = torch.arange(0.0, length, 8.0, dtype=F64)
    return steps[:, None].expand(-1, 3), length * torch.eye(3, dtype=F64)


def batch_of(*lengths):
    parts = [diagonal(length) for length in lengths]
    ptr = torch.tensor([0, *(len(p) for p, _ in parts)]).cumsum(0)
    cells = torch.stack([cell for _, cell in parts])
    return cells, torch.ones(len(parts), 3, dtype=torch.bool), torch.cat([p for p, _ in parts]), ptr


@pytest.fixture
def small_limit(monkeypatch):
    """At most so many candidates, those of a cell of 48 Å among them."""
    for module in (lattice, _shortest_vectors):
        monkeypatch.setattr(module, "MOST_CANDIDATES", 33_000)


def test_a_batch_does_what_its_members_do(small_limit, monkeypatch):
    lengths = [40, 48, 9, 48, 30, 48, 48]
    for options in ({}, {"max_vectors": 200}):
        together = reciprocal_vectors(*batch_of(*lengths), **OPTIONS, **options)
        with monkeypatch.context() as patch:
            patch.setattr(_shortest_vectors, "MOST_CANDIDATES", 10**9)
            whole = reciprocal_vectors(*batch_of(*lengths), **OPTIONS, **options)
        for name, found, expected in zip(whole._fields, together, whole, strict=True):
            assert torch.equal(found, expected), name
    alone = [reciprocal_vectors(*batch_of(length), **OPTIONS) for length in lengths]
    assert together.ptr.diff().sum() < sum(len(x.integers) for x in alone)  # the budget's
    together = reciprocal_vectors(*batch_of(*lengths), **OPTIONS)
    assert torch.equal(together.integers, torch.cat([x.integers for x in alone]))


@pytest.mark.parametrize("function", [reciprocal_vectors, check_vectors])
def test_one_system_with_too_many_is_named(small_limit, function):
    message = "for system 2, of a cell of 80 x 80 x 80 Å.* set max_vectors, or a smaller k_max"
    with pytest.raises(TooManyVectorsError, match=message) as caught:
        function(*batch_of(9, 48, 80, 9), **OPTIONS)
    assert caught.value.system == 2
    assert caught.value.lengths == pytest.approx([80, 80, 80])
    function(*batch_of(9, 48, 80, 9), **OPTIONS, max_vectors=100)


@pytest.mark.parametrize("function", [reciprocal_vectors, check_vectors])
@pytest.mark.parametrize(("name", "row"), [("positions", 4), ("cell", 1)])
def test_numbers_that_are_not_finite_name_their_system(function, name, row):
    cell, pbc, positions, ptr = batch_of(24, 16, 9)
    {"cell": cell[:, 0], "positions": positions}[name][row] = math.nan
    with pytest.raises(UnfitSystemError, match=f"{name} of system 1 hold a number") as caught:
        function(cell, pbc, positions.clone() if name == "cell" else positions, ptr, **OPTIONS)
    assert caught.value.system == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_check_says_what_the_search_does(small_limit, seed):
    """Of sizes about the limit, periodic or not, with and without vacuum."""
    generator = seeded(seed)
    verdicts = set()
    for _ in range(12):
        pbc = torch.rand(1, 3, generator=generator) < 0.5
        size = 10 + 90 * torch.rand(3, generator=generator, dtype=F64)
        positions = size * torch.rand(20, 3, generator=generator, dtype=F64)
        cell = torch.diag(size + 30 * torch.rand(3, generator=generator, dtype=F64))[None]
        cell = cell + 3 * torch.rand(1, 3, 3, generator=generator, dtype=F64)
        given = cell, pbc, positions, torch.tensor([0, 20])
        found = []
        for function in (reciprocal_vectors, check_vectors):
            try:
                function(*given, **OPTIONS)
                found.append(None)
            except TooManyVectorsError as error:
                found.append(str(error))
        assert found[0] == found[1]
        verdicts.add(found[0] is None)
    assert verdicts == {True, False}


def test_the_quick_check_looks_at_no_cells_of_usual_systems(monkeypatch):
    monkeypatch.setattr(lattice, "_chosen_cells", None)
    check_vectors(*batch_of(30, 9, 40), **OPTIONS)
    none = torch.zeros(0, 3), torch.tensor([0])
    monkeypatch.undo()
    check_vectors(torch.zeros(0, 3, 3), torch.zeros(0, 3, dtype=torch.bool), *none, **OPTIONS)
