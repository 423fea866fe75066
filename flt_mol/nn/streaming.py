"""Causal attention one token at a time, with a state of constant size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flt_mol.functional import streaming
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import at_least_float32, first_per_system
from flt_mol.functional.streaming import CausalState
from flt_mol.nn.layout import layout_of


class Streaming:
    """The methods of `FLTAttention` for sequences that come token by token."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def initial_state(self, num_streams: int) -> CausalState:
        """State of a causal layer in linear mode before the first token of `num_streams` sequences.

        Raises:
            ValueError: a layer that is not causal, or not in linear mode.
        """
        weight = self.query.weight
        keys = weight.new_zeros(0, self.num_heads, self.num_features)
        value = weight.new_zeros(0, self.num_heads, self.embed_dim // self.num_heads)
        ptr = torch.zeros(num_streams + 1, dtype=torch.int64, device=weight.device)
        return self._state(keys, value, ptr, None)

    def state_after(self, x: Tensor, positions: Tensor | None = None, **given: Any) -> CausalState:
        """The state after whole sequences, one per system, for `step`; arguments as of `forward`.

        Raises:
            ValueError: as `initial_state` and `forward`.
        """
        layout, rows = self.rows(x, positions, given)
        keys = self.feature_map(rows.key, rows.key_at, key=True)
        first = None
        if self.rpe is not None and positions is not None:
            first = first_per_system(at_least_float32(layout.pack(positions)), rows.ptr)
        return self._state(keys, rows.value, rows.ptr, first)

    def _state(
        self, keys: Tensor, value: Tensor, ptr: Tensor, origin: Tensor | None
    ) -> CausalState:
        self._check_streaming()
        state = streaming.state_of(keys, value, ptr, log=self.feature_map.exponential)
        if self.rpe is not None and origin is None:
            # Without positions tokens count from 0.
            origin = state.sums.new_zeros(len(ptr) - 1, self.rpe.dim)
        return state._replace(origin=origin)

    def step(
        self,
        x: Tensor,
        state: CausalState,
        positions: Tensor | None = None,
        position_features: PositionFeatures | None = None,
    ) -> tuple[Tensor, CausalState]:
        """Process one more token of every sequence, at a cost independent of the tokens before.

        Steps give what `forward` gives for the whole sequence, token by token.

        Args:
            x: (B, C), the next token of each.
            state: from `initial_state`, `state_after` or the step before; it stays as it is.
            positions: (B, ℓ); with ℓ = 1 the default is the number of tokens before.
            position_features: of these tokens, used instead of `positions`.

        Returns:
            (B, C), and the state after these tokens.

        Raises:
            ValueError: as `initial_state`, or shapes that do not fit.
        """
        self._check_streaming()
        length, origin = state.length, state.origin
        shape = len(length), self.num_heads, -1
        if x.shape != (len(length), self.embed_dim):
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected {(len(length), self.embed_dim)}: one "
                "token of each sequence of the state"
            )
        if self.rpe is not None and position_features is None and origin is not None:
            if positions is None and self.rpe.dim == 1:
                positions = length[:, None].to(origin.dtype)
            if positions is not None and positions.shape == origin.shape:
                positions = at_least_float32(positions)
                first = (length == 0)[:, None]
                origin = torch.where(first, positions, origin.to(positions.dtype))
        layout = layout_of(x, ptr=torch.arange(len(length) + 1, device=length.device))
        at = self.features_at(layout, positions, position_features, origin)
        query, key, value = (f(x).view(shape) for f in (self.query, self.key, self.value))
        phi = self.feature_map
        queries, keys = phi(query, at, key=False), phi(key, at, key=True)
        out, state = streaming.step(queries, keys, value, state._replace(origin=origin))
        out = self.out(self.dropout(out.flatten(1).to(value.dtype)))
        return out, state

    def _check_streaming(self) -> None:
        if not self.causal or self.mode != "linear":
            raise ValueError(
                "only a causal layer in linear mode streams tokens: build it with causal=True and "
                f"mode='linear' (it has causal={self.causal} and mode={self.mode!r})"
            )
