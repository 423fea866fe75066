"""A model's predictions on one split or several, with their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from flt_mol.evaluation.elements import check_elements, warn_unseen
from flt_mol.evaluation.metrics import EnergyMetrics, energies
from flt_mol.modes import evaluating
from flt_mol.structures import Structures

__all__ = [
    "SplitResult",
    "check_elements",
    "evaluate_model",
    "evaluate_splits",
    "evaluating",
    "predict_batch",
]

Model = Callable[[Structures], Any]
"""An `nn.Module` or a function: Structures → {"energy": (B,)} or (B,), eV."""


@dataclass(frozen=True, eq=False)
class SplitResult:
    """Predictions and targets of the S systems of one split.

    Args:
        sid: S names, as stored.
        prediction: (S,) float64, eV.
        target: (S,) float64, eV.
        metrics: `count`, `mae`, `ewt`, `rmse`, `me`; see
            :class:`~flt_mol.evaluation.metrics.EnergyMetrics`.
        path: where the split was read from, empty if unknown.
        unseen: symbols of its elements that the model was never trained on.
    """

    sid: tuple[int | str, ...]
    prediction: NDArray[np.float64]
    target: NDArray[np.float64]
    metrics: Mapping[str, float]
    path: str = ""
    unseen: tuple[str, ...] = ()

    @property
    def error(self) -> NDArray[np.float64]:
        """(S,) float64, prediction − target, eV."""
        return self.prediction - self.target


def evaluate_model(
    model: Model,
    source: Any,
    batch_size: int = 64,
    *,
    progress: Callable[[int, int | None], None] | None = None,
) -> SplitResult:
    """Predict every system of one split and compare with its targets.

    Args:
        model: a module (put into eval mode meanwhile, run on its own device) or a function such
            as `baseline.predict`; Structures → {"energy": (B,)} or (B,), eV.
        source: a DataLoader of Structures (`batch_size` is then its own), a data set of
            Structures, or any iterable of them.
        batch_size: systems per call.
        progress: called with (systems done, systems in all or None) after each batch.

    Raises:
        ValueError: 'this split has no targets', naming the path; no systems; a prediction or
            target that is not finite, naming the sid.

    Warns:
        UserWarning: elements that the model was never trained on, naming them.
    """
    result = _evaluate(model, source, batch_size, progress)
    warn_unseen(result.unseen)
    return result


def evaluate_splits(
    model: Model,
    sources: Mapping[str, Any],
    batch_size: int = 64,
    *,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> dict[str, SplitResult]:
    """:func:`evaluate_model` on every split of {name: source}; one warning for all.

    Args:
        model: as for :func:`evaluate_model`.
        sources: {split: data set, loader or iterable of Structures}.
        batch_size: systems per call.
        progress: called with (split, systems done, systems in all or None) after each batch.
    """
    results = {}
    for split, source in sources.items():

        def report(done: int, total: int | None, split: str = split) -> None:
            if progress is not None:
                progress(split, done, total)

        results[split] = _evaluate(model, source, batch_size, report)
    warn_unseen({symbol for result in results.values() for symbol in result.unseen})
    return results


def predict_batch(model: Model, batch: Structures) -> NDArray[np.float64]:
    """Energies (B,) float64, eV, of one batch, moved to the model's device.

    The caller sets eval and inference mode.

    Raises:
        ValueError: the model did not give one energy per system.
    """
    output = model(batch.to(_device(model)))
    values = energies(output["energy"] if isinstance(output, Mapping) else output, "predictions")
    if len(values) != len(batch):
        raise ValueError(f"the model gave {len(values)} energies for {len(batch)} systems")
    return values


def _device(model: Any) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")


def _evaluate(
    model: Model,
    source: Any,
    batch_size: int,
    progress: Callable[[int, int | None], None] | None,
) -> SplitResult:
    path = _path(source)
    total = _total(source)
    metrics = EnergyMetrics()
    sids: list[int | str] = []
    predictions, targets = [], []
    elements: set[int] = set()
    with evaluating(model), torch.inference_mode():
        for batch in _batches(source, batch_size, path):
            prediction, target = predict_batch(model, batch), energies(batch.energy, "targets")
            metrics.update(prediction, target, sid=batch.sid)
            sids += batch.sid
            predictions.append(prediction)
            targets.append(target)
            elements.update(batch.atomic_numbers.tolist())
            if progress is not None:
                progress(metrics.count, total)
    if not sids:
        raise ValueError(f"no systems to evaluate in {path or 'this split'}")
    return SplitResult(
        sid=tuple(sids),
        prediction=np.concatenate(predictions),
        target=np.concatenate(targets),
        metrics=metrics.compute(),
        path=path,
        unseen=tuple(check_elements(model, elements)),
    )


def _batches(source: Any, batch_size: int, path: str) -> Iterator[Structures]:
    """Batches that all have targets: a loader's own, or `batch_size` systems of a data set."""
    if isinstance(source, DataLoader):
        yield from (_with_targets(batch, path) for batch in source)
        return
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    parts: list[Structures] = []
    for part in _items(source):
        parts.append(_with_targets(part, path))
        if sum(len(p) for p in parts) >= batch_size:
            yield Structures.cat(parts)
            parts = []
    if parts:
        yield Structures.cat(parts)


def _items(source: Any) -> Iterator[Structures]:
    # A torch Dataset need not raise IndexError at its end, which iter() would wait for.
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return (source[i] for i in range(len(source)))
    return iter(source)


def _with_targets(part: Structures, path: str) -> Structures:
    if part.energy is None:
        sids = ", ".join(str(sid) for sid in part.sid[:5])
        raise ValueError(
            f"this split has no targets: {path or 'the data set'} lacks y_relaxed "
            f"(first at sid {sids}). Test splits hold none: use predict, or a validation split"
        )
    return part


def _path(source: Any) -> str:
    if isinstance(source, DataLoader):
        source = source.dataset
    path = getattr(source, "path", None)
    return "" if path is None else str(path)


def _total(source: Any) -> int | None:
    if isinstance(source, DataLoader):
        source = source.sampler
    return len(source) if hasattr(source, "__len__") else None
