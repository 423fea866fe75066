"""File names in the order of the numbers in them."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["natural"]


def natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key with numbers by value.

    Example:
        >>> sorted([Path("data.10.lmdb"), Path("data.2.lmdb")], key=natural)[0].name
        'data.2.lmdb'
    """
    parts = re.split(r"([0-9]+)", path.name)
    return [(0, int(p), "") if place % 2 else (1, 0, p) for place, p in enumerate(parts)]
