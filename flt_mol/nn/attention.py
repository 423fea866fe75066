"""Multi-head attention with learned relative positions: linear cost, or the exact form."""

from __future__ import annotations

import inspect
from functools import reduce
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from flt_mol.functional.causal import causal_attention, causal_log_attention
from flt_mol.functional.exact import exact_attention
from flt_mol.functional.feature_maps import stabilised_features
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import (
    at_least_float32,
    index_in_system,
    mean_per_system,
    system_index,
)
from flt_mol.functional.images import image_attention
from flt_mol.functional.linear import (
    linear_attention,
    linear_log_attention,
    linear_sums,
    normalised,
    read_sums,
)
from flt_mol.functional.pairs import pair_sums
from flt_mol.functional.streaming import CausalState, state_of
from flt_mol.nn.feature_maps import FeatureMap, feature_map_of
from flt_mol.nn.images import PairWeights
from flt_mol.nn.layers import drawn_linear, seeded_generator
from flt_mol.nn.layout import (
    LAYOUT,
    Layout,
    aligned_layouts,
    check_names,
    check_rows,
    chosen_rows,
    layout_of,
    require,
)
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.streaming import Streaming

MODES = ("linear", "exact", "auto")
# Features in memory where no gradient needs all of them: 32 MB.
MAX_FEATURES = 2**23


class AttentionInputs(TypedDict, total=False):
    """Keyword arguments of `FLTAttention`; all are optional and may be None.

    Attributes:
        ptr: (B + 1,), first row of each system, for packed rows. **Without `ptr` and `system`,
            rows (N, C) are all one system.**
        system: (N,), the system of each row in any order, instead of `ptr`.
        num_systems: B, with `system` only: indices beyond it are refused.
        mask: (B, L) bool, True for real rows, for padded rows. What stands in the others has no
            influence, not even NaN; they come out as 0.
        position_features: Φ, Ψ of the rows as given, instead of `positions`: a basis (N, 2R) or
            (B, L, 2R).
        context: (K, C') or (B, L', C'), the rows that keys and values are made of, where they are
            another set (cross-attention). Rows whose system has no context get ``out(0)``.
        context_positions, context_ptr, context_system, context_mask: of the context.
        context_features: Φ, Ψ of the context.
        context_values: rows that values are made of, where keys are made of others.
        pairs: what `PairCorrection` gives, of packed rows: near pairs' weights times 1 + weight.
        images: what `ImageKeys` gives, of packed rows, for mode "exact": keys that are periodic
            images. Positions are not needed then.
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


_INPUTS = AttentionInputs.__annotations__
_OF_CONTEXT = tuple(f"context_{x}" for x in ("positions", "ptr", "system", "mask", "features"))


class AttentionRows(NamedTuple):
    """What attention works on: packed rows by head, and the geometry between them.

    Attributes:
        query, key, value: (N, H, D), (K, H, D) and (K, H, V).
        ptr: (B + 1,), first query of each system.
        key_ptr: (B + 1,), first key of each system; None where keys are rows of the same set.
        query_at, key_at: Φ of the queries and Ψ of the keys; None without positions.
        pairs: A_ij → A_ij (1 + weight_ij), see `AttentionInputs`.
        images: keys that are periodic images, each with the logarithm of its factor.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    ptr: Tensor
    key_ptr: Tensor | None = None
    query_at: PositionFeatures | None = None
    key_at: PositionFeatures | None = None
    pairs: PairWeights | None = None
    images: PairWeights | None = None

    @property
    def key_offsets(self) -> Tensor:
        """(B + 1,), first key of each system."""
        return self.ptr if self.key_ptr is None else self.key_ptr


class Fidelity(NamedTuple):
    """Error of linear attention relative to the softmax it estimates, on one batch.

    Attributes:
        output_error: (H,), ‖out_linear − out_exact‖ / ‖out_exact‖ over all rows of the batch, of
            the attended values before the output map.
        total_variation: (H,), the mean over queries of ½ Σ_j |A_ij − A*_ij|: 0 where the weights
            agree, 1 where they lie on other keys.
    """

    output_error: Tensor
    total_variation: Tensor


