import math

import pytest
import torch
from periodic import F64, seeded

from flt_mol.functional import reciprocal_vectors
from flt_mol.functional.mesh import make_mesh, mesh_filter, mesh_modes, mesh_nodes, mode_integers
from flt_mol.nn.spectral_filter import radial_basis

H, D, K_MAX = 2, 3, 0.45
ON, OFF = [True] * 3, [False] * 3
# Cells in Å, pbc, extent of the atoms, their number; edges on both sides of a change of the mesh.
SYSTEMS = {
    "cube": ([[14.0, 0, 0], [0, 14, 0], [0, 0, 14]], ON, (14, 14, 14), 50),
    "odd sizes": ([[7.1, 0, 0], [0, 23.9, 0], [0, 0, 13.3]], ON, (7, 23, 13), 37),
    "triclinic": ([[21.3, 0, 0], [5, 23.1, 0], [-3, 9.2, 17.0]], ON, (21, 23, 17), 61),
    "thin": ([[2.5, 0, 0], [0, 2.5, 0], [0, 0, 40]], ON, (2.5, 2.5, 40), 12),
    "slab": ([[9.0, 0, 0], [2, 8, 0], [0, 0, 50]], [True, True, False], (9, 8, 6), 20),
    "molecule": ([[0.0] * 3] * 3, OFF, (6, 9, 3), 9),
    "atom": ([[0.0] * 3] * 3, OFF, (1, 1, 1), 1),
}


def case(name):
    """Fractions (N, 3), cell, value and the amplitudes of two functions of \\|k\\|, float64."""
    cell, pbc, extent, count = SYSTEMS[name]
    generator = seeded(1)
    positions = torch.rand(count, 3, generator=generator, dtype=F64) * torch.tensor(extent)
    lattice = reciprocal_vectors(
        torch.tensor([cell], dtype=F64),
        torch.tensor([pbc]),
        positions,
        torch.tensor([0, count]),
        k_max=K_MAX,
        padding=10.0,
    )
    value = torch.randn(count, H, D, generator=generator, dtype=F64)
    amplitudes = torch.randn(H, 3, generator=generator, dtype=F64)
    return positions @ lattice.inverse[0], lattice, value, amplitudes


def gamma(integers, inverse, amplitudes):
    magnitude = (integers.double().flatten(0, -2)[:, None] * inverse).sum(-1).norm(dim=-1)
    centers = torch.tensor([0.0, 0.15, 0.35], dtype=F64)
    return (radial_basis(magnitude, centers, 0.06, K_MAX) @ amplitudes.T).T


def explicit(fraction, value, amplitudes, lattice):
    phase = 2 * math.pi * fraction @ lattice.integers.double().T
    spectrum = gamma(lattice.integers, lattice.inverse[0], amplitudes) * lattice.weight
    between = phase[:, None] - phase[None]
    return torch.einsum("ijk,hk,jhd->ihd", between.cos(), spectrum, value)


def on_mesh(fraction, value, amplitudes, lattice):
    modes = mesh_modes(lattice.cell[0].norm(dim=1).tolist(), K_MAX)
    integers = mode_integers(modes)
    spectrum = gamma(integers, lattice.inverse[0], amplitudes) / lattice.cell[0].det().abs()
    spectrum = spectrum.view(H, *integers.shape[:-1]).to(value.dtype)
    return mesh_filter(value, spectrum, make_mesh(fraction, modes, value.dtype))


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", SYSTEMS)
def test_it_is_the_sum_over_vectors(name):
    fraction, lattice, value, amplitudes = case(name)
    expected = explicit(fraction, value, amplitudes, lattice)
    assert error(on_mesh(fraction, value, amplitudes, lattice), expected) < 1e-6
    # Whole turns change nothing, nor does the place of the origin beyond the accuracy.
    moved = fraction + torch.tensor([3.0, -1.0, 0.37], dtype=F64)
    assert error(on_mesh(moved, value, amplitudes, lattice), expected) < 1e-6
    single = on_mesh(fraction, value.float(), amplitudes, lattice)
    assert single.dtype == torch.float32
    assert error(single, expected) < 5e-6


@pytest.mark.parametrize("name", ["triclinic", "slab"])
def test_gradients_and_their_gradients_are_those_of_the_sum(name):
    fraction, lattice, value, amplitudes = case(name)
    inputs = [x.requires_grad_() for x in (fraction, value, amplitudes)]
    results = []
    for route in (on_mesh, explicit):
        out = route(*inputs, lattice)
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), inputs)
        results.append((*first, *second))
    limits = 1e-5, 1e-6, 1e-6, 3e-4, 1e-5, 1e-5  # each derivative by a position costs a digit
    for found, expected, limit in zip(*results, limits, strict=True):
        assert error(found.detach(), expected.detach()) < limit


def test_channels_and_bins_in_parts_give_the_same(monkeypatch):
    given = case("triclinic")
    fraction, lattice, value, amplitudes = given
    whole = on_mesh(fraction, value, amplitudes, lattice)
    monkeypatch.setattr("flt_mol.functional.mesh._NODES", 1)
    monkeypatch.setattr("flt_mol.functional.mesh._BLOCKS", 1)
    torch.testing.assert_close(on_mesh(fraction, value, amplitudes, lattice), whole)


def test_a_mesh_resolves_its_modes_and_grows_with_the_volume():
    for m in range(60):
        nodes = mesh_nodes((m, 0, 0))[0]
        assert nodes >= 1.5 * (2 * m + 1)
        assert nodes <= max(16, 1.6 * 1.5 * (2 * m + 1))
    integers = mode_integers((2, 1, 1))
    assert integers.shape == (5, 3, 2, 3)
    assert integers[:, 0, 0, 0].tolist() == [0, 1, 2, -2, -1]


def test_memory_does_not_grow_with_atoms_times_vectors():
    count = 20_000
    fraction = torch.rand(count, 3, generator=seeded())
    mesh = make_mesh(fraction, (20, 20, 20), torch.float32)
    kept = sum(x.numel() for x in mesh if isinstance(x, torch.Tensor))
    assert kept < 120 * count  # vectors: 16,000
    spectrum = torch.zeros(1, 41, 41, 21)
    spectrum[0, 0, 0, 0] = 1.0  # F = 1: each atom gets the sum over all
    out = mesh_filter(torch.ones(count, 1, 1), spectrum, mesh)
    torch.testing.assert_close(out, torch.full((count, 1, 1), float(count)), rtol=5e-6, atol=0)
