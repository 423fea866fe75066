"""Linear maps and a norm for features in irreps of O(3), of which the layers are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.numerics import draw_normal, placed, seeded_generator
from flt_mol.integrations._irreps_layout import check_width, cleaned, o3, parts_of, terms_of


class IrrepsLinear(nn.Module):
    """`e3nn.o3.Linear`, the linear map between channels of equal irreps, drawn by a generator.

    Args:
        irreps_in: e3nn irreps of the features.
        irreps_out: of what comes out. Irreps that `irreps_in` lacks come out as 0.
        bias: whether 0e channels get one; 0 at first. Of those that `irreps_in` lacks it is all.
        generator: on CPU; None takes a seed from torch's global one.

    Example:
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
        super().__init__()
        self.irreps_in, self.irreps_out = cleaned(irreps_in), cleaned(irreps_out)
        self._dim = self.irreps_in.dim
        # e3nn cannot give a bias to scalars that it makes of nothing (0.6.0).
        self._by_hand = bias and not any(term.scalar for term in terms_of(self.irreps_in))
        self._terms = terms_of(self.irreps_out)
        # Weights of its own would be drawn from torch's global generator.
        self.linear = o3.Linear(
            self.irreps_in,
            self.irreps_out,
            internal_weights=False,
            shared_weights=True,
            biases=bias and not self._by_hand,
        )
        generator = seeded_generator(generator)
        start = draw_normal(self.linear.weight_numel, generator=generator)
        self.weight = nn.Parameter(placed(start))
        scalars = sum(term.mul for term in self._terms if term.scalar)
        self.bias = nn.Parameter(placed(torch.zeros(scalars))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, irreps_in.dim) → (N, irreps_out.dim); under autocast in its dtype.

        Raises:
            ValueError: `x` of another width.
        """
        check_width(x, self._dim, self.irreps_in)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            # e3nn's contractions are not all among those that autocast converts.
            kind = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(kind), weight.to(kind)
            bias = None if bias is None else bias.to(kind)
        with without_autocast(x):
            if bias is None or not self._by_hand:
                out: Tensor = self.linear(x, weight, bias)
            else:
                out = self.linear(x, weight) + self._on_scalars(bias)
        return out

    def _on_scalars(self, bias: Tensor) -> Tensor:
        """(scalars,) → (irreps_out.dim,), 0 for all that is not 0e."""
        parts = iter(bias.split([term.mul for term in self._terms if term.scalar]))
        return torch.cat(
            [
                next(parts) if term.scalar else bias.new_zeros(term.mul * term.width)
                for term in self._terms
            ]
        )


class IrrepsNorm(nn.Module):
    r"""Layer norm of irreps: x / √(mean ‖x‖²/(2l + 1) + ε) per term and atom, equivariant to O(3).

    The mean is over the channels of a term; from 0e channels theirs is subtracted before. Then a
    learned weight per channel, and a bias for 0e: for those it is torch's LayerNorm. The other
    terms are those of Equiformer's [1]. Each atom is normalised by itself, unlike in
    `e3nn.nn.BatchNorm`: what an atom gets does not depend on the batch.

    Args:
        irreps: e3nn irreps of the features.
        eps: ε.

    References:
        [1] Liao & Smidt, "Equiformer: Equivariant graph attention Transformer for 3D atomistic
        graphs", ICLR 2023, section 4.1.

    Example:
        >>> IrrepsNorm("1x1o")(torch.tensor([[3.0, 0.0, 4.0]])).norm() ** 2
        tensor(3.0000, grad_fn=<PowBackward0>)
    """

    def __init__(self, irreps: str | o3.Irreps, eps: float = 1e-5) -> None:
        super().__init__()
        self.irreps = cleaned(irreps)
        self._dim = self.irreps.dim
        self.eps = eps
        self.terms = terms_of(self.irreps)
        scalars = sum(term.mul for term in self.terms if term.scalar)
        self.weight = nn.Parameter(placed(torch.ones(self.irreps.num_irreps)))
        self.bias = nn.Parameter(placed(torch.zeros(scalars)))

    def forward(self, x: Tensor) -> Tensor:
        """(N, irreps.dim) → the same, in the dtype of `x`.

        Raises:
            ValueError: `x` of another width, or not packed.
        """
        check_width(x, self._dim, self.irreps, packed=True)
        weights = self.weight.split([term.mul for term in self.terms])
        biases = iter(self.bias.split([term.mul for term in self.terms if term.scalar]))
        parts = parts_of(at_least_float32(x), self.terms)
        out = []
        with without_autocast(x):
            for part, term, weight in zip(parts, self.terms, weights, strict=True):
                centred = part - part.mean(1, keepdim=True) if term.scalar else part
                scale = (centred.square().mean((1, 2), keepdim=True) + self.eps).rsqrt()
                scaled = centred * scale * weight[:, None]
                out.append((scaled + next(biases)[:, None] if term.scalar else scaled).flatten(1))
        return torch.cat(out, dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{self.irreps}"
