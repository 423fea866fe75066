"""Tags that are the numbers of layers, as `ase.build` counts them from the top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LAYERS_MEND", "layer_note", "tags_are_layers"]

LAYERS_MEND = (
    "tag_slab(atoms, …) of flt_mol.data sets them anew, and so does --tag-slab of flt-mol predict"
)
"""How errors and warnings say what to do about it."""


def tags_are_layers(record: Mapping[str, Any]) -> bool:
    """Whether the tags of a record are layers' numbers, and the heights of its atoms agree.

    Builders of `ase.build` number layers from 1, the topmost, and leave adsorbates at 0. Of a
    slab with an adsorbate and up to two layers OC20's tags would be in the opposite order, but
    for an adsorbate that hangs below: that has elements of its own, and here they are of tag 0.

    Args:
        record: by the names of the OC20 schema; one that lacks numbers or has bad ones is none.

    Example:
        >>> from ase.build import add_adsorbate, fcc111
        >>> from flt_mol.data.ase.records import atoms_record
        >>> slab = fcc111("Cu", (1, 1, 2), vacuum=8.0)
        >>> add_adsorbate(slab, "O", 1.2, "fcc")
        >>> slab.get_tags().tolist(), tags_are_layers(atoms_record(slab))
        ([2, 1, 0], True)
    """
    found = _columns(record)
    if found is None:
        return False
    tags, heights, numbers = found
    there = np.unique(tags)
    layers = there[there > 0]
    if not np.array_equal(layers, np.arange(1, len(layers) + 1)) or there[0] < 0:
        return False
    if len(layers) < 3 and set(numbers[tags == 0]) <= set(numbers[tags != 0]):
        return False  # a slab that hangs or wraps; without atoms of tag 0, a thin one
    means = [heights[tags == tag].mean() for tag in there]
    return bool((np.diff(means) < 0).all())


def layer_note(record: Mapping[str, Any], dropped: bool = False) -> dict[str, str]:
    """A warning where atoms of tag 0 lie above the others: ase.build tags adsorbates 0.

    Args:
        record: as of :func:`tags_are_layers`.
        dropped: whether tags that are layers' numbers are read as none, so that all is well.
    """
    found = _columns(record)
    if found is None or (dropped and tags_are_layers(record)):
        return {}
    tags, heights, numbers = found
    # A slab whose adsorbate is below, or which wraps, has its own elements there.
    if tags.all() or set(numbers[tags == 0]) <= set(numbers[tags != 0]):
        return {}
    others = max(heights[tags == tag].mean() for tag in set(tags.tolist()) - {0})
    if heights[tags == 0].mean() <= others:
        return {}
    return {
        "layers": "atoms of tag 0 lie above the others, as if tags were the layer numbers of "
        f"ase.build (expected: 0 below the surface, 1 surface, 2 adsorbate; if so, {LAYERS_MEND})"
    }


def _columns(
    record: Mapping[str, Any],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Tags (N,), not all 0, heights (N,) along the normal of a × b, elements (N,); else None."""
    fields = [record.get(name) for name in ("tags", "cell", "pos", "atomic_numbers")]
    if any(field is None for field in fields):
        return None
    try:
        tags, cell, pos, numbers = map(np.asarray, fields)
        tags, numbers = tags.reshape(-1), numbers.reshape(-1)
        cell, pos = cell.reshape(3, 3).astype(float), pos.reshape(-1, 3).astype(float)
    except (TypeError, ValueError):  # refused later, in words
        return None
    if not len(tags) == len(pos) == len(numbers) or not tags.any():
        return None
    if not (np.isfinite(cell).all() and np.isfinite(pos).all()):
        return None
    normal = np.cross(cell[0], cell[1]) * np.sign(np.linalg.det(cell) or 1.0)
    return (tags, pos @ normal, numbers) if normal.any() else None
