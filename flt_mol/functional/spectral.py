"""Sums over atoms with a filter that is known by its spectrum on the reciprocal lattice.

out_i = Σ_j F_h(r_i − r_j) v_jh, F_h(r) = Σ_k w_k g_h(k) cos 2πk·r, w_k the weights of
`reciprocal_vectors`. By **structure factors** Σ_j e^{−2πik·r_j} v_j it takes O(N·K·C) time; by
**kernels**, matrices of T radial functions shared by layers, O(N²·(T·H + C)), faster for small
systems. Systems come in groups of G, padded to L atoms and K vectors with values and spectra of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_BUDGET = {"cpu": 2**17}  # numbers of a group's largest tensor: about a core's cache
_BUDGET_ELSEWHERE = 2**30
_ROWS = 4096  # atoms whose phases are computed together


def padded_groups(
    costs: Sequence[int], members: Iterable[int], device: torch.device
) -> list[list[int]]:
    """Systems of similar cost in groups, each with about a cache of padded numbers, or one system.

    `costs` are the numbers of every system, `members` the systems to group.
    """
    budget = _BUDGET.get(device.type, _BUDGET_ELSEWHERE)
    groups: list[list[int]] = []
    for member in sorted(members, key=costs.__getitem__):
        if groups and (len(groups[-1]) + 1) * costs[member] <= budget:
            groups[-1].append(member)
        else:
            groups.append([member])
    return groups


def padded_rows(ptr: Tensor, systems: Sequence[int], fill: int) -> Tensor:
    """(G, L) int64, the rows of some systems, padded with `fill`."""
    chosen = torch.tensor(systems, device=ptr.device)
    start, size = ptr[chosen], ptr[chosen + 1] - ptr[chosen]
    steps = torch.arange(int(size.max()), device=ptr.device)
    return torch.where(steps < size[:, None], start[:, None] + steps, fill)


def lattice_waves(fraction: Tensor, integers: Tensor) -> Tensor:
    """[cos 2πk·r_i | sin 2πk·r_i] (G, L, 2K) of fractions (G, L, 3) and integers (G, K, 3)."""
    # Not a matmul: TF32 would cost phases three digits.
    k, parts = integers.to(fraction.dtype)[:, None], []
    for some in fraction[:, :, None].split(_ROWS, 1):  # bounds what is kept without gradients
        turns = some[..., 0] * k[..., 0] + some[..., 1] * k[..., 1] + some[..., 2] * k[..., 2]
        phase = 2 * math.pi * turns
        parts.append(torch.cat([phase.cos(), phase.sin()], -1))
    return torch.cat(parts, 1)


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
