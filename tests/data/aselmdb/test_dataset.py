"""`.aselmdb` files: ASE's rows in, OC20's records out, and back."""

from __future__ import annotations

import json
import pickle
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import fcc111
from ase.constraints import FixAtoms, FixCartesian, FixedPlane, FixScaled
from ase.db.row import AtomsRow, atoms2dict
from ase.io.jsonio import encode
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.data import from_ase, open_dataset
from flt_mol.data.aselmdb.dataset import AseLmdbDataset, decode_row, encode_row, write_aselmdb
from flt_mol.data.oc20 import to_structures
from flt_mol.structures import Structures

FIELDS = ("positions", "cell", "atomic_numbers", "tags", "fixed", "pbc", "ptr")
OPTIONAL = ("energy", "energy_initial", "positions_relaxed")


def assert_equal(a: Structures, b: Structures) -> None:
    for name in (*FIELDS, *OPTIONAL):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name
    assert a.sid == b.sid
    assert a.info == b.info


def ase_row(atoms: Atoms, data: Any = None, **pairs: Any) -> bytes:
    """What ASE's backend would store."""
    row = AtomsRow(atoms)
    content = {k: row[k] for k in row.__dict__ if k[0] != "_" and k != "id"}
    if atoms.constraints:
        content["constraints"] = [constraint.todict() for constraint in atoms.constraints]
    content |= {"cell": np.asarray(content["cell"]), "key_value_pairs": pairs, "data": data or {}}
    return zlib.compress(encode(content).encode())


