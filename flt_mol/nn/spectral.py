"""The spectral filter: an unnormalised sum over atoms whose spectrum is learned directly."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.lattice import (
    ReciprocalVectors,
    fractional_positions,
    reciprocal_vectors,
)
from flt_mol.functional.numerics import draw_normal, placed, seeded_generator
from flt_mol.functional.ragged import ragged_layout
from flt_mol.functional.spectral import (
    kernel_filter,
    kernel_matrices,
    lattice_waves,
    radial_basis,
    structure_factor_filter,
)
from flt_mol.nn.layers import drawn_linear
from flt_mol.nn.layout import check_rows

_DENSITY = 0.05  # atoms/Å³, about that of a metal; sets the initial scale only


class SpectralGeometry(NamedTuple):
    """What filters of one radial basis need to know of a batch: made once, shared by layers.

    Attributes:
        ptr: (B + 1,) int64, first atom of each system.
        waves: (1, 2S), of the systems that go by structure factors.
        wave_layout: (3, B + 1) int64, of `waves`.
        spectra: (K, T), weights times radial functions, of the vectors of these systems.
        kernels: (T, P), matrices of the radial functions, of the other, smaller systems.
        kernel_layout: (3, B + 1) int64, of `kernels`.
        settings: (3,) float64 on CPU, k_max, sigma_max and number of functions of the basis.
    """

    ptr: Tensor
    waves: Tensor
    wave_layout: Tensor
    spectra: Tensor
    kernels: Tensor
    kernel_layout: Tensor
    settings: Tensor


class SpectralFilter(nn.Module):
    r"""out_i = W_o [Σ_j F_h(r_i − r_j) (W_v x_j)_h]_h, with the spectrum of F_h learned.

    F_h(r) = (1/V) Σ_{\|k\| ≤ k_max} g_h(\|k\|) cos 2πk·r over the reciprocal lattice of the
    system's own cell, so F_h is a sum over all periodic images of one function f_h of distance. Its
    spectrum g_h = Σ_n a_hn h_n G_n is a sum of the T functions `radial_basis`, as wide in k as
    f_h may be in space: s = 1/(2πσ_max). In space that makes shells, of either sign.

    Exactly (to rounding) invariant to translation, permutation, shifts of atoms by lattice vectors,
    the choice of the cell's basis, its handedness; to rotation of periodic systems; and the same
    in supercells. Open directions are made periodic behind `padding`: there, and in shrunk vacuum,
    sums are exact up to what f_h is beyond `padding`: measured, at most 5e-4 of the root mean
    square output at 4σ_max, 3e-4 at 5σ_max (1e-3 for molecules of a few atoms). Molecules whose
    principal axes are distinct still turn exactly, since the virtual cell turns with them; for
    the others, spheres and cubes, rotation changes outputs by these 5e-4.

    **Forces** are the gradient of the energy to rounding in periodic systems. In open directions
    virtual vectors are held constant, so they are off by what f_h is beyond `padding`: up to 1e-3
    of the largest force for small molecules and slabs at the default, less with more padding.

    Args:
        embed_dim: C.
        num_heads: H, filters; ``num_heads=embed_dim`` is one per channel.
        k_max: cutoff, cycles/Å; detail finer than about 1/(2 k_max) is left to local terms.
        sigma_max: Å, the width f_h may have. Each of the T functions is at most 1.5e-2 of its f(0)
            beyond 3σ_max, 6e-4 beyond 4σ_max and 2e-5 beyond 5σ_max, about the Gaussian of σ_max.
            Further out the end at k_max leaves a tail that falls as a power of r: 1e-5 beyond
            6σ_max, 1e-6 beyond 10σ_max (measured, σ_max = 2.5 to 4 Å, k_max = 0.45 to 0.6 Å⁻¹).
        num_basis: T. Functions closer than s in k add little.
        padding: Å of vacuum kept in open directions; None is 4 σ_max.
        shrink_vacuum: whether periodic directions with more vacuum than `padding` count as open.
        max_vectors: budget of reciprocal vectors per system, for very large cells only: it gives up
            supercell consistency, see `reciprocal_vectors`.
        kernels_below: systems of up to so many atoms go by kernel matrices; None chooses by C.
        bias: whether the two linear maps have one.
        init_scale: scale of the initial amplitudes. With 1, values of unit variance give outputs
            of unit size, whether values are independent or alike; 0 starts with no filter at all.
        generator: on CPU, for the initial weights; None takes a seed from torch's global one.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> layer = SpectralFilter(embed_dim=16, num_heads=4)
        >>> positions, ptr = torch.rand(5, 3), torch.tensor([0, 2, 5])
        >>> cell, pbc = 6.0 * torch.eye(3).expand(2, 3, 3), torch.ones(2, 3, dtype=torch.bool)
        >>> geometry = layer.geometry(positions, cell, pbc, ptr)
        >>> layer(torch.randn(5, 16), geometry).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        k_max: float = 0.45,
        sigma_max: float = 3.0,
        num_basis: int = 8,
        padding: float | None = None,
        shrink_vacuum: bool = True,
        max_vectors: int | None = None,
        kernels_below: int | None = None,
        bias: bool = True,
        init_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        _check_basis(k_max, sigma_max, num_basis)
        _check_budgets(padding, max_vectors, kernels_below)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.k_max = k_max
        self.sigma_max = sigma_max
        self.num_basis = num_basis
        self.padding = padding_of(padding, sigma_max)
        self.shrink_vacuum = shrink_vacuum
        self.max_vectors = max_vectors
        self.kernels_below = _crossover(embed_dim) if kernels_below is None else kernels_below
        # Constants of the settings, not buffers: to_empty and load_state_dict leave them alone.
        self._constants = _basis(k_max, sigma_max, num_basis)
        generator = seeded_generator(generator)
        amplitudes = draw_normal(num_heads, num_basis, generator=generator)
        self.amplitudes = nn.Parameter(placed(amplitudes * init_scale * num_basis**-0.5))
        self.value = drawn_linear(embed_dim, embed_dim, bias, generator)
        self.out = drawn_linear(embed_dim, embed_dim, bias, generator)

    def geometry(
        self, positions: Tensor, cell: Tensor | None, pbc: Tensor | None, ptr: Tensor
    ) -> SpectralGeometry:
        """Waves and kernels of a batch, for all filters with the same basis. Differentiable.

        Not for compiled regions: the number of vectors depends on the data. Give `forward`, which
        compiles, the result.

        Args:
            positions: (N, 3), Å.
            cell: (B, 3, 3), Å, rows are lattice vectors, zeros where there is none. None, with
                `pbc` None: molecules.
            pbc: (B, 3) bool.
            ptr: (B + 1,), first atom of each system.

        Raises:
            ValueError: see `reciprocal_vectors`.
        """
        lattice = reciprocal_vectors(
            cell,
            pbc,
            positions,
            ptr,
            k_max=self.k_max,
            padding=self.padding,
            shrink_vacuum=self.shrink_vacuum,
            max_vectors=self.max_vectors,
        )
        ptr = ptr.to(torch.int64)
        fraction = fractional_positions(positions, ptr, lattice)
        spectra = self._radial(_lengths(lattice.vectors)) * lattice.weight[:, None]
        sizes, counts = ptr.diff(), lattice.ptr.diff()
        # Kernels of few vectors would be larger than the waves they are made of.
        small = (sizes <= self.kernels_below) & (sizes <= 2 * counts)
        dtype = at_least_float32(self.amplitudes).dtype
        by_kernels, kernel_spectra, wave_layout = _waves(fraction, lattice, spectra, ptr, small)
        layout = ragged_layout(ptr, ptr, small & (counts > 0))
        kernels = kernel_matrices(
            by_kernels.to(dtype), kernel_spectra.to(dtype), wave_layout, int(layout[2, -1])
        )
        waves, spectra, wave_layout = _waves(fraction, lattice, spectra, ptr, ~small)
        settings = self._settings()
        return SpectralGeometry(
            ptr, waves.to(dtype), wave_layout, spectra.to(dtype), kernels, layout, settings
        )

    def forward(self, x: Tensor, geometry: SpectralGeometry) -> Tensor:
        """Filter projected features: x (N, C) → (N, C).

        Raises:
            ValueError: `x` of another width or number of rows, or a geometry of another basis.
        """
        if x.dim() != 2:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (N, {self.embed_dim})")
        check_rows(x, self.embed_dim, "x", self.value.weight)
        value = self.value(x)
        heads = value.view(x.shape[0], self.num_heads, self.embed_dim // self.num_heads)
        summed = self.convolve(heads, geometry).reshape(value.shape)
        out: Tensor = self.out(summed.to(value.dtype))
        return out

    def convolve(self, value: Tensor, geometry: SpectralGeometry) -> Tensor:
        """Σ_j F_h(r_i − r_j) v_jh alone: (N, H, D) → (N, H, D), at least float32.

        Raises:
            ValueError: as `forward`.
        """
        if not torch.compiler.is_compiling():
            self._check(value, geometry)
        value = at_least_float32(value)
        with without_autocast(value):
            amplitudes = self.amplitudes.to(value.dtype)
            spectrum = geometry.spectra.to(value.dtype) @ amplitudes.T
            waves, kernels = geometry.waves.to(value.dtype), geometry.kernels.to(value.dtype)
            # A route that no system takes is left out, but for graphs, which know no sizes.
            eager = not torch.compiler.is_compiling()
            if eager and not waves.numel():
                return kernel_filter(value, amplitudes, kernels, geometry.kernel_layout)
            far = structure_factor_filter(value, spectrum, waves, geometry.wave_layout)
            if eager and not kernels.numel():
                return far
            return far + kernel_filter(value, amplitudes, kernels, geometry.kernel_layout)

    def spectrum(self, magnitude: Tensor) -> Tensor:
        r"""g_h(\|k\|): (K,), cycles/Å → (K, H), Å³."""
        return self._radial(magnitude) @ self.amplitudes.T.to(magnitude.dtype)

    def filter(self, displacements: Tensor) -> Tensor:
        """f_h(r) of a single pair in open space: displacements (…, 3), Å → (…, H).

        f(r) = 4π ∫_0^{k_max} g(k) k² sinc(2kr) dk, by 256 Gauss-Legendre nodes: exact to rounding
        up to 60/k_max, far beyond where f has decayed. For plots and checks: nodes times pairs
        are held in memory.
        """
        distance = torch.linalg.vector_norm(displacements, dim=-1)
        k, weight = (x.to(distance) for x in _quadrature(self.k_max, 256))
        shells = torch.sinc(2 * distance[..., None] * k) * (4 * math.pi * k**2 * weight)
        return shells @ self.spectrum(k)

    def _radial(self, magnitude: Tensor) -> Tensor:
        """h_n G_n(k): (K,) → (K, T)."""
        centers, heights = (x.to(magnitude) for x in self._constants)
        width = 1 / (2 * math.pi * self.sigma_max)
        return radial_basis(magnitude, centers, width, self.k_max) * heights

    def _settings(self) -> Tensor:
        settings = [self.k_max, self.sigma_max, self.num_basis]
        return torch.tensor(settings, dtype=torch.float64, device="cpu")

    def _check(self, value: Tensor, geometry: SpectralGeometry) -> None:
        rows = int(geometry.ptr[-1])
        width = self.embed_dim // self.num_heads
        if value.dim() != 3 or value.shape[0] != rows or value.shape[1] != self.num_heads:
            raise ValueError(
                f"value has shape {tuple(value.shape)}, expected ({rows}, {self.num_heads}, "
                f"{width}) for a geometry of {rows} atoms"
            )
        if not torch.equal(geometry.settings, self._settings()):
            k_max, sigma_max, num_basis = geometry.settings.tolist()
            raise ValueError(
                f"the geometry was made for k_max={k_max}, sigma_max={sigma_max}, num_basis="
                f"{num_basis:.0f}, this layer has {self.k_max}, {self.sigma_max}, {self.num_basis}"
            )

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, k_max={self.k_max}, "
            f"sigma_max={self.sigma_max}, num_basis={self.num_basis}, padding={self.padding}"
        )


