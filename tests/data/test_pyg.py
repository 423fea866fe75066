"""Objects of torch_geometric: its own where it is installed, and look-alikes where it is not."""

import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flt_mol.data import open_dataset
from flt_mol.data.decoding import decode
from flt_mol.data.opening import MemoryDataset
from flt_mol.data.pyg import is_pyg, pyg_records
from flt_mol.data.schema import ReadOptions
from flt_mol.structures import Structures

FIELDS = ("positions", "cell", "atomic_numbers", "tags", "fixed", "pbc", "ptr")
OPTIONAL = ("energy", "energy_initial", "positions_relaxed")


def assert_equal(a, b):
    for name in (*FIELDS, *OPTIONAL):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name
    assert a.sid == b.sid
    assert a.info == b.info


def from_pyg(data):
    """All graphs, without a warning of what they lack."""
    with warnings.catch_warnings(action="ignore"):
        dataset = open_dataset(data)
        return dataset.batch(range(len(dataset)))


@pytest.fixture
def records(make_record):
    """Systems of 6, 2 and 4 atoms with fields whose names contain "index"."""
    numbers = {"bulk_index": torch.tensor([3]), "ads_index": torch.tensor([1]), "name": "a"}
    made = []
    for place, n in enumerate((6, 2, 4)):
        record = make_record(sid=100 + place, y_relaxed=-1.5 - place, y_init=0.25, **numbers)
        for field in ("pos", "pos_relaxed", "atomic_numbers", "tags", "fixed"):
            record[field] = record[field][-n:]
        record |= {"natoms": n, "edge_index": torch.arange(2 * n).reshape(2, n) % n}
        made.append(record)
    return made


@pytest.fixture
def expected(records):
    return Structures.cat([decode([record], ReadOptions(), where=str) for record in records])


def look_alike_1(record):
    """As PyG 1.x keeps its fields."""
    data = SimpleNamespace(**record, x=None, face=None)
    data.__dict__["__num_nodes__"] = None
    return data


def look_alike_2(record):
    """As PyG 2.x keeps its fields."""
    return SimpleNamespace(_store=SimpleNamespace(_mapping=dict(record)))


def look_alike_batch(records, version):
    """What PyG's collate does to these records."""
    counts = [record["natoms"] for record in records]
    ptr = torch.tensor([0, *np.cumsum(counts)])
    fields = {"ptr": ptr, "batch": torch.arange(3).repeat_interleave(ptr.diff())}
    slices = {}
    added = {}
    for name, first in records[0].items():
        values = [record[name] for record in records]
        if isinstance(first, str):
            fields[name] = values
        elif not isinstance(first, torch.Tensor):
            fields[name] = torch.tensor(values, dtype=torch.float64 if name[0] == "y" else None)
            slices[name] = torch.arange(4)
        else:
            axis = -1 if name == "edge_index" else 0
            if "index" in name:
                added[name] = ptr[:-1]
                values = [value + int(start) for value, start in zip(values, ptr, strict=False)]
            fields[name] = torch.cat(values, axis)
            slices[name] = torch.tensor([0, *np.cumsum([v.shape[axis] for v in values])])
    if version == 1:
        return SimpleNamespace(**fields, __slices__=slices, __cumsum__=added)
    store = SimpleNamespace(_mapping=fields, _slice_dict=slices, _inc_dict=added, _num_graphs=3)
    return SimpleNamespace(_store=store)


@pytest.mark.parametrize("make", [look_alike_1, look_alike_2])
def test_data_of_any_version(make, records, expected):
    assert_equal(Structures.cat([from_pyg(make(record)) for record in records]), expected)


@pytest.mark.parametrize("version", [1, 2])
def test_batches_come_apart_as_they_were(version, records, expected):
    batch = look_alike_batch(records, version)
    numbers = (vars(batch) if version == 1 else batch._store._mapping)["bulk_index"]
    assert numbers.tolist() == [3, 9, 11]
    assert_equal(from_pyg(batch), expected)
    assert from_pyg(batch).info["bulk_index"] == (3, 3, 3)
    assert_equal(open_dataset(batch).batch([0, 1, 2]), expected)


