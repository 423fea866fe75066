"""Pure functions: reference attention, feature maps, linear attention, lattices, pairs."""

from flt_mol.functional.causal import causal_attention, causal_log_attention
from flt_mol.functional.exact import exact_attention
from flt_mol.functional.feature_maps import (
    orthogonal_projection,
    softmax_log_features,
    softplus_log_features,
    stabilised_features,
)
from flt_mol.functional.fourier import PositionFeatures, fourier_basis, position_features
from flt_mol.functional.groups import (
    centred,
    group_budget,
    offsets_of,
    sum_per_system,
    system_index,
)
from flt_mol.functional.images import image_attention
from flt_mol.functional.lattice import UnfitSystemError, minimum_image
from flt_mol.functional.linear import linear_attention, linear_sums, normalised
from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs
from flt_mol.functional.pairs import filtered_dots, pair_filter, pair_sums
from flt_mol.functional.reciprocal import ReciprocalVectors, reciprocal_vectors
from flt_mol.functional.reference import softmax_attention
from flt_mol.functional.streaming import CausalState, state_of, step

__all__ = [
    "CausalState", "NeighborPairs", "PositionFeatures", "ReciprocalVectors", "UnfitSystemError",
    "causal_attention", "causal_log_attention", "centred", "exact_attention", "filtered_dots",
    "fourier_basis", "group_budget", "image_attention", "linear_attention", "linear_sums",
    "minimum_image", "neighbor_pairs", "normalised", "offsets_of", "orthogonal_projection",
    "pair_filter", "pair_sums", "position_features", "reciprocal_vectors", "softmax_attention",
    "softmax_log_features", "softplus_log_features", "stabilised_features", "state_of", "step",
    "sum_per_system", "system_index",
]  # fmt: skip
