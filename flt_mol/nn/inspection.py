"""What a layer attends to, written out on demand, and how far its linear form is from the exact."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.functional.groups import index_in_system
from flt_mol.nn.attend import Projected, Rule, attend


class Fidelity(NamedTuple):
    """How far linear attention is from the softmax it estimates, on one batch.

    Attributes:
        output_error: (H,), ‖out_linear − out_exact‖ / ‖out_exact‖ over all rows of the batch, of
            the attended values before the output map.
        total_variation: (H,), the mean over queries of ½ Σ_j |A_ij − A*_ij|: 0 where the weights
            agree, 1 where they lie on other keys.
    """

    output_error: Tensor
    total_variation: Tensor


def attention_matrices(rule: Rule, rows: Projected) -> list[Tensor]:
    """The normalised weights A of each system: B matrices (H, n, m), rows summing to 1.

    Attention is linear in its values, so its weights are what comes out for values that are the
    rows of a unit matrix: the weights shown are those in use, whatever the mode.
    """
    key_ptr = rows.ptr if rows.key_ptr is None else rows.key_ptr
    keys, heads = rows.value.shape[:2]
    sizes = key_ptr.diff().tolist()
    unit = torch.eye(max(sizes, default=0), device=key_ptr.device, dtype=rows.value.dtype)
    value = unit[index_in_system(key_ptr, keys)][:, None, :].expand(-1, heads, -1)
    weights = attend(rule, rows._replace(value=value.contiguous()))
    parts = torch.split(weights.transpose(0, 1), rows.ptr.diff().tolist(), dim=1)
    return [part[..., :size] for part, size in zip(parts, sizes, strict=True)]


def fidelity(rule: Rule, rows: Projected) -> Fidelity:
    """The linear form of `rule` against its exact twin, on the same queries, keys and mask."""
    linear, exact = rule._replace(mode="linear"), rule._replace(mode="exact")
    ours, truth = attend(linear, rows), attend(exact, rows)
    size = truth.square().sum((0, 2))
    # Without rows, or with values that are all 0, there is nothing to be wrong by.
    error = (ours - truth).square().sum((0, 2)) / torch.where(size > 0, size, 1.0)
    pairs = zip(attention_matrices(linear, rows), attention_matrices(exact, rows), strict=True)
    distance = torch.zeros_like(error)
    for a, b in pairs:
        distance += (a - b).abs().sum((1, 2)) / 2
    return Fidelity(error.sqrt(), distance / max(len(rows.query), 1))
