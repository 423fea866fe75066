"""Which systems are too large for a model, said before it is called and when it is."""

from __future__ import annotations

from collections.abc import Sequence

from flt_mol.functional.lattice import UnfitSystemError
from flt_mol.functional.reciprocal import check_vectors
from flt_mol.models.config import EnergyConfig
from flt_mol.structures import Structures

__all__ = ["check_systems", "unfit_message"]


def check_systems(config: EnergyConfig, structures: Structures) -> None:
    """Refuse systems that a model of this configuration refuses, without building or calling it.

    Much cheaper than a pass: a data set's `check` (:func:`flt_mol.data.open_dataset`) that keeps
    long jobs from ending at the one system that is a thousand Å wide. Sizes are looked at, for the
    spectral filters; models without them take any.

    Raises:
        ValueError: the first system that is too large, by its sid.

    Example:
        >>> import torch
        >>> from flt_mol.models.config import SpectralConfig
        >>> chain = [[x, x, x] for x in range(0, 400, 5)]  # across the cell, so no vacuum
        >>> wide = Structures.single([29] * 80, chain, cell=400 * torch.eye(3), pbc=True)
        >>> check_systems(EnergyConfig(rpe=None, spectral=SpectralConfig()), wide)
        Traceback (most recent call last):
        ValueError: sid 0: too large for this model: what is left of it without vacuum, ...
    """
    spectral = config.spectral
    if spectral is None:
        return
    try:
        check_vectors(
            structures.cell,
            structures.pbc,
            structures.positions,
            structures.ptr,
            k_max=spectral.k_max,
            padding=4 * spectral.sigma_max if spectral.padding is None else spectral.padding,
            max_vectors=spectral.max_vectors,
        )
    except UnfitSystemError as error:
        raise ValueError(unfit_message(error, structures.sid)) from None


def unfit_message(error: UnfitSystemError, sid: Sequence[int | str]) -> str:
    """What to say of the system that an error is about, by its sid."""
    return f"sid {sid[error.system]}: {error.reason}"
