import pytest
import torch
from periodic import F64, seeded

from flt_mol.nn.radial import PairTypes, RadialBasis, log_smooth_cutoff, smooth_cutoff


def test_the_cutoff_is_the_polynomial_and_smooth_at_both_ends():
    r = torch.linspace(0, 6, 61, dtype=F64, requires_grad=True)
    u = r.detach() / 6
    w = smooth_cutoff(r, 6.0)
    torch.testing.assert_close(w, 1 - 10 * u**3 + 15 * u**4 - 6 * u**5)
    (slope,) = torch.autograd.grad(w.sum(), r, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), r)
    for derivative in (slope, curvature):
        assert derivative[0].abs() < 1e-12
        assert derivative[-1].abs() < 1e-12
    far = torch.tensor([6.0, 7.0, 100.0], dtype=F64, requires_grad=True)
    assert not smooth_cutoff(far, 6.0).any()
    log = log_smooth_cutoff(torch.cat([r, far]), 6.0)
    torch.testing.assert_close(log.exp()[:61], w)
    (gradient,) = torch.autograd.grad(log[log.isfinite()].sum(), far)
    assert not gradient.any()


def test_gaussians_with_centres_under_the_cutoff():
    basis, r = RadialBasis(5.0, 6), torch.tensor([0.3, 2.0, 4.9, 5.0], dtype=F64)
    for t in range(6):
        expected = torch.exp(-((r - t) ** 2) / 2)
        torch.testing.assert_close(basis(r)[:, t], expected * smooth_cutoff(r, 5.0))
    assert not list(basis.parameters())
    many = RadialBasis(5.0, 200)(torch.tensor([0.1, 4.9]))
    assert many.min() > torch.finfo(torch.float32).tiny  # denormal numbers are slow


def test_distances_per_ordered_pair_of_elements():
    types = PairTypes(seeded()).double()
    r, i, j = torch.tensor([1.0, 2.0], dtype=F64), torch.tensor([8, 29]), torch.tensor([29, 8])
    out = types(r, i, j)
    for p in range(2):
        a = 1 + types.scale_receiver[i[p]] @ types.scale_sender[j[p]]
        b = types.shift_receiver[i[p]] @ types.shift_sender[j[p]]
        torch.testing.assert_close(out[p], a * r[p] + b)
    assert not torch.allclose(types(r[:1], i[:1], j[:1]), types(r[:1], j[:1], i[:1]))
    basis = RadialBasis(5.0, 4, pair_types=True, generator=seeded()).double()
    moved = basis.pair_types(r, i, j)
    window = smooth_cutoff(r, 5.0)[:, None]
    torch.testing.assert_close(
        basis(r, i, j),
        window * torch.exp(-0.5 * (moved[:, None] * 3 / 5 - torch.arange(4)) ** 2),
    )


def test_settings_that_do_not_fit():
    for settings in ({"cutoff": 0.0}, {"cutoff": float("nan")}, {"num_basis": 1}):
        with pytest.raises(ValueError, match="cutoff"):
            RadialBasis(**settings)
    with pytest.raises(ValueError, match="atomic_numbers"):
        RadialBasis(5.0, 4, pair_types=True)(torch.ones(2))
