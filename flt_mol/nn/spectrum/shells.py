"""Gaussian shells: masks with peaks away from zero, so that single distances can be marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flt_mol.nn.spectrum._shapes import laguerre_function
from flt_mol.nn.spectrum._terms import TermSpectrum


class ShellSpectrum(TermSpectrum):
    r"""Gaussian shells per head: f(x) = Σ_t a_t (r²/2n_tσ_t²)^{n_t} e^{n_t − r²/2σ_t²}, r = ‖x‖.

    Each is r^{2n} e^{−r²/2σ²} over its greatest value, so that it peaks with height a_t at
    r = σ_t √(2n_t), with a width of about σ_t/√2; n = 0 is a zero-centred Gaussian. In any ℓ

    g(ξ) = Σ_t a_t n_t! (e/n_t)^{n_t} (2πσ_t²)^{ℓ/2} L_{n_t}^{(ℓ/2−1)}(2π²σ_t²‖ξ‖²) e^{−2π²σ_t²‖ξ‖²}

    with generalised Laguerre polynomials: n derivatives of the Gaussian's transform
    (π/α)^{ℓ/2} e^{−π²‖ξ‖²/α} by −α at α = 1/2σ². At one σ, the shells n = 0, 1, 2, … are a complete
    radial basis (polynomials in r² times a Gaussian). Rotation-invariant; the signs of g change.

    Args:
        num_heads, num_terms, dim: H, T and ℓ.
        powers: n_t ≥ 0 for each term, the same for all heads; None is 0, 1, …, T − 1.
        sigma_min, sigma_max: σ of the first and the last term at the start, Å, evenly spaced in
            log σ between. The default puts peaks at 0, 2.1, 3.0, 3.7, 4.2, … Å.
        generator: on CPU; None takes a seed from torch's global one.

    Attributes:
        log_length: log σ (H, T), σ in Å.
        amplitude: a (H, T), normal with standard deviation 1/√T at the start.

    Raises:
        ValueError: powers that are not T whole numbers ≥ 0, or widths that are not
            0 < sigma_min ≤ sigma_max.

    Example:
        >>> spectrum = ShellSpectrum(num_heads=1, num_terms=1, powers=[2], sigma_max=1.5)
        >>> mask = spectrum.mask(torch.tensor([[0.0, 0, 0], [3.0, 0, 0]])) / spectrum.amplitude
        >>> mask.detach().abs().flatten()
        tensor([0., 1.])
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        powers: Sequence[int] | None = None,
        sigma_min: float = 1.5,
        sigma_max: float = 1.5,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            num_heads, num_terms, dim, ("sigma", sigma_min, sigma_max), generator=generator
        )
        self.powers = tuple(range(num_terms) if powers is None else powers)
        if len(self.powers) != num_terms or any(n < 0 or n != int(n) for n in self.powers):
            raise ValueError(
                f"powers is {powers}, expected {num_terms} whole numbers ≥ 0, one for each term"
            )

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        u = 2 * math.pi**2 * length.square() * xi.square().sum(-1)
        terms = [
            _over_peak(n) * laguerre_function(term, n, self.dim / 2 - 1)
            for n, term in zip(self.powers, u.unbind(1), strict=True)
        ]
        volume = (math.sqrt(2 * math.pi) * length) ** self.dim
        return volume * torch.stack(terms, 1) * (-0.5 * u).exp()

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        u = x.square().sum(-1) / (2 * length.square())
        # As a power of y e^{1−y} ≤ 1: at large n, r^{2n} alone would overflow.
        terms = [
            (term / n * (1 - term / n).exp()) ** n if n else (-term).exp()
            for n, term in zip(self.powers, u.unbind(-1), strict=True)
        ]
        return torch.stack(terms, -1)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, powers={self.powers}"


def _over_peak(n: int) -> float:
    """The transform's n! over the greatest value of u^n e^{−u}: n! (e/n)^n."""
    return math.exp(math.lgamma(n + 1) + n - n * math.log(n)) if n else 1.0
