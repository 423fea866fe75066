"""Conversions keep every system; nothing but a whole file ever has the output's name."""

import errno
import os
import subprocess
from dataclasses import replace

import ase.io
import numpy as np
import pytest
import torch

from flt_mol.data import convert, from_trajectories, open_dataset, split
from flt_mol.data.conversion import SUFFIXES, readable_batches
from helpers.systems import make_record, make_system, same, write_records


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    records = [make_record(i, 5 + i % 6, graph=True) for i in range(12)]
    return open_dataset(write_records(tmp_path / "in" / "a.lmdb", records))


def alike(a, b, suffix):
    """Bit for bit, but for eight decimals of positions in .extxyz."""
    if suffix != ".extxyz":
        return same(a, b)
    for x, y in ((a.positions, b.positions), (a.positions_relaxed, b.positions_relaxed)):
        if x is not None and not torch.allclose(x, y, rtol=0, atol=1e-8):
            return False
    fields = ("atomic_numbers", "tags", "fixed", "cell", "pbc", "energy", "energy_initial")
    numbers = all(torch.equal(getattr(a, f), getattr(b, f)) for f in fields)
    return numbers and a.sid == b.sid and a.info == b.info


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_system_comes_back(suffix, source, tmp_path):
    done = []
    result = convert(
        source, tmp_path / f"b{suffix}", progress=lambda n, total: done.append((n, total))
    )
    back = open_dataset(tmp_path / f"b{suffix}")
    assert alike(source.batch(range(12)), back.batch(range(12)), suffix)
    assert result.systems == 12
    assert result.bytes == (tmp_path / f"b{suffix}").stat().st_size
    assert done[-1] == (24, 24)
    assert sorted(os.listdir(tmp_path)) == [f"b{suffix}", "in"]


