"""Spectral and local filters where no gradient is asked for: rows in chunks, added in place.

The same numbers as the layers give, to rounding. Of all rows there are only waves, the values that
neighbours read, and the sum that is added to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional import _pair_ops, _rows
from flt_mol.functional import forward_only as rows_only
from flt_mol.functional.forward_only import pieces
from flt_mol.functional.ragged import matrices, systems_of
from flt_mol.nn._pair_checks import check_atoms
from flt_mol.nn._plain import is_plain, is_stack
from flt_mol.nn.local_filter import LocalFilter, LocalGeometry
from flt_mol.nn.spectral import SpectralFilter, SpectralGeometry

__all__ = ["add_local", "add_spectral", "can_local", "can_spectral"]


def can_spectral(layer: SpectralFilter, h: Tensor, geometry: SpectralGeometry) -> bool:
    """Whether all systems go by structure factors, and are long; else the layer is to be called.

    What does not fit is left to the layer, too, which says so.
    """
    if not all(map(is_plain, (layer, layer.value, layer.out), (SpectralFilter, *[nn.Linear] * 2))):
        return False
    if h.dim() != 2 or not _fits(h, layer.embed_dim, layer.value.weight, geometry.waves):
        return False
    if len(h) != int(geometry.ptr[-1]) or not torch.equal(geometry.settings, layer._settings()):
        return False
    if not rows_only.worthwhile(geometry.ptr, len(h), layer.embed_dim):
        return False
    covered = sum(rows.stop - rows.start for rows, _, _ in systems_of(geometry.wave_layout))
    return bool(covered == len(h))


def add_spectral(out: Tensor, layer: SpectralFilter, h: Tensor, geometry: SpectralGeometry) -> None:
    """Add layer(h, geometry) to `out` in place, with W_o multiplied to the structure factors.

    Args:
        out: (N, C), no view of `h`.
        layer: C.
        h: (N, C).
        geometry: for which `can_spectral` is true.
    """
    spectrum = (geometry.spectra @ layer.amplitudes.T).repeat_interleave(2, dim=0)
    for rows, columns, piece in systems_of(geometry.wave_layout):
        waves = matrices(geometry.waves, rows, columns, piece)[0]
        own, target = h[rows], out[rows]
        parts = pieces(slice(0, len(own)), rows_only.CHUNK)
        # With the few channels as rows, products of long sums run twice as fast.
        factors = own.new_zeros(layer.embed_dim, waves.shape[1])
        for part in parts:
            factors.addmm_(layer.value(own[part]).T, waves[part])
        by_head = factors.T.reshape(-1, layer.num_heads, layer.embed_dim // layer.num_heads)
        weighted = (by_head * spectrum[columns][:, :, None]).flatten(1) @ layer.out.weight.T
        for part in parts:
            some = target[part]
            if layer.out.bias is not None:
                some.add_(layer.out.bias)
            some.addmm_(waves[part], weighted)


def can_local(layer: LocalFilter, x: Tensor, local: LocalGeometry) -> bool:
    """Whether there are many rows, radial sums alone, and pairs sorted by receiver.

    Raises:
        ValueError: pairs that name other atoms, as the layer itself.
    """
    known = is_plain(layer, LocalFilter) and is_plain(layer.value, nn.Linear)
    if not known or layer.vectors or not is_stack(layer.out, nn.Linear, nn.SiLU, nn.Linear):
        return False
    if x.dim() != 2 or not _fits(x, layer.channels, layer.value.weight, local.basis):
        return False
    # Measured: fewer rows gain nothing, or lose 3 % where a piece of a chunk is left over.
    if len(x) < 4 * rows_only.CHUNK or local.basis.shape[1] != len(layer.weight):
        return False
    receiver = local.pairs.index_i
    if not len(receiver) or len(receiver) != len(local.basis):
        return False
    check_atoms(local.pairs, x, layer.channels)
    return bool((receiver[1:] >= receiver[:-1]).all())


def add_local(out: Tensor, layer: LocalFilter, x: Tensor, local: LocalGeometry) -> None:
    """Add layer(x, local) to `out` in place, with radial sums of a chunk of receivers at a time.

    Args:
        out: (N, C), no view of `x`.
        layer: C.
        x: (N, C).
        local: for which `can_local` is true.
    """
    first, _, last = layer.out
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    receiver, sender = local.pairs.index_i, local.pairs.index_j
    value, weight = layer.value(x), layer.RATE * layer.weight
    parts = pieces(slice(0, len(x)), rows_only.CHUNK)
    starts = torch.tensor([part.start for part in parts] + [len(x)])
    ends = torch.searchsorted(receiver, starts).tolist()
    from_sums, from_rows = first.weight.T.split([layer.num_filters, layer.channels])
    for part, start, stop in zip(parts, ends, ends[1:], strict=False):
        rows = x[part]
        summed = _pair_ops.filtered(
            local.basis[start:stop],
            weight,
            value,
            receiver[start:stop] - part.start,
            sender[start:stop],
            len(rows),
        )
        inner = (
            torch.mm(rows, from_rows)
            if first.bias is None
            else torch.addmm(first.bias, rows, from_rows)
        )
        inner = torch.nn.functional.silu(inner.addmm_(summed, from_sums), inplace=True)
        target = out[part]
        if last.bias is not None:
            target.add_(last.bias)
        target.addmm_(inner, last.weight.T)


def _fits(x: Tensor, width: int, *others: Tensor) -> bool:
    """Whether rows have this width, and all one dtype that needs no wider one."""
    known = x.dtype in (torch.float32, torch.float64) and x.shape[1] == width
    return known and _rows.values_only(x, *others) and all(y.dtype == x.dtype for y in others)
