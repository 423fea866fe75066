"""What every set of frequencies offers: ξ, and the weight of each for a spectrum."""

from __future__ import annotations

from torch import Tensor

from flt_mol.functional.groups import at_least_float32
from flt_mol.nn.layers import placed
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
        if num_frequencies < 1 or dim < 1:
            raise ValueError(
                f"num_frequencies and dim must be ≥ 1, got {num_frequencies} and {dim}"
            )
        self.num_frequencies = num_frequencies
        self.dim = dim

    def forward(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ) or (H, R, ℓ), cycles/Å, and ρ (H, R), complex where g is."""
        raise NotImplementedError(f"{type(self).__name__} has no frequencies: define forward")

    def check(self, spectrum: Spectrum) -> None:
        """ValueError unless these frequencies go with this spectrum."""
        if spectrum.dim != self.dim:
            raise ValueError(
                f"the spectrum is over {spectrum.dim} dimensions, {type(self).__name__} over "
                f"{self.dim}"
            )

    def extra_repr(self) -> str:
        """What `repr` shows."""
        every = "" if self.redraw_every is None else f", redraw_every={self.redraw_every}"
        return f"num_frequencies={self.num_frequencies}, dim={self.dim}{every}"


class QuadratureFrequencies(Frequencies):
    """Fixed frequencies with quadrature weights: ∫ h(ξ) dξ ≈ Σ_t ω_t h(ξ_t) for even h.

    The mask is then Σ_t ω_t g(ξ_t) cos 2πξ_t·x: no noise, but an error that depends on g and x.

    Args:
        points: ξ (R, ℓ), cycles/Å; of ξ and −ξ, which have the same wave, one is enough.
        weights: ω (R,) > 0, Å^{-ℓ}.

    Raises:
        ValueError: shapes that do not belong together, or weights that are not positive.
    """

    points: Tensor
    log_weight: Tensor

    def __init__(self, points: Tensor, weights: Tensor) -> None:
        if points.dim() != 2 or weights.shape != points.shape[:1] or not bool((weights > 0).all()):
            raise ValueError(
                f"expected points (R, ℓ) and positive weights (R,), got {tuple(points.shape)} and "
                f"{tuple(weights.shape)}, the smallest {float(weights.min()):g}"
            )
        super().__init__(*points.shape)
        self.register_buffer("points", placed(points))
        self.register_buffer("log_weight", placed(weights.log()))

    def forward(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and ρ = R ω g(ξ) (H, R)."""
        points = at_least_float32(self.points)
        weights = at_least_float32(self.log_weight).exp()
        return points, spectrum(points) * (self.num_frequencies * weights)
