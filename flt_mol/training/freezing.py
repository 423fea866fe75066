"""Parameters that training leaves as they are, chosen by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["freeze", "trainable"]


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Take the parameters whose names match any pattern out of training; their names.

    They need no gradient, get no state of an optimiser and no weight decay. Buffers, as random
    features and normalisers, are not trained anyway.

    Args:
        model: changed in place.
        patterns: as of :func:`fnmatch.fnmatchcase`: ``*``, ``?`` and ``[…]``, where ``*`` goes
            across dots. A name of a part stands for all that is in it.

    Raises:
        ValueError: a pattern that matches no name, with the nearest ones; or nothing left to train.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> freeze(model, ["0"])
        ('0.weight', '0.bias')
        >>> freeze(model, ["1.wieght"])
        Traceback (most recent call last):
        ValueError: finetune.freeze: '1.wieght' matches no parameter; near: 1.weight, 0.weight
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if _matches(name, pattern)]
        if not found:
            raise ValueError(
                f"finetune.freeze: '{pattern}' matches no parameter; {_near(pattern, names)}"
            )
        frozen.update(found)
    if patterns and len(frozen) == len(names):
        raise ValueError("finetune.freeze matches every parameter: nothing is left to train")
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return tuple(name for name in names if name in frozen)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimiser should have: those that are not frozen.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = freeze(model, ["bias"])
        >>> [tuple(p.shape) for p in trainable(model)]
        [(1, 2)]
    """
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern.rstrip('.')}.*")


def _near(pattern: str, names: Sequence[str]) -> str:
    parts = {name.rpartition(".")[0] for name in names} | {name.split(".")[0] for name in names}
    candidates = [*names, *sorted(parts - {""})]
    near = difflib.get_close_matches(pattern.rstrip(".*"), candidates, n=3, cutoff=0.5)
    if near:
        return f"near: {', '.join(near)}"
    return f"names begin with {', '.join(sorted({name.split('.')[0] for name in names}))}"
