"""Base of frequency sets: ξ, and the weight of each for a spectrum."""

from __future__ import annotations

from torch import Tensor

from flt_mol.nn.radial import check_sizes
from flt_mol.nn.redraw import Redrawn
from flt_mol.nn.spectrum import Spectrum


class Frequencies(Redrawn):
    r"""ξ_1 … ξ_R and weights ρ_t, so that (1/R) Σ_t Re ρ_t e^{2πiξ_t·x} estimates f(x).

    ξ of density p have ρ = g(ξ)/p(ξ). Random ones keep their draws as `Redrawn` says. A family of
    your own defines `forward`.

    Args:
        num_frequencies: R.
        dim: ℓ.

    Raises:
        ValueError: R or ℓ below 1.
    """

    def __init__(self, num_frequencies: int, dim: int) -> None:
        super().__init__()
        check_sizes(num_frequencies=num_frequencies, dim=dim)
        self.num_frequencies = num_frequencies
        self.dim = dim

    def forward(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ) or (H, R, ℓ), cycles/Å, and ρ (H, R), complex where g is."""
        raise NotImplementedError(f"{type(self).__name__} has no frequencies: define forward")

    def check(self, spectrum: Spectrum) -> None:
        """ValueError unless these frequencies go with this spectrum."""
        if spectrum.dim != self.dim:
            ours = f"{type(self).__name__} over {self.dim}"
            raise ValueError(f"the spectrum is over {spectrum.dim} dimensions, {ours}")
