import math

import numpy as np
import pytest
import torch

from flt_mol.nn.frequencies import (
    FREQUENCIES,
    SAMPLINGS,
    ComponentFrequencies,
    Frequencies,
    GaussianFrequencies,
    QuadratureFrequencies,
    normal_vectors,
)
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import DirectionalSpectrum, GaussianSpectrum, Spectrum

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
        {"sampling": "halton"},
        {"mean": [0.1, 0.2]},
        {"mean": torch.zeros(3, 3)},
        {"redraw_every": 0, "learned_sigma": False},
        {"sigma": math.inf},
        {"sigma": (0.1, math.nan)},
        {"sigma": math.nan},
        {"sigma": "wide"},
        {"sigma": (0.1, 0.2, 0.3)},
        {"sigma": None},
        {"mean": [0.0, math.nan, 0.0]},
        {"mean": [0.0, math.inf, 0.0]},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        GaussianFrequencies(**{"num_frequencies": 4, **settings})


@pytest.mark.parametrize(
    "sigma",
    [
        np.float32(0.25),
        np.float64(0.25),
        np.array(0.25),
        torch.tensor(0.25),
        [0.25, 0.25],
        np.array([0.25, 0.25]),
        torch.tensor([0.25, 0.25]),
    ],
)
def test_a_width_may_be_any_kind_of_number(sigma):
    expected = GaussianFrequencies(4, sigma=0.25, generator=seeded())
    got = GaussianFrequencies(4, sigma=sigma, generator=seeded())
    assert torch.equal(got.log_sigma, expected.log_sigma)
    assert torch.equal(got()[0], expected()[0])


def test_draws_are_those_of_shipped_checkpoints():
    # The first numbers of a generator with seed 0; a change here breaks reproducibility.
    frequencies = GaussianFrequencies(2, generator=seeded())
    expected = torch.tensor([[1.5410, -0.2934, -2.1788], [0.5684, -1.0845, -1.3986]])
    torch.testing.assert_close(frequencies.draw, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_vectors_of_every_sampling_are_standard_normal(sampling, dim):
    generator = seeded(5)
    draws = torch.stack([normal_vectors(7, dim, sampling, generator) for _ in range(1500)]).double()
    for row in (0, 6):
        z = draws[:, row]
        assert (z.mean(0).abs() < 5 / math.sqrt(1500)).all()
        assert ((z.square().mean(0) - 1).abs() < 5 * math.sqrt(2 / 1500)).all()
        assert ((z.pow(4).mean(0) - 3).abs() < 5 * math.sqrt(96 / 1500)).all()
        product = (z[:, :1] * z[:, 1:]).mean(0)
        assert (product.abs() < 5 / math.sqrt(1500)).all()


def test_orthogonal_vectors_are_orthogonal_in_blocks():
    z = normal_vectors(7, 3, "orthogonal", seeded()).double()
    gram = z @ z.T / z.norm(dim=-1)[:, None] / z.norm(dim=-1)
    for block in (slice(0, 3), slice(3, 6)):
        assert (gram[block, block] - torch.eye(3)).abs().max() < 1e-5
    assert gram[:3, 3:6].abs().max() > 0.01


def test_sobol_vectors_are_spread_evenly_and_follow_the_generator_alone():
    state = torch.get_rng_state()
    z = normal_vectors(64, 3, "sobol", seeded())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(z, normal_vectors(64, 3, "sobol", seeded()))
    assert not torch.equal(z, normal_vectors(64, 3, "sobol", seeded(1)))
    # One point in each 64th of every coordinate.
    cells = (64 * torch.special.ndtr(z.double())).floor().long()
    assert torch.equal(cells.sort(0).values, torch.arange(64)[:, None].expand(-1, 3))


def test_draws_do_not_depend_on_the_default_dtype():
    for sampling in SAMPLINGS:
        expected = normal_vectors(5, 3, sampling, seeded())
        torch.set_default_dtype(F64)
        try:
            assert torch.equal(normal_vectors(5, 3, sampling, seeded()), expected)
            assert GaussianFrequencies(4, sampling=sampling, mean=[0.0] * 3)()[0].dtype == F64
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("means", ["one", "each"])
def test_the_density_with_means_is_symmetric_and_integrates_to_one(means):
    mean = [0.1, -0.15] if means == "one" else 0.2 * torch.randn(3, 2, generator=seeded())
    frequencies = GaussianFrequencies(3, 2, (0.05, 0.1), mean=mean, generator=seeded()).double()
    axis = torch.linspace(-1.5, 1.5, 301, dtype=F64)
    grid = torch.cartesian_prod(axis, axis)
    density = frequencies.log_density(grid).exp()
    assert density.sum().item() * 0.01**2 == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(density, density.flip(0))
    xi, log_density = frequencies()
    centre = frequencies.mean.expand(3, -1)
    sigmas = frequencies.log_sigma.exp()
    torch.testing.assert_close(xi, centre + sigmas[:, None] * frequencies.draw)
    explicit = torch.stack(
        [
            normal_density(xi - sign * centre[j], sigmas[j].item()) / 6
            for j in range(3)
            for sign in (1, -1)
        ]
    ).sum(0)
    torch.testing.assert_close(log_density.exp(), explicit)


def test_a_learned_mean_is_a_parameter_and_gets_a_gradient():
    frequencies = GaussianFrequencies(4, learned_mean=True, generator=seeded())
    assert {name for name, _ in frequencies.named_parameters()} == {"log_sigma", "mean"}
    plain = GaussianFrequencies(4, generator=seeded())
    for one, other in zip(frequencies(), plain(), strict=True):
        torch.testing.assert_close(one, other)  # it begins at 0
    xi, log_density = frequencies()
    (gradient,) = torch.autograd.grad((xi.sin().sum() + log_density.sum()), frequencies.mean)
    assert (gradient != 0).all()
    assert "mean" not in dict(GaussianFrequencies(4, mean=[0.1, 0, 0]).named_parameters())


X = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0.6, -0.8, 0.3], [1.5, 1.0, 0], [3.0, 3.0, -3.0]])
RANDOM = {
    "standard": lambda kind, dim: GaussianFrequencies(
        6, dim, 1.0, sampling=kind, generator=seeded()
    ),
    "range": lambda kind, dim: GaussianFrequencies(
        6, dim, (0.1, 0.25), sampling=kind, generator=seeded()
    ),
    "mean": lambda kind, dim: GaussianFrequencies(
        6,
        dim,
        0.2,
        shared_sigma=True,
        sampling=kind,
        generator=seeded(),
        mean=[0.15, -0.1, 0.05][:dim],
    ),
    "means": lambda kind, dim: GaussianFrequencies(
        6,
        dim,
        (0.15, 0.3),
        sampling=kind,
        generator=seeded(),
        mean=0.1 * torch.randn(6, dim, generator=seeded(2)),
    ),
    "component": lambda kind, dim: ComponentFrequencies(
        6, 2, 4, dim, sampling=kind, generator=seeded()
    ),
}


