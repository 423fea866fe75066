"""Read-outs: from features of atoms to energies of systems and displacements of atoms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from flt_mol.functional.groups import (
    at_least_float32,
    check_ptr,
    mean_per_system,
    sum_per_system,
    without_autocast,
)
from flt_mol.functional.linear import with_ones
from flt_mol.functional.pairs import filtered_dots, pair_filter, segment_sum
from flt_mol.nn.embedding import NUM_TAGS
from flt_mol.nn.layers import drawn_linear, drawn_weight, placed, seeded_generator
from flt_mol.nn.local_filter import LocalGeometry, check_features
from flt_mol.nn.radial import CHUNK, check_sizes, smooth_cutoff
from flt_mol.nn.spectral_filter import SpectralFilter, SpectralGeometry

READOUTS = ("tags", "sum", "mean")

_CORE = 0.1  # Å, far below any distance between atoms


class EnergyHead(nn.Module):
    """E_b from e(x_i) of its atoms, with e = Linear ∘ GELU ∘ Linear ∘ LayerNorm.

    Readouts:
        - "tags": Σ_i w[tag_i] · e(x_i), w learned, one per tag, (0.1, 0.3, 1) at the start: an
          adsorption energy is mostly the adsorbate's.
        - "sum": Σ_i e(x_i), extensive: twice the system has twice the energy.
        - "mean": the mean of e(x_i), intensive.

    Args:
        embed_dim: C.
        num_outputs: K, quantities per system. Each has its own w.
        readout: "tags", "sum" or "mean".
        norm: whether e begins with the LayerNorm.

    Raises:
        ValueError: an unknown readout, or a size below 1.
    """

    INITIAL_TAG_WEIGHTS = (0.1, 0.3, 1.0)

    def __init__(
        self, embed_dim: int, num_outputs: int = 1, readout: str = "tags", norm: bool = True
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_outputs=num_outputs)
        if readout not in READOUTS:
            raise ValueError(f"readout is '{readout}'; known: {', '.join(READOUTS)}")
        self.readout = readout
        self.num_outputs = num_outputs
        self.atom_energy = nn.Sequential(
            nn.LayerNorm(embed_dim) if norm else nn.Identity(),
            nn.Linear(embed_dim, embed_dim),
            nn.GELU(),
            nn.Linear(embed_dim, num_outputs),
        )
        if readout == "tags":
            start = torch.tensor(self.INITIAL_TAG_WEIGHTS, dtype=torch.float32)
            if num_outputs > 1:
                start = start[:, None].repeat(1, num_outputs)
            self.tag_weight = nn.Parameter(placed(start))

    def forward(self, x: Tensor, tags: Tensor | None, ptr: Tensor) -> Tensor:
        """Features (N, C) to energies (B,), or (B, K) for K > 1; 0 for systems without atoms.

        Args:
            x: (N, C).
            tags: (N,) int64, 0 to 2; looked at by the readout "tags" only.
            ptr: (B + 1,), first atom of each system.

        Raises:
            ValueError: a `ptr` that does not describe N rows, or no tags where they are needed.
            IndexError: other tags, on CPU.
        """
        check_ptr(ptr, x.shape[0])
        with without_autocast(x):
            x = x.to(next(self.atom_energy.parameters()).dtype)
            per_atom = self.atom_energy(x)
            if self.num_outputs == 1:
                per_atom = per_atom.squeeze(-1)
            if self.readout == "tags":
                if tags is None:
                    raise ValueError("readout='tags' needs the tags (N,) of the atoms")
                weight = self.tag_weight.view(NUM_TAGS, -1)
                per_atom = embedding(tags, weight).view(per_atom.shape) * per_atom
        reduce = mean_per_system if self.readout == "mean" else sum_per_system
        return reduce(at_least_float32(per_atom), ptr)


class ChargeHead(nn.Module):
    """E_b = Σ_i Σ_c w_c q_ic Σ_j F_c(r_i − r_j) q_jc: learned charges act at any distance.

    u = Linear ∘ GELU ∘ Linear ∘ LayerNorm of the features. The first half of the charges flows
    between neighbours, q_i = κ Σ_j s(r_ij) (u_j − u_i) with a smooth cutoff s, so that molecules
    further apart are neutral [1]; κ = 5, and w starts at 0. The others are u, with w of both signs.
    F_c is as in `SpectralFilter`: latent Ewald summation [2] with a learned kernel, at first a
    smeared 1/r.

    Args:
        embed_dim: C.
        num_outputs: K, energies per system. Each has its own w.
        charges: Q, charges per atom.
        settings: k_max, sigma_max and num_basis of the geometry.
        cutoff: of s, Å; values above 3.5 are reduced to 3.5.
        generator: on CPU, for all weights; None takes a seed from torch.

    Raises:
        ValueError: a size below 1.

    References:
        [1] Nistor et al., Journal of Chemical Physics 125, 094108 (2006).
        [2] Cheng, npj Computational Materials 11, 80 (2025).
    """

    INITIAL_SCALE, FLOW, INITIAL_KERNEL = 0.3, 5.0, 30.0

    def __init__(
        self,
        embed_dim: int,
        num_outputs: int,
        charges: int,
        settings: tuple[float, float, int],
        cutoff: float = 3.5,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_outputs=num_outputs, charges=charges)
        generator = seeded_generator(generator)
        self.cutoff = min(cutoff, 3.5)
        first = drawn_linear(embed_dim, embed_dim, True, generator)
        last = drawn_linear(embed_dim, charges, False, generator, self.INITIAL_SCALE)
        self.potential = nn.Sequential(nn.LayerNorm(embed_dim), first, nn.GELU(), last)
        k_max, sigma_max, num_basis = settings
        self.filter = SpectralFilter(
            charges,
            charges,
            k_max=k_max,
            sigma_max=sigma_max,
            num_basis=num_basis,
            generator=generator,
        )
        self.filter.start_as_coulomb()
        self.flowing = (charges + 1) // 2
        with torch.no_grad():
            self.filter.amplitudes[: self.flowing] *= self.INITIAL_KERNEL
        del self.filter.value, self.filter.out  # it convolves only
        start = (1.0 - 2.0 * (torch.arange(charges) % 2)) * charges**-0.5
        start[: self.flowing] = 0.0
        self.weight = nn.Parameter(placed(start.repeat(num_outputs, 1)))

    def charges(self, x: Tensor, local: LocalGeometry) -> Tensor:
        """Features (N, C) to charges (N, Q)."""
        u = self.potential(x.to(self.weight.dtype))
        first, others = u.tensor_split([self.flowing], 1)
        s = smooth_cutoff(local.distances, self.cutoff)[:, None].to(u.dtype)
        ends = local.pairs.index_i, local.pairs.index_j
        moved = pair_filter(s, s.new_ones(1, self.flowing + 1), with_ones(first), *ends, len(u))
        return torch.cat([self.FLOW * (moved[:, :-1] - first * moved[:, -1:]), others], 1)

    def forward(
        self, x: Tensor, geometry: SpectralGeometry, local: LocalGeometry, ptr: Tensor
    ) -> Tensor:
        """Features (N, C) to energies (B, K), at least float32."""
        with without_autocast(x):
            q = self.charges(x, local)
            summed = self.filter.convolve(q[:, :, None], geometry).squeeze(-1)
            return sum_per_system((q * summed) @ self.weight.mT, ptr)


class DisplacementHead(nn.Module):
    r"""d_i = Σ_j m_ij r̂_ij with m_ij = Σ_c s_c(x_i) F_c(r_ij) (V x_j)_c, F_c(r) = Σ_t W_tc B_t(r).

    A sum of directions to neighbours, periodic images included, weighted by invariants [1]: it
    turns and mirrors with the system and is the same in a supercell. x goes through a LayerNorm
    first, s = Linear ∘ GELU ∘ Linear, V is linear; below 0.1 Å r̂ fades out as r². Time O(P·T·C'),
    memory O(P·T + N·C).

    Args:
        embed_dim: C.
        num_basis: T, functions in `LocalGeometry.basis`.
        channels: C', terms of m.
        generator: on CPU, for all weights; None takes a seed from torch.

    Raises:
        ValueError: a size below 1.

    References:
        [1] Schütt et al., "Equivariant message passing", ICML 2021, equation 8.
    """

    # A surface atom with forty neighbours then moves by about 0.02 Å before any training.
    INITIAL_SCALE = 0.02

    def __init__(
        self,
        embed_dim: int,
        num_basis: int,
        channels: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_basis=num_basis, channels=channels)
        generator = seeded_generator(generator)
        self.norm = nn.LayerNorm(embed_dim)
        first, last = (
            drawn_linear(embed_dim, width, True, generator) for width in (embed_dim, channels)
        )
        with torch.no_grad():
            last.weight.mul_(self.INITIAL_SCALE)
        self.strength = nn.Sequential(first, nn.GELU(), last)
        self.value = drawn_linear(embed_dim, channels, False, generator)
        self.weight = drawn_weight(num_basis, channels, generator)

    def forward(self, x: Tensor, local: LocalGeometry, fixed: Tensor | None = None) -> Tensor:
        """Features (N, C) to displacements (N, 3), Å, at least float32.

        Args:
            x: (N, C), invariant to rotations.
            local: the pairs of these atoms; self pairs add nothing.
            fixed: (N,) bool, atoms that do not move: exactly 0. None: all are free.

        Raises:
            ValueError: `x` of another shape.
        """
        check_features(x, self.value.in_features)
        i, j = local.pairs.index_i, local.pairs.index_j
        with without_autocast(x):
            h = self.norm(x.to(self.weight.dtype))
            strength, value, parts = self.strength(h), self.value(h), []
            for basis, *ends in zip(*(y.split(CHUNK) for y in (local.basis, i, j)), strict=True):
                along = filtered_dots(strength, value, self.weight, *ends)
                parts.append((basis.to(along.dtype) * along).sum(-1))
            size = torch.cat(parts)
            # r̂ · r² / (r² + δ²), δ = 0.1 Å: 0 with gradient 0 at r = 0, and continuous.
            fading = local.distances / (local.distances.square() + _CORE**2)
            directions = (local.vectors * fading[:, None]).to(size.dtype)
            moved = segment_sum(size[:, None] * directions, i, x.shape[0])
        return moved if fixed is None else moved.masked_fill(fixed[:, None], 0.0)
