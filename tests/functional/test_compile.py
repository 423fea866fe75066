"""Packed forwards as one graph: torch.compile without breaks, torch.export, promises of the ops."""

import pytest
import torch
from torch import nn

from flt_mol.functional.exact import exact_attention
from flt_mol.functional.feature_maps import (
    elu_features,
    hyperbolic_log_features,
    project_positions,
    relu_features,
    softmax_log_features,
    softplus_log_features,
    stabilised_features,
)
from flt_mol.functional.groups import (
    centred,
    first_per_system,
    index_in_system,
    max_per_system,
    mean_per_system,
    offsets_of,
    offsets_of_both,
    spread,
)
from flt_mol.functional.linear import linear_attention, read_back

H, D, M = 2, 4, 5
F64 = torch.float64
CASES = [([0, 2, 2, 5], [0, 1, 4, 4]), ([0, 0, 4, 9], [0, 3, 3, 8])]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(rows, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=F64).requires_grad_()
        for shape in ((rows, H, D), (keys, H, D), (keys, H, 3))
    ]


def offsets(case):
    return [torch.tensor(x) for x in case]


def softmax_path(q, k, v, ptr, key_ptr, w, at, key_at, weight):
    logits, key_logits = (
        softmax_log_features(
            x, w[..., :D], project_positions(r, weight, w[..., D:]), subtract_norm=norm
        )
        for x, r, norm in ((q, at, False), (k, key_at, True))
    )
    return linear_attention(*stabilised_features(logits, key_logits, ptr, key_ptr), v, ptr, key_ptr)


def other_maps(q, k, v, ptr, key_ptr, w):
    w, b = w[..., :D], w[..., 0]
    # Features side by side are features too: all maps in one graph.
    logits, key_logits = (
        torch.cat([hyperbolic_log_features(x, w), softplus_log_features(x, w, b)], -1)
        for x in (q, k)
    )
    features, key_features = stabilised_features(logits, key_logits, ptr, key_ptr)
    others, key_others = (torch.cat([relu_features(x, w), elu_features(x)], -1) for x in (q, k))
    return linear_attention(
        torch.cat([features, others], -1),
        torch.cat([key_features, key_others], -1),
        v,
        ptr,
        key_ptr,
    )


