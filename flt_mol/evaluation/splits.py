"""A model's predictions on one split or several, compared with their targets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from ase.formula import Formula
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from flt_mol.data.schema import far_off_message
from flt_mol.evaluation.metrics import EnergyMetrics, metrics_of
from flt_mol.prediction.energies import (
    MESSAGES,
    batches,
    check_elements,
    energies_of,
    evaluating,
    model_device,
)
from flt_mol.structures import Structures, relaxed_displacement

__all__ = ["COLUMNS", "SplitResult", "evaluate_model", "evaluate_splits", "split_messages"]

COLUMNS = ("natoms", "adsorbate", "elements", "facet", "trained_on", "held_out")
"""What may be known of a system beside its energies, in this order in files.

The adsorbate is the formula of the atoms with tag 2; the last two are "yes" or "no"."""

Model = Callable[[Structures], Any]
"""An `nn.Module` or a function: Structures → {"energy": (B,)} or (B,), eV."""


@dataclass(frozen=True, eq=False)
class SplitResult:
    """Predictions and targets of the S systems of one split.

    Args:
        sid: S names, as stored.
        prediction: (S,) float64, eV.
        target: (S,) float64, eV.
        path: where the split was read from, empty if unknown.
        unseen: symbols of its elements that the model was never trained on.
        columns: S values by name, see :data:`COLUMNS`; None where a system lacks one.
        further: errors of other outputs: "energy_initial_mae" (eV), "…_ewt", "…_count"; over free
            atoms "displacement", the mean distance between predicted and relaxed positions (Å),
            "displacement_unmoved", the same if no atom moved, and "displacement_atoms".
        unfixed: whether the model moves free atoms, and no atom of the split is fixed.
        worst: the systems with the largest |error|, that first, as many as were asked for.
    """

    sid: tuple[int | str, ...]
    prediction: NDArray[np.float64]
    target: NDArray[np.float64]
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

    @cached_property
    def metrics(self) -> dict[str, float]:
        """As of :func:`~flt_mol.evaluation.metrics.metrics_of`."""
        return metrics_of(self.prediction, self.target, self.sid)


def evaluate_model(model: Model, source: Any, batch_size: int = 64, **options: Any) -> SplitResult:
    """:func:`evaluate_splits` of a single split, with the arguments described there."""
    name = _path(source) or "this split"
    return evaluate_splits(model, {name: source}, batch_size, **options)[name]


def evaluate_splits(
    model: Model,
    sources: Mapping[str, Any],
    batch_size: int = 64,
    *,
    progress: Callable[[str, int, int | None], None] | None = None,
    keep_worst: int = 0,
) -> dict[str, SplitResult]:
    """Predict every system of every split and compare with its targets.

    Args:
        model: a module (put into eval mode meanwhile, run on its own device) or a function.
        sources: {split: a data set or iterable of Structures, or a DataLoader}.
        batch_size: systems per call, but for a DataLoader.
        progress: called with (split, systems done, systems in all or None) after each batch.
        keep_worst: of how many systems with the largest |error| of each split structures are kept.

    Raises:
        ValueError: no targets, naming the path; no systems; a prediction or target that is not
            finite, naming the sid; a `batch_size` below 1.

    Warns:
        UserWarning: targets far off all others, by sid, and :func:`split_messages`.
    """
    results = {}
    for split, source in sources.items():
        found = _Found(keep_worst)
        total = len(source) if hasattr(source, "__len__") else None
        with evaluating(model), torch.inference_mode():
            for batch in _batches(source, batch_size):
                found.add(model(batch.to(model_device(model))), batch)
                if progress is not None:
                    progress(split, len(found.sids), total)
        results[split] = found.result(model, _path(source))
    far_off = (
        far_off_message(result.target, result.sid, split, "the errors")
        for split, result in results.items()
    )
    for text in filter(None, [*far_off, *split_messages(results)]):
        warnings.warn(text, UserWarning, stacklevel=2)
    return results


def split_messages(results: Mapping[str, SplitResult]) -> list[str]:
    """Warnings of elements never trained on, and of no fixed atom where the model moves free ones.

    Each once for all splits.
    """
    texts = []
    if unseen := sorted({symbol for result in results.values() for symbol in result.unseen}):
        texts.append(MESSAGES["elements"].format(which=", ".join(unseen)))
    if unfixed := [split for split, result in results.items() if result.unfixed]:
        texts.append(MESSAGES["fixed"].format(which=", ".join(unfixed)))
    return texts


def _batches(source: Any, batch_size: int) -> Iterator[Structures]:
    """Batches that all have targets: a loader's own, or `batch_size` systems of a data set."""
    if isinstance(source, DataLoader):
        parts: Iterator[Structures] = iter(source)
    elif hasattr(source, "__getitems__"):
        steps = range(0, len(source), max(1, batch_size))
        read = (source.__getitems__(range(len(source))[i : i + batch_size]) for i in steps)
        parts = batches(read, batch_size)
    else:
        parts = batches(source, batch_size)
    for batch in parts:
        if batch.energy is None:
            raise ValueError(
                f"this split has no targets: {_path(source) or 'the data set'} lacks y_relaxed "
                f"(first at sid {batch.sid[0]}); use predict, or a validation split"
            )
        yield batch


