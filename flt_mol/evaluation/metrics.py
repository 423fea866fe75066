"""Metrics of energies and forces over systems, and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.files import some
from flt_mol.prediction.energies import energy_array
from flt_mol.structures import Structures, known_forces, relaxed_displacement

EWT_THRESHOLD = 0.02
"""eV; an energy is within threshold if its error is strictly smaller."""

FORCE_THRESHOLD = 0.03
"""eV/Å, of the largest component of a system's errors, likewise."""

TARGETS = {
    "energy_initial": "energy_initial",
    "displacement": "positions_relaxed",
    "forces": "forces",
}
"""Output of a model beside "energy" → field of `Structures` that is its target."""

LEVEL = 0.95
"""Share of the resampled values that lie within an interval."""

DRAWS = 1000
"""Resamples; the ends of a 95 % interval are then those of the 25 lowest and 25 highest."""

_STATISTICS: dict[str, Callable[[NDArray[np.float64]], Any]] = {
    "mae": lambda error: np.abs(error).mean(),
    "ewt": lambda error: (np.abs(error) < EWT_THRESHOLD).mean(),
    "rmse": lambda error: np.sqrt(np.square(error).mean()),
    "me": lambda error: error.mean(),
    "median_ae": lambda error: np.median(np.abs(error)),
}


class EnergyMetrics:
    r"""Metrics over all systems of the errors e_s = prediction_s − target_s, in float64 eV.

    - `mae` = (1/S) Σ |e_s|, `rmse` = √((1/S) Σ e_s²), `me` = (1/S) Σ e_s (the bias), `median_ae`,
      the median of |e_s|, in eV;
    - `ewt` = (1/S) #{s : |e_s| < 0.02 eV}, a fraction, strictly below (Chanussot et al. 2021,
      ACS Catal. 11, 6059), compared in float32 where one is.

    Errors, not means of batches, are kept, so batches may have any sizes and order.

    Examples:
        >>> metrics = EnergyMetrics()
        >>> metrics.update(prediction=[0.0, 1.0], target=[0.01, 2.0])
        >>> metrics.update(prediction=[3.0], target=[3.0])
        >>> {name: round(value, 4) for name, value in metrics.compute().items()}
        {'count': 3, 'mae': 0.3367, 'ewt': 0.6667, 'rmse': 0.5774, 'me': -0.3367, 'median_ae': 0.01}
    """

    def __init__(self) -> None:
        self._errors: list[NDArray[np.float64]] = [np.empty(0)]
        self._sids: set[str] = set()

    def update(self, prediction: Any, target: Any, sid: Sequence[Any] | None = None) -> None:
        """Add the systems of one batch.

        Args:
            prediction: (B,) or (B, 1), eV.
            target: (B,) or (B, 1), eV.
            sid: B names, each of which comes once in all batches.

        Raises:
            ValueError: as `errors_of`; a sid that comes twice.
        """
        errors = errors_of(prediction, target, sid)
        for name in map(str, () if sid is None else sid):
            if name in self._sids:
                raise ValueError(f"sid {name} comes twice, and would count twice")
            self._sids.add(name)
        self._errors.append(errors)

    def compute(self) -> dict[str, float]:
        """`count`, `mae`, `ewt`, `rmse`, `me`, `median_ae` as plain numbers, see the class.

        Raises:
            ValueError: no system was added.
        """
        error = np.concatenate(self._errors)
        if not len(error):
            raise ValueError("no systems: the metrics of an empty split are undefined")
        return {"count": len(error), **{x: float(of(error)) for x, of in _STATISTICS.items()}}


