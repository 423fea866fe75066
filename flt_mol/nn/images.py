"""Masks for exact attention whose keys are periodic images, and what pairs hand to attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.images import log_sum_over_images
from flt_mol.functional.neighbors import NeighborPairs, PairGroups, pair_lengths
from flt_mol.functional.pairs import segment_sum
from flt_mol.nn.layers import applied, drawn_linear, placed, seeded_generator
from flt_mol.nn.radial import (
    SMALLEST_EXPONENT,
    PairTypes,
    check_sizes,
    log_smooth_cutoff,
    smooth_cutoff,
)

_SMALLEST_WINDOW = 1e-11  # times e⁻⁶⁰ is still a normal number


class PairWeights(NamedTuple):
    """A weight (G, H), or its logarithm, per head for pairs of a query i and a key j, (G,) each.

    `once` tells that every (i, j) is there once at most, which saves time.
    """

    index_i: Tensor
    index_j: Tensor
    weight: Tensor
    once: bool = False


class ImageKeys(nn.Module):
    """log w = f(r_i − r_j − T) + log window: the mask for `functional.images.image_attention`.

    The weight of j becomes exp(q_i·k_j) Σ_T exp(f(r_i − r_j − T)) window(‖r_i − r_j − T‖): the same
    in a supercell.

    Args:
        mask: a module with a method `mask`, such as a `Spectrum` or a `FourierRPE`, which becomes
            part of this one, or a callable from displacements (P, 3), Å, to f (P, H).
        cutoff: Å, where the window `smooth_cutoff` ends.

    Raises:
        ValueError: a cutoff that is not a positive length, or no mask.

    """

    def __init__(self, mask: nn.Module | Callable[[Tensor], Tensor], cutoff: float = 6.0) -> None:
        super().__init__()
        if not 0 < cutoff < math.inf:
            raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")
        if not callable(getattr(mask, "mask", mask)):
            raise ValueError(f"mask is a {type(mask).__name__}: expected a Spectrum or a callable")
        owner = getattr(mask, "__self__", None)
        if isinstance(owner, nn.Module) and mask == getattr(owner, "mask", None):
            mask = owner  # so that its parameters move and train with this module
        self.source = mask
        self.cutoff = float(cutoff)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (P, 3), Å → (P, H)."""
        f: Callable[[Tensor], Tensor] = getattr(self.source, "mask", self.source)
        return f(displacements)

    def forward(
        self, pairs: NeighborPairs, vectors: Tensor, groups: PairGroups | None = None
    ) -> PairWeights:
        """Log weights (P, H) of pairs with self pairs, vectors (P, 3), Å; (G, H) with `groups`.

        ``groups = pairs.groups()`` sums over images here, which costs less where layers share f.

        Raises:
            ValueError: no atom sees itself among the pairs.
        """
        distances = pair_lengths(vectors)
        if not torch.compiler.is_compiling() and len(vectors) and not pairs.is_self().any():
            raise ValueError(
                "pairs have no self pairs: build them with neighbor_pairs(..., self_pairs=True)"
            )
        window = log_smooth_cutoff(distances, self.cutoff)
        log_weight = self.mask(vectors) + window[:, None]
        if groups is None:
            return PairWeights(pairs.index_i, pairs.index_j, log_weight)
        drawn = log_sum_over_images(log_weight, groups.group, len(groups.index_i))
        return PairWeights(groups.index_i, groups.index_j, drawn, once=True)


