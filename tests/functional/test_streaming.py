import pytest
import torch

from flt_mol.functional.causal import causal_attention, causal_log_attention
from flt_mol.functional.streaming import (
    CausalState,
    initial_state,
    state_of,
    state_of_log,
    step,
    step_log,
)

B, L, H, M, V = 3, 40, 2, 5, 4
LOG = [True, False]
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


def draw(log, dtype=torch.float64, scale=1.0, length=L):
    """(B, L, H, ·) logits or positive features of queries and keys, and values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, length, H, width, generator=generator, dtype=torch.float64)
        for width in (M, M, V)
    )
    q, k = (scale * x if log else torch.nn.functional.softplus(scale * x) for x in (q, k))
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def whole(log, q, k, v):
    ptr = torch.arange(len(q) + 1) * q.shape[1]
    attention = causal_log_attention if log else causal_attention
    return attention(*(x.flatten(0, 1) for x in (q, k, v)), ptr).unflatten(0, q.shape[:2])


def run_steps(log, q, k, v, state):
    outputs = []
    for t in range(q.shape[1]):
        out, state = (step_log if log else step)(q[:, t], k[:, t], v[:, t], state)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def start(log, dtype=torch.float64):
    return initial_state(B, H, M, V, log=log, dtype=dtype)


@pytest.mark.parametrize("log", LOG)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_step_by_step_equals_the_whole(log, dtype, tolerance):
    inputs = draw(log, dtype, length=150)
    out, state = run_steps(log, *inputs, start(log, dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out, whole(log, *inputs), rtol=0, atol=tolerance)
    assert state.length.tolist() == [150] * B


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_steps_equal_the_whole_for_logits_of_any_size(scale):
    inputs = draw(True, scale=scale)
    out, _ = run_steps(True, *inputs, start(True))
    torch.testing.assert_close(out, whole(True, *inputs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("log", LOG)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_a_prefix_at_once_and_the_rest_in_steps_equal_the_whole(log, dtype, tolerance):
    inputs = draw(log, dtype)
    expected = whole(log, *inputs)
    prefixes = [17, 0, 5]  # ragged, with an empty one
    ptr = torch.tensor([0, *prefixes]).cumsum(0)
    k, v = (torch.cat([x[b, :n] for b, n in enumerate(prefixes)]) for x in inputs[1:])
    state = (state_of_log if log else state_of)(k, v, ptr)
    assert state.length.tolist() == prefixes
    rest = [torch.stack([x[b, n : n + 20] for b, n in enumerate(prefixes)]) for x in inputs]
    out, _ = run_steps(log, *rest, state)
    for b, n in enumerate(prefixes):
        torch.testing.assert_close(out[b], expected[b, n : n + 20], rtol=0, atol=tolerance)


@pytest.mark.parametrize("log", LOG)
def test_the_state_of_a_prefix_is_the_state_after_its_steps(log):
    q, k, v = draw(log, scale=20.0 if log else 1.0)
    _, expected = run_steps(log, q, k, v, start(log))
    ptr = torch.arange(B + 1) * L
    state = (state_of_log if log else state_of)(k.flatten(0, 1), v.flatten(0, 1), ptr)
    for found, true in zip(state, expected, strict=True):
        if true is None:
            assert found is None
        else:
            torch.testing.assert_close(found, true, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("log", LOG)
@pytest.mark.parametrize("prefix", [0, 6])
def test_gradients_through_steps_are_those_of_the_whole(log, prefix):
    inputs = draw(log)
    if prefix:
        ptr = torch.arange(B + 1) * prefix
        state = (state_of_log if log else state_of)(
            *(x[:, :prefix].flatten(0, 1) for x in inputs[1:]), ptr
        )
    else:
        state = start(log)
    out, _ = run_steps(log, *(x[:, prefix:] for x in inputs), state)
    gradients = torch.autograd.grad(out.sin().sum(), inputs)
    truth = torch.autograd.grad(whole(log, *inputs)[:, prefix:].sin().sum(), inputs)
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_the_first_token_is_its_value_to_the_last_bit(scale):
    q, k, v = draw(True, torch.float32, scale=scale)
    v = max(scale, 1.0) * v
    out, _ = step_log(q[:, 0], k[:, 0], v[:, 0], start(True, torch.float32))
    assert torch.equal(out, v[:, 0])


@pytest.mark.parametrize("fall", [30.0, 1e4])
def test_old_keys_keep_their_weight_when_new_ones_are_small(fall):
    q, k, v = draw(True)
    k = torch.cat([k[:, :2], k[:, 2:] - fall], 1)
    out, _ = run_steps(True, q, k, v, start(True))
    torch.testing.assert_close(out, whole(True, q, k, v), rtol=0, atol=1e-12)


def test_tokens_of_zero_weight_give_zero_until_one_has_some():
    q, k, v = draw(True)
    k = torch.cat([torch.full_like(k[:, :3], -torch.inf), k[:, 3:]], 1)
    out, _ = run_steps(True, q, k, v, start(True))
    assert (out[:, :3] == 0).all()
    expected = whole(True, q, k, v)[:, 3:]
    torch.testing.assert_close(out[:, 3:], expected, rtol=0, atol=1e-12)
    k_start, v_start = (x[:, :2].flatten(0, 1) for x in (k, v))
    state = state_of_log(k_start, v_start, torch.arange(B + 1) * 2)
    out, _ = run_steps(True, *(x[:, 2:] for x in (q, k, v)), state)
    assert (out[:, 0] == 0).all()
    torch.testing.assert_close(out[:, 1:], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("log", LOG)
def test_streams_can_be_reordered_repeated_and_detached(log):
    q, k, v = draw(log)
    _, state = run_steps(log, *(x[:, :10] for x in (q, k, v)), start(log))
    before = [x.clone() for x in state if x is not None]
    index = torch.tensor([2, 0, 0, 1])
    out, _ = run_steps(log, *(x[index, 10:] for x in (q, k, v)), state.streams(index))
    torch.testing.assert_close(out, whole(log, q, k, v)[index, 10:], rtol=0, atol=1e-12)
    for old, new in zip(before, (x for x in state if x is not None), strict=True):
        assert torch.equal(old, new)
    assert state.sums.requires_grad
    detached = state.detach()
    assert isinstance(detached, CausalState)
    assert not any(x.requires_grad for x in detached if x is not None)
    assert torch.equal(detached.to("cpu").sums, state.sums)


@pytest.mark.parametrize("log", LOG)
def test_streams_do_not_see_each_other(log):
    inputs = [x.detach().clone() for x in draw(log)]
    expected = whole(log, *inputs)[1]
    for x in inputs:
        x[0], x[2] = torch.nan, 1e30
    out, _ = run_steps(log, *inputs, start(log))
    torch.testing.assert_close(out[1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("log", LOG)
def test_half_precision_and_autocast_are_summed_in_the_dtype_of_the_state(log):
    q, k, v = (x.detach().to(torch.bfloat16) for x in draw(log))
    expected, _ = run_steps(log, q.float(), k.float(), v.float(), start(log, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = run_steps(log, q, k, v, start(log, torch.float32))
        ptr = torch.arange(B + 1) * L
        at_once = (state_of_log if log else state_of)(k.flatten(0, 1), v.flatten(0, 1), ptr)
    assert out.dtype == state.sums.dtype == at_once.sums.dtype == torch.float32
    assert torch.equal(out, expected)
    torch.testing.assert_close(at_once.sums, state.sums)


@pytest.mark.parametrize("log", LOG)
def test_the_state_of_a_padded_batch_compiles(log):
    _, k, v = (x.detach() for x in draw(log))
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    make = state_of_log if log else state_of
    ptr, real = torch.tensor([0, 7, 7, 60]), 60
    compiled = torch.compile(make, fullgraph=True, backend="aot_eager")
    found, expected = compiled(k, v, ptr), make(k[:real], v[:real], ptr)
    for x, true in zip(found, expected, strict=True):
        if true is not None:
            torch.testing.assert_close(x, true)


def test_no_streams_and_no_systems():
    state = initial_state(0, H, M, V, log=True)
    out, state = step_log(*(torch.zeros(0, H, n) for n in (M, M, V)), state)
    assert out.shape == (0, H, V)
    empty = state_of_log(torch.zeros(0, H, M), torch.zeros(0, H, V), torch.tensor([0]))
    assert empty.sums.shape == (0, H, M, V + 1)


def test_what_does_not_belong_together_is_refused():
    q, k, v = (torch.zeros(B, H, n) for n in (M, M, V))
    with pytest.raises(ValueError, match="direct features"):
        step_log(q, k, v, start(False))
    with pytest.raises(ValueError, match="log features"):
        step(q, k, v, start(True))
    with pytest.raises(ValueError, match="state is one for"):
        step_log(q[:1], k[:1], v[:1], start(True))
    with pytest.raises(ValueError, match="float32 or float64"):
        initial_state(B, H, M, V, log=True, dtype=torch.bfloat16)
    for make in (state_of, state_of_log):
        with pytest.raises(ValueError, match="ptr"):
            make(k, v, torch.tensor([0, 9]))
