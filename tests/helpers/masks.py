"""Masks of position features, written out."""

import torch


def relative_mask(query_features, key_features):
    """N̂_hij = Φ_ih·Ψ_jh of Φ (N, H, 2R) or (N, 1, 2R) and Ψ (N, H, 2R) → (H, N, N)."""
    heads = key_features.shape[1]
    return torch.einsum("ihf,jhf->hij", query_features.expand(-1, heads, -1), key_features)