def number(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


@pytest.fixture
def slab() -> Atoms:
    atoms = fcc111("Pt", (2, 2, 2), vacuum=8)
    atoms.pbc = True
    atoms.set_tags([0] * 4 + [1] * 4)
    atoms.set_constraint(FixAtoms(range(4)))
    return atoms


@pytest.fixture
def rows(slab: Atoms) -> list[bytes]:
    return [ase_row(slab, {"sid": 100 + i, "y_relaxed": -1.0 - i}) for i in range(4)]


def test_rows_of_ase(slab: Atoms, write_lmdb: Any) -> None:
    relaxed = slab.positions + 0.25
    data = {"sid": 7, "y_relaxed": -1.5, "pos_relaxed": relaxed, "note": "a", "lists": [1, 2]}
    path = write_lmdb({1: ase_row(slab, data, y_init=0.5), b"nextid": number(2)}, "a.aselmdb")
    dataset = open_dataset(path, require_energy=True)
    assert isinstance(dataset, AseLmdbDataset)
    (system,) = dataset
    assert torch.equal(system.positions, from_ase(slab).positions)
    assert torch.equal(system.cell, from_ase(slab).cell)
    assert system.tags.tolist() == [0] * 4 + [1] * 4
    assert system.fixed.tolist() == [True] * 4 + [False] * 4
    assert system.pbc.all()
    assert system.sid == (7,)
    assert (system.energy.item(), system.energy_initial.item()) == (-1.5, 0.5)
    assert torch.allclose(system.positions_relaxed, torch.as_tensor(relaxed).float())
    assert system.info == {"note": ("a",), "lists": ([1, 2],)}
    assert dataset.natoms().tolist() == [8]


def test_gaps_that_were_deleted_are_no_news(rows: Any, write_lmdb: Any) -> None:
    values = {1: rows[0], 3: rows[1], 12: rows[2], b"nextid": number(13)}
    gone = [n for n in range(1, 13) if n not in (1, 3, 12)]
    values |= {b"deleted_ids": number(gone), b"metadata": number({"format": "x"})}
    dataset = open_dataset(write_lmdb(values))
    assert [system.sid[0] for system in dataset] == [100, 101, 102]
    assert [dataset.number(i) for i in range(3)] == [1, 3, 12]
    assert dataset.metadata() == {"format": "x"}


@pytest.mark.parametrize(
    ("following", "deleted", "told"),
    [
        (number(6), None, "5 rows"),
        (number(4), None, "3 rows"),
        (number(7), number([5]), "5 rows"),
        (number("x"), None, "unreadable"),
        (b"x\x9cdamaged", None, "unreadable"),
        (number(5), b"?", "unreadable"),
    ],
)
def test_counts_that_disagree_are_told_once(
    following: Any, deleted: Any, told: str, rows: Any, write_lmdb: Any
) -> None:
    values = {i + 1: row for i, row in enumerate(rows)} | {b"nextid": following}
    values |= {} if deleted is None else {b"deleted_ids": deleted}
    with pytest.warns(UserWarning, match=f"{told}.*4 are stored") as caught:
        assert len(list(open_dataset(write_lmdb(values)))) == 4
    assert len(caught) == 1


def test_the_calculators_energy_only_where_it_is_named(slab: Atoms, write_lmdb: Any) -> None:
    from ase.calculators.singlepoint import SinglePointCalculator

    slab.calc = SinglePointCalculator(slab, energy=-312.5, forces=np.ones((8, 3)))
    path = write_lmdb({1: ase_row(slab, {"sid": 7}), b"nextid": number(2)})
    dataset = open_dataset(path)
    assert dataset[0].energy is None
    assert dataset[0].info == {"energy": (-312.5,)}
    assert dataset.record(0)["forces"].shape == (8, 3)
    with pytest.raises(ValueError, match="this split has no targets"):
        open_dataset(path, require_energy=True)
    asked = open_dataset(path, require_energy=True, energy="calculator")
    assert asked[0].energy.tolist() == [-312.5]


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
    record = decode_row(ase_row(slab), "here")
    assert record["fixed"].tolist() == from_ase(slab).fixed.tolist()
    assert np.flatnonzero(record["fixed"]).tolist() == [0, 1, 3, 4]


def test_rows_that_leave_out_what_is_false() -> None:
    content = atoms2dict(Atoms("CO", [[0, 0, 0], [0, 0, 1.1]]))
    assert {"pbc", "cell", "tags"}.isdisjoint(content)
    notes: dict[str, str] = {}
    row = decode_row(encode(content).encode(), "here")
    system = to_structures(row, where="here", notes=notes)
    assert not system.pbc.any()
    assert not system.cell.any()
    assert set(notes) == {"sid", "tags", "cell"}


SPOILED: dict[str, Any] = {
    "constraints": "FixAtoms",
    "key": {"constraints": [{"name": "FixAtoms"}]},
    "atom": {"constraints": [{"name": "FixAtoms", "kwargs": {"indices": [99]}}]},
    "mask": {"constraints": [{"name": "FixAtoms", "kwargs": {"indices": [True, False]}}]},
    "half": {"constraints": [{"name": "FixAtoms", "kwargs": {"indices": [0.5]}}]},
}


@pytest.mark.parametrize("content", SPOILED.values(), ids=SPOILED)
def test_constraints_that_cannot_be_read_are_errors(content: Any) -> None:
    content = {"constraints": content} if isinstance(content, str) else content
    row = {"numbers": [29], "positions": [[0, 0, 0]], **content}
    with pytest.raises(ValueError, match="here: field fixed"):
        decode_row(json.dumps(row).encode(), "here")["fixed"]


def _bomb() -> bytes:
    packer = zlib.compressobj(9)
    zeros = b" " * (1 << 20)
    return b"".join(packer.compress(zeros) for _ in range(70)) + packer.flush()


@pytest.mark.parametrize(
    "damage",
    [b"", b"x\x9c123", b"nonsense", number([1, 2]), number(7), _bomb(), number({"data": [1]})],
    ids=["empty", "cut", "text", "list", "number", "bomb", "data"],
)
def test_damaged_rows_are_named_or_skipped(damage: bytes, rows: Any, write_lmdb: Any) -> None:
    path = write_lmdb({1: rows[0], 2: damage, 3: rows[2], b"nextid": number(4)}, "a.aselmdb")
    dataset = open_dataset(path)
    with pytest.raises(ValueError, match=r"a\.aselmdb, key 2: ") as caught:
        dataset[1]
    assert str(path) in str(caught.value)
    rest = open_dataset(path, on_error="skip")
    assert [system.sid[0] for system in rest] == [100, 102]
    assert ["key 2" in message for message in rest.skipped] == [True]


def test_objects_of_ase_harm_their_own_field_only(slab: Atoms, write_lmdb: Any) -> None:
    row = json.loads(zlib.decompress(ase_row(slab)))
    path = {"__ase_objtype__": "bandpath", "kpts": [1]}
    row["data"] = {"sid": 7, "y_relaxed": -1.5, "path": path, "deep": {"list": [path]}, "good": 1}
    (system,) = dataset = open_dataset(write_lmdb({1: zlib.compress(json.dumps(row).encode())}))
    assert system.energy.tolist() == [-1.5]
    assert system.info == {"good": (1,)}
    for name in ("path", "deep"):
        with pytest.raises(ValueError, match=f"key 1: field {name} .*'bandpath'"):
            dataset.record(0)[name]
    with pytest.raises(ValueError, match="key 1: field path"):
        open_dataset(dataset.path, energy="path")[0]


def test_the_kind_is_found_by_contents(rows: Any, write_lmdb: Any, make_record: Any) -> None:
    plain = zlib.decompress(rows[0])
    first_bad = {1: b"", 2: rows[0]}
    for values in ({1: rows[0]}, {1: plain}, first_bad):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert isinstance(open_dataset(write_lmdb(values, "some.db")), AseLmdbDataset)
    pickled = open_dataset(write_lmdb({0: make_record()}, "named.aselmdb"))
    assert not isinstance(pickled, AseLmdbDataset)
    assert pickled[0].sid == (101,)
    with pytest.raises(ValueError, match=r"no records in .*empty\.lmdb"):
        open_dataset(write_lmdb({b"nextid": number(1)}, "empty.lmdb"))


def test_records_there_and_back(make_record: Any, tmp_path: Path) -> None:
    further = {"bulk_index": torch.tensor([3]), "name": "x", "ok": True, "none": None, "f": 0.1}
    records = [make_record(sid=i, y_relaxed=0.1 * i, **further) for i in range(3)]
    records.append(make_record(sid="text", tags=..., cell=..., y_relaxed=..., pos_relaxed=...))
    records.append(make_record(sid=..., pbc=[True, True, False], fixed=torch.zeros(6)))
    records.append(make_record(sid=8, cell=np.diag([9.0, 9.0, 0.0]), pbc=...))
    records.append(make_record(sid=9, pos=np.random.default_rng(0).normal(size=(6, 3))))
    path = tmp_path / "a.aselmdb"
    encoded = [encode_row(record, "here") for record in records]
    assert write_aselmdb(path, encoded, len(records), metadata={"source": "here"}) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = open_dataset(path)
        systems = list(dataset)
    assert dataset.metadata() == {"source": "here"}
    for place, record in enumerate(records):
        expected = to_structures(record, where="here", default_sid=place + 1)
        assert_equal(systems[place], expected)
        again = dataset.record(place)
        assert encode_row(again, "here") == encoded[place]
        assert again["pos"].dtype == np.asarray(record["pos"]).dtype
        assert "edge_index" not in again
        assert [again.get(name) for name in ("f", "ok")] == [record.get("f"), record.get("ok")]


@pytest.mark.parametrize("name", ["mtime", "user", "numbers", "positions", "energy", "data", "id"])
def test_fields_named_like_columns_of_a_row(name: str, make_record: Any) -> None:
    record = make_record(**{name: 7.5})
    row = decode_row(encode_row(record), "here")
    assert row[name] == 7.5
    assert_equal(to_structures(row, where=""), to_structures(record, where=""))


def test_energies_of_calculators_come_back_as_such(make_record: Any) -> None:
    record = make_record(calculator=-300.0, energy=-1.0)
    row = decode_row(encode_row(record), "here")
    assert (row["calculator"], row["energy"], row["y_relaxed"]) == (-300.0, -1.0, -1.25)
    row = decode_row(encode_row(make_record(calculator=-300.0)), "here")
    assert (row["calculator"], row["energy"]) == (-300.0, -300.0)
    row = decode_row(encode_row(make_record(calculator="vasp", energy=-1.0)), "here")
    assert (row["calculator"], row["energy"]) == ("vasp", -1.0)


@settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
    st.dictionaries(st.text(min_size=1), st.integers() | st.floats(allow_nan=False) | st.text()),
    st.randoms(use_true_random=False),
)
def test_any_record_there_and_back(
    n: int, dtype: Any, periodic: bool, further: dict[str, Any], random: Any
) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    further.pop("calculator", None)  # the name of an energy, which rows have a column for
    record = {
        **further,
        "pos": rng.normal(size=(n, 3)).astype(dtype),
        "pos_relaxed": rng.normal(size=(n, 3)).astype(dtype),
        "atomic_numbers": rng.integers(1, 118, n).astype(np.float32),
        "tags": rng.integers(0, 3, n),
        "fixed": rng.integers(0, 2, n).astype(np.float32),
        "natoms": n,
        "cell": (np.eye(3) * 9 + rng.normal(size=(3, 3))).astype(dtype)[None],
        "sid": int(rng.integers(2**40)),
        "y_relaxed": float(rng.normal()),
        "y_init": float(rng.normal()),
    }
    record |= {"pbc": [True, False, True]} if periodic else {}
    data = encode_row(record)
    back = decode_row(data, "here")
    assert_equal(to_structures(back, where=""), to_structures(record, where=""))
    assert encode_row(back) == data
    for name in ("pos", "pos_relaxed"):
        assert back[name].dtype == dtype
        assert np.array_equal(back[name], record[name])