@pytest.mark.parametrize("directional", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", RANDOM)
def test_the_mean_of_the_mask_is_f_for_every_random_family(family, sampling, directional):
    dim = 1 if family == "standard" else 2  # σ = 1 is far too wide for more dimensions
    kind = DirectionalSpectrum if directional else GaussianSpectrum
    widths = (0.2, 0.5) if family == "standard" else (1.0, 2.0)
    spectrum = kind(2, 4, dim, "amplitude", *widths, generator=seeded(4))
    rpe, generator = FourierRPE(spectrum, RANDOM[family](sampling, dim)).double(), seeded(6)
    x = X[:, :dim].double() * (0.3 if family == "standard" else 1.0)
    with torch.no_grad():
        masks = []
        for _ in range(400):
            rpe.frequencies.redraw(generator)
            masks.append(rpe.sampled_mask(x))
        masks, f = torch.stack(masks), rpe.mask(x)
    error = masks.std(0) / math.sqrt(len(masks))
    assert ((masks.mean(0) - f).abs() < 5 * error + 1e-9).all()
    assert (error < 0.2 * f.abs().max()).all()  # sharp enough to see a lost factor
    assert (error[1:] > 0).all()


def test_quadrature_weights_become_a_density():
    points = torch.tensor([[0.0, 0.0], [0.1, 0.2], [0.3, -0.1]])
    weights = torch.tensor([0.5, 1.0, 2.0])
    frequencies = QuadratureFrequencies(points, weights).double()
    xi, log_density = frequencies()
    torch.testing.assert_close((-log_density).exp() / 3, weights.double())
    assert xi.dtype == log_density.dtype == F64
    assert set(frequencies.state_dict()) == {"points", "log_weight"}
    with pytest.raises(ValueError, match="positive"):
        QuadratureFrequencies(points, torch.tensor([0.5, 0.0, 2.0]))
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite"):
            QuadratureFrequencies(points, torch.tensor([0.5, wrong, 2.0]))
        with pytest.raises(ValueError, match="must be finite"):
            QuadratureFrequencies(points * wrong, weights)
    with pytest.raises(ValueError, match="points must be"):
        QuadratureFrequencies(points, weights[:2])


def test_a_family_of_ones_own():
    class Grid(Frequencies):
        def forward(self):
            xi = torch.arange(self.num_frequencies, dtype=F64)[:, None] / 10
            return xi, torch.full((self.num_frequencies,), -0.5, dtype=F64)

    class Unit(Spectrum):
        def forward(self, frequencies):
            return torch.ones(self.num_heads, frequencies.shape[-2], dtype=F64)

    rpe = FourierRPE(Unit(2, 1), Grid(4, 1))
    positions = torch.tensor([[0.0], [1.0], [2.5]], dtype=F64)
    expected = torch.cos(2 * math.pi * torch.arange(4) / 10).sum() * math.exp(0.5) / 4
    features = rpe(positions)
    got = (features.query[0] * features.key[1]).sum(-1)
    torch.testing.assert_close(got, expected.double().expand(2), rtol=1e-6, atol=0)
    with pytest.raises(NotImplementedError, match="forward"):
        Frequencies(3, 3)()
    with pytest.raises(ValueError, match="num_frequencies"):
        Frequencies(0, 3)


def test_names_for_configurations():
    assert set(FREQUENCIES) == {"gaussian", "component", "lattice", "lebedev"}
    assert all(issubclass(family, Frequencies) for family in FREQUENCIES.values())
