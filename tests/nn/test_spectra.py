"""Every family of spectra: f and g from theory, a transform pair, one contract."""

import math

import pytest
import torch

from flt_mol.nn import SPECTRA, GaussianSpectrum
from flt_mol.nn.spectrum import ProductSpectrum, SumSpectrum

PARTS = [{"name": "gaussian", "num_terms": 2}, {"name": "tent", "num_terms": 1}]
SPECS = {
    **{name: {} for name in SPECTRA.keys() - {"sum", "product"}},
    "gaussian, weights": {"form": "weight"},
    "matern 1/2": {"nu": 0.5},
    "matern 5/2": {"nu": 2.5},
    "bspline 3": {"order": 3},
    "sum": {"spectra": PARTS},
}
EVERY = sorted(SPECS)
# Without corners, and without tails beyond 24 Å.
ROUND = ["directional", "gaussian", "gaussian, weights", "gaussian_mixture"]
# Spectra that fall too slowly for a sum of waves up to a cutoff.
SLOW = {"cauchy": 3e-3, "box": 3e-2, "laplace": 5e-3, "matern 1/2": 5e-3, "tent": 2e-3, "sum": 2e-3}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(name, dim=3, heads=2, terms=3, seed=0):
    given = dict(SPECS[name])
    if name == "sum":
        given["spectra"] = [{**part, "dim": dim} for part in PARTS]
    else:
        given |= {"num_terms": terms, "dim": dim}
    family = SPECTRA[name.replace(",", "").split()[0]]
    return family(num_heads=heads, generator=seeded(seed), **given)


@pytest.mark.parametrize("name", EVERY)
def test_f_is_the_fourier_transform_of_g(name):
    """In one dimension, by the trapezoidal rule, whose error is f at a distance of 200 Å."""
    spectrum = build(name, dim=1).double().requires_grad_(False)
    step, cutoff = 1 / 200, 40.0
    xi = torch.arange(-cutoff, cutoff + step / 2, step, dtype=torch.float64)[:, None]
    x = torch.tensor([0.0, 0.5, -0.5, 1.7, -2.9, 4.1, 7.0], dtype=torch.float64)[:, None]
    phase = 2 * math.pi * x * xi.T
    wave = torch.complex(phase.cos(), phase.sin())
    found = step * (wave[:, None] * spectrum(xi)).sum(-1)
    expected = spectrum.mask(x)
    size = float(spectrum.mask(torch.zeros(1)).abs().max().clamp(min=1))
    assert float((found.real - expected).abs().max()) < SLOW.get(name, 1e-5) * size
    assert float(found.imag.abs().max()) < 1e-9 * size


@pytest.mark.parametrize("name", ROUND)
@pytest.mark.parametrize("dim", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_dimensions_follow_from_one(name, dim):
    """g on an axis is the transform along it of f summed over the other axes (projection slice)."""
    spectrum = build(name, dim=dim).double()
    k = torch.tensor([0.02, 0.07, 0.13], dtype=torch.float64)
    xi = torch.zeros(3, dim, dtype=torch.float64)
    xi[:, 0] = k
    # ∫ f(x, y) dy e^{-2πikx} dx, over a box of the size of the mask: only for those that end there.
    line = torch.arange(-24, 24.01, 0.6, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * dim).view(-1, dim)
    phase = 2 * math.pi * grid[:, :1] * k
    wave = torch.complex(phase.cos(), -phase.sin())
    found = 0.6**dim * (spectrum.mask(grid).T[:, :, None] * wave).sum(1)
    torch.testing.assert_close(found.real, torch.real(spectrum(xi) + 0j), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.imag, torch.imag(spectrum(xi) + 0j), rtol=1e-4, atol=1e-3)


def single(family, dim=3, **settings):
    """One term of amplitude 1."""
    spectrum = family(1, 1, dim, **settings).double()
    with torch.no_grad():
        spectrum.amplitude.fill_(1.0)
    return spectrum


K = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.05, -0.1, 0.2]], dtype=torch.float64)
R = 10 * K


