"""Golden tests: each f against a quadrature of its g, or g against one of f where that decays.

Both say the same, since Fourier transforms are inverted in one way only.
"""

import math

import numpy as np
import pytest
import scipy.special
import torch

from flt_mol.nn.spectrum import (
    CauchySpectrum,
    DirectionalSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    LaplaceSpectrum,
    MaternSpectrum,
    ProductSpectrum,
    ShellSpectrum,
)

F64 = torch.float64
DIMS = pytest.mark.parametrize("dim", [1, 2, 3])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def moved(spectrum, seed=3):
    """In float64, with parameters a little off where they start, so that heads differ in all."""
    spectrum = spectrum.double()
    with torch.no_grad():
        for parameter in spectrum.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded(seed), dtype=F64)
    return spectrum.requires_grad_(False)


def displacements(dim, count=6, scale=1.0):
    return scale * torch.randn(count, dim, generator=seeded(1), dtype=F64)


def trapezoid(spectrum, x, reach, points):
    """∫ g(ξ) e^{2πiξ·x} dξ on a grid: exponentially exact where g is smooth and decays."""
    axis = torch.linspace(-reach, reach, points, dtype=F64)
    grid = torch.cartesian_prod(*[axis] * spectrum.dim).view(-1, spectrum.dim)
    phase = 2 * math.pi * x @ grid.T
    integral = torch.polar(torch.ones_like(phase), phase) @ spectrum(grid).T.to(torch.complex128)
    integral = integral * (axis[1] - axis[0]) ** spectrum.dim
    assert integral.imag.abs().max() < 1e-12 * max(1.0, float(integral.abs().max()))
    return integral.real


def radial_transform(profile, k, dim, reach, pieces=40):
    """The ℓ-dimensional Fourier transform of a function of ‖x‖, by Gauss-Legendre in ‖x‖."""
    nodes, weights = (torch.tensor(a, dtype=F64) for a in np.polynomial.legendre.leggauss(40))
    edges = torch.cat(
        [torch.zeros(1, dtype=F64), torch.logspace(-4, math.log10(reach), pieces, dtype=F64)]
    )
    half = (edges[1:] - edges[:-1])[:, None] / 2
    r = (edges[:-1, None] + half * (1 + nodes)).flatten()
    weight = (half * weights).flatten()
    angle = 2 * math.pi * k[:, None] * r
    wave = {
        1: lambda: 2 * angle.cos(),
        2: lambda: 2 * math.pi * r * torch.tensor(scipy.special.j0(angle.numpy())),
        3: lambda: 4 * math.pi * r**2 * torch.sinc(angle / math.pi),
    }[dim]()
    return (wave * weight) @ profile(r)


def along_first_axis(r, dim):
    return torch.nn.functional.pad(r[:, None], (0, dim - 1))


GAUSSIAN_LIKE = {
    "gaussian": lambda dim: GaussianSpectrum(
        2, 3, dim, sigma_min=0.7, sigma_max=1.6, generator=seeded()
    ),
    "mixture": lambda dim: GaussianMixtureSpectrum(
        2, 3, dim, sigma_min=0.7, sigma_max=1.6, generator=seeded()
    ),
    "mixture, weights": lambda dim: GaussianMixtureSpectrum(
        2, 3, dim, "weight", 0.7, 1.6, generator=seeded()
    ),
    "directional": lambda dim: DirectionalSpectrum(
        2, 3, dim, sigma_min=0.7, sigma_max=1.6, generator=seeded()
    ),
    "directional, weights": lambda dim: DirectionalSpectrum(
        2, 3, dim, "weight", 0.7, 1.6, generator=seeded()
    ),
    "shells": lambda dim: ShellSpectrum(
        2, 4, dim, sigma_min=0.8, sigma_max=1.2, generator=seeded()
    ),
    "shells, powers": lambda dim: ShellSpectrum(
        2, 2, dim, powers=[6, 2], sigma_min=0.9, sigma_max=0.9, generator=seeded()
    ),
    "sum": lambda dim: (
        GaussianSpectrum(2, 2, dim, sigma_min=0.7, sigma_max=1.6, generator=seeded())
        + DirectionalSpectrum(2, 2, dim, sigma_min=0.7, sigma_max=1.6, generator=seeded(1))
        + ShellSpectrum(2, 2, dim, sigma_min=0.9, generator=seeded(2))
    ),
}


@DIMS
@pytest.mark.parametrize("family", GAUSSIAN_LIKE)
def test_the_mask_is_the_inverse_transform_of_a_smooth_spectrum(family, dim):
    spectrum = moved(GAUSSIAN_LIKE[family](dim))
    x = displacements(dim, scale=1.2)
    f = spectrum.mask(x)
    torch.testing.assert_close(f, trapezoid(spectrum, x, 1.9, 69), rtol=0, atol=1e-8)
    assert f.abs().max() > 0.05


@pytest.mark.parametrize("order", ["plane first", "axis first"])
def test_a_product_of_spectra_is_the_spectrum_of_the_product(order):
    plane = DirectionalSpectrum(2, 2, 2, sigma_min=0.7, sigma_max=1.5, generator=seeded())
    axis = ShellSpectrum(2, 3, 1, sigma_min=0.9, sigma_max=1.2, generator=seeded(1))
    parts = (plane, axis) if order == "plane first" else (axis, plane)
    spectrum = moved(ProductSpectrum(*parts))
    x = displacements(3)
    first, second = (0, 2), (2, 3)
    if order == "axis first":
        first, second = (1, 3), (0, 1)
    f = plane.mask(x[:, slice(*first)]) * axis.mask(x[:, slice(*second)])
    torch.testing.assert_close(spectrum.mask(x), f, rtol=0, atol=1e-15)
    torch.testing.assert_close(f, trapezoid(spectrum, x, 1.9, 69), rtol=0, atol=1e-8)


