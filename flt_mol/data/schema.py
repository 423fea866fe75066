"""Records of the OC20 schema by stored names: values, and options of reading."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.structures import Structures

Record = Mapping[str, Any]
OnError = Literal["raise", "skip"]
Tagger = Callable[[Structures], Structures]

GRAPH_FIELDS = frozenset(
    ("edge_index", "cell_offsets", "distances", "neighbors", "edge_attr", "batch", "ptr")
)
_NO_TARGETS = GRAPH_FIELDS | {"sid", "fid", "frame_id", "frame", "step", "id", "natoms"}
_LIST_SIZE = 1_000_000  # values in lists of lists; arrays may be larger
_FRAMES = re.compile(r"first|last|all|-?\d+|(-?\d*:){1,2}-?\d*").fullmatch


@dataclass(frozen=True)
class ReadOptions:
    """How records are read; the arguments are those of `flt_mol.data.open_dataset`.

    Raises:
        ValueError: another `on_error` or `frames`, or energies both required and ignored.
    """

    require_energy: bool = False
    ignore_energy: bool = False
    on_error: OnError = "raise"
    energy: str = "y_relaxed"
    energy_initial: str = "y_init"
    positions_relaxed: str = "pos_relaxed"
    check: Callable[[Structures], None] | None = None
    frames: str | None = "all"
    forces: bool = False
    tag_slab: Tagger | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}, expected 'raise' or 'skip'")
        if self.require_energy and self.ignore_energy:
            raise ValueError("require_energy and ignore_energy exclude each other")
        if not (self.frames is None or _FRAMES(self.frames)):
            raise ValueError(f"frames is {self.frames!r}, expected first, last, all, 0, 2:9, …")

    def energy_of(self, record: Record) -> str:
        """Where a record's target is: with forces, by default the energy of the same positions."""
        if self.forces and self.energy == "y_relaxed":
            return next((n for n in ("y", "calculator") if record.get(n) is not None), self.energy)
        return self.energy


class Stored:
    """A value of a record that is decoded when it is asked for, or has been already."""

    array: NDArray[Any] | None = None

    def numpy(self) -> NDArray[Any]:
        """Its numbers; ValueError where they do not fit their description."""
        raise ValueError(f"is a {type(self).__name__}, expected numbers")

    def __setstate__(self, state: object) -> None:
        raise ValueError(f"a {type(self).__name__} takes no state")


def decoded(value: Any) -> Any:
    """A stored value as an array, or ValueError of it; anything else as it is."""
    try:
        return value.numpy() if isinstance(value, Stored) else value
    except (TypeError, OverflowError) as error:
        raise ValueError(f"cannot be decoded ({error})") from error


def to_numpy(value: Any) -> NDArray[Any]:
    """The numbers of a stored value, array, tensor, list or number.

    Raises:
        ValueError: something else; the text goes after the name of a field.
    """
    value = decoded(value)
    if isinstance(value, list | tuple):
        _refuse_endless(value)
    try:
        if isinstance(value, Tensor):
            value = value.float() if value.dtype == torch.bfloat16 else value
            array: NDArray[Any] = value.numpy(force=True)
        else:
            array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"is ragged, or not an array of numbers ({error})") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"holds {array.dtype}, expected numbers")
    return array


def may_be_energy(name: Any, value: Any) -> bool:
    """Whether a field may be a target: one floating-point number that counts nothing."""
    with suppress(ValueError):
        array = to_numpy(value)
        return name not in _NO_TARGETS and array.size == 1 and array.dtype.kind == "f"
    return False


def _refuse_endless(value: Sequence[Any]) -> None:
    """Refuse lists that hold themselves, or each other again and again."""
    rest, count = [value], 0
    while rest:
        item = rest.pop()
        count += len(item)
        if count > _LIST_SIZE:
            raise ValueError("holds lists that contain themselves; store an array")
        rest += [inner for inner in item if isinstance(inner, list | tuple)]


def heights(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance (…, n), Å, between lattice planes, for each of n ≤ 3 lattice vectors (…, n, 3).

    hᵢ² = det G / det Gᵢ, where G = A Aᵀ, and Gᵢ is G without row and column i; 0 where vectors are
    in line.
    """
    gram = vectors @ np.swapaxes(vectors, -1, -2)
    volume = np.maximum(np.linalg.det(gram), 0.0)
    result = np.zeros(vectors.shape[:-1])
    for i in range(vectors.shape[-2]):
        others = np.delete(np.delete(gram, i, -1), i, -2)
        area = np.asarray(np.linalg.det(others))
        np.divide(volume, area, out=result[..., i], where=area > 0)
    return np.sqrt(result)
