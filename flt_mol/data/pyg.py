"""Objects of torch_geometric in memory, known by what they hold: nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data.fields import GRAPH_FIELDS
from flt_mol.data.oc20 import to_structures
from flt_mol.data.options import ReadOptions
from flt_mol.data.tensors import numpy_of
from flt_mol.structures import Structures

__all__ = ["from_pyg", "is_pyg", "pyg_records"]

_KNOWN_BY = ("pos", "atomic_numbers", "z", "edge_index")


def from_pyg(
    data: Any,
    *,
    options: ReadOptions | None = None,
    notes: MutableMapping[str, str] | None = None,
) -> Structures:
    """A `Data`, or all graphs of a `Batch`, with OC20's names for their fields.

    Objects of torch_geometric 1.x that were unpickled under 2.x are read too. Fields whose name
    contains "index" come out as they were before batching: torch_geometric adds running counts of
    nodes to them, which are taken off here. `atomic_numbers` may be called `z`.

    Args:
        data: `Data` or `Batch`, on any device.
        options: which targets are read, under which names, and whether one is required.
        notes: filled with the defaults taken (kind → text); no warning is issued here.

    Raises:
        ValueError: no such object, or fields that :func:`flt_mol.data.oc20.to_structures` refuses,
            naming the graph's place, its sid and the field.
    """
    several = pyg_records(data, notes)
    return Structures.cat(
        [
            to_structures(
                record,
                where=f"graph {place} of {type(data).__name__}",
                default_sid=place,
                options=options,
                notes=notes,
            )
            for place, record in enumerate(several)
        ]
    )


def is_pyg(value: Any) -> bool:
    """Whether something holds fields as torch_geometric's objects do."""
    try:
        return _fields(value) is not None
    except ValueError:
        return True  # one that is refused with a reason


def pyg_records(data: Any, notes: MutableMapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The fields of each graph by name, without the graphs themselves.

    Raises:
        ValueError: no `Data` or `Batch`, or one whose atoms are in no order.
    """
    fields = _fields(data)
    if fields is None:
        raise ValueError(f"a {type(data).__name__} holds no structures, expected PyG Data or Batch")
    kept = {name: value for name, value in fields.items() if _counts(name, fields)}
    if kept.get("atomic_numbers") is None and kept.get("z") is not None:
        kept["atomic_numbers"] = kept.pop("z")
        if notes is not None:
            notes["z"] = "no atomic_numbers (z is taken for them)"
    # What batching noted down; 2.x keeps it beside the fields.
    about = {**vars(data), **getattr(vars(data).get("_store"), "__dict__", {})}
    ptr = _ptr(fields, about)
    if ptr is None:
        return [kept]
    batch = _Batch(about, ptr)
    return [dict(batch.graph(kept, b)) for b in range(len(ptr) - 1)]


def _fields(data: Any) -> Mapping[str, Any] | None:
    """Name → value: 1.x keeps them in `__dict__`, 2.x in `_store`; None for anything else."""
    state = getattr(type(data), "__dict__", None) and getattr(data, "__dict__", None)
    if not isinstance(state, dict):
        return None
    if "_node_store_dict" in state:
        raise ValueError(
            f"a {type(data).__name__} has several kinds of nodes; give Data with one node an atom"
        )
    store = state.get("_store")
    if store is not None:
        mapping = getattr(store, "__dict__", {}).get("_mapping")
        return mapping if isinstance(mapping, Mapping) else None
    return state if any(state.get(name) is not None for name in _KNOWN_BY) else None


def _counts(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a field is one of the system: no graph, and nothing that batching added."""
    if name in GRAPH_FIELDS or name.startswith("_") or fields[name] is None:
        return False
    return not any(name == f"{other}{end}" for other in fields for end in ("_batch", "_ptr"))


def _ptr(fields: Mapping[str, Any], about: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """First atom of each graph and the end (B + 1,); None for a single graph."""
    for name, counted in (("ptr", True), ("batch", False), ("natoms", False)):
        value = fields.get(name)
        if not isinstance(value, Tensor | np.ndarray | list) or np.size(_numpy(value)) == 0:
            continue
        numbers = _numpy(value).reshape(-1).astype(np.int64)
        if counted:
            return numbers
        if name == "natoms":
            return None if len(numbers) == 1 else np.concatenate([[0], np.cumsum(numbers)])
        if (np.diff(numbers) < 0).any():
            raise ValueError("batch is not ascending: the atoms of several graphs are mixed")
        graphs = about.get("_num_graphs", about.get("__num_graphs__")) or 0
        return np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=int(graphs)))])
    return None


def _numpy(value: Any) -> NDArray[Any]:
    return numpy_of(value) if isinstance(value, Tensor) else np.asarray(value)


class _Batch:
    """Takes apart what torch_geometric put together."""

    def __init__(self, about: Mapping[str, Any], ptr: NDArray[np.int64]) -> None:
        self.ptr = ptr
        self.slices: Mapping[str, Any] = about.get("_slice_dict", about.get("__slices__")) or {}
        self.added: Mapping[str, Any] = about.get("_inc_dict", about.get("__cumsum__")) or {}

    def graph(self, fields: Mapping[str, Any], b: int) -> Iterator[tuple[str, Any]]:
        """The fields of graph `b`; what belongs to no single graph is left out."""
        for name, value in fields.items():
            if isinstance(value, list | tuple):
                if len(value) == len(self.ptr) - 1:
                    yield name, value[b]
            elif isinstance(value, Tensor | np.ndarray):
                part = self.part(name, torch.as_tensor(value), b)
                if part is not None:
                    yield name, part
            elif isinstance(value, str | bool | int | float):
                yield name, value

    def part(self, name: str, value: Tensor, b: int) -> Tensor | None:
        """The rows of graph `b`, as they were before."""
        if value.ndim == 0:
            return value
        axis = value.ndim - 1 if "index" in name or name == "face" else 0
        ends = self.slices.get(name)
        if isinstance(ends, Tensor | list | Sequence) and int(ends[-1]) == value.shape[axis]:
            start, stop = int(ends[b]), int(ends[b + 1])
            rows = value.narrow(axis, start, stop - start)
            added = self.added.get(name)
            # Booleans that something is added to are whole numbers from then on.
            if added is None or rows.dtype == torch.bool:
                return rows
            return rows - torch.as_tensor(added[b]).to(rows.device)
        return self.by_size(name, value, b)

    def by_size(self, name: str, value: Tensor, b: int) -> Tensor | None:
        """The rows of graph `b` of a field that was put into the batch later, by its length."""
        graphs, atoms = len(self.ptr) - 1, int(self.ptr[-1])
        if value.shape[0] == atoms:
            return value[int(self.ptr[b]) : int(self.ptr[b + 1])]
        for rows in (1, 3) if name == "cell" else (1,):
            if value.shape[0] == rows * graphs:
                return value[rows * b : rows * (b + 1)]
        return None
