"""What a batch of structures is checked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flt_mol._structures_pairs import check_pairs

if TYPE_CHECKING:
    from flt_mol.structures import Structures


_OPTIONAL = ("positions_relaxed", "energy", "energy_initial")
_INDEX = (torch.int64, torch.int32)
_DTYPES = {
    **dict.fromkeys(("atomic_numbers", "tags", "ptr"), (_INDEX, "torch.int64", "long")),
    **dict.fromkeys(("fixed", "pbc"), ((torch.bool,), "torch.bool", "bool")),
    **dict.fromkeys(("positions", "cell", "positions_relaxed"), (None, "a float", "float")),
    **dict.fromkeys(("energy", "energy_initial"), (None, "a float", "double")),
}


def check_kinds(structures: Structures) -> None:
    """Refuse fields of another kind than theirs: uint8 is a mask to torch, ~ of an int no mask."""
    for name, (dtypes, expected, cast) in _DTYPES.items():
        value = getattr(structures, name)
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"Structures.{name} is a {type(value).__name__}, expected a tensor; "
                "Structures.single takes lists and arrays"
            )
        if value.dtype not in dtypes if dtypes else not value.is_floating_point():
            raise ValueError(
                f"Structures.{name} has dtype {value.dtype}, expected {expected}: {name}.{cast}()"
            )
    if isinstance(structures.sid, str):
        raise ValueError(f"Structures.sid is '{structures.sid}', expected a tuple of names")


def check_shapes(structures: Structures) -> None:
    """Refuse fields that do not belong together, by name."""
    check_kinds(structures)
    n, b = structures.num_atoms, len(structures)
    expected: dict[str, tuple[int, ...]] = {
        "atomic_numbers": (n,),
        "positions": (n, 3),
        "tags": (n,),
        "fixed": (n,),
        "positions_relaxed": (n, 3),
        "cell": (b, 3, 3),
        "pbc": (b, 3),
        "energy": (b,),
        "energy_initial": (b,),
    }
    for name, shape in expected.items():
        value = getattr(structures, name)
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"Structures.{name} has shape {tuple(value.shape)}, expected {shape} "
                f"for {b} systems and {n} atoms"
            )
    if len(structures.sid) != b:
        raise ValueError(f"Structures.sid has {len(structures.sid)} names for {b} systems")
    check_pairs(structures.pairs, structures.cutoff)


def shaped(name: str, value: Tensor, shape: tuple[int, ...], sid: int | str) -> Tensor:
    """`value` in `shape`, from which it may differ by axes of length one."""
    if value.numel() or 0 not in shape:
        found, wanted = ([n for n in s if n != 1] for s in (value.shape, shape))
        if found != wanted:
            raise ValueError(f"{name} of {sid} has shape {tuple(value.shape)}, expected {shape}")
    return value.reshape(shape)


def whole(name: str, x: Any, n: int | None, low: int, high: int, sid: int | str) -> Tensor:
    """(n,) int64 out of whole numbers of any dtype; any n for None."""
    given = torch.as_tensor(x)
    value = given.to(torch.int64)
    wrong = (value != given) | (value < low) | (value > high)
    if bool(wrong.any()):
        first = given[wrong][0].item() if given.dim() else given.item()
        raise ValueError(f"{name} of {sid} holds {first:.6g}, expected {low} to {high}")
    return value.reshape(-1) if n is None else shaped(name, value, (n,), sid)


def three(x: Any, sid: int | str) -> Tensor:
    """Periodicity of one system, (1, 3) bool, out of one or three values."""
    value = torch.as_tensor(x).bool().reshape(-1)
    if value.numel() not in (1, 3):
        raise ValueError(f"pbc of {sid} has {value.numel()} values, expected 1 or 3")
    return value.expand(3).reshape(1, 3).clone()
