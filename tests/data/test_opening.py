"""Whatever holds structures opens, and gives the same systems; folders, memory, and bad places."""

import json
import pickle
import zlib

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.db import connect
from ase.io import write

from flt_mol.data import from_ase, open_dataset, to_ase
from flt_mol.data.flat import write_flat
from flt_mol.structures import Structures

NAMES = ("atomic_numbers", "positions", "cell", "pbc", "tags", "fixed", "energy", "ptr")


def frame(sid, size=3):
    """An O on a column of Cu, in a cell without symmetry."""
    rng = np.random.default_rng(sid)
    atoms = Atoms(
        f"Cu{size}O",
        positions=rng.uniform(0, 5, (size + 1, 3)).astype(np.float32),
        cell=[[5.0, 0.5, 0.25], [0, 6.0, 1.0], [0, 0, 20.0]],
        pbc=[True, True, False],
        tags=[0] * (size - 1) + [1, 2],
        info={"sid": sid, "y_relaxed": -sid / 8},
    )
    atoms.set_constraint(FixAtoms(range(size - 1)))
    return atoms


FRAMES = [frame(10, 3), frame(11, 5), frame(12, 2)]


def records():
    return [
        {
            "pos": torch.tensor(a.positions, dtype=torch.float32),
            "atomic_numbers": torch.tensor(a.numbers, dtype=torch.float32),
            "cell": torch.tensor(np.array(a.cell), dtype=torch.float32)[None],
            "pbc": torch.tensor(a.pbc),
            "tags": torch.tensor(a.get_tags()),
            "fixed": (torch.tensor(a.get_tags()) == 0).float(),
            "natoms": len(a),
            "sid": a.info["sid"],
            "y_relaxed": a.info["y_relaxed"],
        }
        for a in FRAMES
    ]


def row(atoms):
    """A row of an `.aselmdb` file."""

    def array(x, kind):
        return {"__ndarray__": [list(np.shape(x)), kind, np.ravel(x).tolist()]}

    content = {
        "numbers": array(atoms.numbers, "int64"),
        "positions": array(atoms.positions, "float64"),
        "cell": array(np.array(atoms.cell), "float64"),
        "pbc": array(atoms.pbc, "bool"),
        "tags": array(atoms.get_tags(), "int64"),
        "constraints": [c.todict() for c in atoms.constraints],
        "key_value_pairs": {"sid": atoms.info["sid"]},
        "data": {"y_relaxed": atoms.info["y_relaxed"]},
    }
    content["constraints"][0]["kwargs"]["indices"] = list(atoms.constraints[0].index)
    return zlib.compress(json.dumps(content, default=int).encode())


def of_lmdb(make, suffix="lmdb"):
    def source(folder, write_lmdb, pickle_pyg):
        values = {i + 1: make(i, pickle_pyg) for i in range(3)}
        return write_lmdb(values, folder / f"data.{suffix}")

    return source


def of_ase(name):
    def source(folder, write_lmdb, pickle_pyg):
        write(folder / name, FRAMES)
        return folder / name

    return source


def of_database(name):
    def source(folder, write_lmdb, pickle_pyg):
        with connect(folder / name) as database:
            for atoms in FRAMES:
                database.write(
                    atoms, sid=atoms.info["sid"], data={"y_relaxed": atoms.info["y_relaxed"]}
                )
        return folder / name

    return source


def shards(folder, write_lmdb, pickle_pyg):
    for number, some in ((2, [0]), (10, [1, 2])):
        write_lmdb({i: records()[i] for i in some}, folder / f"data.{number}.lmdb")
    (folder / "data.2.lmdb-lock").touch()
    return folder


def flat(folder, write_lmdb, pickle_pyg):
    write_flat([Structures.cat([from_ase(a) for a in FRAMES])], folder / "a.safetensors")
    return folder / "a.safetensors"


def saved(folder, write_lmdb, pickle_pyg):
    torch.save(records(), folder / "a.pt")
    return folder / "a.pt"


