import math
import time

import pytest
import torch
from scipy.spatial.transform import Rotation

from flt_mol.functional.lattice import fractional_positions, reciprocal_vectors

F64 = torch.float64
TRICLINIC = torch.tensor([[7.6, 0, 0], [3.8, 6.6, 0], [0.7, 0.2, 9.0]], dtype=F64)
SLAB = torch.tensor([[7.6, 0, 0], [3.8, 6.6, 0], [0.7, 0.2, 40.0]], dtype=F64)


def atoms(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, generator=generator, dtype=F64) * torch.tensor(size, dtype=F64)


def rotation(seed):
    return torch.tensor(Rotation.random(random_state=seed).as_matrix())


def one(cell, pbc, positions, k_max=0.45, padding=12.0, **options):
    """Reciprocal vectors of a single system."""
    ptr = torch.tensor([0, positions.shape[0]])
    pbc = torch.tensor([pbc])
    return reciprocal_vectors(
        cell[None], pbc, positions, ptr, k_max=k_max, padding=padding, **options
    )


def brute_force(cell, k_max):
    """Every reciprocal vector with |k| ≤ k_max, both signs, from a cube of integers."""
    steps = torch.arange(-25, 26, dtype=F64)
    vectors = torch.cartesian_prod(steps, steps, steps) @ torch.linalg.inv(cell).T
    return vectors[vectors.norm(dim=-1) <= k_max]


def ascending(vectors):
    """Rows in a fixed order, so that sets can be compared."""
    keys = (vectors * 1e6).round().to(torch.int64)
    order = sorted(range(len(keys)), key=lambda i: keys[i].tolist())
    return vectors[order]


def lattice_sum(lattice, g, displacements):
    """Σ_k weight g(k) cos 2πk·r for every displacement."""
    phase = 2 * math.pi * displacements @ lattice.vectors.T
    return phase.cos() @ (lattice.weight * g(lattice.vectors.norm(dim=-1)))


def image_sum(cell, pbc, f, displacements, reach):
    """Σ_T f(r + T) over lattice vectors of periodic directions, in real space."""
    counts = [reach if p else 0 for p in pbc]
    steps = [torch.arange(-n, n + 1, dtype=F64) for n in counts]
    images = torch.cartesian_prod(*steps) @ cell
    return f((displacements[:, None] + images).norm(dim=-1)).sum(-1)


def gaussian(sigma):
    """f with f(0) = 1, and its Fourier transform."""
    volume = (2 * math.pi) ** 1.5 * sigma**3
    return (
        lambda r: torch.exp(-(r**2) / (2 * sigma**2)),
        lambda k: volume * torch.exp(-2 * (math.pi * sigma * k) ** 2),
    )


def differences(positions):
    return (positions[:, None] - positions[None]).reshape(-1, 3)


