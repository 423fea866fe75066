"""From queries, keys and values to attended values, in each mode: no weights, only the choice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional import forward_only, recomputed
from flt_mol.functional._rows import ordinary
from flt_mol.functional.causal import causal_attention, causal_log_attention
from flt_mol.functional.exact import exact_attention
from flt_mol.functional.feature_maps import stabilised_features
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import system_index
from flt_mol.functional.images import image_attention
from flt_mol.functional.linear import linear_sums, normalised
from flt_mol.functional.numerics import at_least_float32
from flt_mol.functional.pairs import pair_sums
from flt_mol.nn._plain import is_plain
from flt_mol.nn.feature_map import FeatureMap, SoftmaxFeatures
from flt_mol.nn.images import PairWeights

MODES = ("linear", "exact", "auto")


def check_mode(mode: str, feature_map: FeatureMap) -> None:
    """ValueError for an unknown mode, and "auto" with features that do not estimate the softmax."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    if mode == "auto" and not feature_map.estimates_softmax:
        raise ValueError(
            f"mode 'auto' mixes softmax with {type(feature_map).__name__}, which does not "
            "estimate it: use 'linear' or 'exact', or feature_map='softmax'"
        )


class Projected(NamedTuple):
    """What attention works on: packed rows by head, and the geometry between them.

    Attributes:
        query: (N, H, D).
        key: (K, H, D).
        value: (K, H, V).
        ptr: (B + 1,), first query of each system.
        key_ptr: (B + 1,), first key of each system; None where keys are rows of the same set.
        query_at: Φ of the queries; None without positions.
        key_at: Ψ of the keys.
        pairs: what `nn.PairCorrection` gives: A_ij → A_ij (1 + weight_ij). Or None.
        images: what `nn.ImageKeys` gives: keys that are periodic images, each with the
            logarithm of its factor. Or None.
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


class Rule(NamedTuple):
    """How attention attends: see `FLTAttention`."""

    feature_map: FeatureMap
    mode: str
    causal: bool
    exact_below: int


def attend(rule: Rule, rows: Projected) -> Tensor:
    """Attended values (N, H, V), at least float32.

    Raises:
        ValueError: a combination that has no meaning or no implementation.
    """
    if rows.images is not None:
        return _with_images(rule, rows, rows.images)
    if rows.pairs is not None:
        if rule.causal or rows.key_ptr is not None or rule.mode == "auto":
            raise ValueError(
                "pairs correct attention among the atoms of one set: not with causal, not with a "
                "context, and in mode 'linear' or 'exact', which the caller chooses"
            )
        if rule.mode == "exact":
            return _exact_with_pairs(rows, rows.pairs)
    if rule.mode == "linear":
        return linear(rule, rows)
    if rule.mode == "exact":
        return exact(rows, rule.causal)
    return _by_size(rule, rows)


def linear(rule: Rule, rows: Projected) -> Tensor:
    """φ(q ⊕ Φ), φ(k ⊕ Ψ), then sums per system; ⊕ is an addition of logits."""
    at_once = _at_once(rule, rows)
    if at_once is not None:
        return at_once
    queries = _features(rule.feature_map, rows.query, rows.query_at, key=False)
    keys = _features(rule.feature_map, rows.key, rows.key_at, key=True)
    if rule.causal:
        run = causal_log_attention if rule.feature_map.exponential else causal_attention
        return run(queries, keys, rows.value, rows.ptr)
    if rule.feature_map.exponential:
        queries, keys = stabilised_features(queries, keys, rows.ptr, rows.key_ptr)
    sums = linear_sums(queries, keys, rows.value, rows.ptr, rows.key_ptr)
    if rows.pairs is not None:
        sums = sums + pair_sums(queries, keys, rows.value, rows.pairs.weight, *rows.pairs[:2])
    return normalised(sums)


def _at_once(rule: Rule, rows: Projected) -> Tensor | None:
    """The same without features of all rows in memory; None where another form is asked for."""
    # Numbers of rows are asked for last: graphs have none.
    if rule.causal or rows.pairs is not None or not is_plain(rule.feature_map, SoftmaxFeatures):
        return None
    assert isinstance(rule.feature_map, SoftmaxFeatures)
    given = rows.query, rows.key, rows.value
    # Checkpointing runs a step without gradients first: training has one form.
    values_only = forward_only.available(*given) and not rule.feature_map.training
    if not values_only and not ordinary(*given):
        return None
    numbers = rule.feature_map.num_heads * rule.feature_map.num_features
    if not forward_only.worthwhile(rows.ptr, len(rows.query), numbers):
        return None
    projection, query_at = rule.feature_map.factors(rows.query_at, key=False)
    _, key_at = rule.feature_map.factors(rows.key_at, key=True)
    if isinstance(query_at, Tensor) or isinstance(key_at, Tensor):
        return None  # frequencies of each head's own
    attend_to = (
        forward_only.forward_softmax_attention
        if values_only
        else recomputed.recomputed_softmax_attention
    )
    return attend_to(*given, projection, rows.ptr, rows.key_ptr, query_at, key_at)


def _features(
    feature_map: FeatureMap, x: Tensor, at: PositionFeatures | None, *, key: bool
) -> Tensor:
    features: Tensor = feature_map(x, at, key=key)
    expected = (x.shape[0], x.shape[1], feature_map.num_features)
    if tuple(features.shape) != expected:
        raise ValueError(
            f"{type(feature_map).__name__} gives features of shape {tuple(features.shape)} for "
            f"rows {tuple(x.shape)}, expected {expected}: (rows, heads, num_features)"
        )
    return features


def exact(rows: Projected, causal: bool = False) -> Tensor:
    """softmax(q·k/√D + Φ·Ψ), the sum of products as one product of concatenations."""
    query, key = _concatenated(rows)
    return exact_attention(query, key, rows.value, rows.ptr, rows.key_ptr, scale=1.0, causal=causal)


def _concatenated(rows: Projected) -> tuple[Tensor, Tensor]:
    """[q D^{-1/4}, Φ] and [k D^{-1/4}, Ψ], whose product is the whole logit."""
    scale = rows.query.shape[-1] ** -0.25
    query, key = at_least_float32(rows.query) * scale, at_least_float32(rows.key) * scale
    if rows.query_at is not None and rows.key_at is not None:
        # Positions may be float64 beside float32 rows, as NumPy and ASE give them.
        at_queries = rows.query_at.query.expand(-1, query.shape[1], -1)
        query = torch.cat([query, at_queries.to(query.dtype)], dim=-1)
        key = torch.cat([key, rows.key_at.key.to(key.dtype)], dim=-1)
    return query, key


def _with_images(rule: Rule, rows: Projected, images: PairWeights) -> Tensor:
    """exp(q·k/√D) times a lattice sum over the images of the key."""
    if rule.mode != "exact" or rule.causal or rows.pairs is not None or rows.key_ptr is not None:
        raise ValueError(
            "image keys are for mode 'exact', among the atoms of one set: without causal, pairs "
            "and context"
        )
    return image_attention(rows.query, rows.key, rows.value, rows.ptr, *images)


def _exact_with_pairs(rows: Projected, pairs: PairWeights) -> Tensor:
    """The softmax of all pairs written out, those corrected among them: for small systems."""
    query, key = _concatenated(rows)
    index_i, index_j, first = _all_pairs(rows.ptr, query.shape[0])
    i, j, weight = pairs
    start = rows.ptr[system_index(rows.ptr, query.shape[0])]
    correction = weight.to(query.dtype).log1p()
    zeros = correction.new_zeros(index_i.shape[0], correction.shape[1])
    log_weight = zeros.index_add(0, first[i] + j - start[i], correction)
    return image_attention(
        query, key, rows.value, rows.ptr, index_i, index_j, log_weight, scale=1.0
    )


def _all_pairs(ptr: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """All (i, j) within systems, by i then j, and the place of each i's first pair."""
    system = system_index(ptr, num_rows)
    partners = ptr.diff()[system]
    first = partners.cumsum(0) - partners
    index_i = torch.repeat_interleave(partners)
    index_j = torch.arange(index_i.shape[0], device=ptr.device) - first[index_i]
    return index_i, index_j + ptr[system[index_i]], first


