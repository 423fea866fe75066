"""Where frequencies ξ come from, and the density they were drawn with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional._common import at_least_float32, draw_normal, placed, seeded_generator


class GaussianFrequencies(nn.Module):
    r"""ξ_i = σ_i z_i with z_i ~ N(0, I_ℓ) drawn once and saved.

    With one σ the density is p(ξ) = N(ξ; 0, σ²I). With a σ per frequency it is that of the whole
    set, p(ξ) = (1/R) Σ_j N(ξ; 0, σ_j²I) (the balance heuristic [2]): (1/R) Σ_i g(ξ_i)/p(ξ_i) has
    the same expectation as with each frequency's own density, without that one's heavy tails.

    **Why the draw is fixed.** The expectation of the mask is f for *every* σ, so if z were drawn
    anew at each step, σ would receive no signal but the noise's. Learning σ, as the paper [1]
    proposes, means moving the one set of frequencies that the model keeps: z is a buffer, saved
    with the weights and never redrawn.

    Args:
        num_frequencies: R.
        dim: ℓ.
        sigma: Å⁻¹; one value for all, or (lowest, highest), spaced evenly in log σ. A Gaussian of
            width s in real space has a spectrum of width 1/(2πs): the default covers s of 1 to
            4 Å, that of `GaussianSpectrum`. The variance of the mask is finite only for
            2π σ s > 1/√2, and least at 1.
        learned_sigma: whether σ is a parameter; otherwise a buffer.
        shared_sigma: whether there is one σ in all instead of one per frequency.
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: σ not positive, or a range for a shared σ.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.
        [2] Veach & Guibas, "Optimally combining sampling techniques", SIGGRAPH 1995.

    Example:
        >>> frequencies, log_density = GaussianFrequencies(16)()
        >>> frequencies.shape, log_density.shape
        (torch.Size([16, 3]), torch.Size([16]))
    """

    draw: Tensor
    log_sigma: Tensor

    def __init__(
        self,
        num_frequencies: int,
        dim: int = 3,
        sigma: float | tuple[float, float] = (0.04, 0.16),
        learned_sigma: bool = True,
        shared_sigma: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        low, high = (sigma, sigma) if isinstance(sigma, int | float) else sigma
        if not 0 < low <= high or num_frequencies < 1 or dim < 1:
            raise ValueError(
                f"need 0 < σ, lowest first, and at least one frequency and dimension, got "
                f"sigma={sigma}, num_frequencies={num_frequencies}, dim={dim}"
            )
        if shared_sigma and low != high:
            raise ValueError(f"a shared sigma is one number, got the range {sigma}")
        self.num_frequencies = num_frequencies
        self.dim = dim
        self.register_buffer(
            "draw",
            placed(draw_normal(num_frequencies, dim, generator=seeded_generator(generator))),
        )
        log_sigma = placed(
            torch.linspace(
                math.log(low),
                math.log(high),
                1 if shared_sigma else num_frequencies,
                dtype=torch.float32,
                device="cpu",
            )
        )
        if learned_sigma:
            self.log_sigma = nn.Parameter(log_sigma)
        else:
            self.register_buffer("log_sigma", log_sigma)

    def forward(self) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and log p(ξ) (R,)."""
        log_sigma = at_least_float32(self.log_sigma)
        frequencies = log_sigma.exp()[:, None] * self.draw
        return frequencies, self.log_density(frequencies)

    def log_density(self, frequencies: Tensor) -> Tensor:
        """Logarithm of p(ξ) = (1/J) Σ_j N(ξ; 0, σ_j²I) over the J widths: (K, ℓ) → (K,)."""
        log_sigma = at_least_float32(self.log_sigma)
        squared = frequencies.square().sum(-1)[:, None]
        log_normal = (
            -0.5 * squared * (-2 * log_sigma).exp()
            - self.dim * log_sigma
            - 0.5 * self.dim * math.log(2 * math.pi)
        )
        return log_normal.logsumexp(-1) - math.log(log_sigma.numel())

    def extra_repr(self) -> str:
        """What `repr` shows."""
        learned = isinstance(self.log_sigma, nn.Parameter)
        return (
            f"num_frequencies={self.num_frequencies}, dim={self.dim}, "
            f"num_sigmas={self.log_sigma.numel()}, learned_sigma={learned}"
        )
