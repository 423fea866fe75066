"""A model's predictions on one split or several, compared with their targets."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from numpy.typing import NDArray

from flt_mol.data.checks import Unusual
from flt_mol.data.tags import adsorbate_formula
from flt_mol.evaluation.metrics import TARGETS, error_sums, errors_of, metrics_of
from flt_mol.prediction.energies import (
    UNSEEN,
    batches,
    check_elements,
    energies_of,
    evaluating,
    prepared,
    unfit_for,
)
from flt_mol.prediction.members import Members
from flt_mol.structures import Structures

COLUMNS = ("natoms", "adsorbate", "elements", "facet", "trained_on", "held_out")
"""What may be known of a system beside its energies, in this order in files.

The adsorbate is the formula of the atoms with tag 2; the last two are "yes" or "no"."""

_COUNTS = {
    "energy_initial_mae": "energy_initial_count",
    "displacement": "displacement_atoms",
    "forces_cosine": "forces_atoms",
}

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
        columns: S values by name, see `COLUMNS`; None where a system lacks one.
        further: errors of other outputs: "energy_initial_mae" (eV), "…_ewt", "…_count"; over free
            atoms "displacement", the mean distance between predicted and relaxed positions (Å),
            "displacement_unmoved", the same if no atom moved, and "displacement_atoms"; those of
            `flt_mol.evaluation.metrics.force_sums`, and "forces_atoms".
    """

    sid: tuple[int | str, ...]
    prediction: NDArray[np.float64]
    target: NDArray[np.float64]
    path: str = ""
    unseen: tuple[str, ...] = ()
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    further: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> NDArray[np.float64]:
        """(S,) float64, prediction − target, eV."""
        return self.prediction - self.target

    @cached_property
    def metrics(self) -> dict[str, float]:
        """As of `metrics_of`."""
        return metrics_of(self.prediction, self.target)

    @classmethod
    def cat(cls, parts: Iterable[SplitResult]) -> SplitResult:
        """All systems of several results; what is not a field by system, or unseen, is not kept."""
        parts = list(parts)
        names = [name for name in COLUMNS if any(name in part.columns for part in parts)]
        return cls(
            sid=tuple(sid for part in parts for sid in part.sid),
            prediction=np.concatenate([part.prediction for part in parts]),
            target=np.concatenate([part.target for part in parts]),
            unseen=tuple(sorted({symbol for part in parts for symbol in part.unseen})),
            columns={
                name: tuple(x for p in parts for x in p.columns.get(name, (None,) * len(p.sid)))
                for name in names
            },
        )


Results = Mapping[str, SplitResult]


def evaluate_model(model: Model, source: Any, batch_size: int = 64, **options: Any) -> SplitResult:
    """`evaluate_splits` of a single split, with the arguments described there."""
    name = _path(source) or "this split"
    return evaluate_splits(model, {name: source}, batch_size, **options)[name]


def evaluate_splits(
    model: Model,
    sources: Mapping[str, Any],
    batch_size: int = 64,
    *,
    progress: Callable[[str, int, int | None], None] | None = None,
    warn: bool = True,
    members: Members | None = None,
) -> dict[str, SplitResult]:
    """Predict every system of every split and compare with its targets.

    Args:
        model: a module (put into eval mode meanwhile, run on its own device) or a function.
        sources: {split: a data set, DataLoader or other iterable of Structures}.
        batch_size: systems per call; larger batches of a source stay whole.
        progress: called with (split, systems done, systems in all or None) after each batch.
        warn: whether to warn.
        members: of the model, to warn of tags by another rule.

    Raises:
        ValueError: no targets, naming the path; no systems; a prediction or target that is not
            finite, naming the sid; a `batch_size` below 1.

    Warns:
        UserWarning: once of each kind for all splits, as `flt_mol.predict`, and energies that
            are no adsorption energies (`Unusual`).
    """
    results, unusual = {}, Unusual()
    reference = getattr(model, "reference_energies", None)
    for split, source in sources.items():
        found, done = _Split(), 0
        total = len(source) if hasattr(source, "__len__") else None
        with evaluating(model), torch.inference_mode():
            for batch in _batches(source, batch_size):
                found.add(model(prepared(model, batch)), batch)
                done += len(batch)
                if warn:
                    unusual.add(batch, unfit_for([model], batch, members))
                    unusual.add_energies(batch, reference)
                if progress is not None:
                    progress(split, done, total)
        results[split] = found.result(model, _path(source))
    unusual.warn()
    for text in unseen_messages(results) if warn else ():
        warnings.warn(text, stacklevel=2)
    return results


