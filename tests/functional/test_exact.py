import pytest
import torch

from flt_mol.functional import exact
from flt_mol.functional.exact import exact_attention
from flt_mol.functional.groups import budget_of, group_budget
from flt_mol.functional.reference import softmax_attention

H, D, V = 3, 5, 4
PTRS = {
    "one": ([0, 7], None),
    "ragged with empties": ([0, 0, 1, 4, 4, 9, 9], None),
    "two sets": ([0, 3, 7], [0, 2, 4]),
    "no keys": ([0, 3, 5, 9], [0, 4, 4, 6]),
    "no queries": ([0, 3, 3, 4], [0, 1, 3, 8]),
    "no keys at all": ([0, 2, 4], [0, 0, 0]),
}


def draw(name, dtype=torch.float64, scale=1.0):
    ptr, key_ptr = (None if x is None else torch.tensor(x) for x in PTRS[name])
    rows = [int((ptr if key_ptr is None else key_ptr)[-1])] * 2
    generator = torch.Generator().manual_seed(0)
    shapes = [(int(ptr[-1]), H, D), (rows[0], H, D), (rows[1], H, V)]
    inputs = [torch.randn(shape, generator=generator, dtype=dtype) * scale for shape in shapes]
    return [x.requires_grad_() for x in inputs], ptr, key_ptr


@pytest.fixture(params=["whole", "fused and in blocks"])
def path(request, monkeypatch):
    """Both ways: a system's weights at once, and as systems too large for that are treated."""
    if request.param != "whole":
        monkeypatch.setattr(exact, "MIN_ROWS", 2)
        with group_budget(2):
            yield
    else:
        yield


