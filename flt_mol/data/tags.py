"""Tags of slabs: 0 below the surface, 1 surface, 2 adsorbate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase.data import chemical_symbols
from numpy.typing import NDArray

from flt_mol.data.schema import heights, to_numpy
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from ase import Atoms

Adsorbate = str | Iterable[int] | None
Surface = int | str
_Floats = NDArray[np.float64]
_Rows = NDArray[np.int64]

_VACUUM = 4.0  # Å; atoms of a solid leave no gap as wide, a slab without one is a bulk crystal
_GUESSED = ("H", "C", "N", "O")
_WRITTEN = {"HO": "OH", "HN": "NH", "H2N": "NH2", "H3N": "NH3", "CHN": "HCN"}  # by Hill's formula
_DEPTH = 2.0  # Å below the highest atom of the slab
_INSIDE = 3.5  # Å from either face: coordinated as in the bulk
_LACKING = 0.02  # of the coordination number
_LAYER_GAP = 0.6  # Å between heights of neighbouring layers, at least
_REACH = 10.0  # Å, of images around the cell; further ones bound no Voronoi cell in the slab


def tag_slab(
    atoms: Atoms, adsorbate: Adsorbate = None, *, surface: Surface = "oc20", fix: bool = False
) -> Atoms:
    """A copy of a slab with its tags: 0 below the surface, 1 surface, 2 adsorbate.

    The surface is that on the adsorbate's side; the vacuum may lie along any lattice vector, and
    the slab may wrap through the boundary of the cell. Give the `surface` that the model was
    trained with:

    - ``"oc20"``: as in OC20, atoms within 2 Å of the slab's highest atom, and atoms
      of the upper half with fewer neighbours (by Voronoi cells) than in the middle of the slab. Of
      20 systems of OC20's val_id all tags as stored in 16.
    - ``"half"``: the upper half of the layers (gaps of 0.6 Å in height), rounded up, as in
      `emt_adsorption`. Of its 4,851 systems all tags as stored in 4,844.
    - a number: that many layers from the top.

    Args:
        atoms: the slab with its adsorbate; not changed.
        adsorbate: rows of the adsorbate's atoms, or a mask; its formula, such as "CO", where the
            slab has none of its elements; "none" for a clean slab; or None to guess: all H, C, N
            and O, where they lie on one surface only.
        surface: "oc20", "half" or a number of layers.
        fix: whether `FixAtoms` holds the atoms of tag 0, as in OC20, instead of existing
            constraints.

    Raises:
        ValueError: not a slab (no cell, no vacuum, or vacuum along several directions), an
            adsorbate that is missing or ambiguous, too few layers.

    Examples:
        >>> from ase.build import add_adsorbate, fcc111
        >>> slab = fcc111("Pt", (1, 1, 3), vacuum=7.0)
        >>> add_adsorbate(slab, "O", 1.3, "fcc")
        >>> tag_slab(slab).get_tags().tolist()
        [0, 0, 1, 2]
    """
    if not len(atoms):
        raise ValueError("slab has no atoms")
    try:
        rows, frame = _adsorbate_atoms(atoms, adsorbate, _slab_frame(atoms))
        slab = np.setdiff1d(np.arange(len(atoms)), rows)
        at_surface = _surface_atoms(frame, atoms.numbers, slab, surface)
    except ValueError as error:
        raise ValueError(f"{atoms.get_chemical_formula()} {error}") from error
    tags = np.zeros(len(atoms), dtype=np.int64)
    tags[slab[at_surface]] = 1
    tags[rows] = 2
    tagged: Atoms = atoms.copy()
    tagged.set_tags(tags)
    if fix:
        from ase.constraints import FixAtoms

        tagged.set_constraint(FixAtoms(mask=tags == 0))
    return tagged


def tag_structures(
    structures: Structures, adsorbate: Adsorbate = None, *, surface: Surface = "oc20"
) -> Structures:
    """The same batch, systems whose tags are all 0 tagged by `tag_slab`.

    Of these, atoms of tag 0 are held fixed where no atom is; `info["tag_rule"]` is `surface`.

    Raises:
        ValueError: as `tag_slab`, naming the sid.
    """
    from ase import Atoms

    systems = []
    for system in structures.to("cpu"):
        if not system.tags.any():
            atoms = Atoms(
                system.atomic_numbers.numpy(),
                system.positions.double().numpy(),
                cell=system.cell[0].numpy(),
                pbc=system.pbc[0].numpy(),
            )
            try:
                tagged = tag_slab(atoms, adsorbate, surface=surface)
            except ValueError as error:
                raise ValueError(f"{system.sid[0]}: {error}") from error
            tags = torch.as_tensor(tagged.get_tags())
            fixed = system.fixed if system.fixed.any() else tags == 0
            info = {**system.info, "tag_rule": (str(surface),)}
            system = replace(system, tags=tags, fixed=fixed, info=info)
        systems.append(system)
    return Structures.cat(systems).to(structures.ptr.device)


def slab_tagger(
    adsorbate: str | None = None, surface: Any = "oc20", name: str = "surface"
) -> partial[Structures]:
    """`tag_structures` with arguments as commands and files have them: ``12,13``, ``2``.

    Raises:
        ValueError: another rule, by its `name`.
    """
    rows = [] if adsorbate is None else [x.strip() for x in adsorbate.split(",")]
    numbered = bool(rows) and all(x.isdecimal() for x in rows)
    which: Adsorbate = [int(x) for x in rows] if numbered else adsorbate
    return partial(tag_structures, adsorbate=which, surface=parse_rule(surface, name))


def tagger_of(data: Mapping[str, Any]) -> Callable[[Structures], Structures] | None:
    """What tags the structures of a run, by its settings `data`; None where nothing does."""
    if not data.get("tag_slab"):
        return None
    return slab_tagger(data.get("adsorbate"), data.get("tag_rule") or "oc20", "data.tag_rule")


def parse_rule(value: Any, name: str) -> Surface:
    """A `surface` from a file or command: oc20, half, or a number of layers.

    Raises:
        ValueError: something else, by its `name`.
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value in ("oc20", "half") or (type(value) is int and value > 0):
        found: Surface = value
        return found
    raise ValueError(f"{name} is {value!r}, expected oc20, half or a number of layers")


