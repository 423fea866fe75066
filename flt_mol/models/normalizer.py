"""Mean and spread of the target, kept inside the model so that energies come out in eV."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn


class Normalizer(nn.Module):
    """y = mean + std · ŷ, with both as buffers, so that a checkpoint carries them.

    Example:
        >>> normalizer = Normalizer()
        >>> normalizer.fit(torch.tensor([1.0, 3.0]))
        >>> normalizer.denormalize(torch.tensor([0.0, 1.0]))
        tensor([2., 3.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float32))
        self.register_buffer("std", torch.ones((), dtype=torch.float32))

    def fit(self, targets: Tensor) -> None:
        """Set mean and (population) standard deviation of `targets`, (n,) eV.

        One target or equal targets have no spread: std falls back to 1 with a warning.

        Raises:
            ValueError: no targets, or one that is not finite.
        """
        values = targets.detach().to(torch.float64).reshape(-1)
        if values.numel() == 0:
            raise ValueError("the normaliser needs at least one target")
        if not bool(values.isfinite().all()):
            raise ValueError("the normaliser met a target that is not finite")
        std = float(values.std(correction=0))
        if std < 1e-6:
            warnings.warn(
                "all targets are equal (or there is only one): the normaliser's std is set to 1",
                stacklevel=2,
            )
            std = 1.0
        self.mean.fill_(float(values.mean()))
        self.std.fill_(std)

    def denormalize(self, y: Tensor) -> Tensor:
        """ŷ without unit to y in eV."""
        return self.mean + self.std * y