@pytest.mark.parametrize("handed", [1.0, -1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_vectors_of_a_cell_and_no_other(seed, handed):
    cell = TRICLINIC @ rotation(seed) + atoms(3, [1.0, 1.0, 1.0], seed)
    cell = torch.diag(torch.tensor([1.0, 1.0, handed], dtype=F64)) @ cell
    lattice = one(cell, [True] * 3, atoms(12, [9.0, 9.0, 9.0]))
    vectors = lattice.vectors
    assert (vectors[0] == 0).all()
    assert (vectors.norm(dim=-1).diff() > -1e-12).all()
    both = torch.cat([vectors, -vectors[1:]])
    expected = brute_force(cell, 0.45)
    assert both.shape == expected.shape
    torch.testing.assert_close(ascending(both), ascending(expected), rtol=0, atol=1e-12)
    volume = torch.linalg.det(cell).abs()
    weight = torch.full_like(lattice.weight, 2.0)
    weight[0] = 1.0
    torch.testing.assert_close(lattice.weight, weight / volume)
    inverse = torch.linalg.inv(lattice.cell[0])
    torch.testing.assert_close(vectors, lattice.integers.double() @ inverse.T)


@pytest.mark.parametrize(("c", "error"), [(4.0, 1.5e-3), (5.0, 3e-5)])
@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_poisson_in_a_periodic_cell(sigma, c, error):
    f, g = gaussian(sigma)
    positions = atoms(12, [7.0, 7.0, 7.0])
    lattice = one(TRICLINIC, [True] * 3, positions, k_max=c / (2 * math.pi * sigma))
    expected = image_sum(TRICLINIC, [True] * 3, f, differences(positions), 3)
    found = lattice_sum(lattice, g, differences(positions))
    assert (found - expected).abs().max() < error
    assert (found - expected).abs().max() > 1e-3 * error  # not a stricter set than promised


@pytest.mark.parametrize("pbc", [(1, 1, 0), (0, 1, 1), (1, 0, 0), (0, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize(("pad", "error"), [(4.0, 5e-4), (5.0, 2.5e-5)])
def test_open_directions_see_no_images(pbc, pad, error):
    sigma = 2.0
    f, g = gaussian(sigma)
    pbc = [bool(p) for p in pbc]
    positions = atoms(15, [6.0, 5.0, 7.0])
    k_max = 5.5 / (2 * math.pi * sigma)
    lattice = one(TRICLINIC, pbc, positions, k_max=k_max, padding=pad * sigma)
    expected = image_sum(TRICLINIC, pbc, f, differences(positions), 4)
    found = lattice_sum(lattice, g, differences(positions))
    assert (found - expected).abs().max() < error


@pytest.mark.parametrize("pbc", [(1, 1, 0), (1, 0, 0), (0, 0, 0)])
def test_virtual_vectors_are_perpendicular_and_as_long_as_promised(pbc):
    positions = atoms(15, [4.0, 5.0, 7.0])
    pbc = [bool(p) for p in pbc]
    cell = one(TRICLINIC, pbc, positions, padding=10.0).cell[0]
    kept = [i for i in range(3) if pbc[i]]
    torch.testing.assert_close(cell[kept], TRICLINIC[kept])
    for i in range(3):
        if pbc[i]:
            continue
        others = [j for j in range(3) if j != i]
        direction = cell[i] / cell[i].norm()
        assert (cell[others] @ direction).abs().max() < 1e-9
        along = positions @ direction
        torch.testing.assert_close(cell[i].norm(), along.max() - along.min() + 10.0)


def test_the_given_vectors_of_open_directions_do_not_matter():
    positions = atoms(10, [4.0, 5.0, 7.0])
    garbage = TRICLINIC.clone()
    garbage[2] = garbage[0]
    ours, theirs = (one(c, [True, True, False], positions) for c in (TRICLINIC, garbage))
    torch.testing.assert_close(ours.vectors, theirs.vectors)


@pytest.mark.parametrize(
    ("cell", "size", "kept"),
    [
        (SLAB, [7.0, 6.0, 8.0], [0, 1]),
        (torch.diag(torch.tensor([30.0, 31.0, 6.0], dtype=F64)), [5.0, 4.0, 6.0], [2]),
        (torch.diag(torch.tensor([30.0, 31.0, 32.0], dtype=F64)), [5.0, 4.0, 6.0], []),
        (TRICLINIC, [7.0, 6.0, 8.0], [0, 1, 2]),
    ],
)
def test_vacuum_shrinks_wherever_atoms_are_written(cell, size, kept):
    sigma = 2.5
    f, g = gaussian(sigma)
    positions = atoms(25, size)
    options = {"k_max": 5 / (2 * math.pi * sigma), "padding": 5 * sigma}
    lattice = one(cell, [True] * 3, positions, **options)
    for axis in kept:
        assert (lattice.cell[0] - cell[axis]).norm(dim=-1).min() < 1e-9
    assert lattice.cell[0].det().abs() <= cell.det().abs() + 1e-9
    whole = one(cell, [True] * 3, positions, shrink_vacuum=False, **options)
    assert (len(lattice.integers) < len(whole.integers)) == (len(kept) < 3)

    def sums(lattice, positions):
        return lattice_sum(lattice, g, differences(positions - lattice.offset))

    expected = image_sum(cell, [True] * 3, f, differences(positions), 3)
    assert (sums(lattice, positions) - expected).abs().max() < 1e-4
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        shifts = torch.randint(-3, 4, (25, 3), generator=generator).double()
        moved = positions + shifts @ cell + torch.tensor([0.3, 17.0, 29.5])
        again = one(cell, [True] * 3, moved, **options)
        assert again.integers.shape == lattice.integers.shape
        torch.testing.assert_close(again.weight, lattice.weight, rtol=1e-9, atol=0)
        torch.testing.assert_close(sums(again, moved), sums(lattice, positions), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("vacuum", "shrinks"), [(11.9, False), (12.1, True)])
def test_only_a_gap_wider_than_the_padding_is_vacuum(vacuum, shrinks):
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 3.0], [1.0, 1.0, 7.0]], dtype=F64)
    cell = torch.diag(torch.tensor([4.0, 4.0, 7.0 + vacuum], dtype=F64))
    lattice = one(cell, [True] * 3, positions, padding=12.0)
    third = lattice.cell[0].norm(dim=-1).max()
    assert math.isclose(third, 19.0 if shrinks else 7.0 + vacuum, abs_tol=1e-9)


def test_of_several_gaps_the_widest_is_the_vacuum():
    heights = torch.tensor([0.0, 2.0, 16.0, 18.0, 38.0], dtype=F64)  # gaps of 14, 20 and 22 Å
    positions = torch.stack([heights * 0, heights * 0, heights], dim=-1)
    cell = torch.diag(torch.tensor([4.0, 4.0, 60.0], dtype=F64))
    lattice = one(cell, [True] * 3, positions, padding=12.0)
    assert math.isclose(lattice.cell[0].norm(dim=-1).max(), 38.0 + 12.0, abs_tol=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        [[1, 1, 0], [0, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [0, 1, 0], [3, -2, 1]],
        [[1, 0, 1], [0, 1, 0], [0, 0, 1]],
        [[0, 1, 0], [1, 0, 0], [0, 0, 1]],
        [[-1, 0, 0], [5, 1, 0], [2, 2, 1]],
    ],
)
def test_another_basis_of_the_lattice_gives_the_same_vectors(change):
    positions = atoms(20, [7.0, 6.0, 8.0])
    change = torch.tensor(change, dtype=F64)
    ours, theirs = (one(c, [True] * 3, positions) for c in (SLAB, change @ SLAB))
    assert len(ours.integers) == len(theirs.integers)
    both = [ascending(torch.cat([x.vectors, -x.vectors[1:]])) for x in (ours, theirs)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize("pbc", [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 0, 0)])
def test_vectors_turn_with_the_system(pbc):
    pbc = [bool(p) for p in pbc]
    positions = atoms(20, [7.0, 6.0, 8.0])
    turn = rotation(3)
    still, turned = (
        one(c, pbc, p) for c, p in ((SLAB, positions), (SLAB @ turn.T, positions @ turn.T))
    )
    both = [ascending(torch.cat([v, -v[1:]])) for v in (still.vectors @ turn.T, turned.vectors)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-9)


def test_a_batch_of_very_different_cells_is_each_alone():
    positions = [atoms(n, [s] * 3, n) for n, s in ((20, 7.0), (1, 1.0), (0, 1.0), (5, 30.0))]
    cells = [SLAB, torch.zeros(3, 3, dtype=F64), torch.zeros(3, 3, dtype=F64), 40 * TRICLINIC / 7]
    flags = [[True] * 3, [False] * 3, [True] * 3, [True, False, True]]
    ptr = torch.tensor([0, 20, 21, 21, 26])
    batch = reciprocal_vectors(
        torch.stack(cells), torch.tensor(flags), torch.cat(positions), ptr, k_max=0.3, padding=9.0
    )
    assert batch.ptr.shape == (5,)
    assert int(batch.ptr[3]) == int(batch.ptr[2])  # no atoms, no vectors
    for b in range(4):
        alone = one(cells[b], flags[b], positions[b], k_max=0.3, padding=9.0)
        rows = slice(int(batch.ptr[b]), int(batch.ptr[b + 1]))
        assert torch.equal(batch.integers[rows], alone.integers)
        torch.testing.assert_close(batch.vectors[rows], alone.vectors)
        torch.testing.assert_close(batch.weight[rows], alone.weight)
        torch.testing.assert_close(batch.offset[ptr[b] : ptr[b + 1]], alone.offset)


@pytest.mark.parametrize("ptr", [[0], [0, 0], [0, 0, 0]])
def test_no_atoms(ptr):
    b = len(ptr) - 1
    lattice = reciprocal_vectors(
        torch.zeros(b, 3, 3), torch.ones(b, 3, dtype=torch.bool), torch.zeros(0, 3),
        torch.tensor(ptr), k_max=0.4, padding=9.0,
    )  # fmt: skip
    assert lattice.integers.shape == (0, 3)
    assert lattice.ptr.tolist() == [0] * (b + 1)
    assert fractional_positions(torch.zeros(0, 3), torch.tensor(ptr), lattice).shape == (0, 3)


@pytest.mark.parametrize(
    "cell",
    [
        torch.zeros(3, 3),
        torch.diag(torch.tensor([5.0, 0.0, 5.0])),
        torch.tensor([[5.0, 0, 0], [10.0, 0, 0], [0, 0, 5.0]]),
        torch.tensor([[5.0, 0, 0], [0, 5.0, 0], [2.0, 3.0, 0.0]]),
        0.01 * torch.eye(3),
    ],
)
def test_a_cell_that_is_singular_where_it_is_periodic_is_refused(cell):
    with pytest.raises(ValueError, match=r"cell of system 0 is singular .* set pbc False"):
        one(cell, [True] * 3, torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.tensor([[0.0, math.nan, 0.0]])}, "positions .* not finite"),
        ({"cell": torch.full((1, 3, 3), math.inf)}, "cell .* not finite"),
        ({"cell": torch.eye(3)}, "cell has shape"),
        ({"pbc": torch.ones(3, dtype=torch.bool)}, "pbc has shape"),
        ({"pbc": torch.ones(1, 3)}, "pbc has dtype"),
        ({"positions": torch.zeros(1, 2)}, "positions have shape"),
        ({"ptr": torch.tensor([0, 2])}, "ptr"),
        ({"k_max": 0.0}, "k_max"),
        ({"padding": math.nan}, "padding"),
        ({"max_vectors": 0}, "max_vectors"),
        ({"cell": 1e4 * torch.eye(3)[None], "shrink_vacuum": False}, "set max_vectors"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes, message):
    arguments = {
        "cell": 5 * torch.eye(3)[None],
        "pbc": torch.ones(1, 3, dtype=torch.bool),
        "positions": torch.zeros(1, 3),
        "ptr": torch.tensor([0, 1]),
        "k_max": 0.45,
        "padding": 12.0,
    }
    with pytest.raises(ValueError, match=message):
        reciprocal_vectors(**{**arguments, **changes})


@pytest.mark.parametrize("budget", [1, 2, 7, 40, 200, 10**6])
def test_a_budget_keeps_the_shortest_whole_shells(budget):
    positions = atoms(30, [12.0, 12.0, 12.0])
    cell = 12.0 * torch.eye(3, dtype=F64)
    everything = one(cell, [True] * 3, positions)
    lattice = one(cell, [True] * 3, positions, max_vectors=budget)
    count = len(lattice.integers)
    assert 1 <= count <= budget
    assert torch.equal(
        lattice.integers.square().sum(-1), everything.integers.square().sum(-1)[:count]
    )
    if count < len(everything.integers):
        lengths = everything.vectors.norm(dim=-1)
        assert lengths[count] > lengths[count - 1] + 1e-6  # no shell is torn apart
        shell = int((lengths < lengths[count] + 1e-6).sum())
        assert shell > budget  # and the next would not have fitted


@pytest.mark.parametrize("sides", [[1e4, 1e4, 1e4], [1e4, 5.0, 5.0], [3.0, 1e5, 3.0]])
def test_a_budget_looks_at_few_vectors_in_a_huge_cell(sides):
    cell = torch.diag(torch.tensor(sides, dtype=F64)) @ rotation(1)
    positions = atoms(20, [1.0, 1.0, 1.0]) @ cell
    start = time.process_time()
    lattice = one(cell, [True] * 3, positions, max_vectors=500, shrink_vacuum=False)
    assert time.process_time() - start < 2.0
    assert 400 < len(lattice.integers) <= 500
    # A cube of integers of the same lattice holds no shorter one that is missing.
    longest = lattice.vectors.norm(dim=-1).max()
    steps = torch.arange(-12, 13, dtype=F64)
    cube = torch.cartesian_prod(steps, steps, steps) @ torch.linalg.inv(cell).T
    shorter = int((cube.norm(dim=-1) < longest * (1 - 1e-4)).sum())
    assert shorter <= 2 * len(lattice.integers) - 1


def test_dtype_follows_the_positions_whatever_the_default():
    positions = atoms(5, [3.0, 3.0, 3.0])
    for default in (torch.float32, F64):
        torch.set_default_dtype(default)
        try:
            for dtype, expected in ((torch.bfloat16, torch.float32), (F64, F64)):
                lattice = one(TRICLINIC.to(dtype), [True] * 3, positions.to(dtype))
                assert lattice.vectors.dtype == lattice.weight.dtype == expected
                assert lattice.offset.dtype == lattice.inverse.dtype == expected
        finally:
            torch.set_default_dtype(torch.float32)


def test_autocast_rounds_nothing():
    positions, cell = atoms(25, [7.0, 6.0, 8.0]).float(), SLAB.float()
    plain = one(cell, [True] * 3, positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = one(cell, [True] * 3, positions)
        fraction = fractional_positions(positions, torch.tensor([0, 25]), cast)
    for ours, theirs in zip(plain, cast, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(fraction, fractional_positions(positions, torch.tensor([0, 25]), plain))


def test_fractions_in_float32_do_not_care_where_the_system_lies():
    # Multiples of 1/64 Å stay exact in float32 after a shift by 2^14 Å.
    positions = (atoms(30, [7.0, 6.0, 8.0]) * 64).round() / 64
    ptr = torch.tensor([0, 30])
    exact = fractional_positions(positions, ptr, one(SLAB, [True] * 3, positions))
    far = (positions + 2.0**14).float()
    found = fractional_positions(far, ptr, one(SLAB.float(), [True] * 3, far))
    difference = found.double() - exact
    assert (difference - difference.round()).abs().max() < 1e-6


def test_derivatives_of_vectors_and_weights():
    positions = atoms(10, [7.0, 6.0, 8.0])

    first, others = positions[:1], positions[1:]  # fractions are taken from the first atom

    def outputs(cell, others):
        positions = torch.cat([first, others])
        lattice = one(cell, [True] * 3, positions, k_max=0.15)
        fraction = fractional_positions(positions, torch.tensor([0, 10]), lattice)
        return lattice.vectors, lattice.weight, fraction

    inputs = [x.clone().requires_grad_() for x in (TRICLINIC, others)]
    assert torch.autograd.gradcheck(outputs, inputs)
