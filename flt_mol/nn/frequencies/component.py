"""Frequencies drawn from the spectrum itself, each from one of its Gaussians."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.numerics import at_least_float32
from flt_mol.nn.frequencies.base import Frequencies
from flt_mol.nn.frequencies.draws import SAMPLINGS, normal_vectors
from flt_mol.nn.spectrum import (
    DirectionalSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    Spectrum,
)


class ComponentFrequencies(Frequencies):
    r"""Each frequency belongs to one term t of a sum of Gaussians and is drawn as that term is.

    For f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²), a set per head: ξ = z/(2πσ_t) with z ~ N(0, I_ℓ), and
    N̂(x) = Σ_t (a_t/n_t) Σ_{i of t} cos(z_i·x/σ_t), where n_t of the R frequencies belong to t:
    R/T each, the rest to the first ones (stratified, not drawn). Unbiased, no density needed,
    |N̂(x)| ≤ Σ_t |a_t| for every draw, and gradients reach a and σ both. At equal accuracy it
    needs 1.5 to 5 times fewer frequencies than a Gaussian of a wrong width; against
    `GaussianFrequencies` with a range of σ that covers all terms its rms error is 1 to 12 %
    smaller. With means and phases, ξ = μ_t + z/(2πσ_t) and the waves are cos(2πξ·x + α_t).

    Since σ belongs to f, not to the sampling alone, it has a signal under `redraw_every` too.
    The spectrum stays where it is, in `FourierRPE`: only its numbers of heads and terms are
    needed here.

    Args:
        num_frequencies: R ≥ T, of each head.
        num_heads: H.
        num_terms: T.
        dim: ℓ.
        sampling: how the z of a term and head are related: see `normal_vectors`.
        redraw_every: None, or the number of training steps after which training goes on with
            another draw, while eval keeps the saved one: see `Redrawn` for what a step is.
        generator: on CPU; None takes a seed from torch's global one.

    Raises:
        ValueError: R < T, which would leave terms out, or an unknown `sampling`.

    Example:
        >>> from flt_mol.nn.spectrum import GaussianSpectrum
        >>> spectrum = GaussianSpectrum(num_heads=4, num_terms=8)
        >>> frequencies = ComponentFrequencies.of(spectrum, num_frequencies=16)
        >>> xi, ratio = frequencies.ratio(spectrum)
        >>> xi.shape, ratio.shape
        (torch.Size([4, 16, 3]), torch.Size([4, 16]))
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
            raise ValueError(
                f"need num_heads ≥ 1 and num_frequencies ≥ num_terms ≥ 1, got num_heads="
                f"{num_heads}, num_frequencies={num_frequencies}, num_terms={num_terms}: a term "
                "without a frequency would be missing from the mask"
            )
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling is {sampling!r}, expected one of {', '.join(SAMPLINGS)}")
        self.num_heads = num_heads
        self.num_terms = num_terms
        self.sampling = sampling
        self.counts = [len(range(t, num_frequencies, num_terms)) for t in range(num_terms)]
        self._init_redraw(redraw_every, generator)

    @classmethod
    def of(
        cls,
        spectrum: Spectrum,
        num_frequencies: int,
        *,
        sampling: str = "normal",
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
    ) -> ComponentFrequencies:
        """Frequencies for `spectrum`: its H, T and ℓ."""
        num_heads, num_terms = gaussian_components(spectrum).amplitude.shape
        return cls(
            num_frequencies,
            num_heads,
            num_terms,
            spectrum.dim,
            sampling=sampling,
            redraw_every=redraw_every,
            generator=generator,
        )

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        z = [
            torch.cat([normal_vectors(n, self.dim, self.sampling, generator) for n in self.counts])
            for _ in range(self.num_heads)
        ]
        return {"draw": torch.stack(z)}

    @property
    def term(self) -> Tensor:
        """(R,) int64, the term t that each frequency belongs to, ascending."""
        # No buffer: it follows from R and T, and would be lost where only what is saved is kept.
        share, extra = divmod(self.num_frequencies, self.num_terms)
        row = torch.arange(self.num_frequencies, device=self.draw.device)
        # Terms before `extra` have one more than the others.
        return torch.maximum(row // (share + 1), (row - extra) // share)

    def ratio(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (H, R, ℓ), cycles/Å, and ρ = R a_t e^{iα_t}/n_t (H, R), real where there is no α.

        Raises:
            ValueError: a spectrum that is not a sum of Gaussians, or one of other numbers of heads
                and terms.
        """
        draw = self._drawn("draw")
        amplitude, sigma, mean, phase = gaussian_components(spectrum)
        if amplitude.shape != (self.num_heads, self.num_terms):
            raise ValueError(
                f"the spectrum has {amplitude.shape[0]} heads and {amplitude.shape[1]} terms, the "
                f"frequencies are for {self.num_heads} and {self.num_terms}"
            )
        term = self.term
        frequencies = draw / (2 * math.pi * sigma)[:, term, None]
        if mean is not None:
            frequencies = frequencies + mean[:, term]
        share = [self.num_frequencies / count for count in self.counts]
        ratio = amplitude * torch.tensor(share, dtype=amplitude.dtype, device=amplitude.device)
        if phase is not None:
            ratio = torch.polar(torch.ones_like(ratio), phase.to(ratio.dtype)) * ratio
        return frequencies, ratio[:, term]

    def extra_repr(self) -> str:
        """What `repr` shows."""
        text = (
            f"num_frequencies={self.num_frequencies}, num_heads={self.num_heads}, "
            f"num_terms={self.num_terms}, dim={self.dim}, sampling={self.sampling!r}"
        )
        return text if self.redraw_every is None else f"{text}, redraw_every={self.redraw_every}"


class GaussianComponents(NamedTuple):
    """The terms of f(x) = Re Σ_t a_t exp(−‖x‖²/2σ_t²) e^{i(2πμ_t·x + α_t)}.

    Attributes:
        amplitude: a (H, T).
        sigma: σ (H, T), Å.
        mean: μ (H, T, ℓ), cycles/Å, or None where it is 0.
        phase: α (H, T), or None where it is 0.
    """

    amplitude: Tensor
    sigma: Tensor
    mean: Tensor | None
    phase: Tensor | None


def gaussian_components(spectrum: Spectrum) -> GaussianComponents:
    """The terms of a spectrum that is a sum of Gaussians, in either form.

    Raises:
        ValueError: a spectrum of another family.

    Example:
        >>> from flt_mol.nn.spectrum import GaussianSpectrum
        >>> spectrum = GaussianSpectrum(num_heads=4, num_terms=8, form="weight")
        >>> amplitude = gaussian_components(spectrum).amplitude
        >>> torch.allclose(amplitude.sum(-1), spectrum.mask(torch.zeros(3)))
        True
    """
    if not isinstance(spectrum, GaussianSpectrum | GaussianMixtureSpectrum):
        raise ValueError(
            f"{type(spectrum).__name__} is not a sum of Gaussians: use GaussianFrequencies, whose "
            "density does not depend on the spectrum"
        )
    sigma = at_least_float32(spectrum.log_sigma).exp()
    if spectrum.form == "amplitude":
        amplitude = at_least_float32(spectrum.amplitude)
    else:
        amplitude = spectrum.weight / (math.sqrt(2 * math.pi) * sigma) ** spectrum.dim
    mean = spectrum.mean if isinstance(spectrum, GaussianMixtureSpectrum) else None
    phase = spectrum.phase if isinstance(spectrum, DirectionalSpectrum) else None
    return GaussianComponents(amplitude, sigma, mean, phase)
