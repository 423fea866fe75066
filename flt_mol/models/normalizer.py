"""Mean and spread of the target, kept inside the model so that energies come out in eV."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flt_mol.moments import Moments


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

    def fit(self, targets: Tensor | Iterable[Tensor] | Moments) -> None:
        """Set mean and (population) standard deviation of `targets`, eV.

        One target or equal targets have no spread: std falls back to 1 with a warning.

        Args:
            targets: a tensor; any number of tensors, which are never held all at once; or what
                was found before, as by :func:`flt_mol.data.loader.target_statistics`.

        Raises:
            ValueError: no targets, one that is not finite, or mean or spread beyond float32.
        """
        moments = targets if hasattr(targets, "std") and not isinstance(targets, Tensor) else _moments(targets)
        if moments.count == 0:
            raise ValueError("the normaliser needs at least one target")
        if max(abs(moments.mean), moments.std) > torch.finfo(torch.float32).max:
            raise ValueError(
                f"the normaliser met targets with mean {moments.mean:g} and spread "
                f"{moments.std:g} eV: that is no energy; look for the largest, and leave it out"
            )
        std = moments.std
        if std < 1e-6:
            warnings.warn(
                "all targets are equal (or there is only one): the normaliser's std is set to 1",
                stacklevel=2,
            )
            std = 1.0
        self.mean.fill_(moments.mean)
        self.std.fill_(std)

    def denormalize(self, y: Tensor) -> Tensor:
        """ŷ without unit to y in eV."""
        return self.mean + self.std * y


def _moments(targets: Tensor | Iterable[Tensor]) -> Moments:
    moments = Moments()
    for part in [targets] if isinstance(targets, Tensor) else targets:
        if not bool(part.isfinite().all()):
            raise ValueError("the normaliser met a target that is not finite")
        moments += Moments.of(part)
    return moments
