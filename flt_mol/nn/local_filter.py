"""Layers that act on neighbour pairs: local filters and the pair correction."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.neighbors import NeighborPairs, pair_lengths
from flt_mol.functional.pairs import pair_filter, segment_sum
from flt_mol.nn.images import PairWeights
from flt_mol.nn.layers import applied, drawn_linear, drawn_weight, seeded_generator
from flt_mol.nn.radial import RadialBasis, check_sizes

_GAIN = 3**-0.5  # of linear maps: sums that nothing normalises shall not grow


class LocalGeometry(NamedTuple):
    """Pairs of a batch and their basis for local layers: computed once, shared by all layers.

    Attributes:
        pairs: within the cutoff or beyond it; those beyond have no weight.
        vectors: (P, 3), Å, r_i − r_j − T·cell.
        distances: (P,), Å.
        basis: B (P, T), radial functions under the smooth cutoff.
        vector_basis: B' (P, T'), those of vectors; None without.
    """

    pairs: NeighborPairs
    vectors: Tensor
    distances: Tensor
    basis: Tensor
    vector_basis: Tensor | None = None

    def directions(self) -> Tensor:
        """r̂ (P, 3), and 0 at distance 0, where its gradient would have no bound."""
        zero = self.distances == 0
        inverse = self.distances.masked_fill(zero, 1.0).reciprocal().masked_fill(zero, 0.0)
        return self.vectors * inverse[:, None]


class LocalBasis(nn.Module):
    """Radial functions of all pairs, for sums and for vectors: `LocalGeometry`.

    Args and errors are those of `RadialBasis`, and `vector_basis`, T' Gaussians of the vectors, 0
    for none. Few do: forces are smooth.
    """

    def __init__(
        self,
        cutoff: float = 5.0,
        num_basis: int = 32,
        vector_basis: int = 0,
        pair_types: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        generator = seeded_generator(generator)
        self.cutoff = float(cutoff)
        self.radial = RadialBasis(cutoff, num_basis, pair_types, generator)
        self.vector_radial = RadialBasis(cutoff, vector_basis) if vector_basis else None

    def forward(
        self, pairs: NeighborPairs, vectors: Tensor, atomic_numbers: Tensor | None = None
    ) -> LocalGeometry:
        """Geometry of pairs without self pairs, vectors (P, 3), Å, and elements (N,) of N atoms."""
        vectors = at_least_float32(vectors)
        distances = pair_lengths(vectors)
        with without_autocast(vectors):
            basis = self.radial(distances, *_elements(pairs, atomic_numbers))
            directed = None if self.vector_radial is None else self.vector_radial(distances)
        return LocalGeometry(pairs, vectors, distances, basis, directed)


class LocalFilter(nn.Module):
    r"""out_i = o([m_i, \|V_i\|²/n_i, V_i·(M V_i)/n_i, x_i]): the surroundings of an atom.

    m_ic = Σ_j F_c(r_ij) (U x_j)_c is a filter per channel [1],
    V_ica = Σ_j G_c(r_ij) (W x_j)_c r̂_ij,a a vector per channel; squares and products of mixed
    channels (M is learned) tell angles apart, n = 1 + \|V\|² bounds them. F_c = κ Σ_t W_tc B_t and
    G are linear in the bases of `LocalBasis`, o is Linear ∘ SiLU ∘ Linear; κ = 5 (`RATE`) lets F
    learn faster under Adam. Outputs are invariant to O(3), and the same in a supercell. Time
    O(P·(T·K + 3·T'·D)), memory O(P·(T + 3·T') + N·(C + K)).

    Args:
        channels: C.
        num_basis: T, as of the `LocalBasis`.
        vectors: D, vector channels; 0 for none.
        vector_basis: T', likewise.
        generator: on CPU, for all weights; None takes a seed from torch.
        num_filters: K, channels of the radial sums; None is C.
        vector_dropout: probability that an invariant of vectors is 0 in training.

    Raises:
        ValueError: a size below 1, vectors without a basis, a probability outside [0, 1].

    References:
        [1] Schütt et al., "SchNet", NeurIPS 2017, equation 3.
    """

    INITIAL_SCALE, INITIAL_INVARIANTS, RATE = 0.2, 0.125, 5.0

    def __init__(
        self,
        channels: int,
        num_basis: int = 32,
        vectors: int = 0,
        vector_basis: int = 0,
        generator: torch.Generator | None = None,
        *,
        num_filters: int | None = None,
        vector_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        filters = channels if num_filters is None else num_filters
        check_sizes(channels=channels, num_basis=num_basis, num_filters=filters)
        if vectors < 0 or (vectors and vector_basis < 1):
            raise ValueError(f"{vectors} vector channels need vector_basis ≥ 1, got {vector_basis}")
        generator = seeded_generator(generator)
        self.channels, self.num_filters, self.vectors = channels, filters, vectors
        self.weight = drawn_weight(num_basis, filters, generator, self.INITIAL_SCALE / self.RATE)
        self.value = drawn_linear(channels, filters, False, generator, _GAIN)
        if vectors:
            self.vector_weight = drawn_weight(vector_basis, vectors, generator)
            self.vector_value = drawn_linear(channels, vectors, False, generator)
            self.vector_mix = drawn_linear(vectors, vectors, False, generator)
            self.vector_dropout = nn.Dropout(vector_dropout)
        width = filters + 2 * vectors
        first = drawn_linear(width + channels, channels, True, generator, _GAIN)
        with torch.no_grad():
            first.weight[:, filters:width] *= self.INITIAL_INVARIANTS
        last = drawn_linear(channels, channels, True, generator, _GAIN)
        self.out = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, x: Tensor, local: LocalGeometry) -> Tensor:
        """Features (N, C) to features (N, C).

        Raises:
            ValueError: features of another width, a geometry without vectors.
        """
        check_features(x, self.channels)
        value, pairs = self.value(x), local.pairs
        weight = self.RATE * self.weight
        parts = [pair_filter(local.basis, weight, value, pairs.index_i, pairs.index_j, len(x))]
        if self.vectors:
            parts.append(self.vector_dropout(torch.cat(self.invariants(x, local), -1)))
        out: Tensor = self.out(torch.cat([part.to(value.dtype) for part in (*parts, x)], -1))
        return out

    def invariants(self, x: Tensor, local: LocalGeometry) -> tuple[Tensor, Tensor]:
        r"""\|V_i\|²/n_i and V_i·(M V_i)/n_i, (N, D) each, at least float32."""
        if local.vector_basis is None:
            raise ValueError("this geometry has no vectors: LocalBasis(..., vector_basis=...)")
        value, where = self.vector_value(x), (local.pairs.index_i, local.pairs.index_j, len(x))
        summed = [
            pair_filter(local.vector_basis * a[:, None], self.vector_weight, value, *where)
            for a in local.directions().unbind(1)
        ]
        with without_autocast(value):
            vectors = torch.stack(summed)
            mixed = applied(self.vector_mix, vectors)
            square = vectors.square().sum(0)
            size = 1 + square
            return square / size, (vectors * mixed).sum(0) / size


class PairCorrection(nn.Module):
    """Weights w_ij = exp(F_ij) − 1 that turn linear attention's φ(q_i)·φ(k_j) into φφ·exp(F_ij).

    F_h = 5 tanh(S_h / 5), S_h(i, j) = Σ_T Σ_t W_th B_t(‖r_i − r_j − T‖), the sum over
    the pairs (i, j, T) given. Exact by `functional.pair_sums`, at cost O(N). Where most weights are
    negative, float32 loses about exp(5): attention of 50 atoms with all F = −5 is wrong by 8e-5 of
    its size. **Not the same in a supercell**: the global sum
    counts each atom of the cell once, not each of its images.

    Args:
        num_heads: H.
        cutoff, num_basis, pair_types, generator: as of `RadialBasis`.

    Raises:
        ValueError: as of `RadialBasis`.
    """

    BOUND = 5.0

    def __init__(
        self,
        num_heads: int,
        cutoff: float = 6.0,
        num_basis: int = 32,
        pair_types: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads)
        generator = seeded_generator(generator)
        self.basis = RadialBasis(cutoff, num_basis, pair_types, generator)
        self.weight = drawn_weight(num_basis, num_heads, generator)

    def forward(
        self, pairs: NeighborPairs, vectors: Tensor, atomic_numbers: Tensor | None = None
    ) -> PairWeights:
        """(G, H) weights of the distinct (i, j), at least float32; arguments as of `LocalBasis`."""
        groups, distances = pairs.groups(), pair_lengths(vectors)
        with without_autocast(distances):
            basis = self.basis(distances, *_elements(pairs, atomic_numbers))
            per_pair = basis @ self.weight.to(basis.dtype)
            total = segment_sum(per_pair, groups.group, len(groups.index_i))
            weight = torch.expm1(self.BOUND * torch.tanh(total / self.BOUND))
        return PairWeights(groups.index_i, groups.index_j, weight)


def check_features(x: Tensor, channels: int) -> None:
    """Refuse features that are not packed rows (N, C)."""
    if x.dim() != 2 or x.shape[1] != channels:
        shape = tuple(x.shape)
        raise ValueError(f"x has shape {shape}, expected (N, {channels}); of padded rows: x[mask]")


def _elements(pairs: NeighborPairs, numbers: Tensor | None) -> list[Tensor]:
    return [] if numbers is None else [numbers[pairs.index_i], numbers[pairs.index_j]]
