"""Round trips: what is read after a conversion is what was read before."""

from __future__ import annotations

import json
import os
import warnings

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert

KINDS = ("lmdb", "aselmdb", "extxyz")
CELL = np.diag([7.0, 8.0, 9.0])

pytestmark = pytest.mark.filterwarnings("ignore:.*(no |all tags|left out|lie above).*:UserWarning")


def same_systems(source, output, bits, indices=None):
    chosen = range(len(source)) if indices is None else indices
    found = open_dataset(output)
    assert len(found) == len(chosen)
    for index, system in zip(chosen, found, strict=True):
        assert bits(system) == bits(source[index])
    return found


ODD = {
    "no tags": {"tags": ...},
    "no fixed": {"fixed": ...},
    "no tags, no fixed, no natoms": {"tags": ..., "fixed": ..., "natoms": ...},
    "no sid": {"sid": ...},
    "no targets": {"y_relaxed": ..., "y_init": ..., "pos_relaxed": ...},
    "only the target": {"y_init": ..., "pos_relaxed": ...},
    "nothing fixed": {"fixed": torch.zeros(6)},
    "all fixed": {"fixed": torch.ones(6)},
    "no cell": {"cell": ...},
    "zero cell": {"cell": torch.zeros(1, 3, 3)},
    "cell of negative zeros": {"cell": -torch.zeros(1, 3, 3)},
    "slab": {"cell": np.diag([7.0, 8.0, 0.0])},
    "pbc of one axis": {"cell": CELL, "pbc": np.array([False, True, False])},
    "not periodic in a cell": {"cell": CELL, "pbc": [False]},
    "float64": {"pos": np.arange(18.0).reshape(6, 3) / 7, "cell": CELL / 3 + 5},
    "float64 relaxed": {"pos_relaxed": np.arange(18.0).reshape(6, 3) / 7},
    "float64 initial": {"pos": np.arange(18.0).reshape(6, 3) / 7},
    "float16": {"pos": np.arange(18).reshape(6, 3).astype(np.float16) / 7},
    "whole numbers": {"pos": np.arange(18).reshape(6, 3)},
    "negative zero": {"pos": -np.zeros((6, 3), np.float32), "y_relaxed": -0.0, "y_init": -0.0},
    "tiny and large": {"pos": np.float32([[1e-45, 2e-38, 3e7 / 7, *[0.1] * 15]]).reshape(6, 3)},
    "far, float32": {"pos": np.float32(np.arange(18).reshape(6, 3) / 7 + 3e4)},
    "far, float64": {"pos": np.arange(18).reshape(6, 3) / 7 + 1e6},
    "just far enough": {"pos": np.full((6, 3), np.nextafter(np.float32(100), np.float32(200)))},
    "just near enough": {"pos": np.full((6, 3), np.float32(100))},
    "energy in float32": {"y_relaxed": torch.tensor([-1.1]), "y_init": np.float32(0.3)},
    "text sid": {"sid": "slab 12 'A' \"b\" \\ {x=1} [2] = é\n\tend"},
    "text sid like a number": {"sid": "0012"},
    "text sid like another number": {"sid": "1e3"},
    "text sid like nan": {"sid": "nan"},
    "text sid like a boolean": {"sid": "T"},
    "text sid like an array": {"sid": "1 2 3"},
    "text sid like JSON": {"sid": '_JSON {"a": 1}'},
    "empty text sid": {"sid": ""},
    "negative sid": {"sid": -5},
    "large sid": {"sid": 2**63 - 1},
    "sid as tensor": {"sid": torch.tensor([9])},
    "one atom": {
        "pos": np.float32([[1, 2, 3]]), "atomic_numbers": [1.0], "natoms": 1, "tags": [2],
        "fixed": [0], "pos_relaxed": np.float64([[1, 2, 3.1]]),
    },
    "elements at the ends": {"atomic_numbers": torch.tensor([1, 118, 117, 2, 57, 103])},
    "info": {
        "bulk_id": "mp-126", "flag": True, "other": False, "ratio": 0.1,
        "nothing": float("nan"), "much": float("inf"), "minus": -0.0, "whole": 3.0,
        "name": "True", "number": "12", "empty": "", "long": 2**60,
    },
    "info of lists": {
        "shift": torch.tensor([0.5, 0.25]), "one": np.array([3]),
        "hkl": [1, 2, 3], "words": ["a b", "c"], "none": [],
    },
    "info that JSON has not": {
        "miller": (1, 1, 1), "bulk index": 3, "blob": b"\0\1", "mixed": [1, 2.5], "deep": [[1], []],
    },
    "info of a calculator": {
        "energy": -3.25, "free_energy": -3.5, "dipole": [0.5, 0.25, -1.0],
        "stress": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "magmom": 1.0,
    },
}  # fmt: skip
NOT_IN = [("info that JSON has not", "aselmdb"), ("info that JSON has not", "extxyz")]


