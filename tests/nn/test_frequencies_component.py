"""Frequencies drawn from the terms of the spectrum itself."""

import math

import pytest
import torch

from flt_mol.nn.frequencies import ComponentFrequencies, gaussian_components
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import (
    DirectionalSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    LaplaceSpectrum,
)

F64 = torch.float64
X = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0.6, -0.8, 0.3], [3.0, 3.0, -3.0]], dtype=F64)
FAMILIES = [GaussianSpectrum, GaussianMixtureSpectrum, DirectionalSpectrum]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(family=GaussianSpectrum, num_frequencies=7, heads=2, terms=3, form="amplitude"):
    spectrum = family(heads, terms, 3, form, 1.0, 3.0, generator=seeded(1))
    frequencies = ComponentFrequencies.of(spectrum, num_frequencies, generator=seeded(2))
    return FourierRPE(spectrum, frequencies).double()


@pytest.mark.parametrize("form", ["amplitude", "weight"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampled_mask_is_the_sum_over_terms_and_their_draws(family, form):
    rpe = build(family, form=form)
    amplitude, sigma, mean, phase = gaussian_components(rpe.spectrum)
    counts, draw = [3, 2, 2], rpe.frequencies.draw
    expected = torch.zeros(len(X), 2, dtype=F64)
    for head in range(2):
        first = 0
        for term, count in enumerate(counts):
            for z in draw[head, first : first + count]:
                angle = X @ z / sigma[head, term]
                if mean is not None:
                    angle = angle + 2 * math.pi * X @ mean[head, term]
                if phase is not None:
                    angle = angle + phase[head, term]
                expected[:, head] += amplitude[head, term] / count * angle.cos()
            first += count
    torch.testing.assert_close(rpe.sampled_mask(X), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(rpe.mask(X)[0], rpe.sampled_mask(X)[0])  # x = 0: no noise


@pytest.mark.parametrize("family", FAMILIES)
def test_the_product_of_features_is_the_sampled_mask(family):
    rpe, positions = build(family), 3 * torch.randn(5, 3, generator=seeded(), dtype=F64)
    features = rpe(positions)
    assert features.basis.shape == (5, 2, 14)
    product = torch.einsum("ihc,jhc->ijh", features.query.expand(5, 2, 14), features.key)
    expected = rpe.sampled_mask(positions[:, None] - positions[None])
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-12)


def test_the_mask_never_exceeds_the_sum_of_amplitudes():
    rpe = build(num_frequencies=3)
    bound = rpe.spectrum.amplitude.abs().sum(-1)
    for seed in range(20):
        rpe.frequencies.redraw(seeded(seed))
        assert (rpe.sampled_mask(10 * X).abs() <= bound + 1e-12).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_everything_that_is_learned(family):
    rpe = build(family, num_frequencies=3)
    parameters = dict(rpe.named_parameters())

    def features(*values):
        at = torch.func.functional_call(rpe, dict(zip(parameters, values, strict=True)), (X,))
        return at.query, at.key

    assert torch.autograd.gradcheck(features, tuple(parameters.values()))
    features(*parameters.values())[1].square().sum().backward()
    rpe.sampled_mask(X).sum().backward()
    for name, parameter in parameters.items():
        assert (parameter.grad != 0).all(), name


def test_the_variance_is_below_that_of_a_mismatched_gaussian():
    from flt_mol.nn.frequencies import GaussianFrequencies

    spectrum = GaussianSpectrum(1, 1, sigma_min=2.0, sigma_max=2.0, generator=seeded(1))
    errors = []
    for frequencies in (
        ComponentFrequencies.of(spectrum, 16, generator=seeded()),
        GaussianFrequencies(16, sigma=1.5 / (4 * math.pi), shared_sigma=True, generator=seeded()),
    ):
        rpe, generator = FourierRPE(spectrum, frequencies).double(), seeded(3)
        with torch.no_grad():
            masks = []
            for _ in range(300):
                frequencies.redraw(generator)
                masks.append(rpe.sampled_mask(2 * X))
        errors.append((torch.stack(masks) - rpe.mask(2 * X)).square().mean().sqrt())
    assert errors[0] < 0.8 * errors[1]


def test_only_the_draw_is_saved():
    frequencies = ComponentFrequencies(5, 2, 3, generator=seeded())
    assert set(frequencies.state_dict()) == {"draw"}
    assert frequencies.draw.shape == (2, 5, 3)
    assert not torch.equal(frequencies.draw[0], frequencies.draw[1])  # each head its own
    other = ComponentFrequencies(5, 2, 3, generator=seeded(1))
    other.load_state_dict(frequencies.state_dict())
    assert torch.equal(other.draw, frequencies.draw)


@pytest.mark.parametrize(("count", "terms"), [(3, 3), (7, 3), (8, 3), (9, 3), (5, 1), (11, 4)])
def test_the_frequencies_of_each_term_are_as_many_as_were_drawn(count, terms):
    frequencies = ComponentFrequencies(count, 2, terms, generator=seeded())
    expected = [t for t, n in enumerate(frequencies.counts) for _ in range(n)]
    assert frequencies.term.tolist() == expected
    assert sum(frequencies.counts) == count


def test_a_checkpoint_is_all_that_a_module_without_storage_needs():
    rpe = build(DirectionalSpectrum)
    with torch.device("meta"):
        spectrum = DirectionalSpectrum(2, 3, 3, "amplitude", 1.0, 3.0)
        empty = FourierRPE(spectrum, ComponentFrequencies.of(spectrum, 7)).double()
    empty.to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.detach().fill_(0)
    empty.load_state_dict(rpe.state_dict())
    torch.testing.assert_close(empty.sampled_mask(X), rpe.sampled_mask(X), rtol=0, atol=0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="num_frequencies ≥ num_terms"):
        ComponentFrequencies(3, 2, 4)
    with pytest.raises(ValueError, match="sampling"):
        ComponentFrequencies(4, 2, 4, sampling="halton")
    with pytest.raises(ValueError, match="not a sum of Gaussians"):
        ComponentFrequencies.of(LaplaceSpectrum(2, 3), 6)
    rpe = FourierRPE(GaussianSpectrum(2, 3), ComponentFrequencies(6, 2, 4))
    with pytest.raises(ValueError, match="3 terms"):
        rpe(torch.zeros(2, 3))
