"""Random features. Statistical tests use fixed seeds and bounds of 5 standard errors: were the
seeds drawn anew, one comparison in 1.7 million would fail by chance."""

import math
from itertools import pairwise

import pytest
import torch

from flt_mol.functional import (
    fourier_basis,
    gaussian_projection,
    linear_attention,
    orthogonal_projection,
    position_features,
    project_positions,
    softmax_log_features,
    stabilised_features,
)

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("num_features", [3, 8, 20])
def test_orthogonal_rows_within_blocks(num_features):
    w = orthogonal_projection(num_features, 8, generator=seeded())
    assert w.shape == (num_features, 8)
    assert w.dtype == torch.float32
    gram = w @ w.T
    for start in range(0, num_features, 8):
        block = gram[start : start + 8, start : start + 8]
        lengths = block.diagonal().sqrt()
        cosines = block / lengths[:, None] / lengths
        torch.testing.assert_close(cosines, torch.eye(len(block)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("draw", [orthogonal_projection, gaussian_projection])
def test_rows_are_standard_normal(draw):
    # Moments of one entry over draws; without the sign fix QR gives directions with a mean,
    # without the lengths ‖w‖² is no chi-square variable (variance 2·dim).
    generator, dim, count = seeded(), 4, 4000
    w = torch.stack([draw(dim, dim, generator=generator) for _ in range(count)]).double()
    mean, square = w.mean(0), w.square().mean(0)
    assert (mean.abs() < 5 / math.sqrt(count)).all()
    assert ((square - 1).abs() < 5 * math.sqrt(2 / count)).all()
    length = w.square().sum(-1)
    # Var of a sample variance of χ²_4: (μ4 − σ⁴)/n with μ4 = 12·4·(4 + 4) and σ⁴ = 64.
    spread = length.var(0)
    assert ((spread - 2 * dim).abs() < 5 * math.sqrt((384 - 64) / count)).all()


def test_the_generator_decides_and_the_default_dtype_does_not():
    first = orthogonal_projection(6, 4, generator=seeded(3))
    torch.set_default_dtype(F64)
    try:
        again = orthogonal_projection(6, 4, generator=seeded(3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first, again)
    assert not torch.equal(first, orthogonal_projection(6, 4, generator=seeded(4)))


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("with_positions", [False, True])
def test_features_are_unbiased(orthogonal, with_positions):
    # Two rows, one head; K independent projections of M rows, each giving one estimate.
    generator, dim, frequencies, count = seeded(1), 4, 2, 20_000
    q, k = torch.randn(2, 1, 1, dim, generator=generator, dtype=F64)
    positions = torch.randn(2, 1, 3, generator=generator, dtype=F64)
    xi = 0.2 * torch.randn(frequencies, 3, generator=generator, dtype=F64)
    ratio = torch.tensor([[0.5, -0.3]], dtype=F64)
    width = dim + (2 * frequencies if with_positions else 0)
    draw = orthogonal_projection if orthogonal else gaussian_projection
    w = torch.cat([draw(width, width, generator=generator) for _ in range(count)]).double()[None]
    expected = (q * k).sum() / math.sqrt(dim)
    logits = [None, None]
    if with_positions:
        at = [position_features(fourier_basis(r, xi), ratio) for r in positions]
        logits = [
            project_positions(at[0].basis, at[0].query_weight, w[..., dim:]),
            project_positions(at[1].basis, at[1].key_weight, w[..., dim:]),
        ]
        norms = at[0].query.square().sum() + at[1].key.square().sum()
        logits[0] = logits[0] - norms / 2  # the constant that attention drops
        expected = expected + (at[0].query * at[1].key).sum()
    log_q = softmax_log_features(q, w[..., :dim], logits[0])
    log_k = softmax_log_features(k, w[..., :dim], logits[1])
    estimates = (log_q + log_k).exp().view(count, width).mean(-1)
    error = estimates.std() / math.sqrt(count)
    assert error < 0.02 * expected.exp()  # so a scale of 1/D or 1, or a lost norm, is seen
    assert (q / dim**0.25).square().sum() > 0.3
    assert (estimates.mean() - expected.exp()).abs() < 5 * error


def explicit_log_features(x, at, w):
    """log φ of the concatenation [Φ, x̂], by the definition, with nothing dropped."""
    heads = x.shape[1]
    joined = torch.cat([at.expand(-1, heads, -1), x * x.shape[-1] ** -0.25], dim=-1)
    return torch.einsum("nhd,hmd->nhm", joined, w) - joined.square().sum(-1, keepdim=True) / 2


@pytest.fixture
def case():
    generator, n, h, d, r, m = seeded(2), 9, 3, 4, 5, 12
    q, k, v = torch.randn(3, n, h, d, generator=generator, dtype=F64)
    basis = fourier_basis(
        3 * torch.randn(n, 3, generator=generator, dtype=F64),
        0.2 * torch.randn(r, 3, generator=generator, dtype=F64),
    )
    ratio = torch.randn(h, r, generator=generator, dtype=F64)
    w = torch.randn(h, m, 2 * r + d, generator=generator, dtype=F64)
    return q, k, v, basis, ratio, w


@pytest.mark.parametrize("split", ["one_sided", "symmetric"])
def test_added_projections_are_the_projection_of_the_concatenation(case, split):
    q, k, _, basis, ratio, w = case
    at = position_features(basis, ratio, split)
    w_positions, w_content = w[..., :10], w[..., 10:]
    for x, phi, weight in ((q, at.query, at.query_weight), (k, at.key, at.key_weight)):
        fused = softmax_log_features(x, w_content, project_positions(basis, weight, w_positions))
        dropped = phi.square().sum(-1, keepdim=True) / 2
        torch.testing.assert_close(
            fused - dropped, explicit_log_features(x, phi, w), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("split", ["one_sided", "symmetric"])
def test_dropping_what_is_constant_changes_no_output(case, split):
    q, k, v, basis, ratio, w = case
    at, ptr = position_features(basis, ratio, split), torch.tensor([0, 4, 9])
    whole = [explicit_log_features(q, at.query, w), explicit_log_features(k, at.key, w)]
    fused = [
        softmax_log_features(
            x, w[..., 10:], project_positions(basis, weight, w[..., :10]), subtract_norm=norm
        )
        for x, weight, norm in ((q, at.query_weight, False), (k, at.key_weight, True))
    ]
    torch.testing.assert_close(
        linear_attention(*stabilised_features(*fused, ptr), v, ptr),
        linear_attention(*(x.exp() for x in whole), v, ptr),
        rtol=0,
        atol=1e-11,
    )


def test_the_norm_of_keys_is_not_constant(case):
    q, k, v, _, _, w = case
    ptr, w = torch.tensor([0, 9]), w[..., 10:]
    log_q = softmax_log_features(q, w)
    outputs = [
        linear_attention(
            *stabilised_features(log_q, softmax_log_features(k, w, subtract_norm=norm), ptr),
            v,
            ptr,
        )
        for norm in (True, False)
    ]
    assert (outputs[0] - outputs[1]).abs().max() > 0.01


def log_space_attention(log_q, log_k, v, ptr):
    """The truth for logits of any size: everything stays a logarithm until the softmax."""
    parts = []
    for a, b in pairwise(ptr.tolist()):
        pairs = torch.logsumexp(log_q[a:b, None] + log_k[None, a:b], dim=-1)  # (i, j, H)
        parts.append(torch.einsum("ijh,jhd->ihd", pairs.softmax(1), v[a:b]))
    return torch.cat(parts)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_logits_of_any_size(size, dtype):
    generator = seeded(3)
    logits = size * torch.randn(2, 12, 2, 16, generator=generator, dtype=F64)
    v = torch.randn(12, 2, 4, generator=generator, dtype=F64)
    ptr = torch.tensor([0, 5, 5, 12])
    log_q, log_k, value = (x.to(dtype).requires_grad_() for x in (*logits, v))
    phi_q, phi_k = stabilised_features(log_q, log_k, ptr)
    normaliser = linear_sum(phi_q, phi_k, ptr)
    assert (normaliser >= 1 - 1e-6).all()
    out = linear_attention(phi_q, phi_k, value, ptr)
    truth = log_space_attention(log_q.double(), log_k.double(), value.double(), ptr)
    # float32 logits of 10⁴ are known to 1e-3 only.
    tolerance = 1e-10 if dtype == F64 else max(1e-5, 4e-7 * size)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=tolerance)
    seed = torch.randn(out.shape, generator=generator, dtype=F64)
    gradients = torch.autograd.grad(out, (log_q, log_k, value), seed.to(dtype))
    expected = torch.autograd.grad(truth, (log_q, log_k, value), seed)
    for gradient, true in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=20 * tolerance)


def linear_sum(phi_q, phi_k, ptr):
    sums = [
        phi_k[a:b].sum(0, keepdim=True).expand(b - a, -1, -1) for a, b in pairwise(ptr.tolist())
    ]
    return (phi_q * torch.cat(sums)).sum(-1)


def test_shifts_common_to_a_row_or_a_system_change_nothing(case):
    q, k, v, _, _, w = case
    ptr = torch.tensor([0, 4, 9])
    log_q, log_k = (softmax_log_features(x, w[..., 10:]) for x in (q, k))
    expected = linear_attention(*stabilised_features(log_q, log_k, ptr), v, ptr)
    rows = 300 * torch.randn(9, 3, 1, generator=seeded(), dtype=F64)
    systems = torch.tensor([400.0] * 4 + [-700.0] * 5, dtype=F64)[:, None, None]
    shifted = stabilised_features(log_q + rows, log_k + systems, ptr)
    torch.testing.assert_close(linear_attention(*shifted, v, ptr), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_stabilisers_see_their_own_system_only(poison):
    log_q, log_k = torch.randn(2, 9, 2, 6, generator=seeded())
    ptr = torch.tensor([0, 4, 9])
    expected = stabilised_features(log_q[4:], log_k[4:], torch.tensor([0, 5]))
    log_q[:4], log_k[:4] = poison, poison
    result = stabilised_features(log_q, log_k, ptr)
    for got, want in zip(result, expected, strict=True):
        assert torch.equal(got[4:], want)


def test_autocast_and_half_precision_keep_exponents_in_float32(case):
    q, k, _, basis, ratio, w = (x.float() for x in case)
    at = position_features(basis, ratio)

    def features():
        logits = project_positions(at.basis, at.key_weight, w[..., :10])
        return softmax_log_features(k, w[..., 10:], logits)

    expected = features()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(features(), expected)
    assert softmax_log_features(q.bfloat16(), w[..., 10:].bfloat16()).dtype == torch.float32