def test_forces_are_kept_where_asked(make_record: Any) -> None:
    record = make_record(force=torch.ones(6, 3))
    assert "forces" not in decode_row(encode_row(record), "here")
    row = decode_row(encode_row(record, forces=True), "here")
    assert row["forces"].tolist() == [[1.0] * 3] * 6
    assert row["forces"].dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pos": ...}, "pos is missing"),
        ({"pos": np.zeros((5, 3))}, "pos has shape"),
        ({"atomic_numbers": [0] * 6}, "atomic_numbers holds 0"),
        ({"tags": [0.5] * 6}, "tags holds numbers that are not whole"),
        ({"fixed": [0] * 5}, "fixed has 5 numbers"),
        ({"cell": np.zeros((3, 2))}, "cell has shape"),
        ({"name": b"bytes"}, "name holds bytes"),
        ({"name": {"inner": {1, 2}}}, "name holds set"),
    ],
)
def test_records_that_rows_cannot_hold(changes: Any, told: str, make_record: Any) -> None:
    with pytest.raises(ValueError, match=f"here.*{told}"):
        encode_row(make_record(**changes), "here")


def test_files_are_whole_or_not_there(rows: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.aselmdb"
    write_aselmdb(path, rows)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="3 rows to write, expected 4"):
        write_aselmdb(path, rows[:3], 4)
    with pytest.raises(ValueError, match="0 rows to write"):
        write_aselmdb(path, [])

    def fails() -> Any:
        yield rows[0]
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_aselmdb(path, fails())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.aselmdb"]


