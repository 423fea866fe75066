"""Records → Structures: spellings, defaults, targets, and what is refused; one and many at once."""

import math
import warnings

import numpy as np
import pytest
import torch

from flt_mol.data import open_dataset
from flt_mol.data.decoding import decode
from flt_mol.data.schema import ReadOptions, heights
from flt_mol.structures import Structures, relaxed_displacement

FIELDS = ("atomic_numbers", "positions", "cell", "pbc", "tags", "fixed", "energy", "natoms")


def read(*records, **options):
    return decode(
        records, ReadOptions(**options), where=lambda i: f"f.lmdb, key {i}", default_sid=lambda i: i
    )


def same(a, b, names=FIELDS):
    return all(
        getattr(a, name).dtype == getattr(b, name).dtype
        and torch.equal(getattr(a, name), getattr(b, name))
        for name in names
    )


def test_fields_land_in_their_place(make_record):
    record = make_record(tags=torch.tensor([1, 0, 1, 0, 2, 2]))
    record["cell"] = torch.tensor([[[5.0, 1.0, 2.0], [0.0, 6.0, 3.0], [0.0, 0.0, 20.0]]])
    system = read(record)
    assert torch.equal(system.positions, record["pos"])
    assert torch.equal(system.positions_relaxed, record["pos_relaxed"])
    # Rows are lattice vectors; a transposed cell would be another lattice.
    assert system.cell[0, 0].tolist() == [5.0, 1.0, 2.0]
    assert system.cell[0, :, 0].tolist() == [5.0, 0.0, 0.0]
    assert system.atomic_numbers.tolist() == [78, 78, 78, 78, 6, 8]
    # Where one is swapped for the other, one of these lines says so.
    assert system.tags.tolist() == [1, 0, 1, 0, 2, 2]
    assert system.fixed.tolist() == [True, True, False, False, False, False]
    assert system.pbc.tolist() == [[True, True, True]]
    assert system.sid == (101,)
    assert system.energy.tolist() == [-1.25]
    assert system.energy_initial.tolist() == [6.25]
    assert system.positions.dtype == system.cell.dtype == torch.float32
    assert system.atomic_numbers.dtype == system.tags.dtype == torch.int64
    assert dict(system.info) == {}


def test_energies_keep_64_bits(make_record):
    energy = -1.2345678901234567
    batch = read(*[make_record(y_relaxed=energy, y_init=energy)] * 3)
    assert batch.energy.dtype == torch.float64
    assert batch.energy.tolist() == batch.energy_initial.tolist() == [energy] * 3


def test_each_system_keeps_its_own_sid_and_energy(make_record):
    records = [make_record(sid=s, y_relaxed=-s / 8, tags=[s % 3] * 6) for s in (7, 100, 3, 58)]
    batch = read(*records)
    assert batch.sid == (7, 100, 3, 58)
    assert batch.energy.tolist() == [-7 / 8, -100 / 8, -3 / 8, -58 / 8]
    assert batch.tags.tolist() == [1] * 12 + [0] * 6 + [1] * 6
    for b, record in enumerate(records):
        assert same(batch[b], read(record))


