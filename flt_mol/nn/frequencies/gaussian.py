"""Frequencies from a Gaussian, a mixture of one for each, or the Gaussians of the spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flt_mol.functional.feature_maps import orthogonal_projection
from flt_mol.functional.groups import at_least_float32
from flt_mol.nn.frequencies.base import Frequencies
from flt_mol.nn.layers import draw_normal, placed
from flt_mol.nn.spectrum import GaussianSpectrum, Spectrum


class GaussianFrequencies(Frequencies):
    r"""ξ_i = μ_i + σ_i z_i with z_i ~ N(0, I_ℓ), drawn once and saved.

    The density is that of the whole set, p(ξ) = (1/R) Σ_j N(ξ; 0, σ_j²I), the balance heuristic
    [2], without the heavy tails of each frequency's own. With means it is
    p(ξ) = (1/R) Σ_j ½[N(ξ; μ_j, σ_j²I) + N(ξ; −μ_j, σ_j²I)], drawn from the first half alone:
    Re g(ξ) e^{2πiξ·x} is the same at ξ and −ξ. The expectation of the mask is f for *every* σ and
    μ: learning σ, as the paper [1] proposes, moves the frequencies that the model keeps, and does
    not go with `redraw_every`. Of "matern", "laplace", "cauchy" and "box" its variance is infinite.

    Args:
        num_frequencies: R.
        dim: ℓ.
        sigma: Å⁻¹; one value for all, or (lowest, highest), spaced evenly in log σ. For a Gaussian
            of width s the variance of the mask is finite for 2π σ s > 1/√2, and least at 1.
        learned_sigma: whether σ is a parameter; otherwise a buffer.
        shared_sigma: whether there is one σ in all instead of one per frequency.
        generator: on CPU; None takes a seed from torch.
        sampling: how the z are related, "normal", "orthogonal" or "sobol": see `normal_vectors`.
        mean: μ, cycles/Å, (ℓ,) for all frequencies or (R, ℓ); None is 0.
        learned_mean: whether μ is a parameter, from 0 on and shared by all if `mean` is None.
        redraw_every: None, or the number of training steps with one draw, see `Redrawn`.

    Raises:
        ValueError: arguments that do not fit together, naming the first of them.

    References:
        [1] Choromanski et al., AISTATS 2024.
        [2] Veach & Guibas, SIGGRAPH 1995.
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
            raise ValueError(f"sigma is {sigma}, expected > 0, or (lowest, highest) if not shared")
        if redraw_every is not None and (learned_sigma or learned_mean):
            raise ValueError("redraw_every needs a constant σ and μ: pass learned_sigma=False")
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
                expected = f"expected ({dim},) or ({num_frequencies}, {dim})"
                raise ValueError(f"mean has shape {tuple(mu.shape)}, {expected}")
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
        return frequencies, spectrum(frequencies) / self.density(frequencies)

    def density(self, frequencies: Tensor) -> Tensor:
        """p(ξ), see above: (K, ℓ) → (K,)."""
        log_sigma = self.log_sigma.to(frequencies.dtype)
        if self.mean is None:
            squared = frequencies.square().sum(-1)[:, None]
        else:
            means = torch.stack([self.mean, -self.mean])
            squared = (frequencies[:, None, None] - means).square().sum(-1)
        log_peak = -self.dim * (log_sigma + 0.5 * math.log(2 * math.pi))
        log_normal = log_peak.addcmul(squared, (-2 * log_sigma).exp(), value=-0.5)
        return log_normal.exp().flatten(1).mean(1)


class ComponentFrequencies(Frequencies):
    r"""Each frequency belongs to one term t of a sum of Gaussians and is drawn from that term.

    For f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²), a set per head: ξ = z/(2πσ_t) with z ~ N(0, I_ℓ), and
    N̂(x) = Σ_t (a_t/n_t) Σ_{i of t} cos(z_i·x/σ_t), where n_t of the R frequencies belong to t.
    Unbiased, |N̂(x)| ≤ Σ_t |a_t| for every draw. With means and phases, ξ = μ_t + z/(2πσ_t) and
    cos(2πξ·x + α_t). Goes with "gaussian", "gaussian_mixture" and "directional" spectra.

    Args:
        num_frequencies: R ≥ T, of each head.
        num_heads, num_terms, dim: H, T and ℓ of the spectrum.
        sampling, redraw_every, generator: see `GaussianFrequencies`.

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
        given, own = (spectrum.num_heads, spectrum.num_terms), (self.num_heads, self.num_terms)
        if given != own:
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


def normal_vectors(count: int, dim: int, sampling: str, generator: torch.Generator) -> Tensor:
    r"""Rows z (count, dim), each N(0, I), related to each other as `sampling` says.

    "normal": independent. "orthogonal": in blocks of `dim`; in three dimensions this brings little.
    "sobol": scrambled Sobol points through the inverse normal distribution function. float32 on
    CPU.

    Raises:
        ValueError: unknown `sampling`.
    """
    if sampling == "normal":
        return draw_normal(count, dim, generator=generator)
    if sampling == "orthogonal":
        return orthogonal_projection(count, dim, generator=generator)
    if sampling == "sobol":
        return _sobol_normal(count, dim, generator)
    raise ValueError(f"sampling is {sampling!r}, expected normal, orthogonal or sobol")


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