@pytest.mark.parametrize("kind", KINDS)
def test_odd_records_come_back(kind, make_record, source, bits, tmp_path):
    names = [name for name in ODD if (name, kind) not in NOT_IN]
    given = source([make_record(**ODD[name]) for name in names])
    convert(given, tmp_path / f"out.{kind}", workers=1, chunk_size=20)
    found = open_dataset(tmp_path / f"out.{kind}")
    wrong = [name for i, name in enumerate(names) if bits(found[i]) != bits(given[i])]
    assert (len(found), wrong) == (len(names), [])


@pytest.mark.parametrize(("kind", "key", "value"), [
    ("aselmdb", "miller", (1, 1, 1)),
    ("aselmdb", "deep", [(1,), 2]),
    ("extxyz", "miller", (1, 1, 1)),
    ("extxyz", "mixed", [1, 2.5]),
    ("extxyz", "one", [1]),
    ("extxyz", "deep", [[1], [2, 3]]),
    ("extxyz", "several", {"a": 1}),
    ("extxyz", "blob", b"x"),
    ("extxyz", "number", 1 + 2j),
    ("extxyz", "large", 2**70),
    ("extxyz", "bulk index", 3),
    ("extxyz", "größe", 3),
    ("extxyz", "Lattice", 3.0),
    ("extxyz", "uid", 3),
    ("extxyz", "polarization", 3.0),
    ("extxyz", "unique_id", "x"),
    ("extxyz", "energy", 3),
    ("extxyz", "stress", [1.0, 2.0, 3.0]),
])  # fmt: skip
def test_what_a_file_cannot_hold_is_refused_by_name(
    kind, key, value, make_record, source, tmp_path
):
    given = source([make_record(), make_record(**{key: value})])
    with pytest.raises(ValueError, match=f"key 1, sid 101: {key} .*; convert to .lmdb"):
        convert(given, tmp_path / f"out.{kind}", workers=1)
    result = convert(given, tmp_path / "out.lmdb", workers=1)
    assert open_dataset(result.output)[1].info[key] == (value,)


@pytest.mark.parametrize(("key", "target"), [
    ("energy_relaxed", "y_relaxed"), ("energy_init", "y_init"),
])  # fmt: skip
def test_a_value_is_not_taken_for_a_missing_target(key, target, make_record, bits, tmp_path):
    given = open_dataset([make_record(**{key: 1.5})])
    convert(given, tmp_path / "with.extxyz", workers=1)
    same_systems(given, tmp_path / "with.extxyz", bits)
    without = open_dataset([make_record(**{key: 1.5, target: ...})])
    with pytest.raises(ValueError, match=f"{key} cannot have this name"):
        convert(without, tmp_path / "without.extxyz", workers=1)


