"""Damaged compact files end in systems or in errors that name the file, in batches or alone."""

from __future__ import annotations

import random
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from flt_mol.data.compact import encode, in_blocks, pack, write_compact
from flt_mol.data.compact.dataset import CompactDataset
from flt_mol.structures import Structures

SEEDS = 200  # 2,000 were tried
HEADER = 80


@pytest.fixture
def payloads(make_record: Any) -> list[bytes]:
    """Records with further values, numbers and texts as sids."""
    changes = [{"sid": i if i % 2 else f"text {i}", "facet": "1" * (i % 3)} for i in range(9)]
    return [encode(make_record(**change), "r") for change in changes]


def seeded(count: int) -> Iterator[tuple[int, random.Random]]:
    return ((seed, random.Random(seed)) for seed in range(count))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with flipped bits, bytes from elsewhere, zeros, or an end that is missing."""
    new = bytearray(data)
    start, length = rng.randrange(len(data)), rng.choice([1, 2, 8, 300, 4096])
    kind = rng.choice(["flip", "flip", "flips", "copy", "zeros", "noise", "cut"])
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 20):
            new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del new[start:]
    else:
        source = rng.randrange(len(data))
        piece = {"copy": data[source : source + length], "noise": rng.randbytes(length)}
        new[start : start + length] = piece.get(kind, bytes(length))
    return bytes(new)


def read(function: Callable[[], Any]) -> Any:
    """What a function returns, or its error as text."""
    try:
        return function()
    except ValueError as error:
        return str(error)


def bits(found: Structures | str) -> Any:
    """All bits of a batch; an error as it is."""
    if isinstance(found, str):
        return found
    return {
        name: (value.dtype, value.numpy().tobytes()) if isinstance(value, torch.Tensor) else value
        for name, value in vars(found).items()
        if name != "system"
    }


def check(path: Path) -> int:
    """Read it all, one by one and in batches; return how many systems could be read."""
    dataset = read(lambda: CompactDataset(path))
    if isinstance(dataset, str):
        assert str(path) in dataset
        return 0
    assert dataset.natoms().shape == (len(dataset),)
    found = [read(lambda i=index: dataset[i]) for index in range(len(dataset))]
    errors = [error for error in found if isinstance(error, str)]
    assert all(str(path) in error for error in errors)
    good = [index for index, system in enumerate(found) if not isinstance(system, str)]
    if errors:
        assert read(lambda: dataset.batch(range(len(dataset)))) == errors[0]
    if good:
        batch = read(lambda: dataset.batch(good))
        assert bits(batch) == bits(Structures.cat([found[index] for index in good]))
        assert bits(dataset.batch(good[-1:])) == bits(found[good[-1]])
    return len(good)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_files_end_in_systems_or_named_errors(
    payloads: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "sound.lmdb"
    write_compact(path, in_blocks(payloads, 3), 9)
    sound = path.read_bytes()
    counts = []
    for seed, rng in seeded(SEEDS):
        path = tmp_path / f"{seed}.lmdb"
        path.write_bytes(damaged(sound, rng))
        counts.append(check(path))
        path.unlink()
    # Most damage is found, and most of it costs a part of the records at most.
    assert counts.count(0) > SEEDS / 10
    assert counts.count(9) > SEEDS / 10
    assert len(set(counts)) > 5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fewer_records_than_announced_are_always_reported(
    payloads: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "sound.lmdb"
    write_compact(path, in_blocks(payloads, 3), 9)
    sound = path.read_bytes()
    for seed, rng in seeded(300):
        path = tmp_path / f"{seed}.lmdb"
        path.write_bytes(damaged(sound, rng))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                count = len(CompactDataset(path))
            except ValueError:
                continue
        assert count == 9 or any("9 records" in str(w.message) for w in caught)
        path.unlink()


def forged(payload: bytes, rng: random.Random) -> bytes:
    """A record with wrong contents under a checksum that is right."""
    new = bytearray(payload)
    for _ in range(rng.choice([1, 1, 2, 5])):
        # The header decides how the rest is read.
        place = rng.randrange(4, HEADER if rng.random() < 0.7 else len(new))
        size = rng.choice([1, 4, 8])
        numbers = [rng.randbytes(size), b"\xff" * size, bytes(size), bytes([new[place] ^ 1])]
        piece = rng.choice(numbers)
        new[place : place + len(piece)] = piece
    return struct.pack("<I", zlib.crc32(new[4:])) + bytes(new[4:])


@pytest.mark.filterwarnings("ignore::UserWarning")
# Of NaNs that signal, when float32 becomes float64; they are refused afterwards.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_forged_records_are_the_same_in_batches_and_alone(
    payloads: list[bytes], tmp_path: Path
) -> None:
    records = [forged(rng.choice(payloads), rng) for _, rng in seeded(600)]
    path = tmp_path / "x.lmdb"
    write_compact(path, in_blocks([payloads[0], *records]), 601)
    dataset = CompactDataset(path)
    good = 0
    for index in range(1, 601):
        alone = read(lambda i=index: dataset[i])
        failed = isinstance(alone, str)
        both = alone if failed else Structures.cat([dataset[0], alone])
        assert bits(read(lambda i=index: dataset.batch([i]))) == bits(alone)
        assert bits(read(lambda i=index: dataset.batch([0, i]))) == bits(both)
        assert not failed or f"{path}, record {index}" in alone
        good += not failed
    assert 50 < good < 550


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_forged_tables(payloads: list[bytes], tmp_path: Path) -> None:
    for seed, rng in seeded(60):
        block = bytearray(pack(payloads[:4]))
        place = 4 * rng.randrange(1, 11)
        struct.pack_into("<I", block, place, rng.choice([0, 1, 2**32 - 1, rng.getrandbits(12)]))
        size = 8 + 4 * (2 * min(int.from_bytes(block[4:8], "little"), 99) + 1)
        struct.pack_into("<I", block, 0, zlib.crc32(block[4:size]))
        path = tmp_path / f"{seed}.lmdb"
        with (
            lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20) as environment,
            environment.begin(write=True) as transaction,
        ):
            for key, value in (
                (b"00000000", bytes(block)),
                (b"00000001", pack(payloads[:1])),
                (b"format", b"flt_mol compact 1"),
                (b"length", b"5"),
            ):
                transaction.put(key, value)
        assert check(path) >= 1
        path.unlink()


def test_the_checks_can_fail(payloads: list[bytes]) -> None:
    rng = random.Random(0)
    assert all(damaged(payloads[0], rng) != payloads[0] for _ in range(5))
    assert np.mean([forged(payloads[0], rng) != payloads[0] for _ in range(50)]) > 0.9
