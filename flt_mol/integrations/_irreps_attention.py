"""Attention with invariant weights whose values are features in irreps."""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.numerics import seeded_generator
from flt_mol.integrations._irreps import IrrepsLinear
from flt_mol.integrations._irreps_layout import (
    by_head,
    cleaned,
    invariants,
    irreps_of_values,
    joined,
    number_of_invariants,
    o3,
    refuse_missing,
    terms_of,
)
from flt_mol.nn.attention import Attention, AttentionRows
from flt_mol.nn.feature_maps import FeatureMap
from flt_mol.nn.images import PairWeights
from flt_mol.nn.layers import drawn_linear
from flt_mol.nn.layout import Layout, check_rows, layout_of
from flt_mol.nn.radial import check_sizes
from flt_mol.nn.rpe import FourierRPE


class IrrepsAttention(Attention):
    r"""Attention among the atoms of each system, y_i = O(⊕_h Σ_j A^h_ij v^h_j), v of any irreps.

    Weights A^h_ij ∝ exp(q_i·k_j/√D + …) are those of `nn.FLTAttention`, in all its modes and with
    all its feature maps: linear in N, and N × N never written out, in mode "linear". Queries and
    keys are made of the invariants of x alone, so a weighted mean of vectors or tensors turns with
    them. Values v = V x and outputs are linear per irrep; each head gets its share of the channels
    of every irrep.

    **Equivariance.** Without positions, and with `images` or `pairs` whose masks know distances
    only: to all of O(3), and to permutations. With an RPE, which samples waves in a few
    directions: to translations only, in the exact mode too (`nn.rpe.rotation_error` says how
    much a rotation can change the mask). All weights are means: what depends on how many atoms
    there are, or where, is for `IrrepsPairFilter`.

    Args:
        irreps: e3nn irreps of the features, as "32x0e + 8x1o".
        num_heads: H.
        head_dim: D of queries and keys.
        irreps_out: of what comes out, if not `irreps`.
        irreps_value: of the values of all heads together, multiplicities being multiples of H. The
            default is `irreps` with every multiplicity rounded up to the next multiple: any
            `irreps` will do.
        norms: whether queries and keys also know the lengths of all that is not 0e.
        feature_map: φ of the linear mode: a name in `nn.FEATURE_MAPS`, or a `FeatureMap` of H, D
            and the width of the position features.
        num_features: M, where `feature_map` is a name; the default is 64.
        rpe: an RPE of this layer's own.
        position_dim: width 2R of the position features that `forward` will be given.
        orthogonal: whether random directions are orthogonal in blocks (the default).
        bias: of queries, keys, and 0e channels of what comes out.
        mode: "linear", "exact" or "auto", as for `nn.FLTAttention`.
        exact_below: number of keys from which "auto" is linear; the default is FLTAttention's.
        redraw_every: training steps after which random features are drawn anew.
        generator: on CPU, for weights and random features; None takes a seed from torch's global
            one.

    Raises:
        ValueError: irreps without invariants, `irreps_value` that H does not divide, irreps that
            would always be 0, and what `nn.FLTAttention` refuses.

    Example:
        >>> attention = IrrepsAttention("8x0e + 3x1o", num_heads=4)
        >>> attention.irreps_value
        8x0e+4x1o
        >>> attention(torch.randn(5, 17), ptr=torch.tensor([0, 2, 5])).shape
        torch.Size([5, 17])
    """

    def __init__(
        self,
        irreps: str | o3.Irreps,
        num_heads: int,
        *,
        head_dim: int = 16,
        irreps_out: str | o3.Irreps | None = None,
        irreps_value: str | o3.Irreps | None = None,
        norms: bool = False,
        feature_map: str | FeatureMap = "softmax",
        num_features: int | None = None,
        rpe: FourierRPE | None = None,
        position_dim: int | None = None,
        orthogonal: bool | None = None,
        bias: bool = True,
        mode: str = "linear",
        exact_below: int | None = None,
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, head_dim=head_dim)
        self.irreps = cleaned(irreps)
        self.irreps_out = self.irreps if irreps_out is None else cleaned(irreps_out)
        self.irreps_value = irreps_of_values(self.irreps, irreps_value, num_heads)
        refuse_missing("irreps_value", self.irreps_value, self.irreps, "the features")
        refuse_missing("irreps_out", self.irreps_out, self.irreps_value, "the values")
        self._terms, self._value_terms = terms_of(self.irreps), terms_of(self.irreps_value)
        self._dim = self.irreps.dim
        self.head_dim, self.norms = head_dim, norms
        generator = seeded_generator(generator)
        width = number_of_invariants(self.irreps, norms)
        self.query = drawn_linear(width, num_heads * head_dim, bias, generator)
        self.key = drawn_linear(width, num_heads * head_dim, bias, generator)
        self.value = IrrepsLinear(self.irreps, self.irreps_value, generator=generator)
        self.out = IrrepsLinear(self.irreps_value, self.irreps_out, bias, generator)
        self.set_up(
            num_heads,
            head_dim,
            feature_map=feature_map,
            num_features=num_features,
            rpe=rpe,
            position_dim=position_dim,
            orthogonal=orthogonal,
            mode=mode,
            exact_below=exact_below,
            causal=False,
            redraw_every=redraw_every,
            generator=generator,
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        ptr: Tensor | None = None,
        system: Tensor | None = None,
        num_systems: int | None = None,
        mask: Tensor | None = None,
        position_features: PositionFeatures | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
    ) -> Tensor:
        """Attend within each system.

        Args:
            x: (N, irreps.dim), rows of all systems; or padded, (B, L, irreps.dim).
            positions: (N, ℓ) or (B, L, ℓ), Å, for a layer with an RPE of its own.
            ptr: (B + 1,), first row of each system, for packed rows. **Without `ptr` and `system`,
                rows (N, C) are all one system.**
            system: (N,), the system of each row in any order, instead of `ptr`.
            num_systems: B, with `system` only.
            mask: (B, L) bool, True for real rows, for padded rows.
            position_features: Φ, Ψ of the rows as given, instead of `positions`.
            pairs: what `nn.PairCorrection` gives, of packed rows.
            images: what `nn.ImageKeys` gives, of packed rows, for mode "exact".

        Returns:
            Rows as they came, (N, irreps_out.dim) or (B, L, irreps_out.dim).

        Raises:
            ValueError: shapes that do not fit, positions missing where the layer needs them or
                given where it has no use for them.
        """
        layout = self._layout(x, ptr, system, num_systems, mask)
        rows = self._projected(x, layout, positions, position_features, pairs, images)
        out = self.attend(rows).to(rows.value.dtype)
        return layout.unpack(self.out(joined(out, self._value_terms)))

    def matrices(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        ptr: Tensor | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
    ) -> list[Tensor]:
        """The weights in use: B matrices (H, n, n) whose rows sum to 1. For looking: O(N·n·H)."""
        layout = self._layout(x, ptr, None, None, None)
        rows = self._projected(x, layout, positions, None, pairs, images)
        return self.weights(rows)

    def _layout(
        self,
        x: Tensor,
        ptr: Tensor | None,
        system: Tensor | None,
        num_systems: int | None,
        mask: Tensor | None,
    ) -> Layout:
        check_rows(x, self._dim, "x", self.query.weight)
        return layout_of(x, ptr=ptr, system=system, num_systems=num_systems, mask=mask)

    def _projected(
        self,
        x: Tensor,
        layout: Layout,
        positions: Tensor | None,
        features: PositionFeatures | None,
        pairs: PairWeights | None,
        images: PairWeights | None,
    ) -> AttentionRows:
        layout.refuse_unsorted(pairs, images)
        rows = layout.pack(x)
        scalars = invariants(rows, self._terms, self.norms)
        query, key = (
            part(scalars).view(-1, self.num_heads, self.head_dim) for part in (self.query, self.key)
        )
        value = by_head(self.value(rows), self._value_terms, self.num_heads)
        at = None
        if images is None:
            at = self.features_at(layout, positions, features, "mean")
        return AttentionRows(query, key, value, layout.ptr, None, at, at, pairs, images)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return (
            f"{self.irreps}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"position_dim={self.position_dim}, mode={self.mode!r}"
        )
