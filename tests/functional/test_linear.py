import pytest
import torch
from torch.autograd import forward_ad

from flt_mol.functional.causal import causal_log_attention
from flt_mol.functional.feature_maps import stabilised_features
from flt_mol.functional.groups import group_budget
from flt_mol.functional.linear import (
    linear_attention,
    linear_log_attention,
    linear_sums,
    normalised,
)
from helpers.kernels import kernel_attention

H, M, V = 3, 6, 4
# First queries and first keys of each system; None where keys are the same rows.
CASES = {
    "one": ([0, 7], None),
    "ragged": ([0, 1, 4, 9], None),
    "empty": ([0, 0, 5, 5, 6, 6], None),
    "two sets": ([0, 3, 7], [0, 2, 4]),
    "no keys": ([0, 3, 5, 9], [0, 4, 4, 6]),
    "no queries": ([0, 3, 3, 4], [0, 1, 3, 8]),
    "no keys at all": ([0, 2, 4], [0, 0, 0]),
    "no rows": ([0, 0], None),
}


def draw(case, dtype=torch.float64, seed=0):
    ptr, key_ptr = (None if x is None else torch.tensor(x) for x in CASES[case])
    keys = ptr if key_ptr is None else key_ptr
    generator = torch.Generator().manual_seed(seed)

    def make(f, rows, width):
        return f(int(rows[-1]), H, width, generator=generator, dtype=dtype).requires_grad_()

    inputs = make(torch.rand, ptr, M), make(torch.rand, keys, M), make(torch.randn, keys, V)
    return inputs, ptr, key_ptr


def agree(found, expected, tolerance):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_values_and_gradients_are_the_kernel_matrix_ones(case, dtype, tolerance):
    inputs, ptr, key_ptr = draw(case, dtype)
    out = linear_attention(*inputs, ptr, key_ptr)
    expected = kernel_attention(*inputs, ptr, key_ptr=key_ptr)
    keys = ptr if key_ptr is None else key_ptr
    seen = keys.diff().repeat_interleave(ptr.diff()) > 0
    assert out.dtype == dtype
    assert (out[~seen] == 0).all()
    agree([out], [expected], tolerance)
    seed = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, seed)
    agree(found, torch.autograd.grad(expected[seen], inputs, seed[seen]), tolerance)


@pytest.mark.parametrize("case", ["ragged", "no keys"])
def test_second_derivatives(case):
    inputs, ptr, key_ptr = draw(case)
    assert torch.autograd.gradgradcheck(
        lambda *x: linear_attention(*x, ptr, key_ptr), inputs, fast_mode=True
    )


@pytest.mark.parametrize("budget", [1, 40, 60, 10**6])
@pytest.mark.parametrize("case", ["ragged", "empty", "two sets", "no keys"])
@pytest.mark.parametrize("run", [linear_attention, linear_log_attention, linear_sums])
def test_groups_of_any_size_give_the_same(budget, case, run):
    inputs, ptr, key_ptr = draw(case)
    expected = run(*inputs, ptr, key_ptr)
    seed = torch.randn_like(expected)
    with group_budget(budget):
        out = run(*inputs, ptr, key_ptr)
        found = torch.autograd.grad(out, inputs, seed)
    agree([out], [expected], 1e-12)
    agree(found, torch.autograd.grad(expected, inputs, seed), 1e-12)
    if run is linear_log_attention:
        q, k, v = inputs
        agree([out], [linear_attention(q.exp(), k.exp(), v, ptr, key_ptr)], 1e-12)


def test_logits_of_minus_infinity_are_features_of_nothing():
    inputs, ptr, _ = draw("ragged")
    with torch.no_grad():
        q, k, v = inputs
        k[0], k[2, :, 1], k[4:, :, 2], q[5, :, 3], q[6] = [-torch.inf] * 5
    out = linear_log_attention(*inputs, ptr)
    features = [x.detach().exp().requires_grad_() for x in (q, k)]
    expected = linear_attention(*features, v, ptr)
    assert (out[0] == 0).all()
    assert (out[6] == 0).all()
    agree([out, causal_log_attention(*inputs, ptr)[0]], [expected, out[0]], 1e-12)
    true = torch.autograd.grad(expected.sum(), features)
    for create_graph in (False, True):
        found = torch.autograd.grad(out.sum(), inputs, retain_graph=True, create_graph=create_graph)
        agree(found[:2], [x * y for x, y in zip(true, features, strict=True)], 1e-12)
    causal = torch.autograd.grad(causal_log_attention(*inputs, ptr).sum(), inputs)
    assert all(x.isfinite().all() for x in (*causal, *found))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_log_features_of_any_size_give_the_softmax_of_their_sums(scale):
    inputs, ptr, _ = draw("ragged", torch.float32)
    q, k, v = (x.detach() * s for x, s in zip(inputs, (scale, scale, 1.0), strict=True))
    out = linear_attention(*stabilised_features(q, k, ptr), v, ptr)
    logits = (q.double()[:, None] + k.double()).logsumexp(-1).permute(2, 0, 1)
    system = torch.bucketize(torch.arange(9), ptr[1:], right=True)
    weights = logits.masked_fill(system[:, None] != system, -torch.inf).softmax(-1)
    expected = torch.einsum("hij,jhv->ihv", weights, v.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6 * max(1, scale / 10))


