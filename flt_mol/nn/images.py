"""Masks for exact attention whose keys are periodic images, and what pairs hand to attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.images import log_sum_over_images
from flt_mol.functional.neighbors import NeighborPairs, pair_lengths
from flt_mol.functional.pairs import segment_sum
from flt_mol.nn.layers import applied, drawn_linear, placed, seeded_generator
from flt_mol.nn.radial import (
    SMALLEST_EXPONENT,
    PairTypes,
    check_basis,
    check_sizes,
    log_smooth_cutoff,
    smooth_cutoff,
)


class PairWeights(NamedTuple):
    """A weight (G, H), or its logarithm, per head for pairs of a query i and a key j, (G,) each.

    Every (i, j) is there once at most.
    """

    index_i: Tensor
    index_j: Tensor
    weight: Tensor


class ImageKeys(nn.Module):
    """log w = f(r_i − r_j − T) + log window: the mask for `functional.images.image_attention`.

    The weight of j becomes exp(q_i·k_j) Σ_T exp(f(r_i − r_j − T)) window(‖r_i − r_j − T‖): the same
    in a supercell.

    Args:
        source: a module with a method ``mask``, from displacements (P, 3), Å, to f (P, H), such as
            a `Spectrum` or a `FourierRPE`; it becomes part of this one.
        cutoff: Å, where the window `smooth_cutoff` ends.

    Raises:
        ValueError: a cutoff that is not a positive length.
    """

    def __init__(self, source: nn.Module, cutoff: float = 6.0) -> None:
        super().__init__()
        check_basis(cutoff)
        self.source = source
        self.cutoff = float(cutoff)

    def forward(self, pairs: NeighborPairs, vectors: Tensor) -> PairWeights:
        """Log weights (G, H) of pairs with self pairs, vectors (P, 3), Å, summed over images.

        Raises:
            ValueError: no atom sees itself among the pairs.
        """
        if not torch.compiler.is_compiling() and len(vectors) and not pairs.is_self().any():
            raise ValueError("no self pairs: build pairs with neighbor_pairs(…, self_pairs=True)")
        f: Tensor = self.source.mask(vectors)  # type: ignore[operator]
        return image_weights(f, pairs, pair_lengths(vectors), self.cutoff)


def image_weights(f: Tensor, pairs: NeighborPairs, distances: Tensor, cutoff: float) -> PairWeights:
    """Log Σ_T exp(f) window of each (i, j), for f (P, H) of its images."""
    groups = pairs.groups()
    log_weight = f + log_smooth_cutoff(distances, cutoff)[:, None]
    summed = log_sum_over_images(log_weight, groups.group, len(groups.index_i))
    return PairWeights(groups.index_i, groups.index_j, summed)


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
        generator: on CPU, for all weights; None takes a seed from torch.

    Raises:
        ValueError: a size below 1, a cutoff that is not positive, or fewer than two Gaussians.

    References:
        [1] Shi et al., "Benchmarking Graphormer …", 2022, section 3.
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
        check_basis(cutoff, num_basis)
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
        self, pairs: NeighborPairs, vectors: Tensor, atomic_numbers: Tensor
    ) -> tuple[PairWeights, Tensor | None]:
        """Log weights as of `ImageKeys`, and the density (N, C) of N atoms, None without.

        Args:
            pairs: with self pairs.
            vectors: (P, 3), Å.
            atomic_numbers: (N,).
        """
        distances, rows = pair_lengths(vectors), atomic_numbers.shape[0]
        ends = atomic_numbers[pairs.index_i], atomic_numbers[pairs.index_j]
        with without_autocast(distances):
            features = self.features(distances, *ends)
            keys = image_weights(self.bias(features), pairs, distances, self.cutoff)
            if self.density_out is None:
                return keys, None
            window = smooth_cutoff(distances, self.cutoff).masked_fill(pairs.is_self(), 0.0)
            summed = segment_sum(features * window[:, None], pairs.index_i, rows)
            return keys, applied(self.density_out, summed)

    def features(self, distances: Tensor, receiver: Tensor, sender: Tensor) -> Tensor:
        """G (P, T) of distances (P,), Å, and atomic numbers (P,) of both atoms."""
        r = at_least_float32(distances)
        if self.pair_types is not None:
            r = self.pair_types(r, receiver, sender)
        centre, log_width = (x.to(r.dtype) for x in (self.centre, self.log_width))
        steps = (r[:, None] - centre) * torch.exp(-log_width)
        return (-0.5 * steps.square()).clamp(min=SMALLEST_EXPONENT).exp()

    def bias(self, features: Tensor) -> Tensor:
        """G (P, T), as of `features`, → f (P, H), in its dtype."""
        return applied(self.out, gelu(applied(self.hidden, features)))