def _path(source: Any) -> str:
    while not hasattr(source, "path") and hasattr(source, "dataset"):
        source = source.dataset  # of a loader, or a subset
    return str(getattr(source, "path", ""))


class _Found:
    """What the batches of one split gave so far."""

    def __init__(self, keep_worst: int) -> None:
        self.sids: list[int | str] = []
        self._keep_worst = keep_worst
        self._energies: list[NDArray[np.float64]] = []  # (2, B): predictions and targets
        self._columns: dict[str, list[Any]] = {}
        self._initial = EnergyMetrics()
        self._moved: list[Tensor] = []  # (2, atoms): distances of free atoms, the same unmoved
        self._elements: set[int] = set()
        self._moves = self._fixed = False
        self._worst: list[tuple[float, str, Structures]] = []

    def add(self, output: Any, batch: Structures) -> None:
        prediction = energies_of(output, batch)
        target = energies_of(batch.energy, batch)
        EnergyMetrics().update(prediction, target, batch.sid)  # names what is not finite
        self.sids += batch.sid
        self._energies.append(np.stack([prediction, target]))
        for name, values in _columns(batch).items():
            self._columns.setdefault(name, []).extend(values)
        self._elements.update(batch.atomic_numbers.tolist())
        self._fixed |= bool(batch.fixed.any())
        if isinstance(output, Mapping):
            self._moves |= "displacement" in output
            self._add_further(output, batch)
        size = np.abs(prediction - target)
        for b in np.argsort(-size, kind="stable")[: self._keep_worst].tolist():
            alone = replace(batch[b], pairs=None, cutoff=None)
            self._worst.append((-float(size[b]), str(batch.sid[b]), alone))
        self._worst = sorted(self._worst, key=lambda x: x[:2])[: self._keep_worst]

    def _add_further(self, output: Mapping[str, Any], batch: Structures) -> None:
        if "energy_initial" in output and batch.energy_initial is not None:
            self._initial.update(output["energy_initial"], batch.energy_initial, batch.sid)
        if "displacement" in output and batch.positions_relaxed is not None:
            batch = batch.to("cpu")
            target = relaxed_displacement(batch).double()
            moved = torch.stack([output["displacement"].cpu().double() - target, target])
            distance = torch.linalg.vector_norm(moved, dim=-1)[:, ~batch.fixed]
            wrong = batch.system[~batch.fixed][~distance.isfinite().all(dim=0)].tolist()
            if wrong:
                raise ValueError(f"a displacement of sid {batch.sid[wrong[0]]} is not finite")
            self._moved.append(distance)

    def result(self, model: Any, path: str) -> SplitResult:
        if not self.sids:
            raise ValueError(f"no systems to evaluate in {path or 'this split'}")
        further: dict[str, float] = {}
        with suppress(ValueError):  # none was stored
            initial = self._initial.compute()
            further |= {f"energy_initial_{x}": initial[x] for x in ("mae", "ewt", "count")}
        if self._moved and (distances := torch.cat(self._moved, dim=1)).numel():
            distance, unmoved = distances.mean(dim=1).tolist()
            further |= {"displacement": distance, "displacement_unmoved": unmoved}
            further["displacement_atoms"] = distances.shape[1]
        prediction, target = np.concatenate(self._energies, axis=1)
        return SplitResult(
            sid=tuple(self.sids),
            prediction=prediction,
            target=target,
            path=path,
            unseen=tuple(check_elements(model, self._elements)),
            columns={
                name: tuple(values)
                for name, values in self._columns.items()
                if any(value is not None for value in values)
            },
            further=further,
            unfixed=self._moves and not self._fixed,
            worst=tuple(structure for _, _, structure in self._worst),
        )


def _columns(structures: Structures) -> dict[str, list[Any]]:
    numbers, tags = structures.atomic_numbers.cpu().numpy(), structures.tags.cpu().numpy()
    systems = [(numbers[i:j], tags[i:j]) for i, j in pairwise(structures.ptr.tolist())]
    info: Mapping[str, tuple[Any, ...]] = structures.info
    facets = info.get("facet") or info.get("miller_index") or (None,) * len(structures)
    return {
        "natoms": [len(z) for z, _ in systems],
        "adsorbate": [_formula(tuple(z[tag == 2].tolist())) for z, tag in systems],
        "elements": [" ".join(sorted(chemical_symbols[i] for i in set(z))) for z, _ in systems],
        "facet": [_facet(value) for value in facets],
    }


def _facet(value: Any) -> str | None:
    """(1, 1, 1) as "111", (1, -1, 0) as "1 -1 0"; text as it is."""
    if value is None or isinstance(value, str):
        return value or None
    numbers = [str(x) for x in np.asarray(value).reshape(-1).tolist()]
    return ("" if all(len(x) == 1 for x in numbers) else " ").join(numbers) or None


@lru_cache(maxsize=4096)
def _formula(numbers: tuple[int, ...]) -> str | None:
    symbols = [chemical_symbols[z] for z in numbers]
    return str(Formula.from_list(symbols).format("hill")) if symbols else None
