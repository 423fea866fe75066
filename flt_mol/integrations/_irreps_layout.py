"""How features in irreps of O(3) lie in memory, by term and by head. Here e3nn is imported."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.groups import at_least_float32

try:
    from e3nn import nn as e3nn_nn
    from e3nn import o3
except ImportError as error:
    raise ImportError("irreps need e3nn: pip install 'flt_mol[e3nn]'") from error

__all__ = [
    "Term",
    "by_head",
    "check_width",
    "cleaned",
    "e3nn_nn",
    "invariants",
    "irreps_of_values",
    "joined",
    "number_of_invariants",
    "o3",
    "parts_of",
    "refuse_missing",
    "terms_of",
]

_SOFT = 0.1  # below this length a norm is a parabola, so that it is smooth at 0


def cleaned(irreps: str | o3.Irreps) -> o3.Irreps:
    """Irreps of the same layout, without empty terms and with equal neighbours joined.

    Example:
        >>> cleaned("2x0e + 0x2e + 3x0e + 1o")
        5x0e+1x1o
    """
    return o3.Irreps(irreps).remove_zero_multiplicities().simplify()


def refuse_missing(name: str, irreps: o3.Irreps, available: o3.Irreps, source: str) -> None:
    """ValueError for irreps of which no linear map makes anything but 0.

    Example:
        >>> refuse_missing("irreps", cleaned("2x1o"), cleaned("4x0e"), "irreps_hidden")
        Traceback (most recent call last):
        ValueError: irreps 2x1o hold 1o, which irreps_hidden 4x0e lack: leave it out, or add it
    """
    missing = sorted({term.ir for term in irreps} - {term.ir for term in available})
    if missing:
        raise ValueError(
            f"{name} {irreps} hold {', '.join(map(str, missing))}, which {source} {available} "
            "lack: leave it out, or add it"
        )


def check_width(x: Tensor, dim: int, irreps: o3.Irreps, *, packed: bool = False) -> None:
    """ValueError for features that are not of width `dim`, that of `irreps`.

    Args:
        x: (…, dim), or (N, dim) where they must be packed.
        dim: a plain number, since torch.compile cannot ask `irreps`.
        irreps: for the message.
        packed: whether there may be no further axes.

    Example:
        >>> check_width(torch.zeros(5, 8), 12, cleaned("4x1o"))
        Traceback (most recent call last):
        ValueError: x has shape (5, 8), expected (N, 12) for irreps 4x1o
    """
    if x.dim() == 0 or x.shape[-1] != dim or (packed and x.dim() != 2):
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (N, {dim}) for irreps {irreps}")


class Term(NamedTuple):
    """A term of irreps in plain numbers, which torch.compile can read: e3nn's it cannot.

    Attributes:
        mul: how many channels.
        width: 2l + 1.
        scalar: whether it is 0e.
    """

    mul: int
    width: int
    scalar: bool


def terms_of(irreps: o3.Irreps) -> tuple[Term, ...]:
    """The terms in order."""
    return tuple(Term(term.mul, term.ir.dim, term.ir.is_scalar()) for term in irreps)


def parts_of(x: Tensor, terms: tuple[Term, ...]) -> list[Tensor]:
    """Features (N, dim) as one (N, mul, 2l + 1) for each term."""
    parts = x.split([term.mul * term.width for term in terms], dim=-1)
    return [
        part.reshape(x.shape[0], term.mul, term.width)
        for part, term in zip(parts, terms, strict=True)
    ]


def by_head(x: Tensor, terms: tuple[Term, ...], num_heads: int) -> Tensor:
    """(N, dim) → (N, H, dim/H): each head gets its share of the channels of every term."""
    shares = [
        part.reshape(x.shape[0], num_heads, term.mul // num_heads * term.width)
        for part, term in zip(parts_of(x, terms), terms, strict=True)
    ]
    return torch.cat(shares, dim=-1)


def joined(x: Tensor, terms: tuple[Term, ...]) -> Tensor:
    """What `by_head` took apart: (N, H, dim/H) → (N, dim)."""
    widths = [term.mul * term.width // x.shape[1] for term in terms]
    return torch.cat([part.flatten(1) for part in x.split(widths, dim=-1)], dim=-1)


def invariants(x: Tensor, terms: tuple[Term, ...], norms: bool) -> Tensor:
    """The 0e channels and, with `norms`, √(‖v‖² + s²) − s of all others, s = 0.1: (N, I)."""
    kept = []
    for part, term in zip(parts_of(x, terms), terms, strict=True):
        if term.scalar:
            kept.append(part.squeeze(-1))
        elif norms:
            wide = at_least_float32(part)
            size = (wide.square().sum(-1) + _SOFT**2).sqrt() - _SOFT
            kept.append(size.to(x.dtype))
    return torch.cat(kept, dim=-1)


def number_of_invariants(irreps: o3.Irreps, norms: bool) -> int:
    """I, of which queries and keys are made.

    Raises:
        ValueError: there are none.
    """
    count: int = sum(term.mul for term in irreps if norms or term.ir.is_scalar())
    if not count:
        raise ValueError(
            f"irreps {irreps} have no invariants to make queries and keys of: add 0e channels, or "
            "take lengths with norms=True"
        )
    return count


def irreps_of_values(irreps: o3.Irreps, given: str | o3.Irreps | None, num_heads: int) -> o3.Irreps:
    """Irreps whose multiplicities are multiples of H.

    Raises:
        ValueError: those given are not.
    """
    if given is None:
        return o3.Irreps([(-(-mul // num_heads) * num_heads, ir) for mul, ir in irreps])
    values = cleaned(given)
    for term in values:
        if term.mul % num_heads:
            more = -(-term.mul // num_heads) * num_heads
            raise ValueError(
                f"irreps_value {values}: {term} is not shared evenly by {num_heads} heads, take "
                f"{more}x{term.ir}; without irreps_value this is done for you"
            )
    return values
