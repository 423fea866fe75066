"""From what an atom is to its first features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional._rows import by_rows, rows_of, values_only
from flt_mol.nn._plain import all_plain

MAX_ATOMIC_NUMBER = 118
NUM_TAGS = 3
INDEX_DTYPES = (torch.int64, torch.int32)


class AtomError(ValueError):
    """An atom that is none.

    Attributes:
        row: of the first such atom.
        reason: what is wrong with it.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"atom {row} (counted from 0) has {reason}")
        self.row = row
        self.reason = reason


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
        if values_only(atomic_numbers, tags, *self.parameters()) and all_plain(self):
            return by_rows(
                self._sum, atomic_numbers, tags, size=rows_of(self.element.embedding_dim)
            )
        return self._sum(atomic_numbers, tags)

    def _sum(self, atomic_numbers: Tensor, tags: Tensor) -> Tensor:
        out: Tensor = self.element(atomic_numbers) + self.tag(tags)
        return out


def check_atoms(atomic_numbers: Tensor, tags: Tensor) -> None:
    """Refuse elements and tags that are none, looking at them once.

    Args:
        atomic_numbers: (N,).
        tags: (N,).

    Raises:
        ValueError: dtypes that are no integers of 32 or 64 bits, or shapes other than (N,).
        AtomError: the first atom whose number is not 1 to 118, or whose tag not 0 to 2.

    Example:
        >>> check_atoms(torch.tensor([8, 1, 1]), torch.tensor([2, 2, 3]))
        Traceback (most recent call last):
        flt_mol.nn.embedding.AtomError: atom 2 (counted from 0) has tag 3, expected 0 (below the
        surface), 1 (surface) or 2 (adsorbate)
    """
    check_index("atomic_numbers", atomic_numbers)
    check_index("tags", tags)
    if atomic_numbers.dim() != 1 or tags.shape != atomic_numbers.shape:
        raise ValueError(
            f"atomic_numbers have shape {tuple(atomic_numbers.shape)} and tags "
            f"{tuple(tags.shape)}, expected (N,) both"
        )
    if torch.compiler.is_compiling():
        return
    no_element = (atomic_numbers < 1) | (atomic_numbers > MAX_ATOMIC_NUMBER)
    wrong = no_element | (tags < 0) | (tags >= NUM_TAGS)
    if not bool(wrong.any()):
        return
    row = int(wrong.nonzero()[0])
    if bool(no_element[row]):
        raise AtomError(row, f"atomic number {int(atomic_numbers[row])}, expected 1 to 118")
    meant = "0 (below the surface), 1 (surface) or 2 (adsorbate)"
    raise AtomError(row, f"tag {int(tags[row])}, expected {meant}")


def check_tags(tags: Tensor, num_atoms: int) -> None:
    """Refuse tags that are not one for each atom. Graphs do not look at numbers.

    Raises:
        ValueError: another dtype or shape, or a number that is not 0 to 2.
    """
    check_index("tags", tags)
    if tags.shape != (num_atoms,):
        raise ValueError(
            f"tags have shape {tuple(tags.shape)}, expected ({num_atoms},): one for each atom"
        )
    if not torch.compiler.is_compiling() and bool(((tags < 0) | (tags >= NUM_TAGS)).any()):
        raise ValueError("tags are not all 0 (below the surface), 1 (surface) or 2 (adsorbate)")


def check_index(name: str, value: Tensor) -> None:
    """Refuse dtypes that index otherwise than by number: torch takes uint8 for a mask.

    Raises:
        ValueError: naming the tensor, its dtype and the mend.
    """
    if value.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} are {value.dtype}, expected torch.int64: {name}.long()")
