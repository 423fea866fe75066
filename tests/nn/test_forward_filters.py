"""Filters where no gradient is asked for: the numbers of the layers themselves."""

import pytest
import torch
from torch import nn

from flt_mol.functional import _pair_ops
from flt_mol.functional import forward_only as rows_only
from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs
from flt_mol.nn import (
    FLTAttention,
    FLTBlock,
    LocalBasis,
    LocalFilter,
    SpectralFilter,
    forward_filters,
)

F64, C, CUTOFF = torch.float64, 12, 4.0
SYSTEMS = {"one": [0, 23], "several": [0, 8, 8, 23]}
PARTS = {
    "both": ("attention", "spectral", "local"),
    "filters": ("spectral", "local"),
    "spectral": ("spectral",),
    "local": ("local",),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Systems of these tests are too small for the quick form to be quick."""
    monkeypatch.setattr(rows_only, "LEAST", 1)
    monkeypatch.setattr(rows_only, "CHUNK", 5)
    monkeypatch.setitem(_pair_ops._CHUNK, "cpu", 60)


@pytest.fixture
def calls(monkeypatch):
    taken = []
    for name in ("add_spectral", "add_local"):
        original = getattr(forward_filters, name)

        def spy(*given, _name=name, _original=original):
            taken.append(_name)
            return _original(*given)

        monkeypatch.setattr(forward_filters, name, spy)
    return taken


def make(parts="both", norm=True, vectors=0, num_filters=None, bias=True):
    torch.manual_seed(0)
    names = PARTS[parts]
    attention = FLTAttention(C, 3, num_features=4) if "attention" in names else None
    spectral = SpectralFilter(C, 3, k_max=0.3, kernels_below=0, bias=bias)
    local = LocalFilter(C, 6, vectors, 4 if vectors else 0, num_filters=num_filters)
    block = FLTBlock(
        attention,
        20,
        spectral=spectral if "spectral" in names else None,
        local=local if "local" in names else None,
        local_norm=norm,
    ).double()
    for parameter in block.parameters():  # biases and gains that are not 0 and 1
        nn.init.normal_(parameter, std=0.5)
    basis = LocalBasis(CUTOFF, 6, 4 if vectors else 0).double()
    return block.eval(), basis


def draw(systems="one", seed=1):
    generator = torch.Generator().manual_seed(seed)
    ptr = torch.tensor(SYSTEMS[systems])
    rows, count = int(ptr[-1]), len(ptr) - 1
    positions = 7 * torch.rand(rows, 3, generator=generator, dtype=F64)
    cell = 7.0 * torch.eye(3, dtype=F64).expand(count, 3, 3)
    x = torch.randn(rows, C, generator=generator, dtype=F64)
    return x, positions, cell, torch.ones(count, 3, dtype=torch.bool), ptr


def geometry(block, basis, positions, cell, pbc, ptr, order=None):
    given = {}
    if block.local is not None:
        pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
        if order is not None:
            pairs = NeighborPairs(*(x[order(len(x))] for x in pairs))
        given["local"] = basis(pairs, pairs.vectors(positions, cell, ptr), len(positions))
    if block.spectral is not None:
        given["waves"] = block.spectral.geometry(positions, cell, pbc, ptr)
    return given


def both(block, x, ptr, given):
    expected = block(x, ptr, **given).detach()
    copy = x.clone()
    with torch.no_grad():
        found = block(x, ptr, **given)
    assert torch.equal(x, copy)
    return found, expected


@pytest.mark.parametrize("systems", SYSTEMS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("norm", [True, False])
def test_blocks_equal_their_differentiable_form(systems, parts, norm, calls):
    block, basis = make(parts, norm)
    x, *where = draw(systems)
    found, expected = both(block, x, where[-1], geometry(block, basis, *where))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    taken = [f"add_{name}" for name in ("spectral", "local") if name in PARTS[parts]]
    assert calls == taken


@pytest.mark.parametrize("settings", [{"num_filters": 5}, {"bias": False}])
def test_other_settings(settings, calls):
    block, basis = make(**settings)
    x, *where = draw()
    found, expected = both(block, x, where[-1], geometry(block, basis, *where))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert calls == ["add_spectral", "add_local"]


def test_receivers_without_neighbours(calls):
    block, basis = make("local")
    x, positions, cell, pbc, ptr = draw()
    positions[3:9] += 100 * torch.arange(1, 7)[:, None]  # each alone, a whole chunk among them
    positions[-1] -= 100
    given = geometry(block, basis, positions, cell, ~pbc, ptr)
    assert 0 < len(given["local"].pairs.index_i.unique()) < 23
    found, expected = both(block, x, ptr, given)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert calls == ["add_local"]


def _hooked(block):
    block.spectral.value.register_forward_hook(lambda *_: None)
    block.local.out[1].register_forward_hook(lambda *_: None)


def _replaced(block):
    nn.utils.parametrizations.weight_norm(block.spectral.out)
    block.local.out = nn.Sequential(*block.local.out, nn.Tanh())


def _child(block):
    for part in (block.spectral, block.local):
        part.__class__ = type("Other", (type(part),), {})


@pytest.mark.parametrize("change", [_hooked, _replaced, _child])
def test_what_is_not_known_is_called(change, calls):
    block, basis = make()
    change(block)
    x, *where = draw()
    found, expected = both(block, x, where[-1], geometry(block, basis, *where))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert not calls


def test_vectors_and_pairs_out_of_order_are_left_to_the_layer(calls):
    x, *where = draw()
    for settings, order in (({"vectors": 2}, None), ({}, lambda n: torch.arange(n).flip(0))):
        block, basis = make("local", **settings)
        found, expected = both(block, x, where[-1], geometry(block, basis, *where, order))
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert not calls


def test_systems_that_go_by_kernels_are_left_to_the_layer(calls):
    block, basis = make("spectral")
    block.spectral.kernels_below = 8  # the first system
    x, *where = draw("several")
    given = geometry(block, basis, *where)
    assert given["waves"].kernels.numel() and given["waves"].waves.numel()  # noqa: PT018
    found, expected = both(block, x, where[-1], given)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert not calls


def test_what_does_not_fit_is_refused_all_the_same():
    block, basis = make("filters")
    x, *where = draw()
    given = geometry(block, basis, *where)
    other = SpectralFilter(C, 3, k_max=0.25, kernels_below=0).double().geometry(*where)
    far = given["local"].pairs._replace(index_j=given["local"].pairs.index_j + 1)
    with torch.no_grad():
        with pytest.raises(ValueError, match="the geometry was made for"):
            block(x, where[-1], **{**given, "waves": other})
        with pytest.raises(ValueError, match="pairs name atoms from"):
            block(x, where[-1], **{**given, "local": given["local"]._replace(pairs=far)})
