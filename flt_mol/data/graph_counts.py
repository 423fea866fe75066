"""How many graphs a record is of, by what torch_geometric notes down when it batches."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flt_mol.data.fields import Fields

__all__ = ["refuse_several"]


def refuse_several(read: Fields, n: int) -> None:
    """Refuse a record of `n` atoms whose `ptr` or `batch` tell of several graphs.

    Raises:
        ValueError: naming record, sid and field.
    """
    for field, graphs_of in (("ptr", _ptr_tells), ("batch", _batch_tells)):
        value = read.record.get(field)
        if value is None or isinstance(value, str):
            continue
        several = 1
        with suppress(ValueError):  # something else of that name
            several = graphs_of(read.array(field), n)
        if several > 1:
            read.fail(field, f"is of {several} graphs: store one system per record")


def _ptr_tells(ptr: NDArray[Any] | None, n: int) -> int:
    """Graphs of which `ptr` holds the first atoms, and the end."""
    if ptr is None or ptr.ndim != 1 or len(ptr) < 3 or ptr[0] != 0 or ptr[-1] != n:
        return 1
    return len(ptr) - 1


def _batch_tells(batch: NDArray[Any] | None, n: int) -> int:
    """Graphs of which `batch` holds each atom's."""
    if batch is None or batch.size != n or batch.dtype.kind not in "iu":
        return 1
    return len(np.unique(batch))
