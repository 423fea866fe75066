"""Checks of how rows are laid out: batches, padding, order in time.

See :mod:`flt_mol.testing.symmetry` for what all of them raise and return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flt_mol.modes import evaluating
from flt_mol.testing._common import agree, trainable
from flt_mol.testing.layers import Layer, PaddedLayer, agree_at, evaluated, outputs
from flt_mol.testing.rows import Rows
from flt_mol.testing.symmetry import supercell

FILLERS = (0.0, 1e6, float("nan"))


def check_layer_alone(
    layer: Layer,
    rows: Rows,
    *,
    tolerance: float = 1e-5,
    larger: int = 50,
    contents: Sequence[float] = (1.0, 50.0, float("nan")),
) -> float:
    """A system's outputs do not depend on its batch.

    Each alone is compared with all together, then with all between two partners `larger` times
    the size of the largest of them, whose features are multiplied by each of `contents`.
    """
    alone = torch.cat([evaluated(layer, part) for part in rows])
    together = evaluated(layer, rows)
    change = "from a system alone to all in one batch"
    errors = [agree_at(rows, alone, together, tolerance, change)]
    partner = _partner(max(rows, key=lambda part: part.num_rows), larger)
    for factor in contents:
        other = replace(partner, x=factor * partner.x)
        beside = evaluated(layer, Rows.cat([other, *rows, other]))
        size = partner.num_rows
        change = f"from a system alone to one beside {size} rows of {factor:g} times the size"
        second = beside[size : size + rows.num_rows]
        errors.append(agree_at(rows, alone, second, tolerance, change))
    return max(errors)


def check_layer_padding(
    layer: PaddedLayer,
    rows: Rows,
    *,
    tolerance: float = 0.0,
    fillers: Sequence[float] = FILLERS,
    zeros: bool = True,
) -> None:
    """What padding holds does not show, in values or gradients, bit for bit.

    With padding behind and before the real rows: outputs of real rows, and the gradients of all
    parameters and of real rows, are the same for every filler; outputs at padding are zero.

    Args:
        layer: whose `filler`, `before` and `extra` are set in turn, and restored.
        rows: sizes should differ, and an empty system be among them.
        tolerance: of the relative difference from the first filler.
        fillers: what padding holds, a NaN among them.
        zeros: whether outputs at padding must be zero.
    """
    saved = layer.filler, layer.before, layer.extra
    try:
        layer.extra = 2
        for layer.before in (False, True):
            place = "before" if layer.before else "behind"
            first: dict[str, Tensor] = {}
            for layer.filler in fillers:
                words = f"padding {place} the rows holds {layer.filler:g} instead of {fillers[0]:g}"
                found = _values_and_gradients(layer, rows, zeros)
                first = first or found
                for name, value in found.items():
                    agree(f"{name}, where {words}", first[name], value, tolerance)
    finally:
        layer.filler, layer.before, layer.extra = saved


def check_layer_padded_equals_packed(
    padded: PaddedLayer, packed: Layer, rows: Rows, *, tolerance: float = 1e-6
) -> float:
    """The padded form of a layer has the outputs of its packed form at real rows."""
    first, second = evaluated(packed, rows), evaluated(padded, rows)
    return agree_at(rows, first, second, tolerance, "from packed to padded")


def check_layer_causality(
    layer: Layer, rows: Rows, *, tolerance: float = 1e-6, factor: float = 50.0
) -> float:
    """Rows of a system that come later leave no trace in the outputs of those before.

    From one third and from two thirds of each system on, features and positions are multiplied by
    `factor` (NaN, if you like): earlier outputs must stay. So must they be where later rows end
    the system, and their gradients by later features must be zero.
    """
    errors = []
    whole = evaluated(layer, rows)
    place = torch.arange(rows.num_rows, device=rows.ptr.device) - rows.ptr[rows.system]
    for share in (1 / 3, 2 / 3):
        cut = (share * rows.sizes).ceil().to(torch.int64)
        early = place < cut[rows.system]
        kept = early.nonzero().squeeze(1)
        change = f"when the last {1 - share:.0%} of each system were {factor:g} times as large"
        second = evaluated(layer, _scaled(rows, ~early, factor))[kept]
        errors.append(agree_at(rows, whole[kept], second, tolerance, change, kept))
        start = rows.taken(kept, torch.cat([cut.new_zeros(1), cut.cumsum(0)]))
        change = f"when the last {1 - share:.0%} of each system were left out"
        errors.append(agree_at(rows, whole[kept], evaluated(layer, start), tolerance, change, kept))
        _no_gradient_from_later(layer, rows, early, tolerance)
    return max(errors)


def check_layer_streaming(
    layer: Layer,
    step: Callable[[Rows, Any], tuple[Tensor, Any]],
    rows: Rows,
    *,
    chunk: int = 1,
    tolerance: float = 1e-5,
) -> float:
    """Rows given one after the other, with carried state, have the outputs of the whole.

    Args:
        layer: the whole.
        step: (the next rows of one system, state) → (their outputs, new state); the state is None
            at the start of each system.
        rows: the systems.
        chunk: rows per step.
        tolerance: see :mod:`flt_mol.testing.symmetry`.
    """
    streamed = []
    with evaluating(layer), torch.no_grad():
        whole = outputs(layer, rows)
        for part in rows:
            state: Any = None
            for start in range(0, part.num_rows, chunk):
                stop = min(start + chunk, part.num_rows)
                index = torch.arange(start, stop, device=part.ptr.device)
                ptr = torch.tensor([0, stop - start], dtype=torch.int64, device=part.ptr.device)
                out, state = step(part.taken(index, ptr), state)
                streamed.append(out.reshape(stop - start, -1))
    second = torch.cat(streamed) if streamed else whole
    change = f"from the whole to steps of {chunk} with carried state"
    return agree_at(rows, whole, second, tolerance, change)


def _partner(rows: Rows, times: int) -> Rows:
    """One system `times` as large, along its first lattice vector or its first axis."""
    if rows.cell is not None and bool(rows.cell[0, 0].any()):
        return supercell(rows, (times, 1, 1), everywhere=True)[0]
    source = torch.arange(rows.num_rows, device=rows.ptr.device).repeat(times)
    partner = rows.taken(source, times * rows.ptr)
    if rows.positions is None or not rows.num_rows:
        return partner
    first = rows.positions[:, 0]
    moves = torch.zeros_like(rows.positions).repeat(times, 1)
    step = torch.arange(times, device=first.device).repeat_interleave(rows.num_rows)
    moves[:, 0] = step * (first.max() - first.min() + 3)
    return replace(partner, positions=rows.positions.repeat(times, 1) + moves)


def _values_and_gradients(layer: PaddedLayer, rows: Rows, zeros: bool) -> dict[str, Tensor]:
    """Outputs at real rows, gradients of their squares' sum; padding's outputs are checked."""
    leaves = {"x": rows.x.detach().clone().requires_grad_()}
    if rows.positions is not None:
        leaves["positions"] = rows.positions.detach().clone().requires_grad_()
    with evaluating(layer):
        mask = layer.mask_of(rows)
        out = layer.padded_output(replace(rows, **leaves))
        real, padding = out[mask], out[~mask]
        if zeros and not bool((padding == 0).all()):
            raise AssertionError(
                f"outputs at padding are not zero where it holds {layer.filler:g}: the largest is "
                f"{float(padding.detach().abs().max()):.3g}"
            )
        named = {**leaves, **trainable(layer)}
        gradients = torch.autograd.grad(
            real.square().sum(), list(named.values()), allow_unused=True
        )
    found = {"outputs": real.detach()}
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            found[f"the gradient of {name}"] = gradient
    return found


def _scaled(rows: Rows, chosen: Tensor, factor: float) -> Rows:
    x = torch.where(chosen[:, None], factor * rows.x, rows.x)
    if rows.positions is None:
        return replace(rows, x=x)
    positions = torch.where(chosen[:, None], factor * rows.positions, rows.positions)
    return replace(rows, x=x, positions=positions)


def _no_gradient_from_later(layer: Layer, rows: Rows, early: Tensor, tolerance: float) -> None:
    x = rows.x.detach().clone().requires_grad_()
    with evaluating(layer):
        out = outputs(layer, replace(rows, x=x))
        (gradient,) = torch.autograd.grad(out[early].square().sum(), x)
    later = (~early).nonzero().squeeze(1)
    leak = torch.where(early[:, None], 0, gradient)
    if not float(leak.abs().max()) <= tolerance * float(gradient.abs().max()):
        where = int(leak.nan_to_num(nan=float("inf")).abs().max(dim=1).values.argmax())
        system = int(rows.system[where])
        raise AssertionError(
            f"earlier outputs have a gradient of {float(leak[where].abs().max()):.3g} by the "
            f"features of row {where - int(rows.ptr[system])} of system {system}, one of "
            f"{len(later)} later rows; the largest by an earlier one is "
            f"{float(gradient[early].abs().max()):.3g}"
        )
