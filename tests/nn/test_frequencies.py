"""Every family of frequencies: unbiased or exact, saved, and of the right spectra."""

import math

import pytest
import torch

from flt_mol.nn import FREQUENCIES, SPECTRA, FourierRPE, GaussianFrequencies, GaussianSpectrum
from flt_mol.nn.frequencies import (
    ComponentFrequencies,
    LatticeFrequencies,
    LebedevFrequencies,
    QuadratureFrequencies,
    normal_vectors,
)

H, T = 2, 3
SETS = {
    "gaussian": {},
    "gaussian, orthogonal": {"sampling": "orthogonal", "shared_sigma": True, "sigma": 0.1},
    "gaussian, sobol": {"sampling": "sobol"},
    "gaussian, means": {"mean": [0.05, 0.0, 0.02], "learned_sigma": False},
    "component": {"num_heads": H, "num_terms": T},
    "component, sobol": {"num_heads": H, "num_terms": T, "sampling": "sobol"},
    "lattice": {"radius": 8.0, "sigma": [1.0, 4.0]},
    "lebedev": {"radius": 8.0, "sigma": [1.0, 4.0]},
}
RANDOM = [name for name in SETS if name[0] in "gc"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(name="gaussian", seed=0, **settings):
    return SPECTRA[name](H, T, generator=seeded(seed), **settings)


def build(name, seed=0, count=64):
    family = name.split(",")[0]
    given = dict(SETS[name])
    if family in ("gaussian", "component"):
        given |= {"num_frequencies": count, "generator": seeded(seed)}
    return FREQUENCIES[family](**given)


X = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.5], [0.3, -2.0, 2.0], [3.0, 3.0, -1.0]])


