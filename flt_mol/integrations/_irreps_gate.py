"""The feed-forward net of a block: gates for what has a direction, functions for what has none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import seeded_generator
from flt_mol.integrations._irreps import IrrepsLinear
from flt_mol.integrations._irreps_layout import cleaned, e3nn_nn, o3, refuse_missing


class IrrepsFeedForward(nn.Module):
    """Linear ∘ Gate ∘ Linear: SiLU of 0e, tanh of 0o, and the rest times sigmoids of gates.

    `e3nn.nn.Gate` with one gate for each channel that is neither 0e nor 0o, made of 0e channels.
    Of irreps without 0e each gate is a number, learned by its bias.

    Args:
        irreps: e3nn irreps of what goes in and comes out.
        irreps_hidden: of the hidden layer; the default is `irreps`.
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: `irreps_hidden` that lacks an irrep of `irreps`, which would come out as 0.

    Example:
        >>> IrrepsFeedForward("8x0e + 4x1o", "16x0e + 8x1o")(torch.randn(5, 20)).shape
        torch.Size([5, 20])
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
        refuse_missing("irreps", irreps, hidden, "irreps_hidden")
        generator = seeded_generator(generator)
        gate = _gate(hidden)
        self.first = IrrepsLinear(irreps, gate.irreps_in, True, generator)
        self.gate = gate
        self.last = IrrepsLinear(gate.irreps_out, irreps, True, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(N, irreps.dim) → (N, irreps.dim).

        Raises:
            ValueError: `x` of another width.
        """
        out: Tensor = self.last(self.gate(self.first(x)))
        return out


def _gate(irreps: o3.Irreps) -> e3nn_nn.Gate:
    flat = o3.Irreps([term for term in irreps if term.ir.l == 0])
    gated = o3.Irreps([term for term in irreps if term.ir.l > 0])
    gates = o3.Irreps([(gated.num_irreps, "0e")] if len(gated) else [])
    functions = [nn.functional.silu if term.ir.p == 1 else torch.tanh for term in flat]
    return e3nn_nn.Gate(flat, functions, gates, [torch.sigmoid] * len(gates), gated)
