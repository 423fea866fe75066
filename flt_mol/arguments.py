"""Numbers that callers give, refused in words where they are none."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["whole_number"]


def whole_number(name: str, value: Any, lowest: int) -> int:
    """The value, where it is a whole number that is not too low.

    Raises:
        ValueError: it is not, naming the argument.

    Example:
        >>> whole_number("max_atoms", 1e4, 1)
        10000
    """
    try:
        whole = int(value)
        good = whole == value and not isinstance(value, bool | np.bool_)
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if whole < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}")
    return whole
