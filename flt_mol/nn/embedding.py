"""Initial features of atoms from element and tag."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_ATOMIC_NUMBER = 118
NUM_TAGS = 3
_TAGS = "0 (below the surface), 1 (surface) or 2 (adsorbate)"


class AtomError(ValueError):
    """Atom `row` has a number or tag that does not exist: the `reason`."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"atom {row} (counted from 0) has {reason}")
        self.row, self.reason = row, reason


class AtomEmbedding(nn.Module):
    """x_i = E[z_i] + G[tag_i]: a learned vector per element plus one per tag.

    Args:
        embed_dim: C.
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.element = nn.Embedding(MAX_ATOMIC_NUMBER + 1, embed_dim)
        self.tag = nn.Embedding(NUM_TAGS, embed_dim)

    def forward(self, atomic_numbers: Tensor, tags: Tensor) -> Tensor:
        """(N,) integer elements 1 to 118 and (N,) integer tags 0 to 2 to features (N, C).

        Raises:
            AtomError: the first atom of other numbers; compiled and exported graphs do not look.
        """
        no_element = (atomic_numbers < 1) | (atomic_numbers > MAX_ATOMIC_NUMBER)
        wrong = no_element | (tags < 0) | (tags >= NUM_TAGS)
        if not torch.compiler.is_compiling() and bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            number, tag = int(atomic_numbers[row]), f"tag {int(tags[row])}, expected {_TAGS}"
            bad = bool(no_element[row])
            raise AtomError(row, f"atomic number {number}, expected 1 to 118" if bad else tag)
        out: Tensor = self.element(atomic_numbers) + self.tag(tags)
        return out
