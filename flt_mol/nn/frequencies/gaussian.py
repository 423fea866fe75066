"""Frequencies from a Gaussian, or from a mixture of one Gaussian per frequency."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flt_mol.functional.feature_maps import orthogonal_projection
from flt_mol.functional.groups import at_least_float32
from flt_mol.nn.frequencies.base import Frequencies
from flt_mol.nn.layers import draw_normal, placed
from flt_mol.nn.spectrum import Spectrum

SAMPLINGS = ("normal", "orthogonal", "sobol")


class GaussianFrequencies(Frequencies):
    r"""ξ_i = μ_i + σ_i z_i with z_i ~ N(0, I_ℓ), drawn once and saved.

    With one σ and no μ the density is p(ξ) = N(ξ; 0, σ²I). With a σ per frequency it is that of the
    whole set, p(ξ) = (1/R) Σ_j N(ξ; 0, σ_j²I), the balance heuristic [2]: the same expectation as
    with each frequency's own density, without that one's heavy tails. With means it is
    p(ξ) = (1/R) Σ_j ½[N(ξ; μ_j, σ_j²I) + N(ξ; −μ_j, σ_j²I)], drawn from the first half alone:
    Re g(ξ) e^{2πiξ·x} is the same at ξ and −ξ.

    **Why the draw is fixed.** The expectation of the mask is f for *every* σ and μ: with z drawn
    again and again they would receive no signal but noise. Learning σ, as the paper [1] proposes,
    means moving the one set of frequencies that the model keeps. The other mode is
    ``learned_sigma=False`` with `redraw_every`: the spectrum then learns what is right on average.

    Goes with every spectrum; for the long tails of "matern", "laplace", "cauchy" and "box" the
    variance of the mask is infinite.

    Args:
        num_frequencies: R.
        dim: ℓ.
        sigma: Å⁻¹; one value for all, or (lowest, highest), spaced evenly in log σ. A Gaussian of
            width s in real space has a spectrum of width 1/(2πs): the default covers s of 1 to
            4 Å. The variance of the mask is finite only for 2π σ s > 1/√2, and least at 1.
        learned_sigma: whether σ is a parameter; otherwise a buffer.
        shared_sigma: whether there is one σ in all instead of one per frequency.
        generator: on CPU; None takes a seed from torch's global one.
        sampling: how the z are related, "normal", "orthogonal" or "sobol": see `normal_vectors`.
        mean: μ, cycles/Å, (ℓ,) for all frequencies or (R, ℓ); None is 0.
        learned_mean: whether μ is a parameter, from 0 on and shared by all if `mean` is None.
        redraw_every: None, or the number of training steps with one draw, see `Redrawn`.

    Raises:
        ValueError: σ not positive or not finite, a range for a shared σ, a mean of another shape,
            an unknown `sampling`, or `redraw_every` together with a learned σ or μ.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.
        [2] Veach & Guibas, "Optimally combining sampling techniques", SIGGRAPH 1995.

    Example:
        >>> from flt_mol.nn import GaussianSpectrum
        >>> xi, ratio = GaussianFrequencies(16)(GaussianSpectrum(num_heads=4))
        >>> xi.shape, ratio.shape
        (torch.Size([16, 3]), torch.Size([4, 16]))
    """

    draw: Tensor
    log_sigma: Tensor
    mean: Tensor | None

    def __init__(
        self,
        num_frequencies: int = 16,
        dim: int = 3,
        sigma: float | Sequence[float] = (0.04, 0.16),
        learned_sigma: bool = True,
        shared_sigma: bool = False,
        generator: torch.Generator | None = None,
        *,
        sampling: str = "normal",
        mean: Sequence[float] | Tensor | None = None,
        learned_mean: bool = False,
        redraw_every: int | None = None,
    ) -> None:
        super().__init__(num_frequencies, dim)
        low, high = (float(x) for x in (sigma if isinstance(sigma, Sequence) else (sigma, sigma)))
        if not 0 < low <= high < math.inf or (shared_sigma and low != high):
            raise ValueError(
                f"sigma is {sigma}, expected a number > 0, or two, lowest first, where each "
                "frequency has its own"
            )
        if redraw_every is not None and (learned_sigma or learned_mean):
            raise ValueError(
                "redraw_every does not go with a learned σ or μ, whose only signal is the draw "
                "that stays: pass learned_sigma=False and learned_mean=False, or redraw_every=None"
            )
        self.sampling = sampling
        self._init_redraw(redraw_every, generator)
        count, bounds = 1 if shared_sigma else num_frequencies, (math.log(low), math.log(high))
        log_sigma = torch.linspace(*bounds, count, dtype=torch.float32, device="cpu")
        self._keep("log_sigma", log_sigma, learned_sigma)
        if mean is None and not learned_mean:
            self.mean = None
        else:
            mu = torch.as_tensor([0.0] * dim if mean is None else mean, dtype=torch.float32)
            if mu.shape not in [(dim,), (num_frequencies, dim)]:
                raise ValueError(
                    f"mean has shape {tuple(mu.shape)}, expected ({dim},) or "
                    f"({num_frequencies}, {dim})"
                )
            self._keep("mean", mu.detach().clone().view(-1, dim), learned_mean)

    def _keep(self, name: str, value: Tensor, learned: bool) -> None:
        if learned:
            self.register_parameter(name, nn.Parameter(placed(value)))
        else:
            self.register_buffer(name, placed(value))

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"draw": normal_vectors(self.num_frequencies, self.dim, self.sampling, generator)}

    def forward(self, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and ρ = g(ξ)/p(ξ) (H, R)."""
        frequencies = at_least_float32(self.log_sigma).exp()[:, None] * self.draw
        if self.mean is not None:
            frequencies = frequencies + self.mean
        return frequencies, spectrum(frequencies) * (-self.log_density(frequencies)).exp()

    def log_density(self, frequencies: Tensor) -> Tensor:
        """Logarithm of p(ξ), see above: (K, ℓ) → (K,)."""
        log_sigma = at_least_float32(self.log_sigma)
        if self.mean is None:
            squared = frequencies.square().sum(-1)[:, None]
        else:
            means = torch.stack([self.mean, -self.mean])
            squared = (frequencies[:, None, None] - means).square().sum(-1)
        log_normal = (
            -0.5 * squared * (-2 * log_sigma).exp()
            - self.dim * log_sigma
            - 0.5 * self.dim * math.log(2 * math.pi)
        ).flatten(1)
        return log_normal.logsumexp(-1) - math.log(log_normal.shape[-1])


