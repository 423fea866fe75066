"""Summaries count what is there and list what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import molecule
from fuzzing.sound import sound

from flt_mol.data import from_ase, open_dataset
from flt_mol.data.inspect import render, summarise
from flt_mol.data.memory import MemoryDataset
from flt_mol.structures import Structures


@pytest.fixture
def path(write_lmdb: Any, make_record: Any) -> Any:
    """Two good records, an outlier, and a bad one."""
    return write_lmdb(
        {
            0: make_record(sid=1, y_relaxed=-1.0),
            1: make_record(sid=2, y_relaxed=np.float64(-2.0), facet="111"),
            2: make_record(sid=3, y_relaxed=-5332.0, pos_relaxed=None),
            3: make_record(sid=4, y_relaxed=float("nan")),
        }
    )


def test_counts(path: Any) -> None:
    summary = summarise(open_dataset(path))
    assert summary["path"] == str(path)
    assert summary["count"] == 4
    assert summary["fields"]["pos"] == 4
    assert summary["fields"]["facet"] == 1
    assert summary["missing"] == {"pos_relaxed": 1}
    assert summary["dtypes"]["atomic_numbers"] == ["tensor float32, 1 axes"]
    assert summary["dtypes"]["y_relaxed"] == ["float"]
    assert summary["energy"]["count"] == 3
    assert summary["energy"]["min"] == -5332.0
    assert summary["energy"]["max"] == -1.0
    assert summary["energy"]["mean"] == pytest.approx(-5335.0 / 3)
    assert summary["energy"]["std"] == pytest.approx(np.std([-1.0, -2.0, -5332.0]))
    assert summary["elements"] == {"C": 3, "O": 3, "Pt": 3}
    assert summary["atoms"] == {"count": 3, "min": 6, "median": 6, "mean": 6, "max": 6, "std": 0}
    assert summary["pbc"] == {"TTT": 3}
    assert summary["tags"] == {"0": 6, "1": 6, "2": 6}
    assert summary["fixed"] == pytest.approx(1 / 3)


def test_what_is_wrong_is_listed(path: Any) -> None:
    summary = summarise(open_dataset(path))
    assert summary["outliers"] == [{"sid": 3, "energy": -5332.0}]
    assert len(summary["problems"]) == 1
    assert "sid 4: y_relaxed is nan" in summary["problems"][0]
    skipping = summarise(open_dataset(path, on_error="skip"))
    assert skipping["count"] == 3
    assert skipping["skipped"] == summary["problems"]
    assert skipping["problems"] == []
    text = render(summary)
    for word in ("4 systems", "sid 3: -5332 eV", "sid 4: y_relaxed is nan", "Pt 3", "facet"):
        assert word in text


def test_json(path: Any) -> None:
    summary = summarise(open_dataset(path))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_json_without_infinity(write_lmdb: Any, make_record: Any) -> None:
    path = write_lmdb({0: make_record(), 1: make_record(sid=2)})
    batch = open_dataset(path).batch([0, 1])
    huge = replace(batch, energy=torch.tensor([1.7e308, -1.7e308], dtype=torch.float64))
    summary = summarise(list(huge))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["energy"]["max"] == 1.7e308
    assert summary["energy"]["std"] is None
    assert "std beyond float64" in render(summary)


def test_repeated_sids(write_lmdb: Any, make_record: Any) -> None:
    dataset = open_dataset(write_lmdb({0: make_record(), 1: make_record()}))
    summary = summarise(dataset)
    assert summary["repeated_sids"] == [101]
    assert "1 repeated sids:\n  101" in render(summary)


def test_lists_of_structures_and_no_targets() -> None:
    summary = summarise([from_ase(molecule("H2O"), sid="water")])
    assert summary["count"] == 1
    assert summary["energy"] is None
    assert summary["fields"] == {}
    assert summary["pbc"] == {"FFF": 1}
    assert "no targets" in render(summary)


def test_unread_graphs_stay_bytes(write_lmdb: Any, make_record: Any) -> None:
    record = make_record(edge_index=torch.zeros(2, 5, dtype=torch.int64))
    summary = summarise(open_dataset(write_lmdb(dict.fromkeys(range(20), record))))
    assert summary["fields"]["edge_index"] == 20
    assert summary["dtypes"]["edge_index"] == ["tensor int64, 2 axes"]


@pytest.mark.filterwarnings("ignore:.*all tags are 0")
@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("lmdb of PyG 1.x", "LMDB of PyG 1.x pickles"),
        ("lmdb of PyG 2.x", "LMDB of PyG 2.x pickles"),
        ("lmdb of dicts", "LMDB of pickles with torch tensors"),
        ("lmdb of arrays", "LMDB of pickles with numpy arrays"),
        ("lmdb of zlib", "LMDB of zlib-compressed pickles"),
        ("compact lmdb", "compact LMDB"),
        ("aselmdb", "LMDB of ASE rows (aselmdb)"),
        ("traj", "ASE traj"),
        ("extxyz", "ASE extxyz"),
        ("ase db", "ASE db"),
        ("cif", "ASE cif"),
    ],
)
def test_every_kind_of_file(kind: str, shown: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{sound(kind).suffix}"
    path.write_bytes(sound(kind).data)
    summary = summarise(open_dataset(path))
    count, size = sound(kind).count, len(sound(kind).data)
    assert summary["kind"] == shown
    assert (summary["count"], summary["looked_at"]) == (count, count)
    assert (summary["bytes"], summary["bytes_per_record"]) == (size, round(size / count))
    assert summary["elements"] == dict.fromkeys(("C", "O", "Pt"), count)
    assert summary["atoms"]["max"] == 6
    assert summary["fields"]["pos"] == count
    assert summary["problems"] == []
    assert f"{size:,} bytes" in render(summary)
    if kind != "cif":
        assert summary["energy"]["max"] == pytest.approx(-1.25)
        assert summary["fixed"] == pytest.approx(1 / 3)
        assert "y_relaxed" not in summary["missing"]


def test_together_or_one_by_one(make_record: Any, write_lmdb: Any) -> None:
    """What is counted of batches is what is counted of systems, bad records in between or not."""
    values = {i: make_record(sid=i, y_relaxed=-float(i)) for i in range(150)}
    values[3] = make_record(sid=3, atomic_numbers=torch.tensor([29.0]), pos=torch.zeros(1, 3))
    values |= {i: make_record(sid=f"name {i}") for i in (70, 71)}
    good = open_dataset(write_lmdb(values, "good.lmdb"))
    values[100] = b"no pickle"
    values[101] = make_record(sid=101, y_relaxed=float("inf"))
    bad = open_dataset(write_lmdb(values, "bad.lmdb"))
    for dataset, problems in ((good, ["sid 3: natoms"]), (bad, ["sid 3", "key 100", "sid 101"])):
        together = summarise(dataset)
        slow = summarise(_OneByOne(dataset))
        assert len(together["problems"]) == len(problems)
        for message, part in zip(together["problems"], problems, strict=True):
            assert part in message
        for name in ("problems", "elements", "atoms", "pbc", "tags", "fixed", "energy"):
            assert together[name] == slow[name], name
        assert together["outliers"] == slow["outliers"]
        assert together["counts"]["outliers"] > 100


class _OneByOne:
    """A data set of which nothing is known but its systems."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def test_some_of_many(make_record: Any, write_lmdb: Any) -> None:
    dataset = open_dataset(write_lmdb({i: make_record(sid=i) for i in range(130)}))
    told: list[tuple[int, int | None]] = []
    summary = summarise(dataset, limit=10, progress=lambda done, total: told.append((done, total)))
    assert (summary["count"], summary["looked_at"]) == (130, 10)
    assert summary["fields"]["pos"] == summary["atoms"]["count"] == 10
    assert summary["missing"] == {}
    assert told == [(10, 10)]
    assert "10 of 130" in render(summary)
    told.clear()
    summarise(dataset, progress=lambda done, total: told.append((done, total)))
    assert told == [(64, 130), (128, 130), (130, 130)]
    assert "looked at" not in render(summarise(dataset, limit=130))
    with pytest.raises(ValueError, match="limit is 0"):
        summarise(dataset, limit=0)


