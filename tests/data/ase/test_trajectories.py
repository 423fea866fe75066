"""Relaxations as IS2RE records."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.db import connect
from ase.optimize import BFGS

from flt_mol.data.ase.references import References
from flt_mol.data.ase.trajectories import from_trajectories

COLUMNS = ["symbols", "positions", "move_mask", "tags"]


def make_frames(seed: int = 0, count: int = 3, force: float = 0.01) -> list[Atoms]:
    """A CO that sinks, with energies −10 − seed, −11 − seed, …"""
    frames = []
    for step in range(count):
        atoms = fcc111("Pt", (2, 2, 2), vacuum=8)
        add_adsorbate(atoms, molecule("CO"), 1.9 - 0.1 * step, "ontop")
        atoms.info.clear()
        atoms.set_tags([0] * 4 + [1] * 4 + [2] * 2)
        atoms.set_constraint(FixAtoms(range(4)))
        atoms.pbc = True
        forces = np.zeros((10, 3))
        forces[:4] = 9.0  # on atoms that are held
        forces[4, 2] = force if step == count - 1 else 1.0
        atoms.calc = SinglePointCalculator(atoms, energy=-10.0 - seed - step, forces=forces)
        frames.append(atoms)
    return frames


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three relaxations in three formats."""
    folder = tmp_path / "relaxations"
    folder.mkdir()
    ase.io.write(folder / "ads2.traj", make_frames(0))
    ase.io.write(folder / "ads10.extxyz", make_frames(1), columns=[*COLUMNS, "forces"])
    with connect(folder / "ads11.db") as database:
        for atoms in make_frames(2):
            database.write(atoms)
    return folder


REFERENCES = {"ads2": -4.0, "ads10.extxyz": -5.5, "ads11": -6.0}


def test_first_frame_last_frame_and_target(folder: Path) -> None:
    dataset = from_trajectories(folder, references=REFERENCES)
    systems = list(dataset)
    assert [system.sid[0] for system in systems] == ["ads2", "ads10", "ads11"]
    assert [system.energy.item() for system in systems] == [-8.0, -7.5, -8.0]
    assert [system.energy_initial.item() for system in systems] == [-6.0, -5.5, -6.0]
    for seed, (system, atol) in enumerate(zip(systems, (0, 1e-5, 0), strict=True)):
        first, *_, last = make_frames(seed)
        for found, atoms in (
            (system.positions, first),
            (system.positions_relaxed, last),
        ):
            wanted = torch.as_tensor(atoms.positions).float()
            assert torch.allclose(found, wanted, rtol=0, atol=atol)
        assert system.tags.tolist() == [0] * 4 + [1] * 4 + [2] * 2
        assert system.fixed.tolist() == [True] * 4 + [False] * 6
        assert system.pbc.all()
        assert system.info == {"reference_energy": (list(REFERENCES.values())[seed],)}
    assert [s.sid for s in pickle.loads(pickle.dumps(dataset))] == [s.sid for s in dataset]


def test_a_real_relaxation(tmp_path: Path) -> None:
    atoms = fcc111("Cu", (2, 2, 2), vacuum=6)
    add_adsorbate(atoms, "O", 1.5, "fcc")
    atoms.set_tags([0] * 4 + [1] * 4 + [2])
    atoms.set_constraint(FixAtoms(range(4)))
    atoms.pbc = True
    atoms.calc = EMT()
    before = atoms.positions.copy(), atoms.get_potential_energy()
    path = tmp_path / "o.traj"
    with BFGS(atoms, trajectory=str(path), logfile=None) as optimizer:
        assert optimizer.run(fmax=0.05, steps=60)
    (system,) = from_trajectories(path, references={"o": 1.5})
    assert torch.allclose(system.positions, torch.as_tensor(before[0]).float())
    assert torch.allclose(system.positions_relaxed, torch.as_tensor(atoms.positions).float())
    assert system.energy_initial.item() == pytest.approx(before[1] - 1.5)
    assert system.energy.item() == pytest.approx(atoms.get_potential_energy() - 1.5)
    assert system.energy < system.energy_initial


