"""Where a fine-tuning run starts: a checkpoint's weights, new elements, the zero of energies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.data.loader import TargetStatistics, trained_on
from flt_mol.models.checkpoint import checkpoint_config, misfits, read_checkpoint, read_weights
from flt_mol.models.config import EnergyConfig
from flt_mol.models.energy import CONFIG_KEY, EnergyModel
from flt_mol.nn.embedding import AtomEmbedding
from flt_mol.nn.radial import PairTypes
from flt_mol.prediction.energies import check_elements
from flt_mol.training.config import FinetuneConfig
from flt_mol.training.freezing import freeze
from flt_mol.training.shifting import refit

__all__ = ["Start", "start_from"]


@dataclass(frozen=True)
class Start:
    """What a run started from.

    Attributes:
        path: the checkpoint's file.
        added: names of weights that the checkpoint lacks, at their initial values.
        unused: names of weights that only the checkpoint has.
        new_elements: symbols of elements that it was never trained on.
        shift: eV that each energy was shifted by.
        frozen: names of the parameters that stay as they are.
    """

    path: Path
    added: tuple[str, ...]
    unused: tuple[str, ...]
    new_elements: tuple[str, ...]
    shift: dict[str, float]
    frozen: tuple[str, ...]

    def __str__(self) -> str:
        """One line for people."""
        parts = [f"fine-tuning {self.path}"]
        parts += [f"{name} shifted by {by:+.4f} eV" for name, by in self.shift.items()]
        if self.new_elements:
            parts.append(f"new elements: {', '.join(self.new_elements)}")
        if self.frozen:
            parts.append(f"{len(self.frozen)} parameters frozen")
        if self.added:
            parts.append(f"not in the checkpoint: {_some(self.added)}")
        if self.unused:
            parts.append(f"only in the checkpoint: {_some(self.unused)}")
        return "; ".join(parts)


def start_from(
    model: EnergyModel,
    config: FinetuneConfig,
    training: Any,
    statistics: TargetStatistics,
) -> Start:
    """Give `model` what a run that fine-tunes begins with.

    Weights and buffers are taken by name; what the checkpoint lacks keeps its initial values.
    Elements never trained on begin, in every table of elements, as the mean of those that were: a
    model knows what to do with an average atom, and nothing of a random one. Elements seen are
    those of both trainings.

    Args:
        model: as built from the run's settings; changed in place.
        config: with a checkpoint.
        training: the training systems: a data set, or a list.
        statistics: of their targets.

    Raises:
        ValueError: no whole checkpoint, weights of other shapes (listed with the settings that
            differ), or patterns that match no name.

    Warns:
        UserWarning: targets that are far from all that the checkpoint was trained on, or new
            elements in frozen tables.
    """
    assert config.checkpoint is not None
    path, weights = read_weights(config.checkpoint)
    weights.pop(CONFIG_KEY, None)
    added, unused = _load(model, path, weights)
    new = check_elements(model, statistics.elements)
    _start_elements(model, statistics.elements)
    shift = refit(model, config.normalizer, training, statistics, added)
    frozen = freeze(model, config.freeze)
    model.mark_seen(statistics.elements)
    model.trained_on = trained_on(statistics, read_checkpoint(path).get("trained_on"))
    if new and not model.embedding.element.weight.requires_grad:
        warnings.warn(
            f"finetune.freeze keeps embedding.element.weight, so {', '.join(new)}, never trained "
            "on, stay at the mean of the other elements",
            stacklevel=2,
        )
    return Start(path, added, unused, tuple(new), shift, frozen)


def _load(
    model: EnergyModel, path: Path, weights: dict[str, Tensor]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    own = {name: value for name, value in model.state_dict().items() if name != CONFIG_KEY}
    shared = {name: value for name, value in weights.items() if name in own}
    wrong = misfits({name: own[name] for name in shared}, shared)
    if wrong or not shared:
        raise ValueError(
            f"{path} does not fit the model of this run:\n  "
            + "\n  ".join(wrong or ["no weight of that name"])
            + _settings_apart(path, model.config)
        )
    model.load_state_dict(shared, strict=False)
    added, unused = (name for name in own if name not in shared), set(weights) - set(own)
    return tuple(added), tuple(sorted(unused))


def _settings_apart(path: Path, ours: EnergyConfig) -> str:
    theirs, own = _flat(checkpoint_config(path).model_dump()), _flat(ours.model_dump())
    apart = [
        f"\n  {key} is {own.get(key)} here and {theirs.get(key)} in the checkpoint"
        for key in sorted(own.keys() | theirs.keys())
        if own.get(key) != theirs.get(key) and key != "model.seed"
    ]
    return "".join(["\nthese settings differ:", *apart]) if apart else ""


def _flat(values: Mapping[str, Any], prefix: str = "model.") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _start_elements(model: EnergyModel, elements: Sequence[int]) -> None:
    seen = model.elements_seen.clone()
    new = torch.zeros_like(seen)
    new[list(elements)] = True
    new &= ~seen
    if not bool(new.any()) or not bool(seen.any()):
        return
    with torch.no_grad():
        for table in _element_tables(model):
            table[new] = table[seen].mean(0)


def _element_tables(model: nn.Module) -> list[Tensor]:
    """Parameters with a row for each element."""
    tables: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, AtomEmbedding):
            tables.append(module.element.weight)
        elif isinstance(module, PairTypes):
            tables += module.parameters()
    return tables


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
