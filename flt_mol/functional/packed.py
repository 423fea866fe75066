"""The packed layout: rows of B systems, one after the other, and ``ptr``, where each begins.

``ptr`` is (B + 1,) int64: row n belongs to system b if ``ptr[b] <= n < ptr[b + 1]``.
Systems without rows are allowed.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flt_mol.functional._common import at_least_float32


def system_sizes(ptr: Tensor, num_rows: int) -> list[int]:
    """Rows per system, as B plain integers.

    Args:
        ptr: (B + 1,) integers, 0 first, `num_rows` last, never decreasing.
        num_rows: N.

    Raises:
        ValueError: `ptr` does not describe N rows.

    Example:
        >>> system_sizes(torch.tensor([0, 2, 2, 5]), 5)
        [2, 0, 3]
    """
    if ptr.dim() != 1 or ptr.numel() == 0 or ptr.is_floating_point():
        raise ValueError(
            f"ptr must hold B + 1 integers, got shape {tuple(ptr.shape)} and {ptr.dtype}"
        )
    offsets: list[int] = ptr.tolist()
    sizes = [stop - start for start, stop in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != num_rows or min(sizes, default=0) < 0:
        raise ValueError(
            f"ptr must start at 0, never decrease and end at the number of rows, {num_rows}; "
            f"it starts at {offsets[0]}, ends at {offsets[-1]} and its smallest step is "
            f"{min(sizes, default=0)}"
        )
    return sizes


def system_index(ptr: Tensor, num_rows: int) -> Tensor:
    """(N,) int64, the system of each row, ascending.

    Example:
        >>> system_index(torch.tensor([0, 2, 2, 5]), 5)
        tensor([0, 0, 2, 2, 2])
    """
    index = torch.arange(ptr.numel() - 1, device=ptr.device)
    return torch.repeat_interleave(index, ptr.to(torch.int64).diff(), output_size=num_rows)


def offsets_of(system: Tensor, num_systems: int | None = None) -> tuple[Tensor, Tensor | None]:
    """`ptr` of a vector of system indices, and the order that sorts its rows.

    Args:
        system: (N,) integers ≥ 0, the system of each row, in any order.
        num_systems: B; the default is the largest index + 1, which misses empty systems at the end.

    Returns:
        ptr (B + 1,) int64, and order (N,) int64 such that ``x[order]`` is packed with every
        system's rows in their old order, or None where `system` is sorted already.

    Raises:
        ValueError: indices that are negative or ≥ `num_systems`.

    Example:
        >>> ptr, order = offsets_of(torch.tensor([1, 0, 1]), num_systems=3)
        >>> ptr.tolist(), order.tolist()
        ([0, 1, 3, 3], [1, 0, 2])
    """
    if system.dim() != 1 or system.is_floating_point() or system.dtype == torch.bool:
        raise ValueError(
            f"system must hold one integer per row, got shape {tuple(system.shape)} "
            f"and {system.dtype}"
        )
    system = system.to(torch.int64)  # differences of unsigned integers wrap around
    low, high = (int(system.min()), int(system.max())) if system.numel() else (0, -1)
    if low < 0 or (num_systems is not None and high >= num_systems):
        raise ValueError(
            f"system holds indices from {low} to {high}, expected 0 to "
            f"{'B - 1' if num_systems is None else num_systems - 1}"
        )
    sizes = torch.bincount(system, minlength=high + 1 if num_systems is None else num_systems)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    if bool((system.diff() >= 0).all()):
        return ptr, None
    return ptr, torch.argsort(system, stable=True)


def sum_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """Σ of the rows of each system: (N, …) → (B, …); zeros for systems without rows."""
    out = x.new_zeros(ptr.numel() - 1, *x.shape[1:])
    return out.index_add(0, system_index(ptr, x.shape[0]), x)


def centred(positions: Tensor, ptr: Tensor) -> Tensor:
    """Positions relative to the mean of their own system: (N, ℓ) → (N, ℓ), at least float32.

    The first row of each system is taken off before the mean is formed, so coordinates of
    10⁵ Å lose no more than their own float32 spacing.

    Example:
        >>> centred(torch.tensor([[100001.0], [100002.0], [5.0]]), torch.tensor([0, 2, 3])).tolist()
        [[-0.5], [0.5], [0.0]]
    """
    positions = at_least_float32(positions)
    if positions.shape[0] == 0:
        return positions
    system = system_index(ptr, positions.shape[0])
    # The mean makes the result independent of the anchor, so the anchor needs no gradient.
    anchor = positions.detach()[ptr[:-1].clamp(max=positions.shape[0] - 1)]
    local = positions - anchor[system]
    mean = sum_per_system(local, ptr) / ptr.diff().clamp(min=1)[:, None]
    return local - mean[system]
