import math

import pytest
import torch
from periodic import F64, seeded
from torch.autograd import gradcheck, gradgradcheck

from flt_mol.functional import group_budget
from flt_mol.functional.spectral import (
    kernel_filter,
    kernel_matrices,
    plane_waves,
    spectral_sums,
    spectral_tables,
    structure_factor_filter,
)
from flt_mol.nn.spectral_filter import radial_basis

G, L, K, T, H, D = 2, 4, 5, 3, 2, 3


def case():
    generator = seeded()
    fraction = torch.rand(G, L, 3, generator=generator, dtype=F64) - 0.5
    integers = torch.randint(-3, 4, (G, K, 3), generator=generator)
    spectra = torch.randn(G, K, T, generator=generator, dtype=F64)
    value = torch.randn(G, L, H, D, generator=generator, dtype=F64)
    amplitudes = torch.randn(H, T, generator=generator, dtype=F64)
    spectra[1, 3:], value[0, 3:] = 0, 0  # padding
    return fraction.requires_grad_(), integers, spectra, value, amplitudes


def explicit(fraction, integers, spectra, value, amplitudes):
    """Σ_j Σ_k Σ_t a_ht γ_kt cos 2πk·(r_i − r_j) v_jh, with complex waves nowhere."""
    between = fraction[:, :, None] - fraction[:, None]
    phase = 2 * math.pi * torch.einsum("gijc,gkc->gijk", between, integers.double())
    return torch.einsum("gijk,gkt,ht,gjhd->gihd", phase.cos(), spectra, amplitudes, value)


def by_factors(fraction, integers, spectra, value, amplitudes):
    return structure_factor_filter(value, spectra @ amplitudes.T, plane_waves(fraction, integers))


def by_kernels(fraction, integers, spectra, value, amplitudes):
    kernels = kernel_matrices(plane_waves(fraction, integers), spectra)
    return kernel_filter(value, amplitudes, kernels)


@pytest.mark.parametrize("route", [by_factors, by_kernels])
def test_both_routes_are_the_sum_over_vectors_with_gradients_of_any_order(route):
    fraction, integers, *rest = case()
    inputs = [fraction, *(x.requires_grad_() for x in rest)]

    def run(f, *others):
        return route(f, integers, *others)

    out, expected = run(*inputs), explicit(fraction, integers, *rest)
    torch.testing.assert_close(out, expected)
    for one, other in zip(
        torch.autograd.grad(out.sin().sum(), inputs),
        torch.autograd.grad(expected.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


def test_phases_keep_float32_digits_and_take_no_matmul():
    fraction = torch.full((1, 1, 3), 0.2000001)
    waves = plane_waves(fraction, torch.tensor([[[1000, -999, 0]]]))
    exact = 2 * math.pi * 0.2000001
    torch.testing.assert_close(
        waves.flatten(), torch.tensor([math.cos(exact), math.sin(exact)]), rtol=0, atol=2e-4
    )


def test_radial_functions_are_even_bumps_that_end_smoothly():
    k = torch.tensor([0.0, 0.1, 0.3999, 0.4, 0.5], dtype=F64)
    centers = torch.tensor([0.0, 0.2], dtype=F64)
    out = radial_basis(k, centers, 0.05, 0.4)
    for row, x in enumerate(k.tolist()):
        for column, c in enumerate(centers.tolist()):
            bump = sum(math.exp(-((x + s * c) ** 2) / (2 * 0.05**2)) for s in (1, -1))
            end = max(0.0, 1 - (x / 0.4) ** 2) ** 2
            assert abs(float(out[row, column]) - bump * end) < 1e-12
    assert not out[3:].any()


def test_steps_of_graphs_give_what_eager_code_gives():
    generator = seeded()
    ptr, key_ptr = torch.tensor([0, 5, 5, 9, 20]), torch.tensor([0, 6, 6, 20, 32])
    fraction = torch.rand(20, 3, generator=generator) - 0.5
    spectra = torch.randn(32, T, generator=generator)
    integers = torch.randint(-2, 3, (32, 3), generator=generator)
    value = torch.randn(20, H, D, generator=generator)
    inputs = [value, torch.randn(H, T, generator=generator), fraction, spectra]
    inputs = [x.requires_grad_() for x in inputs]
    ops = torch.ops.flt_mol

    def run(tables, sums, below):
        where = ptr, key_ptr, below
        table = tables(fraction, spectra, integers, *where)
        return sums(*inputs[:2], spectra, table, *where)

    for below in (0, 7, 100):  # by structure factors, mixed, by kernels
        with group_budget(2**40):
            expected = run(spectral_tables, spectral_sums, below)
        out = run(ops.spectral_tables, ops.spectral_sums, below)
        torch.testing.assert_close(out, expected)
        wanted = torch.autograd.grad(expected.sin().sum(), inputs)
        found = torch.autograd.grad(out.sin().sum(), inputs)
        torch.testing.assert_close(found, wanted)
