"""Which files are tried: kind × mutation × seed, each made again from these three."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzzing.hostile import JSON, PICKLES
from fuzzing.mutations import BYTES, FOREIGN, LMDB, RECORDS, TEXT, Mutation
from fuzzing.sound import SOUND, Sound, lmdb_bytes, row, sound

__all__ = ["THINGS", "Case", "choose", "made", "mutations"]

_TEXTS = ("extxyz", "ase json", "POSCAR", "cif")


@dataclass(frozen=True)
class Case:
    """One file: how it is made."""

    kind: str
    mutation: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.mutation}:{self.seed}"


def _hostile_lmdb(values: dict[bytes, bytes], suffix: str) -> Callable[[Path], tuple[Path, int]]:
    def make(folder: Path) -> tuple[Path, int]:
        path = folder / f"data{suffix}"
        path.write_bytes(lmdb_bytes(values))
        return path, len(values)

    return make


def _pickle(name: str, folder: Path, canary: Path, rng: Random) -> tuple[Path, int | None]:
    """A hostile pickle as record 1 of 3, or as the whole file."""
    attack = PICKLES[name](str(canary))
    if rng.random() < 0.15:
        path = folder / rng.choice(("data.lmdb", "data.pkl", "data.traj", "data.json", "data"))
        path.write_bytes(attack)
        return path, None
    given = sound("lmdb of arrays")
    assert given.values is not None
    if rng.random() < 0.3:
        attack = zlib.compress(attack)
    values = {b"0": given.values[b"0"], b"1": attack, b"2": given.values[b"2"]}
    if rng.random() < 0.1:
        values = {b"0": given.values[b"0"], b"length": attack}
        path = folder / "data.lmdb"
        path.write_bytes(lmdb_bytes(values))
        return path, 1
    path = folder / "data.lmdb"
    path.write_bytes(lmdb_bytes(values))
    return path, 3


def _json(name: str, folder: Path, canary: Path, rng: Random) -> tuple[Path, int | None]:
    """Hostile JSON as row 2 of 3 of an aselmdb, or as (a row of) ASE's JSON database."""
    attack = JSON[name]()
    rows = {str(i + 1).encode(): zlib.compress(json.dumps(row(i)).encode()) for i in range(3)}
    if rng.random() < 0.6:
        rows[b"2"] = zlib.compress(attack) if rng.random() < 0.8 else attack
        path = folder / "data.aselmdb"
        path.write_bytes(lmdb_bytes({**rows, b"nextid": zlib.compress(b"4")}))
        return path, 3
    if rng.random() < 0.6:
        attack = b'{"1":' + attack + b',"ids":[1],"nextid":2}'
    path = folder / "data.json"
    path.write_bytes(attack)
    return path, None


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


THINGS: dict[str, Callable[[Path], None]] = {
    "pipe": _fifo,
    "folder": lambda path: path.mkdir(),
    "loop of links": _loop,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/null": lambda path: path.symlink_to("/dev/null"),
    "/dev/urandom": lambda path: path.symlink_to("/dev/urandom"),
    "/proc/version": lambda path: path.symlink_to("/proc/version"),
    "socket": _socket,
    "sparse": lambda path: _sparse(path),
}


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 34)


def _thing(name: str, folder: Path, canary: Path, rng: Random) -> tuple[Path, int | None]:
    """No regular file: given itself, inside a folder of shards, or as data.mdb of a folder."""
    suffix = rng.choice((".lmdb", ".aselmdb", ".traj", ".db", ".extxyz", ".json", ""))
    form = rng.choice(("itself", "itself", "shard", "data.mdb"))
    if form == "itself":
        path = folder / f"data{suffix}"
        THINGS[name](path)
        return path, None
    path = folder / "data"
    path.mkdir()
    if form == "data.mdb":
        THINGS[name](path / "data.mdb")
        return path, None
    (path / "data.0.lmdb").write_bytes(sound("lmdb of arrays").data)
    THINGS[name](path / "data.1.lmdb")
    return path, None


_SPECIAL = {
    "hostile pickle": (PICKLES, _pickle),
    "hostile json": (JSON, _json),
    "no regular file": (THINGS, _thing),
}


def mutations(kind: str) -> dict[str, Mutation]:
    """The mutations that a kind of file has."""
    given = sound(kind)
    found: dict[str, Mutation] = {"none": lambda given, rng: (given.data, given.count)}
    found |= {**BYTES, **{f"foreign {name}": change for name, change in FOREIGN.items()}}
    if given.values is not None:
        found |= LMDB | RECORDS
    if kind in _TEXTS:
        found |= TEXT
    return found


def choose(count: int, seed: int) -> Iterator[Case]:
    """`count` cases: the kinds in turn, their mutations in turn from a random order."""
    rng = Random(seed)
    kinds = [*SOUND, "hostile pickle", *SOUND, "hostile pickle", "hostile json", "no regular file"]
    waiting: dict[str, list[str]] = {}
    for index in range(count):
        kind = kinds[index % len(kinds)]
        if not waiting.get(kind):
            names = sorted(_SPECIAL[kind][0] if kind in _SPECIAL else mutations(kind))
            names = [name for name in names if name != "none"]
            rng.shuffle(names)
            waiting[kind] = names
        yield Case(kind, waiting[kind].pop(), seed * 1_000_000 + index)


def made(case: Case, folder: Path, canary: Path) -> tuple[Path, int | None]:
    """Make a case's file in an empty folder.

    Returns:
        What to open, and the number of records to expect (None: unknown).
    """
    rng = Random(str(case))
    if case.kind in _SPECIAL:
        return _SPECIAL[case.kind][1](case.mutation, folder, canary, rng)
    given: Sound = sound(case.kind)
    data, count = mutations(case.kind)[case.mutation](given, rng)
    path = folder / f"data{given.suffix}"
    path.write_bytes(data)
    return path, count
