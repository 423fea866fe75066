"""Which models predict: one, or the members of an ensemble."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flt_mol.structures import Structures

if TYPE_CHECKING:
    from flt_mol.data.slabs.surface import Surface
    from flt_mol.models.energy import EnergyModel

__all__ = ["EnsembleEnergies", "Members", "load_members", "load_model"]

_SAME = {"energy_relaxed": "y_relaxed", "energy_init": "y_init"}


@dataclass(frozen=True, eq=False)
class EnsembleEnergies:
    """What the K members of an ensemble say of B structures.

    Args:
        members: (K, B) float64, eV, in the order in which the members were given.

    Example:
        >>> EnsembleEnergies(np.array([[-1.0, 2.0], [-3.0, 2.0]])).mean
        array([-2.,  2.])
    """

    members: NDArray[np.float64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """(B,) float64, eV."""
        return np.asarray(self.members.mean(axis=0))

    @property
    def spread(self) -> NDArray[np.float64]:
        """(B,) float64, eV: the standard deviation of the members, with K − 1 (ddof = 1).

        It is how far they disagree, no error bar: what all of them get wrong does not show.
        """
        return np.asarray(self.members.std(axis=0, ddof=1))

    def __len__(self) -> int:
        """Number of structures B."""
        return int(self.members.shape[1])

    def __repr__(self) -> str:
        return f"EnsembleEnergies({len(self.members)} members, {len(self)} structures)"


@dataclass(frozen=True, eq=False)
class Members:
    """The models that predict together.

    Args:
        models: K modules.
        labels: how messages name them.
        ensemble: whether they were given as an ensemble.
        sources: what was given for each, a checkpoint or the module.
    """

    models: tuple[nn.Module, ...]
    labels: tuple[str, ...]
    ensemble: bool
    sources: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.labels, self.models, strict=True)

    @cached_property
    def surface(self) -> Surface | None:
        """The `surface` of `flt_mol.data.tag_slab` that fits them all, where that is known."""
        from flt_mol.training.tag_rules import surface_rule

        try:
            return surface_rule(self.sources)
        except ValueError:  # different ones, or a file that is gone by now
            return None

    @property
    def move_atoms(self) -> bool:
        """Whether some of them read energies from atoms that they moved."""
        configs = (getattr(model, "config", None) for model in self.models)
        return any(getattr(config, "feedback", None) == "positions" for config in configs)

    def check(self, structures: Structures) -> None:
        """Refuse systems that a member refuses, without calling it.

        Raises:
            ValueError: the first system that is too large, by its sid.
        """
        from flt_mol.models.energy import EnergyModel
        from flt_mol.models.geometry import check_systems

        for model in self.models:
            if isinstance(model, EnergyModel):
                check_systems(model.config, structures)

    def result(self, energies: NDArray[np.float64]) -> Any:
        """(K, B) as what callers get: (B,) of one model, else :class:`EnsembleEnergies`."""
        return EnsembleEnergies(energies) if self.ensemble else energies[0]


def load_model(name_or_path: str | Path) -> EnergyModel:
    """The trained model of a checkpoint, a run's folder, or a shipped model, in eval mode on CPU.

    Args:
        name_or_path: a file, a folder that `flt-mol train` wrote, or a name in `models/`.

    Raises:
        ValueError: no such checkpoint, or one that is damaged or of another kind.
    """
    from flt_mol.models.checkpoint import load_model as load

    return load(name_or_path)


def load_members(checkpoint: Any, device: str | torch.device | None = None) -> Members:
    """The model of a checkpoint, or those of several; each file is loaded once.

    Args:
        checkpoint: a checkpoint or module, or a list or tuple of them.
        device: where models of checkpoints go, CPU if not given.

    Raises:
        ValueError: an ensemble of fewer than two; of checkpoints that were trained on
            different energies; a device for modules, which are left where they are.

    Warns:
        UserWarning: a member that is there twice, by another path or in another file, too.
    """
    ensemble = isinstance(checkpoint, list | tuple)
    given = list(checkpoint) if ensemble else [checkpoint]
    if ensemble and len(given) < 2:
        raise ValueError(
            f"an ensemble has at least two members, got {len(given)}; give one checkpoint by "
            "itself, not in a list"
        )
    for one in given:
        if not isinstance(one, str | Path | nn.Module):
            raise ValueError(
                f"checkpoint is a {type(one).__name__}, expected a path, the name of a shipped "
                "model, a module, or a list of these"
            )
    labels = tuple(_label(one, place) for place, one in enumerate(given))
    if ensemble:
        _refuse_different_targets(given, labels)
    models = _load_each_once(given, labels, device)
    return Members(models, labels, ensemble, tuple(given))


def _label(one: Any, place: int) -> str:
    return f"member {place}" if isinstance(one, nn.Module) else str(one)


def _load_each_once(
    given: Sequence[Any], labels: Sequence[str], device: str | torch.device | None
) -> tuple[nn.Module, ...]:
    loaded: dict[Any, nn.Module] = {}
    models = []
    twice = []
    for one, label in zip(given, labels, strict=True):
        key = _key(one) if len(given) > 1 else label
        if key in loaded:
            twice.append(label)
        else:
            loaded[key] = _load(one, device)
        models.append(loaded[key])
    for place, model in enumerate(models):
        others = [x for x in models[:place] if x is not model and _same_weights(x, model)]
        if others and labels[place] not in twice and not isinstance(given[place], nn.Module):
            twice.append(labels[place])
    if twice:
        text = (
            f"{', '.join(twice)}: there twice in the ensemble, with the same weights, so that its "
            "spread is too small"
        )
        warnings.warn(text, UserWarning, stacklevel=5)
    return tuple(models)


def _same_weights(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        value.device == theirs[name].device and torch.equal(value, theirs[name])
        for name, value in ours.items()
    )


def _key(one: Any) -> Any:
    if isinstance(one, nn.Module):
        return id(one)
    from flt_mol.models.checkpoint import find_checkpoint

    return find_checkpoint(one).resolve()


def _load(one: Any, device: str | torch.device | None) -> nn.Module:
    if isinstance(one, nn.Module):
        if device is not None:
            raise ValueError("device is for checkpoints; move a module yourself: model.to(device)")
        return one
    if device is None:
        return load_model(one)
    from flt_mol.models.checkpoint import load_model as load

    return load(one, map_location=device)


def _refuse_different_targets(given: Sequence[Any], labels: Sequence[str]) -> None:
    """A mean of energies before and after relaxation, say, is no energy of anything."""
    targets: dict[str, str] = {}
    for one, label in zip(given, labels, strict=True):
        target = None if isinstance(one, nn.Module) else _target(one)
        if target is not None:
            targets.setdefault(target, label)
    if len(targets) > 1:
        told = ", ".join(f"{target} ({label})" for target, label in targets.items())
        raise ValueError(
            f"the members were trained on different energies: {told}; take members of one kind. "
            "Where only the names differ, load them yourself and give the modules"
        )


def _target(checkpoint: Any) -> str | None:
    """The name of the energies that it was trained on, where the file tells."""
    from flt_mol.models.checkpoint import find_checkpoint, read_checkpoint

    config = read_checkpoint(find_checkpoint(checkpoint)).get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    if not isinstance(data, Mapping):
        return None
    name = str(data.get("energy") or "y_relaxed")
    return _SAME.get(name, name)
