"""A block where no gradient is asked for: the same numbers to rounding, in chunks and in place.

Products of weights are taken before rows meet them where that saves more than it costs: of long
systems, queries are only needed as W_φ·q, values only in sums over keys, and what queries read only
behind the output map. A layer then costs its four C × C maps and the keys' features.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.functional import forward_only as rows_only
from flt_mol.functional._feature_groups import (
    KeySums,
    Side,
    add_keys,
    exponentials,
    groups_of,
    no_keys,
    read_sums,
    rows_at_once,
    scaled_columns,
)
from flt_mol.functional.feature_maps import SharedLogits
from flt_mol.functional.forward_only import attended, available, pieces
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.nn._plain import is_plain, is_stack
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.feature_map import SoftmaxFeatures
from flt_mol.nn.inputs import Place
from flt_mol.nn.layout import layout_of

__all__ = ["add_feed_forward", "attention_of", "available", "can_feed_forward"]

# Bytes of the feed-forward net's hidden layer held at once: within a core's cache.
FFN_BYTES = 3 * 2**23


class Maps(NamedTuple):
    """The weights of an attention layer as rows meet them.

    Attributes:
        query: W_qᵀ (C, C).
        key: W_kᵀ (C, C), and its bias.
        value: W_vᵀ (C, C).
        out: W_oᵀ (C, C).
        columns: random directions (H, D, M), scaled.
        query_shift: W_φ·b_q (H, 1, M), what the bias of queries adds to logits.
        out_bias: b_o + W_o b_v (C,): weights sum to 1, so the bias of values passes through.
    """

    query: Tensor
    key: tuple[Tensor, Tensor | None]
    value: Tensor
    out: Tensor
    columns: Tensor
    query_shift: Tensor | None
    out_bias: Tensor | None


class Rows(NamedTuple):
    """What attention reads, and where its output goes.

    Attributes:
        x: (N, C), to which it is added.
        norm: from x to what attention reads, or that itself, (N, C).
        out: (N, C), of rows that systems have.
        at: position logits of queries and of keys, or None twice.
    """

    x: Tensor
    norm: Tensor | nn.Module
    out: Tensor
    at: tuple[SharedLogits | None, SharedLogits | None]

    def normed(self, part: slice) -> Tensor:
        """What attention reads of some rows."""
        if isinstance(self.norm, Tensor):
            return self.norm[part]
        rows: Tensor = self.norm(self.x[part])
        return rows

    def queries(self, maps: Maps, h: Tensor, part: slice) -> Side:
        """Queries of some rows, given those normalised."""
        query = _by_head(h @ maps.query, maps)
        return Side(query, maps.columns, *_at(self.at[0], part), maps.query_shift)

    def keys(self, maps: Maps, h: Tensor, part: slice) -> Side:
        """Their keys."""
        weight, bias = maps.key
        key = h @ weight if bias is None else torch.addmm(bias, h, weight)
        return Side(_by_head(key, maps), maps.columns, *_at(self.at[1], part))

    def write(self, part: slice, attended: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Write x + attended · weight + bias for some rows."""
        if bias is None:
            torch.addmm(self.x[part], attended, weight, out=self.out[part])
        else:
            torch.add(self.x[part], bias, out=self.out[part]).addmm_(attended, weight)


def attention_of(
    attention: FLTAttention,
    x: Tensor,
    ptr: Tensor,
    positions: Tensor | None,
    features: PositionFeatures | None,
) -> Callable[[Tensor, Tensor | nn.Module], Tensor] | None:
    """What adds an attention layer's output to x; None where it has to be called as it is.

    The function takes x (N, C) and its norm, or the normalised rows, and gives a new tensor.

    Raises:
        ValueError: as the layer itself.
    """
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float64) or not _is_known(attention):
        return None
    if attention.query.weight.dtype != x.dtype or x.shape[1] != attention.embed_dim:
        return None
    layout = layout_of(x, ptr=ptr)
    numbers = attention.num_heads * attention.num_features
    if not rows_only.worthwhile(layout.ptr, len(x), numbers):
        return None
    if attention.mode == "auto" and bool((ptr.diff() < attention.exact_below).any()):
        return None
    attention.refresh()
    place = Place(layout, positions, features)
    queries, keys = attention.places(place, None, (len(x), len(x)), needed=True, redraw=True)
    if queries is not None and queries.basis.dim() != 2:
        return None  # frequencies of each head's own
    assert isinstance(attention.feature_map, SoftmaxFeatures)
    at = (
        _shared(attention.feature_map, queries, x.dtype, key=False),
        _shared(attention.feature_map, keys, x.dtype, key=True),
    )

    def add(x: Tensor, norm: Tensor | nn.Module) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        add_attention(attention, Rows(x, norm, out, at), layout.ptr)
        return out

    return add