def adsorbate_formula(numbers: Sequence[int]) -> str:
    """The formula of a few atoms as chemists write it: Hill's, but for OH, NH3 and the like.

    Example:
        >>> [adsorbate_formula(x) for x in ([8, 1], [1, 1, 7], [6, 7, 1], [6, 1, 1, 8])]
        ['OH', 'NH2', 'HCN', 'CH2O']
    """
    from ase.formula import Formula

    found = Formula.from_list([chemical_symbols[z] for z in numbers]).format("hill")
    return _WRITTEN.get(found, found)


def tags_are_layers(record: Mapping[str, Any]) -> bool:
    """Whether the tags of a record are the layer numbers of `ase.build`: 1 is the topmost layer.

    Adsorbates have 0 there. Tags up to 2 may be OC20's, of an adsorbate that hangs below a slab:
    then its elements are its own, here those of tag 0.
    """
    try:
        tags, numbers = (to_numpy(record[name]).reshape(-1) for name in ("tags", "atomic_numbers"))
        cell = to_numpy(record["cell"]).reshape(3, 3).astype(float)
        pos = to_numpy(record["pos"]).reshape(len(numbers), 3).astype(float)
    except (KeyError, ValueError):  # missing, or refused later
        return False
    there = np.unique(tags)
    layers = there[there != 0]
    if len(tags) != len(numbers) or not np.array_equal(layers, np.arange(1, len(layers) + 1)):
        return False
    if len(layers) < 3 and set(numbers[tags == 0]) <= set(numbers[tags != 0]):
        return False
    with np.errstate(invalid="ignore"):  # not finite, refused later
        height = pos @ np.cross(cell[0], cell[1]) * np.sign(np.linalg.det(cell) or 1.0)
        means = [height[tags == tag].mean() for tag in there]
    return len(layers) > 0 and bool((np.diff(means) < 0).all())


def layer_note(record: Mapping[str, Any]) -> dict[str, str]:
    """A warning where the tags of a record are layers' numbers."""
    text = (
        "tags are the layer numbers of ase.build (expected: 0 below the surface, 1 surface, "
        "2 adsorbate); flt_mol.data.tag_slab, or --tag-slab of flt-mol predict, sets them"
    )
    return {"layers": text} if tags_are_layers(record) else {}