@pytest.mark.parametrize(
    ("name", "settings", "g", "f"),
    [
        (
            "gaussian",
            {"sigma_min": 2.0},
            lambda k: (2 * math.pi * 4) ** 1.5 * (-2 * math.pi**2 * 4 * k**2).exp(),
            lambda r: (-(r**2) / 8).exp(),
        ),
        (
            "laplace",
            {"length_min": 2.0},
            lambda k: 8 * math.pi * 8 / (1 + (4 * math.pi * k) ** 2) ** 2,
            lambda r: (-r / 2).exp(),
        ),
        (
            "matern",
            {"length_min": 2.0},
            lambda k: 32 * math.pi * 3**1.5 / 8 / (3 / 4 + (2 * math.pi * k) ** 2) ** 3,
            lambda r: (1 + 3**0.5 * r / 2) * (-(3**0.5) * r / 2).exp(),
        ),
        (
            "cauchy",
            {"length_min": 2.0},
            lambda k: math.pi**2 * 8 * (-4 * math.pi * k).exp(),
            lambda r: (1 + r**2 / 4) ** -2,
        ),
    ],
)
def test_closed_forms_in_three_dimensions(name, settings, g, f):
    """As tables of transforms have them, with f(x) = ∫ g e^{2πi x·ξ} dξ."""
    largest = {key.replace("min", "max"): v for key, v in settings.items() if "min" in key}
    spectrum = single(SPECTRA[name], **settings, **largest)
    torch.testing.assert_close(spectrum(K)[0], g(K.norm(dim=-1)))
    torch.testing.assert_close(spectrum.mask(R)[:, 0], f(R.norm(dim=-1)))


@pytest.mark.parametrize(("name", "order"), [("box", 1), ("tent", 2), ("bspline", 4)])
def test_local_masks_end_at_their_radius(name, order):
    spectrum = single(SPECTRA[name], 1, radius_min=3.0, radius_max=3.0).requires_grad_(False)
    k = torch.tensor([[0.11], [0.4]], dtype=torch.float64)
    v = 3 / order
    wave = (torch.sin(2 * math.pi * v * k) / (math.pi * k)) ** order
    peak = {1: 1.0, 2: 2 * v, 4: (2 * v) ** 3 * 2 / 3}[order]
    torch.testing.assert_close(spectrum(k)[0], wave[:, 0] / peak)
    x = torch.tensor([[0.0], [-2.99], [3.01], [40.0]], dtype=torch.float64)
    mask = spectrum.mask(x)[:, 0]
    assert mask[0] == pytest.approx(1)
    assert mask[1] > 0
    assert mask[2:].tolist() == [0, 0]
    if order == 2:
        tent = spectrum.mask(torch.tensor([[1.0], [2.0]], dtype=torch.float64))[:, 0]
        torch.testing.assert_close(tent, tent.new_tensor([2 / 3, 1 / 3]))


def test_products_of_dimensions():
    spectrum = build("tent", dim=2).double()
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    v = spectrum.log_radius.exp()
    expected = spectrum.amplitude * (1 - x[0].abs() / v).clamp(min=0).prod(-1)
    torch.testing.assert_close(spectrum.mask(x)[0], expected.sum(-1))


