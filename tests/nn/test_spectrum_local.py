"""Local masks: box, tent, B-splines; and what is wrong with the formula they correct."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from flt_mol.nn.spectrum import BoxSpectrum, BSplineSpectrum, TentSpectrum
from flt_mol.nn.spectrum._shapes import cardinal_bspline, laguerre_function, sine_ratio

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def single(order, dim=1, radius=1.5, form="amplitude", height=1.0):
    """One spline of radius 1.5 Å in the first dimension, a little less in the others."""
    spectrum = BSplineSpectrum(1, 1, dim, order, form).double().requires_grad_(False)
    radii = radius * torch.tensor([1.0, 0.8, 0.7], dtype=F64)[:dim]
    spectrum.log_length.copy_(radii.log())
    (spectrum.amplitude if form == "amplitude" else spectrum.weight).fill_(height)
    return spectrum


def line(*values):
    return torch.tensor(values, dtype=F64)[:, None]


def transform_of_the_mask(spectrum, xi):
    """∫ f(x) cos(2πξ·x) dx by Gauss-Legendre between the knots of the piecewise polynomial."""
    nodes, weights = (
        torch.tensor(a, dtype=F64)
        for a in np.polynomial.legendre.leggauss(30 if spectrum.order <= 2 else 16)
    )
    columns, column_weights = [], []
    for radius in spectrum.lengths[0, 0]:
        knots = radius * torch.linspace(-1, 1, spectrum.order + 1, dtype=F64)
        half = radius / spectrum.order
        columns.append(((knots[:-1] + half)[:, None] + half * nodes).flatten())
        column_weights.append((half * weights).repeat(spectrum.order))
    grid = torch.cartesian_prod(*columns).view(-1, spectrum.dim)
    weight = torch.cartesian_prod(*column_weights).view(-1, spectrum.dim).prod(-1)
    return (2 * math.pi * xi @ grid.T).cos() @ (weight * spectrum.mask(grid)[:, 0])


@pytest.mark.parametrize("form", ["amplitude", "weight"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_spectrum_is_the_transform_of_the_mask(dim, order, form):
    spectrum = single(order, dim, form=form, height=1.7)
    xi = 0.6 * torch.randn(8, dim, generator=seeded(1), dtype=F64)
    xi[0] = 0
    torch.testing.assert_close(
        spectrum(xi)[0], transform_of_the_mask(spectrum, xi), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("order", [2, 3, 4, 7])
def test_the_mask_is_the_inverse_transform_of_the_spectrum(order):
    # On a lattice of frequencies the mask is repeated at the distance 1/spacing (Poisson), which
    # is exact where it vanishes beyond half of that. The cut at 300 cycles/Å costs 3e-4 at most.
    spectrum, x = single(order), line(0.0, 0.2, 0.77, 1.2, 1.49, 1.51, 1.9)
    xi = torch.arange(-1200, 1201, dtype=F64)[:, None] / 4
    numeric = (2 * math.pi * x @ xi.T).cos() @ spectrum(xi).T / 4
    torch.testing.assert_close(numeric, spectrum.mask(x), rtol=0, atol=4e-4)


def test_a_box_smoothed_in_frequency_is_a_box_smoothed_in_space():
    # Gibbs' ripples do not vanish: the spectrum is multiplied by that of a Gaussian of width s.
    spectrum, s = single(1, height=2.0), 0.1
    x, xi = line(0.0, 1.0, 1.45, 1.5, 1.6, 2.0), torch.arange(-2400, 2401, dtype=F64)[:, None] / 240
    window = (-2 * math.pi**2 * s**2 * xi.square()).exp()
    numeric = (2 * math.pi * x @ xi.T).cos() @ (window * spectrum(xi).T) / 240
    erf = torch.special.erf
    smooth = erf((x + 1.5) / (s * math.sqrt(2))) - erf((x - 1.5) / (s * math.sqrt(2)))
    torch.testing.assert_close(numeric, smooth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_the_support_is_the_radius_in_each_dimension_and_the_peak_is_the_amplitude(order):
    spectrum = single(order, dim=3, height=-1.3)
    radii = spectrum.lengths[0, 0]
    for axis in range(3):
        x = torch.zeros(3, dtype=F64)
        x[axis] = radii[axis] + 1e-9
        assert spectrum.mask(x) == 0
        x[axis] = radii[axis] - 1e-3
        assert spectrum.mask(x) < 0
    assert spectrum.mask(torch.zeros(3, dtype=F64)).item() == pytest.approx(-1.3, abs=1e-14)


def test_values_by_hand():
    box = BoxSpectrum(1, 1, 2).double().requires_grad_(False)
    box.log_length.copy_(torch.tensor([1.0, 2.0]).log())
    box.amplitude.fill_(3.0)
    x = torch.tensor([[0.9, 1.9], [1.1, 0.0], [0.0, 2.1], [-0.9, -1.9]], dtype=F64)
    assert box.mask(x).flatten().tolist() == [3, 0, 0, 3]
    # C stands outside of the product, and sin(2πvξ)/(πξ) is 2v at ξ = 0.
    at_zero = box(torch.tensor([[0.0, 0.0], [0.25, 0.0]], dtype=F64)).flatten()
    torch.testing.assert_close(at_zero, torch.tensor([3.0 * 2 * 4, 3 * 4 / (math.pi / 4)]).double())

    tent = TentSpectrum(1, 1, 1, "weight").double().requires_grad_(False)
    tent.log_length.fill_(math.log(2.0))
    tent.weight.fill_(1.0)
    torch.testing.assert_close(
        tent.mask(line(0.0, 0.5, -1.5, 3.0)).flatten(), line(2, 1.5, 0.5, 0)[:, 0]
    )
    xi = line(0.1, 0.3)
    expected = (2 * math.pi * xi).sin().square() / (math.pi * xi).square()
    torch.testing.assert_close(tent(xi), expected.T)

    quadratic = single(3)  # knots at ±1/2 and ±3/2: 3/4 − x², then (3/2 − |x|)²/2, over 3/4
    expected = line(1.0, (0.75 - 0.09) / 0.75, 0.5**2 / 2 / 0.75, 0.1**2 / 2 / 0.75)
    torch.testing.assert_close(quadratic.mask(line(0.0, 0.3, -1.0, 1.4)), expected)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [1, 2])
def test_weights_are_the_papers_formula_with_the_power_put_right(order, dim):
    spectrum = single(order, dim, form="weight", height=0.7)
    xi = 0.5 * torch.randn(9, dim, generator=seeded(), dtype=F64)
    radii = spectrum.lengths[0, 0]
    sines = (2 * math.pi * radii * xi / order).sin() / (math.pi * xi)
    torch.testing.assert_close(spectrum(xi)[0], 0.7 * sines.pow(order).prod(-1))


def test_the_forms_begin_as_the_same_function():
    first, second = (BSplineSpectrum(2, 3, 3, 4, form, generator=seeded()) for form in FORMS)
    x = 2 * torch.randn(20, 3, generator=seeded(1))
    torch.testing.assert_close(first.mask(x), second.mask(x))
    torch.testing.assert_close(first(x / 20), second(x / 20))
    assert first.lengths[:, 0].allclose(torch.tensor(3.0))
    assert first.lengths[:, -1].allclose(torch.tensor(6.0))


FORMS = ("amplitude", "weight")


def test_the_printed_formula_is_not_the_spectrum_of_a_continuous_local_mask():
    v, s = 1.5, 0.05
    xi = torch.arange(-2400, 2400, dtype=F64)[:, None] / 100 + 0.005
    window = (-2 * math.pi**2 * s**2 * xi.square()).exp()

    def printed(order, x):
        """Real and imaginary part of the transform of sin^k(2πvξ)/(πξ), smoothed over 0.05 Å."""
        g = window * (2 * math.pi * v * xi).sin().pow(order) / (math.pi * xi)
        phase = 2 * math.pi * x @ xi.T
        return (phase.cos() @ g / 100).flatten(), (phase.sin() @ g / 100).flatten()

    # k = 2: no real part at all; the imaginary one is odd.
    x = line(-2.0, -1.0, 0.0, 1.0, 2.0)
    real, imaginary = printed(2, x)
    assert real.abs().max() < 1e-10
    expected = line(-0.5, -0.5, 0.0, 0.5, 0.5)[:, 0]
    torch.testing.assert_close(imaginary, expected, rtol=0, atol=1e-6)
    # k = 3: (3 box of radius v − box of radius 3v)/4, with jumps at v and 3v, and support 3v.
    inside, outside, far = printed(3, line(v - 0.3, v + 0.3, 3 * v + 0.3))[0].tolist()
    assert inside == pytest.approx(0.5, abs=1e-6)
    assert outside == pytest.approx(-0.25, abs=1e-6)
    assert far == pytest.approx(0.0, abs=1e-6)
    # The corrected one is continuous there and zero beyond.
    near = single(3).mask(line(v - 1e-4, v + 1e-4, v + 0.1)).flatten()
    assert near[0] < 1e-7
    assert (near[1:] == 0).all()
    assert printed(1, line(1.2, 1.8))[0].tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_order_k_has_k_minus_two_continuous_derivatives(order):
    # All one-sided derivatives up to k − 2 agree at every knot; the next one jumps.
    knots = torch.arange(order + 1, dtype=F64) - order / 2
    sides = []
    for side in (-1e-7, 1e-7):
        x = (knots + side).requires_grad_()
        value, derivatives = cardinal_bspline(x, order), []
        for _ in range(order):
            derivatives.append(value.detach())
            if not value.requires_grad:
                break
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        sides.append(derivatives)
    below, above = sides
    for left, right in zip(below[: order - 1], above[: order - 1], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)
    # The jumps of the last one are the signed binomials of the k-fold difference.
    jumps = [(-1) ** i * math.comb(order, i) for i in range(order + 1)]
    torch.testing.assert_close(
        above[order - 1] - below[order - 1], torch.tensor(jumps, dtype=F64), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("order", [1, 2, 3, 6, 12, 24])
def test_splines_add_up_to_one_at_any_order(order):
    x = torch.rand(50, generator=seeded())[:, None] + torch.arange(-order, order + 1)
    torch.testing.assert_close(cardinal_bspline(x, order).sum(-1), torch.ones(50))


def test_a_high_order_is_nearly_a_gaussian():
    order = 40
    x = torch.linspace(0, 1.4, 15, dtype=F64)[:, None]
    gaussian = (-x.square() * 3 * order / (2 * 1.5**2)).exp()
    torch.testing.assert_close(single(order).mask(x), gaussian, rtol=0, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_sine_ratio_and_its_derivatives_keep_their_digits_everywhere(dtype):
    x = torch.tensor([0, 1e-30, 1e-6, 1e-3, 0.1, 0.4999, 0.5001, 0.9, 3.0, -2.0], dtype=F64)
    series = [(-1) ** n / math.factorial(2 * n + 1) for n in range(15)]
    coefficients = np.zeros(29)
    coefficients[::2] = series
    exact = np.polynomial.Polynomial(coefficients)
    z = x.to(dtype, copy=True).requires_grad_()
    value = sine_ratio(z)
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    tolerance = 3e-14 if dtype == F64 else 1e-5
    for n, found in enumerate((value.detach(), slope.detach(), curvature)):
        expected = torch.tensor(exact.deriv(n)(x.numpy()) if n else exact(x.numpy()))
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slope[1:3].detach().double(), -x[1:3] / 3, rtol=1e-5, atol=0)


def test_special_functions_have_right_gradients():
    x = torch.tensor([0.0, 0.1, 0.49, -0.7, 1.3], dtype=F64, requires_grad=True)
    assert gradcheck(sine_ratio, x)
    assert gradgradcheck(sine_ratio, x)
    assert gradcheck(lambda z: cardinal_bspline(z, 4), x)
    assert gradgradcheck(lambda z: cardinal_bspline(z, 4), x)
    assert gradgradcheck(lambda z: laguerre_function(z, 3, 0.5), x)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.5])
def test_laguerre_functions_are_orthogonal_with_the_known_norm(alpha):
    # ∫ x^α e^{−x} L_m L_n dx = Γ(n + α + 1)/n! δ_mn; with x = y² all is smooth and even in y
    # for α = ±1/2, where the trapezoid rule is exact.
    y = torch.linspace(-9, 9, 8001, dtype=F64)
    weight = y.abs().pow(2 * alpha + 1) * (y[1] - y[0])
    values = torch.stack([laguerre_function(y.square(), n, alpha) for n in range(5)])
    norms = [math.gamma(n + alpha + 1) / math.factorial(n) for n in range(5)]
    expected = torch.tensor(norms, dtype=F64).diag()
    torch.testing.assert_close((values * weight) @ values.T, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", [BoxSpectrum, TentSpectrum, BSplineSpectrum])
def test_settings_that_make_no_sense_are_refused(family):
    with pytest.raises(ValueError, match="radius_min"):
        family(1, 2, radius_min=4.0, radius_max=3.0)
    with pytest.raises(ValueError, match="form"):
        BSplineSpectrum(1, 2, form="peak")
    with pytest.raises(ValueError, match="order is 0"):
        BSplineSpectrum(1, 2, order=0)
