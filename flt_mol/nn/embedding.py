"""From what an atom is to its first features."""

from __future__ import annotations

from torch import Tensor, nn

MAX_ATOMIC_NUMBER = 118
NUM_TAGS = 3


class AtomEmbedding(nn.Module):
    """x_i = E[z_i] + G[tag_i]: a learned vector per element plus one per tag.

    Args:
        embed_dim: C.

    Example:
        >>> import torch
        >>> AtomEmbedding(8)(torch.tensor([29, 8]), torch.tensor([1, 2])).shape
        torch.Size([2, 8])
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.element = nn.Embedding(MAX_ATOMIC_NUMBER + 1, embed_dim)
        self.tag = nn.Embedding(NUM_TAGS, embed_dim)

    def forward(self, atomic_numbers: Tensor, tags: Tensor) -> Tensor:
        """(N,) int64 elements 1 to 118 and (N,) int64 tags 0 to 2 to features (N, C)."""
        out: Tensor = self.element(atomic_numbers) + self.tag(tags)
        return out
