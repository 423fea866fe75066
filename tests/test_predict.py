import csv
import json
import pickle
import sys
import types
import zlib

import ase.io
import lmdb
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.constraints import FixAtoms, FixCartesian
from torch import nn

from flt_mol.data import tag_slab
from flt_mol.predict import (
    Prediction,
    predict,
    predict_files,
    predict_structures,
    write_predictions,
)
from flt_mol.structures import Structures
from flt_mol.testing import random_structures


class Fake(nn.Module):
    """Σ (z + 100 · tag), plus noise in training mode; a nonlinear sum of float32 positions."""

    def __init__(self, seen=(1, 6, 8, 29, 78)):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float32))
        self.inner = nn.Dropout(0.5)
        self.register_buffer("elements_seen", torch.zeros(119, dtype=torch.bool))
        self.elements_seen[list(seen)] = True
        self.sizes: list[int] = []

    def forward(self, structures):
        assert torch.is_inference_mode_enabled()
        self.sizes.append(len(structures))
        values = structures.atomic_numbers + 100 * structures.tags
        total = torch.zeros(len(structures), dtype=torch.float32)
        energy = total.index_add(0, structures.system, self.weight * values)
        return {"energy": self.inner(energy)}


def slab():
    atoms = fcc111("Pt", (2, 2, 3), vacuum=8.0)
    add_adsorbate(atoms, "O", 1.2, "ontop")
    atoms.set_tags([0] * 8 + [1] * 4 + [2])
    atoms.info = {}  # of the builder, which extxyz cannot hold
    return atoms


SLAB_ENERGY = 12 * 78 + 8 + 100 * (4 + 2)


def record(sid, atoms, **more):
    return {
        "pos": atoms.positions.astype(np.float32),
        "cell": atoms.cell.array.astype(np.float32),
        "pbc": atoms.pbc,
        "atomic_numbers": atoms.numbers.astype(np.uint8),
        "tags": atoms.get_tags().astype(np.uint8),
        "fixed": np.zeros(len(atoms), dtype=np.uint8),
        "sid": sid,
        "natoms": len(atoms),
        **more,
    }


def write_lmdb(path, records):
    with lmdb.open(str(path), subdir=False, map_size=1 << 24) as env, env.begin(write=True) as t:
        for i, values in enumerate(records):
            t.put(str(i).encode(), zlib.compress(pickle.dumps(values, protocol=4)))
        t.put(b"length", pickle.dumps(len(records)))
    return path


def test_one_structure_and_several():
    one = predict(slab(), Fake())
    assert one.dtype == np.float64
    assert one.tolist() == [SLAB_ENERGY]
    more = slab()
    more += Atoms("O", positions=[[0, 0, 15]], tags=[2])
    assert predict([slab(), more], Fake()).tolist() == [SLAB_ENERGY, SLAB_ENERGY + 208]
    assert predict((a for a in (more, slab())), Fake()).tolist() == [SLAB_ENERGY + 208, SLAB_ENERGY]
    assert predict([], Fake()).shape == (0,)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 100])
def test_batched_equals_one_by_one(batch_size):
    structures = list(random_structures(torch.Generator().manual_seed(0), (3, 9, 1, 30, 2, 8, 4)))
    model = Fake(range(1, 119))
    tagged = [s for s in structures if bool(s.tags.any())]
    got = predict_structures(model, tagged, batch_size)
    alone = [predict_structures(model, [s])[0] for s in tagged]
    np.testing.assert_allclose(got, alone, rtol=1e-7)
    assert model.sizes[0] == min(batch_size, len(tagged))


def test_flags_are_restored():
    model = Fake().train()
    model.inner.eval()
    predict(slab(), model)
    assert model.training
    assert not model.inner.training


def test_all_tags_zero_is_warned_of_once():
    bare = slab()
    bare.set_tags(0)
    with pytest.warns(UserWarning, match=r"all tags are 0 in 2 of 3 structures \(0, 2\)") as caught:
        energies = predict([bare, slab(), bare], Fake(), batch_size=1)
    assert len(caught) == 1
    assert "set_tags" in str(caught[0].message)
    assert energies[0] == 12 * 78 + 8


