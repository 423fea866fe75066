"""What is learned on neighbour pairs: the pair filter and the pair correction."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.neighbors import NeighborPairs, PairGroups, pair_lengths
from flt_mol.functional.numerics import draw_normal, placed, seeded_generator
from flt_mol.functional.pairs import pair_filter, segment_sum
from flt_mol.nn._pair_checks import (
    check_atoms,
    check_groups,
    check_numbers,
    check_sizes,
    check_vectors,
)
from flt_mol.nn.image_keys import ImageKeys, PairWeights
from flt_mol.nn.layers import drawn_linear
from flt_mol.nn.local_filter import LocalBasis, LocalFilter, LocalGeometry
from flt_mol.nn.radial import RadialBasis, smooth_cutoff

__all__ = [
    "ImageKeys",
    "LocalBasis",
    "LocalFilter",
    "LocalGeometry",
    "PairCorrection",
    "PairFilter",
    "PairWeights",
]

LARGEST_BOUND = 10.0


class PairFilter(nn.Module):
    """out_i = o(Σ_j F(r_ij) ∘ V x_j), F_c(r) = Σ_t W_tc B_t(r): a learned filter per channel.

    An unnormalised sum over all periodic pairs within the cutoff, the same in a supercell, added
    to what attention gives. V is linear, o is Linear ∘ SiLU ∘ Linear, so that an atom can respond
    to the density around it. Time O(P·T·C), memory O(P·T + N·C).

    Args:
        channels: C.
        cutoff: Å.
        num_basis: T.
        pair_types: whether distances are transformed per pair of elements (`PairTypes`).
        hidden_dim: None for F linear in the basis; else the width of a hidden layer,
            F = w(r) · W SiLU(W₁ B(r) + b₁), as in SchNet [1]; keep it well below C.
        generator: on CPU, for all weights; None takes a seed from torch's global one.

    Raises:
        ValueError: a size below 1, or settings that `RadialBasis` refuses.

    References:
        [1] Schütt et al., "SchNet: A continuous-filter convolutional neural network", NeurIPS 2017.
    """

    def __init__(
        self,
        channels: int,
        cutoff: float = 6.0,
        num_basis: int = 32,
        pair_types: bool = False,
        hidden_dim: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(channels=channels, hidden_dim=hidden_dim)
        generator = seeded_generator(generator)
        self.basis = RadialBasis(cutoff, num_basis, pair_types, generator)
        width = num_basis if hidden_dim is None else hidden_dim
        self.hidden = (
            None if hidden_dim is None else drawn_linear(num_basis, width, True, generator)
        )
        start = draw_normal(width, channels, generator=generator) * width**-0.5
        self.weight = nn.Parameter(placed(start))
        self.value = drawn_linear(channels, channels, False, generator)
        first, last = (drawn_linear(channels, channels, True, generator) for _ in range(2))
        self.out = nn.Sequential(first, nn.SiLU(), last)

    def forward(
        self,
        x: Tensor,
        pairs: NeighborPairs,
        vectors: Tensor,
        atomic_numbers: Tensor | None = None,
    ) -> Tensor:
        """Features (N, C) to features (N, C).

        Args:
            x: (N, C).
            pairs: within the cutoff or beyond it; those beyond have no weight.
            vectors: (P, 3), Å, of the pairs, or their lengths (P,).
            atomic_numbers: (N,), 1 to 118, needed if `pair_types`.

        Raises:
            ValueError: rows, vectors or elements that do not belong to these pairs.
        """
        check_atoms(pairs, x, self.value.in_features)
        distances = _lengths(pairs, vectors)
        elements = _elements_of(pairs, atomic_numbers, x.shape[0])
        with without_autocast(distances):
            basis = self.basis(distances, *elements, windowed=self.hidden is None)
        if self.hidden is not None:
            window = smooth_cutoff(distances, self.basis.cutoff)[:, None]
            basis = nn.functional.silu(self.hidden(basis.to(self.hidden.weight.dtype))) * window
        value = self.value(x)
        summed = pair_filter(basis, self.weight, value, pairs.index_i, pairs.index_j, x.shape[0])
        out: Tensor = self.out(summed.to(value.dtype))
        return out


class PairCorrection(nn.Module):
    """Weights w_ij = exp(F_ij) − 1 that turn linear attention's φ(q_i)·φ(k_j) into φφ·exp(F_ij).

    F_h = bound · tanh(S_h / bound), S_h(i, j) = Σ_T Σ_t W_th B_t(‖r_i − r_j − T‖), the sum over
    the pairs (i, j, T) given. Written φφ·[1 + (exp(F) − 1)], the 1 is the global linear
    sum and the rest lives on pairs: feed the result to `functional.pair_sums` and add that to
    `linear_sums`, numerator and denominator, for any N at cost O(N) and exactly.

    **Images are drawn together in the exponent**, so that every weight stays positive. One term
    exp(f) − 1 per image would not do: in cells smaller than the cutoff 1 + Σ_T (exp f − 1) turns
    negative (−0.99 for two images with f = −5). Where (i, j) has one image it is the same thing.
    The bound acts on the sum, hence weights lie within exp(±bound) however small the cell.

    **What the bound costs**: where most weights are negative, the global sum cancels against the
    pairs, and float32 loses about exp(bound): with all F = −bound, attention of 50 atoms is wrong
    by 8e-5 of its size at the default bound of 5, by 1.5e-3 at 8 and by 1 % at 10, the largest
    that is allowed; from 15 on nothing would be left. F of both signs, and F ≥ 0, do no harm
    (6e-7). Stronger masks are for exact attention.

    **Not the same in a supercell**: the global sum counts each atom of the cell once, not each
    of its images, so doubling the cell doubles what the correction is weighed against. Modes that
    are consistent are the pair filter, the spectral filter and exact attention with image keys.

    Args:
        num_heads: H.
        cutoff: Å.
        num_basis: T.
        pair_types: whether distances are transformed per pair of elements (`PairTypes`).
        bound: largest |F|, up to 10.
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: a bound that is not positive or above 10, no heads, or settings that
            `RadialBasis` refuses.
    """

    def __init__(
        self,
        num_heads: int,
        cutoff: float = 6.0,
        num_basis: int = 32,
        pair_types: bool = False,
        bound: float = 5.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads)
        if not 0 < bound <= LARGEST_BOUND:
            raise ValueError(
                f"bound is {bound}, expected a positive number up to {LARGEST_BOUND:g}: weights of "
                "exp(−bound) are lost in float32 beside the global sum they are taken from; exact "
                "attention takes masks of any size"
            )
        generator = seeded_generator(generator)
        self.bound = float(bound)
        self.basis = RadialBasis(cutoff, num_basis, pair_types, generator)
        start = draw_normal(num_basis, num_heads, generator=generator) * num_basis**-0.5
        self.weight = nn.Parameter(placed(start))

    def forward(
        self,
        pairs: NeighborPairs,
        groups: PairGroups,
        vectors: Tensor,
        atomic_numbers: Tensor | None = None,
    ) -> PairWeights:
        """(G, H) weights exp(F) − 1 of the groups, at least float32.

        Args:
            pairs: within the cutoff or beyond it; those beyond have no weight.
            groups: ``pairs.groups()``.
            vectors: (P, 3), Å, of the pairs, or their lengths (P,).
            atomic_numbers: (N,), 1 to 118, needed if `pair_types`.

        Raises:
            ValueError: groups, vectors or elements that do not belong to these pairs.
        """
        check_groups(pairs, groups)
        distances = _lengths(pairs, vectors)
        with without_autocast(distances):
            basis = self.basis(distances, *_elements_of(pairs, atomic_numbers))
            per_pair = basis @ self.weight.to(basis.dtype)
            total = segment_sum(per_pair, groups.group, groups.index_i.shape[0])
            weight = torch.expm1(self.bound * torch.tanh(total / self.bound))
        return PairWeights(groups.index_i, groups.index_j, weight)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"bound={self.bound}"


def _lengths(pairs: NeighborPairs, vectors: Tensor) -> Tensor:
    """Lengths (P,) of vectors (P, 3); lengths are given back."""
    check_vectors(pairs, vectors)
    return at_least_float32(vectors) if vectors.dim() == 1 else pair_lengths(vectors)


def _elements_of(
    pairs: NeighborPairs, atomic_numbers: Tensor | None, num_rows: int | None = None
) -> tuple[Tensor, Tensor] | tuple[()]:
    """Atomic numbers of receivers and senders, where they are known."""
    if atomic_numbers is None:
        return ()
    check_numbers(pairs, atomic_numbers, num_rows)
    return atomic_numbers[pairs.index_i], atomic_numbers[pairs.index_j]