def same_forward_and_backward(function, arguments_of, dynamic):
    """The compiled function's values and gradients are those of the function."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for case in CASES if dynamic else CASES[:1]:  # without dynamic, each size is compiled anew
        arguments = arguments_of(case)
        leaves = [x for x in arguments if x.requires_grad]
        out, expected = compiled(*arguments), function(*arguments)
        assert out.abs().max() > 0.01
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        seed = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, seed)
        truth = torch.autograd.grad(expected, leaves, seed)
        for gradient, true in zip(found, truth, strict=True):
            torch.testing.assert_close(gradient, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("path", "dynamic"), [(softmax_path, True), (softmax_path, False), (other_maps, False)]
)
def test_linear_attention_is_one_graph(path, dynamic):
    def arguments_of(case):
        ptr, key_ptr = offsets(case)
        q, k, v = draw(int(ptr[-1]), int(key_ptr[-1]))
        generator = torch.Generator().manual_seed(1)
        shapes = [(H, M, D + 6), (len(q), 6), (len(k), 6), (H, 6)]
        others = [
            torch.randn(shape, generator=generator, dtype=F64).requires_grad_()
            for shape in (shapes if path is softmax_path else shapes[:1])
        ]
        return [q, k, v, ptr, key_ptr, *others]

    same_forward_and_backward(path, arguments_of, dynamic)


@pytest.mark.parametrize(("causal", "dynamic"), [(False, True), (True, True), (True, False)])
def test_exact_attention_is_one_graph(causal, dynamic):
    def attend(q, k, v, ptr, key_ptr):
        return exact_attention(q, k, v, ptr, None if causal else key_ptr, causal=causal)

    def arguments_of(case):
        ptr, key_ptr = offsets(case)
        return [*draw(int(ptr[-1]), int((ptr if causal else key_ptr)[-1])), ptr, key_ptr]

    same_forward_and_backward(attend, arguments_of, dynamic)


def test_helpers_of_the_packed_layout_are_one_graph():
    def summary(x, ptr):
        parts = [reduce(x, ptr) for reduce in (mean_per_system, first_per_system)]
        largest = max_per_system(x, ptr).nan_to_num(neginf=0.0)
        index = index_in_system(ptr, x.shape[0])[:, None]
        return spread(sum(parts) * largest, ptr, x.shape[0]) + centred(x, ptr) * index

    def arguments_of(case):
        ptr = torch.tensor(case[0])
        return [draw(int(ptr[-1]), 0)[0].detach()[:, 0].clone().requires_grad_(), ptr]

    same_forward_and_backward(summary, arguments_of, dynamic=True)


@pytest.mark.parametrize(("num_systems", "dynamic"), [(None, True), (6, False)])
def test_systems_in_any_order_are_one_graph(num_systems, dynamic):
    def attend(q, k, v, system):
        ptr, order = offsets_of(system, num_systems)
        if order is not None:
            q, k, v = q[order], k[order], v[order]
        out = exact_attention(q, k, v, ptr)
        return out if order is None else torch.empty_like(out).index_copy(0, order, out)

    def arguments_of(case):
        rows = case[0][-1]
        generator = torch.Generator().manual_seed(2)
        return [*draw(rows, rows), torch.randint(1, 6, (rows,), generator=generator)]

    same_forward_and_backward(attend, arguments_of, dynamic)


def test_systems_of_two_sets_are_one_graph():
    def attend(q, k, v, system, key_system):
        ptr, order, key_ptr, key_order = offsets_of_both(system, key_system)
        if order is not None:
            q = q[order]
        if key_order is not None:
            k, v = k[key_order], v[key_order]
        out = exact_attention(q, k, v, ptr, key_ptr)
        return out if order is None else torch.empty_like(out).index_copy(0, order, out)

    def arguments_of(case):
        generator = torch.Generator().manual_seed(3)
        rows, keys = case[0][-1], case[1][-1]
        systems = (torch.randint(0, 4, (n,), generator=generator) for n in (rows, keys))
        return [*draw(rows, keys), *systems]

    same_forward_and_backward(attend, arguments_of, dynamic=True)


def test_autocast_is_the_same_inside_a_graph():
    def attend(q, k, v, ptr, key_ptr):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = (q.transpose(0, 1) @ k.transpose(0, 1).mT).sum().float() * 0
            return linear_attention(q.exp(), k.exp(), v, ptr, key_ptr) + mixed

    ptr, key_ptr = offsets(CASES[0])
    q, k, v = (x.detach().float() for x in draw(5, 4))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, ptr, key_ptr), attend(q, k, v, ptr, key_ptr))


OPS = {
    "read_back": lambda q, k, v, ptr, key_ptr: (q, k, v, ptr, key_ptr),
    "read_back_gradients": lambda q, k, v, ptr, key_ptr: (q[..., :3], q, k, v, ptr, key_ptr),
    "stabilised_features": lambda q, k, v, ptr, key_ptr: (q, k, ptr, key_ptr),
    "exact_attention": lambda q, k, v, ptr, key_ptr: (q, k, v, ptr, key_ptr, 0.5, False),
    "exact_attention_gradients": lambda q, k, v, ptr, key_ptr: (
        *(q[..., :3].detach(), q[..., 1:].detach(), q, k, v, ptr, key_ptr),
        *(0.5, False),
    ),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("case", "heads_first"),
    [(CASES[0], True), (([0, 5], [0, 4]), False), (([0, 2, 4], [0, 1, 3]), False)],
)
def test_operators_keep_their_promises_to_torch(name, case, heads_first):
    ptr, key_ptr = offsets(case)
    q, k, v = draw(max(5, int(ptr[-1])), max(4, int(key_ptr[-1])))  # the last case has padding
    q, k, v = (x.detach().transpose(0, 1) for x in (q, k, v))
    if heads_first:
        q, k, v = (x.contiguous() for x in (q, k, v))
    if "gradients" not in name:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    torch.library.opcheck(
        getattr(torch.ops.flt_mol, name).default, OPS[name](q, k, v, ptr, key_ptr)
    )


class Attention(nn.Module):
    """A small layer of all that is exported."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.weight = nn.Parameter(torch.randn(H, M, D, generator=generator, dtype=F64))

    def forward(self, x, system):
        ptr, order = offsets_of(system)
        rows = x if order is None else x[order]
        logits = softmax_log_features(rows, self.weight)
        out = linear_attention(*stabilised_features(logits, logits, ptr), rows, ptr)
        out = out + exact_attention(rows, rows, rows, ptr, causal=True)
        return out if order is None else torch.empty_like(out).index_copy(0, order, out)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_module_serves_other_sizes(strict):
    module = Attention()
    (x, *_), system = draw(6, 0), torch.tensor([0, 1, 0, 1, 1, 3])
    rows = torch.export.Dim("rows", min=2, max=1000)
    exported = torch.export.export(
        module, (x.detach(), system), dynamic_shapes=({0: rows}, {0: rows}), strict=strict
    ).module()
    for count in (6, 9):
        (x, *_) = draw(count, 0, seed=count)
        system = torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(count))
        torch.testing.assert_close(exported(x, system), module(x, system), rtol=0, atol=1e-12)


def test_a_bad_ptr_is_refused_in_eager_mode_and_padding_in_a_graph():
    q, k, v = (x.detach() for x in draw(5, 5))
    short = torch.tensor([0, 2, 3])
    compiled = torch.compile(exact_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="ptr must start at 0"):
        exact_attention(q, k, v, short)
    out = compiled(q, k, v, short)
    assert (out[3:] == 0).all()
    torch.testing.assert_close(out[:3], exact_attention(q[:3], k[:3], v[:3], short))


def test_queries_and_keys_may_be_one_tensor():
    x = draw(5, 5)[0].transpose(0, 1)
    ptr = torch.tensor([0, 2, 5])
    (once,) = torch.autograd.grad(read_back(x, x, x, ptr, ptr).sum(), x)
    copies = [x.detach().clone().requires_grad_() for _ in range(3)]
    parts = torch.autograd.grad(read_back(*copies, ptr, ptr).sum(), copies)
    torch.testing.assert_close(once, sum(parts))
