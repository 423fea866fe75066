"""Which atoms of a clean slab are its surface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.slabs.coordination import OPEN, coordination

if TYPE_CHECKING:
    from flt_mol.data.slabs.frame import Frame

__all__ = ["LAYER_GAP", "Surface", "layers", "parse_rule", "surface_atoms"]

Surface = int | str
_DEPTH = 2.0  # Å
_INSIDE = 3.5  # Å from either face: coordinated as in the bulk
_LACKING = 0.02  # of the coordination number
LAYER_GAP = 0.6  # Å between heights of neighbouring layers, at least


def parse_rule(value: Any, name: str) -> Surface:
    """A `surface` out of a file: oc20, half, or a number of layers.

    Raises:
        ValueError: something else, by its `name`.

    Example:
        >>> parse_rule("2", "data.tag_rule"), parse_rule("half", "data.tag_rule")
        (2, 'half')
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if number or value in ("oc20", "half"):
        found: Surface = value
        return found
    raise ValueError(f"{name} is {value!r}, expected oc20, half or a number of layers")


def surface_atoms(
    frame: Frame, numbers: NDArray[np.int64], rows: NDArray[np.int64], surface: Surface
) -> NDArray[np.bool_]:
    """Which of the slab's atoms (S,) are at its upper surface.

    Args:
        frame: of the whole system.
        numbers: (N,), its elements.
        rows: (S,), the atoms of the slab, the adsorbate left out.
        surface: "oc20", "half" of the layers, rounded up, or a number of layers.

    Raises:
        ValueError: another `surface`, or fewer layers than it asks for.
    """
    height = frame.height[rows]
    if surface == "oc20":
        near = height >= height.max() - _DEPTH * frame.slant - 1e-3
        return np.asarray(near | _under_coordinated(frame, numbers[rows], rows))
    number = layers(height)
    count = int(number.max()) + 1
    if surface == "half":
        return np.asarray(number < (count + 1) // 2)
    if isinstance(surface, bool) or not isinstance(surface, int) or surface < 1:
        raise ValueError(
            f"surface is {surface!r}, expected 'oc20', 'half' or a number of layers from 1 on"
        )
    if surface >= count:
        raise ValueError(
            f"has {count} layers, of which {surface} cannot be the surface with others below it; "
            "ask for fewer"
        )
    return np.asarray(number < surface)


def layers(height: NDArray[np.float64]) -> NDArray[np.int64]:
    """The layer (S,) of each atom, from 0 at the top, by gaps of `LAYER_GAP` between heights.

    Example:
        >>> layers(np.array([0.0, 2.1, 2.0, 4.1])).tolist()
        [2, 1, 1, 0]
    """
    order = np.argsort(-height, kind="stable")
    steps = -np.diff(height[order], prepend=height[order[:1]])
    number = np.empty(len(height), dtype=np.int64)
    number[order] = (steps > LAYER_GAP).cumsum()
    return number


def _under_coordinated(
    frame: Frame, numbers: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Atoms of the upper half with fewer neighbours than any of their element inside the slab.

    OC20 compared with the bulk crystal, which is not known here. Of an element that does not occur
    inside a thin slab, the atom with most neighbours stands for the bulk.
    """
    height = frame.height[rows]
    found = coordination(frame.positions[rows], frame.lateral)
    inside = (height > height.min() + _INSIDE) & (height < height.max() - _INSIDE) & (found > OPEN)
    lacking = np.zeros(len(rows), dtype=np.bool_)
    for number in np.unique(numbers):
        same = numbers == number
        bulk = found[same & inside].min() if (same & inside).any() else found[same].max()
        lacking |= same & (found < bulk * (1.0 - _LACKING))
    return np.asarray(lacking & (height > height.mean()))
