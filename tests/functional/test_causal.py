import pytest
import torch
from flt_mol.functional._blocks import blocks_of

from flt_mol.functional.causal import causal_attention, causal_log_attention, causal_sums

H, M, V = 2, 5, 3
SIZES = {
    **{str(n): [n] for n in (0, 1, 15, 16, 17, 64, 100, 128, 200)},
    "ragged": [3, 0, 70, 0, 0, 131, 1, 5],
    "short": [1, 2, 0, 3, 4, 5, 1],
    "equal": [64, 64, 64],
}
ATTENTIONS = [causal_log_attention, causal_attention]


def offsets(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def draw(rows, dtype=torch.float64, seed=0, scale=1.0):
    """Logits q and k, and values; leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width):
        return torch.randn(rows, H, width, generator=generator, dtype=torch.float64)

    tensors = (scale * normal(M), scale * normal(M), normal(V))
    return [x.to(dtype).requires_grad_() for x in tensors]


def draw_for(attention, rows, dtype=torch.float64, seed=0):
    """Logits for the one, positive features with some zeros for the other."""
    q, k, v = draw(rows, dtype, seed)
    if attention is causal_attention:
        q, k = (x.detach().relu().add(0.3 * (x > -1)).requires_grad_() for x in (q, k))
    return [q, k, v]


def log_matrix(q, k, v, ptr):
    """The definition: log A_ij by logsumexp over m, masked, normalised by a softmax."""
    outputs = [v[:0]]
    for start, stop in zip(ptr.tolist(), ptr.tolist()[1:], strict=False):
        rows = slice(start, stop)
        log_weights = torch.logsumexp(q[rows, None] + k[None, rows], dim=-1)
        future = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)[..., None]
        weights = log_weights.masked_fill(future, -torch.inf).softmax(1)
        outputs.append(torch.einsum("ijh,jhv->ihv", weights, v[rows]))
    return torch.cat(outputs)


def matrix(q, k, v, ptr):
    """The definition: A = φ(Q) φ(K)ᵀ, masked, normalised by its row sums."""
    outputs = [v[:0]]
    for start, stop in zip(ptr.tolist(), ptr.tolist()[1:], strict=False):
        rows = slice(start, stop)
        past = torch.ones(stop - start, stop - start, dtype=q.dtype).tril()[..., None]
        weights = torch.einsum("ihm,jhm->ijh", q[rows], k[rows]) * past
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
        outputs.append(torch.einsum("ijh,jhv->ihv", weights, v[rows]))
    return torch.cat(outputs)


TRUTH = {causal_log_attention: log_matrix, causal_attention: matrix}


def assert_equals_truth(attention, inputs, ptr, tolerance, rtol=0.0):
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = attention(*inputs, ptr), TRUTH[attention](*exact, ptr)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=tolerance)
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).double()
    gradients = torch.autograd.grad(out, inputs, seed.to(out.dtype))
    truth = torch.autograd.grad(expected, exact, seed, materialize_grads=True, allow_unused=True)
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient.double(), true, rtol=rtol, atol=10 * tolerance)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-6)])
def test_values_and_gradients_are_the_masked_matrix_ones(name, attention, dtype, tolerance):
    ptr = offsets(SIZES[name])
    assert_equals_truth(attention, draw_for(attention, int(ptr[-1]), dtype), ptr, tolerance)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_thousand_tokens(attention):
    assert_equals_truth(attention, draw_for(attention, 1000), offsets([1000]), 1e-11)


@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4])
def test_logits_that_rise_steeply_within_blocks(scale):
    ptr = offsets([100, 7, 0, 64])
    assert_equals_truth(causal_log_attention, draw(171, scale=scale), ptr, 1e-11, rtol=1e-9)


@pytest.mark.parametrize("rise", [20.0, 33.0, 60.0, 200.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_a_single_rise_in_some_heads_and_blocks(rise, dtype, tolerance):
    q, k, v = draw(128, dtype, scale=2.0)
    with torch.no_grad():
        k[40:, 0, 2] += rise  # one block of one head
        q[:, 0, 2] -= rise  # so that what comes before and after weighs about the same
    assert_equals_truth(causal_log_attention, [q, k, v], offsets([128]), tolerance)


@pytest.mark.parametrize("fall", [30.0, 300.0, 1e4])
def test_keys_that_fall_leave_the_weight_with_old_ones(fall):
    q, k, v = draw(150, torch.float32)
    with torch.no_grad():
        k[3:] -= fall
    assert_equals_truth(causal_log_attention, [q, k, v], offsets([150]), 2e-6)
    out = causal_log_attention(q, k, v, offsets([150]))
    only_old = causal_log_attention(q, torch.cat([k[:3], k[3:] - 1e6]), v, offsets([150]))
    torch.testing.assert_close(out[-1], only_old[-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [50.0, 1e4])
@pytest.mark.parametrize("last", [0, 1, 15, 24, 62, 63, 64, 99])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_later_rows_change_nothing_however_large(attention, last, factor):
    ptr = offsets([130])
    inputs = draw_for(attention, 130, torch.float32)
    larger = [torch.cat([x[: last + 1], factor * x[last + 1 :].flip(0)]).detach() for x in inputs]
    out, changed = attention(*inputs, ptr), attention(*larger, ptr)
    assert (out[: last + 1] - changed[: last + 1]).abs().max() < 1e-6
    assert (out[last + 1 :] - changed[last + 1 :]).abs().max() > 1.0
    assert changed.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_gradient_flows_to_later_rows(attention, scale):
    inputs = draw_for(attention, 130, torch.float32)
    large = [(scale * x).detach().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(attention(*large, offsets([130]))[:70].sin().sum(), large)
    for gradient in gradients:
        assert (gradient[70:] == 0).all()
        assert gradient[:70].abs().max() > 0


def test_tokens_fifty_times_larger_after_the_25th_through_projections():
    generator = torch.Generator().manual_seed(23)
    x = torch.randn(40, 32, generator=generator)
    y = torch.cat([x[:25], 50 * torch.randn(15, 32, generator=generator)])
    projections = torch.randn(3, 32, H * 16, generator=generator) * 0.3

    def run(tokens):
        q, k, v = ((tokens @ w).reshape(-1, H, 16) for w in projections)
        return causal_log_attention(
            q, k - k.square().sum(-1, keepdim=True) / 2, v, offsets([len(tokens)])
        )

    first, second = run(x), run(y)
    torch.testing.assert_close(first[:25], second[:25], rtol=0, atol=1e-6)
    assert second.isfinite().all()
    torch.testing.assert_close(run(x[:1]), first[:1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_row_of_a_system_is_its_value_to_the_last_bit(scale, dtype):
    ptr = offsets([70, 1, 0, 30])
    q, k, v = draw(101, dtype, scale=scale)
    v = (v * max(scale, 1.0)).detach().requires_grad_()
    out = causal_log_attention(q, k, v, ptr)
    for first in (0, 70, 71):
        assert torch.equal(out[first], v[first])
    (gradient,) = torch.autograd.grad(out[70].sum(), v)
    expected = torch.zeros_like(v)
    expected[70] = 1.0
    torch.testing.assert_close(gradient, expected)


def test_a_constant_of_a_row_or_feature_cancels():
    q, k, v = draw(90)
    ptr = offsets([90])
    shift = 1e3 * torch.randn(H, M, generator=torch.Generator().manual_seed(4)).double()
    row = 1e3 * torch.randn(90, H, 1, generator=torch.Generator().manual_seed(5)).double()
    torch.testing.assert_close(
        causal_log_attention(q + shift + row, k - shift, v, ptr),
        causal_log_attention(q, k, v, ptr),
        rtol=0,
        atol=1e-11,
    )


def test_logarithms_of_features_give_the_same_as_features():
    q, k, v = (x.detach() for x in draw_for(causal_attention, 150))
    ptr = offsets([80, 70])
    with_zeros = causal_log_attention(q.log(), k.log(), v, ptr)
    assert q.log().isinf().any()
    torch.testing.assert_close(with_zeros, causal_attention(q, k, v, ptr), rtol=0, atol=1e-11)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_rows_without_any_weight_give_zero_with_finite_gradients(attention):
    q, k, v = draw_for(attention, 80)
    with torch.no_grad():
        for x, rows in ((k, slice(0, 3)), (q, slice(40, 41))):
            x[rows] = 0.0 if attention is causal_attention else -torch.inf
    out = attention(q, k, v, offsets([80]))
    assert (out[[0, 1, 2, 40]] == 0).all()
    assert (out[3] != 0).all()
    for gradient in torch.autograd.grad(100 * out.sin().sum(), [q, k, v]):
        assert gradient.isfinite().all()
    alone = attention(q[3:40], k[3:40], v[3:40], offsets([37]))
    torch.testing.assert_close(out[3:40], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [[4, 0, 3], [9]])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_first_and_second_derivatives_of_log_attention(sizes, scale):
    ptr = offsets(sizes)
    logits = draw(int(ptr[-1]), seed=3)

    def run(q, k, v):
        ramp = scale * torch.linspace(0, 1, len(q), dtype=q.dtype)[:, None, None]
        return causal_log_attention(q - ramp, k + ramp, v, ptr)

    assert torch.autograd.gradcheck(run, logits, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, logits, fast_mode=True)


def test_first_and_second_derivatives_of_sums():
    ptr = offsets([4, 0, 6])
    q, k, v = draw(10, seed=3)
    inputs = [x.transpose(0, 1) for x in (q, k, v)]
    for reverse in (False, True):
        assert torch.autograd.gradgradcheck(
            lambda *x, reverse=reverse: causal_sums(*x, ptr, reverse=reverse),
            inputs,
            fast_mode=True,
        )


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_derivative_of_a_derivative_is_the_masked_matrix_one(attention):
    ptr = offsets([70, 20])
    _, k, v = draw_for(attention, 90)

    def penalty(run):
        # Queries are made of keys, as both are of the same tokens in a layer.
        q = 0.3 * k.square() + k
        (force,) = torch.autograd.grad(run(q, k, v, ptr).sin().sum(), k, create_graph=True)
        return torch.autograd.grad(force.square().sum(), (k, v))

    for fast, slow in zip(penalty(attention), penalty(TRUTH[attention]), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


def test_a_third_derivative():
    x = torch.linspace(-1, 1, 3, dtype=torch.float64).reshape(3, 1, 1).requires_grad_()
    value = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).reshape(3, 1, 1)
    derivative = causal_log_attention(torch.zeros_like(x), x, value, offsets([3]))[2]
    for _ in range(3):
        (derivative,) = torch.autograd.grad(derivative.sum(), x, create_graph=True)
        derivative = derivative[2]
    # out_2 = s(x_2) with s = 1/(1 + c exp(−x)), whose derivatives are polynomials in s.
    s = x.detach().flatten().softmax(0)[2]
    expected = s * (1 - s) * (1 - 6 * s + 6 * s**2)
    torch.testing.assert_close(derivative.flatten()[0].detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_batch_is_its_systems_alone(attention, dtype, tolerance):
    sizes = [33, 0, 150, 1, 20]
    inputs, ptr = draw_for(attention, sum(sizes), dtype), offsets(sizes)
    out, start = attention(*inputs, ptr), 0
    for size in sizes:
        rows = slice(start, start + size)
        alone = attention(*(x[rows] for x in inputs), offsets([size]))
        torch.testing.assert_close(out[rows], alone, rtol=0, atol=tolerance)
        start += size


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_other_systems_leave_no_trace(attention, poison):
    ptr = offsets([20, 70, 10])
    clean = draw_for(attention, 100, torch.float32)
    dirty = [x.detach().clone() for x in clean]
    for x in dirty:
        x[:20], x[90:] = poison, poison
        x.requires_grad_()
    rows = slice(20, 90)
    out, alone = attention(*dirty, ptr)[rows], attention(*(x[rows] for x in clean), offsets([70]))
    torch.testing.assert_close(out, alone, rtol=0, atol=1e-6)
    gradients = torch.autograd.grad(out.sin().sum(), dirty)
    truth = torch.autograd.grad(alone.sin().sum(), clean)
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient[rows], true[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_compiled_without_a_break_and_with_padding_behind_the_last_system(attention):
    ptr, real = offsets([5, 0, 66]), 71
    inputs = draw_for(attention, 80, torch.float32)
    with torch.no_grad():
        for x in inputs:
            x[real:] = torch.nan
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out = compiled(*inputs, ptr)
    expected = attention(*(x[:real] for x in inputs), ptr)
    assert (out[real:] == 0).all()
    torch.testing.assert_close(out[:real], expected, rtol=0, atol=1e-6)
    gradients = torch.autograd.grad(out[:real].sin().sum(), inputs)
    truth = torch.autograd.grad(expected.sin().sum(), inputs)
    for gradient, true in zip(gradients, truth, strict=True):
        assert (gradient[real:] == 0).all()
        torch.testing.assert_close(gradient[:real], true[:real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [[64], [3, 9]])
def test_operations_keep_the_rules_of_custom_operators(sizes):
    ptr = offsets(sizes)
    q, k, v = (x.detach().transpose(0, 1).contiguous() for x in draw(sum(sizes), torch.float32))
    needs = [x.requires_grad_() for x in (q, k, v)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flt_mol.causal_log_attention, (*needs, ptr), test_utils=tests)
    torch.library.opcheck(torch.ops.flt_mol.causal_sums, (*needs, ptr, True), test_utils=tests)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_memory_layouts_give_the_same_numbers(attention):
    ptr = offsets([4, 75])
    rows_first = draw_for(attention, 79)
    heads_first = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in rows_first]
    assert not heads_first[0].is_contiguous()
    torch.testing.assert_close(attention(*rows_first, ptr), attention(*heads_first, ptr))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_nothing_of_size_rows_times_block_times_features_is_kept(attention):
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    inputs = [torch.rand(128, 2, n, requires_grad=True) for n in (32, 32, 16)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(*inputs, offsets([30, 98]))
    assert kept
    assert max(kept) <= 128 * 2 * 32
    assert sum(kept) <= 128 * 2 * (2 * 32 + 6 * 17)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_autocast_changes_nothing(attention, dtype):
    ptr = offsets([3, 80])
    inputs = draw_for(attention, 83, torch.float32)
    plain = attention(*inputs, ptr)
    with torch.autocast("cpu", dtype=dtype):
        cast = attention(*inputs, ptr)
        assert torch.equal(cast, plain)
        gradients = torch.autograd.grad(cast, inputs, torch.ones_like(cast))
    expected = torch.autograd.grad(plain, inputs, torch.ones_like(plain))
    for gradient, true in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, true)


def test_half_precision_inputs_are_summed_in_float32():
    rows = 3000  # 1 + 1 + … in bfloat16 stops at 256
    ones = torch.ones(rows, 1, 2, dtype=torch.bfloat16)
    value = (torch.arange(rows) % 2).reshape(-1, 1, 1).to(torch.bfloat16)
    for attention in ATTENTIONS:
        out = attention(ones, ones, value, offsets([rows]))
        assert out.dtype == torch.float32
        torch.testing.assert_close(out[-1, 0, 0], torch.tensor(0.5))
    mixed = causal_log_attention(ones, ones, value.double(), offsets([rows]))
    assert mixed.dtype == torch.float64


@pytest.mark.parametrize("ptr", [[0], [0, 0], [0, 0, 0]])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_rows(attention, ptr):
    inputs = draw(0)
    out = attention(*inputs, torch.tensor(ptr))
    assert out.shape == (0, H, V)
    out.sum().backward()
    assert all(x.grad is not None for x in inputs)


@pytest.mark.parametrize(
    "sizes", [[], [0, 0], [1], [64], [128], [100, 0, 30, 31], [5] * 9, [3, 700]]
)
def test_blocks_hold_every_row_once_and_join_what_they_cut(sizes):
    rows = sum(sizes) + 2
    blocks = blocks_of(offsets(sizes), rows)
    assert blocks.active == sorted(blocks.active, reverse=True)
    x = torch.arange(1.0, rows + 1).reshape(1, rows, 1)
    if blocks.active:
        assert blocks.cut_zero_filled(x).sum() == x[:, :-2].sum()
        expected = torch.cat([x[:, :-2], torch.zeros(1, 2, 1)], 1)
        assert torch.equal(blocks.join(blocks.cut(x), rows), expected)


def test_blocks_of_short_systems_are_not_padded_many_times_over():
    blocks = blocks_of(offsets([5] * 100 + [600]), 1100)
    assert sum(blocks.active) * blocks.length < 2 * 1100


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_inputs_that_do_not_belong_together_are_refused(attention):
    q, k, v = draw(5)
    with pytest.raises(ValueError, match="ptr"):
        attention(q, k, v, torch.tensor([0, 6]))
    for wrong in ((q, k[..., 1:], v), (q[:, :1], k[:, :1], v), (q[1:], k[1:], v)):
        with pytest.raises(ValueError, match="queries"):
            attention(*wrong, torch.tensor([0, 5]))
