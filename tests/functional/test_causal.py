import pytest
import torch

from flt_mol.functional.causal import causal_attention, causal_log_attention
from flt_mol.functional.streaming import CausalState, state_of, step
from helpers.kernels import kernel_attention

H, M, V = 2, 5, 3
SIZES = {
    "one token": [1],
    "one block": [64],
    "blocks and a rest": [150],
    "ragged": [3, 0, 130, 1, 64, 65, 0],
    "nothing": [0, 0],
}
KINDS = {True: causal_log_attention, False: causal_attention}


def offsets(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def draw(rows, log, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(rows, H, M, generator=generator, dtype=dtype) * scale for _ in range(2))
    v = torch.randn(rows, H, V, generator=generator, dtype=dtype)
    if not log:
        q, k = q.abs(), k.abs()
    return [x.requires_grad_() for x in (q, k, v)]


def reference(q, k, v, ptr, log):
    if not log:
        return kernel_attention(q, k, v, ptr, causal=True)
    logits = (q[:, None] + k).logsumexp(-1).permute(2, 0, 1)
    system = torch.bucketize(torch.arange(len(q)), ptr[1:], right=True)
    hidden = (system[:, None] != system) | ~torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return torch.einsum("hij,jhv->ihv", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


def compare(inputs, ptr, log, tolerance):
    out, expected = KINDS[log](*inputs, ptr), reference(*(x.double() for x in inputs), ptr, log)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    seed = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, seed)
    truth = torch.autograd.grad(expected, inputs, seed.double())
    for x, y in zip(found, truth, strict=True):
        size = 1 + (float(y.abs().max()) if y.numel() else 0)
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("log", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-6)])
def test_values_and_gradients_are_the_masked_matrix_ones(sizes, log, dtype, tolerance):
    ptr = offsets(SIZES[sizes])
    compare(draw(int(ptr[-1]), log, dtype), ptr, log, tolerance)


@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4])
def test_logits_that_rise_steeply_within_blocks(scale):
    compare(draw(150, True, scale=scale), offsets([150]), True, 1e-10)


