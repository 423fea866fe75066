"""Files that ASE reads: nothing lost unsaid, nothing written, and no harm from hostile ones."""

from __future__ import annotations

import gzip
import json
import sqlite3
import struct
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.db import connect
from ase.io.trajectory import Trajectory

from flt_mol.data import AseDataset, from_ase, open_dataset
from flt_mol.data.ase.files import holds_structures, records_of
from flt_mol.data.ase.ulm import check_trajectory
from flt_mol.data.joined import JoinedDataset
from flt_mol.structures import Structures

FIELDS = ("positions", "cell", "pbc", "tags", "fixed", "atomic_numbers")


def make_slab(seed: int = 0) -> Atoms:
    atoms = fcc111("Pt", (2, 2, 2), vacuum=8)
    add_adsorbate(atoms, molecule("CO"), 1.9, "ontop")
    atoms.info.clear()
    atoms.set_tags([0] * 4 + [1] * 4 + [2] * 2)
    atoms.set_constraint(FixAtoms(range(4)))
    atoms.pbc = (True, True, False)
    atoms.rattle(0.05, seed=seed)
    atoms.calc = SinglePointCalculator(atoms, energy=-50.0 - seed, forces=np.ones((10, 3)))
    return atoms


@pytest.fixture
def frames() -> list[Atoms]:
    return [make_slab(seed) for seed in range(4)]


@pytest.fixture
def rows(frames: Any) -> Any:
    """Writes the frames as a database with targets."""

    def make(path: Path) -> Path:
        with connect(path) as database:
            for i, atoms in enumerate(frames):
                data = {"pos_relaxed": atoms.positions + 0.5, "list": [1, 2], "text": "a"}
                database.write(atoms, y_relaxed=-1.0 - i, site="top", data=data)
        return path

    return make


# Databases


@pytest.mark.parametrize("name", ["rows.db", "rows.json", "rows.sqlite"])
def test_databases_hold_what_ase_finds_in_them(
    name: str, rows: Any, frames: Any, tmp_path: Path
) -> None:
    path = rows(tmp_path / name.replace("sqlite", "db")).rename(tmp_path / name)
    dataset = open_dataset(path, require_energy=True)
    assert isinstance(dataset, AseDataset)
    assert len(dataset) == 4
    for i, (system, atoms) in enumerate(zip(dataset, frames, strict=True)):
        expected = from_ase(atoms)
        for field in FIELDS:
            assert torch.equal(getattr(system, field), getattr(expected, field)), field
        assert system.energy.tolist() == [-1.0 - i]
        assert torch.equal(system.positions_relaxed, (expected.positions.double() + 0.5).float())
        assert system.sid == (f"{name}#{i}",)
        info = {field: values[0] for field, values in system.info.items()}
        assert info == {"site": "top", "list": [1, 2], "text": "a", "energy": -50.0 - i}
    assert np.array_equal(dataset.record(0)["forces"], np.ones((10, 3)))
    asked = open_dataset(path, energy="calculator")
    assert [s.energy.item() for s in asked] == [-50.0, -51.0, -52.0, -53.0]
    near = f"{name}#0: y_relaxd was asked for, and is not stored; stored are: y_relaxed"
    with pytest.raises(ValueError, match=near.replace("#0:", "#0, sid .*:")):
        open_dataset(path, energy="y_relaxd")


def test_rows_agree_with_ases_own_reader(rows: Any, tmp_path: Path) -> None:
    for name in ("a.db", "a.json"):
        path = rows(tmp_path / name)
        for system, row in zip(open_dataset(path), connect(path).select(), strict=True):
            expected = from_ase(row.toatoms(add_additional_information=True), sid=system.sid[0])
            for field in (*FIELDS, "energy", "positions_relaxed"):
                assert torch.equal(getattr(system, field), getattr(expected, field))


