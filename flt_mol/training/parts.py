"""Parts of a model that may be null, set whole by an override: Hydra merges into what is there.

``model.pairs={cutoff: 4.0}`` gives a model without pairs all of their settings, of which the
others are the defaults, and changes the cutoff of a model that has some.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from flt_mol.models.config import PARTS

_WHOLE = re.compile(rf"\+*model\.({'|'.join(PARTS)})=\s*\{{")
_NAMED = re.compile(rf"\+*model\.({'|'.join(PARTS)})(?=[.=])")


def split_parts(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides for Hydra, and apart from them all those of a part that one sets whole.

    Example:
        >>> split_parts(["model.pairs={cutoff: 4.0}", "model.pairs.vectors=8", "model.seed=1"])
        (['model.seed=1'], ['model.pairs={cutoff: 4.0}', 'model.pairs.vectors=8'])
    """
    whole = {match.group(1) for match in map(_WHOLE.match, overrides) if match}
    rest: list[str] = []
    parts: list[str] = []
    for override in overrides:
        match = _NAMED.match(override)
        (parts if match and match.group(1) in whole else rest).append(override)
    return rest, parts


def set_parts(composed: DictConfig, overrides: Iterable[str]) -> None:
    """Apply what :func:`split_parts` kept apart, in order.

    Raises:
        HydraException, OmegaConfBaseException: as of any other override.
    """
    parser = OverridesParser.create()
    for text in overrides:
        override = parser.parse_override(text)
        key, value = override.key_or_group, _plain(override.value())
        name = key.split(".")[1]
        if OmegaConf.select(composed, f"model.{name}") is None and value is not None:
            composed.model[name] = PARTS[name]()
        OmegaConf.update(composed, key, value, merge=True)


def null_part(overrides: Iterable[str]) -> str:
    """What to say of overrides that change one setting of a part which is null.

    Example:
        >>> null_part(["training.epochs=2", "model.pairs.cutoff=4.0"])
        "'model.pairs.cutoff=4.0' changes a part that this model does not have: model.pairs is null;
        give it with model.pairs={cutoff: 4.0}"
    """
    for override in overrides:
        match = _NAMED.match(override)
        if match and "." in override[match.end() :]:
            part = match.group(1)
            key, _, value = override[match.end() + 1 :].partition("=")
            return (
                f"'{override}' changes a part that this model does not have: model.{part} is null; "
                f"give it with model.{part}={{{key}: {value}}}"
            )
    return "an override changes a setting of what is null"


def _plain(value: Any) -> Any:
    """Without Hydra's quoted strings."""
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return getattr(value, "text", value)
