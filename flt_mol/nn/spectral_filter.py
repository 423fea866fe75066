"""The spectral filter: an unnormalised sum over atoms whose spectrum is learned directly."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.mesh import Mesh, make_mesh, mesh_filter, mesh_modes, mode_integers
from flt_mol.functional.neighbors import pair_lengths
from flt_mol.functional.reciprocal import (
    ReciprocalVectors,
    following,
    fractional_positions,
    reciprocal_vectors,
)
from flt_mol.functional.spectral import spectral_sums, spectral_tables
from flt_mol.nn.layers import draw_normal, drawn_linear, placed, seeded_generator
from flt_mol.nn.local_filter import check_features
from flt_mol.nn.radial import check_sizes

# Of a system's atoms and plane waves; beyond, a mesh is faster and takes less memory.
MAX_PRODUCTS = 5e6
_DENSITY = 0.05  # atoms/Å³, about that of a metal; sets the initial scale only


class SpectralMesh(NamedTuple):
    """A large system, rows `start` to `stop` of the batch, on a mesh; spectra (modes, T)."""

    start: int
    stop: int
    spectra: Tensor
    mesh: Mesh


class SpectralGeometry(NamedTuple):
    """Geometry of a batch for filters of one radial basis: computed once, shared by layers.

    Attributes:
        spectra: (K, T), weights times radial functions of the reciprocal vectors.
        table: kernels or plane waves, of `functional.spectral.spectral_tables`.
        ptr: (B + 1,), first atom of each system.
        key_ptr: (B + 1,), first vector of each system.
        meshes: of systems without vectors.
        settings: as of the layer.
        below: systems of up to so many atoms go by kernels.
    """

    spectra: Tensor
    table: Tensor
    ptr: Tensor
    key_ptr: Tensor
    meshes: tuple[SpectralMesh, ...]
    settings: tuple[float, float, int, float]
    below: int


class SpectralFilter(nn.Module):
    r"""out_i = W_o [Σ_j F_h(r_i − r_j) (W_v x_j)_h]_h, with the spectrum of F_h learned.

    F_h(r) = (1/V) Σ_{\|k\| ≤ k_max} g_h(\|k\|) cos 2πk·r over the reciprocal lattice of the
    system's own cell, so F_h is a sum over all periodic images of one function f_h of distance. Its
    spectrum g_h = Σ_n a_hn h_n G_n is a sum of the T functions `radial_basis`, of width
    s = 1/(2πσ_max) in k. In space that makes shells, of either sign.

    Invariant, to rounding, to translation, permutation, lattice shifts of atoms, the cell's basis
    and the rotation of periodic systems, and the same in supercells. Open directions and vacuum are
    periodic behind `padding`: 4σ_max makes errors of 5e-4 of the root mean square output (1e-3 for
    a few atoms), also under rotation of spheres and cubes.

    Args:
        embed_dim: C.
        num_heads: H, filters; ``num_heads=embed_dim`` is one per channel.
        k_max: cutoff, cycles/Å; detail finer than about 1/(2 k_max) is left to local terms.
        sigma_max: Å, the width f_h may have: beyond 4σ_max each of the T functions is at most 6e-4
            of its f(0).
        num_basis: T. Functions closer than s in k add little.
        padding: Å of vacuum kept in open directions; None is 4 σ_max.
        generator: on CPU, for the initial weights; None takes a seed from torch.

    Raises:
        ValueError: sizes that do not fit together.

    Examples:
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
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_basis=num_basis)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if not (0 < sigma_max < math.inf and 1 / (math.pi * sigma_max) <= k_max < math.inf):
            raise ValueError(f"k_max is {k_max}, expected at least 1/(π·sigma_max), {sigma_max=}")
        self.embed_dim, self.num_heads, self.num_basis = embed_dim, num_heads, num_basis
        self.k_max, self.sigma_max = k_max, sigma_max
        self.padding = 4 * sigma_max if padding is None else padding
        # Measured: kernels pay off up to 0.6 C atoms times the layers that share a geometry; their
        # memory grows with the square, 8 MB a system at 512 atoms.
        self.kernels_below = min(embed_dim, 512)
        # Constants of the settings, not buffers: to_empty and load_state_dict leave them alone.
        self._constants = _basis(k_max, sigma_max, num_basis)
        generator = seeded_generator(generator)
        amplitudes = draw_normal(num_heads, num_basis, generator=generator)
        self.amplitudes = nn.Parameter(placed(amplitudes * num_basis**-0.5))
        self.value = drawn_linear(embed_dim, embed_dim, True, generator)
        self.out = drawn_linear(embed_dim, embed_dim, True, generator)

    @property
    def settings(self) -> tuple[float, float, int, float]:
        """k_max, sigma_max, num_basis and padding: filters that share them share a geometry."""
        return (self.k_max, self.sigma_max, self.num_basis, self.padding)

    def geometry(
        self,
        positions: Tensor,
        cell: Tensor | None,
        pbc: Tensor | None,
        ptr: Tensor,
        lattice: ReciprocalVectors | None = None,
    ) -> SpectralGeometry:
        """Plane waves and kernels of a batch, for all filters with the same basis; differentiable.

        Arguments and errors are those of `reciprocal_vectors`, which gives the `lattice` with the
        layer's own `k_max`, `padding` and `MAX_PRODUCTS`; without, it breaks graphs.
        """
        if lattice is None:
            limits = {"padding": self.padding, "max_products": MAX_PRODUCTS}
            lattice = reciprocal_vectors(cell, pbc, positions, ptr, k_max=self.k_max, **limits)
        dtype = at_least_float32(self.amplitudes).dtype
        below = self.kernels_below
        with without_autocast(positions):
            if positions.requires_grad:
                lattice = following(lattice, positions, ptr)
            fraction = fractional_positions(positions, ptr, lattice)
            spectra = self._radial(pair_lengths(lattice.vectors)) * lattice.weight[:, None]
            spectra = spectra.to(dtype)
            table = spectral_tables(fraction, spectra, lattice.integers, ptr, lattice.ptr, below)
        meshes = tuple(self._mesh(b, positions, ptr, lattice, dtype) for b in lattice.large)
        return SpectralGeometry(spectra, table, ptr, lattice.ptr, meshes, self.settings, below)

    def _mesh(
        self, b: int, positions: Tensor, ptr: Tensor, lattice: ReciprocalVectors, dtype: torch.dtype
    ) -> SpectralMesh:
        start, stop = ptr[b : b + 2].tolist()
        cell = lattice.cell[b].double()
        local = positions[start:stop].double() - lattice.offset[start:stop]
        modes = mesh_modes(cell.detach().norm(dim=1).tolist(), self.k_max)
        integers = mode_integers(modes, cell.device).to(lattice.inverse.dtype)
        magnitude = pair_lengths((integers.flatten(0, 2)[:, None] * lattice.inverse[b]).sum(-1))
        spectra = self._radial(magnitude) / cell.det().abs()
        spectra = spectra.unflatten(0, integers.shape[:-1]).to(dtype)
        mesh = make_mesh(local @ torch.linalg.inv(cell), modes, dtype)
        return SpectralMesh(start, stop, spectra, mesh)

    def forward(self, x: Tensor, geometry: SpectralGeometry) -> Tensor:
        """Filter projected features: x (N, C) → (N, C).

        Raises:
            ValueError: `x` of another width or number of rows, or a geometry of another basis.
        """
        check_features(x, self.embed_dim)
        value = self.value(x)
        summed = self.convolve(value.unflatten(1, (self.num_heads, -1)), geometry)
        out: Tensor = self.out(summed.flatten(1).to(value.dtype))
        return out

    def convolve(self, value: Tensor, geometry: SpectralGeometry) -> Tensor:
        """Σ_j F_h(r_i − r_j) v_jh alone: (N, H, D) → (N, H, D), at least float32."""
        if geometry.settings != self.settings:
            given = f"{geometry.settings}, not {self.settings}"
            raise ValueError(f"geometry for k_max, sigma_max, num_basis, padding = {given}")
        value = at_least_float32(value)
        dtype, where = value.dtype, (geometry.ptr, geometry.key_ptr, geometry.below)
        tensors = (x.to(dtype) for x in (self.amplitudes, geometry.spectra, geometry.table))
        with without_autocast(value):
            amplitudes, spectra, table = tensors
            out = spectral_sums(value, amplitudes, spectra, table, *where)
            for start, stop, spectra, mesh in geometry.meshes:
                spectrum = (spectra.to(dtype) @ amplitudes.T).movedim(-1, 0)
                mesh = mesh._replace(weights=mesh.weights.to(dtype))
                found = mesh_filter(value[start:stop], spectrum, mesh)
                out = torch.cat([out[:start], found, out[stop:]])
            return out

    @torch.no_grad()
    def start_as_coulomb(self) -> None:
        """Amplitudes of about g ∝ 1/(k² + s²), a smeared 1/r that is screened from σ_max on."""
        centers, heights = self._constants
        start = 1 / ((centers**2 + 1 / (2 * math.pi * self.sigma_max) ** 2) * heights)
        self.amplitudes.copy_(start / start.norm())

    def spectrum(self, magnitude: Tensor) -> Tensor:
        r"""g_h(\|k\|): (K,), cycles/Å → (K, H), Å³."""
        return self._radial(magnitude) @ self.amplitudes.T.to(magnitude.dtype)

    def filter(self, displacements: Tensor) -> Tensor:
        """f_h(r) of a single pair in open space: displacements (…, 3), Å → (…, H).

        f(r) = 4π ∫_0^{k_max} g(k) k² sinc(2kr) dk by 256 Gauss-Legendre nodes: for plots, checks.
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


def radial_basis(magnitude: Tensor, centers: Tensor, width: float, k_max: float) -> Tensor:
    r"""G_n(k) = [e^{−(k−κ_n)²/2s²} + e^{−(k+κ_n)²/2s²}]·(1 − k²/k_max²)², 0 from k_max on.

    \|k\| (K,) and κ (T,) → (K, T), all in cycles/Å. Even in k, so that it is smooth in three
    dimensions and its inverse Fourier transform decays about as a Gaussian of σ = 1/(2πs). Value
    and slope are 0 at k_max, so a vector that enters or leaves the sum makes no jump.
    """
    k = magnitude[:, None]
    bumps = torch.exp(-((k - centers) ** 2) / (2 * width**2))
    bumps = bumps + torch.exp(-((k + centers) ** 2) / (2 * width**2))
    return bumps * (1 - (k / k_max) ** 2).clamp(min=0.0) ** 2


def _quadrature(stop: float, num_nodes: int) -> tuple[Tensor, Tensor]:
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