def test_unseen_elements_and_missing_cells_are_warned_of_once():
    water = molecule("H2O")
    water.set_tags(2)
    with pytest.warns(UserWarning, match="structures") as caught:
        predict([water, slab(), water], Fake(seen=[1]), batch_size=1)
    assert [str(w.message).split(":")[0] for w in caught] == [
        "no cell in 2 of 3 structures (0, 2)",
        "elements never trained on",
    ]
    assert "never trained on: O, Pt." in str(caught[1].message)


def test_structures_that_are_none():
    with pytest.raises(ValueError, match=r"structure 1 is a str, expected ase\.Atoms"):
        predict([slab(), "POSCAR"], Fake())
    with pytest.raises(ValueError, match="atoms is a NoneType, expected ase.Atoms, or several"):
        predict(None, Fake())
    for member in (None, 3):
        with pytest.raises(ValueError, match=f"checkpoint is a {type(member).__name__}, expected"):
            predict(slab(), ["emt_small", member])


@pytest.mark.parametrize("size", [2.5, True, "4", None, float("nan"), [3]])
def test_batch_sizes_that_are_none(size, tmp_path):
    with pytest.raises(ValueError, match="batch_size must be a whole number, got"):
        predict(slab(), Fake(), size)
    with pytest.raises(ValueError, match="batch_size must be a whole number, got"):
        predict_structures("no such model", [], size)
    with pytest.raises(ValueError, match="batch_size must be a whole number, got"):
        predict_files("no such model", [tmp_path / "missing"], size)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        predict(slab(), Fake(), batch_size=0)
    assert (
        predict([slab()] * 3, Fake(), np.int64(2)).tolist()
        == predict([slab()] * 3, Fake()).tolist()
    )


def test_energies_that_are_not_finite_are_refused():
    model = Fake()
    model.weight.data.fill_(torch.inf)
    with pytest.raises(ValueError, match="inf eV for structure 0"):
        predict(slab(), model)


def test_checkpoints_are_loaded_by_path_or_name(monkeypatch):
    asked = []
    module = types.ModuleType("flt_mol.training.checkpoints")
    module.load_model = lambda name: asked.append(name) or Fake()
    monkeypatch.setitem(sys.modules, "flt_mol.training.checkpoints", module)
    assert predict(slab(), "emt_small").tolist() == [SLAB_ENERGY]
    assert asked == ["emt_small"]


def test_files_of_all_kinds(tmp_path):
    """Slabs with tags, in the order given, batches across files, and a progress."""
    other = slab()
    other += Atoms("C", positions=[[0, 0, 15]], tags=[2])
    ase.io.write(tmp_path / "many.traj", [slab(), other, slab()])
    ase.io.write(tmp_path / "one.extxyz", other)
    write_lmdb(tmp_path / "data.lmdb", [record(500, slab()), record(501, other, y_relaxed=None)])
    model, seen = Fake(), []
    files = [tmp_path / "one.extxyz", str(tmp_path / "many.traj"), tmp_path / "data.lmdb"]
    got = predict_files(model, files, batch_size=4, progress=lambda *n: seen.append(n))
    assert [p.name for p in got] == [
        "one.extxyz", "many.traj#0", "many.traj#1", "many.traj#2", "500", "501",
    ]  # fmt: skip
    more = SLAB_ENERGY + 206
    assert [p.energy for p in got] == [more, SLAB_ENERGY, more, SLAB_ENERGY, SLAB_ENERGY, more]
    assert [p.file for p in got] == [str(files[i]) for i in (0, 1, 1, 1, 2, 2)]
    assert model.sizes == [4, 2]
    assert seen == [(4, 6), (6, 6)]
    assert predict_files(model, str(files[0])) == got[:1]


def test_files_that_keep_no_tags_give_one_warning_in_all(tmp_path):
    bare = slab()
    ase.io.write(tmp_path / "POSCAR", bare, format="vasp")
    ase.io.write(tmp_path / "slab.cif", bare)
    ase.io.write(tmp_path / "slab.xyz", bare, format="xyz")
    files = [tmp_path / name for name in ("POSCAR", "slab.cif", "slab.xyz")]
    with pytest.warns(UserWarning, match="structures") as caught:
        got = predict_files(Fake(), files, batch_size=1)
    assert [str(w.message).split(":")[0] for w in caught] == [
        "all tags are 0 in 3 of 3 structures (POSCAR, slab.cif, slab.xyz)",
        "no cell in 1 of 3 structures (slab.xyz)",
    ]
    assert [p.energy for p in got] == [12 * 78 + 8] * 3


