"""Which rule made the tags of the data that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from flt_mol.data.catalog import Recipe
    from flt_mol.data.slabs.surface import Surface

__all__ = ["DEFAULT", "TagRule", "common_rule", "surface_rule", "tag_rules"]

DEFAULT = "oc20"
"""Where nothing tells: what most models of slabs are trained on."""
_KEY = "tag_rule"


@dataclass(frozen=True)
class TagRule:
    """The rule of a data set's tags.

    Args:
        surface: as of :func:`flt_mol.data.tag_slab`.
        data: name of the data set.
    """

    surface: Surface
    data: str


def surface_rule(checkpoint: Any) -> Surface | None:
    """The `surface` of :func:`flt_mol.data.tag_slab` that fits a model.

    It is what ``tag_rule`` in the `dataset.yaml` of the model's training data says.

    Args:
        checkpoint: file of a checkpoint, folder of a run, or name of a shipped model; a list or
            tuple of them for an ensemble.

    Returns:
        The rule; None where that is not known: of modules, of training data without such a key or
        that cannot be found here.

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


def _rule(checkpoint: Any) -> TagRule | None:
    from flt_mol.training.checkpoints import find_checkpoint, read_checkpoint

    config = read_checkpoint(find_checkpoint(checkpoint)).get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    if not isinstance(data, Mapping) or not data.get("name"):
        return None
    if data.get("train", "train") in (data.get("paths") or {}):  # files of one's own
        return None
    found = _recipe(data["name"])
    surface = None if found is None else found.metadata.get(_KEY)
    if found is None or surface is None:
        return None
    number = isinstance(surface, int) and not isinstance(surface, bool) and surface > 0
    if not number and surface not in ("oc20", "half"):
        raise ValueError(
            f"{found.folder / 'dataset.yaml'}: {_KEY} is {surface!r}, expected oc20, half or a "
            "number of layers"
        )
    return TagRule(surface, found.name)


def _recipe(name: str) -> Recipe | None:
    from flt_mol.data.catalog import recipe

    try:
        return recipe(name)
    except (OSError, ValueError):  # trained elsewhere, on data that is not here
        return None
