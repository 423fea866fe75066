"""A model's predictions on one split or several, with their metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from flt_mol.arguments import whole_number
from flt_mol.evaluation.collecting import Found, SplitResult, energies_of
from flt_mol.evaluation.elements import check_elements, warn_unseen
from flt_mol.modes import evaluating
from flt_mol.structures import Structures
from flt_mol.targets import far_off_message

__all__ = [
    "SplitResult",
    "check_elements",
    "evaluate_model",
    "evaluate_splits",
    "evaluating",
    "predict_batch",
    "unfixed_message",
]

Model = Callable[[Structures], Any]
"""An `nn.Module` or a function: Structures → {"energy": (B,)} or (B,), eV."""


def evaluate_model(
    model: Model,
    source: Any,
    batch_size: int = 64,
    *,
    progress: Callable[[int, int | None], None] | None = None,
    keep_worst: int = 0,
) -> SplitResult:
    """Predict every system of one split and compare with its targets.

    Args:
        model: a module (put into eval mode meanwhile, run on its own device) or a function such
            as `baseline.predict`; Structures → {"energy": (B,)} or (B,), eV.
        source: a DataLoader of Structures (`batch_size` is then its own), a data set of
            Structures, or any iterable of them.
        batch_size: systems per call.
        progress: called with (systems done, systems in all or None) after each batch.
        keep_worst: of how many systems with the largest |error| structures are kept.

    Raises:
        ValueError: 'this split has no targets', naming the path; no systems; a prediction or
            target that is not finite, naming the sid; a `batch_size` or `keep_worst` that is no
            whole number.

    Warns:
        UserWarning: elements that the model was never trained on, naming them; targets far off
            all others, by sid; no fixed atom, where the model moves free ones.
    """
    result = _evaluate(model, source, batch_size, progress, keep_worst)
    warn_unseen(result.unseen)
    _warn_far_off({result.path or "this split": result})
    if result.unfixed:
        warnings.warn(unfixed_message([result.path or "this split"]), UserWarning, stacklevel=2)
    return result


def evaluate_splits(
    model: Model,
    sources: Mapping[str, Any],
    batch_size: int = 64,
    *,
    progress: Callable[[str, int, int | None], None] | None = None,
    keep_worst: int = 0,
) -> dict[str, SplitResult]:
    """:func:`evaluate_model` on every split of {name: source}; one warning for all.

    Args:
        model: as for :func:`evaluate_model`.
        sources: {split: data set, loader or iterable of Structures}.
        batch_size: systems per call.
        progress: called with (split, systems done, systems in all or None) after each batch.
        keep_worst: as for :func:`evaluate_model`, of each split.
    """
    results = {}
    for split, source in sources.items():

        def report(done: int, total: int | None, split: str = split) -> None:
            if progress is not None:
                progress(split, done, total)

        results[split] = _evaluate(model, source, batch_size, report, keep_worst)
    warn_unseen({symbol for result in results.values() for symbol in result.unseen})
    _warn_far_off(results)
    unfixed = [split for split, result in results.items() if result.unfixed]
    if unfixed:
        warnings.warn(unfixed_message(unfixed), UserWarning, stacklevel=2)
    return results


def _warn_far_off(results: Mapping[str, SplitResult]) -> None:
    for split, result in results.items():
        message = far_off_message(result.target, result.sid, split, "the errors")
        if message is not None:
            warnings.warn(message, UserWarning, stacklevel=3)


def unfixed_message(splits: list[str]) -> str:
    """The warning about splits without a fixed atom under a model that moves free ones."""
    return (
        f"no atom is fixed in {', '.join(splits)}, and this model moves free atoms: it takes the "
        "slab's lower layers for free, too. Store `fixed` (in ASE: FixAtoms) as in training"
    )


def predict_batch(model: Model, batch: Structures) -> NDArray[np.float64]:
    """Energies (B,) float64, eV, of one batch, moved to the model's device.

    The caller sets eval and inference mode.

    Raises:
        ValueError: the model did not give one energy per system.
    """
    return energies_of(model(batch.to(_device(model))), batch)


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
    keep_worst: int,
) -> SplitResult:
    batch_size = whole_number("batch_size", batch_size, 1)
    keep_worst = whole_number("keep_worst", keep_worst, 0)
    path = _path(source)
    total = _total(source)
    device = _device(model)
    found = Found(keep_worst)
    with evaluating(model), torch.inference_mode():
        for batch in _batches(source, batch_size, path):
            found.add(model(batch.to(device)), batch)
            if progress is not None:
                progress(len(found.sids), total)
    if not found.sids:
        raise ValueError(f"no systems to evaluate in {path or 'this split'}")
    return found.result(model, path)


def _batches(source: Any, batch_size: int, path: str) -> Iterator[Structures]:
    """Batches that all have targets: a loader's own, or `batch_size` systems of a data set."""
    if isinstance(source, DataLoader):
        yield from (_with_targets(batch, path) for batch in source)
        return
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
