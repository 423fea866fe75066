"""Packed forwards as one graph: torch.compile without breaks, torch.export, promises of the ops."""

import pytest
import torch
from torch import nn

from flt_mol.functional.causal import causal_attention, causal_log_attention
from flt_mol.functional.exact import exact_attention
from flt_mol.functional.feature_maps import (
    softmax_log_features,
    stabilised_features,
)
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import offsets_of
from flt_mol.functional.linear import linear_attention

pytestmark = pytest.mark.slow
H, D, M = 2, 4, 5
F64 = torch.float64
CASES = [([0, 2, 2, 5], [0, 1, 4, 4]), ([0, 0, 4, 9], [0, 3, 3, 8])]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).requires_grad_()


WEIGHT, PLACES = draw(H, M, D + 6, seed=7).detach(), draw(50, 6, seed=8).detach()


def linear(q, k, v, ptr, key_ptr):
    w, at = WEIGHT, PLACES
    one = torch.ones(1, 6, dtype=F64)
    logits, key_logits = (
        softmax_log_features(
            x, w[..., :D], PositionFeatures(at[: len(x)], one, one), w[..., D:], subtract_norm=norm
        )
        for x, norm in ((q, False), (k, True))
    )
    return linear_attention(*stabilised_features(logits, key_logits, ptr, key_ptr), v, ptr, key_ptr)


FORMS = {
    "linear": linear,
    "exact": exact_attention,
    "exact causal": lambda q, k, v, ptr, _: exact_attention(q, q * 2, q, ptr, causal=True),
    "causal": lambda q, k, v, ptr, _: causal_attention(q.exp(), q.cos().exp(), q, ptr),
    "causal log": lambda q, k, v, ptr, _: causal_log_attention(q, q * 2, q, ptr),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [True, False])
def test_attention_is_one_graph_forwards_and_backwards(form, dynamic):
    run = torch.compile(FORMS[form], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for case in CASES if dynamic else CASES[:1]:
        ptr, key_ptr = (torch.tensor(x) for x in case)
        keys = int(key_ptr[-1])
        inputs = [draw(int(ptr[-1]), H, D), draw(keys, H, D, seed=1), draw(keys, H, 3, seed=2)]
        out, expected = run(*inputs, ptr, key_ptr), FORMS[form](*inputs, ptr, key_ptr)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        seed = torch.randn_like(out)
        found = torch.autograd.grad(out, inputs, seed, materialize_grads=True)
        truth = torch.autograd.grad(expected, inputs, seed, materialize_grads=True)
        for x, y in zip(found, truth, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("linear_attention", mode) for mode in ("features", "log", "sums")),
        *(("exact_attention", mode) for mode in ("all", "causal")),
        *(("causal_attention", mode) for mode in ("features", "log")),
    ],
)
def test_operators_keep_their_promises_to_torch(name, mode):
    ptr = torch.tensor([0, 2, 4])
    q, k, v = draw(H, 5, D), draw(H, 5, D, seed=1), draw(H, 5, 3, seed=2)
    q, k = (x.detach().abs().requires_grad_() for x in (q, k))
    torch.library.opcheck(
        getattr(torch.ops.flt_mol, name).default, (q, k, v, ptr, ptr.clone(), mode)
    )


class Attention(nn.Module):
    """A small layer of what is exported."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(draw(H, M, D, seed=4).detach())

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
    rows = torch.export.Dim("rows", min=2, max=1000)
    given = draw(6, H, D).detach(), torch.tensor([0, 1, 0, 1, 1, 3])
    exported = torch.export.export(
        module, given, dynamic_shapes=({0: rows}, {0: rows}), strict=strict
    ).module()
    for count in (6, 9):
        x = draw(count, H, D, seed=count)
        system = torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(count))
        torch.testing.assert_close(exported(x, system), module(x, system), rtol=0, atol=1e-12)