class GaussianBias(nn.Module):
    """f_h(r) = b_h + Σ_k U_hk GELU(Σ_t W_kt G_t(r) + c_k), G_t(r) = exp(−(a r + b − μ_t)² / 2σ_t²).

    The bias that 3D-Graphormer [1] adds to its attention's logits, without a cutoff. μ, σ, and a, b
    of each ordered pair of elements (`PairTypes`) are learned. `density` is what [1] adds to the
    embedding of atoms, under the smooth cutoff w. Unlike in [1], Gaussians have height 1, and begin
    evenly spaced over [0, cutoff], one spacing wide.

    Args:
        num_heads: H.
        num_basis: T; the hidden layer is as wide.
        cutoff: Å, where the density ends and the last centre begins.
        pair_types: whether a and b are learned per pair of elements; else they are 1 and 0.
        embed_dim: C of the density; None is no density.
        generator: on CPU, for all weights; None takes a seed from torch's global one.

    Raises:
        ValueError: a size below 1, a cutoff that is not positive, or fewer than two Gaussians.

    References:
        [1] Shi et al., "Benchmarking Graphormer on Large-Scale Molecular Modeling Datasets", 2022,
        section 3.

    """

    def __init__(
        self,
        num_heads: int,
        num_basis: int = 128,
        cutoff: float = 6.0,
        pair_types: bool = True,
        embed_dim: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, embed_dim=embed_dim)
        if not 0 < cutoff < math.inf or num_basis < 2:
            raise ValueError(f"need 0 < cutoff < ∞ and num_basis ≥ 2, got {cutoff=}, {num_basis=}")
        generator = seeded_generator(generator)
        self.cutoff = float(cutoff)
        self.pair_types = PairTypes(generator=generator) if pair_types else None
        steps = torch.arange(num_basis, dtype=torch.float32, device="cpu")
        spacing = self.cutoff / (num_basis - 1)
        self.centre = nn.Parameter(placed(steps * spacing))
        # By its logarithm, so that no step of the optimiser makes a width zero or negative.
        self.log_width = nn.Parameter(placed(torch.full_like(steps, math.log(spacing))))
        self.hidden = drawn_linear(num_basis, num_basis, True, generator)
        self.out = drawn_linear(num_basis, num_heads, True, generator)
        self.density_out = (
            None if embed_dim is None else drawn_linear(num_basis, embed_dim, True, generator)
        )

    def forward(
        self, distances: Tensor, receiver: Tensor | None = None, sender: Tensor | None = None
    ) -> Tensor:
        """Distances (P,), Å, and atomic numbers (P,) of both atoms if types are on → f (P, H).

        Raises:
            ValueError: types are on and atomic numbers are missing.
        """
        return self.bias(self.features(distances, receiver, sender))

    def features(
        self, distances: Tensor, receiver: Tensor | None = None, sender: Tensor | None = None
    ) -> Tensor:
        """G (P, T) of the pairs, at least float32; arguments and errors as of `forward`."""
        r = at_least_float32(distances)
        with without_autocast(r):
            if self.pair_types is not None:
                r = self.pair_types(r, receiver, sender)
            centre, log_width = (x.to(r.dtype) for x in (self.centre, self.log_width))
            steps = (r[:, None] - centre) * torch.exp(-log_width)
            return (-0.5 * steps.square()).clamp(min=SMALLEST_EXPONENT).exp()

    def bias(self, features: Tensor) -> Tensor:
        """G (P, T), as of `features`, → f (P, H), in its dtype under autocast too."""
        with without_autocast(features):
            return applied(self.out, gelu(applied(self.hidden, features)))

    def density(
        self, features: Tensor, distances: Tensor, pairs: NeighborPairs, num_rows: int
    ) -> Tensor:
        """P Σ_j w(r_ij) G(r_ij) + p of each of N atoms: `features` (P, T) → (N, C).

        Pairs of an atom and itself, and those beyond the cutoff, do not count.

        Raises:
            ValueError: built without `embed_dim`.
        """
        if self.density_out is None:
            raise ValueError("there is no density: build GaussianBias with embed_dim=C")
        with without_autocast(features):
            window = smooth_cutoff(distances.to(features.dtype), self.cutoff)
            window = window.masked_fill(pairs.is_self() | (window < _SMALLEST_WINDOW), 0.0)
            summed = segment_sum(features * window[:, None], pairs.index_i, num_rows)
            return applied(self.density_out, summed)
