"""Functions of rows where nothing but values is asked for: a chunk of rows at a time.

What is on the way from rows to results then has the size of a chunk. Tensors of all rows of a large
system are given back to the operating system as soon as they are freed, and fetched again page by
page: on some machines that takes as long as what is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Numbers on the way at once: within a core's cache, and small beside the cost of a call.
NUMBERS = 2**17


def nothing_watches() -> bool:
    """Whether this is no trace, no compiled graph and no transform, forward mode included."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return getattr(torch.autograd.forward_ad, "_current_level", -1) < 0


def ordinary(*tensors: Tensor) -> bool:
    """Whether they are plain tensors on CPUs, and `nothing_watches`.

    On other devices than CPUs launching many small kernels costs more than memory traffic.
    """
    plain = (Tensor, torch.nn.Parameter)
    return nothing_watches() and all(type(x) in plain and x.device.type == "cpu" for x in tensors)


def values_only(*tensors: Tensor) -> bool:
    """Whether nothing needs more than values of these: no derivative, graph or transform."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not wanted and ordinary(*tensors)


def by_rows(function: Callable[..., Tensor], *given: Tensor, size: int) -> Tensor:
    """``function(*given)``, with up to `size` rows of all given tensors at a time.

    Args:
        function: of tensors (n, …), to one (n, …) each row of which depends on their same row
            alone. It gives no tensor that requires a gradient: see `values_only`.
        given: (N, …), each.
        size: rows at a time, at least 1.

    Example:
        >>> by_rows(torch.add, torch.arange(5), torch.ones(5), size=2)
        tensor([1., 2., 3., 4., 5.])
    """
    rows = len(given[0])
    if rows <= size:
        return function(*given)
    first = function(*(x[:size] for x in given))
    out = first.new_empty(rows, *first.shape[1:])
    out[:size] = first
    for start in range(size, rows, size):
        out[start : start + size] = function(*(x[start : start + size] for x in given))
    return out


def rows_of(numbers_per_row: int) -> int:
    """Rows with `NUMBERS` numbers in all."""
    return max(1, NUMBERS // max(1, numbers_per_row))