@dataclass(frozen=True, eq=False)
class _Frame:
    """A slab in one piece, with its vacuum above."""

    positions: _Floats  # (N, 3), Å, moved by lattice vectors, without vacuum in between
    height: _Floats  # (N,), Å, along the normal of the surface
    lateral: _Floats  # (2, 3), Å, the lattice vectors along the surface
    slant: float  # distance of the cell's planes over the length of the vector that leads on


def _slab_frame(atoms: Atoms) -> _Frame:
    """The frame of a slab: its vacuum lies along an open direction, else the widest gap."""
    cell, pbc = np.asarray(atoms.cell.complete()), np.asarray(atoms.pbc)
    fractions = np.linalg.solve(cell.T, atoms.positions.T).T
    distances = heights(cell)
    width, end = np.full(3, np.inf), fractions.min(axis=0)
    for k in np.flatnonzero(pbc):
        places = np.sort(fractions[:, k] % 1.0)
        gaps = np.diff(places, append=places[0] + 1.0)
        width[k] = gaps.max() * distances[k]
        end[k] = places[(gaps.argmax() + 1) % len(places)]
    periodic = pbc & np.asarray(atoms.cell).any(axis=1)
    empty = np.flatnonzero(width >= _VACUUM if periodic.all() else ~periodic)
    if periodic.sum() < 2 or len(empty) != 1:
        found = ", ".join(f"{name} {gap:.1f} Å" for name, gap in zip("abc", width, strict=True))
        raise ValueError(
            f"is not a slab: a slab has cell and pbc along its surface, and at least {_VACUUM:g} Å "
            f"of vacuum along one lattice vector; gaps found: {found}; or use atoms.set_tags"
        )
    axis = int(empty[0])
    # Every atom in one cell that begins where the vacuum ends; open directions as they are.
    origin = np.where(np.arange(3) == axis, end, 0.0)
    steps = np.where(pbc, np.floor(fractions - origin + 1e-9), 0.0)
    return _Frame(
        atoms.positions - steps @ cell,
        (fractions - steps)[:, axis] * distances[axis],
        np.delete(cell, axis, axis=0),
        float(distances[axis] / np.linalg.norm(cell[axis])),
    )


def _adsorbate_atoms(atoms: Atoms, adsorbate: Adsorbate, frame: _Frame) -> tuple[_Rows, _Frame]:
    """The rows (A,) of the adsorbate's atoms, and the frame with the adsorbate's side above."""
    rows = _rows(atoms, adsorbate)
    if adsorbate is not None and not len(rows):
        return rows, frame
    if adsorbate is not None and len(rows) == len(atoms):
        raise ValueError("would be all adsorbate: no slab remains")
    sides = []
    for side in (frame, replace(frame, height=-frame.height)) if 0 < len(rows) < len(atoms) else ():
        slab = np.delete(side.height, rows)
        lowest = slab.max() - _DEPTH if adsorbate is None else (slab.max() + slab.min()) / 2
        if side.height[rows].min() > lowest:
            sides.append(side)
    if len(sides) == 1:
        return rows, sides[0]
    if adsorbate is None:
        raise ValueError(
            f"has no adsorbate that can be guessed, {', '.join(_GUESSED)} on one surface only; "
            'name the atoms: adsorbate="CO", [12, 13] or "none" (--adsorbate CO, 12,13 or none)'
        )
    raise ValueError("has adsorbate atoms above and below its middle, expected on one face only")


def _rows(atoms: Atoms, adsorbate: Adsorbate) -> _Rows:
    if adsorbate is None:
        return np.flatnonzero(np.isin(atoms.get_chemical_symbols(), _GUESSED))
    if isinstance(adsorbate, str):
        return np.empty(0, np.int64) if adsorbate == "none" else _of_formula(atoms, adsorbate)
    given = np.array(list(adsorbate) or np.empty(0, np.int64))
    try:
        return np.unique(np.arange(len(atoms))[given])
    except IndexError as error:
        raise ValueError(
            f"has atoms 0 to {len(atoms) - 1}; the adsorbate is given as {given.tolist()}: {error}"
        ) from None


def _of_formula(atoms: Atoms, formula: str) -> _Rows:
    from ase.formula import Formula

    try:
        wanted = Formula(formula).count()
    except (ValueError, KeyError) as error:
        raise ValueError(f"has no adsorbate {formula!r}: not a formula") from error
    symbols = np.array(atoms.get_chemical_symbols())
    there = Counter(symbols.tolist())
    found = ", ".join(f"{there[s]} of {n} {s}" for s, n in wanted.items() if there[s] != n)
    if found or not wanted:
        text = f"does not have one {formula}, apart from the slab: {found}"
        raise ValueError(f"{text}; give the adsorbate's atoms by number, adsorbate=[12, 13]")
    return np.flatnonzero(np.isin(symbols, list(wanted)))


