import math

import pytest
import torch

from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import (
    SPECTRA,
    BoxSpectrum,
    BSplineSpectrum,
    CauchySpectrum,
    DirectionalSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    LaplaceSpectrum,
    MaternSpectrum,
    ProductSpectrum,
    ShellSpectrum,
    Spectrum,
    SumSpectrum,
)

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def inverse_transform(spectrum, displacements, reach=1.6, points=61):
    """∫ g(ξ) cos(2πξ·x) dξ by the trapezoid rule, exponentially exact for Gaussians."""
    axis = torch.linspace(-reach, reach, points, dtype=F64)
    grid = torch.cartesian_prod(*[axis] * spectrum.dim).view(-1, spectrum.dim)
    g = spectrum(grid)
    waves = torch.cos(2 * math.pi * displacements @ grid.T)
    return waves @ g.T * (axis[1] - axis[0]) ** spectrum.dim


@pytest.mark.parametrize("form", ["amplitude", "weight"])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_mask_is_the_inverse_transform_of_the_spectrum(form, dim):
    spectrum = GaussianSpectrum(
        2, 3, dim, form, sigma_min=0.7, sigma_max=2.0, generator=seeded()
    ).double()
    x = torch.randn(6, dim, generator=seeded(1), dtype=F64)
    with torch.no_grad():
        spectrum.log_sigma += 0.1 * torch.randn(2, 3, generator=seeded(2), dtype=F64)
        torch.testing.assert_close(
            spectrum.mask(x), inverse_transform(spectrum, x), rtol=0, atol=1e-8
        )


def test_values_by_hand():
    one = GaussianSpectrum(1, 1, 3, "weight", sigma_min=1.0, sigma_max=1.0).double()
    torch.nn.init.ones_(one.weight)
    origin, unit = torch.zeros(1, 3, dtype=F64), torch.eye(3, dtype=F64)[:1]
    assert one.mask(origin).item() == pytest.approx((2 * math.pi) ** -1.5)
    assert one.mask(unit).item() == pytest.approx((2 * math.pi) ** -1.5 * math.exp(-0.5))
    assert one(origin).item() == pytest.approx(1.0)
    assert one(unit).item() == pytest.approx(math.exp(-2 * math.pi**2))
    two = GaussianSpectrum(1, 2, 3, "amplitude", generator=seeded()).double()
    assert two.mask(origin).item() == pytest.approx(two.amplitude.sum().item())


def test_both_forms_begin_as_the_same_function():
    first, second = (GaussianSpectrum(3, 5, 3, form, generator=seeded()) for form in FORMS)
    x = 3 * torch.randn(20, 3, generator=seeded(1))
    torch.testing.assert_close(first.mask(x), second.mask(x))
    torch.testing.assert_close(first(x / 20), second(x / 20))
    widths = first.log_sigma.exp()
    torch.testing.assert_close(widths[:, 0], torch.ones(3))
    torch.testing.assert_close(widths[:, -1], torch.full((3,), 4.0))


FORMS = ("amplitude", "weight")


@pytest.mark.parametrize("form", FORMS)
def test_heads_differ_and_every_parameter_gets_a_gradient(form):
    spectrum = GaussianSpectrum(4, 3, form=form, generator=seeded())
    x = torch.randn(5, 3, generator=seeded(1))
    assert spectrum.mask(x).std(-1).min() > 0
    for output in (spectrum.mask(x), spectrum(x / 10)):
        spectrum.zero_grad()
        output.square().sum().backward()
        for parameter in spectrum.parameters():
            assert (parameter.grad != 0).all()


def test_shapes_of_the_mask_follow_the_displacements():
    spectrum = GaussianSpectrum(4, 3, dim=2)
    assert spectrum.mask(torch.zeros(2)).shape == (4,)
    assert spectrum.mask(torch.zeros(5, 6, 2)).shape == (5, 6, 4)