def normal_vectors(count: int, dim: int, sampling: str, generator: torch.Generator) -> Tensor:
    r"""Rows z (count, dim), each N(0, I), related to each other as `sampling` says.

    - ``normal``: independent.
    - ``orthogonal``: orthogonal in blocks of `dim`; in three dimensions this brings little.
    - ``sobol``: scrambled Sobol points [1] through the inverse of the normal distribution function:
      10 / 22 / 36 / 63 % off the rms error of a mask of 2 Å at 16 / 64 / 256 / 1024 rows.

    Args:
        count: number of rows.
        dim: ℓ.
        sampling: "normal", "orthogonal" or "sobol".
        generator: on CPU; torch's global one is left alone.

    Returns:
        float32 on CPU.

    Raises:
        ValueError: unknown `sampling`.

    References:
        [1] Owen, "Randomly permuted (t,m,s)-nets and (t,s)-sequences", 1995.
    """
    if sampling == "normal":
        return draw_normal(count, dim, generator=generator)
    if sampling == "orthogonal":
        return orthogonal_projection(count, dim, generator=generator)
    if sampling == "sobol":
        return _sobol_normal(count, dim, generator)
    raise ValueError(f"sampling is {sampling!r}, expected one of {', '.join(SAMPLINGS)}")


def _sobol_normal(count: int, dim: int, generator: torch.Generator) -> Tensor:
    seed = int(torch.randint(2**62, (), generator=generator, dtype=torch.int64, device="cpu"))
    with torch.device("cpu"):
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
        uniform = engine.draw(count, dtype=torch.float64)
    # The engine rounds its first point, and that one alone, to the default dtype.
    uniform[0] = engine.shift.to(torch.float64) / 2**engine.MAXBIT
    # Points are multiples of 2^-30 and may be 0: the middle of their cell is inside (0, 1).
    middle = uniform + 0.5 ** (engine.MAXBIT + 1)
    return (math.sqrt(2) * torch.erfinv(2 * middle - 1)).to(torch.float32)
