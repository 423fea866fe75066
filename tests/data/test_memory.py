"""Structures that are in memory already."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, fcc111, molecule
from ase.calculators.emt import EMT

from flt_mol.data import from_ase, open_dataset, to_ase
from flt_mol.data.loader import make_loader
from flt_mol.data.memory import MemoryDataset
from flt_mol.data.oc20 import to_structures
from flt_mol.structures import Structures


@pytest.fixture
def slab() -> Atoms:
    atoms = fcc111("Cu", (2, 2, 2), vacuum=8)
    add_adsorbate(atoms, molecule("CO"), 1.9, "ontop")
    atoms.set_tags([0] * 4 + [1] * 4 + [2] * 2)
    atoms.pbc = True
    atoms.info = {"sid": "slab", "y_relaxed": -1.5, "note": "a"}
    return atoms


def test_atoms_alone_and_in_a_list(slab: Atoms) -> None:
    for source in (slab, [slab], (slab, slab)):
        dataset = open_dataset(source, require_energy=True)
        system = dataset[0]
        assert system.sid == ("slab",)
        assert system.energy.tolist() == [-1.5]
        assert system.info == {"note": ("a",)}
        assert torch.equal(system.positions, from_ase(slab).positions)
    assert len(open_dataset((slab, slab))) == 2


def test_a_live_calculator_is_not_run(slab: Atoms) -> None:
    slab.calc = EMT()
    assert open_dataset(slab)[0].info == {"note": ("a",)}
    assert slab.calc.results == {}
    energy = slab.get_potential_energy()
    asked = open_dataset(slab, energy="calculator", require_energy=True)
    assert asked[0].energy.tolist() == [pytest.approx(energy)]
    slab.positions[0] += 0.1  # what it found is of other positions
    with pytest.raises(ValueError, match="calculator was asked for, and is not stored"):
        open_dataset(slab, energy="calculator")[0]


def test_structures_come_back_as_they_are(slab: Atoms, make_record: Any) -> None:
    batch = Structures.cat([from_ase(slab, sid=3), to_structures(make_record(), where="")])
    for source in (batch, [batch], [batch[0], batch[1]], batch[0]):
        dataset = open_dataset(source)
        for system, given in zip(dataset, batch, strict=False):
            for name in ("positions", "cell", "pbc", "tags", "fixed", "atomic_numbers", "energy"):
                assert torch.equal(getattr(system, name), getattr(given, name))
            assert system.sid == given.sid
            assert system.info == {k: v for k, v in given.info.items() if v != (None,)}
            assert (system.positions_relaxed is None) == (given.positions_relaxed is None)
    assert len(open_dataset([batch, batch[0]])) == 3


def test_mappings_and_mixtures(slab: Atoms, make_record: Any) -> None:
    dataset = open_dataset([make_record(), slab, from_ase(slab, sid=7), make_record(sid=5)])
    assert [system.sid[0] for system in dataset] == [101, "slab", 7, 5]
    assert dataset.natoms().tolist() == [6, 10, 10, 6]
    assert open_dataset(make_record())[0].sid == (101,)


def test_anything_with_length_and_places_is_read_when_asked(make_record: Any) -> None:
    fetched: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            fetched.append(index)
            return make_record(sid=index) if index < 3 else Structures.cat([system, system])

    system = to_structures(make_record(), where="")
    dataset = open_dataset(Lazy())
    assert fetched == [0]
    assert dataset[2].sid == (2,)
    assert fetched == [0, 2]
    with pytest.raises(ValueError, match="Lazy in memory, system 3: it holds 2 systems"):
        dataset[3]
    assert len(open_dataset(Lazy(), on_error="skip")) == 3


def test_other_data_sets_and_iterators(slab: Atoms, write_lmdb: Any, make_record: Any) -> None:
    stored = open_dataset(write_lmdb({i: make_record(sid=i) for i in range(3)}))
    assert [s.sid[0] for s in open_dataset(torch.utils.data.Subset(stored, [2, 0]))] == [2, 0]

    def frames() -> Iterator[Atoms]:
        yield slab
        yield slab

    assert len(open_dataset(frames())) == 2
    assert [s.sid[0] for s in open_dataset(make_loader(stored, 2))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (3, "a int holds no structures"),
        (None, "a NoneType holds no structures"),
        ([], "it is empty"),
        ([3], "list of 1 int, place 0: a int holds no structures"),
        (object(), "a object holds no structures"),
        ([[Atoms("H")]], "place 0: a list holds no structures"),
        ("nowhere.traj", "does not exist"),
    ],
)
def test_what_is_no_source(source: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        open_dataset(source)


def test_bad_objects_are_named_or_skipped(slab: Atoms, make_record: Any) -> None:
    slab.info["y_relaxed"] = float("nan")
    source = [make_record(), slab, "text", make_record(sid=3, pos=torch.zeros(2, 3))]
    with pytest.raises(ValueError, match="list of 4 dict, place 2: a str"):
        open_dataset(source)
    dataset = open_dataset(source, on_error="skip")
    assert [system.sid[0] for system in dataset] == [101]
    assert [
        told in message
        for told, message in zip(
            ("place 2", "sid slab: y_relaxed is nan", "sid 3: pos"), dataset.skipped, strict=True
        )
    ] == [True] * 3
    with pytest.raises(ValueError, match=r"list of 2 dict, system 1, sid 3: pos has shape"):
        list(open_dataset([source[0], source[3]]))


def test_defaults_warn_once(make_record: Any) -> None:
    source = [make_record(sid=..., tags=...) for _ in range(3)]
    with pytest.warns(UserWarning, match=r"list of 3 dict: no sid.*no tags") as caught:
        systems = list(open_dataset(source))
    assert [system.sid[0] for system in systems] == [0, 1, 2]
    assert len(caught) == 1


def test_pickled_and_after_to_ase(slab: Atoms) -> None:
    dataset = MemoryDataset([slab, to_ase(from_ase(slab, sid=8))], name="two slabs")
    again = pickle.loads(pickle.dumps(dataset))
    assert [system.sid[0] for system in again] == ["slab", 8]
    assert str(again.path) == "two slabs"
