"""Exponential features of packed rows a group of systems at a time, and sums over keys of them.

Short systems share their products and exponentials; each has only its own sums. Long ones come in
pieces. Layout is (H, n, M), one row of features after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.numerics import least_exponent

# Numbers of features at once: 512 rows of 12 heads with 64 features stay in a core's cache.
NUMBERS = 3 * 2**17


class Group(NamedTuple):
    """Neighbouring rows: those of some systems, or a piece of one.

    Attributes:
        part: the rows.
        systems: numbers of the systems, each with rows here.
        sizes: how many rows of each.
        first: whether these are the first rows of the first system.
    """

    part: slice
    systems: list[int]
    sizes: list[int]
    first: bool

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """(H, n, …) → the rows of each system, as views."""
        return (x,) if len(self.sizes) == 1 else x.split(self.sizes, 1)


class KeySums(NamedTuple):
    """What queries need to know of the keys of B systems.

    Attributes:
        peaks: c (B, H, 1, M), the largest logit of each feature; 0 without keys.
        weights: z = Σ_j φ(k_j), (B, H, 1, M).
        values: S = Σ_j φ(k_j) v_jᵀ (B, H, M, V).
    """

    peaks: Tensor
    weights: Tensor
    values: Tensor

    def both(self) -> Tensor:
        """[S, z] (B, H, M, V + 1), for one product with queries."""
        return torch.cat([self.values, self.weights.mT], -1)


class Side(NamedTuple):
    """Queries or keys of all systems, and what makes logits of them.

    Attributes:
        rows: x (N, H, D).
        columns: W D^{-1/4}, (H, D, M).
        basis: T (N, 2R), or None without positions.
        shared: F (H, 2R, M), or None.
        shift: (H, 1, M), of queries only, added to all their logits; None for 0.
    """

    rows: Tensor
    columns: Tensor
    basis: Tensor | None = None
    shared: Tensor | None = None
    shift: Tensor | None = None

    def logits(self, part: slice) -> Tensor:
        """x_h W_h + T F_h (H, n, M) of some rows."""
        rows = self.rows[part].transpose(0, 1).to(self.columns.dtype)
        if self.basis is None or self.shared is None:
            return torch.bmm(rows, self.columns)
        basis = self.basis[part].to(rows.dtype).expand(len(self.shared), -1, -1)
        return torch.bmm(basis, self.shared).baddbmm_(rows, self.columns)

    def key_logits(self, part: slice) -> Tensor:
        """The same less ‖x̂‖²/2, which cancels for queries only."""
        rows = self.rows[part].to(self.columns.dtype)
        norm = torch.linalg.vector_norm(rows, dim=-1).T[..., None]
        return self.logits(part).sub_(norm.square_().mul_(0.5 * rows.shape[-1] ** -0.5))

    def query_features(self, group: Group, peaks: Tensor) -> Tensor:
        """φ(q) (H, n, M), the largest of each row 1, given c of the keys."""
        logits = self.logits(group.part)
        for system, some in zip(group.systems, group.split(logits), strict=True):
            some.add_(peaks[system] if self.shift is None else peaks[system] + self.shift)
        return exponentials(logits.sub_(logits.amax(-1, keepdim=True)))

    def key_features(self, group: Group, peaks: Tensor) -> Tensor:
        """φ(k) (H, n, M) relative to c."""
        logits = self.key_logits(group.part)
        for system, some in zip(group.systems, group.split(logits), strict=True):
            some.sub_(peaks[system])
        return exponentials(logits)


class Gradients:
    """What a `Side` gets back: zeros to begin with, None for what nobody asks for.

    Args:
        side: queries or keys.
        needs: whether rows, basis and columns of positions need a gradient.
    """

    def __init__(self, side: Side, needs: tuple[bool, bool, bool]) -> None:
        self.side = side
        self.rows, self.basis, self.shared = (
            torch.zeros_like(x) if needed and x is not None else None
            for needed, x in zip(needs, (side.rows, side.basis, side.shared), strict=True)
        )

    def add(self, part: slice, grad: Tensor, *, key: bool) -> None:
        """Hand the gradient (H, n, M) of some rows' logits on."""
        side = self.side
        if self.rows is not None:
            to_rows = torch.bmm(grad, side.columns.mT)
            if key:
                scale = grad.sum(-1, keepdim=True).mul_(-(side.rows.shape[-1] ** -0.5))
                to_rows.addcmul_(side.rows[part].transpose(0, 1), scale)
            self.rows[part] = to_rows.transpose(0, 1)
        if self.basis is not None and side.shared is not None:
            self.basis[part] = torch.bmm(grad, side.shared.mT).sum(0)
        if self.shared is not None and side.basis is not None:
            self.shared.baddbmm_(side.basis[part].T.expand(len(grad), -1, -1), grad)


