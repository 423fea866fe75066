import pytest
import torch
from periodic import F64, batch, kept_sizes, lengths, over_images, seeded, supercell

from flt_mol.functional import _image_ops, softmax_attention
from flt_mol.functional.images import image_attention, log_sum_over_images
from flt_mol.functional.neighbors import neighbor_pairs

H, D, V, CUTOFF = 2, 3, 4, 4.2
NAMES = ("positions", "cell", "q", "k", "v")


@pytest.fixture(params=["matrix", "pairs"])
def way(request, monkeypatch):
    """Both ways through the operator, whatever the sizes."""
    monkeypatch.setattr(_image_ops, "_PAIR_COST", 10**9 if request.param == "matrix" else 0)


def draw(rows, dtype=F64, seed=1):
    generator = seeded(seed)
    return [
        torch.randn(rows, H, width, generator=generator, dtype=F64).to(dtype).requires_grad_()
        for width in (D, D, V)
    ]


def mask(vectors):
    """Any f(x) per head, not symmetrical."""
    r = lengths(vectors)[..., None]
    return torch.cat([1.5 * (-(r**2) / 4).exp(), (vectors[..., :1] - r).sin()], -1)


def log_window(vectors):
    u = lengths(vectors) / CUTOFF
    inside = u < 1
    u = torch.where(inside, u, 0.0)
    window = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
    return torch.where(inside, window.log(), -torch.inf)[..., None]


def by_images(positions, cell, pbc, ptr, q, k, v):
    """exp(q·k) Σ_T exp(f(r + T)) window(r + T), a loop over T, then the quotient."""
    numerator, denominator = torch.zeros_like(v), torch.zeros_like(v[..., :1])
    for rows, _, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        logits = torch.einsum("ihd,jhd->ijh", q[rows], k[rows]) * D**-0.5
        weight = (logits + mask(vectors) + log_window(vectors)).exp()
        index = torch.arange(rows.start, rows.stop)
        part = torch.einsum("ijh,jhv->ihv", weight, v[rows])
        numerator = numerator.index_add(0, index, part)
        denominator = denominator.index_add(0, index, weight.sum(1)[:, :, None])
    return numerator / denominator


def by_pairs(positions, cell, pbc, ptr, q, k, v, *, grouped=False):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    vectors = pairs.vectors(positions, cell, ptr)
    i, j, log_weight = pairs.index_i, pairs.index_j, mask(vectors) + log_window(vectors)
    if grouped:
        i, j, group = pairs.groups()
        log_weight = log_sum_over_images(log_weight, group, len(i))
    return image_attention(q, k, v, ptr, i, j, log_weight)


def system_and_inputs(sizes=(5, 0, 1, 6), dtype=F64):
    positions, cell, pbc, ptr = batch(sizes)
    q, k, v = draw(len(positions), dtype)
    return (positions.to(dtype).requires_grad_(), cell.to(dtype).requires_grad_(), pbc, ptr), (
        q,
        k,
        v,
    )


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-4)])
def test_values_and_gradients_are_those_of_the_sum_over_images(way, grouped, dtype, tolerance):
    system, qkv = system_and_inputs(dtype=dtype)
    out, expected = by_pairs(*system, *qkv, grouped=grouped), by_images(*system, *qkv)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    inputs = dict(zip(NAMES, [*system[:2], *qkv], strict=True))
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64).to(dtype)
    gradients = torch.autograd.grad(out, inputs.values(), seed)
    truth = torch.autograd.grad(expected, inputs.values(), seed)
    for name, gradient, true in zip(inputs, gradients, truth, strict=True):
        torch.testing.assert_close(
            gradient, true, rtol=0, atol=10 * tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_pairs_in_any_order_give_the_same(way):
    system, qkv = system_and_inputs()
    pairs = neighbor_pairs(*system, CUTOFF, self_pairs=True)
    log_weight = torch.randn(len(pairs.index_i), H, generator=seeded(), dtype=F64)
    shuffle = torch.randperm(len(pairs.index_i), generator=seeded())
    outs = []
    for order in (torch.arange(len(shuffle)), shuffle):
        w = log_weight[order].requires_grad_()
        out = image_attention(*qkv, system[3], pairs.index_i[order], pairs.index_j[order], w)
        (gradient,) = torch.autograd.grad(out.sin().sum(), w)
        outs.append((out, torch.empty_like(gradient).index_copy(0, order, gradient)))
    for first, second in zip(*outs, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_with_all_pairs_and_no_mask_it_is_softmax_attention(way):
    q, k, v = draw(8)
    ptr = torch.tensor([0, 3, 3, 8])
    same = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5))
    i, j = same.nonzero().T
    out = image_attention(q, k, v, ptr, i, j, torch.zeros(len(i), H), scale=0.7)
    expected = softmax_attention(q, k, v, ptr, scale=0.7)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("times", [(2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-5)])
