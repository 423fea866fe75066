"""A spectrum and its frequencies → position features Φ, Ψ per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.fourier import (
    SPLITS,
    PositionFeatures,
    fourier_basis,
    phases,
    position_features,
)
from flt_mol.functional.groups import centred, check_ptr, first_per_system, spread
from flt_mol.functional.numerics import at_least_float32, draw_normal
from flt_mol.nn.frequencies import Frequencies
from flt_mol.nn.spectrum import Spectrum

__all__ = ["FourierRPE", "PositionFeatures", "rotation_error"]


class FourierRPE(nn.Module):
    r"""A learned relative positional encoding f(r_i − r_j), as features whose product is its mean.

    Φ_i·Ψ_j = N̂(r_i − r_j) = (1/R) Σ_t Re[ρ_t e^{2πiξ_t·(r_i − r_j)}], with ρ_t = g(ξ_t)/p(ξ_t).
    For random frequencies E[N̂] = f and Var N̂ ≤ (‖g/p‖²_∞ − f²)/R [1, Theorem 4.2]. At a few dozen
    frequencies in three dimensions N̂ is far from f: it is a learned pattern of waves, and it is
    not rotation-invariant (`rotation_error` measures both families, random and deterministic).

    Args:
        spectrum: g, per head; real, or complex for masks that know a direction.
        frequencies: ξ and their density p.
        split: how ρ is shared between Φ and Ψ, see `functional.position_features`.

    Raises:
        ValueError: something else than a spectrum and frequencies, two of different ℓ,
            or an unknown split.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.

    Example:
        >>> from flt_mol.nn import GaussianFrequencies, GaussianSpectrum
        >>> rpe = FourierRPE(GaussianSpectrum(num_heads=4, num_terms=8), GaussianFrequencies(16))
        >>> features = rpe(torch.rand(10, 3))
        >>> features.query.shape, features.key.shape
        (torch.Size([10, 1, 32]), torch.Size([10, 4, 32]))
    """

    def __init__(
        self, spectrum: Spectrum, frequencies: Frequencies, split: str = "one_sided"
    ) -> None:
        super().__init__()
        if not (isinstance(spectrum, Spectrum) and isinstance(frequencies, Frequencies)):
            raise ValueError(
                f"FourierRPE takes (spectrum, frequencies), a Spectrum and Frequencies in this "
                f"order, got {type(spectrum).__name__} and {type(frequencies).__name__}"
            )
        if spectrum.dim != frequencies.dim:
            raise ValueError(
                f"the spectrum is over {spectrum.dim} dimensions, the frequencies over "
                f"{frequencies.dim}"
            )
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
        self.spectrum = spectrum
        self.frequencies = frequencies
        self.split = split

    @property
    def num_heads(self) -> int:
        """H."""
        return self.spectrum.num_heads

    @property
    def dim(self) -> int:
        """ℓ, the dimension of positions."""
        return self.spectrum.dim

    @property
    def num_features(self) -> int:
        """2R, the width of Φ and Ψ."""
        return 2 * self.frequencies.num_frequencies

    def ratio(self) -> tuple[Tensor, Tensor]:
        """ξ (R, ℓ) or (H, R, ℓ), cycles/Å, and ρ = g(ξ)/p(ξ) (H, R), real or complex."""
        frequencies, ratio = self.frequencies.ratio(self.spectrum)
        return frequencies, ratio

    def forward(
        self,
        positions: Tensor,
        ptr: Tensor | None = None,
        *,
        origin: str | Tensor = "mean",
        redraw: bool = True,
    ) -> PositionFeatures:
        """Φ and Ψ of positions (N, ℓ), Å, each system relative to its own origin.

        Φ_i·Ψ_j does not depend on the origin but for rounding, which is why there is one: phases
        of coordinates of 10⁴ Å are wrong by 1e-3 in float32. An estimate of exp(Φ_i·Ψ_j) by random
        features does depend on it.

        Args:
            positions: (N, ℓ), Å.
            ptr: (B + 1,), first row of each system; None is one system.
            origin: "mean" of the system's positions; its "first" position, for causal layers, where
                no row may know of later ones; or points (B, ℓ), Å, for cross-attention, where
                queries and keys need the same one.
            redraw: False if this call is no training forward of its own, as that for the keys of
                cross-attention or one for inspection: it uses the present frequencies and does
                not begin a step of their `redraw_every`, see `Redrawn`.

        Raises:
            ValueError: positions that are not (N, ℓ) or complex, `ptr` that does not describe N
                rows, or an origin that is neither "mean" nor "first" nor (B, ℓ).
        """
        if positions.dim() != 2 or positions.shape[-1] != self.dim:
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}, expected (N, {self.dim})"
            )
        if ptr is None:
            ptr = torch.arange(2, device=positions.device) * positions.shape[0]
        check_ptr(ptr, positions.shape[0])
        if redraw:
            self.frequencies._count_step()
        frequencies, ratio = self.ratio()
        basis = fourier_basis(relative_positions(positions, ptr, origin), frequencies)
        features = position_features(basis, ratio, self.split)
        self.frequencies._watch(*(x for x in features if x is not None), always=redraw)
        return features

    def mask(self, displacements: Tensor) -> Tensor:
        """f(x), what the features estimate: displacements (…, ℓ), Å → (…, H)."""
        mask: Tensor = self.spectrum.mask(displacements)
        return mask

    def sampled_mask(self, displacements: Tensor) -> Tensor:
        """N̂(x), what the features give: displacements (…, ℓ), Å → (…, H).

        With the present draw: it is no training forward.
        """
        frequencies, ratio = self.ratio()
        phase = phases(displacements, frequencies)
        if frequencies.dim() == 2:
            phase = phase.unsqueeze(-2)
        if not ratio.is_complex():
            return (phase.cos() * ratio).mean(-1)
        return (phase.cos() * ratio.real - phase.sin() * ratio.imag).mean(-1)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"split={self.split!r}"


def relative_positions(positions: Tensor, ptr: Tensor, origin: str | Tensor) -> Tensor:
    """Positions relative to their own system's origin: (N, ℓ) → (N, ℓ), at least float32.

    Nothing is rounded before the difference is formed: integers are subtracted as such, float16
    and bfloat16 positions as float32.

    Args:
        positions: (N, ℓ), Å, of any real or integer dtype.
        ptr: (B + 1,), first row of each system.
        origin: "mean", "first", or points (B, ℓ), Å. Gradients reach the origin too.

    Raises:
        ValueError: another word, points of another shape, or complex numbers.

    Example:
        >>> positions = torch.tensor([[100001.0], [100003.0], [5.0]])
        >>> relative_positions(positions, torch.tensor([0, 2, 2, 3]), "first").tolist()
        [[0.0], [2.0], [0.0]]
    """
    positions = _exact(positions, "positions")
    if isinstance(origin, Tensor):
        if origin.shape != (ptr.numel() - 1, positions.shape[-1]):
            raise ValueError(
                f"origin has shape {tuple(origin.shape)}, expected ({ptr.numel() - 1}, "
                f"{positions.shape[-1]}): one point per system"
            )
        return _difference(positions, spread(_exact(origin, "origin"), ptr, positions.shape[0]))
    if origin == "mean" and positions.is_floating_point():
        return centred(positions, ptr)
    if origin not in ("mean", "first"):
        raise ValueError(f"origin is {origin!r}, expected 'mean', 'first' or points (B, ℓ)")
    first = spread(first_per_system(positions, ptr), ptr, positions.shape[0])
    local = _difference(positions, first)
    return centred(local, ptr) if origin == "mean" else local


def _exact(x: Tensor, name: str) -> Tensor:
    """The same numbers in a dtype whose differences are right: int64, or at least float32."""
    if x.is_complex():
        raise ValueError(f"{name} are complex ({x.dtype}), expected real coordinates")
    return at_least_float32(x) if x.is_floating_point() else x.to(torch.int64)


def _difference(x: Tensor, y: Tensor) -> Tensor:
    """In at least float32, and exact before it is rounded where one or both are integers."""
    if x.is_floating_point() == y.is_floating_point():
        return at_least_float32(x - y)
    (whole, rest), (other, other_rest) = _whole_and_rest(x), _whole_and_rest(y)
    # An origin in float64 makes no float64 out of integers.
    return at_least_float32(whole - other) + (rest - other_rest).to(rest.dtype)


def _whole_and_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integer as int64, and what is left, through which gradients go."""
    if not x.is_floating_point():
        return x, torch.zeros_like(x, dtype=torch.float32)
    whole = x.detach().round()
    return whole.to(torch.int64), x - whole


