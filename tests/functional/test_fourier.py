import math

import pytest
import torch

from flt_mol.functional.fourier import (
    SPLITS,
    fourier_basis,
    phases,
    position_features,
    quarter_turn,
)
from helpers.masks import relative_mask

F64 = torch.float64


def draw(rows=7, heads=3, frequencies=5, dim=3):
    generator = torch.Generator().manual_seed(0)
    positions = 5 * torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    xi = 0.2 * torch.randn(frequencies, dim, generator=generator, dtype=torch.float64)
    ratio = torch.randn(heads, frequencies, generator=generator, dtype=torch.float64)
    return positions, xi, ratio


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_product_of_features_is_the_sampled_mask(split, dim):
    positions, xi, ratio = draw(dim=dim)
    assert (ratio < 0).any()
    assert (ratio > 0).any()
    features = position_features(fourier_basis(positions, xi), ratio, split)
    displacements = positions[:, None] - positions[None]
    waves = torch.cos(2 * math.pi * torch.einsum("ijd,rd->ijr", displacements, xi))
    expected = torch.einsum("ijr,hr->hij", waves, ratio) / 5
    torch.testing.assert_close(
        relative_mask(features.query, features.key), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("split", SPLITS)
def test_norms_depend_on_the_head_alone(split):
    positions, xi, ratio = draw()
    features = position_features(fourier_basis(positions, xi), ratio, split)
    for x in (features.query, features.key):
        norms = x.square().sum(-1)
        torch.testing.assert_close(norms, norms[:1].expand_as(norms))
    if split == "symmetric":
        torch.testing.assert_close(features.query.square().sum(-1)[0], ratio.abs().mean(-1))
    elif split == "balanced":
        for x in (features.query, features.key):
            size = ratio.square().mean(-1).sqrt()
            torch.testing.assert_close(x.square().sum(-1)[0], size)
    else:
        assert features.query.shape[1] == 1  # not expanded to heads
        torch.testing.assert_close(features.key.square().sum(-1)[0], ratio.square().mean(-1))


def slope_to_ratio(split, size, single):
    """Mean gradient of softmax features of attention to ρ of that size, one or all; R = 16."""
    slopes = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, generator=generator):
            return torch.randn(*shape, generator=generator, dtype=F64)

        positions, xi, ratio = 5 * normal(20, 3), 0.15 * normal(16, 3), normal(4, 16).sign()
        if single:
            ratio[:, 0] *= size
        else:
            ratio *= size
        ratio.requires_grad_()
        features = position_features(fourier_basis(positions, xi), ratio, split)
        w, value, target = normal(32, 8), normal(20, 4, 5), normal(20, 4, 5)
        q, k = (
            (x @ w - x.square().sum(-1, keepdim=True) / 2).exp().expand(20, 4, 8)
            for x in (features.query, features.key)
        )
        weights = torch.einsum("nhm,khm->hnk", q, k)
        out = torch.einsum("hnk,khd->nhd", weights / weights.sum(-1, keepdim=True), value)
        (slope,) = torch.autograd.grad((out * target).sum(), ratio)
        slopes.append((slope[:, 0] if single else slope).abs().mean())
    return float(torch.stack(slopes).mean())


@pytest.mark.parametrize("single", [True, False])
def test_which_gradients_stay_bounded_as_the_ratio_vanishes(single):
    slopes = {s: [slope_to_ratio(s, size, single) for size in (1, 1e-4, 1e-8)] for s in SPLITS}
    assert max(slopes["one_sided"]) < 3 * min(slopes["one_sided"])
    assert 50 < slopes["symmetric"][2] / slopes["symmetric"][1] < 200  # ρ^(-1/2): 100
    if single:
        assert max(slopes["balanced"]) < 3 * min(slopes["balanced"])
    else:
        assert 20 < slopes["balanced"][1] / slopes["balanced"][0] < 200
        assert slopes["balanced"][2] < 0.5 * slopes["symmetric"][2]