def errors_of(
    prediction: Any, target: Any, sid: Sequence[Any] | None = None
) -> NDArray[np.float64]:
    """Errors, prediction − target, of B systems, (B,) or (B, 1) each, as (B,) float64, eV.

    Raises:
        ValueError: shapes that would broadcast, or a value that is not finite, naming its sid.
    """
    predicted, wanted = energy_array(prediction, "predictions"), energy_array(target, "targets")
    names = [f"row {x}" for x in range(len(wanted))] if sid is None else [f"sid {x}" for x in sid]
    if not len(predicted) == len(wanted) == len(names):
        raise ValueError(
            f"{len(predicted)} predictions for {len(wanted)} targets and {len(names)} sids"
        )
    for kind, values in (("prediction", predicted), ("target", wanted)):
        for row in np.flatnonzero(~np.isfinite(values))[:1]:
            raise ValueError(f"{kind} {values[row]} of {names[row]} is not a finite energy")
    dtypes = [str(getattr(x, "dtype", "")) for x in (prediction, target)]
    if not any(x.endswith("float32") for x in dtypes):
        return predicted - wanted
    single = (predicted.astype(np.float32) - wanted.astype(np.float32)).astype(np.float64)
    edge = np.float64(np.float32(EWT_THRESHOLD))  # a little below it
    return np.where(np.abs(single) == edge, np.copysign(EWT_THRESHOLD, single), single)


def metrics_of(prediction: Any, target: Any, sid: Sequence[Any] | None = None) -> dict[str, float]:
    """All of `EnergyMetrics.compute` for one batch; raises as `EnergyMetrics`."""
    metrics = EnergyMetrics()
    metrics.update(prediction, target, sid)
    return metrics.compute()


def error_sums(
    outputs: Mapping[str, Tensor], structures: Structures
) -> dict[str, tuple[float, int]]:
    """Errors of every output, summed over a batch, and the number of systems or free atoms.

    "mae" (eV) and "ewt" (systems with an error below 0.02 eV) of energies, "energy_initial_mae" and
    "…_ewt" of those before relaxation, "displacement" and, to compare with, "displacement_unmoved"
    (Å; as if every atom stayed where it is); with several recycles also "mae_recycle1" and so on
    for each; and those of `force_sums`.

    Raises:
        ValueError: a missing target, naming the sids.
    """
    energies = energy_errors(outputs, structures, "energy")
    errors, within = {"mae": energies}, {"ewt": energies[-1]}
    found: dict[str, tuple[float, int]] = {}
    if "forces" in outputs:
        found |= force_sums(outputs["forces"], energies[-1], structures)
    if "energy_initial" in outputs:
        initial = energy_errors(outputs, structures, "energy_initial")
        errors["energy_initial_mae"], within["energy_initial_ewt"] = initial, initial[-1]
    if "displacement" in outputs:
        free = ~structures.fixed
        distances, unmoved = displacement_errors(outputs, structures)
        errors["displacement"] = distances[:, free]
        found["displacement_unmoved"] = float(unmoved[free].sum()), int(free.sum())
    for name, values in errors.items():
        sums, count = values.sum(-1).tolist(), values.shape[1]
        found[name] = sums[-1], count
        if len(sums) > 1:
            found |= {f"{name}_recycle{k}": (x, count) for k, x in enumerate(sums, 1)}
    for name, last in within.items():
        found[name] = float((last < EWT_THRESHOLD).sum()), len(last)
    return found


def energy_errors(outputs: Mapping[str, Tensor], structures: Structures, name: str) -> Tensor:
    """|E_k − y| (K, B), eV, of each recycle; `name` is "energy" or "energy_initial".

    Raises:
        ValueError: missing targets, naming the sids; another shape than theirs.
    """
    every = _recycles(outputs, name)
    target: Tensor | None = getattr(structures, name)
    if target is None:
        raise ValueError(f"some of sids {some(structures.sid)} have no {name}")
    if every.shape[1:] != target.shape:  # (B, 1) − (B,) is (B, B)
        shapes = f"{tuple(every.shape[1:])}, expected {tuple(target.shape)}"
        raise ValueError(f"the model's output {name} has shape {shapes}")
    return (every - target.to(every.dtype)).abs()


def displacement_errors(
    outputs: Mapping[str, Tensor], structures: Structures
) -> tuple[Tensor, Tensor]:
    """‖d_k − d‖₂ (K, N), Å, whose gradient is 0 where it is 0; and ‖d‖₂ (N,).

    Raises:
        ValueError: missing targets, naming the sids.
    """
    target = relaxed_displacement(structures)
    difference = _recycles(outputs, "displacement").to(target.dtype) - target
    return torch.linalg.vector_norm(difference, dim=-1), torch.linalg.vector_norm(target, dim=-1)


