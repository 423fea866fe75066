"""The zero of energies, which a checkpoint and one's own data may set differently."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data import make_loader
from flt_mol.data.loader import TargetStatistics
from flt_mol.models.energy import EnergyModel
from flt_mol.modes import evaluating
from flt_mol.structures import Structures

__all__ = ["refit"]

_AT_ONCE = 64
_AT_MOST = 1000  # systems
_FAR = 10.0  # spreads of the targets that the checkpoint knows


def refit(
    model: EnergyModel,
    how: str,
    training: Any,
    statistics: TargetStatistics,
    added: Sequence[str],
) -> dict[str, float]:
    """Shift each energy of `model` by the median of what it is off by: the least MAE a shift gives.

    y = mean + std · ŷ keeps its std, so that what the head says means the same as before. A
    normaliser that the checkpoint lacks is fitted to the targets.

    Args:
        model: with the checkpoint's weights; changed in place.
        how: "refit" or "keep".
        training: the training systems: a data set, or a list.
        statistics: of their targets.
        added: names of weights that the checkpoint lacks.

    Returns:
        Shifts in eV, by output; none for "keep".

    Raises:
        ValueError: a system without target, or with a prediction that is not finite, by its sid.

    Warns:
        UserWarning: targets that are far from all that the checkpoint was trained on.
    """
    known, moments = dict(model.normalizers), {"energy": statistics.energies}
    if statistics.energies_initial is not None:
        moments["energy_initial"] = statistics.energies_initial
    for name, prefix in (("energy", "normalizer"), ("energy_initial", "normalizer_initial")):
        if f"{prefix}.mean" in added and name in moments:
            known.pop(name).fit(moments[name])
    shift: dict[str, float] = {}
    for name, missed in _residuals(model, training, list(known)).items():
        middle, std = float(np.median(missed)), float(known[name].std)
        _warn_of_far_targets(name, missed, middle, std, how)
        if how == "refit":
            known[name].mean += middle
            shift[name] = middle
    return shift


def _residuals(
    model: EnergyModel, training: Any, outputs: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Target − prediction (S,), eV, of training systems, or of so many of them, evenly spread."""
    chosen = np.unique(np.linspace(0, len(training) - 1, min(len(training), _AT_MOST)).astype(int))
    systems = [training[int(i)] for i in chosen]
    missed: dict[str, list[Tensor]] = {name: [] for name in outputs}
    with evaluating(model), torch.inference_mode():
        for batch in make_loader(systems, _AT_ONCE, cutoff=model.cutoff):
            found = model(batch)
            for name, values in missed.items():
                values.append(_missed(batch, name, found[name]))
    return {name: torch.cat(values).numpy() for name, values in missed.items()}


def _missed(batch: Structures, name: str, found: Tensor) -> Tensor:
    target: Tensor | None = getattr(batch, name)
    if target is None:
        raise ValueError(f"sids {list(batch.sid)[:5]}: some have no {name}")
    missed = target.double() - found.double()
    if not bool(missed.isfinite().all()):
        at = int((~missed.isfinite()).nonzero()[0])
        raise ValueError(f"the checkpoint predicts {found[at].item()} eV for sid {batch.sid[at]}")
    return missed


def _warn_of_far_targets(
    name: str, missed: NDArray[np.float64], middle: float, std: float, how: str
) -> None:
    if how == "keep" and abs(middle) > _FAR * std:
        warnings.warn(
            f"{name}: targets are {middle:+.3f} eV off what the checkpoint says, and those it was "
            f"trained on have a spread of {std:.3f} eV: if they go by another reference, set "
            "finetune.normalizer=refit",
            stacklevel=4,
        )
    spread = float(np.median(np.abs(missed - middle)))
    if spread > _FAR * std:
        warnings.warn(
            f"{name}: targets differ from what the checkpoint says by a constant ± {spread:.3f} eV,"
            f" and those it was trained on have a spread of {std:.3f} eV: are they the same "
            "quantity, in eV? total energies, say, are no adsorption energies",
            stacklevel=4,
        )