DECAYING = {
    "matern 1/2": lambda dim: MaternSpectrum(2, 3, dim, nu=0.5, generator=seeded()),
    "matern 3/2": lambda dim: MaternSpectrum(2, 3, dim, nu=1.5, generator=seeded()),
    "matern 5/2": lambda dim: MaternSpectrum(2, 3, dim, nu=2.5, generator=seeded()),
    "laplace": lambda dim: LaplaceSpectrum(2, 3, dim, generator=seeded()),
    "shells": lambda dim: ShellSpectrum(
        2, 3, dim, powers=(30, 0, 9), sigma_min=0.5, sigma_max=0.7, generator=seeded()
    ),
}


@DIMS
@pytest.mark.parametrize("family", DECAYING)
def test_the_spectrum_is_the_transform_of_a_mask_that_decays(family, dim):
    spectrum = moved(DECAYING[family](dim))
    k = torch.tensor([0.0, 0.03, 0.1, 0.3, 0.7], dtype=F64)
    g = radial_transform(lambda r: spectrum.mask(along_first_axis(r, dim)), k, dim, reach=200.0)
    torch.testing.assert_close(
        spectrum(along_first_axis(k, dim)), g.T, rtol=1e-7, atol=1e-7 * float(g.abs().max())
    )


@DIMS
@pytest.mark.parametrize("form", ["multivariate", "rational"])
def test_the_mask_of_a_cauchy_kernel_is_the_transform_of_its_spectrum(form, dim):
    if (form, dim) == ("rational", 2):
        with pytest.raises(ValueError, match="1 and 3 dimensions"):
            CauchySpectrum(1, 1, dim, form)
        return
    spectrum = moved(CauchySpectrum(2, 3, dim, form, generator=seeded()))
    r = torch.tensor([0.0, 0.3, 1.0, 4.0, 11.0], dtype=F64)
    f = radial_transform(lambda k: spectrum(along_first_axis(k, dim)).T, r, dim, reach=8.0)
    # In three dimensions 1/(1 + r²) has a pole at ξ = 0, which is cut off: 2π²/3 · 10⁻⁶ of a.
    atol = 1e-5 if (form, dim) == ("rational", 3) else 1e-10
    torch.testing.assert_close(spectrum.mask(along_first_axis(r, dim)), f, rtol=0, atol=atol)


@pytest.mark.parametrize("family", [LaplaceSpectrum, CauchySpectrum])
def test_separable_kernels_are_products_of_those_of_one_dimension(family):
    separable = moved(family(2, 1, 3, "separable", generator=seeded()))
    lines = []
    for axis in range(3):
        line = family(2, 1, 1).double().requires_grad_(False)
        line.log_length.copy_(separable.log_length[:, :, axis])
        line.amplitude.fill_(1.0)
        lines.append(line)
    product = ProductSpectrum(*lines)
    x = displacements(3)
    a = separable.amplitude[:, 0]
    torch.testing.assert_close(separable.mask(x), a * product.mask(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(separable(x / 5), a[:, None] * product(x / 5), rtol=1e-12, atol=0)


def test_the_forms_of_a_kernel_agree_in_one_dimension():
    x = displacements(1)
    for family, forms in (
        (LaplaceSpectrum, ["isotropic", "separable"]),
        (CauchySpectrum, ["multivariate", "rational", "separable"]),
    ):
        first, *others = (family(3, 4, 1, form, generator=seeded()).double() for form in forms)
        for other in others:
            torch.testing.assert_close(other.mask(x), first.mask(x), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(other(x / 5), first(x / 5), rtol=1e-12, atol=1e-14)


def test_laplace_is_matern_one_half():
    laplace, matern = (
        LaplaceSpectrum(2, 3, generator=seeded()),
        MaternSpectrum(2, 3, nu=0.5, generator=seeded()),
    )
    x = displacements(3)
    torch.testing.assert_close(laplace.mask(x), matern.mask(x))
    torch.testing.assert_close(laplace(x), matern(x))


def test_shells_peak_where_they_are_said_to_and_do_not_overflow():
    powers = (0, 1, 4, 30)
    spectrum = ShellSpectrum(1, 4, powers=powers, sigma_min=0.7, sigma_max=0.7, generator=seeded())
    with torch.no_grad():
        for term, n in enumerate(powers):
            spectrum.amplitude.zero_()[0, term] = -2.0
            peak = 0.7 * math.sqrt(2 * n)
            near = along_first_axis(torch.tensor([peak - 1e-2, peak, peak + 1e-2]), 3)
            f = spectrum.mask(near)[:, 0]
            assert f[1].item() == pytest.approx(-2.0, rel=1e-5)
            assert f[0] > f[1] < f[2]
    far = along_first_axis(torch.logspace(-30, 18, 97), 3).requires_grad_()
    for output in (spectrum(far), spectrum.mask(far)):
        (slope,) = torch.autograd.grad(output.sum(), far)
        assert output.isfinite().all()
        assert slope.isfinite().all()
