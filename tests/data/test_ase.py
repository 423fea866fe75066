"""ASE's atoms and files: what lands where, calculators, databases, and what cannot be read."""

import bz2
import gzip
import lzma
import sqlite3

import numpy as np
import pytest
from ase import Atoms
from ase.build import fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian
from ase.db import connect
from ase.io import write

from flt_mol.data import from_ase, open_dataset
from tests.data.test_opening import FRAMES


def calculated(energy=-7.5):
    atoms = FRAMES[0].copy()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=np.ones((4, 3)))
    del atoms.info["y_relaxed"]
    return atoms


def test_fixed_atoms_are_those_held_in_all_directions():
    atoms = molecule("H2O")
    atoms.set_constraint([FixAtoms([0]), FixCartesian([1], (True, True, False)), FixCartesian([2])])
    assert from_ase(atoms).fixed.tolist() == [True, False, True]
    atoms.set_constraint(FixAtoms([7]))
    with pytest.raises(ValueError, match="FixAtoms holds atoms: index 7"):
        from_ase(atoms)


def test_targets_come_from_info_and_never_from_a_calculator():
    atoms = calculated()
    assert from_ase(atoms).energy is None
    atoms.info |= {"y_relaxed": -1.5, "y_init": 2.0}
    atoms.arrays["pos_relaxed"] = atoms.positions + 0.5
    system = from_ase(atoms, sid="named")
    assert system.energy.tolist() == [-1.5]
    assert system.energy_initial.tolist() == [2.0]
    assert system.sid == ("named",)
    assert np.allclose(system.positions_relaxed, atoms.positions + 0.5, atol=1e-6)
    assert from_ase(atoms, ignore_energy=True).energy is None


def test_frames_after_a_blank_line_are_not_lost(tmp_path):
    one = "1\n\nH 0 0 0\n"
    whole, parted = tmp_path / "whole.xyz", tmp_path / "parted.extxyz"
    whole.write_text(2 * one + "\n\n")
    parted.write_text(one + "\n" + one)
    assert len(open_dataset(whole)) == 2
    with pytest.raises(ValueError, match="line 4 is blank"):
        open_dataset(parted)


@pytest.mark.parametrize("name", ["a.traj", "a.extxyz", "a.db"])
def test_a_calculators_energy_only_by_its_own_name(name, tmp_path):
    write(tmp_path / name, calculated())
    path = tmp_path / name
    assert open_dataset(path)[0].energy is None
    assert open_dataset(path, energy="calculator")[0].energy.tolist() == [-7.5]
    with pytest.raises(ValueError, match='no targets.*energy="calculator"'):
        open_dataset(path, require_energy=True)
    with pytest.raises(ValueError, match="energy is missing.*calculator"):
        open_dataset(path, energy="energy")


def test_a_live_calculator_is_not_run():
    atoms = Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]], info={"sid": 1}, tags=[1, 2])
    atoms.calc = EMT()
    assert "calculator" not in open_dataset(atoms).record(0)
    atoms.get_potential_energy()
    assert "calculator" in open_dataset(atoms).record(0)
    atoms.positions += [[0, 0, 0], [0, 0, 0.1]]
    assert "calculator" not in open_dataset(atoms).record(0)


def test_two_values_of_a_target_are_an_error(tmp_path):
    with connect(tmp_path / "a.db") as database:
        for energy in (-1.0, -2.0):
            database.write(FRAMES[0], sid=1, y_relaxed=-1.0, data={"y_relaxed": energy})
    rest = open_dataset(tmp_path / "a.db", on_error="skip")
    assert rest.batch([0]).energy.tolist() == [-1.0]
    assert "y_relaxed of data is -2.0, of key_value_pairs -1.0" in rest.skipped[0]


def test_sids_of_files_without_sids(tmp_path):
    plain = [atoms.copy() for atoms in FRAMES]
    for atoms in plain:
        del atoms.info["sid"]
    write(tmp_path / "many.traj", plain)
    write(tmp_path / "one.traj", plain[0])
    assert open_dataset(tmp_path / "many.traj").batch(range(3)).sid[2] == "many.traj#2"
    assert open_dataset(tmp_path / "one.traj")[0].sid == ("one.traj",)
    with pytest.warns(UserWarning, match="no sid"):
        assert open_dataset(plain)[2].sid == (2,)
    for atoms, sid in zip(plain, ("", " a", "b "), strict=True):
        atoms.info["sid"] = sid
    write(tmp_path / "text.traj", plain)
    assert open_dataset(tmp_path / "text.traj").batch(range(3)).sid == ("text.traj#0", "a", "b")
    assert from_ase(plain[0]).sid == (0,)


