"""Fragments that lie far apart in open directions, brought together: sums need no empty space."""

from __future__ import annotations

import torch
from torch import Tensor


def brought_together(
    cell: Tensor, kept: Tensor, local: Tensor, ptr: Tensor, which: Tensor, padding: float
) -> tuple[Tensor, Tensor]:
    """Cells in which fragments lie `padding` apart, in a row, and how atoms are moved for it.

    Fragments are further apart than `padding` along an open direction. None touches another one
    before or after, so sums of functions that end there are the same.

    Args:
        cell: (B, 3, 3) float64 on CPU, Å, virtual vectors along the axes that atoms turn with.
        kept: (B, 3) bool, rows that are lattice vectors; the others are perpendicular to them.
        local: (N, 3), Å, on one side of the vacuum.
        ptr: (B + 1,).
        which: (B,) bool, the systems to look at; the others stay.
        padding: Å.

    Returns:
        Cells (B, 3, 3), and what to take off each atom (N, 3), Å.
    """
    cell, move = cell.clone(), torch.zeros_like(local)
    for b in (which & ~kept.all(-1)).nonzero().flatten().tolist():
        rows, free = slice(int(ptr[b]), int(ptr[b + 1])), ~kept[b]
        axes = torch.nn.functional.normalize(cell[b, free], dim=-1)
        along = (local[rows, None] * axes).sum(-1)
        shift = _shift_into_a_row(along, _fragments(along, padding), padding)
        along = along - shift
        move[rows] = (shift[..., None] * axes).sum(1)
        extent = along.amax(0) - along.amin(0)
        cell[b, free] = axes * (extent + padding)[:, None]
    return cell, move


def _fragments(along: Tensor, gap: float) -> Tensor:
    """Labels (n,) from 0 on: atoms (n, d) are cut wherever an axis has nothing for a whole `gap`.

    Parts are cut again, along all axes, until nothing is left to cut.
    """
    label = torch.zeros(len(along), dtype=torch.int64)
    while True:
        before = int(label.max())
        for column in along.T:
            order = torch.argsort(column, stable=True)
            order = order[torch.argsort(label[order], stable=True)]
            cut = (label[order].diff() > 0) | (column[order].diff() > gap)
            label = torch.empty_like(label)
            label[order] = torch.cat([cut.new_zeros(1), cut]).cumsum(0)
        if int(label.max()) == before:
            return label


def _shift_into_a_row(along: Tensor, label: Tensor, padding: float) -> Tensor:
    """What to take off (n, d): fragments in a row along the last axis, centred on the others."""
    count, index = int(label.max()) + 1, label[:, None].expand_as(along)
    empty = along.new_full((count, along.shape[1]), torch.inf)
    low = empty.scatter_reduce(0, index, along, "amin")
    high = (-empty).scatter_reduce(0, index, along, "amax")
    # In the order they have: whichever way the axis points, it is the same row.
    order = torch.argsort((low + high)[:, -1], stable=True)
    width = (high - low)[order, -1] + padding
    shift = (low + high) / 2
    shift[order, -1] = low[order, -1] - (width.cumsum(0) - width)
    return shift[label]