def force_errors(forces: Tensor, structures: Structures) -> tuple[Tensor, Tensor]:
    """F − F* (N, 3), eV/Å, 0 where that is not known, and (N,) bool, where it is.

    Raises:
        ValueError: no F*, or another number of F, naming the sids.
    """
    wanted = structures.forces
    if wanted is None or forces.shape != wanted.shape:
        raise ValueError(f"some of sids {some(structures.sid)} have no forces")
    known = known_forces(structures)
    return (forces - wanted.to(forces.dtype)).masked_fill(~known[:, None], 0.0), known


def _recycles(outputs: Mapping[str, Tensor], name: str) -> Tensor:
    """(K, …): an output on every recycle."""
    every = outputs.get(f"{name}_recycles")
    return outputs[name][None] if every is None else every


def force_sums(
    forces: Tensor, energy_error: Tensor, structures: Structures
) -> dict[str, tuple[float, int]]:
    """OC20's metrics of forces, summed over a batch, and how many numbers each is a mean over.

    - "forces_mae", eV/Å: |F − F*| of each component;
    - "forces_cosine": F·F* / |F||F*| of each atom;
    - "efwt": systems with an energy error below 0.02 eV and all |F − F*| below 0.03 eV/Å.

    Fixed atoms, those without known forces and systems of such atoms alone do not count. Raises as
    `force_errors`.

    Args:
        forces: F (N, 3), eV/Å, predicted.
        energy_error: (B,), eV.
        structures: B systems with F*, their forces.

    References:
        Chanussot et al., ACS Catal. 2021, table 2: S2EF.
    """
    difference, known = force_errors(forces, structures)
    assert structures.forces is not None
    error, wanted = difference[known].abs(), structures.forces[known].to(forces.dtype)
    cosine = torch.cosine_similarity(forces[known], wanted, dim=1)
    largest = error.new_full((len(structures),), -1.0)
    largest.scatter_reduce_(0, structures.system[known], error.amax(1), "amax")
    within = (energy_error.abs() < EWT_THRESHOLD) & (largest < FORCE_THRESHOLD) & (largest >= 0)
    return {
        "forces_mae": (float(error.sum()), error.numel()),
        "forces_cosine": (float(cosine.sum()), len(cosine)),
        "efwt": (float(within.sum()), int((largest >= 0).sum())),
    }


def bootstrap_intervals(
    error: Any, names: Sequence[str] = tuple(_STATISTICS), seed: int = 0
) -> dict[str, tuple[float, float]]:
    r"""Percentile bootstrap intervals (95 %, 1000 draws) of the metrics of S systems.

    From the 2.5 % to the 97.5 % quantile of the metric over resamples of S systems, drawn with
    replacement: what other systems of the same kind would give, not another seed of training. The
    order of the systems changes nothing.

    Args:
        error: (S,) prediction − target, eV, finite.
        names: of the metrics.
        seed: of the draws.

    Returns:
        {name: (low, high)}; eV, "ewt" a fraction.

    Raises:
        ValueError: no systems, or an error that is not finite.

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.

    Examples:
        >>> low, high = bootstrap_intervals(np.array([0.0, 1.0] * 200))["mae"]
        >>> 0.44 < low < 0.46 and 0.54 < high < 0.56  # 0.5 ± 1.96 · 0.5 / √400
        True
    """
    error = np.sort(energy_array(error, "errors"))
    if not len(error) or not np.isfinite(error).all():
        raise ValueError("intervals need at least one system, and finite errors")
    rng, draws = np.random.default_rng(seed), []
    for _ in range(DRAWS):
        drawn = error[rng.integers(len(error), size=len(error))]
        draws.append([_STATISTICS[name](drawn) for name in names])
    ends = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0).T.tolist()
    return {name: (low, high) for name, (low, high) in zip(names, ends, strict=True)}
