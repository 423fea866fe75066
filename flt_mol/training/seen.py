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

__all__ = [
    "SystemsSeen",
    "TrainedFile",
    "find_held_out",
    "fingerprints",
    "read_systems",
    "systems_seen",
]

_DIGITS = 3  # of Å; files with fewer decimals than float32 has give the same
_AT_ONCE = 256


@dataclass(frozen=True)
class TrainedFile:
    """A training of which only the file is known.

    Attributes:
        data: of its settings, what says which file that is: name, train, paths.
        held_out: fingerprints of the systems in it that were not trained on.
    """

    data: Mapping[str, Any]
    held_out: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SystemsSeen:
    """Of a checkpoint, by its own training and those of the checkpoints that it was tuned from.

    Attributes:
        trained_on: fingerprints; None where none are known.
        held_out: (sid, fingerprint) of each; empty where none were, or it is not known.
        files: trainings whose systems are not among `trained_on`; without name and paths where
            nothing is known of one.
    """

    trained_on: frozenset[int] | None = None
    held_out: frozenset[tuple[str, int]] = frozenset()
    files: tuple[TrainedFile, ...] = ()

    def was_trained_on(self, number: int, files: Sequence[TrainedFile] = ()) -> bool | None:
        """Whether a system was trained on; None where that cannot be known.

        Args:
            number: its fingerprint.
            files: those of `self.files` that it was read from.
        """
        if number in (self.trained_on or ()) or any(number not in f.held_out for f in files):
            return True
        known = self.trained_on is not None or bool(self.files)
        return False if known and all(number in f.held_out for f in self.files) else None


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
    training: Any,
    held_out: Any | None,
    before: SystemsSeen | None = None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a checkpoint says of the systems of its run: tensors and plain data.

    Args:
        training: as :func:`~flt_mol.training.run_data.load_split` gave it; fingerprints are taken
            of what is in memory, a large data set would have to be read once more.
        held_out: of the training split, to validate on; None where the run has a split for that.
        before: of the checkpoint that the run starts from, whose training counts, too.
        data: the `data` part of the run's settings, which stands for a large training split.

    Returns:
        ``{"trained_on": (n,) int64 or None, "held_out": None or {"sid": names, "fingerprint":
        (m,) int64}, "files": [{"data": {"name", "train", "paths"}, "held_out": (k,) int64}]}``.
    """
    content: dict[str, Any] = {"trained_on": None, "held_out": None}
    held = torch.zeros(0, dtype=torch.int64)
    if held_out is not None:
        pairs = list(_each(held_out))
        held = torch.tensor([number for _, number in pairs], dtype=torch.int64)
        content["held_out"] = {"sid": [sid for sid, _ in pairs], "fingerprint": held}
    known, files = None, []
    if before is not None:
        known = before.trained_on
        files = [_file(one.data, torch.tensor(sorted(one.held_out))) for one in before.files]
        if known is None and not files:  # whatever it was, it was no training on nothing
            files.append(_file({}, torch.zeros(0)))
    if isinstance(training, list):
        known = (known or frozenset()) | {number for _, number in _each(training)}
    elif data is not None:
        files.append(_file(data, held))
    if known is not None:
        content["trained_on"] = torch.tensor(sorted(known), dtype=torch.int64)
    return {**content, "files": files}


def _file(data: Mapping[str, Any], held_out: Tensor) -> dict[str, Any]:
    train, paths = str(data.get("train") or "train"), data.get("paths") or {}
    own = {train: paths[train]} if train in paths else {}
    part = {"name": data.get("name"), "train": train, "paths": own}
    return {"data": part, "held_out": held_out.to(torch.int64)}


def find_held_out(
    source: Any, held_out: Iterable[tuple[str, int]]
) -> tuple[list[int], list[tuple[str, int]]]:
    """Where systems held out are in a data set, by what they are; names only choose among equals.

    Args:
        source: data set with `batch`, in any order, under any names.
        held_out: (sid, fingerprint) of each.

    Returns:
        Their numbers in `source`, ascending, and those that are not there, by sid.
    """
    wanted: dict[int, list[str]] = {}
    for sid, fingerprint in held_out:
        wanted.setdefault(fingerprint, []).append(sid)
    there: dict[int, list[tuple[int, str]]] = {fingerprint: [] for fingerprint in wanted}
    for start in range(0, len(source), _AT_ONCE):
        batch = source.batch(range(start, min(start + _AT_ONCE, len(source))))
        for number, (sid, fingerprint) in enumerate(named_fingerprints(batch), start):
            if fingerprint in there:
                there[fingerprint].append((number, sid))
    numbers, missing = [], []
    for fingerprint, sids in wanted.items():
        same = sorted(there[fingerprint], key=lambda one: one[1] not in sids)[: len(sids)]
        numbers += [number for number, _ in same]
        names = {sid for _, sid in same}
        left = sorted(sids, key=lambda sid: (sid in names, sid))[: len(sids) - len(same)]
        missing += [(sid, fingerprint) for sid in left]
    return sorted(numbers), sorted(missing)


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
        content: of :func:`~flt_mol.models.checkpoint.read_checkpoint`.
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
    known = None if trained_on is None else frozenset(trained_on)
    return SystemsSeen(known, frozenset(pairs), _files(content, systems, numbers or ()))


def _files(
    content: Mapping[str, Any], systems: Mapping[str, Any], held_out: Iterable[int]
) -> tuple[TrainedFile, ...]:
    """Trainings known by their file: those stated, or, before they were, the run's own."""
    stated = systems.get("files")
    if isinstance(stated, list | tuple):
        parts = (one for one in stated if isinstance(one, Mapping))
        return tuple(
            TrainedFile(one["data"], frozenset(_whole(one.get("held_out")) or ()))
            for one in parts
            if isinstance(one.get("data"), Mapping)
        )
    config = content.get("config")
    data: Any = config.get("data") if isinstance(config, Mapping) else None
    if not isinstance(data, Mapping) or _whole(systems.get("trained_on")) is not None:
        return ()
    return (TrainedFile(data, frozenset(held_out)),)


def _whole(numbers: Any) -> list[int] | None:
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or numbers.dim() != 1:
        return None
    found: list[int] = numbers.tolist()
    return found
