"""Random features. Statistical tests use fixed seeds and bounds of 5 standard errors: were the
seeds resampled, one comparison in 1.7 million would fail by chance."""

import math
from itertools import pairwise

import pytest
import torch

from flt_mol.functional.feature_maps import (
    orthogonal_projection,
    softmax_log_features,
    softplus_log_features,
    stabilised_features,
)
from flt_mol.functional.fourier import PositionFeatures, fourier_basis, position_features
from flt_mol.functional.linear import linear_attention, linear_sums
from helpers.kernels import kernel_attention

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def opposite_log_features(x, w, at=None, w_at=None, *, key=False):
    """Those of w, then those of −w."""
    both = [None if y is None else torch.cat([y, -y], 1) for y in (w, w_at)]
    return softmax_log_features(x, both[0], at, both[1], key=key)


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


def test_rows_are_standard_normal():
    # Moments of one entry over draws; without the sign fix QR gives directions with a mean,
    # without the lengths ‖w‖² is no chi-square variable (variance 2·dim).
    generator, dim, count = seeded(), 4, 4000
    w = torch.stack(
        [orthogonal_projection(dim, dim, generator=generator) for _ in range(count)]
    ).double()
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


@pytest.mark.parametrize("log_features", [softmax_log_features, opposite_log_features])
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("with_positions", [False, True])
def test_features_are_unbiased(log_features, orthogonal, with_positions):
    # Two rows, one head; K independent projections of M rows, each giving one estimate.
    generator, dim, frequencies, count = seeded(1), 4, 2, 20_000
    q, k = torch.randn(2, 1, 1, dim, generator=generator, dtype=F64)
    positions = torch.randn(2, 1, 3, generator=generator, dtype=F64)
    xi = 0.2 * torch.randn(frequencies, 3, generator=generator, dtype=F64)
    ratio = torch.tensor([[0.5, -0.3]], dtype=F64)
    width = dim + (2 * frequencies if with_positions else 0)
    draw = orthogonal_projection if orthogonal else torch.randn
    w = torch.cat([draw(width, width, generator=generator) for _ in range(count)]).double()[None]
    expected = (q * k).sum() / math.sqrt(dim)
    at, w_at, norms = [None, None], None, 0.0
    if with_positions:
        at, w_at = [position_features(fourier_basis(r, xi), ratio) for r in positions], w[..., dim:]
        norms = at[0].query.square().sum() + at[1].key.square().sum()
        expected = expected + (at[0].query * at[1].key).sum()
    # Norms of positions are the constant attention drops.
    log_q = log_features(q, w[..., :dim], at[0], w_at) - norms / 2
    log_k = log_features(k, w[..., :dim], at[1], w_at, key=True)
    # Features w come before features −w of the same draws.
    estimates = (log_q + log_k).exp().view(-1, count, width).mean((0, 2))
    error = estimates.std() / math.sqrt(count)
    assert error < 0.02 * expected.exp()  # so a scale of 1/D or 1, or a lost norm, is seen
    assert (q / dim**0.25).square().sum() > 0.3
    assert (estimates.mean() - expected.exp()).abs() < 5 * error


def test_opposite_pairs_vary_less_than_as_many_independent_features():
    # Relative variance of a pair's mean, by Lemma 2 of the paper on Performers: half of
    # (e^s − 1)(1 − e^−s) for s = ‖q̂ + k̂‖², where two independent features have half of e^s − 1.
    generator, dim, count = seeded(5), 4, 400_000
    q, k = 0.7 * torch.randn(2, 1, 1, dim, generator=generator, dtype=F64)
    w = torch.randn(1, count, dim, generator=generator, dtype=F64)
    pairs = opposite_log_features(q, w) + opposite_log_features(k, w)
    estimates = pairs.exp().view(2, count).mean(0) / ((q * k).sum() / math.sqrt(dim)).exp()
    size = ((q + k) / dim**0.25).square().sum()
    assert size > 0.5
    expected = 0.5 * size.expm1() * -(-size).expm1()
    squares = (estimates - 1).square()
    assert (squares.mean() - expected).abs() < 5 * squares.std() / math.sqrt(count)
    assert expected < 0.8 * 0.5 * size.expm1()