@pytest.mark.parametrize("kind", KINDS)
def test_all_at_once(kind, source, bits, tmp_path):
    given = source(30)
    result = convert(given, tmp_path / f"out.{kind}", workers=1, chunk_size=7)
    same_systems(given, result.output, bits)
    assert (result.systems, result.kind, result.skipped) == (30, kind, ())
    assert result.left_out == ("edge_index",)
    assert result.bytes == result.output.stat().st_size
    assert result.bytes_per_system == result.bytes / 30
    assert sorted(os.listdir(tmp_path)) == [f"out.{kind}", "source"]


finite = st.floats(-(2.0**99), 2.0**99, width=32)
value = st.one_of(
    st.booleans(), st.integers(-(2**62), 2**62), st.floats(), st.text(max_size=8),
    st.lists(st.floats(), min_size=2, max_size=4), st.lists(st.text(max_size=3), max_size=3),
)  # fmt: skip


@st.composite
def any_record(draw):
    n = draw(st.integers(1, 4))
    pos = np.array(draw(st.lists(finite, min_size=3 * n, max_size=3 * n))).reshape(n, 3)
    record = {
        "pos": pos.astype(draw(st.sampled_from([np.float32, np.float64]))),
        "atomic_numbers": draw(st.lists(st.integers(1, 118), min_size=n, max_size=n)),
        "cell": np.diag(draw(st.lists(st.floats(1, 1e3), min_size=3, max_size=3))),
        "sid": draw(st.one_of(st.text(max_size=8), st.integers(-(2**63) + 1, 2**63 - 1))),
        "y_relaxed": draw(st.floats(-1e9, 1e9)),
    }
    if draw(st.booleans()):
        record["tags"] = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
        record["fixed"] = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        record["pbc"] = draw(st.lists(st.booleans(), min_size=3, max_size=3))
        record["pos_relaxed"] = (pos + 1.5).astype(np.float32)
    names = st.sampled_from(["bulk_id", "a-b", "T", "tag", "facet"])
    return record | draw(st.dictionaries(names, value, max_size=3))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(records=st.lists(any_record(), min_size=1, max_size=4))
def test_any_records_come_back(records, tmp_path_factory, bits):
    folder = tmp_path_factory.mktemp("any")
    given = open_dataset(records)
    for kind in KINDS:
        convert(given, folder / f"out.{kind}", workers=1, chunk_size=2)
        same_systems(given, folder / f"out.{kind}", bits)


@pytest.mark.parametrize("first", KINDS)
def test_from_kind_to_kind_and_back(first, source, bits, tmp_path):
    given = source(6)
    previous = given
    for number, kind in enumerate((first, *KINDS, first)):
        output = tmp_path / f"{number}.{kind}"
        convert(previous, output, workers=1)
        previous = same_systems(given, output, bits)


def test_compact_to_compact_is_the_same_but_for_the_name_of_the_source(source, tmp_path):
    (tmp_path / "a").mkdir()
    convert(source(5), tmp_path / "a" / "data.lmdb", workers=1)
    convert(open_dataset(tmp_path / "a" / "data.lmdb"), tmp_path / "b.lmdb", workers=1)
    assert blocks(tmp_path / "a" / "data.lmdb") == blocks(tmp_path / "b.lmdb")


def blocks(path):
    options = {"subdir": False, "readonly": True, "lock": False}
    with lmdb.open(str(path), **options) as environment, environment.begin() as transaction:
        return {key: value for key, value in transaction.cursor() if key != b"metadata"}


def metadata(path):
    options = {"subdir": False, "readonly": True, "lock": False}
    with lmdb.open(str(path), **options) as environment, environment.begin() as transaction:
        return json.loads(transaction.get(b"metadata"))


@pytest.mark.parametrize("kind", KINDS)
def test_output_does_not_depend_on_chunks(kind, source, tmp_path):
    given = source(9)
    contents = set()
    for name, options in {
        "a": {"workers": 1},
        "b": {"workers": 1, "chunk_size": 2},
    }.items():
        output = tmp_path / name / f"out.{kind}"
        convert(given, output, **options)
        contents.add(output.read_bytes())
    assert len(contents) == 1


