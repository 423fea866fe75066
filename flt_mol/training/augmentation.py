"""Other descriptions of the same system, for training: the energy learns to ignore them.

The paper's mode sees positions through plane waves in a fixed frame, so neither rotations nor the
choice of periodic image leave its energies alone. Showing both at random is the cheap remedy.
Other starting points of the same relaxation, by noise and by interpolation, serve every model.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.structures import Structures, missing_for, relaxed_displacement

ROTATIONS = ("none", "z", "full")
_LEAST_VOLUME = 1e-6  # that three vectors of length one span


def rotate(structures: Structures, kind: str) -> Structures:
    """Each system and its cell turned, and mirrored half of the time, at random.

    Args:
        structures: initial positions, and relaxed ones if there are any.
        kind: "z": about the z axis, which stays the normal of slabs; "full": any rotation;
            "none": nothing is done.

    Raises:
        ValueError: unknown `kind`.

    Example:
        >>> pair = Structures.single([1, 1], [[0.0, 0.0, 0.0], [0.0, 3.0, 4.0]])
        >>> turned = rotate(pair, "full").positions
        >>> round(float((turned[1] - turned[0]).norm()), 4)
        5.0
    """
    if kind not in ROTATIONS:
        raise ValueError(f"rotation is '{kind}'; known: {', '.join(ROTATIONS)}")
    if kind == "none":
        return structures
    matrices = _about_z if kind == "z" else _orthogonal
    matrix = matrices(len(structures), structures.positions)
    per_atom = matrix[structures.system]
    relaxed = structures.positions_relaxed
    return replace(
        structures,
        positions=_apply(structures.positions, per_atom),
        positions_relaxed=None if relaxed is None else _apply(relaxed, per_atom),
        cell=structures.cell @ matrix,
    )


def shift_images(structures: Structures) -> Structures:
    """Another choice of periodic images: a random origin in the cell, atoms wrapped around it.

    Only along vectors with a slab's or crystal's periodicity (`pbc`); axis c of slabs, across the
    vacuum, is left alone, since OC20 calls it periodic too. `positions_relaxed` move along, by the
    same lattice vectors.

    Raises:
        ValueError: a singular cell of a system that repeats along all axes, naming the sid.

    Example:
        >>> import torch
        >>> cell = torch.diag(torch.tensor([3.0, 4.0, 20.0]))
        >>> one = Structures.single([1], [[1.0, 1.0, 1.0]], cell=cell, pbc=True)
        >>> moved = shift_images(one).positions - one.positions
        >>> bool((moved[0] / cell.diagonal()).frac().abs().max() < 1e-5)
        True
    """
    axes = structures.pbc.clone()
    axes[:, 2] = False
    # Open axes may lack a vector; any invertible stand-in does, as they are not touched.
    eye = torch.eye(3, dtype=structures.cell.dtype, device=structures.cell.device)
    whole = structures.pbc.all(1)
    cell = torch.where(whole[:, None, None], structures.cell, eye)
    axes = axes & whole[:, None]
    system = structures.system
    fractional = _apply(structures.positions, _inverse(cell, structures)[system])
    origin = torch.rand(len(structures), 3, dtype=cell.dtype, device=cell.device)
    lattice = -(fractional + origin[system]).floor() * axes[system]
    shift = _apply(lattice, cell[system])
    relaxed = structures.positions_relaxed
    return replace(
        structures,
        positions=structures.positions + shift,
        positions_relaxed=None if relaxed is None else relaxed + shift,
        pairs=None if structures.pairs is None else _moved(structures.pairs, lattice),
    )


def move_atoms(
    structures: Structures, noise: float = 0.0, interpolation: float = 0.0
) -> tuple[Structures, Tensor]:
    """Other starting points of the same relaxations: free atoms elsewhere, fixed ones in place.

    r ← r + t d + `noise` ε, with d the displacement to the relaxed structure by its shortest
    periodic image, ε standard normal, and t uniform in [0, 1] for a share `interpolation` of the
    systems, 0 for the others. The relaxed energy and `positions_relaxed` stay what they are, hence
    the displacement that is left follows. Pairs are dropped: a model that needs them searches them
    anew, in each step and not ahead in the loader's processes.

    Args:
        structures: with `positions_relaxed` for interpolation.
        noise: standard deviation along each axis, Å.
        interpolation: probability, per system.

    Returns:
        The systems, and (B,) bool, which of them differ from those given: `energy_initial` is no
        longer theirs.

    Raises:
        ValueError: no `positions_relaxed` to interpolate to, naming the sids.

    References:
        Godwin et al., ICLR 2022 (Noisy Nodes), arXiv:2106.07971: both, for IS2RE.

    Example:
        >>> one = Structures.single([1], [[0, 0, 0]], positions_relaxed=[[2, 0, 0]])
        >>> between, moved = move_atoms(one, interpolation=1.0)
        >>> bool(0 <= between.positions[0, 0] < 2), moved.tolist()
        (True, [True])
    """
    positions, system = structures.positions, structures.system
    moved = torch.zeros(len(structures), dtype=torch.bool, device=positions.device)
    if noise == 0 and interpolation == 0:
        return structures, moved
    free = ~structures.fixed
    if interpolation > 0:
        displacement = _displacement(structures).to(positions.dtype)
        chosen, reach = torch.rand(
            2, len(structures), dtype=positions.dtype, device=positions.device
        )
        moved = chosen < interpolation
        positions = positions + (reach * moved)[system, None] * displacement
    if noise > 0:
        positions = positions + noise * torch.randn_like(positions) * free[:, None]
        moved = torch.ones_like(moved)
    frees = torch.zeros_like(structures.natoms).index_add_(0, system, free.to(torch.int64))
    after = replace(structures, positions=positions, pairs=None, cutoff=None)
    return after, moved & (frees > 0)


def _displacement(structures: Structures) -> Tensor:
    if structures.positions_relaxed is None:
        raise ValueError(
            "training.interpolation needs relaxed positions, and there are none for "
            f"{missing_for(structures.sid)}: give them for every system that is trained on, leave "
            "out those without, or set training.interpolation=0"
        )
    return relaxed_displacement(structures)


def _inverse(cell: Tensor, structures: Structures) -> Tensor:
    """(B, 3, 3) inverse cells; ValueError if there is none, naming the sid."""
    inverse: Tensor = torch.linalg.inv_ex(cell).inverse
    unit = cell / torch.linalg.vector_norm(cell, dim=-1, keepdim=True)
    # Of vectors that are zero or not finite, too.
    singular = ~(torch.linalg.det(unit).abs() > _LEAST_VOLUME)
    if bool(singular.any()):
        system = int(singular.nonzero()[0])
        raise ValueError(
            f"the cell of sid {structures.sid[system]} is {structures.cell[system].tolist()}, "
            "singular, and pbc is True along all its axes: give three vectors that span a volume, "
            "set pbc False where nothing repeats, leave the system out, or set "
            "training.shift_images=false"
        )
    return inverse


def _moved(pairs: NeighborPairs, lattice: Tensor) -> NeighborPairs:
    """The same pairs after atoms were moved by `lattice` (N, 3) vectors: T' = T + lᵢ − lⱼ."""
    moves = lattice.to(pairs.shift.dtype)
    return pairs._replace(shift=pairs.shift + moves[pairs.index_i] - moves[pairs.index_j])


def _apply(rows: Tensor, matrices: Tensor) -> Tensor:
    return torch.einsum("ni,nij->nj", rows, matrices)


def _about_z(count: int, like: Tensor) -> Tensor:
    """(count, 3, 3): random angles about z, half of them after a mirror."""
    angle = 2 * math.pi * torch.rand(count, dtype=like.dtype, device=like.device)
    mirror = 1.0 - 2.0 * torch.randint(2, (count,), device=like.device).to(like.dtype)
    out = like.new_zeros(count, 3, 3)
    out[:, 0, 0], out[:, 0, 1] = angle.cos(), angle.sin()
    out[:, 1, 0], out[:, 1, 1] = -angle.sin() * mirror, angle.cos() * mirror
    out[:, 2, 2] = 1.0
    return out


def _orthogonal(count: int, like: Tensor) -> Tensor:
    """(count, 3, 3), uniform over rotations and mirror images: Q of a Gaussian's QR, R's sign +."""
    gaussian = torch.randn(count, 3, 3, dtype=like.dtype, device=like.device)
    q, r = torch.linalg.qr(gaussian)
    out: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    return out
