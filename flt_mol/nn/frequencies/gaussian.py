"""Frequencies from a Gaussian, or from a mixture of one Gaussian per frequency."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import at_least_float32, placed
from flt_mol.nn.frequencies.base import Frequencies, number_range
from flt_mol.nn.frequencies.draws import SAMPLINGS, normal_vectors


class GaussianFrequencies(Frequencies):
    r"""ξ_i = μ_i + σ_i z_i with z_i ~ N(0, I_ℓ), drawn once and saved.

    With one σ and no μ the density is p(ξ) = N(ξ; 0, σ²I); ``sigma=1`` is the standard Gaussian.
    With a σ per frequency it is that of the whole set, p(ξ) = (1/R) Σ_j N(ξ; 0, σ_j²I) (the
    balance heuristic [2]): (1/R) Σ_i g(ξ_i)/p(ξ_i) has the same expectation as with each
    frequency's own density, without that one's heavy tails. With means it is
    p(ξ) = (1/R) Σ_j ½[N(ξ; μ_j, σ_j²I) + N(ξ; −μ_j, σ_j²I)]. Frequencies are drawn from the first
    half alone: the real part of g(ξ) e^{2πiξ·x} is the same at ξ and −ξ, so both halves have the
    same expectation, for complex (Hermitian) g too.

    **Why the draw is fixed.** The expectation of the mask is f for *every* σ and μ, so if z were
    drawn anew, they would receive no signal but the noise's. Learning σ, as the paper [1]
    proposes, means moving the one set of frequencies that the model keeps: z is a buffer, saved
    with the weights. The other mode is ``learned_sigma=False`` with `redraw_every`: then the
    spectrum learns what is right on average over draws, and eval uses the one that is saved.

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
        sampling: how the z are related, "normal", "orthogonal" or "sobol": see `normal_vectors`.
        mean: μ, cycles/Å, (ℓ,) for all frequencies or (R, ℓ); None is 0.
        learned_mean: whether μ is a parameter, from 0 on if `mean` is None.
        redraw_every: None, or the number of training steps after which training goes on with
            another draw, while eval keeps the saved one: see `Redrawn` for what a step is.

    Raises:
        ValueError: σ not positive or not finite, a range for a shared σ, a mean of another shape
            or not finite, an unknown `sampling`, or `redraw_every` together with a learned σ or μ.

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
    mean: Tensor | None

    def __init__(
        self,
        num_frequencies: int,
        dim: int = 3,
        sigma: float | tuple[float, float] = (0.04, 0.16),
        learned_sigma: bool = True,
        shared_sigma: bool = False,
        generator: torch.Generator | None = None,
        *,
        sampling: str = "normal",
        mean: Sequence[float] | Tensor | None = None,
        learned_mean: bool = False,
        redraw_every: int | None = None,
    ) -> None:
        low, high = number_range(sigma, "sigma")
        if not 0 < low <= high < math.inf or num_frequencies < 1 or dim < 1:
            raise ValueError(
                f"need finite σ > 0, lowest first, and at least one frequency and dimension, got "
                f"sigma={sigma}, num_frequencies={num_frequencies}, dim={dim}"
            )
        if shared_sigma and low != high:
            raise ValueError(f"a shared sigma is one number, got the range {sigma}")
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling is {sampling!r}, expected one of {', '.join(SAMPLINGS)}")
        if redraw_every is not None and (learned_sigma or learned_mean):
            raise ValueError(
                "redraw_every does not go with a learned σ or μ, whose only signal is the draw "
                "that stays: pass learned_sigma=False and learned_mean=False, or redraw_every=None"
            )
        super().__init__(num_frequencies, dim)
        self.sampling = sampling
        self._init_redraw(redraw_every, generator)
        self._keep(
            "log_sigma", _even_log(low, high, 1 if shared_sigma else num_frequencies), learned_sigma
        )
        if mean is None and not learned_mean:
            self.mean = None
        else:
            self._keep("mean", self._checked_mean(mean), learned_mean)

    def _keep(self, name: str, value: Tensor, learned: bool) -> None:
        if learned:
            self.register_parameter(name, nn.Parameter(placed(value)))
        else:
            self.register_buffer(name, placed(value))

    def _checked_mean(self, mean: Sequence[float] | Tensor | None) -> Tensor:
        if mean is None:
            return torch.zeros(1, self.dim, dtype=torch.float32, device="cpu")
        value = torch.as_tensor(mean, dtype=torch.float32, device="cpu").detach().clone()
        if value.shape not in [(self.dim,), (self.num_frequencies, self.dim)]:
            raise ValueError(
                f"mean has shape {tuple(value.shape)}, expected ({self.dim},) or "
                f"({self.num_frequencies}, {self.dim})"
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"mean must be finite, got {value.tolist()}")
        return value.view(-1, self.dim)

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"draw": normal_vectors(self.num_frequencies, self.dim, self.sampling, generator)}

    def forward(self) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ), cycles/Å, and log p(ξ) (R,)."""
        log_sigma = at_least_float32(self.log_sigma)
        frequencies = log_sigma.exp()[:, None] * self._drawn("draw")
        if self.mean is not None:
            frequencies = frequencies + self.mean
        return frequencies, self.log_density(frequencies)

    def log_density(self, frequencies: Tensor) -> Tensor:
        """Logarithm of p(ξ), see above: (K, ℓ) → (K,)."""
        log_sigma = at_least_float32(self.log_sigma)
        if self.mean is None:
            squared = frequencies.square().sum(-1)[:, None]
        else:
            mean = torch.cat([self.mean, -self.mean])
            squared = (frequencies[:, None] - mean).square().sum(-1).unflatten(-1, (2, -1))
        log_normal = (
            -0.5 * squared * (-2 * log_sigma).exp()
            - self.dim * log_sigma
            - 0.5 * self.dim * math.log(2 * math.pi)
        ).flatten(1)
        return log_normal.logsumexp(-1) - math.log(log_normal.shape[-1])

    def extra_repr(self) -> str:
        """What `repr` shows."""
        learned = isinstance(self.log_sigma, nn.Parameter)
        text = (
            f"num_frequencies={self.num_frequencies}, dim={self.dim}, "
            f"num_sigmas={self.log_sigma.numel()}, learned_sigma={learned}, "
            f"sampling={self.sampling!r}"
        )
        if self.mean is not None:
            text += f", learned_mean={isinstance(self.mean, nn.Parameter)}"
        return text if self.redraw_every is None else f"{text}, redraw_every={self.redraw_every}"


def _even_log(low: float, high: float, count: int) -> Tensor:
    """`count` logarithms from log `low` to log `high`."""
    return torch.linspace(math.log(low), math.log(high), count, dtype=torch.float32, device="cpu")
