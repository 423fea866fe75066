"""What a spectrum is, and how spectra are put together."""

from __future__ import annotations

from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn


class Spectrum(nn.Module):
    r"""A spectrum g per head, and the mask f(x) = ∫ g(ξ) e^{2πi x·ξ} dξ it stands for.

    f is real, so g(−ξ) is the complex conjugate of g(ξ). A real g is an even function and its mask
    is symmetric, f(−x) = f(x); a family whose masks know a direction (left from right, before from
    after) has a complex g, and says so by `is_complex`.

    **A family of your own** needs `forward`, and `mask` where f is known in closed form. Spectra of
    the same heads and dimension can be added, ``first + second``: g and f add up.

    Attributes:
        num_heads: H.
        dim: ℓ, the dimension of positions.
        is_complex: whether `forward` gives complex numbers.

    Raises:
        ValueError: num_heads or dim below 1.

    Example:
        >>> class White(Spectrum):  # g = b up to ‖ξ‖ = 1/2, nothing above
        ...     def __init__(self, num_heads, dim=3):
        ...         super().__init__(num_heads, dim)
        ...         self.height = nn.Parameter(torch.ones(num_heads))
        ...
        ...     def forward(self, frequencies):  # (R, ℓ) → (H, R)
        ...         return self.height[:, None] * (frequencies.norm(dim=-1) <= 0.5)
        >>> White(num_heads=2)(torch.tensor([[0.0, 0.0, 0.3], [0.0, 1.0, 0.0]]))
        tensor([[1., 0.],
                [1., 0.]], grad_fn=<MulBackward0>)
    """

    is_complex: bool = False

    def __init__(self, num_heads: int, dim: int) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1:
            raise ValueError(f"num_heads and dim must be ≥ 1, got {num_heads} and {dim}")
        self.num_heads = num_heads
        self.dim = dim

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ), or (H, R, ℓ) with a set for each head, cycles/Å → (H, R)."""
        raise NotImplementedError(f"{type(self).__name__} has no spectrum: define forward")

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x) in closed form: displacements (…, ℓ), Å → (…, H)."""
        raise NotImplementedError(f"{type(self).__name__} has no closed form: define mask")

    def __add__(self, other: object) -> SumSpectrum:
        """Spectra and masks added up."""
        return SumSpectrum(self, other) if isinstance(other, Spectrum) else NotImplemented

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"num_heads={self.num_heads}, dim={self.dim}"


class SumSpectrum(Spectrum):
    """The sum of spectra over the same positions: g = Σ_i g_i, f = Σ_i f_i.

    Args:
        spectra: one or more, all with the same H and ℓ. ``first + second`` builds the same.

    Raises:
        ValueError: none at all, or spectra of different H or ℓ.

    Example:
        >>> from flt_mol.nn.spectrum import BoxSpectrum, GaussianSpectrum
        >>> total = GaussianSpectrum(num_heads=4, num_terms=8) + BoxSpectrum(4, num_terms=2)
        >>> total.mask(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    def __init__(self, *spectra: Spectrum) -> None:
        _check_heads(spectra)
        if len(dims := {spectrum.dim for spectrum in spectra}) > 1:
            raise ValueError(
                f"spectra over {sorted(dims)} dimensions cannot be added; over different "
                "coordinates of the same positions they multiply: ProductSpectrum"
            )
        super().__init__(spectra[0].num_heads, spectra[0].dim)
        self.spectra = nn.ModuleList(spectra)
        self.is_complex = any(spectrum.is_complex for spectrum in spectra)

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) or (H, R, ℓ), cycles/Å → (H, R)."""
        spectra: list[Tensor] = [spectrum(frequencies) for spectrum in self.spectra]
        return reduce(torch.add, spectra)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        masks = [cast(Spectrum, spectrum).mask(displacements) for spectrum in self.spectra]
        return reduce(torch.add, masks)


class ProductSpectrum(Spectrum):
    r"""The product of spectra over disjoint groups of coordinates.

    With x = (x₁, x₂, …), the first spectrum taking the first ℓ₁ coordinates and so on:
    f(x) = Π_i f_i(x_i) and g(ξ) = Π_i g_i(ξ_i), in ℓ = Σ_i ℓ_i dimensions. So a mask may depend on
    height above a surface and on the distance in the surface in different ways.

    It is not the product of masks of the *same* coordinates: that one's spectrum is a convolution,
    which has a closed form for Gaussians only.

    Args:
        spectra: one or more, all with the same H; coordinates are handed out in this order.

    Raises:
        ValueError: none at all, or spectra of different H.

    Example:
        >>> from flt_mol.nn.spectrum import GaussianSpectrum, LaplaceSpectrum
        >>> in_plane, height = GaussianSpectrum(4, 8, dim=2), LaplaceSpectrum(4, 3, dim=1)
        >>> ProductSpectrum(in_plane, height).mask(torch.zeros(5, 3)).shape
        torch.Size([5, 4])
    """

    def __init__(self, *spectra: Spectrum) -> None:
        _check_heads(spectra)
        super().__init__(spectra[0].num_heads, sum(spectrum.dim for spectrum in spectra))
        self.spectra = nn.ModuleList(spectra)
        self.is_complex = any(spectrum.is_complex for spectrum in spectra)

    def forward(self, frequencies: Tensor) -> Tensor:
        """g(ξ): frequencies (R, ℓ) or (H, R, ℓ), cycles/Å → (H, R)."""
        groups = self._split(frequencies)
        factors: list[Tensor] = [
            spectrum(x) for spectrum, x in zip(self.spectra, groups, strict=True)
        ]
        return reduce(torch.mul, factors)

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x): displacements (…, ℓ), Å → (…, H)."""
        masks = [
            cast(Spectrum, spectrum).mask(group)
            for spectrum, group in zip(self.spectra, self._split(displacements), strict=True)
        ]
        return reduce(torch.mul, masks)

    def _split(self, coordinates: Tensor) -> tuple[Tensor, ...]:
        """Columns of (…, ℓ) by spectrum."""
        check_dim(coordinates, self.dim)
        sizes = [cast(Spectrum, spectrum).dim for spectrum in self.spectra]
        return torch.split(coordinates, sizes, dim=-1)


def check_dim(coordinates: Tensor, dim: int) -> None:
    """ValueError unless the last axis is of size ℓ."""
    if coordinates.dim() < 1 or coordinates.shape[-1] != dim:
        raise ValueError(
            f"the spectrum is over {dim} dimensions: expected (…, {dim}), got "
            f"{tuple(coordinates.shape)}"
        )


def _check_heads(spectra: tuple[Spectrum, ...]) -> None:
    if not spectra:
        raise ValueError("no spectrum given: expected at least one")
    if len(heads := {spectrum.num_heads for spectrum in spectra}) > 1:
        raise ValueError(f"spectra of {sorted(heads)} heads do not belong together: use one number")
