"""Lattices and shells: the documented errors, and the properties that they come from."""

import math
import sys

import numpy as np
import pytest
import torch

from flt_mol.nn.frequencies import GaussianFrequencies, LatticeFrequencies, LebedevFrequencies
from flt_mol.nn.frequencies.lattice import half_lattice
from flt_mol.nn.frequencies.shells import _DEGREES, half_rule
from flt_mol.nn.rpe import FourierRPE, rotation_error
from flt_mol.nn.spectrum import GaussianSpectrum

F64 = torch.float64
RADIUS = 18.0


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rpe_of(frequencies, *sigmas):
    """One head, f(0) = 1, equal amplitudes of these widths, float64."""
    spectrum = GaussianSpectrum(1, len(sigmas), frequencies.dim).double()
    with torch.no_grad():
        spectrum.log_sigma.copy_(torch.tensor([sigmas], dtype=F64).log())
        spectrum.amplitude.fill_(1 / len(sigmas))
    return FourierRPE(spectrum, frequencies.double())


def largest_error(rpe, radius):
    """Max |N̂ − f| over distances up to the radius, in 128 directions."""
    directions = torch.randn(128, rpe.dim, generator=seeded(1), dtype=F64)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    with torch.no_grad():
        return max(
            float((rpe.sampled_mask(r * directions) - rpe.mask(r * directions)).abs().max())
            for r in torch.linspace(0, radius, 25).tolist()
        )


@pytest.mark.parametrize(
    ("family", "sigmas", "count", "rotation", "error"),
    [
        (LatticeFrequencies, (2.0,), 959, 3.7e-4, 5.6e-4),
        (LatticeFrequencies, (4.0,), 269, 3.9e-4, 5.1e-4),
        (LebedevFrequencies, (2.0,), 1256, 2.9e-4, 6.5e-4),
        (LebedevFrequencies, (4.0,), 275, 2.1e-4, 6.5e-4),
    ],
)
def test_the_documented_errors(family, sigmas, count, rotation, error):
    frequencies = family(RADIUS, (min(sigmas), max(sigmas)))
    assert frequencies.num_frequencies == count
    rpe = rpe_of(frequencies, *sigmas)
    turned = float(rotation_error(rpe, RADIUS, num_radii=36, num_directions=128))
    assert 0.6 * rotation < turned < 1.1 * rotation
    assert 0.6 * error < largest_error(rpe, RADIUS) < 1.1 * error


def test_few_shells_do_not_depend_on_orientation_where_few_lattice_points_do():
    shells = rpe_of(LebedevFrequencies(RADIUS, 4.0, cutoff=2.5, margin=0.5), 4.0)
    assert shells.frequencies.num_frequencies == 43
    assert float(rotation_error(shells, RADIUS)) < 1e-6
    assert 0.2 < largest_error(shells, RADIUS) < 0.3
    lattice = rpe_of(LatticeFrequencies(RADIUS, 4.0, cutoff=3.0, margin=1.0), 4.0)
    assert float(rotation_error(lattice, RADIUS)) > 0.3


def test_random_frequencies_depend_on_orientation():
    rpe = rpe_of(GaussianFrequencies(16, sigma=1 / (4 * math.pi), generator=seeded()), 2.0)
    assert float(rotation_error(rpe, RADIUS)) > 0.5


