"""Pairs that come in both directions: what their gradients may make of it."""

import itertools

import pytest
import torch
from periodic import F64, kept_sizes, seeded

from flt_mol.functional import _pair_ops
from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs, pair_lengths
from flt_mol.functional.pairs import pair_filter
from flt_mol.nn import LocalBasis

T, C = 4, 5


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    if request.param == "many chunks":
        monkeypatch.setitem(_pair_ops._CHUNK, "cpu", 12)


@pytest.fixture
def crystal():
    """Two small periodic cells and a molecule, with images of atoms themselves among the pairs."""
    draw = seeded(0)
    positions = 3 * torch.rand(8, 3, generator=draw, dtype=F64)
    cell = 3 * torch.eye(3, dtype=F64).repeat(3, 1, 1)
    cell[0, 0, 1] = 0.5
    pbc = torch.tensor([[True] * 3, [True, True, False], [False] * 3])
    ptr = torch.tensor([0, 3, 5, 8])
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 3.5)
    assert bool((pairs.index_i == pairs.index_j).any())
    return positions, cell, ptr, pairs


def _draw(*shapes):
    draw = seeded(1)
    return [torch.randn(s, generator=draw, dtype=F64).requires_grad_() for s in shapes]


def _energy(positions, crystal, weight, value, symmetric):
    """A scalar of everything, not linear in any of them."""
    _, cell, ptr, pairs = crystal
    distances = pair_lengths(pairs.vectors(positions, cell, ptr))
    basis = torch.exp(-((distances[:, None] - torch.linspace(0, 3, T, dtype=F64)) ** 2))
    out = pair_filter(
        basis, weight, value, pairs.index_i, pairs.index_j, len(value), symmetric=symmetric
    )
    return (out.sin() * torch.arange(1, C + 1)).sum()


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_gradients_are_those_of_any_pairs(crystal, needs, chunks):
    positions = crystal[0].clone()
    inputs = [positions, *_draw((T, C), (8, C))]
    for x, need in zip(inputs, needs, strict=True):
        x.requires_grad_(need)
    asked = [x for x in inputs if x.requires_grad]
    found, expected = (
        torch.autograd.grad(_energy(positions, crystal, *inputs[1:], symmetric), asked)
        for symmetric in (True, False)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_gradients_of_forces_too(crystal, chunks):
    found = []
    for symmetric in (True, False):
        positions = crystal[0].clone().requires_grad_()
        weight, value = _draw((T, C), (8, C))
        energy = _energy(positions, crystal, weight, value, symmetric)
        inputs = [positions, weight, value]
        first = torch.autograd.grad(energy, inputs, create_graph=True)
        loss = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(loss, inputs))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-9)


def test_operator_follows_torchs_rules(crystal):
    pairs = crystal[3]
    basis = torch.exp(-pair_lengths(pairs.vectors(*crystal[:3])))[:, None].repeat(1, T)
    weight, value = _draw((T, C), (8, C))
    operands = basis, weight, value, pairs.index_i, pairs.index_j, 8
    torch.library.opcheck(_pair_ops.symmetric_pair_filter, operands)


def test_nothing_of_pairs_times_channels_is_kept(crystal):
    pairs = crystal[3]
    weight, value = _draw((T, C), (8, C))
    basis = torch.rand(len(pairs.index_i), T, dtype=F64)
    indices = pairs.index_i, pairs.index_j
    kept = kept_sizes(lambda: pair_filter(basis, weight, value, *indices, 8, symmetric=True))
    assert max(kept) <= max(basis.numel(), value.numel())


def test_lists_that_are_symmetric_and_lists_that_are_not(crystal):
    pairs = crystal[3]
    assert pairs.symmetric()
    shuffled = torch.randperm(len(pairs.index_i), generator=seeded(2))
    assert NeighborPairs(*(x[shuffled] for x in pairs)).symmetric()
    for p in range(len(pairs.index_i)):
        kept = torch.arange(len(pairs.index_i)) != p
        assert not NeighborPairs(*(x[kept] for x in pairs)).symmetric()
    moved = pairs._replace(shift=pairs.shift + torch.tensor([0, 0, 1]))
    assert not moved.symmetric()
    none = NeighborPairs(*(x[:0] for x in pairs))
    assert none.symmetric()


def test_other_senders_than_receivers_are_refused():
    i = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="3 senders for 2 receivers"):
        pair_filter(torch.ones(2, 1), torch.ones(1, 1), torch.ones(3, 1), i, i, 2, symmetric=True)


def test_a_basis_says_whether_its_pairs_are(crystal):
    positions, cell, ptr, pairs = crystal
    numbers = torch.tensor([1, 8, 29, 29, 78, 6, 1, 1])
    vectors = pairs.vectors(positions, cell, ptr)
    assert LocalBasis(3.5, 4)(pairs, vectors, 8).symmetric
    assert LocalBasis(3.5, 4, vector_basis=3)(pairs, vectors, 8).symmetric
    cut = NeighborPairs(*(x[:-1] for x in pairs))
    assert not LocalBasis(3.5, 4)(cut, vectors[:-1], 8).symmetric
    # What a pair of elements does to a distance depends on which of them looks.
    typed = LocalBasis(3.5, 4, pair_types=True)
    assert not typed(pairs, vectors, 8, numbers).symmetric
