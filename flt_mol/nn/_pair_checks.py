"""Refusals of what modules on pairs are given, in words. By values in eager mode only.

All are silent while torch compiles or exports a graph, which reading a number would break.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional.neighbors import NeighborPairs, PairGroups
from flt_mol.nn.embedding import MAX_ATOMIC_NUMBER


def check_sizes(**sizes: int | None) -> None:
    """ValueError for a size below 1, by its name; None passes."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}, expected a number ≥ 1")


def check_vectors(pairs: NeighborPairs, vectors: Tensor, *, lengths: bool = True) -> None:
    """ValueError unless there is one vector, or length if these will do, for each pair."""
    if torch.compiler.is_compiling():
        return
    count = pairs.index_i.shape[0]
    shapes = ((count, 3), (count,)) if lengths else ((count, 3),)
    if tuple(vectors.shape) not in shapes or not vectors.is_floating_point():
        raise ValueError(
            f"vectors have shape {tuple(vectors.shape)} and {vectors.dtype}, expected "
            f"{' or '.join(map(str, shapes))} numbers for {count} pairs: "
            "pairs.vectors(positions, cell, ptr) of the same pairs"
        )


def check_groups(pairs: NeighborPairs, groups: PairGroups) -> None:
    """ValueError unless the groups are those of these pairs."""
    if torch.compiler.is_compiling():
        return
    group, count = groups.group, groups.index_i.shape[0]
    fits = group.shape == pairs.index_i.shape
    if fits and len(group):
        fits = int(group.min()) >= 0 and int(group.max()) < count
        fits = fits and torch.equal(groups.index_i[group], pairs.index_i)
        fits = fits and torch.equal(groups.index_j[group], pairs.index_j)
    if not fits:
        raise ValueError("groups are those of another list of pairs: give pairs.groups()")


def check_atoms(pairs: NeighborPairs, x: Tensor, channels: int) -> None:
    """ValueError unless `x` (N, C) has the rows that pairs name, packed."""
    if torch.compiler.is_compiling():
        return
    if x.dim() != 2 or x.shape[1] != channels:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected (N, {channels}): pack padded rows, x[mask]"
        )
    _check_rows(pairs, x.shape[0], "x")


def check_numbers(pairs: NeighborPairs, atomic_numbers: Tensor, num_rows: int | None) -> None:
    """ValueError unless there is a number for each atom: N of them, or as many as pairs name."""
    if torch.compiler.is_compiling():
        return
    rows = num_rows if num_rows is not None else atomic_numbers.numel()
    if tuple(atomic_numbers.shape) != (rows,):
        raise ValueError(
            f"atomic_numbers have shape {tuple(atomic_numbers.shape)}, expected ({rows},): one for "
            "each atom"
        )
    check_elements(atomic_numbers)
    if num_rows is None:
        _check_rows(pairs, rows, "atomic_numbers")


def check_elements(atomic_numbers: Tensor) -> None:
    """ValueError for atomic numbers that are not whole, or not from 1 to 118."""
    if torch.compiler.is_compiling():
        return
    kind = atomic_numbers.dtype
    if atomic_numbers.is_floating_point() or atomic_numbers.is_complex() or kind == torch.bool:
        raise ValueError(f"atomic_numbers are {kind}, expected integers: atomic_numbers.long()")
    if atomic_numbers.numel():
        low, high = (int(x) for x in atomic_numbers.aminmax())
        if low < 1 or high > MAX_ATOMIC_NUMBER:
            raise ValueError(
                f"atomic_numbers run from {low} to {high}, expected 1 to {MAX_ATOMIC_NUMBER}: "
                "leave out rows that are no atoms"
            )


def _check_rows(pairs: NeighborPairs, num_rows: int, name: str) -> None:
    if pairs.index_i.shape[0] == 0:
        return
    ends = [x.aminmax() for x in (pairs.index_i, pairs.index_j)]
    low, high = min(int(x.min) for x in ends), max(int(x.max) for x in ends)
    if low < 0 or high >= num_rows:
        raise ValueError(
            f"pairs name atoms from {low} to {high}, but {name} has {num_rows} rows: give the "
            "atoms that the pairs were made for"
        )
