"""φ as modules: maps of [Φ, q̂] and [Ψ, k̂], q̂ = q D^{-1/4}, that never form these concatenations.

`SoftmaxFeatures` and `HyperbolicFeatures` are unbiased estimates of exp(q·k/√D + Φ·Ψ). The others
define an attention of their own, in which position features are further inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional.feature_maps import (
    orthogonal_projection,
    softmax_log_features,
    softplus_log_features,
)
from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import at_least_float32
from flt_mol.nn.layers import draw_normal, placed, seeded_generator
from flt_mol.nn.redraw import Redrawn


class FeatureMap(nn.Module):
    """Base of feature maps: from rows to features ≥ 0, per head.

    A map of your own needs `forward`, and the attributes that are not the defaults. Features below
    0 make weights that may cancel, and outputs without bound or NaN. The position features of the
    rows are ``at.query`` or, of keys, ``at.key``: (N, H, 2R), or (N, 1, 2R) where all heads share
    them.

    Args:
        num_heads: H.
        head_dim: D.
        position_dim: 2R, the width of the position features; 0 without positions.
        num_features: M, how many features come out.

    Attributes:
        exponential: whether `forward` gives log φ, which attention exponentiates after taking off
            what is common to a system.
        estimates_softmax: whether E[φ(q)·φ(k)] = exp(q·k/√D + Φ·Ψ), up to a factor of the query.
        learned: whether it has weights, which exact attention would never train.

    Examples:
        >>> class Squares(FeatureMap):
        ...     def forward(self, x, at, *, key):
        ...         positions = (at.key if key else at.query).expand(-1, self.num_heads, -1)
        ...         return torch.cat([positions, x], dim=-1).square()
        >>> from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum
        >>> rpe = FourierRPE(GaussianSpectrum(2, 4), GaussianFrequencies(5))  # 2R = 10
        >>> squares = Squares(num_heads=2, head_dim=4, position_dim=10, num_features=14)
        >>> layer = FLTAttention(8, 2, feature_map=squares, rpe=rpe)
        >>> layer(torch.randn(6, 8), torch.rand(6, 3)).shape
        torch.Size([6, 8])
    """

    exponential = False
    estimates_softmax = False
    learned = False
    per_direction = 1

    def __init__(self, num_heads: int, head_dim: int, position_dim: int, num_features: int) -> None:
        super().__init__()
        if min(num_heads, head_dim, num_features) < 1 or position_dim < 0:
            sizes = f"{num_heads=}, {head_dim=} and {num_features=}"
            raise ValueError(f"{sizes} must be ≥ 1, {position_dim=} must be ≥ 0")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.position_dim = position_dim
        self.num_features = num_features

    def forward(self, x: Tensor, at: PositionFeatures | None, *, key: bool) -> Tensor:
        """φ, or log φ if `exponential`, of rows (N, H, D) at positions `at` → (N, H, M).

        Args:
            x: queries or keys.
            at: the rows' position features; None without positions.
            key: whether the rows are keys (Ψ) or queries (Φ).
        """
        raise NotImplementedError(f"{type(self).__name__} has no features: define forward")


class RandomFeatures(FeatureMap, Redrawn):
    """Base of maps with fixed random directions W (M, 2R + D) per head, saved as buffers.

    Args:
        num_heads, head_dim, position_dim, num_features: H, D, 2R and M.
        orthogonal: whether directions are orthogonal in blocks, else independent.
        redraw_every: training steps after which training draws another W, while eval keeps the
            saved one (see `Redrawn`), or None.
        generator: on CPU; None takes a seed from torch.
    """

    content_projection: Tensor
    position_projection: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        position_dim: int = 0,
        *,
        num_features: int = 64,
        orthogonal: bool = True,
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if num_features % self.per_direction:
            raise ValueError(f"num_features {num_features} must be even: W and −W are both used")
        super().__init__(num_heads, head_dim, position_dim, num_features)
        self.orthogonal = orthogonal
        self.register_buffer("position_projection", None)
        self._init_redraw(redraw_every, generator)

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        content, positions = _directions(self, self.orthogonal, generator)
        draws = {"content_projection": content}
        if self.position_dim:
            draws["position_projection"] = positions
        return draws

    def forward(self, x: Tensor, at: PositionFeatures | None, *, key: bool) -> Tensor:
        """φ, or log φ if `exponential`, of rows (N, H, D) → (N, H, M)."""
        if redraws := self.redraw_every is not None:
            self.begin_step()
        # What is subtracted is a constant of the row, which cancels for queries.
        norm = key and self.exponential
        features = softmax_log_features(
            x, self.content_projection, at, self.position_projection, key=key, subtract_norm=norm
        )
        if redraws:
            self.watch(features)
        return features


class SoftmaxFeatures(RandomFeatures):
    """Positive random features: φ_m(x) = exp(w_m·x̂ − ‖x̂‖²/2), as logarithms.

    E[φ(q)·φ(k)]/M = exp(q·k/√D + Φ·Ψ), up to a factor of the query's, which attention divides out.
    The relative variance of one weight is (exp(‖q̂ + k̂‖²) − 1)/M: good for small logits only.
    Choromanski et al., ICLR 2021, Lemma 1.
    """

    exponential = True
    estimates_softmax = True


class HyperbolicFeatures(SoftmaxFeatures):
    """Positive features in opposite pairs: exp(±w_m·x̂ − ‖x̂‖²/2), M/2 directions.

    Of the same expectation as `SoftmaxFeatures`, by the same lemma, and of smaller variance.
    """

    per_direction = 2


class _Rectified(FeatureMap):
    def forward(self, x: Tensor, at: PositionFeatures | None, *, key: bool) -> Tensor:
        """φ of rows (N, H, D) → (N, H, M); a row that has no feature has no attention: 0."""
        return super().forward(x, at, key=key).clamp(min=0.0)


class ReLUFeatures(_Rectified, RandomFeatures):
    """φ(x) = ReLU(W [Φ, x̂]), with W random and fixed; see `LearnedReLUFeatures`."""


class LearnedFeatures(FeatureMap):
    """Base of maps with learned directions W (M, 2R + D) per head, and a learned b if `biased`.

    Args:
        num_heads, head_dim, position_dim, num_features: H, D, 2R and M.
        generator: on CPU, for W at the start; None as of `RandomFeatures`.
    """

    learned = True
    biased = False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        position_dim: int = 0,
        *,
        num_features: int = 64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, position_dim, num_features)
        content, positions = _directions(self, True, seeded_generator(generator))
        self.weight = nn.Parameter(placed(content))
        self.bias = nn.Parameter(torch.zeros_like(self.weight[..., 0])) if self.biased else None
        self.position_weight = nn.Parameter(placed(positions)) if position_dim else None

    def forward(self, x: Tensor, at: PositionFeatures | None, *, key: bool) -> Tensor:
        """W [Φ, x̂] + b of rows (N, H, D) → (N, H, M)."""
        logits = softmax_log_features(
            x, self.weight, at, self.position_weight, key=key, subtract_norm=False
        )
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)


class LearnedReLUFeatures(_Rectified, LearnedFeatures):
    """φ(x) = ReLU(W [Φ, x̂]), with W learned: the map of the paper's image model."""


