"""Molecules have no cell: None in its place; and shapes that PyG's collating makes."""

import pytest
import torch

from flt_mol.functional import minimum_image, neighbor_pairs
from flt_mol.functional.lattice import reciprocal_vectors
from flt_mol.nn import SpectralFilter

PTR = torch.tensor([0, 3, 3, 7])
OPEN = torch.zeros(3, 3, 3), torch.zeros(3, 3, dtype=torch.bool)


def places():
    return 4 * torch.rand(7, 3, generator=torch.Generator().manual_seed(0))


def test_pairs_and_vectors_without_a_cell():
    r = places()
    pairs = neighbor_pairs(r, None, None, PTR, 3.0)
    assert len(pairs.index_i) > 4
    for found, expected in zip(pairs, neighbor_pairs(r, *OPEN, PTR, 3.0), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(pairs.vectors(r, None, PTR), pairs.vectors(r, OPEN[0], PTR))
    assert torch.equal(neighbor_pairs(r, None, OPEN[1], PTR, 3.0).index_j, pairs.index_j)


def test_a_spectral_filter_without_a_cell():
    r = places().double().requires_grad_()
    layer = SpectralFilter(8, 2).double()
    x = torch.ones(7, 8, dtype=torch.float64)
    out = layer(x, layer.geometry(r, None, None, PTR))
    given = layer(x, layer.geometry(r, OPEN[0].double(), OPEN[1], PTR))
    torch.testing.assert_close(out, given, rtol=0, atol=0)
    (slope,) = torch.autograd.grad(out.square().sum(), r)
    assert slope.abs().max() > 0


def test_the_shortest_image_without_a_cell_is_the_vector():
    v = 50 * places()
    assert torch.equal(minimum_image(v, None, None, PTR), v)


CALLS = {
    "neighbor_pairs": lambda cell, pbc: neighbor_pairs(places(), cell, pbc, PTR, 3.0),
    "reciprocal_vectors": lambda cell, pbc: reciprocal_vectors(
        cell, pbc, places(), PTR, k_max=0.3, padding=8.0
    ),
    "minimum_image": lambda cell, pbc: minimum_image(places(), cell, pbc, PTR),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("cell", "pbc", "message"),
    [
        (OPEN[0], None, "pbc is None and there is a cell"),
        (None, ~OPEN[1], "cell is None and pbc is True somewhere"),
        (torch.zeros(9, 3), OPEN[1], r"cell has shape \(9, 3\).*store cell as \(1, 3, 3\)"),
        (OPEN[0], torch.zeros(9, dtype=torch.bool), r"pbc has shape \(9,\).*and pbc as \(1, 3\)"),
        (torch.zeros(8, 3), OPEN[1], r"cell has shape \(8, 3\), expected \(3, 3, 3\)[^:]*$"),
    ],
)
def test_what_does_not_go_together_is_refused(call, cell, pbc, message):
    with pytest.raises(ValueError, match=message):
        call(cell, pbc)
