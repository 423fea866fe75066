"""How large further values are, so that one of them does not hold up a conversion."""

from __future__ import annotations

from typing import Any

from flt_mol.structures import Structures

__all__ = ["refuse_large"]

_LARGEST = 1 << 24  # bytes; JSON, base64 and what is compared take many times as much
_ITEM = 8  # bytes, at least, of a number or of an item in a list


def refuse_large(structures: Structures, where: str) -> None:
    """Refuses a system with a further value that no file should be made to hold.

    Raises:
        ValueError: naming the record and the field.
    """
    for name, (value,) in structures.info.items():
        if _exceeds(value, _LARGEST):
            raise ValueError(
                f"{where}, sid {structures.sid[0]}: {name} is a {type(value).__name__} of more "
                f"than {_LARGEST:,} bytes, which is not kept; remove it from the record, or leave "
                "such records out (on_error='skip', --skip-bad)"
            )


def _exceeds(value: Any, limit: int) -> bool:
    """Whether a value takes more than `limit` bytes, without looking at more of it than that."""
    pending, size = [value], 0
    while pending and size <= limit:
        value = pending.pop()
        size += _ITEM
        if isinstance(value, str | bytes | bytearray):
            size += len(value)
        elif isinstance(value, int):
            size += value.bit_length() // 8
        elif isinstance(value, list | tuple | set | frozenset | dict):
            size += _ITEM * len(value)
            if size > limit:
                return True
            pending += value
            if isinstance(value, dict):
                pending += value.values()
        else:
            size += getattr(value, "nbytes", 0)
    return size > limit
