"""Pickles: what is read of each protocol and library, and that nothing is run."""

import collections
import io
import os
import pickle
import zipfile
import zlib

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, InMemoryDataset

from flt_mol.data import open_dataset
from flt_mol.data.lmdb import write_lmdb as write
from flt_mol.data.pyg import fields_of
from flt_mol.data.schema import Stored, to_numpy
from flt_mol.data.unpickle import _Storage, inflated, unpickle
from tests.helpers.hostile import PICKLES


def fields(data):
    return {
        name: value.numpy() if isinstance(value, Stored) else value
        for name, value in fields_of(unpickle(inflated(data))).items()
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("squeeze", [bytes, zlib.compress])
def test_dicts_of_every_protocol(protocol, squeeze, make_record):
    record = make_record(extra=np.arange(6).reshape(2, 3), text="111", nested=[1, (2, {"a": {3}})])
    found = fields(squeeze(pickle.dumps(record, protocol)))
    assert found.keys() == record.keys()
    for name, value in record.items():
        if isinstance(value, torch.Tensor | np.ndarray):
            assert found[name].dtype == to_numpy(value).dtype
            assert np.array_equal(found[name], value)
        else:
            assert found[name] == value


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_pyg_of_both_generations(version, protocol, make_record, pickle_pyg, write_lmdb):
    record = make_record()
    path = write_lmdb({0: pickle_pyg(record, version, protocol), 1: record})
    batch = open_dataset(path).batch([0, 1])
    assert torch.equal(batch[0].positions, batch[1].positions)
    assert torch.equal(batch[0].cell, batch[1].cell)
    assert batch.sid == (101, 101)
    assert batch.energy.tolist() == [-1.25, -1.25]


DTYPES = (*(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),)
DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_layout(dtype):
    base = torch.arange(24).reshape(4, 6).remainder(2).to(dtype)
    views = [base, base.T, base[1:3, ::2], base[:, :0], base[0, 0], base[0].expand(3, 6)]
    for tensor, found in zip(views, unpickle(pickle.dumps(views)), strict=True):
        assert np.array_equal(found.numpy(), to_numpy(tensor))
        assert found.numpy().shape == tuple(tensor.shape)


ARRAYS = [
    np.arange(6, dtype=">i4"),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(12)[::2],
    np.array(3.5),
    np.zeros((0, 3), np.uint8),
    np.array([True, False]),
    np.float32([1.5]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=range(len(ARRAYS)))
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_arrays_of_every_layout(array, protocol):
    found = unpickle(pickle.dumps(array, protocol)).numpy()
    assert np.array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("=")
    assert unpickle(pickle.dumps(np.float64(2.5), protocol)) == 2.5


@pytest.mark.parametrize(
    "value",
    [np.array([{}], object), np.zeros(2, [("a", "f4")]), torch.zeros(2, dtype=torch.cfloat)],
)
def test_values_that_hold_no_numbers_harm_their_own_field_only(value, make_record, write_lmdb):
    path = write_lmdb({0: make_record(other=value), 1: make_record(tags=value)})
    if value.dtype != torch.cfloat:
        assert open_dataset(path)[0].sid == (101,)
    with pytest.raises(ValueError, match="data.lmdb, key 1"):
        open_dataset(path)[1]


def test_classes_of_others_are_refused_by_name():
    for value in (collections.Counter("a"), pytest.raises, os.system, np.load):
        with pytest.raises(ValueError, match=r"(Counter|raises|system|load).*never run"):
            unpickle(pickle.dumps({"a": value}))
    with pytest.raises(ValueError, match="outside the record"):
        unpickle(b"Pos.system\n.")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_damaged_pickles_are_value_errors(damage, make_record):
    data = pickle.dumps(make_record())
    damaged = {
        "cut": data[: len(data) // 2],
        "flipped": data[:20] + b"\xff" + data[21:],
        "empty": b"",
        "text": b"no pickle",
    }[damage]
    with pytest.raises(ValueError, match="unreadable record of"):
        unpickle(damaged)


@pytest.mark.parametrize(
    "length", ["memo bomb", "text memo bomb", "huge BINBYTES8", "huge BINUNICODE"]
)
def test_declared_lengths_do_not_exceed_the_record(length):
    with pytest.raises(ValueError, match="memo index|truncated"):
        unpickle(PICKLES[length]("canary"))


def test_deep_keys_are_refused():
    with pytest.raises(ValueError, match="are tuples"):
        unpickle(PICKLES["nested key"]("canary"))
    with pytest.raises(ValueError, match="tuples or calls"):
        unpickle(b"\x80\x04}(" + b")" + b"\x85" * 3_000_000 + b"K\x01u.")
    # As many tuples of numbers as a record may hold of atoms do no harm.
    positions = {"pos": [(1.0, 2.0, 3.0)] * 3000, "tags": [(i,) for i in range(3000)]}
    assert unpickle(pickle.dumps(positions)) == positions


def test_saved_files(make_record, tmp_path, pickle_pyg):
    records = [make_record(sid=i, edge_index=...) for i in range(3)]
    paths = [tmp_path / name for name in ("zip.pt", "list.pkl", "one.pkl", "data.pkl")]
    torch.save(records, paths[0])
    paths[1].write_bytes(pickle.dumps(records))
    paths[2].write_bytes(pickle.dumps(records[0]))
    paths[3].write_bytes(pickle_pyg(make_record(sid=0, edge_index=...), 2))
    for path, count in zip(paths, (3, 3, 1, 1), strict=True):
        batch = open_dataset(path).batch(range(count))
        assert batch.sid == tuple(range(count))
        assert torch.equal(batch.positions[:6], records[0]["pos"])


def test_saved_files_that_are_refused(tmp_path):
    torch.save({"a": os.system}, tmp_path / "hostile.pt")
    (tmp_path / "zip.pt").write_bytes(b"PK\x05\x06" + bytes(18))
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
    (tmp_path / "two.pt").write_bytes(2 * pickle.dumps(ATOMS))  # of which one would be lost
    refused = {"hostile": "system", "zip": "torch.save.*no data.pkl", "cut": "zip", "two": "follow"}
    for name, reason in refused.items():
        with pytest.raises(ValueError, match=rf"{name}\.pt.*{reason}"):
            open_dataset(tmp_path / f"{name}.pt")
    foreign = {
        "gzip": b"\x1f\x8b\x08",
        "web page": b"<html>",
        "git-lfs": b"version https://git-lfs",
    }
    for kind, head in foreign.items():
        for file in (tmp_path / "a.pt", tmp_path / "a.safetensors"):
            file.write_bytes(head + bytes(99))
            with pytest.raises(ValueError, match=rf"{file.name}.* is a {kind}"):
                open_dataset(file)


def atoms(sid):
    """As PyG stores them, in three, four or five atoms."""
    n = 3 + sid % 3
    fields = {"pos": torch.arange(3.0 * n).reshape(n, 3) + sid, "cell": 9 * torch.eye(3)[None]}
    numbers = {"atomic_numbers": torch.full((n,), 29.0), "tags": torch.ones(n, dtype=torch.long)}
    edges = {"edge_index": torch.zeros(2, n, dtype=torch.long), "fixed": torch.zeros(n)}
    return Data(**fields, **numbers, **edges, natoms=n, y_relaxed=0.5 * sid, sid=sid)


ATOMS = [atoms(sid) for sid in range(4)]
COLLATED = InMemoryDataset.collate(ATOMS)
OBJECTS = {
    "list": ATOMS,
    "tuple": tuple(ATOMS),
    "batch": Batch.from_data_list(ATOMS),
    "by name": {f"s{one.sid}": one for one in ATOMS},
    "dicts": [one.to_dict() for one in ATOMS],
    "collated": COLLATED,
    "collated dict": (COLLATED[0].to_dict(), COLLATED[1], Data),
}
WRITERS = {
    "zip": torch.save,
    "legacy": lambda obj, path: torch.save(obj, path, _use_new_zipfile_serialization=False),
    "pickle 2": lambda obj, path: path.write_bytes(pickle.dumps(obj, 2)),
    "pickle 5": lambda obj, path: path.write_bytes(pickle.dumps(obj, 5)),
}


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["a.pt", "a.pkl", "a", "a.lmdb"])
def test_objects_of_pyg_however_they_were_saved(kind, writer, name, tmp_path):
    WRITERS[writer](OBJECTS[kind], tmp_path / name)
    batch = open_dataset(tmp_path / name).batch(range(4))
    assert batch.sid == (0, 1, 2, 3)
    assert batch.energy.tolist() == [0, 0.5, 1.0, 1.5]
    assert torch.equal(batch.positions, torch.cat([one.pos for one in ATOMS]))
    assert batch.natoms.tolist() == [3, 4, 5, 3]


def test_long_lists(tmp_path):
    torch.save(ATOMS * 2500, tmp_path / "one.pt")
    one = [atoms(sid) for sid in range(3000)]
    torch.save(one, tmp_path / "many.pt")
    assert len(open_dataset(tmp_path / "one.pt")) == 10_000
    assert open_dataset(tmp_path / "many.pt")[2999].sid == (2999,)


def test_a_folder_of_saved_objects_and_compressed_archives(tmp_path):
    for one in ATOMS:
        torch.save(one, tmp_path / f"data_{one.sid}.pt")
    assert open_dataset(tmp_path).batch(range(4)).sid == (0, 1, 2, 3)
    torch.save(ATOMS, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as stored,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.namelist():
            packed.writestr(entry, stored.read(entry))
    assert len(open_dataset(tmp_path / "b.pt")) == 4
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("a/data.pkl", bytes(1 << 28))
    with pytest.raises(ValueError, match=r"bomb\.pt.*too large"):
        open_dataset(tmp_path / "bomb.pt")


def test_names_in_a_mapping_are_sids(tmp_path):
    unnamed = [Data(**{k: v for k, v in one.to_dict().items() if k != "sid"}) for one in ATOMS]
    torch.save({f"slab {i}": one for i, one in enumerate(unnamed)}, tmp_path / "a.pt")
    assert open_dataset(tmp_path / "a.pt")[2].sid == ("slab 2",)


@pytest.mark.parametrize("writer", WRITERS)
def test_hostile_files_name_what_they_ask_for_and_run_nothing(writer, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'run'}",)

    WRITERS[writer]([Hostile()], tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt.*system, which is never run"):
        open_dataset(tmp_path / "a.pt")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("writer", ["zip", "legacy"])
def test_files_that_are_cut_never_give_numbers(writer, tmp_path):
    WRITERS[writer](ATOMS, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    for share in (0.02, 0.3, 0.6, 0.9, 0.999):
        (tmp_path / "b.pt").write_bytes(data[: int(share * len(data))])
        with pytest.raises(ValueError, match=r"b\.pt.*torch.save"):
            open_dataset(tmp_path / "b.pt")


def test_tensors_without_stored_numbers_are_refused():
    storage = unpickle(pickle.dumps(torch.ones(2)))
    storage.args = (_Storage(b"", "FloatStorage"), 0, (2,), (1,))
    with pytest.raises(ValueError, match="0 numbers"):
        storage.numpy()


WEIGHTS = torch.nn.Linear(2, 2).state_dict()  # a dict with attributes


@pytest.mark.parametrize("obj", [None, 3, torch.ones(2), WEIGHTS, {"state_dict": WEIGHTS}])
def test_files_of_other_things_are_named(obj, tmp_path):
    torch.save(obj, tmp_path / "a.pt")
    missing = r"atomic_numbers is missing.*\(weights of a model\?\)"
    reason = missing if isinstance(obj, dict) else "holds no structures"
    with pytest.raises(ValueError, match=rf"a\.pt.*{reason}"):
        open_dataset(tmp_path / "a.pt")[0]


def test_lmdb_of_named_and_torch_saved_records(tmp_path):
    def saved(obj):
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        return buffer.getvalue()

    items = [(f"data_{one.sid}".encode(), saved(one)) for one in ATOMS]
    write(tmp_path / "a.lmdb", items)
    assert open_dataset(tmp_path / "a.lmdb").batch(range(4)).sid == (0, 1, 2, 3)
