import itertools

import pytest
import torch
from periodic import ALL_PBC, F64, lattice_shifts, rotation, seeded

from flt_mol.functional.groups import spread
from flt_mol.functional.minimum_image import minimum_image

ROWS = 40


def lattices(count, seed=0):
    """Cells between orthorhombic and strongly skewed, none flat."""
    generator = seeded(seed)
    cell = torch.diag(torch.tensor([3.0, 4.0, 6.0], dtype=F64)).repeat(count, 1, 1)
    skew = torch.rand(count, 3, generator=generator, dtype=F64) * 5 - 2.5
    cell[:, 1, 0], cell[:, 2, 0], cell[:, 2, 1] = skew.T
    return cell @ rotation(seed)


def draws(count, reach=8.0, seed=1, dtype=F64):
    return reach * torch.randn(count, 3, generator=seeded(seed), dtype=F64).to(dtype)


def shortest(vectors, cell, pbc, reach=7):
    """The length of the shortest of all images up to `reach` cells away."""
    images = (lattice_shifts(cell, pbc, reach).to(F64)[:, :, None] * cell).sum(1)
    return (vectors[:, None] - images).norm(dim=-1).amin(1)


def check_is_image(out, vectors, cell, pbc, ptr):
    """`out` differs from `vectors` by whole lattice vectors of the axes that repeat."""
    full = spread(torch.linalg.inv(cell), ptr, len(out))
    turns = ((vectors - out)[:, :, None] * full).sum(1)
    allowed = spread(pbc, ptr, len(out))
    assert (turns - turns.round()).abs().max() < 1e-6
    assert (turns * ~allowed).abs().max() < 1e-6


@pytest.mark.parametrize("pbc", ALL_PBC)
def test_no_image_is_shorter(pbc):
    cell = lattices(12)
    pbc = torch.tensor(pbc).repeat(12, 1)
    ptr = ROWS * torch.arange(13)
    # Within the reach of the brute search: 6 Å stays below five cells.
    vectors = draws(12 * ROWS, reach=3.0)
    out = minimum_image(vectors, cell, pbc, ptr)
    for b in range(12):
        rows = slice(b * ROWS, (b + 1) * ROWS)
        truth = shortest(vectors[rows], cell[b], pbc[b])
        torch.testing.assert_close(out[rows].norm(dim=-1), truth, rtol=0, atol=1e-12)
    check_is_image(out, vectors, cell, pbc, ptr)
    if pbc.any():
        assert (out != vectors).any()
    else:
        assert torch.equal(out, vectors)


def test_lengths_are_those_of_ase():
    from ase.geometry import find_mic

    # ASE leaves its own ground where axes are open and not perpendicular to the rest.
    cell, ptr = lattices(30, seed=5), ROWS * torch.arange(31)
    vectors = draws(30 * ROWS, reach=30.0)
    out = minimum_image(vectors, cell, torch.ones(30, 3, dtype=torch.bool), ptr)
    for b in range(30):
        rows = slice(b * ROWS, (b + 1) * ROWS)
        _, truth = find_mic(vectors[rows].numpy(), cell[b].numpy(), pbc=True)
        torch.testing.assert_close(
            out[rows].norm(dim=-1), torch.from_numpy(truth), rtol=0, atol=1e-11
        )


PRIMITIVE = {
    "cubic": [[1.0, 0, 0], [0, 1, 0], [0, 0, 1]],
    "fcc": [[0.0, 1, 1], [1, 0, 1], [1, 1, 0]],
    "bcc": [[-1.0, 1, 1], [1, -1, 1], [1, 1, -1]],
    "hexagonal": [[1.0, 0, 0], [-0.5, 0.75**0.5, 0], [0, 0, 5]],
    "slab": [[2.5, 0, 0], [1.25, 1.25 * 3**0.5, 0], [0, 0, 28]],
}


