"""Which systems a model was trained on, and which were held out, as its checkpoint tells."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flt_mol.structures import Structures

__all__ = ["SystemsSeen", "fingerprints", "read_systems", "systems_seen"]

_DIGITS = 3  # of Å; files with fewer decimals than float32 has give the same
_AT_ONCE = 256


@dataclass(frozen=True)
class SystemsSeen:
    """Of a checkpoint.

    Attributes:
        trained_on: fingerprints; None where they are not known.
        held_out: (sid, fingerprint) of each; empty where none were, or it is not known.
    """

    trained_on: frozenset[int] | None = None
    held_out: frozenset[tuple[str, int]] = frozenset()


def fingerprints(structures: Structures) -> list[int]:
    """B 64-bit numbers that tell systems apart by elements, positions and cell, to 0.001 Å.

    Names and targets do not count: a system is the same in a copy of its file, and with another
    energy.

    Example:
        >>> one = Structures.single([1, 1], [[0, 0, 0], [0, 0, 0.74]], sid="a", energy=-1.0)
        >>> same = Structures.single([1, 1], [[0, 0, 0], [0, 0, 0.74]], sid="b")
        >>> moved = Structures.single([1, 1], [[0, 0, 0], [0, 0, 0.75]], sid="a")
        >>> numbers = fingerprints(Structures.cat([one, same, moved]))
        >>> numbers[0] == numbers[1], numbers[0] == numbers[2]
        (True, False)
    """
    numbers = structures.atomic_numbers.numpy()
    positions, cells = (_rounded(x) for x in (structures.positions, structures.cell))
    found = []
    for b, (start, stop) in enumerate(pairwise(structures.ptr.tolist())):
        parts = (numbers[start:stop], positions[start:stop], cells[b])
        digest = hashlib.blake2b(b"".join(x.tobytes() for x in parts), digest_size=8)
        found.append(int.from_bytes(digest.digest(), "little", signed=True))
    return found


def _rounded(values: Tensor) -> Any:
    return np.round(values.numpy().astype(np.float64), _DIGITS) + 0.0  # no −0


def systems_seen(
    training: Any, held_out: Any | None, before: SystemsSeen | None = None
) -> dict[str, Any]:
    """What a checkpoint says of the systems of its run: tensors and plain data.

    Args:
        training: as :func:`~flt_mol.training.run_data.load_split` gave it; fingerprints are taken
            of what is in memory, a large data set would have to be read once more.
        held_out: of the training split, to validate on; None where the run has a split for that.
        before: of the checkpoint that the run starts from, whose training counts, too.

    Returns:
        ``{"trained_on": (n,) int64 or None, "held_out": None or {"sid": names, "fingerprint":
        (m,) int64}}``.
    """
    content: dict[str, Any] = {"trained_on": None, "held_out": None}
    if isinstance(training, list):
        known = {number for _, number in _each(training)} | (
            (before and before.trained_on) or set()
        )
        content["trained_on"] = torch.tensor(sorted(known), dtype=torch.int64)
    if held_out is not None:
        pairs = list(_each(held_out))
        found = torch.tensor([number for _, number in pairs], dtype=torch.int64)
        content["held_out"] = {"sid": [sid for sid, _ in pairs], "fingerprint": found}
    return content


def _each(systems: Any) -> Iterator[tuple[str, int]]:
    """(sid, fingerprint) of each."""
    for start in range(0, len(systems), _AT_ONCE):
        part = [systems[i] for i in range(start, min(start + _AT_ONCE, len(systems)))]
        yield from named_fingerprints(Structures.cat(part))


def named_fingerprints(structures: Structures) -> Iterable[tuple[str, int]]:
    """(sid, fingerprint) of each system."""
    return zip(map(str, structures.sid), fingerprints(structures), strict=True)


def read_systems(content: Mapping[str, Any]) -> SystemsSeen:
    """What the content of a checkpoint says, as far as it can be made out.

    Args:
        content: of :func:`~flt_mol.training.checkpoint_file.read_checkpoint`.
    """
    systems = content.get("systems")
    systems = systems if isinstance(systems, Mapping) else {}
    held = systems.get("held_out")
    held = held if isinstance(held, Mapping) else {}
    sids, numbers = held.get("sid"), _whole(held.get("fingerprint"))
    pairs: Iterable[tuple[str, int]] = ()
    if isinstance(sids, Sequence) and numbers is not None and len(sids) == len(numbers):
        pairs = zip(map(str, sids), numbers, strict=True)
    trained_on = _whole(systems.get("trained_on"))
    return SystemsSeen(None if trained_on is None else frozenset(trained_on), frozenset(pairs))


def _whole(numbers: Any) -> list[int] | None:
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or numbers.dim() != 1:
        return None
    found: list[int] = numbers.tolist()
    return found
