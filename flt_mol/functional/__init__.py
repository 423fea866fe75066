"""Pure functions: the quadratic truth, feature maps, Fourier features, linear attention."""

from flt_mol.functional.feature_maps import (
    gaussian_projection,
    orthogonal_projection,
    project_positions,
    softmax_log_features,
    stabilised_features,
)
from flt_mol.functional.fourier import PositionFeatures, fourier_basis, position_features
from flt_mol.functional.linear import linear_attention
from flt_mol.functional.packed import centred, offsets_of, sum_per_system, system_index
from flt_mol.functional.reference import kernel_attention, relative_mask, softmax_attention

__all__ = [
    "PositionFeatures",
    "centred",
    "fourier_basis",
    "gaussian_projection",
    "kernel_attention",
    "linear_attention",
    "offsets_of",
    "orthogonal_projection",
    "position_features",
    "project_positions",
    "relative_mask",
    "softmax_attention",
    "softmax_log_features",
    "stabilised_features",
    "sum_per_system",
    "system_index",
]