@pytest.mark.parametrize("name", PRIMITIVE)
@pytest.mark.parametrize("open_axes", [(), (2,), (0, 1)])
def test_crystals_and_their_ties(name, open_axes):
    """On a grid of fractions, where many images are equally long."""
    cell = torch.tensor(PRIMITIVE[name], dtype=F64)
    pbc = torch.ones(3, dtype=torch.bool)
    pbc[list(open_axes)] = False
    grid = torch.tensor(list(itertools.product(range(-6, 7, 2), repeat=3)), dtype=F64) / 4
    grid = grid * torch.tensor([1.0, 1.0, 0.5], dtype=F64)
    vectors = grid @ cell
    out = minimum_image(vectors, cell[None], pbc[None], torch.tensor([0, len(grid)]))
    truth = shortest(vectors, cell, pbc, reach=4)
    torch.testing.assert_close(out.norm(dim=-1), truth, rtol=0, atol=1e-12)
    again = minimum_image(out, cell[None], pbc[None], torch.tensor([0, len(grid)]))
    assert torch.equal(again, out)


@pytest.mark.parametrize("pbc", [(True, True, True), (True, True, False), (False, True, True)])
def test_another_basis_of_the_lattice_changes_nothing(pbc):
    cell, ptr, pbc = lattices(8, seed=3), ROWS * torch.arange(9), torch.tensor(pbc).repeat(8, 1)
    vectors = draws(8 * ROWS)
    truth = minimum_image(vectors, cell, pbc, ptr)
    axes = pbc[0].nonzero().flatten().tolist()
    skewed = cell.clone()
    skewed[:, axes[0]] += 41 * skewed[:, axes[-1]]
    skewed[:, axes[-1]] -= 57 * skewed[:, axes[0]]
    out = minimum_image(vectors, skewed, pbc, ptr)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-8), (torch.float32, 0.05)])
def test_vectors_many_cells_long(dtype, tolerance):
    cell, ptr = lattices(5), torch.arange(6)
    short = minimum_image(draws(5), cell, torch.ones(5, 3, dtype=torch.bool), ptr)
    far = short + (torch.tensor([90001.0, -80002, 50003], dtype=F64)[:, None] * cell).sum(1)
    out = minimum_image(far.to(dtype), cell.to(dtype), torch.ones(5, 3, dtype=torch.bool), ptr)
    assert out.dtype == dtype
    torch.testing.assert_close(out.to(F64), short, rtol=0, atol=tolerance)


def test_short_vectors_come_back_as_they_are():
    cell = lattices(6)
    vectors = draws(6 * ROWS, reach=0.3, dtype=torch.float32)
    pbc = torch.ones(6, 3, dtype=torch.bool)
    assert torch.equal(minimum_image(vectors, cell, pbc, ROWS * torch.arange(7)), vectors)


def test_what_open_axes_hold_is_not_looked_at():
    cell, ptr = lattices(3), ROWS * torch.arange(4)
    pbc = torch.tensor([[True, False, True], [False, True, False], [False] * 3])
    vectors = draws(3 * ROWS)
    truth = minimum_image(vectors, cell, pbc, ptr)
    for content in (0.0, torch.nan, torch.inf, 1e30):
        other = torch.where(pbc[..., None], cell, content)
        assert torch.equal(minimum_image(vectors, other, pbc, ptr), truth)


def test_systems_do_not_see_each_other():
    cell = lattices(4)
    cell[2] *= 0.1
    pbc = torch.tensor([[True] * 3, [True, True, False], [True] * 3, [False] * 3])
    sizes = (ROWS, 0, 1, 7)
    ptr = torch.tensor([0, *itertools.accumulate(sizes)])
    vectors = draws(sum(sizes), dtype=torch.float32)
    together = minimum_image(vectors, cell, pbc, ptr)
    for b, size in enumerate(sizes):
        rows = slice(int(ptr[b]), int(ptr[b + 1]))
        alone = minimum_image(
            vectors[rows], cell[b : b + 1], pbc[b : b + 1], torch.tensor([0, size])
        )
        assert torch.equal(alone, together[rows])


def test_nothing_at_all():
    none = torch.zeros(0, dtype=torch.bool)
    out = minimum_image(
        torch.zeros(0, 3), torch.zeros(0, 3, 3), none.view(0, 3), torch.zeros(1).int()
    )
    assert out.shape == (0, 3)


