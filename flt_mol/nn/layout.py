"""The layouts that attention takes: packed, unsorted and padded rows, all packed inside."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from flt_mol.functional.groups import offsets_of, offsets_of_both, system_sizes
from flt_mol.nn.checks import require


class RowsGiven(TypedDict):
    """What says which system each row belongs to; None where it is not said."""

    ptr: Tensor | None
    system: Tensor | None
    mask: Tensor | None


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
    def padded(self) -> bool:
        """Whether rows are given as (B, L, …)."""
        return len(self.leading) == 2

    def refuse_unsorted(self, *counted: object) -> None:
        """Refuse what counts packed rows, such as pairs, where rows were given in another order.

        Raises:
            ValueError: something is given that is not None, and rows are not in packed order.
        """
        if self.order is not None and any(given is not None for given in counted):
            raise ValueError(
                "pairs, images, waves and local geometry count packed rows: sort rows by system, "
                "and give ptr or system"
            )

    def pack(self, x: Tensor) -> Tensor:
        """Rows as given, (N, …) or (B, L, …), to packed rows (K, …)."""
        if self.padded:
            if self.mask is not None:
                # Padding may hold NaN, whose product with a gradient of 0 is NaN.
                x = torch.where(self.mask.view(*self.leading, *[1] * (x.dim() - 2)), x, 0.0)
            x = x.flatten(0, 1)
        return x if self.order is None else x[self.order]

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed rows (K, …) to rows as given, zeros at padding."""
        rows = packed
        if self.order is not None:
            total = self.leading[0] * (self.leading[1] if self.padded else 1)
            rows = packed.new_zeros(total, *packed.shape[1:]).index_copy(0, self.order, packed)
        if self.padded:
            rows = rows.view(*self.leading, *packed.shape[1:])
            if self.mask is not None:
                mask = self.mask.view(*self.leading, *[1] * (packed.dim() - 1))
                rows = torch.where(mask, rows, 0.0)
        return rows


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

    Args:
        x: (N, C) or (B, L, C).
        ptr: (B + 1,), first row of each system, for packed rows.
        system: (N,), the system of each row in any order. Without `ptr` and `system`, rows (N, C)
            are one system.
        num_systems: B, with `system` only.
        mask: (B, L) bool, True for real rows, for padded rows only.
        name: what errors call `x`.

    Raises:
        ValueError: arguments that do not belong together or do not fit `x`.
    """
    if x.dim() == 3:
        if ptr is not None or system is not None or num_systems is not None:
            raise ValueError(
                f"{name} is padded, shape {tuple(x.shape)}: its systems are its first dimension; "
                "give mask, not ptr, system or num_systems"
            )
        return _padded(x, mask, name)
    if mask is not None:
        raise ValueError(
            f"a mask belongs to padded rows (B, L, C); {name} has {x.dim()} dimensions"
        )
    return _packed(x, ptr, system, num_systems, name)


def aligned_layouts(
    x: Tensor,
    context: Tensor,
    num_systems: int | None,
    rows: RowsGiven,
    context_rows: RowsGiven,
) -> tuple[Layout, Layout]:
    """The layouts of two sets of rows of the same B systems.

    Args:
        x: (N, C) or (B, L, C).
        context: (K, C') or (B, L', C'); may be padded where `x` is packed and the reverse.
        num_systems: B, where both have `system`.
        rows: `ptr`, `system` and `mask` of `x`.
        context_rows: `ptr`, `system` and `mask` of the context.

    Raises:
        ValueError: arguments that do not belong together, or different numbers of systems.
    """
    system, context_system = rows["system"], context_rows["system"]
    if (
        system is not None
        and context_system is not None
        and (system.shape, context_system.shape) == (x.shape[:1], context.shape[:1])
        and x.dim() == context.dim() == 2
    ):
        ptr, order, key_ptr, key_order = offsets_of_both(system, context_system, num_systems)
        return (
            Layout(ptr, order, None, (x.shape[0],)),
            Layout(key_ptr, key_order, None, (context.shape[0],)),
        )
    layout = layout_of(x, num_systems=None if system is None else num_systems, **rows)
    keys = layout_of(
        context,
        num_systems=None if context_system is None else num_systems,
        name="context",
        **context_rows,
    )
    if layout.ptr.shape != keys.ptr.shape:
        raise ValueError(
            f"x has {len(layout.ptr) - 1} systems, the context {len(keys.ptr) - 1}: each system "
            "of x needs its own context, which may be empty; with system, give num_systems"
        )
    return layout, keys


def _packed(
    x: Tensor, ptr: Tensor | None, system: Tensor | None, num_systems: int | None, name: str
) -> Layout:
    rows = x.shape[0]
    if ptr is not None and system is not None:
        raise ValueError("give ptr or system, not both")
    if system is None and num_systems is not None:
        raise ValueError("num_systems belongs to system; ptr says it already")
    if system is not None:
        if system.shape != (rows,):
            raise ValueError(
                f"system has shape {tuple(system.shape)}, expected ({rows},), one for each row of "
                f"{name}"
            )
        if num_systems is not None and torch.compiler.is_compiling():
            fits = ((system >= 0) & (system < num_systems)).all()
            require(fits, f"system holds indices that are not 0 to {num_systems - 1}")
        ptr, order = offsets_of(system, num_systems)
        return Layout(ptr, order, None, (rows,))
    if ptr is None:
        ptr = torch.tensor([0, rows], dtype=torch.int64, device=x.device)
    elif not torch.compiler.is_compiling():
        system_sizes(ptr, rows)
    return Layout(ptr, None, None, (rows,))


def _padded(x: Tensor, mask: Tensor | None, name: str) -> Layout:
    batch, length = x.shape[:2]
    if mask is None:
        ptr = torch.arange(batch + 1, device=x.device) * length
        return Layout(ptr, None, None, (batch, length))
    if mask.shape != (batch, length) or mask.dtype != torch.bool:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and {mask.dtype}, expected bool "
            f"({batch}, {length}), True for real rows of {name}"
        )
    sizes = mask.sum(1)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    if torch.compiler.is_compiling():
        # Of static shape: real rows first, in order; those of padding stay, behind ptr[-1].
        order = torch.argsort((~mask).flatten().to(torch.uint8), stable=True)
    else:
        order = mask.flatten().nonzero().squeeze(1)
    return Layout(ptr, order, mask, (batch, length))
