"""The layouts that attention takes: packed, unsorted and padded rows, all packed inside."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.groups import check_ptr, index_in_system, offsets_of

LAYOUT = ("ptr", "system", "num_systems", "mask")
_HINTS = {"batch": "; give system=batch", "key_padding_mask": "; give mask=~key_padding_mask"}


class Layout(NamedTuple):
    """How rows as given become packed rows, and back.

    Attributes:
        ptr: (B + 1,) int64, first packed row of each system. Packed rows from ``ptr[-1]`` on, if
            any, are padding.
        order: (K,) int64, which of the given rows each packed row is; None if all are, in order.
        mask: (B, L) bool, True for real rows, of a padded layout in which some are not.
        leading: leading dimensions of what is given: (N,), or (B, L).
    """

    ptr: Tensor
    order: Tensor | None
    mask: Tensor | None
    leading: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """How many packed rows there are."""
        return math.prod(self.leading) if self.order is None else self.order.shape[0]

    def positions(self, given: Tensor | None, dim: int) -> Tensor:
        """(N, ℓ): those given, packed, or places in the sequence where ℓ = 1.

        Raises:
            ValueError: they are missing in more dimensions, or not one for each row.
        """
        expected = (*self.leading, dim)
        if given is None:
            if dim != 1:
                raise ValueError(f"positions are missing: the rpe needs {expected}")
            # Sequences of more tokens than float32 counts one by one do not fit any memory.
            return index_in_system(self.ptr, self.num_rows)[:, None].float()
        if tuple(given.shape) != expected:
            raise ValueError(f"positions have shape {tuple(given.shape)}, expected {expected}")
        return self.pack(given)

    def refuse_unsorted(self, *counted: object) -> None:
        """ValueError where something counts packed rows, as pairs do, and rows came unsorted."""
        if self.order is not None and any(given is not None for given in counted):
            raise ValueError("pairs, images and geometry count packed rows: sort rows by system")

    def pack(self, x: Tensor) -> Tensor:
        """Rows as given, (N, …) or (B, L, …), to packed rows (K, …)."""
        if len(self.leading) == 2:
            # Padding may hold NaN, whose product with a gradient of 0 is NaN.
            x = self._masked(x).flatten(0, 1)
        return x if self.order is None else x[self.order]

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed rows (K, …) to rows as given, zeros at padding."""
        rows = packed
        if self.order is not None:
            rows = packed.new_zeros(math.prod(self.leading), *packed.shape[1:])
            rows = rows.index_copy(0, self.order, packed)
        if len(self.leading) == 2:
            rows = self._masked(rows.view(*self.leading, *packed.shape[1:]))
        return rows

    def _masked(self, x: Tensor) -> Tensor:
        if self.mask is None:
            return x
        return torch.where(self.mask.view(*self.leading, *[1] * (x.dim() - 2)), x, 0.0)


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for unknown names."""
    for name in given:
        if name not in known:
            known = ", ".join(known) + _HINTS.get(name, "")
            raise TypeError(f"no argument '{name}': there are {known}")


def layout_of(
    x: Tensor,
    *,
    ptr: Tensor | None = None,
    system: Tensor | None = None,
    num_systems: int | None = None,
    mask: Tensor | None = None,
    name: str = "x",
) -> Layout:
    """The layout of rows `x`: (N, C) with `ptr` or `system`, or (B, L, C) with or without `mask`.

    Arguments are those of `nn.attention.AttentionInputs`; `name` is what errors call `x`.

    Raises:
        ValueError: arguments that do not belong together or do not fit `x`.
    """
    of_padded, of_packed = mask is not None, ptr is not None or system is not None
    both = ptr is not None and system is not None
    if both or (of_packed if x.dim() == 3 else of_padded) or (system is None and num_systems):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: packed rows (N, C) go with ptr, or system and "
            "num_systems; padded ones (B, L, C) with mask"
        )
    if x.dim() == 3:
        return _padded(x, mask, name)
    rows = x.shape[0]
    if system is not None:
        if system.shape != (rows,):
            raise ValueError(f"system has shape {tuple(system.shape)}, expected ({rows},)")
        if num_systems is not None and torch.compiler.is_compiling():
            fits = ((system >= 0) & (system < num_systems)).all()
            require(fits, f"system holds indices that are not 0 to {num_systems - 1}")
        return Layout(*offsets_of(system, num_systems), None, (rows,))
    if ptr is None:
        ptr = torch.tensor([0, rows], dtype=torch.int64, device=x.device)
    check_ptr(ptr, rows)
    return Layout(ptr, None, None, (rows,))


def aligned_layouts(x: Tensor, context: Tensor, given: Mapping[str, Any]) -> tuple[Layout, Layout]:
    """The layouts of two sets of rows of the same B systems, one padded and one packed if need be.

    `given` are arguments of `nn.attention.AttentionInputs`, by their names there.

    Raises:
        ValueError: arguments that do not belong together, or different numbers of systems.
    """
    num_systems = given.get("num_systems")
    both = [s for s in map(given.get, ("system", "context_system")) if s is not None]
    if num_systems is None and len(both) == 2:
        if torch.compiler.is_compiling():
            raise ValueError("a graph needs num_systems beside system and context_system")
        num_systems = 1 + max(int(s.max()) if s.numel() else -1 for s in both)
    layouts = []
    for rows, prefix, name in ((x, "", "x"), (context, "context_", "context")):
        own = {key: given.get(prefix + key) for key in ("ptr", "system", "mask")}
        count = None if own["system"] is None else num_systems
        layouts.append(layout_of(rows, **own, num_systems=count, name=name))
    layout, keys = layouts
    if layout.ptr.shape != keys.ptr.shape:
        raise ValueError(
            f"x has {len(layout.ptr) - 1} systems, the context {len(keys.ptr) - 1}: each needs its "
            "own context, which may be empty; with system, give num_systems"
        )
    return layout, keys


def _padded(x: Tensor, mask: Tensor | None, name: str) -> Layout:
    batch, length = x.shape[:2]
    if mask is None:
        ptr = torch.arange(batch + 1, device=x.device) * length
        return Layout(ptr, None, None, (batch, length))
    if mask.shape != (batch, length) or mask.dtype != torch.bool:
        found = f"mask has shape {tuple(mask.shape)} and {mask.dtype}"
        raise ValueError(f"{found}, expected bool {(batch, length)}, True for rows of {name}")
    sizes = mask.sum(1)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return Layout(ptr, chosen_rows(mask.flatten()), mask, (batch, length))


def chosen_rows(chosen: Tensor) -> Tensor:
    """Where `chosen` (N,) is true, (K,) in order; in graphs (N,), with the others behind these."""
    if torch.compiler.is_compiling():
        return torch.argsort((~chosen).to(torch.uint8), stable=True)
    return chosen.nonzero().squeeze(1)


def require(condition: Tensor, message: str) -> None:
    """ValueError unless `condition` () is fulfilled, a tensor that depends on numbers.

    Reading it would break a graph; there it becomes part of the graph, and raises when that runs.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)


def check_rows(x: Tensor, width: int, name: str) -> None:
    """Refuse rows that are not (N, C) or (B, L, C) of this width C."""
    if x.dim() not in (2, 3) or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected (N, {width}) or (B, L, {width})"
        )
