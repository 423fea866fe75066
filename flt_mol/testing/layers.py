"""What layers are checked on, and how a layer's own signature is fitted to it.

A layer under test is one callable of one argument: :class:`Rows` of B systems → (N, C'), a row of
outputs for each of the N rows. Two modules adapt others to that:

- :class:`PackedLayer` calls ``module(x, positions, ptr=ptr)``, or what it is told to call;
- :class:`PaddedLayer` pads, calls ``module(x, positions, mask=mask)`` and takes the padding away,
  so that everything that is checked of packed layers can be checked of padded ones, too.

Example:
    >>> import torch
    >>> from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum
    >>> from flt_mol.testing import PackedLayer, check_layer_permutation, random_rows
    >>> rpe = FourierRPE(GaussianSpectrum(num_heads=2, num_terms=4), GaussianFrequencies(6))
    >>> rows = random_rows(torch.Generator().manual_seed(0), width=8)
    >>> layer = PackedLayer(FLTAttention(8, 2, rpe=rpe))
    >>> check_layer_permutation(layer, rows) < 1e-5  # the error found
    True

    Another signature, here one that would take cells and pbc as well:

    >>> def call(module, rows):
    ...     return module(rows.x, rows.positions, rows.cell, rows.pbc, ptr=rows.ptr)
    >>> def mean(x, positions, cell, pbc, *, ptr):
    ...     return x - x.mean(dim=0)
    >>> PackedLayer(mean, call)(rows).shape
    torch.Size([15, 8])

    A model of energies is a layer whose outputs are each system's energy, once for each row:

    >>> energies = PackedLayer(
    ...     lambda structures: structures.natoms.double(),
    ...     lambda model, rows: model(rows.structures)[rows.system, None],
    ... )
    >>> check_layer_permutation(energies, rows)
    0.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.modes import evaluating
from flt_mol.testing._common import difference
from flt_mol.testing.rows import Rows

Layer = Callable[[Rows], Tensor]
"""What is checked: Rows → (N, C'). Checks that need parameters want an `nn.Module`."""


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
        self.call = call

    def forward(self, rows: Rows) -> Tensor:
        """Rows to (N, C')."""
        if self.call is not None:
            return self.call(self.module, rows)
        out: Tensor = self.module(rows.x, rows.positions, ptr=rows.ptr)
        return out


class PaddedLayer(nn.Module):
    """A module or function on padded rows as a layer under test, which takes packed ones.

    Args:
        module: what is checked.
        call: (module, x (B, L, C), positions (B, L, ℓ) or None, mask (B, L) bool, True = real) →
            (B, L, C'); the default is ``module(x, positions, mask=mask)``.
        filler: what padding of `x` and `positions` holds.
        extra: L less the rows of the largest system.
        before: whether padding comes before the real rows instead of behind them.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        call: Callable[[Any, Tensor, Tensor | None, Tensor], Tensor] | None = None,
        *,
        filler: float = 0.0,
        extra: int = 0,
        before: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.call = call
        self.filler = filler
        self.extra = extra
        self.before = before

    def mask_of(self, rows: Rows) -> Tensor:
        """(B, L) bool, True where a real row lies."""
        sizes = rows.sizes
        length = int(sizes.max()) + self.extra if len(rows) else self.extra
        mask = torch.arange(length, device=sizes.device) < sizes[:, None]
        return mask.flip(1) if self.before else mask

    def padded_output(self, rows: Rows) -> Tensor:
        """(B, L, C'), padding included."""
        mask = self.mask_of(rows)
        x = self._padded(rows.x, mask)
        positions = None if rows.positions is None else self._padded(rows.positions, mask)
        call = _call_with_mask if self.call is None else self.call
        out = call(self.module, x, positions, mask)
        if out.dim() != 3 or out.shape[:2] != mask.shape:
            raise AssertionError(
                f"outputs have shape {tuple(out.shape)} for a mask of {tuple(mask.shape)}"
            )
        return out

    def forward(self, rows: Rows) -> Tensor:
        """Rows to (N, C'), without the padding."""
        return self.padded_output(rows)[self.mask_of(rows)]

    def _padded(self, values: Tensor, mask: Tensor) -> Tensor:
        out = values.new_full((*mask.shape, values.shape[-1]), self.filler)
        out[mask] = values
        return out


def _call_with_mask(module: Any, x: Tensor, positions: Tensor | None, mask: Tensor) -> Tensor:
    out: Tensor = module(x, positions, mask=mask)
    return out


def outputs(layer: Layer, rows: Rows) -> Tensor:
    """(N, C'), checked to be so."""
    out = layer(rows)
    if out.dim() != 2 or out.shape[0] != rows.num_rows:
        raise AssertionError(f"outputs have shape {tuple(out.shape)} for {rows.num_rows} rows")
    return out


def evaluated(layer: Layer, rows: Rows) -> Tensor:
    """(N, C') in eval mode without gradients."""
    with evaluating(layer), torch.no_grad():
        return outputs(layer, rows)


def agree_at(
    rows: Rows,
    first: Tensor,
    second: Tensor,
    tolerance: float,
    change: str,
    places: Tensor | None = None,
) -> float:
    """The largest |second − first| over the largest |first|, for rows that should be the same.

    Args:
        rows: the systems.
        first: (K, C'), outputs before.
        second: (K, C'), outputs after.
        tolerance: the largest error allowed.
        change: what happened between the two, for the message.
        places: (K,) int64, the row of `rows` that each is of; None where K = N.

    Raises:
        AssertionError: naming the row and system that differ most, and the numbers.
    """
    if first.shape != second.shape:
        raise AssertionError(
            f"outputs have shape {tuple(first.shape)}, and {tuple(second.shape)} {change}"
        )
    found = difference(first, second)
    if found.error <= tolerance:  # false for NaN
        return found.error
    where = found.place[0] if places is None else int(places[found.place[0]])
    system = int(rows.system[where])
    raise AssertionError(
        f"outputs changed {change}; most, those of row {where - int(rows.ptr[system])} of system "
        f"{system} ({int(rows.sizes[system])} rows), column {found.place[1]}: {found.words}: "
        f"relative error {found.error:.3g}, tolerance {tolerance:g}"
    )