def test_a_sample_is_spread_over_the_file(make_record: Any, write_lmdb: Any) -> None:
    values = {i: make_record(sid=i, y_relaxed=float(i) / 100) for i in range(100)}
    summary = summarise(open_dataset(write_lmdb(values)), limit=4)
    assert [summary["energy"][name] for name in ("min", "median", "max")] == [0.0, 0.375, 0.75]


def test_long_lists_are_cut_and_counted() -> None:
    dataset = MemoryDataset([_system(y=-50.0, sid=i % 1100) for i in range(2200)])
    summary = summarise(dataset)
    assert summary["counts"]["outliers"] == 2200
    assert summary["counts"]["repeated_sids"] == 1100
    assert len(summary["outliers"]) == len(summary["repeated_sids"]) == 1000
    assert "2200 energies beyond 10 eV" in render(summary)
    assert "… and 2180 more" in render(summary)
    assert (summary["kind"], summary["bytes"]) == ("in memory", None)


def _system(y: float, sid: int) -> Structures:
    """One atom in a box."""
    return Structures.single(
        [29], [[0.0, 0.0, 0.0]], cell=9 * np.eye(3), pbc=True, tags=[2], energy=y, sid=sid
    )


def test_control_characters_do_not_reach_the_terminal(make_record: Any, write_lmdb: Any) -> None:
    record = make_record(sid="\x1b[2J\n", y_relaxed=99.0, **{"\x1b]0;": 1})
    text = render(summarise(open_dataset(write_lmdb({0: record, 1: record}))))
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2J\\n" in text


