"""Families that are sums of T terms per head, first of all of Gaussians."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32
from flt_mol.nn.layers import draw_normal, placed, seeded_generator
from flt_mol.nn.spectrum.base import Spectrum


class TermSpectrum(Spectrum):
    r"""f(x) = Σ_t a_t K(x; s_t), g(ξ) = Σ_t a_t K̂(ξ; s_t) per head, with K of peak 1.

    A subclass defines K and K̂, `_unit_mask` and `_unit_spectrum`. Lengths s_t begin evenly spaced
    in log s, amplitudes a_t normal with standard deviation 1/√T. Parameters are `amplitude` (H, T)
    and `log_length` (H, T), log s.

    Args:
        num_heads: H.
        num_terms: T.
        dim: ℓ.
        length_min, length_max: shortest and longest s_t at the start, Å.
        generator: on CPU; None takes a seed from torch.

    Raises:
        ValueError: lengths that are not 0 < length_min ≤ length_max < ∞, or T < 1.
    """

    # What lengths are called, in parameters and messages; one for all dimensions, or for each.
    _name = "length"
    _per_dimension = False

    def __init__(
        self,
        num_heads: int,
        num_terms: int = 16,
        dim: int = 3,
        length_min: float = 1.0,
        length_max: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, dim)
        if not 0 < length_min <= length_max < math.inf or num_terms < 1:
            raise ValueError(
                f"need 0 < {self._name}_min ≤ {self._name}_max and num_terms ≥ 1, got {length_min},"
                f" {length_max} and {num_terms}"
            )
        self.num_terms = num_terms
        bounds = math.log(length_min), math.log(length_max)
        log = torch.linspace(*bounds, num_terms, dtype=torch.float32, device="cpu")
        shape = (num_heads, 1, dim) if self._per_dimension else (num_heads, 1)
        log = (log[:, None] if self._per_dimension else log).repeat(shape)
        amplitude = draw_normal(num_heads, num_terms, generator=seeded_generator(generator))
        self.amplitude = nn.Parameter(placed(amplitude * math.pow(num_terms, -0.5)))
        self.register_parameter(f"log_{self._name}", nn.Parameter(placed(log)))

    def lengths(self) -> Tensor:
        """Lengths s (H, T), or (H, T, ℓ), Å."""
        return at_least_float32(getattr(self, f"log_{self._name}")).exp()

    def amplitudes(self) -> Tensor:
        """Amplitudes a (H, T)."""
        return at_least_float32(self.amplitude)

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) or (H, R, ℓ), cycles/Å → (H, R)."""
        length = self.lengths()
        terms = self._unit_spectrum(self._columns(frequencies, 3), length[:, :, None])
        return (self._weights(length)[:, :, None] * terms).sum(1)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        points = self._columns(displacements, 2).unsqueeze(-2)
        return (self.amplitudes() * self._unit_mask(points, self.lengths())).sum(-1)

    def _columns(self, coordinates: Tensor, axis: int) -> Tensor:
        """Coordinates (…, ℓ), at least float32, with an axis for terms at −axis."""
        if coordinates.dim() < axis - 1 or coordinates.shape[-1] != self.dim:
            shape = tuple(coordinates.shape)
            raise ValueError(f"coordinates have shape {shape}, expected (…, {self.dim})")
        return at_least_float32(coordinates).unsqueeze(-axis)

    def _weights(self, length: Tensor) -> Tensor:
        """Factors of `_unit_spectrum` (H, T)."""
        return self.amplitudes()

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        """K̂: ξ (1, R, ℓ) or (H, 1, R, ℓ), s (H, T, 1) or (H, T, 1, ℓ) → (H, T, R)."""
        raise NotImplementedError

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        """K: x (…, 1, 1, ℓ), s (H, T) or (H, T, ℓ) → (…, H, T)."""
        raise NotImplementedError


