"""Queries, keys and values of rows in any layout, packed, and where these rows are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import mean_per_system
from flt_mol.functional.numerics import at_least_float32, seeded_generator
from flt_mol.nn._init import drawn_linear
from flt_mol.nn.attend import Projected
from flt_mol.nn.checks import check_features, check_pairs, check_rows, check_tensors
from flt_mol.nn.images import PairWeights
from flt_mol.nn.inputs import Place
from flt_mol.nn.layout import Layout, RowsGiven, aligned_layouts, layout_of
from flt_mol.nn.rpe import FourierRPE


class Projections(nn.Module):
    """The linear maps of multi-head attention, and its rows before they attend.

    Args:
        embed_dim: C.
        num_heads: H.
        rpe: an RPE of this layer's own, or None.
        position_dim: width 2R of position features that are given, or None.
        context_dim: channels of keys' and values' rows, if not C.
        bias: whether the maps have one.
        causal: whether rows see rows up to themselves only.
        generator: on CPU, for weights; None takes a seed from torch's global one.

    Raises:
        ValueError: sizes that do not fit together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        rpe: FourierRPE | None,
        position_dim: int | None,
        context_dim: int | None,
        bias: bool,
        causal: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.context_dim = embed_dim if context_dim is None else context_dim
        self.position_dim = _width_of_positions(rpe, position_dim, num_heads)
        self.causal = causal
        self.rpe = rpe
        generator = seeded_generator(generator)
        self.query = drawn_linear(embed_dim, embed_dim, bias, generator)
        self.key = drawn_linear(self.context_dim, embed_dim, bias, generator)
        self.value = drawn_linear(self.context_dim, embed_dim, bias, generator)
        self.out = drawn_linear(embed_dim, embed_dim, bias, generator)

    def projected(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        ptr: Tensor | None = None,
        system: Tensor | None = None,
        num_systems: int | None = None,
        mask: Tensor | None = None,
        position_features: PositionFeatures | None = None,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        context_ptr: Tensor | None = None,
        context_system: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_features: PositionFeatures | None = None,
        context_values: Tensor | None = None,
        pairs: PairWeights | None = None,
        images: PairWeights | None = None,
        refresh: bool = True,
    ) -> tuple[Layout, Projected]:
        """The layout of the rows, and their queries, keys, values and geometry, packed.

        Takes what `forward` takes; what `forward` does before it attends. With ``refresh=False``
        random draws stay as they are, as befits looking at what a layer does.
        """
        check_tensors(x=x, positions=positions, ptr=ptr, system=system, mask=mask, context=context)
        check_tensors(
            context_positions=context_positions,
            context_ptr=context_ptr,
            context_system=context_system,
            context_mask=context_mask,
            context_values=context_values,
        )
        check_rows(x, self.embed_dim, "x", self.query.weight)
        rows: RowsGiven = {"ptr": ptr, "system": system, "mask": mask}
        others: RowsGiven = {"ptr": context_ptr, "system": context_system, "mask": context_mask}
        if context is None:
            self._refuse_context(context_positions, context_features, *others.values())
            layout = keys = layout_of(x, num_systems=num_systems, **rows)
        else:
            if self.causal:
                raise ValueError("a causal layer attends to its own rows: it takes no context")
            check_rows(context, self.context_dim, "context", self.key.weight)
            layout, keys = aligned_layouts(x, context, num_systems, rows, others)
        layout.refuse_unsorted(pairs, images)
        check_pairs(pairs, layout.ptr, self.num_heads, "pairs")
        check_pairs(images, layout.ptr, self.num_heads, "images")
        sources = x if context is None else context
        values = sources if context_values is None else context_values
        check_rows(values, self.context_dim, "context_values", self.value.weight)
        if values.shape[:-1] != sources.shape[:-1]:
            raise ValueError(
                f"context_values have shape {tuple(values.shape)}, the rows that keys are made of "
                f"{tuple(sources.shape)}: one value for each key"
            )
        if refresh:
            self.refresh()
        query = self._by_head(self.query(layout.pack(x)))
        key = self._by_head(self.key(keys.pack(sources)))
        value = self._by_head(self.value(keys.pack(values)))
        at = self.places(
            Place(layout, positions, position_features),
            None if context is None else Place(keys, context_positions, context_features),
            (query.shape[0], key.shape[0]),
            needed=images is None,
            redraw=refresh,
        )
        key_ptr = None if context is None else keys.ptr
        return layout, Projected(query, key, value, layout.ptr, key_ptr, *at, pairs, images)

    def refresh(self) -> None:
        """What is due once per forward pass: nothing here."""

    def _refuse_context(self, *given: object) -> None:
        if any(value is not None for value in given):
            raise ValueError("context_… is given, but no context")
        if self.context_dim != self.embed_dim:
            raise ValueError(
                f"context is missing: this layer has keys of {self.context_dim} channels"
            )

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], self.num_heads, self.embed_dim // self.num_heads)

    def places(
        self,
        queries: Place,
        keys: Place | None,
        num_rows: tuple[int, int],
        *,
        needed: bool,
        redraw: bool,
    ) -> tuple[PositionFeatures | None, PositionFeatures | None]:
        """Φ of the queries and Ψ of the keys, or twice None for a layer without positions."""
        if self.position_dim == 0:
            places = (queries,) if keys is None else (queries, keys)
            if any(at.positions is not None or at.features is not None for at in places):
                raise ValueError(
                    "this layer was built without positions: build it with rpe=… or position_dim=…"
                )
            return None, None
        if not needed:
            return None, None
        origin: str | Tensor = "first" if self.causal else "mean"
        if keys is not None and self.rpe is not None and keys.features is None:
            # One origin for both: what an estimate's features are depends on it.
            given = keys.packed_positions(self.rpe, num_rows[1])
            # Sums of integers may wrap, of half floats overflow, and lose digits in float32.
            given = at_least_float32(given) if given.is_floating_point() else given.double()
            origin = mean_per_system(given, keys.layout.ptr)
        query_at = queries.position_features(self.rpe, num_rows[0], origin, redraw=redraw)
        check_features(query_at, num_rows[0], self.num_heads, self.position_dim)
        if keys is None:
            return query_at, query_at
        # The second use of the same frequencies is no second forward.
        key_at = keys.position_features(self.rpe, num_rows[1], origin, redraw=False)
        check_features(key_at, num_rows[1], self.num_heads, self.position_dim)
        return query_at, key_at


def _width_of_positions(rpe: FourierRPE | None, position_dim: int | None, num_heads: int) -> int:
    """2R, from whichever of the two is given, checked against the other."""
    if rpe is not None and not isinstance(rpe, FourierRPE):
        raise ValueError(
            f"rpe is a {type(rpe).__name__}, expected FourierRPE(spectrum, frequencies)"
        )
    if rpe is None:
        if position_dim is not None and position_dim < 0:
            raise ValueError(f"position_dim must be ≥ 0, got {position_dim}")
        return position_dim or 0
    if rpe.num_heads != num_heads:
        raise ValueError(f"the rpe has {rpe.num_heads} heads, the attention {num_heads}")
    if position_dim not in (None, rpe.num_features):
        raise ValueError(
            f"position_dim is {position_dim}, but the rpe gives {rpe.num_features} features"
        )
    return rpe.num_features
