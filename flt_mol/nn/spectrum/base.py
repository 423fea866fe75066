"""Base of spectra, and sums and products of spectra."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, cast

from torch import Tensor, nn

from flt_mol.nn.radial import check_sizes


class Spectrum(nn.Module):
    r"""A spectrum g per head, and the mask f(x) = ∫ g(ξ) e^{2πi x·ξ} dξ it stands for.

    f is real, so g(−ξ) is the complex conjugate of g(ξ); masks that know a direction (before from
    after) have a complex g. Both are at least float32 and differentiable by all parameters. A
    family of your own defines `forward`, and `mask` where f is known in closed form.

    Args:
        num_heads: H.
        dim: ℓ, the dimension of positions.

    Raises:
        ValueError: num_heads or dim below 1.
    """

    def __init__(self, num_heads: int, dim: int) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, dim=dim)
        self.num_heads = num_heads
        self.dim = dim

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ), or (H, R, ℓ) with a set for each head, cycles/Å → (H, R)."""
        raise NotImplementedError(f"{type(self).__name__} has no spectrum: define forward")

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x) in closed form: displacements (…, ℓ), Å → (…, H)."""
        raise NotImplementedError(f"{type(self).__name__} has no closed form: define mask")


class _Combined(Spectrum):
    def __init__(
        self, dim: int, spectra: tuple[Spectrum, ...], combine: Callable[[Any, Any], Any]
    ) -> None:
        if len(heads := {spectrum.num_heads for spectrum in spectra}) != 1:
            raise ValueError(f"expected spectra of the same heads, got {sorted(heads)}")
        super().__init__(heads.pop(), dim)
        self.spectra = nn.ModuleList(spectra)
        self._combine = combine

    def _columns(self, coordinates: Tensor) -> Sequence[Tensor]:
        return [coordinates] * len(self.spectra)

    def forward(self, frequencies: Tensor) -> Tensor:
        parts = zip(self.spectra, self._columns(frequencies), strict=True)
        found: Tensor = reduce(self._combine, (g(xi) for g, xi in parts))
        return found

    def mask(self, displacements: Tensor) -> Tensor:
        parts = zip(self.spectra, self._columns(displacements), strict=True)
        return reduce(self._combine, (cast(Spectrum, g).mask(x) for g, x in parts))


class SumSpectrum(_Combined):
    """The sum of spectra over the same positions: g = Σ_i g_i, f = Σ_i f_i.

    Args:
        spectra: one or more, all with the same H and ℓ.

    Raises:
        ValueError: none at all, or spectra of different H or ℓ.
    """

    def __init__(self, *spectra: Spectrum) -> None:
        if len(dims := {spectrum.dim for spectrum in spectra}) != 1:
            raise ValueError(f"expected spectra of the same dim, got {sorted(dims)}")
        super().__init__(dims.pop(), spectra, operator.add)


class ProductSpectrum(_Combined):
    r"""The product of spectra over disjoint groups of coordinates, x = (x₁, x₂, …).

    f(x) = Π_i f_i(x_i) and g(ξ) = Π_i g_i(ξ_i), in ℓ = Σ_i ℓ_i dimensions, such as height above a
    surface and place in it. Not the product of masks of the *same* coordinates.

    Args:
        spectra: one or more, all with the same H; the first takes the first ℓ₁ coordinates.

    Raises:
        ValueError: none at all, or spectra of different H.
    """

    def __init__(self, *spectra: Spectrum) -> None:
        super().__init__(sum(spectrum.dim for spectrum in spectra), spectra, operator.mul)
        self._dims = [spectrum.dim for spectrum in spectra]

    def _columns(self, coordinates: Tensor) -> Sequence[Tensor]:
        return list(coordinates.split(self._dims, dim=-1))