def test_the_generator_decides_and_the_global_one_stays_put():
    state = torch.get_rng_state()
    first, again = (GaussianSpectrum(2, 3, generator=seeded(5)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.amplitude, again.amplitude)
    torch.manual_seed(1)
    third = GaussianSpectrum(2, 3)
    torch.manual_seed(1)
    assert torch.equal(third.amplitude, GaussianSpectrum(2, 3).amplitude)
    assert not torch.equal(first.amplitude, third.amplitude)


@pytest.mark.parametrize(
    "settings",
    [
        {"form": "gauss"},
        {"sigma_min": 0.0},
        {"sigma_min": 3.0, "sigma_max": 2.0},
        {"num_terms": 0},
        {"num_heads": 0},
        {"dim": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=r"form|sigma_min|num_heads"):
        GaussianSpectrum(**{"num_heads": 1, "num_terms": 2, **settings})


def test_a_family_of_ones_own_needs_one_method():
    class White(Spectrum):
        def forward(self, frequencies):
            return frequencies.new_ones(self.num_heads, len(frequencies))

    rpe = FourierRPE(White(2, dim=3), GaussianFrequencies(4, generator=seeded()))
    assert rpe(torch.zeros(5, 3)).key.shape == (5, 2, 8)
    with pytest.raises(NotImplementedError, match="White has no closed form"):
        rpe.mask(torch.zeros(5, 3))


class Ball(Spectrum):
    """g = b where ‖ξ‖ ≤ 1/2, over three dimensions: a family of one's own, with its closed form."""

    def __init__(self, num_heads):
        super().__init__(num_heads, 3)
        self.height = torch.nn.Parameter(torch.arange(1.0, num_heads + 1))

    def forward(self, frequencies):
        return self.height[:, None] * (frequencies.norm(dim=-1) <= 0.5)

    def mask(self, displacements):
        z = math.pi * displacements.norm(dim=-1, keepdim=True)
        return self.height * (math.pi / 2) * (z.sin() - z * z.cos()) / z**3


def test_a_family_of_ones_own_goes_where_the_others_go():
    ball, other = Ball(2), GaussianSpectrum(2, 3, generator=seeded())
    line = LaplaceSpectrum(2, 1, 1, generator=seeded())
    x, xi = torch.randn(5, 3, generator=seeded(1)), torch.randn(8, 3, generator=seeded(2)) / 4
    total = ball + other
    torch.testing.assert_close(total.mask(x), ball.mask(x) + other.mask(x))
    torch.testing.assert_close(total(xi), ball(xi) + other(xi))
    product = ProductSpectrum(ball, line)
    longer = torch.cat([xi, xi[:, :1]], 1)
    torch.testing.assert_close(product(longer), ball(xi) * line(xi[:, :1]))
    rpe = FourierRPE(ball, GaussianFrequencies(4096, sigma=0.25, generator=seeded()))
    torch.testing.assert_close(rpe.sampled_mask(x), rpe.mask(x), rtol=0, atol=0.15)


def test_sums_and_products_of_sums():
    parts = [GaussianSpectrum(2, 2, 1, generator=seeded(n)) for n in range(3)]
    xi = torch.randn(8, 1, generator=seeded(5)) / 4
    total = parts[0] + parts[1] + parts[2]
    assert isinstance(total, SumSpectrum)
    torch.testing.assert_close(total(xi), sum(part(xi) for part in parts))
    torch.testing.assert_close(total(xi), SumSpectrum(*parts)(xi))
    torch.testing.assert_close(total.mask(xi), SumSpectrum(*parts).mask(xi))
    assert len(list(total.parameters())) == 6
    pair = torch.cat([xi, xi.flip(0)], 1)
    product = ProductSpectrum(total, parts[0])
    torch.testing.assert_close(product(pair), total(xi) * parts[0](xi.flip(0)))
    assert (ProductSpectrum(parts[0]).dim, product.dim) == (1, 2)
    assert not product.is_complex
    assert (total + DirectionalSpectrum(2, 1, 1)).is_complex
    assert ProductSpectrum(total, DirectionalSpectrum(2, 1, 1)).is_complex


def test_sums_and_products_take_frequencies_per_head():
    first, second = (GaussianSpectrum(2, 2, 1, generator=seeded(n)) for n in range(2))
    xi = torch.randn(2, 8, 2, generator=seeded(5)) / 4
    product = ProductSpectrum(first, second)
    each = torch.stack([product(xi[0])[0], product(xi[1])[1]])
    torch.testing.assert_close(product(xi), each)
    total = first + second
    each = torch.stack([total(xi[0, :, :1])[0], total(xi[1, :, :1])[1]])
    torch.testing.assert_close(total(xi[:, :, :1]), each)


def test_spectra_that_do_not_fit_together_are_refused():
    one = GaussianSpectrum(2, 2, 1)
    with pytest.raises(ValueError, match=r"\[1, 3\] dimensions cannot be added"):
        one + GaussianSpectrum(2, 2, 3)
    for combine in (SumSpectrum, ProductSpectrum):
        with pytest.raises(ValueError, match=r"\[2, 4\] heads"):
            combine(one, GaussianSpectrum(4, 2, 1))
        with pytest.raises(ValueError, match="no spectrum"):
            combine()
    with pytest.raises(TypeError):
        one + 1.0
    with pytest.raises(ValueError, match="over 2 dimensions"):
        ProductSpectrum(one, one)(torch.zeros(4, 3))


def test_the_mixture_at_zero_is_the_gaussian_and_without_phases_it_is_directional():
    gaussian = GaussianSpectrum(2, 3, generator=seeded())
    mixture = GaussianMixtureSpectrum(2, 3, mean_std=0.0, generator=seeded())
    x, xi = torch.randn(5, 3, generator=seeded(1)), torch.randn(8, 3, generator=seeded(2)) / 5
    torch.testing.assert_close(mixture.mask(x), gaussian.mask(x))
    torch.testing.assert_close(mixture(xi), gaussian(xi))
    mixture = GaussianMixtureSpectrum(2, 3, generator=seeded())
    directional = DirectionalSpectrum(2, 3, generator=seeded())
    assert torch.equal(mixture.mean, directional.mean)
    assert 0.07 < GaussianMixtureSpectrum(20, 20).mean.std() < 0.13
    torch.nn.init.zeros_(directional.phase)
    torch.testing.assert_close(directional.mask(x), mixture.mask(x))
    torch.testing.assert_close(directional(xi), mixture(xi) + 0j)
    # A quarter turn of the phase makes every wave odd.
    torch.nn.init.constant_(directional.phase, math.pi / 2)
    torch.testing.assert_close(directional.mask(-x), -directional.mask(x))


def test_kernels_by_hand():
    def unit(family, **settings):
        spectrum = family(1, 1, length_min=2.0, length_max=2.0, **settings).double()
        torch.nn.init.ones_(spectrum.amplitude)
        return spectrum

    x = torch.tensor([[1.0, 2.0, -2.0]], dtype=F64)  # of length 3
    u = 1.5
    for family, settings, expected in [
        (LaplaceSpectrum, {}, math.exp(-u)),
        (LaplaceSpectrum, {"form": "separable"}, math.exp(-2.5)),
        (MaternSpectrum, {"nu": 0.5}, math.exp(-u)),
        (MaternSpectrum, {}, (1 + u * 3**0.5) * math.exp(-u * 3**0.5)),
        (MaternSpectrum, {"nu": 2.5}, (1 + u * 5**0.5 + u**2 * 5 / 3) * math.exp(-u * 5**0.5)),
        (CauchySpectrum, {}, (1 + u**2) ** -2),
        (CauchySpectrum, {"form": "rational"}, 1 / (1 + u**2)),
        (CauchySpectrum, {"form": "separable"}, 1 / (1.25 * 2 * 2)),
    ]:
        spectrum = unit(family, **settings)
        assert spectrum.mask(x).item() == pytest.approx(expected, rel=1e-7), (family, settings)
        assert spectrum.mask(0 * x).item() == 1
    # ∫ f = g(0): 8π s³ for exp(−r/s).
    assert unit(LaplaceSpectrum)(0 * x).item() == pytest.approx(8 * math.pi * 8, rel=1e-6)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: GaussianMixtureSpectrum(1, 1, mean_std=-0.1), "mean_std"),
        (lambda: DirectionalSpectrum(1, 1, form="phase"), "form"),
        (lambda: MaternSpectrum(1, 1, nu=2.0), "nu is 2.0, expected one of 0.5, 1.5, 2.5"),
        (lambda: LaplaceSpectrum(1, 1, form="round"), "form"),
        (lambda: LaplaceSpectrum(1, 1, length_min=0.0), "length_min"),
        (lambda: CauchySpectrum(1, 1, form="lorentz"), "multivariate, rational, separable"),
        (lambda: CauchySpectrum(1, 1, length_max=math.inf), "length_max"),
        (lambda: ShellSpectrum(1, 2, powers=[1]), "powers"),
        (lambda: ShellSpectrum(1, 2, powers=[1, -1]), "powers"),
        (lambda: ShellSpectrum(1, 2, powers=[1, 0.5]), "powers"),
        (lambda: ShellSpectrum(1, 2, sigma_min=math.nan), "sigma_min"),
        (lambda: BoxSpectrum(1, 2, radius_min=-1.0), "radius_min"),
    ],
)
def test_settings_of_other_families_that_make_no_sense_are_refused(build, name):
    with pytest.raises(ValueError, match=name):
        build()