@pytest.mark.parametrize("kind", ["csv", "csv file", "json", "json rows", "mapping", "ints"])
def test_references_of_any_form(kind: str, folder: Path, tmp_path: Path) -> None:
    table = tmp_path / f"references.{kind[:4].strip()}"
    given: Any = table
    if kind == "csv":
        rows = [f"{name.split('.')[0]}, {energy}" for name, energy in REFERENCES.items()]
        table.write_text("\n".join(["sid, energy", *rows]))
    elif kind == "csv file":
        files = ("ads2.traj", "ads10.extxyz", "ads11.db")
        rows = [f"{e},x,{f}" for f, e in zip(files, REFERENCES.values(), strict=True)]
        table.write_text("\n".join(["reference,more,file", *rows]))
    elif kind == "json":
        table.write_text(json.dumps(REFERENCES))
    elif kind == "json rows":
        table.write_text(json.dumps([{"sid": k, "energy": v} for k, v in REFERENCES.items()]))
    else:
        given = REFERENCES
    if kind == "ints":
        for number, file in enumerate(sorted(folder.iterdir())):
            file.unlink()
            frames = make_frames()
            frames[0].info["sid"] = number
            ase.io.write(folder / f"{number}.traj", frames)
        given = {0: -4.0, 1: -4.0, 2: -4.0}
    targets = [system.energy.item() for system in from_trajectories(folder, references=given)]
    assert targets == ([-8.0] * 3 if kind == "ints" else [-8.0, -7.5, -8.0])
    if given is table:
        again = from_trajectories(folder, references=str(table))
        assert [system.energy.item() for system in again] == targets