def test_other_warnings_of_files_come_through(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "notes.txt").write_text("")
    write_lmdb(tmp_path / "shards" / "data.0000.lmdb", [record(1, slab())])
    with pytest.warns(UserWarning, match=r"notes\.txt"):
        predict_files(Fake(), tmp_path / "shards")


def test_unreadable_files_are_all_named_before_anything_is_predicted(tmp_path):
    ase.io.write(tmp_path / "good.extxyz", slab())
    (tmp_path / "bad.cif").write_text("not a crystal")
    files = [tmp_path / name for name in ("good.extxyz", "bad.cif", "missing.traj")]
    model = Fake()
    with pytest.raises(ValueError, match="cannot use 2 of 3 files") as caught:
        predict_files(model, files)
    assert "bad.cif" in str(caught.value)
    assert "missing.traj" in str(caught.value)
    assert "good.extxyz" not in str(caught.value)
    assert model.sizes == []


PREDICTIONS = [Prediction("a,b#1", 1 / 3, "dir/a,b"), Prediction("500", -2.0, "x.lmdb")]


def test_csv(tmp_path):
    path = write_predictions(PREDICTIONS, tmp_path / "new" / "out.csv")
    with path.open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert rows[1] == {"sid": "500", "energy": "-2.0", "file": "x.lmdb"}
    assert [Prediction(r["sid"], float(r["energy"]), r["file"]) for r in rows] == PREDICTIONS
    assert [entry.name for entry in path.parent.iterdir()] == ["out.csv"]


def test_json(tmp_path):
    path = write_predictions(iter(PREDICTIONS), tmp_path / "out.JSON")
    rows = json.loads(path.read_text())
    assert [Prediction(r["sid"], r["energy"], r["file"]) for r in rows] == PREDICTIONS


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        write_predictions([Prediction("a", float("nan"), "f")], path)
    with pytest.raises(ValueError, match=r"ending in \.csv or \.json"):
        write_predictions(PREDICTIONS, tmp_path / "out.xlsx")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_empty_system_needs_no_tags():
    empty = Structures.single([], [], cell=np.eye(3))
    assert predict_structures(Fake(), [empty]).tolist() == [0.0]


def test_targets_are_not_looked_at(tmp_path):
    atoms = slab()
    path = write_lmdb(
        tmp_path / "a.lmdb", [record(1, atoms, y_relaxed=float("nan"), y_init="none")]
    )
    assert [p.energy for p in predict_files(Fake(), path)] == [SLAB_ENERGY]
    atoms.info["y_relaxed"] = float("nan")
    ase.io.write(tmp_path / "a.extxyz", atoms)
    assert [p.energy for p in predict_files(Fake(), tmp_path / "a.extxyz")] == [SLAB_ENERGY]
    assert predict(atoms, Fake()).tolist() == [SLAB_ENERGY]


def test_bad_records_are_left_out_on_request(tmp_path):
    atoms = slab()
    bad = {**record(2, atoms), "pos": np.full((len(atoms), 3), np.nan, dtype=np.float32)}
    path = write_lmdb(tmp_path / "a.lmdb", [record(1, atoms), bad, record(3, atoms)])
    with pytest.raises(ValueError, match="a.lmdb"):
        predict_files(Fake(), path)
    with pytest.warns(UserWarning, match=r"(?s)a.lmdb: left out 1 of 3 records:\n.*pos"):
        predictions = predict_files(Fake(), path, skip_bad=True)
    assert [p.name for p in predictions] == ["1", "3"]


def test_layer_numbers_taken_for_tags_are_warned_of():
    atoms = fcc111("Pt", (2, 2, 3), vacuum=8.0)
    add_adsorbate(atoms, "O", 1.2, "ontop")
    atoms.set_tags([2] * 4 + [1] * 4 + [0] * 4 + [0])
    with pytest.warns(UserWarning, match="layer numbers") as caught:
        predict([atoms, atoms], Fake())
    assert len(caught) == 1


