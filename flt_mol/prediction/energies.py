"""Energies of structures in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flt_mol.arguments import whole_number
from flt_mol.evaluation.splits import predict_batch
from flt_mol.modes import evaluating
from flt_mol.prediction.members import EnsembleEnergies, Members, load_members
from flt_mol.prediction.notes import SUMMED_UP, Seen
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["member_energies", "predict_atoms", "predict_structures", "structures_of"]

_TARGETS = ("y_relaxed", "energy_relaxed", "y_init", "energy_init", "pos_relaxed")


def predict_atoms(
    atoms: Atoms | Iterable[Atoms],
    checkpoint: Any,
    batch_size: int,
    device: str | torch.device | None,
) -> Any:
    """What :func:`flt_mol.predict.predict` does."""
    from ase import Atoms

    batch_size = whole_number("batch_size", batch_size, 1)
    if not isinstance(atoms, Iterable):
        raise ValueError(f"atoms is a {type(atoms).__name__}, expected ase.Atoms, or several")
    items = [atoms] if isinstance(atoms, Atoms) else list(atoms)
    for place, item in enumerate(items):
        if not isinstance(item, Atoms):
            raise ValueError(
                f"structure {place} is a {type(item).__name__}, expected ase.Atoms; "
                "for files use predict_files"
            )
    members = load_members(checkpoint, device)
    notes: dict[str, str] = {}
    structures = (structures_of(item, place, notes) for place, item in enumerate(items))
    energies, messages = member_energies(members, structures, batch_size)
    for text in (*messages.values(), *notes.values()):
        warnings.warn(text, UserWarning, stacklevel=3)
    return members.result(energies)


@overload
def predict_structures(
    model: nn.Module | str | Path,
    structures: Iterable[Structures],
    batch_size: int = 32,
    *,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float64]: ...


@overload
def predict_structures(
    model: list[Any] | tuple[Any, ...],
    structures: Iterable[Structures],
    batch_size: int = 32,
    *,
    progress: Callable[[int], None] | None = None,
) -> EnsembleEnergies: ...


def predict_structures(
    model: Any,
    structures: Iterable[Structures],
    batch_size: int = 32,
    *,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float64] | EnsembleEnergies:
    """Energies (B,) float64, eV, of all systems of `structures`, in order.

    The model is in eval mode meanwhile and has its own flags back afterwards.

    Args:
        model: a module or checkpoint, or a list or tuple of them for an ensemble.
        structures: batches of any number of systems, such as the items of a data set.
        batch_size: systems per call of the model.
        progress: called with the number of structures done after each batch.

    Returns, raises, warns: as :func:`flt_mol.predict.predict`.
    """
    batch_size = whole_number("batch_size", batch_size, 1)
    members = load_members(model)
    energies, messages = member_energies(members, structures, batch_size, progress)
    for text in messages.values():
        warnings.warn(text, UserWarning, stacklevel=2)
    result: NDArray[np.float64] | EnsembleEnergies = members.result(energies)
    return result


def member_energies(
    members: Members,
    structures: Iterable[Structures],
    batch_size: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[NDArray[np.float64], dict[str, str]]:
    """Energies (K, B) float64, eV, by each member, and what to warn of, kind → text.

    Raises:
        ValueError: a `batch_size` that is no whole number from 1 on; an energy that is not finite,
            naming the sid.
    """
    batch_size = whole_number("batch_size", batch_size, 1)
    energies = [np.empty((len(members), 0), dtype=np.float64)]
    seen = Seen.of(members)
    with ExitStack() as stack:
        for model in members.models:
            stack.enter_context(evaluating(model))
        stack.enter_context(torch.inference_mode())
        for batch in _batches(structures, batch_size):
            energies.append(np.stack([_finite(model, name, batch) for name, model in members]))
            seen.add(batch)
            if progress is not None:
                progress(seen.count)
    return np.concatenate(energies, axis=1), dict(seen.messages(members))


def structures_of(atoms: Atoms, sid: int | str, notes: dict[str, str]) -> Structures:
    """One structure as a batch of one; notes that are not summed up by :class:`Seen` are kept."""
    from flt_mol.data import from_ase

    found: dict[str, str] = {}
    structures = from_ase(_without_targets(atoms), sid=sid, notes=found)
    for kind, text in found.items():
        if kind not in SUMMED_UP:
            notes.setdefault(kind, text)
    return structures


def _finite(model: nn.Module, name: str, batch: Structures) -> NDArray[np.float64]:
    values = predict_batch(model, batch)
    for sid, value in zip(batch.sid, values, strict=True):
        if not np.isfinite(value):
            raise ValueError(f"the model gives {value} eV for structure {sid} ({name})")
    return values


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
