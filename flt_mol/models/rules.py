"""Rules for single settings: what a value has to be, and how that is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

__all__ = [
    "BELOW_ONE",
    "POSITIVE",
    "SEED",
    "SIZE",
    "UNSIGNED",
    "Rule",
    "at_least",
    "check_below_one",
    "check_choice",
    "check_length",
    "check_settings",
    "check_whole",
    "is_kind",
    "kind_name",
    "one_of",
]

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value of the right type will do, and what is expected."""


def at_least(low: float) -> Rule:
    """Numbers from `low` on.

    Example:
        >>> at_least(1)[1]
        'at least 1'
    """
    return (lambda value: value >= low), f"at least {low:g}"


def one_of(names: tuple[str, ...]) -> Rule:
    """One of these words.

    Example:
        >>> one_of(("adamw", "adam"))[1]
        'one of adamw, adam'
    """
    return (lambda value: value in names), f"one of {', '.join(names)}"


SIZE = at_least(1)
UNSIGNED = at_least(0)
POSITIVE: Rule = (lambda value: value > 0), "above 0"
BELOW_ONE: Rule = (lambda value: 0 <= value < 1), "from 0 to below 1"
SEED: Rule = (lambda value: -(2**63) <= value < 2**63), "a whole number of 64 bits"


def check_settings(config: Any, rules: Mapping[str, Rule], prefix: str) -> None:
    """Refuse a dataclass with a value of another type than its annotation, or against its rule.

    Args:
        config: the dataclass; lists and parts of it are looked at by rules only.
        rules: of some of its fields, by name.
        prefix: of the keys, as "training.".

    Raises:
        ValueError: naming the key, its value, and what is expected.
    """
    for key, kind in get_type_hints(type(config)).items():
        value = getattr(config, key)
        kinds = (kind,) if get_origin(kind) in (list, dict) else get_args(kind) or (kind,)
        if kinds[0] in (int, float, str, bool) and not any(is_kind(value, k) for k in kinds):
            raise ValueError(f"{prefix}{key} is {value!r}, expected {kind_name(kinds)}")
        fits, expected = rules.get(key, (None, ""))
        infinite = isinstance(value, float) and not math.isfinite(value)
        if infinite or (fits is not None and not fits(value)):
            wanted = expected or "a finite number"
            raise ValueError(f"{prefix}{key} is {value!r}, expected {wanted}")


def is_kind(value: Any, kind: type) -> bool:
    """Whether a value is of a kind: an int is a float; a bool is only a bool.

    Example:
        >>> is_kind(1, float), is_kind(True, int), is_kind(None, type(None))
        (True, False, True)
    """
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def kind_name(kinds: tuple[type, ...]) -> str:
    """Kinds in words.

    Example:
        >>> kind_name((int, type(None)))
        'a whole number or null'
    """
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return " or ".join(words.get(kind, "null") for kind in kinds)


def check_choice(key: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse what is not among the known words, with ValueError."""
    if value not in known:
        raise ValueError(f"{key} is {value!r}; known: {', '.join(known)}")


def check_whole(key: str, value: Any, low: int) -> None:
    """Refuse what is no whole number from `low` on, with ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{key} is {value!r}, expected a whole number of at least {low}")


def check_below_one(key: str, value: Any) -> None:
    """Refuse what is no probability below 1, with ValueError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{key} is {value!r}, expected at least 0 and below 1")


def check_length(key: str, value: Any, high: float = math.inf) -> None:
    """Refuse what is no positive number, or above `high` Å, with ValueError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}, expected a number above 0")
    if value > high:
        raise ValueError(f"{key} is {value!r}, expected at most {high:g} Å")