class Attention(nn.Module):
    """From queries, keys and values to attended values: `FLTAttention` without its linear maps.

    For layers that make rows in a way of their own. They call ``nn.Module.__init__``, then
    `set_up`, and give `attend` their `AttentionRows`.
    """

    def set_up(
        self,
        num_heads: int,
        head_dim: int,
        *,
        generator: torch.Generator,
        feature_map: str | FeatureMap = "softmax",
        rpe: FourierRPE | None = None,
        position_dim: int | None = None,
        mode: str = "linear",
        exact_below: int | None = None,
        causal: bool = False,
        **features: Any,
    ) -> None:
        """Make the feature map and keep the settings; arguments as those of `FLTAttention`.

        Raises:
            ValueError: settings that do not fit together.
        """
        self.num_heads = num_heads
        if rpe is not None:
            width = rpe.num_features
            if rpe.num_heads != num_heads:
                raise ValueError(f"the rpe has {rpe.num_heads} heads, the attention {num_heads}")
            if position_dim not in (None, width):
                raise ValueError(f"position_dim is {position_dim}, the rpe has {width} features")
            position_dim = width
        self.position_dim = position_dim or 0
        self.rpe = rpe
        self.causal = causal
        shape = num_heads, head_dim, self.position_dim
        self.feature_map = feature_map_of(feature_map, shape, generator, **features)
        if exact_below is None:
            # Where both take the same time. Exact attention multiplies rows of D + 2R numbers.
            crossover = 18.0 if causal else 6.5 / (1 + 0.5 * self.position_dim / (head_dim + 32))
            exact_below = round(crossover * self.num_features * head_dim**-0.25)
        self.exact_below = exact_below
        self.mode = mode

    @property
    def mode(self) -> str:
        """How attention is computed: "linear", "exact" or "auto"."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
        if mode == "auto" and not self.feature_map.estimates_softmax:
            name = type(self.feature_map).__name__
            raise ValueError(f"mode 'auto' mixes softmax with {name}, which does not estimate it")
        self._mode = mode

    @property
    def num_features(self) -> int:
        """M."""
        return self.feature_map.num_features

    def attend(self, rows: AttentionRows, mode: str | None = None) -> Tensor:
        """Attended values (N, H, V), at least float32, in this layer's mode or another.

        Raises:
            ValueError: a combination that has no meaning or no implementation.
        """
        mode = mode or self._mode
        for name, pairs in (("pairs", rows.pairs), ("images", rows.images)):
            if pairs is not None:
                if self.causal or rows.key_ptr is not None or mode == "auto":
                    raise ValueError(f"{name} are among rows of one set: no causal, context, auto")
                _check_pairs(pairs, rows, name)
        if rows.images is not None:
            if mode != "exact" or rows.pairs is not None:
                raise ValueError("images go with mode 'exact', without pairs")
            return image_attention(rows.query, rows.key, rows.value, rows.ptr, *rows.images)
        if mode == "exact":
            return _exact(rows, self.causal)
        return self._linear(rows) if mode == "linear" else self._by_size(rows)

    def _linear(self, rows: AttentionRows) -> Tensor:
        """φ(q ⊕ Φ), φ(k ⊕ Ψ), then sums per system; ⊕ is an addition of logits."""
        log, value, ptr = self.feature_map.exponential, rows.value, rows.ptr
        most = MAX_FEATURES // (self.num_heads * self.feature_map.num_features)
        whole = self.causal or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not whole and rows.pairs is None and max(len(rows.query), len(rows.key)) > most:
            return self._halves(rows, max(1, most))
        queries = self.feature_map(rows.query, rows.query_at, key=False)
        keys = self.feature_map(rows.key, rows.key_at, key=True)
        if self.causal:
            run = causal_log_attention if log else causal_attention
            return run(queries, keys, value, ptr)
        if rows.pairs is None:
            of_sets = linear_log_attention if log else linear_attention
            return of_sets(queries, keys, value, ptr, rows.key_ptr)
        if log:
            queries, keys = stabilised_features(queries, keys, ptr)
        i, j, weight = rows.pairs
        sums = linear_sums(queries, keys, value, ptr)
        return normalised(sums + pair_sums(queries, keys, value, weight, i, j))

    def _halves(self, rows: AttentionRows, size: int) -> Tensor:
        """The same without gradients, with the features of at most `size` rows at a time."""
        middle = (len(rows.ptr) - 1) // 2
        if not middle:
            return self._long(rows, size)
        ends = int(rows.ptr[middle]), int(rows.key_offsets[middle])
        parts = []
        for some, (own, keys) in (
            (slice(middle + 1), (slice(end) for end in ends)),
            (slice(middle, None), (slice(end, None) for end in ends)),
        ):
            ptr, key_ptr = rows.ptr[some], None
            if rows.key_ptr is not None:
                key_ptr = rows.key_ptr[some] - rows.key_ptr[some][0]
            half = _some(rows, own, keys)
            parts.append(self._linear(half._replace(ptr=ptr - ptr[0], key_ptr=key_ptr)))
        return torch.cat(parts)

    def _long(self, rows: AttentionRows, size: int) -> Tensor:
        """One system, by sums over `size` keys at a time."""
        log, states, parts, none = self.feature_map.exponential, [], [], slice(0)
        for start in range(0, max(1, len(rows.key)), size):
            some = _some(rows, none, slice(start, start + size))
            keys = self.feature_map(some.key, some.key_at, key=True)
            ptr = torch.tensor([0, len(keys)], device=keys.device)
            states.append(state_of(keys, some.value, ptr, log=log))
        sums, level, *_ = reduce(CausalState.joined, states)
        for start in range(0, max(1, len(rows.query)), size):
            some = _some(rows, slice(start, start + size), none)
            features = self.feature_map(some.query, some.query_at, key=False)
            parts.append(normalised(read_sums(features, sums[0], level)))
        return torch.cat(parts)

    def _by_size(self, rows: AttentionRows) -> Tensor:
        """Each system by its own number of keys: exact below `exact_below`, linear from there."""
        small = rows.key_offsets.diff() < self.exact_below
        if not torch.compiler.is_compiling():
            if bool(small.all()):
                return _exact(rows, self.causal)
            if not bool(small.any()):
                return self._linear(rows)
        near, few = _part(rows, small)
        far, many = _part(rows, ~small)
        by_softmax, by_features = _exact(few, self.causal), self._linear(many)
        out = by_softmax.new_zeros(rows.query.shape[0], *by_softmax.shape[1:])
        # Added, not put: a compiled graph holds all rows in both parts, zero where not chosen.
        return out.index_add(0, near, by_softmax).index_add(0, far, by_features)

    def weights(self, rows: AttentionRows, mode: str | None = None) -> list[Tensor]:
        """The normalised weights A of each system: B matrices (H, n, m), rows summing to 1.

        Attention is linear in its values, so its weights are what comes out for values that are
        the rows of a unit matrix: those in use, in any mode.
        """
        key_ptr, heads = rows.key_offsets, rows.value.shape[1]
        sizes = key_ptr.diff().tolist()
        unit = torch.eye(max(sizes, default=0), device=key_ptr.device, dtype=rows.value.dtype)
        value = unit[index_in_system(key_ptr, len(rows.value))][:, None, :].expand(-1, heads, -1)
        weights = self.attend(rows._replace(value=value.contiguous()), mode).transpose(0, 1)
        parts = torch.split(weights, rows.ptr.diff().tolist(), dim=1)
        return [part[..., :size] for part, size in zip(parts, sizes, strict=True)]

    def features_at(
        self,
        layout: Layout,
        positions: Tensor | None,
        features: PositionFeatures | None,
        origin: str | Tensor,
    ) -> PositionFeatures | None:
        """Φ and Ψ of packed rows: those given or of this layer's RPE; None without positions.

        Raises:
            ValueError: positions of another shape, missing, or given to a layer without them.
        """
        if self.position_dim == 0:
            if positions is not None or features is not None:
                raise ValueError("this layer was built without positions: give rpe or position_dim")
            return None
        if features is None:
            if self.rpe is None:
                raise ValueError("position_features are missing: this layer has no rpe of its own")
            packed = layout.positions(positions, self.rpe.dim)
            at: PositionFeatures = self.rpe(packed, layout.ptr, origin=origin)
            return at
        basis, heads = features.basis, features.key_weight.shape[0]
        leading, width = tuple(basis.shape[: len(layout.leading)]), basis.shape[-1]
        if (leading, width, heads) != (layout.leading, self.position_dim, self.num_heads):
            raise ValueError(
                f"position_features have a basis of shape {tuple(basis.shape)} for {heads} heads, "
                f"expected {(*layout.leading, self.position_dim)} for {self.num_heads}"
            )
        return features._replace(basis=layout.pack(basis))


class FLTAttention(Streaming, Attention):
    r"""Attention among the rows of each system, weights exp(q_i·k_j/√D + N̂(r_i − r_j)).

    ``mode="linear"`` estimates them with M random features [2] of the concatenations [Φ, q] and
    [Ψ, k] (FLT [1]; without positions: Performer), in time linear in N. ``mode="exact"`` is the
    softmax they estimate, with the same sampled mask N̂, parameters and state_dict, in time
    quadratic in the size of a system. ``mode="auto"`` takes the exact form for systems of fewer
    than `exact_below` keys, and the linear form for the others. `.mode` can be set at any time.

    Rows come packed, (N, C) with `ptr` or `system`, or padded, (B, L, C) with `mask`; see
    `AttentionInputs`. Positions come from `rpe`, owned by this layer, or, where several layers
    share an RPE, as `position_features`, computed once (``position_dim=rpe.num_features`` then).

    Args:
        embed_dim: C.
        num_heads: H; D = C/H.
        feature_map: φ of the linear mode: a name in `nn.FEATURE_MAPS`, or a `FeatureMap` of H, D
            and the width of the position features.
        num_features: M, where `feature_map` is a name; the default is 64. "elu" has a fixed number.
        rpe: an RPE of this layer's own.
        position_dim: width 2R of the position features that `forward` will be given; needs no
            value where `rpe` is given.
        context_dim: channels of `context`, if not C.
        orthogonal: whether random directions are orthogonal in blocks (the default), else
            independent.
        dropout: probability, on the attended values. There is no attention matrix to drop from.
        bias: whether the four linear maps have one.
        mode: "linear", "exact" or "auto".
        exact_below: number of keys from which "auto" is linear. The default, 6.5 M/D^¼ divided by
            1 + R/(D + 32), or 18 M/D^¼ for causal layers, is about where both take the same time.
        causal: whether row i attends to the rows of its system up to itself only.
        redraw_every: training steps with one draw of random features, see `nn.redraw.Redrawn`.
        generator: on CPU, for weights and random features (buffers, saved with the weights); None
            takes a seed from torch.

    Raises:
        ValueError: sizes that do not fit together, unknown mode or feature map, or mode "auto"
            with a feature map that does not estimate the softmax.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.
        [2] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021.

    Examples:
        >>> from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum
        >>> rpe = FourierRPE(GaussianSpectrum(4, num_terms=8), GaussianFrequencies(16))
        >>> attention = FLTAttention(32, 4, rpe=rpe)
        >>> system = torch.tensor([0, 0, 0, 1, 1])
        >>> attention(torch.randn(5, 32), torch.rand(5, 3), system=system).shape
        torch.Size([5, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str | FeatureMap = "softmax",
        num_features: int | None = None,
        rpe: FourierRPE | None = None,
        position_dim: int | None = None,
        context_dim: int | None = None,
        orthogonal: bool | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        mode: str = "linear",
        exact_below: int | None = None,
        causal: bool = False,
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self.embed_dim = embed_dim
        self.context_dim = embed_dim if context_dim is None else context_dim
        generator = seeded_generator(seeded_generator(generator))
        self.query = drawn_linear(embed_dim, embed_dim, bias, generator)
        self.key = drawn_linear(self.context_dim, embed_dim, bias, generator)
        self.value = drawn_linear(self.context_dim, embed_dim, bias, generator)
        self.out = drawn_linear(embed_dim, embed_dim, bias, generator)
        self.dropout = nn.Dropout(dropout)
        self.set_up(
            num_heads,
            embed_dim // num_heads,
            feature_map=feature_map,
            num_features=num_features,
            rpe=rpe,
            position_dim=position_dim,
            orthogonal=orthogonal,
            mode=mode,
            exact_below=exact_below,
            causal=causal,
            redraw_every=redraw_every,
            generator=generator,
        )

    def forward(
        self, x: Tensor, positions: Tensor | None = None, **given: Unpack[AttentionInputs]
    ) -> Tensor:
        """Attend within each system.

        Args:
            x: (N, C), rows of all systems; or (B, L, C), one system for each b.
            positions: (N, ℓ) or (B, L, ℓ), Å, for a layer with an RPE of its own. With ℓ = 1 the
                default is the place of each row in its system: 0, 1, 2, …, padding not counted.
            **given: ptr, system, mask, context and more: see `AttentionInputs`.

        Returns:
            Rows as they came, (N, C) or (B, L, C).

        Raises:
            ValueError: shapes that do not fit, positions missing where the layer needs them or
                given where it has no use for them.
        """
        layout, rows = self.rows(x, positions, given)
        out = self.attend(rows).flatten(1).to(rows.value.dtype)
        return layout.unpack(self.out(self.dropout(out)))

    # What `help` and torch.export read: the arguments of `AttentionInputs` by their names.
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *list(inspect.signature(forward).parameters.values())[:-1],
            *(inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=None) for x in _INPUTS),
        ]
    )

    def rows(
        self,
        x: Tensor,
        positions: Tensor | None,
        given: AttentionInputs,
        origin: str | Tensor | None = None,
    ) -> tuple[Layout, AttentionRows]:
        """Layout of the rows; queries, keys, values and geometry, packed, from `origin` (B, ℓ)."""
        if given.keys() - _INPUTS:
            check_names(given, _INPUTS)
        check_rows(x, self.embed_dim, "x")
        context, values = given.get("context"), given.get("context_values")
        pairs, images = given.get("pairs"), given.get("images")
        if context is None:
            if any(given.get(name) is not None for name in _OF_CONTEXT):
                raise ValueError("context_… is given, but no context")
            if self.context_dim != self.embed_dim:
                raise ValueError(f"context is missing: keys have {self.context_dim} channels")
            of_rows: dict[str, Any] = {name: given.get(name) for name in LAYOUT}
            layout = keys = layout_of(x, **of_rows)
            own = sources = layout.pack(x)
        else:
            if self.causal:
                raise ValueError("a causal layer attends to its own rows: it takes no context")
            check_rows(context, self.context_dim, "context")
            layout, keys = aligned_layouts(x, context, given)
            own, sources = layout.pack(x), keys.pack(context)
        if pairs is not None or images is not None:
            layout.refuse_unsorted(pairs, images)
        value_rows = sources
        if values is not None:
            check_rows(values, self.context_dim, "context_values")
            if tuple(values.shape[:-1]) != keys.leading:
                shape = tuple(values.shape)
                raise ValueError(
                    f"context_values {shape} are not one value for each key {keys.leading}"
                )
            value_rows = keys.pack(values)
        shape = (-1, self.num_heads, self.embed_dim // self.num_heads)
        query, key = self.query(own).view(shape), self.key(sources).view(shape)
        value = self.value(value_rows).view(shape)
        at = key_at = None
        if images is None:
            key_positions = given.get("context_positions")
            key_features = given.get("context_features")
            if origin is None:
                origin = "first" if self.causal else "mean"
            if context is not None and self.rpe is not None and key_features is None:
                # One origin for both: what an estimate's features are depends on it.
                packed = keys.positions(key_positions, self.rpe.dim)
                packed = at_least_float32(packed) if packed.is_floating_point() else packed.double()
                origin = mean_per_system(packed, keys.ptr)
            features = given.get("position_features")
            at = key_at = self.features_at(layout, positions, features, origin)
            if context is not None:
                key_at = self.features_at(keys, key_positions, key_features, origin)
        key_ptr = None if context is None else keys.ptr
        return layout, AttentionRows(
            query, key, value, layout.ptr, key_ptr, at, key_at, pairs, images
        )

    def matrices(
        self, x: Tensor, positions: Tensor | None = None, **given: Unpack[AttentionInputs]
    ) -> list[Tensor]:
        """The weights in use, written out: B matrices (H, n, m) whose rows sum to 1.

        Takes what `forward` takes. Costs O(N·n·H): for analysis, not for training.
        """
        return self.weights(self.rows(x, positions, given)[1])

    @torch.no_grad()
    def fidelity(
        self, x: Tensor, positions: Tensor | None = None, **given: Unpack[AttentionInputs]
    ) -> Fidelity:
        """Error of the linear mode relative to the exact one on this batch, per head: `Fidelity`.

        Takes what `forward` takes. Quadratic in the size of systems.
        """
        rows = self.rows(x, positions, given)[1]
        ours, truth = self.attend(rows, "linear"), self.attend(rows, "exact")
        size = truth.square().sum((0, 2))
        # Without rows, or with values that are all 0, there is nothing to be wrong by.
        error = (ours - truth).square().sum((0, 2)) / torch.where(size > 0, size, 1.0)
        both = zip(self.weights(rows, "linear"), self.weights(rows, "exact"), strict=True)
        distance = sum((a - b).abs().sum((1, 2)) / 2 for a, b in both) + torch.zeros_like(error)
        return Fidelity(error.sqrt(), distance / max(len(rows.query), 1))


def logit_factors(rows: AttentionRows) -> tuple[Tensor, Tensor]:
    """[q/√D, T] and [k, Ψ ∘ a], whose product is the logit q·k/√D + Φ·Ψ, Φ = T ∘ a."""
    query = at_least_float32(rows.query) * rows.query.shape[-1] ** -0.5
    key = at_least_float32(rows.key)
    if rows.query_at is not None and rows.key_at is not None:
        # Positions may be float64 beside float32 rows, as NumPy and ASE give them.
        at_queries, at_keys = rows.key_at.beside(rows.query_at)
        at_queries = at_queries.expand(-1, query.shape[1], -1).to(query.dtype)
        query = torch.cat([query, at_queries], dim=-1)
        key = torch.cat([key, at_keys.to(key.dtype)], dim=-1)
    return query, key


def _exact(rows: AttentionRows, causal: bool) -> Tensor:
    query, key = logit_factors(rows)
    value, ptr = rows.value, rows.ptr
    if rows.pairs is None:
        return exact_attention(query, key, value, ptr, rows.key_ptr, scale=1.0, causal=causal)
    i, j, weight = rows.pairs
    log_weight = weight.to(query.dtype).log1p()
    return image_attention(query, key, value, ptr, i, j, log_weight, scale=1.0, others=True)


def _part(rows: AttentionRows, chosen: Tensor) -> tuple[Tensor, AttentionRows]:
    """The queries of the chosen systems, by their rows, and all that belongs to them."""
    order, ptr = _systems_rows(rows.ptr, rows.query.shape[0], chosen)
    keys, key_ptr = order, None
    if rows.key_ptr is not None:
        keys, key_ptr = _systems_rows(rows.key_ptr, rows.key.shape[0], chosen)
    return order, _some(rows, order, keys)._replace(ptr=ptr, key_ptr=key_ptr)


def _some(rows: AttentionRows, own: Tensor | slice, keys: Tensor | slice) -> AttentionRows:
    """Some queries and keys, with the offsets as they were."""
    return rows._replace(
        query=rows.query[own],
        key=rows.key[keys],
        value=rows.value[keys],
        query_at=rows.query_at and rows.query_at.rows(own),
        key_at=rows.key_at and rows.key_at.rows(keys),
    )


def _systems_rows(ptr: Tensor, num_rows: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the chosen systems, and their offsets, in which other systems are empty."""
    sizes = ptr.diff() * chosen
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    # Rows behind the last offset belong to no system, and are not kept.
    kept = torch.cat([chosen, chosen.new_zeros(1)])[system_index(ptr, num_rows)]
    return chosen_rows(kept), offsets


def _check_pairs(pairs: PairWeights, rows: AttentionRows, name: str) -> None:
    """Refuse pairs of other heads, of rows that there are not or of two systems, or twice."""
    index_i, index_j, weight = pairs
    ptr, num_heads = rows.ptr, rows.query.shape[1]
    if index_i.shape != index_j.shape or weight.shape != (*index_i.shape, num_heads):
        raise ValueError(
            f"{name} have indices {tuple(index_i.shape)} and {tuple(index_j.shape)} and weights "
            f"{tuple(weight.shape)}, expected (P,), (P,) and (P, {num_heads})"
        )
    # Blocks share pairs, and a look at them waits for the device: one for each batch.
    compiling = torch.compiler.is_compiling()
    seen = None if compiling else getattr(index_i, "_flt_mol_pairs", None)
    if seen is not None and seen[0] is index_j and seen[1] is ptr:
        return
    both = torch.stack([index_i, index_j]).to(torch.int64)
    inside = ((both >= 0) & (both < ptr[-1])).all()
    system = torch.searchsorted(ptr[1:].to(torch.int64), both, right=True)
    fit = inside & (system[0] == system[1]).all()
    if not compiling:
        number = (both[0] * len(rows.query) + both[1]).sort().values
        fit = fit & (number.diff() != 0).all()
    require(fit, f"{name} join rows that are not of one system (another ptr?), or come twice")
    if not compiling:
        index_i._flt_mol_pairs = index_j, ptr  # type: ignore[attr-defined]
