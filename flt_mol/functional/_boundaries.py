"""What repeats in a batch: its cells and pbc, or None where nothing does."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["boundaries", "stored_flat"]


def boundaries(
    cell: Tensor | None, pbc: Tensor | None, positions: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """Cells (B, 3, 3) and pbc (B, 3) of a batch; None for both, or for `cell` alone, is open.

    Raises:
        ValueError: a cell without pbc, or pbc True somewhere without a cell.

    Example:
        >>> cell, pbc = boundaries(None, None, torch.zeros(2, 3), torch.tensor([0, 2]))
        >>> cell.shape, bool(pbc.any())
        (torch.Size([1, 3, 3]), False)
    """
    systems = max(0, int(ptr.numel()) - 1)
    like = positions if isinstance(positions, Tensor) else torch.zeros(0)
    if pbc is None:
        if cell is not None:
            raise ValueError("pbc is None and there is a cell: give pbc (B, 3), or None for both")
        pbc = torch.zeros(systems, 3, dtype=torch.bool, device=like.device)
    if cell is None:
        if isinstance(pbc, Tensor) and bool(pbc.any()):
            raise ValueError("cell is None and pbc is True somewhere: give the cell (B, 3, 3), Å")
        cell = torch.zeros(systems, 3, 3, dtype=like.dtype, device=like.device)
    return cell, pbc


def stored_flat(value: Tensor, expected: tuple[int, ...]) -> str:
    """What to add to the refusal of a shape that PyG's collating makes of (3, 3) and (3,).

    Example:
        >>> stored_flat(torch.zeros(6, 3), (2, 3, 3))
        ": in PyG's Data store cell as (1, 3, 3) and pbc as (1, 3)"
    """
    systems, *rest = expected
    if tuple(value.shape) != (systems * rest[0], *rest[1:]):
        return ""
    return ": in PyG's Data store cell as (1, 3, 3) and pbc as (1, 3)"
