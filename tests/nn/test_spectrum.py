import math

import pytest
import torch

from flt_mol.nn import FourierRPE, GaussianFrequencies, GaussianSpectrum, Spectrum

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
