"""One record → Structures: spellings, defaults, and what is refused."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from flt_mol.data import collate, open_dataset
from flt_mol.data.cells import heights
from flt_mol.data.oc20 import to_structures
from flt_mol.data.options import ReadOptions
from flt_mol.structures import Structures

FIELDS = ("atomic_numbers", "positions", "cell", "pbc", "tags", "fixed", "energy", "natoms")


def same(a: Structures, b: Structures) -> bool:
    """Whether all numbers agree bit for bit, types included."""
    return all(
        getattr(a, name).dtype == getattr(b, name).dtype
        and torch.equal(getattr(a, name), getattr(b, name))
        for name in FIELDS
    )


def read(record: Any) -> Structures:
    """The record, after a journey through a pickle."""
    return to_structures(record, where="f.lmdb, key 3", default_sid=3)


def test_fields_land_in_their_place(make_record: Any) -> None:
    record = make_record()
    system = read(record)
    assert torch.equal(system.positions, record["pos"])
    assert torch.equal(system.positions_relaxed, record["pos_relaxed"])
    assert torch.equal(system.cell, record["cell"])
    assert system.atomic_numbers.tolist() == [78, 78, 78, 78, 6, 8]
    assert system.tags.tolist() == [0, 0, 1, 1, 2, 2]
    assert system.fixed.tolist() == [True, True, False, False, False, False]
    assert system.pbc.tolist() == [[True, True, True]]
    assert system.sid == (101,)
    assert system.energy.tolist() == [-1.25]
    assert system.energy_initial.tolist() == [6.25]
    assert system.positions.dtype == system.cell.dtype == torch.float32
    assert system.atomic_numbers.dtype == system.tags.dtype == torch.int64
    assert system.energy.dtype == torch.float64
    assert dict(system.info) == {}


SPELLINGS = {
    "z int": lambda r: {"atomic_numbers": r["atomic_numbers"].long()},
    "z uint8": lambda r: {"atomic_numbers": r["atomic_numbers"].byte()},
    "z column": lambda r: {"atomic_numbers": r["atomic_numbers"][:, None]},
    "z row": lambda r: {"atomic_numbers": r["atomic_numbers"][None]},
    "z list": lambda r: {"atomic_numbers": [int(z) for z in r["atomic_numbers"]]},
    "z numpy int32": lambda r: {"atomic_numbers": r["atomic_numbers"].numpy().astype(np.int32)},
    "pos float64": lambda r: {"pos": r["pos"].double(), "cell": r["cell"].double()},
    "pos numpy": lambda r: {"pos": r["pos"].numpy()},
    "pos list": lambda r: {"pos": r["pos"].double().tolist()},
    "pos with axis": lambda r: {"pos": r["pos"][None]},
    "cell 3x3": lambda r: {"cell": r["cell"][0]},
    "cell 9": lambda r: {"cell": r["cell"].flatten()},
    "cell 1x9": lambda r: {"cell": r["cell"].reshape(1, 9)},
    "cell numpy": lambda r: {"cell": r["cell"].numpy()},
    "pbc true": lambda r: {"pbc": True},
    "pbc 3": lambda r: {"pbc": torch.tensor([True, True, True])},
    "pbc 1x3": lambda r: {"pbc": torch.ones(1, 3, dtype=torch.uint8)},
    "pbc list": lambda r: {"pbc": [1, 1, 1]},
    "tags float": lambda r: {"tags": r["tags"].float()},
    "tags int8": lambda r: {"tags": r["tags"].to(torch.int8)},
    "tags column": lambda r: {"tags": r["tags"][:, None]},
    "fixed bool": lambda r: {"fixed": r["fixed"].bool()},
    "fixed uint8": lambda r: {"fixed": r["fixed"].byte().numpy()},
    "natoms tensor": lambda r: {"natoms": torch.tensor([6])},
    "natoms float": lambda r: {"natoms": torch.tensor(6.0)},
    "y numpy": lambda r: {"y_relaxed": np.float64(-1.25)},
    "y 0d": lambda r: {"y_relaxed": torch.tensor(-1.25)},
    "y 1": lambda r: {"y_relaxed": torch.tensor([-1.25])},
    "y 1x1": lambda r: {"y_relaxed": torch.tensor([[-1.25]])},
    "y array": lambda r: {"y_relaxed": np.array([-1.25], dtype=np.float32)},
    "y list": lambda r: {"y_relaxed": [-1.25]},
    "y bfloat16": lambda r: {"y_relaxed": torch.tensor([-1.25], dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_every_spelling_gives_the_same_numbers(
    spelling: str, default: torch.dtype, make_record: Any
) -> None:
    record = make_record()
    expected = read(record)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert same(read({**record, **SPELLINGS[spelling](record)}), expected)
        assert torch.get_default_dtype() == default
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("random7", "random7"),
        ("101", "101"),
        (b"r7", "r7"),
        (2472718, 2472718),
        (7.0, 7),
        (np.int64(7), 7),
        (torch.tensor(7), 7),
        (torch.tensor([[7]]), 7),
        (["r7"], "r7"),
        (np.array("r7"), "r7"),
    ],
)
def test_sids_as_stored(stored: Any, expected: Any, make_record: Any) -> None:
    (sid,) = read(make_record(sid=stored)).sid
    assert sid == expected
    assert type(sid) is type(expected)


def _twice(path: Any) -> list[Structures]:
    dataset = open_dataset(path)
    return [*dataset, *dataset]


DEFAULTS = {
    "tags": "no tags",
    "fixed": "no field fixed",
    "natoms": "no natoms",
    "sid": "no sid",
    "cell": "not periodic",
}


@pytest.mark.parametrize("missing", [*DEFAULTS, "all"])
@pytest.mark.parametrize("value", [..., None])
def test_missing_fields_have_defaults_and_one_warning(
    missing: str, value: Any, make_record: Any, write_lmdb: Any
) -> None:
    names = list(DEFAULTS) if missing == "all" else [missing]
    records = {i: make_record(**dict.fromkeys(names, value)) for i in range(3)}
    path = write_lmdb(records)
    with pytest.warns(UserWarning, match=r"data\.lmdb: no ") as caught:
        batch = collate(_twice(path))
    (warning,) = caught
    for name in names:
        assert DEFAULTS[name] in str(warning.message)
    assert str(path) in str(warning.message)
    expected = Structures.cat([read(make_record())] * 6)
    changed = {
        "tags": torch.zeros(36, dtype=torch.int64),
        "fixed": torch.zeros(36, dtype=torch.bool),
        "cell": torch.zeros(6, 3, 3),
    }
    for name in FIELDS:
        truth = changed[name] if name in names and name in changed else getattr(expected, name)
        if name == "pbc" and "cell" in names:
            truth = torch.zeros(6, 3, dtype=torch.bool)
        assert torch.equal(getattr(batch, name), truth)
    assert batch.sid == ((0, 1, 2, 0, 1, 2) if "sid" in names else (101,) * 6)


def test_all_zero_tags_warn_once(make_record: Any, write_lmdb: Any) -> None:
    path = write_lmdb({i: make_record(tags=torch.zeros(6)) for i in range(3)})
    with pytest.warns(UserWarning, match="all tags are 0, no atom is marked") as caught:
        assert len(list(open_dataset(path))) == 3
    assert len(caught) == 1


def test_complete_records_warn_of_nothing(make_record: Any, write_lmdb: Any) -> None:
    assert len(list(open_dataset(write_lmdb({0: make_record()})))) == 1


BAD = {
    "no positions": ({"pos": ...}, r"pos is missing; fields stored: edge_index, cell"),
    "positions of fewer": (
        {"pos": torch.zeros(5, 3)},
        r"pos has shape \(5, 3\), expected \(6, 3\)",
    ),
    "positions flat": ({"pos": torch.zeros(18)}, r"pos has shape \(18,\)"),
    "positions transposed": ({"pos": torch.zeros(3, 6)}, r"pos has shape \(3, 6\)"),
    "nan position": ({"pos": torch.full((6, 3), torch.nan)}, "pos of atom 0 is not finite"),
    "text positions": ({"pos": "here"}, "pos holds <U4"),
    "ragged positions": ({"pos": [[0, 1], [2]]}, "pos is a ragged list"),
    "infinite relaxed": ({"pos_relaxed": torch.full((6, 3), torch.inf)}, "pos_relaxed of atom 0"),
    "relaxed of fewer": ({"pos_relaxed": torch.zeros(5, 3)}, "pos_relaxed has shape"),
    "no elements": ({"atomic_numbers": None}, "atomic_numbers is missing"),
    "no atoms": ({"atomic_numbers": torch.zeros(0)}, "the system has no atoms"),
    "element 0": (
        {"atomic_numbers": torch.tensor([0.0] * 6)},
        "holds 0, expected elements 1 to 118",
    ),
    "element 119": ({"atomic_numbers": [119] * 6}, "holds 119"),
    "half an element": ({"atomic_numbers": [1.5] * 6}, "numbers that are not whole"),
    "nan element": ({"atomic_numbers": [torch.nan] * 6}, "numbers that are not whole"),
    "two axes": ({"atomic_numbers": torch.ones(2, 3)}, r"shape \(2, 3\), expected one number per"),
    "natoms": ({"natoms": 7}, "natoms is 7, but there are 6 atomic numbers"),
    "batch": ({"natoms": torch.tensor([3, 3])}, "store one system per record"),
    "tags of fewer": ({"tags": torch.zeros(5)}, "tags has 5 numbers for 6 atoms"),
    "layer tags": ({"tags": [4, 3, 2, 1, 0, 0]}, "tags holds 4, expected 0 below the surface"),
    "negative tags": ({"tags": [-1, 0, 0, 1, 2, 2]}, "tags holds -1"),
    "fixed of more": ({"fixed": torch.zeros(7)}, "fixed has 7 numbers for 6 atoms"),
    "cell of two": ({"cell": torch.zeros(2, 3)}, r"cell has shape \(2, 3\)"),
    "nan cell": ({"cell": torch.full((3, 3), torch.nan)}, "cell is not finite"),
    "pbc of two": ({"pbc": [True, False]}, r"pbc has shape \(2,\)"),
    "pbc nan": (
        {"pbc": torch.tensor([1, torch.nan, 1])},
        r"pbc is \[1.0, nan, 1.0\], expected true",
    ),
    "pbc two": ({"pbc": [2, 1, 1]}, r"pbc is \[2, 1, 1\], expected true or false for each axis"),
    "nan target": ({"y_relaxed": float("nan")}, "y_relaxed is nan, expected a finite energy"),
    "inf target": ({"y_relaxed": torch.tensor([-torch.inf])}, "y_relaxed is -inf"),
    "text target": ({"y_relaxed": "-1.5"}, "y_relaxed is '-1.5', expected one number"),
    "list target": ({"y_relaxed": torch.zeros(2)}, r"y_relaxed is of shape \(2,\)"),
    "complex target": ({"y_relaxed": 1j}, "y_relaxed holds complex"),
    "bool target": ({"y_relaxed": True}, "y_relaxed is True"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_refused_and_can_be_skipped(
    name: str, make_record: Any, write_lmdb: Any
) -> None:
    changes, message = BAD[name]
    path = write_lmdb({0: make_record(sid=7), 1: make_record(sid=900, **changes)})
    dataset = open_dataset(path)
    assert dataset[0].sid == (7,)
    with pytest.raises(ValueError, match=message) as caught:
        dataset[1]
    assert f"{path}, key 1, sid 900: " in str(caught.value)
    rest = open_dataset(path, on_error="skip")
    assert [system.sid for system in rest] == [(7,)]
    assert rest.skipped == [str(caught.value)]


@pytest.mark.parametrize("wrong", [2.0, torch.nan])
def test_pbc_of_a_batch(wrong: float, make_record: Any, write_lmdb: Any) -> None:
    axes = [torch.tensor([first, 1.0, 1.0]) for first in (1.0, wrong)]
    path = write_lmdb({i: make_record(pbc=pbc) for i, pbc in enumerate(axes)})
    with pytest.raises(ValueError, match=r"key 1.*pbc is \[.*\], expected true or false"):
        list(open_dataset(path).batch([0, 1]))


@pytest.mark.parametrize("sid", [1.5, {"a": 1}, torch.tensor([1, 2])])
def test_bad_sids(sid: Any, make_record: Any) -> None:
    with pytest.raises(ValueError, match="f.lmdb, key 3: sid is"):
        read(make_record(sid=sid))


def test_empty_records() -> None:
    with pytest.raises(ValueError, match="atomic_numbers is missing; fields stored: none"):
        read({})


def test_targets_required(make_record: Any, write_lmdb: Any) -> None:
    path = write_lmdb({0: make_record(sid=7), 1: make_record(sid=902, y_relaxed=None)})
    assert open_dataset(path)[1].energy is None
    with pytest.raises(ValueError, match="sid 902: y_relaxed is missing: the system has no target"):
        open_dataset(path, require_energy=True)[1]
    rest = open_dataset(path, require_energy=True, on_error="skip")
    assert [system.sid for system in rest] == [(7,)]


@pytest.mark.parametrize("value", [..., None])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_splits_without_targets(
    value: Any, on_error: Any, make_record: Any, write_lmdb: Any
) -> None:
    changes = dict.fromkeys(("y_relaxed", "y_init", "pos_relaxed"), value)
    path = write_lmdb({i: make_record(sid=500 + i, **changes) for i in range(3)})
    batch = collate(list(open_dataset(path)))
    assert batch.sid == (500, 501, 502)
    assert batch.energy is batch.energy_initial is batch.positions_relaxed is None
    with pytest.raises(ValueError, match="this split has no targets") as caught:
        open_dataset(path, require_energy=True, on_error=on_error)
    assert str(path) in str(caught.value)


ZERO = torch.zeros(1, 3, 3)
OPEN_C = torch.diag(torch.tensor([12.0, 12.0, 0.0]))


@pytest.mark.parametrize(
    ("cell", "pbc", "expected"),
    [
        (ZERO, ..., [False] * 3),
        (None, ..., [False] * 3),
        (None, False, [False] * 3),
        (ZERO, [False] * 3, [False] * 3),
        (OPEN_C, ..., [True, True, False]),
        (OPEN_C, [True, True, False], [True, True, False]),
        (30 * torch.eye(3), [False] * 3, [False] * 3),
        (30 * torch.eye(3), ..., [True] * 3),
        (torch.diag(torch.tensor([0.0, 0.0, 4.0])), ..., [False, False, True]),
        (torch.tensor([10.0, 11.0, 12.0]), ..., [True] * 3),
        (1e-6 * torch.eye(3), False, [False] * 3),
    ],
)
def test_periodicity(cell: Any, pbc: Any, expected: Any, make_record: Any) -> None:
    system = read(make_record(cell=cell, pbc=pbc))
    assert system.pbc.tolist() == [expected]
    if cell is not None and cell.ndim > 1:
        assert torch.equal(system.cell[0], cell.reshape(3, 3))


@pytest.mark.parametrize(
    ("cell", "pbc", "axis"),
    [
        (ZERO, True, "a"),
        (None, [False, True, False], "b"),
        (1e-6 * torch.eye(3), ..., "a"),
        (1e-6 * torch.eye(3), True, "a"),
        (OPEN_C, True, "c"),
        (torch.tensor([[5.0, 0, 0], [5.0, 1e-4, 0], [0, 0, 9.0]]), ..., "a"),
        (torch.tensor([[5.0, 0, 0], [10.0, 0, 0], [0, 0, 9.0]]), [True, True, False], "a"),
        (torch.tensor([[5.0, 0, 0], [0, 5.0, 0], [5.0, 5.0, 0]]), ..., "a"),
    ],
)
def test_singular_cells(cell: Any, pbc: Any, axis: str, make_record: Any) -> None:
    message = f"f.lmdb, key 3, sid 101: cell is singular along the periodic direction {axis}"
    with pytest.raises(ValueError, match=message) as caught:
        read(make_record(cell=cell, pbc=pbc))
    assert "set pbc False there" in str(caught.value)


def test_heights_of_known_lattices() -> None:
    assert heights(np.diag([2.0, 3.0, 4.0])).tolist() == pytest.approx([2, 3, 4])
    # Primitive fcc cell with a = 4: planes (111), a/√3 apart.
    fcc = 2.0 * (np.ones((3, 3)) - np.eye(3))
    assert heights(fcc).tolist() == pytest.approx([4 / math.sqrt(3)] * 3)
    hexagonal = np.array([[1.0, 0, 0], [0.5, math.sqrt(3) / 2, 0]])
    assert heights(hexagonal).tolist() == pytest.approx([math.sqrt(3) / 2] * 2)
    assert heights(np.array([[0.0, 3, 4]])).tolist() == [5]
    assert heights(np.zeros((0, 3))).tolist() == []


@pytest.mark.parametrize("shift", [150.0, 1e5, -1e7])
def test_far_systems_keep_their_distances(shift: float, make_record: Any) -> None:
    record = make_record()
    here = {name: record[name].double() for name in ("pos", "pos_relaxed")}
    there = {name: value + shift for name, value in here.items()}
    system = read({**record, **there})
    assert system.positions.abs().max() < 10
    distances = torch.cdist(system.positions, system.positions)
    assert torch.allclose(distances, torch.cdist(record["pos"], record["pos"]), atol=1e-5)
    moved = system.positions_relaxed - system.positions
    assert torch.allclose(moved, torch.full((6, 3), 0.1), atol=1e-5)


def test_near_systems_stay_as_stored(make_record: Any) -> None:
    record = make_record(pos=make_record()["pos"] + 60)
    assert torch.equal(read(record).positions, record["pos"])


def test_further_fields_go_to_info_as_stored(make_record: Any, write_lmdb: Any) -> None:
    further = {
        "bulk_index": torch.tensor([3]),
        "ads_index": torch.tensor(1),
        "fixed_index": torch.tensor([0, 1]),
        "facet": "111",
        "slab": 17,
        "miller": (1, 1, 1),
        "pad": torch.zeros(2000),
        "force": torch.zeros(6, 3),
        "distances": torch.zeros(10),
        "normal": None,
        "_cache": 1,
    }
    path = write_lmdb({i: make_record(sid=i, **further) for i in range(3)})
    batch = collate(list(open_dataset(path)))
    assert dict(batch.info) == {
        "bulk_index": (3, 3, 3),
        "ads_index": (1, 1, 1),
        "fixed_index": ([0, 1],) * 3,
        "facet": ("111",) * 3,
        "slab": (17,) * 3,
        "miller": ((1, 1, 1),) * 3,
    }
    assert batch.sid == (0, 1, 2)
    assert batch.tags.tolist() == [0, 0, 1, 1, 2, 2] * 3
    assert pickle.loads(pickle.dumps(batch)).info == batch.info


BAD_TARGETS = [float("nan"), math.inf, "-1.5", "", torch.zeros(2), True, 10**5000, b"?"]


@pytest.mark.parametrize("value", BAD_TARGETS, ids=range(len(BAD_TARGETS)))
def test_bad_targets_can_be_ignored(value: Any, make_record: Any, write_lmdb: Any) -> None:
    bad = {"y_relaxed": value, "y_init": value, "pos_relaxed": "none"}
    path = write_lmdb({0: make_record(**bad), 1: make_record()})
    systems = list(open_dataset(path, ignore_energy=True))
    assert all(s.energy is s.energy_initial is s.positions_relaxed is None for s in systems)
    assert same_input(systems[0], systems[1])
    assert len(open_dataset(path.parent, ignore_energy=True)) == 2
    with pytest.raises(ValueError, match="sid 101"):
        open_dataset(path)[0]
    with pytest.raises(ValueError, match="exclude each other"):
        open_dataset(path, ignore_energy=True, require_energy=True)


def same_input(a: Structures, b: Structures) -> bool:
    """Whether all but the targets agree."""
    names = [name for name in FIELDS if name != "energy"]
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.parametrize("value", [math.nan, "none", torch.zeros(2)])
def test_a_bad_initial_energy_is_left_out_with_a_warning(
    value: Any, make_record: Any, write_lmdb: Any
) -> None:
    path = write_lmdb({i: make_record(y_init=value) for i in range(3)})
    with pytest.warns(UserWarning, match="y_init left out: .*key 0, sid 101: y_init is") as caught:
        systems = list(open_dataset(path))
    assert len(caught) == 1
    assert all(system.energy_initial is None for system in systems)
    assert [system.energy.item() for system in systems] == [-1.25] * 3


@pytest.mark.parametrize("field", ["pos", "pos_relaxed", "cell"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_numbers_beyond_float32(field: str, sign: int, make_record: Any) -> None:
    value = make_record()[field].double().numpy()
    value[..., 2, 2] = sign * 1e39
    with pytest.raises(ValueError, match=rf"key 3, sid 101: {field} .*is too large for float32"):
        read(make_record(**{field: value}))


@pytest.mark.parametrize(
    "sid", [10**5000, -(10**5000), [10**5000, 1], 1 << 64, 1e300], ids=range(5)
)
def test_sids_that_no_int64_holds(sid: Any, make_record: Any, write_lmdb: Any) -> None:
    path = write_lmdb({4: make_record(sid=sid)})
    with pytest.raises(ValueError, match=r"data\.lmdb, key 4: sid is "):
        open_dataset(path)[0]


@pytest.mark.parametrize("sid", [2**63 - 1, 0, -7])
def test_sids_that_int64_holds(sid: int, make_record: Any) -> None:
    assert read(make_record(sid=sid)).sid == (sid,)


def test_parameters_are_positions(make_record: Any, write_lmdb: Any) -> None:
    record = make_record()
    other = make_record(pos=torch.nn.Parameter(record["pos"]))
    first, second = open_dataset(write_lmdb({0: record, 1: other}))
    assert same(first, second)


def test_targets_under_other_names(make_record: Any, write_lmdb: Any) -> None:
    record = make_record(y=torch.tensor([-3.5]), before=2.5, end=torch.ones(6, 3))
    names = {"energy": "y", "energy_initial": "before", "positions_relaxed": "end"}
    dataset = open_dataset(write_lmdb({0: record}), require_energy=True, **names)
    for system in (dataset[0], dataset.batch([0])):
        assert system.energy.tolist() == [-3.5]
        assert system.energy_initial.tolist() == [2.5]
        assert torch.equal(system.positions_relaxed, torch.ones(6, 3))


@pytest.mark.parametrize(
    ("option", "name", "nearest"),
    [
        ("energy", "y_relax", "y_relaxed, "),
        ("energy", "calculator", ""),
        ("energy_initial", "yinit", "y_init, "),
        ("positions_relaxed", "pos_relax", "pos_relaxed, "),
    ],
)
def test_unknown_names_are_told_with_those_that_are_there(
    option: str, name: str, nearest: str, make_record: Any, write_lmdb: Any
) -> None:
    path = write_lmdb({0: make_record(), 1: make_record()})
    dataset = open_dataset(path, **{option: name})
    told = f"data.lmdb, key 1, sid 101: {name} was asked for, and is not stored; stored are: "
    for read in (lambda: dataset[1], lambda: dataset.batch([1, 0])):
        with pytest.raises(ValueError, match=re.escape(told + nearest)) as caught:
            read()
        assert "edge_index" not in str(caught.value)
    assert open_dataset(path, ignore_energy=True, **{option: name})[0].energy is None


def test_a_missing_target_is_told_with_the_fields_that_are_there(make_record: Any) -> None:
    record = make_record(y_relaxed=..., y_relax=-1.5, y_init=None)
    with pytest.raises(ValueError, match="y_relaxed is missing.*stored are: y_relax, ") as caught:
        to_structures(record, where="", options=ReadOptions(require_energy=True))
    assert "y_init" not in str(caught.value)
    # A name that is known, and holds None, is a missing target like any other.
    record = make_record(mine=None)
    assert to_structures(record, where="", options=ReadOptions(energy="mine")).energy is None


@pytest.mark.parametrize("records", [{5: "x"}, {None: 1}])
def test_names_that_are_no_text(records: Any, make_record: Any) -> None:
    with pytest.raises(ValueError, match="is the name of a field, expected text"):
        list(open_dataset([{**make_record(), **records}]))
    with pytest.raises(ValueError, match="of several records give a list"):
        list(open_dataset({0: make_record(), 1: make_record()}))


@pytest.mark.parametrize("sid", [-(2**63) - 1, 2**63])
def test_sids_beyond_int64(sid: int, make_record: Any) -> None:
    assert to_structures(make_record(sid=-(2**63)), where="").sid == (-(2**63),)
    with pytest.raises(ValueError, match="store an int64"):
        to_structures(make_record(sid=sid), where="")
