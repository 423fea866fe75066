"""Features in irreps of O(3): layout, linear maps, norm, feed-forward net. Imports e3nn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.nn.layers import draw_normal, placed, seeded_generator
from flt_mol.nn.local_filter import check_features

try:
    from e3nn import nn as e3nn_nn
    from e3nn import o3 as o3
except ImportError as error:
    raise ImportError("irreps need e3nn: pip install 'flt_mol[e3nn]'") from error

_SOFT = 0.1  # below this length a norm is a parabola, so that it is smooth at 0


def cleaned(irreps: str | o3.Irreps) -> o3.Irreps:
    """Irreps of the same layout, without empty terms and with equal neighbours joined."""
    return o3.Irreps(irreps).remove_zero_multiplicities().simplify()


def parts_of(x: Tensor, irreps: o3.Irreps) -> list[Tensor]:
    """Features (N, dim) as one (N, mul, 2l + 1) for each term."""
    parts = zip(x.split([term.dim for term in irreps], dim=-1), irreps, strict=True)
    return [part.unflatten(1, (term.mul, term.ir.dim)) for part, term in parts]


def by_head(x: Tensor, irreps: o3.Irreps, num_heads: int) -> Tensor:
    """(N, dim) → (N, H, dim/H): each head gets its share of the channels of every term."""
    shares = [part.flatten(1).unflatten(1, (num_heads, -1)) for part in parts_of(x, irreps)]
    return torch.cat(shares, dim=-1)


def joined(x: Tensor, irreps: o3.Irreps) -> Tensor:
    """The inverse of `by_head`: (N, H, dim/H) → (N, dim)."""
    widths = [term.dim // x.shape[1] for term in irreps]
    return torch.cat([part.flatten(1) for part in x.split(widths, dim=-1)], dim=-1)


def invariants(x: Tensor, irreps: o3.Irreps, norms: bool) -> Tensor:
    """The 0e channels and, with `norms`, √(‖v‖² + s²) − s of all others, s = 0.1: (N, I)."""
    kept = []
    for part, term in zip(parts_of(x, irreps), irreps, strict=True):
        if term.ir.is_scalar():
            kept.append(part.squeeze(-1))
        elif norms:
            size = (at_least_float32(part).square().sum(-1) + _SOFT**2).sqrt() - _SOFT
            kept.append(size.to(x.dtype))
    return torch.cat(kept, dim=-1)


class IrrepsLinear(o3.Linear):  # type: ignore[misc]
    """`e3nn.o3.Linear`, the linear map between channels of equal irreps, drawn by a generator.

    Args:
        irreps_in: e3nn irreps of the features.
        irreps_out: of what comes out. Irreps that `irreps_in` lacks come out as 0.
        bias: whether 0e channels get one; 0 at first. Of those that `irreps_in` lacks it is all.
        generator: on CPU; None takes a seed from torch.

    Examples:
        >>> IrrepsLinear("8x0e + 4x1o", "2x0e + 2x1o")(torch.randn(5, 20)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        irreps_in: str | o3.Irreps,
        irreps_out: str | o3.Irreps,
        bias: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        with torch.random.fork_rng(devices=[]):  # e3nn draws from torch's global generator
            super().__init__(cleaned(irreps_in), cleaned(irreps_out))
        start = draw_normal(self.weight_numel, generator=seeded_generator(generator))
        with torch.no_grad():
            self.weight.copy_(start)
        # e3nn's own fail where an irrep is made of nothing else.
        scalar = [term.ir.is_scalar() for term in self.irreps_out for _ in range(term.dim)]
        index = torch.tensor(scalar, dtype=torch.bool).nonzero().squeeze(1)
        self.register_buffer("_scalars", index, persistent=False)
        self.offset = nn.Parameter(placed(torch.zeros(len(index)))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, irreps_in.dim) → (N, irreps_out.dim), in the dtype of the weights."""
        check_features(x, self.irreps_in.dim)
        with without_autocast(x):  # e3nn's contractions are not all among those that it converts
            out: Tensor = super().forward(x.to(self.weight.dtype))
            if self.offset is not None:
                out = out.index_add(1, self._scalars, self.offset.expand(len(out), -1))
        return out


class IrrepsNorm(nn.Module):
    r"""Layer norm of irreps: x / √(mean ‖x‖²/(2l + 1) + ε) per term and atom, equivariant to O(3).

    ε is 1e-5. The mean is over the channels of a term; from 0e channels theirs is subtracted
    before. Then a learned weight per channel, and a bias for 0e, as torch's LayerNorm; the other
    terms are those of Equiformer's [1]. Unlike `e3nn.nn.BatchNorm`, nothing depends on the batch.

    Args:
        irreps: e3nn irreps of the features.

    References:
        [1] Liao & Smidt, "Equiformer", ICLR 2023, section 4.1.
    """

    def __init__(self, irreps: str | o3.Irreps) -> None:
        super().__init__()
        self.irreps = cleaned(irreps)
        self.weight = nn.Parameter(placed(torch.ones(self.irreps.num_irreps)))
        self.bias = nn.Parameter(placed(torch.zeros(self.irreps.count("0e"))))

    def forward(self, x: Tensor) -> Tensor:
        """(N, irreps.dim) → the same, in the dtype of `x`."""
        check_features(x, self.irreps.dim)
        weights = self.weight.split([term.mul for term in self.irreps])
        biases = iter(self.bias.split([term.mul for term in self.irreps if term.ir.is_scalar()]))
        parts = parts_of(at_least_float32(x), self.irreps)
        out = []
        with without_autocast(x):
            for part, term, weight in zip(parts, self.irreps, weights, strict=True):
                scalar = term.ir.is_scalar()
                centred = part - part.mean(1, keepdim=True) if scalar else part
                scale = (centred.square().mean((1, 2), keepdim=True) + 1e-5).rsqrt()
                scaled = centred * scale * weight[:, None]
                out.append((scaled + next(biases)[:, None] if scalar else scaled).flatten(1))
        return torch.cat(out, dim=-1).to(x.dtype)


class IrrepsFeedForward(nn.Module):
    """Linear ∘ Gate ∘ Linear: SiLU of 0e, tanh of 0o, and the rest times sigmoids of gates.

    `e3nn.nn.Gate` with one gate for each channel that is neither 0e nor 0o, made of 0e channels.

    Args:
        irreps: e3nn irreps of what goes in and comes out.
        irreps_hidden: of the hidden layer; the default is `irreps`. Irreps that it lacks come out
            as 0.
        generator: on CPU; None takes a seed from torch.
    """

    def __init__(
        self,
        irreps: str | o3.Irreps,
        irreps_hidden: str | o3.Irreps | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        irreps = cleaned(irreps)
        hidden = irreps if irreps_hidden is None else cleaned(irreps_hidden)
        flat = o3.Irreps([term for term in hidden if term.ir.l == 0])
        gated = o3.Irreps([term for term in hidden if term.ir.l > 0])
        gates = o3.Irreps([(gated.num_irreps, "0e")] if len(gated) else [])
        acts = [nn.functional.silu if term.ir.p == 1 else torch.tanh for term in flat]
        self.gate = e3nn_nn.Gate(flat, acts, gates, [torch.sigmoid] * len(gates), gated)
        generator = seeded_generator(generator)
        self.first = IrrepsLinear(irreps, self.gate.irreps_in, True, generator)
        self.last = IrrepsLinear(self.gate.irreps_out, irreps, True, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(N, irreps.dim) → (N, irreps.dim)."""
        out: Tensor = self.last(self.gate(self.first(x)))
        return out
