"""Property checks to run on your own modules: each raises AssertionError with the numbers.

- Of models of energies, Structures → (B,): `check_permutation`, `check_translation`, … on
  :func:`random_structures`; see :mod:`flt_mol.testing.energy`.
- Of models that say where atoms go: `check_displacement_equivariance`.
- Of layers, rows of B systems → rows: `check_layer_…` on :func:`random_rows`; see
  :mod:`flt_mol.testing.layers` for how a layer's own signature is fitted.
- Of a fast form against a plain one, values and gradients: :func:`check_matches`.

Modules are put in eval mode meanwhile, and left as they were.
"""

from flt_mol.testing.displacement import check_displacement_equivariance
from flt_mol.testing.energy import (
    check_batch_equals_alone,
    check_deterministic,
    check_empty_and_single_atom,
    check_gradients,
    check_permutation,
    check_rotation,
    check_save_load,
    check_translation,
)
from flt_mol.testing.layers import PackedLayer, PaddedLayer
from flt_mol.testing.layout import (
    check_layer_alone,
    check_layer_causality,
    check_layer_padded_equals_packed,
    check_layer_padding,
    check_layer_streaming,
)
from flt_mol.testing.matches import check_matches
from flt_mol.testing.numerics import (
    check_layer_autocast,
    check_layer_coincident,
    check_layer_deterministic,
    check_layer_device,
    check_layer_dtype,
    check_layer_gradients,
    check_layer_save_load,
)
from flt_mol.testing.periodic import check_periodic_images, check_supercell
from flt_mol.testing.rows import Rows, random_rows
from flt_mol.testing.structures import random_structures
from flt_mol.testing.symmetry import (
    check_layer_cell_basis,
    check_layer_lattice_shifts,
    check_layer_permutation,
    check_layer_rotation,
    check_layer_supercell,
    check_layer_system_order,
    check_layer_translation,
)

__all__ = [
    "PackedLayer",
    "PaddedLayer",
    "Rows",
    "check_batch_equals_alone",
    "check_deterministic",
    "check_displacement_equivariance",
    "check_empty_and_single_atom",
    "check_gradients",
    "check_layer_alone",
    "check_layer_autocast",
    "check_layer_causality",
    "check_layer_cell_basis",
    "check_layer_coincident",
    "check_layer_deterministic",
    "check_layer_device",
    "check_layer_dtype",
    "check_layer_gradients",
    "check_layer_lattice_shifts",
    "check_layer_padded_equals_packed",
    "check_layer_padding",
    "check_layer_permutation",
    "check_layer_rotation",
    "check_layer_save_load",
    "check_layer_streaming",
    "check_layer_supercell",
    "check_layer_system_order",
    "check_layer_translation",
    "check_matches",
    "check_periodic_images",
    "check_permutation",
    "check_rotation",
    "check_save_load",
    "check_supercell",
    "check_translation",
    "random_rows",
    "random_structures",
]
