"""From what an atom is to its first features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_ATOMIC_NUMBER = 118
NUM_TAGS = 3
_TAGS = "0 (below the surface), 1 (surface) or 2 (adsorbate)"


class AtomError(ValueError):
    """An atom with a number or tag that does not exist.

    Attributes:
        row: of the first such atom.
        reason: what is wrong with it.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"atom {row} (counted from 0) has {reason}")
        self.row, self.reason = row, reason


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
        """(N,) integer elements 1 to 118 and (N,) integer tags 0 to 2 to features (N, C).

        Raises:
            ValueError: other dtypes than int64 and int32, or other shapes; and `AtomError`, which
                is one, for other numbers, naming the first such atom. In compiled and exported
                graphs numbers are not looked at.
        """
        check_atoms(atomic_numbers, tags)
        out: Tensor = self.element(atomic_numbers) + self.tag(tags)
        return out


def check_atoms(atomic_numbers: Tensor, tags: Tensor) -> None:
    """Refuse elements and tags that do not exist: errors as of `AtomEmbedding.forward`."""
    _check_index("atomic_numbers", atomic_numbers, atomic_numbers.shape[:1])
    _check_index("tags", tags, atomic_numbers.shape)
    if torch.compiler.is_compiling():
        return
    no_element = (atomic_numbers < 1) | (atomic_numbers > MAX_ATOMIC_NUMBER)
    wrong = no_element | (tags < 0) | (tags >= NUM_TAGS)
    if not bool(wrong.any()):
        return
    row = int(wrong.nonzero()[0])
    if bool(no_element[row]):
        raise AtomError(row, f"atomic number {int(atomic_numbers[row])}, expected 1 to 118")
    raise AtomError(row, f"tag {int(tags[row])}, expected {_TAGS}")


def check_elements(atomic_numbers: Tensor) -> None:
    """Refuse atomic numbers that are not integers from 1 to 118."""
    kind = atomic_numbers.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise ValueError(f"atomic_numbers are {kind}, expected integers: atomic_numbers.long()")
    if atomic_numbers.numel() and not torch.compiler.is_compiling():
        low, high = (int(x) for x in atomic_numbers.aminmax())
        if low < 1 or high > MAX_ATOMIC_NUMBER:
            raise ValueError(f"atomic_numbers run from {low} to {high}, expected 1 to 118")


def check_tags(tags: Tensor, num_atoms: int) -> None:
    """Refuse tags that are not one for each atom, 0 to 2. Graphs do not look at numbers."""
    _check_index("tags", tags, (num_atoms,))
    if not torch.compiler.is_compiling() and bool(((tags < 0) | (tags >= NUM_TAGS)).any()):
        raise ValueError(f"tags are not all {_TAGS}")


def _check_index(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    # torch takes uint8 for a mask.
    if value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} are {value.dtype}, expected torch.int64: {name}.long()")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} have shape {tuple(value.shape)}, expected {tuple(shape)}")
