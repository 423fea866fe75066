"""What the batches of one split give: predictions, columns, errors, the worst systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.evaluation.elements import check_elements
from flt_mol.evaluation.further import FurtherErrors
from flt_mol.evaluation.metrics import EnergyMetrics, energies, metrics_of
from flt_mol.evaluation.systems import Columns, columns_of, joined_columns
from flt_mol.structures import Structures

__all__ = ["Found", "SplitResult", "energies_of"]


@dataclass(frozen=True, eq=False)
class SplitResult:
    """Predictions and targets of the S systems of one split.

    Args:
        sid: S names, as stored.
        prediction: (S,) float64, eV.
        target: (S,) float64, eV.
        metrics: `count`, `mae`, `ewt`, `rmse`, `me`, `median_ae`; see
            :func:`~flt_mol.evaluation.metrics.metrics_of`.
        path: where the split was read from, empty if unknown.
        unseen: symbols of its elements that the model was never trained on.
        columns: what is known of each system, S values by name, None where one lacks it; see
            :func:`~flt_mol.evaluation.systems.columns_of`.
        further: errors of other outputs; see :class:`~flt_mol.evaluation.further.FurtherErrors`.
        unfixed: whether the model moves free atoms, and no atom of the split is fixed.
        worst: the systems with the largest |error|, that first, as many as were asked for.
    """

    sid: tuple[int | str, ...]
    prediction: NDArray[np.float64]
    target: NDArray[np.float64]
    metrics: Mapping[str, float]
    path: str = ""
    unseen: tuple[str, ...] = ()
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    further: Mapping[str, float] = field(default_factory=dict)
    unfixed: bool = False
    worst: tuple[Structures, ...] = ()

    @property
    def error(self) -> NDArray[np.float64]:
        """(S,) float64, prediction − target, eV."""
        return self.prediction - self.target


def energies_of(output: Any, batch: Structures) -> NDArray[np.float64]:
    """Energies (B,) float64, eV, out of what a model gave for a batch.

    Raises:
        ValueError: not one energy per system.
    """
    values = energies(output["energy"] if isinstance(output, Mapping) else output, "predictions")
    if len(values) != len(batch):
        raise ValueError(f"the model gave {len(values)} energies for {len(batch)} systems")
    return values


class Found:
    """What the batches of one split gave so far.

    Args:
        keep_worst: of how many systems with the largest |error| structures are kept.
    """

    def __init__(self, keep_worst: int) -> None:
        self.sids: list[int | str] = []
        self._keep_worst = keep_worst
        self._predictions: list[NDArray[np.float64]] = []
        self._targets: list[NDArray[np.float64]] = []
        self._columns: list[Columns] = []
        self._further = FurtherErrors()
        self._elements: set[int] = set()
        self._moves = self._fixed = False
        self._worst: list[tuple[float, str, Structures]] = []

    def add(self, output: Any, batch: Structures) -> None:
        """Add one batch and what the model gave for it.

        Raises:
            ValueError: shapes that do not fit, or numbers that are not finite, naming the sid.
        """
        prediction, target = energies_of(output, batch), energies(batch.energy, "targets")
        EnergyMetrics().update(prediction, target, batch.sid)  # names what is not finite
        self.sids += batch.sid
        self._predictions.append(prediction)
        self._targets.append(target)
        self._columns.append(columns_of(batch))
        self._further.update(output, batch)
        self._elements.update(batch.atomic_numbers.tolist())
        self._moves |= isinstance(output, Mapping) and "displacement" in output
        self._fixed |= bool(batch.fixed.any())
        self._note_worst(np.abs(prediction - target), batch)

    def _note_worst(self, size: NDArray[np.float64], batch: Structures) -> None:
        if not self._keep_worst:
            return
        least = self._worst[-1][0] if len(self._worst) == self._keep_worst else -1.0
        for b in np.argsort(-size, kind="stable")[: self._keep_worst]:
            if size[b] >= least:
                alone = replace(batch[int(b)], pairs=None, cutoff=None)
                self._worst.append((float(size[b]), str(batch.sid[b]), alone))
        self._worst.sort(key=lambda entry: (-entry[0], entry[1]))
        del self._worst[self._keep_worst :]

    def result(self, model: Any, path: str) -> SplitResult:
        """All batches as one; needs at least one system."""
        prediction, target = np.concatenate(self._predictions), np.concatenate(self._targets)
        return SplitResult(
            sid=tuple(self.sids),
            prediction=prediction,
            target=target,
            metrics=metrics_of(prediction, target),
            path=path,
            unseen=tuple(check_elements(model, self._elements)),
            columns=joined_columns(self._columns),
            further=self._further.compute(),
            unfixed=self._moves and not self._fixed,
            worst=tuple(structure for _, _, structure in self._worst),
        )