@pytest.mark.parametrize("kept", ["ptr", "batch"])
def test_batches_without_notes_go_by_sizes(kept, records, expected):
    batch = look_alike_batch(records, 1)
    for name in {"ptr", "batch", "natoms", "__slices__", "__cumsum__"} - {kept}:
        del batch.__dict__[name]
    for name in ("bulk_index", "ads_index"):  # what was added is not known any more
        batch.__dict__[name] = torch.tensor([3, 3, 3] if name[0] == "b" else [1, 1, 1])
    batch.cell = batch.cell.reshape(9, 3)
    assert_equal(from_pyg(batch), expected)


def test_fields_that_were_changed_after_batching(records, expected):
    batch = look_alike_batch(records, 2)
    batch._store._mapping["y_relaxed"] = torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64)
    batch._store._mapping["sid"] = ["a", "b", "c"]
    batch._store._mapping["cell"] = batch._store._mapping["cell"].reshape(9, 3)
    system = from_pyg(batch)
    assert system.energy.tolist() == [7.0, 8.0, 9.0]
    assert system.sid == ("a", "b", "c")
    assert torch.equal(system.positions, expected.positions)
    assert torch.equal(system.cell, expected.cell)


def test_mixed_atoms_are_refused(records):
    batch = look_alike_batch(records, 1)
    del batch.ptr
    batch.batch = batch.batch.flip(0)
    with pytest.raises(ValueError, match="batch is not ascending"):
        pyg_records(batch)


def test_graphs_without_atoms_are_named(records):
    batch = SimpleNamespace(
        pos=torch.zeros(2, 3), atomic_numbers=torch.ones(2), ptr=torch.tensor([0, 2, 2])
    )
    assert len(pyg_records(batch)) == 2
    with pytest.raises(ValueError, match=r"SimpleNamespace.* 1: .*no atoms"):
        from_pyg(batch)


def test_z_is_taken_for_atomic_numbers_with_a_note():
    data = SimpleNamespace(pos=torch.zeros(1, 3), z=torch.tensor([29]), y=torch.tensor([[-1.5]]))
    with pytest.warns(UserWarning, match="z is used"), pytest.warns(UserWarning, match="no sid"):
        system = open_dataset(data, energy="y")[0]
    assert system.atomic_numbers.tolist() == [29]
    assert system.energy.tolist() == [-1.5]


@pytest.mark.parametrize("value", [3, None, "text", [1], SimpleNamespace(a=1), object(), dict])
def test_what_is_no_such_object(value):
    assert not is_pyg(value)
    with pytest.raises(ValueError, match="expected PyG Data or Batch"):
        pyg_records(value)


def test_several_kinds_of_nodes_are_refused():
    with pytest.raises(ValueError, match="several kinds of nodes"):
        pyg_records(SimpleNamespace(_node_store_dict={}))


def test_errors_name_place_sid_and_field(records):
    records[1]["pos"] = records[1]["pos"] * float("nan")
    with pytest.raises(ValueError, match=r"list in memory, system 1, sid 101: pos"):
        list(open_dataset([look_alike_1(record) for record in records]))
    dataset = open_dataset([look_alike_1(record) for record in records], on_error="skip")
    assert [system.sid[0] for system in dataset] == [100, 102]
    assert len(dataset.skipped) == 1


def test_without_targets(records):
    for record in records:
        del record["y_relaxed"]
    data = [look_alike_2(record) for record in records]
    assert open_dataset(data)[0].energy is None
    with pytest.raises(ValueError, match="this split has no targets"):
        open_dataset(data, require_energy=True)


