"""Which rule made the tags of the data that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from flt_mol.data.tags import parse_rule

if TYPE_CHECKING:
    from flt_mol.data.recipes import Recipe
    from flt_mol.data.tags import Surface

__all__ = ["DEFAULT", "TagRule", "common_rule", "inherited", "surface_rule", "tag_rules"]

DEFAULT = "oc20"
"""Where nothing tells: what most models of slabs are trained on."""
_KEY = "tag_rule"
_INHERITED = "inherited_tag_rule"
_TUNED = "was tuned from"


@dataclass(frozen=True)
class TagRule:
    """The rule of a data set's tags.

    Args:
        surface: as of :func:`flt_mol.data.tag_slab`.
        data: what has tags by it: a data set, or a checkpoint.
        bond: what the model has to do with that.
    """

    surface: Surface
    data: str
    bond: str = "was trained on"


def surface_rule(checkpoint: Any) -> Surface | None:
    """The `surface` of :func:`flt_mol.data.tag_slab` that fits a model.

    It is what the run says as ``data.tag_rule``; else ``tag_rule`` in the `dataset.yaml` of its
    training data; else, of a model that was fine-tuned, the rule of what it was tuned from.

    Args:
        checkpoint: file of a checkpoint, folder of a run, or name of a shipped model; a list or
            tuple of them for an ensemble.

    Returns:
        The rule; None where that is not known: of modules, of training data without such a key or
        that cannot be found here, and of files of one's own without ``data.tag_rule``.

    Raises:
        ValueError: no such checkpoint; members of an ensemble that want different rules.

    Example:
        >>> surface_rule("emt_small")
        'half'
    """
    given = checkpoint if isinstance(checkpoint, list | tuple) else [checkpoint]
    rule = common_rule(tag_rules(given))
    return None if rule is None else rule.surface


def tag_rules(checkpoints: Sequence[Any]) -> dict[str, TagRule]:
    """The rule of each checkpoint of which it is known, by its name.

    Raises:
        ValueError: no such checkpoint, or a rule that is none.
    """
    found = {str(one): _rule(one) for one in checkpoints if not isinstance(one, nn.Module)}
    return {name: rule for name, rule in found.items() if rule is not None}


def common_rule(rules: Mapping[str, TagRule]) -> TagRule | None:
    """The one rule of all; None where none is known.

    Raises:
        ValueError: different ones.
    """
    if len({rule.surface for rule in rules.values()}) > 1:
        told = ", ".join(f"{rule.surface} ({name})" for name, rule in rules.items())
        raise ValueError(
            f"the members were trained on tags by different rules: {told}; say which to tag by "
            "with surface=… (--surface)"
        )
    return next(iter(rules.values()), None)


def inherited(checkpoint: str | None) -> dict[str, Any]:
    """What a run's checkpoints note of the rule of the one that it is tuned from.

    Returns:
        ``{"inherited_tag_rule": {"surface": …, "from": …}}``; empty where nothing is known.
    """
    if checkpoint is None:
        return {}
    try:
        rule = _rule(checkpoint)
    except ValueError:  # a rule that is none, in somebody's dataset.yaml
        return {}
    return {} if rule is None else {_INHERITED: {"surface": rule.surface, "from": checkpoint}}


def _rule(checkpoint: Any) -> TagRule | None:
    from flt_mol.models.checkpoint import find_checkpoint, read_checkpoint

    path = find_checkpoint(checkpoint)
    config = read_checkpoint(path).get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(data, Mapping):
        return None
    if data.get(_KEY) is not None:
        surface = parse_rule(data[_KEY], f"{path}: data.{_KEY}")
        return TagRule(surface, f"files of data.{_KEY}={surface}")
    return _of_data(data) or _of_start(config, path)


def _of_data(data: Mapping[str, Any]) -> TagRule | None:
    """The rule of a data set that has a name, and not of files of one's own."""
    if not data.get("name") or data.get("train", "train") in (data.get("paths") or {}):
        return None
    found = _recipe(data["name"])
    surface = None if found is None else found.metadata.get(_KEY)
    if found is None or surface is None:
        return None
    return TagRule(parse_rule(surface, f"{found.folder / 'dataset.yaml'}: {_KEY}"), found.name)


def _of_start(config: Mapping[str, Any], path: Path) -> TagRule | None:
    """The rule of what a run was tuned from, as it is noted; of older runs, of that checkpoint."""
    noted, finetune = config.get(_INHERITED), config.get("finetune")
    if isinstance(noted, Mapping):
        surface = parse_rule(noted.get("surface"), f"{path}: {_INHERITED}")
        return TagRule(surface, str(noted.get("from")), _TUNED)
    start = finetune.get("checkpoint") if isinstance(finetune, Mapping) else None
    if not isinstance(start, str) or (Path(start).exists() and not Path(start).is_absolute()):
        return None  # of an export, which keeps the name alone
    try:
        rule = _rule(start)
    except (OSError, ValueError, RecursionError):  # it is gone, or tuned from itself
        return None
    return None if rule is None else TagRule(rule.surface, start, _TUNED)


def _recipe(name: str) -> Recipe | None:
    from flt_mol.data.recipes import recipe

    try:
        return recipe(name)
    except (OSError, ValueError):  # trained elsewhere, on data that is not here
        return None
