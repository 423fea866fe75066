r"""Attention, pair sums and a block for features in irreps of O(3), in e3nn's terms.

Features (N, irreps.dim) are laid out as e3nn has them: vectors "1o" are (x, y, z), as positions
are. Turn, mirror or invert all positions of a system by R, and outputs turn by
``irreps.D_from_matrix(R)``, as long as **nothing that goes in knows a direction**: attention
without positions, or with image keys or pair corrections, which know distances only. A sampled RPE
knows directions: then equivariance is to translations only.

Needs e3nn (``pip install 'flt_mol[e3nn]'``); nothing else in flt_mol imports it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.numerics import seeded_generator
from flt_mol.integrations._irreps import IrrepsLinear, IrrepsNorm
from flt_mol.integrations._irreps_attention import IrrepsAttention
from flt_mol.integrations._irreps_filter import IrrepsPairFilter
from flt_mol.integrations._irreps_gate import IrrepsFeedForward
from flt_mol.integrations._irreps_layout import cleaned, o3
from flt_mol.nn.images import PairWeights
from flt_mol.nn.local_filter import LocalGeometry

__all__ = [
    "IrrepsAttention",
    "IrrepsBlock",
    "IrrepsFeedForward",
    "IrrepsLinear",
    "IrrepsNorm",
    "IrrepsPairFilter",
]


class IrrepsBlock(nn.Module):
    """x ← x + Attention(Norm(x)) + PairFilter(x); x ← x + FFN(Norm(x)), all equivariant.

    The pair filter takes features as they are, unlike `nn.FLTBlock`'s: normalised ones no longer
    tell how dense an atom's surroundings are. It is also what makes vectors of scalars: features
    may begin with zeros in all channels but 0e.

    Args:
        irreps: e3nn irreps of the features.
        attention: an `IrrepsAttention` of these irreps, or None.
        pair_filter: an `IrrepsPairFilter` of these irreps, or None.
        irreps_hidden: of the feed-forward net's hidden layer; the default is `irreps`.
        generator: on CPU, for the feed-forward net; None takes a seed from torch's global one.

    Raises:
        ValueError: neither attention nor pair filter, or one of other irreps.

    Example:
        >>> irreps = "8x0e + 4x1o"
        >>> block = IrrepsBlock(irreps, IrrepsAttention(irreps, num_heads=2))
        >>> block(torch.randn(5, 20), torch.tensor([0, 2, 5])).shape
        torch.Size([5, 20])
    """

    def __init__(
        self,
        irreps: str | o3.Irreps,
        attention: IrrepsAttention | None = None,
        pair_filter: IrrepsPairFilter | None = None,
        irreps_hidden: str | o3.Irreps | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.irreps = cleaned(irreps)
        if attention is None and pair_filter is None:
            raise ValueError("a block without attention and pair_filter: give at least one")
        if attention is not None:
            self._check("attention", attention.irreps, attention.irreps_out)
        if pair_filter is not None:
            self._check("pair_filter", pair_filter.irreps_in, pair_filter.irreps_out)
        self.attention_norm = None if attention is None else IrrepsNorm(self.irreps)
        self.attention = attention
        self.pair_filter = pair_filter
        self.ffn_norm = IrrepsNorm(self.irreps)
        self.ffn = IrrepsFeedForward(self.irreps, irreps_hidden, seeded_generator(generator))

    def forward(
        self,
        x: Tensor,
        ptr: Tensor,
        position_features: PositionFeatures | None = None,
        *,
        positions: Tensor | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
        local: LocalGeometry | None = None,
    ) -> Tensor:
        """Features (N, irreps.dim) of packed rows to features of the same irreps.

        Args:
            x: (N, irreps.dim).
            ptr: (B + 1,), first row of each system.
            position_features: Φ and Ψ, for attention that shares an RPE.
            positions: (N, ℓ), Å, for attention with an RPE of its own.
            pairs: weights of near pairs, of an `nn.PairCorrection`, for attention.
            images: keys that are periodic images, of an `nn.ImageKeys`, for attention.
            local: of an `nn.LocalBasis`, for the pair filter.

        Raises:
            ValueError: a pair filter without `local`, and what the parts refuse.
        """
        out: Tensor = x
        if self.attention is not None and self.attention_norm is not None:
            out = out + self.attention(
                self.attention_norm(x),
                positions,
                ptr=ptr,
                position_features=position_features,
                pairs=pairs,
                images=images,
            )
        if self.pair_filter is not None:
            if local is None:
                raise ValueError("this block has a pair_filter: pass local, of a LocalBasis")
            out = out + self.pair_filter(x, local)
        hidden: Tensor = self.ffn(self.ffn_norm(out))
        return out + hidden

    def _check(self, name: str, *irreps: o3.Irreps) -> None:
        for found in irreps:
            if found != self.irreps:
                raise ValueError(f"{name} is of irreps {found}, this block of {self.irreps}")