def test_targets_under_other_names(make_record: Any, write_lmdb: Any) -> None:
    path = write_lmdb({0: make_record(y_relaxed=..., e_ads=-2.5), 1: make_record(sid=2)})
    summary = summarise(open_dataset(path, energy="e_ads"))
    assert summary["energy"]["min"] == -2.5
    assert summary["missing"] == {"e_ads": 1}


def test_shards(make_record: Any, write_lmdb: Any, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for i in range(2):
        write_lmdb({0: make_record(sid=i)}, tmp_path / "all" / f"data.{i}.lmdb")
    summary = summarise(open_dataset(tmp_path / "all"))
    assert summary["kind"] == "2 × LMDB of pickles with torch tensors"
    files = (tmp_path / "all").iterdir()
    assert summary["bytes"] == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("missing", [[], [0], [63, 64], [*range(60, 140)], [*range(150)]])
def test_energies_beside_systems_that_have_none(
    missing: list[int], make_record: Any, write_lmdb: Any
) -> None:
    """Those in the same batch as a system without target are counted all the same."""
    values = {i: make_record(sid=i, y_relaxed=-float(i)) for i in range(150)}
    for number, i in enumerate(missing):
        values[i] = make_record(sid=i, y_relaxed=(..., None)[number % 2])
    dataset = open_dataset(write_lmdb(values))
    in_memory = MemoryDataset([dataset[i] for i in range(150)])
    slow = summarise(_OneByOne(dataset))
    for given in (dataset, in_memory, _Batches(dataset)):
        summary = summarise(given)
        assert (summary["energy"] or {"count": 0})["count"] == 150 - len(missing)
        for name in ("energy", "outliers", "counts", "atoms", "elements", "problems"):
            assert summary[name] == slow[name], name
    ignoring = summarise(open_dataset(dataset.path, ignore_energy=True))
    assert ignoring["energy"] is None
    assert ignoring["atoms"] == slow["atoms"]


class _Batches(_OneByOne):
    """A data set of which nothing is known but its systems, which come in batches, too."""

    def batch(self, indices: Any) -> Any:
        return self.dataset.batch(indices)