def padding_of(padding: float | None, sigma_max: float) -> float:
    """Å of vacuum kept in open directions: 4 σ_max where nothing else is said."""
    return 4 * sigma_max if padding is None else padding


def _waves(
    fraction: Tensor, lattice: ReciprocalVectors, spectra: Tensor, ptr: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Waves, spectra and their layout of the systems `chosen` (B,) only."""
    counts = lattice.ptr.diff()
    vectors = torch.repeat_interleave(chosen, counts)
    columns = torch.cat([counts.new_zeros(1), (counts * chosen).cumsum(0)])
    layout = ragged_layout(ptr, columns)
    waves = lattice_waves(fraction, lattice.integers[vectors], layout, int(layout[2, -1]))
    return waves, spectra[vectors], torch.cat([layout[:1], 2 * layout[1:]])


def _lengths(vectors: Tensor) -> Tensor:
    """|k|, with a gradient of 0 instead of NaN at k = 0."""
    square = vectors.square().sum(-1)
    zero = square == 0
    return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _quadrature(stop: float, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on [0, stop], float64 on CPU."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return torch.from_numpy((nodes + 1) * stop / 2), torch.from_numpy(weights * stop / 2)


def _basis(k_max: float, sigma_max: float, num_basis: int) -> tuple[Tensor, Tensor]:
    """Centres κ_n (T,), evenly up to k_max − 2s, and heights h_n (T,), float64 on CPU.

    h_n makes the squares of three effects of the n-th function add up to 1: f(0) of an atom on
    itself, √(ρ∫f²) of independent neighbours at density ρ, and ρ·max g of neighbours in step.
    """
    width = 1 / (2 * math.pi * sigma_max)
    centers = torch.linspace(0.0, k_max - 2 * width, num_basis, dtype=torch.float64, device="cpu")
    k, weight = _quadrature(k_max, 512)
    functions = radial_basis(k, centers, width, k_max)
    shells = (4 * math.pi * k**2 * weight)[:, None]
    itself = (shells * functions).sum(0)
    independent = _DENSITY * (shells * functions.square()).sum(0)
    in_step = _DENSITY * functions.amax(0)
    return centers, (itself**2 + independent + in_step**2).rsqrt()


def _check_basis(k_max: float, sigma_max: float, num_basis: int) -> None:
    if num_basis < 1:
        raise ValueError(f"num_basis must be ≥ 1, got {num_basis}")
    if math.isinf(k_max) or math.isinf(sigma_max):
        raise ValueError(f"k_max {k_max} and sigma_max {sigma_max} must be finite")
    if not (sigma_max > 0 and k_max * sigma_max * math.pi >= 1):
        raise ValueError(
            f"k_max {k_max} leaves no room for functions of width 1/(2π·sigma_max): k_max "
            f"must be at least 1/(π·sigma_max), {1 / (math.pi * max(sigma_max, 1e-9)):.3g}"
        )


def _check_budgets(
    padding: float | None, max_vectors: int | None, kernels_below: int | None
) -> None:
    if padding is not None and not 0 < padding < math.inf:
        raise ValueError(f"padding is {padding}, expected a positive length in Å, or None")
    for name, least, number in (
        ("max_vectors", 1, max_vectors),
        ("kernels_below", 0, kernels_below),
    ):
        if number is not None and number < least:
            raise ValueError(f"{name} is {number}, expected a number ≥ {least}, or None")


def _crossover(embed_dim: int) -> int:
    """Atoms up to which kernels pay off.

    Measured, one CPU thread, 8 functions: without forces they do up to 0.6 C times the number of
    layers that share a geometry, with forces up to half of that. Taken for two layers, and
    bounded, since their memory grows with the square: 8 MB a system at 512 atoms.
    """
    return min(embed_dim, 512)