def exponentials(logits: Tensor) -> Tensor:
    """Their exponentials, in place; those far below rounding are raised to what is not slow."""
    return logits.clamp_(min=least_exponent(logits.dtype)).exp_()


def joined(group: Group, rows: Tensor, matrices: Tensor) -> Tensor:
    """The product of each system's rows (H, n_b, I) with its matrix (H, I, O): (H, n, O)."""
    parts = zip(group.systems, group.split(rows), strict=True)
    products = [torch.bmm(some, matrices[system]) for system, some in parts]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def groups_of(ptr: Tensor, size: int) -> list[Group]:
    """Systems that have rows, neighbours together up to `size` rows; longer ones in pieces.

    Example:
        >>> [(g.systems, g.sizes) for g in groups_of(torch.tensor([0, 2, 2, 3, 8]), 4)]
        [([0, 2], [2, 1]), ([3], [4]), ([3], [1])]
    """
    groups: list[Group] = []
    for system, (start, stop) in enumerate(pairwise(ptr.tolist())):
        last = groups[-1] if groups else None
        if last is not None and start < stop <= last.part.start + size and last.first:
            last.systems.append(system)
            last.sizes.append(stop - start)
            groups[-1] = last._replace(part=slice(last.part.start, stop))
            continue
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            groups.append(Group(slice(begin, end), [system], [end - begin], begin == start))
    return groups


def scaled_columns(projection: Tensor, dtype: torch.dtype) -> Tensor:
    """W D^{-1/4}, transposed: (H, M, D) → (H, D, M)."""
    scaled: Tensor = projection.to(dtype) * projection.shape[-1] ** -0.25
    return scaled.transpose(1, 2).contiguous()


def rows_at_once(columns: Tensor) -> int:
    """How many rows' features, given columns (H, D, M), are held at once."""
    return max(1, NUMBERS // max(1, columns.shape[0] * columns.shape[2]))


def no_keys(keys: Side, num_systems: int, value_dim: int) -> KeySums:
    """Sums over no keys."""
    heads, _, features = keys.columns.shape
    zeros = keys.columns.new_zeros
    peaks, weights = (zeros(num_systems, heads, 1, features) for _ in range(2))
    return KeySums(peaks, weights, zeros(num_systems, heads, features, value_dim))


def add_keys(sums: KeySums, keys: Side, value: Tensor, group: Group) -> None:
    """Add a group of keys with values (K, H, V); rescale what is there as logits turn up larger."""
    logits = keys.key_logits(group.part)
    for system, some in zip(group.systems, group.split(logits), strict=True):
        largest = some.amax(1, keepdim=True)
        if not group.first:
            largest = torch.maximum(largest, sums.peaks[system])
            rescale = (sums.peaks[system] - largest).exp_()
            sums.weights[system].mul_(rescale)
            sums.values[system].mul_(rescale.mT)
        some.sub_(largest)
        sums.peaks[system] = largest
    exponentials(logits)
    values = group.split(value[group.part].to(logits.dtype).transpose(0, 1))
    for system, some, own in zip(group.systems, group.split(logits), values, strict=True):
        sums.weights[system].add_(some.sum(1, keepdim=True))
        sums.values[system].baddbmm_(some.mT, own)


def sum_keys(keys: Side, value: Tensor, ptr: Tensor, size: int) -> KeySums:
    """`KeySums` of keys with values (K, H, V), `size` rows at a time."""
    sums = no_keys(keys, len(ptr) - 1, value.shape[-1])
    for group in groups_of(ptr, size):
        add_keys(sums, keys, value, group)
    return sums


def read_sums(queries: Side, group: Group, peaks: Tensor, both: Tensor, out: Tensor) -> Tensor:
    """φ(q)·S / φ(q)·z of a group → its rows of `out` (N, H, V), 0 without keys.

    Args:
        queries: of all rows; `out` may be the same memory.
        group: the rows.
        peaks: c of all systems.
        both: `KeySums.both`.
        out: where results go.

    Returns:
        φ(q)·z (H, n, 1), 1 without keys.
    """
    features = queries.query_features(group, peaks)
    read = joined(group, features, both)
    total = read[..., -1:].masked_fill_(read[..., -1:] == 0, 1.0)
    torch.div(read[..., :-1], total, out=out[group.part].transpose(0, 1))
    return total