def test_gradients_through_the_stabiliser_are_those_of_attention():
    inputs, ptr, key_ptr = draw("two sets")

    def run(q, k, v):
        return linear_attention(*stabilised_features(q, k, ptr, key_ptr), v, ptr, key_ptr)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    q, k, v = inputs
    plain = linear_attention(q.exp(), k.exp(), v, ptr, key_ptr)
    agree([run(*inputs)], [plain], 1e-12)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_other_systems_leave_no_trace(poison):
    inputs, ptr, _ = draw("ragged", torch.float32)
    rows = slice(1, 4)
    alone = [x.detach()[rows] for x in inputs]
    dirty = [torch.full_like(x.detach(), poison) for x in inputs]
    for x, own in zip(dirty, alone, strict=True):
        x[rows] = own
    one = torch.tensor([0, 3])
    q, k = stabilised_features(*dirty[:2], ptr)
    own_q, own_k = stabilised_features(*alone[:2], one)
    assert torch.equal(q[rows], own_q)
    assert torch.equal(k[rows], own_k)
    agree([linear_attention(*dirty, ptr)[rows]], [linear_attention(*alone, one)], 1e-6)


@pytest.mark.parametrize("padding", [0.0, float("nan")])
def test_rows_beyond_the_last_system_are_padding(padding):
    # As compiled graphs have them; public functions refuse such a ptr in eager mode.
    q, v = (torch.rand(H, 5, n) for n in (M, V))
    q[:, 3:], v[:, 3:] = padding, padding
    inputs, ptr = [x.requires_grad_() for x in (q, q * 2, v)], torch.tensor([0, 2, 3])
    for mode in ("features", "log", "sums"):
        out = torch.ops.flt_mol.linear_attention(*inputs, ptr, ptr, mode)
        assert out[:, :3].isfinite().all()
        assert (out[:, 3:] == 0).all()
        seed = torch.full_like(out, padding)
        seed[:, :3] = 1.0
        for gradient in torch.autograd.grad(out, inputs, seed):
            assert gradient[:, :3].isfinite().all()
            assert (gradient[:, 3:] == 0).all()


def test_sums_are_numerator_and_denominator():
    (q, k, v), ptr, _ = draw("one")
    weights = torch.einsum("ihm,jhm->hij", q, k)
    sums = linear_sums(q, k, v, ptr)
    agree([sums[..., :-1]], [torch.einsum("hij,jhv->ihv", weights, v)], 1e-12)
    agree([sums[..., -1]], [weights.sum(-1).T], 1e-12)


def test_the_denominator_alone_is_clamped():
    # Features of 1e-12 would vanish beside any eps; the weights stay 1 : 3.
    q, k = torch.full((2, 1, 1), 1e-12), torch.tensor([1e-12, 3e-12]).reshape(2, 1, 1)
    out = linear_attention(q, k, torch.tensor([0.0, 1.0]).reshape(2, 1, 1), torch.tensor([0, 2]))
    torch.testing.assert_close(out.flatten(), torch.tensor([0.75, 0.75]))
    sums = torch.tensor([[0.0, 0.0], [1e-40, 1e-40]], requires_grad=True)
    (gradient,) = torch.autograd.grad(normalised(sums).sum(), sums)
    assert gradient[0].isfinite().all()


def test_precision_is_at_least_float32_whatever_autocast_says():
    inputs, ptr, _ = draw("ragged", torch.float32)
    plain = linear_attention(*inputs, ptr)
    truth = torch.autograd.grad(plain.sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_attention(*inputs, ptr)
        assert torch.equal(cast, plain)
        assert all(map(torch.equal, torch.autograd.grad(cast.sum(), inputs), truth))
    ones = torch.ones(3000, 1, 2, dtype=torch.bfloat16)  # 1 + 1 + … in bfloat16 stops at 256
    out = linear_sums(ones, ones, ones[..., :1], torch.tensor([0, 3000]))
    assert out.dtype == torch.float32
    assert (out == 6000).all()


def test_nothing_of_size_rows_times_features_times_channels_is_kept():
    kept = []
    inputs = [torch.rand(64, 2, n, requires_grad=True) for n in (32, 32, 16)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, id):
        linear_attention(*inputs, torch.tensor([0, 64]))
    assert 0 < max(kept) <= 64 * 2 * 32


def test_forward_mode_is_refused_instead_of_wrong():
    (q, k, v), ptr, _ = draw("one")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            linear_attention(dual, k, v, ptr)


@pytest.mark.parametrize(
    ("ptr", "key_ptr"), [([0, 6], None), ([0, 7], [0, 4]), ([0, 7], [0, 2, 7])], ids=str
)
def test_offsets_that_do_not_fit_are_refused(ptr, key_ptr):
    key_ptr = None if key_ptr is None else torch.tensor(key_ptr)
    inputs, _, _ = draw("one")
    with pytest.raises(ValueError, match="ptr"):
        linear_attention(*inputs, torch.tensor(ptr), key_ptr)
