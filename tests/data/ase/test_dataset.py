"""ASE atoms and files: tags, fixed atoms, cells and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian, FixedPlane, FixScaled
from ase.db import connect

from flt_mol.data import AseDataset, from_ase, open_dataset, to_ase

TAGS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
FIXED = [True] * 4 + [False] * 6


@pytest.fixture
def slab() -> Atoms:
    """CO on two layers of Pt, tags as in OC20."""
    atoms = fcc111("Pt", (2, 2, 2), vacuum=8)
    add_adsorbate(atoms, molecule("CO"), 1.9, "ontop")
    atoms.info.clear()
    atoms.set_tags(TAGS)
    atoms.set_constraint(FixAtoms(range(4)))
    atoms.pbc = True
    return atoms


def _one(path: Path) -> Any:
    dataset = open_dataset(path)
    assert isinstance(dataset, AseDataset)
    (system,) = dataset
    return system


@pytest.mark.parametrize("name", ["slab.extxyz", "slab.traj", "slab.db", "slab.json"])
def test_files_that_keep_everything(name: str, slab: Atoms, tmp_path: Path) -> None:
    path = tmp_path / name
    ase.io.write(path, slab)
    system = _one(path)
    assert system.tags.tolist() == (TAGS if name != "slab.extxyz" else system.tags.tolist())
    assert system.fixed.tolist() == FIXED
    assert system.sid == (name,)
    assert system.energy is None
    assert system.pbc.all()
    assert np.allclose(system.positions, slab.positions, atol=1e-5)
    assert np.allclose(system.cell[0], np.asarray(slab.cell), atol=1e-5)


def test_extxyz_columns(slab: Atoms, tmp_path: Path) -> None:
    path = tmp_path / "slab.extxyz"
    columns = ["symbols", "positions", "move_mask", "tags"]
    ase.io.write(path, slab, columns=columns)
    assert "move_mask:L:1:tags:I:1" in path.read_text()
    system = _one(path)
    assert system.tags.tolist() == TAGS
    assert system.fixed.tolist() == FIXED


@pytest.mark.parametrize(
    ("name", "fixed", "periodic", "note"),
    [
        ("POSCAR", FIXED, True, "all tags are 0"),
        ("slab.cif", [False] * 10, True, "all tags are 0"),
        ("slab.xyz", [False] * 10, False, "no cell.*all tags are 0"),
    ],
)
def test_files_that_keep_less_warn_once(
    name: str, fixed: Any, periodic: bool, note: str, slab: Atoms, tmp_path: Path
) -> None:
    path = tmp_path / name
    options = {"format": "xyz"} if name.endswith(".xyz") else {}
    ase.io.write(path, slab, **options)
    with pytest.warns(UserWarning, match=note) as caught:
        system = _one(path)
    assert len(caught) == 1
    assert "0 below the surface, 1 surface, 2 adsorbate" in str(caught[0].message)
    assert system.tags.tolist() == [0] * 10
    assert system.fixed.tolist() == fixed
    assert bool(system.pbc.all()) is periodic


def test_constraints(slab: Atoms) -> None:
    partly = [True, True, False]
    slab.set_constraint(
        [
            FixAtoms([0]),
            FixCartesian([1], [True] * 3),
            FixCartesian([2], partly),
            FixScaled([3], [True] * 3),
            FixCartesian([4], partly),
            FixCartesian([4], [False, False, True]),
            FixedPlane(5, (0, 0, 1)),
        ]
    )
    assert torch.nonzero(from_ase(slab).fixed).flatten().tolist() == [0, 1, 3, 4]


def test_frames_and_their_names(slab: Atoms, tmp_path: Path) -> None:
    path = tmp_path / "frames.traj"
    ase.io.write(path, [slab, slab, slab])
    dataset = open_dataset(path)
    assert [system.sid[0] for system in dataset] == [f"frames.traj#{i}" for i in range(3)]
    assert dataset.path == path


@pytest.mark.parametrize("name", ["rows.db", "rows.json"])
def test_rows_of_a_database(name: str, slab: Atoms, tmp_path: Path) -> None:
    path = tmp_path / name
    with connect(path) as database:
        database.write(slab, y_relaxed=-1.5)
        database.write(slab, y_relaxed=-2.5)
    energies = [float(s.energy) for s in open_dataset(path, require_energy=True)]
    assert energies == [-1.5, -2.5]
    assert [s.sid for s in open_dataset(path)] == [(f"{name}#0",), (f"{name}#1",)]


def test_the_calculators_energy_is_no_target(slab: Atoms, tmp_path: Path) -> None:
    path = tmp_path / "slab.extxyz"
    slab.calc = SinglePointCalculator(slab, energy=-5332.0, forces=np.zeros((10, 3)))
    ase.io.write(path, slab, columns=["symbols", "positions", "tags"])
    assert from_ase(slab).energy is None
    assert _one(path).energy is None
    with pytest.raises(ValueError, match="this split has no targets"):
        open_dataset(path, require_energy=True)


def test_targets_and_sid_in_info(slab: Atoms, tmp_path: Path) -> None:
    slab.info.update(sid="random7", y_relaxed=-1.5, y_init=0.25)
    slab.arrays["pos_relaxed"] = slab.positions + 0.5
    path = tmp_path / "slab.extxyz"
    ase.io.write(path, slab, columns=["symbols", "positions", "tags", "pos_relaxed"])
    for system in (from_ase(slab), _one(path)):
        assert system.sid == ("random7",)
        assert system.energy.tolist() == [-1.5]
        assert system.energy_initial.tolist() == [0.25]
        assert torch.allclose(system.positions_relaxed, system.positions + 0.5, atol=1e-6)
    assert from_ase(slab, sid=9).sid == (9,)
    slab.info["y_relaxed"] = float("nan")
    with pytest.raises(ValueError, match="sid 9: y_relaxed is nan"):
        from_ase(slab, sid=9)


def test_there_and_back(slab: Atoms) -> None:
    slab.info.update(sid="random7", y_relaxed=-1.5, y_init=0.25)
    system = from_ase(slab)
    atoms = to_ase(system)
    again = from_ase(atoms)
    assert again.sid == system.sid
    for name in ("positions", "cell", "pbc", "tags", "fixed", "atomic_numbers", "energy"):
        assert torch.equal(getattr(again, name), getattr(system, name))
    assert to_ase(from_ase(molecule("H2O"))).constraints == []


def test_from_ase_tells_of_defaults_without_warning() -> None:
    notes: dict[str, str] = {}
    system = from_ase(molecule("H2O"), notes=notes)
    assert set(notes) == {"tags", "cell"}
    assert system.sid == (0,)
    assert not system.pbc.any()


@pytest.mark.parametrize("pbc", [True, (False, False, True)])
def test_singular_cells(pbc: Any, tmp_path: Path) -> None:
    atoms = molecule("CH3OH", pbc=pbc)
    with pytest.raises(ValueError, match="singular along the periodic direction"):
        from_ase(atoms, sid="methanol")
    path = tmp_path / "methanol.json"
    ase.io.write(path, atoms)
    with pytest.raises(ValueError, match=r"methanol\.json.*singular along the periodic direction"):
        open_dataset(path)
    tiny = molecule("CH3OH", cell=[1e-6] * 3, pbc=True)
    with pytest.raises(ValueError, match="singular"):
        from_ase(tiny)


def test_open_cells_and_open_axes() -> None:
    assert from_ase(molecule("CH3OH", cell=[30.0] * 3)).pbc.tolist() == [[False] * 3]
    layer = from_ase(molecule("CH3OH", cell=[12.0, 12.0, 0.0], pbc=(True, True, False)))
    assert layer.pbc.tolist() == [[True, True, False]]
    assert layer.cell[0].diagonal().tolist() == [12.0, 12.0, 0.0]


def test_rigid_shifts_leave_distances(slab: Atoms) -> None:
    reference = torch.cdist(*[from_ase(slab).positions] * 2)
    for shift in (0.7, 1e3, 1e5):
        moved = slab.copy()
        moved.positions += shift
        positions = from_ase(moved).positions
        assert torch.allclose(torch.cdist(positions, positions), reference, atol=1e-5)


def test_layer_tags_are_refused() -> None:
    layers = fcc111("Cu", (1, 1, 4), vacuum=8)
    with pytest.raises(ValueError, match=r"tags holds 4.*ase\.build numbers layers"):
        from_ase(layers)


def test_two_layers_of_ase_build_warn_once(slab: Atoms, tmp_path: Path) -> None:
    layers = fcc111("Pt", (2, 2, 2), vacuum=8)
    add_adsorbate(layers, molecule("CO"), 1.9, "ontop")
    path = tmp_path / "layers.traj"
    ase.io.write(path, [layers, layers])
    with pytest.warns(UserWarning, match="layer numbers of ase.build") as caught:
        assert len(list(open_dataset(path))) == 2
    assert len(caught) == 1
    for rotation in (0, 40):
        slab.rotate(rotation, "x", rotate_cell=True)
        notes: dict[str, str] = {}
        from_ase(slab, notes=notes)
        assert notes == {}


def test_empty_atoms() -> None:
    with pytest.raises(ValueError, match="the system has no atoms"):
        from_ase(Atoms())


def test_one_bad_frame(slab: Atoms, tmp_path: Path) -> None:
    bad = slab.copy()
    bad.positions[3, 1] = np.nan
    path = tmp_path / "frames.traj"
    ase.io.write(path, [slab, bad])
    with pytest.raises(ValueError, match=r"frames\.traj#1, sid frames\.traj#1: pos of atom 3"):
        open_dataset(path)
    dataset = open_dataset(path, on_error="skip")
    assert [system.sid[0] for system in dataset] == ["frames.traj#0"]
    assert len(dataset.skipped) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.traj", b"nonsense"),
        ("a.extxyz", b"3\nno such\n"),
        ("a.unknown", b"what is this"),
        ("empty.xyz", b""),
        ("a.json", b'{"tags": [0]}'),
    ],
)
def test_files_that_ase_cannot_read(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=name) as caught:
        open_dataset(path)
    assert str(path) in str(caught.value)


def test_text_is_of_unknown_format(tmp_path: Path) -> None:
    path = tmp_path / "hello.txt"
    path.write_text("hello, world\n")
    with pytest.raises(ValueError, match=r"hello\.txt is of unknown format"):
        open_dataset(path)


def test_bad_targets_of_frames_can_be_ignored(slab: Atoms, tmp_path: Path) -> None:
    path = tmp_path / "frames.traj"
    slab.info.update(y_relaxed=float("nan"), y_init="?")
    ase.io.write(path, [slab, slab])
    systems = list(open_dataset(path, ignore_energy=True))
    assert [system.energy for system in systems] == [None, None]
    assert from_ase(slab, ignore_energy=True).energy is None
    with pytest.raises(ValueError, match="y_relaxed is nan"):
        open_dataset(path)


CIF = """data_alloy
_cell_length_a 3.6
_cell_length_b 3.6
_cell_length_c 3.6
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 1'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
_atom_site_occupancy
"""


@pytest.mark.filterwarnings("ignore:.*all tags are 0:UserWarning")
def test_shared_sites_of_a_cif_warn_once(tmp_path: Path) -> None:
    path = tmp_path / "alloy.cif"
    sites = "Pt1 Pt 0 0 0 1.0\nCu1 Cu 0.5 0.5 0 {0}\nNi1 Ni 0.5 0.5 0 {1}\n"
    path.write_text(CIF + sites.format(0.75, 0.25))
    with pytest.warns(UserWarning, match="one element per site") as caught:
        (system,) = open_dataset(path)
    texts = [str(w.message) for w in caught if "occupied in part" in str(w.message)]
    assert len(texts) == 1
    assert texts[0].startswith(f"{path}: site 1 is occupied in part (Cu 0.75, Ni 0.25)")
    assert system.atomic_numbers.tolist() == [78, 29]
    path.write_text(CIF + sites.format(1.0, 1.0))
    with pytest.warns(UserWarning, match=r"site 1 is occupied by several elements \(Cu 1, Ni 1\)"):
        open_dataset(path)
    path.write_text(CIF + "Pt1 Pt 0 0 0 1.0\nCu1 Cu 0.5 0.5 0 1.0\n")
    open_dataset(path)


@pytest.mark.filterwarnings("ignore:.*all tags are 0")
def test_total_energies_are_no_targets_unless_asked_for(tmp_path: Path) -> None:
    frames = [molecule("H2O") for _ in range(2)]
    for step, atoms in enumerate(frames):
        atoms.calc = SinglePointCalculator(atoms, energy=-1.0 - step)
    calculator = 'energy="calculator" takes the total energies that a calculator found'
    relaxations = "from_trajectories(…, references=…) and flt-mol data convert --references"
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        for name in ("a.traj", "b.traj"):
            ase.io.write(folder / name, frames[:count])
        for source in (folder, folder / "a.traj"):
            text = open_dataset(source).without_targets()
            assert text.startswith("this split has no targets (no record holds y_relaxed); train")
            assert calculator in text
            assert (relaxations in text) == (count == 2)
            with pytest.raises(ValueError, match="this split has no targets") as caught:
                open_dataset(source, require_energy=True)
            assert calculator in str(caught.value)
            assert open_dataset(source, energy="calculator").without_targets() is None
    text = open_dataset(frames).without_targets()
    assert calculator in text
    assert relaxations not in text
    assert "calculator" not in open_dataset(molecule("H2O")).without_targets()


@pytest.mark.parametrize("suffix", ["extxyz", "traj", "db"])
@pytest.mark.filterwarnings("ignore:.*(all tags are 0|no tags)")
def test_a_calculators_energy_has_one_name_only(tmp_path: Path, suffix: str) -> None:
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, energy=-14.0)
    path = tmp_path / f"calc.{suffix}"
    ase.io.write(path, atoms)
    for options in ({"energy": "energy"}, {"energy_initial": "energy"}):
        with pytest.raises(ValueError, match=r"energy is what a calculator found.*'calculator'"):
            open_dataset(path, **options)
    text = open_dataset(path).without_targets()
    assert text is not None
    assert "stored are" not in text
    with pytest.raises(ValueError, match="was asked for") as caught:
        open_dataset(path, energy="E")
    assert "energy," not in str(caught.value).partition("stored are")[2]
    assert open_dataset(path, energy="calculator")[0].energy.tolist() == [-14.0]


def test_an_energy_that_somebody_stored_is_one(slab: Atoms) -> None:
    slab.calc = SinglePointCalculator(slab, energy=-14.0)
    slab.info = {"energy": -0.5, "sid": 1}
    (system,) = open_dataset(slab, energy="energy")
    assert system.energy.tolist() == [-0.5]
