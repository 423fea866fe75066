"""What families that are sums of T terms per head share."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import at_least_float32, draw_normal, placed, seeded_generator
from flt_mol.nn.spectrum.base import Spectrum, check_dim

FORMS = ("amplitude", "weight")


class TermSpectrum(Spectrum):
    r"""f(x) = Σ_t a_t K(x; s_t), g(ξ) = Σ_t a_t K̂(ξ; s_t), per head, with K of peak 1.

    The basis of families with a length s_t > 0 per term, learned as its logarithm. A subclass
    defines K and K̂, `_unit_mask` and `_unit_spectrum`. Lengths begin evenly spaced in log s,
    amplitudes normal with standard deviation 1/√T.

    Args:
        num_heads, num_terms, dim: H, T and ℓ.
        lengths: shortest and longest s_t at the start, Å, with the name they have for the user.
        per_dimension: whether each dimension has a length of its own.
        generator: on CPU; None takes a seed from torch's global one.

    Attributes:
        log_length: log s (H, T), or (H, T, ℓ).
        amplitude: a (H, T).
    """

    def __init__(
        self,
        num_heads: int,
        num_terms: int,
        dim: int,
        lengths: tuple[str, float, float],
        per_dimension: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, dim)
        log_length = log_spaced(*lengths, num_terms).repeat(num_heads, 1)
        if per_dimension:
            log_length = log_length[..., None].repeat(1, 1, dim)
        self.log_length = nn.Parameter(placed(log_length))
        self.amplitude = nn.Parameter(placed(drawn_amplitude(num_heads, num_terms, generator)))

    @property
    def num_terms(self) -> int:
        """T."""
        return self.log_length.shape[1]

    @property
    def lengths(self) -> Tensor:
        """Lengths s (H, T), or (H, T, ℓ), Å."""
        return at_least_float32(self.log_length).exp()

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) or (H, R, ℓ), cycles/Å → (H, R)."""
        columns = frequency_columns(frequencies, self.num_heads, self.dim)
        terms = self._unit_spectrum(columns, self.lengths[:, :, None])
        return (self._amplitudes()[:, :, None] * terms).sum(1)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        check_dim(displacements, self.dim)
        points = at_least_float32(displacements)[..., None, None, :]
        return (self._amplitudes() * self._unit_mask(points, self.lengths)).sum(-1)

    def _amplitudes(self) -> Tensor:
        """Amplitudes a (H, T)."""
        return at_least_float32(self.amplitude)

    def _unit_spectrum(self, xi: Tensor, length: Tensor) -> Tensor:
        """K̂: ξ (1 or H, 1, R, ℓ), s (H, T, 1) or (H, T, 1, ℓ) → (H, T, R)."""
        raise NotImplementedError

    def _unit_mask(self, x: Tensor, length: Tensor) -> Tensor:
        """K: x (…, 1, 1, ℓ), s (H, T) or (H, T, ℓ) → (…, H, T)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"num_heads={self.num_heads}, num_terms={self.num_terms}, dim={self.dim}"


def check_form(form: str, forms: tuple[str, ...]) -> None:
    """ValueError unless `form` is one of `forms`."""
    if form not in forms:
        raise ValueError(f"form is {form!r}, expected one of {', '.join(forms)}")


def log_spaced(name: str, low: float, high: float, num_terms: int) -> Tensor:
    """Logarithms of T lengths from `low` to `high`: (T,), float32 on CPU.

    Raises:
        ValueError: not 0 < low ≤ high < ∞, or T < 1.
    """
    if not 0 < low <= high < math.inf or num_terms < 1:
        raise ValueError(
            f"need 0 < {name}_min ≤ {name}_max and num_terms ≥ 1, got {name}_min={low}, "
            f"{name}_max={high}, num_terms={num_terms}"
        )
    return torch.linspace(
        math.log(low), math.log(high), num_terms, dtype=torch.float32, device="cpu"
    )


def drawn_amplitude(num_heads: int, num_terms: int, generator: torch.Generator | None) -> Tensor:
    """Amplitudes (H, T), float32 on CPU, whose sum over t has standard deviation 1."""
    draw = draw_normal(num_heads, num_terms, generator=seeded_generator(generator))
    return draw * math.pow(num_terms, -0.5)


def frequency_columns(frequencies: Tensor, num_heads: int, dim: int) -> Tensor:
    """ξ (R, ℓ) or (H, R, ℓ) → (1 or H, 1, R, ℓ), at least float32, to set against (H, T, 1, …).

    Raises:
        ValueError: any other shape.
    """
    shape = tuple(frequencies.shape)
    per_head = len(shape) == 3 and shape[0] == num_heads
    if not (len(shape) == 2 or per_head) or shape[-1] != dim:
        raise ValueError(
            f"frequencies have shape {shape}, expected (R, {dim}) or ({num_heads}, R, {dim})"
        )
    xi = at_least_float32(frequencies)
    return xi[:, None] if per_head else xi[None, None]


def product(x: Tensor) -> Tensor:
    """Π over the last, short axis: (…, ℓ) → (…).

    `torch.prod` divides by each factor in its gradient and looks for zeros, which waits for a GPU.
    """
    return reduce(torch.mul, x.unbind(-1))


def norm(x: Tensor) -> Tensor:
    """‖x‖ over the last axis: (…, ℓ) → (…), with gradient 0, not NaN, at the origin."""
    squared = x.square().sum(-1)
    zero = squared.eq(0)
    return squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)
