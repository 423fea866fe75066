"""Energies of new structures: of ASE atoms, and of files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flt_mol.data.cells import heights
from flt_mol.data.splits import skipped_message
from flt_mol.evaluation.elements import check_elements, unseen_message
from flt_mol.evaluation.splits import predict_batch
from flt_mol.modes import evaluating
from flt_mol.predictions import Prediction, write_predictions
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from ase import Atoms

    from flt_mol.data import StructuresDataset
    from flt_mol.models.energy import EnergyModel

__all__ = [
    "Prediction",
    "load_model",
    "predict",
    "predict_files",
    "predict_structures",
    "write_predictions",
]

_SUMMED_UP = {"tags", "cell"}
_NARROW = 4.0  # Å; the narrowest slabs of the shipped data set are wider
_TARGETS = ("y_relaxed", "energy_relaxed", "y_init", "energy_init", "pos_relaxed")


def load_model(name_or_path: str | Path) -> EnergyModel:
    """The trained model of a checkpoint, a run's folder, or a shipped model, in eval mode on CPU.

    Args:
        name_or_path: a file, a folder that `flt-mol train` wrote, or a name in `models/`.

    Raises:
        ValueError: no such checkpoint, or one that is damaged or of another kind.
    """
    from flt_mol.training.checkpoints import load_model as load

    return load(name_or_path)


def predict(
    atoms: Atoms | Iterable[Atoms],
    checkpoint: nn.Module | str | Path,
    batch_size: int = 32,
) -> NDArray[np.float64]:
    """Energies (B,) float64, eV, of ASE atoms, in their order.

    Tags (0 below the surface, 1 surface, 2 adsorbate) and fixed atoms are read from the atoms:
    set them with `atoms.set_tags` and `FixAtoms`.

    Args:
        atoms: one structure, or several.
        checkpoint: file of a checkpoint, name of a shipped model, or a module.
        batch_size: structures per call of the model; it changes no energy beyond rounding.

    Raises:
        ValueError: something that is not an `ase.Atoms`, naming its place; an energy that is not
            finite.

    Warns:
        UserWarning: once each for all structures: tags that are all 0, or look like layer
            numbers, no cell, cells too narrow for a model that does not see periodic images,
            elements that the model was never trained on, naming them.
    """
    from ase import Atoms

    items = [atoms] if isinstance(atoms, Atoms) else list(atoms)
    for place, item in enumerate(items):
        if not isinstance(item, Atoms):
            raise ValueError(
                f"structure {place} is a {type(item).__name__}, expected ase.Atoms; "
                "for files use predict_files"
            )
    from flt_mol.data import from_ase

    notes: dict[str, str] = {}
    structures = (
        from_ase(_without_targets(item), sid=place, notes=notes) for place, item in enumerate(items)
    )
    energies = predict_structures(_module(checkpoint), structures, batch_size)
    for kind, text in notes.items():
        if kind not in _SUMMED_UP:
            warnings.warn(text, UserWarning, stacklevel=2)
    return energies


def predict_files(
    model: nn.Module | str | Path,
    files: str | Path | Sequence[str | Path],
    batch_size: int = 32,
    *,
    skip_bad: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> list[Prediction]:
    """Energies of all structures of `files`, in order: LMDB, and whatever ASE reads.

    Targets, if there are any, are not looked at.

    Args:
        model: a module, file of a checkpoint, or name of a shipped model.
        files: one path or several; a file may hold many frames.
        batch_size: structures per call of the model, across files.
        skip_bad: leave bad records out, with a warning that counts and names them.
        progress: called with (structures done, structures in all) after each batch.

    Raises:
        ValueError: files that cannot be read, naming each of them with the reason, before
            anything is predicted; an energy that is not finite.

    Warns:
        UserWarning: as :func:`predict`.
    """
    paths = [files] if isinstance(files, str | Path) else list(files)
    datasets = _open_all(paths, skip_bad)
    for dataset in datasets:
        if dataset.skipped:
            warnings.warn(skipped_message(dataset), UserWarning, stacklevel=2)
    total = sum(len(dataset) for dataset in datasets)
    names: list[tuple[str, str]] = []

    def structures() -> Iterator[Structures]:
        for path, dataset in zip(paths, datasets, strict=True):
            for start in range(0, len(dataset), batch_size):
                batch = dataset.batch(range(start, min(start + batch_size, len(dataset))))
                names.extend((str(sid), str(path)) for sid in batch.sid)
                yield from batch

    values = predict_structures(
        _module(model),
        structures(),
        batch_size,
        progress=None if progress is None else lambda done: progress(done, total),
    )
    return [
        Prediction(name, energy, path)
        for (name, path), energy in zip(names, values.tolist(), strict=True)
    ]


def predict_structures(
    model: nn.Module,
    structures: Iterable[Structures],
    batch_size: int = 32,
    *,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float64]:
    """Energies (B,) float64, eV, of all systems of `structures`, in order.

    The model is in eval mode meanwhile and has its own flags back afterwards.

    Args:
        model: a module.
        structures: batches of any number of systems, such as the items of a data set.
        batch_size: systems per call of the model.
        progress: called with the number of structures done after each batch.

    Raises, warns: as :func:`predict`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    energies: list[NDArray[np.float64]] = []
    seen = _Seen()
    done = 0
    with evaluating(model), torch.inference_mode():
        for batch in _batches(structures, batch_size):
            values = predict_batch(model, batch)
            for sid, value in zip(batch.sid, values, strict=True):
                if not np.isfinite(value):
                    raise ValueError(f"the model gives {value} eV for structure {sid}")
            energies.append(values)
            seen.add(batch)
            done += len(batch)
            if progress is not None:
                progress(done)
    for message in seen.messages(model):
        warnings.warn(message, UserWarning, stacklevel=3)
    return np.concatenate(energies) if energies else np.empty(0, dtype=np.float64)


