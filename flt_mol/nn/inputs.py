"""What attention is given beside its rows, and where those rows are."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from torch import Tensor

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import index_in_system
from flt_mol.nn.layout import Layout
from flt_mol.nn.local import PairWeights
from flt_mol.nn.rpe import FourierRPE


class AttentionInputs(TypedDict, total=False):
    """What `FLTAttention.forward` takes by name; all of it is optional, and None is the same.

    Attributes:
        ptr: (B + 1,), first row of each system, for packed rows.
        system: (N,), the system of each row in any order, instead of `ptr`. Without either, rows
            (N, C) are one system.
        num_systems: B, with `system` only: indices beyond it are refused.
        mask: (B, L) bool, True for real rows, for padded rows. What stands in the others has no
            influence, not even NaN; they come out as 0.
        position_features: Φ, Ψ of the rows as given, instead of `positions`: a basis (N, 2R) or
            (B, L, 2R).
        context: (K, C') or (B, L', C'), the rows that keys and values are made of, where they are
            another set than `x` (cross-attention). Rows whose system has no context get ``out(0)``.
        context_positions, context_ptr, context_system, context_mask, context_features: as
            `positions`, `ptr`, `system`, `mask`, `position_features`, of the context.
        context_values: rows that values are made of, in the layout of the keys', where values and
            keys are made of different ones.
        pairs: what `PairCorrection` gives, of packed rows: near pairs' weights times 1 + weight.
        images: what `ImageKeys` gives, of packed rows, for mode "exact": keys that are periodic
            images. They hold all that is known of positions, which are not needed then.
    """

    ptr: Tensor | None
    system: Tensor | None
    num_systems: int | None
    mask: Tensor | None
    position_features: PositionFeatures | None
    context: Tensor | None
    context_positions: Tensor | None
    context_ptr: Tensor | None
    context_system: Tensor | None
    context_mask: Tensor | None
    context_features: PositionFeatures | None
    context_values: Tensor | None
    pairs: PairWeights | None
    images: PairWeights | None


class Place(NamedTuple):
    """Where the rows of one set are: positions as given, or their features, or neither."""

    layout: Layout
    positions: Tensor | None
    features: PositionFeatures | None

    def packed_positions(self, rpe: FourierRPE, num_rows: int) -> Tensor:
        """(N, ℓ): those given, or places in the sequence where ℓ = 1.

        Raises:
            ValueError: they are missing in more dimensions, or not one for each row.
        """
        layout = self.layout
        if self.positions is None:
            if rpe.dim != 1:
                raise ValueError(
                    f"positions are missing: this layer's rpe needs one for each of {num_rows} rows"
                )
            # Sequences of more tokens than float32 counts one by one do not fit any memory.
            return index_in_system(layout.ptr, num_rows)[:, None].float()
        expected = (*layout.leading, rpe.dim)
        if tuple(self.positions.shape) != expected:
            raise ValueError(
                f"positions have shape {tuple(self.positions.shape)}, expected {expected}"
            )
        return layout.pack(self.positions)

    def position_features(
        self, rpe: FourierRPE | None, num_rows: int, origin: str | Tensor, redraw: bool = True
    ) -> PositionFeatures:
        """Φ and Ψ of the packed rows: those given, or those of the layer's own RPE.

        Raises:
            ValueError: neither features nor an RPE, or features that are not one for each row.
        """
        if self.features is not None:
            basis = self.features.basis
            leading = self.layout.leading
            if tuple(basis.shape[: len(leading)]) != leading:
                raise ValueError(
                    f"position_features have a basis of shape {tuple(basis.shape)}, expected "
                    f"{(*leading, basis.shape[-1])}, one for each row"
                )
            return self.features._replace(basis=self.layout.pack(basis))
        if rpe is None:
            raise ValueError("position_features are missing: this layer has no rpe of its own")
        positions = self.packed_positions(rpe, num_rows)
        features: PositionFeatures = rpe(positions, self.layout.ptr, origin=origin)
        return features
