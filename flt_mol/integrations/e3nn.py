"""Attention, pair sums and a block for features in irreps of O(3), in e3nn's terms.

Features (N, irreps.dim) are laid out as e3nn has them: vectors "1o" are (x, y, z). Turn, mirror or
invert all positions of a system by R, and outputs turn by ``irreps.D_from_matrix(R)``; with a
sampled RPE, which knows directions, equivariance is to translations only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.pairs import segment_sum
from flt_mol.integrations.irreps import (
    IrrepsFeedForward,
    IrrepsLinear,
    IrrepsNorm,
    by_head,
    cleaned,
    invariants,
    joined,
    o3,
)
from flt_mol.nn.attention import Attention, AttentionRows
from flt_mol.nn.images import PairWeights
from flt_mol.nn.layers import applied, drawn_linear, drawn_weight, seeded_generator
from flt_mol.nn.layout import LAYOUT, check_names, check_rows, layout_of
from flt_mol.nn.local_filter import LocalGeometry, check_features
from flt_mol.nn.radial import check_sizes


class IrrepsAttention(Attention):
    r"""Attention among the atoms of each system, y_i = O(⊕_h Σ_j A^h_ij v^h_j), v of any irreps.

    Weights A^h_ij are those of `nn.FLTAttention`, of queries and keys made of invariants of x, so a
    weighted mean of vectors or tensors turns with them. Values v = V x and outputs are linear per
    irrep; each head gets its share of the channels of every irrep, multiplicities of values rounded
    up. What depends on how many atoms there are, or where, is for `IrrepsPairFilter`.

    Args:
        irreps: e3nn irreps of the features, as "32x0e + 8x1o".
        num_heads: H.
        head_dim: D of queries and keys.
        norms: whether queries and keys also know the lengths of all that is not 0e.
        generator: on CPU, for weights and random features; None takes a seed from torch.
        options: rpe, position_dim, feature_map, num_features, orthogonal, mode, exact_below and
            redraw_every, see `nn.FLTAttention`.

    Raises:
        ValueError: irreps without invariants, and what `nn.FLTAttention` refuses.

    Examples:
        >>> attention = IrrepsAttention("8x0e + 3x1o", num_heads=4)
        >>> attention(torch.randn(5, 17), ptr=torch.tensor([0, 2, 5])).shape
        torch.Size([5, 17])
    """

    def __init__(
        self,
        irreps: str | o3.Irreps,
        num_heads: int,
        *,
        head_dim: int = 16,
        norms: bool = False,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, head_dim=head_dim)
        self.irreps = cleaned(irreps)
        self.irreps_value = o3.Irreps(
            [(-(-mul // num_heads) * num_heads, ir) for mul, ir in self.irreps]
        )
        self.head_dim, self.norms = head_dim, norms
        generator = seeded_generator(generator)
        width = self.irreps.num_irreps if norms else self.irreps.count("0e")
        if not width:
            raise ValueError(f"irreps {self.irreps} have no invariants: add 0e channels, or norms")
        self.query = drawn_linear(width, num_heads * head_dim, True, generator)
        self.key = drawn_linear(width, num_heads * head_dim, True, generator)
        self.value = IrrepsLinear(self.irreps, self.irreps_value, generator=generator)
        self.out = IrrepsLinear(self.irreps_value, self.irreps, True, generator)
        self.set_up(num_heads, head_dim, generator=generator, **options)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        position_features: PositionFeatures | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
        **rows_of: Any,
    ) -> Tensor:
        """Attend within each system; arguments and errors are those of `nn.FLTAttention`.

        Features (N, irreps.dim), or padded (B, L, irreps.dim), → the same rows; `rows_of` are ptr,
        system, num_systems and mask.
        """
        check_rows(x, self.irreps.dim, "x")
        check_names(rows_of, LAYOUT)
        layout = layout_of(x, **rows_of)
        layout.refuse_unsorted(pairs, images)
        rows = layout.pack(x)
        scalars = invariants(rows, self.irreps, self.norms)
        shape = -1, self.num_heads, self.head_dim
        query, key = self.query(scalars).view(shape), self.key(scalars).view(shape)
        value = by_head(self.value(rows), self.irreps_value, self.num_heads)
        at = None
        if images is None:
            at = self.features_at(layout, positions, position_features, "mean")
        packed = AttentionRows(query, key, value, layout.ptr, None, at, at, pairs, images)
        out = self.attend(packed).to(value.dtype)
        return layout.unpack(self.out(joined(out, self.irreps_value)))


class IrrepsPairFilter(nn.Module):
    r"""out_i = O(Σ_j Σ_path R_path(r_ij) · (U x_j) ⊗_path Y(r̂_ij)): how directions get in.

    The convolution of tensor field networks [1] in the channelwise form of NequIP [2]: every
    channel of U x_j times spherical harmonics of r_i − r_j, on every path to an irrep of
    `irreps_out`, weighted by functions of the distance, R = W₂ SiLU(W₁ B(r)), one per channel and
    path, 0 from the cutoff on. U and O are linear per irrep. An unnormalised sum over all periodic
    pairs: equivariant to O(3), the same in a supercell, and linear in x. Forces are continuous.

    Memory O(P·W), W the components of all paths' products together. A pair at distance 0 has no
    direction: only l = 0 adds to its sum.

    Args:
        irreps_in: e3nn irreps of the features, as "32x0e".
        irreps_out: of what comes out, if not `irreps_in`, as "32x0e + 16x1o".
        lmax: largest l of the spherical harmonics.
        num_basis: T, as of the `nn.LocalBasis` that makes the geometry.
        hidden_dim: width of the radial net's hidden layer.
        generator: on CPU, for all weights; None takes a seed from torch.

    Raises:
        ValueError: a size below 1, or irreps in `irreps_out` that no product gives.

    References:
        [1] Thomas et al., "Tensor field networks", 2018, equation 3.
        [2] Batzner et al., Nature Communications 13, 2453 (2022).
    """

    def __init__(
        self,
        irreps_in: str | o3.Irreps,
        irreps_out: str | o3.Irreps | None = None,
        lmax: int = 2,
        num_basis: int = 32,
        hidden_dim: int = 32,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_basis=num_basis, hidden_dim=hidden_dim)
        self.irreps_in = cleaned(irreps_in)
        self.irreps_out = self.irreps_in if irreps_out is None else cleaned(irreps_out)
        self.irreps_sh = o3.Irreps.spherical_harmonics(lmax)
        generator = seeded_generator(generator)
        self.product = _products(self.irreps_in, self.irreps_sh, self.irreps_out)
        self.hidden = drawn_linear(num_basis, hidden_dim, False, generator)
        self.weight = drawn_weight(hidden_dim, self.product.weight_numel, generator)
        self.value = IrrepsLinear(self.irreps_in, self.irreps_in, generator=generator)
        self.out = IrrepsLinear(self.product.irreps_out, self.irreps_out, generator=generator)

    def forward(self, x: Tensor, local: LocalGeometry) -> Tensor:
        """Packed features (N, irreps_in.dim), and what an `nn.LocalBasis` gives, to irreps_out."""
        pairs = local.pairs
        check_features(x, self.irreps_in.dim)
        value = self.value(x)
        with without_autocast(value):
            dtype = at_least_float32(value).dtype
            harmonics = o3.spherical_harmonics(
                self.irreps_sh, local.directions(), False, "component"
            ).to(dtype)
            radial = nn.functional.silu(applied(self.hidden, local.basis))
            radial = (radial @ self.weight.to(radial.dtype)).to(dtype)
            message = self.product(value.to(dtype)[pairs.index_j], harmonics, radial)
            summed = segment_sum(message, pairs.index_i, x.shape[0])
        out: Tensor = self.out(summed.to(value.dtype))
        return out


def _products(
    irreps_in: o3.Irreps, irreps_sh: o3.Irreps, irreps_out: o3.Irreps
) -> o3.TensorProduct:
    """Products x ⊗ Y on all paths to `irreps_out`, a weight per pair, channel and path."""
    wanted = {term.ir for term in irreps_out}
    paths = [
        (first, second, ir, term.mul)
        for first, term in enumerate(irreps_in)
        for second, harmonic in enumerate(irreps_sh)
        for ir in term.ir * harmonic.ir
        if ir in wanted
    ]
    if missing := wanted - {ir for _, _, ir, _ in paths}:
        names = ", ".join(map(str, sorted(missing)))
        raise ValueError(f"irreps_out hold {names}: no product of {irreps_in} and {irreps_sh} does")
    sums, place, _ = o3.Irreps([(mul, ir) for _, _, ir, mul in paths]).sort()
    instructions = [
        (first, second, place[k], "uvu", True) for k, (first, second, _, _) in enumerate(paths)
    ]
    weights = {"internal_weights": False, "shared_weights": False}
    return o3.TensorProduct(irreps_in, irreps_sh, sums, instructions, **weights)


class IrrepsBlock(nn.Module):
    """x ← x + Attention(Norm(x)) + PairFilter(x); x ← x + FFN(Norm(x)), all equivariant.

    The pair filter takes features as they are: normalised ones no longer tell how dense an atom's
    surroundings are. It also makes vectors of scalars: features may begin with zeros in all others.

    Args:
        irreps: e3nn irreps of the features.
        attention: an `IrrepsAttention` of these irreps, or None.
        pair_filter: an `IrrepsPairFilter` of these irreps, or None.
        irreps_hidden: of the feed-forward net's hidden layer; the default is `irreps`.
        generator: on CPU, for the feed-forward net; None takes a seed from torch.

    Raises:
        ValueError: neither attention nor pair filter, or one of other irreps.
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
        for part in (attention, pair_filter):
            irreps_of = ("irreps", "irreps_in", "irreps_out")
            if any(getattr(part, name, self.irreps) != self.irreps for name in irreps_of):
                name = type(part).__name__
                raise ValueError(f"{name} is of other irreps than this block of {self.irreps}")
        self.attention_norm = None if attention is None else IrrepsNorm(self.irreps)
        self.attention = attention
        self.pair_filter = pair_filter
        self.ffn_norm = IrrepsNorm(self.irreps)
        self.ffn = IrrepsFeedForward(self.irreps, irreps_hidden, seeded_generator(generator))

    def forward(
        self, x: Tensor, ptr: Tensor, *, local: LocalGeometry | None = None, **given: Any
    ) -> Tensor:
        """Features (N, irreps.dim) of packed rows to features of the same irreps.

        `local`, of an `nn.LocalBasis`, is for a pair filter, which needs it; `given` are further
        arguments of `IrrepsAttention`: positions, position_features, pairs, images.
        """
        out: Tensor = x
        if self.attention is not None and self.attention_norm is not None:
            out = out + self.attention(self.attention_norm(x), ptr=ptr, **given)
        if self.pair_filter is not None:
            if local is None:
                raise ValueError("this block has a pair_filter: pass local, of a LocalBasis")
            out = out + self.pair_filter(x, local)
        hidden: Tensor = self.ffn(self.ffn_norm(out))
        return out + hidden