def test_atoms_of_a_supercell_have_the_same_output(way, grouped, times, dtype, tolerance):
    system, qkv = system_and_inputs((6,), dtype)
    positions, cell, pbc, ptr = system
    large, large_cell, large_ptr = supercell(positions, cell, times)
    copies = len(large) // len(positions)
    tiled = [x.repeat(copies, 1, 1) for x in qkv]
    out = by_pairs(large, large_cell, pbc, large_ptr, *tiled, grouped=grouped)
    expected = by_pairs(positions, cell, pbc, ptr, *qkv, grouped=grouped)
    torch.testing.assert_close(out, expected.repeat(copies, 1, 1), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "need", [(True,) * 4, (False, False, True, True), (True, False, True, False)]
)
def test_first_and_second_derivatives(way, need):
    positions, cell, pbc, ptr = batch((3, 0, 1, 3))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 3.5, self_pairs=True)
    log_weight = torch.randn(len(pairs.index_i), H, generator=seeded(), dtype=F64)
    inputs = [
        x.detach().requires_grad_(n) for x, n in zip((*draw(7), log_weight), need, strict=True)
    ]

    def call(q, k, v, log_weight):
        return image_attention(q, k, v, ptr, pairs.index_i, pairs.index_j, log_weight)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_forces_can_be_trained_on(way):
    system, qkv = system_and_inputs((3, 1))
    penalties = []
    for attention in (by_pairs, by_images):
        energy = attention(*system, *qkv).sin().sum()
        (force,) = torch.autograd.grad(energy, system[0], create_graph=True)
        penalties.append(torch.autograd.grad(force.square().sum(), [system[0], *qkv]))
    for fast, slow in zip(*penalties, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits_leave_no_nan(way, size):
    _, (q, k, v) = system_and_inputs()
    positions, cell, pbc, ptr = batch()
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    log_weight = torch.full((len(pairs.index_i), H), size, requires_grad=True)
    out = image_attention(q * 100, k * 100, v, ptr, pairs.index_i, pairs.index_j, log_weight)
    assert (q @ k.mT).abs().max() * 1e4 > 1e4
    for gradient in torch.autograd.grad(out.sum(), (q, k, v, log_weight)):
        assert gradient.isfinite().all()
    q0 = torch.zeros_like(q)
    shifted = image_attention(q0, k, v, ptr, pairs.index_i, pairs.index_j, log_weight)
    plain = image_attention(
        q0, k, v, ptr, pairs.index_i, pairs.index_j, torch.zeros_like(log_weight)
    )
    # Float32 numbers at 10⁴ are 10⁻³ apart.
    torch.testing.assert_close(shifted, plain, rtol=0, atol=2e-3)


def test_weights_of_zero_are_pairs_left_out(way):
    q, k, v = draw(4)
    i, j = torch.ones(4, 4).nonzero().T
    kept = torch.tensor([True, False, True, True, False]).repeat(4)[:16] & (i != 2)
    log_weight = torch.where(kept, 0.3, -torch.inf)[:, None].repeat(1, H).requires_grad_()
    ptr = torch.tensor([0, 4])
    out = image_attention(q, k, v, ptr, i, j, log_weight)
    inputs = (q, k, v, log_weight)
    gradients = torch.autograd.grad(out.sin().sum(), inputs)
    fewer = log_weight.detach()[kept].requires_grad_()
    expected = image_attention(q, k, v, ptr, i[kept], j[kept], fewer)
    truth = list(torch.autograd.grad(expected.sin().sum(), (q, k, v, fewer)))
    truth[3] = torch.zeros_like(log_weight).index_put((kept.nonzero()[:, 0],), truth[3])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-12)
    assert (out[2] == 0).all()  # all of its pairs are left out
    assert (out[0] != 0).all()