def test_oc20s_own_records(oc20_data, tmp_path):
    source = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb")
    result = convert(source, tmp_path / "a.safetensors")
    assert result.bytes_per_system <= 2600
    assert same(source.batch(range(20)), open_dataset(result.output).batch(range(20)))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_bytes_each_time(suffix, source, tmp_path):
    for name in ("b", "c"):
        convert(source, tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"b{suffix}").read_bytes() == (tmp_path / f"c{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_some_systems_in_another_order(suffix, source, tmp_path):
    convert(source, tmp_path / f"b{suffix}", indices=[7, 2, 11])
    assert open_dataset(tmp_path / f"b{suffix}").batch([0, 1, 2]).sid == (7, 2, 11)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_targets_by_other_names_get_those_of_oc20(suffix, tmp_path):
    record = make_record(1)
    record["e_ads"] = record.pop("y_relaxed")
    record["relaxed"] = record.pop("pos_relaxed")
    path = write_records(tmp_path / "a.lmdb", [record])
    named = open_dataset(path, energy="e_ads", positions_relaxed="relaxed")
    convert(named, tmp_path / f"b{suffix}")
    back = open_dataset(tmp_path / f"b{suffix}")
    assert back[0].energy.item() == record["e_ads"]
    assert alike(named[0], back[0], suffix)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_some_without_targets(suffix, tmp_path):
    records = [make_record(i) for i in range(5)]
    del records[2]["y_relaxed"], records[3]["pos_relaxed"]
    source = open_dataset(write_records(tmp_path / "a.lmdb", records))
    convert(source, tmp_path / f"b{suffix}")
    back = open_dataset(tmp_path / f"b{suffix}")
    assert [s.energy is None for s in back] == [False, False, True, False, False]
    assert [s.positions_relaxed is None for s in back] == [False, False, False, True, False]


TEXTS = [
    "007",
    "T",
    "1e5",
    "a b",
    "é ü",
    'say "x"',
    "back\\slash",
    "1 2",
    "_JSON",
    "nan",
    "line\nend",
]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_and_texts_stay_as_they_are(suffix, tmp_path):
    info = {"text": "", "flag": True, "number": 3, "real": 0.1, "list": [1, 2], "texts": ["a", "1"]}
    systems = [make_system(text, info={**info, "text": text}) for text in TEXTS]
    source = open_dataset(systems)
    convert(source, tmp_path / f"b{suffix}")
    back = open_dataset(tmp_path / f"b{suffix}").batch(range(len(TEXTS)))
    assert back.sid == tuple(TEXTS)
    assert back.info == source.batch(range(len(TEXTS))).info


def test_ase_reads_what_was_written(source, tmp_path):
    convert(source, tmp_path / "b.extxyz")
    frames = ase.io.read(tmp_path / "b.extxyz", ":")
    assert len(frames) == 12
    system = source[4]
    assert frames[4].info["sid"] == 4
    assert frames[4].info["y_relaxed"] == system.energy.item()
    assert frames[4].get_tags().tolist() == system.tags.tolist()
    assert set(frames[4].constraints[0].index) == set(system.fixed.nonzero().flatten().tolist())
    np.testing.assert_allclose(frames[4].arrays["pos_relaxed"], system.positions_relaxed, atol=1e-8)


def test_what_a_kind_of_file_does_not_keep_is_named(tmp_path):
    source = open_dataset([make_system(3, info={"energy": 0.5})])
    with pytest.raises(ValueError, match=r"info.*extxyz"):
        convert(source, tmp_path / "b.extxyz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_invalid_records(suffix, tmp_path):
    records = [make_record(i) for i in range(5)]
    records[2]["pos"] = records[2]["pos"][:-1]
    path = write_records(tmp_path / "a.lmdb", [*records, b"\x80junk"])
    source = open_dataset(path)
    with pytest.raises(ValueError, match="key 2"):
        convert(source, tmp_path / f"b{suffix}")
    assert not (tmp_path / f"b{suffix}").exists()
    result = convert(open_dataset(path, on_error="skip"), tmp_path / f"b{suffix}")
    assert result.systems == 4
    assert ["key 2" in result.skipped[0], "key 5" in result.skipped[1]] == [True, True]
    assert [s.sid[0] for s in open_dataset(tmp_path / f"b{suffix}")] == [0, 1, 3, 4]


def test_nothing_to_convert(source, tmp_path):
    with pytest.raises(ValueError, match="no records"):
        convert(source, tmp_path / "b.safetensors", indices=[])
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_outputs_that_are_refused(source, tmp_path):
    for name in ("b.lmdb", "b.cif", "b"):
        with pytest.raises(ValueError, match=name):
            convert(source, tmp_path / name)
    (tmp_path / "c.safetensors").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"c\.safetensors exists"):
        convert(source, tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == b"mine"
    convert(source, tmp_path / "c.safetensors", overwrite=True)
    assert len(open_dataset(tmp_path / "c.safetensors")) == 12
    (tmp_path / "d.extxyz").mkdir()
    with pytest.raises(ValueError, match=r"d\.extxyz exists"):
        convert(source, tmp_path / "d.extxyz", overwrite=True)


def test_onto_itself(source, tmp_path):
    path = tmp_path / "b.safetensors"
    convert(source, path)
    before = path.read_bytes()
    convert(open_dataset(path), path, overwrite=True)
    assert same(open_dataset(path).batch(range(12)), source.batch(range(12)))
    assert len(path.read_bytes()) <= len(before) + 64


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_writer_that_lies_is_found_out(suffix, source, tmp_path, monkeypatch):
    from flt_mol.data import conversion

    def wrong(batches, path):
        right((_other(batch) for batch in batches), path)

    right = conversion._WRITERS[suffix]
    monkeypatch.setitem(conversion._WRITERS, suffix, wrong)
    with pytest.raises(ValueError, match="energy is not preserved"):
        convert(source, tmp_path / f"b{suffix}")
    assert sorted(os.listdir(tmp_path)) == ["in"]


def _other(batch):
    energy = batch.energy.clone()
    energy[-1] += 1e-9
    return replace(batch, energy=energy)


def test_a_full_disk(source, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flt_mol.data.flat.save_file", full)
    with pytest.raises(OSError, match="No space"):
        convert(source, tmp_path / "b.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_leftovers_of_killed_processes_are_removed(source, tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    gone = tmp_path / f".b.safetensors.{dead.pid}.tmp.safetensors"
    running = tmp_path / f".b.safetensors.{os.getppid()}.tmp.safetensors"
    folder = tmp_path / f".c.{dead.pid}.tmp"
    folder.mkdir()
    for path in (gone, running, folder / "x"):
        path.write_bytes(b"half")
    convert(source, tmp_path / "b.safetensors")
    split(source, tmp_path / "c", {"all": 12})
    assert not gone.exists()
    assert running.exists()
    assert not folder.exists()


def test_trajectories(tmp_path):
    from ase.build import fcc111
    from ase.calculators.singlepoint import SinglePointCalculator

    frames = []
    for energy in (-10.0, -12.5):
        frames.append(fcc111("Cu", (2, 2, 3), vacuum=8.0))
        frames[-1].set_tags([0] * 8 + [1] * 4)
        frames[-1].positions[-1, 2] += 0.1 * energy / 10
        frames[-1].calc = SinglePointCalculator(frames[-1], energy=energy, forces=np.zeros((12, 3)))
    (tmp_path / "in").mkdir()
    ase.io.write(tmp_path / "in" / "0001.traj", frames)
    source = from_trajectories(tmp_path / "in", references={"0001": -11.0})
    for suffix in SUFFIXES:
        convert(source, tmp_path / f"b{suffix}")
        back = open_dataset(tmp_path / f"b{suffix}")[0]
        assert back.sid == ("0001",)
        assert back.energy.item() == pytest.approx(-1.5)
        assert back.energy_initial.item() == pytest.approx(1.0)


def test_batches_of_mixed_records(tmp_path):
    records = [make_record(i) for i in range(4)]
    del records[1]["y_relaxed"]
    source = open_dataset(write_records(tmp_path / "a.lmdb", records))
    found = list(readable_batches(source, [0, 1, 3]))
    assert [rows for rows, _ in found] == [[0], [1], [3]]
    assert [batch.energy is None for _, batch in found] == [False, True, False]