def test_wrapped_relaxed_positions_move_by_the_minimum_image(make_record):
    record = make_record(cell=torch.diag(torch.tensor([5.0, 6.0, 20.0])), fixed=[0] * 6)
    record["pos_relaxed"] = record["pos"] + torch.tensor([0.1, 5.9, -0.2])
    moved = relaxed_displacement(read(record))
    assert torch.allclose(moved, torch.tensor([0.1, -0.1, -0.2]).expand(6, 3), atol=1e-5)


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
    "pos parameter": lambda r: {"pos": torch.nn.Parameter(r["pos"])},
    "cell 3x3": lambda r: {"cell": r["cell"][0]},
    "cell 9": lambda r: {"cell": r["cell"].flatten()},
    "cell numpy": lambda r: {"cell": r["cell"].numpy()},
    "pbc true": lambda r: {"pbc": True},
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
    "y 1x1": lambda r: {"y_relaxed": torch.tensor([[-1.25]])},
    "y array": lambda r: {"y_relaxed": np.array([-1.25], dtype=np.float32)},
    "y list": lambda r: {"y_relaxed": [-1.25]},
    "y bfloat16": lambda r: {"y_relaxed": torch.tensor([-1.25], dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_numbers(spelling, make_record, write_lmdb):
    record = make_record()
    other = {**record, **SPELLINGS[spelling](record)}
    expected = read(record)
    torch.set_default_dtype(torch.float64)
    try:
        assert same(read(other), expected)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    # In one batch with the others, out of a file, too.
    batch = open_dataset(write_lmdb({0: record, 1: other})).batch([1, 0])
    assert same(batch[0], expected)
    assert same(batch[1], expected)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("random7", "random7"),
        (" r7\n", "r7"),
        (b"r7 ", "r7"),
        ("", 0),
        (b" ", 0),
        (2**63 - 1, 2**63 - 1),
        (-7, -7),
        (7.0, 7),
        (np.int64(7), 7),
        (torch.tensor([[7]]), 7),
        (["r7"], "r7"),
        (np.array("r7"), "r7"),
    ],
)
def test_sids_as_stored(stored, expected, make_record):
    (sid,) = read(make_record(sid=stored)).sid
    assert sid == expected
    assert type(sid) is type(expected)


BAD_SIDS = [1.5, {"a": 1}, torch.tensor([1, 2]), 10**5000, 1 << 64, math.nan, 1e300]


@pytest.mark.parametrize("sid", BAD_SIDS, ids=range(len(BAD_SIDS)))
def test_invalid_sids(sid, make_record):
    with pytest.raises(ValueError, match="f.lmdb, key 0: sid "):
        read(make_record(sid=sid))


DEFAULTS = ("fixed", "natoms", "sid", "tags", "cell")
NOTED = ("fixed", "natoms", "sid")  # of the others `Unusual` warns