def test_the_same_rows_give_the_same_bytes_and_the_map_grows(
    rows: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    many = rows * 40
    files = [tmp_path / "a.aselmdb", tmp_path / "b.aselmdb"]
    monkeypatch.setattr("flt_mol.data.lmdb.write._FIRST_MAP", 1 << 16)
    monkeypatch.setattr("flt_mol.data.lmdb.write._CHUNK", 7)
    for file in files:
        write_aselmdb(file, many, len(many))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 1 << 16
    assert [s.sid[0] for s in open_dataset(files[0])] == [100, 101, 102, 103] * 40


def test_pickled_data_sets_read(rows: Any, write_lmdb: Any) -> None:
    dataset = open_dataset(write_lmdb({1: rows[0], 2: rows[1], b"nextid": number(3)}))
    again = pickle.loads(pickle.dumps(dataset))
    assert [system.sid for system in again] == [(100,), (101,)]
    assert_equal(again.batch([1, 0, 1]), Structures.cat([again[1], again[0], again[1]]))


def test_ases_own_backend_agrees(slab: Atoms, make_record: Any, tmp_path: Path) -> None:
    backend = pytest.importorskip("ase_db_backends.aselmdb").LMDBDatabase
    ours, theirs = tmp_path / "ours.aselmdb", tmp_path / "theirs.aselmdb"
    write_aselmdb(ours, [encode_row(make_record(sid=i)) for i in (5, 6)], metadata={"a": 1})
    database = backend(ours, readonly=True)
    assert len(database) == 2
    assert database.metadata == {"a": 1}
    row = database._get_row(2)
    assert row.data["sid"] == 6
    atoms = row.toatoms()
    assert np.array_equal(atoms.positions.astype(np.float32), make_record()["pos"].numpy())
    assert atoms.constraints[0].index.tolist() == [0, 1]
    database.close()
    database = backend(theirs)
    for i in range(5):
        database.write(slab, data={"sid": i, "y_relaxed": 0.5 * i}, kind="slab")
    database.delete([2])
    database.close()
    systems = list(open_dataset(theirs, require_energy=True))
    assert [system.sid[0] for system in systems] == [0, 2, 3, 4]
    assert [system.energy.item() for system in systems] == [0.0, 1.0, 1.5, 2.0]
    assert systems[0].info == {"kind": ("slab",)}
    assert torch.equal(systems[0].fixed, from_ase(slab).fixed)


def test_data_counts_more_than_key_value_pairs(slab: Atoms, write_lmdb: Any) -> None:
    data = {"sid": 7, "y_relaxed": -1.5, "site": "fcc", "y_init": None}
    row = ase_row(slab, data, sid=8, y_relaxed=-1.5, site="hcp", y_init=0.5)
    (system,) = open_dataset(write_lmdb({1: row}, "a.aselmdb"))
    assert (system.sid, system.info["site"]) == ((7,), ("fcc",))
    assert (system.energy.item(), system.energy_initial.item()) == (-1.5, 0.5)


@pytest.mark.parametrize("name", ["y_relaxed", "E_ads", "y_init"])
def test_two_values_of_a_target(name: str, slab: Atoms, write_lmdb: Any) -> None:
    row = ase_row(slab, {"sid": 7, "y_relaxed": -1.0, name: -1.5}, **{name: -2.5})
    options = {"energy": name} if name == "E_ads" else {}
    path = write_lmdb({1: row}, "a.aselmdb")
    told = f"{name} of data is -1.5, {name} of key_value_pairs is -2.5"
    if name == "y_init":  # a bad one is left out, as any
        with pytest.warns(UserWarning, match=told):
            assert open_dataset(path)[0].energy_initial is None
        return
    with pytest.raises(ValueError, match=rf"key 1, sid 7: {told}"):
        list(open_dataset(path, **options))
    assert open_dataset(path, ignore_energy=True)[0].sid == (7,)
    if name != "y_relaxed":  # no target, no error
        assert open_dataset(path)[0].info["E_ads"] == (-1.5,)


@pytest.mark.parametrize("field", ["pos", "cell", "force"])
def test_numbers_that_json_does_not_have(field: str, make_record: Any) -> None:
    wide = np.diag(np.full(3, 9.0)) if field == "cell" else np.arange(18.0).reshape(6, 3)
    record = make_record(**{field: wide.astype(np.longdouble)})
    told = {"force": "forces"}.get(field, field)
    with pytest.raises(ValueError, match=rf"here: {told} holds an array of float128"):
        encode_row(record, "here", forces=True)
    assert encode_row(make_record(**{field: wide}), "here", forces=True)


def test_fields_called_as_columns_are_named(make_record: Any) -> None:
    for name in ("positions", "data"):
        with pytest.raises(ValueError, match=f"here: {name} holds bytes"):
            encode_row(make_record(**{name: b"x"}), "here")
