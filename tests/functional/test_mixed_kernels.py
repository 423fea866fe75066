"""Products with mixtures of shared matrices, against mixtures that are formed."""

import pytest
import torch

from flt_mol.functional._mixed_kernels import mixed_product
from flt_mol.functional.ragged import ragged_layout, ragged_product


def _inputs(offsets, present=None):
    draw = torch.Generator().manual_seed(0)
    ptr = torch.tensor(offsets)
    layout = ragged_layout(ptr, ptr, present)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    size = int(layout[2, -1])
    return normal(3, 4), normal(4, size), normal(offsets[-1], 3, 5), layout


def _reference(amplitudes, kernels, value, layout):
    return ragged_product(amplitudes @ kernels, value, layout, len(value))


@pytest.mark.parametrize("offsets", [[0, 3, 3, 4, 9], [0, 5]])
@pytest.mark.parametrize("some", [False, True])
def test_values_and_gradients(offsets, some):
    present = torch.arange(len(offsets) - 1) % 2 == 0 if some else None
    *given, layout = _inputs(offsets, present)
    results = []
    for form in (mixed_product, _reference):
        out = form(*given, layout)
        first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        total = sum(x.square().sum() for x in first)
        results.append([out, *first, *torch.autograd.grad(total, given)])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


def test_matrices_need_not_be_symmetric_and_derivatives_hold_by_differences():
    *given, layout = _inputs([0, 2, 4])
    assert torch.autograd.gradcheck(lambda *x: mixed_product(*x, layout), given)
    assert torch.autograd.gradgradcheck(lambda *x: mixed_product(*x, layout), given)


def test_is_a_proper_operator():
    *given, layout = _inputs([0, 2, 4])
    torch.library.opcheck(torch.ops.flt_mol.mixed_product.default, (*given, layout, False))
    torch.library.opcheck(torch.ops.flt_mol.mixed_product.default, (*given, layout, True))