def _shared(
    feature_map: SoftmaxFeatures, at: PositionFeatures | None, dtype: torch.dtype, *, key: bool
) -> SharedLogits | None:
    given = feature_map.factors(at, key=key)[1]
    return SharedLogits(*(x.to(dtype) for x in given)) if isinstance(given, SharedLogits) else None


def _is_known(attention: FLTAttention) -> bool:
    """Whether `add_attention` has a form for this layer."""
    maps = (attention.query, attention.key, attention.value, attention.out)
    return (
        is_plain(attention, FLTAttention)
        and all(is_plain(layer, nn.Linear) for layer in maps)
        and is_plain(attention.feature_map, SoftmaxFeatures)
        and attention.mode in ("linear", "auto")
        and not attention.causal
    )


def can_feed_forward(norm: nn.Module, ffn: nn.Module) -> bool:
    """Whether they are LayerNorm, and Linear, GELU, Linear, Dropout, as `FLTBlock` makes them."""
    kinds = (nn.Linear, nn.GELU, nn.Linear, nn.Dropout)
    known = is_plain(norm, nn.LayerNorm) and is_stack(ffn, *kinds)
    return known and getattr(list(ffn.children())[1], "approximate", None) == "none"


def add_feed_forward(x: Tensor, norm: nn.LayerNorm, ffn: nn.Sequential) -> Tensor:
    """Add FFN(LayerNorm(x)) to x in place, for Linear, GELU, Linear; a chunk of rows at a time."""
    first, last = ffn[0], ffn[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    size = max(128, FFN_BYTES // (first.out_features * x.element_size()))
    hidden = x.new_empty(min(size, len(x)), first.out_features)
    for part in pieces(slice(0, len(x)), size):
        rows = x[part]
        h, inner = norm(rows), hidden[: len(rows)]
        if first.bias is None:
            torch.mm(h, first.weight.T, out=inner)
        else:
            torch.addmm(first.bias, h, first.weight.T, out=inner)
        torch.ops.aten.gelu_(inner)
        if last.bias is not None:
            rows.add_(last.bias)
        rows.addmm_(inner, last.weight.T)
    return x


def add_attention(attention: FLTAttention, rows: Rows, ptr: Tensor) -> None:
    """Add what an attention layer gives, system by system; short ones share their products."""
    maps = _maps(attention)
    for systems in _groups(ptr, rows_only.CHUNK):
        length = systems[-1].stop - systems[0].start
        if len(systems) == 1 and _folding_pays(maps, length):
            _add_folded(maps, rows, systems[0])
        elif length <= rows_only.CHUNK:
            _add_short(maps, rows, systems)
        else:
            _add_long(maps, rows, systems[0])


def _maps(attention: FLTAttention) -> Maps:
    assert isinstance(attention.feature_map, SoftmaxFeatures)
    query, key, value, out = attention.query, attention.key, attention.value, attention.out
    projection = attention.feature_map.factors(None, key=False)[0]
    columns = scaled_columns(projection, query.weight.dtype)
    query_shift: Tensor | None = None
    out_bias: Tensor | None = out.bias
    if query.bias is not None:
        query_shift = query.bias.view(len(columns), 1, -1) @ columns
    if value.bias is not None:
        passed = out.weight @ value.bias
        out_bias = passed if out_bias is None else out_bias + passed
    key_map = key.weight.T, key.bias
    return Maps(
        query.weight.T, key_map, value.weight.T, out.weight.T, columns, query_shift, out_bias
    )


def _groups(ptr: Tensor, size: int) -> list[list[slice]]:
    """Systems that are not empty, neighbours together as long as they have up to `size` rows."""
    groups: list[list[slice]] = []
    offsets = ptr.tolist()
    for start, stop in pairwise(offsets):
        if start == stop:
            continue
        if groups and stop - groups[-1][0].start <= size:
            groups[-1].append(slice(start, stop))
        else:
            groups.append([slice(start, stop)])
    return groups


def _add_short(maps: Maps, rows: Rows, systems: list[slice]) -> None:
    """Systems that fit a chunk together."""
    part = slice(systems[0].start, systems[-1].stop)
    h = rows.normed(part)
    keys, queries = rows.keys(maps, h, part), rows.queries(maps, h, part)
    ptr = torch.tensor([part.start, *(system.stop for system in systems)]) - part.start
    value = _by_head(h @ maps.value, maps)
    out = attended(queries, keys, value, (ptr, ptr), queries.rows)
    rows.write(part, out.flatten(1), maps.out, maps.out_bias)


def _add_long(maps: Maps, rows: Rows, system: slice) -> None:
    """One system, a chunk at a time: all keys, then all queries."""
    parts, size = pieces(system, rows_only.CHUNK), rows_at_once(maps.columns)
    sums = None
    for part in parts:
        h = rows.normed(part)
        keys, value = rows.keys(maps, h, part), _by_head(h @ maps.value, maps)
        sums = _with_keys(sums, keys, value, size)
    assert sums is not None
    both = sums.both()
    for part in parts:
        queries = rows.queries(maps, rows.normed(part), part)
        for group in groups_of(_one(part), size):
            read_sums(queries, group, sums.peaks, both, queries.rows)
        rows.write(part, queries.rows.flatten(1), maps.out, maps.out_bias)


def _add_folded(maps: Maps, rows: Rows, system: slice) -> None:
    """The same with W_φ W_q, and W_o W_v around the sums, multiplied first.

    Σ_j φ(k_j) v_jᵀ = (Σ_j φ(k_j) h_jᵀ) W_vᵀ, and φ(q)·S W_oᵀ = φ(q)·(S W_oᵀ).
    """
    heads, head_dim, features = maps.columns.shape
    parts, width = pieces(system, rows_only.CHUNK), rows.x.shape[1]
    sums = None
    for part in parts:
        h = rows.normed(part)
        keys = rows.keys(maps, h, part)
        value = h[:, None].expand(-1, heads, -1)
        sums = _with_keys(sums, keys, value, rows_at_once(maps.columns))
    assert sums is not None
    by_head = maps.value.view(width, heads, head_dim).transpose(0, 1)
    out = sums.values[0] @ by_head @ maps.out.view(heads, head_dim, width)
    query = maps.query.view(width, heads, head_dim).transpose(0, 1) @ maps.columns
    query = query.transpose(0, 1).flatten(1)
    shift = sums.peaks[0, :, 0]
    if maps.query_shift is not None:
        shift = shift + maps.query_shift[:, 0]
    logits = rows.x.new_empty(rows_only.CHUNK, heads * features)
    for part in parts:
        h = rows.normed(part)
        flat = logits[: len(h)]
        if rows.at[0] is None:
            torch.mm(h, query, out=flat)
        else:
            basis, columns = rows.at[0]
            # The thin product first: adding one to what is there takes twice as long.
            torch.mm(basis[part], columns.transpose(0, 1).flatten(1), out=flat)
            flat.addmm_(h, query)
        queries = flat.view(-1, heads, features).add_(shift)
        exponentials(queries.sub_(queries.amax(-1, keepdim=True)))
        total = torch.bmm(queries.transpose(0, 1), sums.weights[0].mT).transpose(0, 1)
        queries.div_(total)
        rows.write(part, flat, out.flatten(0, 1), maps.out_bias)


def _with_keys(sums: KeySums | None, keys: Side, value: Tensor, size: int) -> KeySums:
    """Sums over keys so far of one system, None before the first, with some more in them."""
    first = sums is None
    if sums is None:
        sums = no_keys(keys, 1, value.shape[-1])
    for group in groups_of(_one(slice(0, len(value))), size):
        add_keys(sums, keys, value, group if first else group._replace(first=False))
    return sums


def _one(part: slice) -> Tensor:
    """`ptr` of the rows of `part` as one system."""
    return torch.tensor([0, part.stop - part.start])


def _at(at: SharedLogits | None, part: slice) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if at is None else (at.basis[part], at.columns)


def _by_head(x: Tensor, maps: Maps) -> Tensor:
    """(n, H·D) → (n, H, D)."""
    return x.view(len(x), *maps.columns.shape[:2])


def _folding_pays(maps: Maps, num_rows: int) -> bool:
    """Whether products of weights cost less than what they save, by multiplications.

    Theirs are of many thin matrices and count double: measured, C = 768 breaks even at 1,500 rows.
    """
    heads, head_dim, features = maps.columns.shape
    width, wide = maps.out.shape[0], heads * features
    saved = width**2 + wide * head_dim - width * wide
    return num_rows * saved > 2 * width * wide * head_dim
