import pytest
import torch
from periodic import F64, kept_sizes, seeded

from flt_mol.functional import _pair_ops, linear
from flt_mol.functional.pairs import (
    pair_dots,
    pair_filter,
    pair_sums,
    segment_peak,
    segment_sum,
    weighted_sum,
)

N, K, P, T, C, H, M, V = 7, 9, 40, 5, 6, 3, 4, 2


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    if request.param == "many chunks":  # of 2 to 5 pairs: rows are cut in two
        monkeypatch.setitem(_pair_ops._CHUNK, "cpu", 12)


def draw_pairs(order="sorted", rows=N, senders=K, count=P, seed=0):
    """Random pairs, some of them twice; rows 0 and N − 1 receive none, sender 1 sends none."""
    generator = seeded(seed)
    i = torch.randint(1, rows - 1, (count,), generator=generator).sort().values
    j = torch.randint(2, senders, (count,), generator=generator)
    if order == "shuffled":
        shuffle = torch.randperm(count, generator=generator)
        i, j = i[shuffle], j[shuffle]
    return i, j


def draw(*shapes, dtype=F64, seed=1):
    generator = seeded(seed)
    return [
        torch.randn(shape, generator=generator, dtype=F64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def filter_by_loop(basis, weight, value, i, j, num_rows):
    rows = [value.new_zeros(weight.shape[1]) for _ in range(num_rows)]
    for p in range(len(i)):
        rows[i[p]] = rows[i[p]] + (basis[p] @ weight) * value[j[p]]
    return torch.stack(rows)


def weighted_by_loop(weight, value, i, j, num_rows):
    rows = [value.new_zeros(value.shape[1:]) for _ in range(num_rows)]
    for p in range(len(i)):
        rows[i[p]] = rows[i[p]] + weight[p][:, None] * value[j[p]]
    return torch.stack(rows)


def dots_by_loop(x, y, i, j):
    return torch.stack([(x[a] * y[b]).sum(-1) for a, b in zip(i, j, strict=True)])


def sums_by_matrix(q, k, v, w, i, j):
    """The explicit matrix of weights (H, N, K), then numerator and denominator."""
    dense = torch.zeros(H, len(q), len(k), dtype=w.dtype)
    for p in range(len(i)):
        dense = dense.index_put((torch.arange(H), i[p], j[p]), w[p], accumulate=True)
    dense = dense * torch.einsum("ihm,jhm->hij", q, k)
    numerator = torch.einsum("hij,jhv->ihv", dense, v)
    return torch.cat([numerator, dense.sum(-1).T[:, :, None]], -1)


CASES = {
    "filter": (
        lambda x, i, j: pair_filter(*x, i, j, N),
        lambda x, i, j: filter_by_loop(*x, i, j, N),
        [(P, T), (T, C), (K, C)],
    ),
    "weighted": (
        lambda x, i, j: weighted_sum(*x, i, j, N),
        lambda x, i, j: weighted_by_loop(*x, i, j, N),
        [(P, H), (K, H, V)],
    ),
    "dots": (
        lambda x, i, j: pair_dots(*x, i, j),
        lambda x, i, j: dots_by_loop(*x, i, j),
        [(N, H, M), (K, H, M)],
    ),
    "sums": (
        lambda x, i, j: pair_sums(*x, i, j),
        lambda x, i, j: sums_by_matrix(*x, i, j),
        [(N, H, M), (K, H, M), (K, H, V), (P, H)],
    ),
    "segments": (
        lambda x, i, j: segment_sum(*x, i, N),
        lambda x, i, j: weighted_by_loop(x[0], x[0].new_ones(K, H, 1), i, j, N).squeeze(-1),
        [(P, H)],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-4)])
def test_values_and_gradients_are_those_of_the_loop(case, order, dtype, tolerance, chunks):
    fast, slow, shapes = CASES[case]
    pairs, inputs = draw_pairs(order), draw(*shapes, dtype=dtype)
    out, expected = fast(inputs, *pairs), slow(inputs, *pairs)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    (seed,) = draw(out.shape, dtype=dtype, seed=2)
    gradients = torch.autograd.grad(out, inputs, seed)
    truth = torch.autograd.grad(expected, inputs, seed)
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_first_and_second_derivatives(case, order, chunks):
    fast, _, shapes = CASES[case]
    i, j = draw_pairs(order, count=9)
    inputs = draw(*((9, *shape[1:]) if shape[0] == P else shape for shape in shapes))
    assert torch.autograd.gradcheck(lambda *x: fast(x, i, j), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: fast(x, i, j), inputs, fast_mode=True)


def test_third_derivatives_of_the_filter_are_those_of_the_loop(chunks):
    i, j = draw_pairs(count=9)
    inputs = draw((9, T), (T, C), (K, C))

    def penalty(function):
        """As for training on forces with a second-order optimiser, or for Hessians of forces."""
        energy = function(*inputs, i, j, N).sin().sum()
        force = torch.autograd.grad(energy, inputs[0], create_graph=True)[0]
        stress = torch.autograd.grad(force.sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in stress), inputs)

    for fast, slow in zip(penalty(pair_filter), penalty(filter_by_loop), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_no_pairs(case, chunks):
    fast, _, shapes = CASES[case]
    none = torch.zeros(0, dtype=torch.int64)
    inputs = draw(*((0, *shape[1:]) if shape[0] == P else shape for shape in shapes))
    out = fast(inputs, none, none)
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out, inputs, torch.ones_like(out)):
        assert (gradient == 0).all()


