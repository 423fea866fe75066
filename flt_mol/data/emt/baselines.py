"""What needs no structure: a constant, and a linear regression on composition alone.

A model of structures that does not beat the second has learnt nothing from positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flt_mol.evaluation.metrics import EnergyMetrics
from flt_mol.prediction.energies import energy_array as energies
from flt_mol.structures import Structures

__all__ = ["Baseline", "CompositionRegression", "Constant", "composition_features", "score"]

Array = NDArray[np.float64]

_ELEMENTS = 119


class Baseline(Protocol):
    """Fitted on one set of structures, predicts energies of any other."""

    @classmethod
    def fit(cls, train: Iterable[Structures]) -> Self:
        """Fits on structures with energies."""

    def predict(self, structures: Iterable[Structures]) -> Array:
        """(B,) float64 energies, eV, of all systems in order."""


@dataclass(frozen=True)
class Constant:
    """The median training energy for everything: the constant with the least MAE in training.

    Args:
        value: eV.

    Example:
        >>> train = [Structures.single([1], [[0, 0, 0]], energy=e) for e in (0.0, 1.0, 5.0)]
        >>> Constant.fit(train).predict(train)
        array([1., 1., 1.])
    """

    value: float

    @classmethod
    def fit(cls, train: Iterable[Structures]) -> Self:
        """Fits the median.

        Raises:
            ValueError: no systems, or a system without an energy, naming its sid.
        """
        return cls(float(np.median(_collect(train)[1])))

    def predict(self, structures: Iterable[Structures]) -> Array:
        """(B,) float64 energies, eV, of all systems in order."""
        count = sum(len(batch) for batch in structures)
        return np.full(count, self.value, dtype=np.float64)


@dataclass(frozen=True)
class CompositionRegression:
    r"""Linear least squares on composition.

    E = b + Σ_Z a_Z n_Z + Σ_Z s_Z x_Z, where n_Z counts element Z in the adsorbate (tag 2) and x_Z
    is its fraction of the slab's atoms (tags 0 and 1). Elements that training never had in that
    role have coefficient 0. The columns are linearly dependent (the fractions sum to 1), so the
    solution of least norm is taken; its predictions are those of any other.

    Args:
        intercept: b, eV.
        adsorbate: (119,) float64, a_Z by atomic number, eV per atom.
        slab: (119,) float64, s_Z by atomic number, eV.
    """

    intercept: float
    adsorbate: Array
    slab: Array

    @classmethod
    def fit(cls, train: Iterable[Structures]) -> Self:
        """Fits by `numpy.linalg.lstsq`.

        Raises:
            ValueError: no systems, or a system without an energy, naming its sid.
        """
        features, targets = _collect(train)
        design = np.column_stack([np.ones(len(features)), features])
        coefficients = np.linalg.lstsq(design, targets, rcond=None)[0]
        coefficients[1:][~features.any(axis=0)] = 0.0
        return cls(float(coefficients[0]), *np.split(coefficients[1:], 2))

    def predict(self, structures: Iterable[Structures]) -> Array:
        """(B,) float64 energies, eV, of all systems in order."""
        features = _stack([composition_features(batch) for batch in structures])
        predicted: Array = self.intercept + features @ np.concatenate([self.adsorbate, self.slab])
        return predicted


def composition_features(structures: Structures) -> Array:
    """(B, 238) float64: adsorbate counts by atomic number 0 to 118, then slab fractions.

    The fractions of a system without slab atoms are 0.

    Example:
        >>> system = Structures.single([29, 28, 8], [[0, 0, 0]] * 3, tags=[0, 1, 2])
        >>> features = composition_features(system)[0]
        >>> features[[8, 119 + 28, 119 + 29]]
        array([1. , 0.5, 0.5])
    """
    system = structures.system.cpu().numpy()
    numbers = structures.atomic_numbers.cpu().numpy()
    adsorbate = structures.tags.cpu().numpy() == 2
    counts = np.zeros((2, len(structures), _ELEMENTS), dtype=np.float64)
    np.add.at(counts, ((~adsorbate).astype(np.int64), system, numbers), 1.0)
    fractions = counts[1] / np.maximum(counts[1].sum(axis=1, keepdims=True), 1.0)
    return np.concatenate([counts[0], fractions], axis=1)


def score(baseline: Baseline, structures: Iterable[Structures]) -> dict[str, Any]:
    """`count`, `mae` (eV), `ewt` (fraction) and the rest of `EnergyMetrics` of one split.

    Raises:
        ValueError: no systems, or a system without an energy, naming its sid.
    """
    batches = list(structures)
    metrics = EnergyMetrics()
    metrics.update(baseline.predict(batches), _collect(batches)[1])
    return metrics.compute()


def _collect(batches: Iterable[Structures]) -> tuple[Array, Array]:
    """Composition features (B, 238) and energies (B,) of all systems."""
    features, targets = [], []
    for batch in batches:
        if batch.energy is None:
            raise ValueError(f"sid {batch.sid[:1]} has no energy (y_relaxed), which a fit needs")
        features.append(composition_features(batch))
        targets.append(energies(batch.energy))
    if not features:
        raise ValueError("no systems: there is nothing to fit or score")
    return _stack(features), np.concatenate(targets)


def _stack(features: list[Array]) -> Array:
    return np.concatenate(features) if features else np.zeros((0, 2 * _ELEMENTS))
