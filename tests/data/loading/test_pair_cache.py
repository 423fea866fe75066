"""Pairs from disk are those that are searched, or there are none."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flt_mol.data import make_loader, open_dataset
from flt_mol.data.loading import batching
from flt_mol.data.loading.batching import cached_pairs
from flt_mol.data.loading.pair_cache import PairCache, header_crc32
from flt_mol.data.loading.pair_writer import write_cache
from flt_mol.functional.neighbors import NeighborPairs
from flt_mol.structures import Structures

CUTOFF = 3.0


@pytest.fixture
def systems() -> list[Structures]:
    """Crystals, slabs and molecules of one to nine atoms, some without any pair."""
    rng = torch.Generator().manual_seed(0)
    return [
        Structures.single(
            [6] * n,
            6 * torch.rand(n, 3, generator=rng),
            cell=torch.diag(torch.tensor([2.5, 4.0, 9.0])),
            pbc=[n % 2 == 0, n % 3 == 0, False],
            sid=n,
        )
        for n in range(1, 10)
    ]


def assert_same(a: NeighborPairs | None, b: NeighborPairs | None) -> None:
    assert a is not None
    assert b is not None
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x, y)


def folders(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.parametrize("indices", [[0], [3, 1, 8], [5, 5, 0, 0], list(range(9))])
def test_pairs_are_those_of_the_batch(
    indices: list[int], systems: list[Structures], tmp_path: Path
) -> None:
    cache = pickle.loads(pickle.dumps(cached_pairs(systems, CUTOFF, tmp_path)))
    batch = Structures.cat([systems[i] for i in indices])
    found = cache.attach(batch, indices)
    assert found.cutoff == CUTOFF
    assert_same(found.pairs, batch.with_pairs(CUTOFF).pairs)
    assert len(cache) == 9
    single = [len(system.with_pairs(CUTOFF).pairs.index_i) for system in systems]
    assert cache.counts().tolist() == single
    assert min(single) == 0


def test_batches_of_the_loader(systems: list[Structures], tmp_path: Path) -> None:
    options: Any = {"shuffle": True, "seed": 1, "cutoff": CUTOFF}
    cached = make_loader(systems, 4, pair_cache=tmp_path, **options)
    for batch, searched in zip(cached, make_loader(systems, 4, **options), strict=True):
        assert batch.sid == searched.sid
        assert_same(batch.pairs, searched.pairs)
    assert len(folders(tmp_path)) == 1


def test_a_budget_of_pairs(systems: list[Structures], tmp_path: Path) -> None:
    counts = cached_pairs(systems, CUTOFF, tmp_path).counts()
    limit = int(counts.max()) + 10
    options: Any = {"cutoff": CUTOFF, "pair_cache": tmp_path}
    batches = list(make_loader(systems, max_pairs=limit, shuffle=True, **options))
    assert max(len(batch.pairs.index_i) for batch in batches) <= limit
    assert sorted(sid for batch in batches for sid in batch.sid) == list(range(1, 10))
    most = int(counts.argmax())
    with pytest.raises(ValueError, match=f"sid {most + 1} has {counts.max()} pairs, more than"):
        make_loader(systems, max_pairs=int(counts.max()) - 1, **options)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and searching pairs is an error from then on."""

    def fail(*_: Any) -> None:
        raise AssertionError("pairs are searched again")

    return lambda: monkeypatch.setattr(batching, "write_cache", fail)


def test_searched_once(
    systems: list[Structures],
    tmp_path: Path,
    no_search: Any,
    write_lmdb: Any,
    make_record: Any,
) -> None:
    path = write_lmdb({i: make_record(sid=i) for i in range(3)})
    first = [cached_pairs(x, CUTOFF, tmp_path / "c").path for x in (open_dataset(path), systems)]
    no_search()
    again = [cached_pairs(x, CUTOFF, tmp_path / "c").path for x in (open_dataset(path), systems)]
    assert first == again
    assert first[0].name.startswith("data-3A-")
    with pytest.raises(AssertionError):
        cached_pairs(systems, CUTOFF + 0.1, tmp_path / "c")
    with pytest.raises(AssertionError):
        cached_pairs(systems[:-1], CUTOFF, tmp_path / "c")


def test_a_file_that_has_changed(tmp_path: Path, write_lmdb: Any, make_record: Any) -> None:
    path = write_lmdb({0: make_record()})
    old = cached_pairs(open_dataset(path), CUTOFF, tmp_path / "c")
    write_lmdb({0: make_record(pos=make_record()["pos"] * 0.9)})
    os.utime(path, ns=(0, 0))
    dataset = open_dataset(path)
    new = cached_pairs(dataset, CUTOFF, tmp_path / "c")
    assert new.path != old.path
    assert_same(new.attach(dataset[0], [0]).pairs, dataset[0].with_pairs(CUTOFF).pairs)


