"""How a layer's or a model's own signature is fitted to `Rows`, and how outputs are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.structures import Structures
from helpers.invariances.rows import Rows

Layer = Callable[[Any], Any]
"""Rows → (N, C'), or a model: Structures → energies (B,). Checks of parameters need a module."""


class PackedLayer(nn.Module):
    """A module or function on packed rows as a layer under test.

    Args:
        module: what is checked.
        call: (module, rows) → (N, C'); the default is
            ``module(rows.x, rows.positions, ptr=rows.ptr)``.
    """

    def __init__(
        self, module: Callable[..., Any], call: Callable[[Any, Rows], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.call = call or (lambda module, rows: module(rows.x, rows.positions, ptr=rows.ptr))

    def forward(self, rows: Rows) -> Tensor:
        """Rows to (N, C')."""
        return self.call(self.module, rows)


class EnergyLayer(nn.Module):
    """A model of energies as a layer: each row's output is its system's energy, eV."""

    def __init__(self, model: Callable[[Structures], Mapping[str, Tensor] | Tensor]) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Rows) -> Tensor:
        """Rows of atoms to (N, 1); energies of systems without atoms are checked, too."""
        return self.energies(rows.structures)[rows.system, None]

    def energies(self, structures: Structures) -> Tensor:
        """(B,), eV, checked to be so and finite."""
        output = self.model(structures)
        energy: Tensor = output["energy"] if isinstance(output, Mapping) else output
        if tuple(energy.shape) != (len(structures),) or not bool(energy.isfinite().all()):
            found = f"shape {tuple(energy.shape)} and values {energy.tolist()}"
            raise AssertionError(f"energies of {structures.natoms.tolist()} atoms have {found}")
        return energy


def fitted(layer: Layer, rows: Any) -> tuple[Layer, Rows]:
    """A layer and rows, of a layer and rows or of a model and Structures."""
    if isinstance(rows, Structures):
        return EnergyLayer(layer), Rows.of(rows)
    return layer, rows


@contextmanager
def evaluating(layer: Any) -> Iterator[None]:
    """A module in eval mode; afterwards each of its submodules has its own flag back."""
    flags = {x: x.training for x in layer.modules()} if isinstance(layer, nn.Module) else {}
    try:
        for part in flags:
            part.training = False
        yield
    finally:
        for part, flag in flags.items():
            part.training = flag


def outputs(layer: Layer, rows: Rows) -> Tensor:
    """(N, C'), checked to be so."""
    out: Tensor = layer(rows)
    if out.dim() != 2 or out.shape[0] != rows.num_rows:
        raise AssertionError(f"outputs have shape {tuple(out.shape)} for {rows.num_rows} rows")
    return out


def evaluated(layer: Layer, rows: Rows) -> Tensor:
    """(N, C') in eval mode without gradients."""
    with evaluating(layer), torch.no_grad():
        return outputs(layer, rows)


def agree(
    name: str, first: Tensor, second: Tensor, tolerance: float, *, least: float = 0.0
) -> float:
    """max|second − first| / max(max|first|, least), in float64; NaN and infinity agree with none.

    AssertionError, naming the worst entry, where shapes differ or it is beyond `tolerance`.
    """
    if first.shape != second.shape:
        raise AssertionError(f"{name}: shape {tuple(first.shape)} → {tuple(second.shape)}")
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    if first.numel() == 0:
        return 0.0
    size = (second - first).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    place = tuple(int(i) for i in torch.unravel_index(size.argmax(), first.shape))
    worst, old, new = (float(x[place]) for x in (size, first, second))
    scale = max(float(first.abs().max()), least)
    error = 0.0 if worst == 0 else (worst / scale if scale > 0 else math.inf)
    if not error <= tolerance:
        entry = f"entry {place}: {old:.9g} → {new:.9g}, the largest is {scale:.3g}"
        raise AssertionError(f"{name}: relative error {error:.3g} > {tolerance:g}; {entry}")
    return error


def same(layer: Layer, first: Tensor, second: Tensor, tolerance: float, change: str) -> float:
    """The error of a layer's outputs after a change against those before."""
    what, least = ("energies", 1.0) if isinstance(layer, EnergyLayer) else ("outputs", 0.0)
    return agree(f"{what} changed {change}", first, second, tolerance, least=least)