def test_a_key_in_info_and_none(tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    frames = make_frames()
    frames[0].info["slab_and_gas"] = -4.0
    ase.io.write(path, frames)
    assert from_trajectories(path, references="slab_and_gas")[0].energy.item() == -8.0
    assert from_trajectories([path], references="none")[0].energy.item() == -12.0
    with pytest.raises(ValueError, match="no reference energy slab_or_gas; stored are: slab_and_g"):
        from_trajectories(path, references="slab_or_gas")
    frames[0].info["slab_and_gas"] = "many"
    ase.io.write(path, frames)
    with pytest.raises(ValueError, match="slab_and_gas is 'many', expected a finite energy"):
        from_trajectories(path, references="slab_and_gas")


def test_missing_references_are_named(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"ads10\.extxyz, sid ads10: no reference.*there are: ads11, ads2"
    ):
        from_trajectories(folder, references={"ads2": 0.0, "ads11": 0.0})
    dataset = from_trajectories(folder, references={"ads2": 0.0, "ads11": 0.0}, on_error="skip")
    assert [system.sid[0] for system in dataset] == ["ads2", "ads11"]
    assert len(dataset.skipped) == 1
    with pytest.raises(ValueError, match="every file is bad; the first"):
        from_trajectories(folder, references={}, on_error="skip")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sid,eV\na,1\n", "the columns are sid, eV"),
        ("sid,energy\na,x\n", "the reference energy of a is 'x'"),
        ("sid,energy\na,nan\n", "the reference energy of a is 'nan'"),
        ("sid;energy\na;-1,5\n", "'-1,5', expected a finite energy in eV with a decimal point"),
        ("sid\na\n", "the columns are sid; expected sid and energy"),
        ("sid,energy\na,1\na,2\n", "two reference energies of a"),
    ],
)
def test_tables_that_cannot_be_read(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"table\.csv.*{told}"):
        References(path)
    with pytest.raises(ValueError, match=r"none\.csv does not exist \(looked in") as caught:
        References(tmp_path / "none.csv")
    assert "Errno" not in str(caught.value)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        References(tmp_path / "folder.csv")
    (tmp_path / "table.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="expected sid and energy"):
        References(tmp_path / "table.json")
    with pytest.raises(ValueError, match="is True, expected"):
        References({"a": True})


def _without_energy(frames: list[Atoms]) -> list[Atoms]:
    frames[-1].calc = None
    return frames


def _other_cell(frames: list[Atoms]) -> list[Atoms]:
    frames[-1].cell[2, 2] += 0.01
    return frames


def _other_order(frames: list[Atoms]) -> list[Atoms]:
    atoms = frames[-1][::-1]
    atoms.calc = SinglePointCalculator(atoms, energy=-12.0)
    return [*frames[:-1], atoms]


def _other_pbc(frames: list[Atoms]) -> list[Atoms]:
    frames[-1].pbc = (True, True, False)
    return frames


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda frames: frames[:1], "1 frames, expected the initial and the relaxed"),
        (_without_energy, "the last frame holds no energy"),
        (_other_cell, "the cell changes between the frames"),
        (_other_pbc, "the cell changes between the frames"),
        (_other_order, "in another order"),
        (lambda frames: [*frames, Atoms("H")], "10 atoms, the last 1"),
    ],
)
def test_what_is_no_relaxation(change: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    ase.io.write(path, change(make_frames()))
    with pytest.raises(ValueError, match=rf"a\.traj.*{told}"):
        from_trajectories(path, references={"a": 0.0})


def test_a_first_frame_without_energy(tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    frames = make_frames()
    frames[0].calc = None
    ase.io.write(path, frames)
    (system,) = from_trajectories(path, references="none")
    assert system.energy_initial is None
    assert system.energy.item() == -12.0


def test_what_is_not_relaxed_is_named_in_one_warning(tmp_path: Path) -> None:
    for number, force in enumerate((0.01, 0.2, 0.3)):
        ase.io.write(tmp_path / f"{number}.traj", make_frames(force=force))
    told = r"beyond 0\.05 eV/Å on a free atom: 1\.traj \(0\.2\), 2\.traj \(0\.3\)"
    with pytest.warns(UserWarning, match=told) as caught:
        dataset = from_trajectories(tmp_path, references="none")
    assert len(caught) == 1
    assert len(dataset) == 3
    assert len(from_trajectories(tmp_path, references="none", fmax=0.5)) == 3


def test_interrupted_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    ase.io.write(path, make_frames())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"a\.traj"):
        from_trajectories(path, references="none")
    with pytest.raises(ValueError, match=r"b\.traj does not exist"):
        from_trajectories(tmp_path / "b.traj", references="none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no trajectories in"):
        from_trajectories(tmp_path / "empty", references="none")
    with pytest.raises(ValueError, match="no trajectories in"):
        from_trajectories([], references="none")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "; "])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_tables_of_any_delimiter(delimiter: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"table.{suffix}"
    rows = (("sid", "energy", "note"), ("a", "-1.5", "x"), ("b c", "2", ""))
    # With the mark that spreadsheets put first.
    path.write_text("\n".join(map(delimiter.join, rows)), encoding="utf-8-sig")
    assert References(str(path)).table == {"a": -1.5, "b c": 2.0}


@pytest.fixture
def subfolders(tmp_path: Path) -> Path:
    """Cu2/relax.traj, Cu10/relax.traj, and a folder without structures."""
    for seed, name in enumerate(("Cu2", "Cu10")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        ase.io.write(tmp_path / "runs" / name / "relax.traj", make_frames(seed))
        (tmp_path / "runs" / name / "log.txt").write_text("BFGS 0")
    return tmp_path / "runs"


def test_one_trajectory_in_each_subfolder(subfolders: Path) -> None:
    dataset = from_trajectories(subfolders, references={"Cu2": -4.0, "Cu10": -5.0})
    assert [system.sid[0] for system in dataset] == ["Cu2", "Cu10"]
    assert [system.energy.item() for system in dataset] == [-8.0, -8.0]
    assert dataset.where(1) == str(subfolders / "Cu10" / "relax.traj")
    assert dataset.default_sid(1) == "Cu10"
    # relax is no name of one system.
    with pytest.raises(ValueError, match=r"sid Cu2: no reference energy .* under Cu2; there are"):
        from_trajectories(subfolders, references={"relax": -4.0, "relax.traj": -4.0})


def test_sids_of_their_own_in_subfolders(subfolders: Path) -> None:
    frames = make_frames(1)
    frames[0].info["sid"] = 7
    ase.io.write(subfolders / "Cu10" / "relax.traj", frames)
    for name in ("Cu10", "7"):
        dataset = from_trajectories(subfolders, references={"Cu2": -4.0, name: -5.0})
        assert [system.sid[0] for system in dataset] == ["Cu2", 7]
        assert dataset[1].energy.item() == -8.0


def test_what_else_lies_beside_subfolders(subfolders: Path) -> None:
    (subfolders / "plots").mkdir()
    (subfolders / ".git").mkdir()
    (subfolders / "notes.md").write_text("?")
    # One frame is an initial structure, not a second trajectory.
    ase.io.write(subfolders / "Cu2" / "init.xyz", make_frames()[0])
    with pytest.warns(UserWarning, match=r"passed over, as no traj.*: notes\.md, plots") as caught:
        dataset = from_trajectories(subfolders, references="none")
    assert len(caught) == 1
    assert [system.sid[0] for system in dataset] == ["Cu2", "Cu10"]


def test_several_trajectories_in_a_subfolder(subfolders: Path) -> None:
    ase.io.write(subfolders / "Cu10" / "again.traj", make_frames())
    told = r"Cu10 holds 2 files that may be its trajectory, .*: again\.traj, relax\.traj; move the"
    with pytest.raises(ValueError, match=told):
        from_trajectories(subfolders, references="none")
    dataset = from_trajectories(subfolders, references="none", on_error="skip")
    assert [system.sid[0] for system in dataset] == ["Cu2"]
    assert len(dataset.skipped) == 1
    (subfolders / "Cu10" / "log.txt").unlink()
    alone = from_trajectories(subfolders / "Cu10", references="none")
    assert [system.sid[0] for system in alone] == ["again", "relax"]


def test_single_frames_in_a_subfolder_are_not_passed_over(subfolders: Path) -> None:
    (subfolders / "Cu3").mkdir()
    ase.io.write(subfolders / "Cu3" / "a.xyz", make_frames()[0])
    with pytest.raises(ValueError, match=r"a\.xyz: 1 frames, expected the initial and"):
        from_trajectories(subfolders, references="none")
    ase.io.write(subfolders / "Cu3" / "b.xyz", make_frames()[0])
    with pytest.raises(ValueError, match=r"Cu3 holds 2 files that may be .*: a\.xyz, b\.xyz"):
        from_trajectories(subfolders, references="none")


def test_trajectories_beside_subfolders(subfolders: Path) -> None:
    ase.io.write(subfolders / "a.traj", make_frames())
    with pytest.warns(UserWarning, match="passed over, as no trajectories: Cu2, Cu10"):
        dataset = from_trajectories(subfolders, references="none")
    assert [system.sid[0] for system in dataset] == ["a"]


def test_subfolders_are_searched_and_not_theirs(subfolders: Path) -> None:
    with pytest.raises(ValueError, match="no trajectories in .*, nor in its subfolders"):
        from_trajectories(subfolders.parent, references="none")


def test_repeated_sids_are_told(folder: Path) -> None:
    ase.io.write(folder / "ads2.extxyz", make_frames(3), columns=[*COLUMNS, "forces"])
    told = (
        r"several trajectories have the sid ads2: ads2\.(traj|extxyz), ads2\.(traj|extxyz); rename"
    )
    with pytest.warns(UserWarning, match=told):
        dataset = from_trajectories(folder, references="none")
    assert len(dataset) == 4
