"""Objects of torch_geometric, known by what they hold: nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data.schema import GRAPH_FIELDS, Stored, to_numpy

_KNOWN_BY = ("pos", "atomic_numbers", "z", "edge_index")


def is_pyg(value: Any) -> bool:
    """Whether something holds fields as torch_geometric's objects do."""
    return not isinstance(value, Mapping) and fields_of(value) is not None


def fields_of(data: Any) -> Mapping[str, Any] | None:
    """Name → value: 1.x keeps them in `__dict__`, 2.x in `_store`; None for anything else."""
    if isinstance(data, dict):
        return data
    state = getattr(data, "__dict__", None)
    if not isinstance(state, dict):
        return None
    if "_node_store_dict" in state:
        raise ValueError("it has several kinds of nodes; give Data with one node per atom")
    store = state.get("_store")
    if store is not None:
        mapping = getattr(store, "__dict__", {}).get("_mapping")
        return mapping if isinstance(mapping, Mapping) else None
    return state if any(state.get(name) is not None for name in _KNOWN_BY) else None


def is_collated(value: Any) -> bool:
    """Whether it is what an `InMemoryDataset` stores: fields of all graphs, and their slices."""
    if not isinstance(value, tuple) or not 2 <= len(value) <= 4 or isinstance(value[0], tuple):
        return False
    slices = value[1] if isinstance(value[1], Mapping) and fields_of(value[0]) is not None else {}
    return "pos" in slices and to_numpy(slices["pos"]).ndim == 1  # else two mappings


def pyg_records(
    data: Any, notes: dict[str, str] | None = None, slices: Mapping[str, Any] | None = None
) -> list[Mapping[str, Any]]:
    """The fields of each graph by name, without the edges; `slices` are where graphs begin and end.

    Objects of torch_geometric 1.x that were unpickled under 2.x are read too. Fields whose name
    contains "index" come out as they were before batching, which adds running counts of nodes.
    `atomic_numbers` may be called `z`.

    Raises:
        ValueError: no `Data` or `Batch`, or one whose atoms are in no order.
    """
    fields = fields_of(data)
    if fields is None:
        raise ValueError(f"a {type(data).__name__} holds no structures, expected PyG Data or Batch")
    kept = {name: value for name, value in fields.items() if _is_of_system(name, fields)}
    if kept.get("atomic_numbers") is None and kept.get("z") is not None:
        kept["atomic_numbers"] = kept.pop("z")
        if notes is not None:
            notes["z"] = "no atomic_numbers (z is used)"
    # What batching noted down; 2.x keeps it beside the fields.
    own = getattr(data, "__dict__", {})
    about = {**own, **getattr(own.get("_store"), "__dict__", {})} if slices is None else {}
    ptr = _ptr(fields, about) if slices is None else to_numpy(slices["pos"]).astype(np.int64)
    if ptr is None:
        return [kept]
    slices = slices or about.get("_slice_dict", about.get("__slices__")) or {}
    added: Mapping[str, Any] = about.get("_inc_dict", about.get("__cumsum__")) or {}
    graphs: list[dict[str, Any]] = [{} for _ in ptr[1:]]
    for name, value in kept.items():
        parts = _parts(name, value, slices.get(name), ptr)
        for b, (graph, part) in enumerate(zip(graphs, parts, strict=False)):
            moved = name in added and isinstance(part, np.ndarray) and part.dtype.kind != "b"
            graph[name] = part - to_numpy(added[name])[b] if moved else part
    return list(graphs)


def _is_of_system(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a field is one of the system: no edges, and nothing that batching added."""
    if name in GRAPH_FIELDS or str(name).startswith("_") or fields[name] is None:
        return False
    return not any(name == f"{other}{end}" for other in fields for end in ("_batch", "_ptr"))


def _ptr(fields: Mapping[str, Any], about: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """First atom of each graph and the end (B + 1,); None for a single graph."""
    for name in ("ptr", "batch"):
        if isinstance(fields.get(name), Tensor | np.ndarray | Stored):
            numbers = to_numpy(fields[name]).reshape(-1).astype(np.int64)
            if name == "ptr" or not len(numbers):
                return numbers if len(numbers) else None
            if (np.diff(numbers) < 0).any() or numbers[0] < 0 or numbers[-1] > len(numbers):
                raise ValueError("batch is not ascending: the atoms of several graphs are mixed")
            graphs = about.get("_num_graphs", about.get("__num_graphs__")) or 0
            return np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=int(graphs)))])
    return None


def _parts(name: str, value: Any, ends: Any, ptr: NDArray[np.int64]) -> Sequence[Any]:
    """A field's part for each graph, by what batching noted down, else by its length; or none."""
    graphs = len(ptr) - 1
    if isinstance(value, list | tuple):
        return value if len(value) == graphs else ()
    if not isinstance(value, Tensor | np.ndarray | Stored):
        return [value] * graphs
    array = to_numpy(value)
    if array.ndim == 0:
        return [array] * graphs
    axis = array.ndim - 1 if "index" in name or name == "face" else 0
    ends = None if ends is None else to_numpy(ends).astype(np.int64)
    if ends is not None and ends[-1] == array.shape[axis]:
        return np.split(array, ends[1:-1], axis)
    if len(array) == ptr[-1]:
        return np.split(array, ptr[1:-1])
    each = 3 if name == "cell" and len(array) == 3 * graphs else 1
    return np.split(array, graphs) if len(array) == each * graphs else ()
