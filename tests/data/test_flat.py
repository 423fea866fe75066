"""Flat files: what is written is read, in any order, and what is damaged is named."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from flt_mol.data import FlatDataset, make_loader, open_dataset
from flt_mol.data.flat import write_flat
from flt_mol.structures import Structures
from helpers.systems import make_system, make_systems, same

INFO = {"adsorbate": "CO", "slab": 7, "weight": 0.1, "index": [1, 2]}


def about(**content):
    return {"flt_mol.flat": json.dumps(content)}


@pytest.fixture
def systems():
    return [make_system(i, 3 + i % 5, info={**INFO, "slab": i}) for i in range(20)]


@pytest.fixture
def path(tmp_path, systems):
    write_flat([Structures.cat(systems[:13]), *systems[13:]], tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_arrays_by_columns(tmp_path):
    system = make_system(0)
    columns = replace(system, positions=system.positions.t().contiguous().t())
    assert not columns.positions.is_contiguous()
    write_flat([columns], tmp_path / "a.safetensors")
    assert same(open_dataset(tmp_path / "a.safetensors")[0], system)


def test_every_system_comes_back(path, systems):
    dataset = open_dataset(path)
    assert isinstance(dataset, FlatDataset)
    assert len(dataset) == 20
    assert dataset.natoms().tolist() == [len(s.tags) for s in systems]
    for rows in ([3], [0, 1, 2], [19, 4, 4, 0], list(range(20)), [-1]):
        assert same(dataset.batch(rows), Structures.cat([systems[i] for i in rows]))


def test_the_general_decoder_reads_the_same(path, systems):
    dataset = open_dataset(path)
    slow = super(FlatDataset, dataset)._systems([5, 2, 9], {})
    assert same(slow, dataset.batch([5, 2, 9]))
    assert dataset.record(2)["y_relaxed"] == systems[2].energy.item()


def test_types_in_the_file(path):
    tensors = load_file(path)
    kinds = {name: str(tensor.dtype) for name, tensor in tensors.items()}
    assert kinds == {
        "ptr": "int64", "sid": "int64", "atomic_numbers": "uint8", "tags": "uint8",
        "fixed": "bool", "pbc": "bool", "positions": "float32", "positions_relaxed": "float32",
        "cell": "float32", "energy": "float64", "energy_initial": "float64", "info": "uint8",
        "info_ptr": "int64",
    }  # fmt: skip


def test_bytes_of_a_system_like_those_of_oc20(tmp_path):
    write_flat([make_system(i, 78) for i in range(50)], tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size / 50 <= 2600


def test_optional_targets_are_missing_where_one_system_lacks_them(tmp_path):
    lacking = make_system(1, energy=None, positions_relaxed=None)
    write_flat([make_system(0), lacking], tmp_path / "a.safetensors")
    dataset = open_dataset(tmp_path / "a.safetensors")
    assert dataset[0].energy is not None
    assert dataset[1].energy is None
    both = dataset.batch([0, 1])
    assert both.energy is None
    assert both.positions_relaxed is None
    assert both.energy_initial is not None
    with pytest.raises(ValueError, match="y_relaxed"):
        open_dataset(tmp_path / "a.safetensors", require_energy=True).batch([0, 1])
    assert dataset.record(1).get("y_relaxed") is None


def test_options(path, systems):
    assert open_dataset(path, ignore_energy=True).batch([0, 1]).energy is None
    other = open_dataset(path, energy="weight").batch([0, 1])
    assert other.energy.tolist() == [0.1, 0.1]
    assert open_dataset(path, energy="y_init")[3].energy == systems[3].energy_initial

    def check(structures):
        if 4 in structures.sid:
            raise ValueError("sid 4 is not welcome")

    skipped = open_dataset(path, on_error="skip", check=check)
    assert len(skipped) == 19
    assert "sid 4" in skipped.skipped[0]
    assert skipped[4].sid == (5,)


def test_names_of_every_kind(tmp_path):
    names = ["007", 3, "O on Pt", -(2**62)]
    write_flat([Structures.cat([make_system(s) for s in names])], tmp_path / "a.safetensors")
    assert open_dataset(tmp_path / "a.safetensors").batch([3, 0, 1, 2]).sid == (
        -(2**62), "007", 3, "O on Pt",
    )  # fmt: skip


def test_processes_map_the_file_themselves(path, systems):
    dataset = pickle.loads(pickle.dumps(open_dataset(path)))
    assert same(dataset[7], systems[7])
    loader = make_loader(dataset, 6, num_workers=1, multiprocessing_context="fork")
    assert [sid for batch in loader for sid in batch.sid] == list(range(20))


def test_nothing_to_write(tmp_path):
    with pytest.raises(ValueError, match="no systems"):
        write_flat([], tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"sid 5: .*odd"):
        write_flat([make_system(5, info={"odd": object()})], tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_named(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"weight": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match=r"a\.safetensors is not a flat file.*weight"):
        open_dataset(path)
    for content in (b"", b"12345", b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.safetensors"):
            open_dataset(path)


def test_truncated_anywhere(path):
    content = path.read_bytes()
    for size in np.linspace(0, len(content) - 1, 40).astype(int).tolist():
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"a\.safetensors"):
            open_dataset(path)


DAMAGE = {
    "ptr": lambda t: np.add(t, [0] * 10 + [50] + [0] * 10, dtype=np.int64),
    "positions": lambda t: t[:-1],
    "energy": lambda t: t[:-1],
    "cell": lambda t: t.reshape(-1, 9),
    "tags": lambda t: t.astype(np.int64),
    "info_ptr": lambda t: t[::-1].copy(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_lengths_that_do_not_belong_together(name, path):
    tensors = load_file(path)
    tensors[name] = DAMAGE[name](tensors[name])
    save_file(tensors, path, metadata=about(version=1))
    with pytest.raises(ValueError, match=r"a\.safetensors.*" + name):
        open_dataset(path)


@pytest.mark.parametrize("name", ["ptr", "positions", "tags"])
def test_missing_tensors(name, path):
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata=about(version=1))
    with pytest.raises(ValueError, match=r"a\.safetensors.*" + name):
        open_dataset(path)


def test_missing_names(path):
    tensors = load_file(path)
    del tensors["sid"]
    save_file(tensors, path, metadata=about(version=1))
    with pytest.raises(ValueError, match="system 3.*no sid"):
        open_dataset(path)[3]
    del tensors["info"], tensors["info_ptr"]
    save_file(tensors, path, metadata=about(version=1))
    with pytest.raises(ValueError, match=r"a\.safetensors.*info"):
        open_dataset(path)


def test_newer_versions(path):
    tensors = load_file(path)
    save_file(tensors, path, metadata=about(version=2))
    with pytest.raises(ValueError, match="newer"):
        open_dataset(path)
    save_file({**tensors, "further": np.zeros(3)}, path, metadata=about(version=1))
    assert len(open_dataset(path)) == 20  # tensors that are not known do no harm


VALUES = {
    "atomic_numbers": (0, "atomic_numbers"),
    "tags": (7, "tags"),
    "positions": (np.nan, "pos"),
}


@pytest.mark.parametrize("name", VALUES)
def test_damaged_values_are_named_when_they_are_read(name, path):
    tensors = load_file(path)
    value, field = VALUES[name]
    tensors[name][tensors["ptr"][6]] = value
    save_file(tensors, path, metadata=about(version=1))
    dataset = open_dataset(path)
    dataset.batch([5, 7])
    with pytest.raises(ValueError, match=rf"system 6.*sid 6.*{field}"):
        dataset.batch([5, 6, 7])
    assert len(open_dataset(path, on_error="skip")) == 19


def test_damaged_texts(path):
    tensors = load_file(path)
    tensors["info"][tensors["info_ptr"][6]] = ord("[")
    save_file(tensors, path, metadata=about(version=1))
    with pytest.raises(ValueError, match="system 6.*info"):
        open_dataset(path)[6]


def test_any_reader_of_safetensors_opens_it(path, systems):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["flt_mol.flat"]) == {"version": 1}
        ptr, energy = file.get_tensor("ptr"), file.get_tensor("energy")
        one = json.loads(bytes(file.get_tensor("info")[: file.get_tensor("info_ptr")[1]].tolist()))
    assert torch.equal(ptr, Structures.cat(systems).ptr)
    assert torch.equal(energy, Structures.cat(systems).energy)
    assert one == {**INFO, "slab": 0}


def test_folders_of_flat_files(tmp_path):
    for i in (10, 2):
        write_flat(make_systems(i), tmp_path / f"part.{i}.safetensors")
    dataset = open_dataset(tmp_path)
    assert len(dataset) == 12
    assert same(dataset.batch([3, 0]), Structures.cat([make_systems(10)[1], make_systems(2)[0]]))