def rotation_error(
    rpe: FourierRPE,
    radius: float,
    *,
    num_radii: int = 48,
    num_directions: int = 256,
    generator: torch.Generator | None = None,
) -> Tensor:
    """How much turning a molecule can change N̂, per head: the widest range over directions.

    For each distance r ≤ `radius`, N̂(r u) over directions u has a largest and a smallest value; the
    result is the largest difference of the two over r. It is in the units of the mask, so compare
    it with f(0). A set of frequencies that is invariant to rotations has 0; a random
    one of R = 16 / 64 / 256 / 1024 has 1.1 / 0.6 / 0.3 / 0.15 f(0) over 18 Å.

    Args:
        rpe: its present draw is measured.
        radius: largest distance, Å.
        num_radii: distances, evenly spaced from 0 on.
        num_directions: random directions u.
        generator: on CPU, of u; None is the same directions each time.

    Returns:
        (H,), without gradient.

    Example:
        >>> from flt_mol.nn.frequencies import LatticeFrequencies
        >>> from flt_mol.nn.spectrum import GaussianSpectrum
        >>> spectrum = GaussianSpectrum(num_heads=1, num_terms=1, sigma_min=4.0)
        >>> rpe = FourierRPE(spectrum, LatticeFrequencies(radius=8.0, sigma=4.0))
        >>> relative = rotation_error(rpe, 8.0) / spectrum.mask(torch.zeros(3)).abs()
        >>> bool(relative < 2e-3)
        True
    """
    if generator is None:
        generator = torch.Generator("cpu").manual_seed(0)
    directions = draw_normal(num_directions, rpe.dim, generator=generator)
    frequencies, _ = rpe.ratio()
    directions = (directions / directions.norm(dim=-1, keepdim=True)).to(frequencies)
    with torch.no_grad():
        ranges = []
        for step in range(num_radii + 1):
            masks = rpe.sampled_mask(radius * step / num_radii * directions)
            ranges.append(masks.amax(0) - masks.amin(0))
        return torch.stack(ranges).amax(0)
