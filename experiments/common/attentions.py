"""Causal attention of other papers, as parts of our `FLTEncoder`; each is checked against its sum.

All take packed rows of sequences of one length, and share `CausalAttention`'s linear maps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional import causal_attention, causal_log_attention, orthogonal_projection
from flt_mol.functional.feature_maps import stabilised_features
from flt_mol.nn import SoftmaxFeatures
from flt_mol.nn.layers import drawn_linear, seeded_generator

BLOCK = 64
_AT_ONCE = 4  # features per Fourier transform: they stay in the cache


class CausalAttention(nn.Module):
    """Queries, keys, values and output around `attend`; looks like a causal `FLTAttention`.

    Args:
        embed_dim: C.
        num_heads: H; D = C/H.
        generator: on CPU; None takes a seed from torch's global one.
    """

    causal, rpe = True, None

    def __init__(
        self, embed_dim: int, num_heads: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.generator = seeded_generator(generator)
        maps = (drawn_linear(embed_dim, embed_dim, True, self.generator) for _ in range(4))
        self.query, self.key, self.value, self.out = maps

    def forward(self, x: Tensor, positions: None = None, *, ptr: Tensor, **unused: Any) -> Tensor:
        """Rows (N, C) of B sequences of one length → (N, C)."""
        maps, heads = (self.query, self.key, self.value), (self.num_heads, -1)
        rows = (linear(x).unflatten(1, heads) for linear in maps)
        return self.out(self.attend(*rows, x, ptr).flatten(1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor, ptr: Tensor) -> Tensor:
        """Packed rows (N, H, D) and features (N, C) → attended values (N, H, D)."""
        raise NotImplementedError


def in_sequences(rows: Tensor, ptr: Tensor) -> Tensor:
    """Packed (N, …) → (B, L, …)."""
    return rows.unflatten(0, (len(ptr) - 1, -1))


class CosFormerAttention(CausalAttention):
    """Weights ReLU(q_i)·ReLU(k_j) cos(π(i − j)/2L): Qin et al., "cosFormer", ICLR 2022.

    Args:
        max_length: L; the other arguments are those of `CausalAttention`.
    """

    def __init__(self, *shape: Any, max_length: int, **given: Any) -> None:
        super().__init__(*shape, **given)
        self.max_length = max_length

    def attend(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor, ptr: Tensor) -> Tensor:
        """cos(a − b) = cos a cos b + sin a sin b: features of width 2D."""
        length = len(x) // (len(ptr) - 1)
        place = torch.arange(length, dtype=x.dtype, device=x.device).repeat(len(ptr) - 1)
        angle = (0.5 * math.pi / self.max_length * place)[:, None, None]
        query, key = (
            torch.cat([rows.relu() * angle.cos(), rows.relu() * angle.sin()], -1)
            for rows in (query, key)
        )
        return causal_attention(query, key, value, ptr)


class RandomFeatureAttention(CausalAttention):
    """RFA of Peng et al., "Random Feature Attention", ICLR 2021, with a gate or without.

    Queries and keys have norm 1, x̃ = x/‖x‖, and weights are φ(q̃_i)·φ(k̃_j). "gaussian":
    φ(x) = √(2/M) [sin Wx, cos Wx], for exp(−‖x − y‖²/2) at W ~ N(0, I); "arccos":
    φ(x) = √(2/M) ReLU(Wx). W is random and fixed, times a learned factor per head and channel.
    With a gate g_i = sigmoid(w·x_i + b) per head the sums forget: S_i = g_i S_{i−1} +
    (1 − g_i) φ(k̃_i) v_iᵀ, and the same for the normaliser.

    Features may be negative, and so may normalisers: we clamp them at a tenth of what they would be
    were all φ(q̃_i)·φ(k̃_j) = 1.

    Args:
        kernel: "gaussian" or "arccos".
        gated: whether there is a gate.
        num_features: M; the other arguments are those of `CausalAttention`.
    """

    projection: Tensor
    floor = 0.1

    def __init__(
        self, *shape: Any, kernel: str, gated: bool, num_features: int = 64, **given: Any
    ) -> None:
        super().__init__(*shape, **given)
        self.kernel = kernel
        rows = num_features // 2 if kernel == "gaussian" else num_features
        draws = [
            orthogonal_projection(rows, self.head_dim, generator=self.generator)
            for _ in range(self.num_heads)
        ]
        self.register_buffer("projection", torch.stack(draws))
        self.scale = nn.Parameter(torch.ones(self.num_heads, 1, self.head_dim))
        self.gate = nn.Linear(self.embed_dim, self.num_heads) if gated else None
        if self.gate is not None:
            nn.init.constant_(self.gate.bias, 2.0)  # a memory of eight tokens at first

    def features(self, rows: Tensor) -> Tensor:
        """φ of (N, H, D) → (N, H, M)."""
        rows = nn.functional.normalize(rows, dim=-1)
        u = torch.einsum("nhd,hmd->nhm", rows, self.projection * self.scale)
        if self.kernel == "gaussian":
            return torch.cat([u.sin(), u.cos()], -1) * self.projection.shape[1] ** -0.5
        return u.relu() * (2 / self.projection.shape[1]) ** 0.5

    def attend(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor, ptr: Tensor) -> Tensor:
        """Sums with decay by blocks, then the quotient."""
        query, key = self.features(query), self.features(key)
        if self.gate is None:
            log_gate = x.new_zeros(len(x), self.num_heads)
        else:
            log_gate = nn.functional.logsigmoid(self.gate(x))
            key = key * -torch.expm1(log_gate)[..., None]
        values = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        packed = (query, key, values, log_gate)
        rows = (in_sequences(part, ptr).transpose(1, 2) for part in packed)
        sums = decayed_sums(*rows).transpose(1, 2).flatten(0, 1)
        # What the normaliser would be for weights of 1: Σ_j (1 − g_j) Π_{s>j} g_s = 1 − Π_s g_s.
        total = in_sequences(log_gate, ptr).cumsum(1)
        most = -torch.expm1(total) if self.gate is not None else torch.ones_like(total).cumsum(1)
        least = self.floor * most.flatten(0, 1)[..., None]
        return sums[..., :-1] / torch.maximum(sums[..., -1:], least)


def decayed_sums(query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor) -> Tensor:
    """Σ_{j≤i} (Π_{j<s≤i} g_s) (q_i·k_j) v_j, in time linear in N.

    Args:
        query: (B, H, N, M).
        key: (B, H, N, M).
        value: (B, H, N, V).
        log_gate: log g ≤ 0, (B, H, N).

    Examples:
        >>> ones, value = torch.ones(1, 1, 3, 1), torch.tensor([8.0, 0.0, 1.0]).view(1, 1, 3, 1)
        >>> decayed_sums(ones, ones, value, torch.full((1, 1, 3), 0.5).log()).flatten()
        tensor([8., 4., 3.])
    """
    out, state = [], query.new_zeros(())
    for q, k, v, gate in zip(*(rows.split(BLOCK, 2) for rows in (query, key, value, log_gate)),
                             strict=True):  # fmt: skip
        level = gate.cumsum(-1)
        later = torch.ones(gate.shape[-1], gate.shape[-1], dtype=torch.bool).triu(1)
        decay = (level[..., :, None] - level[..., None, :]).masked_fill(later, -torch.inf).exp()
        own = ((q @ k.mT) * decay) @ v
        if out:
            own = own + (q * level.exp()[..., None]) @ state
        last = level[..., -1:]
        state = last.exp()[..., None] * state + (k * (last - level).exp()[..., None]).mT @ v
        out.append(own)
    return torch.cat(out, 2)


class StochasticAttention(CausalAttention):
    """Performer on queries and keys with stochastic positional encodings (SPE).

    Liutkus et al., "Relative Positional Encoding for Transformers with Linear Complexity", ICML
    2021: q̂_i = Σ_d q_id Q̄_d(i) and k̂_j likewise, with random codes of R columns of
    E[Q̄_d(i)·K̄_d(j)]/R = P_d(i − j), so q̂·k̂/R estimates Σ_d q_d k_d P_d(i − j); R = D here.
    "sine": P_d(x) = Σ_k λ_kd² cos(2πf_kd x + θ_kd). "conv": P_d = Σ_u a_d(u) b_d(u + x), a and b
    learned filters. A learned gate δ_d mixes in what ignores positions: δ P + 1 − δ.

    Codes are resampled in every training step; evaluation always takes the same.

    Args:
        kind: "sine" or "conv".
        num_features: M of the Performer.
        num_sines: K.
        width: length of the filters; the other arguments are those of `CausalAttention`.
    """

    def __init__(
        self, *shape: Any, kind: str, num_features: int = 64, num_sines: int = 5, width: int = 64,
        **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(*shape, **given)
        self.kind, heads = kind, (self.num_heads, self.head_dim)
        self.gate = nn.Parameter(torch.zeros(heads))
        if kind == "sine":
            self.frequency = nn.Parameter(self._normal(*heads, num_sines) - 4.0)
            self.phase = nn.Parameter(self._normal(*heads, num_sines))
            self.gain = nn.Parameter(torch.full((*heads, num_sines), num_sines**-0.5))
        else:
            fade = torch.linspace(0, -4, width).exp()
            filters = self._normal(2, *heads, width) * fade
            self.filters = nn.Parameter(filters / filters.norm(dim=-1, keepdim=True))
        self.feature_map = SoftmaxFeatures(
            self.num_heads, self.head_dim, num_features=num_features, generator=self.generator
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def codes(self, length: int, columns: int, generator: torch.Generator | None) -> list[Tensor]:
        """Q̄ and K̄ without gate, (H, D, L, R)."""
        dtype, shape = self.gate.dtype, tuple(self.gate.shape)
        if self.kind == "conv":
            count = length + self.filters.shape[-1] - 1
            noise = torch.randn(*shape, columns, count, generator=generator, dtype=dtype)
            spectrum = torch.fft.rfft(noise)
            # Σ_u a(u) z(i + u): a correlation; the first L places meet no wrapped end.
            found = torch.fft.rfft(self.filters, n=count).conj()[..., None, :] * spectrum
            return list(torch.fft.irfft(found, n=count)[..., :length].mT)
        place = torch.arange(length, dtype=dtype)[:, None]
        turns = math.pi * torch.sigmoid(self.frequency)[:, :, None, :] * place  # f below 1/2
        noise = torch.randn(
            *shape, 2 * self.gain.shape[-1], columns, generator=generator, dtype=dtype
        )
        noise = torch.cat([self.gain, self.gain], -1)[..., None] * noise
        angles = (turns + self.phase[:, :, None, :], turns)
        return [torch.cat([angle.cos(), angle.sin()], -1) @ noise for angle in angles]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor, ptr: Tensor) -> Tensor:
        """Coded queries and keys into softmax features."""
        generator = None if self.training else torch.Generator().manual_seed(0)
        length, size = len(x) // (len(ptr) - 1), self.head_dim
        codes = self.codes(length, size, generator)
        common = torch.randn(*self.gate.shape, 1, size, generator=generator, dtype=self.gate.dtype)
        gate = torch.sigmoid(self.gate)[:, :, None, None]
        rows = []
        for part, code in zip((query, key), codes, strict=True):
            mixed = (gate.sqrt() * code + (1 - gate).sqrt() * common) * size**-0.5
            coded = torch.einsum("blhd,hdlr->blhr", in_sequences(part, ptr), mixed)
            rows.append(coded.flatten(0, 1))
        features = [self.feature_map(row, None, key=i == 1) for i, row in enumerate(rows)]
        return causal_log_attention(*features, value, ptr)


class LogLinearAttention(CausalAttention):
    """Performer whose weights have a factor exp(b_{h,i−j}), b learned: O(N log N) by FFT.

    Luo et al., "Stable, Fast and Accurate: Kernelized Attention with Relative Positional Encoding",
    NeurIPS 2021; our own form of it.

    Args:
        max_length: most tokens, the number of distances.
        num_features: M.
        fft: whether to use FFT, else the same sum is written out: O(N²), faster at short lengths.
            The other arguments are those of `CausalAttention`.
    """

    def __init__(
        self, *shape: Any, max_length: int, num_features: int = 64, fft: bool = True, **given: Any
    ) -> None:
        super().__init__(*shape, **given)
        self.fft = fft
        self.log_mask = nn.Parameter(torch.zeros(self.num_heads, max_length))
        self.feature_map = SoftmaxFeatures(
            self.num_heads, self.head_dim, num_features=num_features, generator=self.generator
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor, ptr: Tensor) -> Tensor:
        """Later tokens have the factor 0."""
        logs = (self.feature_map(rows, None, key=i == 1) for i, rows in enumerate((query, key)))
        query, key = stabilised_features(*logs, ptr)
        length = len(x) // (len(ptr) - 1)
        mask = self.log_mask[:, :length].exp()
        mask = torch.cat([mask.new_zeros(len(mask), length - 1), mask], -1)
        run = masked_attention if self.fft else written_out
        sequences = zip(*(in_sequences(rows, ptr) for rows in (query, key, value)), strict=True)
        return torch.cat([run(*rows, mask) for rows in sequences])


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """`masked_attention` with all weights written out, (H, N, N)."""
    factors = mask.flip(-1).unfold(-1, len(value), 1).flip(1)  # c of i − j
    weights = query.transpose(0, 1) @ key.permute(1, 2, 0) * factors
    sums = weights @ value.transpose(0, 1)
    return (sums / weights.sum(-1, keepdim=True)).transpose(0, 1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """out_i = Σ_j c_{i−j} φ(q_i)·φ(k_j) v_j / Σ_j c_{i−j} φ(q_i)·φ(k_j), by FFT.

    Args:
        query: φ(q) (N, H, M), not negative.
        key: φ(k) (N, H, M), not negative.
        value: (N, H, D).
        mask: c (H, 2N − 1), from c_{1−N} to c_{N−1}, positive.

    Examples:
        >>> ones, value = torch.ones(3, 1, 1), torch.tensor([0.0, 6.0, 3.0]).view(3, 1, 1)
        >>> masked_attention(ones, ones, value, torch.ones(1, 5)).flatten()
        tensor([3., 3., 3.])
    """
    length = value.shape[0]
    values = torch.cat([value, value.new_ones(*value.shape[:2], 1)], -1)
    # c_0 … c_{N−1}, then c_{−N} (never met: 0), c_{1−N} … c_{−1}: a circle of 2N.
    circle = torch.cat(
        [mask[:, length - 1 :], mask.new_zeros(len(mask), 1), mask[:, : length - 1]], -1
    )
    heads = [
        _head(query[:, h], key[:, h], values[:, h], torch.fft.rfft(circle[h]))
        for h in range(len(mask))
    ]
    sums = torch.stack(heads, 1)
    return sums[..., :-1] / sums[..., -1:]


def _head(query: Tensor, key: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Σ_j c_{i−j} φ(q_i)·φ(k_j) v_j of one head: (N, M), (N, M), (N, V) → (N, V)."""
    length, columns = len(key), values.T.contiguous()
    sums = torch.zeros_like(columns)
    for q, k in zip(query.T.split(_AT_ONCE), key.T.split(_AT_ONCE), strict=True):
        spectrum = torch.fft.rfft(k[:, None, :] * columns, n=2 * length) * mask
        convolved = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        sums = sums + (convolved * q[:, None, :]).sum(0)
    return sums.T
