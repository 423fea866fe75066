"""3D-Graphormer's dense bias: Gaussians of a pair's distance and elements, through a small net."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.functional.numerics import placed, seeded_generator
from flt_mol.functional.pairs import segment_sum
from flt_mol.nn._pair_checks import check_sizes
from flt_mol.nn._plain import applied
from flt_mol.nn.layers import drawn_linear
from flt_mol.nn.radial import _FAR, PairTypes, smooth_cutoff

_SMALLEST_WINDOW = 1e-11  # times e⁻⁶⁰ is still a normal number


class GaussianBias(nn.Module):
    """f_h(r) = b_h + Σ_k U_hk GELU(Σ_t W_kt G_t(r) + c_k), G_t(r) = exp(−(a r + b − μ_t)² / 2σ_t²).

    The bias that 3D-Graphormer [1] adds to its attention's logits. Centres μ and widths σ are
    learned, and so are a and b of each ordered pair of elements, of low rank (`PairTypes`) where
    [1] has a table. Gaussians have height 1 where those of [1] have area 1, and centres begin
    evenly spaced over [0, cutoff], one spacing wide, where those of [1] are drawn from [0, 3] Å.

    `forward` gives f without a cutoff: whoever makes keys of periodic images of it adds
    `log_smooth_cutoff`, as `ImageKeys` does. `density` gives the part that [1] adds to the
    embedding of atoms, P Σ_j w(r_ij) G(r_ij), under the smooth cutoff w that periodic systems
    need. Both can share their Gaussians:

        features = layer.features(distances, receiver, sender)
        mask, x = layer.bias(features), x + layer.density(features, distances, pairs, len(x))

    Time O(P·T·(T + H)), memory O(P·T), for P pairs: several times what the attention takes.

    Args:
        num_heads: H.
        num_basis: T; the hidden layer is as wide.
        cutoff: Å, where the density ends and the last centre begins.
        pair_types: whether a and b are learned per pair of elements; else they are 1 and 0.
        embed_dim: C of the density; None builds no density.
        generator: on CPU, for all weights; None takes a seed from torch's global one.

    Raises:
        ValueError: a size below 1, a cutoff that is not a positive length, or fewer than two
            Gaussians.

    References:
        [1] Shi et al., "Benchmarking Graphormer on Large-Scale Molecular Modeling Datasets", 2022,
        section 3 (Gaussian basis function kernel, centrality as a sum of edge features).

    Example:
        >>> layer = GaussianBias(num_heads=4, num_basis=8, pair_types=False)
        >>> layer(torch.tensor([0.0, 1.5, 3.0])).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        num_heads: int,
        num_basis: int = 128,
        cutoff: float = 6.0,
        pair_types: bool = True,
        embed_dim: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, embed_dim=embed_dim)
        if not 0 < cutoff < math.inf or num_basis < 2:
            raise ValueError(
                f"need 0 < cutoff < ∞ and num_basis ≥ 2, got cutoff={cutoff}, num_basis={num_basis}"
            )
        generator = seeded_generator(generator)
        self.cutoff = float(cutoff)
        self.pair_types = PairTypes(generator=generator) if pair_types else None
        steps = torch.arange(num_basis, dtype=torch.float32, device="cpu")
        spacing = self.cutoff / (num_basis - 1)
        self.centre = nn.Parameter(placed(steps * spacing))
        # By its logarithm, so that no step of the optimiser makes a width zero or negative.
        self.log_width = nn.Parameter(placed(torch.full_like(steps, math.log(spacing))))
        self.hidden = drawn_linear(num_basis, num_basis, True, generator)
        self.out = drawn_linear(num_basis, num_heads, True, generator)
        self.density_out = (
            None if embed_dim is None else drawn_linear(num_basis, embed_dim, True, generator)
        )

    def forward(
        self, distances: Tensor, receiver: Tensor | None = None, sender: Tensor | None = None
    ) -> Tensor:
        """Distances (P,), Å, and the atomic numbers (P,) of both atoms if types are on → f (P, H).

        Raises:
            ValueError: types are on and atomic numbers are missing, none, or not one a pair.
        """
        return self.bias(self.features(distances, receiver, sender))

    def features(
        self, distances: Tensor, receiver: Tensor | None = None, sender: Tensor | None = None
    ) -> Tensor:
        """G (P, T) of the pairs, at least float32; arguments as of `forward`.

        Raises:
            ValueError: types are on and atomic numbers are missing, none, or not one a pair.
        """
        r = at_least_float32(distances)
        with without_autocast(r):
            if self.pair_types is not None:
                if receiver is None or sender is None:
                    raise ValueError(
                        "pair_types=True needs the atomic numbers (P,) of receivers and senders"
                    )
                r = self.pair_types(r, receiver, sender)
            centre, log_width = (x.to(r.dtype) for x in (self.centre, self.log_width))
            steps = (r[:, None] - centre) * torch.exp(-log_width)
            # Denormal numbers would make every product with them several times slower.
            return (-0.5 * steps.square()).clamp(min=_FAR).exp()

    def bias(self, features: Tensor) -> Tensor:
        """G (P, T), as of `features`, → f (P, H), in its dtype whatever autocast asks for."""
        with without_autocast(features):
            hidden = nn.functional.gelu(applied(self.hidden, features))
            return applied(self.out, hidden)

    def density(
        self, features: Tensor, distances: Tensor, pairs: NeighborPairs, num_rows: int
    ) -> Tensor:
        """P Σ_j w(r_ij) G(r_ij) + p of each atom: (P, T) → (N, C), at least float32.

        Pairs of an atom and itself do not count, those beyond the cutoff neither.

        Args:
            features: of these pairs, see `features`.
            distances: (P,), Å.
            pairs: the pairs, with or without self pairs.
            num_rows: N.

        Raises:
            ValueError: built without `embed_dim`, or features or distances of other pairs.
        """
        if self.density_out is None:
            raise ValueError("there is no density: build GaussianBias with embed_dim=C")
        count = pairs.index_i.shape[0]
        if features.shape[0] != count or distances.shape != (count,):
            raise ValueError(
                f"features {tuple(features.shape)} and distances {tuple(distances.shape)} are not "
                f"those of these {count} pairs"
            )
        with without_autocast(features):
            window = smooth_cutoff(distances.to(features.dtype), self.cutoff)
            window = window.masked_fill(pairs.is_self() | (window < _SMALLEST_WINDOW), 0.0)
            summed = segment_sum(features * window[:, None], pairs.index_i, num_rows)
            return applied(self.density_out, summed)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"cutoff={self.cutoff}, num_basis={len(self.centre)}"
