"""The models that predict together, and the rule by which their training data were tagged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flt_mol.data.recipes import recipe
from flt_mol.data.tags import Surface, parse_rule
from flt_mol.models.checkpoint import load_model, read_checkpoint
from flt_mol.structures import Structures


@dataclass(frozen=True, eq=False)
class Members:
    """K models that predict together, their names, what they were loaded from."""

    models: tuple[nn.Module, ...]
    labels: tuple[str, ...]
    ensemble: bool
    given: tuple[Any, ...]

    @cached_property
    def rules(self) -> set[Surface]:
        """The rules by which the training data were tagged, as far as they are known."""
        return set(tag_rules(self.given).values())

    def check(self, structures: Structures) -> None:
        """Raise ValueError for the first system that a member refuses, without calling it."""
        for model in self.models:
            if callable(check := getattr(model, "check", None)):
                check(structures)

    def lacking(self, output: str) -> list[str]:
        """Names of the members that do not give an output, or do not say so."""
        configs = [getattr(model, "config", None) for model in self.models]
        given = [output in getattr(config, "outputs", ()) for config in configs]
        return [name for name, gives in zip(self.labels, given, strict=True) if not gives]


def load_members(checkpoint: Any, device: str | torch.device | None = None) -> Members:
    """The model of a checkpoint, or those of several.

    Args:
        checkpoint: file of a checkpoint, folder of a run, name of a shipped model, or a module; a
            list or tuple of at least two of them is an ensemble.
        device: where models of checkpoints go (cpu if not given); modules stay where they are.

    Raises:
        ValueError: no such checkpoint; an ensemble of fewer than two, or of models that were
            trained on different energies; a device for a module.
    """
    if isinstance(checkpoint, Members):
        return checkpoint
    ensemble = isinstance(checkpoint, list | tuple)
    given = tuple(checkpoint) if ensemble else (checkpoint,)
    if ensemble and len(given) < 2:
        raise ValueError(f"an ensemble has at least two members, got {len(given)}")
    if ensemble:
        _refuse_different_targets(given)
    models = tuple(_load(one, device) for one in given)
    labels = tuple(
        f"member {place}" if isinstance(one, nn.Module) else str(one)
        for place, one in enumerate(given)
    )
    return Members(models, labels, ensemble, given)


def _load(one: Any, device: str | torch.device | None) -> nn.Module:
    if isinstance(one, str | Path):
        return load_model(one, map_location=device or "cpu")
    if not isinstance(one, nn.Module):
        raise ValueError(f"checkpoint is a {type(one).__name__}, expected a path, name or module")
    if device is not None:
        raise ValueError("device is for checkpoints; move a module yourself: model.to(device)")
    return one


def _refuse_different_targets(given: Sequence[Any]) -> None:
    """A mean of energies before and after relaxation, say, is the energy of nothing."""
    targets: dict[str, str] = {}
    for one in given:
        if isinstance(one, str | Path) and (data := read_checkpoint(one)["config"].get("data")):
            targets.setdefault(str(data.get("energy") or "y_relaxed"), str(one))
    if len(targets) > 1:
        found = ", ".join(f"{target} ({label})" for target, label in targets.items())
        raise ValueError(f"the members were trained on different energies: {found}")


def surface_rule(checkpoint: Any) -> Surface | None:
    """The `surface` of `flt_mol.data.tag_slab` that fits a model, None if it is not known.

    It is ``data.tag_rule`` of the run; else ``tag_rule`` in the `dataset.yaml` of its data.

    Args:
        checkpoint: as of `load_members`; of modules nothing is known.

    Raises:
        ValueError: no such checkpoint; members of an ensemble with different rules.

    Examples:
        >>> surface_rule("emt-small")
        'half'
    """
    rules = tag_rules(checkpoint if isinstance(checkpoint, list | tuple) else [checkpoint])
    if len(set(rules.values())) > 1:
        found = ", ".join(f"{rule} ({name})" for name, rule in rules.items())
        raise ValueError(f"members with different tag rules: {found}; choose with --surface")
    return next(iter(rules.values()), None)


def tag_rules(checkpoints: Sequence[Any]) -> dict[str, Surface]:
    """{checkpoint: its rule}, of those whose rule is known.

    Raises:
        ValueError: no such checkpoint, or a rule that is not usable.
    """
    given = [x for x in checkpoints if isinstance(x, str | Path)]
    rules = {str(x): rule_of_run(read_checkpoint(x)["config"], str(x)) for x in given}
    return {name: rule for name, rule in rules.items() if rule is not None}


def rule_of_run(config: Mapping[str, Any], checkpoint: str) -> Surface | None:
    """The rule that the settings of a run state, or its data set's `dataset.yaml`."""
    data = config.get("data") or {}
    rule, own = data.get("tag_rule"), data.get("train", "train") in (data.get("paths") or {})
    if rule is None and data.get("name") and not own:
        with suppress(ValueError, OSError):  # trained elsewhere, on data that is not here
            rule = recipe(data["name"]).metadata.get("tag_rule")
    if rule is None:  # older fine-tuned models
        rule = (config.get("inherited_tag_rule") or {}).get("surface")
    return None if rule is None else parse_rule(rule, f"the tag rule of {checkpoint}")
