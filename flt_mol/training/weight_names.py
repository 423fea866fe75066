"""Which tensors of a state dict are the model's, and what the model calls them.

Wrappers put their names before or between those of a model: data-parallel training, the compiler,
averages of weights, modules that hold the model as one of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from flt_mol.models.energy import CONFIG_KEY

__all__ = ["model_weights", "strip_prefixes"]

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PREFIXES = ("model.", "ema.")
_AVERAGES = {"ema", "swa", "avg", "average", "averaged"}
_COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


def model_weights(weights: Mapping[str, Tensor], averaged: bool = True) -> dict[str, Tensor]:
    """The weights of one model under its own names; what else a wrapper keeps is left out.

    A model is found by the configuration that its weights carry.

    Args:
        weights: of a model, or of a module that holds one, or one and its average.
        averaged: whether the average is taken where there are both.

    Raises:
        ValueError: several models, and nothing says which is meant; they are named.

    Example:
        >>> import torch
        >>> one = torch.zeros(1)
        >>> found = model_weights({
        ...     "net.config_json": one, "net.bias": one, "loss.scale": one, "ema.n_averaged": one,
        ...     "ema.module.config_json": one, "ema.module.bias": one + 1})
        >>> found["bias"].item(), list(found)
        (1.0, ['config_json', 'bias'])
    """
    ends = re.compile(rf"(?:.*\.)?(?={CONFIG_KEY}$)")
    roots = [match.group() for match in map(ends.match, weights) if match]
    if not roots:
        return strip_prefixes(weights)
    root = _choose(roots, weights, averaged)
    # A model at the top does not own what belongs to one below it.
    deeper = tuple(r for r in roots if r != root and r.startswith(root))
    inside = [key for key in weights if key.startswith(root) and not key.startswith(deeper)]
    return _unwrapped({key.removeprefix(root): weights[key] for key in inside})


def strip_prefixes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop wrappers' names in any nesting, prefixes that every key carries, and counters.

    Example:
        >>> import torch
        >>> list(strip_prefixes({"model.module._orig_mod.head.bias": torch.zeros(1)}))
        ['head.bias']
    """
    out = _unwrapped(weights)
    while out:
        shared = [prefix for prefix in _PREFIXES if all(key.startswith(prefix) for key in out)]
        if not shared:
            break
        out = {key.removeprefix(shared[0]): value for key, value in out.items()}
    return out


def _choose(roots: list[str], weights: Mapping[str, Tensor], averaged: bool) -> str:
    if len(roots) == 1:
        return roots[0]
    meant = [root for root in roots if _is_average(root, weights) == averaged]
    if len(meant) != 1:
        names = ", ".join(f"'{root}'" for root in roots)
        raise ValueError(
            f"its state_dict holds {len(roots)} models, under the prefixes {names}: save the one "
            "that is meant by itself"
        )
    return meant[0]


def _is_average(root: str, weights: Mapping[str, Tensor]) -> bool:
    counter = root.removesuffix("module.") + _COUNTER
    return counter in weights or not _AVERAGES.isdisjoint(re.split(r"[._]", root.lower()))


def _unwrapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for key, value in weights.items():
        parts = [part for part in key.split(".") if part not in _WRAPPERS]
        if parts and parts[-1] != _COUNTER:
            name = ".".join(parts)
            # Two of one name would hide each other: the odd one is left for the list of misfits.
            out[key if name in out else name] = value
    return out
