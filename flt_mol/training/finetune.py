"""Where a fine-tuning run starts: a checkpoint's weights, new elements, reference energy."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols
from numpy.typing import NDArray
from torch import Tensor, nn

from flt_mol.data import make_loader
from flt_mol.data.loader import TargetStatistics, element_counts, fit_references
from flt_mol.files import some
from flt_mol.models.checkpoint import checkpoint_config, misfits, read_weights
from flt_mol.models.energy import CONFIG_KEY, EnergyModel, add_buffers
from flt_mol.nn.radial import PairTypes
from flt_mol.prediction.energies import evaluating
from flt_mol.structures import Structures
from flt_mol.training.config import FinetuneConfig
from flt_mol.training.folder import differences

_CHUNK = 64
_AT_MOST = 1000  # systems by which energies are shifted
_FAR = 10.0  # standard deviations of the targets that the checkpoint was trained on


def start_from(
    model: EnergyModel, config: FinetuneConfig, training: Any, statistics: TargetStatistics
) -> str:
    """Give `model` what a fine-tuning run starts from; a line that says what that is.

    Weights and buffers are taken by name; what the checkpoint lacks keeps its initial values.
    Elements never trained on start, in every table of elements, as the mean of those that were.
    Each energy is shifted by the median of what the checkpoint is off by on the training systems
    (``normalizer="refit"``), the shift with the least MAE; its standard deviation stays. With
    reference energies in `statistics` those are fitted to what it is off by, first.

    Raises:
        ValueError: no whole checkpoint, weights of other shapes (listed with the settings that
            differ), or patterns that match no name.

    Warns:
        UserWarning: targets that are far from all that the checkpoint was trained on.
    """
    assert config.checkpoint is not None
    path, weights = read_weights(config.checkpoint)
    weights.pop(CONFIG_KEY, None)
    added, unused = _load(model, path, weights)
    new = _start_elements(model, statistics.elements)
    shifts = _shift(model, config.normalizer == "refit", training, statistics, added)
    frozen = freeze(model, config.freeze)
    model.mark_seen(statistics.elements)
    symbols = ", ".join(chemical_symbols[number] for number in new)
    parts = [f"fine-tuning {path}"]
    parts += [f"{name} shifted by {by:+.4f} eV" for name, by in shifts.items()]
    parts += [f"new elements: {symbols}"] if new else []
    parts += [f"{len(frozen)} parameters frozen"] if frozen else []
    parts += [f"not in the checkpoint: {some(added)}"] if added else []
    heads = ", ".join(dict.fromkeys(name.split(".")[0] for name in unused))
    parts += [f"only in the checkpoint: {heads} ({len(unused)} weights)"] if unused else []
    return "; ".join(parts)


def _load(
    model: EnergyModel, path: Path, weights: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Names that the checkpoint lacks, and those that only it has."""
    add_buffers(model, weights)
    own = {name: value for name, value in model.state_dict().items() if name != CONFIG_KEY}
    shared = {name: value for name, value in weights.items() if name in own}
    wrong = misfits({name: own[name] for name in shared}, shared)
    if wrong or not shared:
        theirs, ours = checkpoint_config(path).model_dump(), model.config.model_dump()
        changed = differences({"model": theirs}, {"model": ours}, ignored={"model.seed"})
        lines = [*(wrong or ["no weight of that name"]), *changed]
        raise ValueError("\n  ".join([f"{path} does not fit the model of this run:", *lines]))
    model.load_state_dict(shared, strict=False)
    return [name for name in own if name not in shared], sorted(set(weights) - set(own))


def _start_elements(model: EnergyModel, elements: Sequence[int]) -> list[int]:
    """The mean row for elements never trained on; their numbers."""
    seen = model.elements_seen
    new = [number for number in elements if not seen[number]]
    tables = [model.embedding.element.weight]
    for part in model.modules():
        tables += part.parameters() if isinstance(part, PairTypes) else ()
    if bool(seen.any()):
        with torch.no_grad():
            for table in tables:
                table[new] = table[seen].mean(0)
    return new


def _shift(
    model: EnergyModel,
    refit: bool,
    training: Any,
    statistics: TargetStatistics,
    added: Sequence[str],
) -> dict[str, float]:
    """Shift the means; shifts in eV, by output. Normalisers that are `added` are fitted instead."""
    known = dict(model.normalizers)
    if "normalizer_initial.mean" in added and statistics.energies_initial is not None:
        fitted = known.pop("energy_initial")
        fitted.fit(statistics.energies_initial)
        if statistics.references:
            fitted.set_reference(statistics.references["energy_initial"])
    shifts: dict[str, float] = {}
    count = len(training) if statistics.references else min(len(training), _AT_MOST)
    chosen = np.unique(np.linspace(0, len(training) - 1, count).astype(int))
    systems: list[Structures] = [training[int(i)] for i in chosen]
    for name, missed in _residuals(model, systems, list(known)).items():
        if statistics.references:
            counts = np.concatenate([element_counts(system) for system in systems])
            reference, missed = fit_references(counts, missed)
            before = known[name].reference
            known[name].set_reference(reference + (0 if before is None else before.numpy()))
        middle, std = float(np.median(missed)), float(known[name].std)
        if refit:
            known[name].mean += middle
            shifts[name] = middle
        rest = float(np.median(np.abs(missed - (middle if refit else 0))))
        if rest > _FAR * std:
            warnings.warn(
                f"{name}: targets differ by {rest:.3f} eV from the checkpoint's predictions"
                f"{f' after a shift of {middle:.3f}' if refit else ''}, and those it was trained "
                f"on have a standard deviation of {std:.3f} eV: is it the same quantity and "
                "reference (finetune.normalizer=refit), in eV?",
                stacklevel=5,
            )
    return shifts


def _residuals(
    model: EnergyModel, systems: Sequence[Structures], outputs: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Target − prediction (S,), eV."""
    missed: dict[str, list[Tensor]] = {name: [] for name in outputs}
    with evaluating(model), torch.inference_mode():
        for batch in make_loader(systems, _CHUNK, prepare=model.prepare_batch):
            found = model(batch)
            for name, values in missed.items():
                values.append(getattr(batch, name).double() - found[name].double())
    return {name: torch.cat(values).numpy() for name, values in missed.items()}


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Take the parameters whose names match any pattern out of training; their names.

    They need no gradient, and have no optimiser state and no weight decay. Patterns are as of
    `fnmatch.fnmatchcase`, where ``*`` crosses dots. A name of a part stands for all in it.

    Raises:
        ValueError: a pattern that matches nothing, or patterns that match everything.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for pattern in patterns:
        whole = f"{pattern.rstrip('.')}.*"
        found = [x for x in names if fnmatchcase(x, pattern) or fnmatchcase(x, whole)]
        if not found:
            near = difflib.get_close_matches(pattern.rstrip(".*"), names, n=3, cutoff=0.5)
            hint = ", ".join(near or dict.fromkeys(name.split(".")[0] for name in names))
            raise ValueError(f"finetune.freeze: '{pattern}' matches no parameter; there are {hint}")
        frozen.update(found)
    if len(frozen) == len(names):
        raise ValueError("finetune.freeze matches every parameter: nothing is left to train")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return tuple(name for name in names if name in frozen)
