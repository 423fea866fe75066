"""The data of a run: a split opened, checked, kept in memory where it is small, and in batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from flt_mol.data import make_loader, open_dataset
from flt_mol.data.catalog import recipe
from flt_mol.data.loading.batching import Loader
from flt_mol.data.options import OnError
from flt_mol.data.splits import skipped_message
from flt_mol.structures import Structures
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig
from flt_mol.training.losses import needed

IN_MEMORY = 20_000
PAIRS_IN_MEMORY = 1 << 30  # bytes, for each split
_AT_ONCE = 256  # systems read in one go
_PINNED = ("auto", "gpu", "cuda")


def split_path(data: DataConfig, split: str) -> Path:
    """The file of a split: one's own path first, else the data set's.

    Raises:
        ValueError: neither names it.
    """
    if split in data.paths:
        return Path(data.paths[split])
    if data.name is None:
        raise ValueError(f"no file for split '{split}': set data.paths.{split} or data.name")
    return Path(recipe(data.name).path(split))


def load_split(config: RunConfig, split: str) -> Any:
    """A split, with the targets of all outputs of the model; as a list where it is small.

    Raises:
        ValueError: no such split, a bad record, or a target that is missing, naming the sid.
    """
    data = config.data
    path = split_path(data, split)
    on_error: OnError = "skip" if data.skip_bad else "raise"
    dataset = open_dataset(
        path,
        require_energy=True,
        on_error=on_error,
        energy=data.energy,
        energy_initial=data.energy_initial,
        positions_relaxed=data.positions_relaxed,
    )
    if data.name is not None and split not in data.paths:
        recipe(data.name).check_count(split, dataset, stacklevel=3)
    if dataset.skipped:
        warnings.warn(skipped_message(dataset), UserWarning, stacklevel=3)
    systems: Any = dataset
    if len(dataset) <= IN_MEMORY:
        starts = range(0, len(dataset), _AT_ONCE)
        systems = [
            system
            for start in starts
            for system in dataset.batch(range(start, min(start + _AT_ONCE, len(dataset))))
        ]
    _check_targets(dataset, systems, split, config)
    return systems


def _check_targets(dataset: Any, systems: Any, split: str, config: RunConfig) -> None:
    """Refuse a split without the targets of the model's outputs, before anything is trained.

    Of a data set that is too large to be read twice, the first system stands for all.
    """
    fields = {"energy_initial": "energy_initial", "displacement": "positions_relaxed"}
    for field in (field for output, field in fields.items() if output in config.model.outputs):
        seen = systems if isinstance(systems, list) else [systems[0]]
        lacking = (i for i, system in enumerate(seen) if getattr(system, field) is None)
        first = next(lacking, None)
        if first is None:
            continue
        # Of systems of which one lacks its target, a batch keeps none: look at each alone.
        try:
            for index in range(first, len(dataset)):
                needed(dataset[index], field)
        except ValueError as error:
            raise ValueError(f"split '{split}': {error}") from error


def split_loader(
    dataset: Any,
    split: str,
    settings: TrainingConfig,
    shuffle: bool = False,
    cutoff: float | None = None,
) -> Loader:
    """Batches of a split.

    Args:
        dataset: as :func:`load_split` gave it.
        split: what to call it in errors.
        settings: sizes of batches, seed, workers.
        shuffle: a new order in each epoch.
        cutoff: Å; batches come with their pairs, which are searched once where they fit.

    Raises:
        ValueError: a budget of atoms that is too small.
    """
    atoms = settings.batch_atoms
    if cutoff is not None and isinstance(dataset, list):
        dataset, cutoff = with_pairs_in_memory(dataset, cutoff)
    try:
        return make_loader(
            dataset,
            settings.batch_size if atoms is None else None,
            max_atoms=atoms,
            shuffle=shuffle,
            seed=settings.seed,
            num_workers=settings.num_workers,
            cutoff=cutoff,
            pin_memory=settings.accelerator in _PINNED and torch.cuda.is_available(),
        )
    except ValueError as error:
        if atoms is None:
            raise
        raise ValueError(f"training.batch_atoms is {atoms}; {split} data: {error}") from error


def with_pairs_in_memory(
    systems: list[Structures], cutoff: float, limit: int = PAIRS_IN_MEMORY
) -> tuple[list[Structures], float | None]:
    """Systems with their pairs, searched once; or as they are, where pairs would take too much.

    Args:
        systems: single ones.
        cutoff: Å.
        limit: bytes that all pairs together may take.

    Returns:
        The systems, and the cutoff that is left for the loader to search in every epoch.

    Raises:
        ValueError: as :meth:`Structures.with_pairs`, naming the sid.
    """
    out, taken = [], 0
    for system in systems:
        out.append(system.with_pairs(cutoff))
        pairs = out[-1].pairs
        taken += 0 if pairs is None else sum(x.nbytes for x in pairs)
        if taken > limit:
            return systems, cutoff
    return out, None
