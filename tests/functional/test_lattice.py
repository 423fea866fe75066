import itertools
import math

import pytest
import torch
from periodic import ALL_PBC, F64, lattice_shifts, rotation, seeded

from flt_mol.functional import UnfitSystemError, minimum_image, reciprocal_vectors
from flt_mol.functional.lattice import short_basis
from flt_mol.functional.reciprocal import fractional_positions

PTR = torch.tensor([0, 6])
TRICLINIC = torch.tensor([[4.0, 0.3, -0.2], [1.1, 5.0, 0.4], [-0.7, 0.9, 6.0]], dtype=F64)
ON = torch.ones(1, 3, dtype=torch.bool)


def atoms(cell=TRICLINIC, count=6, seed=0):
    return torch.rand(count, 3, generator=seeded(seed), dtype=F64) @ cell


def vectors_of(positions, cell, pbc, ptr=PTR, **settings):
    given = {"k_max": 0.5, "padding": 8.0, **settings}
    return reciprocal_vectors(cell[None], torch.as_tensor(pbc)[None], positions, ptr, **given)


def lattice_sum(positions, cell, pbc, sigma=1.0, factor=5.0, **settings):
    """Σ_j Σ_T exp(−‖r_i − r_j − T‖²/2σ²) of each atom i, by its spectrum."""
    settings = {"padding": factor * sigma, **settings}
    k_max = factor / (2 * math.pi * sigma)
    ptr = torch.tensor([0, len(positions)])
    found = vectors_of(positions, cell, pbc, ptr, k_max=k_max, **settings)
    k2 = found.vectors.square().sum(-1)
    g = (math.sqrt(2 * math.pi) * sigma) ** 3 * torch.exp(-2 * math.pi**2 * sigma**2 * k2)
    phase = (
        2 * math.pi * fractional_positions(positions, ptr, found) @ found.integers.to(positions).T
    )
    waves = torch.exp(1j * phase)
    return ((waves @ waves.conj().sum(0)[:, None].mul(found.weight[:, None] * g[:, None])).real)[
        :, 0
    ]


def explicit_sum(positions, cell, pbc, sigma=1.0):
    shifts = lattice_shifts(cell, torch.as_tensor(pbc), 3).double() @ cell
    r = positions[:, None, None] - positions[None, :, None] - shifts
    return torch.exp(-r.square().sum(-1) / (2 * sigma**2)).sum((1, 2))


def test_vectors_are_all_short_ones_of_the_reciprocal_lattice_once():
    found = vectors_of(atoms(), TRICLINIC, [True] * 3)
    # k·a is the integer of the lattice vector a, not of a column of the cell.
    torch.testing.assert_close(found.vectors @ TRICLINIC.T, found.integers.double())
    every = torch.tensor(list(itertools.product(range(-5, 6), repeat=3))).double()
    k = every @ torch.linalg.inv(TRICLINIC).T
    assert 2 * len(found.integers) - 1 == int((k.norm(dim=-1) <= 0.5).sum())
    both = torch.cat([found.integers, -found.integers[1:]])
    assert len(torch.unique(both, dim=0)) == len(both)
    assert not found.integers[0].any()
    assert (found.vectors.norm(dim=-1).diff() > -1e-12).all()
    volume = torch.linalg.det(TRICLINIC)
    torch.testing.assert_close(found.weight[:2] * volume, torch.tensor([1.0, 2.0], dtype=F64))


@pytest.mark.parametrize("pbc", ALL_PBC)
def test_poisson_sums_are_sums_over_images(pbc):
    positions = atoms()
    expected = explicit_sum(positions, TRICLINIC, pbc)
    for factor, error in ((4.0, 6e-3), (5.0, 1e-4)):
        found = lattice_sum(positions, TRICLINIC, list(pbc), factor=factor)
        torch.testing.assert_close(found, expected, rtol=0, atol=error)


