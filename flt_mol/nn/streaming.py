"""Causal attention one token at a time: what a layer carries on, and the steps it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flt_mol.functional import streaming
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import first_per_system
from flt_mol.functional.numerics import at_least_float32
from flt_mol.functional.streaming import CausalState
from flt_mol.nn.checks import check_features
from flt_mol.nn.inputs import AttentionInputs

if TYPE_CHECKING:
    from flt_mol.nn.attention import FLTAttention


class AttentionState(NamedTuple):
    """What a causal layer remembers of B sequences; its size does not grow with their length.

    Attributes:
        sums: Σ_j φ(k_j) [v_j, 1] of every sequence and what they are scaled by.
        origin: (B, ℓ), position of each sequence's first token; None without an RPE of one's own.
    """

    sums: CausalState
    origin: Tensor | None

    def streams(self, index: Tensor) -> AttentionState:
        """The states of sequences `index` (K,), in that order and as often as they are named."""
        origin = None if self.origin is None else self.origin[index]
        return AttentionState(self.sums.streams(index), origin)

    def detach(self) -> AttentionState:
        """The same numbers without the history that gradients follow."""
        origin = None if self.origin is None else self.origin.detach()
        return AttentionState(self.sums.detach(), origin)


def initial_state(layer: FLTAttention, num_streams: int) -> AttentionState:
    """The state before the first token of `num_streams` sequences.

    Raises:
        ValueError: a layer that is not causal and linear.
    """
    _check(layer)
    weight = layer.query.weight
    phi = layer.feature_map
    sums = streaming.initial_state(
        num_streams,
        layer.num_heads,
        phi.num_features,
        layer.embed_dim // layer.num_heads,
        log=phi.exponential,
        dtype=at_least_float32(weight[:0]).dtype,
        device=weight.device,
    )
    origin = None
    if layer.rpe is not None:
        origin = sums.sums.new_zeros(num_streams, layer.rpe.dim)
    return AttentionState(sums, origin)


def step(
    layer: FLTAttention,
    x: Tensor,
    state: AttentionState,
    positions: Tensor | None = None,
    position_features: PositionFeatures | None = None,
) -> tuple[Tensor, AttentionState]:
    """One more token of every sequence: (B, C) → (B, C), and the state after it."""
    _check(layer)
    streams = state.sums.length.shape[0]
    if x.shape != (streams, layer.embed_dim):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected {(streams, layer.embed_dim)}: one token of "
            "each sequence of the state"
        )
    at, origin = _where(layer, state, positions, position_features)
    query, key, value = (
        f(x).view(streams, layer.num_heads, layer.embed_dim // layer.num_heads)
        for f in (layer.query, layer.key, layer.value)
    )
    phi = layer.feature_map
    run = streaming.step_log if phi.exponential else streaming.step
    out, sums = run(phi(query, at, key=False), phi(key, at, key=True), value, state.sums)
    out = layer.out(layer.dropout(out.flatten(1).to(value.dtype)))
    return out, AttentionState(sums, origin)


def _where(
    layer: FLTAttention,
    state: AttentionState,
    positions: Tensor | None,
    features: PositionFeatures | None,
) -> tuple[PositionFeatures | None, Tensor | None]:
    """Position features of one token of each sequence, and the sequences' origins."""
    if layer.position_dim == 0:
        if positions is not None or features is not None:
            raise ValueError("this layer was built without positions")
        return None, None
    length = state.sums.length
    if features is None:
        if layer.rpe is None or state.origin is None:
            raise ValueError("position_features are missing: this layer has no rpe of its own")
        if positions is None:
            if layer.rpe.dim != 1:
                raise ValueError(f"positions are missing: give (B, {layer.rpe.dim})")
            positions = length[:, None].to(state.origin.dtype)
        if positions.shape != state.origin.shape:
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}, expected "
                f"{tuple(state.origin.shape)}: one of each sequence of the state"
            )
        positions = at_least_float32(positions)
        origin = state.origin.to(positions.dtype)
        origin = torch.where((length == 0)[:, None], positions, origin)
        ptr = torch.arange(length.shape[0] + 1, device=length.device)
        features = layer.rpe(positions, ptr, origin=origin)
        state = state._replace(origin=origin)
    check_features(features, length.shape[0], layer.num_heads, layer.position_dim)
    return features, state.origin


def state_after(
    layer: FLTAttention, x: Tensor, positions: Tensor | None, given: AttentionInputs
) -> AttentionState:
    """The state after the sequences `x`, as if their tokens had come one by one."""
    _check(layer)
    layout, rows = layer.projected(x, positions, refresh=False, **given)
    keys = layer.feature_map(rows.key, rows.key_at, key=True)
    run = streaming.state_of_log if layer.feature_map.exponential else streaming.state_of
    sums = run(keys, rows.value, rows.ptr)
    origin = None
    if layer.rpe is not None:
        # Without positions tokens count from 0.
        origin = sums.sums.new_zeros(rows.ptr.shape[0] - 1, layer.rpe.dim)
        if positions is not None:
            origin = first_per_system(at_least_float32(layout.pack(positions)), rows.ptr)
    return AttentionState(sums, origin)


def _check(layer: FLTAttention) -> None:
    if not layer.causal or layer.mode != "linear":
        raise ValueError(
            "only a causal layer in linear mode goes token by token: build it with causal=True "
            f"and mode='linear' (it has causal={layer.causal} and mode={layer.mode!r})"
        )