@pytest.mark.parametrize("spectrum", ["gaussian", "directional"])
@pytest.mark.parametrize("name", SETS)
def test_the_mask_is_right_on_average(name, spectrum):
    """Over many draws; deterministic sets give it without any."""
    g = gaussian(spectrum)
    if name in RANDOM:
        draws = [
            FourierRPE(g, build(name, seed, 512)).sampled_mask(X).detach() for seed in range(60)
        ]
        found = torch.stack(draws)
        error = (found.mean(0) - g.mask(X)).abs()
        assert bool((error < 4.5 * found.std(0) / 60**0.5 + 1e-5).all())
        assert float(found.std(0).max()) < 0.8
    else:
        found = FourierRPE(g, build(name)).sampled_mask(X)
        torch.testing.assert_close(found, g.mask(X), rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", SETS)
def test_draws_are_saved_buffers_and_stay(name):
    frequencies = build(name)
    g = gaussian()
    frequencies.check(g)
    xi, ratio = frequencies(g)
    again = frequencies.train()(g)
    assert torch.equal(xi, again[0])
    assert torch.equal(ratio, frequencies.eval()(g)[1])
    other = build(name, seed=1)
    if name in RANDOM:
        assert not torch.equal(other(g)[0], xi)
        assert "draw" in frequencies.state_dict()
        torch.manual_seed(5)
        first = type(frequencies)(8, **SETS[name])
        torch.manual_seed(5)
        assert torch.equal(type(frequencies)(8, **SETS[name]).draw, first.draw)
    other.load_state_dict(frequencies.state_dict())
    assert torch.equal(other(g)[0], xi)
    assert torch.equal(build(name)(g)[1], ratio)  # the same seed
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(frequencies(g)[1], ratio)
    double = build(name).double()(gaussian().double())
    assert double[0].dtype == torch.float64


@pytest.mark.parametrize("name", SETS)
def test_gradients_reach_all_that_is_learned(name):
    rpe = FourierRPE(gaussian(), build(name))
    rpe.sampled_mask(X).square().sum().backward()
    for key, parameter in rpe.named_parameters():
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


def test_density_of_means_and_widths():
    frequencies = GaussianFrequencies(
        5, 2, sigma=(0.1, 0.3), mean=[0.2, -0.1], learned_mean=True, generator=seeded()
    )
    xi = torch.randn(7, 2, generator=seeded(1)) / 5
    expected = 0
    for s in frequencies.log_sigma.exp():
        for mu in (frequencies.mean[0], -frequencies.mean[0]):
            normal = torch.distributions.Normal(mu, s)
            expected = expected + normal.log_prob(xi).sum(-1).exp() / 10
    torch.testing.assert_close(frequencies.density(xi), expected)
    assert {name for name, _ in frequencies.named_parameters()} == {"log_sigma", "mean"}
    spaced = GaussianFrequencies(3, sigma=(0.1, 0.4)).log_sigma.exp()
    torch.testing.assert_close(spaced, torch.tensor([0.1, 0.2, 0.4]))


def test_the_best_width_has_the_least_variance():
    """κ = 2πσ_pσ_t = 1 matches the spectrum: every ρ is f(0)."""
    spectrum = GaussianSpectrum(1, 1, sigma_min=2.0, sigma_max=2.0, generator=seeded())
    sigma = 1 / (2 * math.pi * 2.0)
    _, ratio = GaussianFrequencies(32, sigma=sigma, generator=seeded())(spectrum)
    torch.testing.assert_close(ratio, spectrum.mask(torch.zeros(1, 3)).T.expand(1, 32))
    _, wide = GaussianFrequencies(32, sigma=2 * sigma, generator=seeded())(spectrum)
    assert bool(wide.std() > 0.3 * ratio.abs().max())


def test_components_share_frequencies_evenly_and_bound_the_mask():
    spectrum = gaussian("directional", form="weight")
    frequencies = ComponentFrequencies(8, H, T, generator=seeded())
    assert frequencies.counts == [3, 3, 2]
    xi, ratio = frequencies(spectrum)
    a = spectrum.amplitudes()
    torch.testing.assert_close(
        ratio[:, :3], (8 / 3 * a * torch.exp(1j * spectrum.phase))[:, [0] * 3]
    )
    torch.testing.assert_close(ratio[:, 6].abs(), (4 * a[:, 2]).abs())
    z = (xi[:, 6:] - spectrum.mean[:, 2:]) * 2 * math.pi * spectrum.lengths()[:, 2, None, None]
    torch.testing.assert_close(z, frequencies.draw[:, 6:])
    masks = FourierRPE(spectrum, frequencies).sampled_mask(100 * X)
    assert bool((masks.abs() <= a.abs().sum(1) + 1e-5).all())


@pytest.mark.parametrize("sampling", ["normal", "orthogonal", "sobol"])
def test_vectors_are_standard_normal(sampling):
    z = torch.cat([normal_vectors(256, 3, sampling, seeded(k)) for k in range(20)])
    torch.testing.assert_close(z.T @ z / len(z), torch.eye(3), rtol=0, atol=0.06)
    assert float(z.mean(0).abs().max()) < 0.05
    assert float(((z**4).mean(0) - 3).abs().max()) < 0.4
    if sampling == "orthogonal":
        gram = normal_vectors(3, 3, sampling, seeded()) @ normal_vectors(3, 3, sampling, seeded()).T
        assert float(gram.fill_diagonal_(0).abs().max()) < 1e-5


def rotation_error(rpe, radius):
    """The widest range of the sampled mask over directions, at any distance up to the radius."""
    directions = torch.nn.functional.normalize(torch.randn(256, 3, generator=seeded()), dim=1)
    with torch.no_grad():
        masks = [rpe.sampled_mask(r * directions) for r in torch.linspace(0.4, radius, 48)]
    return max(float((mask.amax(0) - mask.amin(0)).max()) for mask in masks)


@pytest.mark.parametrize(
    ("frequencies", "count"),
    [(LatticeFrequencies(18.0, 4.0), 269), (LebedevFrequencies(18.0, 4.0), 275)],
)
def test_deterministic_sets_do_not_know_directions(frequencies, count):
    assert frequencies.num_frequencies == count
    spectrum = GaussianSpectrum(1, 1, sigma_min=4.0, generator=seeded())
    rpe = FourierRPE(spectrum, frequencies)
    peak = spectrum.mask(torch.zeros(1, 3)).abs().detach()
    assert float(rotation_error(rpe, 18.0) / peak) < 1e-3
    few = FourierRPE(spectrum, GaussianFrequencies(16, generator=seeded()))
    assert float(rotation_error(few, 18.0) / peak) > 0.3
    norms = frequencies.points.norm(dim=1)
    assert float(norms.max()) <= 4.2 / (2 * math.pi * 4.0) + 1e-6


def test_the_lattice_repeats_the_mask_with_its_period():
    spectrum = GaussianSpectrum(1, 1, 1, sigma_min=2.0, sigma_max=2.0, generator=seeded())
    rpe = FourierRPE(spectrum, LatticeFrequencies(8.0, 2.0, dim=1))
    x = torch.linspace(0, 8, 9)[:, None]
    torch.testing.assert_close(rpe.sampled_mask(x + 16.0), rpe.sampled_mask(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GaussianFrequencies(0), "num_frequencies"),
        (lambda: GaussianFrequencies(4, sigma=(0.2, 0.1)), "sigma"),
        (lambda: GaussianFrequencies(4, sigma=(0.1, 0.2), shared_sigma=True), "sigma"),
        (lambda: GaussianFrequencies(4, sampling="grid"), "grid"),
        (lambda: GaussianFrequencies(4, mean=[0.0, 1.0]), "mean"),
        (lambda: GaussianFrequencies(4, redraw_every=1), "redraw_every"),
        (lambda: GaussianFrequencies(4, learned_sigma=False, redraw_every=0), "redraw_every"),
        (lambda: ComponentFrequencies(2, H, T), "num_terms"),
        (lambda: LatticeFrequencies(0.0, 1.0), "radius"),
        (lambda: LatticeFrequencies(500.0, 0.1), "radius"),
        (lambda: LebedevFrequencies(8.0, (2.0, 1.0)), "sigma"),
        (lambda: LebedevFrequencies(8.0, 1.0, tolerance=-1.0), "tolerance"),
        (lambda: QuadratureFrequencies(torch.ones(3, 1), torch.zeros(3)), "weights"),
        (lambda: build("component").check(SPECTRA["laplace"](H, T)), "MaternSpectrum"),
        (lambda: build("component").check(GaussianSpectrum(H, T + 1)), "terms"),
        (lambda: build("lebedev").check(GaussianSpectrum(H, T, 2)), "LebedevFrequencies"),
    ],
)
def test_what_is_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make()
