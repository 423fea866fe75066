"""Structures: a flat batch of atomic systems, the one schema that all packages share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from flt_mol.files import some

if TYPE_CHECKING:
    from flt_mol.functional import NeighborPairs, ReciprocalVectors

# Field: whether its rows are atoms, systems, or their bounds; shape of a row; kind of its numbers.
_FIELDS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "ptr": ("bounds", (), "int64"),
    "atomic_numbers": ("atoms", (), "int64"),
    "positions": ("atoms", (3,), "a float"),
    "tags": ("atoms", (), "int64"),
    "fixed": ("atoms", (), "bool"),
    "positions_relaxed": ("atoms", (3,), "a float"),
    "forces": ("atoms", (3,), "a float"),
    "cell": ("systems", (3, 3), "a float"),
    "pbc": ("systems", (3,), "bool"),
    "energy": ("systems", (), "a float"),
    "energy_initial": ("systems", (), "a float"),
}
_OPTIONAL = ("positions_relaxed", "forces", "energy", "energy_initial")
_BOUNDS = {"atomic_numbers": (1, 118), "tags": (0, 2), "fixed": (0, 1), "pbc": (0, 1)}
_DTYPES = {  # uint8 is no mask: ~ of an int is none
    "int64": (torch.int64, torch.int32),
    "bool": (torch.bool,),
    "a float": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
}


@dataclass(frozen=True, eq=False)
class Structures:
    """B atomic systems with N atoms in all: those of system b are rows ``ptr[b]:ptr[b + 1]``.

    Args:
        atomic_numbers: (N,) int64, 1 to 118.
        positions: (N, 3) float, Å, of the initial structure.
        cell: (B, 3, 3) float, Å; rows are the lattice vectors, zeros where there is none.
        pbc: (B, 3) bool, whether the system repeats along each lattice vector.
        tags: (N,) int64; 0 below the surface, 1 surface, 2 adsorbate.
        fixed: (N,) bool, held fixed while relaxing.
        ptr: (B + 1,) int64, first atom of each system, and N at the end.
        sid: B names, int or str, as stored.
        energy: (B,) float64, eV, the target: adsorption energy after relaxation; or None.
        energy_initial: (B,) float64, eV, adsorption energy before relaxation; or None.
        positions_relaxed: (N, 3) float, Å, possibly wrapped differently from `positions`.
        forces: (N, 3) float, eV/Å, at `positions`, NaN where unknown; or None.
        info: further plain values by name, each a tuple of B entries, as stored.
        pairs: neighbour pairs of the initial positions, sorted; see `with_pairs`.
        cutoff: Å, within which `pairs` were searched; None without pairs.
        reciprocal: reciprocal vectors of the cells; see `with_reciprocal`.
        reciprocal_settings: what they were made with.

    Raises:
        ValueError: dtypes of another kind (32 bits will do) or shapes that do not fit, by field.

    Examples:
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
    forces: Tensor | None = None
    info: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    pairs: NeighborPairs | None = None
    cutoff: float | None = None
    reciprocal: ReciprocalVectors | None = None
    reciprocal_settings: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check(self)
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
        forces: Any = None,
        info: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Structures:
        """One system from lists, arrays or tensors; `cell`, `tags` and `fixed` are 0 if missing.

        Raises:
            ValueError: shapes that do not fit, or invalid numbers, naming `sid` and the field.
        """
        n = torch.as_tensor(atomic_numbers).numel()
        periodic = torch.as_tensor(pbc).reshape(-1)
        given = {
            "atomic_numbers": atomic_numbers,
            "positions": positions,
            "cell": torch.zeros(3, 3) if cell is None else cell,
            "pbc": periodic.expand(3) if len(periodic) == 1 else periodic,
            "tags": [0] * n if tags is None else tags,
            "fixed": [0] * n if fixed is None else fixed,
            "positions_relaxed": positions_relaxed,
            "forces": forces,
        }
        fields: dict[str, Any] = {
            name: _tensor(name, x, n, dtype, sid) for name, x in given.items() if x is not None
        }
        for name, x in (("energy", energy), ("energy_initial", energy_initial)):
            fields[name] = None if x is None else torch.tensor([float(x)], dtype=torch.float64)
        return cls(
            **fields,
            ptr=torch.tensor([0, n], dtype=torch.int64),
            sid=(sid,),
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
        taken = {"atoms": atoms, "systems": systems}
        fields: dict[str, Any] = {
            name: x[taken[of]]
            for name, (of, _, _) in _FIELDS.items()
            if of in taken and (x := getattr(self, name)) is not None
        }
        chosen, pairs = systems.tolist(), self.pairs
        if pairs is not None:
            found, ends = _ranges(torch.searchsorted(pairs.index_i, self.ptr), systems)
            moved = torch.repeat_interleave(ptr[:-1] - self.ptr[systems], ends.diff())
            i, j, shift = (x[found] for x in pairs)
            pairs = type(pairs)(i + moved, j + moved, shift)
        if (lattice := self.reciprocal) is not None:
            found, ends = _ranges(lattice.ptr, systems)
            vectors = (x[found] for x in lattice[:3])
            cells = (x[systems] for x in (lattice.cell, lattice.inverse, lattice.virtual))
            large = tuple(place for place, b in enumerate(chosen) if b in lattice.large)
            lattice = type(lattice)._make([*vectors, ends, *cells, lattice.offset[atoms], large])
        return Structures(
            **fields,
            ptr=ptr,
            sid=tuple(self.sid[b] for b in chosen),
            info={name: tuple(values[b] for b in chosen) for name, values in self.info.items()},
            pairs=pairs,
            cutoff=self.cutoff,
            reciprocal=lattice,
            reciprocal_settings=self.reciprocal_settings,
        )

    def __iter__(self) -> Iterator[Structures]:
        return (self[b] for b in range(len(self)))

    @classmethod
    def cat(cls, parts: Sequence[Structures]) -> Structures:
        """All systems of `parts` in one batch, in order.

        Optional fields stay only where every part has them, pairs only where all were searched
        within one cutoff, reciprocal vectors where all have the same settings. `info` keeps every
        name; a part that lacks it gives None.

        Raises:
            ValueError: `parts` is empty.
        """
        if not parts:
            raise ValueError("Structures.cat needs at least one batch")
        fields: dict[str, Any] = {}
        for name in _FIELDS.keys() - {"ptr"}:
            values = [getattr(part, name) for part in parts]
            fields[name] = None if any(x is None for x in values) else torch.cat(values)
        starts = list(accumulate((part.num_atoms for part in parts), initial=0))
        ends = [part.ptr[1:] + start for part, start in zip(parts, starts, strict=False)]
        if all(part.pairs is not None and part.cutoff == parts[0].cutoff for part in parts):
            each = [cast("NeighborPairs", part.pairs) for part in parts]
            moved = [(i + at, j + at, t) for (i, j, t), at in zip(each, starts, strict=False)]
            fields["pairs"] = type(each[0])(*map(torch.cat, zip(*moved, strict=True)))
            fields["cutoff"] = parts[0].cutoff
        settings = parts[0].reciprocal_settings
        if settings and all(part.reciprocal_settings == settings for part in parts):
            fields["reciprocal"] = _joined([cast("ReciprocalVectors", x.reciprocal) for x in parts])
            fields["reciprocal_settings"] = settings
        info: dict[str, tuple[Any, ...]] = {}
        for name in dict.fromkeys(name for part in parts for name in part.info):
            found = (part.info.get(name, (None,) * len(part)) for part in parts)
            info[name] = tuple(chain.from_iterable(found))
        sids = tuple(chain.from_iterable(part.sid for part in parts))
        return cls(**fields, ptr=torch.cat([parts[0].ptr[:1], *ends]), sid=sids, info=info)

    def with_pairs(self, cutoff: float) -> Structures:
        """The same batch with all pairs within `cutoff`, in Å, periodic images included.

        Errors are those of `flt_mol.functional.neighbor_pairs`, naming the sid.
        """
        from flt_mol.functional import neighbor_pairs  # only who needs pairs waits for it

        with naming_sid(self):
            pairs = neighbor_pairs(self.positions, self.cell, self.pbc, self.ptr, cutoff)
        return replace(self, pairs=pairs, cutoff=float(cutoff))

    def with_reciprocal(self, **settings: Any) -> Structures:
        """The same batch with the reciprocal vectors of its cells.

        Arguments and errors are those of `flt_mol.functional.reciprocal_vectors`, errors
        naming the sid.
        """
        from flt_mol.functional import reciprocal_vectors

        with naming_sid(self):
            found = reciprocal_vectors(self.cell, self.pbc, self.positions, self.ptr, **settings)
        return replace(self, reciprocal=found, reciprocal_settings=settings)

    def moved(self, positions: Tensor) -> Structures:
        """The same batch with atoms elsewhere; forces, pairs and reciprocal vectors are dropped."""
        names = ("forces", "pairs", "cutoff", "reciprocal", "reciprocal_settings")
        dropped: dict[str, Any] = dict.fromkeys(names)
        return replace(self, positions=positions, **dropped)

    def to(self, device: torch.device | str) -> Structures:
        """The same batch on `device`; float64 becomes float32 where the device has none (MPS)."""
        single = torch.device(device).type == "mps"

        def move(value: Tensor) -> Tensor:
            dtype = torch.float32 if single and value.dtype == torch.float64 else value.dtype
            return value.to(device, dtype, non_blocking=True)

        return self._map(move)

    def pin_memory(self) -> Structures:
        """The same batch in page-locked memory; called by DataLoader(pin_memory=True)."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Structures:
        held = {name: getattr(self, name) for name in _FIELDS}
        tensors: Any = {name: function(x) for name, x in held.items() if x is not None}
        if self.pairs is not None:
            tensors["pairs"] = type(self.pairs)(*map(function, self.pairs))
        if self.reciprocal is not None:
            *moved, large = self.reciprocal
            tensors["reciprocal"] = type(self.reciprocal)._make([*map(function, moved), large])
        return replace(self, **tensors)


def relaxed_displacement(structures: Structures) -> Tensor:
    """Displacement of each atom, r_relaxed − r by its shortest periodic image; 0 for fixed atoms.

    Returns (N, 3), Å. `positions_relaxed` may be wrapped into another cell.

    Raises:
        ValueError: `positions_relaxed` are missing or not finite, or a cell is singular; by sid.
    """
    from flt_mol.functional import minimum_image

    if structures.positions_relaxed is None:
        raise ValueError(f"some of sids {some(structures.sid)} have no positions_relaxed")
    vectors = structures.positions_relaxed - structures.positions
    with naming_sid(structures):
        found = minimum_image(vectors, structures.cell, structures.pbc, structures.ptr)
    return found.masked_fill(structures.fixed[:, None], 0.0)


def known_forces(structures: Structures) -> Tensor:
    """(N,) bool, atoms that are free and whose forces are known: those that count, as in OC20."""
    if structures.forces is None:
        return torch.zeros_like(structures.fixed)
    return ~structures.fixed & structures.forces.isfinite().all(1)


def _ranges(ptr: Tensor, systems: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ptr[b] to ptr[b + 1] of all `systems` b, one range after the other, and their ptr."""
    start, sizes = ptr[systems], ptr.diff()[systems]
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    shift = torch.repeat_interleave(start - ends[:-1], sizes)
    return torch.arange(len(shift), device=ptr.device) + shift, ends


def _joined(lattices: Sequence[ReciprocalVectors]) -> ReciprocalVectors:
    *each, ptrs, cell, inverse, virtual, offset, large = zip(*lattices, strict=True)
    starts = accumulate((int(ptr[-1]) for ptr in ptrs), initial=0)
    systems = accumulate((len(x) for x in cell), initial=0)
    ends = [ptr[1:] + start for ptr, start in zip(ptrs, starts, strict=False)]
    moved = tuple(b + first for some, first in zip(large, systems, strict=False) for b in some)
    parts = (*each, [ptrs[0][:1], *ends], cell, inverse, virtual, offset)
    return type(lattices[0])._make([*(torch.cat(list(x)) for x in parts), moved])


@contextmanager
def naming_sid(structures: Structures) -> Iterator[None]:
    """Errors about a system or atom, of which they have the place, as ValueErrors with its sid."""
    try:
        yield
    except ValueError as error:
        given = vars(error)
        if "reason" not in given:
            raise
        row = given.get("row")
        b = given["system"] if row is None else int(structures.system[row])
        atom = "" if row is None else f"atom {row - int(structures.ptr[b])} (counted from 0) has "
        raise ValueError(f"sid {structures.sid[b]}: {atom}{given['reason']}") from None


def _check(batch: Structures) -> None:
    for name, (_, _, kind) in _FIELDS.items():
        value = getattr(batch, name)
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, Tensor):
            hint = "expected a tensor; Structures.single takes lists"
            raise ValueError(f"Structures.{name} is a {type(value).__name__}, {hint}")
        if value.dtype not in _DTYPES[kind]:
            raise ValueError(f"Structures.{name} has dtype {value.dtype}, expected {kind}")
    n, b = batch.num_atoms, len(batch)
    rows = {"atoms": n, "systems": b, "bounds": b + 1}
    for name, (of, shape, _) in _FIELDS.items():
        value = getattr(batch, name)
        if value is not None and value.shape != (rows[of], *shape):
            expected = f"expected {(rows[of], *shape)} for {b} systems and {n} atoms"
            raise ValueError(f"Structures.{name} has shape {tuple(value.shape)}, {expected}")
    if isinstance(batch.sid, str) or len(batch.sid) != b:
        raise ValueError(f"Structures.sid is {batch.sid!r:.60}, expected {b} names")


