"""The numbers of a stored tensor or array, looked at where they lie if that can be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flt_mol.data.pickles.values import StoredArray, StoredDtype, StoredTensor, decode
from flt_mol.data.tensors import numpy_of

__all__ = ["UnusualError", "stored_array", "stored_numbers"]


class UnusualError(Exception):
    """Something that the slow path has to judge."""


def stored_numbers(value: Any) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """Type, shape, and bytes in C order of stored numbers; the bytes are a view where they can be.

    Raises:
        Exception: of any kind, for what is no array of numbers, or a damaged one.
    """
    if type(value) is StoredTensor:
        found = _tensor(value)
        if found is not None:
            return found
    elif type(value) is StoredArray and type(value.dtype) is StoredDtype and value.order == "C":
        dtype, shape = value.dtype.decode(), value.shape
        if (
            dtype.kind in "biuf"
            and min(shape, default=1) > 0
            and len(value.data) == math.prod(shape) * dtype.itemsize
        ):
            return dtype, shape, value.data
    array = stored_array(value)
    return array.dtype, array.shape, array.tobytes()


def _tensor(value: StoredTensor) -> tuple[np.dtype[Any], tuple[int, ...], memoryview] | None:
    """A tensor's numbers where they lie one after the other, None where they do not."""
    step = 1
    for n, stride in zip(value.size[::-1], value.stride[::-1], strict=True):
        if n < 1 or stride != step:
            return None
        step *= n
    found = value.storage.numbers()
    if found is None or value.offset < 0:
        return None
    dtype, data = found
    if value.offset == 0 and step * dtype.itemsize == len(data):
        return dtype, value.size, data
    start, stop = value.offset * dtype.itemsize, (value.offset + step) * dtype.itemsize
    return None if stop > len(data) else (dtype, value.size, data[start:stop])


def stored_array(value: Any) -> NDArray[Any]:
    """Any stored numbers, as `Fields.array` reads them."""
    value = decode(value)
    array = numpy_of(value) if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UnusualError
    return array
