import math

import pytest
import torch

from flt_mol.analysis.masks import deterministic_sets, largest_error, random_sets
from flt_mol.nn.frequencies import QuadratureFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum


def test_the_largest_error_of_one_wave_is_known():
    """At ξ = 0 alone the mask is constant: off by c − f(r), most where f is farthest from c."""
    spectrum = GaussianSpectrum(1, 1, sigma_min=2.0, sigma_max=2.0)
    with torch.no_grad():
        spectrum.amplitude.fill_(1.0)
    volume = (math.sqrt(2 * math.pi) * 2.0) ** 3
    constant = QuadratureFrequencies(torch.zeros(1, 3), torch.tensor([0.25 / volume]))
    rpe = FourierRPE(spectrum, constant)
    assert largest_error(rpe, 10.0).item() == pytest.approx(0.75, abs=1e-5)
    heavy = QuadratureFrequencies(torch.zeros(1, 3), torch.tensor([0.75 / volume]))
    error = largest_error(FourierRPE(spectrum, heavy), 10.0).item()
    assert error == pytest.approx(0.75 - math.exp(-12.5), abs=1e-5)


def test_deterministic_sets_are_near_and_turn_well():
    lattice, shells = deterministic_sets(4.0, 12.0)
    for found in (lattice, shells):
        assert found.error < 2e-3
        assert found.rotation < 2e-3
    rough = list(deterministic_sets(4.0, 12.0, [(2.5, 0.5)]))
    assert rough[1].num_frequencies < shells.num_frequencies
    assert rough[1].error > 10 * shells.error
    assert rough[1].rotation < 2e-3


def test_random_sets_err_as_one_over_the_root_of_their_number():
    found = {}
    for result in random_sets(2.0, [16, 256], radius=12.0, draws=4):
        assert result.rotation > result.error  # a range, from below f to above it
        found.setdefault(result.kind, []).append(result.error)
    assert len(found) == 6
    for few, many in found.values():
        assert 2.5 < few / many < 6.5