def test_chosen_systems_in_their_order(source, bits, tmp_path):
    given = source(9)
    chosen = [8, 2, -4, 2]
    convert(given, tmp_path / "out.lmdb", indices=chosen, workers=1, chunk_size=3)
    same_systems(given, tmp_path / "out.lmdb", bits, chosen)


def test_default_sids_stay_with_their_system(source, make_record, bits, tmp_path):
    given = source([make_record(sid=...) for _ in range(5)])
    convert(given, tmp_path / "out.lmdb", indices=[3, 1], workers=1)
    assert [s.sid[0] for s in open_dataset(tmp_path / "out.lmdb")] == [3, 1]


def test_targets_of_other_names(source, make_record, bits, tmp_path):
    record = make_record(y_relaxed=5.0, total=-2.5, start=1.5, end=make_record()["pos"] + 1)
    names = {"energy": "total", "energy_initial": "start", "positions_relaxed": "end"}
    given = source([record, record], **names)
    for kind in KINDS:
        convert(given, tmp_path / f"out.{kind}", workers=1)
        found = same_systems(given, tmp_path / f"out.{kind}", bits)
        assert found[0].energy.item() == -2.5


@pytest.mark.parametrize("kind", KINDS)
def test_ignored_targets_stay_behind(kind, source, make_record, bits, tmp_path):
    given = source([make_record(y_relaxed="none", pos_relaxed=[1])] * 2, ignore_energy=True)
    result = convert(given, tmp_path / f"out.{kind}", workers=1)
    found = same_systems(given, result.output, bits)
    assert found[0].energy is None
    assert {"y_relaxed", "y_init", "pos_relaxed"} <= set(result.left_out)


def test_forces_on_demand(source, make_record, tmp_path):
    force = torch.arange(18.0).reshape(6, 3) / 7
    given = source([make_record(force=force), make_record()])
    for kind in ("lmdb", "aselmdb"):
        result = convert(given, tmp_path / f"with.{kind}", workers=1, forces=True)
        assert "force" not in result.left_out
        record = open_dataset(result.output).record(0)
        held = record.get("force") if record.get("force") is not None else record.get("forces")
        assert np.array_equal(np.asarray(held), force.numpy())
    assert "force" in convert(given, tmp_path / "without.lmdb", workers=1).left_out
    with pytest.raises(ValueError, match="hold no forces"):
        convert(given, tmp_path / "out.extxyz", forces=True)


def test_shards_share_the_systems(source, bits, tmp_path):
    given = source(11)
    result = convert(given, tmp_path / "out", shard_size=4, workers=1, chunk_size=3)
    names = ["data.0000.lmdb", "data.0001.lmdb", "data.0002.lmdb"]
    assert sorted(os.listdir(result.output)) == names
    assert [len(open_dataset(result.output / name)) for name in names] == [4, 4, 3]
    assert result.bytes == sum((result.output / name).stat().st_size for name in names)
    same_systems(given, result.output, bits)


def test_trajectory_to_extxyz_keeps_what_the_calculator_found(bits, tmp_path):
    from ase.build import bulk
    from ase.calculators.emt import EMT
    from ase.io import write

    frames = []
    for scale in (1.0, 1.02):
        atoms = bulk("Cu", a=3.6 * scale, cubic=True)
        atoms.calc = EMT()
        atoms.get_stress()
        frames.append(atoms)
    write(tmp_path / "in.traj", frames)
    given = open_dataset(tmp_path / "in.traj")
    for kind in KINDS:
        convert(given, tmp_path / f"out.{kind}", workers=1)
        found = same_systems(given, tmp_path / f"out.{kind}", bits)
        assert found[0].info["energy"] == (frames[0].get_potential_energy(),)


