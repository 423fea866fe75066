"""Structures: a flat batch of atomic systems, the one schema that all packages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flt_mol.functional import NeighborPairs

__all__ = ["Structures", "relaxed_displacement"]

_PER_ATOM = {
    "atomic_numbers": (),
    "positions": (3,),
    "tags": (),
    "fixed": (),
    "positions_relaxed": (3,),
}
_PER_SYSTEM = {"cell": (3, 3), "pbc": (3,), "energy": (), "energy_initial": ()}
_OPTIONAL = ("positions_relaxed", "energy", "energy_initial")
_SHOWN = 5  # sids in a message
_T = TypeVar("_T")
_WHOLE = ("atomic_numbers", "tags", "ptr")  # int64, or int32
_MASKS = ("fixed", "pbc")  # bool: uint8 is a mask to torch, ~ of an int is none


@dataclass(frozen=True, eq=False)
class Structures:
    """B atomic systems with N atoms in all, packed one after the other, without padding.

    Atoms of system b are rows ``ptr[b]:ptr[b + 1]``. Systems without atoms are allowed.

    Args:
        atomic_numbers: (N,) int64, 1 to 118.
        positions: (N, 3) float, Å, of the initial structure.
        cell: (B, 3, 3) float, Å; rows are the lattice vectors, zeros where there is none.
        pbc: (B, 3) bool, whether the system repeats along each lattice vector.
        tags: (N,) int64; 0 below the surface, 1 surface, 2 adsorbate.
        fixed: (N,) bool, held fixed while relaxing.
        ptr: (B + 1,) int64, first atom of each system, and N at the end.
        sid: B names, int or str, as stored.
        energy: (B,) float64, eV, the target: adsorption energy after relaxation. None if unknown.
        energy_initial: (B,) float64, eV, adsorption energy before relaxation. None if unknown.
        positions_relaxed: (N, 3) float, Å, possibly wrapped differently from `positions`.
        info: further plain values by name, each a tuple of B entries, as stored.
        pairs: neighbour pairs of the initial positions, rows of this batch, sorted; see
            :meth:`with_pairs`. They are not searched again when positions are replaced: whoever
            moves atoms drops them or searches again.
        cutoff: Å, within which `pairs` were searched; None without pairs.

    Raises:
        ValueError: dtypes of another kind (32 bits will do), or shapes that do not belong
            together, naming the field. Models check the numbers.

    Example:
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> Structures.cat([water, water])
        Structures(2 systems, 6 atoms)
    """

    atomic_numbers: Tensor
    positions: Tensor
    cell: Tensor
    pbc: Tensor
    tags: Tensor
    fixed: Tensor
    ptr: Tensor
    sid: tuple[int | str, ...]
    energy: Tensor | None = None
    energy_initial: Tensor | None = None
    positions_relaxed: Tensor | None = None
    info: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    pairs: NeighborPairs | None = None
    cutoff: float | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_shapes(self)
        if (self.pairs is None) != (self.cutoff is None):
            raise ValueError("Structures has pairs or cutoff alone: call with_pairs(cutoff)")

    @classmethod
    def single(
        cls,
        atomic_numbers: Any,
        positions: Any,
        *,
        cell: Any = None,
        pbc: Any = False,
        tags: Any = None,
        fixed: Any = None,
        sid: int | str = 0,
        energy: float | None = None,
        energy_initial: float | None = None,
        positions_relaxed: Any = None,
        info: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Structures:
        """One system from lists, arrays or tensors; see the class for the fields.

        Missing `cell` is zeros, `tags` are 0, `fixed` is False.

        Raises:
            ValueError: an atomic number that is not 1 to 118, a tag not 0 to 2, a shape that
                does not fit, or a number that is not finite; naming `sid` and the field.
        """
        numbers = _whole("atomic_numbers", atomic_numbers, None, 1, 118, sid)
        n = len(numbers)
        periodic = torch.as_tensor(pbc).bool().reshape(-1)
        if periodic.numel() not in (1, 3):
            raise ValueError(f"pbc of {sid} has {periodic.numel()} values, expected 1 or 3")

        def floats(name: str, x: Any, *shape: int) -> Tensor:
            value = _shaped(name, torch.as_tensor(x, dtype=dtype), shape, sid)
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} of {sid} holds a number that is not finite")
            return value

        def scalar(x: float | None) -> Tensor | None:
            return None if x is None else torch.tensor([float(x)], dtype=torch.float64)

        if positions_relaxed is not None:
            positions_relaxed = floats("positions_relaxed", positions_relaxed, n, 3)
        return cls(
            atomic_numbers=numbers,
            positions=floats("positions", positions, n, 3),
            cell=floats("cell", torch.zeros(3, 3) if cell is None else cell, 1, 3, 3),
            pbc=periodic.expand(3).reshape(1, 3).clone(),
            tags=_whole("tags", [0] * n if tags is None else tags, n, 0, 2, sid),
            fixed=_whole("fixed", [0] * n if fixed is None else fixed, n, 0, 1, sid).bool(),
            ptr=torch.tensor([0, n], dtype=torch.int64),
            sid=(sid,),
            energy=scalar(energy),
            energy_initial=scalar(energy_initial),
            positions_relaxed=positions_relaxed,
            info={name: (value,) for name, value in (info or {}).items()},
        )

    def __len__(self) -> int:
        return int(self.ptr.numel()) - 1

    def __repr__(self) -> str:
        return f"Structures({len(self)} systems, {self.num_atoms} atoms)"

    @property
    def num_atoms(self) -> int:
        """Number of atoms N of all systems."""
        return int(self.atomic_numbers.shape[0])

    @property
    def natoms(self) -> Tensor:
        """(B,) int64, atoms per system."""
        return self.ptr.diff()

    @cached_property
    def system(self) -> Tensor:
        """(N,) int64, the system of each atom, ascending."""
        index = torch.arange(len(self), device=self.ptr.device)
        return torch.repeat_interleave(index, self.natoms, output_size=self.num_atoms)

    def __getitem__(self, index: int) -> Structures:
        """System `index` alone, as a batch of one."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"system {index} of {len(self)}")
        return self.select([index % len(self)])

    def select(self, rows: Sequence[int]) -> Structures:
        """The systems `rows`, in the order given, repeated where given twice, as a new batch."""
        systems = torch.as_tensor(rows, dtype=torch.int64, device=self.ptr.device)
        atoms, ptr = _ranges(self.ptr, systems)
        changes: dict[str, Any] = {}
        for name in (*_PER_ATOM, *_PER_SYSTEM):
            value = getattr(self, name)
            taken = atoms if name in _PER_ATOM else systems
            changes[name] = None if value is None else value[taken]
        chosen = systems.tolist()
        pairs = self.pairs
        if pairs is not None:
            pair_ptr = torch.searchsorted(pairs.index_i, self.ptr)
            found, ends = _ranges(pair_ptr, systems)
            moved = torch.repeat_interleave(ptr[:-1] - self.ptr[systems], ends.diff())
            pairs = type(pairs)(
                pairs.index_i[found] + moved, pairs.index_j[found] + moved, pairs.shift[found]
            )
        return Structures(
            **changes,
            ptr=ptr,
            sid=tuple(self.sid[b] for b in chosen),
            info={name: tuple(values[b] for b in chosen) for name, values in self.info.items()},
            pairs=pairs,
            cutoff=self.cutoff,
        )

    def __iter__(self) -> Iterator[Structures]:
        return (self[b] for b in range(len(self)))

    @classmethod
    def cat(cls, parts: Sequence[Structures]) -> Structures:
        """All systems of `parts` in one batch, in order.

        Optional fields stay only where every part has them, pairs only where all were searched
        within one cutoff. `info` keeps every name; a part that lacks it gives None.

        Raises:
            ValueError: `parts` is empty.
        """
        if not parts:
            raise ValueError("Structures.cat needs at least one batch")
        merged: dict[str, Any] = {}
        for name in (*_PER_ATOM, *_PER_SYSTEM):
            values = [getattr(part, name) for part in parts]
            merged[name] = None if any(v is None for v in values) else torch.cat(values)
        natoms = torch.cat([part.natoms for part in parts])
        pairs, cutoff = _join_pairs(parts)
        names = dict.fromkeys(name for part in parts for name in part.info)
        return cls(
            **merged,
            ptr=torch.cat([natoms.new_zeros(1), natoms.cumsum(0)]),
            sid=tuple(s for part in parts for s in part.sid),
            info={
                name: tuple(
                    value for part in parts for value in part.info.get(name, (None,) * len(part))
                )
                for name in names
            },
            pairs=pairs,
            cutoff=cutoff,
        )

    def with_pairs(self, cutoff: float) -> Structures:
        """The same batch with all pairs within `cutoff`, in Å, periodic images included.

        Raises:
            ValueError: as :func:`flt_mol.functional.neighbor_pairs`, naming the sid.

        Example:
            >>> pair = Structures.single([1, 1], [[0, 0, 0], [0, 0, 2]]).with_pairs(3.0)
            >>> pair.pairs.index_i.tolist(), pair.pairs.index_j.tolist()
            ([0, 1], [1, 0])
        """
        from flt_mol.functional import neighbor_pairs  # only who needs pairs waits for it

        if not 0 < cutoff < math.inf:
            raise ValueError(f"cutoff is {cutoff}, expected a positive length in Å")

        pairs = _naming_sid(
            lambda s: neighbor_pairs(s.positions, s.cell, s.pbc, s.ptr, cutoff), self
        )
        return replace(self, pairs=pairs, cutoff=float(cutoff))

    def to(self, device: torch.device | str) -> Structures:
        """The same batch on `device`; float64 becomes float32 where the device has none (MPS)."""
        target = torch.device(device)

        def move(value: Tensor) -> Tensor:
            if target.type == "mps" and value.dtype == torch.float64:
                value = value.to(torch.float32)
            return value.to(target, non_blocking=True)

        return self._map(move)

    def pin_memory(self) -> Structures:
        """The same batch in page-locked memory; called by DataLoader(pin_memory=True)."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Any) -> Structures:
        tensors = {
            f.name: function(value)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        if self.pairs is not None:
            tensors["pairs"] = type(self.pairs)(*map(function, self.pairs))
        return replace(self, **tensors)


def relaxed_displacement(structures: Structures) -> Tensor:
    """How far each atom moves, r_relaxed − r by its shortest periodic image; 0 for fixed atoms.

    Args:
        structures: with `positions_relaxed`, possibly wrapped into another cell.

    Returns:
        (N, 3), Å, at least float32.

    Raises:
        ValueError: `positions_relaxed` are missing or not finite, or a cell is singular along its
            periodic axes; naming the sid.

    Example:
        >>> one = Structures.single(
        ...     [1], [[0.5, 0.0, 0.0]], cell=4 * torch.eye(3), pbc=True,
        ...     positions_relaxed=[[3.5, 0.0, 0.0]])
        >>> relaxed_displacement(one)
        tensor([[-1.,  0.,  0.]])
    """
    from flt_mol.functional import minimum_image

    if structures.positions_relaxed is None:
        some = "some of sids" if len(structures) > 1 else "sid"
        shown = ", ".join(map(str, structures.sid[:_SHOWN])) + ", …" * (len(structures) > _SHOWN)
        raise ValueError(f"displacements need positions_relaxed, missing for {some} {shown}")

    def shortest(some: Structures) -> Tensor:
        vectors = cast(Tensor, some.positions_relaxed) - some.positions
        return minimum_image(vectors, some.cell, some.pbc, some.ptr)

    return _naming_sid(shortest, structures).masked_fill(structures.fixed[:, None], 0.0)


def _ranges(ptr: Tensor, systems: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ptr[b] to ptr[b + 1] of all `systems` b, one range after the other, and their ptr."""
    start = ptr[systems]
    sizes = ptr[systems + 1] - start
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    shift = torch.repeat_interleave(start - ends[:-1], sizes)
    return torch.arange(len(shift), device=ptr.device) + shift, ends