@pytest.mark.parametrize("name", SPECTRA)
def test_every_family_is_built_without_storage_and_loaded(name):
    spectrum = SPECTRA[name](2, 3, generator=seeded())
    with torch.device("meta"):
        other = SPECTRA[name](2, 3)
    assert {p.device.type for p in other.parameters()} == {"meta"}
    other.to_empty(device="cpu").load_state_dict(spectrum.state_dict())
    x = torch.linspace(-1, 1, 15).reshape(5, 3)
    assert torch.equal(other.mask(x), spectrum.mask(x))
    assert torch.equal(other(x), spectrum(x))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_splines_with_weights_are_built_without_storage(order):
    with torch.device("meta"):
        assert BSplineSpectrum(2, 3, order=order, form="weight").weight.device.type == "meta"


def test_the_registry_has_every_family_that_yaml_can_name():
    families, waiting = set(), [Spectrum]
    while waiting:
        for family in waiting.pop().__subclasses__():
            if family.__module__.startswith("flt_mol."):
                families.add(family)
                waiting.append(family)
    abstract = {"GaussianTerms", "TermSpectrum", "KernelSpectrum"}
    named = set(SPECTRA.values()) | {SumSpectrum, ProductSpectrum}
    assert {family for family in families if family.__name__ not in abstract} == named