@pytest.mark.parametrize("name", PTRS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.usefixtures("path")
def test_values_and_gradients_are_the_reference_ones(name, causal, dtype, tolerance):
    inputs, ptr, key_ptr = draw(name, dtype, scale=2.0)
    if causal and key_ptr is not None:
        return
    out = exact_attention(*inputs, ptr, key_ptr, causal=causal)
    expected = softmax_attention(*inputs, ptr, causal=causal, key_ptr=key_ptr)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    seed = torch.randn_like(out)
    truth = torch.autograd.grad(expected, inputs, seed)
    for create_graph in (False, True):  # two ways through the backward pass
        found = torch.autograd.grad(out, inputs, seed, retain_graph=True, create_graph=create_graph)
        for gradient, true in zip(found, truth, strict=True):
            torch.testing.assert_close(gradient, true, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize(
    ("ptr", "key_ptr", "causal"),
    [([0, 1, 1, 4], None, False), ([0, 1, 1, 4], None, True), ([0, 1, 2, 2], [0, 3, 3, 4], False)],
)
@pytest.mark.usefixtures("path")
def test_first_and_second_derivatives(ptr, key_ptr, causal):
    ptr, key_ptr = torch.tensor(ptr), None if key_ptr is None else torch.tensor(key_ptr)
    generator = torch.Generator().manual_seed(0)
    shapes = (int(ptr[-1]), 2, 2), (4, 2, 2), (4, 2, 1)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]

    def attend(*x):
        return exact_attention(*x, ptr, key_ptr, scale=0.7, causal=causal)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


def test_a_large_system_takes_the_other_way_and_agrees():
    generator = torch.Generator().manual_seed(0)
    ptr = torch.tensor([0, 10, 710])
    inputs = [
        torch.randn(710, 3, width, generator=generator, dtype=torch.float64).requires_grad_()
        for width in (6, 6, 9)
    ]
    assert budget_of(torch.device("cpu")) < 700**2
    for causal in (False, True):
        out = exact_attention(*inputs, ptr, causal=causal)
        expected = softmax_attention(*inputs, ptr, causal=causal)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        seed = torch.randn_like(out)
        found, truth = (torch.autograd.grad(x, inputs, seed) for x in (out, expected))
        for gradient, true in zip(found, truth, strict=True):
            torch.testing.assert_close(gradient, true, rtol=0, atol=1e-10)


def test_by_hand():
    # q·k = 0 and ln 3, so weights 1 : 3.
    q, k = torch.ones(1, 1, 1), torch.tensor([1.0, 3.0]).log().reshape(2, 1, 1)
    v = torch.tensor([0.0, 8.0]).reshape(2, 1, 1)
    out = exact_attention(q, k, v, torch.tensor([0, 1]), torch.tensor([0, 2]))
    torch.testing.assert_close(out.flatten(), torch.tensor([6.0]))


def test_queries_without_keys_get_zero():
    inputs, ptr, key_ptr = draw("no keys")
    out = exact_attention(*inputs, ptr, key_ptr)
    assert (out[3:5] == 0).all()
    assert (out[:3] != 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), inputs[0])
    assert (gradient[3:5] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("path")
def test_huge_logits_pick_the_largest(dtype):
    inputs, ptr, _ = draw("one", dtype, scale=100.0)  # logits of ±1e4
    out = exact_attention(*inputs, ptr, scale=1.0)
    logits = torch.einsum("ihd,jhd->hij", *inputs[:2])
    assert logits.abs().max() > 1e4
    torch.testing.assert_close(out, softmax_attention(*inputs, ptr, scale=1.0))
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("path")
def test_other_systems_and_padding_leave_no_trace(poison, causal):
    inputs, ptr, _ = draw("ragged with empties", torch.float32)  # rows 4 to 8: a system
    alone = [x.detach()[4:9].requires_grad_() for x in inputs]
    expected = exact_attention(*alone, torch.tensor([0, 5]), scale=1.0, causal=causal)
    dirty = [x.detach().clone() for x in inputs]
    for x in dirty:
        x[:4] = poison
    dirty = [torch.cat([x, torch.full_like(x[:2], poison)]).requires_grad_() for x in dirty]
    heads_first = [x.transpose(0, 1) for x in dirty]
    out = torch.ops.flt_mol.exact_attention(*heads_first, ptr, ptr, "causal" if causal else "all")
    assert torch.equal(out[:, 4:9].transpose(0, 1), expected)
    assert (out[:, 9:] == 0).all()
    seed = torch.full_like(out, poison)
    seed[:, 4:9] = 1.0
    truth = torch.autograd.grad(expected.sum(), alone)
    for gradient, true in zip(torch.autograd.grad(out, dirty, seed), truth, strict=True):
        torch.testing.assert_close(gradient[4:9], true, rtol=0, atol=1e-6)
        assert (gradient[9:] == 0).all()


def test_the_future_does_not_reach_the_past():
    inputs, ptr, _ = draw("one")
    out = exact_attention(*inputs, ptr, causal=True)
    for i in range(7):
        for gradient in torch.autograd.grad(out[i].sum(), inputs, retain_graph=True):
            assert (gradient[i + 1 :] == 0).all()


def test_autocast_changes_nothing_and_half_precision_is_float32_inside():
    inputs, ptr, _ = draw("one", torch.float32)
    plain = exact_attention(*inputs, ptr)
    truth = torch.autograd.grad(plain.sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = exact_attention(*inputs, ptr)
        assert torch.equal(cast, plain)
        for gradient, true in zip(torch.autograd.grad(cast.sum(), inputs), truth, strict=True):
            assert torch.equal(gradient, true)
    assert exact_attention(*(x.bfloat16() for x in inputs), ptr).dtype == torch.float32


def test_memory_of_a_graph_is_linear_in_rows():
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    inputs = [torch.randn(200, 2, 8, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        exact_attention(*inputs, torch.tensor([0, 200]))
    assert max(kept) <= 200 * 2 * 8


@pytest.mark.parametrize("ptr", [[0], [0, 0], [0, 0, 0]])
def test_no_rows(ptr):
    inputs = [torch.zeros(0, H, D, requires_grad=True) for _ in range(3)]
    out = exact_attention(*inputs, torch.tensor(ptr))
    assert out.shape == (0, H, D)
    out.sum().backward()
    assert all(x.grad is not None for x in inputs)


def test_arguments_that_do_not_fit_are_refused():
    inputs, ptr, key_ptr = draw("two sets")
    with pytest.raises(ValueError, match="leave key_ptr out"):
        exact_attention(*inputs, ptr, key_ptr, causal=True)
    with pytest.raises(ValueError, match="give key_ptr"):
        exact_attention(*inputs, ptr)
    with pytest.raises(ValueError, match="key_ptr must"):
        exact_attention(*inputs, ptr, ptr)
