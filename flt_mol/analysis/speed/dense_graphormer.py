"""3D-Graphormer with its pair features written out, as its authors' code has them.

Every atom against every image that any atom sees: features (n, m, T), a bias (n, m, H) and
attention (H, n, m) for each system, plain autograd. It computes what `graphormer3d-exact` computes,
with the same weights.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from flt_mol.functional.neighbors import pair_lengths
from flt_mol.models import EnergyModel
from flt_mol.nn.images import GaussianBias
from flt_mol.nn.radial import log_smooth_cutoff
from flt_mol.nn.transformer import FLTBlock
from flt_mol.structures import Structures

__all__ = ["DenseGraphormer"]


class DenseGraphormer(nn.Module):
    """What an energy model with centred image masks says, by dense matrices.

    The authors' code pads systems of a batch to the largest; here each has its own matrices, which
    is the less work.

    Args:
        model: with ``images.mask: centred``, one pass, energies only; its weights are used.

    Raises:
        ValueError: another kind of model.
    """

    def __init__(self, model: EnergyModel) -> None:
        super().__init__()
        if not isinstance(model.geometry.images, GaussianBias) or model.config.recycles != 1:
            raise ValueError("expected a model with images.mask: centred and one pass")
        self.model, self.masks = model, model.geometry.images

    @property
    def cutoff(self) -> float:
        """Å, of the images."""
        return self.masks.cutoff

    def forward(self, structures: Structures) -> dict[str, Tensor]:
        """``energy`` (B,), as of the model."""
        model, ptr = self.model, structures.ptr
        parts = [self._pairs(system) for system in structures]
        x = model.embedding(structures.atomic_numbers, structures.tags)
        x = x + torch.cat([density for _, _, density in parts])
        for block in cast(list[FLTBlock], list(model.encoder.blocks)):
            h = block.attention_norm(x)
            attention = block.attention
            assert attention is not None
            rows = attention.projected(h, ptr=ptr)[1]
            each = [
                _attended(rows.query[a:b], rows.key[a:b], rows.value[a:b], keys, bias)
                for a, b, (keys, bias, _) in zip(ptr[:-1], ptr[1:], parts, strict=True)
            ]
            x = x + attention.out(torch.cat(each).flatten(1))
            x = x + block.ffn(block.ffn_norm(x))
        out = model.head(x, structures.tags, ptr)
        return {"energy": model.normalizer.denormalize(out)}

    def _pairs(self, system: Structures) -> tuple[Tensor, Tensor, Tensor]:
        """Atoms whose images are keys (m,), the bias (H, n, m), and the density (n, C)."""
        given = system if system.cutoff == self.cutoff else system.with_pairs(self.cutoff)
        assert given.pairs is not None
        pairs = given.pairs.with_self(system.num_atoms)
        keys = torch.cat([pairs.index_j[:, None], pairs.shift], 1).unique(dim=0)
        atom, shift = keys[:, 0], keys[:, 1:].to(system.positions.dtype)
        images = system.positions[atom] + shift @ system.cell[0].to(shift.dtype)
        vectors = system.positions[:, None] - images
        n, m = vectors.shape[:2]
        distance = pair_lengths(vectors.reshape(-1, 3))
        numbers = system.atomic_numbers
        features = self.masks.features(
            distance, numbers.repeat_interleave(m), numbers[atom].repeat(n)
        )
        window = log_smooth_cutoff(distance, self.cutoff).view(n, m)
        bias = self.masks.bias(features).view(n, m, -1).permute(2, 0, 1) + window
        itself = (atom == torch.arange(n)[:, None]) & (shift == 0).all(-1)
        weight = window.exp().masked_fill(itself, 0.0)
        density = (features.view(n, m, -1) * weight[:, :, None]).sum(1)
        assert self.masks.density_out is not None
        return atom, bias, self.masks.density_out(density)


def _attended(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """Softmax over images: (n, H, D) → (n, H, D)."""
    logits = torch.einsum("ihd,jhd->hij", query, key[keys]) * query.shape[-1] ** -0.5 + bias
    return torch.einsum("hij,jhd->ihd", logits.softmax(-1), value[keys])
