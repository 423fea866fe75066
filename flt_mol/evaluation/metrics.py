"""Energy metrics of IS2RE as sums over systems, so that no batching changes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["EWT_THRESHOLD", "EnergyMetrics", "energies", "ewt", "mae", "median_ae", "metrics_of"]

EWT_THRESHOLD = 0.02
"""eV; an energy is within threshold if its error is strictly smaller."""


def energies(values: Any, name: str = "energies") -> NDArray[np.float64]:
    """`values` as a (B,) float64 array, eV.

    Args:
        values: tensor (on any device), array or sequence of numbers, of shape (B,), (B, 1) or (),
            which is one system.
        name: what the values are, for the error.

    Raises:
        ValueError: None, something not real numbers, or another shape. (1, B) is refused: against
            (B,) or (B, 1) it would broadcast to (B, B).

    Example:
        >>> energies([[1.0], [2.0]])
        array([1., 2.])
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu")
        if values.dtype in (torch.bfloat16, torch.float16):  # numpy has no bfloat16
            values = values.to(torch.float64)
        values = values.numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be real numbers in eV, got {array.dtype} values")
    if array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
        raise ValueError(
            f"{name} have shape {array.shape}, expected (B,) or (B, 1): one energy per system"
        )
    return array.astype(np.float64).reshape(-1)


@dataclass
class EnergyMetrics:
    r"""Running sums over systems of the errors e_s = prediction_s − target_s, in float64 eV.

    - `mae` = (1/S) Σ |e_s|, `rmse` = √((1/S) Σ e_s²), `me` = (1/S) Σ e_s (the bias), in eV;
    - `ewt` = (1/S) #{s : |e_s| < 0.02 eV}, a fraction, strictly below (Chanussot et al. 2021,
      ACS Catal. 11, 6059).

    The sums, not means of batch means, are carried, so batches may have any sizes and order, and
    the metrics of two processes are :meth:`merge`-d.

    Example:
        >>> metrics = EnergyMetrics()
        >>> metrics.update(prediction=[0.0, 1.0], target=[0.01, 2.0])
        >>> metrics.update(prediction=[3.0], target=[3.0])
        >>> {name: round(value, 4) for name, value in metrics.compute().items()}
        {'count': 3, 'mae': 0.3367, 'ewt': 0.6667, 'rmse': 0.5774, 'me': -0.3367}
    """

    count: int = 0
    absolute: float = 0.0
    squared: float = 0.0
    signed: float = 0.0
    within: int = 0

    def update(self, prediction: Any, target: Any, sid: Sequence[Any] | None = None) -> None:
        """Add the systems of one batch.

        Args:
            prediction: (B,) or (B, 1), eV.
            target: (B,) or (B, 1), eV.
            sid: B names, for the errors; row numbers are named without it.

        Raises:
            ValueError: shapes that would broadcast, or a value that is not finite, naming its
                sid. Nothing is added then.
        """
        error = _errors(prediction, target, sid)
        self.count += len(error)
        self.absolute += float(np.abs(error).sum())
        self.squared += float(np.square(error).sum())
        self.signed += float(error.sum())
        self.within += int(np.count_nonzero(np.abs(error) < EWT_THRESHOLD))

    def merge(self, other: EnergyMetrics) -> EnergyMetrics:
        """Add the systems of `other`, of another process say, and return self."""
        self.count += other.count
        self.absolute += other.absolute
        self.squared += other.squared
        self.signed += other.signed
        self.within += other.within
        return self

    def compute(self) -> dict[str, float]:
        """`count`, `mae`, `ewt`, `rmse`, `me` as plain numbers, see the class.

        Raises:
            ValueError: no system was added.
        """
        if self.count == 0:
            raise ValueError("no systems: the metrics of an empty split are undefined")
        return {
            "count": self.count,
            "mae": self.absolute / self.count,
            "ewt": self.within / self.count,
            "rmse": math.sqrt(self.squared / self.count),
            "me": self.signed / self.count,
        }


def mae(prediction: Any, target: Any) -> float:
    """Mean absolute error, eV, of (B,) or (B, 1) energies; see :class:`EnergyMetrics`.

    Example:
        >>> mae([1.0, 2.0], [1.5, 1.5])
        0.5
    """
    return _computed(prediction, target)["mae"]


def ewt(prediction: Any, target: Any) -> float:
    """Fraction of systems with |error| strictly below 0.02 eV; see :class:`EnergyMetrics`.

    Example:
        >>> ewt([0.019, 0.02], [0.0, 0.0])
        0.5
    """
    return _computed(prediction, target)["ewt"]


def median_ae(prediction: Any, target: Any) -> float:
    """Median of |error|, eV, of (B,) or (B, 1) energies: half of the systems are closer.

    Example:
        >>> median_ae([1.0, 2.0, 9.0], [1.5, 1.9, 1.0])
        0.5
    """
    return metrics_of(prediction, target)["median_ae"]


def metrics_of(prediction: Any, target: Any, sid: Sequence[Any] | None = None) -> dict[str, float]:
    """All of :meth:`EnergyMetrics.compute`, and "median_ae", the median of |error|, eV.

    Unlike the others a median is no sum, and needs all systems at once.

    Raises:
        ValueError: as :class:`EnergyMetrics`.
    """
    metrics = EnergyMetrics()
    metrics.update(prediction, target, sid)
    computed = metrics.compute()
    size = np.abs(energies(prediction) - energies(target))
    return {**computed, "median_ae": float(np.median(size))}


def _computed(prediction: Any, target: Any) -> dict[str, float]:
    metrics = EnergyMetrics()
    metrics.update(prediction, target)
    return metrics.compute()


def _errors(prediction: Any, target: Any, sid: Sequence[Any] | None) -> NDArray[np.float64]:
    """Errors prediction − target, (B,) float64, after all checks."""
    predicted = energies(prediction, "predictions")
    wanted = energies(target, "targets")
    if predicted.shape != wanted.shape:
        raise ValueError(f"{len(predicted)} predictions for {len(wanted)} targets")
    if sid is not None and len(sid) != len(wanted):
        raise ValueError(f"{len(sid)} sids for {len(wanted)} targets")
    for name, values in (("prediction", predicted), ("target", wanted)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            systems = ", ".join(
                f"row {row}" if sid is None else f"sid {sid[row]}" for row in bad[:5]
            )
            more = "" if len(bad) <= 5 else f" and {len(bad) - 5} more"
            raise ValueError(f"{name} {values[bad[0]]} is not a finite energy: {systems}{more}")
    error: NDArray[np.float64] = predicted - wanted
    return error
