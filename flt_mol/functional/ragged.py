"""Products with one matrix per system, all in one flat buffer, as single steps for autograd.

A batch of B matrices per head, n_b × m_b for system b, is a tensor `blocks` (H, S): system b's lie
in ``blocks[:, start:stop]``, row by row. `layout` (3, B + 1) int64 says where: its rows are the
offsets of the systems among the rows, among the columns, and in the buffer. A system whose piece
of the buffer is empty has no matrix, its products are 0.

The three operations A·y, Aᵀ·x and x·yᵀ are each other's derivatives, so any number of
derivatives works, and torch.compile sees no loop over systems.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flt_mol.functional.groups import operator, without_autocast

# Rows of a system from which a product with its transposed matrix is formed transposed, too.
LONG = 4096


def ragged_layout(rows: Tensor, columns: Tensor, present: Tensor | None = None) -> Tensor:
    """`layout` of matrices n_b × m_b from the offsets (B + 1,) of their rows and columns.

    Args:
        rows: (B + 1,) int64.
        columns: (B + 1,) int64.
        present: (B,) bool, which systems have a matrix; None is all.

    Example:
        >>> ragged_layout(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 9]))
        tensor([[ 0,  2,  3],
                [ 0,  4,  9],
                [ 0,  8, 13]])
    """
    sizes = rows.diff() * columns.diff()
    if present is not None:
        sizes = sizes * present
    return torch.stack([rows, columns, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])])


def ragged_product(blocks: Tensor, y: Tensor, layout: Tensor, num_rows: int) -> Tensor:
    """A_b·y_b for every system and head: (H, S), (M, H, D) → (N, H, D), N = `num_rows`."""
    out: Tensor = _product(blocks, y, layout, num_rows)
    return out


def ragged_transposed_product(
    blocks: Tensor, x: Tensor, layout: Tensor, num_columns: int
) -> Tensor:
    """A_bᵀ·x_b for every system and head: (H, S), (N, H, D) → (M, H, D), M = `num_columns`."""
    out: Tensor = _transposed(blocks, x, layout, num_columns)
    return out


def ragged_outer(x: Tensor, y: Tensor, layout: Tensor, size: int) -> Tensor:
    """x_b·y_bᵀ for every system and head: (N, H, D), (M, H, D) → (H, S), S = `size`."""
    out: Tensor = _outer(x, y, layout, size)
    return out


def systems_of(layout: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, columns and piece of the buffer of every system that has a matrix."""
    for parts in zip(*(pairwise(offsets) for offsets in layout.tolist()), strict=True):
        rows, columns, piece = (slice(*part) for part in parts)
        if piece.stop > piece.start:
            yield rows, columns, piece


def matrices(blocks: Tensor, rows: slice, columns: slice, piece: slice) -> Tensor:
    """(…, S) → (…, n_b, m_b), the matrices of one system, as a view."""
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    view: Tensor = blocks[..., piece].unflatten(-1, shape)
    return view


@operator("ragged_product")
def _product(blocks: Tensor, y: Tensor, layout: Tensor, num_rows: int) -> Tensor:
    out = y.new_zeros(num_rows, *y.shape[1:])
    with without_autocast(y):
        for rows, columns, piece in systems_of(layout):
            matrix = matrices(blocks, rows, columns, piece)
            out[rows] = matrix.bmm(y[columns].transpose(0, 1)).transpose(0, 1)
    return out


@_product.register_fake
def _(blocks: Tensor, y: Tensor, layout: Tensor, num_rows: int) -> Tensor:
    return y.new_empty(num_rows, *y.shape[1:])


@operator("ragged_transposed_product")
def _transposed(blocks: Tensor, x: Tensor, layout: Tensor, num_columns: int) -> Tensor:
    out = x.new_zeros(num_columns, *x.shape[1:])
    with without_autocast(x):
        for rows, columns, piece in systems_of(layout):
            matrix, width = matrices(blocks, rows, columns, piece), x.shape[2]
            if len(x[rows]) >= LONG and width < matrix.shape[-1]:
                # Long sums run twice as fast with the few numbers as rows.
                out[columns] = x[rows].permute(1, 2, 0).bmm(matrix).permute(2, 0, 1)
            else:
                out[columns] = matrix.mT.bmm(x[rows].transpose(0, 1)).transpose(0, 1)
    return out


@_transposed.register_fake
def _(blocks: Tensor, x: Tensor, layout: Tensor, num_columns: int) -> Tensor:
    return x.new_empty(num_columns, *x.shape[1:])


@operator("ragged_outer")
def _outer(x: Tensor, y: Tensor, layout: Tensor, size: int) -> Tensor:
    out = x.new_zeros(x.shape[1], size)
    with without_autocast(x):
        for rows, columns, piece in systems_of(layout):
            product = x[rows].transpose(0, 1).bmm(y[columns].permute(1, 2, 0))
            out[:, piece] = product.flatten(1)
    return out


@_outer.register_fake
def _(x: Tensor, y: Tensor, layout: Tensor, size: int) -> Tensor:
    return x.new_empty(x.shape[1], size)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, layout, _ = inputs
    ctx.save_for_backward(first, second, layout)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    blocks, y, layout = ctx.saved_tensors
    to_blocks, to_y = ctx.needs_input_grad[:2]
    return (
        _outer(grad, y, layout, blocks.shape[-1]) if to_blocks else None,
        _transposed(blocks, grad, layout, y.shape[0]) if to_y else None,
        None,
        None,
    )


def _transposed_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    blocks, x, layout = ctx.saved_tensors
    to_blocks, to_x = ctx.needs_input_grad[:2]
    return (
        _outer(x, grad, layout, blocks.shape[-1]) if to_blocks else None,
        _product(blocks, grad, layout, x.shape[0]) if to_x else None,
        None,
        None,
    )


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, layout = ctx.saved_tensors
    to_x, to_y = ctx.needs_input_grad[:2]
    return (
        _product(grad, y, layout, x.shape[0]) if to_x else None,
        _transposed(grad, x, layout, y.shape[0]) if to_y else None,
        None,
        None,
    )


_product.register_autograd(_product_backward, setup_context=_setup)
_transposed.register_autograd(_transposed_backward, setup_context=_setup)
_outer.register_autograd(_outer_backward, setup_context=_setup)
