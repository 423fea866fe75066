import pytest
import torch

from flt_mol.functional import kernel_attention, linear_attention

H, M, V = 3, 6, 4
PTRS = {
    "one": [0, 7],
    "ragged": [0, 1, 4, 9],
    "empty in the middle": [0, 3, 3, 8],
    "empty at both ends": [0, 0, 5, 6, 6, 6],
}


def draw(rows, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(2, rows, H, M, generator=generator, dtype=dtype)
    value = torch.randn(rows, H, V, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (*features.unbind(0), value)]


@pytest.mark.parametrize("name", PTRS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_and_gradients_are_the_kernel_matrix_ones(name, dtype, tolerance):
    ptr = torch.tensor(PTRS[name])
    inputs = draw(int(ptr[-1]), dtype)
    out, expected = linear_attention(*inputs, ptr), kernel_attention(*inputs, ptr)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    seed = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, seed)
    truth = torch.autograd.grad(expected, inputs, seed)
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("name", PTRS)
def test_first_and_second_derivatives(name):
    ptr = torch.tensor(PTRS[name])
    inputs = draw(int(ptr[-1]))
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, ptr), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: linear_attention(*x, ptr), inputs)


def test_a_derivative_of_a_derivative_is_the_kernel_matrix_one():
    ptr = torch.tensor([0, 2, 6])
    q, k, v = draw(6)

    def penalty(attention):
        (force,) = torch.autograd.grad(attention(q, k, v, ptr).sin().sum(), k, create_graph=True)
        return torch.autograd.grad(force.square().sum(), (q, k, v))

    for fast, slow in zip(penalty(linear_attention), penalty(kernel_attention), strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ptr", [[0], [0, 0], [0, 0, 0]])
def test_no_rows(ptr):
    q, k, v = draw(0)
    out = linear_attention(q, k, v, torch.tensor(ptr))
    assert out.shape == (0, H, V)
    out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))


def test_memory_layouts_give_the_same_numbers():
    ptr = torch.tensor([0, 4, 9])
    rows_first = draw(9)
    heads_first = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in rows_first]
    assert not heads_first[0].is_contiguous()
    torch.testing.assert_close(
        linear_attention(*rows_first, ptr), linear_attention(*heads_first, ptr)
    )


def test_rows_without_weight_give_zero_with_finite_gradients():
    q, k, v = draw(5)
    q = q.detach().clone().index_fill_(0, torch.tensor([2]), 0.0).requires_grad_()
    out = linear_attention(q, k, v, torch.tensor([0, 5]))
    assert (out[2] == 0).all()
    assert (out[1] != 0).all()
    out.sum().backward()
    assert k.grad.isfinite().all()
    assert v.grad.isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_other_systems_leave_no_trace(poison):
    ptr = torch.tensor([0, 4, 9, 12])
    clean = draw(12, torch.float32)
    dirty = [x.detach().clone() for x in clean]
    for x in dirty:
        x[:4] = poison
        x[9:] = poison
    rows = slice(4, 9)
    alone = linear_attention(*(x[rows] for x in clean), torch.tensor([0, 5]))
    torch.testing.assert_close(linear_attention(*dirty, ptr)[rows], alone, rtol=0, atol=1e-6)


def test_the_denominator_alone_is_clamped():
    # Features of 1e-12 would vanish beside any eps; the weights stay 1 : 3.
    q = torch.full((2, 1, 1), 1e-12)
    k = torch.tensor([1e-12, 3e-12]).reshape(2, 1, 1)
    v = torch.tensor([0.0, 1.0]).reshape(2, 1, 1)
    out = linear_attention(q, k, v, torch.tensor([0, 2]))
    torch.testing.assert_close(out.flatten(), torch.tensor([0.75, 0.75]))


def test_nothing_of_size_rows_times_features_times_channels_is_kept():
    rows, heads, features, channels = 64, 2, 32, 16
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    inputs = [
        torch.rand(rows, heads, n, requires_grad=True) for n in (features, features, channels)
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        linear_attention(*inputs, torch.tensor([0, 30, 64]))
    assert kept
    assert max(kept) <= rows * heads * max(features, channels + 1)


def test_autocast_changes_nothing():
    ptr = torch.tensor([0, 3, 8])
    inputs = draw(8, torch.float32)
    plain = linear_attention(*inputs, ptr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_attention(*inputs, ptr)
        assert torch.equal(cast, plain)
        gradients = torch.autograd.grad(cast, inputs, torch.ones_like(cast))
    expected = torch.autograd.grad(plain, inputs, torch.ones_like(plain))
    for gradient, true in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, true)


def test_half_precision_inputs_are_summed_in_float32():
    rows = 3000  # 1 + 1 + … in bfloat16 stops at 256
    ones = torch.ones(rows, 1, 2, dtype=torch.bfloat16)
    value = torch.ones(rows, 1, 1, dtype=torch.bfloat16)
    out = linear_attention(ones, ones, value, torch.tensor([0, rows]))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.ones(rows, 1, 1))


def test_ptr_of_another_length_is_refused():
    with pytest.raises(ValueError, match="ptr"):
        linear_attention(*draw(5), torch.tensor([0, 6]))