def _by_size(rule: Rule, rows: Projected) -> Tensor:
    """Each system by its own number of keys: exact below `exact_below`, linear from there on."""
    key_ptr = rows.ptr if rows.key_ptr is None else rows.key_ptr
    small = key_ptr.diff() < rule.exact_below
    if not torch.compiler.is_compiling():
        if bool(small.all()):
            return exact(rows, rule.causal)
        if not bool(small.any()):
            return linear(rule, rows)
    near, few = _part(rows, small)
    far, many = _part(rows, ~small)
    by_softmax, by_features = exact(few, rule.causal), linear(rule, many)
    out = by_softmax.new_zeros(rows.query.shape[0], *by_softmax.shape[1:])
    # Added, not put: a compiled graph holds all rows in both parts, zero where not chosen.
    return out.index_add(0, near, by_softmax).index_add(0, far, by_features)


def _part(rows: Projected, chosen: Tensor) -> tuple[Tensor, Projected]:
    """The queries of the chosen systems, by their rows, and all that belongs to them."""
    order, ptr = _chosen_rows(rows.ptr, rows.query.shape[0], chosen)
    if rows.key_ptr is None:
        keys, key_ptr = order, None
    else:
        keys, key_ptr = _chosen_rows(rows.key_ptr, rows.key.shape[0], chosen)
    return order, Projected(
        rows.query[order],
        rows.key[keys],
        rows.value[keys],
        ptr,
        key_ptr,
        None if rows.query_at is None else rows.query_at.rows(order),
        None if rows.key_at is None else rows.key_at.rows(keys),
    )


def _chosen_rows(ptr: Tensor, num_rows: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the chosen systems, and their offsets, in which other systems are empty."""
    sizes = ptr.diff() * chosen
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    # Rows behind the last offset belong to no system, and are not kept.
    kept = torch.cat([chosen, chosen.new_zeros(1)])[system_index(ptr, num_rows)]
    if torch.compiler.is_compiling():
        # Of static shape: the others' rows stay, as padding behind the last offset.
        return torch.argsort((~kept).to(torch.uint8), stable=True), offsets
    return kept.nonzero().squeeze(1), offsets
