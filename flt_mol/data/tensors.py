"""The numbers of any tensor as a numpy array."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["numpy_of"]


def numpy_of(tensor: Tensor) -> NDArray[Any]:
    """A tensor's numbers; a view of them where numpy can have one.

    Sparse tensors are filled up, bfloat16 becomes float32, views that are conjugate or negative
    only by a flag are worked out.

    Raises:
        ValueError: no numbers that numpy has: a tensor on meta, quantized, of float8, nested, ….
            The text goes after a field's name.

    Example:
        >>> numpy_of(torch.ones(2, dtype=torch.bfloat16))
        array([1., 1.], dtype=float32)
    """
    if tensor.is_meta:
        raise ValueError("is a tensor on the device meta, which holds no numbers")
    if tensor.is_quantized:
        raise ValueError(f"is a quantized tensor ({tensor.dtype}); store dequantize() of it")
    try:
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.cpu().resolve_conj().resolve_neg()
        array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"is a tensor of {tensor.dtype} ({tensor.layout}) that numpy cannot hold; store a "
            "common dtype such as float32"
        ) from error
    return array