def test_rows_after_deletions(rows: Any, tmp_path: Path) -> None:
    for name in ("a.db", "a.json"):
        path = rows(tmp_path / name)
        connect(path).delete([2])
        assert [s.energy.item() for s in open_dataset(path)] == [-1.0, -3.0, -4.0]


@pytest.mark.parametrize("content", [b"", b"\x00", b"hello", b"SQLite format 3\0" + bytes(90)])
def test_no_table_is_made_in_what_is_no_database(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.db"):
        open_dataset(path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["x.db"]


def test_reading_a_database_leaves_nothing(rows: Any, tmp_path: Path) -> None:
    path = rows(tmp_path / "odd ?#%20.db")
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert len(list(open_dataset(path))) == 4
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_other_databases_and_unfinished_writes(rows: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (a INTEGER)")
    connection.close()
    with pytest.raises(ValueError, match="none of ASE"):
        open_dataset(other)
    path = rows(tmp_path / "a.db")
    (tmp_path / "a.db-wal").write_bytes(b"pages")
    with pytest.raises(ValueError, match="a.db-wal holds an unfinished write"):
        open_dataset(path)


def test_one_bad_row_of_a_database(rows: Any, tmp_path: Path) -> None:
    path = rows(tmp_path / "a.db")
    damage = {1: ("positions", b"\0" * 7), 2: ("key_value_pairs", "{"), 4: ("constraints", "[")}
    with sqlite3.connect(path) as connection:
        for number, (column, value) in damage.items():
            connection.execute(f"UPDATE systems SET {column} = ? WHERE id = ?", (value, number))
    connection.close()
    with pytest.raises(ValueError, match=r"a\.db, row 1: field pos"):
        open_dataset(path)
    dataset = open_dataset(path, on_error="skip")
    assert [s.energy.item() for s in dataset] == [-3.0]
    for message, number in zip(dataset.skipped, (1, 2, 4), strict=True):
        assert f"row {number}: " in message


@pytest.mark.parametrize(
    "array", [[[10**12], "float64", [0.0]], [[3], "object", [0.0]]], ids=["bomb", "objects"]
)
def test_hostile_json_harms_its_own_row(array: Any, rows: Any, tmp_path: Path) -> None:
    path = rows(tmp_path / "a.json")
    content = json.loads(path.read_text())
    content["2"]["positions"] = {"__ndarray__": array}
    content["3"]["data"]["atoms"] = {"__ase_objtype__": "atoms", "numbers": [1]}
    del content["4"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"a\.json, row 2: field pos"):
        open_dataset(path)
    dataset = open_dataset(path, on_error="skip")
    assert [s.energy.item() for s in dataset] == [-1.0, -3.0]
    assert ["row 2" in dataset.skipped[0], "row 4" in dataset.skipped[1]] == [True, True]


def test_json_of_something_else(tmp_path: Path) -> None:
    for content in ("[1, 2]", '{"a": 1}', '{"ids": 3}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match=r"a\.json: it is JSON, but no database of ASE"):
            open_dataset(tmp_path / "a.json")


# Frames


def _write_traj(path: Path, frames: list[Atoms]) -> bytes:
    ase.io.write(path, frames)
    return path.read_bytes()


@pytest.mark.parametrize("fraction", np.linspace(0.02, 0.999, 12))
def test_truncated_trajectories_are_refused(fraction: float, frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    data = _write_traj(path, frames)
    path.write_bytes(data[: int(fraction * len(data))])
    with pytest.raises(ValueError, match=r"a\.traj"):
        open_dataset(path)


@pytest.mark.parametrize("count", [1, 2, 41, 42, 43, 50])
def test_whole_trajectories_end_where_they_say(count: int, tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    with Trajectory(path, "w") as trajectory:
        for i in range(count):
            trajectory.write(Atoms("H", [[0, 0, i]]))
    assert check_trajectory(path)
    with path.open("ab") as file:
        file.write(b"\0" * 64)
    assert not check_trajectory(path)


def test_a_writer_that_was_stopped_is_told(frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    three = _write_traj(path, frames[:3])
    four = _write_traj(path, frames)
    # The fourth frame's arrays are written before it is counted.
    path.write_bytes(four[:32] + three[32:40] + four[40 : len(three) + 200])
    with pytest.warns(UserWarning, match="a frame that was not written whole"):
        dataset = open_dataset(path)
    assert len(dataset) == 3


@pytest.mark.parametrize("place", [32, 40, 48])
@pytest.mark.parametrize("number", [-1, 2**40, 2**62, 5000])
def test_trajectories_that_lie_about_sizes(
    place: int, number: int, frames: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.traj"
    data = _write_traj(path, frames[:1])
    path.write_bytes(data[:place] + struct.pack("<q", number) + data[place + 8 :])
    with pytest.raises(ValueError, match=r"a\.traj"):
        open_dataset(path)


def test_trajectories_with_huge_arrays(frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    frames[0].info["mine"] = np.arange(3)
    data = _write_traj(path, frames[:1])
    check_trajectory(path)
    changes = {
        b"[[10, 3]": b"[[99, 9]",
        b'"ndarray": [[10], ': b'"ndarray":[[9999],',
        b'{"__ndarray__": [[3], ': b'{"__ndarray__":[[999],',
    }
    for old, new in changes.items():
        assert old in data
        assert len(old) == len(new)
        path.write_bytes(data.replace(old, new))
        with pytest.raises(ValueError, match="frame 0 is damaged"):
            check_trajectory(path)
        with pytest.raises(ValueError, match=r"a\.traj"):
            open_dataset(path)


def test_a_blank_line_between_frames_is_no_end(frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.extxyz"
    ase.io.write(path, frames)
    lines = path.read_text().splitlines()
    assert len(open_dataset(path)) == 4
    path.write_text("\n".join([*lines, "", " ", ""]))
    assert len(open_dataset(path)) == 4
    path.write_text("\n".join([*lines[:24], "", *lines[24:], ""]))
    with pytest.raises(ValueError, match=r"ASE reads 2 frames of .*a\.extxyz: .*line 26"):
        open_dataset(path)
    dataset = open_dataset(path, on_error="skip")
    assert len(dataset) == 2
    assert "line 26" in dataset.skipped[0]


def test_a_last_line_that_may_be_cut(frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.xyz"
    ase.io.write(path, frames[0], format="extxyz", columns=["symbols", "positions", "tags"])
    text = path.read_text()
    assert open_dataset(path).notes.seen == set()
    path.write_text(text.rstrip())
    with pytest.warns(UserWarning, match=r"a\.xyz does not end with a line feed"):
        open_dataset(path)


@pytest.mark.filterwarnings("ignore:.*all tags are 0:UserWarning")
def test_lost_blocks_and_models_are_told(frames: Any, tmp_path: Path) -> None:
    cif, pdb = tmp_path / "a.cif", tmp_path / "a.pdb"
    ase.io.write(cif, frames)
    assert len(open_dataset(cif)) == 4
    cif.write_text(cif.read_text() + "data_more\n_cell_length_a 3\n")
    with pytest.raises(ValueError, match="5 blocks begin with data_"):
        open_dataset(cif)
    ase.io.write(pdb, frames)
    assert len(open_dataset(pdb)) == 4
    lines = pdb.read_text().splitlines()
    pdb.write_text("\n".join(lines[:-3]) + "\n")
    with pytest.raises(ValueError, match="4 models begin, 3 end"):
        open_dataset(pdb)


def test_counts_beyond_the_file(frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "POSCAR"
    ase.io.write(path, frames[0], format="vasp")
    path.write_text(path.read_text().replace(" 8 ", " 800000000 ", 1))
    with pytest.raises(ValueError, match=r"POSCAR: 80000000\d atoms are announced in"):
        open_dataset(path)


def test_compressed_files(frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.extxyz"
    ase.io.write(path, frames, columns=["symbols", "positions", "tags"])
    packed = tmp_path / "b.extxyz.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    systems = [Structures.cat(list(open_dataset(file))) for file in (path, packed)]
    assert torch.equal(systems[0].positions, systems[1].positions)


def test_what_info_and_calculators_hold(frames: Any, tmp_path: Path) -> None:
    for i, atoms in enumerate(frames):
        atoms.info = {"mine": -0.5 * i, "before": 1.5, "note": "a"}
        atoms.arrays["end"] = atoms.positions + 0.5
    path = tmp_path / "a.traj"
    ase.io.write(path, frames)
    options = {"energy": "mine", "energy_initial": "before"}
    dataset = open_dataset(path, require_energy=True, **options)
    assert [s.energy.item() for s in dataset] == [0.0, -0.5, -1.0, -1.5]
    assert [s.energy_initial.item() for s in dataset] == [1.5] * 4
    assert dataset[0].info["note"] == ("a",)
    assert np.array_equal(dataset.record(0)["forces"], np.ones((10, 3)))
    path = tmp_path / "a.extxyz"
    ase.io.write(path, frames, columns=["symbols", "positions", "tags", "end"])
    system = open_dataset(path, energy="mine", positions_relaxed="end")[0]
    assert torch.allclose(system.positions_relaxed, system.positions + 0.5, atol=1e-6)
    frames[2].info.pop("mine")
    ase.io.write(path, frames)
    with pytest.raises(ValueError, match=r"a\.extxyz#2, sid .*: mine was asked for, and is not"):
        open_dataset(path, energy="mine")
    assert open_dataset(path, energy="mine", ignore_energy=True)[2].energy is None
    assert len(open_dataset(path, energy="mine", on_error="skip")) == 3


def test_records_come_one_by_one(frames: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.traj"
    ase.io.write(path, frames)
    records = records_of(path)
    assert np.array_equal(next(records)["pos"], frames[0].positions)
    assert sum(1 for _ in records) == 3


# Folders


def test_a_folder_of_structure_files(frames: Any, rows: Any, tmp_path: Path) -> None:
    folder = tmp_path / "slabs"
    folder.mkdir()
    columns = ["symbols", "positions", "move_mask", "tags"]
    ase.io.write(folder / "s10.traj", frames[0])
    ase.io.write(folder / "s9.extxyz", frames[1], columns=columns)
    rows(folder / "s11.db")
    for name in ("README.md", "notes.txt", "truth.json", "sids.csv", "run.log", "x.npz"):
        (folder / name).write_text('{"a": 1}')
    (folder / ".hidden.traj").touch()
    with pytest.warns(UserWarning, match=r"no files of structures: README\.md.* and 1 more") as w:
        dataset = open_dataset(folder)
    assert len(w) == 1
    assert isinstance(dataset, JoinedDataset)
    sids = ["s9.extxyz", "s10.traj", *(f"s11.db#{i}" for i in range(4))]
    assert [system.sid[0] for system in dataset] == sids
    assert dataset.natoms().tolist() == [10] * 6
    assert torch.equal(dataset[1].positions, from_ase(frames[0]).positions)


def test_a_bad_file_in_a_folder(frames: Any, tmp_path: Path) -> None:
    ase.io.write(tmp_path / "a.traj", frames[0])
    (tmp_path / "b.traj").write_bytes(b"- of Ulm nonsense")
    with pytest.raises(ValueError, match=r"b\.traj"):
        open_dataset(tmp_path)
    dataset = open_dataset(tmp_path, on_error="skip")
    assert len(dataset) == 1
    assert "b.traj" in dataset.skipped[0]


def test_which_files_are_of_structures(frames: Any, tmp_path: Path) -> None:
    for name in ("a.traj", "a.cif", "POSCAR", "a.json", "a.db", "a.xyz"):
        ase.io.write(tmp_path / name, frames[0])
        assert holds_structures(tmp_path / name)
    for name in ("a.md", "a.csv", "a.yaml", "a.py", "b.json", "a.npz", "empty.traj"):
        (tmp_path / name).write_text("" if name.startswith("empty") else '{"tags": [0]}')
        assert holds_structures(tmp_path / name) == name.startswith("empty")


@pytest.mark.parametrize("suffix", ["extxyz", "xyz", "xyz.gz"])
def test_impossible_numbers_of_atoms_are_refused(tmp_path, suffix):
    path = tmp_path / f"many.{suffix}"
    text = f"1\n\nH 0 0 0\n{10**27}\n\nH 0 0 0\n"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    with pytest.raises(ValueError, match=rf"many.{suffix}: line 4 announces 1{'0' * 27} atoms"):
        open_dataset(path)


def test_files_of_zeros_are_refused_by_their_first_bytes(tmp_path):
    with (tmp_path / "zeros.extxyz").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(ValueError, match=r"zeros.extxyz begins with zeros"):
        open_dataset(tmp_path / "zeros.extxyz")


@pytest.mark.parametrize("zeros", [False, True])
def test_journals_that_are_kept(zeros: bool, rows: Any, tmp_path: Path) -> None:
    path = rows(tmp_path / "a.db")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=PERSIST")
        connection.execute("UPDATE systems SET ctime = 0")
    connection.close()
    journal = tmp_path / "a.db-journal"
    content = journal.read_bytes()
    assert len(content) > 28
    assert any(content)
    assert not any(content[:28])
    if not zeros:  # as while the write goes on
        journal.write_bytes(b"\xd9\xd5\x05\xf9 \xa1c\xd7" + content[8:])
        with pytest.raises(ValueError, match="a.db-journal holds an unfinished write"):
            open_dataset(path)
        return
    assert len(open_dataset(path)) == 4


COLUMNS = {
    "many": ("species:S:1:pos:R:3:foo:R:100000000", "100000004 columns"),
    "in two": ("species:S:1:pos:R:3:foo:R:60000000:bar:I:60000000", "120000004 columns"),
    "quoted": ('"species:S:1:pos:R:3:foo:R:100\\\\000000"', "columns|cannot read"),
}


@pytest.mark.parametrize("atoms", [0, 1, 2])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_beyond_the_line(
    name: str, atoms: int, frames: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    properties, told = COLUMNS[name]
    good = tmp_path / "good.extxyz"
    ase.io.write(good, frames)
    path = tmp_path / "a.extxyz"
    bad = f"{atoms}\nProperties={properties}\n" + "Cu 0 0 0 1\n" * atoms
    path.write_text(good.read_text() + bad + good.read_text())

    def parse(text: str) -> Any:
        assert "foo" not in text, "ASE was asked"
        return parsed(text)

    parsed = ase.io.extxyz.parse_properties
    monkeypatch.setattr(ase.io.extxyz, "parse_properties", parse)
    with pytest.raises(ValueError, match=told):
        open_dataset(path)
    assert len(open_dataset(good)) == len(frames)


def test_wide_frames_are_read(frames: Any, tmp_path: Path) -> None:
    frames[0].arrays["wide"] = np.zeros((len(frames[0]), 2000), dtype=int)
    ase.io.write(tmp_path / "a.extxyz", frames[:1])
    assert len(open_dataset(tmp_path / "a.extxyz")) == 1


GEN = {
    "fewer": ("1000000000 C\nCu\n1 1 0 0 0\n", "1000000000 atoms are announced, 1 are there"),
    "more": ("1 C\nCu\n1 1 0 0 0\n2 1 3 0 0\n", "1 atoms are announced, 1 more lines follow"),
    "more in a cell": (
        "1 S\nCu\n1 1 0 0 0\n0 0 0\n9 0 0\n0 9 0\n0 0 9\n1 S\nCu\n1 1 0 0 0\n",
        "3 more lines follow",
    ),
}


@pytest.mark.parametrize("name", GEN)
def test_gen_files_that_are_read_in_part(name: str, tmp_path: Path) -> None:
    text, told = GEN[name]
    (tmp_path / "a.gen").write_text(text)
    with pytest.raises(ValueError, match=told):
        open_dataset(tmp_path / "a.gen")


@pytest.mark.parametrize("periodic", [False, True])
def test_whole_gen_files(periodic: bool, frames: Any, tmp_path: Path) -> None:
    frames[0].pbc = periodic
    ase.io.write(tmp_path / "a.gen", frames[0])
    (record,) = records_of(tmp_path / "a.gen")
    assert record["natoms"] == len(frames[0])


# Two values of one name


@pytest.mark.parametrize("name", ["y_relaxed", "energy_relaxed"])
@pytest.mark.parametrize("route", ["a.db", "a.json", "atoms"])
def test_a_row_is_the_same_by_every_route(
    route: str, name: str, frames: Any, tmp_path: Path
) -> None:
    def source(data: Any, **pairs: Any) -> Any:
        path = tmp_path / "rows.db" if route == "atoms" else tmp_path / route
        path.unlink(missing_ok=True)
        with connect(path) as database:
            database.write(frames[0], data={"sid": 7, **data}, **pairs)
            row = database.get(1)
        return row.toatoms(add_additional_information=True) if route == "atoms" else path

    (system,) = open_dataset(source({"site": "fcc", name: -1.5}, site="top", **{name: -1.5}))
    assert system.energy.item() == -1.5
    assert system.info["site"] == ("fcc",)
    (system,) = open_dataset(source({"other": 1}, **{name: -2.5}))
    assert system.energy.item() == -2.5
    both = source({name: -1.5}, **{name: -2.5})
    told = f"{name} of data is -1.5, {name} of key_value_pairs is -2.5"
    with pytest.raises(ValueError, match="y_relaxed of data is -1.5, .* is -2.5"):
        list(open_dataset(both))
    if name == "energy_relaxed":
        with pytest.raises(ValueError, match=told):
            list(open_dataset(both, energy=name))
    assert len(list(open_dataset(both, ignore_energy=True))) == 1


POSCAR = "slab\n1.0\n9 0 0\n0 9 0\n0 0 9\n{}\n{}\nCartesian\n0 0 0\n0 0 1\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.xyz", "1\n\nD 0 0 0\n", "there is no element 'D'; symbols are those of the table"),
        ("a.extxyz", "\ufeff1\n\nH 0 0 0\n", "begins with a byte order mark: save it as UTF-8"),
        ("a.extxyz", "", r"a\.extxyz is empty \(0 bytes\); download or write it again"),
        ("a.cif", "<html>404</html>", "it is a web page or XML: the download went wrong"),
        ("a.cif", "404 not found\n", "stops without a reason .AssertionError.: is it such a file"),
        ("POSCAR", POSCAR.format("O H", "2"), "line 6 names 2 elements, line 7 gives 1 numbers"),
        ("POSCAR", POSCAR.format("O H ! new", "1 # old"), "names 2 elements, line 7 gives 1 num"),
        ("POSCAR", POSCAR.format("O H", "1 2"), "too short, or missing at the end"),
    ],
)
def test_reasons_in_words(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path / name)


@pytest.mark.filterwarnings("ignore:.*all tags are 0")
def test_poscars_that_are_good(tmp_path: Path) -> None:
    for symbols, counts in [
        ("O H", "1 1"),
        ("O H ! a b", "1 1 ! c"),
        ("O", "2"),
        ("O H O", "0 1 1"),
    ]:
        (tmp_path / "POSCAR").write_text(POSCAR.format(symbols, counts))
        assert open_dataset(tmp_path / "POSCAR")[0].natoms.tolist() == [2]
