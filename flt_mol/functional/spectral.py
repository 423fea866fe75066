"""Sums over atoms with a filter that is known by its spectrum on the reciprocal lattice.

out_i = Σ_j F_h(r_i − r_j) v_jh, F_h(r) = Σ_k w_k g_h(k) cos 2πk·r, w_k the weights of
`reciprocal_vectors`. By **structure factors** Σ_j e^{−2πik·r_j} v_j it takes O(N·K·C) time; by
**kernels**, matrices of T radial functions shared by layers, O(N²·(T·H + C)), faster for small
systems. Both go over groups of G systems, padded to L atoms and K vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from flt_mol.functional.groups import (
    Groups,
    PaddedRows,
    budget_of,
    groups_of,
    row_offsets,
    single_step,
)


def spectral_tables(
    fraction: Tensor, spectra: Tensor, integers: Tensor, ptr: Tensor, key_ptr: Tensor, below: int
) -> Tensor:
    """Kernels or plane waves of all groups, one after the other, for `spectral_sums`.

    Args:
        fraction: (N, 3), of `fractional_positions`.
        spectra: (K, T), weights w_k times radial functions.
        integers: (K, 3) int64, of `ReciprocalVectors`.
        ptr: (B + 1,), first atom of each system.
        key_ptr: (B + 1,), first vector of each system; those without vectors are skipped.
        below: systems of up to so many atoms go by kernels.
    """
    if torch.compiler.is_compiling():
        return _tables_step(fraction, spectra, integers, ptr, key_ptr, below)
    parts = []
    for kernels, groups in _groups(ptr, key_ptr, len(fraction), len(integers), below):
        for rows, keys in zip(groups.rows, groups.keys, strict=True):
            waves = plane_waves(rows.take(fraction), keys.take(integers)).to(spectra.dtype)
            table = kernel_matrices(waves, _real(spectra, keys)) if kernels else waves
            parts.append(table.flatten())
    if not parts:
        return spectra.new_zeros(0)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def spectral_sums(
    value: Tensor,
    amplitudes: Tensor,
    spectra: Tensor,
    table: Tensor,
    ptr: Tensor,
    key_ptr: Tensor,
    below: int,
) -> Tensor:
    """out_ih = Σ_j Σ_t a_ht F_t(r_i − r_j) v_jh: v (N, H, D), a (H, T) → (N, H, D).

    All of one dtype, at least float32; the rest as of `spectral_tables`. Rows of systems without
    vectors are 0.
    """
    if torch.compiler.is_compiling():
        return _sums_step(value, amplitudes, spectra, table, ptr, key_ptr, below)
    total, start = None, 0
    for kernels, groups in _groups(ptr, key_ptr, len(value), len(spectra), below):
        parts = []
        for rows, keys in zip(groups.rows, groups.keys, strict=True):
            functions = (spectra.shape[1], rows.length, rows.length)
            shape = rows.number, *(functions if kernels else (rows.length, 2 * keys.length))
            own = table[start : start + math.prod(shape)].view(shape)
            start += own.numel()
            of_rows = _real(value, rows)
            if kernels:
                out = kernel_filter(of_rows, amplitudes, own)
            else:
                out = structure_factor_filter(of_rows, _real(spectra, keys) @ amplitudes.T, own)
            parts.append(out.flatten(0, 1))
        found = groups.put_back(parts)
        total = found if total is None else total + found
    return torch.zeros_like(value) if total is None else total


def plane_waves(fraction: Tensor, integers: Tensor) -> Tensor:
    """[cos 2πk·r_i | sin 2πk·r_i] (G, L, 2K) of fractions (G, L, 3) and integers (G, K, 3)."""
    # Not a matmul: TF32 would cost phases three digits.
    k, r = integers.to(fraction.dtype)[:, None], fraction[:, :, None]
    turns = r[..., 0] * k[..., 0] + r[..., 1] * k[..., 1] + r[..., 2] * k[..., 2]
    phase = 2 * math.pi * turns
    return torch.cat([phase.cos(), phase.sin()], -1)


def structure_factor_filter(value: Tensor, spectrum: Tensor, waves: Tensor) -> Tensor:
    """out_i = Σ_k γ_kh [cos_ik Σ_j cos_jk v_jh + sin_ik Σ_j sin_jk v_jh].

    v (G, L, H, D) is 0 at padded atoms, γ_kh = w_k g_h(k) (G, K, H) at padded vectors; `waves` are
    (G, L, 2K). All have one dtype, at least float32.
    """
    groups, vectors, heads = spectrum.shape
    factors = (waves.mT @ value.flatten(2)).view(groups, 2, vectors, heads, -1)
    weighted = (factors * spectrum[:, None, :, :, None]).view(groups, 2 * vectors, -1)
    return (waves @ weighted).view(value.shape)


def kernel_matrices(waves: Tensor, spectra: Tensor) -> Tensor:
    """F_t(r_i − r_j) = Σ_k γ_kt cos 2πk·(r_i − r_j): waves (G, L, 2K), γ (G, K, T) → (G, T, L, L).

    γ has the weights w_k in it and is 0 at padded vectors.
    """
    twice = torch.cat([spectra, spectra], 1)
    return torch.stack([(waves * gamma[:, None]) @ waves.mT for gamma in twice.unbind(2)], 1)


def kernel_filter(value: Tensor, amplitudes: Tensor, kernels: Tensor) -> Tensor:
    """out_ih = Σ_j Σ_t a_ht F_t(r_i − r_j) v_jh: v (G, L, H, D), a (H, T), F (G, T, L, L)."""
    mixed = (amplitudes @ kernels.flatten(2)).unflatten(2, kernels.shape[2:])
    out: Tensor = (mixed @ value.transpose(1, 2)).transpose(1, 2)
    return out


def _groups(
    ptr: Tensor, key_ptr: Tensor, rows: int, vectors: int, below: int
) -> Iterator[tuple[bool, Groups]]:
    """Groups of systems that go by kernels (True), and of the others; those that there are."""
    offsets, key_offsets = row_offsets(ptr, rows), row_offsets(key_ptr, vectors, "key_ptr")
    sizes = [b - a for a, b in pairwise(offsets)]
    counts = [b - a for a, b in pairwise(key_offsets)]
    for kernels in (True, False):
        # Kernels of few vectors would be larger than the waves they are made of.
        costs = tuple(
            2 * n * k if (n <= min(below, 2 * k)) == kernels else 0
            for n, k in zip(sizes, counts, strict=True)
        )
        if any(costs):
            where = ptr.device, budget_of(ptr.device)
            yield kernels, groups_of(costs, offsets, key_offsets, rows, *where)


def _real(x: Tensor, block: PaddedRows) -> Tensor:
    """Rows of a block, 0 where they repeat another: (N, …) → (G, L, …)."""
    rows = block.take(x)
    if block.real is None:
        return rows
    return rows * block.real.view(*block.real.shape, *[1] * (x.dim() - 1))


# Graphs cannot loop over groups: there each is one step, whose gradients go over the groups again.
_tables_step = single_step(
    "spectral_tables",
    ("Tensor fraction, Tensor spectra", "Tensor integers, Tensor ptr, Tensor key_ptr, int below"),
    spectral_tables,
    lambda *_: (cast(int, torch.library.get_ctx().new_dynamic_size()),),
)
_sums_step = single_step(
    "spectral_sums",
    (
        "Tensor value, Tensor amplitudes, Tensor spectra, Tensor table",
        "Tensor ptr, Tensor key_ptr, int below",
    ),
    spectral_sums,
    lambda value, *_: value.shape,
)