def test_rotation_error_is_the_range_over_directions():
    # One frequency along x: N̂(x) = cos 2πξ x₁, from −1 to 1 once r ≥ 1/(2ξ).
    frequencies = GaussianFrequencies(1, generator=seeded())
    frequencies.draw = torch.tensor([[1.0, 0.0, 0.0]])
    rpe = rpe_of(frequencies, 2.0)
    xi, ratio = rpe.ratio()
    size, half = float(ratio.abs().detach()), float(0.5 / xi[0, 0].detach())
    assert float(rotation_error(rpe, half)) == pytest.approx(2 * size, rel=1e-2)
    assert float(rotation_error(rpe, half / 2)) == pytest.approx(size, rel=2e-2)
    assert not rotation_error(rpe, 1.0).requires_grad
    state = torch.get_rng_state()
    assert torch.equal(rotation_error(rpe, 1.0), rotation_error(rpe, 1.0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_lattice_mask_is_the_sum_over_its_periods(dim):
    # Poisson: N̂(x) = Σ_T f(x + T) over the dual lattice, here the vectors of A_ℓ written out.
    sigma, period = 1.5, 4.0 + 2.0 * 1.5
    rpe = rpe_of(LatticeFrequencies(4.0, sigma, dim, cutoff=9.0, margin=2.0), sigma)
    dual = period * torch.tensor([[1, 0, 0], [-0.5, 3**0.5 / 2, 0], [0, -(3**-0.5), 6**0.5 / 3]])
    dual = dual[:dim, :dim].double()
    index = torch.cartesian_prod(*[torch.arange(-4.0, 5.0, dtype=F64)] * dim).view(-1, dim)
    x = 3 * torch.randn(6, dim, generator=seeded(), dtype=F64)
    expected = rpe.mask(x[:, None] + index @ dual).sum(1)
    torch.testing.assert_close(rpe.sampled_mask(x), expected, rtol=0, atol=1e-6)
    assert (expected - rpe.mask(x)).abs().max() > 1e-3


def test_the_three_dimensional_lattice_is_body_centred_cubic():
    points, volume = half_lattice(period=1.0, largest=1.5, dim=3)
    lengths = torch.cat([points, -points[1:]]).norm(dim=-1).sort().values
    # bcc of conventional constant √2/L: 8 neighbours at a√3/2, 6 at a; cell a³/2.
    a = math.sqrt(2)
    assert volume == pytest.approx(a**3 / 2)
    torch.testing.assert_close(lengths[1:9], torch.full((8,), a * math.sqrt(3) / 2, dtype=F64))
    torch.testing.assert_close(lengths[9:15], torch.full((6,), a, dtype=F64))


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_half_a_lattice_holds_one_of_each_pair(dim):
    points, volume = half_lattice(period=5.0, largest=1.0, dim=dim)
    assert (points[0] == 0).all()
    whole = torch.cat([points, -points[1:]])
    distances = torch.cdist(whole, whole) + torch.eye(len(whole)) * 9
    assert distances.min() > 0.19
    ball = math.pi ** (dim / 2) / math.gamma(dim / 2 + 1)
    assert len(whole) == pytest.approx(ball / volume, rel=0.15)


@pytest.mark.parametrize("degree", [3, 15, 35])
def test_half_a_lebedev_rule_integrates_even_polynomials(degree):
    directions, weights = half_rule(degree)
    assert (weights > 0).all()
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(len(weights), dtype=F64))
    axis = torch.tensor([0.48, -0.6, 0.64], dtype=F64)
    for power in range(0, degree, 2):
        mean = (weights * (directions @ axis) ** power).sum()
        assert mean.item() == pytest.approx(1 / (power + 1), rel=1e-9)
    beyond = (weights * (directions @ axis) ** (degree + 9)).sum()
    assert abs(beyond.item() * (degree + 10) - 1) > 1e-6 or degree == 35


def test_all_rules_used_have_positive_weights():
    for degree in _DEGREES:
        assert half_rule(degree)[1].min() > 0, degree


def test_they_are_saved_need_no_scipy_to_load_and_keep_their_dtype(monkeypatch):
    shells = LebedevFrequencies(10.0, 4.0)
    state = shells.state_dict()
    assert set(state) == {"points", "log_weight"}
    assert [value.dtype for value in shells.double()()] == [F64, F64]
    assert [value.dtype for value in shells.half()()] == [torch.float32] * 2
    monkeypatch.setitem(sys.modules, "scipy.integrate", None)
    with pytest.raises(ImportError, match=r"SciPy ≥ 1\.15"):
        LebedevFrequencies(10.0, 4.0)


@pytest.mark.parametrize("family", [LatticeFrequencies, LebedevFrequencies])
def test_settings_that_make_no_sense_are_refused(family):
    for settings in (
        {"radius": 0.0, "sigma": 1.0},
        {"radius": 5.0, "sigma": (2.0, 1.0)},
        {"radius": 5.0, "sigma": 0.0},
        {"radius": 5.0, "sigma": 1.0, "cutoff": -1.0},
        {"radius": 5.0, "sigma": 1.0, "margin": 0.0},
    ):
        with pytest.raises(ValueError, match="sigma"):
            family(**settings)


def test_sets_that_would_be_too_large_are_refused():
    with pytest.raises(ValueError, match="too many points"):
        LatticeFrequencies(500.0, 1.0)
    with pytest.raises(ValueError, match="dim"):
        LatticeFrequencies(5.0, 1.0, dim=0)
    with pytest.raises(ValueError, match="no Lebedev rule"):
        LebedevFrequencies(60.0, 1.0)
    with pytest.raises(ValueError, match="tolerance"):
        LebedevFrequencies(5.0, 1.0, tolerance=0.0)
    with pytest.raises(ValueError, match="no shell"):
        LebedevFrequencies(1.0, 4.0, cutoff=0.1)


@pytest.mark.parametrize("family", [LatticeFrequencies, LebedevFrequencies])
def test_numbers_of_every_kind_do(family):
    expected = family(8.0, 2.0)
    for number in (np.float32, np.float64, np.array, torch.tensor, int):
        got = family(number(8.0), number(2.0))
        assert got.num_frequencies == expected.num_frequencies
        for one, other in zip(got(), expected(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for wrong in (math.nan, math.inf, -1.0, "wide", (2.0, math.inf), (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match="sigma"):
            family(8.0, wrong)
    for wrong in (math.nan, math.inf):
        for settings in ({"radius": wrong}, {"cutoff": wrong}, {"margin": wrong}):
            with pytest.raises(ValueError, match=f"{next(iter(settings))}={wrong}"):
                family(**{"radius": 8.0, "sigma": 2.0, **settings})