def test_rows_without_pairs_and_no_pairs_at_all(way):
    q, k, v = draw(5)
    i, j = torch.tensor([0, 0, 3]), torch.tensor([0, 1, 4])
    out = image_attention(q, k, v, torch.tensor([0, 2, 5]), i, j, torch.zeros(3, H))
    assert (out[[1, 2, 4]] == 0).all()
    torch.testing.assert_close(out[3], v[4])
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="self_pairs=True"):
        image_attention(q, k, v, torch.tensor([0, 2, 5]), none, none, torch.zeros(0, H))
    empty = image_attention(
        *(x[:0] for x in (q, k, v)), torch.tensor([0, 0]), none, none, torch.zeros(0, H)
    )
    assert empty.shape == (0, H, V)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_other_systems_leave_no_trace(way, poison):
    positions, cell, pbc, ptr = batch((5, 0, 1, 6))
    qkv = [x.detach() for x in draw(12)]
    dirty = [x.index_fill(0, torch.arange(6), poison) for x in qkv]
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    log_weight = mask(pairs.vectors(positions, cell, ptr))
    together = image_attention(*dirty, ptr, pairs.index_i, pairs.index_j, log_weight)
    own = pairs.index_i >= 6
    alone = image_attention(
        *(x[6:] for x in qkv),
        torch.tensor([0, 6]),
        pairs.index_i[own] - 6,
        pairs.index_j[own] - 6,
        log_weight[own],
    )
    assert torch.equal(together[6:], alone)


def test_small_systems_go_through_a_matrix_and_large_ones_along_pairs():
    sizes, pairs_each = (4, 40), 70
    ptr = torch.tensor([0, 4, 44])
    i = torch.cat([torch.arange(16) // 4, 4 + torch.arange(pairs_each) % 40]).sort().values
    j = torch.cat([torch.arange(16) % 4, 4 + torch.arange(pairs_each) * 7 % 40])
    groups = _image_ops._grouped(torch.zeros(len(i), H), i, j, 44)
    forms = [form for _, _, form in _image_ops._systems(ptr, 44, groups)]
    assert [type(form).__name__ for form in forms] == ["_Matrix", "_Pairs"]
    assert [form.size for form in forms] == list(sizes)


def test_nothing_per_pair_is_kept_but_the_log_weights():
    positions, cell, pbc, ptr = batch((20,))
    qkv = draw(20)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 6.0, self_pairs=True)
    log_weight = torch.zeros(len(pairs.index_i), H, dtype=F64, requires_grad=True)
    kept = kept_sizes(lambda: image_attention(*qkv, ptr, pairs.index_i, pairs.index_j, log_weight))
    assert len(log_weight) > 1000
    assert sum(kept) <= log_weight.numel() + 2 * len(log_weight) + 5 * 20 * H * V


def test_autocast_changes_nothing(way):
    positions, cell, pbc, ptr = batch()
    qkv = draw(12, torch.float32)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    arguments = (ptr, pairs.index_i, pairs.index_j, torch.zeros(len(pairs.index_i), H))
    plain = image_attention(*qkv, *arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = image_attention(*qkv, *arguments)
        assert torch.equal(cast, plain)
        gradients = torch.autograd.grad(cast.sum(), qkv)
    for gradient, true in zip(gradients, torch.autograd.grad(plain.sum(), qkv), strict=True):
        assert torch.equal(gradient, true)
    half = [x.detach().bfloat16() for x in qkv]
    assert image_attention(*half, *arguments).dtype == torch.float32


def test_it_compiles_as_one_graph_and_torch_finds_no_fault():
    positions, cell, pbc, ptr = batch()
    qkv = draw(12)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    log_weight = torch.zeros(len(pairs.index_i), H, dtype=F64, requires_grad=True)
    arguments = (*qkv, ptr, pairs.index_i, pairs.index_j, log_weight)
    compiled = torch.compile(image_attention, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*arguments), image_attention(*arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    inputs = (*qkv, log_weight)
    seed = torch.ones_like(out)
    for gradient, true in zip(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(expected, inputs, seed),
        strict=True,
    ):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-12)
    operands = (*qkv, log_weight, ptr, pairs.index_i, pairs.index_j)
    torch.library.opcheck(_image_ops.image_attention, operands)


def test_log_sum_over_images_has_finite_gradients_for_groups_without_weight():
    log_weight = torch.tensor([[0.0], [-1.0], [-torch.inf], [-torch.inf]], requires_grad=True)
    out = log_sum_over_images(log_weight, torch.tensor([0, 0, 1, 1]), 3)
    truth = torch.tensor([[1.0 + torch.tensor(-1.0).exp()], [0.0], [0.0]]).log()
    torch.testing.assert_close(out, truth)
    out[0].sum().backward()
    torch.testing.assert_close(log_weight.grad[:2].sum(), torch.tensor(1.0))
    assert (log_weight.grad[2:] == 0).all()


def test_shapes_that_do_not_belong_together_are_refused():
    q, k, v = draw(4)
    i = torch.arange(4)
    with pytest.raises(ValueError, match="log_weight has shape"):
        image_attention(q, k, v, torch.tensor([0, 4]), i, i, torch.zeros(4, H + 1))
    with pytest.raises(ValueError, match="ptr must"):
        image_attention(q, k, v, torch.tensor([0, 3]), i, i, torch.zeros(4, H))