@dataclass
class _Seen:
    """What the predicted structures were like, for the warnings afterwards."""

    count: int = 0
    untagged: list[int | str] = field(default_factory=list)
    without_cell: list[int | str] = field(default_factory=list)
    narrow: list[int | str] = field(default_factory=list)
    elements: set[int] = field(default_factory=set)

    def add(self, batch: Structures) -> None:
        tags, system, cell = batch.tags.cpu(), batch.system.cpu(), batch.cell.cpu()
        tagged = torch.zeros(len(batch), dtype=torch.bool)
        tagged[system[tags != 0]] = True
        no_cell = ~cell.flatten(1).any(dim=1)
        for b in torch.nonzero(~tagged & (batch.natoms.cpu() > 0)).flatten().tolist():
            self.untagged.append(batch.sid[b])
        for b in torch.nonzero(no_cell).flatten().tolist():
            self.without_cell.append(batch.sid[b])
        for sid, vectors, periodic in zip(batch.sid, cell.numpy(), batch.pbc.cpu(), strict=True):
            if periodic.any() and heights(vectors[periodic.numpy()]).min() < _NARROW:
                self.narrow.append(sid)
        self.count += len(batch)
        self.elements.update(batch.atomic_numbers.tolist())

    def messages(self, model: nn.Module) -> Iterator[str]:
        if self.untagged:
            yield (
                f"all tags are 0 in {self._some(self.untagged)}: the model takes every atom for "
                "one below the surface. Set tags (0 below the surface, 1 surface, 2 adsorbate), "
                "in ASE with atoms.set_tags(...), and save as .traj or .extxyz, which keep them"
            )
        if self.without_cell:
            yield (
                f"no cell in {self._some(self.without_cell)}: taken as not periodic. .traj and "
                ".extxyz keep the cell and pbc"
            )
        if self.narrow and not getattr(model, "sees_images", True):
            yield (
                f"cells narrower than {_NARROW:g} Å in {self._some(self.narrow)}: this model does "
                "not see periodic images, so a supercell would get another energy per atom; "
                "repeat them, as in the data that it was trained on"
            )
        unseen = check_elements(model, self.elements)
        if unseen:
            yield unseen_message(unseen)

    def _some(self, sids: list[int | str]) -> str:
        named = ", ".join(str(sid) for sid in sids[:3]) + (", …" if len(sids) > 3 else "")
        return f"{len(sids)} of {self.count} structures ({named})"


def _batches(structures: Iterable[Structures], batch_size: int) -> Iterator[Structures]:
    parts: list[Structures] = []
    for structure in structures:
        parts.append(structure)
        if sum(len(part) for part in parts) >= batch_size:
            yield Structures.cat(parts)
            parts = []
    if parts:
        yield Structures.cat(parts)


def _without_targets(atoms: Atoms) -> Atoms:
    """A copy: what a prediction does not look at cannot be bad."""
    atoms = atoms.copy()
    pairs = atoms.info.get("key_value_pairs")
    if isinstance(pairs, dict):
        atoms.info["key_value_pairs"] = pairs = dict(pairs)
    for name in _TARGETS:
        for fields in (atoms.info, atoms.arrays, pairs):
            if isinstance(fields, dict):
                fields.pop(name, None)
    return atoms


def _module(checkpoint: nn.Module | str | Path) -> nn.Module:
    if isinstance(checkpoint, nn.Module):
        return checkpoint
    return load_model(checkpoint)


def _open_all(paths: Sequence[str | Path], skip_bad: bool) -> list[StructuresDataset]:
    datasets, failures = [], []
    for path in paths:
        try:
            datasets.append(_open(path, skip_bad))
        except (OSError, ValueError) as error:
            text = str(error)
            failures.append(f"  {text}" if str(path) in text else f"  {path}: {text}")
    if failures:
        heading = f"cannot read {len(failures)} of {len(paths)} files:"
        raise ValueError("\n".join([heading, *failures]))
    return datasets


def _open(path: str | Path, skip_bad: bool) -> StructuresDataset:
    """The data set, its warnings about tags and cells left to `_Seen`: once for all files."""
    from flt_mol.data import open_dataset

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = open_dataset(path, ignore_energy=True, on_error="skip" if skip_bad else "raise")
    ours = bool(dataset.notes.seen) and dataset.notes.seen <= _SUMMED_UP
    for warning in caught:
        if not (ours and str(warning.message).startswith(f"{Path(path)}: ")):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    dataset.notes.seen.update(_SUMMED_UP)
    return dataset