def test_rows_without_pairs_are_zero(chunks):
    i, j = draw_pairs()
    basis, weight, value = draw((P, T), (T, C), (K, C))
    out = pair_filter(basis, weight, value, i, j, N)
    assert (out[0] == 0).all()
    assert (out[-1] == 0).all()
    assert (out[1:-1] != 0).all()


@pytest.mark.parametrize("case", CASES)
def test_operators_are_sound_and_compile_as_one_graph(case):
    fast, _, shapes = CASES[case]
    i, j = draw_pairs()
    inputs = draw(*shapes)
    compiled = torch.compile(lambda *x: fast(x, i, j), fullgraph=True, backend="aot_eager")
    out, expected = compiled(*inputs), fast(inputs, i, j)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    seed = torch.ones_like(out)
    for gradient, true in zip(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(expected, inputs, seed),
        strict=True,
    ):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("operator", "shapes", "rows"),
    [
        (_pair_ops.pair_filter, [(P, T), (T, C), (K, C)], [N]),
        (_pair_ops.pair_filter_basis, [(N, C), (K, C), (T, C)], []),
        (_pair_ops.pair_filter_weight, [(N, C), (K, C), (P, T)], []),
        (_pair_ops.pair_dots, [(N, H, M), (K, H, M)], []),
        (_pair_ops.weighted_sum, [(P, H), (K, H, V)], [N]),
    ],
)
def test_torch_finds_no_fault_with_the_operators(operator, shapes, rows):
    torch.library.opcheck(operator, (*draw(*shapes), *draw_pairs(), *rows))


@pytest.mark.parametrize("case", CASES)
def test_autocast_changes_nothing(case):
    fast, _, shapes = CASES[case]
    i, j = draw_pairs()
    inputs = draw(*shapes, dtype=torch.float32)
    plain = fast(inputs, i, j)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fast(inputs, i, j)
        assert torch.equal(cast, plain)
        gradients = torch.autograd.grad(cast, inputs, torch.ones_like(cast))
    for gradient, true in zip(
        gradients, torch.autograd.grad(plain, inputs, torch.ones_like(plain)), strict=True
    ):
        assert torch.equal(gradient, true)


@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_summed_in_float32_and_mixed_dtypes_in_the_widest(case):
    fast, _, shapes = CASES[case]
    i, j = draw_pairs()
    inputs = [x.detach() for x in draw(*shapes, dtype=torch.bfloat16)]
    assert fast(inputs, i, j).dtype == torch.float32
    torch.testing.assert_close(fast(inputs, i, j), fast([x.float() for x in inputs], i, j))
    if len(inputs) > 1:
        assert fast([inputs[0].double(), *inputs[1:]], i, j).dtype == F64


def test_nothing_of_size_pairs_times_channels_is_kept():
    pairs, rows, channels, basis = 600, 20, 64, 8
    i, j = draw_pairs(rows=rows, senders=rows, count=pairs)
    inputs = draw((pairs, basis), (basis, channels), (rows, channels), dtype=torch.float32)
    kept = kept_sizes(lambda: pair_filter(*inputs, i, j, rows))
    assert kept
    assert max(kept) == pairs * basis
    heads, width = 4, 16
    inputs = draw(*[(rows, heads, width)] * 3, (pairs, heads), dtype=torch.float32)
    kept = kept_sizes(lambda: pair_sums(*inputs, i, j))
    assert max(kept) == pairs * heads


def test_the_same_numbers_every_time_and_close_ones_in_any_order(chunks):
    i, j = draw_pairs(count=400)
    basis, weight, value = draw((400, T), (T, C), (K, C), dtype=torch.float32)
    out = pair_filter(basis, weight, value, i, j, N)
    assert torch.equal(out, pair_filter(basis, weight, value, i, j, N))
    shuffle = torch.randperm(400, generator=seeded())
    again = pair_filter(basis[shuffle], weight, value, i[shuffle], j[shuffle], N)
    torch.testing.assert_close(again, out, rtol=0, atol=1e-4)


def test_pair_sums_correct_linear_attention_to_any_mask_under_one_normaliser():
    generator = seeded()
    q, k = torch.rand(2, 6, H, M, generator=generator, dtype=F64)
    v = torch.randn(6, H, V, generator=generator, dtype=F64)
    f = torch.randn(H, 6, 6, generator=generator, dtype=F64)
    near = torch.rand(6, 6, generator=generator) < 0.4
    i, j = near.nonzero().T
    sums = linear.linear_sums(q, k, v, torch.tensor([0, 6]))
    sums = sums + pair_sums(q, k, v, torch.expm1(f[:, i, j].T), i, j)
    weights = torch.einsum("ihm,jhm->hij", q, k) * torch.where(near, f, 0.0).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.einsum("hij,jhv->ihv", weights, v)
    torch.testing.assert_close(linear.normalised(sums), expected, rtol=0, atol=1e-12)


def test_peak_is_the_largest_finite_entry_of_a_segment():
    x = torch.tensor([[1.0], [5.0], [-torch.inf], [-torch.inf], [-3.0]], requires_grad=True)
    peak = segment_peak(x, torch.tensor([0, 0, 0, 1, 2]), 4)
    assert peak.flatten().tolist() == [5.0, 0.0, -3.0, 0.0]
    assert not peak.requires_grad


def test_shapes_that_do_not_belong_together_are_refused():
    i, j = draw_pairs()
    basis, weight, value = draw((P, T), (T, C), (K, C))
    with pytest.raises(ValueError, match=r"basis \(40, 5\).*\(P, T\), \(T, C\) and \(K, C\)"):
        pair_filter(basis, weight[:-1], value, i, j, N)
    with pytest.raises(ValueError, match="P = 39 pairs"):
        pair_filter(basis, weight, value, i[:-1], j[:-1], N)
