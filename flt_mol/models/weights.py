"""Whose weights a state dict holds, by which names, and whether they fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flt_mol.models.energy import CONFIG_KEY

__all__ = ["find_weights", "misfits"]

_STATE_DICTS = ("state_dict", "model_state_dict", "model")
_AVERAGED = ("ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema")
_RAW = ("raw_state_dict", "current_model_state")  # the second is Lightning's
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


def find_weights(content: Mapping[str, Any], averaged: bool = True) -> dict[str, Tensor]:
    """The weights of one EnergyModel under its own names, in what a checkpoint file holds.

    They are found under the keys that tools use, or bare, and by the configuration among them.
    Names of wrappers (data-parallel training, the compiler, averages, modules that hold the model)
    and what else these keep are stripped.

    Args:
        content: of the file.
        averaged: whether averaged weights (EMA) are taken where there are both.

    Raises:
        ValueError: no weights of an EnergyModel, or of several.

    Example:
        >>> import torch
        >>> one = torch.zeros(1)
        >>> found = find_weights({
        ...     "net.config_json": one, "net.bias": one, "loss.scale": one, "ema.n_averaged": one,
        ...     "ema.module.config_json": one, "ema.module.bias": one + 1})
        >>> found["bias"].item(), list(found)
        (1.0, ['config_json', 'bias'])
    """
    state = content.get("training_state")
    raw = _mapping(content, _RAW) or _mapping(state if isinstance(state, Mapping) else {}, _RAW)
    weights = _mapping(content, _STATE_DICTS)
    if not averaged and raw is not None:
        weights = raw
    average = _mapping(content, _AVERAGED)
    if average is None or (weights is not None and not averaged):
        return _of_model(content if weights is None else weights, averaged)
    # An average may leave out what is not averaged, the configuration, too.
    found = {} if weights is None else _of_model(weights, averaged)
    average = _mapping(average, (*_STATE_DICTS, "module")) or average
    return found | _of_model(average, averaged, bare=bool(found))


def _mapping(content: Mapping[str, Any], keys: tuple[str, ...]) -> Mapping[str, Any] | None:
    return next((content[key] for key in keys if isinstance(content.get(key), Mapping)), None)


def _of_model(weights: Mapping[str, Any], averaged: bool, bare: bool = False) -> dict[str, Tensor]:
    for key, value in weights.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ValueError(f"holds {key!r}, a {type(value).__name__}, expected weights by name")
    ends = [key for key in weights if f".{key}".endswith(f".{CONFIG_KEY}")]
    roots = every = [key.removesuffix(CONFIG_KEY) for key in ends] or [""] * bare
    if len(every) > 1:
        roots = [root for root in every if _is_average(root, weights) == averaged]
    if not every:
        raise ValueError(f"no weights that carry a model configuration ('{CONFIG_KEY}')")
    if len(roots) != 1:
        names = ", ".join(f"'{root}'" for root in every)
        raise ValueError(f"weights of {len(every)} models, with the prefixes {names}; save one")
    root = roots[0]
    # A model at the top does not own what belongs to one below it.
    deeper = tuple(other for other in every if other != root and other.startswith(root))
    out: dict[str, Tensor] = {}
    for key, value in weights.items():
        if key.startswith(root) and not key.startswith(deeper) and not key.endswith(_COUNTER):
            parts = [part for part in key.removeprefix(root).split(".") if part not in _WRAPPERS]
            out[".".join(parts)] = value
    return out


def _is_average(root: str, weights: Mapping[str, Any]) -> bool:
    words = {"ema", "swa", "avg", "average", "averaged"}
    counter = root.removesuffix("module.") + _COUNTER
    return counter in weights or not words.isdisjoint(re.split(r"[._]", root.lower()))


def misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """What keeps weights `found` from being those `expected`, a line for each name.

    Example:
        >>> import torch
        >>> misfits({"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(3)})
        ['missing: b', 'wrong shape: a is (3,), expected (2,)']
    """
    lines = [f"missing: {key}" for key in expected if key not in found]
    lines += [f"not known: {key}" for key in found if key not in expected]
    for key, want in expected.items():
        if key not in found or key == CONFIG_KEY:
            continue
        have = found[key]
        if have.shape != want.shape:
            shapes = f"{tuple(have.shape)}, expected {tuple(want.shape)}"
            lines.append(f"wrong shape: {key} is {shapes}")
        elif have.is_floating_point() != want.is_floating_point() or have.is_complex():
            lines.append(f"wrong type: {key} is {have.dtype}, expected {want.dtype}")
    return lines
