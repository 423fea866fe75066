import csv
import json
import warnings

import ase.io
import numpy as np
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from slabs import ByHand, platinum

from flt_mol.data import from_trajectories, open_dataset
from flt_mol.data.tags import tag_structures
from flt_mol.prediction import Prediction, predict_files, write_predictions
from flt_mol.prediction.energies import open_quietly
from flt_mol.prediction.table import write_embeddings


@pytest.fixture
def stored(tmp_path):
    """Frames with targets and further values, one far from the origin, in two files."""
    frames = [platinum() for _ in range(3)]
    for place, atoms in enumerate(frames):
        atoms.numbers[0] = 28 + place
        atoms.info = {"sid": f"slab {2 - place}", "y_relaxed": -1.5, "facet": "111"}
        atoms.set_constraint(FixAtoms([0, 5]))
        atoms.arrays["pos_relaxed"] = atoms.positions + 0.1
    frames[1].positions += 1000 + 1 / 3
    frames[2].pbc = [True, True, False]
    ase.io.write(tmp_path / "a.traj", frames[:2])
    ase.io.write(tmp_path / "b.traj", frames[2])
    return frames, [tmp_path / "a.traj", tmp_path / "b.traj"]


def by_hand(atoms):
    return float(atoms.numbers.sum() + 100 * atoms.get_tags().sum())


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_each_energy_stays_with_its_sid_and_file(stored, batch_size):
    frames, files = stored
    steps = []
    found = predict_files(
        ByHand(), files, batch_size, progress=lambda done, total: steps.append((done, total))
    )
    assert [(p.name, p.energy) for p in found] == [(x.info["sid"], by_hand(x)) for x in frames]
    assert [p.file for p in found] == [str(files[0])] * 2 + [str(files[1])]
    assert steps[-1] == (3, 3)
    assert all(p.std is None for p in found)


def test_ensembles_have_mean_and_standard_deviation(stored):
    frames, files = stored
    (first, *_) = predict_files([ByHand(1.0), ByHand(3.0)], files)
    assert first.energy == 2 * by_hand(frames[0])
    assert first.std == pytest.approx(np.sqrt(2) * by_hand(frames[0]))


