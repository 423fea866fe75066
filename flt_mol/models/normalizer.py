"""Mean and standard deviation of a target, in the model so that energies come out in eV."""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["Moments", "Normalizer"]


class Moments(Protocol):
    """Mean and population standard deviation of targets that were counted before."""

    @property
    def mean(self) -> float:
        """In eV."""

    @property
    def std(self) -> float:
        """In eV."""


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

    def fit(self, targets: Tensor | Moments) -> None:
        """Take mean and population standard deviation of targets, eV, or as given.

        One target, or equal ones, deviate by 0: std falls back to 1 with a warning.

        Raises:
            ValueError: no targets, or mean or standard deviation not finite in float32.
        """
        if isinstance(targets, Tensor):
            values = targets.double()
            mean, std = float(values.mean()), float(values.std(correction=0))
        else:
            mean, std = targets.mean, targets.std
        if not max(abs(mean), std) <= torch.finfo(torch.float32).max:
            raise ValueError(
                f"targets have mean {mean:g} and standard deviation {std:g} eV, expected finite "
                "numbers of at least one system"
            )
        if std < 1e-6:
            warnings.warn("all targets are equal: the normaliser's std is set to 1", stacklevel=2)
            std = 1.0
        self.mean.fill_(mean)
        self.std.fill_(std)

    def denormalize(self, y: Tensor) -> Tensor:
        """ŷ without unit to y in eV."""
        return self.mean + self.std * y
