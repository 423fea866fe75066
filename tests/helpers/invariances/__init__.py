"""Property checks of layers and models: each raises AssertionError with the numbers.

What is checked is a layer, one callable of `Rows` (N rows of B systems) → (N, C'), tried on
`random_rows`; `PackedLayer` fits other signatures. Or it is a model of
energies, Structures → ``{"energy": (B,)}`` or (B,), eV, tried on `random_structures`: the
same checks take it in place of a layer, with structures in place of rows.

Modules are in eval mode meanwhile. Errors are relative to the largest output, for energies to at
least 1 eV; each check returns the one found.

Examples:
    >>> import torch
    >>> from flt_mol.nn import FLTAttention
    >>> rows = random_rows(torch.Generator().manual_seed(0), width=8, dim=None)
    >>> check_permutation(PackedLayer(FLTAttention(8, 2)), rows) < 1e-5
    True
    >>> structures = random_structures(torch.Generator().manual_seed(0))
    >>> check_permutation(lambda s: s.natoms.double(), structures)
    0.0
"""

from helpers.invariances.invariance import (
    check_batch_equals_alone,
    check_cell_basis,
    check_periodic_images,
    check_permutation,
    check_rotation,
    check_supercell,
    check_translation,
)
from helpers.invariances.layers import PackedLayer
from helpers.invariances.rows import Rows, random_rows, random_structures

__all__ = [
    "PackedLayer", "Rows", "check_batch_equals_alone", "check_cell_basis",
    "check_periodic_images", "check_permutation", "check_rotation",
    "check_supercell", "check_translation", "random_rows", "random_structures",
]  # fmt: skip
