"""Frequencies drawn from the spectrum itself, each from one of its Gaussians."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flt_mol.nn.frequencies.base import Frequencies
from flt_mol.nn.frequencies.gaussian import normal_vectors
from flt_mol.nn.spectrum import GaussianSpectrum, Spectrum


class ComponentFrequencies(Frequencies):
    r"""Each frequency belongs to one term t of a sum of Gaussians and is drawn as that term is.

    For f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²), a set per head: ξ = z/(2πσ_t) with z ~ N(0, I_ℓ), and
    N̂(x) = Σ_t (a_t/n_t) Σ_{i of t} cos(z_i·x/σ_t), where n_t of the R frequencies belong to t:
    R/T each, the rest to the first ones. Unbiased, |N̂(x)| ≤ Σ_t |a_t| for every draw, and gradients
    reach a and σ, under `redraw_every` too. At equal accuracy it needs 1.5 to 5 times fewer
    frequencies than a Gaussian of a wrong width. With means and phases, ξ = μ_t + z/(2πσ_t) and the
    waves are cos(2πξ·x + α_t).

    Goes with "gaussian", "gaussian_mixture" and "directional" spectra, which stay where they are,
    in `FourierRPE`: only the numbers of heads and terms are needed here.

    Args:
        num_frequencies: R ≥ T, of each head.
        num_heads, num_terms, dim: H, T and ℓ of the spectrum.
        sampling: how the z of a term and head are related: see `normal_vectors`.
        redraw_every: None, or the number of training steps with one draw, see `Redrawn`.
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: R < T, which would leave terms out, or an unknown `sampling`.
    """

    draw: Tensor

    def __init__(
        self,
        num_frequencies: int,
        num_heads: int,
        num_terms: int,
        dim: int = 3,
        *,
        sampling: str = "normal",
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_frequencies, dim)
        if num_heads < 1 or not 1 <= num_terms <= num_frequencies:
            sizes = f"num_heads={num_heads}, num_terms={num_terms}"
            raise ValueError(f"num_frequencies is {num_frequencies}, expected ≥ num_terms: {sizes}")
        self.num_heads = num_heads
        self.num_terms = num_terms
        self.sampling = sampling
        self.counts = [len(range(t, num_frequencies, num_terms)) for t in range(num_terms)]
        self._init_redraw(redraw_every, generator)

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        z = [
            torch.cat([normal_vectors(n, self.dim, self.sampling, generator) for n in self.counts])
            for _ in range(self.num_heads)
        ]
        return {"draw": torch.stack(z)}

    def check(self, spectrum: Spectrum) -> None:
        """ValueError unless the spectrum is a sum of as many Gaussians, for as many heads."""
        super().check(spectrum)
        if not isinstance(spectrum, GaussianSpectrum):
            name = type(spectrum).__name__
            raise ValueError(f"ComponentFrequencies go with sums of Gaussians, not with {name}")
        given = spectrum.num_heads, spectrum.num_terms
        if given != (own := (self.num_heads, self.num_terms)):
            raise ValueError(f"the spectrum has (heads, terms) {given}, the frequencies {own}")

    def forward(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (H, R, ℓ), cycles/Å, and ρ = R a_t e^{iα_t}/n_t (H, R), real where there is no α."""
        assert isinstance(spectrum, GaussianSpectrum)
        counts = torch.tensor(self.counts, device=self.draw.device)
        term = torch.repeat_interleave(counts, output_size=self.num_frequencies)
        frequencies = self.draw / (2 * math.pi * spectrum.lengths())[:, term, None]
        if spectrum.mean is not None:
            frequencies = frequencies + spectrum.mean[:, term]
        ratio = spectrum.amplitudes() * (self.num_frequencies / counts)
        if spectrum.phase is not None:
            ratio = torch.polar(torch.ones_like(ratio), spectrum.phase.to(ratio.dtype)) * ratio
        return frequencies, ratio[:, term]