def unseen_messages(results: Mapping[str, SplitResult]) -> list[str]:
    """A warning of elements never trained on, if there are some."""
    unseen = sorted({symbol for result in results.values() for symbol in result.unseen})
    return [UNSEEN.format(which=", ".join(unseen))] if unseen else []


def _batches(source: Any, batch_size: int) -> Iterator[Structures]:
    path, systems = _path(source) or "the data set", source
    if hasattr(source, "__getitems__"):  # a data set decodes batches faster than single systems
        rows, steps = range(len(source)), range(0, len(source), max(1, batch_size))
        systems = (source.__getitems__(rows[i : i + batch_size]) for i in steps)
    for batch in batches(systems, batch_size):
        if batch.energy is None:
            where = f"{path} lacks y_relaxed (first at sid {batch.sid[0]})"
            raise ValueError(
                f"this split has no targets: {where}; use predict, or a validation split"
            )
        yield batch


def _path(source: Any) -> str:
    while not hasattr(source, "path") and hasattr(source, "dataset"):
        source = source.dataset  # of a loader, or a subset
    return str(getattr(source, "path", ""))


class _Split:
    """What the batches of one split gave so far."""

    def __init__(self) -> None:
        self._parts: list[SplitResult] = []  # a batch each
        self._sums: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._elements: set[int] = set()

    def add(self, output: Any, batch: Structures) -> None:
        part = SplitResult(
            sid=tuple(batch.sid),
            prediction=energies_of(output, batch),
            target=energies_of(batch.energy, batch),
            columns=_columns(batch),
        )
        errors_of(part.prediction, part.target, part.sid)  # names what is not finite
        self._parts.append(part)
        self._elements.update(batch.atomic_numbers.tolist())
        if not isinstance(output, Mapping):
            return
        batch, known = batch.to("cpu"), {"energy": torch.from_numpy(part.prediction)}
        for name, target in TARGETS.items():
            if name in output and getattr(batch, target) is not None:
                known[name] = found = output[name].cpu().double()
                rows = torch.arange(len(batch)) if name == "energy_initial" else batch.system
                for b in rows[~found.reshape(len(rows), -1).isfinite().all(1)][:1].tolist():
                    raise ValueError(f"{name} of sid {batch.sid[b]} is not finite")
        for name, each in error_sums(known, batch).items():
            self._sums[name].append(each)

    def result(self, model: Any, path: str) -> SplitResult:
        if not self._parts:
            raise ValueError(f"no systems to evaluate in {path or 'this split'}")
        further: dict[str, float] = {}
        for name, each in self._sums.items():
            total, count = (sum(x) for x in zip(*each, strict=True))
            if count and name not in ("mae", "ewt"):
                further[name] = total / count
            if name in _COUNTS:
                further[_COUNTS[name]] = count
        found = SplitResult.cat(self._parts)
        known = {name: x for name, x in found.columns.items() if set(x) != {None}}
        return replace(
            found,
            path=path,
            unseen=tuple(check_elements(model, self._elements)),
            columns=known,
            further=further,
        )


def _columns(structures: Structures) -> dict[str, tuple[Any, ...]]:
    numbers, tags = structures.atomic_numbers.tolist(), structures.tags.tolist()
    systems = [range(*ends) for ends in pairwise(structures.ptr.tolist())]
    adsorbates = ([numbers[i] for i in rows if tags[i] == 2] for rows in systems)
    elements = ({chemical_symbols[numbers[i]] for i in rows} for rows in systems)
    return {
        "natoms": tuple(map(len, systems)),
        "adsorbate": tuple(adsorbate_formula(atoms) or None for atoms in adsorbates),
        "elements": tuple(" ".join(sorted(symbols)) for symbols in elements),
        "facet": tuple(structures.info.get("facet", (None,) * len(systems))),
    }
