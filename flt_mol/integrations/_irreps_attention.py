"""Attention with invariant weights whose values are features in irreps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
from flt_mol.nn._init import drawn_linear
from flt_mol.nn._pair_checks import check_sizes
from flt_mol.nn.attend import Projected, Rule, attend, check_mode
from flt_mol.nn.attention import default_crossover
from flt_mol.nn.checks import check_features, check_pairs, check_rows, check_tensors
from flt_mol.nn.feature_map import FeatureMap, feature_map_of
from flt_mol.nn.inputs import Place
from flt_mol.nn.inspection import attention_matrices
from flt_mol.nn.layout import Layout, layout_of
from flt_mol.nn.local import PairWeights
from flt_mol.nn.projections import _width_of_positions
from flt_mol.nn.rpe import FourierRPE


class IrrepsAttention(nn.Module):
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
        self.num_heads, self.head_dim, self.norms = num_heads, head_dim, norms
        self.position_dim = _width_of_positions(rpe, position_dim, num_heads)
        self.rpe = rpe
        generator = seeded_generator(generator)
        width = number_of_invariants(self.irreps, norms)
        self.query = drawn_linear(width, num_heads * head_dim, bias, generator)
        self.key = drawn_linear(width, num_heads * head_dim, bias, generator)
        self.value = IrrepsLinear(self.irreps, self.irreps_value, generator=generator)
        self.out = IrrepsLinear(self.irreps_value, self.irreps_out, bias, generator)
        self.feature_map = feature_map_of(
            feature_map,
            (num_heads, head_dim, self.position_dim),
            generator,
            num_features=num_features,
            orthogonal=orthogonal,
            redraw_every=redraw_every,
        )
        default = default_crossover(self.feature_map.num_features, head_dim, self.position_dim)
        self.exact_below = default if exact_below is None else exact_below
        self.mode = mode

    @property
    def mode(self) -> str:
        """How attention is computed: "linear", "exact" or "auto"."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        check_mode(mode, self.feature_map)
        self._mode = mode

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
        out = attend(self._rule, rows).to(rows.value.dtype)
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
        rows = self._projected(x, layout, positions, None, pairs, images, redraw=False)
        return attention_matrices(self._rule, rows)

    @property
    def _rule(self) -> Rule:
        return Rule(self.feature_map, self.mode, False, self.exact_below)

    def _layout(
        self,
        x: Tensor,
        ptr: Tensor | None,
        system: Tensor | None,
        num_systems: int | None,
        mask: Tensor | None,
    ) -> Layout:
        check_tensors(x=x, ptr=ptr, system=system, mask=mask)
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
        *,
        redraw: bool = True,
    ) -> Projected:
        layout.refuse_unsorted(pairs, images)
        check_pairs(pairs, layout.ptr, self.num_heads, "pairs")
        check_pairs(images, layout.ptr, self.num_heads, "images")
        if redraw:
            self.feature_map.refresh()
        rows = layout.pack(x)
        scalars = invariants(rows, self._terms, self.norms)
        query, key = (
            part(scalars).view(-1, self.num_heads, self.head_dim) for part in (self.query, self.key)
        )
        value = by_head(self.value(rows), self._value_terms, self.num_heads)
        at = None
        if images is None:
            at = self._places(Place(layout, positions, features), len(rows), redraw)
        return Projected(query, key, value, layout.ptr, None, at, at, pairs, images)

    def _places(self, place: Place, num_rows: int, redraw: bool) -> PositionFeatures | None:
        """Φ and Ψ, or None for a layer without positions."""
        if self.position_dim == 0:
            if place.positions is not None or place.features is not None:
                raise ValueError(
                    "this layer was built without positions: build it with rpe=… or position_dim=…"
                )
            return None
        at = place.position_features(self.rpe, num_rows, "mean", redraw=redraw)
        check_features(at, num_rows, self.num_heads, self.position_dim)
        return at

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return (
            f"{self.irreps}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"position_dim={self.position_dim}, mode={self.mode!r}"
        )