def test_the_noise_of_softmax_features_goes_away_with_a_balanced_mask():
    errors = {}
    for split in SPLITS:
        positions, xi, ratio = draw(rows=30, heads=1, frequencies=16)
        features = position_features(fourier_basis(positions, 0.7 * xi), 0.01 * ratio, split)
        q, k = features.query[:, 0], features.key[:, 0]
        w = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), dtype=F64)
        phi, psi = ((x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp() for x in (q, k))
        errors[split] = float((phi @ psi.T / 64 / (q @ k.T).exp() - 1).square().mean().sqrt())
    assert errors["balanced"] < 0.04
    assert errors["symmetric"] < 0.04
    assert errors["one_sided"] > 0.08


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_a_ratio_of_exactly_zero_has_finite_gradients(split, everywhere, dtype):
    positions, xi, ratio = draw()
    ratio = ratio.to(dtype)
    ratio[:, :1] = 0.0
    if everywhere:
        ratio = 0 * ratio
    ratio.requires_grad_()
    features = position_features(fourier_basis(positions, xi), ratio, split)
    (features.query.sum() + features.key.sum()).backward()
    assert torch.view_as_real(ratio.grad.to(torch.complex128)).isfinite().all()
    assert (features.key[..., 0] == 0).all()


def test_phases_are_float32_under_autocast_and_for_half_precision():
    positions, xi, _ = draw()
    positions, xi = positions.float(), xi.float()
    expected = fourier_basis(positions, xi)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fourier_basis(positions, xi), expected)
    assert fourier_basis(positions.bfloat16(), xi.bfloat16()).dtype == torch.float32


def test_rows_selects_rows_of_both():
    positions, xi, ratio = draw()
    features = position_features(fourier_basis(positions, xi), ratio, "symmetric")
    index = torch.tensor([3, 1])
    assert torch.equal(features.rows(index).query, features.query[index])
    assert torch.equal(features.rows(index).key, features.key[index])


def test_shapes_and_names_that_do_not_fit_are_refused():
    positions, xi, ratio = draw()
    basis = fourier_basis(positions, xi)
    with pytest.raises(ValueError, match="positions have shape"):
        fourier_basis(positions[:, :2], xi)
    with pytest.raises(ValueError, match="split is 'both'"):
        position_features(basis, ratio, "both")
    with pytest.raises(ValueError, match="basis has shape"):
        position_features(basis[:, 1:], ratio)
    with pytest.raises(ValueError, match="basis has shape"):
        position_features(basis[:, None].expand(-1, 2, -1), ratio)
    with pytest.raises(ValueError, match="positions have shape"):
        phases(positions[..., :2], xi)


@pytest.mark.parametrize("complex_ratio", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_products_for_frequencies_per_head_and_complex_ratios(split, per_head, complex_ratio):
    positions, xi, ratio = draw()
    generator = torch.Generator().manual_seed(3)
    if per_head:
        xi = 0.2 * torch.randn(3, 5, 3, generator=generator, dtype=F64)
    if complex_ratio:
        ratio = torch.complex(ratio, torch.randn(3, 5, generator=generator, dtype=F64))
    features = position_features(fourier_basis(positions, xi), ratio, split)
    assert (features.key_turn is not None) == complex_ratio
    assert features.basis.shape == ((7, 3, 10) if per_head else (7, 10))
    expected = torch.zeros(3, 7, 7, dtype=F64)
    for head in range(3):
        for t in range(5):
            turns = (positions[:, None] - positions[None]) @ (xi[head, t] if per_head else xi[t])
            wave = torch.exp(2j * math.pi * turns) * ratio[head, t]
            expected[head] += wave.real / 5
    got = relative_mask(features.query, features.key)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    index = torch.tensor([3, 1])
    assert torch.equal(features.rows(index).query, features.query[index])
    assert torch.equal(features.rows(index).key, features.key[index])


@pytest.mark.parametrize("complex_ratio", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_derivatives(split, complex_ratio):
    positions, xi, ratio = draw(rows=3, heads=2, frequencies=2)
    if complex_ratio:
        ratio = torch.complex(ratio, ratio.flip(0).roll(1, 1))
    inputs = [x.clone().requires_grad_() for x in (positions, xi, ratio)]

    def features(r, frequencies, rho):
        at = position_features(fourier_basis(r, frequencies), rho, split)
        return at.query, at.key

    assert torch.autograd.gradcheck(features, inputs)
    assert torch.autograd.gradgradcheck(features, inputs)


def test_a_quarter_of_a_turn():
    positions, xi, _ = draw()
    angle = 2 * math.pi * positions @ xi.T
    turned = quarter_turn(fourier_basis(positions, xi))
    late = angle - math.pi / 2
    torch.testing.assert_close(turned, torch.cat([late.cos(), late.sin()], -1))