@pytest.mark.parametrize("std", [None, 0.25])
def test_numbers_read_back_exactly(tmp_path, std):
    energy = -1 / 3
    predictions = [Prediction("a,b", energy, "x\udcff.traj", std)]
    write_predictions(predictions, tmp_path / "p.csv")
    write_predictions(predictions, tmp_path / "p.json")
    with open(tmp_path / "p.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    (entry,) = json.loads((tmp_path / "p.json").read_text())
    assert list(row) == list(entry)
    assert ("std" in row) == (std is not None)
    assert (row["sid"], float(row["energy"])) == ("a,b", energy)
    assert entry["energy"] == energy


def test_structures_come_back_with_their_energies(stored, tmp_path):
    frames, files = stored
    path = write_predictions(predict_files(ByHand(), files), tmp_path / "new" / "out.extxyz")
    back = ase.io.read(path, ":")
    assert len(back) == len(frames)
    for atoms, one in zip(frames, back, strict=True):
        np.testing.assert_allclose(one.positions, atoms.positions, atol=1e-7)
        for name in ("numbers", "tags"):
            np.testing.assert_array_equal(one.arrays[name], atoms.arrays[name])
        np.testing.assert_allclose(one.cell, atoms.cell, atol=1e-5)
        np.testing.assert_array_equal(one.pbc, atoms.pbc)
        assert one.constraints[0].index.tolist() == [0, 5]
        assert one.info["sid"] == atoms.info["sid"]
        assert one.info["energy_predicted"] == by_hand(atoms)
        assert "y_relaxed" not in one.info
        assert one.calc is None
    assert open_dataset(path)[0].energy is None  # a prediction is not a target
    assert [file.name for file in path.parent.iterdir()] == ["out.extxyz"]


class Pulled(ByHand):
    """Forces of the atomic number along each axis, displacements of 1 Å, times the scale."""

    def forward(self, structures):
        out = super().forward(structures)
        energy = out["energy"] if isinstance(out, dict) else out
        forces = structures.positions * 0 + structures.atomic_numbers[:, None].float()
        moved = torch.full_like(forces, self.scale)
        embeddings = energy.float()[:, None] * torch.tensor([1.0, 2.0])
        found = {"forces": forces * self.scale, "displacement": moved}
        return {"energy": energy, **found, "system_embeddings": embeddings}


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_forces_and_relaxed_positions_are_written_with_their_structures(
    stored, tmp_path, batch_size
):
    frames, files = stored
    members = [Pulled(1.0), Pulled(3.0)]
    found = predict_files(members, files, batch_size, outputs=["forces"])
    back = ase.io.read(write_predictions(found, tmp_path / "forces.extxyz"), ":")
    for atoms, one, p in zip(frames, back, found, strict=True):
        expected = np.repeat(2.0 * atoms.numbers[:, None], 3, 1)
        np.testing.assert_allclose(one.get_forces(apply_constraint=False), expected)
        assert one.get_potential_energy() == one.info["energy_predicted"] == p.energy
        np.testing.assert_allclose(one.positions, atoms.positions, atol=1e-7)
    found = predict_files(members, files, batch_size, outputs=["displacement"])
    back = ase.io.read(write_predictions(found, tmp_path / "relaxed.extxyz"), ":")
    for atoms, one in zip(frames, back, strict=True):
        np.testing.assert_allclose(one.positions, atoms.positions + 2.0, atol=1e-7)
        assert one.calc is None


def test_embeddings_are_written_with_their_sids(stored, tmp_path):
    model = Pulled(2.0)
    model.forward = lambda structures, embeddings=False: Pulled.forward(model, structures)
    found = predict_files(model, stored[1], 2, outputs=["system_embeddings"])
    with np.load(write_embeddings(found, tmp_path / "x.npz"), allow_pickle=False) as file:
        assert file["sid"].tolist() == [p.name for p in found]
        np.testing.assert_allclose(file["embeddings"][:, 0], [p.energy for p in found])
        assert file["embeddings"].dtype == np.float32


def test_predictions_of_other_structures_are_refused(stored, tmp_path):
    predictions = predict_files(ByHand(), stored[1])
    for wrong in (predictions[::-1], [*predictions, predictions[0]]):
        with pytest.raises(ValueError, match="slab"):
            write_predictions(wrong, tmp_path / "out.extxyz", open_dataset(stored[1]))
    with pytest.raises(ValueError, match="slab"):
        write_predictions(predictions, tmp_path / "out.extxyz", open_dataset(stored[1][:1]))
    assert not (tmp_path / "out.extxyz").exists()
    with pytest.raises(ValueError, match=r"out\.txt"):
        write_predictions(predictions, tmp_path / "out.txt")


def test_files_that_cannot_be_read_are_named(stored, tmp_path):
    (tmp_path / "bad.traj").write_bytes(b"nothing")
    for name in ("bad.traj", "none.traj"):
        with pytest.raises(ValueError, match=name):
            predict_files(ByHand(), [stored[1][0], tmp_path / name])


def invalid(path):
    """Two sound frames around one without a number for each position."""
    frames = [platinum(), platinum(), platinum()]
    frames[1].positions[0] = np.nan
    for place, atoms in enumerate(frames):
        atoms.info["sid"] = place
    ase.io.write(path, frames)
    return path


def test_invalid_records_are_refused_before_the_work_or_skipped(tmp_path):
    path, model = invalid(tmp_path / "x.extxyz"), ByHand()
    with pytest.raises(ValueError, match="sid 1"):
        predict_files(model, path)
    assert model.calls == 0
    with pytest.warns(UserWarning, match=r"skipped 1 of 3(.|\n)*sid 1"):
        found = predict_files(model, open_quietly(path, on_error="skip"))
    assert [p.name for p in found] == ["0", "2"]


@pytest.mark.parametrize("sid", ["slab 1", "slab 0"])  # one of two in a file, and one alone
def test_structures_that_cannot_be_tagged_are_refused_or_skipped(stored, sid):
    def tag(one):
        if sid in one.sid:
            raise ValueError(f"{sid}: no")
        return one

    with pytest.raises(ValueError, match=f"{sid}: no"):
        open_dataset(stored[1], tag_slab=tag)
    files = open_dataset(stored[1], tag_slab=tag, on_error="skip")
    assert len(files.skipped) == 1
    assert f"{sid}: no" in files.skipped[0]
    names = [atoms.info["sid"] for atoms in stored[0]]
    assert [p.name for p in predict_files(ByHand(), files)] == [x for x in names if x != sid]


def test_tags_and_cells_are_warned_of_once_for_all_files(tmp_path):
    for name in "ab":
        ase.io.write(tmp_path / f"{name}.traj", platinum(tags=False))
    with pytest.warns(UserWarning, match="2 of 2 structures") as caught:
        predict_files(ByHand(), [tmp_path / "a.traj", tmp_path / "b.traj"])
    assert len(caught) == 1


def relaxation(path, energies=(-1.0, -2.0, -3.0), sid=None, tags=True):
    """Frames of one slab whose adsorbate moves up; an energy of None is not stored."""
    frames = []
    for step, energy in enumerate(energies):
        atoms = platinum(tags)
        atoms.positions[-2:, 2] += 2 * step
        atoms.info = {} if sid is None else {"sid": sid, "frame_id": step}
        if energy is not None:
            atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=np.zeros((14, 3)))
        frames.append(atoms)
    ase.io.write(path, frames)
    return path


class Height(ByHand):
    """The height of the last atom, Å."""

    def forward(self, structures):
        return structures.positions[structures.ptr[1:] - 1, 2].double()


