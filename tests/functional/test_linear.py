import pytest
import torch

from flt_mol.functional.linear import linear_attention, linear_sums, normalised, read_back
from flt_mol.functional.reference import kernel_attention

H, M, V = 3, 6, 4
PTRS = {
    "one": [0, 7],
    "ragged": [0, 1, 4, 9],
    "empty in the middle": [0, 3, 3, 8],
    "empty at both ends": [0, 0, 5, 6, 6, 6],
}

# First queries and first keys of each system: queries without keys, keys without queries, neither.
CROSS = {
    "two sets": ([0, 3, 7], [0, 2, 4]),
    "no keys": ([0, 3, 5, 9], [0, 4, 4, 6]),
    "no queries": ([0, 3, 3, 4], [0, 1, 3, 8]),
    "neither": ([0, 0, 2, 2], [0, 0, 5, 5]),
    "no keys at all": ([0, 2, 4], [0, 0, 0]),
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


@pytest.mark.parametrize("ptr", [[0, 3], [0, 0, 1, 3, 3]])
def test_first_and_second_derivatives(ptr):
    ptr = torch.tensor(ptr)
    inputs = draw(3)
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


def draw_cross(name, dtype=torch.float64):
    ptr, key_ptr = (torch.tensor(x) for x in CROSS[name])
    query, _, _ = draw(int(ptr[-1]), dtype)
    _, key, value = draw(int(key_ptr[-1]), dtype, seed=1)
    return (query, key, value), ptr, key_ptr


@pytest.mark.parametrize("name", CROSS)
def test_keys_of_another_set(name):
    inputs, ptr, key_ptr = draw_cross(name)
    out = linear_attention(*inputs, ptr, key_ptr)
    expected = kernel_attention(*inputs, ptr, key_ptr=key_ptr)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    seed = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, seed)
    has_keys = key_ptr.diff().repeat_interleave(ptr.diff()) > 0
    assert (out[~has_keys] == 0).all()
    assert (gradients[0][~has_keys] == 0).all()
    truth = torch.autograd.grad(expected[has_keys], inputs, seed[has_keys])
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("ptr", "key_ptr"), [([0, 1, 2], [0, 2, 3]), ([0, 1, 2], [0, 0, 3])])
def test_derivatives_with_keys_of_another_set(ptr, key_ptr):
    ptr, key_ptr = torch.tensor(ptr), torch.tensor(key_ptr)
    (q, _, _), (_, k, v) = draw(2), draw(3)
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, ptr, key_ptr), (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *x: linear_attention(*x, ptr, key_ptr), (q, k, v))


def test_sums_are_numerator_and_denominator():
    ptr = torch.tensor([0, 2, 6])
    q, k, v = draw(6)
    sums = linear_sums(q, k, v, ptr)
    weights = torch.einsum("ihm,jhm->hij", q, k) * (
        torch.block_diag(torch.ones(2, 2), torch.ones(4, 4))
    )
    torch.testing.assert_close(sums[..., :-1], torch.einsum("hij,jhv->ihv", weights, v))
    torch.testing.assert_close(sums[..., -1], weights.sum(-1).T)
    assert torch.equal(normalised(sums), linear_attention(q, k, v, ptr))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e-40, 1.0])
def test_normalising_rows_without_weight_has_finite_gradients(dtype, size):
    sums = torch.tensor([[0.0, 0.0, 0.0], [size, -size, size]], dtype=dtype).requires_grad_()
    out = normalised(sums)
    assert (out[0] == 0).all()
    if size > torch.finfo(dtype).tiny:
        assert out[1].tolist() == [1.0, -1.0]
    (gradient,) = torch.autograd.grad(out, sums, torch.full_like(out, 1e3))
    assert gradient[0].isfinite().all()  # 10³ divided by the smallest normal number is not


def test_queries_without_keys_have_finite_gradients_in_float32():
    inputs, ptr, key_ptr = draw_cross("no keys", torch.float32)
    out = linear_attention(*inputs, ptr, key_ptr)
    for gradient in torch.autograd.grad(out, inputs, torch.full_like(out, 1e3)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("padding", [0.0, 1e30, float("nan"), float("inf")])
def test_rows_beyond_the_last_system_are_padding(padding):
    # As compiled graphs have them; public functions refuse such a ptr in eager mode.
    ptr, key_ptr = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 4])
    (q, _, _), (_, k, v) = draw(3), draw(4)
    clean = [x.detach().transpose(0, 1).clone().requires_grad_() for x in (q, k, v)]
    dirty = [
        torch.cat([x.detach(), torch.full_like(x[:, :2], padding)], 1).requires_grad_()
        for x in clean
    ]
    expected, out = read_back(*clean, ptr, key_ptr), read_back(*dirty, ptr, key_ptr)
    assert torch.equal(out[:, :3], expected)
    assert (out[:, 3:] == 0).all()
    seed = torch.full_like(out, padding)
    seed[:, :3] = torch.randn_like(expected)
    for create_graph in (False, True):  # two ways through the backward pass
        truth = torch.autograd.grad(expected, clean, seed[:, :3], retain_graph=True)
        found = torch.autograd.grad(out, dirty, seed, create_graph=create_graph, retain_graph=True)
        for gradient, true in zip(found, truth, strict=True):
            rows = true.shape[1]
            torch.testing.assert_close(gradient[:, :rows], true, rtol=0, atol=1e-12)
            assert (gradient[:, rows:] == 0).all()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_of_some_inputs_only(wanted):
    ptr = torch.tensor([0, 2, 6])
    inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(draw(6))]
    chosen = [inputs[i] for i in wanted]
    found = torch.autograd.grad(linear_attention(*inputs, ptr).sin().sum(), chosen)
    truth = torch.autograd.grad(kernel_attention(*inputs, ptr).sin().sum(), chosen)
    for gradient, true in zip(found, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-12)


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


def test_mixed_dtypes_meet_in_the_widest():
    ptr = torch.tensor([0, 2, 5])
    q, k, v = (x.detach() for x in draw(5))
    expected = linear_attention(q, k, v, ptr)
    mixed = linear_attention(q, k, v.float(), ptr)
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("ptr", "key_ptr", "message"),
    [
        ([0, 6], None, "ptr must start at 0"),
        ([0, 5], [0, 4], "key_ptr must start at 0"),
        ([0, 5], [0, 2, 5], "ptr describes 1 systems, key_ptr 2"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(ptr, key_ptr, message):
    key_ptr = None if key_ptr is None else torch.tensor(key_ptr)
    with pytest.raises(ValueError, match=message):
        linear_attention(*draw(5), torch.tensor(ptr), key_ptr)


def test_other_keys_need_offsets_of_their_own():
    q, _, _ = draw(5)
    _, k, v = draw(6)
    with pytest.raises(ValueError, match="6 keys for 5 queries: give key_ptr"):
        linear_attention(q, k, v, torch.tensor([0, 5]))
