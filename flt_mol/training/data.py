"""The data of a run: splits opened and checked, a part held out, loaders."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from flt_mol.data import make_loader, open_dataset
from flt_mol.data.checks import Unusual
from flt_mol.data.loader import Loader, sizes_of
from flt_mol.data.recipes import recipe, skipped_message
from flt_mol.data.tags import tagger_of
from flt_mol.evaluation.metrics import TARGETS
from flt_mol.models.build import check_systems
from flt_mol.models.energy import EnergyModel
from flt_mol.prediction.energies import UNSEEN, check_elements
from flt_mol.prediction.members import rule_of_run, surface_rule
from flt_mol.structures import Structures
from flt_mol.training.config import RunConfig, TrainingConfig
from flt_mol.training.processes import World

_IN_MEMORY = 20_000  # systems of a split
_ATTACHED_IN_MEMORY = 1 << 30  # bytes of pairs and reciprocal vectors, for each split
_CHUNK = 256


class Splits(NamedTuple):
    """Data sets, or lists of systems where they are small."""

    training: Any
    validation: Any


def without_idle_outputs(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """A fine-tuning run without the outputs that its first training record has no targets for.

    Most files of one's own hold no relaxed positions; energies are the same without these outputs.
    """
    model = config.model
    if config.finetune.checkpoint is None or model.feedback == "positions":
        return config, []
    names = [name for name in model.outputs if name in TARGETS]
    first = open_split(config, config.data.train, targets=False)[0] if names else None
    idle: list[str] = [name for name in names if _lacks(first, TARGETS[name])]
    settings = config.model_dump()
    settings["model"]["outputs"] = [name for name in model.outputs if name not in idle]
    return RunConfig.model_validate(settings), idle


def open_split(config: RunConfig, split: str, targets: bool = True) -> Any:
    """The data set of a split's file, as training reads it.

    Records that are too large for the model and, with `targets`, those that lack one of its
    outputs' are invalid.

    Raises:
        ValueError: no file for the split; an invalid record, unless ``data.skip_bad``.
    """
    data, outputs = config.data, config.model.outputs if targets else []
    needed: dict[str, str] = {field: out for out, field in TARGETS.items() if out in outputs}
    if targets and config.training.interpolation > 0 and split == data.train:
        needed.setdefault("positions_relaxed", "training.interpolation")

    def check(systems: Structures) -> None:
        check_systems(config.model, systems)
        for field, user in needed.items():
            if _lacks(systems, field):
                rest = ",".join(name for name in outputs if name != user)
                without = f"{user}=0" if "." in user else f"'model.outputs=[{rest}]'"
                raise ValueError(
                    f"sid {systems.sid[0]}: no {field}, needed for {user}: give it as "
                    f"{getattr(data, field, field)}, set data.skip_bad=true, or train without "
                    f"({without})"
                )
        if "forces" in needed and data.energy == "y_relaxed" and systems.energy_initial is not None:
            relaxed = systems.positions_relaxed is not None
            if relaxed and not torch.equal(systems.energy_initial, cast(Tensor, systems.energy)):
                raise ValueError(
                    f"sid {systems.sid[0]}: y_relaxed is not the energy of the positions whose "
                    "forces are given: set data.energy, as to y_init or calculator"
                )

    return open_dataset(
        _file_of(config, split),
        require_energy=True,
        on_error="skip" if data.skip_bad else "raise",
        energy=data.energy,
        energy_initial=data.energy_initial,
        positions_relaxed=data.positions_relaxed,
        check=check,
        forces="forces" in config.model.outputs,
        tag_slab=tagger_of(data.model_dump()),
    )


def with_rule(config: RunConfig) -> RunConfig:
    """The run with the rule of its tags: of the data, else of the checkpoint, or oc20 to tag slabs.

    Warns:
        UserWarning: data that were tagged by another rule than the run's or the checkpoint's.
    """
    data, start = config.data, config.finetune.checkpoint
    dataset = open_split(config, data.train, targets=False)
    stored = dataset.record(0).get("tag_rule") or rule_of_run(
        {"data": data.model_dump(exclude={"tag_rule"})}, "the data set"
    )
    before = None if start is None else surface_rule(start)
    for other, whose in ((data.tag_rule, "data.tag_rule is"), (before, "the checkpoint's is")):
        if stored and other and str(stored) != str(other):
            text = f"{dataset.path}: tagged by the rule '{stored}', and {whose} '{other}'"
            warnings.warn(f"{text}: energies may be far off", stacklevel=2)
    rule = data.tag_rule or stored or before or ("oc20" if data.tag_slab else None)
    data = data.model_copy(update={"tag_rule": rule and str(rule)})
    return config.model_copy(update={"data": data})


def _lacks(systems: Any, field: str) -> bool:
    value = getattr(systems, field)
    return value is None or not bool(value.isfinite().any())


def _file_of(config: RunConfig, split: str) -> Path:
    data = config.data
    if split in data.paths:
        return Path(data.paths[split])
    if data.name is None:
        hint = f"data.paths.{split}, data.name or, to hold out a part, data.validation_fraction=0.1"
        raise ValueError(f"no file for split '{split}': set {hint}")
    return recipe(data.name).path(split)


def files_line(config: RunConfig) -> str:
    """What a run is trained and validated on.

    Examples:
        >>> files_line(RunConfig(data={"paths": {"train": "a.lmdb", "val_id": "b.lmdb"}}))
        'train: a.lmdb; val_id: b.lmdb'
    """
    data = config.data
    line = f"{data.train}: {_file_of(config, data.train)}; "
    if data.validation_fraction is None:
        return line + f"{data.validation}: {_file_of(config, data.validation)}"
    return line + f"{data.validation}: {data.validation_fraction:.3g} of it, held out"


def load_splits(config: RunConfig) -> Splits:
    """The training and the validation split.

    With ``data.validation_fraction`` the second is a random share of the first, of at least one
    system, drawn by ``data.validation_seed``. Of 20,000 systems or fewer those of one sid stay
    together; ``flt-mol data split --group-by`` knows more groups.

    Raises:
        ValueError: as of `open_split`, or nothing left to train on.

    Warns:
        UserWarning: skipped records, how many and why; systems that both splits have.
    """
    data = config.data
    whole = _load(config, data.train)
    if data.validation_fraction is None:
        splits = Splits(whole, _load(config, data.validation))
        if both := _in_both(*splits):
            warnings.warn(
                f"{len(both)} of {len(splits.validation)} validation systems have the sids or the "
                f"atoms and positions of training systems (first {', '.join(both[:3])}): if they "
                "are the same, errors are too low",
                stacklevel=2,
            )
        return splits
    groups: dict[Any, list[int]] = {}
    for row, name in enumerate(sids_of(whole) or range(len(whole))):
        groups.setdefault(name, []).append(row)
    count = max(1, round(data.validation_fraction * len(groups)))
    if count >= len(groups):
        text = f"split '{data.train}' has {len(groups)} systems of different sids, too few to hold"
        raise ValueError(f"{text} out a part: set data.paths.{data.validation}")
    order = np.random.default_rng(data.validation_seed % 2**63).permutation(len(groups)).tolist()
    rows = list(groups.values())
    held, kept = (
        sorted(row for group in part for row in rows[group])
        for part in (order[:count], order[count:])
    )
    if isinstance(whole, list):
        return Splits([whole[i] for i in kept], [whole[i] for i in held])
    return Splits(Subset(whole, kept), Subset(whole, held))


def _in_both(training: Any, validation: Any) -> list[str]:
    """Sids of validation systems that training has too, by sid or by atoms, where in memory."""
    if not (isinstance(training, list) and isinstance(validation, list)):
        return []
    known = {x for system in training for x in _names(system)}
    return [str(x.sid[0]) for x in validation if not known.isdisjoint(_names(x))]


def _names(system: Structures) -> tuple[str, bytes]:
    positions = system.positions.mul(1e3).round().to(torch.int64)
    atoms = torch.cat([system.atomic_numbers[:, None], positions], 1)
    return str(system.sid[0]), atoms.numpy().tobytes()


def _load(config: RunConfig, split: str) -> Any:
    dataset, data = open_split(config, split), config.data
    if data.name is not None and split not in data.paths:
        recipe(data.name).check_count(split, dataset, stacklevel=3)
    if dataset.skipped:
        warnings.warn(skipped_message(dataset), stacklevel=3)
    if len(dataset) > _IN_MEMORY:
        if split == data.validation:
            dataset.read_through()  # errors come now, not after the hours of a first epoch
        return dataset
    return [system for batch in dataset.batches(_CHUNK) for system in batch]


def check_splits(splits: Splits, model: EnergyModel) -> None:
    """Warn of what looks wrong, of each kind once; in large splits 20,000 systems are looked at.

    See `flt_mol.data.checks.Unusual`; and elements of validation systems alone.
    """
    unusual, elements = Unusual(), set[int]()
    for split in splits:
        count = min(len(split), _IN_MEMORY)
        rows = [i * len(split) // count for i in range(count)]
        for batch in make_loader(Subset(split, rows), _CHUNK):
            unusual.add(batch)
            unusual.add_energies(batch, model.reference_energies)
            elements.update(batch.atomic_numbers.tolist())
    unusual.warn()
    if unseen := check_elements(model, elements):
        warnings.warn(UNSEEN.format(which=", ".join(unseen)), stacklevel=2)


def split_loader(
    systems: Any,
    settings: TrainingConfig,
    world: World,
    prepare: Callable[[Structures], Structures] | None = None,
    training: bool = False,
) -> Loader:
    """Batches of a split for one of the processes that share it.

    Batches come prepared (`EnergyModel.prepare_batch`), once for all epochs where that fits. Those
    for training are shuffled, and come with what all batches of their step hold.
    """
    if prepare is not None and isinstance(systems, list):
        prepared, size = [], 0
        for system in systems:
            prepared.append(one := prepare(system))
            attached = (*(one.pairs or ()), *(one.reciprocal or ()))
            size += sum(x.nbytes for x in attached if isinstance(x, Tensor))
            if size > _ATTACHED_IN_MEMORY:
                break
        else:
            systems, prepare = prepared, None
    on_gpu = settings.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    loader = make_loader(
        systems,
        settings.batch_size if settings.batch_atoms is None else None,
        max_atoms=settings.batch_atoms,
        shuffle=training,
        seed=settings.seed,
        num_workers=settings.num_workers,
        prepare=prepare,
        rank=world.rank,
        world_size=world.size,
        pin_memory=on_gpu,
    )
    loader.window = settings.accumulate if training else None
    return loader


def data_digest(splits: Splits, processes: int) -> int:
    """A number that changes with the data and the number of processes.

    Of splits in memory with any atom or energy, of larger ones with the numbers of atoms.
    """
    crc = processes
    for split in splits:
        if isinstance(split, list):
            for system in split:
                for field in (system.atomic_numbers, system.positions, system.energy):
                    crc = zlib.crc32(field.contiguous().numpy().tobytes(), crc)
        else:
            crc = zlib.crc32(sizes_of(split).tobytes(), crc)
    return crc


def sids_of(systems: Any) -> list[str] | None:
    """Names of the systems of a split; None of one that is too large to be in memory."""
    return [str(one.sid[0]) for one in systems] if isinstance(systems, list) else None
