"""Batches of structures, and the loader that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flt_mol.structures import Structures

__all__ = ["collate", "make_loader"]


def collate(parts: Sequence[Structures]) -> Structures:
    """All systems of `parts`, in order, in one flat batch; ids and tags come out as stored."""
    return Structures.cat(parts)


def make_loader(
    dataset: Dataset[Structures] | Sequence[Structures],
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    **options: Any,
) -> DataLoader[Structures]:
    """Batches of `batch_size` systems, the last one with what is left: none is dropped.

    Args:
        dataset: of single systems, or a list of them.
        batch_size: systems per batch, at least 1.
        shuffle: a new order in each epoch, drawn from `seed`.
        seed: of the orders; torch's global random state is neither used nor changed.
        num_workers: processes that read; they live as long as the loader.
        options: further arguments of `torch.utils.data.DataLoader`, such as pin_memory or
            multiprocessing_context.

    Raises:
        ValueError: batch_size below 1, or an empty data set.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ValueError("the data set has no systems to make batches of")
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        collate_fn=collate,
        drop_last=False,
        generator=torch.Generator().manual_seed(seed),
        persistent_workers=num_workers > 0,
        **options,
    )
