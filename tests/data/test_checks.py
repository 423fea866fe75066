"""What looks wrong in valid systems, by kind and sid."""

import numpy as np
import pytest
import torch

from flt_mol.data import convert, open_dataset, split
from flt_mol.data.checks import Unusual
from flt_mol.data.conversion import drop_systems
from flt_mol.data.inspection import inspect
from flt_mol.structures import Structures
from helpers.systems import make_record, make_system, write_records


def messages(*systems, reference=None):
    unusual = Unusual()
    for system in systems:
        unusual.add(system)
        unusual.add_energies(system, reference)
    return unusual.messages()


def with_energies(*energies):
    return [make_system(f"s{i}", energy=energy) for i, energy in enumerate(energies)]


def test_sound_systems_have_no_message():
    assert not messages(*with_energies(-9.9, 0.3, 9.9), make_system("none", energy=None))


@pytest.mark.parametrize("tag", [0, 1, 2])
def test_tags_that_are_all_alike(tag):
    alike = make_system("bulk", tags=[tag] * 5)
    (text,) = messages(make_system(1), Structures.cat([alike, make_system(2)]))
    assert f"all tags are {tag} in 1 of 3 structures (bulk)" in text
    (text,) = messages(alike, make_system("two", tags=[2] * 5), make_system(1))
    assert ("0 or 2" in text) == (tag == 0)
    assert "2 of 3" in text
    (text,) = messages(alike, alike)
    assert "2 of 2 structures (bulk)" in text


@pytest.mark.parametrize(
    ("energies", "first", "count"),
    [
        ((0.0, 0.1, 0.2, 0.3, -350.0, 0.5), "s4: -350 eV", 1),
        ((109.0, 147.0, 112.0), "s1: 147 eV", 3),  # a wrong reference
        ((-21.0, -68000.0, -22.0, -23.0), "s1: -68000 eV", 4),
        ((-400.0, -0.5, -420.0, -0.7), "s2: -420 eV", 2),
    ],
)
def test_energies_that_are_no_adsorption_energies(energies, first, count):
    (text,) = messages(*with_energies(*energies))
    assert f"{count} of {len(energies)} structures ({first}" in text


def test_total_energies_less_those_of_their_elements():
    def ten_per_atom(batch):
        return 10.0 * batch.natoms.double()

    assert not messages(*with_energies(49.0, 51.0, 59.0), reference=ten_per_atom)
    (text,) = messages(*with_energies(49.0, 51.0, -1.0), reference=ten_per_atom)
    assert "1 of 3 structures (s2: -51 eV)" in text


def test_atoms_on_one_site_periodic_images_included():
    apart = make_system("apart", tags=[0, 1], atoms=2, fixed=[0, 0], positions_relaxed=None)
    cell = apart.cell[0]
    for shift, close in ((cell[0] + 0.1, True), (cell[0] + 0.3, False), (cell[2] + 0.1, False)):
        positions = torch.stack([torch.ones(3), torch.ones(3) + shift])
        assert bool(messages(apart.moved(positions))) == close  # not periodic along c


def test_no_cell():
    (text,) = messages(make_system("gas", cell=np.zeros((3, 3)), pbc=False))
    assert "no cell in 1 of 1 structures (gas)" in text


def test_one_check_wherever_data_enter(tmp_path):
    records = [make_record(i) for i in range(6)]
    records[4]["y_relaxed"] = -350.0
    records[5]["tags"] = np.ones(12)
    path = write_records(tmp_path / "a.lmdb", records)
    for use in (
        inspect,
        lambda source: convert(source, tmp_path / "b.safetensors"),
        lambda source: split(source, tmp_path / "parts", {"train": 0.5, "val": 0.5}),
    ):
        with pytest.warns(UserWarning, match="of 6") as caught:
            use(open_dataset(path))
        texts = sorted(str(warning.message) for warning in caught)
        assert len(texts) == 2
        assert "all tags are 1 in 1 of 6 structures (5)" in texts[0]
        assert "1 of 6 structures (4: -350 eV)" in texts[1]


def test_systems_are_left_out_by_sid_and_energy(tmp_path):
    records = [make_record(i) for i in range(6)]
    records[4]["y_relaxed"] = -350.0
    del records[3]["y_relaxed"]
    path = write_records(tmp_path / "a.lmdb", records)
    source = open_dataset(path)
    assert drop_systems(source, ["1"], 10.0) == ["1", "4"]
    assert [system.sid[0] for system in source] == [0, 2, 3, 5]
    assert convert(source, tmp_path / "b.safetensors").systems == 4
    with pytest.raises(ValueError, match="77"):
        drop_systems(open_dataset(path), [1, 77])