SOURCES = {
    "LMDB of dicts": of_lmdb(lambda i, _: records()[i]),
    "LMDB of numpy, zlib": of_lmdb(
        lambda i, _: zlib.compress(
            pickle.dumps({k: np.asarray(v) if k != "sid" else v for k, v in records()[i].items()})
        )
    ),
    "LMDB of PyG 1.x": of_lmdb(lambda i, pyg: pyg(records()[i], 1)),
    "LMDB of PyG 2.x": of_lmdb(lambda i, pyg: pyg(records()[i], 2)),
    "aselmdb": of_lmdb(lambda i, _: row(FRAMES[i]), "aselmdb"),
    "aselmdb called lmdb": of_lmdb(lambda i, _: row(FRAMES[i])),
    "folder of LMDB": shards,
    "flat": flat,
    "torch.save": saved,
    "traj": of_ase("a.traj"),
    "extxyz": of_ase("a.extxyz"),
    "db": of_database("a.db"),
    "json": of_database("a.json"),
    "list of Atoms": lambda *_: [a.copy() for a in FRAMES],
    "list of mappings": lambda *_: records(),
    "Structures": lambda *_: Structures.cat([from_ase(a) for a in FRAMES]),
    "mixture": lambda *_: [FRAMES[0], records()[1], from_ase(FRAMES[2])],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_systems(kind, tmp_path, write_lmdb, pickle_pyg):
    dataset = open_dataset(SOURCES[kind](tmp_path, write_lmdb, pickle_pyg), require_energy=True)
    expected = Structures.cat([from_ase(a) for a in FRAMES])
    assert len(dataset) == 3
    assert dataset.kind
    order = [2, 0, 1, 2]
    for batch, truth in (
        (dataset.batch(range(3)), expected),
        (Structures.cat(list(dataset)), expected),
        (dataset.batch(order), expected.select(order)),
        (pickle.loads(pickle.dumps(dataset)).batch(order), expected.select(order)),
    ):
        assert batch.sid == truth.sid
        for name in NAMES:
            assert torch.allclose(getattr(batch, name), getattr(truth, name), atol=1e-5), name
        assert batch.energy.dtype == torch.float64
    assert dataset.natoms().tolist() == [4, 6, 3]
    record = dataset.record(1)
    assert record["sid"] == 11
    assert np.allclose(record["pos"], FRAMES[1].positions, atol=1e-5)
    with pytest.raises(IndexError):
        dataset[3]


def test_structures_and_atoms_there_and_back():
    system = from_ase(FRAMES[1])
    back = from_ase(to_ase(system))
    assert all(torch.equal(getattr(back, name), getattr(system, name)) for name in NAMES)
    assert back.sid == (11,)


def test_invalid_objects_are_named_or_skipped():
    source = [FRAMES[0], {"pos": 1}, 7]
    with pytest.raises(ValueError, match="list in memory, place 2"):
        open_dataset(source)
    with pytest.raises(ValueError, match="list in memory, system 1: atomic_numbers"):
        open_dataset(source[:2])[1]
    rest = open_dataset(source, on_error="skip")
    assert [s.sid for s in rest] == [(10,)]
    assert len(rest.skipped) == 2


@pytest.mark.parametrize("source", [7, None, [], 3.5, object()])
def test_what_is_no_source(source):
    with pytest.raises(ValueError, match="in memory"):
        open_dataset(source)


def test_folders(tmp_path, write_lmdb, make_record):
    with pytest.raises(ValueError, match="no structures in .*no files"):
        open_dataset(tmp_path)
    (tmp_path / "notes.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"no structures.*notes.npz"):
        open_dataset(tmp_path)
    for i in (10, 2, 1):
        write_lmdb({0: make_record(sid=i)}, f"data.{i}.lmdb")
    with pytest.warns(UserWarning, match="notes.npz"):
        dataset = open_dataset(tmp_path)
    assert [s.sid[0] for s in dataset] == [1, 2, 10]
    assert dataset.where(2).endswith("data.10.lmdb, key 0")
    (tmp_path / "data.3.lmdb").write_bytes(b"")
    (tmp_path / "notes.npz").unlink()
    with pytest.raises(ValueError, match="data.3.lmdb is not an LMDB file: it is empty"):
        open_dataset(tmp_path)
    rest = open_dataset(tmp_path, on_error="skip")
    assert len(rest) == 3
    assert len(rest.skipped) == 1


def test_sids_of_shards_without_sids(tmp_path, write_lmdb, make_record):
    for name in ("a", "b"):
        write_lmdb({i: make_record(sid=...) for i in range(2)}, f"{name}.lmdb")
    with pytest.warns(UserWarning, match="no sid") as caught:
        assert open_dataset(tmp_path).batch(range(4)).sid == ("a:0", "a:1", "b:0", "b:1")
    assert len(caught) == 1


def test_paths_that_are_no_data(tmp_path):
    for path, reason in (
        (tmp_path / "nowhere.lmdb", "does not exist"),
        ("", "path is empty"),
        ("/dev/null", "not a regular file"),
        ("emt_adsorption", "is a data set"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_dataset(path)


def test_the_folder_of_a_data_set_is_not_mixed():
    with pytest.raises(ValueError, match="is a data set"):
        open_dataset("datasets/emt_adsorption")


def test_objects_of_pyg_and_layer_numbers(make_record):
    class Data:
        def __init__(self, **fields):
            vars(self).update(fields)

    assert open_dataset(Data(**make_record()))[0].sid == (101,)
    from ase.build import add_adsorbate, fcc111

    slab = fcc111("Cu", (1, 1, 4), vacuum=8.0)
    add_adsorbate(slab, "O", 1.2, "fcc")
    with (
        pytest.warns(UserWarning, match="layer numbers"),
        pytest.raises(ValueError, match="tags holds 4.*tag_slab"),
    ):
        open_dataset(slab)[0]
    with pytest.warns(UserWarning, match="no sid"):
        assert open_dataset(slab, tag_slab=lambda one: one)[0].tags.tolist() == [0] * 5
