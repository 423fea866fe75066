"""How the operators of this library are made, and what all of them refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make of a function one step for autograd and torch.compile, as `torch.library.custom_op`.

    Reverse mode is what these operators know: `register_autograd` gives them gradients, of any
    order. Forward mode (`torch.func.jvp`, `jacfwd`, `forward_ad`) finds them without a rule, and
    torch then drops tangents without a word, hence derivatives of 0: so it is refused here, where
    every call passes. `torch.func.grad`, `jacrev` and `hessian` are not supported by torch's custom
    operators either, and say so themselves.

    Args:
        name: without the namespace.
    """

    def decorate(function: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            refuse_forward_mode()
            return function(*args)

        schema = torch.library.infer_schema(function, mutates_args=())
        return torch.library.custom_op(f"flt_mol::{name}", run, mutates_args=(), schema=schema)

    return decorate


def refuse_forward_mode() -> None:
    """Raise while forward-mode differentiation goes on, torch.func's included.

    Raises:
        NotImplementedError: it does.
    """
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, jacfwd, torch.autograd.forward_ad) is "
            "not implemented for flt_mol's operators: use reverse mode, torch.autograd.grad, or "
            "torch.autograd.functional.jacobian, jvp and hvp"
        )


def system_offsets(ptr: Tensor, num_rows: int, name: str = "ptr") -> list[int]:
    """`ptr` as B + 1 plain integers, for operators to read: rows beyond the last are padding.

    In compiled graphs nobody has looked at the numbers before.

    Raises:
        ValueError: offsets that do not start at 0, decrease, or end beyond `num_rows`.
    """
    offsets: list[int] = ptr.tolist()
    check_offsets(offsets, num_rows, name)
    return offsets


def check_offsets(offsets: Sequence[int], num_rows: int, name: str = "ptr") -> None:
    """ValueError unless offsets start at 0, never decrease and do not end beyond `num_rows`."""
    if not offsets or offsets[0] != 0 or offsets[-1] > num_rows or _falls(offsets):
        raise ValueError(
            f"{name} must start at 0, never decrease and not end beyond the number of rows, "
            f"{num_rows}; found {str(list(offsets))[:80]}"
        )


def systems_of_both(
    ptr: Tensor, num_rows: int, key_ptr: Tensor, num_keys: int
) -> list[tuple[slice, slice]]:
    """The queries and keys of every system, empty ones included.

    Raises:
        ValueError: offsets that do not describe the rows or the keys, or not the same systems.
    """
    offsets = system_offsets(ptr, num_rows)
    key_offsets = offsets if key_ptr is ptr else system_offsets(key_ptr, num_keys, "key_ptr")
    if len(offsets) != len(key_offsets):
        raise ValueError(
            f"ptr describes {len(offsets) - 1} systems, key_ptr {len(key_offsets) - 1}: "
            "both need the same systems in the same order, empty ones included"
        )
    both = zip(pairwise(offsets), pairwise(key_offsets), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in both]


def _falls(offsets: Sequence[int]) -> bool:
    return any(stop < start for start, stop in pairwise(offsets))
