"""One matrix for all heads times a matrix of each: the product behind position features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flt_mol.functional.numerics import operator, without_autocast


def shared_product(shared: Tensor, own: Tensor) -> Tensor:
    """T·F_h for every head h, laid out by head, without copies of T or of the result.

    ``shared @ own`` is the same; torch computes it transposed, which leaves the result of a few
    thousand rows to be rearranged, here and in the backward pass.

    Args:
        shared: T (N, R).
        own: F (H, R, M), of the same dtype.

    Returns:
        (H, N, M).

    Example:
        >>> shared_product(torch.ones(2, 3), torch.ones(4, 3, 5)).shape
        torch.Size([4, 2, 5])
    """
    out: Tensor = _product(shared, own)
    return out


def joint_product(shared: Tensor, own: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """T·F_h + X_h·W_h for every head h: the product of concatenations [T, X_h]·[F_h; W_h].

    Args:
        shared: T (N, R).
        own: F (H, R, M).
        rows: X (H, N, D).
        columns: W (H, D, M), all four of one dtype.

    Returns:
        (H, N, M).
    """
    out: Tensor = _joint(shared, own, rows, columns)
    return out


@operator("joint_product")
def _joint(shared: Tensor, own: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return torch.bmm(rows, columns).baddbmm_(shared.expand(own.shape[0], -1, -1), own)


@_joint.register_fake
def _(shared: Tensor, own: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return shared.new_empty(own.shape[0], shared.shape[0], own.shape[2])


@operator("shared_product")
def _product(shared: Tensor, own: Tensor) -> Tensor:
    return torch.bmm(shared.expand(own.shape[0], -1, -1), own)


@_product.register_fake
def _(shared: Tensor, own: Tensor) -> Tensor:
    return shared.new_empty(own.shape[0], shared.shape[0], own.shape[2])


@operator("shared_product_sum")
def _sum(grad: Tensor, own: Tensor) -> Tensor:
    """Σ_h G_h F_hᵀ, the gradient to T, one head after the other."""
    out = grad.new_zeros(grad.shape[1], own.shape[1])
    for g, f in zip(grad, own, strict=True):
        out.addmm_(g, f.T)
    return out


@_sum.register_fake
def _(grad: Tensor, own: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1], own.shape[1])


def _to_own(shared: Tensor, grad: Tensor) -> Tensor:
    """Tᵀ G_h, the gradient to F."""
    return torch.bmm(shared.T.expand(grad.shape[0], -1, -1), grad)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _save_joint(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    shared, own, rows, columns = inputs
    # Rows serve the gradient of the columns alone, which random directions do not have.
    ctx.save_for_backward(shared, own, rows if ctx.needs_input_grad[3] else None, columns)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shared, own = ctx.saved_tensors
    to_shared, to_own = ctx.needs_input_grad
    with without_autocast(grad):
        return (
            _sum(grad, own) if to_shared else None,
            _to_own(shared, grad) if to_own else None,
        )


def _joint_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shared, own, rows, columns = ctx.saved_tensors
    to_shared, to_own, to_rows, to_columns = ctx.needs_input_grad
    with without_autocast(grad):
        return (
            _sum(grad, own) if to_shared else None,
            _to_own(shared, grad) if to_own else None,
            torch.bmm(grad, columns.mT) if to_rows else None,
            torch.bmm(rows.mT, grad) if to_columns else None,
        )


def _sum_backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    grad, own = ctx.saved_tensors
    to_grad, to_own = ctx.needs_input_grad
    with without_autocast(cotangent):
        return (
            _product(cotangent, own) if to_grad else None,
            _to_own(cotangent, grad) if to_own else None,
        )


_product.register_autograd(_product_backward, setup_context=_save)
_joint.register_autograd(_joint_backward, setup_context=_save_joint)
_sum.register_autograd(_sum_backward, setup_context=_save)