@pytest.mark.parametrize("rise", [20.0, 33.0, 60.0, 200.0, -300.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_a_single_rise_or_fall_in_some_heads(rise, dtype, tolerance):
    q, k, v = draw(200, True, dtype)
    k = k.detach().clone()
    k[90:, 0] += rise
    k[30:, 1, 2] += rise
    compare([q, k.requires_grad_(), v], offsets([200]), True, tolerance)


@pytest.mark.parametrize("rate", [0.7, 3.0, 6.0, 20.0])
def test_heads_that_decay_from_row_to_row(rate):
    q, k, v = draw(150, True)
    k = (k.detach() + rate * torch.arange(150)[:, None, None]).requires_grad_()
    compare([q, k, v], offsets([75, 75]), True, 1e-10)


@pytest.mark.parametrize("log", KINDS)
@pytest.mark.parametrize("last", [0, 1, 24, 62, 63, 64, 99])
@pytest.mark.parametrize("factor", [50.0, 1e4])
def test_later_rows_change_nothing_however_large(log, last, factor):
    inputs = [x.detach() for x in draw(130, log, torch.float32)]
    other = [x.clone() for x in inputs]
    for x in other:
        x[last + 1 :] *= factor
    ptr = offsets([130])
    before, after = KINDS[log](*inputs, ptr), KINDS[log](*other, ptr)
    torch.testing.assert_close(before[: last + 1], after[: last + 1], rtol=0, atol=2e-6)
    assert not torch.allclose(before[last + 1 :], after[last + 1 :], atol=1e-3)


@pytest.mark.parametrize("log", KINDS)
def test_no_gradient_flows_to_later_rows(log):
    inputs = draw(100, log)
    out = KINDS[log](*inputs, offsets([100]))
    for gradient in torch.autograd.grad(out[:70].square().sum(), inputs):
        assert (gradient[70:] == 0).all()
        assert (gradient[:69] != 0).any()


@pytest.mark.parametrize("log", KINDS)
def test_rows_without_any_weight_give_zero_with_finite_gradients(log):
    q, k, v = draw(70, log)
    k = k.detach().clone()
    k[:66, 0] = -torch.inf if log else 0.0
    inputs = [q, k.requires_grad_(), v]
    out = KINDS[log](*inputs, offsets([70]))
    assert (out[:66, 0] == 0).all()
    assert (out[66:] != 0).all()
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("log", KINDS)
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_second_derivatives(log, scale):
    inputs, ptr = draw(8, log, scale=scale if log else 1.0), offsets([4, 0, 4])
    assert torch.autograd.gradgradcheck(
        lambda *x: KINDS[log](*x, ptr), inputs, fast_mode=True, atol=1e-4
    )


@pytest.mark.parametrize("log", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_other_systems_leave_no_trace(log, poison):
    inputs = [x.detach() for x in draw(90, log, torch.float32)]
    dirty = [x.clone() for x in inputs]
    for x in dirty:
        x[:20], x[60:] = poison, poison
    out = KINDS[log](*dirty, offsets([20, 40, 30]))[20:60]
    alone = KINDS[log](*(x[20:60] for x in inputs), offsets([40]))
    torch.testing.assert_close(out, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("log", KINDS)
def test_autocast_and_half_precision(log):
    inputs, ptr = draw(70, log, torch.float32), offsets([70])
    plain = KINDS[log](*inputs, ptr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(KINDS[log](*inputs, ptr), plain)
    assert KINDS[log](*(x.bfloat16() for x in inputs), ptr).dtype == torch.float32


@pytest.mark.parametrize("log", KINDS)
def test_inputs_that_do_not_belong_together_are_refused(log):
    q, k, v = draw(4, log)
    for given in ((q, k[:3], v), (q, k, v[:, :1]), (q[..., 0], k[..., 0], v[..., 0])):
        with pytest.raises(ValueError, match=r"queries|ptr"):
            KINDS[log](*given, offsets([4]))


@pytest.mark.parametrize("log", KINDS)
@pytest.mark.parametrize("prefix", [0, 1, 7])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_prefix_at_once_and_the_rest_in_steps_equal_the_whole(log, prefix, scale):
    streams, length = 3, 10
    inputs = draw(streams * length, log, scale=scale if log else 1.0)
    whole = KINDS[log](*inputs, offsets([length] * streams)).view(streams, length, H, V)
    q, k, v = (x.view(streams, length, H, -1) for x in inputs)
    rows = (x[:, :prefix].flatten(0, 1) for x in (k, v))
    state = state_of(*rows, offsets([prefix] * streams), log=log)
    outs = []
    for t in range(prefix, length):
        out, state = step(q[:, t], k[:, t], v[:, t], state)
        outs.append(out)
    assert state.length.tolist() == [length] * streams
    found, expected = torch.stack(outs, 1), whole[:, prefix:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    seed = torch.randn_like(found)
    truth = torch.autograd.grad(expected, inputs, seed)
    for x, y in zip(torch.autograd.grad(found, inputs, seed), truth, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("log", KINDS)
def test_streams_can_be_chosen_repeated_and_detached(log):
    k, v = draw(6, log)[1:]
    state = state_of(k, v, offsets([2, 0, 4]), log=log)
    chosen = state.streams(torch.tensor([2, 0, 2])).detach()
    assert isinstance(chosen, CausalState)
    assert chosen.length.tolist() == [4, 2, 4]
    assert torch.equal(chosen.sums[1], state.sums[0])
    assert not chosen.sums.requires_grad


def test_states_that_do_not_fit_are_refused():
    state = state_of(*draw(2, True)[1:], offsets([1, 1]), log=True)
    with pytest.raises(ValueError, match="shapes"):
        step(*draw(3, True, torch.float32), state)