def positions_alone(basis, weight, projection, turn=None):
    at = PositionFeatures(basis, weight, weight, turn)
    nothing = basis.new_zeros(len(basis), len(projection), 1)
    return softmax_log_features(
        nothing, nothing.new_zeros(*projection.shape[:2], 1), at, projection, key=True
    )


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
    for x, phi, key in ((q, at.query, False), (k, at.key, True)):
        fused = softmax_log_features(x, w_content, at, w_positions, key=key)
        dropped = phi.square().sum(-1, keepdim=True) / 2
        torch.testing.assert_close(
            fused - dropped, explicit_log_features(x, phi, w), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_projections_of_positions_are_those_of_the_features_written_out(case, per_head, turned):
    _, _, _, basis, ratio, w = case
    generator, (heads, frequencies) = seeded(4), ratio.shape
    projection = w[..., : 2 * frequencies]
    # Halves need not be equal here, though ρ = b + ic gives equal ones.
    weight, turn = torch.randn(2, heads, 2 * frequencies, generator=generator, dtype=F64)
    if per_head:
        positions = torch.randn(len(basis), 3, generator=generator, dtype=F64)
        xi = 0.2 * torch.randn(heads, frequencies, 3, generator=generator, dtype=F64)
        basis = torch.stack([fourier_basis(positions, head) for head in xi], dim=1)
    each = basis if per_head else basis[:, None].expand(-1, heads, -1)
    cosines, sines = each.chunk(2, -1)
    features = each * weight
    if turned:
        features = features + torch.cat([sines, -cosines], -1) * turn
    found = positions_alone(basis, weight, projection, turn if turned else None)
    expected = torch.einsum("nhf,hmf->nhm", features, projection)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_turn_is_the_phase_of_a_complex_ratio(case):
    # With W = Φ_i as its one row W·Ψ_j is (1/R) Σ_t Re[ρ_t e^{2πi ξ_t·(r_i − r_j)}].
    _, _, _, _, ratio, _ = case
    heads, frequencies = ratio.shape
    generator = seeded(6)
    positions = 3 * torch.randn(2, 3, generator=generator, dtype=F64)
    xi = 0.2 * torch.randn(frequencies, 3, generator=generator, dtype=F64)
    rho = torch.complex(ratio, torch.randn(ratio.shape, generator=generator, dtype=F64))
    basis = fourier_basis(positions, xi)
    scale = frequencies**-0.5
    weight, turn = (scale * torch.cat([x, x], -1) for x in (rho.real, rho.imag))
    query = (scale * basis[0]).expand(heads, 1, -1)
    found = positions_alone(basis[1:], weight, query, turn)[0, :, 0]
    waves = torch.exp(2j * math.pi * (xi @ (positions[0] - positions[1])))
    torch.testing.assert_close(found, (rho * waves).real.mean(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("split", ["one_sided", "symmetric"])
def test_dropping_what_is_constant_changes_no_output(case, split):
    q, k, v, basis, ratio, w = case
    at, ptr = position_features(basis, ratio, split), torch.tensor([0, 4, 9])
    whole = [explicit_log_features(q, at.query, w), explicit_log_features(k, at.key, w)]
    fused = [
        softmax_log_features(x, w[..., 10:], at, w[..., :10], key=key, subtract_norm=key)
        for x, key in ((q, False), (k, True))
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


def test_softplus_features_are_those_of_the_concatenation(case):
    q, k, _, basis, ratio, w = case
    at = position_features(basis, ratio)
    bias = torch.randn(w.shape[:2], generator=seeded(), dtype=F64)
    for x, phi, key in ((q, at.query, False), (k, at.key, True)):
        joined = torch.cat([phi.expand(-1, 3, -1), x * x.shape[-1] ** -0.25], dim=-1)
        logits = torch.einsum("nhd,hmd->nhm", joined, w)
        given = x, w[..., 10:], at, w[..., :10]
        softplus = softplus_log_features(
            softmax_log_features(*given, key=key, subtract_norm=False) + bias
        ).exp()
        expected = (logits + bias).exp().log1p()
        torch.testing.assert_close(softplus, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (F64, 1e-15)])
def test_the_logarithm_of_softplus_at_every_size(dtype, tolerance):
    z = torch.tensor([-1e4, -104.0, -40.0, -18.1, -17.9, -2.0, 0.0, 3.0, 20.0, 39.9, 40.1, 1e4])
    z = z.to(dtype).requires_grad_()
    found = softplus_log_features(z)
    truth = [
        math.log(math.log1p(math.exp(x))) if -700 < x < 700 else x if x < 0 else math.log(x)
        for x in z.tolist()
    ]
    expected = torch.tensor(truth, dtype=dtype)
    torch.testing.assert_close(found.flatten(), expected, rtol=tolerance, atol=2 * tolerance)
    (slope,) = torch.autograd.grad(found.sum(), z)
    # σ(z)/softplus(z), which is 1 − e^z/2 for small e^z.
    wide = z.detach().double()
    true = torch.where(
        wide < -30, 1.0, wide.clamp(min=-30).sigmoid() / wide.clamp(-30, 700).exp().log1p()
    )
    true = torch.where(wide > 700, 1 / wide, true)
    torch.testing.assert_close(slope.double(), true, rtol=20 * tolerance, atol=0)


def log_space_attention(log_q, log_k, v, ptr):
    """The truth for logits of any size: everything stays a logarithm until the softmax."""
    if ptr is None:  # one system, keys of another set
        pairs = torch.logsumexp(log_q[:, None] + log_k[None], dim=-1)  # (i, j, H)
        return torch.einsum("ijh,jhd->ihd", pairs.softmax(1), v)
    parts = []
    for a, b in pairwise(ptr.tolist()):
        parts.append(log_space_attention(log_q[a:b], log_k[a:b], v[a:b], None))
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


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_keys_of_another_set(size):
    ptr, key_ptr = torch.tensor([0, 3, 5, 5, 9]), torch.tensor([0, 4, 4, 6, 7])
    generator = seeded(7)
    log_q = size * torch.randn(9, 2, 6, generator=generator, dtype=F64)
    log_k = size * torch.randn(7, 2, 6, generator=generator, dtype=F64)
    v = torch.randn(7, 2, 3, generator=generator, dtype=F64)
    inputs = [x.requires_grad_() for x in (log_q, log_k, v)]
    features = stabilised_features(log_q, log_k, ptr, key_ptr)
    assert all(x.isfinite().all() for x in features)
    has_keys = torch.tensor([True] * 3 + [False] * 2 + [True] * 4)
    sums = linear_sums(*features, v, ptr, key_ptr)
    assert (sums[has_keys][..., -1] >= 1 - 1e-12).all()
    out = linear_attention(*features, v, ptr, key_ptr)
    assert (out[~has_keys] == 0).all()
    seed = torch.randn(out.shape, generator=generator, dtype=F64)
    gradients = torch.autograd.grad(out, inputs, seed)
    parts = [(slice(0, 3), slice(0, 4)), (slice(5, 9), slice(6, 7))]
    truth = [log_space_attention(log_q[a], log_k[b], v[b], None) for a, b in parts]
    torch.testing.assert_close(out[has_keys], torch.cat(truth), rtol=0, atol=1e-10)
    true = torch.autograd.grad(torch.cat(truth), inputs, seed[has_keys])
    for gradient, expected in zip(gradients, true, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9)


def test_attention_on_stabilised_features_can_be_differentiated_twice():
    ptr, generator = torch.tensor([0, 1, 1, 3]), seeded(8)
    inputs = [
        torch.randn(3, 2, n, generator=generator, dtype=F64).requires_grad_() for n in (3, 3, 1)
    ]

    def attend(log_q, log_k, value):
        return linear_attention(*stabilised_features(log_q, log_k, ptr), value, ptr)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)
    plain = kernel_attention(inputs[0].exp(), inputs[1].exp(), inputs[2], ptr)
    torch.testing.assert_close(attend(*inputs), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_rows_beyond_the_last_system_are_padding(poison):
    ptr, log = torch.tensor([0, 2, 5]), torch.randn(2, 7, 3, 4, generator=seeded(), dtype=F64)
    clean = log[:, :5].clone().requires_grad_()
    log[:, 5:] = poison
    log.requires_grad_()
    expected, found = stabilised_features(*clean, ptr), stabilised_features(*log, ptr)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[:5], y)
        assert (x[5:] == 0).all()
    (gradient,) = torch.autograd.grad(sum(x.square().sum() for x in found), log)
    (true,) = torch.autograd.grad(sum(x.square().sum() for x in expected), clean)
    assert torch.equal(gradient[:, :5], true)
    assert (gradient[:, 5:] == 0).all()


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
        return softmax_log_features(k, w[..., 10:], at, w[..., :10], key=True)

    expected = features()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(features(), expected)
    assert softmax_log_features(q.bfloat16(), w[..., 10:].bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(("dtype", "normal"), [(torch.float32, 1e-38), (torch.float64, 1e-300)])
def test_features_are_no_denormal_numbers(dtype, normal):
    """Those make exponentials and products many times slower; e⁻⁹⁵ is one in float32."""
    logits = torch.linspace(-1000, 0, 60, dtype=dtype).reshape(10, 2, 3)
    ptr = torch.tensor([0, 10])
    for features in stabilised_features(logits, logits, ptr):
        assert ((features > normal) | (features == 0)).all()
        assert features.max() == 1
    bounded = logits.clamp(min=-50)
    queries, keys = stabilised_features(bounded, bounded, ptr)
    expected = (bounded - bounded.amax(0)).exp()
    torch.testing.assert_close(keys, expected, rtol=1e-5, atol=0)
    largest = (bounded + bounded.amax(0)).amax(-1, keepdim=True)
    torch.testing.assert_close(queries, (bounded + bounded.amax(0) - largest).exp())
