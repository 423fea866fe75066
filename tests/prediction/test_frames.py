import ase.io
import numpy as np
import pytest
from ase.constraints import FixAtoms
from slabs import PLATINUM, ByHand, platinum

from flt_mol.data import open_dataset, tag_slab
from flt_mol.data.slabs import tag_structures
from flt_mol.predict import Prediction, StructureFiles, predict_files, write_predictions

GEOMETRY = ("positions", "numbers", "tags")


@pytest.fixture
def stored(tmp_path):
    """Frames with a target, further values, and one far from the origin, in two files."""
    frames = [platinum() for _ in range(3)]
    for place, atoms in enumerate(frames):
        atoms.info = {
            "sid": f"slab {place}",
            "y_relaxed": -1.5,
            "facet": "111",
            "miller": [1, 1, 1],
        }
        atoms.set_constraint(FixAtoms([0, 5]))
        atoms.arrays["pos_relaxed"] = atoms.positions + 0.1
    frames[1].positions += 1e5 + 1 / 3
    frames[2].pbc = [True, True, False]
    ase.io.write(tmp_path / "a.traj", frames[:2])
    ase.io.write(tmp_path / "b.traj", frames[2])
    return frames, [tmp_path / "a.traj", tmp_path / "b.traj"]


def test_structures_come_back_with_their_energies(stored, tmp_path):
    frames, files = stored
    predictions = predict_files(ByHand(), files)
    path = write_predictions(predictions, tmp_path / "new" / "out.extxyz")
    for atoms, back in zip(frames, ase.io.read(path, ":"), strict=True):
        for name in GEOMETRY:
            np.testing.assert_array_equal(back.arrays[name], atoms.arrays[name])
        np.testing.assert_array_equal(back.cell, atoms.cell)
        np.testing.assert_array_equal(back.pbc, atoms.pbc)
        assert back.constraints[0].index.tolist() == [0, 5]
        info = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in back.info.items()}
        assert info == {
            "sid": atoms.info["sid"],
            "facet": "111",
            "miller": [1, 1, 1],
            "energy_predicted": PLATINUM,
        }
        assert back.calc is None
        assert "pos_relaxed" not in back.arrays
    assert [file.name for file in path.parent.iterdir()] == ["out.extxyz"]


def test_predictions_are_no_targets(stored, tmp_path):
    path = write_predictions(predict_files(ByHand(), stored[1]), tmp_path / "out.extxyz")
    assert open_dataset(path)[0].energy is None
    assert open_dataset(path, energy="energy_predicted")[0].energy.item() == PLATINUM


def test_the_spread_and_a_second_prediction(stored, tmp_path):
    path = write_predictions(
        predict_files([ByHand(), ByHand(3.0)], stored[1]), tmp_path / "one.extxyz"
    )
    info = ase.io.read(path).info
    assert info["energy_predicted"] == 2 * PLATINUM
    assert info["energy_predicted_spread"] == pytest.approx(2**0.5 * PLATINUM)
    again = write_predictions(predict_files(ByHand(), path), tmp_path / "two.extxyz")
    info = ase.io.read(again).info
    assert info["energy_predicted"] == PLATINUM
    assert "energy_predicted_spread" not in info


def test_values_that_extxyz_cannot_hold_are_left_out(tmp_path):
    atoms = platinum()
    atoms.info = {"odd name!": 1, "unit": "eV", "data": {"pbc": 3}}
    ase.io.write(tmp_path / "a.json", atoms)
    rows = predict_files(ByHand(), tmp_path / "a.json")
    path = write_predictions(rows, tmp_path / "out.extxyz")
    assert ase.io.read(path).info["energy_predicted"] == PLATINUM


def test_tags_are_those_that_were_predicted_with(tmp_path):
    bare = platinum(tags=False)
    ase.io.write(tmp_path / "POSCAR", bare, format="vasp")
    files = StructureFiles(tmp_path / "POSCAR", prepare=tag_structures)
    (prediction,) = predict_files(ByHand(), files)
    assert prediction.energy == PLATINUM
    back = ase.io.read(write_predictions([prediction], tmp_path / "o.extxyz", files))
    assert back.get_tags().tolist() == tag_slab(bare).get_tags().tolist()
    assert back.constraints[0].index.tolist() == list(range(8))


def test_structures_that_cannot_be_prepared(tmp_path):
    good, bulk = platinum(tags=False), platinum(tags=False)
    bulk.set_cell(bulk.cell.array * [[1], [1], [0.5]])
    ase.io.write(tmp_path / "a.traj", [bulk, good, bulk])
    with pytest.raises(ValueError, match=r"a.traj#0: COPt12 is no slab"):
        predict_files(ByHand(), StructureFiles(tmp_path / "a.traj", prepare=tag_structures))
    files = StructureFiles(tmp_path / "a.traj", skip_bad=True, prepare=tag_structures)
    with pytest.warns(UserWarning, match=r"(?s)left out 2 structures:\n  a.traj#0: .*a.traj#2"):
        found = predict_files(ByHand(), files)
    assert [(p.name, p.energy) for p in found] == [("a.traj#1", PLATINUM)]
    frames = ase.io.read(write_predictions(found, tmp_path / "o.extxyz", files), ":")
    assert [frame.info["sid"] for frame in frames] == ["a.traj#1"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["slab 0", "slab 2", "slab 1"], "slab 1: the prediction in its place is of slab 2"),
        (["slab 0", "slab 1"], "slab 2: the prediction in its place is missing"),
        (["slab 0", "slab 1", "slab 2", "x"], "no structure is left for the prediction of x"),
    ],
)
def test_predictions_of_other_structures_are_refused(stored, tmp_path, names, message):
    files = StructureFiles(stored[1])
    rows = [Prediction(name, -1.0, "a.traj") for name in names]
    with pytest.raises(ValueError, match=message):
        write_predictions(rows, tmp_path / "o.extxyz", files)
    assert not (tmp_path / "o.extxyz").exists()
