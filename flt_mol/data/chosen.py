"""Some systems of a data set, as a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from flt_mol.structures import Structures

__all__ = ["Chosen"]


class Chosen(Subset[Structures]):
    """The systems of a data set that have numbers `indices`.

    Args:
        dataset: of :func:`flt_mol.data.open_dataset`.
        indices: of its systems, in the order wanted.
        lacking: one message for each of the others that was left out as bad.

    Attributes:
        path: of the data set.
        skipped: messages of the records that were left out as bad, there and here.
    """

    def __init__(self, dataset: Any, indices: Sequence[int], lacking: Sequence[str] = ()) -> None:
        super().__init__(dataset, indices)
        self.path: Path = dataset.path
        self.skipped: list[str] = [*dataset.skipped, *lacking]

    def where(self, index: int) -> str:
        """File and key of system `index`, for errors."""
        return str(cast(Any, self.dataset).where(self.indices[index]))

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,)."""
        return np.asarray(cast(Any, self.dataset).natoms()[self.indices], np.int64)
