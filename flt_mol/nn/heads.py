"""Read-outs: from features of atoms to quantities of systems."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flt_mol.functional.packed import sum_per_system


class EnergyHead(nn.Module):
    """E_b = Σ_{i ∈ b} w[tag_i] · e(x_i), with e = Linear ∘ GELU ∘ Linear ∘ LayerNorm.

    The weights w are learned, one per tag, and start at (0.1, 0.3, 1) for atoms below the
    surface, at the surface, and of the adsorbate: an adsorption energy is mostly the adsorbate's.

    Args:
        embed_dim: C.
    """

    INITIAL_TAG_WEIGHTS = (0.1, 0.3, 1.0)

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.atom_energy = nn.Sequential(
            nn.LayerNorm(embed_dim),
            nn.Linear(embed_dim, embed_dim),
            nn.GELU(),
            nn.Linear(embed_dim, 1),
        )
        self.tag_weight = nn.Parameter(torch.tensor(self.INITIAL_TAG_WEIGHTS, dtype=torch.float32))

    def forward(self, x: Tensor, tags: Tensor, ptr: Tensor) -> Tensor:
        """Features (N, C), tags (N,) and ptr (B + 1,) to energies (B,); 0 for empty systems.

        Sums are taken in at least float32, whatever the autocast dtype.
        """
        per_atom = self.tag_weight[tags] * self.atom_energy(x).squeeze(-1)
        return sum_per_system(per_atom.to(torch.promote_types(per_atom.dtype, torch.float32)), ptr)
