"""Energy metrics of IS2RE as sums over systems, and how far they may be off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.prediction.energies import energy_array

__all__ = [
    "DRAWS",
    "EWT_THRESHOLD",
    "LEVEL",
    "EnergyMetrics",
    "bootstrap_intervals",
    "ewt",
    "mae",
    "median_ae",
    "metrics_of",
]

EWT_THRESHOLD = 0.02
"""eV; an energy is within threshold if its error is strictly smaller."""

LEVEL = 0.95
"""Share of the resampled values that lie within an interval."""

DRAWS = 1000
"""Resamples; the ends of a 95 % interval are then those of the 25 lowest and 25 highest."""


@dataclass
class EnergyMetrics:
    r"""Running sums over systems of the errors e_s = prediction_s − target_s, in float64 eV.

    - `mae` = (1/S) Σ |e_s|, `rmse` = √((1/S) Σ e_s²), `me` = (1/S) Σ e_s (the bias), in eV;
    - `ewt` = (1/S) #{s : |e_s| < 0.02 eV}, a fraction, strictly below (Chanussot et al. 2021,
      ACS Catal. 11, 6059).

    The sums, not means of batch means, are carried, so batches may have any sizes and order.

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
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
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
    return metrics_of(prediction, target)["mae"]


def ewt(prediction: Any, target: Any) -> float:
    """Fraction of systems with |error| strictly below 0.02 eV; see :class:`EnergyMetrics`.

    Example:
        >>> ewt([0.019, 0.02], [0.0, 0.0])
        0.5
    """
    return metrics_of(prediction, target)["ewt"]


def median_ae(prediction: Any, target: Any) -> float:
    """Median of |error|, eV, of (B,) or (B, 1) energies: half of the systems are closer.

    Example:
        >>> median_ae([1.0, 2.0, 9.0], [1.5, 1.9, 1.0])
        0.5
    """
    return metrics_of(prediction, target)["median_ae"]


def metrics_of(prediction: Any, target: Any, sid: Sequence[Any] | None = None) -> dict[str, float]:
    """All of :meth:`EnergyMetrics.compute`, and "median_ae", the median of |error|, eV.

    Raises:
        ValueError: as :class:`EnergyMetrics`.
    """
    metrics = EnergyMetrics()
    metrics.update(prediction, target, sid)
    error = np.abs(_errors(prediction, target, sid))
    return {**metrics.compute(), "median_ae": float(np.median(error))}


def _errors(prediction: Any, target: Any, sid: Sequence[Any] | None) -> NDArray[np.float64]:
    """Errors prediction − target, (B,) float64, after all checks."""
    found = {
        "prediction": energy_array(prediction, "predictions"),
        "target": energy_array(target, "targets"),
    }
    lengths = [len(values) for values in found.values()]
    if lengths[0] != lengths[1] or (sid is not None and len(sid) != lengths[1]):
        sids = "" if sid is None else f" and {len(sid)} sids"
        raise ValueError(f"{lengths[0]} predictions for {lengths[1]} targets{sids}")
    for name, values in found.items():
        bad = np.flatnonzero(~np.isfinite(values)).tolist()
        if bad:
            systems = [f"row {row}" if sid is None else f"sid {sid[row]}" for row in bad[:5]]
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise ValueError(
                f"{name} {values[bad[0]]} is not a finite energy: {', '.join(systems)}{more}"
            )
    return np.asarray(found["prediction"] - found["target"])


def bootstrap_intervals(
    error: Any, names: Sequence[str] = ("mae", "ewt", "rmse", "me", "median_ae"), seed: int = 0
) -> dict[str, tuple[float, float]]:
    r"""Percentile bootstrap intervals (95 %, 1000 draws) of the metrics of S systems.

    An interval goes from the 2.5 % to the 97.5 % quantile of the metric over resamples of S
    systems, drawn with replacement. It says what other systems of the same kind would give, not
    what another seed of training would. The order of the systems changes nothing; one system gives
    intervals without width.

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

    Example:
        >>> low, high = bootstrap_intervals(np.array([0.0, 1.0] * 200))["mae"]
        >>> 0.44 < low < 0.46 and 0.54 < high < 0.56  # 0.5 ± 1.96 · 0.5 / √400
        True
    """
    from scipy.stats import bootstrap

    error = np.sort(energy_array(error, "errors"))
    if not len(error) or not np.isfinite(error).all():
        raise ValueError("intervals need at least one system, and finite errors")

    def statistics(sample: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        return np.stack([_STATISTICS[name](sample, axis) for name in names])

    if len(error) == 1:
        ends = [statistics(error)] * 2
    else:
        batch = max(1, 2**22 // len(error))  # 32 MB of draws
        found = bootstrap(
            (error,),
            statistics,
            n_resamples=DRAWS,
            batch=batch,
            confidence_level=LEVEL,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        ends = [found.low, found.high]
    lows, highs = (np.atleast_1d(end).tolist() for end in ends)
    return {name: (low, high) for name, low, high in zip(names, lows, highs, strict=True)}


_STATISTICS: dict[str, Any] = {
    "mae": lambda x, axis: np.abs(x).mean(axis),
    "ewt": lambda x, axis: (np.abs(x) < EWT_THRESHOLD).mean(axis),
    "rmse": lambda x, axis: np.sqrt(np.square(x).mean(axis)),
    "me": lambda x, axis: x.mean(axis),
    "median_ae": lambda x, axis: np.median(np.abs(x), axis),
}
