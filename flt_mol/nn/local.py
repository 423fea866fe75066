"""What lives on neighbour pairs: pair filter, pair correction, and masks for image keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.functional._common import (
    at_least_float32,
    draw_normal,
    placed,
    seeded_generator,
    without_autocast,
)
from flt_mol.functional.images import log_sum_over_images
from flt_mol.functional.neighbors import NeighborPairs, PairGroups, pair_lengths
from flt_mol.functional.pairs import pair_filter, segment_sum
from flt_mol.nn.radial import RadialBasis, log_smooth_cutoff, smooth_cutoff


class PairWeights(NamedTuple):
    """A weight, or its logarithm, per head for pairs (i, j).

    Attributes:
        index_i: (G,) int64, receiver (query).
        index_j: (G,) int64, sender (key).
        weight: (G, H).
    """

    index_i: Tensor
    index_j: Tensor
    weight: Tensor


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
        generator: on CPU; None takes a seed from torch's global one.

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
        generator = seeded_generator(generator)
        self.basis = RadialBasis(cutoff, num_basis, pair_types, generator)
        self.hidden = None if hidden_dim is None else nn.Linear(num_basis, hidden_dim)
        width = num_basis if hidden_dim is None else hidden_dim
        start = draw_normal(width, channels, generator=generator) * width**-0.5
        self.weight = nn.Parameter(placed(start))
        self.value = nn.Linear(channels, channels, bias=False)
        self.out = nn.Sequential(
            nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, channels)
        )

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
            atomic_numbers: (N,), needed if `pair_types`.
        """
        distances = _lengths(vectors)
        elements = _elements_of(pairs, atomic_numbers)
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

    **Not the same in a supercell**: the global sum counts each atom of the cell once, not each
    of its images, so doubling the cell doubles what the correction is weighed against. Modes that
    are consistent are the pair filter, the spectral filter and exact attention with image keys.

    Args:
        num_heads: H.
        cutoff: Å.
        num_basis: T.
        pair_types: whether distances are transformed per pair of elements (`PairTypes`).
        bound: largest |F|.
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: a bound that is not positive.
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
        if not bound > 0:
            raise ValueError(f"bound is {bound}, expected a positive number")
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
            atomic_numbers: (N,), needed if `pair_types`.
        """
        distances = _lengths(vectors)
        with without_autocast(distances):
            basis = self.basis(distances, *_elements_of(pairs, atomic_numbers))
            per_pair = basis @ self.weight.to(basis.dtype)
            total = segment_sum(per_pair, groups.group, groups.index_i.shape[0])
            weight = torch.expm1(self.bound * torch.tanh(total / self.bound))
        return PairWeights(groups.index_i, groups.index_j, weight)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"bound={self.bound}"


class ImageKeys(nn.Module):
    """log w = f(r_i − r_j − T) + log window: the mask for `functional.images.image_attention`.

    The weight of j becomes exp(q_i·k_j) Σ_T exp(f(r_i − r_j − T)) window(‖r_i − r_j − T‖), a
    multiplicative lattice sum: the same in a supercell.

    Args:
        mask: f, any callable from displacements (P, 3), Å, to (P, H): `FourierRPE.mask`, say, or
            the method of a spectrum. If it is a module its parameters are this one's too.
        cutoff: Å, where the window `smooth_cutoff` ends.
    """

    def __init__(self, mask: Callable[[Tensor], Tensor], cutoff: float = 6.0) -> None:
        super().__init__()
        if not cutoff > 0:
            raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")
        self.mask = mask
        self.cutoff = float(cutoff)

    def forward(
        self, pairs: NeighborPairs, vectors: Tensor, groups: PairGroups | None = None
    ) -> PairWeights:
        """Log weights (P, H) of the pairs or, with `groups`, (G, H) of their sums over images.

        Groups cost less where several attention layers share the mask.

        Args:
            pairs: with self pairs (``neighbor_pairs(..., self_pairs=True)``).
            vectors: (P, 3), Å.
            groups: ``pairs.groups()``, or None.

        Raises:
            ValueError: no atom sees itself among the pairs.
        """
        if not torch.compiler.is_compiling() and len(pairs.index_i) and not pairs.is_self().any():
            raise ValueError(
                "pairs lack the pairs of an atom and itself, so no atom would attend to itself: "
                "build them with neighbor_pairs(..., self_pairs=True)"
            )
        window = log_smooth_cutoff(pair_lengths(vectors), self.cutoff)
        log_weight = self.mask(vectors) + window[:, None]
        if groups is None:
            return PairWeights(pairs.index_i, pairs.index_j, log_weight)
        drawn = log_sum_over_images(log_weight, groups.group, groups.index_i.shape[0])
        return PairWeights(groups.index_i, groups.index_j, drawn)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"cutoff={self.cutoff}"


def _lengths(vectors: Tensor) -> Tensor:
    """Lengths (P,) of vectors (P, 3); lengths are given back."""
    return at_least_float32(vectors) if vectors.dim() == 1 else pair_lengths(vectors)


def _elements_of(
    pairs: NeighborPairs, atomic_numbers: Tensor | None
) -> tuple[Tensor, Tensor] | tuple[()]:
    """Atomic numbers of receivers and senders, where they are known."""
    if atomic_numbers is None:
        return ()
    return atomic_numbers[pairs.index_i], atomic_numbers[pairs.index_j]
