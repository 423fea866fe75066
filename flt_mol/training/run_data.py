"""The data of a run: a split opened, checked, kept in memory where it is small, and in batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flt_mol.data import make_loader, open_dataset
from flt_mol.data.recipes import recipe
from flt_mol.data.loader import Chosen
from flt_mol.data.loader import Loader
from flt_mol.data.schema import OnError
from flt_mol.data.recipes import skipped_message
from flt_mol.models.geometry import check_systems
from flt_mol.structures import Structures
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig

IN_MEMORY = 20_000
PAIRS_IN_MEMORY = 1 << 30  # bytes, for each split
_AT_ONCE = 256  # systems read in one go
TARGETS = {
    "energy_initial": ("energy_initial", "energy_initial", "energy before relaxation"),
    "displacement": ("positions_relaxed", "positions_relaxed", "relaxed positions"),
}
"""Output → key in `data` of its target's name, field of `Structures`, what it is called."""
_PINNED = ("auto", "gpu", "cuda")


def split_path(data: DataConfig, split: str) -> Path:
    """The file of a split: one's own path first, else the data set's.

    Raises:
        ValueError: neither names it.
    """
    if split in data.paths:
        return Path(data.paths[split])
    if data.name is None:
        mend = f"set data.paths.{split} or data.name"
        if split == data.validation:
            mend += (
                "; to hold out a part of the training split, set data.validation_fraction=0.1, or "
                "make files of it with flt-mol data split"
            )
        others = [name for name in data.paths if name not in (data.train, data.validation)]
        key = "train" if split == data.train else "validation"
        if others and split == getattr(data, key):
            mend += f"; or say which of your paths it is: data.{key}={' or '.join(others)}"
        raise ValueError(f"no file for split '{split}': {mend}")
    return Path(recipe(data.name).path(split))


def load_split(config: RunConfig, split: str) -> Any:
    """A split, with all targets that training needs; as a list where it is small.

    With ``data.skip_bad``, records that are bad, too large for the model, or lack such a target are
    left out.

    Raises:
        ValueError: no such split, a bad record, one too large for the model, or a target that is
            missing, naming the sid.

    Warns:
        UserWarning: records that were left out: how many, and the first ones with the reason.
    """
    data = config.data
    dataset = open_split(config, split)
    if data.name is not None and split not in data.paths:
        recipe(data.name).check_count(split, dataset, stacklevel=3)
    if split == data.validation and len(dataset) > IN_MEMORY:
        dataset.read_through()  # not after a first epoch of hours
    systems, dataset = _with_targets(dataset, split, config)
    if dataset.skipped:
        warnings.warn(skipped_message(dataset), UserWarning, stacklevel=3)
    return dataset if systems is None else systems


def open_split(config: RunConfig, split: str) -> Any:
    """The data set of a split's file, as training reads it; targets may be missing.

    Raises:
        ValueError: no such split, a bad record, or one too large for the model, naming the sid.
    """
    data = config.data
    on_error: OnError = "skip" if data.skip_bad else "raise"
    return open_dataset(
        split_path(data, split),
        require_energy=True,
        on_error=on_error,
        energy=data.energy,
        energy_initial=data.energy_initial,
        positions_relaxed=data.positions_relaxed,
        check=partial(check_systems, config.model),
    )


def some_have(dataset: Any, field: str) -> bool:
    """Whether one of the systems has a target, by its field; of very many the first are asked."""
    count = len(dataset) if len(dataset) <= IN_MEMORY else _AT_ONCE
    return any(_lacks(part, [field]) is None for _, part in _parts(dataset, count, [field]))


def chosen(systems: Any, indices: list[int]) -> Any:
    """Some systems of what :func:`load_split` gave, as it gives them."""
    if isinstance(systems, list):
        return [systems[i] for i in indices]
    return Chosen(systems, indices)


class _Need(NamedTuple):
    """A target that a split has to have."""

    name: str
    users: str
    mend: str


def _needs(config: RunConfig, split: str) -> dict[str, _Need]:
    """What training with this configuration asks of a split's systems, by field."""
    found, share = {}, config.training.interpolation
    for output, (_, field, called) in TARGETS.items():
        users, mends = [], []
        if output in config.model.outputs:
            users.append("model.outputs")
            mends.append(_without(output, config))
        if output == "displacement" and share > 0 and split == config.data.train:
            users.append(f"training.interpolation={share:g}")
            mends.append("training.interpolation=0")
        if users:
            found[field] = _Need(called, " and ".join(users), " ".join(mends))
    return found


def _without(output: str, config: RunConfig) -> str:
    """The options of a command line that leave an output out."""
    others = ",".join(name for name in config.model.outputs if name != output)
    weight = getattr(config.loss, f"{output}_weight")
    return f"'model.outputs=[{others}]'" + (f" loss.{output}_weight=null" if weight else "")


def _with_targets(
    dataset: Any, split: str, config: RunConfig
) -> tuple[list[Structures] | None, Any]:
    """The systems that have all targets, or None where they are too many; and the data set of them.

    Of a data set that is too large to be read twice, the first system stands for all, unless those
    that lack a target are to be left out.

    Raises:
        ValueError: a system without a target, by its sid, or nothing but such systems.
    """
    needs, skip = _needs(config, split), config.data.skip_bad
    small = len(dataset) <= IN_MEMORY
    systems: list[Structures] = []
    chosen: list[int] = []
    lacking: list[str] = []
    for indices, part in _parts(dataset, len(dataset) if small or (skip and needs) else 1, needs):
        field = _lacks(part, needs)
        if field is None:
            chosen += indices
            systems += list(part) if small else ()
            continue
        name, users, mend = needs[field]
        without = f"no {name} for sid {part.sid[0]}, asked for by {users}"
        if not skip:
            mends = [f"give it as {getattr(config.data, field)}"]
            if some_have(dataset, field):
                mends.append("leave such systems out (data.skip_bad=true)")
            raise ValueError(
                f"split '{split}': {without}; {', '.join(mends)}, or train without it: {mend}"
            )
        lacking.append(f"{dataset.where(indices[0])}: {without}")
    if not chosen:
        raise ValueError(f"split '{split}': every record lacks a target; the first: {lacking[0]}")
    return systems if small else None, Chosen(dataset, chosen, lacking) if lacking else dataset


def _parts(
    dataset: Any, count: int, needs: Iterable[str]
) -> Iterator[tuple[list[int], Structures]]:
    """The first `count` systems, in batches; one by one where a target is missing.

    Of systems of which one lacks its target, a batch keeps none.
    """
    for start in range(0, count, _AT_ONCE):
        indices = list(range(start, min(start + _AT_ONCE, count)))
        batch = dataset.batch(indices)
        if _lacks(batch, needs) is None:
            yield indices, batch
        else:
            yield from (([index], dataset[index]) for index in indices)


def _lacks(systems: Structures, needs: Iterable[str]) -> str | None:
    return next((field for field in needs if getattr(systems, field) is None), None)


def split_loader(
    dataset: Any,
    split: str,
    settings: TrainingConfig,
    shuffle: bool = False,
    cutoff: float | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Batches of a split.

    Args:
        dataset: as :func:`load_split` gave it.
        split: what to call it in errors.
        settings: sizes of batches, seed, workers.
        shuffle: a new order in each epoch.
        cutoff: Å; batches come with their pairs, which are searched once where they fit.
        rank: of the process whose batches these are.
        world_size: processes that share the split.

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
            rank=rank,
            world_size=world_size,
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
