"""Relaxations as IS2RE records: which frame gives what, references, folders, what is refused."""

import numpy as np
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from flt_mol.data import from_trajectories, open_dataset
from tests.data.test_opening import frame


def relaxation(path, sid=None, energies=(-10.0, -11.0, -12.5), force=0.01, **changes):
    """Three frames; the free atoms move by a quarter of an ångström each."""
    frames = []
    for step, energy in enumerate(energies):
        atoms = frame(1)
        atoms.info.clear()
        atoms.info |= {"reference": -9.0} | ({} if sid is None else {"sid": sid})
        atoms.positions[2:] += 0.25 * step
        if energy is not None:
            forces = np.zeros((4, 3))
            forces[3, 0] = force
            atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        frames.append(atoms)
    for name, change in changes.items():
        getattr(frames[-1], name)(change)
    path.parent.mkdir(exist_ok=True)
    write(path, frames)
    return path


def test_the_first_frame_is_the_input_and_the_last_gives_the_target(tmp_path):
    path = relaxation(tmp_path / "a.traj", sid=7)
    dataset = from_trajectories(path, references={7: -9.5})
    system = dataset[0]
    assert system.sid == (7,)
    assert system.energy.tolist() == [-12.5 + 9.5]
    assert system.energy_initial.tolist() == [-10.0 + 9.5]
    first, *_, last = read(path, ":")
    assert np.allclose(system.positions, first.positions)
    assert np.allclose(system.positions_relaxed, last.positions)
    assert system.tags.tolist() == [0, 0, 1, 2]
    assert system.fixed.tolist() == [True, True, False, False]
    assert system.info["reference_energy"] == (-9.5,)


@pytest.mark.parametrize("kind", ["sid", "stem", "csv", "info", "none"])
def test_references_of_every_form(kind, tmp_path):
    path = relaxation(tmp_path / "a.traj", sid="x")
    table = tmp_path / "t.csv"
    table.write_text("sid,energy\nx,-9.0\n")
    given = {"sid": {"x": -9.0}, "stem": {"a": -9.0}, "info": "reference"}
    references = given.get(kind, "none" if kind == "none" else table)
    energy = from_trajectories([path], references=references)[0].energy.item()
    assert energy == (-12.5 if kind == "none" else -3.5)


@pytest.mark.parametrize(
    ("references", "reason"),
    [
        ({"y": -9.0}, "no reference energy.*there are: y"),
        ("missing", "no reference energy missing"),
        ({"x": float("nan")}, "reference energy of x is nan"),
        ({"x": "1,5"}, "expected a finite energy"),
        ({"x": True}, "expected a finite energy"),
    ],
)
def test_references_that_are_refused(references, reason, tmp_path):
    path = relaxation(tmp_path / "a.traj", sid="x")
    with pytest.raises(ValueError, match=reason):
        from_trajectories(path, references=references)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "sid,energy\nx,1\nx,2\n"])
def test_tables_that_cannot_be_read(text, tmp_path):
    path = relaxation(tmp_path / "a.traj", sid="x")
    table = tmp_path / "t.csv"
    table.write_text(text)
    with pytest.raises(ValueError, match=table.name):
        from_trajectories(path, references=table)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"energies": (-1.0,)}, "1 frames"),
        ({"energies": (-1.0, None)}, "last frame holds no energy"),
        ({"set_cell": np.eye(3) * 30}, "another cell"),
        ({"set_atomic_numbers": [29, 29, 8, 29]}, "another order"),
    ],
)
def test_what_is_not_a_relaxation_is_named_or_skipped(changes, reason, tmp_path):
    good = relaxation(tmp_path / "a.traj")
    bad = relaxation(tmp_path / "bad.traj", **changes)
    with pytest.raises(ValueError, match=f"bad.traj.*{reason}"):
        from_trajectories([good, bad], references="none")
    rest = from_trajectories([good, bad], references="none", on_error="skip")
    assert [s.sid for s in rest] == [("a",)]
    assert len(rest.skipped) == 1
    assert relaxation(tmp_path / "b.traj", energies=(None, -2.0))
    assert from_trajectories(tmp_path / "b.traj", references="none")[0].energy_initial is None


def test_what_is_not_relaxed_is_named_in_one_warning(tmp_path):
    paths = [relaxation(tmp_path / f"{n}.traj", force=f) for n, f in (("a", 0.01), ("b", 0.3))]
    with pytest.warns(UserWarning, match=r"not relaxed.*: b \(0.3\)"):
        from_trajectories(paths, references="none")
    assert len(from_trajectories(paths, references="none", fmax=0.5)) == 2


def test_folders_and_subfolders(tmp_path):
    for name in ("a10", "a2"):
        relaxation(tmp_path / "flat" / f"{name}.traj")
        relaxation(tmp_path / name / "relax.traj")
    flat = from_trajectories(tmp_path / "flat", references="none")
    assert [s.sid for s in flat] == [("a2",), ("a10",)]
    (tmp_path / "flat").rename(tmp_path / "a2" / "inside")
    deep = from_trajectories(tmp_path, references={"a2": 1.0, "a10": 2.0})
    batch = deep.batch([0, 1])
    assert batch.sid == ("a2", "a10")
    assert torch.equal(batch.energy, torch.tensor([-13.5, -14.5], dtype=torch.float64))
    file = tmp_path / "a10" / "relax.traj"
    for dataset in (
        from_trajectories(file, references="none"),
        from_trajectories(file.parent, references="none"),
        open_dataset(file, frames=None),
        open_dataset(file.parent, frames=None),
    ):
        assert dataset[0].sid == ("a10",)
    relaxation(tmp_path / "a10" / "again.traj")
    with pytest.raises(ValueError, match="a10 holds several trajectories"):
        from_trajectories(tmp_path, references="none")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="no trajectories in .*void"):
        from_trajectories(tmp_path / "void", references="none")
    with pytest.raises(ValueError, match="nowhere.traj does not exist"):
        from_trajectories(tmp_path / "nowhere.traj", references="none")