def test_tags_of_a_slab_that_hangs_are_not_taken_for_layer_numbers():
    atoms = fcc111("Pt", (2, 2, 3), vacuum=8.0)
    add_adsorbate(atoms, "O", 1.2, "ontop")
    atoms.positions[:, 2] *= -1
    atoms.positions[:, 2] += atoms.cell[2, 2]
    tagged = tag_slab(atoms, "O", surface="half")
    assert set(tagged.get_tags()) == {0, 1, 2}
    predict(tagged, Fake())


def test_names_that_are_no_text_are_escaped(tmp_path):
    name = b"caf\xe9 \xc3\xa9.cif".decode("utf-8", "surrogateescape")
    for file in (tmp_path / "out.csv", tmp_path / "out.json"):
        write_predictions([Prediction(name, 1.0, name)], file)
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0]["sid"] == "caf\\udce9 é.cif"
    assert json.loads((tmp_path / "out.json").read_text())[0]["sid"] == name


def test_errors_of_writing_name_the_target(tmp_path):
    (tmp_path / "out.csv").mkdir()
    with pytest.raises(OSError, match="out.csv") as caught:
        write_predictions([Prediction("a", 1.0, "a")], tmp_path / "out.csv")
    assert "tmp.csv" not in str(caught.value)


def test_narrow_cells_are_warned_of_where_images_are_not_seen():
    def copper(repeat):
        atoms = bulk("Cu", "fcc", a=3.6, cubic=True).repeat(repeat)
        atoms.set_tags(1)
        return atoms

    frames = [copper((1, 1, 1)), copper((2, 2, 2)), copper((3, 3, 1))]
    model = Fake(range(1, 119))
    predict(frames, model)
    model.sees_images = False
    with pytest.warns(UserWarning, match=r"narrower than 4 Å in 2 of 3 structures \(0, 2\)"):
        predict(frames, model)
    open_above = copper((1, 2, 2))
    open_above.pbc = [False, True, True]
    predict([open_above, slab()], model)


def test_slabs_without_fixed_atoms_are_told_of_where_atoms_move():
    model = Fake(range(1, 119))
    free, held = slab(), slab()
    held.set_constraint(FixAtoms(range(8)))
    molecule = Atoms("CO", [[0, 0, 0], [0, 0, 1.1]], tags=[2, 2], cell=[9, 9, 9])
    predict([free, held, molecule], model)
    model.config = types.SimpleNamespace(feedback="positions")
    predict([held, molecule], model)
    with pytest.warns(UserWarning, match=r"no atom is fixed in 1 of 3 structures \(1\)"):
        predict([held, free, molecule], model)


def test_atoms_in_one_place_are_told_of():
    twice = slab()
    twice.positions[3] = twice.positions[4] + twice.cell[0] + [0.3, 0, 0]
    with pytest.warns(UserWarning, match=r"less than 0\.5 Å apart.* in 1 of 2 structures \(1\)"):
        predict([slab(), twice], Fake())
    hydrogen = Atoms("H2", [[0, 0, 0], [0, 0, 0.6]], cell=[9, 9, 9], pbc=True, tags=[2, 2])
    assert len(predict(hydrogen, Fake())) == 1
    hydrogen.set_pbc([True, False, False])
    hydrogen.positions[1] = [8.8, 0, 0]
    with pytest.warns(UserWarning, match=r"less than 0\.5 Å apart, periodic images included"):
        predict(hydrogen, Fake())


@pytest.mark.parametrize("kind", [FixAtoms, FixCartesian])
def test_constraints_of_atoms_that_are_not_there(kind):
    atoms = slab()
    atoms.set_constraint(kind([99]))
    with pytest.raises(ValueError, match=rf"sid 0: a {kind.__name__} holds atom 99, and there are"):
        predict(atoms, Fake())
    atoms.set_constraint(FixAtoms([-1]))
    assert len(predict(atoms, Fake())) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_cells_that_are_not_finite(value):
    atoms = slab()
    atoms.set_cell([value] * 3)
    with pytest.raises(ValueError, match="cell is not finite"):
        predict(atoms, Fake())
    atoms = slab()
    atoms.positions[3] = value
    with pytest.raises(ValueError, match="pos of atom 3 is not finite"):
        predict(atoms, Fake())
