import math

import pytest
import torch

from flt_mol.nn import GaussianFrequencies

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal_density(xi, sigma):
    return torch.distributions.Normal(0.0, sigma).log_prob(xi).sum(-1).exp()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_density_of_one_sigma_is_the_normal_one(dim):
    frequencies = GaussianFrequencies(
        20, dim, sigma=0.2, shared_sigma=True, generator=seeded()
    ).double()
    xi, log_density = frequencies()
    # log σ was rounded to float32, hence the tolerance.
    torch.testing.assert_close(log_density.exp(), normal_density(xi, 0.2), rtol=1e-5, atol=0)
    torch.testing.assert_close(xi, 0.2 * frequencies.draw)


def test_the_density_of_many_sigmas_is_the_mean_over_all_of_them():
    frequencies = GaussianFrequencies(5, 3, sigma=(0.05, 0.4), generator=seeded()).double()
    xi, log_density = frequencies()
    sigmas = frequencies.log_sigma.exp()
    expected = torch.stack([normal_density(xi, sigma.item()) for sigma in sigmas]).mean(0)
    torch.testing.assert_close(log_density.exp(), expected)
    torch.testing.assert_close(sigmas[[0, -1]], torch.tensor([0.05, 0.4], dtype=F64))
    torch.testing.assert_close(xi / frequencies.draw, sigmas[:, None].expand(-1, 3))


@pytest.mark.parametrize("dim", [1, 2])
def test_the_density_integrates_to_one(dim):
    frequencies = GaussianFrequencies(7, dim, sigma=(0.05, 0.2), generator=seeded()).double()
    axis = torch.linspace(-1.6, 1.6, 401, dtype=F64)
    grid = torch.cartesian_prod(*[axis] * dim).view(-1, dim)
    total = frequencies.log_density(grid).exp().sum() * (axis[1] - axis[0]) ** dim
    assert total.item() == pytest.approx(1.0, abs=1e-9)


def test_the_draw_is_standard_normal():
    count = 30_000
    draw = GaussianFrequencies(count, 3, sigma=0.1, shared_sigma=True, generator=seeded()).draw
    assert (draw.mean(0).abs() < 5 / math.sqrt(count)).all()
    assert ((draw.square().mean(0) - 1).abs() < 5 * math.sqrt(2 / count)).all()


def test_the_draw_is_saved_and_sigma_learned():
    frequencies = GaussianFrequencies(4, generator=seeded())
    assert set(frequencies.state_dict()) == {"draw", "log_sigma"}
    assert [name for name, _ in frequencies.named_parameters()] == ["log_sigma"]
    xi, log_density = frequencies()
    for output in (xi.square().sum(), log_density.square().sum()):
        (gradient,) = torch.autograd.grad(output, frequencies.log_sigma, retain_graph=True)
        assert (gradient != 0).all()
    other = GaussianFrequencies(4, sigma=0.1, generator=seeded(1))
    other.load_state_dict(frequencies.state_dict())
    assert torch.equal(other()[0], xi)


def test_fixed_and_shared_sigmas():
    fixed = GaussianFrequencies(4, learned_sigma=False)
    assert list(fixed.parameters()) == []
    assert fixed.log_sigma.shape == (4,)
    shared = GaussianFrequencies(4, sigma=0.1, shared_sigma=True)
    assert shared.log_sigma.shape == (1,)


def test_the_generator_decides():
    first, again = (GaussianFrequencies(4, generator=seeded(2)) for _ in range(2))
    assert torch.equal(first.draw, again.draw)
    assert not torch.equal(first.draw, GaussianFrequencies(4, generator=seeded(3)).draw)


@pytest.mark.parametrize(
    "settings",
    [
        {"sigma": 0.0},
        {"sigma": (0.2, 0.1)},
        {"num_frequencies": 0},
        {"dim": 0},
        {"sigma": (0.1, 0.2), "shared_sigma": True},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match="sigma"):
        GaussianFrequencies(**{"num_frequencies": 4, **settings})
