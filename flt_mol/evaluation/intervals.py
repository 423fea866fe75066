"""How far metrics may be off because a split holds only so many systems: bootstrap intervals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flt_mol.arguments import whole_number
from flt_mol.evaluation.metrics import EWT_THRESHOLD, energies

__all__ = ["DRAWS", "LEVEL", "bootstrap_intervals"]

LEVEL = 0.95
"""Share of the resampled values that lie within an interval."""

DRAWS = 1000
"""Resamples; the ends of a 95 % interval are then those of the 25 lowest and 25 highest."""

_AT_ONCE = 1 << 20  # systems drawn at once, 8 MB an array

Array = NDArray[np.float64]


def bootstrap_intervals(
    error: Array, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> dict[str, tuple[float, float]]:
    r"""Percentile bootstrap intervals of the metrics of S systems.

    S systems are drawn with replacement `draws` times; an interval goes from the (1 − level)/2 to
    the (1 + level)/2 quantile of the metric over these resamples. It tells what other systems of
    the same kind would give, not what another seed of training would. Errors are sorted before,
    so that the order of systems changes nothing; one system gives intervals without width.

    Args:
        error: (S,) prediction − target, eV, finite.
        level: of confidence, between 0 and 1.
        draws: number of resamples.
        seed: of a generator of its own.

    Returns:
        {"mae", "ewt", "rmse", "me", "median_ae": (low, high)}; eV, "ewt" a fraction.

    Raises:
        ValueError: no systems, an error that is not finite, or a level outside (0, 1).

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.

    Example:
        >>> low, high = bootstrap_intervals(np.array([0.0, 1.0] * 200))["mae"]
        >>> 0.44 < low < 0.46 and 0.54 < high < 0.56  # 0.5 ± 1.96 · 0.5 / √400
        True
    """
    error = energies(error, "errors")
    if not len(error) or not np.isfinite(error).all():
        raise ValueError("intervals need at least one system, and finite errors")
    draws = whole_number("draws", draws, 1)
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise ValueError(f"level is {level!r}, expected a number between 0 and 1")
    size = np.abs(error)
    order = np.lexsort((error, size))
    error, size = error[order], size[order]
    columns = np.stack([size, error**2, error, size < EWT_THRESHOLD], axis=1)
    rng = np.random.default_rng(seed)
    sums, medians = [], []
    for counts in _resampled(rng, len(error), draws):
        sums.append(counts.astype(np.float64) @ columns)
        medians.append(_medians(counts, size))
    mae, mse, me, ewt = (np.concatenate(sums) / len(error)).T
    values = {"mae": mae, "ewt": ewt, "rmse": np.sqrt(mse), "me": me}
    values["median_ae"] = np.concatenate(medians)
    ends = [(1 - level) / 2, (1 + level) / 2]
    quantiles = {name: np.quantile(of_draws, ends) for name, of_draws in values.items()}
    return {name: (float(low), float(high)) for name, (low, high) in quantiles.items()}


def _resampled(rng: np.random.Generator, size: int, draws: int) -> Iterator[NDArray[np.int64]]:
    """How often each of `size` systems is drawn, (n, size), some draws at a time."""
    rows = max(1, _AT_ONCE // size)
    for start in range(0, draws, rows):
        n = min(rows, draws - start)
        drawn = rng.integers(0, size, (n, size)) + size * np.arange(n)[:, None]
        yield np.bincount(drawn.reshape(-1), minlength=n * size).reshape(n, size)


def _medians(counts: NDArray[np.int64], ascending: Array) -> Array:
    """(n,) medians of `ascending`, each value as often as a row of counts says."""
    size = len(ascending)
    upto = np.cumsum(counts, axis=1)
    middle = [(size - 1) // 2, size // 2]  # from 0; the same one where the size is odd
    places = np.array([np.searchsorted(row, middle, side="right") for row in upto])
    medians: Array = ascending[places].mean(axis=1)
    return medians