@pytest.mark.parametrize("suffix", [".traj", ".extxyz"])
def test_the_first_frame_of_a_relaxation_is_taken_with_the_sid_of_convert(tmp_path, suffix):
    paths = [relaxation(tmp_path / f"{name}{suffix}") for name in "ab"]
    height = platinum().positions[-1, 2]
    with pytest.warns(UserWarning, match="2 relaxations: their first frame") as caught:
        found = predict_files(Height(), paths)
    assert len(caught) == 1
    assert [(p.name, p.file) for p in found] == [("a", str(paths[0])), ("b", str(paths[1]))]
    assert [p.energy for p in found] == pytest.approx([height] * 2, abs=1e-5)
    assert from_trajectories(paths, references="none").batch([0, 1]).sid == ("a", "b")
    path = write_predictions(found, tmp_path / "first.extxyz")
    assert [one.positions[-1, 2] for one in ase.io.read(path, ":")] == pytest.approx([height] * 2)


@pytest.mark.parametrize(
    ("frames", "rows", "names"),
    [
        ("first", [0], ["a"]),
        ("last", [2], ["a"]),
        ("all", [0, 1, 2], ["a#0", "a#1", "a#2"]),
        ("@0", [0], ["a"]),
        ("@-1", [2], ["a"]),
        ("@:", [0, 1, 2], ["a#0", "a#1", "a#2"]),
        ("@1:", [1, 2], ["a#1", "a#2"]),
    ],
)
def test_frames_on_request(tmp_path, frames, rows, names):
    path = relaxation(tmp_path / "a.traj")
    heights = [platinum().positions[-1, 2] + 2 * row for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if frames.startswith("@"):
            found = predict_files(Height(), f"{path}{frames}")
        else:
            found = predict_files(Height(), open_quietly(path, frames))
    assert [p.energy for p in found] == pytest.approx(heights, abs=1e-5)
    assert [p.name for p in found] == names
    written = ase.io.read(write_predictions(found, tmp_path / "out.extxyz"), ":")
    assert [one.positions[-1, 2] for one in written] == pytest.approx(heights)


@pytest.mark.parametrize(
    "change",
    [
        lambda atoms: atoms.set_cell(atoms.cell * 1.1),
        lambda atoms: atoms.set_pbc([True, True, False]),
        lambda atoms: atoms.numbers.__setitem__(0, 28),
        lambda atoms: atoms.info.update(energy=None),
        lambda atoms: atoms.info.update(sid="other"),
    ],
)
def test_frames_of_other_kinds_are_structures(tmp_path, change):
    frames = ase.io.read(relaxation(tmp_path / "a.traj"), ":")
    change(frames[1])
    for step, atoms in enumerate(frames):
        energy = atoms.info.pop("energy", float(step))
        atoms.calc = None if energy is None else SinglePointCalculator(atoms, energy=energy)
    ase.io.write(tmp_path / "b.traj", frames)
    assert len({p.name for p in predict_files(ByHand(), tmp_path / "b.traj")}) == 3


def test_frames_that_are_not_there_are_named(tmp_path):
    path = relaxation(tmp_path / "a.traj")
    for index in ("@3", "@5:", "@-4"):
        with pytest.raises(ValueError, match="3 frames, and none of"):
            predict_files(ByHand(), f"{path}{index}")
    for wrong in ("@x", "@0:1:2:3", "@1.5"):
        with pytest.raises(ValueError, match="frames is"):
            open_dataset(f"{path}{wrong}")
    with pytest.raises(ValueError, match="frames is 'some'"):
        open_quietly(path, "some")


def test_tags_come_from_the_first_frame(tmp_path):
    path = relaxation(tmp_path / "a.traj", tags=False)  # the adsorbate leaves the surface

    calls = []

    def tag(structures):
        calls.append(structures)
        return tag_structures(structures, surface="half")

    for frames in ("last", "all"):
        files = open_dataset([path, path], tag_slab=tag, frames=frames)
        tags = {tuple(one.tags.tolist()) for one in files}
        assert tags == {(0,) * 4 + (1,) * 8 + (2,) * 2}
        assert all(one.fixed.tolist() == [True] * 4 + [False] * 10 for one in files)
    assert len(calls) == 4


def test_sids_that_repeat_can_be_told_apart(tmp_path):
    one = relaxation(tmp_path / "one.extxyz", energies=(None, None), sid=1981)
    two = relaxation(tmp_path / "two.extxyz", energies=(None,), sid=5)
    (tmp_path / "other").mkdir()
    three = relaxation(tmp_path / "other" / "two.extxyz", energies=(None,), sid=5)
    with pytest.warns(UserWarning, match="repeat.*1981, 5") as caught:
        found = predict_files(ByHand(), [one, two, three])
    assert len(caught) == 1
    assert [p.name for p in found] == ["1981#0", "1981#1", f"{two}:5", f"{three}:5"]
    with pytest.warns(UserWarning, match="repeat"):
        again = predict_files(ByHand(), [two, two])
    assert len({p.name for p in again}) == 2
    with pytest.warns(UserWarning, match="repeat"):
        assert [p.name for p in predict_files(ByHand(), [one, two])][2] == "5"
