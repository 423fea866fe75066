"""One matrix for all heads: the products written out, and every derivative of them."""

import pytest
import torch
from flt_mol.functional.shared import joint_product, shared_product

from flt_mol.functional.feature_maps import (
    SharedLogits,
    position_logits,
    project_positions,
    softmax_log_features,
)

N, R, H, M, D = 7, 4, 3, 5, 2
F64 = torch.float64


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64)


def inputs():
    shapes = (N, R), (H, R, M), (H, N, D), (H, D, M)
    return [draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def test_products_are_those_of_their_formulas():
    shared, own, rows, columns = inputs()
    expected = torch.einsum("nr,hrm->hnm", shared, own)
    torch.testing.assert_close(shared_product(shared, own), expected, rtol=0, atol=1e-13)
    expected = expected + torch.einsum("hnd,hdm->hnm", rows, columns)
    torch.testing.assert_close(
        joint_product(shared, own, rows, columns), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("function", [shared_product, joint_product])
@pytest.mark.parametrize("fixed", [None, 0, 1, 2, 3])
def test_first_and_second_derivatives(function, fixed):
    tensors = inputs()[: 2 if function is shared_product else 4]
    if fixed is not None and fixed < len(tensors):
        tensors[fixed].requires_grad_(False)
    torch.autograd.gradcheck(function, tensors)
    torch.autograd.gradgradcheck(function, tensors)


def test_the_operators_are_sound_and_compile():
    tensors = inputs()
    torch.library.opcheck(torch.ops.flt_mol.shared_product.default, tensors[:2])
    torch.library.opcheck(torch.ops.flt_mol.joint_product.default, tensors)
    torch.library.opcheck(
        torch.ops.flt_mol.shared_product_sum.default,
        (draw(H, N, M).requires_grad_(), draw(H, R, M).requires_grad_()),
    )


@pytest.mark.parametrize("turned", [False, True])
def test_logits_put_off_are_logits_at_once(turned):
    basis, weight, projection = draw(N, 4), draw(H, 4, seed=1), draw(H, M, 4, seed=2)
    turn = draw(H, 4, seed=3) if turned else None
    x, w = draw(N, H, D, seed=4), draw(H, M, D, seed=5)
    lazy = position_logits(basis, weight, projection, turn)
    assert isinstance(lazy, SharedLogits)
    at_once = project_positions(basis, weight, projection, turn)
    torch.testing.assert_close(
        softmax_log_features(x, w, lazy), softmax_log_features(x, w, at_once), rtol=0, atol=1e-12
    )
    own = draw(N, H, 4, seed=6)
    assert torch.equal(
        position_logits(own, weight, projection, turn),
        project_positions(own, weight, projection, turn),
    )