def test_metadata_says_what_was_left_out(source, make_record, tmp_path):
    given = source([make_record(), make_record(atomic_numbers=[0] * 6)])
    convert(given, tmp_path / "out.lmdb", workers=1, on_error="skip")
    about = metadata(tmp_path / "out.lmdb")
    assert about["left_out"] == ["edge_index"]
    assert len(about["skipped"]) == 1
    assert "key 1" in about["skipped"][0]
    assert about["source"] == "data.lmdb"


@pytest.mark.parametrize("kind", KINDS)
def test_bad_records_are_skipped_and_listed(kind, source, make_record, bits, tmp_path):
    records = [make_record(sid=i) for i in range(9)]
    for bad in (0, 4, 8):
        records[bad]["y_relaxed"] = float("nan")
    given = source(records)
    result = convert(given, tmp_path / f"out.{kind}", workers=1, on_error="skip", chunk_size=2)
    same_systems(given, result.output, bits, [1, 2, 3, 5, 6, 7])
    named = [f"key {bad}, " in text for bad, text in zip((0, 4, 8), result.skipped, strict=True)]
    assert (named, result.systems) == ([True] * 3, 6)


def test_records_skipped_on_opening_are_listed_too(source, make_record, tmp_path):
    given = source([make_record(), make_record(pos=[1])], on_error="skip")
    assert len(convert(given, tmp_path / "out.lmdb", workers=1).skipped) == 1


def test_bad_record_is_named_and_the_work_kept(source, make_record, bits, tmp_path):
    records = [make_record(sid=i) for i in range(9)]
    records[7]["tags"] = [5] * 6
    given, output = source(records), tmp_path / "out.lmdb"
    for _ in range(2):
        with pytest.raises(ValueError, match="key 7, sid 7: tags"):
            convert(given, output, workers=1, chunk_size=2)
        assert not output.exists()
    work = tmp_path / ".out.lmdb.convert"
    assert len(list(work.glob("chunk-*"))) == 3
    stamps = {path: path.stat().st_mtime_ns for path in work.glob("chunk-*")}
    seen = []
    convert(
        given, output, workers=1, chunk_size=2, on_error="skip",
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[:3] == [(2, 18), (4, 18), (6, 18)]
    assert seen[-1] == (18, 18)
    assert len(stamps) == 3
    assert not work.exists()


def test_all_bad_is_an_error(source, make_record, tmp_path):
    with pytest.raises(ValueError, match="every record is bad; the first: .*key 0"):
        convert(source([make_record(pos=[1])] * 3), tmp_path / "out.lmdb", on_error="skip")


def test_workers_give_the_same(make_record, tmp_path):
    """The same bytes, the same list of bad records, and each warning once."""
    records = [make_record(sid=i) for i in range(9)]
    records[2]["tags"] = records[8]["tags"] = None
    records[5]["pos"] = [1]
    results = []
    for workers in (1, 2):
        given = open_dataset(records)
        output = tmp_path / str(workers) / "out.lmdb"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = convert(given, output, workers=workers, chunk_size=3, on_error="skip")
        assert len([w for w in caught if "no tags" in str(w.message)]) == 1
        results.append((output.read_bytes(), result.skipped, result.left_out, result.systems))
    assert results[0] == results[1]
    assert len(results[0][1]) == 1


def test_genuine_records_are_small_and_exact(oc20_data, bits, tmp_path):
    given = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb")
    for kind in KINDS:
        result = convert(given, tmp_path / f"out.{kind}", workers=1)
        same_systems(given, result.output, bits)
        if kind == "lmdb":
            assert result.bytes_per_system < 3000
            found = open_dataset(result.output)
            for index in range(len(given)):
                for name in ("pos", "pos_relaxed", "cell"):
                    a, b = (np.asarray(d.record(index)[name]) for d in (given, found))
                    assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
