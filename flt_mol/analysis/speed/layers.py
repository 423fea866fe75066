"""Layers that are compared over lengths: ours, those of other packages, and what they replace.

All are one pre-norm block, x ← x + Attention(LayerNorm(x)); x ← x + FFN(LayerNorm(x)), of the same
sizes; only the attention differs. All call `forward(x, positions)` with rows (N, C), one system.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flt_mol.analysis.layer_cost import LayerSize, TimedLayer, gaussian_rpe
from flt_mol.analysis.speed.log_linear import LogLinearAttention
from flt_mol.nn.attention import AttentionRows, FLTAttention
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import BoxSpectrum

__all__ = ["CORES", "LAYERS", "Contestant", "DenseBiasAttention", "build_core", "build_layer"]


class Contestant(NamedTuple):
    """A layer that is compared.

    Attributes:
        build: its module, from the sizes.
        kind: of its products, see `floors.block_products`.
        package: what has to be installed, or None.
    """

    build: Callable[[LayerSize], nn.Module]
    kind: str
    package: str | None = None


class Block(nn.Module):
    """A block around any attention (N, C) → (N, C), as `nn.FLTBlock` is around ours."""

    def __init__(self, size: LayerSize, attention: nn.Module, batched: bool = False) -> None:
        super().__init__()
        c = size.embed_dim
        self.attention, self.batched = attention, batched
        self.attention_norm, self.ffn_norm = nn.LayerNorm(c), nn.LayerNorm(c)
        self.ffn = nn.Sequential(nn.Linear(c, size.ffn_dim), nn.GELU(), nn.Linear(size.ffn_dim, c))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rows (N, C) to rows; where something is, is the attention's own business."""
        h = self.attention_norm(x)
        x = x + (self.attention(h[None])[0] if self.batched else self.attention(h))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class DenseBiasAttention(nn.Module):
    """Softmax attention with a learned bias b_h,i−j, written out (H, N, N) in every call.

    What positions cost where attention is exact; torch's fused attention takes the bias as a mask.
    """

    def __init__(self, size: LayerSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.embed_dim, 3 * size.embed_dim)
        self.out = nn.Linear(size.embed_dim, size.embed_dim)
        self.table = nn.Parameter(0.1 * torch.randn(size.num_heads, 2 * size.tokens - 1))

    def bias(self, length: int) -> Tensor:
        """(H, N, N), b of i − j."""
        windows = self.table.flip(-1).unfold(-1, length, 1)  # row s: b of −j + N − 1 − s
        return windows.flip(1)

    def forward(self, x: Tensor) -> Tensor:
        """One sequence: (N, C) → (N, C)."""
        q, k, v = self.qkv(x).view(1, len(x), 3, self.num_heads, -1).transpose(1, 3).unbind(2)
        out = nn.functional.scaled_dot_product_attention(q, k, v, self.bias(len(x))[None])
        result: Tensor = self.out(out[0].transpose(0, 1).flatten(1))
        return result


def _performer_pytorch(size: LayerSize) -> nn.Module:
    attention = import_module("performer_pytorch").SelfAttention(
        size.embed_dim,
        heads=size.num_heads,
        dim_head=size.embed_dim // size.num_heads,
        nb_features=size.num_features,
        qkv_bias=True,
        attn_out_bias=True,
    )
    return Block(size, attention, batched=True)


def _pyg(size: LayerSize) -> nn.Module:
    """With M features as the others have; as it comes it has D log D, 266 for D = 64."""
    module = import_module("torch_geometric.nn.attention.performer")
    attention = module.PerformerAttention(
        size.embed_dim, size.num_heads, size.embed_dim // size.num_heads, qkv_bias=True
    )
    projection = attention.fast_attn
    projection.num_rows = size.num_features
    projection.projection_matrix = module.orthogonal_matrix(size.num_features, projection.num_cols)
    return Block(size, attention, batched=True)


def _log_linear(size: LayerSize) -> nn.Module:
    sizes = size.embed_dim, size.num_heads, size.num_features, size.tokens
    return Block(size, LogLinearAttention(*sizes))


def _local_rpe(size: LayerSize) -> FourierRPE:
    """The paper's local RPE: boxes."""
    spectrum = BoxSpectrum(size.num_heads, num_terms=16)
    return FourierRPE(spectrum, GaussianFrequencies(size.num_frequencies))


OURS = "Performer (ours)"
LAYERS: dict[str, Contestant] = {
    OURS: Contestant(lambda size: TimedLayer(size, "block", None), "linear"),
    "FLT, Gaussian RPE": Contestant(
        lambda size: TimedLayer(size, "block", gaussian_rpe(size)), "positions"
    ),
    "FLT, local RPE": Contestant(
        lambda size: TimedLayer(size, "block", _local_rpe(size)), "positions"
    ),
    "log-linear Performer": Contestant(_log_linear, "fft"),
    "softmax, dense bias": Contestant(
        lambda size: Block(size, DenseBiasAttention(size)), "softmax"
    ),
    "performer-pytorch": Contestant(_performer_pytorch, "linear", "performer_pytorch"),
    "PyG PerformerAttention": Contestant(_pyg, "linear", "torch_geometric"),
}


def build_layer(name: str, size: LayerSize) -> nn.Module:
    """A layer of `LAYERS`, in eval mode: nothing is redrawn, and nothing drops out in any of them.

    Raises:
        ImportError: its package is not installed.
    """
    return LAYERS[name].build(size).eval()


def build_core(name: str, size: LayerSize) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Attention alone, a function of queries, keys and values; and these, as maps leave them.

    They are rows (N, C) seen by head. Position features are made beforehand, as an encoder makes
    them once for all of its layers.

    Raises:
        ImportError: the package is not installed.
    """
    head_dim = size.embed_dim // size.num_heads
    rows = [torch.randn(size.tokens, size.num_heads, head_dim, requires_grad=True) for _ in "qkv"]
    function: Any = CORES[name](size)
    return function, rows


def _our_core(size: LayerSize, rpe: FourierRPE | None) -> Callable[..., Tensor]:
    width = 0 if rpe is None else rpe.num_features
    layer = FLTAttention(
        size.embed_dim, size.num_heads, num_features=size.num_features, position_dim=width
    ).eval()
    ptr = torch.tensor([0, size.tokens])
    at = None
    if rpe is not None:
        with torch.no_grad():
            at = rpe(15 * torch.rand(size.tokens, 3), ptr)
    return lambda q, k, v: layer.attend(AttentionRows(q, k, v, ptr, None, at, at), "linear")


def _batched_core(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *rows: core(*(x.transpose(0, 1)[None] for x in rows))


def _fast_attention(size: LayerSize) -> Callable[..., Tensor]:
    module = import_module("performer_pytorch")
    head_dim = size.embed_dim // size.num_heads
    return _batched_core(module.FastAttention(head_dim, nb_features=size.num_features).eval())


def _pyg_core(size: LayerSize) -> Callable[..., Tensor]:
    attention: Any = _pyg(size).attention
    return _batched_core(attention.fast_attn)


CORES: dict[str, Callable[[LayerSize], Callable[..., Tensor]]] = {
    OURS: lambda size: _our_core(size, None),
    "FLT, Gaussian RPE": lambda size: _our_core(size, gaussian_rpe(size)),
    "FLT, local RPE": lambda size: _our_core(size, _local_rpe(size)),
    "performer-pytorch": _fast_attention,
    "PyG PerformerAttention": _pyg_core,
}