def _naming_sid(function: Callable[[Structures], _T], structures: Structures) -> _T:
    """Call a function of a batch; if it raises ValueError, name the first system that makes it."""
    try:
        return function(structures)
    except ValueError as error:
        for system in structures if len(structures) > 1 else ():
            _naming_sid(function, system)
        raise ValueError(f"sid {structures.sid[0]}: {error}") from None


def _check_kinds(structures: Structures) -> None:
    for name in (*_PER_ATOM, *_PER_SYSTEM, "ptr"):
        value = getattr(structures, name)
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"Structures.{name} is a {type(value).__name__}, expected a tensor; "
                "Structures.single takes lists and arrays"
            )
        if name in _WHOLE:
            good, kind = value.dtype in (torch.int64, torch.int32), "int64"
        elif name in _MASKS:
            good, kind = value.dtype == torch.bool, "bool"
        else:
            good, kind = value.is_floating_point(), "a float"
        if not good:
            raise ValueError(f"Structures.{name} has dtype {value.dtype}, expected {kind}")


def _check_shapes(structures: Structures) -> None:
    n, b = structures.num_atoms, len(structures)
    expected = {name: (n, *shape) for name, shape in _PER_ATOM.items()}
    expected |= {name: (b, *shape) for name, shape in _PER_SYSTEM.items()}
    for name, shape in expected.items():
        value = getattr(structures, name)
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"Structures.{name} has shape {tuple(value.shape)}, expected {shape} "
                f"for {b} systems and {n} atoms"
            )
    if isinstance(structures.sid, str) or len(structures.sid) != b:
        raise ValueError(f"Structures.sid is {structures.sid!r:.60}, expected {b} names")