def test_records_that_were_skipped(tmp_path: Path, write_lmdb: Any, make_record: Any) -> None:
    records = {i: make_record(pos=make_record()["pos"] * (1 + i / 9), sid=i) for i in range(3)}
    bad = make_record(atomic_numbers=torch.zeros(6))
    found = []
    for k in (0, 1):
        path = write_lmdb({**records, k: bad})
        os.utime(path, ns=(0, 0))
        dataset = open_dataset(path, on_error="skip")
        cache = cached_pairs(dataset, CUTOFF, tmp_path / "c")
        found.append(cache.path)
        assert_same(cache.attach(dataset[0], [0]).pairs, dataset[0].with_pairs(CUTOFF).pairs)
    assert found[0] != found[1]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def other_version(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["header"]["format"] = 0
    stored["crc32"] = header_crc32(stored["header"])
    file.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("header.json", truncate),
        ("header.json", flip),
        ("header.json", other_version),
        ("header.json", Path.unlink),
        ("offsets", flip),
        ("offsets", truncate),
        ("checksums", flip),
        ("checksums", truncate),
        ("sender", truncate),
        ("shift", Path.unlink),
    ],
)
def test_a_damaged_cache_is_made_again(
    name: str, damage: Any, systems: list[Structures], tmp_path: Path
) -> None:
    path = cached_pairs(systems, CUTOFF, tmp_path).path
    damage(path / name)
    with pytest.raises(ValueError, match=path.name):
        PairCache(path)
    batch = Structures.cat(systems)
    again = cached_pairs(systems, CUTOFF, tmp_path)
    assert_same(again.attach(batch, range(9)).pairs, batch.with_pairs(CUTOFF).pairs)
    assert folders(tmp_path) == [path.name]
    names = ["checksums", "header.json", "offsets", "receiver", "sender", "shift"]
    assert folders(path) == names