@pytest.mark.parametrize("pbc", [[True] * 3, [True, True, False], [False, False, False]])
def test_sums_do_not_depend_on_how_a_system_is_written(pbc):
    positions, on = atoms(), torch.tensor(pbc)
    expected, turn = lattice_sum(positions, TRICLINIC, pbc), rotation(1)
    turned = lattice_sum(positions @ turn.T, TRICLINIC @ turn.T, pbc)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-12)
    moved = torch.randint(-4, 5, (6, 3), generator=seeded()) * on
    shifted = lattice_sum(positions + moved.double() @ TRICLINIC, TRICLINIC, pbc)
    torch.testing.assert_close(shifted, expected, rtol=0, atol=1e-12)
    change = torch.eye(3, dtype=F64)
    change[0, 1], change[2, 2] = 3.0, -1.0
    if pbc[1]:  # another basis, left-handed where all directions repeat
        other = lattice_sum(positions, change @ TRICLINIC, pbc)
        torch.testing.assert_close(other, expected, rtol=0, atol=1e-12)
    garbage = TRICLINIC.masked_fill(~on[:, None], 77.0)
    same = lattice_sum(positions, garbage, pbc)
    torch.testing.assert_close(same, expected, rtol=0, atol=1e-12)


def test_supercells_and_far_systems():
    positions = atoms()
    expected = lattice_sum(positions, TRICLINIC, [True] * 3)
    times = torch.tensor([2.0, 1.0, 3.0], dtype=F64)
    images = torch.cartesian_prod(torch.arange(2), torch.arange(1), torch.arange(3)).double()
    tiled = (positions[None] + (images @ TRICLINIC)[:, None]).flatten(0, 1)
    found = lattice_sum(tiled, times[:, None] * TRICLINIC, [True] * 3)
    torch.testing.assert_close(found[:6], expected, rtol=0, atol=1e-12)
    far = (positions + 1e5).float()
    near = far.double() - far.double()[0]
    found = lattice_sum(far, TRICLINIC.float(), [True] * 3).double()
    torch.testing.assert_close(found, lattice_sum(near, TRICLINIC, [True] * 3), rtol=0, atol=1e-5)


def test_open_directions_get_perpendicular_vectors_of_the_extent_and_padding():
    positions = atoms()
    found = vectors_of(positions, TRICLINIC, [True, True, False])
    a, b, c = found.cell[0]
    torch.testing.assert_close(found.cell[0, :2], TRICLINIC[:2])
    assert max(abs(a @ c), abs(b @ c)) < 1e-10
    height = positions @ (c / c.norm())
    length = height.amax() - height.amin() + 8.0
    assert length - 0.1 < c.norm() < length + 1e-9  # a smooth maximum is somewhat lower


def test_vacuum_shrinks_wherever_atoms_are_written():
    slab = torch.diag(torch.tensor([5.0, 5.0, 60.0], dtype=F64))
    positions = torch.rand(6, 3, generator=seeded(), dtype=F64) @ torch.diag(
        torch.tensor([5.0, 5.0, 6.0], dtype=F64)
    )
    across = positions + torch.tensor([0.0, 0.0, 58.0], dtype=F64)
    across[:, 2] %= 60.0
    whole = vectors_of(positions, slab, [True] * 3, padding=59.0)
    for where in (positions, across):
        small = vectors_of(where, slab, [True] * 3)
        assert 3 * len(small.integers) < len(whole.integers)
        found = lattice_sum(where, slab, [True] * 3)
        torch.testing.assert_close(
            found, explicit_sum(positions, slab, [1, 1, 1]), atol=1e-4, rtol=0
        )


def test_systems_of_a_batch_do_not_meet():
    positions = torch.cat([atoms(), atoms(seed=1)[:3], atoms(seed=2)[:1]])
    ptr = torch.tensor([0, 6, 6, 9, 10])
    cell = torch.stack([TRICLINIC, torch.zeros(3, 3, dtype=F64), 1.5 * TRICLINIC, TRICLINIC])
    pbc = torch.tensor([[True] * 3, [True] * 3, [True, False, True], [False] * 3])
    found = reciprocal_vectors(cell, pbc, positions, ptr, k_max=0.4, padding=6.0)
    assert found.ptr.diff()[1] == 0
    for b in (0, 2, 3):
        rows = slice(int(ptr[b]), int(ptr[b + 1]))
        alone = torch.tensor([0, rows.stop - rows.start])
        one = vectors_of(positions[rows], cell[b], pbc[b].tolist(), alone, k_max=0.4, padding=6.0)
        own = slice(int(found.ptr[b]), int(found.ptr[b + 1]))
        torch.testing.assert_close(found.vectors[own], one.vectors, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.weight[own], one.weight)