class GaussianSpectrum(TermSpectrum):
    r"""A sum of T zero-centred Gaussians per head, in any dimension ℓ.

    f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²), g(ξ) = Σ_t a_t (√(2π) σ_t)^ℓ exp(−2π²σ_t²‖ξ‖²). With
    ``form="weight"`` the parameters are w_t = a_t (√(2π) σ_t)^ℓ: with ℓ = 3 the paper's RPE for
    OC20 [1]. Both forms begin as the same function.

    Args:
        num_heads, num_terms, dim, generator: see `TermSpectrum`.
        form: "amplitude" or "weight", which names the parameter (H, T) beside `log_sigma` (H, T).
        sigma_min, sigma_max: narrowest and widest σ_t at the start, Å, evenly spaced in log σ.

    Raises:
        ValueError: unknown form, or what `TermSpectrum` raises.

    References:
        [1] Choromanski et al., AISTATS 2024, section 4.3.
    """

    _name = "sigma"
    mean: Tensor | None
    phase: Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_terms: int = 16,
        dim: int = 3,
        form: str = "amplitude",
        sigma_min: float = 1.0,
        sigma_max: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if form not in ("amplitude", "weight"):
            raise ValueError(f"form is {form!r}, expected amplitude or weight")
        super().__init__(num_heads, num_terms, dim, sigma_min, sigma_max, generator)
        self.form = form
        self.register_parameter("mean", None)  # those of wave packets, see below
        self.register_parameter("phase", None)
        if form == "weight":
            volume = self._volume(self.lengths()).detach()
            self.weight = nn.Parameter((self.amplitude.detach() * volume).to(self.amplitude.dtype))
            del self.amplitude

    def amplitudes(self) -> Tensor:
        """Amplitudes a (H, T), in either form."""
        if self.form == "amplitude":
            return super().amplitudes()
        return at_least_float32(self.weight) / self._volume(self.lengths())

    def _weights(self, length: Tensor) -> Tensor:
        if self.form == "weight":
            return at_least_float32(self.weight)
        return self.amplitude * self._volume(length)

    def _volume(self, length: Tensor) -> Tensor:
        """(√(2π) σ)^ℓ, the integral of exp(−‖x‖²/2σ²)."""
        return (math.sqrt(2 * math.pi) * length) ** self.dim

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        """K̂ over the volume of K, which the weights have."""
        return (-2 * math.pi**2 * length.square() * xi.square().sum(-1)).exp()

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        return (-x.square().sum(-1) / (2 * length.square())).exp()


class GaussianMixtureSpectrum(GaussianSpectrum):
    r"""A mixture of T Gaussians per head at frequencies ±μ_t: wave packets in real space.

    f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²) cos 2πμ_t·x, and with G_t(ξ) = exp(−2π²σ_t²‖ξ‖²)
    g(ξ) = ½ Σ_t a_t (√(2π) σ_t)^ℓ [G_t(ξ − μ_t) + G_t(ξ + μ_t)], see [1]. At μ_t = 0 the family is
    `GaussianSpectrum`. Masks are symmetric, but not rotation-invariant.

    Args:
        num_heads, num_terms, dim, form, sigma_min, sigma_max, generator: see `GaussianSpectrum`.
        mean_std: standard deviation of each coordinate of μ_t at the start, normal, cycles/Å; the
            parameter is `mean` (H, T, ℓ).

    Raises:
        ValueError: see `GaussianSpectrum`; a negative mean_std.

    References:
        [1] Choromanski et al., AISTATS 2024.
    """

    _directional = False

    def __init__(
        self,
        num_heads: int,
        num_terms: int = 16,
        dim: int = 3,
        form: str = "amplitude",
        sigma_min: float = 1.0,
        sigma_max: float = 4.0,
        mean_std: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        if not 0 <= mean_std < math.inf:
            raise ValueError(f"mean_std is {mean_std}, expected a number ≥ 0, cycles/Å")
        generator = seeded_generator(generator)
        super().__init__(num_heads, num_terms, dim, form, sigma_min, sigma_max, generator)
        mean = mean_std * draw_normal(num_heads, num_terms, dim, generator=generator)
        self.mean = nn.Parameter(placed(mean))
        if self._directional:
            shape = num_heads, num_terms
            turns = torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu")
            self.phase = nn.Parameter(placed(2 * math.pi * turns))

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        assert self.mean is not None
        mean = at_least_float32(self.mean)[:, :, None]
        ahead = 0.5 * super()._unit_spectrum(xi - mean, length)
        behind = 0.5 * super()._unit_spectrum(xi + mean, length)
        if self.phase is None:
            return ahead + behind
        phase = at_least_float32(self.phase)[:, :, None]
        return torch.complex(phase.cos() * (ahead + behind), phase.sin() * (ahead - behind))

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        assert self.mean is not None
        turns = (x * at_least_float32(self.mean)).sum(-1)
        phase = 0.0 if self.phase is None else at_least_float32(self.phase)
        return super()._unit_mask(x, length) * (2 * math.pi * turns + phase).cos()


class DirectionalSpectrum(GaussianMixtureSpectrum):
    r"""A mixture of Gaussians with phases: masks that tell x from −x, as in sequences.

    f(x) = Σ_t a_t exp(−‖x‖²/2σ_t²) cos(2πμ_t·x + α_t), of complex spectrum
    g(ξ) = ½ Σ_t a_t (√(2π) σ_t)^ℓ [e^{iα_t} G_t(ξ − μ_t) + e^{−iα_t} G_t(ξ + μ_t)]; G_t and the
    arguments are those of `GaussianMixtureSpectrum`. The parameter `phase` is α (H, T), uniform on
    the circle at the start.
    """

    _directional = True
