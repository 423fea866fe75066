"""Targets beside the energy: how far atoms move while a structure relaxes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flt_mol.functional.lattice import minimum_image
from flt_mol.structures import Structures


def relaxed_displacement(structures: Structures) -> Tensor:
    """How far each atom moves, r_relaxed − r by its shortest periodic image; 0 for fixed atoms.

    Relaxed positions may be wrapped into another cell than the initial ones.

    Args:
        structures: with `positions_relaxed`.

    Returns:
        (N, 3), Å, at least float32.

    Raises:
        ValueError: `positions_relaxed` are missing or not finite, or a cell is singular along its
            periodic axes; naming the sid.

    Example:
        >>> import torch
        >>> one = Structures.single(
        ...     [1], [[0.5, 0.0, 0.0]], cell=4 * torch.eye(3), pbc=True,
        ...     positions_relaxed=[[3.5, 0.0, 0.0]])
        >>> relaxed_displacement(one)
        tensor([[-1.,  0.,  0.]])
    """
    relaxed = structures.positions_relaxed
    if relaxed is None:
        raise ValueError(
            f"displacements need positions_relaxed, missing for {missing_for(structures.sid)}"
        )
    vectors = relaxed - structures.positions
    try:
        shortest = minimum_image(vectors, structures.cell, structures.pbc, structures.ptr)
    except ValueError as error:
        if len(structures) == 1:
            raise ValueError(f"displacements of sid {structures.sid[0]}: {error}") from None
        for system in structures:
            relaxed_displacement(system)
        raise
    return shortest.masked_fill(structures.fixed[:, None], 0.0)


def missing_for(sids: Sequence[int | str], most: int = 5) -> str:
    """Which systems lack a target, as far as a batch tells, which has those of all or none.

    Example:
        >>> missing_for(["a"]), missing_for(["a", "b", "c"], most=2)
        ('sid a', 'some of sids a, b and 1 more')
    """
    shown = ", ".join(str(sid) for sid in sids[:most])
    if len(sids) == 1:
        return f"sid {shown}"
    rest = f" and {len(sids) - most} more" if len(sids) > most else ""
    return f"some of sids {shown}{rest}"
