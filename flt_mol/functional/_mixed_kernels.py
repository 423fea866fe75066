"""Products with mixtures of matrices that all layers share, without holding the mixtures.

The form Σ_b Σ_h Σ_t a_ht g_hᵀ F_t v_h, over systems b with matrices F_t (n_b × n_b), is linear in
a, F, g and v. The three operators are its derivatives, and so are theirs. A system's mixture
Σ_t a_ht F_t is made again wherever it is needed: (H, n_b, n_b) stays in a core's cache, while those
of a batch would be kept for every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flt_mol.functional.groups import operator, without_autocast
from flt_mol.functional.ragged import systems_of


def mixed_product(amplitudes: Tensor, kernels: Tensor, value: Tensor, layout: Tensor) -> Tensor:
    """out_h = Σ_t a_ht F_t v_h of each system: (H, T), (T, P), (N, H, D) → (N, H, D).

    Args:
        amplitudes: a.
        kernels: F, matrices n_b × n_b with P entries in all.
        value: v.
        layout: (3, B + 1) of `ragged.ragged_layout`; systems without a matrix give 0.
    """
    out: Tensor = _product(amplitudes, kernels, value, layout, False)
    return out


@operator("mixed_product")
def _product(
    amplitudes: Tensor, kernels: Tensor, value: Tensor, layout: Tensor, transposed: bool
) -> Tensor:
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    with without_autocast(value):
        for rows, _, piece in systems_of(layout):
            n = rows.stop - rows.start
            mixed = torch.mm(amplitudes, kernels[:, piece]).view(-1, n, n)
            product = torch.bmm(mixed.mT if transposed else mixed, value[rows].transpose(0, 1))
            out[rows] = product.transpose(0, 1)
    return out


@_product.register_fake
def _(
    amplitudes: Tensor, kernels: Tensor, value: Tensor, layout: Tensor, transposed: bool
) -> Tensor:
    return value.new_empty(value.shape)


@operator("mixed_product_amplitudes")
def _amplitudes(grad: Tensor, kernels: Tensor, value: Tensor, layout: Tensor) -> Tensor:
    """∂/∂a = Σ_b g_hᵀ F_t v_h: (N, H, D), (T, P), (N, H, D) → (H, T)."""
    out = kernels.new_zeros(value.shape[1], kernels.shape[0])
    with without_autocast(value):
        for rows, _, piece in systems_of(layout):
            out.addmm_(_outer(grad, value, rows), kernels[:, piece].mT)
    return out


@_amplitudes.register_fake
def _(grad: Tensor, kernels: Tensor, value: Tensor, layout: Tensor) -> Tensor:
    return kernels.new_empty(value.shape[1], kernels.shape[0])


@operator("mixed_product_kernels")
def _kernels(amplitudes: Tensor, grad: Tensor, value: Tensor, layout: Tensor, size: int) -> Tensor:
    """∂/∂F = Σ_h a_ht g_h v_hᵀ of each system: (H, T), (N, H, D), (N, H, D) → (T, P)."""
    out = value.new_zeros(amplitudes.shape[1], size)
    with without_autocast(value):
        for rows, _, piece in systems_of(layout):
            out[:, piece] = amplitudes.mT @ _outer(grad, value, rows)
    return out


@_kernels.register_fake
def _(amplitudes: Tensor, grad: Tensor, value: Tensor, layout: Tensor, size: int) -> Tensor:
    return value.new_empty(amplitudes.shape[1], size)


def _outer(grad: Tensor, value: Tensor, rows: slice) -> Tensor:
    """g_h v_hᵀ of one system, (H, n²)."""
    return torch.bmm(grad[rows].transpose(0, 1), value[rows].permute(1, 2, 0)).flatten(1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.last = inputs[-1]


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    amplitudes, kernels, value, layout = ctx.saved_tensors
    to_amplitudes, to_kernels, to_value = ctx.needs_input_grad[:3]
    left, right = (value, grad) if ctx.last else (grad, value)
    size = kernels.shape[1]
    return (
        _amplitudes(left, kernels, right, layout) if to_amplitudes else None,
        _kernels(amplitudes, left, right, layout, size) if to_kernels else None,
        _product(amplitudes, kernels, grad, layout, not ctx.last) if to_value else None,
        *(None, None),
    )


def _amplitudes_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    left, kernels, right, layout = ctx.saved_tensors
    to_left, to_kernels, to_right = ctx.needs_input_grad[:3]
    return (
        _product(grad, kernels, right, layout, False) if to_left else None,
        _kernels(grad, left, right, layout, kernels.shape[1]) if to_kernels else None,
        _product(grad, kernels, left, layout, True) if to_right else None,
        None,
    )


def _kernels_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    amplitudes, left, right, layout = ctx.saved_tensors
    to_amplitudes, to_left, to_right = ctx.needs_input_grad[:3]
    return (
        _amplitudes(left, grad, right, layout) if to_amplitudes else None,
        _product(amplitudes, grad, right, layout, False) if to_left else None,
        _product(amplitudes, grad, left, layout, True) if to_right else None,
        *(None, None),
    )


_product.register_autograd(_product_backward, setup_context=_save)
_amplitudes.register_autograd(_amplitudes_backward, setup_context=_save)
_kernels.register_autograd(_kernels_backward, setup_context=_save)