def _join_pairs(parts: Sequence[Structures]) -> tuple[NeighborPairs | None, float | None]:
    """Pairs and cutoff of all parts in one, or neither, where a part lacks them or differs."""
    each = [part.pairs for part in parts if part.pairs is not None]
    if len(each) < len(parts) or any(part.cutoff != parts[0].cutoff for part in parts):
        return None, None
    starts = accumulate((part.num_atoms for part in parts), initial=0)
    moved = [(i + at, j + at, shift) for (i, j, shift), at in zip(each, starts, strict=False)]
    return type(each[0])(*map(torch.cat, zip(*moved, strict=True))), parts[0].cutoff


def _shaped(name: str, value: Tensor, shape: tuple[int, ...], sid: int | str) -> Tensor:
    """`value` in `shape`, from which it may differ by axes of length one."""
    if value.numel() or 0 not in shape:
        found, wanted = ([n for n in s if n != 1] for s in (value.shape, shape))
        if found != wanted:
            raise ValueError(f"{name} of {sid} has shape {tuple(value.shape)}, expected {shape}")
    return value.reshape(shape)


def _whole(name: str, x: Any, n: int | None, low: int, high: int, sid: int | str) -> Tensor:
    """(n,) int64 out of whole numbers of any dtype; any n for None."""
    given = torch.as_tensor(x)
    value = given.to(torch.int64)
    wrong = (value != given) | (value < low) | (value > high)
    if bool(wrong.any()):
        first = given[wrong][0].item() if given.dim() else given.item()
        raise ValueError(f"{name} of {sid} holds {first:.6g}, expected {low} to {high}")
    return value.reshape(-1) if n is None else _shaped(name, value, (n,), sid)
