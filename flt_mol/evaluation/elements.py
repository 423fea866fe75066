"""Elements that a model was never trained on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["check_elements", "unseen_message", "warn_unseen"]


def check_elements(model: Any, elements: Any) -> list[str]:
    """Symbols of the elements that `model` was never trained on, by atomic number.

    Args:
        model: a module with a buffer `elements_seen` (119,) bool; without it, nothing is known,
            and the list is empty.
        elements: atomic numbers, as a tensor, array or iterable of integers.

    Raises:
        ValueError: an atomic number outside 1 to 118.
    """
    if isinstance(elements, torch.Tensor | np.ndarray):
        elements = elements.reshape(-1).tolist()
    numbers = sorted({int(z) for z in elements})
    wrong = [z for z in numbers if not 1 <= z <= 118]
    if wrong:
        raise ValueError(f"atomic numbers {wrong} are not elements: 1 to 118 are known")
    seen = getattr(model, "elements_seen", None)
    if seen is None:
        return []
    known = seen.detach().to("cpu").tolist()
    unseen = [z for z in numbers if z >= len(known) or not known[z]]
    if not unseen:
        return []
    from ase.data import chemical_symbols  # only a split with such elements needs ASE

    return [chemical_symbols[z] for z in unseen]


def unseen_message(symbols: Iterable[str]) -> str:
    """The warning about elements that were never trained on, naming them."""
    named = ", ".join(symbols)
    return (
        f"elements never trained on: {named}. Energies of structures with them are "
        "extrapolated and may be far off; train on data that has them, or leave them out"
    )


def warn_unseen(symbols: Iterable[str]) -> None:
    """One UserWarning with :func:`unseen_message`, if there are any symbols."""
    symbols = sorted(symbols)
    if symbols:
        warnings.warn(unseen_message(symbols), UserWarning, stacklevel=3)
