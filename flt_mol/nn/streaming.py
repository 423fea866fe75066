"""Causal attention one token at a time, with a state of constant size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import at_least_float32, first_per_system
from flt_mol.functional.streaming import CausalState, state_of, step
from flt_mol.nn.layout import LAYOUT, Layout, check_rows, layout_of
from flt_mol.nn.rpe import FourierRPE


class Streaming:
    """The methods of `FLTAttention` for sequences that come token by token."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def initial_state(self, num_streams: int) -> CausalState:
        """State of a causal layer in linear mode before the first token of `num_streams` sequences.

        Raises:
            ValueError: a layer that is not causal, or not in linear mode.
        """
        self._check_streaming(None)
        weight = self.query.weight
        keys = weight.new_zeros(0, self.num_heads, self.num_features)
        value = weight.new_zeros(0, self.num_heads, self.embed_dim // self.num_heads)
        ptr = torch.zeros(num_streams + 1, dtype=torch.int64, device=weight.device)
        return state_of(keys, value, ptr, log=self.feature_map.exponential)

    def state_after(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        state: CausalState | None = None,
        **given: Any,
    ) -> CausalState:
        """The state after whole sequences, one per system, for `step`; arguments as of `forward`.

        With a `state` they continue its streams. Positions default to the number of tokens before;
        once some are given, later ones have to be given too.

        Raises as `initial_state` and `forward`.
        """
        layout = layout_of(x, **{name: given[name] for name in given.keys() & LAYOUT})
        self._check_streaming(state)
        state = self.initial_state(len(layout.ptr) - 1) if state is None else state
        state, origin = placed_state(self.rpe, layout, positions, state)
        _, rows = self.rows(x, positions, given, origin)
        phi = self.feature_map
        keys = phi(rows.key, rows.key_at, key=True)
        return state.joined(state_of(keys, rows.value, rows.ptr, log=phi.exponential))

    def step(
        self,
        x: Tensor,
        state: CausalState,
        positions: Tensor | None = None,
        position_features: PositionFeatures | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, CausalState]:
        """Process one more token of every sequence, at a cost independent of the tokens before.

        Steps give what `forward` gives for the whole sequence, token by token.

        Args:
            x: (B, C), the next token of each.
            state: from `initial_state`, `state_after` or the step before; it stays as it is.
            positions: (B, ℓ); with ℓ = 1 the default is the number of tokens before.
            position_features: of these tokens, used instead of `positions`.
            mask: (B,) bool; streams with False have no token now: 0 comes out.

        Returns:
            (B, C), and the state after these tokens.

        Raises:
            ValueError: as `initial_state`, a state of other features, shapes that do not fit.
        """
        self._check_streaming(state)
        check_rows(x, self.embed_dim, "x")
        x = present(mask, x)
        layout = layout_of(x, ptr=torch.arange(len(x) + 1, device=x.device))
        before, origin = placed_state(self.rpe, layout, positions, state)
        at = self.features_at(layout, positions, position_features, origin)
        maps, heads = (self.query, self.key, self.value), (self.num_heads, -1)
        query, key, value = (linear(x).unflatten(1, heads) for linear in maps)
        phi = self.feature_map
        queries, keys = phi(query, at, key=False), phi(key, at, key=True)
        if mask is not None:
            keys = keys.masked_fill(~mask[:, None, None], -torch.inf if phi.exponential else 0)
        out, after = step(queries, keys, value, before)
        out = self.out(self.dropout(out.flatten(1).to(value.dtype)))
        if mask is not None:
            after = after._replace(length=state.length + mask)
        return present(mask, out), after

    def _check_streaming(self, state: CausalState | None) -> None:
        if not self.causal or self.mode != "linear":
            found = f"this has causal={self.causal} and mode={self.mode!r}"
            raise ValueError(f"only a causal layer in linear mode streams tokens: {found}")
        if state is not None and (state.largest is None) is self.feature_map.exponential:
            raise ValueError("state is of another feature map than this layer's")


def present(mask: Tensor | None, x: Tensor) -> Tensor:
    """Rows (B, C) with 0 where a mask (B,) is False."""
    if mask is None:
        return x
    if mask.shape != x.shape[:1] or mask.dtype != torch.bool:
        found = f"mask has shape {tuple(mask.shape)} and {mask.dtype}"
        raise ValueError(f"{found}, expected bool ({len(x)},), True for streams with a token")
    return torch.where(mask[:, None], x, 0.0)


def placed_state(
    rpe: FourierRPE | None, layout: Layout, positions: Tensor | None, state: CausalState
) -> tuple[CausalState, Tensor | None]:
    """The state with its origin, and that of the next tokens' positions (B, ℓ)."""
    if len(layout.ptr) - 1 != len(state.length):
        raise ValueError(f"x has {len(layout.ptr) - 1} systems, the state {len(state.length)}")
    if rpe is None:
        return state, None
    zero = state.sums.new_zeros(len(state.length), rpe.dim)
    origin = zero if state.origin is None else state.origin
    if positions is None:  # which count from 0
        return state._replace(origin=origin), origin - state.length[:, None]
    packed = at_least_float32(layout.positions(positions, rpe.dim))
    first = first_per_system(packed, layout.ptr)
    origin = torch.where((state.length == 0)[:, None], first, origin.to(packed.dtype))
    return state._replace(origin=origin), origin
