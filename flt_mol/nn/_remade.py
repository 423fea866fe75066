"""Layers whose activations are made again in the backward pass instead of being kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flt_mol.functional._rows import nothing_watches
from flt_mol.nn._plain import is_plain

__all__ = ["after_activation"]


def after_activation(hidden: Tensor, activation: nn.Module, last: nn.Module) -> Tensor:
    """last(activation(hidden)), with only `hidden` kept for gradients.

    An activation costs a hundredth of the products around it, and is as large as `hidden`.

    Args:
        hidden: (N, F), before the activation.
        activation: without state and without randomness.
        last: a linear map. Neither is run twice where hooks would notice.
    """

    def run(hidden: Tensor) -> Tensor:
        out: Tensor = last(activation(hidden))
        return out

    unseen = all(is_plain(layer, type(layer)) for layer in (activation, last))
    if not (torch.is_grad_enabled() and hidden.requires_grad and unseen and nothing_watches()):
        return run(hidden)
    # Early stopping leaves the product itself out when the activation is made again.
    out: Tensor = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
    return out