def test_no_torch_geometric_is_imported():
    code = (
        "import sys\n"
        "sys.modules['torch_geometric'] = None\n"
        "import flt_mol.data.opening\n"
        "from types import SimpleNamespace as Data\n"
        "data = Data(pos=[[0, 0, 0.0]], atomic_numbers=[29], natoms=1, sid=7)\n"
        "print(flt_mol.data.opening.open_dataset(data)[0].sid)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "(7,)\n", result.stderr


@pytest.fixture
def pyg():
    return pytest.importorskip("torch_geometric.data")


@pytest.fixture
def graphs(pyg, records):
    return [pyg.Data(**record) for record in records]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_genuine_objects(pyg, graphs, expected):
    batch = pyg.Batch.from_data_list(graphs)
    assert batch.bulk_index.tolist() == [3, 9, 11]

    class Stored(pyg.InMemoryDataset):
        def __init__(self):
            super().__init__(None)
            self.data, self.slices = self.collate(graphs)

    sources = [graphs, tuple(graphs), batch, [batch], [graphs[0], *graphs[1:]], Stored()]
    sources += [iter(graphs), pickle.loads(pickle.dumps(batch))]
    for source in sources:
        dataset = open_dataset(source)
        assert isinstance(dataset, MemoryDataset)
        assert_equal(dataset.batch([0, 1, 2]), expected)
    # Energies are float32 after PyG's collate; those here are exact in it.
    assert expected.energy.tolist() == [-1.5, -2.5, -3.5]


def test_objects_of_1x_unpickled_under_2x(pyg, pickle_pyg, records, expected):
    old = [pickle.loads(pickle_pyg(record, 1)) for record in records]
    assert type(old[0]) is pyg.Data
    with pytest.raises(RuntimeError):
        _ = old[0].pos
    assert_equal(open_dataset(old).batch([0, 1, 2]), expected)


def test_followed_batches(pyg, graphs, expected):
    batch = pyg.Batch.from_data_list(graphs, follow_batch=["pos"])
    assert "pos_batch" in batch
    assert_equal(from_pyg(batch), expected)


def test_booleans_in_a_batch(pyg, records, expected):
    kinds = {"pbc": torch.tensor([True, True, True]), "seen_index": torch.tensor([True])}
    changed = [{**record, **kinds, "fixed": record["fixed"] != 0} for record in records]
    batch = pyg.Batch.from_data_list([pyg.Data(**record) for record in changed])
    assert batch.pbc.dtype == batch.fixed.dtype == torch.bool
    system = from_pyg(batch)
    assert torch.equal(system.fixed, expected.fixed)
    assert torch.equal(system.pbc, expected.pbc)
    # PyG adds to it, which makes it a number.
    assert system.info["seen_index"] == (1, 1, 1)


def test_a_batch_as_one_record_is_refused(pyg, records, expected, write_lmdb):
    bare = [{k: v for k, v in record.items() if k not in ("natoms", "sid")} for record in records]
    several = pyg.Batch.from_data_list([pyg.Data(**record) for record in bare])
    one = pyg.Batch.from_data_list([pyg.Data(**bare[0])])
    dataset = open_dataset(write_lmdb({0: several, 1: one}))
    with pytest.warns(UserWarning, match="no natoms"):
        assert torch.equal(dataset[1].positions, expected[0].positions)
    for read in (lambda: dataset[0], lambda: dataset.batch([0]), lambda: dataset.batch([1, 0])):
        with pytest.raises(ValueError, match=r"key 0.*batch is of several graphs"):
            read()
    assert torch.equal(dataset.batch([1]).positions, expected[0].positions)


@pytest.mark.parametrize("listed", [False, True])
def test_mappings_of_several_graphs_are_refused(listed, make_record, write_lmdb):
    held = torch.tensor([0, 0, 1, 1, 1, 1])
    record = make_record(batch=held.tolist() if listed else held)
    dataset = open_dataset(write_lmdb({0: make_record(ptr=torch.tensor([0, 6])), 1: record}))
    with pytest.raises(ValueError, match="batch is of several graphs"):
        dataset.batch([0, 1])
    with pytest.raises(ValueError, match="batch is of several graphs"):
        decode([record], ReadOptions(), where=str)


@pytest.mark.parametrize("batch", ["train", 3, [0] * 6, [4] * 6, [1, 2], torch.arange(6.0), ["a"]])
def test_other_fields_called_batch_do_no_harm(batch, make_record):
    system = decode([make_record(batch=batch, ptr=[0, 6])], ReadOptions(), where=str)
    assert system.natoms.tolist() == [6]