@pytest.mark.parametrize("name", EVERY)
def test_contract(name):
    """Shapes, symmetry, precision, gradients and plain state of every family."""
    spectrum = build(name)
    xi, x = 0.1 * torch.randn(5, 3, generator=seeded(1)), torch.randn(4, 6, 3, generator=seeded(2))
    g, f = spectrum(xi), spectrum.mask(x)
    assert g.shape == (2, 5)
    assert f.shape == (4, 6, 2)
    torch.testing.assert_close(spectrum(-xi), g.conj() if g.is_complex() else g)
    if name == "directional":
        assert not torch.allclose(spectrum.mask(-x), f, atol=1e-3)
    else:
        torch.testing.assert_close(spectrum.mask(-x), f)
    per_head = spectrum(torch.stack([xi, 2 * xi]))
    torch.testing.assert_close(per_head, torch.stack([g[0], spectrum(2 * xi)[1]]))
    (g.abs().sum() + f.sum()).backward()
    for key, parameter in spectrum.named_parameters():
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(spectrum(xi), g)
    half = build(name).bfloat16()
    assert half.mask(x.bfloat16()).dtype == torch.float32
    double = build(name).double()
    torch.testing.assert_close(double(xi.double()).to(g.dtype), g, rtol=1e-4, atol=1e-5)
    other = build(name, seed=1)
    other.load_state_dict(spectrum.state_dict())
    assert torch.equal(other(xi), g)
    assert torch.equal(build(name)(xi), g)  # the same seed
    for wrong in (xi[:, :2], xi[0], xi.expand(3, 5, 3)):
        with pytest.raises((ValueError, RuntimeError)):
            spectrum(wrong)


@pytest.mark.parametrize("name", [*ROUND, "laplace", "matern", "cauchy"])
def test_gradients_of_the_mask_by_positions(name):
    spectrum = build(name).double()
    x = torch.randn(3, 3, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(spectrum.mask, (x,))
    origin = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(spectrum.mask(origin).sum(), origin)
    assert gradient.isfinite().all()


def test_both_forms_of_gaussians_begin_as_one_function():
    one, other = build("gaussian"), build("gaussian, weights")
    assert "weight" in dict(other.named_parameters())
    torch.testing.assert_close(one(K.float()), other(K.float()))
    torch.testing.assert_close(one.amplitudes(), other.amplitudes())


def test_a_mixture_of_mean_zero_is_gaussian():
    one = build("gaussian")
    other = SPECTRA["gaussian_mixture"](2, 3, mean_std=0.0, generator=seeded())
    torch.testing.assert_close(one(K.float()), other(K.float()))
    torch.testing.assert_close(one.mask(R.float()), other.mask(R.float()))


def test_sums_and_products():
    first, second = build("gaussian"), build("cauchy", seed=1)
    total = SumSpectrum(first, second)
    x = R.float()
    torch.testing.assert_close(total.mask(x), first.mask(x) + second.mask(x))
    plane, height = build("gaussian", dim=2), build("tent", dim=1)
    both = ProductSpectrum(plane, height)
    torch.testing.assert_close(both.mask(x), plane.mask(x[:, :2]) * height.mask(x[:, 2:]))
    torch.testing.assert_close(both(x), plane(x[:, :2]) * height(x[:, 2:]))
    spec = [{"name": "gaussian", "dim": 2, "num_terms": 3}, {"name": "tent", "dim": 1}]
    built = SPECTRA["product"](num_heads=2, spectra=spec, generator=seeded())
    assert (built.num_heads, built.dim) == (2, 3)
    assert torch.equal(built.spectra[0].amplitude, plane.amplitude)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GaussianSpectrum(2, form="width"), "width"),
        (lambda: GaussianSpectrum(2, sigma_min=2.0, sigma_max=1.0), "sigma_min"),
        (lambda: GaussianSpectrum(2, 0), "num_terms"),
        (lambda: GaussianSpectrum(0), "num_heads"),
        (lambda: SPECTRA["matern"](2, nu=1.0), "nu"),
        (lambda: SPECTRA["laplace"](2, length_min=-1.0), "length_min"),
        (lambda: SPECTRA["bspline"](2, order=0), "order"),
        (lambda: SPECTRA["box"](2, radius_max=math.inf), "radius_max"),
        (lambda: SPECTRA["gaussian_mixture"](2, mean_std=-1.0), "mean_std"),
        (lambda: SPECTRA["sum"](2, [{"name": "gausian"}]), "gausian"),
        (lambda: SPECTRA["sum"](2, []), "spectra"),
        (lambda: SumSpectrum(build("gaussian", dim=2), build("gaussian", dim=3)), "dim"),
        (lambda: ProductSpectrum(build("gaussian"), build("gaussian", heads=3)), "heads"),
    ],
)
def test_what_is_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make()