@pytest.mark.parametrize("missing", [*DEFAULTS, "all"])
@pytest.mark.parametrize("value", [..., None])
def test_missing_fields_have_defaults_and_one_warning(missing, value, make_record, write_lmdb):
    names = list(DEFAULTS) if missing == "all" else [missing]
    path = write_lmdb({i: make_record(**dict.fromkeys(names, value)) for i in range(3)})
    dataset = open_dataset(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = Structures.cat([*dataset, dataset.batch(range(3))])
    noted = [name for name in names if name in NOTED]
    assert len(caught) == bool(noted)
    assert all(name in str(caught[0].message) for name in noted)
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


NAN, INF = float("nan"), float("inf")
INVALID = {
    "no positions": {"pos": ...},
    "positions of fewer": {"pos": torch.zeros(5, 3)},
    "positions flat": {"pos": torch.zeros(18)},
    "positions transposed": {"pos": torch.zeros(3, 6)},
    "nan position": {"pos": torch.full((6, 3), NAN)},
    "text positions": {"pos": "here"},
    "ragged positions": {"pos": [[0, 1], [2]]},
    "positions beyond float32": {"pos": np.full((6, 3), 1e39)},
    "infinite relaxed": {"pos_relaxed": torch.full((6, 3), INF)},
    "relaxed of fewer": {"pos_relaxed": torch.zeros(5, 3)},
    "no elements": {"atomic_numbers": None},
    "no atoms": {"atomic_numbers": torch.zeros(0)},
    "element 0": {"atomic_numbers": torch.tensor([0.0] * 6)},
    "element 119": {"atomic_numbers": [119] * 6},
    "half an element": {"atomic_numbers": [1.5] * 6},
    "nan element": {"atomic_numbers": [NAN] * 6},
    "two axes": {"atomic_numbers": torch.ones(2, 3)},
    "natoms": {"natoms": 7},
    "natoms of a batch": {"natoms": torch.tensor([3, 3])},
    "batch of a batch": {"batch": torch.tensor([0, 0, 0, 1, 1, 1])},
    "tags of fewer": {"tags": torch.zeros(5)},
    "tags of layers": {"tags": [4, 3, 2, 1, 0, 0]},
    "tags negative": {"tags": [-1, 0, 0, 1, 2, 2]},
    "fixed of more": {"fixed": torch.zeros(7)},
    "fixed 2": {"fixed": [2, 0, 0, 0, 0, 0]},
    "fixed -1": {"fixed": [-1.0, 0, 0, 0, 0, 0]},
    "cell of two": {"cell": torch.zeros(2, 3)},
    "cell nan": {"cell": torch.full((3, 3), NAN)},
    "cell beyond float32": {"cell": np.diag([1e39, 5, 5])},
    "pbc of two": {"pbc": [True, False]},
    "pbc nan": {"pbc": torch.tensor([1, NAN, 1])},
    "pbc 2": {"pbc": [2, 1, 1]},
    "y_relaxed nan": {"y_relaxed": NAN},
    "y_relaxed inf": {"y_relaxed": torch.tensor([-INF])},
    "y_relaxed text": {"y_relaxed": "-1.5"},
    "y_relaxed two": {"y_relaxed": torch.zeros(2)},
    "y_relaxed complex": {"y_relaxed": 1j},
    "y_relaxed bool": {"y_relaxed": True},
    "y_relaxed 1e10": {"y_relaxed": 1e10},
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_records_are_named_and_can_be_skipped(name, make_record, write_lmdb):
    (field,) = INVALID[name]
    path = write_lmdb({0: make_record(sid=7), 1: make_record(sid=900, **INVALID[name])})
    dataset = open_dataset(path)
    assert dataset[0].sid == (7,)
    for ask in (lambda: dataset[1], lambda: dataset.batch([0, 1])):
        with pytest.raises(ValueError, match=f"data.lmdb, key 1, sid 900: {field} ") as caught:
            ask()
    rest = open_dataset(path, on_error="skip")
    assert [system.sid for system in rest] == [(7,)]
    assert rest.skipped == [str(caught.value)]


def test_records_without_names_of_text_and_without_anything(make_record):
    for record in ({}, {0: make_record(), 1: make_record()}, make_record(**{"": 1}) | {5: "x"}):
        with pytest.raises(ValueError, match="f.lmdb, key 0.*(atomic_numbers|names)"):
            read(record)


@pytest.mark.parametrize("value", [NAN, INF, "-1.5", torch.zeros(2), True, 10**5000], ids=range(6))
def test_invalid_targets_can_be_ignored(value, make_record):
    record = make_record(y_relaxed=value, y_init=value, pos_relaxed="none")
    system = read(record, ignore_energy=True)
    assert system.energy is system.energy_initial is system.positions_relaxed is None
    assert same(system, read(make_record()), [name for name in FIELDS if name != "energy"])
    with pytest.raises(ValueError, match="sid 101"):
        read(record)


@pytest.mark.parametrize("value", [NAN, "none", torch.zeros(2)])
def test_an_invalid_initial_energy_is_a_warning(value, make_record, write_lmdb):
    path = write_lmdb({i: make_record(y_init=value if i else 0.5) for i in range(3)})
    with pytest.warns(UserWarning, match="y_init") as caught:
        batch = open_dataset(path).batch(range(3))
    assert len(caught) == 1
    assert batch.energy_initial is None
    assert batch.energy.tolist() == [-1.25] * 3


def test_targets_are_required_where_asked(make_record, write_lmdb):
    path = write_lmdb({0: make_record(sid=7), 1: make_record(sid=902, y_relaxed=None)})
    assert open_dataset(path)[1].energy is open_dataset(path).batch([0, 1]).energy is None
    with pytest.raises(ValueError, match="sid 902: y_relaxed is missing"):
        open_dataset(path, require_energy=True)[1]
    rest = open_dataset(path, require_energy=True, on_error="skip")
    assert [system.sid for system in rest] == [(7,)]


@pytest.mark.parametrize("value", [..., None])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_splits_without_targets(value, on_error, make_record, write_lmdb):
    changes = dict.fromkeys(("y_relaxed", "y_init", "pos_relaxed"), value)
    frame = {"frame_id": 3, "E_ads": -0.5}
    path = write_lmdb({i: make_record(sid=500 + i, **changes, **frame) for i in range(3)})
    batch = open_dataset(path).batch(range(3))
    assert batch.sid == (500, 501, 502)
    assert batch.energy is batch.energy_initial is batch.positions_relaxed is None
    with pytest.raises(ValueError, match="this split has no targets.*stored are: E_ads") as caught:
        open_dataset(path, require_energy=True, on_error=on_error)
    assert str(path) in str(caught.value)
    assert "frame_id" not in str(caught.value)


def test_targets_under_other_names(make_record):
    record = make_record(y=torch.tensor([-3.5]), before=2.5, end=torch.ones(6, 3))
    names = {"energy": "y", "energy_initial": "before", "positions_relaxed": "end"}
    for b in (1, 3):
        batch = read(*[record] * b, **names)
        assert batch.energy.tolist() == [-3.5] * b
        assert batch.energy_initial.tolist() == [2.5] * b
        assert torch.equal(batch.positions_relaxed, torch.ones(6 * b, 3))


@pytest.mark.parametrize("option", ["energy", "energy_initial", "positions_relaxed"])
def test_names_that_are_not_stored_are_answered_with_those_that_are(option, make_record):
    nearest = {"energy": "y_relaxed", "energy_initial": "y_init"}.get(option, "pos_relaxed")
    name = nearest[:-1]
    with pytest.raises(ValueError, match=f"key 0, sid 101: {name} .*stored are: {nearest}"):
        read(make_record(), make_record(), **{option: name})
    assert read(make_record(), ignore_energy=True, **{option: name}).energy is None


def test_options_that_exclude_each_other():
    for options in (
        {"require_energy": True, "ignore_energy": True},
        {"on_error": "stop"},
    ):
        with pytest.raises(ValueError, match="|".join(options)):
            ReadOptions(**options)


OPEN_C = np.diag([12.0, 12.0, 0.0])


@pytest.mark.parametrize(
    ("cell", "pbc", "expected"),
    [
        (np.zeros((3, 3)), ..., [False] * 3),
        (None, ..., [False] * 3),
        (None, False, [False] * 3),
        (OPEN_C, ..., [True, True, False]),
        (OPEN_C, [True, True, False], [True, True, False]),
        (30 * np.eye(3), [False] * 3, [False] * 3),
        (30 * np.eye(3), ..., [True] * 3),
        (np.diag([0.0, 0.0, 4.0]), ..., [False, False, True]),
        (np.array([10.0, 11.0, 12.0]), ..., [True] * 3),
        (1e-6 * np.eye(3), False, [False] * 3),
    ],
)
def test_periodicity(cell, pbc, expected, make_record):
    other = make_record()
    batch = read(other, make_record(cell=cell, pbc=pbc), other)
    assert batch.pbc.tolist() == [[True] * 3, expected, [True] * 3]


@pytest.mark.parametrize(
    ("cell", "pbc"),
    [
        (np.zeros((3, 3)), True),
        (None, [False, True, False]),
        (1e-6 * np.eye(3), ...),
        (OPEN_C, True),
        (np.array([[5.0, 0, 0], [5.0, 1e-4, 0], [0, 0, 9.0]]), ...),
        (np.array([[5.0, 0, 0], [10.0, 0, 0], [0, 0, 9.0]]), [True, True, False]),
        (np.array([[5.0, 0, 0], [0, 5.0, 0], [5.0, 5.0, 0]]), ...),
    ],
)
def test_singular_cells(cell, pbc, make_record):
    with pytest.raises(ValueError, match="key 1, sid 101: cell is singular.*set pbc False"):
        read(make_record(), make_record(cell=cell, pbc=pbc))


def test_heights_of_known_lattices():
    assert heights(np.diag([2.0, 3.0, 4.0])) == pytest.approx([2, 3, 4])
    # Primitive fcc cell with a = 4: planes (111), a/√3 apart.
    fcc = 2.0 * (np.ones((3, 3)) - np.eye(3))
    assert heights(np.stack([fcc, 2 * fcc]))[1] == pytest.approx([8 / math.sqrt(3)] * 3)
    hexagonal = np.array([[1.0, 0, 0], [0.5, math.sqrt(3) / 2, 0]])
    assert heights(hexagonal) == pytest.approx([math.sqrt(3) / 2] * 2)
    assert heights(np.array([[0.0, 3, 4]])).tolist() == [5]
    assert heights(np.zeros((0, 3))).tolist() == []


@pytest.mark.parametrize("shift", [150.0, 1e5, -1e7])
def test_far_systems_keep_their_distances(shift, make_record):
    record = make_record()
    there = {name: record[name].double() + shift for name in ("pos", "pos_relaxed")}
    batch = read(record, {**record, **there})
    assert torch.equal(batch[0].positions, record["pos"])
    far = batch[1]
    assert far.positions.abs().max() < 10
    assert torch.allclose(
        torch.cdist(far.positions, far.positions),
        torch.cdist(record["pos"], record["pos"]),
        atol=1e-5,
    )
    moved = far.positions_relaxed - far.positions
    assert torch.allclose(moved, torch.full((6, 3), 0.1), atol=1e-5)
    near = make_record(pos=record["pos"] + 60)
    assert torch.equal(read(near).positions, near["pos"])


def test_further_fields_go_to_info_as_stored(make_record):
    kept = {
        "bulk_index": torch.tensor([3]),
        "ads_index": torch.tensor(1),
        "fixed_index": torch.tensor([0, 1]),
        "facet": "111",
        "slab": 17,
        "miller": (1, 1, 1),
    }
    dropped = {"pad": torch.zeros(2000), "force": torch.zeros(6, 3), "normal": None, "_cache": 1}
    endless = []
    endless.append(endless)
    batch = read(*[make_record(**kept, **dropped, endless=endless, huge=10**99)] * 3)
    assert dict(batch.info) == {
        "bulk_index": (3, 3, 3),
        "ads_index": (1, 1, 1),
        "fixed_index": ([0, 1],) * 3,
        "facet": ("111",) * 3,
        "slab": (17,) * 3,
        "miller": ((1, 1, 1),) * 3,
    }


def test_lists_without_end_are_refused(make_record):
    doubled = [0, 0]
    for _ in range(25):
        doubled = [doubled, doubled]
    for field in ("pos", "tags", "y_relaxed"):
        with pytest.raises(ValueError, match=f"{field} holds lists that contain themselves"):
            read(make_record(**{field: doubled}))


def test_the_check_of_the_options_names_its_system(make_record, write_lmdb):
    def check(systems):
        if systems.natoms.max() > 6:
            raise ValueError(f"sid {systems.sid[0]} is too large")

    seven = {"pos": torch.zeros(7, 3), "atomic_numbers": [1] * 7, "tags": [2] * 7, "fixed": [0] * 7}
    big = make_record(sid=9, natoms=7, pos_relaxed=..., **seven)
    path = write_lmdb({0: make_record(sid=7), 1: big})
    with pytest.raises(ValueError, match="key 1, sid 9 is too large"):
        open_dataset(path, check=check).batch([0, 1])