def test_stress_is_the_derivative_of_the_sum():
    positions, cell = atoms(), TRICLINIC.clone().requires_grad_()

    def total(strain):
        return lattice_sum(positions @ strain, cell @ strain, [True] * 3).sum()

    assert torch.autograd.gradcheck(total, torch.eye(3, dtype=F64, requires_grad=True))


@pytest.mark.parametrize(
    "cell",
    [
        torch.zeros(3, 3),
        torch.diag(torch.tensor([5.0, 1e-6, 5.0])),
        torch.tensor([[4.0, 0, 0], [4 * 2**0.5, 0, 0], [0, 0, 4.0]]),
        torch.tensor([[4.0, 0, 0], [0, 4.0, 0], [1.2345, 2**0.5, 0]]),
    ],
)
def test_singular_cells_are_named(cell):
    cells, pbc = torch.stack([TRICLINIC.float(), cell]), ON.expand(2, 3)
    positions, ptr = torch.rand(4, 3), torch.tensor([0, 2, 4])
    with pytest.raises(UnfitSystemError, match="singular") as caught:
        reciprocal_vectors(cells, pbc, positions, ptr, k_max=0.3, padding=5.0)
    assert caught.value.system == 1
    with pytest.raises(UnfitSystemError, match="singular"):
        minimum_image(positions, cells, pbc, ptr)


def test_what_does_not_fit_is_named():
    cell, positions = TRICLINIC[None], atoms()
    for wrong, name in (
        ((None, ON, positions, PTR), "cell and pbc"),
        ((cell, None, positions, PTR), "cell and pbc"),
        ((cell[0], ON, positions, PTR), "cell has shape"),
        ((cell, ON.float(), positions, PTR), "pbc is torch.float32"),
        ((cell, ON, positions[:5], PTR), "ptr"),
    ):
        with pytest.raises(ValueError, match=name):
            reciprocal_vectors(*wrong, k_max=0.3, padding=5.0)
    for name in ("k_max", "padding"):
        with pytest.raises(ValueError, match=name):
            vectors_of(positions, TRICLINIC, [True] * 3, **{name: 0})
    positions[3, 1] = math.nan
    with pytest.raises(UnfitSystemError, match="positions"):
        vectors_of(positions, TRICLINIC, [True] * 3)


def test_large_systems_are_for_the_mesh():
    chain = torch.arange(0, 400, 5.0)[:, None].expand(-1, 3)
    where = 400 * torch.eye(3)[None], ON, chain, torch.tensor([0, 80])
    found = reciprocal_vectors(*where, k_max=0.45, padding=10.0, max_products=1e6)
    assert found.large == (0,)
    assert not len(found.vectors)


@pytest.mark.parametrize("pbc", ALL_PBC)
@pytest.mark.parametrize("skew", [0, 3])
def test_minimum_images_are_the_shortest_of_all(pbc, skew):
    cell = TRICLINIC.clone()
    cell[1] += skew * cell[0]
    cell[2] -= skew * cell[1]
    v = 30 * torch.randn(40, 3, generator=seeded(), dtype=F64)
    found = minimum_image(v, cell[None], torch.tensor([pbc]), torch.tensor([0, 40]))
    # In the reduced basis a few cells around the rounded fractions hold the shortest.
    on = torch.tensor(pbc)
    rows = torch.from_numpy(short_basis(cell[None].numpy(), on[None].numpy())[1][0])
    start = v - (v @ torch.linalg.pinv(rows)).round() @ rows
    every = start[:, None] - lattice_shifts(rows, on, 3).double() @ rows
    torch.testing.assert_close(found.norm(dim=-1), every.norm(dim=-1).amin(1))
    taken = (v - found) @ torch.linalg.inv(cell)
    torch.testing.assert_close(taken, taken.round() * on, rtol=0, atol=1e-9)


def test_minimum_image_keeps_short_vectors_and_gradients():
    v = torch.tensor([[2.0, 0, 0], [0.1, -0.2, 0.3]], requires_grad=True)  # half a lattice vector
    out = minimum_image(v, 4 * torch.eye(3)[None], ON, torch.tensor([0, 2]))
    assert torch.equal(out, v)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    assert torch.equal(gradient, torch.ones(2, 3))
    assert torch.equal(minimum_image(v, None, None, torch.tensor([0, 2])), v)
    assert minimum_image(v[:0], None, None, torch.tensor([0])).shape == (0, 3)
