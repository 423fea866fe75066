"""Queries, keys and values of rows in any layout, packed, and where these rows are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional._common import placed, seeded_generator
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.packed import mean_per_system
from flt_mol.nn.attend import Projected
from flt_mol.nn.inputs import Place, check_features
from flt_mol.nn.layout import Layout, RowsGiven, aligned_layouts, layout_of
from flt_mol.nn.local import PairWeights
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
        self.query = _linear(embed_dim, embed_dim, bias, generator)
        self.key = _linear(self.context_dim, embed_dim, bias, generator)
        self.value = _linear(self.context_dim, embed_dim, bias, generator)
        self.out = _linear(embed_dim, embed_dim, bias, generator)

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
    ) -> tuple[Layout, Projected]:
        """The layout of the rows, and their queries, keys, values and geometry, packed.

        Takes what `forward` takes; what `forward` does before it attends.
        """
        _check_rows(x, self.embed_dim, "x")
        rows: RowsGiven = {"ptr": ptr, "system": system, "mask": mask}
        others: RowsGiven = {"ptr": context_ptr, "system": context_system, "mask": context_mask}
        if context is None:
            self._refuse_context(context_positions, context_features, *others.values())
            layout = keys = layout_of(x, num_systems=num_systems, **rows)
        else:
            if self.causal:
                raise ValueError("a causal layer attends to its own rows: it takes no context")
            _check_rows(context, self.context_dim, "context")
            layout, keys = aligned_layouts(x, context, num_systems, rows, others)
        if (pairs is not None or images is not None) and layout.order is not None:
            raise ValueError(
                "pairs and images count packed rows: sort rows by system, and give ptr or system"
            )
        sources = x if context is None else context
        values = sources if context_values is None else context_values
        query = self._by_head(self.query(layout.pack(x)))
        key = self._by_head(self.key(keys.pack(sources)))
        value = self._by_head(self.value(keys.pack(values)))
        at = self._places(
            Place(layout, positions, position_features),
            None if context is None else Place(keys, context_positions, context_features),
            (query.shape[0], key.shape[0]),
            needed=images is None,
        )
        key_ptr = None if context is None else keys.ptr
        return layout, Projected(query, key, value, layout.ptr, key_ptr, *at, pairs, images)

    def _refuse_context(self, *given: object) -> None:
        if any(value is not None for value in given):
            raise ValueError("context_… is given, but no context")
        if self.context_dim != self.embed_dim:
            raise ValueError(
                f"context is missing: this layer has keys of {self.context_dim} channels"
            )

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], self.num_heads, self.embed_dim // self.num_heads)

    def _places(
        self, queries: Place, keys: Place | None, num_rows: tuple[int, int], needed: bool
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
            origin = mean_per_system(keys.packed_positions(self.rpe, num_rows[1]), keys.layout.ptr)
        query_at = queries.position_features(self.rpe, num_rows[0], origin)
        check_features(query_at, num_rows[0], self.num_heads, self.position_dim)
        if keys is None:
            return query_at, query_at
        # The second use of the same frequencies is no second forward.
        key_at = keys.position_features(self.rpe, num_rows[1], origin, redraw=False)
        check_features(key_at, num_rows[1], self.num_heads, self.position_dim)
        return query_at, key_at


def _check_rows(x: Tensor, width: int, name: str) -> None:
    if x.dim() not in (2, 3) or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected (N, {width}) or (B, L, {width})"
        )


def _width_of_positions(rpe: FourierRPE | None, position_dim: int | None, num_heads: int) -> int:
    """2R, from whichever of the two is given, checked against the other."""
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


def _linear(inputs: int, outputs: int, bias: bool, generator: torch.Generator) -> nn.Linear:
    """A linear map with Xavier-uniform weights drawn on CPU, and no bias at first."""
    weight = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu")
    nn.init.xavier_uniform_(weight, generator=generator)
    # Built without storage, so that torch's own initialisation draws nothing from the global RNG.
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
    layer.weight = nn.Parameter(placed(weight))
    if bias:
        layer.bias = nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
    return layer
