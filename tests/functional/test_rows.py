"""Functions of rows in chunks: the same numbers as of all rows at once."""

import pytest
import torch

from flt_mol.functional import _rows, ragged
from flt_mol.functional._rows import by_rows, rows_of, values_only
from flt_mol.functional.lattice import fractional_positions, reciprocal_vectors
from flt_mol.functional.neighbors import neighbor_pairs, pair_lengths
from flt_mol.functional.ragged import ragged_layout, ragged_transposed_product
from flt_mol.functional.spectral import lattice_waves
from flt_mol.nn.radial import RadialBasis

F64 = torch.float64


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 9])
def test_chunks_are_all_rows(rows):
    x, y = torch.randn(rows, 3), torch.arange(rows)
    seen = []

    def function(x, y):
        seen.append(len(x))
        return x.cumsum(1)[:, 1:] + y[:, None]

    torch.testing.assert_close(by_rows(function, x, y, size=4), function(x, y), rtol=0, atol=0)
    assert max(seen[:-1]) <= 4
    assert sum(seen[:-1]) == rows


def test_whether_values_are_all_that_is_needed():
    x, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert values_only(x)
    assert not values_only(x, weight)
    with torch.no_grad():
        assert values_only(x, weight)
        assert not values_only(x.to("meta"))
        with torch.autograd.forward_ad.dual_level():
            assert not values_only(x)
    torch.func.vmap(lambda x: x if not values_only(x) else pytest.fail("under vmap"))(x)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(_rows, "NUMBERS", 16)


def crystal(repeats=1):
    generator = torch.Generator().manual_seed(1)
    cell = 6.0 * torch.eye(3, dtype=F64) + torch.rand(3, 3, generator=generator, dtype=F64)
    ptr = torch.arange(repeats + 1) * 9
    positions = 6 * torch.rand(9 * repeats, 3, generator=generator, dtype=F64)
    return positions, cell.expand(repeats, 3, 3), torch.ones(repeats, 3, dtype=torch.bool), ptr


@pytest.mark.parametrize("repeats", [1, 3])
def test_vectors_lengths_and_radial_functions_in_chunks(small, repeats):
    positions, cell, pbc, ptr = crystal(repeats)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 4.0)
    assert len(pairs.index_i) > 5 * rows_of(9)
    basis = RadialBasis(4.0, 5).double()
    found = pairs.vectors(positions, cell, ptr)
    whole = positions.clone().requires_grad_()  # what asks for a gradient is done at once
    expected = pairs.vectors(whole, cell, ptr)
    assert expected.requires_grad
    torch.testing.assert_close(found, expected.detach())
    images = torch.einsum("pk,pkx->px", pairs.shift.double(), cell[pairs.index_i // 9])
    reference = positions[pairs.index_i] - positions[pairs.index_j] - images
    torch.testing.assert_close(found, reference)
    torch.testing.assert_close(pair_lengths(found), reference.norm(dim=-1))
    torch.testing.assert_close(
        basis(pair_lengths(found)), basis(pair_lengths(expected)).detach(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("repeats", [1, 3])
def test_waves_of_long_systems(small, repeats):
    positions, cell, pbc, ptr = crystal(repeats)
    lattice = reciprocal_vectors(cell, pbc, positions, ptr, k_max=0.4, padding=5.0)
    fraction = fractional_positions(positions, ptr, lattice)
    layout = ragged_layout(ptr, lattice.ptr)
    size = int(layout[2, -1])
    assert size > 16 * repeats
    found = lattice_waves(fraction, lattice.integers, layout, size)
    expected = lattice_waves(fraction.clone().requires_grad_(), lattice.integers, layout, size)
    assert expected.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    first = lattice.integers[: int(lattice.ptr[1])].double()
    phase = 2 * torch.pi * fraction[:9] @ first.T
    reference = torch.stack([phase.cos(), phase.sin()], -1).flatten()
    torch.testing.assert_close(found[0, : reference.numel()], reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("width", [2, 7])
def test_transposed_products_of_long_systems(monkeypatch, width):
    layout = ragged_layout(torch.tensor([0, 4, 4, 9]), torch.tensor([0, 5, 8, 11]))
    blocks = torch.randn(2, int(layout[2, -1]), dtype=F64)
    x = torch.randn(9, 2, width, dtype=F64, requires_grad=True)
    expected = ragged_transposed_product(blocks, x, layout, 11)
    monkeypatch.setattr(ragged, "LONG", 5)  # the last system, and that only where it is narrow
    found = ragged_transposed_product(blocks, x, layout, 11)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
    torch.testing.assert_close(*gradients)
