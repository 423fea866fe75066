"""Masks for exact attention whose keys are periodic images, and what pairs hand to attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from flt_mol.functional.images import log_sum_over_images
from flt_mol.functional.neighbors import NeighborPairs, PairGroups, pair_lengths
from flt_mol.nn._pair_checks import check_groups, check_vectors
from flt_mol.nn.radial import log_smooth_cutoff


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


class SupportsMask(Protocol):
    """What has a mask f: displacements (…, ℓ), Å → (…, H)."""

    def mask(self, displacements: Tensor, /) -> Tensor:
        """f(x)."""


class ImageKeys(nn.Module):
    """log w = f(r_i − r_j − T) + log window: the mask for `functional.images.image_attention`.

    The weight of j becomes exp(q_i·k_j) Σ_T exp(f(r_i − r_j − T)) window(‖r_i − r_j − T‖), a
    multiplicative lattice sum: the same in a supercell.

    Args:
        mask: what f is taken from. An object with a method `mask`, a `Spectrum` or a `FourierRPE`;
            or any callable from displacements (P, 3), Å, to (P, H). A module, or the module whose
            method is given, is part of this one: its parameters move and train with it. Tensors
            that another callable refers to are not.
        cutoff: Å, where the window `smooth_cutoff` ends.

    Raises:
        ValueError: a cutoff that is not a positive length, or no mask.

    Example:
        >>> from flt_mol.nn.spectrum import GaussianSpectrum
        >>> len(list(ImageKeys(GaussianSpectrum(num_heads=2, num_terms=3)).parameters()))
        2
    """

    def __init__(
        self, mask: SupportsMask | Callable[[Tensor], Tensor], cutoff: float = 6.0
    ) -> None:
        super().__init__()
        if not 0 < cutoff < math.inf:
            raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")
        # By name, not as a bound method, so that copies of this module ask their own mask.
        self.source, self.method = _source_of(mask)
        self.cutoff = float(cutoff)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (P, 3), Å → (P, H)."""
        f = self.source if self.method is None else getattr(self.source, self.method)
        return cast(Callable[[Tensor], Tensor], f)(displacements)

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
            ValueError: no atom sees itself among the pairs, vectors or groups of other pairs, or a
                mask that gives something else than (P, H).
        """
        check_vectors(pairs, vectors, lengths=False)
        if groups is not None:
            check_groups(pairs, groups)
        if not torch.compiler.is_compiling() and len(pairs.index_i) and not pairs.is_self().any():
            raise ValueError(
                "pairs lack the pairs of an atom and itself, so no atom would attend to itself: "
                "build them with neighbor_pairs(..., self_pairs=True)"
            )
        window = log_smooth_cutoff(pair_lengths(vectors), self.cutoff)
        mask = self.mask(vectors)
        if not torch.compiler.is_compiling() and (
            mask.dim() != 2 or mask.shape[0] != vectors.shape[0]
        ):
            raise ValueError(
                f"the mask gives {tuple(mask.shape)} for displacements {tuple(vectors.shape)}, "
                "expected (P, H)"
            )
        log_weight = mask + window[:, None]
        if groups is None:
            return PairWeights(pairs.index_i, pairs.index_j, log_weight)
        drawn = log_sum_over_images(log_weight, groups.group, groups.index_i.shape[0])
        return PairWeights(groups.index_i, groups.index_j, drawn)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"cutoff={self.cutoff}"


def _source_of(mask: object) -> tuple[object, str | None]:
    """Whom to ask for f, and by which method; None to call it."""
    if callable(getattr(mask, "mask", None)):
        return mask, "mask"
    if not callable(mask):
        raise ValueError(
            f"mask is a {type(mask).__name__}: expected an object with a method mask, such as a "
            "Spectrum or a FourierRPE, or a callable from displacements (P, 3) to (P, H)"
        )
    owner, name = getattr(mask, "__self__", None), getattr(mask, "__name__", "")
    if isinstance(owner, nn.Module) and getattr(owner, name, None) == mask:
        return owner, name
    return mask, None
