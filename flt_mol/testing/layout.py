"""Checks of how rows are laid out: batches, padding, order in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flt_mol.testing.layers import (
    EnergyLayer,
    Layer,
    PaddedLayer,
    agree,
    evaluated,
    evaluating,
    fitted,
    outputs,
    same,
    trainable,
)
from flt_mol.testing.rows import Rows, random_rows, seeded


def check_batch_equals_alone(
    layer: Layer, rows: Any, *, tolerance: float = 1e-5, larger: int = 50
) -> float:
    """A system's outputs do not depend on its batch, nor on the order of systems.

    Each alone is compared with all in one batch, and with all in reverse between two partners
    `larger` times the largest of them, whose features are as large, 50 times as large, or NaN.
    """
    layer, rows = fitted(layer, rows)
    parts = list(rows)
    outs = [evaluated(layer, part) for part in parts]
    change = "from a system alone to a batch"
    errors = [same(layer, torch.cat(outs), evaluated(layer, rows), tolerance, change)]
    alone = torch.cat(outs[::-1])
    partner = _partner(max(parts, key=lambda part: part.num_rows), larger)
    for factor in (1.0,) if isinstance(layer, EnergyLayer) else (1.0, 50.0, float("nan")):
        other = replace(partner, x=factor * partner.x)
        beside = evaluated(layer, Rows.cat([other, *parts[::-1], other]))
        kept = beside[partner.num_rows : partner.num_rows + rows.num_rows]
        words = f"{change} with {partner.num_rows} rows, {factor:g} times the size"
        errors.append(same(layer, alone, kept, tolerance, words))
    return max(errors)


def check_empty_and_single_atom(layer: Layer, rows: Any, *, tolerance: float = 1e-5) -> float:
    """Systems of one row and of none are finite, and leave the others' outputs as they are."""
    layer, rows = fitted(layer, rows)
    largest = max(rows, key=lambda part: part.num_rows)
    if rows.cell is not None:
        largest = replace(largest, cell=0 * largest.cell, pbc=largest.pbc & False)
    single, empty = (
        largest.taken(torch.arange(n, device=rows.ptr.device), rows.ptr.new_tensor([0, n]))
        for n in (1, 0)
    )
    if evaluated(layer, empty).numel():
        raise AssertionError("a system without rows has outputs")
    expected = torch.cat([evaluated(layer, rows), evaluated(layer, single)])
    mixed = evaluated(layer, Rows.cat([empty, rows, empty, single, empty]))
    return same(layer, expected, mixed, tolerance, "when small systems joined the batch")


def check_padding(layer: PaddedLayer, rows: Rows, *, tolerance: float = 0.0) -> None:
    """What padding holds, 0, 10⁶ or NaN, does not show in values or gradients, bit for bit.

    With padding behind and before the real rows: outputs of real rows, and the gradients of all
    parameters and of real rows, are the same; outputs at padding are zero. Sizes should differ,
    and an empty system be among them.
    """
    for before in (False, True):
        first: dict[str, Tensor] = {}
        for filler in (0.0, 1e6, float("nan")):
            padded = PaddedLayer(layer.module, layer.call, filler=filler, extra=2, before=before)
            found = _values_and_gradients(padded, rows)
            first = first or found
            for name, value in found.items():
                agree(
                    f"{name} changed where padding holds {filler:g}", first[name], value, tolerance
                )


def check_causality(layer: Layer, rows: Rows, *, tolerance: float = 1e-6) -> float:
    """Rows of a system that come later leave no trace in the outputs of those before.

    From one third and from two thirds of each system on, features and positions are multiplied by
    50, and then removed: earlier outputs must stay, and their gradients by later features be 0.
    """
    errors = []
    whole = evaluated(layer, rows)
    place = torch.arange(rows.num_rows, device=rows.ptr.device) - rows.ptr[rows.system]
    for share in (1 / 3, 2 / 3):
        cut = (share * rows.sizes).ceil().to(torch.int64)
        early = place < cut[rows.system]
        scale = torch.where(early, 1.0, 50.0).to(rows.x)[:, None]
        positions = None if rows.positions is None else scale * rows.positions
        larger = replace(rows, x=scale * rows.x, positions=positions)
        removed = rows.taken(early.nonzero()[:, 0], torch.cat([cut.new_zeros(1), cut.cumsum(0)]))
        for change, after in (
            ("when rows behind were 50 times as large", evaluated(layer, larger)[early]),
            ("when rows behind were removed", evaluated(layer, removed)),
        ):
            errors.append(same(layer, whole[early], after, tolerance, change))
        x = rows.x.detach().clone().requires_grad_()
        with evaluating(layer):
            out = outputs(layer, replace(rows, x=x))
            (gradient,) = torch.autograd.grad(out[early].square().sum(), x)
        expected = torch.where(early[:, None], gradient, 0)
        words = "gradients of outputs by rows behind are not 0"
        errors.append(agree(words, expected, gradient, tolerance))
    return max(errors)


def _partner(part: Rows, times: int) -> Rows:
    """One system of `times` the rows of another, in random places."""
    source = torch.arange(part.num_rows, device=part.ptr.device).repeat(times)
    partner = part.taken(source, times * part.ptr)
    if part.positions is None:
        return partner
    pbc = False if part.pbc is None else part.pbc[0].tolist()
    dim, dtype = part.positions.shape[1], part.positions.dtype
    other = random_rows(seeded(), [len(source)], 0, dim=dim, periodic=pbc, dtype=dtype)
    other = other.to(part.ptr.device)
    cell = None if part.cell is None else other.cell
    return replace(partner, positions=other.positions, cell=cell)


def _values_and_gradients(layer: PaddedLayer, rows: Rows) -> dict[str, Tensor]:
    """Outputs at real rows, gradients of their squares' sum; padding's outputs are checked."""
    leaves = {"x": rows.x.detach().clone().requires_grad_()}
    if rows.positions is not None:
        leaves["positions"] = rows.positions.detach().clone().requires_grad_()
    with evaluating(layer):
        out, mask = layer.padded_output(replace(rows, **leaves))
        if not bool((out[~mask] == 0).all()):
            raise AssertionError(f"outputs at padding of {layer.filler:g} are not zero")
        named = {**leaves, **trainable(layer)}
        total = out[mask].square().sum()
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    changes = zip(named, gradients, strict=True)
    found = {f"the gradient of {name}": g for name, g in changes if g is not None}
    return {"outputs": out[mask].detach(), **found}