@pytest.mark.parametrize("name", ["receiver", "sender", "shift"])
def test_damage_that_shows_as_pairs_are_read(
    name: str, systems: list[Structures], tmp_path: Path
) -> None:
    """Every bit of the file: the system it belongs to is refused, and only that one."""
    cache = cached_pairs(systems, CUTOFF, tmp_path)
    file = cache.path / name
    whole = file.read_bytes()
    width = len(whole) // int(cache.counts().sum())
    owner = np.repeat(np.arange(len(systems)), cache.counts() * width)
    for at in range(0, len(whole), 7):
        with file.open("r+b") as damaged:
            damaged.seek(at)
            damaged.write(bytes([whole[at] ^ 1 << at % 8]))
        for i in {0, int(owner[at]), 8}:
            if i == owner[at]:
                message = f"{cache.path.name} is damaged: the pairs of sid {i + 1} .*delete this"
                with pytest.raises(ValueError, match=message):
                    cache.attach(Structures.cat([systems[3], systems[i]]), [3, i])
            else:
                cache.attach(systems[i], [i])
        with file.open("r+b") as damaged:
            damaged.write(whole)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_in_the_middle_of_an_epoch(
    num_workers: int, systems: list[Structures], tmp_path: Path
) -> None:
    def make() -> Any:
        return make_loader(systems, 2, cutoff=CUTOFF, pair_cache=tmp_path, num_workers=num_workers)

    loader = make()
    for _ in loader:
        pass
    (name,) = folders(tmp_path)
    with (tmp_path / name / "shift").open("r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)
        damaged.write(b"\x55")
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    with pytest.raises(ValueError, match=f"{name} is damaged: the pairs of sid 9 .*delete this"):
        next(batches)
    shutil.rmtree(tmp_path / name)
    batch = list(make())[-1]
    assert_same(batch.pairs, systems[8].with_pairs(CUTOFF).pairs)


@pytest.mark.parametrize("field", ["positions", "cell", "pbc"])
def test_systems_that_are_others_by_now(
    field: str, systems: list[Structures], tmp_path: Path
) -> None:
    cache = cached_pairs(systems, CUTOFF, tmp_path)
    value = getattr(systems[8], field).clone()
    value.view(-1)[-1] = not value.view(-1)[-1] if field == "pbc" else 1.5
    other = replace(systems[8], **{field: value})
    with pytest.raises(ValueError, match=r"another data set: positions, cell or pbc of sid 9 are"):
        cache.attach(Structures.cat([systems[0], other]), [0, 8])
    with pytest.raises(ValueError, match=r"another data set: positions, cell or pbc of sid 1 are"):
        cache.attach(Structures.cat(systems[:2]), [7, 8])


def test_another_float_type_in_the_same_batch(systems: list[Structures], tmp_path: Path) -> None:
    cache = cached_pairs(systems, CUTOFF, tmp_path)
    fine = replace(systems[4], positions=systems[4].positions.double())
    mixed = Structures.cat([fine, systems[5]])
    assert mixed.positions.dtype == torch.float64
    single = Structures.cat(systems[4:6]).with_pairs(CUTOFF)
    assert_same(cache.attach(mixed, [4, 5]).pairs, single.pairs)


@pytest.mark.parametrize("changed", range(3))
def test_data_sets_alike_from_outside(
    changed: int, tmp_path: Path, write_lmdb: Any, make_record: Any
) -> None:
    records = {i: make_record(sid=i) for i in range(3)}
    datasets = []
    for folder in ("a", "b"):
        path = write_lmdb(records)
        target = tmp_path / folder / "data.lmdb"
        target.parent.mkdir()
        path.rename(target)
        os.utime(target, ns=(10**18, 10**18))
        datasets.append(open_dataset(target))
        records[changed] = make_record(sid=changed, pos=make_record()["pos"] * 0.9)
    first, second = (cached_pairs(dataset, CUTOFF, tmp_path / "c") for dataset in datasets)
    assert first.path != second.path
    with pytest.raises(ValueError, match=f"another data set: .* of sid {changed} are"):
        first.attach(datasets[1][changed], [changed])


@pytest.mark.parametrize("indices", [[-1], [9], [0, 1], []])
def test_indices_beyond_the_data_set(
    indices: list[int], systems: list[Structures], tmp_path: Path
) -> None:
    cache = cached_pairs(systems, CUTOFF, tmp_path)
    with pytest.raises(ValueError, match="holds pairs of 9 systems, and 1 were asked for"):
        cache.attach(systems[8], indices)


def test_another_process_was_quicker(systems: list[Structures], tmp_path: Path) -> None:
    path = tmp_path / "cache"
    batches = [Structures.cat(systems).with_pairs(CUTOFF)]
    write_cache(path, batches, CUTOFF)
    before = (path / "header.json").stat().st_ino
    write_cache(path, batches, CUTOFF)
    assert (path / "header.json").stat().st_ino == before
    assert folders(tmp_path) == ["cache"]


def test_nothing_is_left_of_a_search_that_failed(systems: list[Structures], tmp_path: Path) -> None:
    cell = torch.diag(torch.tensor([3.0, 3.0, 0.0]))
    flat = Structures.single([6, 6], torch.zeros(2, 3), cell=cell, pbc=True, sid="flat")
    with pytest.raises(ValueError, match="sid flat: cell"):
        cached_pairs([*systems, flat], CUTOFF, tmp_path)
    assert folders(tmp_path) == []


def test_a_folder_that_cannot_be_made(systems: list[Structures], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="no cache of pairs can be made at .*file"):
        cached_pairs(systems, CUTOFF, tmp_path / "file")


@pytest.mark.parametrize("far", [100, 200, 40_000, 2**33])
def test_images_far_away(far: int, tmp_path: Path) -> None:
    """Atoms that were moved by many cells: wider integers, and what was written before them."""
    pair = torch.tensor([[0, 1], [1, 0]])
    parts = [
        Structures(
            **{
                **vars(Structures.single([6, 6], torch.zeros(2, 3))),
                "pairs": NeighborPairs(*pair, torch.tensor([[k, 0, -k], [-k, 0, k]])),
                "cutoff": 1.0,
            }
        )
        for k in (1, far, 2)
    ]
    write_cache(tmp_path / "cache", parts, 1.0)
    found = PairCache(tmp_path / "cache").attach(Structures.cat(parts), [0, 1, 2])
    assert_same(found.pairs, Structures.cat(parts).pairs)


def test_many_atoms(tmp_path: Path) -> None:
    rows = torch.tensor([70_000, 3])
    pairs = NeighborPairs(rows.sort().values, rows, torch.zeros(2, 3, dtype=torch.int64))
    big = Structures.single(np.ones(70_001), np.zeros((70_001, 3)))
    big = Structures(**{**vars(big), "pairs": pairs, "cutoff": 1.0})
    write_cache(tmp_path / "cache", [big], 1.0)
    assert_same(PairCache(tmp_path / "cache").attach(big, [0]).pairs, pairs)
