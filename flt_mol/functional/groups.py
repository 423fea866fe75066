"""Systems of a batch: packed rows and their offsets, sums per system, operators over systems.

Rows of B systems stand one after the other, and ``ptr`` (B + 1,) int64 says where each begins:
row n belongs to system b if ``ptr[b] <= n < ptr[b + 1]``. Systems without rows are allowed. In
compiled and exported graphs, where the number of real rows is unknown, rows beyond ``ptr[B]`` are
padding: they belong to no system and get zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

_F = TypeVar("_F", bound=Callable[..., object])
_OUTSIDE: dict[Callable[..., object], Any] = {}


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def settled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All of them in the widest of their dtypes, at least float32, as products need them."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which products of `x` keep their own dtype, under autocast too."""
    return torch.autocast(x.device.type, enabled=False)


def outside(function: _F) -> _F:
    """`function` as `torch.compiler.disable` makes it, which graphs call without looking inside.

    Not as a decorator: that would import the compiler, seconds, with the module. ``fullgraph=True``
    needs it made before the graph: a graph cannot make it.
    """
    if function not in _OUTSIDE:
        _OUTSIDE[function] = torch.compiler.disable(function)
    found: _F = _OUTSIDE[function]
    return found


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make of a function one step for autograd and torch.compile, as `torch.library.custom_op`.

    Inside it may loop over systems; its gradients are those of `register_autograd`. Forward-mode
    derivatives, which torch would silently take for 0, raise NotImplementedError.

    Args:
        name: without the namespace.
    """

    def decorate(function: Callable[..., Any]) -> CustomOpDef:
        def checked(*given: Any) -> Any:
            if getattr(forward_ad, "_current_level", -1) >= 0:
                raise NotImplementedError(
                    "flt_mol's operators have no forward-mode derivatives: use reverse mode, "
                    "torch.autograd.grad or torch.autograd.functional.jvp"
                )
            return function(*given)

        schema = torch.library.infer_schema(function, mutates_args=())
        return torch.library.custom_op(f"flt_mol::{name}", checked, mutates_args=(), schema=schema)

    return decorate


def check_ptr(
    ptr: Tensor, num_rows: int, key_ptr: Tensor | None = None, num_keys: int | None = None
) -> Tensor:
    """Refuse offsets that do not describe the rows; the offsets of keys, `ptr` if none are given.

    Reading offsets breaks a graph, so nothing is checked while torch compiles or exports one:
    rows beyond the last offset are padding there.

    Args:
        ptr: (B + 1,), first row of each system among `num_rows` queries.
        num_rows: N.
        key_ptr: (B + 1,), first row of each system among `num_keys` keys, or None where keys are
            rows of the same set.
        num_keys: K, or None for N.

    Raises:
        ValueError: offsets that do not describe these rows, or two that are not of the same B.
    """
    keys = ptr if key_ptr is None else key_ptr
    if torch.compiler.is_compiling():
        return keys
    if key_ptr is None and num_keys not in (None, num_rows):
        raise ValueError(f"there are {num_keys} keys for {num_rows} queries: give key_ptr too")
    given = [("ptr", ptr, num_rows)]
    if key_ptr is not None:
        given.append(("key_ptr", key_ptr, num_rows if num_keys is None else num_keys))
        if key_ptr.numel() != ptr.numel():
            raise ValueError(
                f"ptr describes {ptr.numel() - 1} systems, key_ptr {key_ptr.numel() - 1}: "
                "both need the same systems in the same order, empty ones included"
            )
    for name, x, rows in given:
        if x.dim() != 1 or x.numel() == 0 or x.is_floating_point():
            raise ValueError(
                f"{name} must hold B + 1 integers, got shape {tuple(x.shape)} and {x.dtype}"
            )
        offsets = x.tolist()
        if offsets[0] != 0 or offsets[-1] != rows or sorted(offsets) != offsets:
            raise ValueError(
                f"{name} must start at 0, never decrease and end at the number of rows, {rows}; "
                f"found {str(offsets)[:80]}"
            )
    return keys


def system_sizes(ptr: Tensor, num_rows: int) -> list[int]:
    """Rows per system, as B plain integers. Not for code that is compiled.

    Raises:
        ValueError: `ptr` does not describe N rows.

    Example:
        >>> system_sizes(torch.tensor([0, 2, 2, 5]), 5)
        [2, 0, 3]
    """
    sizes: list[int] = check_ptr(ptr, num_rows).diff().tolist()
    return sizes


def systems_of(ptr: Tensor, num_rows: int, name: str = "ptr") -> list[slice]:
    """The rows of every system as slices, for operators: rows beyond the last are padding.

    In compiled graphs nobody has looked at the numbers before.

    Raises:
        ValueError: offsets that do not start at 0, decrease, or end beyond `num_rows`.
    """
    offsets: list[int] = ptr.tolist()
    if offsets[0] != 0 or offsets[-1] > num_rows or sorted(offsets) != offsets:
        raise ValueError(
            f"{name} must start at 0, never decrease and not end beyond the number of rows, "
            f"{num_rows}; found {str(offsets)[:80]}"
        )
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def system_index(ptr: Tensor, num_rows: int) -> Tensor:
    """(N,) int64, the system of each row, ascending; B for rows beyond the last offset.

    Example:
        >>> system_index(torch.tensor([0, 2, 2, 5]), 6)
        tensor([0, 0, 2, 2, 2, 3])
    """
    rows = torch.arange(num_rows, device=ptr.device)
    return torch.searchsorted(ptr[1:].to(torch.int64), rows, right=True)


def index_in_system(ptr: Tensor, num_rows: int) -> Tensor:
    """(N,) int64, how many rows of its own system come before each row; 0 for padding rows.

    Example:
        >>> index_in_system(torch.tensor([0, 2, 2, 5]), 6)
        tensor([0, 1, 0, 1, 2, 0])
    """
    rows = torch.arange(num_rows, device=ptr.device)
    system = system_index(ptr, num_rows)
    first = torch.cat([ptr[:-1], ptr.new_full((1,), num_rows)]).to(torch.int64)
    return (rows - first[system]).clamp(min=0)


def offsets_of(system: Tensor, num_systems: int | None = None) -> tuple[Tensor, Tensor | None]:
    """`ptr` of a vector of system indices, and the order that sorts its rows.

    While torch compiles or exports a graph the numbers in `system` are unknown, so nothing is
    checked, order is always given, and without `num_systems` each system that has rows takes the
    next free number: B = N then, with empty systems at the end.

    Args:
        system: (N,) integers ≥ 0, the system of each row, in any order.
        num_systems: B; the default is the largest index + 1, which misses empty systems at the end.

    Returns:
        ptr (B + 1,) int64, and order (N,) int64 such that ``x[order]`` is packed with every
        system's rows in their old order, or None where `system` is sorted already.

    Raises:
        ValueError: indices that are negative or ≥ `num_systems`.

    Example:
        >>> ptr, order = offsets_of(torch.tensor([1, 0, 1]), num_systems=3)
        >>> ptr.tolist(), order.tolist()
        ([0, 1, 3, 3], [1, 0, 2])
    """
    if system.dim() != 1 or system.is_floating_point() or system.dtype == torch.bool:
        raise ValueError(
            f"system must hold one integer per row, got shape {tuple(system.shape)} "
            f"and {system.dtype}"
        )
    system = system.to(torch.int64)  # differences of unsigned integers wrap around
    if torch.compiler.is_compiling():
        if num_systems is None:
            system, num_systems = dense_ranks(system), system.shape[0]
        return _sorted_offsets(system, num_systems)
    low, high = (int(system.min()), int(system.max())) if system.numel() else (0, -1)
    if low < 0 or (num_systems is not None and high >= num_systems):
        raise ValueError(
            f"system holds indices from {low} to {high}, expected 0 to "
            f"{'B - 1' if num_systems is None else num_systems - 1}"
        )
    sizes = torch.bincount(system, minlength=high + 1 if num_systems is None else num_systems)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    if bool((system.diff() >= 0).all()):
        return ptr, None
    return ptr, torch.argsort(system, stable=True)


def dense_ranks(system: Tensor) -> Tensor:
    """Indices renumbered 0, 1, 2, … without gaps, in their order: (N,) → (N,) int64.

    Example:
        >>> dense_ranks(torch.tensor([7, 3, 7, 4]))
        tensor([2, 0, 2, 1])
    """
    order = torch.argsort(system, stable=True)
    ascending = system[order]
    # No slice of N − 1 rows: torch.export would make a rule of N ≥ 3 out of it.
    first = torch.searchsorted(ascending, ascending)
    ranks = (first == torch.arange(system.shape[0], device=system.device)).cumsum(0) - 1
    return torch.empty_like(ranks).index_copy(0, order, ranks)


def _sorted_offsets(system: Tensor, num_systems: int) -> tuple[Tensor, Tensor]:
    """`ptr` and order by shapes alone, without reading a number."""
    order = torch.argsort(system, stable=True)
    boundaries = torch.arange(num_systems + 1, device=system.device)
    return torch.searchsorted(system[order], boundaries), order


def sum_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """Σ of the rows of each system: (N, …) → (B, …); zeros for systems without rows."""
    total = x.new_zeros(ptr.shape[0], *x.shape[1:])  # padding goes to a system of its own
    return total.index_add(0, system_index(ptr, x.shape[0]), x)[:-1]


def mean_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """Mean of the rows of each system: (N, …) → (B, …); zeros for systems without rows."""
    sizes = ptr.diff().clamp(min=1).reshape(-1, *[1] * (x.dim() - 1))
    return sum_per_system(x, ptr) / sizes


def max_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """The largest of each system's rows: (N, …) → (B, …); −∞ for systems without rows.

    Example:
        >>> max_per_system(torch.tensor([1.0, 4.0, 3.0]), torch.tensor([0, 2, 3]))
        tensor([4., 3.])
    """
    num_systems = ptr.shape[0] - 1
    system = system_index(ptr, x.shape[0]).reshape(-1, *[1] * (x.dim() - 1)).expand_as(x)
    x = x.masked_fill(system == num_systems, -math.inf)
    largest = x.new_full((num_systems + 1, *x.shape[1:]), -math.inf)
    return largest.scatter_reduce(0, system, x, "amax")[:-1]


def first_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """The first row of each system: (N, …) → (B, …); zeros for systems without rows.

    Example:
        >>> first_per_system(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3]))
        tensor([1., 0., 3.])
    """
    # A row of zeros at the end, so that there is one to point at when N = 0.
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded[torch.where(ptr.diff() > 0, ptr[:-1], x.shape[0]).to(torch.int64)]


def spread(per_system: Tensor, ptr: Tensor, num_rows: int) -> Tensor:
    """Each row's own entry of a tensor per system: (B, …) → (N, …); zeros for padding rows.

    Example:
        >>> spread(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([0, 2, 2, 3]), 4)
        tensor([5., 5., 7., 0.])
    """
    padded = torch.cat([per_system, per_system.new_zeros(1, *per_system.shape[1:])])
    return padded[system_index(ptr, num_rows)]


def centred(positions: Tensor, ptr: Tensor) -> Tensor:
    """Positions relative to the mean of their own system: (N, ℓ) → (N, ℓ), at least float32.

    The first row of each system is taken off before the mean is formed, so coordinates of
    10⁵ Å lose no more than their own float32 spacing. Padding rows are 0.

    Example:
        >>> centred(torch.tensor([[100001.0], [100002.0], [5.0]]), torch.tensor([0, 2, 3])).tolist()
        [[-0.5], [0.5], [0.0]]
    """
    positions = positions.to(torch.promote_types(positions.dtype, torch.float32))
    num_rows, num_systems = positions.shape[0], ptr.shape[0] - 1
    system = system_index(ptr, num_rows)
    real = (system < num_systems)[:, None]
    zero = positions.new_zeros(1, positions.shape[-1])
    # The mean makes the result independent of the anchor, so the anchor needs no gradient.
    anchor = torch.cat([first_per_system(positions.detach(), ptr), zero])
    local = (positions - anchor[system]).masked_fill(~real, 0.0)
    total = local.new_zeros(num_systems + 1, local.shape[1]).index_add(0, system, local)
    sizes = torch.cat([ptr.diff(), ptr.new_ones(1)]).clamp(min=1)
    # Rows of padding, those of system B, are all 0.
    return local - (total / sizes[:, None])[system]
