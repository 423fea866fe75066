import pytest
import torch
from periodic import F64, kept_sizes, seeded
from torch.autograd import gradcheck, gradgradcheck

from flt_mol.functional import group_budget, linear_attention, pair_filter, pair_sums
from flt_mol.functional.linear import linear_sums, normalised
from flt_mol.functional.pairs import (
    filtered_dots,
    segment_peak,
    segment_sum,
)

P, N, K, T, C, H = 23, 5, 6, 3, 4, 2


def drawn(*shape, seed=0, grad=True):
    return torch.randn(*shape, generator=seeded(seed), dtype=F64).requires_grad_(grad)


def index(rows=N, seed=0):
    return torch.randint(rows, (P,), generator=seeded(seed))  # in no order


@pytest.fixture(params=[2**17, 7])
def chunk(request):
    """All pairs together, or a few at a time."""
    with group_budget(request.param):
        yield


CALLS = {
    "pair_filter": (
        lambda b, w, v: pair_filter(b, w, v, index(), index(K, 1), N),
        lambda b, w, v: torch.zeros(N, C, dtype=F64).index_add(
            0, index(), (b @ w) * v[index(K, 1)]
        ),
        [(P, T), (T, C), (K, C)],
    ),
    "filtered_dots": (
        lambda x, y, w: filtered_dots(x, y, w, index(), index(K, 1)),
        lambda x, y, w: (x[index()] * y[index(K, 1)]) @ w.T,
        [(N, C), (K, C), (T, C)],
    ),
    "segment_sum": (
        lambda x: segment_sum(x, index(), N),
        lambda x: torch.stack([x[index() == row].sum(0) for row in range(N)]),
        [(P, H)],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_of_any_order_are_those_of_the_formula(name, chunk):
    fast, slow, shapes = CALLS[name]
    inputs = [drawn(*shape, seed=k) for k, shape in enumerate(shapes)]
    out, expected = fast(*inputs), slow(*inputs)
    torch.testing.assert_close(out, expected)
    seed = drawn(*out.shape, seed=9, grad=False)
    for one, other in zip(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(expected, inputs, seed),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert gradcheck(fast, inputs, fast_mode=True)
    assert gradgradcheck(fast, inputs, fast_mode=True)


def test_no_number_per_pair_and_channel_is_kept():
    inputs = drawn(P, T), drawn(T, 50), drawn(K, 50)
    kept = kept_sizes(lambda: pair_filter(*inputs, index(), index(K, 1), N))
    assert kept
    assert max(kept) < P * 50


def test_rows_without_pairs_and_no_pairs_at_all():
    i = torch.tensor([3, 0])
    out = pair_filter(torch.ones(2, 1), torch.ones(1, 2), torch.ones(4, 2), i, i, 5)
    assert out.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1], [0, 0]]
    none = torch.zeros(0, dtype=torch.int64)
    assert not pair_filter(
        torch.ones(0, 1), torch.ones(1, 2), torch.ones(4, 2), none, none, 5
    ).any()
    peak = segment_peak(torch.tensor([[2.0], [-torch.inf], [5.0]]), torch.tensor([0, 1, 0]), 3)
    assert peak.flatten().tolist() == [5, 0, 0]


def test_shapes_that_do_not_belong_together():
    for shapes in (
        ((P, T), (T + 1, C), (K, C)),
        ((P, T), (T, C), (K, C + 1)),
        ((P - 1, T), (T, C), (K, C)),
    ):
        with pytest.raises(ValueError, match="basis"):
            pair_filter(*(torch.ones(shape) for shape in shapes), index(), index(K), N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_have_at_least_float32_under_autocast(dtype):
    inputs = [torch.ones(P, T), torch.ones(T, C), torch.ones(K, C)]
    exact = pair_filter(*inputs, index(), index(K), N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pair_filter(*(x.to(dtype) for x in inputs), index(), index(K), N)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact)


def test_pairs_turn_linear_attention_into_attention_with_a_mask():
    """φφ + φφ (exp f − 1) on pairs is φφ exp f under one normaliser; f = 0 elsewhere."""
    ptr, rows = torch.tensor([0, 2, 5]), 5
    q, k = (drawn(rows, H, 3, seed=s, grad=False).exp() for s in (1, 2))
    v = drawn(rows, H, 4, seed=3, grad=False)
    i, j = torch.tensor([[0, 0, 3, 4, 2], [1, 0, 2, 4, 4]])
    f = drawn(5, H, seed=4, grad=False)
    sums = linear_sums(q, k, v, ptr) + pair_sums(q, k, v, f.expm1(), i, j)
    mask = torch.zeros(rows, rows, H, dtype=F64)
    mask[i, j] = f
    system = torch.tensor([0, 0, 1, 1, 1])
    weight = torch.einsum("ihm,jhm->ijh", q, k) * mask.exp()
    weight = weight * (system[:, None] == system)[..., None]
    expected = torch.einsum("ijh,jhd->ihd", weight / weight.sum(1, keepdim=True), v)
    torch.testing.assert_close(normalised(sums), expected)
    plain = linear_sums(q, k, v, ptr) + pair_sums(q, k, v, 0 * f, i, j)
    torch.testing.assert_close(normalised(plain), linear_attention(q, k, v, ptr))


def test_forward_mode_raises_instead_of_giving_zero():
    index, x = torch.tensor([0, 1]), torch.ones(2, 2)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: pair_filter(x, x, x, index, index, 2), (x,), (x,))
