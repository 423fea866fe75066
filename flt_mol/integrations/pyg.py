"""Our attention as the global half of PyG's GPS layer; needs ``pip install 'flt_mol[pyg]'``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GPSConv
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj

from flt_mol.nn import FLTAttention


class FLTGPSConv(GPSConv):  # type: ignore[misc]
    r"""PyG's `GPSConv` with `FLTAttention`: message passing + attention at linear cost, then a net.

    y = Norm₁(x + Conv(x)) + Norm₂(x + Attention(x)); out = Norm₃(y + MLP(y)), of Rampášek et al.,
    NeurIPS 2022. `GPSConv` itself knows two kinds of attention, dense batches and no positions;
    here rows stay packed.

    Args:
        channels: C, width of the features.
        conv: a message-passing layer C → C, or None.
        attention: of width C; its RPE, if it has one, needs `positions` in every call.
        dropout: on the outputs of both halves and in the net.
        options: further arguments of `GPSConv`: act, act_kwargs, norm, norm_kwargs.

    Raises:
        ValueError: attention of another width.
        TypeError: an option of PyG's own attention.

    Examples:
        >>> import torch
        >>> layer = FLTGPSConv(16, None, FLTAttention(16, 4))
        >>> layer(torch.randn(5, 16), None, batch=torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([5, 16])
    """

    attn: FLTAttention

    def __init__(
        self,
        channels: int,
        conv: MessagePassing | None,
        attention: FLTAttention,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        if attention.embed_dim != channels:
            raise ValueError(f"attention has width {attention.embed_dim}, the layer {channels}")
        given = {"heads": 1, "dropout": dropout, "attn_type": "multihead", "attn_kwargs": None}
        super().__init__(channels, conv, **given, **options)
        self.attn = attention
        self.heads = attention.num_heads
        self.attn_type = "flt"

    def reset_parameters(self) -> None:
        """Redraw the weights of all parts but those of attention, which draws its own."""
        for part in (self.conv, *self.mlp, self.norm1, self.norm2, self.norm3):
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None = None,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Features (N, C) → (N, C).

        `edge_index` and `kwargs` are the message-passing layer's; `batch` (N,) is the graph of each
        row, in any order, None for one graph; `positions` (N, 3), Å, are for an RPE.
        """
        given = {"batch": batch} if self.norm_with_batch else {}

        def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
            return x if norm is None else norm(x, **given)

        def dropped(part: Tensor) -> Tensor:
            return nn.functional.dropout(part, self.dropout, self.training)

        out = normed(self.norm2, x + dropped(self.attn(x, positions, system=batch)))
        if self.conv is not None:
            out = normed(self.norm1, x + dropped(self.conv(x, edge_index, **kwargs))) + out
        return normed(self.norm3, out + self.mlp(out))