class SoftplusFeatures(LearnedFeatures):
    """φ(x) = softplus(W [Φ, x̂] + b), with W and b learned, as logarithms.

    Learned maps follow a given softmax far more closely than random ones of the same M once they
    are trained; before that they are no estimate of anything.
    """

    exponential = True
    biased = True

    def forward(self, x: Tensor, at: PositionFeatures | None, *, key: bool) -> Tensor:
        """Log φ of rows (N, H, D) → (N, H, M)."""
        return softplus_log_features(super().forward(x, at, key=key))


class ELUFeatures(FeatureMap):
    """φ(x) = elu([Φ, x̂]) + 1, e^u for u < 0 and 1 + u above, without any weights: M = 2R + D.

    Katharopoulos et al., "Transformers are RNNs", ICML 2020, equation 7.
    """

    def __init__(self, num_heads: int, head_dim: int, position_dim: int = 0) -> None:
        super().__init__(num_heads, head_dim, position_dim, position_dim + head_dim)

    def forward(self, x: Tensor, at: PositionFeatures | None, *, key: bool) -> Tensor:
        """φ of rows (N, H, D) → (N, H, M)."""
        rows = at_least_float32(x) * self.head_dim**-0.25
        if self.position_dim and at is not None:
            positions = (at.key if key else at.query).to(rows.dtype)
            rows = torch.cat([positions.expand(-1, self.num_heads, -1), rows], dim=-1)
        # Not elu(u) + 1, whose e^u − 1 + 1 keeps no digit of a small e^u.
        return torch.where(rows > 0, rows + 1, rows.clamp(max=0.0).exp())


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "softmax": SoftmaxFeatures,
    "hyperbolic": HyperbolicFeatures,
    "relu": ReLUFeatures,
    "learned_relu": LearnedReLUFeatures,
    "softplus": SoftplusFeatures,
    "elu": ELUFeatures,
}
"""Feature maps by name."""


def feature_map_of(
    choice: str | FeatureMap,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    **settings: Any,
) -> FeatureMap:
    """The map named by, or given as, `choice`, for H heads of D channels and 2R positions.

    Args:
        choice: a name in `FEATURE_MAPS`, or a map, which must be of this shape.
        shape: H, D and 2R.
        generator: for maps that begin with random numbers.
        **settings: what else is asked for, None where nothing is.

    Raises:
        ValueError: unknown name, or a map of another shape.
        TypeError: a setting that the map does not have.
    """
    asked = {name: value for name, value in settings.items() if value is not None}
    if isinstance(choice, FeatureMap):
        own = (choice.num_heads, choice.head_dim, choice.position_dim)
        if own != shape or asked:
            raise ValueError(
                f"the feature map is for heads, channels and positions {own} and brings its own "
                f"settings; needed: {shape}, given besides: {', '.join(asked) or 'nothing'}"
            )
        return choice
    if choice not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map is {choice!r}, expected a FeatureMap or one of {', '.join(FEATURE_MAPS)}"
        )
    kind = FEATURE_MAPS[choice]
    if kind is not ELUFeatures:  # which draws nothing
        asked["generator"] = generator
    return kind(*shape, **asked)


def _directions(
    shape: FeatureMap, orthogonal: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """W for content (H, M, D) and for positions (H, M, 2R), drawn as one matrix per head."""
    draw = orthogonal_projection if orthogonal else draw_normal
    rows, widths = shape.num_features // shape.per_direction, [shape.position_dim, shape.head_dim]
    heads = [draw(rows, sum(widths), generator=generator) for _ in range(shape.num_heads)]
    drawn = torch.stack(heads)
    if shape.per_direction == 2:
        drawn = torch.cat([drawn, -drawn], 1)
    positions, content = drawn.split(widths, -1)
    return content.contiguous(), positions.contiguous()