def _tensor(name: str, x: Any, n: int, dtype: torch.dtype, sid: int | str) -> Tensor:
    """`x` as a field of one system with n atoms; axes of length one do not matter."""
    of, row, kind = _FIELDS[name]
    if kind == "a float":
        given, high = torch.as_tensor(x, dtype=dtype), torch.finfo(dtype).max
        low: float = -high
    else:
        given, (low, high), dtype = torch.as_tensor(x), _BOUNDS[name], _DTYPES[kind][0]
    shape = (n if of == "atoms" else 1, *row)
    long, expected = ([k for k in sizes if k != 1] for sizes in (given.shape, shape))
    if long != expected and (given.numel() or 0 not in shape):
        raise ValueError(f"{name} of {sid} has shape {tuple(given.shape)}, expected {shape}")
    value, given = given.to(dtype).reshape(shape), given.reshape(shape)
    wrong = (value != given) | ~((given >= low) & (given <= high))
    if name == "forces":  # NaN where unknown
        wrong &= ~given.isnan()
    if bool(wrong.any()):
        wanted = "a finite number" if kind == "a float" else f"{low} to {high}"
        raise ValueError(f"{name} of {sid} holds {given[wrong][0].item():.6g}, expected {wanted}")
    return value.clone() if kind == "bool" else value
