"""How records are read: which are refused, and under which names their targets are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flt_mol.structures import Structures

__all__ = ["OnError", "ReadOptions"]

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class ReadOptions:
    """What all data sets are told about their records.

    Args:
        require_energy: systems without target are errors.
        ignore_energy: targets and relaxed positions are not read, so that bad ones do no harm.
        on_error: "raise": a bad record raises ValueError when it is read. "skip": all records are
            read once when the data set is opened, the bad ones left out and listed in
            `dataset.skipped`.
        energy: name under which the target is stored (eV); "calculator" takes the energy that an
            ASE calculator holds.
        energy_initial: name of the energy before relaxation (eV).
        positions_relaxed: name of the relaxed positions (Å).
        check: called with the systems that are read, one or many; what it raises ValueError for is
            a bad record. Picklable, where other processes read.
        layer_numbers: tags that are the layers' numbers of `ase.build` are read as none, for
            :func:`flt_mol.data.tag_slab` to set them, in place of being refused or warned of.

    Raises:
        ValueError: another `on_error`, an empty name, or energies both required and ignored.
    """

    require_energy: bool = False
    ignore_energy: bool = False
    on_error: OnError = "raise"
    energy: str = "y_relaxed"
    energy_initial: str = "y_init"
    positions_relaxed: str = "pos_relaxed"
    check: Callable[[Structures], None] | None = None
    layer_numbers: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}, expected 'raise' or 'skip'")
        if self.require_energy and self.ignore_energy:
            raise ValueError("require_energy and ignore_energy exclude each other")
        for name in ("energy", "energy_initial", "positions_relaxed"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} is {value!r}, expected the name of a stored field")
