import math

import pytest
import torch

from flt_mol.functional.lattice import fractional_positions, reciprocal_vectors
from flt_mol.functional.ragged import ragged_layout
from flt_mol.functional.spectral import (
    kernel_filter,
    kernel_matrices,
    lattice_waves,
    radial_basis,
    structure_factor_filter,
)

F64 = torch.float64
H, D, T = 2, 3, 4
SIZES = [6, 1, 0, 4]
PTR = torch.tensor([0, 6, 7, 7, 11])
CELLS = torch.tensor(
    [
        [[5.0, 0, 0], [1.0, 4.5, 0], [0.5, 0.2, 6.0]],
        [[0.0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[3.0, 0, 0], [0, 3.0, 0], [0, 0, 3.0]],
        [[4.0, 0, 0], [0, 0, 7.0], [0, 5.0, 0]],
    ],
    dtype=F64,
)
PBC = torch.tensor([[True] * 3, [False] * 3, [True] * 3, [True, True, False]])
K_MAX, PADDING = 0.3, 6.0


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def batch(dtype=F64):
    """Positions of a ragged batch with an empty system, and its reciprocal vectors."""
    positions = 2 * draw(11, 3)
    lattice = reciprocal_vectors(
        CELLS.to(dtype), PBC, positions.to(dtype), PTR, k_max=K_MAX, padding=PADDING,
        shrink_vacuum=False,
    )  # fmt: skip
    return positions.to(dtype), lattice


def waves_of(positions, lattice):
    layout = ragged_layout(PTR, lattice.ptr)
    fraction = fractional_positions(positions, PTR, lattice)
    waves = lattice_waves(fraction, lattice.integers, layout, int(layout[2, -1]))
    return waves, torch.cat([layout[:1], 2 * layout[1:]])


def kernels_of(positions, lattice, spectra):
    waves, layout = waves_of(positions, lattice)
    pairs = ragged_layout(PTR, PTR)
    return kernel_matrices(waves, spectra, layout, int(pairs[2, -1])), pairs


def explicit(positions, lattice, spectrum, value):
    """Σ_k γ_kh cos 2πk·(r_i − r_j) v_jh, term by term."""
    out = []
    for b in range(len(SIZES)):
        rows = slice(int(PTR[b]), int(PTR[b + 1]))
        waves = slice(int(lattice.ptr[b]), int(lattice.ptr[b + 1]))
        r, vectors = positions[rows], lattice.vectors[waves]
        turns = ((r[:, None] - r[None])[:, :, None] * vectors).sum(-1)
        matrix = torch.einsum("ijk,kh->hij", (2 * math.pi * turns).cos(), spectrum[waves])
        out.append(torch.einsum("hij,jhd->ihd", matrix, value[rows]))
    return torch.cat(out)


def by_structure_factors(positions, lattice, spectrum, value):
    return structure_factor_filter(value, spectrum, *waves_of(positions, lattice))


def by_kernels(positions, lattice, spectrum, value):
    """Spectra as the radial functions and the identity as amplitudes: one function per head."""
    kernels, pairs = kernels_of(positions, lattice, spectrum)
    return kernel_filter(value, torch.eye(H, dtype=value.dtype), kernels, pairs)


@pytest.mark.parametrize("route", [by_structure_factors, by_kernels])
@pytest.mark.parametrize("width", [D, 5])
def test_values_and_gradients_are_the_explicit_ones(route, width):
    positions, lattice = batch()
    spectrum, value = draw(len(lattice.integers), H, seed=1), draw(11, H, width, seed=2)
    inputs = [x.requires_grad_() for x in (positions, spectrum, value)]
    found, expected = (f(inputs[0], lattice, *inputs[1:]) for f in (route, explicit))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    seed = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, seed)
    truth = torch.autograd.grad(expected, inputs, seed)
    assert truth[0].abs().max() > 0.1
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-9)