def _surface_atoms(
    frame: _Frame, numbers: NDArray[Any], rows: _Rows, surface: Surface
) -> NDArray[np.bool_]:
    """Which of the slab's atoms `rows` (S,), without the adsorbate, are at its upper surface."""
    height = frame.height[rows]
    if surface == "oc20":
        near = height >= height.max() - _DEPTH * frame.slant - 1e-3
        return np.asarray(near | _under_coordinated(frame, numbers[rows], rows))
    order = np.argsort(-height, kind="stable")
    steps = -np.diff(height[order], prepend=height[order[:1]])
    layer = np.empty(len(height), dtype=np.int64)
    layer[order] = (steps > _LAYER_GAP).cumsum()
    count = int(layer.max()) + 1
    if surface == "half":
        return np.asarray(layer < (count + 1) // 2)
    wanted = parse_rule(surface, "surface")
    if not isinstance(wanted, int) or wanted >= count:
        text = f"has {count} layers, of which {wanted} cannot be the surface with others below it"
        raise ValueError(f"{text}; ask for fewer")
    return np.asarray(layer < wanted)


def _under_coordinated(frame: _Frame, numbers: NDArray[Any], rows: _Rows) -> NDArray[np.bool_]:
    """Atoms of the upper half with fewer neighbours than any of their element inside the slab.

    Of an element that does not occur there, the atom with most neighbours stands for the bulk.
    """
    height = frame.height[rows]
    found = _coordination(frame.positions[rows], frame.lateral)
    inside = (height > height.min() + _INSIDE) & (height < height.max() - _INSIDE) & (found > 0)
    lacking = np.zeros(len(rows), dtype=np.bool_)
    for number in np.unique(numbers):
        same = numbers == number
        bulk = found[same & inside].min() if (same & inside).any() else found[same].max()
        lacking |= same & (found < bulk * (1.0 - _LACKING))
    return np.asarray(lacking & (height > height.mean()))


def _coordination(positions: _Floats, lateral: _Floats) -> _Floats:
    """Coordination number (N,) of each atom, Σ Ω / Ω_max = 4π / Ω_max; 0 of an open cell.

    Ω is the solid angle of a face of its Voronoi cell (O'Keeffe, Acta Cryst. A 35, 772, 1979).
    """
    from scipy.spatial import QhullError, Voronoi

    most = np.ceil(_REACH / heights(lateral)).astype(int)
    steps = np.array(list(product(*(range(-n, n + 1) for n in most))))
    images = (positions[None] + (steps[steps.any(axis=1)] @ lateral)[:, None]).reshape(-1, 3)
    low, high = positions.min(0) - _REACH, positions.max(0) + _REACH
    near = ((images > low) & (images < high)).all(axis=1)
    points = np.concatenate([positions, images[near]])
    try:
        cells = Voronoi(points)
    except QhullError:  # all in one plane: nothing is enclosed
        return np.zeros(len(positions))
    largest = np.zeros(len(positions))
    for pair, corners in zip(cells.ridge_points, cells.ridge_vertices, strict=True):
        for atom in pair[pair < len(positions)]:
            seen = cells.vertices[corners] - points[atom]
            angle = np.inf if -1 in corners else _solid_angle(seen)
            largest[atom] = max(largest[atom], angle)
    return np.divide(4.0 * np.pi, largest, out=np.zeros_like(largest), where=largest > 0)


def _solid_angle(corners: _Floats) -> float:
    """Of a flat convex face with corners (K, 3) around the origin: a fan of triangles.

    tan(Ω/2) = |a·(b×c)| / (1 + a·b + b·c + c·a) (van Oosterom, Strackee, IEEE TBME 30, 1983).
    """
    unit = corners / np.linalg.norm(corners, axis=1, keepdims=True)
    a, b, c = unit[0], unit[1:-1], unit[2:]
    above = np.abs(np.cross(b, c) @ a)
    below = 1.0 + b @ a + (b * c).sum(1) + c @ a
    return float(2.0 * np.arctan2(above, below).sum())
