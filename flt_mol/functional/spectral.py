"""Sums over atoms with a filter that is known by its spectrum on the reciprocal lattice.

out_i = Σ_j F_h(r_i − r_j) v_jh with F_h(r) = Σ_k w_k g_h(k) cos 2πk·r, w_k the weights of
`reciprocal_vectors`: periodic, unnormalised, of any sign. Two routes to the same numbers:

- **structure factors**: S_k = Σ_j e^{−2πik·r_j} v_j, times w_k g_h(k), read back at every atom.
  O(N·K·C) time, O(N·K + K·C) memory.
- **kernels**: the matrices of T fixed radial functions, once for all layers, O(N²·K·T); then a
  layer mixes them to one per head and multiplies, O(N²·(T·H + C)) time, O(N²·T) memory. Faster
  where systems are small.

Both use the waves [cos 2πk·r_i, sin 2πk·r_i], computed once for all layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flt_mol.functional import _rows
from flt_mol.functional._mixed_kernels import mixed_product
from flt_mol.functional.groups import operator, without_autocast
from flt_mol.functional.ragged import (
    matrices,
    ragged_product,
    ragged_transposed_product,
    systems_of,
)


def radial_basis(magnitude: Tensor, centers: Tensor, width: float, k_max: float) -> Tensor:
    r"""G_n(k) = [e^{−(k−κ_n)²/2s²} + e^{−(k+κ_n)²/2s²}]·(1 − k²/k_max²)², 0 from k_max on.

    Even in k, so that it is smooth in three dimensions and its inverse Fourier transform decays
    about as a Gaussian of σ = 1/(2πs), to 2e-5 at 5σ. It goes to 0 with its slope at k_max, so a
    vector that enters or leaves the sum makes no jump; the curvature that does jump there leaves
    a tail that falls as a power of r, 1e-5 of f(0) at 6σ. What these cuts leave beyond 4σ is below
    3e-4, beyond 5σ below 2e-5 of √(f(0)² + ρ∫f²), the effect of f on an atom and its neighbours at
    a density ρ of 0.05 Å⁻³ (measured for κ_n ≤ k_max − 2s, σ = 2.5 to 4 Å, k_max = 0.45 Å⁻¹).

    Args:
        magnitude: \|k\| (K,), cycles/Å.
        centers: κ (T,), cycles/Å.
        width: s, cycles/Å.
        k_max: cycles/Å.

    Returns:
        (K, T).
    """
    k = magnitude[:, None]
    bumps = torch.exp(-((k - centers) ** 2) / (2 * width**2))
    bumps = bumps + torch.exp(-((k + centers) ** 2) / (2 * width**2))
    return bumps * (1 - (k / k_max) ** 2).clamp(min=0.0) ** 2


def lattice_waves(fraction: Tensor, integers: Tensor, layout: Tensor, size: int) -> Tensor:
    """[cos 2πk·r_i, sin 2πk·r_i] for every atom and vector of the same system.

    Args:
        fraction: (N, 3) of `fractional_positions`.
        integers: (K, 3) int64 of `reciprocal_vectors`.
        layout: (3, B + 1), of matrices n_b × K_b with S entries in all.
        size: S.

    Returns:
        (1, 2S): matrices n_b × 2K_b, a vector's cosine and sine next to each other.
    """
    columns = integers.to(fraction.dtype)
    if _rows.values_only(fraction) and size >= _rows.NUMBERS * (layout.shape[1] - 1):
        return _waves_of_long_systems(fraction, columns, layout, size)
    turns: Tensor = _turns(fraction, columns, layout, size)
    if not turns.requires_grad and not torch.compiler.is_compiling():
        phase, out = turns.mul_(2 * math.pi), turns.new_empty(size, 2)
        torch.cos(phase, out=out[:, 0])
        torch.sin(phase, out=out[:, 1])
        return out.view(1, -1)
    phase = 2 * math.pi * turns
    return torch.stack([phase.cos(), phase.sin()], dim=-1).reshape(1, -1)


def _waves_of_long_systems(fraction: Tensor, integers: Tensor, layout: Tensor, size: int) -> Tensor:
    """The same numbers, with phases of a chunk of rows on the way; nothing for autograd."""
    out = fraction.new_empty(size, 2)
    for rows, columns, piece in systems_of(layout):
        f, k = fraction[rows], integers[columns]
        waves, at_once = out[piece].view(len(f), len(k), 2), _rows.rows_of(len(k))
        for some, target in zip(f.split(at_once), waves.split(at_once), strict=True):
            phase = _turns_into(f.new_empty(len(some), len(k)), some, k).mul_(2 * math.pi)
            torch.complex(phase.cos(), phase.sin(), out=torch.view_as_complex(target))
    return out.view(1, -1)


def structure_factor_filter(
    value: Tensor, spectrum: Tensor, waves: Tensor, layout: Tensor
) -> Tensor:
    """out_i = Σ_k γ_kh [cos_ik Σ_j cos_jk v_jh + sin_ik Σ_j sin_jk v_jh].

    Args:
        value: v (N, H, D).
        spectrum: γ_kh = w_k g_h(k), (K, H).
        waves: (1, 2S) of `lattice_waves`.
        layout: (3, B + 1), of matrices n_b × 2K_b: columns and offsets twice those given to
            `lattice_waves`.

    Returns:
        (N, H, D); 0 for systems without matrix. All arguments have one dtype, at least float32.
    """
    rows, heads, width = value.shape
    num_vectors = spectrum.shape[0]
    flat = value.reshape(rows, 1, heads * width)
    factors = ragged_transposed_product(waves, flat, layout, 2 * num_vectors)
    factors = factors.view(num_vectors, 2, heads, width) * spectrum[:, None, :, None]
    factors = factors.view(2 * num_vectors, 1, heads * width)
    return ragged_product(waves, factors, layout, rows).view(rows, heads, width)


def kernel_matrices(waves: Tensor, spectra: Tensor, layout: Tensor, size: int) -> Tensor:
    """F_t(r_i − r_j) = Σ_k γ_kt cos 2πk·(r_i − r_j) for all pairs of atoms of the same system.

    Args:
        waves: (1, 2S) of `lattice_waves`.
        spectra: γ (K, T), weights w_k included.
        layout: (3, B + 1), of matrices n_b × 2K_b in `waves`.
        size: P = Σ n_b² over the systems with a matrix in `waves`.

    Returns:
        (T, P): matrices n_b × n_b.
    """
    twice = spectra.repeat_interleave(2, dim=0)
    out: Tensor = _kernel(waves[0], waves[0], twice, layout, size)
    return out


def kernel_filter(value: Tensor, amplitudes: Tensor, kernels: Tensor, layout: Tensor) -> Tensor:
    """out_ih = Σ_j Σ_t a_ht F_t(r_i − r_j) v_jh.

    Args:
        value: v (N, H, D).
        amplitudes: a (H, T).
        kernels: F (T, P) of `kernel_matrices`.
        layout: (3, B + 1), of matrices n_b × n_b.

    Returns:
        (N, H, D); 0 for systems without matrix. All arguments have one dtype, at least float32.
    """
    with without_autocast(value):
        rows, heads, width = value.shape
        terms = amplitudes.shape[1]
        if width >= 4:  # narrower heads: mixing and reading P·H numbers costs more than it saves
            return mixed_product(amplitudes, kernels, value, layout)
        spread = (value[:, None] * amplitudes.T[:, :, None]).reshape(rows, terms, heads * width)
        return ragged_product(kernels, spread, layout, rows).sum(1).view(rows, heads, width)


@operator("lattice_turns")
def _turns(fraction: Tensor, integers: Tensor, layout: Tensor, size: int) -> Tensor:
    """k·r_i in turns. Not a matmul: TF32 would cost phases three digits."""
    out = fraction.new_empty(size)
    for rows, columns, piece in systems_of(layout):
        _turns_into(matrices(out, rows, columns, piece), fraction[rows], integers[columns])
    return out


def _turns_into(out: Tensor, fraction: Tensor, integers: Tensor) -> Tensor:
    """k·r_i of one system → `out` (n, K)."""
    torch.mul(fraction[:, :1], integers[:, 0], out=out)
    out.addcmul_(fraction[:, 1:2], integers[:, 1])
    return out.addcmul_(fraction[:, 2:], integers[:, 2])


@_turns.register_fake
def _(fraction: Tensor, integers: Tensor, layout: Tensor, size: int) -> Tensor:
    return fraction.new_empty(size)


def _turns_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    fraction, integers, layout, _ = inputs
    ctx.num_rows = fraction.shape[0]
    ctx.save_for_backward(integers, layout)


def _turns_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    integers, layout = ctx.saved_tensors
    to_fraction = ragged_product(grad[None], integers[:, None, :], layout, ctx.num_rows)
    return to_fraction.squeeze(1), None, None, None


_turns.register_autograd(_turns_backward, setup_context=_turns_setup)


# The form Σ_t Σ_ij y_tij Σ_k γ_kt a_ik b_jk is linear in y, γ, a and b. The three operations below
# are its derivatives, and so are theirs.


@operator("spectral_kernel")
def _kernel(a: Tensor, b: Tensor, spectra: Tensor, layout: Tensor, size: int) -> Tensor:
    """(a ∘ γ_t) bᵀ for every system and t: (2S,), (2S,), (2K, T) → (T, P)."""
    out = a.new_empty(spectra.shape[1], size)
    with without_autocast(a):
        for pairs, columns, left, right in _pairs(a, b, layout):
            for weights, matrix in zip(spectra[columns].unbind(1), out[:, pairs], strict=True):
                torch.mm(left * weights, right.mT, out=matrix.view(left.shape[0], -1))
    return out


@_kernel.register_fake
def _(a: Tensor, b: Tensor, spectra: Tensor, layout: Tensor, size: int) -> Tensor:
    return a.new_empty(spectra.shape[1], size)


@operator("spectral_kernel_pull")
def _pull(y: Tensor, b: Tensor, spectra: Tensor, layout: Tensor, transposed: bool) -> Tensor:
    """Σ_t (y_t b) ∘ γ_t, or of y_tᵀ: (T, P), (2S,), (2K, T) → (2S,)."""
    out = torch.zeros_like(b)
    with without_autocast(b):
        for pairs, columns, left, right in _pairs(out, b, layout):
            n = left.shape[0]
            for weights, flat in zip(spectra[columns].unbind(1), y[:, pairs], strict=True):
                matrix = flat.view(n, n)
                left.addcmul_((matrix.mT if transposed else matrix) @ right, weights)
    return out


@_pull.register_fake
def _(y: Tensor, b: Tensor, spectra: Tensor, layout: Tensor, transposed: bool) -> Tensor:
    return torch.empty_like(b)


@operator("spectral_kernel_spectra")
def _spectra(y: Tensor, a: Tensor, b: Tensor, layout: Tensor, num_columns: int) -> Tensor:
    """Σ_ij y_tij a_ik b_jk for every k and t: (T, P), (2S,), (2S,) → (2K, T)."""
    out = a.new_zeros(num_columns, y.shape[0])
    with without_autocast(a):
        for pairs, columns, left, right in _pairs(a, b, layout):
            n = left.shape[0]
            for t, flat in enumerate(y[:, pairs]):
                out[columns, t] = (left * (flat.view(n, n) @ right)).sum(0)
    return out


@_spectra.register_fake
def _(y: Tensor, a: Tensor, b: Tensor, layout: Tensor, num_columns: int) -> Tensor:
    return a.new_empty(num_columns, y.shape[0])


def _pairs(a: Tensor, b: Tensor, layout: Tensor) -> Any:
    """Piece of the pair buffer, columns, and the matrices of `a` and `b`, system by system."""
    start = 0
    for rows, columns, piece in systems_of(layout):
        stop = start + (rows.stop - rows.start) ** 2
        yield (
            slice(start, stop),
            columns,
            matrices(a, rows, columns, piece),
            matrices(b, rows, columns, piece),
        )
        start = stop


def _kernel_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.last = inputs[4]


def _kernel_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, spectra, layout = ctx.saved_tensors
    to_a, to_b, to_spectra = ctx.needs_input_grad[:3]
    return (
        _pull(grad, b, spectra, layout, False) if to_a else None,
        _pull(grad, a, spectra, layout, True) if to_b else None,
        _spectra(grad, a, b, layout, spectra.shape[0]) if to_spectra else None,
        None,
        None,
    )


def _pull_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, b, spectra, layout = ctx.saved_tensors
    left, right = (b, grad) if ctx.last else (grad, b)
    to_y, to_b, to_spectra = ctx.needs_input_grad[:3]
    return (
        _kernel(left, right, spectra, layout, y.shape[-1]) if to_y else None,
        _pull(y, grad, spectra, layout, not ctx.last) if to_b else None,
        _spectra(y, left, right, layout, spectra.shape[0]) if to_spectra else None,
        None,
        None,
    )


def _spectra_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, a, b, layout = ctx.saved_tensors
    to_y, to_a, to_b = ctx.needs_input_grad[:3]
    return (
        _kernel(a, b, grad, layout, y.shape[-1]) if to_y else None,
        _pull(y, b, grad, layout, False) if to_a else None,
        _pull(y, a, grad, layout, True) if to_b else None,
        None,
        None,
    )


_kernel.register_autograd(_kernel_backward, setup_context=_kernel_setup)
_pull.register_autograd(_pull_backward, setup_context=_kernel_setup)
_spectra.register_autograd(_spectra_backward, setup_context=_kernel_setup)