@pytest.mark.parametrize("route", [by_structure_factors, by_kernels])
def test_float32(route):
    positions, lattice = batch()
    spectrum, value = draw(len(lattice.integers), H, seed=1), draw(11, H, D, seed=2)
    expected = route(positions, lattice, spectrum, value)
    positions, lattice = batch(torch.float32)
    found = route(positions, lattice, spectrum.float(), value.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("route", [by_structure_factors, by_kernels])
def test_derivatives_of_forces_are_the_explicit_ones(route):
    positions, lattice = batch()
    spectrum, value = draw(len(lattice.integers), H, seed=1), draw(11, H, D, seed=2)
    inputs = [x.requires_grad_() for x in (positions, spectrum, value)]

    def penalty(filter_):
        energy = filter_(inputs[0], lattice, *inputs[1:]).sin().sum()
        (forces,) = torch.autograd.grad(energy, inputs[0], create_graph=True)
        return torch.autograd.grad(forces.square().sum(), inputs)

    for fast, slow in zip(penalty(route), penalty(explicit), strict=True):
        assert slow.abs().max() > 1e-3
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-8)


def test_amplitudes_mix_the_kernels_and_both_orders_of_mixing_agree():
    positions, lattice = batch()
    spectra, amplitudes = draw(len(lattice.integers), T, seed=1), draw(H, T, seed=3)
    for width in (1, 8):
        value = draw(11, H, width, seed=2).requires_grad_()
        found = kernel_filter(value, amplitudes, *kernels_of(positions, lattice, spectra))
        expected = explicit(positions, lattice, spectra @ amplitudes.T, value)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_every_operation_on_kernels_can_be_differentiated_twice():
    positions, lattice = batch()
    spectra = draw(len(lattice.integers), 2, seed=1).requires_grad_()
    waves, layout = waves_of(positions, lattice)
    rows, columns = layout[0].diff(), layout[1].diff()
    keep = int((rows * columns)[:2].sum())  # the first two systems are enough
    layout = layout[:, :3]
    waves, spectra = waves[:, :keep].detach(), spectra[: int(layout[1, -1]) // 2].detach()
    inputs = [waves.requires_grad_(), spectra.requires_grad_()]
    size = int((layout[0].diff() ** 2).sum())

    def function(waves, spectra):
        return kernel_matrices(waves, spectra, layout, size)

    # Random projections: the full Jacobians have thousands of columns.
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)
    ops = torch.ops.flt_mol
    a, y = waves[0].detach().requires_grad_(), draw(2, size, seed=4).requires_grad_()
    b = draw(a.shape[0], seed=5).requires_grad_()
    twice = spectra.detach().repeat_interleave(2, dim=0).requires_grad_()
    for pull in (False, True):
        arguments = (y, b, twice)
        run = lambda y, b, s, pull=pull: ops.spectral_kernel_pull(y, b, s, layout, pull)  # noqa: E731
        assert torch.autograd.gradcheck(run, arguments, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, arguments, fast_mode=True)
    run = lambda y, a, b: ops.spectral_kernel_spectra(y, a, b, layout, len(twice))  # noqa: E731
    assert torch.autograd.gradcheck(run, (y, a, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (y, a, b), fast_mode=True)
    for name, arguments in (
        ("spectral_kernel", (a, b, twice, layout, size)),
        ("spectral_kernel_pull", (y, b, twice, layout, True)),
        ("spectral_kernel_spectra", (y, a, b, layout, len(twice))),
    ):
        torch.library.opcheck(getattr(ops, name).default, arguments)


def test_waves():
    positions, lattice = batch()
    waves, layout = waves_of(positions, lattice)
    pieces = layout[2].tolist()
    system = waves[0, pieces[0] : pieces[1]].view(6, -1, 2)
    turns = (positions[:6] - positions[0]) @ lattice.vectors[: system.shape[1]].T
    expected = torch.stack([(2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()], -1)
    torch.testing.assert_close(system, expected, rtol=0, atol=1e-12)
    fraction = fractional_positions(positions, PTR, lattice).requires_grad_()
    plain = ragged_layout(PTR, lattice.ptr)
    size = int(plain[2, -1])
    integers = lattice.integers.double()
    torch.library.opcheck(
        torch.ops.flt_mol.lattice_turns.default, (fraction, integers, plain, size)
    )

    def function(fraction):
        return lattice_waves(fraction, lattice.integers, plain, size)

    assert torch.autograd.gradcheck(function, fraction)
    assert torch.autograd.gradgradcheck(function, fraction, fast_mode=True)


def test_nothing_of_size_atoms_times_vectors_times_channels_is_kept():
    rows, channels = 40, 64
    ptr, layout = torch.tensor([0, rows]), None
    lattice = reciprocal_vectors(
        9.0 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool), 9 * torch.rand(rows, 3), ptr,
        k_max=0.4, padding=9.0,
    )  # fmt: skip
    layout = ragged_layout(ptr, lattice.ptr)
    fraction = torch.rand(rows, 3, requires_grad=True)
    num_vectors, size = len(lattice.integers), int(layout[2, -1])
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    value = torch.randn(rows, 8, channels // 8, requires_grad=True)
    spectrum = torch.randn(num_vectors, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        waves = lattice_waves(fraction, lattice.integers, layout, size)
        twice = torch.cat([layout[:1], 2 * layout[1:]])
        structure_factor_filter(value, spectrum, waves, twice)
    assert kept
    assert max(kept) <= 2 * num_vectors * max(rows, channels)


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_other_systems_leave_no_trace(poison):
    positions, lattice = batch()
    spectrum, value = draw(len(lattice.integers), H, seed=1), draw(11, H, D, seed=2)
    for route in (by_structure_factors, by_kernels):
        clean = route(positions, lattice, spectrum, value)
        dirty_value, dirty_spectrum = value.clone(), spectrum.clone()
        dirty_value[7:] = poison
        dirty_spectrum[int(lattice.ptr[3]) :] = poison
        dirty = route(positions, lattice, dirty_spectrum, dirty_value)
        assert torch.equal(dirty[:7], clean[:7])


def test_radial_functions_are_smooth_and_end_with_their_slope():
    centers = torch.tensor([0.0, 0.15, 0.34], dtype=F64)
    k = torch.tensor([0.0, 0.2, 0.45, 0.5], dtype=F64).requires_grad_()
    values = radial_basis(k, centers, 0.053, 0.45)
    assert (values[2:] == 0).all()
    plain = values.detach()
    assert math.isclose(plain[0, 0], 2.0)
    by_hand = math.exp(-0.5 * (0.05 / 0.053) ** 2) + math.exp(-0.5 * (0.35 / 0.053) ** 2)
    assert math.isclose(plain[1, 1], by_hand * (1 - (0.2 / 0.45) ** 2) ** 2)
    (slope,) = torch.autograd.grad(values.sum(), k)
    torch.testing.assert_close(slope[[0, 2, 3]], torch.zeros(3, dtype=F64))


@pytest.mark.parametrize(("pad", "tail"), [(4.0, 3e-4), (5.0, 2e-5)])
@pytest.mark.parametrize("sigma", [2.5, 3.0, 4.0])
def test_radial_functions_have_decayed_in_space_where_promised(sigma, pad, tail):
    k_max, width = 0.45, 1 / (2 * math.pi * sigma)
    centers = torch.linspace(0, k_max - 2 * width, 8, dtype=F64)
    k = (torch.arange(4000, dtype=F64) + 0.5) * k_max / 4000
    shells = 4 * math.pi * k**2 * k_max / 4000
    functions = radial_basis(k, centers, width, k_max)
    r = torch.linspace(0, 12 * sigma, 600, dtype=F64)
    in_space = (torch.sinc(2 * r[:, None] * k) * shells) @ functions
    effect = (in_space[0] ** 2 + 0.05 * (shells @ functions**2)).sqrt()
    far = in_space[r > pad * sigma].abs().amax(0)
    assert (far / effect).max() < tail
