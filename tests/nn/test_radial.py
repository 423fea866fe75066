import math

import pytest
import torch
from periodic import F64, seeded

from flt_mol.nn.radial import PairTypes, RadialBasis, log_smooth_cutoff, smooth_cutoff


def derivatives(function, x):
    x = torch.tensor([x], dtype=F64, requires_grad=True)
    values = [function(x)]
    for _ in range(3):
        values.append(torch.autograd.grad(values[-1].sum(), x, create_graph=True)[0])
    return [float(v.detach()) for v in values]


def test_cutoff_and_its_first_two_derivatives_vanish_at_the_end():
    value, slope, curvature, third = derivatives(lambda r: smooth_cutoff(r, 5.0), 5.0 - 1e-9)
    assert abs(value) < 1e-20
    assert abs(slope) < 1e-15
    assert abs(curvature) < 1e-8
    assert third == pytest.approx(-60 / 5**3, rel=1e-6)  # the first that does not
    assert derivatives(lambda r: smooth_cutoff(r, 5.0), 0.0)[:3] == [1.0, 0.0, 0.0]
    assert derivatives(lambda r: smooth_cutoff(r, 5.0), 6.0) == [0.0] * 4


def test_cutoff_is_the_polynomial_without_its_cancellation():
    u = torch.linspace(0, 1, 50, dtype=F64)
    written_out = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
    torch.testing.assert_close(smooth_cutoff(3 * u, 3.0), written_out, rtol=0, atol=1e-14)
    near = torch.tensor([1 - 1e-3])
    torch.testing.assert_close(smooth_cutoff(near, 1.0).item(), 10e-9, rtol=3e-3, atol=0)


def test_logarithm_of_the_cutoff_has_no_nan_at_its_end():
    r = torch.tensor([0.0, 2.0, 4.999, 5.0, 7.0], requires_grad=True)
    log = log_smooth_cutoff(r, 5.0)
    torch.testing.assert_close(log[:3].exp(), smooth_cutoff(r, 5.0)[:3], rtol=1e-3, atol=1e-12)
    assert log[3:].tolist() == [-math.inf, -math.inf]
    (gradient,) = torch.autograd.grad(log.exp().sum(), r, create_graph=True)
    (truth,) = torch.autograd.grad(smooth_cutoff(r, 5.0).sum(), r)
    torch.testing.assert_close(gradient, truth, rtol=0, atol=1e-6)
    (second,) = torch.autograd.grad(gradient.sum(), r)
    assert second.isfinite().all()


def test_basis_is_gaussians_with_centres_under_the_cutoff():
    basis = RadialBasis(cutoff=6.0, num_basis=4)
    r = torch.tensor([0.3, 2.0, 5.5], dtype=F64)
    centres = torch.tensor([0.0, 2.0, 4.0, 6.0], dtype=F64)
    gaussians = (-((r[:, None] - centres) ** 2) / (2 * 2.0**2)).exp()
    torch.testing.assert_close(basis(r, windowed=False), gaussians)
    torch.testing.assert_close(basis(r), gaussians * smooth_cutoff(r, 6.0)[:, None])
    assert basis(r.bfloat16()).dtype == torch.float32


def test_types_transform_the_distance_and_not_the_cutoff():
    basis = RadialBasis(6.0, 8, pair_types=True, generator=seeded())
    r = torch.rand(5, generator=seeded()) * 6
    z_i, z_j = torch.tensor([1, 8, 29, 1, 118]), torch.tensor([8, 1, 29, 78, 1])
    types = basis.pair_types
    scale = 1 + (types.scale_receiver[z_i] * types.scale_sender[z_j]).sum(-1)
    shift = (types.shift_receiver[z_i] * types.shift_sender[z_j]).sum(-1)
    plain = RadialBasis(6.0, 8)
    expected = plain(scale * r + shift, windowed=False) * smooth_cutoff(r, 6.0)[:, None]
    torch.testing.assert_close(basis(r, z_i, z_j), expected)
    with pytest.raises(ValueError, match="atomic_numbers"):
        basis(r)


def test_types_start_near_the_distance_itself_differ_by_order_and_stay_small():
    types = PairTypes(generator=seeded())
    r, i, j = torch.full((1,), 3.0), torch.tensor([8]), torch.tensor([29])
    assert abs(types(r, i, j) - 3.0) < 0.2
    assert types(r, i, j) != types(r, j, i)
    assert sum(p.numel() for p in types.parameters()) < 2000
    types(r, i, j).sum().backward()
    assert all((p.grad != 0).any() for p in types.parameters())
    again = PairTypes(generator=seeded())
    assert torch.equal(types.shift_sender, again.shift_sender)


@pytest.mark.parametrize(
    "settings", [{"cutoff": 0.0}, {"cutoff": -1.0}, {"cutoff": math.inf}, {"num_basis": 1}]
)
def test_settings_without_sense_are_refused(settings):
    with pytest.raises(ValueError, match="need 0 < cutoff < ∞ and num_basis ≥ 2"):
        RadialBasis(**settings)
