import math

import pytest
import torch

from flt_mol.functional import fourier_basis, position_features, relative_mask

SPLITS = ["one_sided", "symmetric"]


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
    else:
        assert features.query.shape[1] == 1  # not expanded to heads
        torch.testing.assert_close(features.key.square().sum(-1)[0], ratio.square().mean(-1))


def slope_to_ratio(split, size):
    """The gradient of a smooth function of Φ and Ψ to ρ, at ρ = size."""
    positions, xi, _ = draw()
    ratio = torch.full((3, 5), size, dtype=torch.float64, requires_grad=True)
    features = position_features(fourier_basis(positions, xi), ratio, split)
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (x @ torch.randn(10, 4, generator=generator, dtype=torch.float64)).exp().sum()
        for x in (features.query, features.key)
    )
    (gradient,) = torch.autograd.grad(total, ratio)
    return gradient.norm()


def test_one_sided_gradients_stay_bounded_and_symmetric_ones_blow_up():
    one_sided = [slope_to_ratio("one_sided", size) for size in (1e-2, 1e-8)]
    symmetric = [slope_to_ratio("symmetric", size) for size in (1e-4, 1e-8)]
    assert 0.5 < one_sided[1] / one_sided[0] < 2
    assert 50 < symmetric[1] / symmetric[0] < 200  # ρ^(-1/2): 100


def test_a_ratio_of_exactly_zero_has_finite_gradients():
    positions, xi, ratio = draw()
    ratio[:, 0] = 0.0
    ratio.requires_grad_()
    features = position_features(fourier_basis(positions, xi), ratio, "symmetric")
    (features.query.sum() + features.key.sum()).backward()
    assert ratio.grad.isfinite().all()
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
    with pytest.raises(ValueError, match="columns"):
        position_features(basis[:, 1:], ratio)