def test_move_masks_and_files_that_keep_less(tmp_path):
    write(tmp_path / "a.extxyz", FRAMES[0], columns=["symbols", "positions", "tags", "move_mask"])
    system = open_dataset(tmp_path / "a.extxyz")[0]
    assert system.fixed.tolist() == [True, True, False, False]
    assert system.tags.tolist() == [0, 0, 1, 2]
    write(tmp_path / "POSCAR", FRAMES[0])
    assert open_dataset(tmp_path / "POSCAR")[0].fixed.sum() == 2


def test_compressed_files(tmp_path):
    write(tmp_path / "a.extxyz", FRAMES)
    (tmp_path / "a.extxyz.gz").write_bytes(gzip.compress((tmp_path / "a.extxyz").read_bytes()))
    assert len(open_dataset(tmp_path / "a.extxyz.gz")) == 3


def test_files_that_cannot_be_read_are_named(tmp_path):
    write(tmp_path / "a.extxyz", FRAMES)
    text = (tmp_path / "a.extxyz").read_text()
    for name, content in {
        "cut.extxyz": text[: len(text) - 80].encode(),
        "empty.extxyz": b"",
        "zeros.traj": bytes(5000),
        "unknown.xyzzy": b"something",
        "cut.traj": b"- of UlmASE-Trajectory" + bytes(10),
        "packed.foo": gzip.compress(b"x"),
        "element.xyz": b"1\n\nQq 0 0 0\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            open_dataset(tmp_path / name)
    rest = open_dataset(tmp_path / "cut.extxyz", on_error="skip")
    assert [s.sid for s in rest] == [(10,), (11,)]
    assert "beyond its first 2 frames" in rest.skipped[0]


@pytest.mark.parametrize("name", ["a.traj", "a.extxyz", "a.db", "a.json", "a.cif", "POSCAR", "a.x"])
def test_files_of_something_else_are_named(name, tmp_path):
    heads = {"git-lfs": b"version https://git-lfs.github.com", "web page": b"<html>\n404"}
    packed = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress}
    for kind, head in (heads | {kind: pack(b"a") for kind, pack in packed.items()}).items():
        (tmp_path / name).write_bytes(head)
        with pytest.raises(ValueError, match=rf"{name}.*it is an? {kind}"):
            open_dataset(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "hint"), [("utf-8-sig", "byte-order mark"), ("utf-16", "UTF-16"), ("x", "decode byte")]
)
def test_text_of_other_encodings(kind, hint, tmp_path):
    path = tmp_path / "a.extxyz"
    write(path, FRAMES)
    data = b"\xf0" * 100_000 if kind == "x" else path.read_text().encode(kind)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.extxyz \(.*{hint}") as caught:
        open_dataset(path)
    assert len(str(caught.value)) < 500


def test_an_index_that_is_none_is_named_with_its_file(tmp_path):
    write(tmp_path / "a.extxyz", FRAMES)
    with pytest.raises(ValueError, match=r"a\.extxyz: frames is 'x', expected"):
        open_dataset(tmp_path / "a.extxyz@x")


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite_are_no_warnings():
    for field in ("positions", "cell"):
        atoms = fcc111("Cu", (1, 1, 3), vacuum=6.0)
        getattr(atoms, field)[0, 0] = np.inf
        with pytest.raises(ValueError, match=field[:3]):
            open_dataset([atoms])[0]


def test_databases_are_left_as_they_are(tmp_path):
    for name in ("a.db", "a.json"):
        with connect(tmp_path / name) as database:
            database.write(FRAMES[0], sid=1)
        before = (tmp_path / name).read_bytes()
        assert len(open_dataset(tmp_path / name)) == 1
        assert (tmp_path / name).read_bytes() == before
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    before = (tmp_path / "other.db").read_bytes()
    with pytest.raises(ValueError, match=r"other.db.*none of ASE"):
        open_dataset(tmp_path / "other.db")
    assert (tmp_path / "other.db").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.suffix not in (".db", ".json")]
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("PRAGMA journal_mode=wal")
    connection.close()
    (tmp_path / "a.db-wal").mkdir()  # as where nothing can be written
    with pytest.raises(ValueError, match=r"a\.db \(in WAL mode"):
        open_dataset(tmp_path / "a.db")


def test_folders_of_files(tmp_path):
    for i, atoms in enumerate(FRAMES):
        write(tmp_path / f"{i}.extxyz", atoms)
    (tmp_path / "README.md").write_text("# text")
    with pytest.warns(UserWarning, match="README.md"):
        assert open_dataset(tmp_path).batch(range(3)).sid == (10, 11, 12)
