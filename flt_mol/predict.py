"""Energies of new structures: of ASE atoms, and of files; the ASE calculator.

The package imports this module, so that everything is loaded when it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np
    import torch
    from ase import Atoms
    from numpy.typing import NDArray
    from torch import nn

    from flt_mol.prediction.calculator import FLTCalculator
    from flt_mol.prediction.energies import predict_structures
    from flt_mol.prediction.files import StructureFiles, predict_files
    from flt_mol.prediction.frames import write_extxyz
    from flt_mol.prediction.members import EnsembleEnergies, load_model
    from flt_mol.prediction.table import Prediction, write_predictions
    from flt_mol.training.tag_rules import surface_rule

__all__ = [
    "EnsembleEnergies",
    "FLTCalculator",
    "Prediction",
    "StructureFiles",
    "load_model",
    "predict",
    "predict_files",
    "predict_structures",
    "surface_rule",
    "write_extxyz",
    "write_predictions",
]

_ROOMS = {
    "EnsembleEnergies": "prediction.members",
    "FLTCalculator": "prediction.calculator",
    "Prediction": "prediction.table",
    "StructureFiles": "prediction.files",
    "load_model": "prediction.members",
    "predict_files": "prediction.files",
    "predict_structures": "prediction.energies",
    "surface_rule": "training.tag_rules",
    "write_extxyz": "prediction.frames",
    "write_predictions": "prediction.table",
}


@overload
def predict(
    atoms: Atoms | Iterable[Atoms],
    checkpoint: nn.Module | str | Path,
    batch_size: int = 32,
    *,
    device: str | torch.device | None = None,
) -> NDArray[np.float64]: ...


@overload
def predict(
    atoms: Atoms | Iterable[Atoms],
    checkpoint: list[Any] | tuple[Any, ...],
    batch_size: int = 32,
    *,
    device: str | torch.device | None = None,
) -> EnsembleEnergies: ...


def predict(
    atoms: Atoms | Iterable[Atoms],
    checkpoint: Any,
    batch_size: int = 32,
    *,
    device: str | torch.device | None = None,
) -> NDArray[np.float64] | EnsembleEnergies:
    """Energies (B,) float64, eV, of ASE atoms, in their order.

    It is `flt_mol.predict` and `flt_mol.predict.predict`, in whichever way it is imported. Tags (0
    below the surface, 1 surface, 2 adsorbate) and fixed atoms are read from the atoms: set them
    with `flt_mol.data.tag_slab`, or with `atoms.set_tags` and `FixAtoms`. The atoms are left as
    they are.

    Args:
        atoms: one structure, or several.
        checkpoint: file of a checkpoint, folder of a run, name of a shipped model, or a module; a
            list or tuple of at least two of them is an ensemble.
        batch_size: structures per call of the model; it changes no energy beyond rounding.
        device: where models of checkpoints go (cpu if not given); modules stay where they are.

    Returns:
        The energies; of an ensemble :class:`~flt_mol.prediction.members.EnsembleEnergies` with
        `mean`, `spread` and `members`.

    Raises:
        ValueError: something that is not an `ase.Atoms`, naming its place; a `batch_size` that is
            no whole number from 1 on; an energy that is not finite; an ensemble of fewer than two,
            or of models of different energies.

    Warns:
        UserWarning: once each for all structures: tags that are all 0, or look like layer
            numbers, no cell, cells too narrow for a model that does not see periodic images,
            atoms less than 0.5 Å apart, elements that a model was never trained on, naming them.
    """
    from flt_mol.prediction.energies import predict_atoms

    found: NDArray[np.float64] | EnsembleEnergies
    found = predict_atoms(atoms, checkpoint, batch_size, device)
    return found


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'flt_mol.predict' has no attribute '{name}'")
    return getattr(import_module(f"flt_mol.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