def test_gradients_are_those_of_the_shift_held_fixed():
    cell = lattices(2).requires_grad_()
    pbc = torch.tensor([[True, True, True], [True, False, True]])
    vectors, ptr = draws(9).requires_grad_(), torch.tensor([0, 4, 9])
    assert torch.autograd.gradcheck(lambda v, c: minimum_image(v, c, pbc, ptr), (vectors, cell))
    (gradient,) = torch.autograd.grad(minimum_image(vectors, cell, pbc, ptr).sum(), vectors)
    assert torch.equal(gradient, torch.ones_like(gradient))


def test_half_precision_is_computed_in_float32():
    vectors = draws(10, reach=2.0).to(torch.bfloat16)
    cell, pbc, ptr = lattices(1), torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 10])
    out = minimum_image(vectors, cell.float(), pbc, ptr)
    assert out.dtype == torch.float32
    torch.testing.assert_close(
        out, minimum_image(vectors.float(), cell.float(), pbc, ptr), rtol=0, atol=0
    )


def test_autocast_changes_nothing():
    cell, pbc, ptr = lattices(1), torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 10])
    truth = minimum_image(draws(10), cell, pbc, ptr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(minimum_image(draws(10), cell, pbc, ptr), truth)


SINGULAR = {
    "a vector of zeros": [[3.0, 0, 0], [0, 3, 0], [0, 0, 0]],
    "two in line": [[3.0, 0, 0], [-1.7, 0, 0], [0, 0, 3]],
    "three in a plane": [[3.0, 0, 0], [0, 3, 0], [1.1, 2.3, 0]],
    "not finite": [[3.0, 0, 0], [0, 3, 0], [0, 0, torch.nan]],
    "endless": [[3.0, 0, 0], [0, 3, 0], [0, 0, torch.inf]],
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_cells_are_refused(name):
    cell = torch.stack([torch.eye(3), torch.tensor(SINGULAR[name])])
    whole, ptr = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"cell\[1\] is .*singular.*\(a, b, c\).*set pbc False"):
        minimum_image(torch.ones(2, 3), cell, whole, ptr)


def test_arguments_that_do_not_fit_are_refused():
    good = (torch.ones(2, 3), torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool))
    ptr = torch.tensor([0, 2])
    cases = (
        (0, torch.ones(2, 2), r"vectors have shape \(2, 2\)"),
        (0, torch.tensor([[0.0, 0, 0], [0, torch.nan, 0]]), r"vectors\[1\] is .*finite"),
        (0, torch.ones(3, 3), "ptr must start at 0"),
        (1, torch.eye(3), r"cell has shape \(3, 3\)"),
        (2, torch.ones(3, dtype=torch.bool), r"pbc has shape \(3,\)"),
        (2, torch.ones(1, 3), r"pbc.bool\(\)"),
    )
    for place, bad, message in cases:
        given = [*good]
        given[place] = bad
        with pytest.raises(ValueError, match=message):
            minimum_image(*given, ptr)


@pytest.mark.parametrize("skew", [0, 1, -7])
@pytest.mark.parametrize("open_axis", [None, 0, 2])
def test_vectors_around_half_a_lattice_vector_alone_in_their_batch(skew, open_axis):
    """One vector a call: nothing longer beside it sends it the long way."""
    cell = torch.diag(torch.tensor([4.0, 5.0, 6.0]))
    cell[2] += skew * cell[1]
    pbc = torch.ones(1, 3, dtype=torch.bool)
    if open_axis is not None:
        pbc[0, open_axis] = False
    axis = 1
    for length, expected in ((2.4, 2.4), (2.6, -2.4), (-2.6, 2.4), (4.9, -0.1)):
        vector = torch.zeros(1, 3)
        vector[0, axis] = length
        shortest = minimum_image(vector, cell[None], pbc, torch.tensor([0, 1]))
        torch.testing.assert_close(shortest[0, axis], torch.tensor(expected))
