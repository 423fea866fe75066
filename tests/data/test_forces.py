"""Forces of every kind of file: read on request, with the energy of the same positions."""

import ase.io
import numpy as np
import pytest
import torch
from ase.build import fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

from flt_mol import Structures, open_dataset
from flt_mol.data import convert
from flt_mol.data.conversion import SUFFIXES
from helpers.systems import make_record, write_records

FORCES = [np.full((4, 3), f) for f in (0.5, -1.25, 3.0)]


def frames():
    """Three frames of one relaxation, with the energies −1, −2 and −3."""
    made = []
    for k, forces in enumerate(FORCES):
        atoms = fcc111("Cu", (1, 1, 4), vacuum=5.0)
        atoms.set_tags([0, 0, 1, 2])
        atoms.positions += 0.1 * k
        atoms.info = {"sid": f"frame-{k}"}
        atoms.calc = SinglePointCalculator(atoms, energy=-1.0 - k, forces=forces)
        made.append(atoms)
    return made


def s2ef_records():
    """As OC20 stores frames: y and force, one sid, fid by fid."""
    records = []
    for k in range(3):
        record = {**make_record(7), "fid": torch.tensor([10 * k]), "y": -1.0 - k}
        record["force"] = torch.tensor(record["force"] * (k + 1))
        records.append({n: v for n, v in record.items() if n not in ("y_relaxed", "pos_relaxed")})
    return records


@pytest.mark.parametrize("name", ["a.traj", "a.extxyz", "a.db"])
def test_every_frame_of_ase_is_a_system_with_the_energy_of_its_positions(name, tmp_path):
    ase.io.write(tmp_path / name, frames())
    batch = open_dataset(tmp_path / name, forces=True, require_energy=True).batch(range(3))
    assert batch.energy.tolist() == [-1.0, -2.0, -3.0]
    np.testing.assert_allclose(batch.forces, np.concatenate(FORCES), atol=1e-7)
    plain = open_dataset(tmp_path / name)[0]
    assert plain.forces is None
    assert plain.energy is None


def test_atoms_in_memory():
    batch = open_dataset(frames(), forces=True).batch([2, 0])
    assert batch.energy.tolist() == [-3.0, -1.0]
    assert batch.forces[:, 1].tolist() == [3.0] * 4 + [0.5] * 4
    again = open_dataset(batch, forces=True).batch([1])
    assert again.forces[:, 1].tolist() == [0.5] * 4


def test_s2ef_records_of_oc20(tmp_path):
    path = write_records(tmp_path / "a.lmdb", s2ef_records())
    batch = open_dataset(path, forces=True).batch(range(3))
    assert batch.energy.tolist() == [-1.0, -2.0, -3.0]
    assert batch.sid == ("7#0", "7#10", "7#20")
    expected = np.concatenate([record["force"] for record in s2ef_records()])
    np.testing.assert_array_equal(batch.forces, expected)
    named = open_dataset(path, forces=True, energy="y_init")[1]
    assert named.energy.item() == s2ef_records()[1]["y_init"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_converted_with_forces(suffix, tmp_path):
    source = open_dataset(write_records(tmp_path / "a.lmdb", s2ef_records()), forces=True)
    convert(source, tmp_path / f"b{suffix}")
    back = open_dataset(tmp_path / f"b{suffix}", forces=True).batch([2, 0, 1])
    wanted = source.batch([2, 0, 1])
    assert back.sid == wanted.sid
    assert back.energy.tolist() == wanted.energy.tolist()
    torch.testing.assert_close(back.forces, wanted.forces, atol=1e-8, rtol=0)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_unknown_forces_are_nan(suffix, tmp_path):
    records = s2ef_records()
    del records[1]["force"]
    source = open_dataset(write_records(tmp_path / "a.lmdb", records), forces=True)
    convert(source, tmp_path / f"b{suffix}")
    for dataset in (source, open_dataset(tmp_path / f"b{suffix}", forces=True)):
        batch = dataset.batch(range(3))
        unknown = batch.forces.isnan().all(1)
        assert torch.equal(unknown, batch.system == 1)
        assert dataset[1].forces.isnan().all()


@pytest.mark.parametrize(
    ("force", "message"),
    [
        (np.zeros((5, 3)), r"force has shape \(5, 3\)"),
        (np.full((12, 3), np.inf), "force of atom 0"),
    ],
)
def test_invalid_forces_matter_only_where_they_are_read(force, message, tmp_path):
    path = write_records(tmp_path / "a.lmdb", [{**make_record(1), "force": force}])
    with pytest.raises(ValueError, match=message):
        open_dataset(path, forces=True)[0]
    assert len(open_dataset(path)[0]) == 1


def test_forces_of_a_calculator_that_has_not_been_asked_are_unknown():
    atoms = fcc111("Cu", (1, 1, 2), vacuum=5.0)
    atoms.set_tags([0, 1])
    atoms.info = {"sid": 1}
    atoms.calc = EMT()
    assert open_dataset(atoms, forces=True)[0].forces.isnan().all()
    forces = atoms.get_forces()
    found = open_dataset(atoms, forces=True)[0]
    np.testing.assert_array_equal(found.forces, forces.astype(np.float32))
    assert isinstance(found, Structures)
